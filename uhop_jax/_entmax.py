r"""Entmax for every alpha, without sorting, and its derivatives in closed form.

With :math:`e = \alpha - 1` and :math:`u = z - \max z \le 0` the weights are

.. math:: p_i = \exp_e(u_i - s), \qquad \exp_e(x) = (1 + e x)_+^{1/e}

(:math:`\exp x` at `e = 0`), where `s >= 0` makes them sum to one. The threshold of
Peters et al. 2019 is `tau = e s - 1`; unlike `tau`, `s` stays accurate as `alpha` tends
to 1. For `alpha > 2` a weight is a steep function of `s`: the rounding of `s` would
change all digits of the weight. The unknown is then the smallest weight `w` of the
support, at the overlap :math:`z_\downarrow`:

.. math:: p_i = (w^e + e (z_i - z_\downarrow))^{1/e},

The sum of these weights is convex and increasing in `w`, with a slope of at least one.

Overlaps are float32 or float64, and `-inf` at masked entries; `alpha` broadcasts
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

# Rows of at least this length: the maxima of blocks of the row first bound the root.
_BLOCKED_LENGTH = 2048
_BLOCKS = 256
_MAX_STEPS = 128
_SQRT_HALF = 0x3F3504F3  # the bits of sqrt(1/2) in float32
# A polynomial for `log1p(f) / f`, highest power first, for `1 + f` in
# [sqrt(1/2), sqrt(2)). Its largest relative error, which the fit minimises, is 3e-8.
# The polynomial costs half as much as `jnp.log1p`.
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
        """The fastest arithmetic that all these `alpha` allow."""
        if (alpha == 2).all():
            return cls.LINEAR
        return cls.SQUARE if (alpha == 1.5).all() else cls.GENERAL


def exp_and_slope(u: Array, s: Array, e: Array, power: Power) -> tuple[Array, Array]:
    """`p = exp_e(u - s)` and its derivative `p^(1 - e)`, both zero off the support."""
    if power is Power.LINEAR:
        p = jnp.maximum(u - (s - 1.0), 0.0)
        return p, jnp.ceil(p)  # 0 or 1; unlike a comparison, `ceil` vectorises
    if power is Power.SQUARE:
        root = jnp.maximum(0.5 * u - (0.5 * s - 1.0), 0.0)
        return root * root, root
    x = u - s
    b = 1.0 + e * x
    inside = b > 0
    p = jnp.where(inside, jnp.exp(_log_exp(x, e)), 0.0)
    return p, jnp.where(inside, p / b, 0.0)


def _log_exp(x: Array, e: Array) -> Array:
    """`log exp_e(x)` where `exp_e(x)` is positive; `x` itself at e = 0."""
    y = e * x
    inverse = 1.0 / jnp.where(e == 0, 1.0, e)
    if x.dtype != jnp.float32:
        return jnp.where(e == 0, x, jnp.log1p(jnp.where(y > -1, y, 0.0)) * inverse)
    # `1 + y = 2^k (1 + f)` with `1 + f` near one. Where `k = 0`, `f` is `y` itself,
    # without the rounding of `1 + y`, and `e` cancels in `log1p(e x) / e`.
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
        del active  # the sums of all rows cost as much as the sums of some

        def total(power: Power) -> tuple[Array, Array]:
            p, slope = exp_and_slope(u, s, e, power)
            return p.sum(-1, keepdims=True), slope.sum(-1, keepdims=True)

        return switch(power, total)

    length = u.shape[-1]
    # Up to this excess over one, one more step reaches the tolerance without another
    # test: each entry adds at most its share, by the quadratic convergence of Newton's
    # method, or for `e > 1/2` by leaving the support.
    share = tolerance(length, u.dtype) / length
    ahead = share ** jnp.maximum(e, 0.5)
    return find_root(sums, length, e, start, lax.while_loop, ahead=ahead)


def tolerance(length: int | Array, dtype: Any) -> Array:
    """The largest excess over one of the sum of the weights of a row."""
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
    """The `s >= start` at which weights sum to one, from sums over the overlaps alone.

    Newton's method on `f^e`, where `f` is the sum of the weights: `f^e` is convex and
    decreasing in `s` for `e <= 1`, so the iterates climb to the root and never pass it.
    Rows with `e > 1` stay at `start`; `steep_support` serves them. A row that has
    converged no longer moves, so that its result does not depend on the other rows.

    Args:
      sums: `sums(s, active)` takes `s (..., 1)` and the rows that have not converged;
        it returns the sums of the weights and of their slopes, `(..., 1)` each.
      length: number of entries of a row.
      e: `alpha - 1`; broadcasts against `start`.
      start: a lower bound of the root, at least 0, `(..., 1)`.
      repeat: `lax.while_loop`, or a function with its signature.
      active: false for rows whose `start` is their root.
      ahead: excess of the sum over one up to which the next step is the last.

    Returns:
      The root `(..., 1)`.
    """
    limit = tolerance(length, start.dtype)
    size = jnp.asarray(length, start.dtype)
    e_rows = jnp.broadcast_to(e, start.shape)
    # The root of a row whose entries all equal the largest: no root is larger.
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
    """A counter at zero that varies over the mesh axes over which `start` varies."""
    return jnp.full_like(start, 0, jnp.int32, shape=())


@jax.jit  # for callers that loop in Python
def _advance(carry, sums, e: Array, upper: Array, limit: Array, ahead: Any):
    """One Newton step of `find_root`, upwards and at most to `upper`."""
    s, active, step = carry
    f, slope = sums
    target = s + f * _log_sum(f, e) / jnp.where(slope == 0, 1.0, slope)
    target = jnp.minimum(target, upper)
    moving = active & (f - 1 > limit) & (target > s)
    return jnp.where(moving, target, s), moving & ~(f - 1 <= ahead), step + 1


def steep_support(
    mass, top: Array, e: Array, repeat, scale: Any = 1.0, guess: Array | None = None
) -> Array:
    """The smallest float `t` with `mass(t) < 1`: the end of the support, for `e > 1`.

    An overlap `t` is in the support if the weights of larger overlaps sum to less than
    one: `mass(t) = sum_i (e (z_i - t))_+^(1/e) < 1`. The mass falls as `t` grows, so
    bisection finds the smallest such float. It bisects integers in the order of the
    floats, and is therefore exact.

    Args:
      mass: `mass(t, active)`, of `t (..., 1)` and the rows that have not converged.
      top: the largest overlap of each row, finite, `(..., 1)`.
      e: `alpha - 1`; broadcasts against `top`.
      repeat: `lax.while_loop`, or a function with its signature.
      scale: factor of the overlaps in `mass`.
      guess: a lower bound, often the result itself.

    Returns:
      The float of each row `(..., 1)`; `top` where `e <= 1`.
    """
    high = ordered_bits(top)
    one = jnp.ones((), high.dtype)
    if guess is None:
        # At this overlap the largest entry alone has a mass above one.
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
    """One bisection step of `steep_support`."""
    below_one, between = mass < 1, middle > low
    low = jnp.where(between & ~below_one, middle, low)
    return low, jnp.where(between & below_one, middle, high)


def ordered_bits(x: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    bits = jnp.finfo(x.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    raw = lax.bitcast_convert_type(x, unsigned)
    sign = jnp.asarray(1 << (bits - 1), unsigned)
    return jnp.where(raw >= sign, ~raw, raw | sign)


def from_ordered(key: Array) -> Array:
    """The floats of which `ordered_bits` are the integers."""
    bits = jnp.iinfo(key.dtype).bits
    sign = jnp.asarray(1 << (bits - 1), key.dtype)
    raw = jnp.where(key >= sign, key ^ sign, ~key)
    return lax.bitcast_convert_type(raw, jnp.dtype(f"float{bits}"))


def steep_mass(x: Array, e: Array) -> Array:
    """`(e x)_+^(1/e)` for `e > 1`."""
    positive = x > 0
    return jnp.where(positive, jnp.exp(_log_root(x, e)), 0.0)


def _log_root(x: Array, e: Array) -> Array:
    """`log((e x)_+^(1/e))` for `e > 1`; `-inf` where `x <= 0`."""
    e = jnp.maximum(e, 1.0)
    return jnp.where(x > 0, jnp.log(e * jnp.where(x > 0, x, 1.0)) / e, -jnp.inf)


def steep_sums(x: Array, w: Array, e: Array) -> tuple[Array, Array]:
    """`p = (w^e + e x)^(1/e)` and its slope in `w`, both zero for a negative `x`.

    The sum is computed in logarithms, because `w^e` underflows for a large `e`.
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

    Newton's method from above: the sum is convex in `w`, so no step passes the root.

    Args:
      sums: `sums(w, active)` takes `w (..., 1)` and the rows that have not converged;
        it returns the sums of the weights and of their slopes in `w`, `(..., 1)` each.
      count: number of entries in the support of each row, `(..., 1)`.
      length: number of entries of a row.
      e: `alpha - 1`, `(..., 1)`.
      repeat: `lax.while_loop`, or a function with its signature.
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
    """One Newton step of `smallest_weight`, downwards and to a positive weight."""
    w, active, step = carry
    total, slope = sums
    target = w - (total - 1) / jnp.maximum(slope, 1.0)
    least = float(jnp.finfo(w.dtype).tiny)
    target = jnp.maximum(target, jnp.maximum(w / 128, least))
    moving = active & (total - 1 > limit) & (target < w)
    return jnp.where(moving, target, w), moving, step + 1


