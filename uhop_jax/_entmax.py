r"""Entmax for every alpha, without sorting, and its derivatives in closed form.

With :math:`e = \alpha - 1` and :math:`u = z - \max z \le 0` the weights are

.. math:: p_i = \exp_e(u_i - s), \qquad \exp_e(x) = (1 + e x)_+^{1/e}

(:math:`\exp x` at `e = 0`), where `s >= 0` makes them sum to one. This is `tau = e s -
1` of Peters et al. 2019, in the variable that stays accurate as `alpha` tends to 1.
For `alpha > 2` a weight is a steep function of `s`, whose rounding would show in all
digits of it. There the unknown is the smallest weight `w` of the support, that of the
overlap :math:`z_\downarrow`:

.. math:: p_i = (w^e + e (z_i - z_\downarrow))^{1/e},

whose sum is convex and increasing in `w`, at a slope of at least one.

Overlaps are float32 or float64, those of masked entries `-inf`; `alpha` broadcasts
against them.
"""

import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from uhop_jax._pytree import varying_alike

# From this length on, the root is first bounded on the maxima of blocks of the row.
_BLOCKED_LENGTH = 2048
_BLOCKS = 256
_MAX_STEPS = 128
_SQRT_HALF = 0x3F3504F3  # the bits of sqrt(1/2) in float32
# `log1p(f) / f` for `1 + f` in [sqrt(1/2), sqrt(2)), to 3e-8: a polynomial fitted to
# the smallest largest relative error, highest power first. Half of the cost of
# `jnp.log1p`.
_LOG1P_RATIO = (
    *(0.08734751, -0.14307483, 0.14917989, -0.16570514, 0.19962071),
    *(-0.25001755, 0.33333951, -0.49999991, 1.0),
)


class Power(enum.IntEnum):
    """How `b^(1/e)` is computed; all but GENERAL need no transcendental function."""

    GENERAL = 0
    SQUARE = 1  # alpha = 1.5
    LINEAR = 2  # alpha = 2

    @classmethod
    def of(cls, alpha: np.ndarray) -> "Power":
        """The fastest that all of these allow."""
        if (alpha == 2).all():
            return cls.LINEAR
        return cls.SQUARE if (alpha == 1.5).all() else cls.GENERAL


def exp_and_slope(u: Array, s: Array, e: Array, power: Power) -> tuple[Array, Array]:
    """`p = exp_e(u - s)` and its derivative `p^(1 - e)`, both zero off the support."""
    if power is Power.LINEAR:
        p = jnp.maximum(u - (s - 1.0), 0.0)
        return p, jnp.ceil(p)  # 0 or 1; unlike a comparison, it vectorises
    if power is Power.SQUARE:
        root = jnp.maximum(0.5 * u - (0.5 * s - 1.0), 0.0)
        return root * root, root
    x = u - s
    b = 1.0 + e * x
    inside = b > 0
    p = jnp.where(inside, jnp.exp(_log_exp(x, e)), 0.0)
    return p, jnp.where(inside, p / b, 0.0)


def _log_exp(x: Array, e: Array) -> Array:
    """`log exp_e(x)` where that is positive, `x` itself at e = 0."""
    y = e * x
    inverse = 1.0 / jnp.where(e == 0, 1.0, e)
    if x.dtype != jnp.float32:
        return jnp.where(e == 0, x, jnp.log1p(jnp.where(y > -1, y, 0.0)) * inverse)
    # `1 + y = 2^k (1 + f)` with `1 + f` next to one. Where `k = 0`, `f` is `y` as it
    # was before the sum rounded it, and `e` drops out of the quotient.
    bits = lax.bitcast_convert_type(1.0 + y, jnp.int32)
    k = (bits - _SQRT_HALF) >> 23
    mantissa = lax.bitcast_convert_type(bits - (k << 23), jnp.float32)
    near = k == 0
    f = jnp.where(near, y, mantissa - 1.0)
    ratio = jnp.zeros_like(f)
    for c in _LOG1P_RATIO:
        ratio = ratio * f + c
    far = (k.astype(jnp.float32) * math.log(2) + f * ratio) * inverse
    return jnp.where(near, x * ratio, far)


