"""Tiles of heads: keys and values that maps make from the rows of a block."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._fast import kept_at
from uhop_jax._products import product
from uhop_jax._pytree import pytree
from uhop_jax.layers.masks import mask_rows, zero_unless
from uhop_jax.streaming._tiles import QueryModel, Tile, add_rows

STATIC = {"static": True}  # metadata of a field that is no leaf


@pytree
class Maps:
    """What makes keys and values from the rows of a block.

    Attributes:
      call: static; maps `numbers`, `others`, the rows of a block and their indices
        `(T,)` to keys `(T, heads, d)` and values `(T, heads, v)`.
      numbers: arrays of floats, in which there are derivatives.
      others: other arrays.
    """

    call: Callable[..., Any] = dataclasses.field(metadata=STATIC)
    numbers: Any = ()
    others: Any = ()

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Any) -> "Maps":
        """The maps `function(arguments, rows, index)`, of a function that hashes."""
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, arguments))
        floating = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves)
        numbers, others = (
            [x for x, number in zip(leaves, floating, strict=True) if number is wanted]
            for wanted in (True, False)
        )
        return cls(_Call(function, structure, floating), numbers, others)


@dataclasses.dataclass(frozen=True)
class _Call:
    """`function` of arguments whose floats come apart from all other arrays."""

    function: Callable[..., Any]
    structure: Any
    floating: tuple[bool, ...]

    def __call__(self, numbers: Any, others: Any, rows: Any, index: Array) -> Any:
        parts = iter(others), iter(numbers)
        leaves = [next(parts[number]) for number in self.floating]
        arguments = jax.tree.unflatten(self.structure, leaves)
        return self.function(arguments, rows, index)


def as_they_are(numbers: Any, others: Any, rows: Any, index: Array) -> Any:
    """Keys and values that the rows are already: a `call` of `Maps`."""
    del numbers, others, index
    return rows


@pytree
class Dropout:
    """Dropout of weights, by a hash of their positions.

    Attributes:
      rate: share that is dropped.
      key: key of `jax.random`.
      base: `(2, Q)`, uint32; for each query the position of a memory of index zero,
        and what it would be for the memories that belong to every bag.
    """

    rate: float = dataclasses.field(metadata=STATIC)
    key: Array
    base: Array


@pytree
class Rows:
    """Memories of all bags, one bag behind another, from which tiles are cut.

    Attributes:
      length: number of memories of all bags.
      maps: makes keys and values.
      rows: a pytree of arrays `(length, ...)`; empty if maps need the index alone.
      mask: `(length,)`, or `(length, 1 or heads, L)`, true where a query may see a
        memory; or None.
      own_memories: keys `(n, heads, d)` and values of memories that belong to every
        bag; or None.
      own_seen: whether these memories count, a scalar; None is always.
      dropout: of the weights; or None.
      spare: index of a memory that may be seen, which is made where nobody may see the
        memory itself; None if memories are not made from their index.
    """

    length: int = dataclasses.field(metadata=STATIC)
    maps: Maps
    rows: Any
    mask: Bool[Array, "..."] | None = None
    own_memories: tuple[Array, Array] | None = None
    own_seen: Bool[Array, ""] | None = None
    dropout: Dropout | None = None
    spare: Int[Array, ""] | None = None

    @property
    def own(self) -> int:
        """Number of memories that belong to every bag."""
        return 0 if self.own_memories is None else self.own_memories[0].shape[0]

    def filled(self, bags: int) -> "Rows":
        """The rows; if there is none, one for each bag, which no query may see."""
        if self.length != 0:
            return self
        count = max(bags, 1)
        rows = jax.tree.map(
            lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), self.rows
        )
        mask = jnp.zeros((count,), bool)
        return dataclasses.replace(self, length=count, rows=rows, mask=mask)

    def width(self, y: Array, update: bool) -> int:
        """Dimension of the averaged patterns."""
        return y.shape[-1] if update else self.sizes()[1]

    def sizes(self) -> tuple[int, int]:
        """Dimensions of keys and values."""
        keys, values = self.shapes()
        return keys.shape[-1], values.shape[-1]

    def shapes(self) -> Any:
        """Shapes and dtypes of the key and the value of one memory."""

        def one(rows: Rows) -> Any:
            return rows.tile(jnp.zeros((), jnp.int32), 1, None, None).keys(None)

        return jax.eval_shape(one, self)

    def tile(self, start: Array, size: int, inside: Array | None, dtype: Any) -> Tile:
        """`size` memories from `start` on, of which those `inside` are valid."""
        rows, mask = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, start, size), (self.rows, self.mask)
        )
        if inside is not None and mask is not None:
            mask = mask & inside.reshape(-1, *(1,) * (mask.ndim - 1))
        mask = inside if mask is None else mask
        index = start + jnp.arange(size, dtype=jnp.int32)
        parts, maps = (self.maps.numbers, rows), self.maps
        of_maps = maps.call, maps.others, index, self.dropout, self.spare
        return HeadTile(parts, mask, start, dtype, *of_maps)

    def own_tile(self, dtype: Any) -> Tile:
        """The memories that belong to every bag."""
        start = jnp.asarray(self.length, jnp.int32)
        index = start + jnp.arange(self.own, dtype=jnp.int32)
        parts, mask = ((), self.own_memories), None
        if self.own_seen is not None:
            mask = jnp.broadcast_to(self.own_seen, (self.own,))
        return HeadTile(
            parts, mask, start, dtype, as_they_are, (), index, self.dropout, own=True
        )

    def zero_parts(self) -> Any:
        """Zeros for derivatives in the numbers of the maps, the rows and `own`."""
        tree = self.maps.numbers, self.rows, self.own_memories
        return jax.tree.map(jnp.zeros_like, tree)


def stored_rows(
    keys: Float[Array, "*batch S heads d"],
    values: Float[Array, "*batch S heads v"],
    where: Bool[Array, "*batch h L S"] | None,
) -> Rows:
    """Rows of keys and values that are there already."""
    length = math.prod(keys.shape[:-2])
    rows = tuple(x.reshape(length, *x.shape[-2:]) for x in (keys, values))
    return Rows(length, Maps(as_they_are), rows, mask_rows(where))


@dataclasses.dataclass(frozen=True)
class HeadTile(Tile):
    """Memories of all heads; the parts are the numbers of the maps and the rows.

    States `(Q, d)` are the states of each head, one head behind another.
    """

    call: Callable[..., Any]
    others: Any
    index: Array
    dropout: Dropout | None
    spare: Array | None = None
    own: bool = False

    def keys(self, model: Any) -> Any:
        """Keys `(T, heads, d)` and values `(T, heads, v)`."""
        (numbers, rows), index = self.parts, self.index
        if self.mask is not None:  # a memory that no query may see may be NaN
            seen = self.mask.any(tuple(range(1, self.mask.ndim)))
            rows = jax.tree.map(lambda x: zero_unless(seen, x), rows)
            if self.spare is not None:  # zeros alone would leave gradients NaN
                index = jnp.where(seen, index, self.spare)
        both = self.call(numbers, self.others, rows, index)
        if self.mask is not None and self.spare is not None:
            both = tuple(zero_unless(seen, x) for x in both)
        return both if self.dtype is None else tuple(x.astype(self.dtype) for x in both)

    def overlaps(self, model: QueryModel, y: Array) -> tuple[Any, Array]:
        both = self.keys(model)
        if self.mask is not None and self.mask.ndim > 1:
            # A weight of zero times NaN is not zero. Queries that see a memory that is
            # not finite get NaN by its overlap; other queries never meet it.
            finite = functools.reduce(
                jnp.logical_and, [jnp.isfinite(x).all((1, 2)) for x in both]
            )
            both = tuple(zero_unless(finite, x) for x in both)
        z = self.compare(model, both, y)
        if self.mask is None:
            return both, z.reshape(-1, z.shape[-1])
        if self.mask.ndim > 1:
            z = jnp.where(jnp.broadcast_to(finite, z.shape), z, jnp.nan)
        mask = jnp.broadcast_to(jnp.moveaxis(self.mask, 0, -1), z.shape)
        z = jnp.where(mask, z, -jnp.inf)
        return both, z.reshape(-1, z.shape[-1])

    def compare(self, model: QueryModel, keys: Any, y: Array) -> Array:
        """Overlaps `(heads, L, T)`."""
        states = y.reshape(keys[0].shape[1], -1, y.shape[-1])
        return product("hld,thd->hlt", states.astype(keys[0].dtype), keys[0])

    def weigh(self, weights: Array, keys: Any, update: bool) -> Array:
        read = keys[0] if update else keys[1]
        if self.dropout is not None and not update:
            weights = self._kept(weights, self.dropout)
        weights = weights.reshape(read.shape[1], -1, weights.shape[-1])
        out = product("hlt,thv->hlv", weights.astype(read.dtype), read)
        return out.reshape(-1, out.shape[-1])

    def _kept(self, weights: Array, drop: Dropout) -> Array:
        """The weights `(Q, T)` after dropout."""
        position = (
            drop.base[int(self.own)][:, None] + self.index.astype(jnp.uint32)[None]
        )
        keep = kept_at(drop.key, position, drop.rate)
        scale = jnp.asarray(1 / (1 - drop.rate), weights.dtype)
        return jnp.where(keep, weights * scale, jnp.zeros((), weights.dtype))

    def added(self, whole: Any, parts: Any) -> Any:
        numbers, rows, own = whole
        if self.own:
            return numbers, rows, jax.tree.map(jnp.add, own, parts[1])
        numbers = jax.tree.map(jnp.add, numbers, parts[0])
        rows = jax.tree.map(
            lambda x, part: add_rows(x, part, self.start), rows, parts[1]
        )
        return numbers, rows, own
