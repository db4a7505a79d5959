"""What a pass works on: tiles of memories, the model and thresholds of queries."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from uhop_jax.model import Model
from uhop_jax.separation import Separation


class Plan(NamedTuple):
    """Static options of a retrieval.

    Attributes:
      steps: number of updates.
      top: number of largest weights to report.
      tile: memories in a tile.
      queries: queries in a block.
      block: memories in a block of the host, or None.
      dtype: dtype of the result.
    """

    steps: int
    top: int
    tile: int
    queries: int
    block: int | None
    dtype: Any


class QueryModel(Model):
    """A model with parameters `(Q,)`, one for each query of a block.

    Attributes:
      beta: `(Q,)`.
      observed: `(Q, d)`, true for known components of the queries, or None.
    """

    beta: Array = dataclasses.field(kw_only=True)
    observed: Array | None = None

    @property
    def per_query(self) -> tuple[Separation, Array, Array | None]:
        """Separation, beta and observed, which have a row for each query."""
        return self.separation, self.beta, self.observed

    def with_rows(self, per_query: tuple[Separation, Array, Any]) -> "QueryModel":
        """The model with other queries' separation, beta and observed."""
        separation, beta, observed = per_query
        return QueryModel(self.similarity, separation, observed, beta=beta)

    def take(self, index: Any) -> "QueryModel":
        """The model of the queries at `index`."""
        return self.with_rows(jax.tree.map(lambda x: x[index], self.per_query))


class Threshold(NamedTuple):
    """The threshold of each query, in two parts `(Q,)`.

    The weight of an overlap `z` is a function of `beta (z - reference) - shift`. For an
    entmax of `alpha > 2`, `reference` is the lowest overlap of the support, and `shift`
    its weight.

    The sum `beta reference + shift` would not do: `beta reference` can be infinite, or
    so large that `shift` is lost in rounding.
    """

    reference: Array
    shift: Array


class Tile(NamedTuple):
    """Consecutive memories `(T, d)`, the first with index `start`.

    Values `(T, v)` and the mask `(T,)` may be None.
    """

    memories: Array
    values: Array | None
    mask: Array | None
    start: Array

    def overlaps(self, model: QueryModel, y: Array) -> tuple[Array, Array]:
        """Keys, and overlaps `(Q, T)`, `-inf` where masked."""
        keys = model.similarity.keys(self.memories)
        z = model.overlaps(keys, y, model.observed)
        return keys, z if self.mask is None else jnp.where(self.mask[None], z, -jnp.inf)

    def averaged(self, keys: Array, update: bool) -> Array:
        """The patterns to average: keys in an update, else values or memories."""
        if update:
            return keys
        return self.memories if self.values is None else self.values
