r"""The geometry of memories in feature space, and checks that all theorems share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from uhop_jax._checks import as_floating, check_finite, working_dtype
from uhop_jax.kernels import Centering, Identity, Kernel, LinearKernel, LowRankKernel
from uhop_jax.separation import Separation, check_separation
from uhop_jax.similarity import (
    Cosine,
    Dot,
    NegativeL2,
    NegativeSquaredL2,
    Similarity,
    check_patterns,
    check_sets,
)

# A state that moves by `r` changes the difference of its overlaps with two memories by
# at most `slope * r * distance`, where `distance` separates the two memories' features.
_SLOPES: dict[type, float] = {Dot: 1.0, Cosine: 1.0, NegativeSquaredL2: 2.0}


class Geometry(NamedTuple):
    """Leads and distances among the memories.

    The leads `K(xi_mu, xi_mu) - K(xi_nu, xi_mu)` are infinite on the diagonal and for
    masked memories.
    """

    keys: Array  # `(M, D)`, features of the memories
    leads: Array  # `(M, M)`
    distances: Array  # `(M, M)`, of the features
    radius: Array  # half the smallest distance of two memories


@jax.jit
def geometry_of(memories: Array, similarity: Similarity, mask: Any = None) -> Geometry:
    """The geometry of memories `(M, d)`; `mask (M,)` is true for valid memories."""
    keys = similarity.keys(memories)
    gram = similarity(memories, memories)
    distances = pairwise_distances(keys)
    skip = jnp.eye(memories.shape[0], dtype=jnp.bool_)
    if mask is not None:
        skip = skip | ~mask[:, None] | ~mask[None]
    leads = jnp.where(skip, jnp.inf, jnp.diagonal(gram)[:, None] - gram)
    return Geometry(
        keys, leads, distances, jnp.where(skip, jnp.inf, distances).min() / 2
    )


@jax.jit
def ball_separation(geometry: Geometry, reach: ArrayLike) -> Array:
    """Smallest lead `(M,)` of each memory in a ball; `reach` is slope times radius."""
    return (geometry.leads - reach * geometry.distances).min(-1)


def pairwise_distances(keys: Array) -> Array:
    """Distances `(M, M)` from differences, more exact than from the Gram matrix.

    Distances below rounding are zero.
    """
    distances = -NegativeL2()(keys, keys)
    rounding = 8 * float(jnp.finfo(keys.dtype).eps) * largest_norm(keys)
    return jnp.where(distances <= rounding, 0.0, distances)


@jax.jit
def largest_norm(x: Array) -> Array:
    """The largest norm of the rows."""
    squared = (x * x).sum(-1).max()  # the norm of zero has no derivative
    return jnp.where(squared == 0, 0.0, jnp.sqrt(jnp.where(squared == 0, 1.0, squared)))


def divide(a: Array, b: Array, empty: float = jnp.inf) -> Array:
    """`a / b`, and `empty` where `b` is zero, with finite derivatives."""
    return jnp.where(b == 0, empty, a / jnp.where(b == 0, 1.0, b))


def checked_memories(
    memories: Any, similarity: Similarity, *, features: bool = False
) -> Array:
    """The memories in the working dtype.

    Raises:
      ValueError: if there are fewer than two memories or one is not finite, or if the
        similarity does not fit them (with `features`, has no features of a memory).
    """
    memories = as_floating(memories, "memories")
    if memories.ndim != 2 or memories.shape[0] < 2:
        raise ValueError(
            f"memories must have shape (M, d) with M at least 2, got {memories.shape}"
        )
    check_patterns(memories, memories, similarity)
    kernel = similarity.kernel
    check_sets(kernel)
    if features and not kernel.has_energy:
        raise ValueError(
            f"{type(kernel).__name__} maps queries and memories differently: memories "
            "have no ball in its features"
        )
    check_finite("memories", memories)
    return memories.astype(working_dtype(memories))


def slope_of(similarity: Similarity) -> float:
    """The slope of `_SLOPES`; refuses other similarities."""
    if type(similarity) not in _SLOPES:
        raise ValueError(
            f"no lead in a ball is known for {type(similarity).__name__}, only for "
            f"{', '.join(c.__name__ for c in _SLOPES)}"
        )
    return _SLOPES[type(similarity)]


def margin_of(separation: Separation) -> ArrayLike:
    """The lead, times `beta`, that makes weights one-hot; refuses what has none."""
    check_separation(separation)
    if not separation.has_conjugate:
        raise ValueError(
            f"no margin makes the weights of {type(separation).__name__} one-hot"
        )
    margin = separation.margin()
    if jnp.ndim(margin):
        raise ValueError(f"alpha must be one number, got shape {jnp.shape(margin)}")
    return margin


def check_linear(kernel: Any) -> None:
    """Refuses a kernel that is not one linear map for memories and queries."""
    if not isinstance(kernel, (Identity, LinearKernel, LowRankKernel, Centering)):
        raise ValueError(
            "kernel must be a LinearKernel, LowRankKernel, Centering or Identity, got "
            f"{type(kernel).__name__}"
        )
    kernel.check()
    if not kernel.has_energy:
        raise ValueError("kernel must have one center for memories and queries")
    if kernel.set_axes:
        raise ValueError(
            f"kernel must be a single kernel, got {kernel.set_axes} axes of memory sets"
        )


@jax.jit
def singular_values(weights: Array) -> tuple[Array, Array]:
    """Singular values in falling order, and which of them are more than rounding."""
    values = jnp.linalg.svd(weights, compute_uv=False)
    return values, active_values(values, weights)


def active_values(values: Array, weights: Array) -> Array:
    """True for singular values of `weights` that are more than rounding."""
    return values > max(weights.shape) * float(jnp.finfo(values.dtype).eps) * values[0]


@jax.jit
def image_of(kernel: Kernel) -> Array | None:
    """Columns `(D, r)`, orthonormal or zero, that span the image of the kernel.

    None for kernels whose image is the whole space.
    """
    if not isinstance(kernel, (LinearKernel, LowRankKernel)):
        return None
    weights = kernel.weights.astype(working_dtype(kernel.weights))
    axes, values, _ = jnp.linalg.svd(weights, full_matrices=False)
    return jnp.where(active_values(values, weights)[None], axes, 0.0)
