r"""Entmax for every alpha, without sorting, and its derivatives in closed form.

With :math:`e = \alpha - 1` and :math:`u = z - \max z \le 0` the weights are

.. math:: p_i = \exp_e(u_i - s), \qquad \exp_e(x) = (1 + e x)_+^{1/e}

(:math:`\exp x` at `e = 0`), where `s >= 0` makes them sum to one. This is `tau = e s -
1` of Peters et al. 2019, in the variable that stays accurate as `alpha` tends to 1.
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
    in `s` for `e <= 1`: the iterates climb to the root and never pass it. For `e > 1`
    it is not convex and the bracket is halved instead. A row that is done stays as it
    is, so that it does not depend on the other rows.

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
        _, _, s, active, _ = carry
        return _advance(carry, sums(s, active), e_rows, upper, limit, ahead)

    def unfinished(carry):
        *_, active, step = carry
        return jnp.any(active) & (step < _MAX_STEPS)

    active = jnp.broadcast_to(jnp.asarray(active), start.shape)
    carry = (start, upper, start, active, 0)
    return repeat(unfinished, body, carry)[2]


@jax.jit  # for callers that loop in Python
def _advance(carry, sums, e: Array, upper: Array, limit: Array, ahead: Any):
    low, high, s, active, step = carry
    f, slope = sums
    convex = e <= 1
    above = f > 1
    low = jnp.where(active & above, s, low)
    high = jnp.where(active & ~above, s, high)
    newton = s + f * _log_sum(f, e) / jnp.where(slope == 0, 1.0, slope)
    target = jnp.where(convex, jnp.minimum(newton, upper), 0.5 * (low + high))
    moving = jnp.where(convex, (f - 1 > limit) & (target > s), target != s)
    moving = active & moving
    active = moving & ~(convex & (f - 1 <= ahead))
    return low, high, jnp.where(moving, target, s), active, step + 1


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
    e = (alpha - 1).astype(z.dtype)
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
    # For alpha > 2 an ulp of the root is much more than an ulp of a weight.
    total = p.sum(-1, keepdims=True)
    steep = (e > 1) & (total > 0)
    p = jnp.where(steep, p / jnp.where(steep, total, 1.0), p)
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
    move = jnp.zeros_like(p)  # at a fixed threshold
    if dz is not None:
        move += slope * jnp.where(p > 0, dz, 0.0)
    if dalpha is not None:
        move += _alpha_slope(p, slope, e) * dalpha.astype(p.dtype)
    total = slope.sum(-1, keepdims=True)
    return move - slope * (
        move.sum(-1, keepdims=True) / jnp.where(total > 0, total, 1.0)
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def weights_at(x: Array, e: Array, power: Power) -> Array:
    """`exp_e(x)`, the weights at a known threshold; `e` broadcasts against `x`."""
    return exp_and_slope(x, jnp.zeros_like(e), e, power)[0]


@weights_at.defjvp
def _weights_at_jvp(power, primals, tangents):
    (x, e), (dx, de) = primals, tangents
    p = weights_at(x, e, power)
    slope = _support_power(p, e, power)
    return p, slope * jnp.where(p > 0, dx, 0.0) + _alpha_slope(p, slope, e) * de


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


def _alpha_slope(p: Array, slope: Array, e: Array) -> Array:
    """The derivative of `p = exp_e(x)` in `e` at a fixed `x`, given `p^(1 - e)`.

    `(p (1 - y) - p^(1 - e)) / e^2` with `y = e log p`, by its series near zero.
    """
    log_p = _log(p)
    y = e * log_p
    near = jnp.abs(y) < 1
    far = (p * (1.0 - y) - slope) / jnp.where(near, 1.0, e) ** 2
    series = _remainder(-jnp.where(near, y, 0.0), 2)
    return jnp.where(near, -0.5 * p * log_p**2 * series, far)


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
