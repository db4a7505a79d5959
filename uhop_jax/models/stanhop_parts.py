"""Parts of STanHop: blocks over scales and series, merging, the decoder's layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from uhop_jax.layers import (
    Association,
    Hopfield,
    HopfieldLayer,
    HopfieldPooling,
    LearnedAlpha,
    dropped,
)
from uhop_jax.separation import Entmax, Separation

EPSILON = 1e-5  # in every LayerNorm


@dataclasses.dataclass(kw_only=True)
class Builder:
    """Builds the layers of a model, all with the model's options."""

    size: int
    options: dict[str, Any]
    dropout: float
    separation: Separation | str | None
    alpha_start: float | None
    alpha_per_head: bool
    released: bool
    rngs: nnx.Rngs

    @property
    def dtypes(self) -> dict[str, Any]:
        """The dtypes among the options."""
        return {name: self.options[name] for name in ("dtype", "param_dtype")}

    def norm(self, size: int | None = None) -> nnx.LayerNorm:
        return nnx.LayerNorm(
            size or self.size, epsilon=EPSILON, rngs=self.rngs, **self.dtypes
        )

    def linear(self, size_in: int, size_out: int) -> nnx.Linear:
        zeros = nnx.initializers.zeros
        return nnx.Linear(
            size_in, size_out, kernel_init=zeros, rngs=self.rngs, **self.dtypes
        )

    def mlp(self, hidden: int) -> "MLP":
        return MLP(self.linear(self.size, hidden), self.linear(hidden, self.size))

    def association(self) -> Any:
        """A generalised sparse Hopfield layer (GSH)."""
        layer = self._layer()
        return self._finished(layer, layer)

    def pooling(self, quantity: int, sets: tuple[int, ...]) -> Any:
        """Pooling by learned queries; in the release, lookup in learned memories."""
        layer = self._layer()
        around: Any
        if self.released:
            around = HopfieldLayer(layer, quantity, rngs=self.rngs)
        else:
            around = HopfieldPooling(layer, quantity, sets=sets, rngs=self.rngs)
        return self._finished(layer, around)

    def _layer(self) -> Hopfield:
        """A layer with an association of its own."""
        separation: Any = self.separation
        if separation is None:
            heads = self.options["num_heads"]
            start = Entmax(np.full(heads, 1.5) if self.alpha_per_head else 1.5)
            dtype = self.dtypes["param_dtype"]
            separation = LearnedAlpha(start, param_dtype=dtype)
        association = Association(separation, dropout=self.dropout)
        return Hopfield(self.size, association, rngs=self.rngs, **self.options)

    def _finished(self, layer: Hopfield, around: Any) -> Any:
        """The layer with the start of its `alpha` and, if released, scrambled heads."""
        if self.separation is None:
            learned: Any = layer.association.separation
            alpha = learned.raw
            if self.alpha_start is None:
                key = self.rngs.params()
                alpha[...] = jax.random.normal(key, alpha.shape, alpha.dtype)
            else:
                alpha[...] = jnp.full_like(alpha[...], self.alpha_start)
        if self.released:
            out = self.linear(self.size, self.size)
            return ScrambledHeads(around, out, self.options["num_heads"])
        return around


class MLP(nnx.Module):
    """Two linear maps with the exact GELU between them."""

    def __init__(self, up: nnx.Linear, down: nnx.Linear):
        self.up, self.down = up, down

    def __call__(self, tokens: Float[Array, "*batch size"]) -> Array:
        """Tokens of the same size."""
        return self.down(jax.nn.gelu(self.up(tokens), approximate=False))


class ScrambledHeads(nnx.Module):
    """A layer whose heads are mixed up with its tokens, as in the release.

    The output `(tokens, heads, head_size)` is transposed to `(heads, tokens,
    head_size)` and then read as tokens, so that a row holds pieces of several tokens.
    The result is not equivariant. The preset `paper` does not use this layer.
    """

    def __init__(self, layer: Any, out: nnx.Linear, num_heads: int):
        self.layer, self.out, self.num_heads = layer, out, num_heads

    def __call__(self, *arguments: Array, key: Array | None = None) -> Array:
        """The layer's output in the scrambled order."""
        output = self.layer(*arguments, key=key)
        heads = output.reshape(*output.shape[:-1], self.num_heads, -1)
        return self.out(jnp.swapaxes(heads, -3, -2).reshape(output.shape))


