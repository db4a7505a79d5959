r"""Statements in closed form: bounds, exact retrieval, the representation theorem."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from uhop_jax._checks import (
    as_at_least,
    as_floating,
    as_positive,
    as_scalar,
    broadcast_rows,
    check_count,
    check_finite,
    check_positive,
    check_scalar,
    is_traced,
    wider_dtype,
    working_dtype,
)
from uhop_jax.similarity import Dot, NegativeSquaredL2, Similarity, check_patterns
from uhop_jax.theory._geometry import (
    ball_separation,
    checked_memories,
    geometry_of,
    largest_norm,
    slope_of,
)


def radius(
    memories: Float[Array, "M d"], *, similarity: Similarity = Dot()
) -> Float[Array, ""]:
    r""":math:`R_\Phi = \min_{\mu \neq \nu} \|\Phi(\xi_\mu) - \Phi(\xi_\nu)\| / 2`.

    [def:stored_and_retrieved]; without a kernel [def:stored_and_retrieved_org].

    Args:
      memories: stored patterns.
      similarity: similarity whose features are used.

    Returns:
      Half the smallest distance of two memories; zero if two coincide.

    Raises:
      ValueError: if there are fewer than two memories, or shapes do not fit.
    """
    memories = checked_memories(memories, similarity, features=True)
    return geometry_of(memories, similarity).radius


def log_rbf(
    memories: Float[Array, "M d"],
    query: Float[Array, "*batch d"],
    *,
    t: ArrayLike = 2.0,
    similarity: Similarity = Dot(),
) -> Float[Array, "*batch M"]:
    r""":math:`\ell_\Phi(\xi_\mu, x) = -t \|\Phi(\xi_\mu) - \Phi(x)\|^2`.

    For features on the unit sphere, and only for them, it equals :math:`2 t K(\xi_\mu,
    x) - 2 t` [eqn:L_normalize]; features of `Cosine` lie on the unit sphere.

    Args:
      memories: stored patterns.
      query: states.
      t: scale of the exponent, positive.
      similarity: similarity whose features are used.

    Returns:
      Values of at most zero.

    Raises:
      ValueError: if `t` is not positive, or shapes do not fit.
    """
    memories = checked_memories(memories, similarity, features=True)
    query = as_floating(query, "query")
    check_patterns(memories, query, similarity)
    query = query.astype(working_dtype(query))
    keys, state = similarity.keys(memories), similarity.state(query)
    squared = NegativeSquaredL2()(keys, state)
    return squared * as_scalar("t", t, squared.dtype)


def pattern_separation(
    memories: Float[Array, "M d"],
    *,
    similarity: Similarity = Dot(),
    distance: ArrayLike = 0.0,
) -> Float[Array, " M"]:
    r"""Smallest lead of each memory over all others, anywhere in its ball.

    At `distance` 0 the lead is :math:`\Delta_\mu = K(\xi_\mu, \xi_\mu) - \max_{\nu \neq
    \mu} K(\xi_\nu, \xi_\mu)`. In a ball of radius `r` the lead over memory `nu` falls
    by at most :math:`r \|\Phi(\xi_\mu) - \Phi(\xi_\nu)\|`, for `NegativeSquaredL2` by
    at most twice as much. For `Dot` and `NegativeSquaredL2` a state in the ball attains
    the bound; for `Cosine` the result is a lower bound of the smallest lead.

    Args:
      memories: stored patterns.
      similarity: overlap of states with memories.
      distance: radius of the ball, in feature space; unless it is 0, `similarity` must
        be `Dot`, `Cosine` or `NegativeSquaredL2`.

    Returns:
      One lead for each memory.

    Raises:
      ValueError: if `distance` is negative or `similarity` has no ball, there are fewer
        than two memories, or shapes do not fit.
    """
    known = not is_traced(distance) and jnp.ndim(distance) == 0
    centre = known and bool(distance == 0)
    memories = checked_memories(memories, similarity, features=not centre)
    reach = jnp.zeros((), memories.dtype)
    if not centre:
        check_scalar("distance", distance)
        reach = as_at_least("distance", distance, 0.0, memories.dtype)
        reach = slope_of(similarity) * reach
    return ball_separation(geometry_of(memories, similarity), reach)


def error_bound(
    memories: Float[Array, "M d"],
    *,
    beta: ArrayLike,
    similarity: Similarity = Dot(),
    distance: ArrayLike | None = None,
) -> Float[Array, " M"]:
    r"""Bound on the error of one `Softmax` update in a ball [eqn:error_bound_exp].

    Without `distance` it is the paper's bound in kernel form, :math:`\|T(x) - \xi_\mu\|
    \le 2 m (M - 1) e^{-\beta (\Delta_\mu - 2 m_\Phi R_\Phi)}` for every `x` in
    :math:`S_{\Phi,\mu}`. Here `m` is the largest norm of the patterns, and
    :math:`m_\Phi` the largest norm of their features. A memory with a neighbour at
    :math:`2 R_\Phi` has :math:`\Delta_\mu \le 2 m_\Phi R_\Phi`, hence a bound of at
    least `2 m (M - 1)`, which is trivial. There is always such a memory.

    With `distance` it is :math:`2 m (M - 1) e^{-\beta \Delta_\mu(r)}` for the ball of
    radius `r` = `distance` (`pattern_separation`). At the same radius this bound is
    never larger than the paper's.

    Args:
      memories: stored patterns.
      beta: inverse temperature, positive.
      similarity: `Dot`, `Cosine` or `NegativeSquaredL2` (whose slope doubles the term
        :math:`2 m_\Phi R_\Phi`).
      distance: radius of the ball, in feature space; None takes the paper's bound.

    Returns:
      One bound for each memory; a bound above `2 m` is trivial.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    memories = checked_memories(memories, similarity, features=True)
    beta = as_scalar("beta", beta, memories.dtype)
    geometry = geometry_of(memories, similarity)
    if distance is None:
        reach = 2 * largest_norm(geometry.keys) * geometry.radius
        separation = ball_separation(geometry, 0.0) - slope_of(similarity) * reach
    else:
        separation = pattern_separation(
            memories, similarity=similarity, distance=distance
        )
    others = memories.shape[0] - 1
    return 2 * largest_norm(memories) * others * jnp.exp(-beta * separation)


def weight_error_bound(
    memories: Float[Array, "M d"], weights: Float[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    r"""The error bound that the weights give: :math:`2 m (1 - p_\mu)`.

    Bounds :math:`\|\sum_\nu p_\nu \xi_\nu - \xi_\mu\|` for non-negative weights whose
    sum is at most one, as the weights of every separation are but `Exponentials`.
    `error_bound` follows from this bound.

    Args:
      memories: stored patterns.
      weights: weights over them.

    Returns:
      Entry `mu` bounds the distance of the retrieved pattern from memory `mu`.

    Raises:
      ValueError: if a weight is negative, weights sum to more than one, or shapes do
        not fit.
    """
    memories = checked_memories(memories, Dot())
    weights = as_floating(weights, "weights")
    if weights.ndim < 1 or weights.shape[-1] != memories.shape[0]:
        raise ValueError(
            f"weights have shape {weights.shape}, but there are {memories.shape[0]} "
            "memories"
        )
    if not is_traced(weights):
        least, most = (
            float(weights.min(initial=0)),
            float(weights.sum(-1).max(initial=0)),
        )
        if least < 0 or most > 1 + float(jnp.finfo(weights.dtype).eps) ** 0.5:
            raise ValueError(
                "weights must be non-negative and sum to at most 1, got a weight of "
                f"{least:g} and a sum of {most:g}"
            )
    dtype = wider_dtype(memories, weights)
    return 2 * largest_norm(memories).astype(dtype) * (1 - weights.astype(dtype))


class Representation(NamedTuple):
    """Result of `representation`.

    Attributes:
      key_weights: `W_K (M, D)`.
      query_weights: `W_Q (M, D)`.
    """

    key_weights: Float[Array, "M D"]
    query_weights: Float[Array, "M D"]


def representation(
    features: Float[Array, "M D"],
    target: Float[Array, "M M"],
    *,
    beta: ArrayLike,
    scale: ArrayLike = 1.0,
) -> Representation:
    r"""The weights with which attention attains any target [thm:perfect_kernel].

    The columns of :math:`X'` are the features, as in the paper, and the rows of the
    argument `features`. Let :math:`X^\dagger` be a left inverse of :math:`X'`. The
    weights :math:`W_K = X^\dagger` and :math:`W_Q = \beta^{-1} \log(P D_0) X^\dagger`
    give

    .. math:: \mathrm{softmax}(\beta (W_K X')^\top W_Q X') = P

    with the softmax over each column: column `j` holds the weights of query `j` over
    the keys. The theorem assumes orthonormal features, a minimiser of the deep-learning
    separation loss. Linearly independent features are enough, and the theorem's `M <=
    d` reads `M <= D`.

    Args:
      features: features `Phi` of the patterns, one per row, linearly independent.
      target: `P`, positive; each column sums to one.
      beta: inverse temperature, positive.
      scale: diagonal of :math:`D_0`, one number or `(M,)`, positive; it does not change
        `P`.

    Returns:
      `Representation`.

    Raises:
      ValueError: if there are more features than dimensions, the features are linearly
        dependent, the target is not positive and column-stochastic, or shapes do not
        fit.
    """
    features, target = as_floating(features, "features"), as_floating(target, "target")
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"features must have shape (M, D), got {features.shape}")
    count, dimension = features.shape
    if target.shape != (count, count):
        raise ValueError(
            f"target must have shape {(count, count)} for {count} features, got "
            f"{target.shape}"
        )
    if count > dimension:
        raise ValueError(
            f"features must be linearly independent: {count} are more than their "
            f"dimension {dimension}"
        )
    dtype = working_dtype(jnp.zeros((), wider_dtype(features, target)))
    features, target = features.astype(dtype), target.astype(dtype)
    check_finite("features", features)
    check_positive("target", target if is_traced(target) else np.asarray(target))
    beta = as_scalar("beta", beta, dtype)
    check_positive("scale", scale, dtype)
    scale = broadcast_rows("scale", jnp.asarray(scale).astype(dtype), (count,))
    if not is_traced(target):
        sums = target.sum(0)
        worst = sums[jnp.argmax(jnp.abs(sums - 1))]
        if abs(float(worst) - 1) > float(jnp.finfo(dtype).eps) ** 0.5:
            raise ValueError(f"columns of target must sum to 1, got {float(worst)}")
    cut = max(features.shape) * float(jnp.finfo(dtype).eps)  # singular values: rounding
    if not is_traced(features):
        rank = int(np.linalg.matrix_rank(np.asarray(features), rtol=cut))
        if rank < count:
            raise ValueError(
                f"features must be linearly independent: {count} have rank {rank}"
            )
    inverse = jnp.linalg.pinv(features.T, rtol=cut)
    # log P + log D_0, not log(P D_0): a huge or tiny scale must not overflow.
    logits = (jnp.log(target) + jnp.log(scale)[None]) / beta
    queries = jnp.matmul(logits, inverse, precision=lax.Precision.HIGHEST)
    return Representation(inverse, queries)


def gradient_descent_bound(
    distance: ArrayLike, *, learning_rate: ArrayLike, steps: int
) -> Float[Array, "*shape"]:
    r"""Bound on the gap of gradient descent on a smooth convex function.

    The lemma [lem:converge-gd] is :math:`f(x_k) - f(x^\star) \le \|x_0 - x^\star\|^2 /
    (2 \gamma k)`, for a convex `f` with a `G`-Lipschitz gradient and :math:`\gamma \le
    1/G`. The paper applies it to the separation loss, which is *not* convex:
    :math:`L(W) = L(-W)`, and :math:`L(0) = 0` is the maximum.

    Args:
      distance: :math:`\|x_0 - x^\star\|`, at least zero.
      learning_rate: :math:`\gamma`, positive.
      steps: `k`, at least 1.

    Returns:
      The bound, of the shape of `distance`.

    Raises:
      ValueError: if an argument is out of range.
    """
    check_count("steps", steps, 1)
    dtype = as_floating(distance, "distance").dtype
    distance = as_at_least("distance", distance, 0.0, dtype)
    return distance**2 / (
        2 * as_positive("learning_rate", learning_rate, dtype) * steps
    )
