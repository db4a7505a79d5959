"""Streamed retrieval from blocks that the host reads: files, arrays, iterators."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from uhop_jax._checks import as_floating, holdable, is_traced, kind_of
from uhop_jax._files import mapped_array
from uhop_jax.streaming._device import ArraySource, Window, fold_tiles
from uhop_jax.streaming._passes import (
    average,
    check_numbers,
    check_values,
    collect,
    online,
    run_queries,
    weigh_given,
)
from uhop_jax.streaming._supports import GROUPS, weigh_tile
from uhop_jax.streaming._tiles import Plan, QueryModel, Tile

BLOCK_BYTES = 2**23  # bytes of memories in a block, by default
Blocks = Callable[[], Iterable[Any]]


class _Pieces:
    """Rows of an array, a file or an iterator, in blocks of one size.

    `count` is the number of rows; None for an iterator until a pass has counted them.
    """

    def __init__(self, source: Any, name: str):
        self.name, self.count = name, None
        if isinstance(source, str | Path):
            source = mapped_array(source, name)
        if isinstance(source, Iterator):
            raise ValueError(
                f"{name} is a {type(source).__name__}, which can be read but once: "
                "pass a function that returns a new one at every call"
            )
        if callable(source):
            self.array, self.factory, self.opened = None, source, None
            pieces = self._open()
            first = next(pieces, None)
            if first is None:
                raise ValueError(f"{name}: the iterator holds no block")
            self.begun: Iterator[np.ndarray] | None = itertools.chain([first], pieces)
        else:
            try:
                first = self.array = np.asarray(source)
            except ValueError:
                raise ValueError(
                    f"{name} must be an array, got {kind_of(source)}"
                ) from None
            self.count = len(first) if first.ndim else 0
        _check_real(first, name)
        if first.ndim != 2 or not first.size:
            raise ValueError(
                f"{name} must have shape (n, d), one pattern per row and at least one, "
                f"got {first.shape}"
            )
        self.sample = as_floating(np.zeros_like(first[:1]), name)

    def _open(self) -> Iterator[np.ndarray]:
        """A new pass over the iterator."""
        pieces = iter(self.factory())
        if pieces is self.opened:
            raise ValueError(
                f"{self.name}: the function must return a new iterator at every call, "
                "got the same one twice"
            )
        self.opened = pieces
        return map(self._piece, pieces)

    def _piece(self, piece: Any) -> np.ndarray:
        """An array of the iterator, of a checked dtype and rank."""
        piece = holdable(np.asarray(piece))
        _check_real(piece, self.name)
        if piece.ndim != 2:
            raise ValueError(
                f"{self.name}: blocks must have shape (n, d), got {piece.shape}"
            )
        return piece

    def size(self, block: int | None) -> int:
        """Rows of a block."""
        bytes_of_row = max(self.sample.nbytes, 1)
        rows = block or max(BLOCK_BYTES // bytes_of_row, 1)
        return rows if self.count is None else min(rows, self.count)

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, int]]:
        """Blocks of `size` rows, the last one padded, each with its number of rows."""
        if self.array is not None:
            for start in range(0, len(self.array), size):
                block = holdable(np.asarray(self.array[start : start + size]))
                yield _padded(block, size)
            return
        pieces = self._open() if self.begun is None else self.begun
        self.begun = None
        buffer: list[np.ndarray] = []
        buffered = rows = 0
        for piece in pieces:
            if piece.shape[1] != self.sample.shape[-1]:
                raise ValueError(
                    f"{self.name}: blocks must have one width, the first has "
                    f"{self.sample.shape[-1]}, one that follows {piece.shape[1]}"
                )
            rows += len(piece)
            while len(piece):
                missing = size - buffered
                part, piece = piece[:missing], piece[missing:]
                buffer.append(part.copy())  # the iterator may overwrite its array
                buffered += len(part)
                if buffered == size:
                    yield np.concatenate(buffer), size
                    buffer, buffered = [], 0
        if buffered:
            yield _padded(np.concatenate(buffer), size)
        self.count = self.count or rows
        if rows != self.count:
            raise ValueError(
                f"{self.name}: a pass over the iterator yields {rows} rows, the first "
                f"one {self.count}"
            )

    def take(self, index: np.ndarray, size: int) -> np.ndarray:
        """Rows at `index`, of an iterator in one pass by blocks of `size`."""
        if self.array is not None:
            return holdable(np.asarray(self.array[index]))
        rows = np.zeros((*index.shape, self.sample.shape[-1]), np.float64)
        start = 0
        for block, count in self.blocks(size):
            inside = (index >= start) & (index < start + count)
            rows[inside] = block[index[inside] - start]
            start += count
        return rows


def _check_real(block: np.ndarray, name: str) -> None:
    """Refuses a dtype that JAX cannot hold as real numbers."""
    dtype = block.dtype
    real = dtype.kind in "biuf" and dtype.itemsize <= 8
    if not real and dtype != jnp.bfloat16:
        raise ValueError(
            f"{name} must be real numbers of at most 64 bits, got dtype {dtype}"
        )


def _padded(block: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """The block padded by zeros to `size` rows, and its number of rows."""
    count = len(block)
    if count < size:
        block = np.pad(block, ((0, size - count), (0, 0)))
    return block, count


class HostSource(NamedTuple):
    """A source: memories and values or None, in blocks that the host reads."""

    memories: _Pieces
    values: _Pieces | None

    @classmethod
    def of(cls, memories: Any, values: Any, mask: Any) -> "HostSource":
        """The source of checked arrays, paths or functions."""
        if mask is not None:
            raise ValueError("mask belongs to memories that are a JAX array")
        pieces = _Pieces(memories, "memories")
        if values is None:
            return cls(pieces, None)
        if isinstance(values, jax.core.Tracer):
            raise ValueError("values are traced, but memories are read on the host")
        value_pieces = _Pieces(values, "values")
        if value_pieces.count is not None and pieces.count is not None:
            width = pieces.sample.shape[-1], value_pieces.sample.shape[-1]
            check_values((value_pieces.count, width[1]), (pieces.count, width[0]))
        return cls(pieces, value_pieces)

    @property
    def sample(self) -> Array:
        """A row from which dimension and dtype are read."""
        return self.memories.sample

    @property
    def value_samples(self) -> tuple[Array, ...]:
        """A row of the values, if any, from which their dtype is read."""
        return () if self.values is None else (self.values.sample,)

    @property
    def length(self) -> int | None:
        """Number of memories; None for an iterator before its first pass."""
        return self.memories.count

    def check_lengths(self) -> None:
        """Refuses values of another number than the memories, where both are known."""
        values = None if self.values is None else self.values.count
        if None not in (values, self.length) and values != self.length:
            raise ValueError(
                f"values have {values} rows, memories {self.length}: they must agree"
            )

    def run(self, plan: Plan, model: QueryModel, query: Array) -> tuple[Array, ...]:
        """The fields of `Streamed` for queries `(Q, d)`."""
        if is_traced(query) or any(map(is_traced, jax.tree.leaves(model))):
            raise ValueError(
                "memories are read on the host, which jit, grad and vmap cannot do: "
                "pass a JAX array"
            )
        driver = _OnHost(plan, self)
        parts = []
        for start in range(0, max(len(query), 1), plan.queries):
            rows = slice(start, start + plan.queries)
            parts.append(run_queries(driver, plan, model.take(rows), query[rows]))
        return tuple(jnp.concatenate(x) for x in zip(*parts, strict=True))


class _OnHost:
    """The driver of passes over blocks, with the methods of `OnDevice`.

    One compiled program works on a block while the next block is transferred.
    """

    once = 1

    def __init__(self, plan: Plan, source: HostSource):
        self.plan, self.source, self.count = plan, source, source.length
        self.size = source.memories.size(plan.block)
        self.groups = min(GROUPS, plan.tile, self.size)

    def width(self, y: Array, update: bool) -> int:
        if update:
            return y.shape[-1]
        return (self.source.values or self.source.memories).sample.shape[-1]

    def average(self, model: QueryModel, y: Array, update: bool) -> tuple[Array, Any]:
        return average(self, model, y, update)

    @staticmethod
    def when(condition: Array, run: Callable[[], Any], otherwise: Any) -> Any:
        return run() if condition else otherwise

    @staticmethod
    def repeat(unfinished, body, carry):
        while unfinished(carry):
            carry = body(carry)
        return carry

    def fold(self, step, model, y, extra, carry, update, active=None):
        if active is not None:
            active = np.flatnonzero(np.asarray(active))
            if len(active) < len(y):
                return self._fold_some(step, model, y, extra, carry, update, active)
        start = 0
        with_values = step in (online, weigh_tile, weigh_given) and not update
        for memories, values, count in self._placed(with_values):
            arguments = model, y, extra, carry
            place = np.int32(start), np.int32(count)
            after = _fold_block(
                step, self.plan, update, arguments, memories, values, *place
            )
            jax.block_until_ready(carry)  # at most two blocks are on the device
            carry, start = after, start + count
        self.count = start
        check_numbers(model.separation, self.plan.top, start)
        return carry

    def _fold_some(self, step, model, y, extra, carry, update, active):
        """A pass for the active queries, their number rounded up to a power of two."""
        number = 1 << (len(active) - 1).bit_length()
        index = np.resize(active, number)
        y, extra, part = jax.tree.map(lambda x: x[index], (y, extra, carry))
        result = self.fold(step, model.take(index), y, extra, part, update)
        return jax.tree.map(
            lambda whole, new: whole.at[active].set(new[: len(active)]), carry, result
        )

    def overlaps(self, model: QueryModel, y: Array) -> Array:
        if self.count is None:
            self.count = sum(
                count for _, count in self.source.memories.blocks(self.size)
            )
        shape = y.shape[0], self.count + self.size  # room for the padding of a block
        start = jnp.full(shape, -jnp.inf, y.dtype)
        z = self.fold(collect, model, y, (), start, False)
        return z[:, : self.count]

    def weighted(
        self, weights: Array, model: QueryModel, y: Array, update: bool
    ) -> Array:
        padded = jnp.pad(weights, ((0, 0), (0, self.size)))
        out = jnp.zeros((y.shape[0], self.width(y, update)), y.dtype)
        return self.fold(weigh_given, model, y, padded, out, update)

    def take(self, index: Array) -> tuple[Array, Array | None]:
        source = self.source
        source.check_lengths()  # before rows of an array are taken
        rows = [
            None if x is None else x.take(np.asarray(index), self.size)
            for x in (source.memories, source.values)
        ]
        source.check_lengths()  # after the pass that counts rows of an iterator
        return jax.tree.map(lambda x: jnp.asarray(x).astype(self.plan.dtype), (*rows,))

    def _placed(self, with_values: bool) -> Iterator[tuple[Array, Array | None, int]]:
        """Blocks on the device with their number of rows, one transferred ahead."""
        source = self.source
        values: Iterator[Any] = iter(())
        if with_values and source.values is not None:
            values = source.values.blocks(self.size)
        ahead = None
        for block, count in source.memories.blocks(self.size):
            value = None
            if with_values and source.values is not None:
                value, value_count = next(values, (None, 0))
                if value_count != count:
                    raise ValueError("values end before the memories, or after")
            placed = jax.device_put((block, value)), count
            if ahead is not None:
                yield *ahead[0], ahead[1]
            ahead = placed
        if next(values, None) is not None:
            raise ValueError("values end before the memories, or after")
        if ahead is not None:
            yield *ahead[0], ahead[1]


@functools.partial(jax.jit, static_argnames=("step", "plan", "update"))
def _fold_block(step, plan, update, arguments, memories, values, start, count):
    """Calls `step` on the tiles of a block whose first memory is number `start`."""

    def shifted(model, y, extra, carry, tile: Tile, update):
        tile = dataclasses.replace(tile, start=tile.start + start)
        return step(model, y, extra, carry, tile, update)

    memories, values = jax.tree.map(lambda x: x.astype(plan.dtype), (memories, values))
    stored = ArraySource(memories, values, None)
    return fold_tiles(shifted, plan, arguments, stored, update, Window(count))