def _steep_weights(z: Array, e: Array) -> Array:
    """Weights of rows with `e > 1`; for other rows the result means nothing."""
    largest = float(jnp.finfo(z.dtype).max)
    # The barrier keeps XLA from fusing the product that made `z` into the subtraction:
    # comparisons and subtractions must see the same rounded numbers.
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
    """The fastest `Power` that all of `e` allow, as an integer array."""
    square, linear = jnp.all(e == 0.5), jnp.all(e == 1)
    return jnp.where(linear, Power.LINEAR, jnp.where(square, Power.SQUARE, 0))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def entmax_weights(z: Array, alpha: Array, power: Power | None) -> Array:
    """Weights of `alpha`-entmax over the last axis, in the shape and dtype of `z`.

    Args:
      z: overlaps `(..., M)`, `-inf` at masked entries.
      alpha: at least 1; broadcasts against `z`. NaN gives NaN.
      power: the arithmetic; None chooses it at run time by the values of `alpha`.
    """
    z, e = varying_alike((z, (alpha - 1).astype(z.dtype)))
    if z.shape[-1] == 0:
        return z
    mode = run_time_power(e) if power is None else power
    top = jnp.max(z, axis=-1, keepdims=True)
    # XLA may fuse the product that made `z` into the difference, without rounding the
    # product. The difference at the maximum must be exactly zero, or one-hot weights
    # are not exact.
    safe_top = jnp.where(top == -jnp.inf, 0.0, top)
    u = jnp.where((z == top) & (top > -jnp.inf), 0.0, z - safe_top)
    start = jnp.zeros_like(top)
    if z.shape[-1] >= _BLOCKED_LENGTH:
        # A part of the entries has a smaller sum, hence a smaller root: a cheap lower
        # bound, which often has the right support already.
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