def _log_sum(f: Array, e: Array) -> Array:
    """`(1 - f^-e) / e`, which is `log f` at e = 0."""
    safe_e = jnp.where(e == 0, 1.0, e)
    return jnp.where(e == 0, jnp.log(f), -jnp.expm1(-e * jnp.log(f)) / safe_e)


def root(u: Array, e: Array, start: Array, power: Power | Array) -> Array:
    """The `s >= start` at which the weights of each row sum to one, `(..., 1)`."""

    def sums(s: Array, active: Array) -> tuple[Array, Array]:
        del active  # all rows are at hand: leaving some out saves nothing

        def total(power: Power) -> tuple[Array, Array]:
            p, slope = exp_and_slope(u, s, e, power)
            return p.sum(-1, keepdims=True), slope.sum(-1, keepdims=True)

        return switch(power, total)

    length = u.shape[-1]
    # An untried step leaves of each entry what a parabola does, or for `e > 1/2` an
    # entry that drops out of the support: at most the tolerance in all.
    share = tolerance(length, u.dtype) / length
    ahead = share ** jnp.maximum(e, 0.5)
    return find_root(sums, length, e, start, lax.while_loop, ahead=ahead)


def tolerance(length: int | Array, dtype: Any) -> Array:
    """How far above one the sum of the weights of a row may be."""
    size = jnp.asarray(length, dtype)
    return float(jnp.finfo(dtype).eps) * (4.0 + 0.25 * jnp.sqrt(size))


def find_root(
    sums,
    length: int | Array,
    e: Array,
    start: Array,
    repeat,
    active: Any = True,
    ahead: Any = 0.0,
) -> Array:
    """The `s >= start` at which weights sum to one, wherever the overlaps are.

    Newton's method on `f^e`, `f` the sum of the weights, which is convex and decreasing
    in `s` for `e <= 1`: the iterates climb to the root and never pass it. Rows of a
    larger `e` stay where they start: they have `steep_support`. A row that is done
    stays as it is, so that it does not depend on the other rows.

    Args:
      sums: of `s (..., 1)` and of which rows still matter, the sum of the weights and
        of their slopes, `(..., 1)` each.
      length: of a row.
      e: `alpha - 1`; broadcasts against `start`.
      start: a lower bound of the root, at least 0, `(..., 1)`.
      repeat: `lax.while_loop`, or what does the same.
      active: rows that are not at their root already.
      ahead: how far above one the sum may be for the next step to be the last, untried.
    """
    limit = tolerance(length, start.dtype)
    size = jnp.asarray(length, start.dtype)
    e_rows = jnp.broadcast_to(e, start.shape)
    # Were all entries equal to the largest, the root would be this; it is never larger.
    upper = jnp.maximum(_log_sum(jnp.full_like(start, size), e_rows), start)

    def body(carry):
        s, active, _ = carry
        return _advance(carry, sums(s, active), e_rows, upper, limit, ahead)

    def unfinished(carry):
        _, active, step = carry
        return jnp.any(active) & (step < _MAX_STEPS)

    active = jnp.full_like(start, True, bool) & active & (e_rows <= 1)
    return repeat(unfinished, body, (start, active, _no_steps(start)))[0]


def _no_steps(start: Array) -> Array:
    """A counter that may differ from row to row, as `start` does."""
    return jnp.full_like(start, 0, jnp.int32, shape=())


@jax.jit  # for callers that loop in Python
def _advance(carry, sums, e: Array, upper: Array, limit: Array, ahead: Any):
    s, active, step = carry
    f, slope = sums
    target = s + f * _log_sum(f, e) / jnp.where(slope == 0, 1.0, slope)
    target = jnp.minimum(target, upper)
    moving = active & (f - 1 > limit) & (target > s)
    return jnp.where(moving, target, s), moving & ~(f - 1 <= ahead), step + 1


