"""Passes of entmax: bounds of thresholds, Newton steps, sums over supports."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax.separation import Separation, _root, _steep
from uhop_jax.separation._root import Power, exp_and_slope, run_time_power, switch
from uhop_jax.separation.entmax import valid_alpha
from uhop_jax.separation.forms import Root
from uhop_jax.streaming._tiles import QueryModel, Threshold, Tile, across, total

GROUPS = 512  # groups of memories, whose two largest overlaps bound a threshold


def entmax_sums(
    driver: Any, model: QueryModel, y: Array, start: tuple[Array, Array], update: bool
) -> tuple[Array, Array, Threshold]:
    """Sums of the averaged patterns and of the weights, and the threshold."""
    none = jnp.full_like(y, -jnp.inf, shape=(y.shape[0], driver.groups))
    largest = driver.fold(_two_largest, model, y, (), (none, none), False)
    top, e, lower, likely, guess = _lower_bound(model, *largest)
    limit = _root.tolerance(driver.count, y.dtype)
    steep = e[:, 0] > 1
    lowest, weight = driver.when(
        jnp.any(steep),
        lambda: _smallest_weight(driver, model, y, top, guess),
        (top, jnp.ones_like(top)),
    )

    def threshold(root: Array) -> Threshold:
        return Threshold(
            jnp.where(steep, lowest, top), jnp.where(steep, weight, root[:, 0])
        )

    def weigh_at(root: Array, active: Any = None) -> tuple[Array, Array]:
        extra = threshold(root)
        return driver.fold(weigh_tile, model, y, extra, start, update, active)

    def sums(root: Array, active: Array) -> tuple[Array, Array]:
        zero, rows = jnp.zeros_like(top), active[:, 0]
        carry = zero, zero
        f, slope = driver.fold(_sums, model, y, threshold(root), carry, False, rows)
        return f[:, None], slope[:, None]

    def climb(root: Array, active: Any = True, ahead: Any = 0.0) -> Array:
        return _root.find_root(
            sums, driver.count, e, root, driver.repeat, active, ahead
        )

    # A Newton step leaves at most half the square of the error. The last step has no
    # separate pass to check it: the pass for the weighted sum does.
    ahead = jnp.sqrt(2 * limit)
    root = driver.when(~likely, lambda: climb(lower, ahead=ahead), lower)
    out, mass = weigh_at(root)
    done = steep[:, None] | ~(mass - 1 > limit)[:, None]  # NaN too

    def again() -> tuple[Array, Array, Array]:
        finer = climb(root, ~done)
        finer_out, finer_mass = weigh_at(finer, ~done[:, 0])
        merged = jnp.where(done, out, finer_out)
        return merged, jnp.where(done[:, 0], mass, finer_mass), finer

    out, mass, root = driver.when(jnp.any(~done), again, (out, mass, root))
    # The weights of NaN are zero for most `alpha`: the sum must not be.
    return out, jnp.where(jnp.isnan(top), top, mass), threshold(root)


def _smallest_weight(
    driver: Any, model: QueryModel, y: Array, top: Array, guess: Array
) -> tuple[Array, Array]:
    """The lowest overlap of each support and its weight, for `alpha > 2`."""
    e, _ = exponent(model.separation, top)
    zero = jnp.zeros_like(top)

    def mass(t: Array, active: Array) -> Array:
        extra, rows = t[:, 0], active[:, 0]
        return driver.fold(_steep_mass, model, y, extra, zero, False, rows)[:, None]

    lowest = _steep.steep_support(
        mass, top[:, None], e, driver.repeat, guess=guess[:, None]
    )
    least, count = driver.fold(
        _least_of_support, model, y, lowest[:, 0], (zero + jnp.inf, zero), False
    )
    least = jnp.where(count > 0, least, top)

    def sums(w: Array, active: Array) -> tuple[Array, Array]:
        extra, rows = Threshold(least, w[:, 0]), active[:, 0]
        f, slope = driver.fold(_steep_sums, model, y, extra, (zero, zero), False, rows)
        return f[:, None], slope[:, None]

    weight = _steep.smallest_weight(
        sums, count[:, None], driver.count, e, driver.repeat
    )
    return least, weight[:, 0]


@jax.jit
def _lower_bound(model: QueryModel, largest: Array, second: Array):
    """A lower bound of the root, from the two largest overlaps of each group `(Q, G)`.

    The root of a part of the entries never exceeds the root of all entries.

    Returns:
      The maximum `(Q,)`; `alpha - 1`, `(Q, 1)`; the root `(Q, 1)`; whether the root is
      likely the root of all entries for most queries, that is, no three entries of a
      support share a group; and for `alpha > 2`, which has no root, a lower bound
      `(Q,)` of the lowest overlap of the support.
    """
    top = largest.max(-1)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    e, power = exponent(model.separation, top)
    z = jnp.concatenate([largest, second], axis=-1)
    u = relative(model, z, top)
    root = _root.root(u, e, jnp.zeros_like(top)[:, None], power)
    support = (1 + e * (u - root) > 0).sum(-1)
    likely = support.astype(top.dtype) ** 3 < largest.shape[-1] ** 2

    def mass(t: Array, active: Array) -> Array:
        del active
        x = relative(model, z, t[:, 0])
        return _steep.steep_mass(x, e).sum(-1, keepdims=True)

    scale = model.beta[:, None].astype(z.dtype)
    guess = _steep.steep_support(mass, top[:, None], e, lax.while_loop, scale)
    return top, e, root, jnp.mean(likely | (e[:, 0] > 1)) > 0.5, guess[:, 0]


def relative(model: QueryModel, z: Array, reference: Array) -> Array:
    """`beta (z - reference)`, exactly zero where `z` equals `reference`."""
    return model.beta[:, None].astype(z.dtype) * (z - reference[:, None])


def steep_relative(model: QueryModel, z: Array, reference: Array) -> Array:
    """`relative`, zero where the difference is rounding.

    The programs of different passes round matrix products differently. With a large
    `alpha`, a difference of that size would give a weight to a memory outside the
    support, or none to the lowest memory of the support.
    """
    difference = z - reference[:, None]
    rounding = 8 * float(jnp.finfo(z.dtype).eps) * jnp.abs(reference)[:, None]
    small = jnp.where(jnp.abs(difference) <= rounding, difference, 0.0)
    difference = difference - lax.stop_gradient(small)
    return model.beta[:, None].astype(z.dtype) * difference


def exponent(separation: Separation, like: Array) -> tuple[Array, Any]:
    """`alpha - 1` of each query `(Q, 1)`, and the method that takes its powers."""
    form = separation.form
    assert isinstance(form, Root)
    alpha = jnp.broadcast_to(jnp.asarray(form.alpha, like.dtype), like.shape)
    e = valid_alpha(alpha)[:, None] - 1
    return e, run_time_power(e) if form.power is None else form.power


def _gathered(model: QueryModel, carry: Any, axis: str) -> Any:
    del model
    return lax.all_gather(carry, axis, axis=1, tiled=True)


@across(_gathered)
def _two_largest(model, y, extra, carry, tile: Tile, update):
    """A step: the two largest overlaps of every group.

    The indices of a group's memories within a tile agree modulo the number of groups.
    """
    del extra, update
    _, z = tile.overlaps(model, y)
    largest, second = carry
    groups = largest.shape[-1]
    missing = -z.shape[-1] % groups
    z = jnp.pad(z, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    for part in jnp.split(z, z.shape[-1] // groups, axis=-1):
        second = jnp.maximum(second, jnp.minimum(largest, part))
        largest = jnp.maximum(largest, part)
    return largest, second


@across(total)
def _sums(model, y, extra, carry, tile: Tile, update):
    """A step: sums of the weights and of their slopes at a threshold."""
    del update
    _, z = tile.overlaps(model, y)
    p, slope = _weights_and_slopes(model, z, extra)
    return carry[0] + p.sum(-1), carry[1] + slope.sum(-1)


@across(total)
def _steep_mass(model, y, extra, carry, tile: Tile, update):
    """A step: sum of the weights if the overlap `extra` had weight zero."""
    del update
    _, z = tile.overlaps(model, y)
    e, _ = exponent(model.separation, carry)
    return carry + _steep.steep_mass(steep_relative(model, z, extra), e).sum(-1)


def _least_and_count(model: QueryModel, carry: Any, axis: str) -> Any:
    del model
    return lax.pmin(carry[0], axis), lax.psum(carry[1], axis)


@across(_least_and_count)
def _least_of_support(model, y, extra, carry, tile: Tile, update):
    """A step: the least overlap of a support, and the size of the support."""
    del update
    _, z = tile.overlaps(model, y)
    inside = (steep_relative(model, z, extra) >= 0) & (z > -jnp.inf)
    least = jnp.minimum(carry[0], jnp.where(inside, z, jnp.inf).min(-1))
    return least, carry[1] + inside.sum(-1, dtype=z.dtype)


@across(total)
def _steep_sums(model, y, extra, carry, tile: Tile, update):
    """A step: sums of the weights and of their slopes in the smallest weight."""
    del update
    _, z = tile.overlaps(model, y)
    least, weight = extra
    e, _ = exponent(model.separation, weight)
    x = steep_relative(model, z, least)
    p, slope = _steep.steep_sums(x, weight[:, None], e)
    return carry[0] + p.sum(-1), carry[1] + slope.sum(-1)


@across(total)
def weigh_tile(model, y, extra, carry, tile: Tile, update):
    """A step: sums of the averaged patterns and of the weights at a threshold."""
    keys, z = tile.overlaps(model, y)
    p, _ = _weights_and_slopes(model, z, extra)
    mass = p.sum(-1)
    out = lax.cond(  # a tile without support costs no product
        jnp.any(mass != 0),
        lambda: carry[0] + tile.weigh(p, keys, update).astype(carry[0].dtype),
        lambda: carry[0],
    )
    return out, carry[1] + mass


def _weights_and_slopes(model: QueryModel, z: Array, threshold: Threshold):
    """Weights at a threshold and their slopes in its shift."""
    reference, shift = threshold.reference, threshold.shift[:, None]
    e, power = exponent(model.separation, reference)
    x = relative(model, z, reference)

    def at(power: Power):
        if power is not Power.GENERAL:
            return exp_and_slope(x, shift, e, power)
        steep = e > 1

        def both():
            above = steep_relative(model, z, reference)
            sums = _steep.steep_sums(above, jnp.where(steep, shift, 1.0), e)
            plain = exp_and_slope(x, shift, e, power)
            return tuple(map(functools.partial(jnp.where, steep), sums, plain))

        return lax.cond(
            jnp.any(steep), both, lambda: tuple(exp_and_slope(x, shift, e, power))
        )

    return switch(power, at)
