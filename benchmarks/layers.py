"""Times output and gradients of a Hopfield layer against attention layers.

    python benchmarks/layers.py [--out DIR] [--rounds N]

Self-association of a batch of token sequences: output, and gradients in all parameters
and in the tokens. All layers have the same four projections. Writes `layers.csv` and a
figure.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from timing import compare, main, peer

from uhop_jax.layers import Association, Hopfield, LearnedAlpha

BASELINE = "nnx.MultiHeadAttention"


class DotProductAttention(nnx.Module):
    """`jax.nn.dot_product_attention` between the usual projections."""

    def __init__(self, heads: int, size: int, *, rngs: nnx.Rngs):
        shape = heads, size // heads
        self.query, self.key, self.value = (
            nnx.LinearGeneral(size, shape, rngs=rngs) for _ in range(3)
        )
        self.out = nnx.LinearGeneral(shape, size, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        read = jax.nn.dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.out(read)


def layers(
    rounds: int,
    sizes: tuple[tuple[int, int, int, int], ...] = ((8, 128, 8, 256), (4, 512, 8, 256)),
) -> list[dict[str, Any]]:
    """A comparison for each of `sizes`: batch, tokens, heads and width."""
    rows = []
    for batch, length, heads, size in sizes:
        rng = np.random.default_rng(0)
        tokens, slope = (
            jnp.asarray(rng.normal(size=(batch, length, size)), jnp.float32)
            for _ in range(2)
        )

        def hopfield(
            separation: Any,
            block: int | None = None,
            heads: int = heads,
            size: int = size,
            **options: Any,
        ) -> Hopfield:
            options |= {"num_heads": heads, "value_size": size, "rngs": nnx.Rngs(0)}
            return Hopfield(size, Association(separation, block=block), **options)

        modules = {
            BASELINE: nnx.MultiHeadAttention(
                heads, size, decode=False, rngs=nnx.Rngs(0)
            ),
            "jax.nn.dot_product_attention": DotProductAttention(
                heads, size, rngs=nnx.Rngs(0)
            ),
            "Hopfield, softmax": hopfield("softmax"),
            "Hopfield, softmax, block 256": hopfield("softmax", 256),
            "Hopfield, sparsemax": hopfield("sparsemax"),
            "Hopfield, entmax 1.5": hopfield("entmax"),
            "Hopfield, entmax, learned alpha": hopfield(LearnedAlpha()),
            "U-Hop, softmax": hopfield("softmax", kernel=True),
        }
        calls: dict[str, Any] = {
            name: _step(module, tokens, slope) for name, module in modules.items()
        }
        calls["PyTorch scaled_dot_product_attention"] = _torch_step(
            heads, size, tokens, slope
        )
        title = f"layer step, {batch} x {length} tokens, {heads} heads, {size} wide"
        rows += compare(f"{title}, float32", BASELINE, calls, rounds)
    return rows


def _step(module: nnx.Module, tokens: jax.Array, slope: jax.Array) -> Any:
    """Output and gradients of a module, as one compiled call."""
    graphdef, state = nnx.split(module)

    @jax.jit
    def run(state, tokens):
        out, pull_back = jax.vjp(lambda s, x: nnx.merge(graphdef, s)(x), state, tokens)
        return out, pull_back(slope)

    state = nnx.to_pure_dict(state)
    return lambda: run(state, tokens)


def _torch_step(heads: int, size: int, tokens: jax.Array, slope: jax.Array) -> Any:
    """Output and gradients of the same layer in PyTorch; None if not installed."""
    torch = peer("torch")
    if torch is None:
        return None
    torch.manual_seed(0)
    query, key, value, out = (torch.nn.Linear(size, size) for _ in range(4))
    x = torch.tensor(np.asarray(tokens)).requires_grad_()
    g = torch.tensor(np.asarray(slope))

    def split(y: Any) -> Any:
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    def run() -> Any:
        for parameter in (
            x,
            *(p for m in (query, key, value, out) for p in [*m.parameters()]),
        ):
            parameter.grad = None
        read = torch.nn.functional.scaled_dot_product_attention(
            split(query(x)), split(key(x)), split(value(x))
        )
        y = out(read.transpose(1, 2).flatten(2))
        y.backward(g)
        return x.grad

    return run


if __name__ == "__main__":
    main(__doc__, "layers", [layers])
