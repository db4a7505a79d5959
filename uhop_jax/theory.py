r"""Theory, executable: the statements of the paper as functions, corrected.

The *ball* of a memory holds the states whose features lie within `distance` of its own;
the paper's :math:`S_{\Phi,\mu}` is that of `distance` :math:`R_\Phi` (`radius`).
Features are those the similarity compares: :math:`\Phi(u)`, on the unit sphere for
`Cosine`. One quantity decides most of what follows, the smallest lead of a memory over
the others anywhere in its ball, `pattern_separation`.

`memories` is `(M, d)` with `M` at least 2. Duplicates have `radius` zero and a
separation of at most zero; no bound excludes them, and none of them counts as stored.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from uhop_jax._checks import (
    as_floating,
    check_at_least,
    check_count,
    check_finite,
    check_positive,
    is_traced,
    wider_dtype,
    working_dtype,
)
from uhop_jax.kernels import Centering, Kernel, LinearKernel, LowRankKernel
from uhop_jax.retrieval import converge
from uhop_jax.separation import Separation, Softmax
from uhop_jax.similarity import (
    Cosine,
    Dot,
    NegativeSquaredL2,
    Similarity,
    check_patterns,
)

# Moving a state by `r` changes a difference of overlaps by at most this times `r` times
# the distance of the two memories.
_SLOPES: dict[type, float] = {Dot: 1.0, Cosine: 1.0, NegativeSquaredL2: 2.0}


def radius(
    memories: Float[Array, "M d"], *, similarity: Similarity = Dot()
) -> Float[Array, ""]:
    r""":math:`R_\Phi = \min_{\mu \neq \nu} \|\Phi(\xi_\mu) - \Phi(\xi_\nu)\| / 2`.

    [def:stored_and_retrieved], and with no kernel [def:stored_and_retrieved_org].

    Args:
      memories: stored patterns.
      similarity: its features are used.

    Returns:
      Half the smallest distance of two memories; zero if two coincide.

    Raises:
      ValueError: if there are fewer than two memories, or shapes do not fit.
    """
    memories = _checked(memories, similarity, features=True)
    return _geometry(memories, similarity).radius


def log_rbf(
    memories: Float[Array, "M d"],
    query: Float[Array, "*batch d"],
    *,
    scale: ArrayLike = 2.0,
    similarity: Similarity = Dot(),
) -> Float[Array, "*batch M"]:
    r""":math:`\ell_\Phi(\xi_\mu, x) = -t \|\Phi(\xi_\mu) - \Phi(x)\|^2`.

    On the unit sphere of features, and only there, it is :math:`2 t K(\xi_\mu, x) - 2
    t` [eqn:L_normalize]; pass `Cosine` to be on it.

    Args:
      memories: stored patterns.
      query: states.
      scale: `t`, positive.
      similarity: its features are used.

    Returns:
      Values of at most zero.

    Raises:
      ValueError: if `scale` is not positive, or shapes do not fit.
    """
    check_positive("scale", scale)
    memories = _checked(memories, similarity, features=True)
    query = as_floating(query, "query")
    check_patterns(memories, query, similarity)
    query = query.astype(working_dtype(query))
    keys, state = similarity.keys(memories), similarity.state(query)
    squared = NegativeSquaredL2()(keys, state)
    return squared * jnp.asarray(scale).astype(squared.dtype)


def pattern_separation(
    memories: Float[Array, "M d"],
    *,
    similarity: Similarity = Dot(),
    distance: ArrayLike = 0.0,
) -> Float[Array, " M"]:
    r"""Lead of each memory over the others, the smallest in its ball.

    At `distance` 0 it is :math:`\Delta_\mu = K(\xi_\mu, \xi_\mu) - \max_{\nu \neq \mu}
    K(\xi_\nu, \xi_\mu)`. In a ball of radius `r` the lead over memory `nu` falls by at
    most :math:`r \|\Phi(\xi_\mu) - \Phi(\xi_\nu)\|` (twice that for
    `NegativeSquaredL2`), and for `Dot` and `NegativeSquaredL2` a state in the ball
    attains it.

    Args:
      memories: stored patterns.
      similarity: overlap of states with memories.
      distance: radius of the ball, in feature space; unless it is 0, `similarity` must
        be `Dot`, `Cosine` or `NegativeSquaredL2`.

    Returns:
      One lead a memory.

    Raises:
      ValueError: if `distance` is negative or `similarity` has no ball, there are fewer
        than two memories, or shapes do not fit.
    """
    centre = isinstance(distance, (int, float)) and distance == 0
    memories = _checked(memories, similarity, features=not centre)
    reach = jnp.zeros((), memories.dtype)
    if not centre:
        reach = _slope(similarity) * _scalar("distance", distance, memories.dtype)
    return _separation(_geometry(memories, similarity), reach)


def error_bound(
    memories: Float[Array, "M d"],
    *,
    beta: ArrayLike,
    similarity: Similarity = Dot(),
    distance: ArrayLike | None = None,
) -> Float[Array, " M"]:
    r"""Bound on the error of one `Softmax` update in a ball [eqn:error_bound_exp].

    By default the paper's, in kernel form, :math:`\|T(x) - \xi_\mu\| \le 2 m (M - 1)
    e^{-\beta (\Delta_\mu - 2 m_\Phi R_\Phi)}` for every `x` in :math:`S_{\Phi,\mu}`,
    with the largest norms `m` of the patterns and :math:`m_\Phi` of their features. For
    a memory with a neighbour at :math:`2 R_\Phi` it is at least `2 m (M - 1)` and says
    nothing, since then :math:`\Delta_\mu \le 2 m_\Phi R_\Phi`: never all are bounded.

    With `distance` it is :math:`2 m (M - 1) e^{-\beta \Delta_\mu(r)}` for the ball of
    that radius (`pattern_separation`), which at the same radius is never larger.

    Args:
      memories: stored patterns.
      beta: inverse temperature, positive.
      similarity: `Dot`, `Cosine` or `NegativeSquaredL2` (whose slope doubles the term
        :math:`2 m_\Phi R_\Phi`).
      distance: radius of the ball, in feature space; None is the paper's form.

    Returns:
      One bound a memory; above `2 m` it says nothing.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    memories = _checked(memories, similarity, features=True)
    beta = _scalar("beta", beta, memories.dtype)
    geometry = _geometry(memories, similarity)
    if distance is None:
        reach = 2 * _largest_norm(geometry.keys) * geometry.radius
        separation = _separation(geometry, 0.0) - _slope(similarity) * reach
    else:
        separation = pattern_separation(
            memories, similarity=similarity, distance=distance
        )
    others = memories.shape[0] - 1
    return 2 * _largest_norm(memories) * others * jnp.exp(-beta * separation)


def weight_error_bound(
    memories: Float[Array, "M d"], weights: Float[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    r"""The error bound that the weights give: :math:`2 m (1 - p_\mu)`.

    Bounds :math:`\|\sum_\nu p_\nu \xi_\nu - \xi_\mu\|` for non-negative weights whose
    sum is at most one: those of every separation here. `error_bound` follows from it.

    Args:
      memories: stored patterns.
      weights: weights over them.

    Returns:
      Entry `mu` bounds the distance of the retrieved pattern from memory `mu`.

    Raises:
      ValueError: if shapes do not fit.
    """
    memories = _checked(memories, Dot())
    weights = as_floating(weights, "weights")
    if weights.ndim < 1 or weights.shape[-1] != memories.shape[0]:
        raise ValueError(
            f"weights have shape {weights.shape}, but there are {memories.shape[0]} "
            "memories"
        )
    dtype = wider_dtype(memories, weights)
    return 2 * _largest_norm(memories).astype(dtype) * (1 - weights.astype(dtype))


def exact_retrieval_slack(
    memories: Float[Array, "M d"],
    *,
    beta: ArrayLike,
    separation: Separation,
    similarity: Similarity = Dot(),
    distance: ArrayLike = 0.0,
) -> Float[Array, " M"]:
    r"""By how much each memory meets the condition of exact retrieval [thm:exact].

    :math:`\Delta_\mu - \mathrm{margin}/\beta`, with margin :math:`1/(\alpha - 1)` for
    `Entmax`. Non-negative if and only if the weights at :math:`\xi_\mu` are exactly
    one-hot, so that one update keeps :math:`\xi_\mu`. With `distance`, if one update
    retrieves it exactly from its whole ball (for `Dot` and `NegativeSquaredL2`, only if
    too). Minus infinity for a separation that is never one-hot, such as `Softmax`.

    On the unit sphere it says :math:`\max_{\nu \neq \mu} \ell_\Phi(\xi_\nu, \xi_\mu)
    \le -2t/(\beta (\alpha - 1))`. (The paper has :math:`\ell_\Phi(\xi_\mu, \xi_\mu)`
    minus that maximum, which is never negative, below the same negative number.) Nor is
    "one-hot" the same as "fixed point", as its proof has it: 0 among the memories -1,
    0, 1 is a fixed point of every update. It is where no memory is a mixture of others.

    Args:
      memories: stored patterns.
      beta: inverse temperature, positive.
      separation: its `margin` is used. That of `TopK(1)` is zero and must be exceeded:
        a tie goes to the lower index.
      similarity: overlap of states with memories.
      distance: as in `pattern_separation`.

    Returns:
      One slack a memory.

    Raises:
      ValueError: if the one-hot weights of `separation` do not follow from a margin
        (`Polynomial`), an argument is out of range, or shapes do not fit.
    """
    margin = _margin(separation)
    lead = pattern_separation(memories, similarity=similarity, distance=distance)
    beta = _scalar("beta", beta, lead.dtype)
    return lead - jnp.asarray(margin).astype(lead.dtype) / beta


class ExactDistance(NamedTuple):
    """Result of `exact_retrieval_distance`.

    Attributes:
      sufficient: patterns at least this far apart are retrieved exactly.
      necessary: patterns retrieved exactly are at least this far apart.
    """

    sufficient: Float[Array, ""]
    necessary: Float[Array, ""]


def exact_retrieval_distance(
    kernel: Kernel | None, *, beta: ArrayLike, separation: Separation
) -> ExactDistance:
    r"""How far apart patterns must be for exact retrieval by `Dot` [coro:exact_coro].

    :math:`\min_{\nu \neq \mu} \|\xi_\mu - \xi_\nu\| \ge \sqrt{2 / (L^2 \beta (\alpha -
    1))}` suffices with the lower Lipschitz constant :math:`L = \sigma_{\min}(W)`; with
    the upper one, :math:`\sigma_{\max}(W)`, which the paper takes, it is only
    necessary. By

    .. math:: 2 (K(\xi_\mu, \xi_\mu) - K(\xi_\nu, \xi_\mu)) = \|\Phi(\xi_\mu) -
      \Phi(\xi_\nu)\|^2 + \|\Phi(\xi_\mu)\|^2 - \|\Phi(\xi_\nu)\|^2

    the first holds for a memory whose *feature norm* no other exceeds, the second for
    one that exceeds no other; both for all of them where feature norms are equal, as
    the paper's "normalized patterns" must be read. Without that no distance suffices:
    the pattern 0 is never retrieved exactly.

    Args:
      kernel: a `LinearKernel`, `LowRankKernel` or `Centering`; None is the identity.
      beta: inverse temperature, positive.
      separation: its `margin` is used.

    Returns:
      `ExactDistance`; `sufficient` is infinite for a kernel that forgets a direction.

    Raises:
      ValueError: if the kernel is not linear, or as in `exact_retrieval_slack`.
    """
    _check_linear(kernel)
    lower = upper = jnp.ones((), jnp.result_type(float))
    if isinstance(kernel, (LinearKernel, LowRankKernel)):
        weights = kernel.weights.astype(working_dtype(kernel.weights))
        values, active = _singular_values(weights)
        lower = values[-1] if weights.shape[0] >= weights.shape[1] else values[-1] * 0
        lower = jnp.where(active.all(), lower, 0.0)
        upper = values[0]
    beta = _scalar("beta", beta, lower.dtype)
    need = jnp.sqrt(2 * jnp.asarray(_margin(separation)).astype(lower.dtype) / beta)
    return ExactDistance(*(_divide(need, constant) for constant in (lower, upper)))


def well_separated(
    memories: Float[Array, "M d"], *, beta: ArrayLike, distance: ArrayLike
) -> Bool[Array, " M"]:
    r"""Whether `Softmax` with `Dot` provably stores each memory, with its ball.

    With :math:`q = (M - 1) e^{-\beta \Delta_\mu(r)}`, a bound on :math:`1 - p_\mu` in
    the ball of radius `r`, and the largest distance `s` of another memory: if :math:`s
    q \le r` an update maps the ball into itself, and if :math:`\beta s^2 q < 1` it
    contracts it (its Jacobian is :math:`\beta` times the covariance of the memories
    under the weights). If both hold, and :math:`\Delta_\mu(r) > 0`, every state of the
    ball converges to one fixed point, within :math:`s q` of the memory (Banach).
    Sufficient, not necessary, and so a lower bound on capacity.

    This is the well-separation of U-Hop+ (Hu et al. 2024), :math:`\Delta_{\min} \ge
    \log(2 (M - 1)/R)/\beta`, with what a whole ball takes: theirs bounds the error of
    the update of the memory itself alone. For features of equal norm no :math:`\beta`
    is enough for `r` = :math:`R_\Phi`: there the balls of the two closest memories
    touch, and :math:`\Delta_\mu(R_\Phi) = 0`.

    Args:
      memories: stored patterns, or their features.
      beta: inverse temperature, positive.
      distance: radius `r` of the ball, positive; below `radius(memories)`, balls are
        disjoint.

    Returns:
      One boolean a memory.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    memories = _checked(memories, Dot())
    beta = _scalar("beta", beta, memories.dtype)
    distance = _scalar("distance", distance, memories.dtype)
    geometry = _geometry(memories, Dot())
    lead = _separation(geometry, distance)
    strayed = (memories.shape[0] - 1) * jnp.exp(-beta * lead)
    spread = geometry.distances.max(-1)
    contracts = beta * spread**2 * strayed < 1
    return (lead > 0) & (spread * strayed <= distance) & contracts


class Stored(NamedTuple):
    """Result of `stored`.

    Attributes:
      stored: `(M,)`, whether all sampled points of the ball went where they should.
      fraction: `(M,)`, the share of them that did.
      radius: scalar, of the balls.
    """

    stored: Bool[Array, " M"]
    fraction: Float[Array, " M"]
    radius: Float[Array, ""]


def stored(
    key: Array,
    memories: Float[Array, "M d"],
    *,
    beta: ArrayLike,
    separation: Separation = Softmax(),
    similarity: Similarity = Dot(),
    samples: int = 32,
    max_steps: int = 256,
    tolerance: float = 1e-3,
) -> Stored:
    r"""Which memories are stored, by sampling their balls [def:stored_and_retrieved].

    A point counts if it converges to the fixed point that the memory itself converges
    to, and that lies in the ball. Points are uniform in the image of :math:`\Phi`
    within :math:`R_\Phi` of the memory; for `Cosine` on the cap of the sphere, nearly
    uniform. Sampling can refute, not prove; `well_separated` proves. Balls are open:
    closed ones of the two closest memories always meet. Where two memories coincide, up
    to rounding, no ball has a point, and none is stored.

    With `Dot` and a large enough `beta`, of the two closest memories the one of smaller
    feature norm is never stored: part of its ball overlaps more with the other.

    Args:
      key: random key.
      memories: stored patterns.
      beta: inverse temperature, positive.
      separation: maps scaled overlaps to weights over the memories.
      similarity: overlap of states with memories, of a linear kernel or none.
      samples: points in each ball, at least 1.
      max_steps: cap on the updates of a point; points that reach it do not count.
      tolerance: how far apart, relative to the radius, two limits may be and count as
        one.

    Returns:
      `Stored`.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    memories, run = _storage_test(
        key, memories, beta, separation, similarity, samples, max_steps, tolerance
    )
    return run(jnp.ones(memories.shape[0], jnp.bool_))


class Capacity(NamedTuple):
    """Result of `capacity`.

    Attributes:
      capacity: the largest size of which all patterns are stored, zero if none.
      sizes: `(sizes,)`, as given.
      stored: `(sizes,)`, the share of the patterns that are stored.
    """

    capacity: int
    sizes: Int[Array, " sizes"]
    stored: Float[Array, " sizes"]


def capacity(
    key: Array,
    patterns: Float[Array, "N d"],
    *,
    sizes: Sequence[int],
    beta: ArrayLike,
    separation: Separation = Softmax(),
    similarity: Similarity = Dot(),
    samples: int = 32,
    max_steps: int = 256,
    tolerance: float = 1e-3,
) -> Capacity:
    """How many of the patterns can be stored at once, by sampling.

    Memory sets are the first `size` patterns; one compiled program serves all sizes.

    Args:
      key: random key, the same points for every size.
      patterns: patterns to store, in the order in which they are added.
      sizes: numbers of memories to try, each from 2 to `N`.
      beta: as in `stored`.
      separation: as in `stored`.
      similarity: as in `stored`.
      samples: as in `stored`.
      max_steps: as in `stored`.
      tolerance: as in `stored`.

    Returns:
      `Capacity`.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    patterns, run = _storage_test(
        key, patterns, beta, separation, similarity, samples, max_steps, tolerance
    )
    if not sizes:
        raise ValueError("sizes must name at least one number of memories, got none")
    for size in sizes:
        check_count("sizes", size, 2, patterns.shape[0])
    index = jnp.arange(patterns.shape[0])
    counts = [int(run(index < size).stored.sum()) for size in sizes]
    full = [size for size, count in zip(sizes, counts, strict=True) if count == size]
    share = jnp.asarray(np.divide(counts, sizes)).astype(patterns.dtype)
    return Capacity(max(full, default=0), jnp.asarray(sizes), share)


def spherical_code_bounds(size: int, dimension: int) -> tuple[float, float]:
    r"""Bounds on the :math:`\Delta_{\min}` of the best code of unit features (U-Hop+).

    :math:`\Delta_{\min} = 1 - \max \cos`, hence :math:`R_\Phi^2 = \Delta_{\min}/2`.
    Exact for a simplex (`M <= D + 1`, :math:`M/(M - 1)`), an orthoplex (`M <= 2 D`,
    one) and on the circle. Else, with :math:`s^{D-1} = 2\sqrt\pi\, \Gamma((D+1)/2) / (M
    \Gamma(D/2))`, caps that fit give at most :math:`2 s^2` and caps that cover at least
    :math:`s^2/2`. Both are inside the bounds of the released code of U-Hop+, which
    bounds the smallest *distance*, :math:`2 s`, from above.

    Args:
      size: number `M` of features, at least 2.
      dimension: `D`, at least 2.

    Returns:
      A lower and an upper bound.

    Raises:
      ValueError: if an argument is out of range.
    """
    check_count("size", size, 2)
    check_count("dimension", dimension, 2)
    if size <= dimension + 1:
        return (size / (size - 1),) * 2
    if size <= 2 * dimension:
        return 1.0, 1.0
    if dimension == 2:
        return (1 - math.cos(2 * math.pi / size),) * 2
    log_s = math.log(2 * math.sqrt(math.pi) / size)
    log_s += math.lgamma((dimension + 1) / 2) - math.lgamma(dimension / 2)
    squared = math.exp(2 * log_s / (dimension - 1))
    return squared / 2, min(2 * squared, 1.0)


def metastable_size(
    weights: Float[Array, "*batch M"], *, threshold: ArrayLike = 0.0
) -> Int[Array, "*batch"]:
    """How many memories a state mixes: weights above the threshold.

    Args:
      weights: weights over the memories.
      threshold: 0 counts the support of a sparse separation; 0.01 is usual for
        `Softmax`.

    Returns:
      A number for each state; 1 is a pattern retrieved alone.

    Raises:
      ValueError: if `threshold` is negative.
    """
    check_at_least("threshold", threshold, 0.0)
    weights = as_floating(weights, "weights")
    threshold = jnp.asarray(threshold).astype(weights.dtype)
    return (weights > threshold).sum(-1, dtype=jnp.int32)


@jax.jit
def effective_memories(weights: Float[Array, "*batch M"]) -> Float[Array, "*batch"]:
    r"""The participation ratio :math:`(\sum p)^2 / \sum p^2`, a soft `metastable_size`.

    Args:
      weights: non-negative weights over the memories; their scale has no effect.

    Returns:
      From 1 (one memory) to `M` (all alike); zero for a row without any weight.
    """
    weights = as_floating(weights, "weights")
    weights = weights.astype(working_dtype(weights))
    top = weights.max(-1, keepdims=True, initial=0.0)
    weights = weights / jnp.where(top == 0, 1.0, top)
    return _divide(weights.sum(-1) ** 2, (weights * weights).sum(-1), empty=0.0)


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

    With features :math:`X'` (one a row here, one a column in the paper) and a left
    inverse :math:`X^\dagger` of the paper's, :math:`W_K = X^\dagger` and :math:`W_Q =
    \beta^{-1} \log(P D_0) X^\dagger` give

    .. math:: \mathrm{softmax}(\beta (W_K X')^\top W_Q X') = P

    over each column: column `j` holds the weights of query `j` over the keys. The
    theorem assumes orthonormal features, a minimiser of the deep-learning separation
    loss; that they are linearly independent is enough (and its `M <= d` is `M <= D`).

    Args:
      features: `Phi` of the patterns, one a row, linearly independent.
      target: `P`, positive, each column summing to one.
      beta: inverse temperature, positive.
      scale: diagonal of :math:`D_0`, one number or `(M,)`, positive; of no effect on
        `P`.

    Returns:
      `Representation`.

    Raises:
      ValueError: if there are more features than dimensions, they are dependent, the
        target is not positive and column-stochastic, or shapes do not fit.
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
    check_positive("target", target)
    beta = _scalar("beta", beta, dtype)
    check_positive("scale", scale)
    scale = jnp.broadcast_to(jnp.asarray(scale).astype(dtype), (count,))
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
    distance: ArrayLike, *, step_size: ArrayLike, steps: int
) -> Float[Array, "*shape"]:
    r"""Gap of gradient descent on a smooth convex function [lem:converge-gd].

    :math:`f(x_k) - f(x^\star) \le \|x_0 - x^\star\|^2 / (2 \gamma k)`, for a convex `f`
    with a `G`-Lipschitz gradient and :math:`\gamma \le 1/G`. It does *not* apply to the
    separation loss, for which the paper states it: :math:`L(W) = L(-W)` and :math:`L(0)
    = 0` is the maximum, so that `L` is not convex.

    Args:
      distance: :math:`\|x_0 - x^\star\|`, at least zero.
      step_size: :math:`\gamma`, positive.
      steps: `k`, at least 1.

    Returns:
      The bound.

    Raises:
      ValueError: if an argument is out of range.
    """
    check_at_least("distance", distance, 0.0)
    check_positive("step_size", step_size)
    check_count("steps", steps, 1)
    distance = as_floating(distance, "distance")
    return distance**2 / (2 * jnp.asarray(step_size).astype(distance.dtype) * steps)


class _Geometry(NamedTuple):
    """Of the memories among themselves; diagonals mean nothing but for `leads`."""

    keys: Array
    leads: Array  # K(xi_mu, xi_mu) - K(xi_nu, xi_mu), infinite where not to be counted
    distances: Array  # of the features
    radius: Array


@jax.jit
def _geometry(memories: Array, similarity: Similarity, mask: Any = None) -> _Geometry:
    keys = similarity.keys(memories)
    gram = similarity(memories, memories)
    distances = _distances(keys)
    skip = jnp.eye(memories.shape[0], dtype=jnp.bool_)
    if mask is not None:
        skip = skip | ~mask[:, None] | ~mask[None]
    leads = jnp.where(skip, jnp.inf, jnp.diagonal(gram)[:, None] - gram)
    return _Geometry(
        keys, leads, distances, jnp.where(skip, jnp.inf, distances).min() / 2
    )


@jax.jit
def _separation(geometry: _Geometry, reach: ArrayLike) -> Array:
    return (geometry.leads - reach * geometry.distances).min(-1)


def _distances(keys: Array) -> Array:
    """From differences, not from the Gram matrix; less than rounding is zero."""
    distances = jnp.sqrt(-NegativeSquaredL2()(keys, keys))
    rounding = 8 * float(jnp.finfo(keys.dtype).eps) * _largest_norm(keys)
    return jnp.where(distances <= rounding, 0.0, distances)


@jax.jit
def _largest_norm(x: Array) -> Array:
    return jnp.linalg.norm(x, axis=-1).max()


def _divide(a: Array, b: Array, empty: float = jnp.inf) -> Array:
    return jnp.where(b == 0, empty, a / jnp.where(b == 0, 1.0, b))


def _checked(memories: Any, similarity: Similarity, *, features: bool = False) -> Array:
    """The memories in the working dtype, once they and the similarity are in order."""
    memories = as_floating(memories, "memories")
    if memories.ndim != 2 or memories.shape[0] < 2:
        raise ValueError(
            f"memories must have shape (M, d) with M at least 2, got {memories.shape}"
        )
    check_patterns(memories, memories, similarity)
    kernel = similarity.kernel
    if kernel is not None and kernel.set_axes:
        raise ValueError(
            f"kernel has {kernel.set_axes} axes of memory sets, memories have none"
        )
    if features and kernel is not None and not kernel.has_energy:
        raise ValueError(
            f"{type(kernel).__name__} maps queries and memories differently: memories "
            "have no ball in its features"
        )
    check_finite("memories", memories)
    return memories.astype(working_dtype(memories))


def _scalar(name: str, value: ArrayLike, dtype: Any) -> Array:
    if jnp.ndim(value):
        raise ValueError(f"{name} must be one number, got shape {jnp.shape(value)}")
    check_positive(name, value)
    return jnp.asarray(value).astype(dtype)


def _slope(similarity: Similarity) -> float:
    if type(similarity) not in _SLOPES:
        raise ValueError(
            f"no lead in a ball is known for {type(similarity).__name__}, only for "
            f"{', '.join(c.__name__ for c in _SLOPES)}"
        )
    return _SLOPES[type(similarity)]


def _margin(separation: Separation) -> ArrayLike:
    separation.check()
    if not separation.has_conjugate:
        raise ValueError(
            f"no margin makes the weights of {type(separation).__name__} one-hot"
        )
    margin = separation.margin()
    if jnp.ndim(margin):
        raise ValueError(f"alpha must be one number, got shape {jnp.shape(margin)}")
    return margin


def _check_linear(kernel: Kernel | None) -> None:
    if not isinstance(kernel, (LinearKernel, LowRankKernel, Centering, type(None))):
        raise ValueError(
            "kernel must be a LinearKernel, LowRankKernel, Centering or None, got "
            f"{type(kernel).__name__}"
        )
    if kernel is not None and kernel.set_axes:
        raise ValueError(
            f"kernel must be one, got {kernel.set_axes} axes of memory sets"
        )


@jax.jit
def _singular_values(weights: Array) -> tuple[Array, Array]:
    """Descending, and which of them are more than rounding."""
    values = jnp.linalg.svd(weights, compute_uv=False)
    return values, _active(values, weights)


def _active(values: Array, weights: Array) -> Array:
    return values > max(weights.shape) * float(jnp.finfo(values.dtype).eps) * values[0]


@jax.jit
def _image(kernel: Kernel | None) -> Array | None:
    """Columns `(D, r)`, orthonormal or zero, that span the image; None: all of it."""
    if not isinstance(kernel, (LinearKernel, LowRankKernel)):
        return None
    weights = kernel.weights.astype(working_dtype(kernel.weights))
    axes, values, _ = jnp.linalg.svd(weights, full_matrices=False)
    return jnp.where(_active(values, weights)[None], axes, 0.0)


def _storage_test(
    key, memories, beta, separation, similarity, samples, max_steps, tolerance
):
    """The checked memories, and what tests those of a mask."""
    memories = _checked(memories, similarity, features=True)
    _check_linear(similarity.kernel)
    beta = _scalar("beta", beta, memories.dtype)
    check_count("samples", samples, 1)
    check_count("max_steps", max_steps, 1)
    check_positive("tolerance", tolerance)
    image = _image(similarity.kernel)

    def run(mask: Array) -> Stored:
        return _stored(
            key, memories, mask, image, beta, separation, similarity, tolerance,
            samples=samples, max_steps=max_steps,
        )  # fmt: skip

    return memories, run


@functools.partial(jax.jit, static_argnames=("samples", "max_steps"))
def _stored(
    key, memories, mask, image, beta, separation, similarity, tolerance, *, samples,
    max_steps,
) -> Stored:  # fmt: skip
    keys, _, _, radius = _geometry(memories, similarity, mask)
    # The dynamics run on features, where all kernels are none.
    on_features = dataclasses.replace(similarity, kernel=None)
    on_sphere = isinstance(similarity, Cosine)

    def balls(rows: Array) -> Array:
        """Which points of the balls of a few memories went where they should."""
        centres = keys[rows]
        points = jax.vmap(
            lambda key, centre: _sample_ball(
                key, centre, radius, image, samples, on_sphere
            )
        )(row_keys[rows], centres)
        end = converge(
            keys,
            jnp.concatenate([centres[:, None], points], axis=1),
            beta=beta,
            separation=separation,
            similarity=on_features,
            max_steps=max_steps,
            mask=mask,
        )
        state = on_features.state(end.state)
        inside = jnp.linalg.norm(state - centres[:, None], axis=-1) <= radius
        common = jnp.linalg.norm(state - state[:, :1], axis=-1) <= tolerance * radius
        there = end.converged & inside & common
        return there[:, 1:] & there[:, :1]

    # A few balls at a time: bounded memory, and none waits for the slowest of all.
    count = keys.shape[0]
    row_keys, batch = jax.random.split(key, count), min(count, 8)
    rows = jnp.arange(-(-count // batch) * batch).reshape(-1, batch) % count
    there = lax.map(balls, rows).reshape(-1, samples)[:count]
    there = there & mask[:, None] & (radius > 0)
    return Stored(there.all(-1), there.mean(-1, dtype=keys.dtype), radius)


def _sample_ball(key, centre, radius, image, samples, on_sphere) -> Array:
    """Points `(samples, D)` within `radius` of `centre`, in the image of the kernel."""
    key, radius_key = jax.random.split(key)
    axes = centre.shape[0] if image is None else image.shape[1]
    rank = jnp.asarray(axes).astype(centre.dtype)
    toward = jax.random.normal(key, (samples, axes), centre.dtype)
    if image is not None:
        image = image.astype(centre.dtype)
        rank = (image != 0).any(0).sum().astype(centre.dtype)
        toward = jnp.matmul(toward, image.T, precision=lax.Precision.HIGHEST)
    if on_sphere:
        toward = toward - (toward * centre[None]).sum(-1, keepdims=True) * centre[None]
        rank = jnp.maximum(rank - 1, 1.0)
    norm = jnp.linalg.norm(toward, axis=-1, keepdims=True)
    toward = toward / jnp.where(norm == 0, 1.0, norm)
    share = jax.random.uniform(radius_key, (samples, 1), centre.dtype) ** (1 / rank)
    chord = radius * share
    if not on_sphere:
        return centre[None] + chord * toward
    # A chord c of the unit sphere subtends the angle of cosine 1 - c^2/2.
    along = chord * jnp.sqrt(jnp.maximum(1 - chord**2 / 4, 0.0))
    return (1 - chord**2 / 2) * centre[None] + along * toward