def steep_support(
    mass, top: Array, e: Array, repeat, scale: Any = 1.0, guess: Array | None = None
) -> Array:
    """The lowest overlap that could be in the support, exactly, for `e > 1` `(..., 1)`.

    An overlap `t` is in the support if those above it leave something of the sum:
    `mass(t) = sum_i (e (z_i - t))_+^(1/e) < 1`. That falls as `t` grows, so the floats
    below the maximum, which are ordered as integers are, are halved.

    Args:
      mass: of `t` and of which rows still matter.
      top: the largest overlap of each row, finite.
      e: `alpha - 1`; broadcasts against `top`.
      repeat: `lax.while_loop`, or what does the same.
      scale: what multiplies the overlaps.
      guess: a lower bound, and mostly the answer.
    """
    high = ordered_bits(top)
    one = jnp.ones((), high.dtype)
    if guess is None:
        # From here on the largest alone has the sum.
        low = ordered_bits(top - 2 / (jnp.maximum(e, 1.0) * scale))
    else:
        low = ordered_bits(guess)
        high = jnp.where(mass(guess, e > 1) < 1, low, high)
    low = jnp.where(e > 1, jnp.minimum(low, high), high) - one

    def body(carry):
        low, high = carry
        middle = low + (high - low) // 2
        return _halve(low, high, middle, mass(from_ordered(middle), high - low > one))

    def unfinished(carry):
        low, high = carry
        return jnp.any(high - low > one)

    return from_ordered(repeat(unfinished, body, (low, high))[1])


@jax.jit
def _halve(low: Array, high: Array, middle: Array, mass: Array):
    found, between = mass < 1, middle > low
    low = jnp.where(between & ~found, middle, low)
    return low, jnp.where(between & found, middle, high)