# The backward pass recomputes the tangent from the weights, which needs less memory.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4,))
def _entmax_tangent(
    p: Array, alpha: Array, dz: Array | None, dalpha: Array | None, power: Power | None
) -> Array:
    """Tangent of the weights `p`; None stands for a tangent of zero."""
    e = (alpha - 1).astype(p.dtype)
    mode = run_time_power(e) if power is None else power
    slope = switch(mode, functools.partial(_support_power, p, e))
    rate = jnp.zeros_like(p)  # tangent at a fixed threshold, divided by the slope
    if dz is not None:
        rate += jnp.where(p > 0, dz, 0.0)
    if dalpha is not None:
        rate += _alpha_rate(p, slope, e) * dalpha.astype(p.dtype)
    if power is None or power is Power.GENERAL:
        # For `alpha > 2` the smallest weight has by far the largest slope: its rate
        # agrees with the mean in most digits. Subtracting its rate from all rates first
        # avoids the cancellation.
        least = lax.cond(
            jnp.any(e > 1),
            lambda: jnp.argmax(slope, axis=-1, keepdims=True).astype(jnp.int32),
            lambda: jnp.full_like(p, -1, jnp.int32, shape=(*p.shape[:-1], 1)),
        )
        index = lax.broadcasted_iota(jnp.int32, p.shape, p.ndim - 1)
        chosen = (index == least) & (e > 1)
        chosen_rate = jnp.where(chosen, rate, 0.0).sum(-1, keepdims=True)
        rate = jnp.where(p > 0, rate - chosen_rate, 0.0)
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
    """`(w^e + e x)^(1/e)`, the weights for a known smallest weight `w`, for `e > 1`."""
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
    # The cap at the square root of the range keeps products of two slopes finite.
    cap = 0.5 * math.log(float(jnp.finfo(p.dtype).max))
    return jnp.where(p > 0, jnp.exp(jnp.minimum((1 - e) * _log(p), cap)), 0.0)


