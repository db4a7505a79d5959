"""What a pass works on: tiles of memories, the model and thresholds of queries."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax._products import weigh
from uhop_jax.model import Model
from uhop_jax.separation import Separation

T = TypeVar("T")


class Plan(NamedTuple):
    """Static options of a retrieval."""

    steps: int  # updates
    top: int  # largest weights to report
    tile: int  # memories in a tile
    queries: int  # in a block
    block: int | None  # memories in a block of the host
    dtype: Any  # of the result


class QueryModel(Model):
    """A model with parameters `(Q,)`, one for each query of a block."""

    beta: Array = dataclasses.field(kw_only=True)
    observed: Array | None = None  # `(Q, d)`, true for known components

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


@dataclasses.dataclass(frozen=True)
class Tile(abc.ABC):
    """Consecutive memories."""

    parts: Any  # arrays in which a pass may take derivatives
    mask: Array | None  # true for valid memories, `(T,)` or `(Q, T)`
    start: Array  # index of the first memory
    dtype: Any  # of keys and of what is read out

    def overlaps(self, model: QueryModel, y: Array) -> tuple[Any, Array]:
        """Keys, and overlaps `(Q, T)`, `-inf` where masked."""
        keys = self.keys(model)
        z = self.compare(model, keys, y)
        if self.mask is None:
            return keys, z
        return keys, jnp.where(jnp.broadcast_to(self.mask, z.shape), z, -jnp.inf)

    @abc.abstractmethod
    def keys(self, model: Any) -> Any:
        """What `compare` and `weigh` need of each memory."""

    @abc.abstractmethod
    def compare(self, model: QueryModel, keys: Any, y: Array) -> Array:
        """Overlaps `(Q, T)` with all memories."""

    @abc.abstractmethod
    def weigh(self, weights: Array, keys: Any, update: bool) -> Array:
        """The weighted sum `(Q, v)` of keys in an update, else of the read-out."""

    @abc.abstractmethod
    def added(self, whole: Any, parts: Any) -> Any:
        """The arrays from which tiles are cut, with `parts` added at this tile."""


@dataclasses.dataclass(frozen=True)
class PatternTile(Tile):
    """Memories `(T, d)`, and values `(T, v)` or None: the parts."""

    def keys(self, model: Any) -> Array:
        return model.similarity.keys(self.parts[0])

    def compare(self, model: QueryModel, keys: Array, y: Array) -> Array:
        return model.overlaps(keys, y, model.observed)

    def weigh(self, weights: Array, keys: Array, update: bool) -> Array:
        memories, values = self.parts
        read = memories if values is None else values
        return weigh(weights, keys if update else read)

    def added(self, whole: Any, parts: Any) -> Any:
        return jax.tree.map(lambda x, y: add_rows(x, y, self.start), whole, parts)


def add_rows(whole: Array, rows: Array, start: Array) -> Array:
    """`whole` with `rows` added from row `start` on."""
    before = lax.dynamic_slice_in_dim(whole, start, rows.shape[0])
    after = before + rows.astype(whole.dtype)
    return lax.dynamic_update_slice_in_dim(whole, after, start, 0)


def across(merge: Callable[[Any, Any, str], Any]) -> Callable[[T], T]:
    """A step whose carries `merge(model, carry, axis)` merges over a mesh axis."""

    def mark(step: T) -> T:
        step.across = merge  # type: ignore[attr-defined]
        return step

    return mark


def total(model: QueryModel, carry: Any, axis: str) -> Any:
    """The sum over a mesh axis of carries that began with zero."""
    del model
    return lax.psum(carry, axis)
