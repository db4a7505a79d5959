"""Masks of a layer: which memories a state may see."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import as_boolean, broadcast_rows, is_traced

VISIBLE = "true for visible memories"


def combined_mask(
    mask: Any, association_mask: Any, shape: tuple[int, ...]
) -> Bool[Array, "..."] | None:
    """Combines both masks of a layer.

    Args:
      mask: `(S,)` or `(*batch, S)`, true for valid memories; or None.
      association_mask: `(L, S)`, `(*batch, L, S)` or `(*batch, 1 or heads, L, S)`, true
        where a state may see a memory; or None.
      shape: `(*batch, heads, L, S)` of the weights.

    Returns:
      `(*batch, 1 or heads, L, S)`; None if there is no mask.

    Raises:
      ValueError: if a mask has another shape, or is not boolean.
    """
    *batch, heads, L, S = shape
    where = None
    if mask is not None:
        mask = jnp.broadcast_to(checked_mask(mask, tuple(batch), S), (*batch, S))
        where = jnp.broadcast_to(mask[..., None, None, :], (*batch, 1, L, S))
    if association_mask is not None:
        visible = as_boolean("association_mask", association_mask, VISIBLE)
        shapes = [(L, S), (*batch, L, S), (*batch, 1, L, S), (*batch, heads, L, S)]
        if visible.shape not in shapes:
            raise ValueError(
                "association_mask must have shape "
                f"{' or '.join(map(str, dict.fromkeys(shapes)))}, got {visible.shape}"
            )
        if visible.ndim < len(shape):
            visible = jnp.broadcast_to(visible, (*batch, L, S))[..., None, :, :]
        where = visible if where is None else where & visible
    return where


def check_where(where: Any, shape: tuple[int, ...]) -> None:
    """Refuses a mask of weights `(*batch, heads, L, S)` that has another shape."""
    *batch, heads, L, S = shape
    if jnp.shape(where) not in ((*batch, 1, L, S), (*batch, heads, L, S)):
        raise ValueError(
            f"where must have shape {(*batch, heads, L, S)}, or 1 in place of the "
            f"heads, got {jnp.shape(where)}"
        )


def extended_mask(
    where: Bool[Array, "... S"], learned: int
) -> Bool[Array, "... S_plus_learned"]:
    """The mask with `learned` columns appended, for memories of the layer itself.

    Every state sees the bias pattern and the zero memory.
    """
    valid = jnp.ones((*where.shape[:-1], learned), bool)
    return jnp.concatenate([where, valid], axis=-1)


def attention_mask(
    mask: Any, is_causal: bool, shape: tuple[int, ...]
) -> tuple[Bool[Array, "..."], Bool[Array, ""] | None]:
    """The mask of an attention of Flax, as an association has it.

    Args:
      mask: broadcasts to `shape`; boolean, or of 0 and 1 in any dtype; or None.
      is_causal: whether a query sees no key at a later position.
      shape: `(*batch, heads, L, S)` of the weights.

    Returns:
      The mask `(*batch, 1 or heads, L, S)`, and a flag, true if a traced mask has
      values other than 0 and 1; the flag is None if such values are excluded.

    Raises:
      ValueError: if the mask does not broadcast, or it is not traced and has values
        other than 0 and 1.
    """
    mask = jnp.ones((1, 1), bool) if mask is None else jnp.asarray(mask)
    invalid = None
    if mask.dtype != jnp.bool_:
        others = (mask != 0) & (mask != 1)
        if is_traced(mask):
            invalid = others.any()
        else:
            with jax.ensure_compile_time_eval():
                other = int(jnp.sum(others))
            if other:
                raise ValueError(
                    "mask must be boolean, or 1 where a query may see a key and else "
                    f"0, got {other} other values of {mask.size}"
                )
        mask = mask.astype(bool)
    broadcast_rows("mask", mask, shape)
    heads = mask.shape[-3] if mask.ndim > 2 else 1
    mask = jnp.broadcast_to(mask, (*shape[:-3], heads, *shape[-2:]))
    return jnp.tril(mask) if is_causal else mask, invalid


def mask_rows(
    where: Bool[Array, "*batch h L S"] | None, shared: bool = False
) -> Bool[Array, "..."] | None:
    """The mask of weights with the axis of memories in front, then heads and states.

    It is `(S, h, *batch L)` if all entries of the batch share the memories, else
    `(*batch S, h, L)`.
    """
    if where is None:
        return None
    if shared:
        where = jnp.moveaxis(where, (-1, -3), (0, 1))
        return where.reshape(*where.shape[:2], math.prod(where.shape[2:]))
    where = jnp.moveaxis(where, -1, -3)
    return where.reshape(math.prod(where.shape[:-2]), *where.shape[-2:])


def first_seen(mask: Bool[Array, " S"] | None) -> Int[Array, ""]:
    """Index of the first memory that may be seen; zero if there is none."""
    return jnp.int32(0) if mask is None else jnp.argmax(mask).astype(jnp.int32)


def zero_unless(
    valid: Bool[Array, "*rows"], x: Float[Array, "..."]
) -> Float[Array, "..."]:
    """`x`, whose first axes are those of `valid`, zero where not valid."""
    valid = valid.reshape(*valid.shape, *(1,) * (x.ndim - valid.ndim))
    return jnp.where(valid, x, jnp.zeros((), x.dtype))


def checked_mask(mask: Any, batch: tuple[int, ...], S: int) -> Array:
    """The boolean mask over memories, of a checked shape."""
    mask = as_boolean("mask", mask, VISIBLE)
    if mask.shape not in ((S,), (*batch, S)):
        raise ValueError(
            f"mask must have shape {(S,)} or {(*batch, S)}, got {mask.shape}; use "
            "association_mask for a mask of each state"
        )
    return mask
