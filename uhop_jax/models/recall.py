"""A causal sequence model of Hopfield layers, for associative recall."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from uhop_jax._checks import check_count, check_floating, check_rngs
from uhop_jax.layers import Association, Hopfield


class SequenceModel(nnx.Module):
    """Token embeddings with learned positions, causal blocks, a linear head.

    Args:
      vocabulary: number of tokens.
      length: of the sequences.
      size: of an embedding.
      depth: number of blocks: a Hopfield layer and an MLP, as residual branches.
      association: makes the association of each layer.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: for the start values.
      **options: further options of `Hopfield`.

    Raises:
      ValueError: if a size is out of range, or sizes do not fit together.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        size: int = 64,
        depth: int = 2,
        association: Callable[[], Association] = Association,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        counts = dict(vocabulary=vocabulary, length=length, size=size, depth=depth)
        for name, number in counts.items():
            check_count(name, number, 1)
        check_floating("param_dtype", param_dtype)
        check_rngs(rngs)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.embed = nnx.Embed(vocabulary, size, rngs=rngs, **dtypes)
        start = nnx.initializers.normal(0.02)
        self.positions = nnx.Param(start(rngs.params(), (length, size), param_dtype))
        self.blocks = nnx.data(
            [
                CausalBlock(size, association(), rngs=rngs, **options | dtypes)
                for _ in range(depth)
            ]
        )
        self.norm = nnx.LayerNorm(size, rngs=rngs, **dtypes)
        self.head = nnx.Linear(size, vocabulary, rngs=rngs, **dtypes)

    def __call__(
        self, tokens: Int[Array, "*batch length parts"], *, key: Array | None = None
    ) -> Float[Array, "*batch length vocabulary"]:
        """Logits of a token at each position, whose own tokens are added up.

        There is no dropout without a key.

        Raises:
          ValueError: if tokens are no integers, or of another shape.
        """
        tokens, length = jnp.asarray(tokens), self.positions.shape[0]
        integers = jnp.issubdtype(tokens.dtype, jnp.integer)
        if tokens.ndim < 2 or tokens.shape[-2] != length or not integers:
            raise ValueError(
                f"tokens must be integers of shape (..., {length}, parts), got "
                f"{tokens.dtype} of shape {tokens.shape}"
            )
        x = self.embed(tokens).sum(-2)
        positions = self.positions[...].astype(x.dtype)
        x = x + jnp.broadcast_to(positions, x.shape)
        for number, block in enumerate(self.blocks):
            block_key = None if key is None else jax.random.fold_in(key, number)
            x = block(x, key=block_key)
        return self.head(self.norm(x))


class CausalBlock(nnx.Module):
    """Association of each token with itself and earlier tokens, then an MLP."""

    def __init__(
        self,
        size: int,
        association: Association,
        *,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm_association = nnx.LayerNorm(size, **dtypes)
        self.norm_mlp = nnx.LayerNorm(size, **dtypes)
        self.association = Hopfield(size, association, **options | dtypes)
        self.up = nnx.Linear(size, 4 * size, **dtypes)
        self.down = nnx.Linear(4 * size, size, **dtypes)

    def __call__(
        self, x: Float[Array, "*batch L size"], *, key: Array | None = None
    ) -> Float[Array, "*batch L size"]:
        """The tokens after the block; no dropout without a key."""
        length = x.shape[-2]
        causal = jnp.tril(jnp.ones((length, length), bool))
        states = self.norm_association(x)
        x = x + self.association(states, association_mask=causal, key=key)
        return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))
