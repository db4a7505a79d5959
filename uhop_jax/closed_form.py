"""What is learned by one linear solve: the closed-form kernel, values to read out."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from uhop_jax._checks import (
    as_at_least,
    as_floating,
    check_memory_set,
    check_positive,
    check_scalar,
    is_traced,
    wider_dtype,
    working_dtype,
)
from uhop_jax._products import gram_matrix
from uhop_jax.kernels import LinearKernel, LowRankKernel
from uhop_jax.model import Model
from uhop_jax.retrieval import retrieve


def fit_closed_form(
    memories: Float[Array, "*sets M d"], *, ridge: ArrayLike = 1.0
) -> LinearKernel | LowRankKernel:
    r"""Whitening with a ridge: a separating kernel without iterations.

    :math:`A = W^T W = (\Xi^T \Xi / M + \lambda \bar s I)^{-1}`, with :math:`\bar s` the
    mean eigenvalue of :math:`\Xi^T \Xi / M`. The ridge trades separation for robustness
    to noise. At ridge zero, for `M <= d` independent memories, :math:`W = G^{-1} \Xi`
    with the Gram matrix :math:`G = \Xi \Xi^T`. Under this `W` the matrix of
    :math:`K(\xi_\mu, \xi_\nu)` is the identity: the minimiser of the deep-learning loss
    and the hypothesis of [thm:perfect_kernel].

    Args:
      memories: stored patterns, one per row.
      ridge: `lambda >= 0`; an array broadcasts against the axes of memory sets.

    Returns:
      A symmetric `W (d, d)`, as a `LowRankKernel` of rank `M` if `M < d`; or a
      `LinearKernel` with `W (M, d)` if the ridge is the number 0. Kernels have at
      least float32.

    Raises:
      ValueError: if the ridge is negative or of a shape that does not fit, or is zero
        and the memories are dependent.
    """
    memories = as_floating(memories, "memories")
    floor = as_at_least("ridge", ridge, 0, working_dtype(memories))
    check_memory_set(memories)
    memories = memories.astype(floor.dtype)
    if not is_traced(ridge) and np.ndim(ridge) == 0 and ridge == 0:
        weights = _interpolation(memories)
        if not is_traced(weights) and not bool(jnp.isfinite(weights).all()):
            raise ValueError(
                f"ridge 0 needs linearly independent memories, got "
                f"{memories.shape[-2]} dependent ones of dimension "
                f"{memories.shape[-1]}; use a ridge above 0"
            )
        return LinearKernel(weights)
    try:
        sets = np.broadcast_shapes(floor.shape, memories.shape[:-2])
    except ValueError:
        raise ValueError(
            f"ridge has shape {floor.shape}, which does not fit memories of shape "
            f"{memories.shape}"
        ) from None
    memories = jnp.broadcast_to(memories, (*sets, *memories.shape[-2:]))
    return _whiten(memories, jnp.broadcast_to(floor, sets))


def fit_values(
    model: Model,
    memories: Float[Array, "M d"],
    values: Float[Array, "M v"] | None = None,
    *,
    ridge: ArrayLike = 0.0,
) -> Float[Array, "M v"]:
    r"""Values that a model reads out so that each memory retrieves its own value.

    They solve :math:`(P + \lambda I) A = V`, where row :math:`\mu` of `P` has the
    weights of the query :math:`\xi_\mu`. With `NegativeSquaredL2` and `Exponentials`
    retrieval of `A` is Gaussian kernel interpolation, or kernel ridge regression:
    :math:`T(x) = \Xi^T (G + \lambda I)^{-1} k(\Xi, x)`. Its fixed points are the
    memories (Iatropoulos et al. 2022, arXiv 2208.09416; Tamamori 2025, arXiv
    2504.12561). Another separation gives the regression of its own weights.

    `beta` is the inverse width of the kernel: other values belong to another `beta`.

        values = fit_values(model, memories, ridge=0.1)
        retrieve(model, memories, query, values=values)

    Args:
      model: similarity, separation and inverse temperature.
      memories: stored patterns, one per row.
      values: the value of each memory; the memories by default.
      ridge: `lambda >= 0`.

    Returns:
      `A`, in at least float32, to be used as the `values` of `retrieve`. In a traced
      call, NaN if the equations have no solution.

    Raises:
      ValueError: if the ridge is negative, shapes do not fit, or the equations have no
        solution, as for equal memories without a ridge.
    """
    memories = as_floating(memories, "memories")
    values = memories if values is None else as_floating(values, "values")
    check_memory_set(memories, distinct=False)
    if values.ndim != 2 or len(values) != len(memories):
        raise ValueError(
            f"values must have shape ({len(memories)}, v), one row for each memory, "
            f"got {values.shape}"
        )
    dtype = working_dtype(jnp.zeros((), wider_dtype(memories, values)))
    memories, values = memories.astype(dtype), values.astype(dtype)
    weights = retrieve(model, memories, memories).weights
    check_scalar("ridge", ridge)
    floor = as_at_least("ridge", ridge, 0, dtype)
    result, solved = _solved(weights, values, floor)
    if not is_traced(solved) and not bool(solved):
        raise ValueError(
            f"ridge {float(np.asarray(ridge)):g} leaves the equations of "
            f"{len(memories)} memories without a solution; use a larger ridge"
        )
    return result


@jax.jit
def _solved(weights: Array, values: Array, ridge: Array) -> tuple[Array, Array]:
    """The solution `A` of `(weights + ridge I) A = values`, and whether there is one.

    A matrix that is singular up to rounding gives huge numbers, not infinite ones: the
    equations must hold up to half the digits. `A` is NaN if they do not.
    """
    matrix = weights + ridge * jnp.eye(len(weights), dtype=weights.dtype)
    result = jnp.linalg.solve(matrix, values)
    error = jnp.abs(jnp.matmul(matrix, result, precision="highest") - values)
    scale = jnp.maximum(1.0, jnp.abs(values).max(initial=0.0))
    solved = (error <= float(jnp.finfo(error.dtype).eps) ** 0.5 * scale).all()
    return jnp.where(solved, result, jnp.nan), solved


def whitenings(
    memories: Float[Array, "*sets M d"], ridges: Sequence[float]
) -> dict[float, LinearKernel | LowRankKernel]:
    """`fit_closed_form` at several positive ridges, from one decomposition.

    Args:
      memories: stored patterns, one per row, in float32 or float64.
      ridges: the ridges, all positive.

    Returns:
      The kernels by ridge.

    Raises:
      ValueError: as in `fit_closed_form`.
    """
    for ridge in ridges:
        check_positive("ridges", ridge)
    check_memory_set(memories)
    stacked = _whitenings(memories, jnp.asarray(ridges, memories.dtype))
    kernels = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(len(ridges))]
    return dict(zip(ridges, kernels, strict=True))


@jax.jit
def _whitenings(memories: Array, ridges: Array) -> LinearKernel | LowRankKernel:
    """Kernels stacked along a first axis, one for each ridge."""
    # `vmap` computes the decomposition once: it does not depend on the ridge.
    return jax.vmap(lambda ridge: _whiten(memories, ridge))(ridges)


def _whiten(memories: Array, ridge: Array) -> LinearKernel | LowRankKernel:
    """The whitening kernel, by the smaller of the two eigenproblems."""
    M, d = memories.shape[-2:]
    return (_whitening if M >= d else _low_rank_whitening)(memories, ridge)


@jax.jit
def _interpolation(memories: Array) -> Array:
    """`G^-1 Xi`; NaN if the memories are linearly dependent up to rounding."""
    gram = gram_matrix(memories)
    values, vectors = jnp.linalg.eigh(gram)
    limit = values[..., -1:] * values.shape[-1] * float(jnp.finfo(values.dtype).eps)
    values = jnp.where(values > limit, values, jnp.nan)
    inner = jnp.einsum("...mk,...md->...kd", vectors, memories, precision="highest")
    return jnp.einsum(
        "...mk,...kd->...md", vectors, inner / values[..., None], precision="highest"
    )


@jax.jit
def _whitening(memories: Array, ridge: Array) -> LinearKernel:
    r"""`A^(1/2)` from the eigenvectors of :math:`\Xi^T \Xi / M`."""
    einsum = functools.partial(jnp.einsum, precision="highest")
    covariance = einsum("...md,...me->...de", memories, memories) / memories.shape[-2]
    values, vectors = jnp.linalg.eigh(covariance)
    scale = lax.rsqrt(jnp.maximum(values, 0.0) + _floor(memories, ridge))
    return LinearKernel(einsum("...dk,...k,...ek->...de", vectors, scale, vectors))


@jax.jit
def _low_rank_whitening(memories: Array, ridge: Array) -> LowRankKernel:
    r"""`A^(1/2)` from the eigenvectors of :math:`\Xi \Xi^T / M`, a smaller matrix."""
    M = memories.shape[-2]
    floor = _floor(memories, ridge)
    values, vectors = jnp.linalg.eigh(gram_matrix(memories) / M)
    root, base = jnp.sqrt(jnp.maximum(values, 0.0) + floor), jnp.sqrt(floor)
    # `1/root - 1/base` over `M (root^2 - base^2)`, written without cancellation.
    change = -1 / (M * root * base * (root + base))
    right = jnp.einsum("...mk,...md->...kd", vectors, memories, precision="highest")
    left = jnp.swapaxes(right, -1, -2) * change[..., None, :]
    return LowRankKernel(1 / base[..., 0], left, right)


def _floor(memories: Array, ridge: Array) -> Array:
    r"""The ridge times the mean eigenvalue of :math:`\Xi^T \Xi / M`, `(..., 1)`."""
    return (ridge * (memories * memories).mean((-2, -1)))[..., None]
