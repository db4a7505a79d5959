"""The algorithms of streamed retrieval, each written once for both drivers.

A driver has loops, branches and passes (`_device._OnDevice`, `_host._OnHost`). A pass,
`driver.fold(step, model, y, extra, carry, update)`, calls a step on every tile of
memories:

    carry = step(model, y, extra, carry, tile, update)

`y (Q, d)` holds the states of a block of queries, `extra` the constants of the pass.
`update` is true for an update of the states, which averages keys, and false for the
read-out, which averages values.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax import _entmax
from uhop_jax._checks import check_count, working_dtype
from uhop_jax._entmax import (
    Power,
    exp_and_slope,
    run_time_power,
    steep_weights_at,
    switch,
    weights_at,
)
from uhop_jax._products import weigh
from uhop_jax.model import Model
from uhop_jax.separation import (
    Entmax,
    Polynomial,
    Separation,
    Softmax,
    Softmax1,
    Sparsemax,
    TopK,
    largest_valid,
    rectified_power,
    scaled_about,
    valid_alpha,
)
from uhop_jax.similarity import Similarity

GROUPS = 512  # groups of memories, whose two largest overlaps bound a threshold


class Plan(NamedTuple):
    """Static options of a retrieval.

    Attributes:
      steps: number of updates.
      top: number of largest weights to report.
      tile: memories in a tile.
      queries: queries in a block.
      block: memories in a block of the host, or None.
      dtype: dtype of the result.
    """

    steps: int
    top: int
    tile: int
    queries: int
    block: int | None
    dtype: Any


class QueryModel(Model):
    """A model with parameters `(Q,)`, one for each query of a block.

    Attributes:
      beta: `(Q,)`.
      observed: `(Q, d)`, true for known components of the queries, or None.
    """

    beta: Array = dataclasses.field(kw_only=True)
    observed: Array | None = None

    @property
    def per_query(self) -> tuple[Separation, Array, Array | None]:
        """Separation, beta and observed, which have a row for each query."""
        return self.separation, self.beta, self.observed

    def with_rows(self, per_query: tuple[Separation, Array, Any]) -> "QueryModel":
        """The model with other queries' separation, beta and observed."""
        separation, beta, observed = per_query
        return QueryModel(self.similarity, separation, observed, beta=beta)

    def take(self, index: Any) -> "QueryModel":
        """The model of the queries at `index`."""
        return self.with_rows(jax.tree.map(lambda x: x[index], self.per_query))


class Threshold(NamedTuple):
    """The threshold of each query, in two parts `(Q,)`.

    The weight of an overlap `z` is a function of `beta (z - reference) - shift`. For an
    entmax of `alpha > 2`, `reference` is the lowest overlap of the support, and `shift`
    its weight.

    The sum `beta reference + shift` would not do: `beta reference` can be infinite, or
    so large that `shift` is lost in rounding.
    """

    reference: Array
    shift: Array


class Tile(NamedTuple):
    """Consecutive memories `(T, d)`, the first with index `start`.

    Values `(T, v)` and the mask `(T,)` may be None.
    """

    memories: Array
    values: Array | None
    mask: Array | None
    start: Array

    def overlaps(self, model: QueryModel, y: Array) -> tuple[Array, Array]:
        """Keys, and overlaps `(Q, T)`, `-inf` where masked."""
        keys = model.similarity.keys(self.memories)
        z = model.overlaps(keys, y, model.observed)
        return keys, z if self.mask is None else jnp.where(self.mask[None], z, -jnp.inf)

    def averaged(self, keys: Array, update: bool) -> Array:
        """The patterns to average: keys in an update, else values or memories."""
        if update:
            return keys
        return self.memories if self.values is None else self.values


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
    if plan.top:
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
) -> tuple[Array, Threshold]:
    """Weighted average `(Q, v)` of keys or values, and the threshold of each query."""
    separation = model.separation
    if isinstance(separation, TopK):
        return _average_of_largest(driver, model, y, update)
    zero = jnp.full_like(y, 0, shape=y.shape[:1])
    out = jnp.full_like(y, 0, shape=(y.shape[0], driver.width(y, update)))
    if isinstance(separation, Sparsemax | Entmax):
        out, total, threshold = _entmax_sums(driver, model, y, (out, zero), update)
        return out / _safe(total)[:, None], threshold
    top = zero if isinstance(separation, Softmax1 | Polynomial) else zero - jnp.inf
    total = zero + 1 if isinstance(separation, Softmax1) else zero
    out, total, top = driver.fold(online, model, y, (), (out, total, top), update)
    return _finished(separation, out, total, top)


