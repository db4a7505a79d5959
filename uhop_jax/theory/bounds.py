r"""Statements in closed form: bounds, exact retrieval, the representation theorem."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from uhop_jax._checks import (
    as_floating,
    as_scalar,
    broadcast_rows,
    check_at_least,
    check_count,
    check_finite,
    check_positive,
    is_traced,
    wider_dtype,
    working_dtype,
)
from uhop_jax.kernels import LinearKernel, LowRankKernel
from uhop_jax.model import Model, check_model
from uhop_jax.similarity import (
    Dot,
    NegativeSquaredL2,
    Similarity,
    check_patterns,
)
from uhop_jax.theory._geometry import (
    ball_separation,
    check_linear,
    checked_memories,
    divide,
    geometry_of,
    largest_norm,
    margin_of,
    singular_values,
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
        reach = slope_of(similarity) * as_scalar("distance", distance, memories.dtype)
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
    sum is at most one, as the weights of every separation here are. `error_bound`
    follows from this bound.

    Args:
      memories: stored patterns.
      weights: weights over them.

    Returns:
      Entry `mu` bounds the distance of the retrieved pattern from memory `mu`.

    Raises:
      ValueError: if shapes do not fit.
    """
    memories = checked_memories(memories, Dot())
    weights = as_floating(weights, "weights")
    if weights.ndim < 1 or weights.shape[-1] != memories.shape[0]:
        raise ValueError(
            f"weights have shape {weights.shape}, but there are {memories.shape[0]} "
            "memories"
        )
    dtype = wider_dtype(memories, weights)
    return 2 * largest_norm(memories).astype(dtype) * (1 - weights.astype(dtype))


def exact_retrieval_slack(
    model: Model,
    memories: Float[Array, "M d"],
    *,
    distance: ArrayLike = 0.0,
) -> Float[Array, " M"]:
    r"""Slack of each memory in the condition of exact retrieval [thm:exact].

    The slack is :math:`\Delta_\mu - \mathrm{margin}/\beta`; the margin of `Entmax` is
    :math:`1/(\alpha - 1)`. The slack is non-negative if and only if the weights at
    :math:`\xi_\mu` are exactly one-hot, so that one update keeps :math:`\xi_\mu`. With
    `distance`, a non-negative slack means that one update retrieves the memory exactly
    from every state of its ball; for `Dot` and `NegativeSquaredL2` the converse holds
    too. The slack is minus infinity for a separation that is never one-hot, such as
    `Softmax`.

    On the unit sphere a non-negative slack means :math:`\max_{\nu \neq \mu}
    \ell_\Phi(\xi_\nu, \xi_\mu) \le -2t/(\beta (\alpha - 1))`. The paper's condition
    differs: there the difference of :math:`\ell_\Phi(\xi_\mu, \xi_\mu)` and the
    maximum, which is never negative, is at most the same negative number. The paper's
    proof also takes "one-hot" and "fixed point" for the same. They are the same only if
    no memory is a mixture of others: among the memories -1, 0, 1, the memory 0 is a
    fixed point of every update.

    Args:
      model: the model, whose separation has the `margin` that is used. The margin of
        `TopK(1)` is zero and must be exceeded: a tie goes to the lower index.
      memories: stored patterns.
      distance: as in `pattern_separation`.

    Returns:
      One slack for each memory.

    Raises:
      ValueError: if the one-hot weights of the separation do not follow from a margin
        (`Polynomial`), an argument is out of range, or shapes do not fit.
    """
    check_model(model)
    margin = margin_of(model.separation)
    lead = pattern_separation(memories, similarity=model.similarity, distance=distance)
    beta = as_scalar("beta", model.beta, lead.dtype)
    return lead - jnp.asarray(margin).astype(lead.dtype) / beta


class ExactDistance(NamedTuple):
    """Result of `exact_retrieval_distance`.

    Attributes:
      sufficient: scalar; patterns at least this far apart are retrieved exactly.
      necessary: scalar; patterns that are retrieved exactly are at least this far
        apart.
    """

    sufficient: Float[Array, ""]
    necessary: Float[Array, ""]


