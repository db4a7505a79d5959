"""Fixed points by plain iteration, with implicit gradients."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike

MAX_SOLVER_STEPS = 200  # iterations for the linear system of the tangents


def fixed_point(
    update: Callable[[Array], Array], start: Array, max_steps: int, tolerance: ArrayLike
) -> tuple[Array, Array, Array]:
    """A fixed point `(D,)` of `update`, by iteration from `start (D,)`.

    Gradients follow from the implicit function theorem, so that only one state is
    stored. The iteration has converged when no component moves by more than the
    tolerance, relative to the largest component.

    Returns:
      The state, the number of updates (int32), and whether it converged.
    """

    def residual(y: Array) -> Array:
        return update(y) - y

    y, (steps, converged) = lax.custom_root(
        residual,
        start,
        functools.partial(_iterate, max_steps, tolerance),
        _solve_linear,
        has_aux=True,
    )
    return y, steps.astype(jnp.int32), converged > 0


def _iterate(cap: int, tolerance: ArrayLike, residual, y: Array):
    """Adds the residual until it is small: plain fixed-point iteration."""

    def unfinished(carry):
        _, steps, converged = carry
        return ~converged & (steps < cap)

    def body(carry):
        y, steps, _ = carry
        move = residual(y)
        new = y + move
        scale = jnp.max(jnp.abs(new), initial=0.0)
        converged = jnp.max(jnp.abs(move), initial=0.0) <= tolerance * scale
        return new, steps + 1, converged

    steps, converged = (jnp.full_like(y, 0, t, shape=()) for t in (jnp.int32, bool))
    y, steps, converged = lax.while_loop(unfinished, body, (y, steps, converged))
    # `custom_root` differentiates the auxiliary outputs too: only floats have tangents.
    return y, (steps.astype(y.dtype), converged.astype(y.dtype))


def _solve_linear(linear, right: Array) -> Array:
    """Solves the tangent system of a fixed point without forming its matrix."""
    return lax.custom_linear_solve(
        linear, right, _stabilised_gradients, transpose_solve=_stabilised_gradients
    )


def _stabilised_gradients(matvec, right: Array) -> Array:
    """Stabilised bi-conjugate gradients (van der Vorst 1992), started at zero.

    `jax.scipy.sparse.linalg.bicgstab` starts its loop with constants, which
    `jax.shard_map` refuses.
    """
    dot = functools.partial(jnp.vdot, precision=lax.Precision.HIGHEST)
    square = dot(right, right)
    enough = (4 * float(jnp.finfo(right.dtype).eps)) ** 2 * square

    def unfinished(carry):
        _, residual, *_, steps, sound = carry
        return sound & (steps < MAX_SOLVER_STEPS) & (dot(residual, residual) > enough)

    def body(carry):
        x, residual, along, rho, steps, _ = carry
        mapped = matvec(along)
        alpha = rho / dot(right, mapped)
        half = residual - alpha * mapped
        half_mapped = matvec(half)
        omega = dot(half_mapped, half) / dot(half_mapped, half_mapped)
        early = dot(half, half) <= enough
        x = x + alpha * along + jnp.where(early, 0.0, omega * half)
        residual = jnp.where(early, half, half - omega * half_mapped)
        new = dot(right, residual)
        sound = (new != 0) & (alpha != 0) & (omega != 0)
        along = residual + new / rho * alpha / omega * (along - omega * mapped)
        return x, residual, along, new, steps + 1, sound

    steps, sound = (jnp.full_like(square, x, type(x)) for x in (0, True))
    carry = jnp.zeros_like(right), right, right, square, steps, sound
    return lax.while_loop(unfinished, body, carry)[0]
