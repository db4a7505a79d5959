"""What a call of a layer associates: arrays and masks of checked shapes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import as_floating, check_count, is_traced
from uhop_jax._pytree import pytree
from uhop_jax.layers.masks import checked_mask, combined_mask, zero_unless
from uhop_jax.layers.tiles import STATIC


@pytree
class IndexedMemories:
    """Memories that a function of their index makes, block by block.

    A layer whose association has a `block` never holds all of them: the backward pass
    makes each block again.

    Attributes:
      function: maps indices `(T,)`, int32, and the arguments to memories
        `(T, memory_size)`. It must hash: the arrays that it needs are arguments.
      length: number of memories, at least one.
      arguments: pytrees of arrays, in which there are derivatives.

    Raises:
      ValueError: if the function cannot be called, or the length is no positive
        integer.
    """

    function: Callable[..., Array] = dataclasses.field(metadata=STATIC)
    length: int = dataclasses.field(metadata=STATIC)
    arguments: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"function must be a function, got {self.function!r}")
        check_count("length", self.length, 1)

    def __call__(self, index: Int[Array, " T"]) -> Float[Array, "T memory_size"]:
        """The memories of these indices."""
        return self.function(index, *self.arguments)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all memories, without making them.

        Raises:
          ValueError: if the function does not give one memory for each index.
        """
        two = jax.ShapeDtypeStruct((2,), jnp.int32)
        made = jax.eval_shape(lambda rows, index: rows(index), self, two).shape
        if len(made) != 2 or made[0] != 2:
            raise ValueError(
                f"function must give (2, memory_size) for 2 indices, got {made}"
            )
        return (self.length, made[1])


class Inputs(NamedTuple):
    """States, memories and masks of one call.

    Attributes:
      state: `(*states, L, state_size)`; axes of the batch may be missing in front.
      memories: `(*batch, S, memory_size)`, or `(S, memory_size)`, which all states
        share. Memories that no state may see are zero.
      values: rows in place of the memories, of their leading axes; or None.
      batch: leading axes of the result.
      where: `(*batch, 1 or heads, L, S)`, true where a state may see a memory; or None.
      visible: `(*batch, S)`, true for memories that some state may see; or None.
      mask: `(*batch, S)` or `(S,)`, true for memories that all states may see, if
        there is no other mask; or None.
      lengths: `(bags,)`, number of memories of each bag, if they lie one bag behind
        another along `S`; or None.
    """

    state: Float[Array, "*states L d"]
    memories: Float[Array, "*sets S d_memory"] | IndexedMemories
    values: Float[Array, "*sets S d_value"] | None
    batch: tuple[int, ...]
    where: Bool[Array, "..."] | None
    visible: Bool[Array, "..."] | None
    mask: Bool[Array, "..."] | None = None
    lengths: Int[Array, " bags"] | None = None


class Sizes(NamedTuple):
    """Dimensions of the arrays that a layer takes, and its number of heads."""

    state: int
    memory: int
    value: int | None  # None if a layer takes no values
    heads: int


def as_inputs(
    sizes: Sizes,
    state: Any,
    memories: Any,
    values: Any,
    mask: Any,
    association_mask: Any,
    *,
    may_be_empty: bool,
) -> Inputs:
    """Checks the arguments of a layer's call, see `Layer`.

    Raises:
      ValueError: if shapes do not fit, or a mask is not boolean.
    """
    state = _state(sizes, state)
    memories = state if memories is None else as_floating(memories, "memories")
    if memories.ndim < 2 or memories.shape[-1] != sizes.memory:
        raise ValueError(
            f"memories must have shape (..., S, {sizes.memory}), got {memories.shape}"
        )
    if memories.shape[-2] == 0 and not may_be_empty:
        raise ValueError(
            f"memories must hold at least one pattern, got shape {memories.shape}; "
            "mask the patterns of an empty bag"
        )
    values = None if values is None else as_floating(values, "values")
    if state.ndim >= memories.ndim and _single(memories):  # for all states
        memories = memories.reshape(memories.shape[-2:])
        if values is not None and values.ndim > 2 and _single(values):
            values = values.reshape(values.shape[-2:])
    shared = memories.ndim == 2
    batch = state.shape[:-2] if shared else memories.shape[:-2]
    if batch[len(batch) - len(state.shape[:-2]) :] != state.shape[:-2]:
        raise ValueError(
            f"memories have shape {memories.shape}, state {state.shape}: leading axes "
            "must agree, or memories have none, or state fewer"
        )
    _check_values(sizes, values, memories.shape[:-1])
    shape = (*batch, sizes.heads, state.shape[-2], memories.shape[-2])
    where, visible = combined_mask(mask, association_mask, shape), None
    if where is not None:  # a memory that no state may see may be NaN
        visible = where.any((-3, -2))
        needed = visible.any(tuple(range(len(batch)))) if shared else visible
        memories = zero_unless(needed, memories)
        if values is not None:
            values = zero_unless(needed, values)
    alone = None if association_mask is not None or mask is None else jnp.asarray(mask)
    return Inputs(state, memories, values, batch, where, visible, alone)


