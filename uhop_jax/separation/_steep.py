"""Entmax for `alpha > 2`: the support, and the smallest weight in it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax._fast import from_ordered, ordered_bits
from uhop_jax.separation._root import newton, tolerance


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

    return newton(body, start, (e > 1) & (count > 0), repeat)


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


def steep_weights(z: Array, e: Array) -> Array:
    """Weights of rows with `e > 1` without NaN; for others they mean nothing."""
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
    return p / jnp.where(total > 0, total, 1.0)
