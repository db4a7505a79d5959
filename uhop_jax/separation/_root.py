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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax._fast import log_exp

_MAX_STEPS = 128


class Power(enum.IntEnum):
    """How `b^(1/e)` is computed; all but GENERAL need no transcendental function."""

    GENERAL = 0
    SQUARE = 1  # alpha = 1.5
    LINEAR = 2  # alpha = 2


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
    p = jnp.where(inside, jnp.exp(log_exp(x, e)), 0.0)
    return p, jnp.where(inside, p / b, 0.0)


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

    active = jnp.full_like(start, True, bool) & active & (e_rows <= 1)
    return newton(body, start, active, repeat)


def newton(body, start: Array, active: Array, repeat) -> Array:
    """What `start (..., 1)` becomes by the steps `body` until no row is active.

    `body` maps the rows, whether each is active, and the number of steps so far.
    """

    def unfinished(carry):
        _, active, step = carry
        return jnp.any(active) & (step < _MAX_STEPS)

    # The counter varies over the mesh axes over which `start` varies.
    no_steps = jnp.full_like(start, 0, jnp.int32, shape=())
    return repeat(unfinished, body, (start, active, no_steps))[0]


@jax.jit  # for callers that loop in Python
def _advance(carry, sums, e: Array, upper: Array, limit: Array, ahead: Any):
    """One Newton step of `find_root`, upwards and at most to `upper`."""
    s, active, step = carry
    f, slope = sums
    target = s + f * _log_sum(f, e) / jnp.where(slope == 0, 1.0, slope)
    target = jnp.minimum(target, upper)
    moving = active & (f - 1 > limit) & (target > s)
    return jnp.where(moving, target, s), moving & ~(f - 1 <= ahead), step + 1


def switch(power: Power | Array, function):
    """Calls `function(power)`, choosing at run time if `power` is an array."""
    if isinstance(power, Power):
        return function(power)
    return lax.switch(power, [functools.partial(function, p) for p in Power])


def run_time_power(e: Array) -> Array:
    """The fastest `Power` that all of `e` allow, as an integer array."""
    square, linear = jnp.all(e == 0.5), jnp.all(e == 1)
    return jnp.where(linear, Power.LINEAR, jnp.where(square, Power.SQUARE, 0))
