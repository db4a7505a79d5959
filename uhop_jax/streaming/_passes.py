"""The algorithms of streamed retrieval, each written once for both drivers.

A driver has loops, branches and passes (`_device.OnDevice`, `_host._OnHost`). A pass,
`driver.fold(step, model, y, extra, carry, update)`, calls a step on every tile of
memories:

    carry = step(model, y, extra, carry, tile, update)

`y (Q, d)` holds the states of a block of queries, `extra` the constants of the pass.
`update` is true for an update of the states, which averages keys, and false for the
read-out, which averages values.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax._checks import check_count, working_dtype
from uhop_jax.separation import Separation, Softmax
from uhop_jax.separation._entmax import steep_weights_at, weights_at
from uhop_jax.separation._root import Power, switch
from uhop_jax.separation.base import largest_valid, scaled_about
from uhop_jax.separation.forms import (
    Exponential,
    Largest,
    Powers,
    Root,
    Whole,
    rectified_power,
)
from uhop_jax.similarity import Similarity
from uhop_jax.streaming._supports import entmax_sums, exponent, relative, steep_relative
from uhop_jax.streaming._tiles import (
    PatternTile,
    Plan,
    QueryModel,
    Threshold,
    Tile,
    across,
)


def run_queries(
    driver: Any, plan: Plan, model: QueryModel, query: Array
) -> tuple[Array, ...]:
    """States, largest weights and the indices of their memories: fields of `Streamed`.

    `query (Q, d)` is a block of queries.
    """
    similarity = model.similarity
    y = similarity.state(query, model.observed)
    y = y.astype(working_dtype(y))
    for _ in range(plan.steps - 1):
        mean, _ = driver.average(model, y, True)
        y = _next_state(similarity, mean).astype(y.dtype)
    state, threshold = driver.average(model, y, False)
    shape = y.shape[0], plan.top
    weights, index = jnp.zeros(shape, y.dtype), jnp.zeros(shape, jnp.int32)
    if plan.top and isinstance(model.separation.form, Whole):
        weights, index = _top(threshold, plan.top)
    elif plan.top:
        overlaps, index = _largest(driver, model, y, plan.top)
        weights = _top_weights(model, overlaps, threshold)
    return state.astype(plan.dtype), weights.astype(plan.dtype), index


@jax.jit
def _next_state(similarity: Similarity, mean: Array) -> Array:
    """The next states from weighted averages of keys, each combined as one key."""
    one = jnp.ones((1,), mean.dtype)
    return jax.vmap(lambda key: similarity.combine(key[None], one))(mean)


def average(
    driver: Any, model: QueryModel, y: Array, update: bool
) -> tuple[Array, Any]:
    """Weighted average `(Q, v)` of keys or values, and the threshold of each query.

    The form `Whole` has no threshold, and gives all weights `(Q, M)` in its place.
    """
    form = model.separation.form
    if isinstance(form, Largest):
        return _average_of_largest(driver, model, y, update)
    if isinstance(form, Whole):
        return _average_of_all(driver, model, y, update)
    zero = jnp.full_like(y, 0, shape=y.shape[:1])
    out = jnp.full_like(y, 0, shape=(y.shape[0], driver.width(y, update)))
    if isinstance(form, Root):
        out, total, threshold = entmax_sums(driver, model, y, (out, zero), update)
        return out / _safe(total)[:, None], threshold
    null = isinstance(form, Exponential) and form.null
    top = zero if null or isinstance(form, Powers) else zero - jnp.inf
    total = zero + driver.once if null else zero
    out, total, top = driver.fold(online, model, y, (), (out, total, top), update)
    return _finished(model, out, total, top)


@jax.jit
def _finished(model: QueryModel, out: Array, total: Array, top: Array):
    """Normalised average, and the threshold, from sums relative to `top`."""
    safe, form = _safe(total), model.separation.form
    if isinstance(form, Powers):
        degree = form.degree
        # The scale of the overlaps has no effect, but NaN is no scale.
        safe = jnp.where(jnp.isnan(model.beta), jnp.nan, safe)
        reference, shift = top * safe ** (1 / degree), jnp.zeros_like(top)
    else:
        reference, shift = jnp.where(top == -jnp.inf, 0.0, top), jnp.log(safe)
    return out / safe[:, None], Threshold(reference, shift)


def _safe(total: Array) -> Array:
    """A sum of weights as a divisor: one in place of zero."""
    return jnp.where(total == 0, 1.0, total)


def _about_one_top(model: QueryModel, carry: Any, axis: str) -> Any:
    out, total, top = carry
    form, new = model.separation.form, lax.pmax(top, axis)
    if isinstance(form, Powers):
        scale = rectified_power(top, new, form.degree)
    else:
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        scale = jnp.exp(model.beta.astype(top.dtype) * (top - safe))
    return lax.psum(out * scale[:, None], axis), lax.psum(total * scale, axis), new


@across(_about_one_top)
def online(
    model: QueryModel, y: Array, extra: Any, carry: Any, tile: Tile, update: bool
):
    """A step: sums of the averaged patterns and of the weights, relative to `top`.

    The carry is `(out, total, top)`; `top` is an earlier overlap, and need not be the
    largest.
    """
    out, total, top = carry
    form = model.separation.form
    if isinstance(form, Powers):
        keys, z = tile.overlaps(model, y)
        new = jnp.maximum(top, z.max(-1))
        degree = form.degree
        e = rectified_power(z, new[:, None], degree)
        scale = rectified_power(top, new, degree)
        part = tile.weigh(e, keys, update).astype(out.dtype)
        return out * scale[:, None] + part, total * scale + e.sum(-1), new
    keys, z = tile.overlaps(model, y)
    unit = model.beta.astype(z.dtype) / math.log(2)
    e = jnp.exp2(unit[:, None] * (z - top[:, None]))
    mass = e.sum(-1)

    def about_top() -> Any:
        return out + tile.weigh(e, keys, update).astype(out.dtype), total + mass, top

    def about_larger() -> Any:
        new = jnp.maximum(top, z.max(-1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        e = jnp.exp2(unit[:, None] * (z - safe[:, None]))
        scale = jnp.exp2(unit * (top - safe))
        part = tile.weigh(e, keys, update).astype(out.dtype)
        return out * scale[:, None] + part, total * scale + e.sum(-1), new

    # Few tiles have much larger overlaps than earlier tiles. The other tiles need no
    # second pass over the overlaps. A mass below the bound leaves products with values
    # finite.
    largest = float(jnp.finfo(tile.dtype).max) ** 0.25
    return lax.cond(jnp.all(mass < largest), about_top, about_larger)


def _average_of_all(driver: Any, model: QueryModel, y: Array, update: bool):
    """`Whole`: the average, and all weights `(Q, M)` in place of a threshold."""
    z = driver.overlaps(model, y)
    weights = weights_of_rows(model.separation, z, model.beta)
    return driver.weighted(weights, model, y, update), weights


@jax.jit
def weights_of_rows(separation: Separation, z: Array, beta: Array) -> Array:
    """Weights `(Q, M)`, with parameters for each query."""

    def row(separation: Separation, z: Array, beta: Array) -> Array:
        return separation.tempered(z, beta, where=~(z == -jnp.inf))  # NaN counts

    return jax.vmap(row)(separation, z, beta)


def collect(model, y, extra, carry, tile: Tile, update):
    """A step: the overlaps of a tile written to their place among all."""
    del extra, update
    _, z = tile.overlaps(model, y)
    # The last tile overlaps the tile before it, with these entries at `-inf`.
    before = lax.dynamic_slice_in_dim(carry, tile.start, z.shape[-1], axis=1)
    z = jnp.maximum(before, z.astype(carry.dtype))
    return lax.dynamic_update_slice_in_dim(carry, z, tile.start, axis=1)


def weigh_given(model, y, extra, carry, tile: Tile, update):
    """A step: the sum of the averaged patterns under the weights `extra (Q, M)`."""
    keys, z = tile.overlaps(model, y)
    p = lax.dynamic_slice_in_dim(extra, tile.start, z.shape[-1], axis=1)
    p = jnp.where(z == -jnp.inf, 0.0, p)
    return carry + tile.weigh(p, keys, update).astype(carry.dtype)


def _average_of_largest(driver: Any, model: QueryModel, y: Array, update: bool):
    """`TopK`: softmax over the `k` largest overlaps, whose patterns are fetched."""
    form = model.separation.form
    assert isinstance(form, Largest)
    best, index = _largest(driver, model, y, form.k)
    return _softmax_of(model, y, driver.take(index), best != -jnp.inf, update)


@functools.partial(jax.jit, static_argnames="update")
def _softmax_of(model: QueryModel, y: Array, fetched: Any, valid: Array, update: bool):
    """Average and threshold of fetched patterns `(Q, k, d)`, `valid (Q, k)`."""

    def row(y, per_query, memories, values, valid):
        memories = jnp.where(valid[:, None], memories, 0.0)
        if values is not None:
            values = jnp.where(valid[:, None], values, 0.0)
        parts, start = (memories, values), jnp.zeros((), jnp.int32)
        tile = PatternTile(parts, valid, start, memories.dtype)
        one = model.with_rows(jax.tree.map(lambda x: x[None], per_query))
        keys, z = tile.overlaps(one, y[None])
        reference = largest_valid(z, valid[None])
        z = scaled_about(z, reference, one.beta.astype(z.dtype), valid[None])[0]
        out = tile.weigh(Softmax()(z), keys, update)
        threshold = Threshold(reference[0], Softmax().conjugate(z))
        return out.astype(y.dtype), threshold

    memories, values = fetched
    return jax.vmap(row)(y, model.per_query, memories, values, valid)


def _largest(driver: Any, model: QueryModel, y: Array, k: int) -> tuple[Array, Array]:
    """The `k` largest overlaps of each query and their indices `(Q, k)`.

    Of equal overlaps the lower index comes first.
    """
    best = jnp.full_like(y, -jnp.inf, shape=(y.shape[0], k))
    index = jnp.full_like(y, 0, jnp.int32, shape=(y.shape[0], k))
    return driver.fold(_merge, model, y, (), (best, index), False)


def _merge(model, y, extra, carry, tile: Tile, update):
    """A step: merges the overlaps of a tile into the largest so far."""
    del extra, update
    best, index = carry
    _, z = tile.overlaps(model, y)

    def merged():
        k = best.shape[-1]
        largest, place = _top(jnp.concatenate([best, z], axis=-1), k)
        old = jnp.take_along_axis(index, jnp.minimum(place, k - 1), axis=-1)
        return largest, jnp.where(place < k, old, tile.start + place - k)

    return lax.cond(jnp.all(z.max(-1) <= best[:, -1]), lambda: carry, merged)


def _top(z: Array, k: int) -> tuple[Array, Array]:
    """The `k` largest entries and their places; NaN of either sign is the largest."""
    largest, place = lax.top_k(jnp.where(jnp.isnan(z), jnp.nan, z), k)
    return largest, place


@jax.jit
def _top_weights(model: QueryModel, z: Array, threshold: Threshold) -> Array:
    """Weights of the largest overlaps, in falling order; zero after `TopK`'s `k`."""
    p, form = weights_of(model, z, threshold), model.separation.form
    if isinstance(form, Largest):
        p = jnp.where(jnp.arange(z.shape[-1])[None] < form.k, p, 0.0)
    return p


