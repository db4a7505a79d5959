"""When one update retrieves a memory exactly, and when it stays in the ball."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from uhop_jax._checks import as_scalar, working_dtype
from uhop_jax.kernels import LinearKernel, LowRankKernel
from uhop_jax.model import Model, check_model
from uhop_jax.similarity import Dot
from uhop_jax.theory._geometry import (
    ball_separation,
    check_linear,
    checked_memories,
    divide,
    geometry_of,
    margin_of,
    singular_values,
)
from uhop_jax.theory.bounds import pattern_separation


def exact_retrieval_slack(
    model: Model, memories: Float[Array, "M d"], *, distance: ArrayLike = 0.0
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