def ordered_bits(x: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    bits = jnp.finfo(x.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    raw = lax.bitcast_convert_type(x, unsigned)
    sign = jnp.asarray(1 << (bits - 1), unsigned)
    return jnp.where(raw >= sign, ~raw, raw | sign)


def from_ordered(key: Array) -> Array:
    """The floats of `ordered_bits`."""
    bits = jnp.iinfo(key.dtype).bits
    sign = jnp.asarray(1 << (bits - 1), key.dtype)
    raw = jnp.where(key >= sign, key ^ sign, ~key)
    return lax.bitcast_convert_type(raw, jnp.dtype(f"float{bits}"))


def steep_mass(x: Array, e: Array) -> Array:
    """`(e x)_+^(1/e)` for `e > 1`."""
    positive = x > 0
    return jnp.where(positive, jnp.exp(_log_root(x, e)), 0.0)


def _log_root(x: Array, e: Array) -> Array:
    """`log((e x)^(1/e))`, `-inf` where that is zero."""
    e = jnp.maximum(e, 1.0)
    return jnp.where(x > 0, jnp.log(e * jnp.where(x > 0, x, 1.0)) / e, -jnp.inf)


def steep_sums(x: Array, w: Array, e: Array) -> tuple[Array, Array]:
    """`p = (w^e + e x)^(1/e)` and its slope in `w`, zero for a negative `x`.

    In logarithms, because `w^e` has no floats for a large `e`.
    """
    e = jnp.maximum(e, 1.0)
    log_w, log_x = jnp.log(w), _log_root(x, e)
    gap = jnp.where(log_x == -jnp.inf, jnp.inf, jnp.abs(log_w - log_x))
    log_p = jnp.maximum(log_w, log_x) + jnp.log1p(jnp.exp(-e * gap)) / e
    inside = x >= 0
    p = jnp.where(inside, jnp.exp(log_p), 0.0)
    return p, jnp.where(inside, jnp.exp((e - 1) * (log_w - log_p)), 0.0)


def smallest_weight(sums, count: Array, length: int | Array, e: Array, repeat) -> Array:
    """The weight `w` of the lowest overlap of a support of `count`, for `e > 1`.

    Newton's method from above, where a convex function is never passed.
    """
    limit = tolerance(length, count.dtype)
    start = 1 / jnp.maximum(count, 1.0)

    def body(carry):
        w, active, _ = carry
        return _descend(carry, sums(w, active), limit)

    def unfinished(carry):
        _, active, step = carry
        return jnp.any(active) & (step < _MAX_STEPS)

    active = (e > 1) & (count > 0)
    return repeat(unfinished, body, (start, active, _no_steps(start)))[0]


@jax.jit
def _descend(carry, sums, limit: Array):
    w, active, step = carry
    total, slope = sums
    target = w - (total - 1) / jnp.maximum(slope, 1.0)
    least = float(jnp.finfo(w.dtype).tiny)
    target = jnp.maximum(target, jnp.maximum(w / 128, least))
    moving = active & (total - 1 > limit) & (target < w)
    return jnp.where(moving, target, w), moving, step + 1


def _steep_weights(z: Array, e: Array) -> Array:
    """Weights of the rows whose `e` is above one; of the others anything finite."""
    largest = float(jnp.finfo(z.dtype).max)
    # What is compared must be what is subtracted, unlike what XLA would fuse.
    z = lax.optimization_barrier(jnp.where(z == jnp.inf, largest, z))
    top = jnp.max(z, axis=-1, keepdims=True)
    safe_top = jnp.where(top > -jnp.inf, top, 0.0)

    def mass(t: Array, active: Array) -> Array:
        del active
        return steep_mass(z - t, e).sum(-1, keepdims=True)

    lowest = steep_support(
        mass, safe_top, jnp.broadcast_to(e, top.shape), lax.while_loop
    )
    inside = (z >= lowest) & (z > -jnp.inf)
    least = jnp.min(jnp.where(inside, z, largest), axis=-1, keepdims=True)
    x = jnp.where(inside, z - least, -1.0)

    def sums(w: Array, active: Array) -> tuple[Array, Array]:
        del active
        p, slope = steep_sums(x, w, e)
        return p.sum(-1, keepdims=True), slope.sum(-1, keepdims=True)

    count = inside.sum(-1, keepdims=True, dtype=z.dtype)
    e_rows = jnp.broadcast_to(e, top.shape)
    w = smallest_weight(sums, count, z.shape[-1], e_rows, lax.while_loop)
    p, _ = steep_sums(x, w, e)
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total > 0, total, 1.0)
    return jnp.where(jnp.isnan(top), top, p)


def switch(power: Power | Array, function):
    """Calls `function(power)`, choosing at run time if `power` is an array."""
    if isinstance(power, Power):
        return function(power)
    return lax.switch(power, [functools.partial(function, p) for p in Power])


def run_time_power(e: Array) -> Array:
    square, linear = jnp.all(e == 0.5), jnp.all(e == 1)
    return jnp.where(linear, Power.LINEAR, jnp.where(square, Power.SQUARE, 0))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def entmax_weights(z: Array, alpha: Array, power: Power | None) -> Array:
    """Weights of `alpha`-entmax, with an `alpha` that broadcasts against `z`.

    `power` fixes the arithmetic; None chooses it when the value of `alpha` is known.
    """
    z, e = varying_alike((z, (alpha - 1).astype(z.dtype)))
    if z.shape[-1] == 0:
        return z
    mode = run_time_power(e) if power is None else power
    top = jnp.max(z, axis=-1, keepdims=True)
    # XLA may fuse the product that made `z` into the difference and round it once only:
    # that of the largest must stay exactly zero, else one-hot weights are not.
    safe_top = jnp.where(top == -jnp.inf, 0.0, top)
    u = jnp.where((z == top) & (top > -jnp.inf), 0.0, z - safe_top)
    start = jnp.zeros_like(top)
    if z.shape[-1] >= _BLOCKED_LENGTH:
        # A part of the entries has a smaller sum, hence a smaller root: a lower bound
        # that costs little, and mostly the right support already.
        size = z.shape[-1] // _BLOCKS
        blocks = u[..., : _BLOCKS * size].reshape(*u.shape[:-1], _BLOCKS, size).max(-1)
        start = root(blocks, e, start, mode)
    s = root(u, e, start, mode)
    p = switch(mode, lambda power: exp_and_slope(u, s, e, power)[0])
    if power is None or power is Power.GENERAL:
        steep = e > 1
        p = lax.cond(
            jnp.any(steep),
            lambda: jnp.where(steep, _steep_weights(z, e), p),
            lambda: p,
        )
    return jnp.where(jnp.isnan(e), e, p)


@functools.partial(entmax_weights.defjvp, symbolic_zeros=True)
def _entmax_jvp(power, primals, tangents):
    z, alpha = primals
    dz, dalpha = tangents
    p = entmax_weights(z, alpha, power)
    dz, dalpha = (None if isinstance(d, SymbolicZero) else d for d in (dz, dalpha))
    return p, _entmax_tangent(p, alpha, dz, dalpha, power)


# Computed again from the weights when a gradient asks for it: cheaper than to store.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4,))
def _entmax_tangent(
    p: Array, alpha: Array, dz: Array | None, dalpha: Array | None, power: Power | None
) -> Array:
    e = (alpha - 1).astype(p.dtype)
    mode = run_time_power(e) if power is None else power
    slope = switch(mode, functools.partial(_support_power, p, e))
    rate = jnp.zeros_like(p)  # at a fixed threshold, over the slope
    if dz is not None:
        rate += jnp.where(p > 0, dz, 0.0)
    if dalpha is not None:
        rate += _alpha_rate(p, slope, e) * dalpha.astype(p.dtype)
    if power is None or power is Power.GENERAL:
        # For alpha > 2 the slope of the smallest weight exceeds the others by far: its
        # rate and the mean agree in most digits, unless its own is taken off all.
        least = lax.cond(
            jnp.any(e > 1),
            lambda: jnp.argmax(slope, axis=-1, keepdims=True).astype(jnp.int32),
            lambda: jnp.full_like(p, -1, jnp.int32, shape=(*p.shape[:-1], 1)),
        )
        index = lax.broadcasted_iota(jnp.int32, p.shape, p.ndim - 1)
        chosen = (index == least) & (e > 1)
        own = jnp.where(chosen, rate, 0.0).sum(-1, keepdims=True)
        rate = jnp.where(p > 0, rate - own, 0.0)
    total = slope.sum(-1, keepdims=True)
    mean = (slope * rate).sum(-1, keepdims=True) / jnp.where(total > 0, total, 1.0)
    return slope * (rate - mean)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def weights_at(x: Array, e: Array, power: Power) -> Array:
    """`exp_e(x)`, the weights at a known threshold; `e` broadcasts against `x`."""
    return exp_and_slope(x, jnp.zeros_like(e), e, power)[0]


@weights_at.defjvp
def _weights_at_jvp(power, primals, tangents):
    (x, e), (dx, de) = primals, tangents
    p = weights_at(x, e, power)
    slope = _support_power(p, e, power)
    return p, slope * (jnp.where(p > 0, dx, 0.0) + _alpha_rate(p, slope, e) * de)


@jax.custom_jvp
def steep_weights_at(x: Array, w: Array, e: Array) -> Array:
    """`(w^e + e x)^(1/e)`, the weights above a known smallest one; for `e > 1`."""
    return steep_sums(x, w, e)[0]


@steep_weights_at.defjvp
def _steep_weights_at_jvp(primals, tangents):
    (x, w, e), (dx, dw, de) = primals, tangents
    p = steep_weights_at(x, w, e)
    e = jnp.maximum(e, 1.0)
    slope = _support_power(p, e, Power.GENERAL)

    def term(v: Array) -> Array:
        log_v = _log(v)
        return jnp.where(v > 0, jnp.exp(e * log_v) * (log_v - 1 / e), 0.0)

    direct = slope / e * (term(w) - term(p))
    log_ratio = jnp.log(w) - _log(p)
    by_w = jnp.where(p > 0, jnp.exp((e - 1) * jnp.minimum(log_ratio, 0.0)), 0.0)
    return p, slope * jnp.where(p > 0, dx, 0.0) + by_w * dw + direct * de


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _support_power(p: Array, e: Array, power: Power) -> Array:
    """`p^(2 - alpha)` on the support, zero off it."""
    if power is Power.LINEAR:
        return (p > 0).astype(p.dtype)
    if power is Power.SQUARE:
        return jnp.sqrt(jnp.where(p > 0, p, 1.0)) * jnp.where(p > 0, 1.0, 0.0)
    # Beyond half the range the sums of products of two would overflow.
    cap = 0.5 * math.log(float(jnp.finfo(p.dtype).max))
    return jnp.where(p > 0, jnp.exp(jnp.minimum((1 - e) * _log(p), cap)), 0.0)


@_support_power.defjvp
def _support_power_jvp(power, primals, tangents):
    # At a known alpha as well, whose value is no constant to a second derivative.
    (p, e), (dp, de) = primals, tangents
    slope = _support_power(p, e, power)
    rate = (1 - e) * jnp.where(p > 0, dp, 0.0) / jnp.where(p > 0, p, 1.0)
    return slope, slope * (rate - _log(p) * de)


def _log(p: Array) -> Array:
    """`log p`, zero off the support."""
    return jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)