def weights_of(model: QueryModel, z: Array, threshold: Threshold) -> Array:
    """Weights `(Q, T)` of overlaps at the threshold of their query."""
    separation, (reference, shift) = model.separation, threshold
    form = separation.form
    if isinstance(form, Powers):
        return rectified_power(z, reference[:, None], form.degree)
    # An infinite overlap would make the gradient of `beta` NaN.
    masked = z == -jnp.inf
    finite = jnp.where(masked, reference[:, None], z)
    above = jnp.where(masked, -jnp.inf, relative(model, finite, reference))
    # The derivative in `beta` holds `beta reference + shift` fixed. The product below
    # is zero, and its derivative in `beta` is not.
    beta = model.beta.astype(z.dtype)
    x = above - (shift - (beta - lax.stop_gradient(beta)) * reference)[:, None]
    if not isinstance(form, Root):
        return jnp.exp(x)
    e, power = exponent(separation, reference)

    def at(power: Power) -> Array:
        plain = weights_at(x, e, power)
        if power is not Power.GENERAL:
            return plain
        steep = e > 1
        weight = jnp.where(steep, shift[:, None], 1.0)

        def both() -> Array:
            above = steep_relative(model, finite, reference)
            p = steep_weights_at(jnp.where(masked, -jnp.inf, above), weight, e)
            return jnp.where(steep, p, plain)

        return lax.cond(jnp.any(steep), both, lambda: plain)

    return switch(power, at)


def check_values(values: tuple[int, ...], memories: tuple[int, ...]) -> None:
    """Refuses values whose shape does not match the shape of the memories."""
    if len(values) != 2 or values[0] != memories[0]:
        raise ValueError(
            f"values have shape {values}, memories {memories}: all axes but the last "
            "must agree"
        )


def check_numbers(separation: Separation, top: int, length: int | None) -> None:
    """Refuses a `k` or a `top` above the number of memories, if that is known."""
    if isinstance(separation.form, Largest):
        check_count("k", separation.form.k, 1, length)
    check_count("top", top, 0, length)
