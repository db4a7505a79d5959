"""The algorithms of streamed retrieval, each written once for both drivers."""

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

GROUPS = 512  # of memories, the two largest of which bound a threshold


class Plan(NamedTuple):
    """What is static: loop lengths, sizes of blocks, and the dtype of the result."""

    steps: int
    top: int
    tile: int
    queries: int
    block: int | None
    dtype: Any


class Model(NamedTuple):
    """How states are compared, with a `beta` and an `alpha` for each query.

    And `observed (Q, d)`, its known components, or None.
    """

    similarity: Similarity
    separation: Separation
    beta: Array
    observed: Array | None = None

    @property
    def own(self) -> tuple[Separation, Array, Array | None]:
        """What each query has of its own."""
        return self.separation, self.beta, self.observed

    def take(self, index: Any) -> "Model":
        """That of some of the queries."""
        return Model(self.similarity, *jax.tree.map(lambda x: x[index], self.own))


class Threshold(NamedTuple):
    """What weighs an overlap `z`: `x = beta (z - about) - shift`, `(Q,)` each.

    For an entmax of `alpha > 2`: the lowest overlap of the support, and its weight.

    In two parts, because the product of `beta` and the overlap that is `about` can be
    so large that nothing is left of `shift` in a sum of the two, or infinite.
    """

    about: Array
    shift: Array


class Tile(NamedTuple):
    """Some consecutive memories, the first of them number `start`."""

    memories: Array
    values: Array | None
    mask: Array | None
    start: Array

    def overlaps(self, model: Model, y: Array) -> tuple[Array, Array]:
        """Keys, and overlaps `(Q, T)`, `-inf` where masked."""
        keys = model.similarity.keys(self.memories)
        z = model.similarity.compare(keys, y, model.observed)
        return keys, z if self.mask is None else jnp.where(self.mask[None], z, -jnp.inf)

    def averaged(self, keys: Array, update: bool) -> Array:
        """What the weights average: an update the keys, the read-out the values."""
        if update:
            return keys
        return self.memories if self.values is None else self.values


def run_queries(
    driver: Any, plan: Plan, model: Model, query: Array
) -> tuple[Array, ...]:
    """State, largest weights and their memories for a block of queries `(Q, d)`."""
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
    """The state that follows from a weighted sum of keys: that of one such key."""
    one = jnp.ones((1,), mean.dtype)
    return jax.vmap(lambda key: similarity.combine(key[None], one))(mean)


def average(
    driver: Any, model: Model, y: Array, update: bool
) -> tuple[Array, Threshold]:
    """Weighted average `(Q, v)` of keys or values, and the threshold."""
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
    """Normalised average, and the threshold, from sums that refer to `top`."""
    safe = _safe(total)
    if isinstance(separation, Polynomial):
        about, shift = top * safe ** (1 / separation.degree), jnp.zeros_like(top)
    else:
        about, shift = jnp.where(top == -jnp.inf, 0.0, top), jnp.log(safe)
    return out / safe[:, None], Threshold(about, shift)


def _safe(total: Array) -> Array:
    return jnp.where(total == 0, 1.0, total)


def online(model: Model, y: Array, extra: Any, carry: Any, tile: Tile, update: bool):
    """Sums of the weights, and of what they average, about an overlap seen before."""
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

    # Few tiles hold much larger overlaps than those before: a pass less for the others.
    # Products with values stay finite up to the range of the dtype less this.
    largest = float(jnp.finfo(averaged.dtype).max) ** 0.25
    return lax.cond(jnp.all(mass < largest), about_top, about_larger)


def _exp2(x: Array) -> Array:
    """`2^x`; on a CPU in half the operations that XLA takes for it."""
    if x.dtype != jnp.float32:
        return jnp.exp2(x)
    return lax.platform_dependent(x, cpu=_short_exp2, default=jnp.exp2)


def _short_exp2(x: Array) -> Array:
    """`2^n 2^f`, `|f| <= 1/2`, by a polynomial; right to 3e-7, zero below `2^-126`.

    Above `2^127` that; NaN stays.
    """
    x = jnp.clip(x, -127.0, 127.0)
    n = jnp.round(x)
    f = x - n
    p = jnp.full_like(f, 1.32647269e-03)
    for c in (9.67151266e-03, 5.55073374e-02, 2.40222421e-01, 6.93146978e-01, 1.0):
        p = p * f + c
    # The bits of `2^n`; those of n = -127 are zero, and so is the float.
    power = (n.astype(jnp.int32) + 127) << 23
    return p * lax.bitcast_convert_type(power, jnp.float32)