def _alpha_rate(p: Array, slope: Array, e: Array) -> Array:
    """The derivative of `p = exp_e(x)` in `e` at a fixed `x`, over `slope = p^(1 - e)`.

    `(p^e (1 - y) - 1) / e^2` with `y = e log p`, by its series near zero.
    """
    log_p = _log(p)
    y = e * log_p
    near = jnp.abs(y) < 1
    power = p / jnp.where(slope > 0, slope, 1.0)
    far = (power * (1.0 - y) - 1.0) / jnp.where(near, 1.0, e) ** 2
    series = _remainder(-jnp.where(near, y, 0.0), 2)
    return jnp.where(near, -0.5 * power * log_p**2 * series, far)


def _remainder(y: Array, order: int) -> Array:
    """`order! sum_k y^(k - order) / k!` from `k = order` on, for `|y| < 1`.

    What `exp(y)` has beyond its first terms, by Horner's rule.
    """
    series = jnp.zeros_like(y)
    terms = 11 if y.dtype == jnp.float32 else 19
    for k in range(terms, order - 1, -1):
        series = 1.0 + series * y / (k + 1)
    return series


@jax.custom_jvp
def entmax_conjugate(z: Array, alpha: Array) -> Array:
    p = entmax_weights(z, alpha, None)
    top = jnp.max(z, axis=-1, initial=-jnp.inf)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    above = p > 0
    u = jnp.where(above & (z != top[..., None]), z - top[..., None], 0.0)
    return top + (p * u).sum(-1) - _negative_entropy(p, alpha)


