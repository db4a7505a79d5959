"""A memory that grows: patterns are added and removed with few compilations."""

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
from uhop_jax._pytree import Pytree
from uhop_jax.kernels import check_numbers
from uhop_jax.model import Model
from uhop_jax.retrieval import Retrieval, retrieve

LEAST_CAPACITY = 8
OUTSIDE = (  # for error messages
    "a memory changes its shape as it grows, so add, remove and replace outside of "
    "jax.jit, jax.vmap and jax.grad"
)


class Memory(Pytree):
    """Stored patterns in slots, some of which are free; every change is a new memory.

    When the slots are full their number doubles. Shapes therefore change, and programs
    are compiled, only a logarithmic number of times. Retrieval weights are over the
    slots, and zero at free slots. `uhop_jax.save` and `uhop_jax.load` write and read
    memories.

    Attributes:
      patterns: `(capacity, d)`, zero in free slots.
      values: `(capacity, v)`, averaged by retrieval; None averages the patterns.
      used: `(capacity,)` boolean, true for slots with a pattern.
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
          value_dimension: `v` of the values; None for a memory without values.
          capacity: initial number of slots.
          dtype: dtype of patterns and values; None is the default float.

        Raises:
          ValueError: if a number is below 1, or the dtype is not floating, or has 64
            bits without `jax_enable_x64`.
        """
        check_count("dimension", dimension, 1)
        check_count("capacity", capacity, 1)
        dtype = jnp.result_type(float) if dtype is None else dtype
        check_floating("dtype", dtype)
        held = jax.dtypes.canonicalize_dtype(dtype)
        if held != jnp.dtype(dtype):
            raise ValueError(
                f"dtype {jnp.dtype(dtype)} needs jax_enable_x64: without it JAX has "
                f"{held}"
            )
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
        """Indices of the slots in use, ascending."""
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
          patterns: the patterns to store.
          values: their values, `(v,)` or `(n, v)`, if the memory has values.

        Returns:
          The new memory, and the slots of the patterns `(n,)`.

        Raises:
          ValueError: if shapes do not fit, patterns or values are not finite, or the
            memory is traced.
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
        """Replaces the patterns in slots that are in use.

        Args:
          slots: one slot or several `(n,)`.
          patterns: the new patterns, as in `add`.
          values: their values, as in `add`.

        Raises:
          ValueError: if a slot is free or named twice, or as in `add`.
        """
        rows, value_rows = self._rows(patterns, values)
        slots = self._in_use(slots)
        if len(slots) != len(rows):
            raise ValueError(f"got {len(slots)} slots for {len(rows)} patterns")
        return _write(self, slots, rows, value_rows)

    def remove(self, slots: int | Sequence[int] | Int[np.ndarray, " n"]) -> "Memory":
        """Frees slots that are in use; the remaining patterns keep their slots.

        Raises:
          ValueError: if a slot is free or named twice.
        """
        return _free(self, self._in_use(slots))

    def retrieve(
        self, model: Model, query: Float[Array, "*batch d"], **options: Any
    ) -> Retrieval:
        """`uhop_jax.retrieve` from the slots in use.

        Args:
          model: similarity, separation and inverse temperature.
          query: initial states.
          **options: further arguments of `uhop_jax.retrieve`, except `mask` and
            `values`.

        Raises:
          ValueError: if `mask` or `values` is among the options, a kernel holds NaN, or
            as in `uhop_jax.retrieve`.
        """
        for name in ("mask", "values"):
            if name in options:
                raise ValueError(f"{name} must be left out: the memory has its own")
        if isinstance(model, Model):
            check_numbers(model.similarity.kernel)
        options |= {"values": self.values, "mask": self.used}
        return retrieve(model, self.patterns, query, **options)

    def _known(self) -> np.ndarray:
        """`used` on the host."""
        if is_traced(self.used):
            raise ValueError(f"the memory is traced: {OUTSIDE}")
        return np.asarray(self.used)

    def _rows(self, patterns: Any, values: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Patterns `(n, d)` and values `(n, v)` on the host, checked."""
        checked: list[np.ndarray | None] = []
        pairs = (("patterns", patterns, self.patterns), ("values", values, self.values))
        for name, x, slots in pairs:
            if (x is None) != (slots is None):
                has = "no values" if slots is None else "values beside its patterns"
                raise ValueError(f"the memory has {has}")
            if x is None or slots is None:
                checked.append(None)
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
            checked.append(np.asarray(x).reshape(-1, x.shape[-1]))
        rows, value_rows = checked
        assert rows is not None
        if value_rows is not None and len(value_rows) != len(rows):
            raise ValueError(f"got {len(value_rows)} values for {len(rows)} patterns")
        return rows, value_rows

    def _in_use(self, slots: Any) -> np.ndarray:
        """Slots `(n,)` in use, int64; refuses free and repeated slots."""
        slots = np.atleast_1d(np.asarray(slots))
        used = self._known()
        if slots.ndim != 1:
            raise ValueError(f"slots must have shape (n,), got {slots.shape}")
        if slots.size and slots.dtype.kind not in "iu":
            raise ValueError(f"slots must be integers, got {slots.dtype}")
        slots = slots.astype(np.int64)
        for slot in slots:
            if not 0 <= slot < self.capacity or not used[slot]:
                raise ValueError(f"slot {slot} holds no pattern")
        if len(np.unique(slots)) != len(slots):
            raise ValueError(f"slots must differ, got {slots.tolist()}")
        return slots


def _padded(capacity: int, x: Array) -> Array:
    """The array with zeros appended to `capacity` rows, without compiling a program."""
    padded = np.zeros((capacity, *x.shape[1:]), x.dtype)
    padded[: x.shape[0]] = np.asarray(x)
    return jax.device_put(padded)


@jax.jit
def _write(memory: Memory, slots: Array, rows: Array, values: Array | None) -> Memory:
    memory_values = memory.values
    if memory_values is not None:
        memory_values = memory_values.at[slots].set(values)
    return dataclasses.replace(
        memory,
        patterns=memory.patterns.at[slots].set(rows),
        values=memory_values,
        used=memory.used.at[slots].set(True),
    )


@jax.jit
def _free(memory: Memory, slots: Array) -> Memory:
    def cleared(x: Array) -> Array:
        return x.at[slots].set(jnp.zeros((), x.dtype))

    return jax.tree.map(cleared, memory)