@_support_power.defjvp
def _support_power_jvp(power, primals, tangents):
    # The derivative in `e` counts at a fixed `Power` too: second derivatives use it.
    (p, e), (dp, de) = primals, tangents
    slope = _support_power(p, e, power)
    rate = (1 - e) * jnp.where(p > 0, dp, 0.0) / jnp.where(p > 0, p, 1.0)
    return slope, slope * (rate - _log(p) * de)


def _log(p: Array) -> Array:
    """`log p`, zero off the support."""
    return jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)


def _alpha_rate(p: Array, slope: Array, e: Array) -> Array:
    """The derivative of `p = exp_e(x)` in `e` at fixed `x`, divided by `p^(1 - e)`.

    It is `(p^e (1 - y) - 1) / e^2` with `y = e log p`, and its series for small `y`.
    """
    log_p = _log(p)
    y = e * log_p
    near = jnp.abs(y) < 1
    power = p / jnp.where(slope > 0, slope, 1.0)
    far = (power * (1.0 - y) - 1.0) / jnp.where(near, 1.0, e) ** 2
    series = _remainder(-jnp.where(near, y, 0.0), 2)
    return jnp.where(near, -0.5 * power * log_p**2 * series, far)


def _remainder(y: Array, order: int) -> Array:
    """`order! sum_{k >= order} y^(k - order) / k!` for `|y| < 1`, by Horner's rule.

    The remainder of the series of `exp(y)` after `order` terms, over its first term.
    """
    series = jnp.zeros_like(y)
    terms = 11 if y.dtype == jnp.float32 else 19
    for k in range(terms, order - 1, -1):
        series = 1.0 + series * y / (k + 1)
    return series


@jax.custom_jvp
def entmax_conjugate(z: Array, alpha: Array) -> Array:
    """The convex conjugate `max_p (p . z - Omega_alpha(p))` of each row `(...,)`."""
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
    # `p (p^e - 1) / e = p log(p) (exp(y) - 1) / y` with `y = e log p`: smooth at e = 0.
    return (p * log_p * _expm1_ratio(e * log_p) / alpha).sum(-1)


def _expm1_ratio(y: Array) -> Array:
    """`(exp(y) - 1) / y`, with its derivatives smooth at zero."""
    near = jnp.abs(y) < 1
    far = jnp.where(near, 1.0, y)
    return jnp.where(near, _remainder(jnp.where(near, y, 0.0), 1), jnp.expm1(far) / far)