def _entmax_sums(
    driver: Any, model: Model, y: Array, start: tuple[Array, Array], update: bool
) -> tuple[Array, Array, Threshold]:
    """Sums of the weights and of what they average, and the threshold."""
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

    # Newton's steps square the error: the pass that would only find that the last one
    # was right is the one that weighs.
    ahead = jnp.sqrt(2 * limit)  # half the square is what one leaves, at most
    root = driver.when(~likely, lambda: climb(lower, ahead=ahead), lower)
    out, total = weigh_at(root)
    done = steep[:, None] | (total - 1 <= limit)[:, None]

    def again() -> tuple[Array, Array, Array]:
        finer = climb(root, ~done)
        found = weigh_at(finer, ~done[:, 0])
        kept = jnp.where(done, out, found[0])
        return kept, jnp.where(done[:, 0], total, found[1]), finer

    out, total, root = driver.when(jnp.any(~done), again, (out, total, root))
    return out, total, threshold(root)


def _smallest_weight(
    driver: Any, model: Model, y: Array, top: Array, guess: Array
) -> tuple[Array, Array]:
    """The lowest overlap of each support and its weight, where `alpha` exceeds 2."""
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
def _lower_bound(model: Model, largest: Array, second: Array):
    """The root of some of the entries is never above that of all.

    Returns the maximum, `alpha - 1`, the root, and whether that is likely the root of
    all entries for most queries: if no three entries of a support share a group. And
    for `alpha > 2`, which has no root, the lowest overlap that could be in the support.
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


def _relative(model: Model, z: Array, about: Array) -> Array:
    """`beta (z - about)`, which is zero where they are equal and never overflows up."""
    return model.beta[:, None].astype(z.dtype) * (z - about[:, None])


def _steep_relative(model: Model, z: Array, about: Array) -> Array:
    """`_relative`, zero where the difference is rounding.

    Programs of different passes round a product of matrices differently, and of that a
    large `alpha` would make a weight, or of the lowest of a support none.
    """
    difference = z - about[:, None]
    rounding = 8 * float(jnp.finfo(z.dtype).eps) * jnp.abs(about)[:, None]
    small = jnp.where(jnp.abs(difference) <= rounding, difference, 0.0)
    difference = difference - lax.stop_gradient(small)
    return model.beta[:, None].astype(z.dtype) * difference


def _exponent(separation: Any, like: Array) -> tuple[Array, Any]:
    """`alpha - 1` of each query `(Q, 1)`, and how powers are taken."""
    if isinstance(separation, Sparsemax):
        return jnp.ones_like(like)[:, None], Power.LINEAR
    e = valid_alpha(separation.alpha)[:, None] - 1
    power = separation.power
    return e, run_time_power(e) if power is None else Power(power)


def _two_largest(model, y, extra, carry, tile: Tile, update):
    """The two largest of every group: memories whose numbers agree modulo `groups`."""
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
    """Sums of the weights and of their slopes at a threshold."""
    del update
    _, z = tile.overlaps(model, y)
    p, slope = _weights_and_slopes(model, z, extra)
    return carry[0] + p.sum(-1), carry[1] + slope.sum(-1)


def _steep_mass(model, y, extra, carry, tile: Tile, update):
    """Sum of what the overlaps above one have of the weights, should that have none."""
    del update
    _, z = tile.overlaps(model, y)
    e, _ = _exponent(model.separation, carry)
    return carry + _entmax.steep_mass(_steep_relative(model, z, extra), e).sum(-1)


def _least_of_support(model, y, extra, carry, tile: Tile, update):
    """The least overlap of a support, and how many are in it."""
    del update
    _, z = tile.overlaps(model, y)
    inside = (_steep_relative(model, z, extra) >= 0) & (z > -jnp.inf)
    least = jnp.minimum(carry[0], jnp.where(inside, z, jnp.inf).min(-1))
    return least, carry[1] + inside.sum(-1, dtype=z.dtype)


def _steep_sums(model, y, extra, carry, tile: Tile, update):
    """Sums of the weights and of their slopes in the smallest."""
    del update
    _, z = tile.overlaps(model, y)
    least, weight = extra
    e, _ = _exponent(model.separation, weight)
    x = _steep_relative(model, z, least)
    p, slope = _entmax.steep_sums(x, weight[:, None], e)
    return carry[0] + p.sum(-1), carry[1] + slope.sum(-1)


def weigh_tile(model, y, extra, carry, tile: Tile, update):
    """Sums of the weights at a threshold, and of what they average."""
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


def _weights_and_slopes(model: Model, z: Array, threshold: Threshold):
    """Weights at a threshold and their slopes in its shift."""
    about, shift = threshold.about, threshold.shift[:, None]
    e, power = _exponent(model.separation, about)
    x = _relative(model, z, about)

    def at(power: Power):
        if power is not Power.GENERAL:
            return exp_and_slope(x, shift, e, power)
        steep = e > 1

        def both():
            above = _steep_relative(model, z, about)
            found = _entmax.steep_sums(above, jnp.where(steep, shift, 1.0), e)
            plain = exp_and_slope(x, shift, e, power)
            return tuple(map(functools.partial(jnp.where, steep), found, plain))

        return lax.cond(
            jnp.any(steep), both, lambda: tuple(exp_and_slope(x, shift, e, power))
        )

    return switch(power, at)


def _average_of_largest(driver: Any, model: Model, y: Array, update: bool):
    """`TopK`: softmax over the `k` largest, whose patterns are fetched."""
    best, index = _largest(driver, model, y, model.separation.k)  # type: ignore
    return _softmax_of(model, y, driver.take(index), best != -jnp.inf, update)


@functools.partial(jax.jit, static_argnames="update")
def _softmax_of(model: Model, y: Array, fetched: Any, valid: Array, update: bool):
    def row(y, own, memories, values, valid):
        memories = jnp.where(valid[:, None], memories, 0.0)
        if values is not None:
            values = jnp.where(valid[:, None], values, 0.0)
        tile = Tile(memories, values, valid, jnp.zeros((), jnp.int32))
        one = Model(model.similarity, *jax.tree.map(lambda x: x[None], own))
        keys, z = tile.overlaps(one, y[None])
        about = largest_valid(z, valid[None])
        z = scaled_about(z, about, one.beta.astype(z.dtype), valid[None])[0]
        out = weigh(Softmax()(z), tile.averaged(keys, update))
        threshold = Threshold(about[0], Softmax().conjugate(z))
        return out.astype(y.dtype), threshold

    memories, values = fetched
    return jax.vmap(row)(y, model.own, memories, values, valid)


def _largest(driver: Any, model: Model, y: Array, k: int) -> tuple[Array, Array]:
    """The `k` largest overlaps of each query and their memories; ties to the lower."""
    best = jnp.full_like(y, -jnp.inf, shape=(y.shape[0], k))
    index = jnp.full_like(y, 0, jnp.int32, shape=(y.shape[0], k))
    return driver.fold(_merge, model, y, (), (best, index), False)


def _merge(model, y, extra, carry, tile: Tile, update):
    """Merges a tile into the largest so far, if it has anything to add."""
    del extra, update
    best, index = carry
    _, z = tile.overlaps(model, y)

    def merged():
        k = best.shape[-1]
        found, place = lax.top_k(jnp.concatenate([best, z], axis=-1), k)
        old = jnp.take_along_axis(index, jnp.minimum(place, k - 1), axis=-1)
        return found, jnp.where(place < k, old, tile.start + place - k)

    return lax.cond(jnp.all(z.max(-1) <= best[:, -1]), lambda: carry, merged)


@jax.jit
def _top_weights(model: Model, z: Array, threshold: Threshold) -> Array:
    """Weights of the largest overlaps; those of `TopK` end at its `k`."""
    p = weights_of(model, z, threshold)
    if isinstance(model.separation, TopK):
        p = jnp.where(jnp.arange(z.shape[-1])[None] < model.separation.k, p, 0.0)
    return p


def weights_of(model: Model, z: Array, threshold: Threshold) -> Array:
    """Weights `(Q, T)` of overlaps at the threshold of their query."""
    separation, (about, shift) = model.separation, threshold
    if isinstance(separation, Polynomial):
        return rectified_power(z, about[:, None], separation.degree)
    # What is infinite would be NaN in the gradient of `beta`.
    masked = z == -jnp.inf
    seen = jnp.where(masked, about[:, None], z)
    above = jnp.where(masked, -jnp.inf, _relative(model, seen, about))
    # Fixed while `beta` moves is `beta about + shift`: the product is zero, its slope
    # is not.
    beta = model.beta.astype(z.dtype)
    x = above - (shift - (beta - lax.stop_gradient(beta)) * about)[:, None]
    if not isinstance(separation, Sparsemax | Entmax):
        return jnp.exp(x)
    e, power = _exponent(separation, about)

    def at(power: Power) -> Array:
        plain = weights_at(x, e, power)
        if power is not Power.GENERAL:
            return plain
        steep = e > 1
        weight = jnp.where(steep, shift[:, None], 1.0)

        def both() -> Array:
            above = _steep_relative(model, seen, about)
            p = steep_weights_at(jnp.where(masked, -jnp.inf, above), weight, e)
            return jnp.where(steep, p, plain)

        return lax.cond(jnp.any(steep), both, lambda: plain)

    return switch(power, at)


def check_values(values: tuple[int, ...], memories: tuple[int, ...]) -> None:
    if len(values) != 2 or values[0] != memories[0]:
        raise ValueError(
            f"values have shape {values}, memories {memories}: all axes but the last "
            "must agree"
        )


def check_numbers(separation: Separation, top: int, length: int | None) -> None:
    """Refuses to look for more memories than there are."""
    for name, k in (("k", getattr(separation, "k", 0)), ("top", top)):
        check_count(name, k, 0, length)