def as_rows(
    sizes: Sizes, state: Any, memories: Any, values: Any, mask: Any, lengths: Any
) -> Inputs:
    """As `as_inputs`, for bags one behind another or memories of an index.

    Memories are `(S, memory_size)` or `IndexedMemories`, values `(S, value_size)`, the
    mask `(S,)`. Lengths are `(bags,)` integers; None is one bag, which all states
    share.

    Raises:
      ValueError: as `as_inputs`; or if the lengths are negative or exceed `S`.
    """
    state = _state(sizes, state)
    if memories is None:
        raise ValueError("memories must be given with lengths, got None")
    if not isinstance(memories, IndexedMemories):
        memories = as_floating(memories, "memories")
    if len(memories.shape) != 2 or memories.shape[1] != sizes.memory:
        raise ValueError(
            f"memories must have shape (S, {sizes.memory}), all bags one behind "
            f"another, got {memories.shape}"
        )
    length = memories.shape[0]
    values = None if values is None else as_floating(values, "values")
    _check_values(sizes, values, (length,))
    if mask is not None:
        mask = checked_mask(mask, (), length)
    batch = state.shape[:-2]
    if lengths is not None:
        lengths = as_lengths(lengths, length)
        bags = lengths.shape
        if batch not in ((), bags):
            raise ValueError(
                f"state must have shape (L, {sizes.state}), which all bags share, or "
                f"{(*bags, 'L', sizes.state)}, got {state.shape}"
            )
        batch = bags
    return Inputs(state, memories, values, batch, None, None, mask, lengths)


def _state(sizes: Sizes, state: Any) -> Array:
    """The states, of a checked shape."""
    state = as_floating(state, "state")
    if state.ndim < 2 or state.shape[-1] != sizes.state:
        raise ValueError(
            f"state must have shape (..., L, {sizes.state}), got {state.shape}"
        )
    return state


def _check_values(sizes: Sizes, values: Array | None, leading: tuple[int, ...]) -> None:
    """Refuses values that are not one for each memory."""
    if values is None:
        return
    if sizes.value is None:
        raise ValueError("values need a layer with a value_size")
    if values.shape != (*leading, sizes.value):
        raise ValueError(
            f"values must have shape {(*leading, sizes.value)}, got {values.shape}"
        )


def _single(x: Array) -> bool:
    """Whether the batch of an array has one entry."""
    return all(number == 1 for number in x.shape[:-2])


def as_lengths(lengths: Any, total: int) -> Int[Array, " bags"]:
    """The number of memories of each bag, int32; -1 for a traced one out of range.

    Raises:
      ValueError: if they are no integers, negative, or more than `total` together.
    """
    traced = is_traced(lengths)
    numbers = lengths if traced else np.asarray(lengths)
    lengths = jnp.asarray(lengths)
    if lengths.ndim != 1 or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            "lengths must be integers of shape (bags,), got "
            f"{lengths.dtype} of shape {lengths.shape}"
        )
    if not traced:
        if (numbers < 0).any() or numbers.sum() > total:
            raise ValueError(
                f"lengths must be at least 0 and sum to at most the {total} memories, "
                f"got a least length of {numbers.min(initial=0)} and a sum of "
                f"{numbers.sum()}"
            )
        return lengths.astype(jnp.int32)
    if lengths.dtype.itemsize < 4:
        lengths = lengths.astype(jnp.int32)
    valid = (lengths >= 0) & (lengths <= total)
    return jnp.where(valid, lengths.astype(jnp.int32), jnp.int32(-1))