class Block(nnx.Module):
    """Association over time, then over series; tokens keep their shape."""

    def __init__(
        self,
        layers: Builder,
        mlp_size: int,
        pooled: int,
        sets: tuple[int, ...],
        dropout: float,
    ):
        self.released = layers.released
        self.time = layers.association()
        self.norms = nnx.data([layers.norm() for _ in range(4)])
        self.mlp_time = layers.mlp(mlp_size)
        self.pool = layers.pooling(pooled, sets)
        self.across = layers.association()
        self.mlp_series = layers.mlp(mlp_size)
        self.dropout = dropout

    def __call__(
        self,
        tokens: Float[Array, "*batch series segments size"],
        *,
        bank: Float[Array, "series stored size"] | None = None,
        bank_weight: float = 1.0,
        key: Array | None = None,
    ) -> Float[Array, "*batch series segments size"]:
        """Tokens after both associations; the bank is read between the two."""
        keys = split_key(key, 2)
        tokens = self.over_time(tokens, keys[0])
        if bank is not None:
            tokens = self._from_bank(tokens, bank, bank_weight)
        return self._over_series(tokens, keys[1])

    def over_time(self, tokens: Array, key: Array | None) -> Array:
        """Associates the segments of each series with one another."""
        keys = split_key(key, 3)
        branch = self.time(tokens, key=keys[0])
        tokens = self.norms[0](tokens + dropped(branch, self.dropout, keys[1]))
        branch = self.mlp_time(tokens)
        return self.norms[1](tokens + dropped(branch, self.dropout, keys[2]))

    def _over_series(self, tokens: Array, key: Array | None) -> Array:
        """Associates the series with one another, at each segment."""
        keys = split_key(key, 4)
        tokens = jnp.swapaxes(tokens, -3, -2)
        pooled = self.pool(tokens, key=keys[0])
        if self.released:  # `across` never sees the result of the lookup
            residual, branch = pooled, self.across(tokens, key=keys[1])
        else:
            residual, branch = tokens, self.across(tokens, pooled, key=keys[1])
        tokens = self.norms[2](residual + dropped(branch, self.dropout, keys[2]))
        branch = self.mlp_series(tokens)
        tokens = self.norms[3](tokens + dropped(branch, self.dropout, keys[3]))
        return jnp.swapaxes(tokens, -3, -2)

    def _from_bank(self, tokens: Array, bank: Array, weight: float) -> Array:
        """Adds the patterns that each series retrieves from its part of the bank."""
        batch = tokens.shape[:-3]
        series, segments, size = tokens.shape[-3:]
        states = jnp.moveaxis(tokens.reshape(-1, series, segments, size), 0, 1)
        retrieved = self.time(states.reshape(series, -1, size), bank)
        retrieved = jnp.moveaxis(retrieved.reshape(series, -1, segments, size), 1, 0)
        retrieved = retrieved.reshape(*batch, series, segments, size)
        return self.norms[0](tokens + jnp.asarray(weight, tokens.dtype) * retrieved)


class Merge(nnx.Module):
    """Merges consecutive segments into one."""

    def __init__(self, layers: Builder, number: int):
        self.number = number
        self.norm = layers.norm(number * layers.size)
        self.linear = layers.linear(number * layers.size, layers.size)

    def __call__(
        self, tokens: Float[Array, "*batch segments size"]
    ) -> Float[Array, "*batch merged size"]:
        """Merged tokens; copies of the last tokens fill the last group."""
        segments, size = tokens.shape[-2:]
        missing = -segments % self.number
        if missing <= segments:
            padding = tokens[..., segments - missing :, :]
        else:
            padding = jnp.repeat(tokens[..., -1:, :], missing, axis=-2)
        tokens = jnp.concatenate([tokens, padding], axis=-2)
        grouped = tokens.reshape(*tokens.shape[:-2], -1, self.number * size)
        return self.linear(self.norm(grouped))


class DecoderLayer(nnx.Module):
    """A block over the forecast's segments, which then retrieve from an encoder scale.

    `ahead` holds the tokens of the forecast, `encoded` the tokens of the encoder scale.
    """

    def __init__(self, layers: Builder, block: Block, segment: int, dropout: float):
        self.block = block
        self.cross = layers.association()
        self.norms = nnx.data([layers.norm(), layers.norm()])
        self.mlp = layers.mlp(layers.size)
        self.head = layers.linear(layers.size, segment)
        self.dropout = dropout

    def __call__(
        self,
        ahead: Float[Array, "*batch series segments size"],
        encoded: Float[Array, "*batch series stored size"],
        *,
        key: Array | None = None,
    ) -> tuple[Array, Array]:
        """Tokens for the next layer, and this layer's part of the forecast.

        Returns:
          Tokens of the shape of `ahead`, and steps `(*batch, series, segments,
          segment)` that are summed over layers.
        """
        keys = split_key(key, 3)
        ahead = self.block(ahead, key=keys[0])
        branch = self.cross(ahead, encoded, key=keys[1])
        ahead = self.norms[0](ahead + dropped(branch, self.dropout, keys[2]))
        ahead = self.norms[1](ahead + self.mlp(ahead))
        return ahead, self.head(ahead)


def normal(shape: tuple[int, ...], dtype: Any, rngs: nnx.Rngs) -> nnx.Param:
    """A parameter drawn from `N(0, 1)`."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype))


def split_key(key: Array | None, number: int) -> Any:
    """`number` keys, or as many None."""
    return [None] * number if key is None else jax.random.split(key, number)
