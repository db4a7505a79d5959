"""A memory that grows: patterns come and go, and nothing is compiled anew."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import (
    as_floating,
    check_count,
    check_finite,
    check_floating,
    is_traced,
)
from uhop_jax._pytree import frozen_pytree
from uhop_jax.kernels import check_numbers
from uhop_jax.retrieval import Retrieval, retrieve

LEAST_CAPACITY = 8
OUTSIDE = (  # of a transformation
    "a memory changes its shape as it grows, so add, remove and replace outside of "
    "jax.jit, jax.vmap and jax.grad"
)


@frozen_pytree
class Memory:
    """Stored patterns in slots, of which some are free; every change is a new memory.

    Once the slots are full their number doubles, so that shapes change, and programs
    are compiled, a logarithmic number of times. Weights are over the slots, zero at
    free ones. `uhop_jax.save` and `uhop_jax.load` keep it in a file.

    Attributes:
      patterns: `(capacity, d)`, zero in free slots.
      values: `(capacity, v)`, what retrieval averages; None for the patterns.
      used: `(capacity,)`, which slots hold a pattern.
    """

    patterns: Float[Array, "capacity d"]
    values: Float[Array, "capacity v"] | None
    used: Bool[Array, " capacity"]

    @classmethod
    def empty(
        cls,
        dimension: int,
        *,
        value_dimension: int | None = None,
        capacity: int = LEAST_CAPACITY,
        dtype: Any = None,
    ) -> "Memory":
        """A memory without patterns.

        Args:
          dimension: `d` of the patterns.
          value_dimension: `v` of the values; None for none.
          capacity: slots to begin with.
          dtype: of both; None is the default float.

        Raises:
          ValueError: if a number is below 1, or the dtype is not floating.
        """
        check_count("dimension", dimension, 1)
        check_count("capacity", capacity, 1)
        dtype = jnp.result_type(float) if dtype is None else dtype
        check_floating("dtype", dtype)
        values = None
        if value_dimension is not None:
            check_count("value_dimension", value_dimension, 1)
            values = jnp.asarray(np.zeros((capacity, value_dimension), dtype))
        patterns = jnp.asarray(np.zeros((capacity, dimension), dtype))
        return cls(patterns, values, jnp.asarray(np.zeros(capacity, bool)))

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.patterns.shape[0]

    @property
    def slots(self) -> Int[np.ndarray, " count"]:
        """The slots in use, ascending."""
        return np.flatnonzero(self._known())

    def __len__(self) -> int:
        return len(self.slots)

    def add(
        self,
        patterns: Float[Array | np.ndarray, "*n d"],
        values: Float[Array | np.ndarray, "*n v"] | None = None,
    ) -> tuple["Memory", Int[np.ndarray, " count"]]:
        """Stores one pattern `(d,)` or several `(n, d)` in the first free slots.

        Args:
          patterns: what to store.
          values: what retrieval averages in their place, if the memory has values.

        Returns:
          The new memory, and the slots that were filled.

        Raises:
          ValueError: if shapes do not fit, or something is not finite.
        """
        free = np.flatnonzero(~self._known())
        rows, value_rows = self._rows(patterns, values)
        grown = self
        missing = len(rows) - len(free)
        if missing > 0:
            capacity = self.capacity
            while capacity < self.capacity + missing:
                capacity *= 2
            grown = jax.tree.map(functools.partial(_padded, capacity), self)
            free = np.flatnonzero(~grown._known())
        slots = free[: len(rows)]
        return _write(grown, slots, rows, value_rows), slots

    def replace(
        self,
        slots: int | Sequence[int] | Int[np.ndarray, " n"],
        patterns: Float[Array | np.ndarray, "*n d"],
        values: Float[Array | np.ndarray, "*n v"] | None = None,
    ) -> "Memory":
        """Puts other patterns into slots that are in use.

        Raises:
          ValueError: if a slot is free or named twice, or as in `add`.
        """
        rows, value_rows = self._rows(patterns, values)
        slots = self._in_use(slots)
        if len(slots) != len(rows):
            raise ValueError(f"got {len(slots)} slots for {len(rows)} patterns")
        return _write(self, slots, rows, value_rows)

    def remove(self, slots: int | Sequence[int] | Int[np.ndarray, " n"]) -> "Memory":
        """Frees slots that are in use; the others keep their patterns and numbers.

        Raises:
          ValueError: if a slot is free or named twice.
        """
        return _free(self, self._in_use(slots))

    def retrieve(self, query: Float[Array, "*batch d"], **options: Any) -> Retrieval:
        """`uhop_jax.retrieve` from the slots in use; `options` as there.

        Raises:
          ValueError: if they name `mask` or `values`, which are the memory's own; or as
            there.
        """
        for name in ("mask", "values"):
            if name in options:
                raise ValueError(f"{name} must be left out: the memory has its own")
        check_numbers(getattr(options.get("similarity"), "kernel", None))
        return retrieve(
            self.patterns, query, values=self.values, mask=self.used, **options
        )

    def _known(self) -> np.ndarray:
        if is_traced(self.used):
            raise ValueError(f"the memory is traced: {OUTSIDE}")
        return np.asarray(self.used)

    def _rows(self, patterns: Any, values: Any) -> tuple[np.ndarray, np.ndarray | None]:
        found: list[np.ndarray | None] = []
        pairs = (("patterns", patterns, self.patterns), ("values", values, self.values))
        for name, x, slots in pairs:
            if (x is None) != (slots is None):
                has = "no values" if slots is None else "values beside its patterns"
                raise ValueError(f"the memory has {has}")
            if x is None or slots is None:
                found.append(None)
                continue
            if is_traced(x):
                raise ValueError(f"{name} are traced: {OUTSIDE}")
            x = as_floating(x, name)
            if x.ndim not in (1, 2) or x.shape[-1] != slots.shape[-1]:
                raise ValueError(
                    f"{name} must have shape (n, {slots.shape[-1]}), got {x.shape}"
                )
            check_finite(name, x)
            x = x.astype(slots.dtype)
            check_finite(f"{name} in {x.dtype}", x)
            found.append(np.asarray(x).reshape(-1, x.shape[-1]))
        rows, value_rows = found
        assert rows is not None
        if value_rows is not None and len(value_rows) != len(rows):
            raise ValueError(f"got {len(value_rows)} values for {len(rows)} patterns")
        return rows, value_rows

    def _in_use(self, slots: Any) -> np.ndarray:
        slots = np.atleast_1d(np.asarray(slots))
        used = self._known()
        if slots.size and slots.dtype.kind not in "iu" or slots.ndim != 1:
            raise ValueError(f"slots must be integers, got {slots.dtype}")
        slots = slots.astype(np.int64)
        for slot in slots:
            if not 0 <= slot < self.capacity or not used[slot]:
                raise ValueError(f"slot {slot} holds no pattern")
        if len(np.unique(slots)) != len(slots):
            raise ValueError(f"slots must differ, got {slots.tolist()}")
        return slots


def _padded(capacity: int, x: Array) -> Array:
    """On the host, where no shape needs a program of its own."""
    whole = np.zeros((capacity, *x.shape[1:]), x.dtype)
    whole[: x.shape[0]] = np.asarray(x)
    return jax.device_put(whole)


@jax.jit
def _write(memory: Memory, slots: Array, rows: Array, values: Array | None) -> Memory:
    kept = memory.values
    if kept is not None:
        kept = kept.at[slots].set(values)
    return dataclasses.replace(
        memory,
        patterns=memory.patterns.at[slots].set(rows),
        values=kept,
        used=memory.used.at[slots].set(True),
    )


@jax.jit
def _free(memory: Memory, slots: Array) -> Memory:
    def cleared(x: Array) -> Array:
        return x.at[slots].set(jnp.zeros((), x.dtype))

    return jax.tree.map(cleared, memory)
