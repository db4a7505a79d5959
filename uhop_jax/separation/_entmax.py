"""Weights and conjugate of entmax, with derivatives in closed form."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from uhop_jax._checks import surely_less
from uhop_jax._fast import remembered
from uhop_jax._pytree import varying_alike
from uhop_jax.separation._root import Power, exp_and_slope, root, run_time_power, switch
from uhop_jax.separation._steep import steep_sums, steep_weights

# Rows of at least this length: the maxima of blocks of the row first bound the root.
_BLOCKED_LENGTH = 2048
_BLOCKS = 256


def entmax_weights(z: Array, alpha: Array, power: Power | None) -> Array:
    """Weights of `alpha`-entmax over the last axis, in the shape and dtype of `z`.

    Masked overlaps are `-inf`; an `alpha` of NaN gives NaN. Without a `power` the
    arithmetic is chosen at run time by the values of `alpha`.
    """
    z, alpha = varying_alike((z, alpha.astype(z.dtype)))
    if z.shape[-1] == 0:
        return z
    threshold = None
    if power in (Power.SQUARE, Power.LINEAR):
        fixed, e = (lax.stop_gradient(x) for x in (z, alpha - 1))
        threshold = jax.tree.map(remembered, _threshold(fixed, e, power))
    return _weights_from(z, alpha, threshold, power, False)


def _mode(e: Array, power: Power | None) -> Power | Array:
    """The arithmetic, which without a `power` is chosen at run time."""
    return run_time_power(e) if power is None else power


def _threshold(z: Array, e: Array, mode: Power | Array) -> tuple[Array, Array]:
    """The largest overlap of each row and its `s`, `(..., 1)`.

    For `e > 1` the `s` is a lower bound of the threshold.
    """
    top = jnp.max(z, axis=-1, keepdims=True)
    u, start = _below(z, top), jnp.zeros_like(top)
    if surely_less(_BLOCKED_LENGTH - 1, z.shape[-1]):
        # A part of the entries has a smaller sum, hence a smaller root: a cheap lower
        # bound, which often has the right support already.
        size = z.shape[-1] // _BLOCKS
        blocks = u[..., : _BLOCKS * size].reshape(*u.shape[:-1], _BLOCKS, size).max(-1)
        start = root(blocks, e, start, mode)
    return top, root(u, e, start, mode)


def _below(z: Array, top: Array) -> Array:
    """`z - top`, exactly zero at the largest overlap `top`.

    XLA may fuse the product that made `z` into the difference, without rounding the
    product: one-hot weights would not be exact.
    """
    safe_top = jnp.where(top == -jnp.inf, 0.0, top)
    return jnp.where((z == top) & (top > -jnp.inf), 0.0, z - safe_top)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _weights_from(
    z: Array,
    alpha: Array,
    threshold: tuple[Array, Array] | None,
    power: Power | None,
    moving: bool,
) -> Array:
    """The weights, from the largest overlap and the threshold if these are known.

    If `moving`, the body has the derivatives of a known threshold too, not the rule
    alone: within a loop JAX takes second derivatives of the body.
    """
    e = alpha - 1
    if power is None:
        whole = functools.partial(_weights_from, z, alpha, None, moving=moving)
        return switch(run_time_power(e), whole)
    top, s = threshold or _threshold(z, e, power)
    u = _below(z, top)
    if moving and threshold:
        largest = jnp.where((z == top) & jnp.isfinite(top), z, 0.0)
        u += _change(largest)
        s += _shift(u, s, e, power)
    p = exp_and_slope(u, s, e, power)[0]
    if power is Power.GENERAL:
        steep = e > 1
        p = lax.cond(
            jnp.any(steep), lambda: jnp.where(steep, steep_weights(z, e), p), lambda: p
        )
    return jnp.where(jnp.isnan(e) | jnp.isnan(top), jnp.nan, p)


@functools.partial(_weights_from.defjvp, symbolic_zeros=True)
def _weights_from_jvp(power, moving, primals, tangents):
    del moving
    (z, alpha, threshold), (dz, dalpha, _) = primals, tangents
    p = _weights_from(z, alpha, threshold, power, True)
    dz, dalpha = (None if isinstance(d, SymbolicZero) else d for d in (dz, dalpha))
    return p, _entmax_tangent(p, alpha, dz, dalpha, power)


def _change(x: Array) -> Array:
    """Zero, with the derivatives of `x`."""
    return x - lax.stop_gradient(x)


def _shift(u: Array, s: Array, e: Array, power: Power) -> Array:
    """Zero, with the derivatives of the threshold, `(..., 1)`.

    On a fixed support the weights sum to one at a root of a linear or of a quadratic
    equation.
    """
    p, slope = exp_and_slope(u, s, e, power)
    excess = _change(p.sum(-1, keepdims=True))
    slopes = slope.sum(-1, keepdims=True)
    slopes = jnp.where(slopes > 0, slopes, 1.0)  # of a row that is masked as a whole
    if power is Power.LINEAR:
        return excess / slopes
    number = jnp.ceil(p).sum(-1, keepdims=True)  # no weight is above one
    return 2 * excess / (slopes + jnp.sqrt(slopes**2 - number * excess))


# The backward pass recomputes the tangent from the weights, which needs less memory.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4,))
def _entmax_tangent(
    p: Array, alpha: Array, dz: Array | None, dalpha: Array | None, power: Power | None
) -> Array:
    """Tangent of the weights `p`, NaN for NaN; None stands for a tangent of zero."""
    e = (alpha - 1).astype(p.dtype)
    slope = switch(_mode(e, power), functools.partial(_support_power, p, e))
    rate = jnp.zeros_like(p)  # tangent at a fixed threshold, divided by the slope
    if dz is not None:
        rate += jnp.where(p == 0, 0.0, dz)
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
        rate = jnp.where(p == 0, 0.0, rate - chosen_rate)
    total = slope.sum(-1, keepdims=True)
    mean = (slope * rate).sum(-1, keepdims=True) / jnp.where(total > 0, total, 1.0)
    return slope * (rate - mean)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def weights_at(x: Array, e: Array, power: Power) -> Array:
    """`exp_e(x)`, the weights at a known threshold; `e` broadcasts against `x`."""
    p, _ = exp_and_slope(x, jnp.zeros_like(e), e, power)
    return jnp.where(jnp.isnan(x), x, p) if power is Power.GENERAL else p


@weights_at.defjvp
def _weights_at_jvp(power, primals, tangents):
    (x, e), (dx, de) = primals, tangents
    p = weights_at(x, e, power)
    slope = _support_power(p, e, power)
    return p, slope * (jnp.where(p == 0, 0.0, dx) + _alpha_rate(p, slope, e) * de)


@jax.custom_jvp
def steep_weights_at(x: Array, w: Array, e: Array) -> Array:
    """`(w^e + e x)^(1/e)`, the weights for a known smallest weight `w`, for `e > 1`."""
    return jnp.where(jnp.isnan(x), x, steep_sums(x, w, e)[0])


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
    return p, slope * jnp.where(p == 0, 0.0, dx) + by_w * dw + direct * de


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _support_power(p: Array, e: Array, power: Power) -> Array:
    """`p^(2 - alpha)` on the support, zero off it."""
    if power is Power.LINEAR:
        return jnp.ceil(0.5 * p)  # 0, 1 or NaN; faster than `sign`
    if power is Power.SQUARE:
        return jnp.where(p == 0, 0.0, jnp.sqrt(jnp.where(p == 0, 1.0, p)))
    # The cap at the square root of the range keeps products of two slopes finite.
    cap = 0.5 * math.log(float(jnp.finfo(p.dtype).max))
    return jnp.where(p == 0, 0.0, jnp.exp(jnp.minimum((1 - e) * _log(p), cap)))


@_support_power.defjvp
def _support_power_jvp(power, primals, tangents):
    # The derivative in `e` counts at a fixed `Power` too: second derivatives use it.
    (p, e), (dp, de) = primals, tangents
    slope = _support_power(p, e, power)
    rate = (1 - e) * jnp.where(p > 0, dp, 0.0) / jnp.where(p > 0, p, 1.0)
    return slope, slope * (rate - _log(p) * de)


def _log(p: Array) -> Array:
    """`log p`, zero off the support."""
    return jnp.where(p == 0, 0.0, jnp.log(jnp.where(p == 0, 1.0, p)))


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
