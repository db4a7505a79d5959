"""Distances of all states to all keys, without an array of all differences."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from uhop_jax._products import contract, shifted

COMPONENTS = 16  # number of components that distances sum at a time


def sum_over_components(
    term: Callable[[Array], Array], keys: Array, state: Array, observed: Any
) -> Array:
    """`sum_j observed_j term(state_j - key_j)` of all states with all keys `(..., M)`.

    The sum takes `COMPONENTS` components at a time: the differences `(..., M, D)` are
    never stored, and the work vectorises over the memories.
    """
    size = max(min(COMPONENTS, keys.shape[-1]), 1)
    groups = -(-keys.shape[-1] // size)

    def in_groups(x: Array) -> Array:  # (..., D) -> (groups, size, ...)
        missing = groups * size - x.shape[-1]
        x = jnp.pad(x, (*(((0, 0),) * (x.ndim - 1)), (0, missing)))
        return jnp.moveaxis(x, -1, 0).reshape(groups, size, *x.shape[:-1])

    @jax.checkpoint
    def add(total: Array, group: tuple[Array, Array, Any]) -> tuple[Array, None]:
        key_group, state_group, weight = group
        key_group = key_group.reshape(size, *(1,) * (state.ndim - 1), keys.shape[0])
        part = jnp.zeros_like(total)
        for j in range(size):
            summand = term(state_group[j][..., None] - key_group[j])
            if weight is not None:
                summand = summand * weight[j][..., None]
            part = part + summand
        return total + part, None

    total = jnp.full_like(state, 0, shape=(*state.shape[:-1], keys.shape[0]))
    return jax.lax.scan(add, total, jax.tree.map(in_groups, (keys, state, observed)))[0]


def absolute(x: Array) -> Array:
    """`|x|` with derivative zero at zero, unlike `jnp.abs`."""
    return x * jax.lax.stop_gradient(jnp.sign(x))


@jax.custom_jvp
def squared_distance(keys: Array, state: Array, observed: Any) -> Array:
    """`sum_j observed_j (state_j - key_j)^2`, from differences: nothing cancels."""
    return sum_over_components(jnp.square, keys, state, observed)


@squared_distance.defjvp
def _squared_distance_jvp(primals, tangents):
    keys, state, observed = primals
    dkeys, dstate, _ = tangents
    # Matrix products, with the mean of the keys as origin so that little cancels.
    center = jax.lax.stop_gradient(keys.mean(0))
    keys_c, state_c = shifted(keys, center), shifted(state, center)
    lift = (1,) * (state.ndim - 1)
    if observed is not None:
        tangent = (
            (observed * state_c * dstate).sum(-1, keepdims=True)
            + contract(observed, keys_c * dkeys)
            - contract(observed * dstate, keys_c)
            - contract(observed * state_c, dkeys)
        )
    else:
        tangent = (
            (state_c * dstate).sum(-1, keepdims=True)
            + (keys_c * dkeys).sum(-1).reshape(*lift, -1)
            - contract(dstate, keys_c)
            - contract(state_c, dkeys)
        )
    return squared_distance(keys, state, observed), 2 * tangent
