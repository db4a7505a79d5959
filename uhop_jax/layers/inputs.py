"""What a call of a layer associates: arrays and masks of checked shapes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from uhop_jax.layers.masks import combined_mask, zero_unless


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
    """

    state: Float[Array, "*states L d"]
    memories: Float[Array, "*sets S d_memory"]
    values: Float[Array, "*sets S d_value"] | None
    batch: tuple[int, ...]
    where: Bool[Array, "..."] | None
    visible: Bool[Array, "..."] | None


class Sizes(NamedTuple):
    """Sizes of the arrays that a layer takes.

    Attributes:
      state: dimension of states.
      memory: dimension of memories.
      value: dimension of values; None if a layer takes none.
      heads: number of heads.
    """

    state: int
    memory: int
    value: int | None
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
    """Checks the arguments of a layer's call, which `Hopfield` documents.

    Args:
      sizes: sizes of the layer.
      state: states.
      memories: memories; None stands for the states.
      values: values, or None.
      mask: mask of memories, or None.
      association_mask: mask of pairs, or None.
      may_be_empty: whether there may be no memory.

    Raises:
      ValueError: if shapes do not fit, or a mask is not boolean.
    """
    state = jnp.asarray(state)
    memories = state if memories is None else jnp.asarray(memories)
    values = None if values is None else jnp.asarray(values)
    if state.ndim < 2 or state.shape[-1] != sizes.state:
        raise ValueError(
            f"state must have shape (..., L, {sizes.state}), got {state.shape}"
        )
    if 0 in memories.shape[-2:-1] and not may_be_empty:
        raise ValueError(
            f"memories must hold at least one pattern, got shape {memories.shape}; "
            "mask the patterns of an empty bag"
        )
    single = all(number == 1 for number in memories.shape[:-2])
    if single and state.ndim >= memories.ndim:  # one memory set for all states
        memories = memories.reshape(memories.shape[-2:])
        if values is not None:
            values = values.reshape(values.shape[-2:])
    shared = memories.ndim == 2
    if memories.ndim < 2 or memories.shape[-1] != sizes.memory:
        raise ValueError(
            f"memories must have shape (..., S, {sizes.memory}), got {memories.shape}"
        )
    batch = state.shape[:-2] if shared else memories.shape[:-2]
    if batch[len(batch) - len(state.shape[:-2]) :] != state.shape[:-2]:
        raise ValueError(
            f"memories have shape {memories.shape}, state {state.shape}: leading axes "
            "must agree, or memories have none, or state fewer"
        )
    if values is not None:
        if sizes.value is None:
            raise ValueError("values need a layer with a value_size")
        if values.shape != (*memories.shape[:-1], sizes.value):
            raise ValueError(
                f"values must have shape {(*memories.shape[:-1], sizes.value)}, got "
                f"{values.shape}"
            )
    shape = (*batch, sizes.heads, state.shape[-2], memories.shape[-2])
    where, visible = combined_mask(mask, association_mask, shape), None
    if where is not None:  # a memory that no state may see may be NaN
        visible = where.any((-3, -2))
        needed = visible.any(tuple(range(len(batch)))) if shared else visible
        memories = zero_unless(needed, memories)
        if values is not None:
            values = zero_unless(needed, values)
    return Inputs(state, memories, values, batch, where, visible)