@jax.jit
def _finished(separation: Separation, out: Array, total: Array, top: Array):
    """Normalised average, and the threshold, from sums relative to `top`."""
    safe = _safe(total)
    if isinstance(separation, Polynomial):
        reference, shift = top * safe ** (1 / separation.degree), jnp.zeros_like(top)
    else:
        reference, shift = jnp.where(top == -jnp.inf, 0.0, top), jnp.log(safe)
    return out / safe[:, None], Threshold(reference, shift)


def _safe(total: Array) -> Array:
    """A sum of weights as a divisor: one in place of zero."""
    return jnp.where(total == 0, 1.0, total)


def online(
    model: QueryModel, y: Array, extra: Any, carry: Any, tile: Tile, update: bool
):
    """A step: sums of the averaged patterns and of the weights, relative to `top`.

    The carry is `(out, total, top)`; `top` is an earlier overlap, and need not be the
    largest.
    """
    out, total, top = carry
    if isinstance(model.separation, Polynomial):
        keys, z = tile.overlaps(model, y)
        new = jnp.maximum(top, z.max(-1))
        degree = model.separation.degree
        e = rectified_power(z, new[:, None], degree)
        scale = rectified_power(top, new, degree)
        part = weigh(e, tile.averaged(keys, update)).astype(out.dtype)
        return out * scale[:, None] + part, total * scale + e.sum(-1), new
    keys, z = tile.overlaps(model, y)
    averaged = tile.averaged(keys, update)
    unit = model.beta.astype(z.dtype) / math.log(2)
    e = _exp2(unit[:, None] * (z - top[:, None]))
    mass = e.sum(-1)

    def about_top() -> Any:
        return out + weigh(e, averaged).astype(out.dtype), total + mass, top

    def about_larger() -> Any:
        new = jnp.maximum(top, z.max(-1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        e = _exp2(unit[:, None] * (z - safe[:, None]))
        scale = jnp.exp2(unit * (top - safe))
        part = weigh(e, averaged).astype(out.dtype)
        return out * scale[:, None] + part, total * scale + e.sum(-1), new

    # Few tiles have much larger overlaps than earlier tiles. The other tiles need no
    # second pass over the overlaps. A mass below the bound leaves products with values
    # finite.
    largest = float(jnp.finfo(averaged.dtype).max) ** 0.25
    return lax.cond(jnp.all(mass < largest), about_top, about_larger)


def _exp2(x: Array) -> Array:
    """`2^x`; on a CPU with half the operations of XLA's `exp2`."""
    if x.dtype != jnp.float32:
        return jnp.exp2(x)
    return lax.platform_dependent(x, cpu=_short_exp2, default=jnp.exp2)


def _short_exp2(x: Array) -> Array:
    """`2^x` as `2^n 2^f` with `|f| <= 1/2`, by a polynomial in `f`.

    The relative error is at most 3e-7. The result is zero below `2^-126`, `2^127` above
    `2^127`, and NaN for NaN.
    """
    x = jnp.clip(x, -127.0, 127.0)
    n = jnp.round(x)
    f = x - n
    p = jnp.full_like(f, 1.32647269e-03)
    for c in (9.67151266e-03, 5.55073374e-02, 2.40222421e-01, 6.93146978e-01, 1.0):
        p = p * f + c
    # The bits of the float `2^n`; for n = -127 all bits are zero, and so is the float.
    power = (n.astype(jnp.int32) + 127) << 23
    return p * lax.bitcast_convert_type(power, jnp.float32)


def _entmax_sums(
    driver: Any, model: QueryModel, y: Array, start: tuple[Array, Array], update: bool
) -> tuple[Array, Array, Threshold]:
    """Sums of the averaged patterns and of the weights, and the threshold."""
    none = jnp.full_like(y, -jnp.inf, shape=(y.shape[0], driver.groups))
    largest = driver.fold(_two_largest, model, y, (), (none, none), False)
    top, e, lower, likely, guess = _lower_bound(model, *largest)
    limit = _entmax.tolerance(driver.count, y.dtype)
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
        return _entmax.find_root(
            sums, driver.count, e, root, driver.repeat, active, ahead
        )

    # A Newton step leaves at most half the square of the error. The last step has no
    # separate pass to check it: the pass for the weighted sum does.
    ahead = jnp.sqrt(2 * limit)
    root = driver.when(~likely, lambda: climb(lower, ahead=ahead), lower)
    out, total = weigh_at(root)
    done = steep[:, None] | (total - 1 <= limit)[:, None]

    def again() -> tuple[Array, Array, Array]:
        finer = climb(root, ~done)
        finer_out, finer_total = weigh_at(finer, ~done[:, 0])
        merged = jnp.where(done, out, finer_out)
        return merged, jnp.where(done[:, 0], total, finer_total), finer

    out, total, root = driver.when(jnp.any(~done), again, (out, total, root))
    return out, total, threshold(root)


def _smallest_weight(
    driver: Any, model: QueryModel, y: Array, top: Array, guess: Array
) -> tuple[Array, Array]:
    """The lowest overlap of each support and its weight, for `alpha > 2`."""
    e, _ = _exponent(model.separation, top)
    zero = jnp.zeros_like(top)

    def mass(t: Array, active: Array) -> Array:
        extra, rows = t[:, 0], active[:, 0]
        return driver.fold(_steep_mass, model, y, extra, zero, False, rows)[:, None]

    lowest = _entmax.steep_support(
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

    weight = _entmax.smallest_weight(
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
    e, power = _exponent(model.separation, top)
    z = jnp.concatenate([largest, second], axis=-1)
    u = _relative(model, z, top)
    root = _entmax.root(u, e, jnp.zeros_like(top)[:, None], power)
    support = (1 + e * (u - root) > 0).sum(-1)
    likely = support.astype(top.dtype) ** 3 < largest.shape[-1] ** 2

    def mass(t: Array, active: Array) -> Array:
        del active
        x = _relative(model, z, t[:, 0])
        return _entmax.steep_mass(x, e).sum(-1, keepdims=True)

    scale = model.beta[:, None].astype(z.dtype)
    guess = _entmax.steep_support(mass, top[:, None], e, lax.while_loop, scale)
    return top, e, root, jnp.mean(likely | (e[:, 0] > 1)) > 0.5, guess[:, 0]


def _relative(model: QueryModel, z: Array, reference: Array) -> Array:
    """`beta (z - reference)`, exactly zero where `z` equals `reference`."""
    return model.beta[:, None].astype(z.dtype) * (z - reference[:, None])


def _steep_relative(model: QueryModel, z: Array, reference: Array) -> Array:
    """`_relative`, zero where the difference is rounding.

    The programs of different passes round matrix products differently. With a large
    `alpha`, a difference of that size would give a weight to a memory outside the
    support, or none to the lowest memory of the support.
    """
    difference = z - reference[:, None]
    rounding = 8 * float(jnp.finfo(z.dtype).eps) * jnp.abs(reference)[:, None]
    small = jnp.where(jnp.abs(difference) <= rounding, difference, 0.0)
    difference = difference - lax.stop_gradient(small)
    return model.beta[:, None].astype(z.dtype) * difference


def _exponent(separation: Any, like: Array) -> tuple[Array, Any]:
    """`alpha - 1` of each query `(Q, 1)`, and the method that takes its powers."""
    if isinstance(separation, Sparsemax):
        return jnp.ones_like(like)[:, None], Power.LINEAR
    e = valid_alpha(separation.alpha)[:, None] - 1
    power = separation.power
    return e, run_time_power(e) if power is None else Power(power)


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


def _sums(model, y, extra, carry, tile: Tile, update):
    """A step: sums of the weights and of their slopes at a threshold."""
    del update
    _, z = tile.overlaps(model, y)
    p, slope = _weights_and_slopes(model, z, extra)
    return carry[0] + p.sum(-1), carry[1] + slope.sum(-1)


def _steep_mass(model, y, extra, carry, tile: Tile, update):
    """A step: sum of the weights if the overlap `extra` had weight zero."""
    del update
    _, z = tile.overlaps(model, y)
    e, _ = _exponent(model.separation, carry)
    return carry + _entmax.steep_mass(_steep_relative(model, z, extra), e).sum(-1)


def _least_of_support(model, y, extra, carry, tile: Tile, update):
    """A step: the least overlap of a support, and the size of the support."""
    del update
    _, z = tile.overlaps(model, y)
    inside = (_steep_relative(model, z, extra) >= 0) & (z > -jnp.inf)
    least = jnp.minimum(carry[0], jnp.where(inside, z, jnp.inf).min(-1))
    return least, carry[1] + inside.sum(-1, dtype=z.dtype)


def _steep_sums(model, y, extra, carry, tile: Tile, update):
    """A step: sums of the weights and of their slopes in the smallest weight."""
    del update
    _, z = tile.overlaps(model, y)
    least, weight = extra
    e, _ = _exponent(model.separation, weight)
    x = _steep_relative(model, z, least)
    p, slope = _entmax.steep_sums(x, weight[:, None], e)
    return carry[0] + p.sum(-1), carry[1] + slope.sum(-1)


def weigh_tile(model, y, extra, carry, tile: Tile, update):
    """A step: sums of the averaged patterns and of the weights at a threshold."""
    keys, z = tile.overlaps(model, y)
    averaged = tile.averaged(keys, update)
    p, _ = _weights_and_slopes(model, z, extra)
    mass = p.sum(-1)
    out = lax.cond(  # a tile without support costs no product
        jnp.any(mass != 0),
        lambda: carry[0] + weigh(p, averaged).astype(carry[0].dtype),
        lambda: carry[0],
    )
    return out, carry[1] + mass


def _weights_and_slopes(model: QueryModel, z: Array, threshold: Threshold):
    """Weights at a threshold and their slopes in its shift."""
    reference, shift = threshold.reference, threshold.shift[:, None]
    e, power = _exponent(model.separation, reference)
    x = _relative(model, z, reference)

    def at(power: Power):
        if power is not Power.GENERAL:
            return exp_and_slope(x, shift, e, power)
        steep = e > 1

        def both():
            above = _steep_relative(model, z, reference)
            sums = _entmax.steep_sums(above, jnp.where(steep, shift, 1.0), e)
            plain = exp_and_slope(x, shift, e, power)
            return tuple(map(functools.partial(jnp.where, steep), sums, plain))

        return lax.cond(
            jnp.any(steep), both, lambda: tuple(exp_and_slope(x, shift, e, power))
        )

    return switch(power, at)


def _average_of_largest(driver: Any, model: QueryModel, y: Array, update: bool):
    """`TopK`: softmax over the `k` largest overlaps, whose patterns are fetched."""
    best, index = _largest(driver, model, y, model.separation.k)  # type: ignore
    return _softmax_of(model, y, driver.take(index), best != -jnp.inf, update)


@functools.partial(jax.jit, static_argnames="update")
def _softmax_of(model: QueryModel, y: Array, fetched: Any, valid: Array, update: bool):
    """Average and threshold of fetched patterns `(Q, k, d)`, `valid (Q, k)`."""

    def row(y, per_query, memories, values, valid):
        memories = jnp.where(valid[:, None], memories, 0.0)
        if values is not None:
            values = jnp.where(valid[:, None], values, 0.0)
        tile = Tile(memories, values, valid, jnp.zeros((), jnp.int32))
        one = model.with_rows(jax.tree.map(lambda x: x[None], per_query))
        keys, z = tile.overlaps(one, y[None])
        reference = largest_valid(z, valid[None])
        z = scaled_about(z, reference, one.beta.astype(z.dtype), valid[None])[0]
        out = weigh(Softmax()(z), tile.averaged(keys, update))
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
        largest, place = lax.top_k(jnp.concatenate([best, z], axis=-1), k)
        old = jnp.take_along_axis(index, jnp.minimum(place, k - 1), axis=-1)
        return largest, jnp.where(place < k, old, tile.start + place - k)

    return lax.cond(jnp.all(z.max(-1) <= best[:, -1]), lambda: carry, merged)


@jax.jit
def _top_weights(model: QueryModel, z: Array, threshold: Threshold) -> Array:
    """Weights of the largest overlaps, in falling order; zero after `TopK`'s `k`."""
    p = weights_of(model, z, threshold)
    if isinstance(model.separation, TopK):
        p = jnp.where(jnp.arange(z.shape[-1])[None] < model.separation.k, p, 0.0)
    return p


def weights_of(model: QueryModel, z: Array, threshold: Threshold) -> Array:
    """Weights `(Q, T)` of overlaps at the threshold of their query."""
    separation, (reference, shift) = model.separation, threshold
    if isinstance(separation, Polynomial):
        return rectified_power(z, reference[:, None], separation.degree)
    # An infinite overlap would make the gradient of `beta` NaN.
    masked = z == -jnp.inf
    finite = jnp.where(masked, reference[:, None], z)
    above = jnp.where(masked, -jnp.inf, _relative(model, finite, reference))
    # The derivative in `beta` holds `beta reference + shift` fixed. The product below
    # is zero, and its derivative in `beta` is not.
    beta = model.beta.astype(z.dtype)
    x = above - (shift - (beta - lax.stop_gradient(beta)) * reference)[:, None]
    if not isinstance(separation, Sparsemax | Entmax):
        return jnp.exp(x)
    e, power = _exponent(separation, reference)

    def at(power: Power) -> Array:
        plain = weights_at(x, e, power)
        if power is not Power.GENERAL:
            return plain
        steep = e > 1
        weight = jnp.where(steep, shift[:, None], 1.0)

        def both() -> Array:
            above = _steep_relative(model, finite, reference)
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
    for name, k in (("k", getattr(separation, "k", 0)), ("top", top)):
        check_count(name, k, 0, length)
