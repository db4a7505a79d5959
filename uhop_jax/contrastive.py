r"""A loss for Stage I with alignment: patterns must find themselves among all others.

Separation losses push all features apart, and nothing holds a corrupted query near its
pattern. The contrastive loss (InfoNCE; van den Oord et al. 2018) asks a corrupted view
of each pattern for the pattern. Its least value over all functions of a view and a
pattern is attained by the logarithm of their likelihood ratio.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, ArrayLike, Bool, Float

from uhop_jax._checks import (
    as_boolean,
    as_floating,
    as_scalar,
    broadcast_rows,
    check_choice,
    working_dtype,
)
from uhop_jax._pytree import Pytree
from uhop_jax.corruption import Mask
from uhop_jax.losses import LOSSES, SeparationLoss, scaled_rows


class ContrastiveLoss(Pytree):
    r"""InfoNCE between patterns and corrupted views of them.

    .. math:: L = -\mathrm{mean}_m \log \mathrm{softmax}_n(2 t \langle \Phi(x'_m),
        \Phi(x_n) \rangle)_m

    where :math:`x'_m` is a view of :math:`x_m`. On the sphere
    :math:`\exp(-t \|u - v\|^2)` is :math:`\exp(2 t \langle u, v \rangle)` up to a
    constant, so that `t` is the scale of the separation losses; the temperature is
    `1 / (2 t)`. The loss is at least zero.

    Attributes:
      t: scale of the exponents, positive.
      view: corruption that makes the views, such as `Mask(0.5)`.
      normalize: whether features are first scaled to unit norm.
    """

    t: ArrayLike = 5.0
    view: Any = Mask(0.5)
    normalize: bool = dataclasses.field(default=True, metadata={"static": True})

    def __call__(
        self,
        features: Float[Array, "*batch M D"],
        views: Float[Array, "*batch M D"],
        *,
        where: Bool[Array, "*batch M"] | None = None,
    ) -> Float[Array, "*batch"]:
        """The loss of the features of a memory set and of its views.

        Args:
          features: one feature vector for each pattern.
          views: one feature vector for the view of each pattern.
          where: true for valid patterns; a set without any has loss zero.

        Returns:
          One loss for each memory set, in at least float32.

        Raises:
          ValueError: if `t` is no positive number, or shapes or dtypes do not fit.
        """
        features = as_floating(features, "features")
        views = as_floating(views, "views")
        if features.ndim < 2 or views.shape != features.shape:
            raise ValueError(
                "features and views must have one shape (..., M, D), got "
                f"{features.shape} and {views.shape}"
            )
        dtype = working_dtype(features)
        t = as_scalar("t", self.t, dtype)
        valid = jnp.ones(features.shape[:-1], bool)
        if where is not None:
            where = as_boolean("where", where, "true for valid patterns")
            valid = broadcast_rows("where", where, valid.shape) & valid
        features, views = (
            jnp.where(valid[..., None], x.astype(dtype), 0.0) for x in (features, views)
        )
        if self.normalize:
            features, views = _unit(features), _unit(views)
        scores = (
            2
            * t
            * jnp.einsum("...md,...nd->...mn", views, features, precision="highest")
        )
        own = jnp.diagonal(scores, axis1=-2, axis2=-1)
        scores = jnp.where(valid[..., None, :], scores, -jnp.inf)
        losses = jnp.where(valid, logsumexp(scores, axis=-1) - own, 0.0)
        return losses.sum(-1) / jnp.maximum(valid.sum(-1), 1).astype(dtype)


def stage_one_loss(
    name: str, t: ArrayLike = 2.0, masked: ArrayLike = 0.5
) -> SeparationLoss | ContrastiveLoss:
    """The loss of Stage I with the name that configs and command lines use.

    Args:
      name: `contrastive`, or the name of a separation loss.
      t: scale of the loss, positive.
      masked: share of the components that a view of a contrastive loss masks.

    Raises:
      ValueError: if the name is unknown.
    """
    check_choice("separation loss", name, (*LOSSES, "contrastive"))
    if name == "contrastive":
        return ContrastiveLoss(t, Mask(masked))
    return LOSSES[name](t)


def _unit(x: Array) -> Array:
    """Rows of unit norm; a zero row stays zero."""
    x = scaled_rows(x)
    squared = (x * x).sum(-1, keepdims=True)
    zero = squared == 0
    return jnp.where(zero, 0.0, x / jnp.sqrt(jnp.where(zero, 1.0, squared)))
