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
    """The k-th largest entry of rows, and a mask of dropout."""
    z = jnp.asarray(np.random.default_rng(0).normal(size=(256, 10_000)), jnp.float32)
    rows = []
    for k in (1, 10, 100):
        by_bits = jax.jit(lambda z, k=k: _fast.kth_largest(z, k))
        by_sort = jax.jit(lambda z, k=k: _fast.plain_kth_largest(z, k))
        calls = {"XLA's sort": lambda f=by_sort: f(z), "bits": lambda f=by_bits: f(z)}
        title = f"k-th largest of (256, 10000), k = {k}, float32"
        rows += compare(title, "XLA's sort", calls, rounds)
    key, shape = jax.random.key(0), (32, 8, 128, 128)
    drawn = jax.jit(lambda key: _fast.plain_kept(key, shape, 0.1))
    hashed = jax.jit(lambda key: _fast.kept(key, shape, 0.1))
    calls = {"jax.random": lambda: drawn(key), "hash": lambda: hashed(key)}
    return rows + compare(f"mask of dropout {shape}", "jax.random", calls, rounds)


if __name__ == "__main__":
    main(__doc__, "fast", [fast])
