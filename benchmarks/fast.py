"""Gains of the ways of `uhop_jax._fast` over JAX's own.

python benchmarks/fast.py [--out DIR] [--rounds N]
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import compare, main

from uhop_jax import _fast


def fast(rounds: int) -> list[dict[str, Any]]:
    """The k-th largest entry of rows, their order, a logarithm, a mask, attention."""
    z = jnp.asarray(np.random.default_rng(0).normal(size=(256, 10_000)), jnp.float32)
    rows = []
    for k in (1, 10, 100):
        by_bits = jax.jit(lambda z, k=k: _fast.kth_largest(z, k))
        by_sort = jax.jit(lambda z, k=k: jax.lax.top_k(z, k)[0][..., -1:])
        calls = {"XLA's sort": lambda f=by_sort: f(z), "bits": lambda f=by_bits: f(z)}
        title = f"k-th largest of (256, 10000), k = {k}, float32"
        rows += compare(title, "XLA's sort", calls, rounds)
    short = z.reshape(-1, 800)[:, :784]
    floats, integers = map(jax.jit, (_fast.plain_descending, _fast.descending))
    calls = {"floats": lambda: floats(short), "integers": lambda: integers(short)}
    rows += compare("falling order of (3200, 784), float32", "floats", calls, rounds)
    x, e = -jnp.abs(z) / 2, jnp.full((1, 1), 0.3, jnp.float32)

    def total(function: Any) -> Any:
        """Twenty evaluations, about as many as entmax needs for its root."""

        def run(x: Any, e: Any) -> Any:
            shifts = jnp.linspace(0.0, 1.0, 20)
            return jax.lax.map(lambda s: jnp.exp(function(x - s, e)).sum(), shifts)

        return jax.jit(run)

    by_log1p, by_polynomial = map(total, (_fast.plain_log_exp, _fast.log_exp))
    calls = {
        "jnp.log1p": lambda: by_log1p(x, e),
        "polynomial": lambda: by_polynomial(x, e),
    }
    rows += compare("log1p(e x) / e, (256, 10000)", "jnp.log1p", calls, rounds)
    key, shape = jax.random.key(0), (32, 8, 128, 128)
    drawn = jax.jit(lambda key: jax.random.bernoulli(key, 0.9, shape))
    hashed = jax.jit(lambda key: _fast.kept(key, shape, 0.1))
    calls = {"jax.random": lambda: drawn(key), "hash": lambda: hashed(key)}
    rows += compare(f"mask of dropout {shape}", "jax.random", calls, rounds)
    heads = z[:, :8192].reshape(-1, 512, 32)[:32]

    def slope(mapped: Any) -> Any:
        """The gradient of attention over the tokens of each head."""

        def attend(x: Any) -> Any:
            return jax.nn.softmax(x @ x.T / 32**0.5) @ x

        return jax.jit(jax.grad(lambda x: (mapped(attend, x) ** 2).sum()))

    few = _fast.entries_at_once(32, 4 * 512 * 512)
    together = slope(lambda function, x: jax.vmap(function)(x))
    in_turn = slope(lambda function, x: _fast.mapped(function, x, few))
    calls = {"together": lambda: together(heads), "in turn": lambda: in_turn(heads)}
    rows += compare("attention of (32, 512, 32)", "together", calls, rounds)
    weights = jax.nn.softmax(z[:, :8192].reshape(-1, 512, 512)[:4])
    slopes, values = heads[:4], heads[4:8]

    def of_values(kept: Any) -> Any:
        """The derivative of averages in the values, `(4, 512, 32)`."""

        def average(values: Any) -> Any:
            out = jnp.einsum("hvs,hls->hvl", kept(values.mT), weights)
            return kept(out).mT

        return jax.jit(lambda slopes: jax.vjp(average, values)[1](slopes)[0])

    free, fixed = of_values(lambda x: x), of_values(_fast.row_major)
    calls = {"XLA's order": lambda: free(slopes), "kept": lambda: fixed(slopes)}
    title = "derivative in values of (4, 512, 512) weights"
    return rows + compare(title, "XLA's order", calls, rounds)


if __name__ == "__main__":
    main(__doc__, "fast", [fast])