def exact_retrieval_distance(model: Model) -> ExactDistance:
    r"""Distance of patterns at which `Dot` retrieves them exactly [coro:exact_coro].

    The condition is :math:`\min_{\nu \neq \mu} \|\xi_\mu - \xi_\nu\| \ge \sqrt{2 / (L^2
    \beta (\alpha - 1))}`. It is sufficient with the lower Lipschitz constant :math:`L =
    \sigma_{\min}(W)`. With the upper constant :math:`\sigma_{\max}(W)`, which the paper
    takes, it is only necessary. By

    .. math:: 2 (K(\xi_\mu, \xi_\mu) - K(\xi_\nu, \xi_\mu)) = \|\Phi(\xi_\mu) -
      \Phi(\xi_\nu)\|^2 + \|\Phi(\xi_\mu)\|^2 - \|\Phi(\xi_\nu)\|^2

    the sufficient distance holds for a memory with the largest feature norm, and the
    necessary distance for a memory with the smallest. Both hold for all memories if
    their feature norms are equal, which is how the paper's "normalized patterns" must
    be read. For other patterns no distance is sufficient in general: the pattern 0 is
    never retrieved exactly.

    Args:
      model: a model with similarity `Dot`, whose kernel is a `LinearKernel`, a
        `LowRankKernel`, a `Centering` or `Identity`.

    Returns:
      `ExactDistance`; `sufficient` is infinite for a kernel with a null direction.

    Raises:
      ValueError: if the similarity is not `Dot` or the kernel is not linear, or as in
        `exact_retrieval_slack`.
    """
    check_model(model)
    kernel = model.similarity.kernel
    if not isinstance(model.similarity, Dot):
        raise ValueError(
            f"similarity must be Dot, got {type(model.similarity).__name__}"
        )
    check_linear(kernel)
    lower = upper = jnp.ones((), jnp.result_type(float))
    if isinstance(kernel, (LinearKernel, LowRankKernel)):
        weights = kernel.weights.astype(working_dtype(kernel.weights))
        values, active = singular_values(weights)
        lower = values[-1] if weights.shape[0] >= weights.shape[1] else values[-1] * 0
        lower = jnp.where(active.all(), lower, 0.0)
        upper = values[0]
    beta = as_scalar("beta", model.beta, lower.dtype)
    margin = jnp.asarray(margin_of(model.separation)).astype(lower.dtype)
    need = jnp.sqrt(jnp.where(margin == 0, 1.0, 2 * margin / beta))
    need = jnp.where(margin == 0, 0.0, need)  # keeps the derivative in beta finite
    return ExactDistance(*(divide(need, constant) for constant in (lower, upper)))


def well_separated(
    memories: Float[Array, "M d"], *, beta: ArrayLike, distance: ArrayLike
) -> Bool[Array, " M"]:
    r"""Whether `Softmax` with `Dot` provably stores each memory with its ball.

    Let :math:`q = (M - 1) e^{-\beta \Delta_\mu(r)}`, a bound on :math:`1 - p_\mu` in
    the ball of radius `r`, and let `s` be the largest distance from another memory. If
    :math:`s q \le r`, an update maps the ball into itself. If :math:`\beta s^2 q < 1`,
    the update is a contraction of the ball, since its Jacobian is :math:`\beta` times
    the covariance of the memories under the weights. If both hold, and
    :math:`\Delta_\mu(r) > 0`, every state of the ball converges to one fixed point,
    within :math:`s q` of the memory (Banach). The condition is sufficient, not
    necessary: the number of memories that meet it is a lower bound on capacity.

    The well-separation of U-Hop+ (Hu et al. 2024), :math:`\Delta_{\min} \ge \log(2 (M -
    1)/R)/\beta`, bounds the error of an update at the memory itself alone; the
    condition here holds for the whole ball. For features of equal norm no
    :math:`\beta` is enough at `r` = :math:`R_\Phi`: the balls of the two closest
    memories touch, and :math:`\Delta_\mu(R_\Phi) = 0`.

    Args:
      memories: stored patterns, or their features.
      beta: inverse temperature, positive.
      distance: radius `r` of the ball, positive; below `radius(memories)`, balls are
        disjoint.

    Returns:
      One boolean for each memory.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    memories = checked_memories(memories, Dot())
    beta = as_scalar("beta", beta, memories.dtype)
    distance = as_scalar("distance", distance, memories.dtype)
    geometry = geometry_of(memories, Dot())
    lead = ball_separation(geometry, distance)
    leakage = (memories.shape[0] - 1) * jnp.exp(-beta * lead)
    spread = geometry.distances.max(-1)
    contracts = beta * spread**2 * leakage < 1
    return (lead > 0) & (spread * leakage <= distance) & contracts


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
    if not is_traced(features):
        rank = int(np.linalg.matrix_rank(np.asarray(features)))
        if rank < count:
            raise ValueError(
                f"features must be linearly independent: {count} have rank {rank}"
            )
    inverse = jnp.linalg.pinv(features.T)
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
    check_at_least("distance", distance, 0.0)
    check_positive("learning_rate", learning_rate)
    check_count("steps", steps, 1)
    distance = as_floating(distance, "distance")
    return distance**2 / (2 * jnp.asarray(learning_rate).astype(distance.dtype) * steps)