@entmax_conjugate.defjvp
def _entmax_conjugate_jvp(primals, tangents):
    (z, alpha), (dz, dalpha) = primals, tangents
    p = entmax_weights(z, alpha, None)
    _, domega = jax.jvp(lambda a: _negative_entropy(p, a), (alpha,), (dalpha,))
    dz = jnp.where(p > 0, dz, 0.0)
    return entmax_conjugate(z, alpha), (p * dz).sum(-1) - domega


def _negative_entropy(p: Array, alpha: Array) -> Array:
    r"""Tsallis :math:`\Omega_\alpha(p)`, see `Entmax`; its limit at `alpha = 1`."""
    alpha = alpha.astype(p.dtype)
    e = alpha - 1
    log_p = _log(p)
    # p (p^e - 1) / e = p log(p) (1 - exp(y)) / -y with y = e log p; smooth at e = 0.
    return (p * log_p * _expm1_ratio(e * log_p) / alpha).sum(-1)


def _expm1_ratio(y: Array) -> Array:
    """`(exp(y) - 1) / y`, with its derivatives smooth at zero."""
    near = jnp.abs(y) < 1
    far = jnp.where(near, 1.0, y)
    return jnp.where(near, _remainder(jnp.where(near, y, 0.0), 1), jnp.expm1(far) / far)
