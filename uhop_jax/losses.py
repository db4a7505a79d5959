r"""Separation losses: how close the features of a memory set are to one another.

A loss depends on the features :math:`F = \Xi W^T` only through their Gram matrix, or
without normalisation through their distances. No function builds an `(M, M, D)` array.

A loss is a frozen pytree whose only leaf is `t`.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from uhop_jax._checks import (
    as_boolean,
    as_floating,
    as_positive,
    as_scalar,
    broadcast_rows,
    check_choice,
    check_count,
    working_dtype,
)
from uhop_jax._products import gram_matrix
from uhop_jax._pytree import Pytree
from uhop_jax.similarity import NegativeSquaredL2


class SeparationLoss(Pytree, abc.ABC):
    """One exponent for each pair of features, and a reduction over the pairs.

    The losses of this module are not convex in `W`, contrary to the paper: they are
    even in `W`, and without normalisation `W = 0` maximises the average and the maximum
    loss.

    Subclasses implement `_reduce` and `_least`, and may have exponents of their own.

    Attributes:
      t: scale of the exponents, positive; the paper has 2.
      normalize: whether features are first scaled to unit norm. Without normalisation
        the average and the maximum loss have no minimiser: larger features always lower
        them.
      of_inner_products: whether the exponents are a function of inner products, not of
        distances.
    """

    of_inner_products: ClassVar[bool] = False

    t: ArrayLike = 2.0
    normalize: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def of_distances(self) -> bool:
        """Whether the loss depends on distances alone, wherever the origin is."""
        return not (self.normalize or self.of_inner_products)

    def __call__(
        self,
        features: Float[Array, "*batch M D"],
        *,
        where: Bool[Array, "*batch M"] | None = None,
    ) -> Float[Array, "*batch"]:
        """The loss of the features of a memory set.

        Args:
          features: one feature vector per row.
          where: true for valid patterns; a set with fewer than two valid patterns has
            loss zero.

        Returns:
          One loss for each memory set, in at least float32.

        Raises:
          ValueError: if `t` is no positive number, or shapes or dtypes do not fit.
        """
        features = as_floating(features, "features")
        if features.ndim < 2:
            raise ValueError(
                f"features must have shape (..., M, D), got {features.shape}"
            )
        loss = self.in_dtype(working_dtype(features))
        if features.shape[-2] == 0:
            return jnp.zeros(features.shape[:-2], working_dtype(features))
        if where is not None:
            where = as_boolean("where", where, "true for valid patterns")
            where = broadcast_rows("where", where, features.shape[:-1])
            features = jnp.where(where[..., None], features, 0.0)
        if self.of_distances:
            return loss.from_pairs(squared_distances(features), where)
        features = scaled_rows(features) if self.normalize else features
        return loss.from_pairs(gram_matrix(features), where)

    def least(
        self, number: Int[ArrayLike, "*batch"], dimension: int
    ) -> Float[Array, "*batch"]:
        """A lower bound of the loss; each class states its own.

        Args:
          number: `M`, the number of valid features.
          dimension: `D`, the dimension of the features.

        Returns:
          The bound; 0 for fewer than two features, whose loss is 0.

        Raises:
          ValueError: if `t` or the dimension is out of range.
        """
        check_count("dimension", dimension, 1)
        M = jnp.asarray(number).astype(jnp.result_type(float))
        t = as_positive("t", self.t, M.dtype)
        return jnp.where(M < 2, 0.0, 2 * t * self._least(M, float(dimension)))

    def in_dtype(self, dtype: Any) -> "SeparationLoss":
        """The loss with `t` in a dtype; refuses a `t` that is no positive number."""
        return dataclasses.replace(self, t=as_scalar("t", self.t, dtype))

    def from_pairs(
        self,
        pairs: Float[Array, "*batch M M"],
        where: Bool[Array, "*batch M"] | None = None,
    ) -> Float[Array, "*batch"]:
        """The loss, from squared distances if `of_distances`, else the Gram matrix."""
        distinct = _distinct(pairs)
        if self.normalize:
            pairs = _on_sphere(pairs)
            if not self.of_inner_products:
                pairs = jnp.where(distinct, 2 * (1 - pairs), 0.0)
        valid = jnp.ones_like(distinct)
        if where is not None:
            valid = where[..., :, None] & where[..., None, :]
        return self._reduce(self._exponents(pairs), valid, distinct)

    def value_and_slope(self, x: Array) -> tuple[Array, Array]:
        """The loss, and twice the symmetric part of its derivative in the Gram matrix.

        `x` is the features `(M, D)` if `of_distances`, else their Gram matrix.
        """
        pairs = squared_distances(x) if self.of_distances else x
        value, slope = jax.value_and_grad(self.from_pairs)(pairs)
        slope = slope + slope.T
        if self.of_distances:
            slope = 2 * (jnp.diag(slope.sum(0)) - slope)
        return value, slope

    def _exponents(self, pairs: Array) -> Array:
        """Exponents `(..., M, M)` from squared distances, or from inner products."""
        return -(pairs * self.t)

    @abc.abstractmethod
    def _reduce(self, exponents: Array, valid: Array, distinct: Array) -> Array:
        """The loss, from exponents, and the pairs that are valid or distinct."""

    @abc.abstractmethod
    def _least(self, M: Array, D: float) -> Array | float:
        """`least` for at least two features, in units of `2 t`."""


class _MeanLoss(SeparationLoss):
    """The logarithm of the mean exponential.

    Attributes:
      pairs: pairs that the mean takes: `distinct` (u != v, as in the authors' code) or
        `all` (as in the paper's expectation).
    """

    pairs: str = dataclasses.field(default="distinct", metadata={"static": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("pairs", self.pairs, ("distinct", "all"))

    def _reduce(self, exponents, valid, distinct):
        counted = valid if self.pairs == "all" else valid & distinct
        exponents = jnp.where(counted, exponents, -jnp.inf)
        number = jnp.where((valid & distinct).any((-2, -1)), counted.sum((-2, -1)), 0)
        top = lax.stop_gradient(exponents.max((-2, -1)))
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        total = jnp.exp(exponents - top[..., None, None]).sum((-2, -1))
        mean = total / jnp.maximum(number, 1).astype(total.dtype)
        log = jnp.log(jnp.where(number > 0, mean, 1.0))
        return jnp.where(number > 0, top + log, 0.0)


class AverageLoss(_MeanLoss):
    r"""The average loss [def:max-loss].

    :math:`\log \mathrm{mean}_{u \ne v} \exp(-t \|\Phi(u) - \Phi(v)\|^2)`; with
    `pairs="all"` the mean takes `u = v` too, as in the paper's expectation. On the
    sphere it is the loss of U-Hop+ at temperature `1 / (2 t)`, up to a constant.

    The mean of the exponentials is at least the exponential of the mean exponent
    (Jensen), and the mean cosine is least if the features sum to zero: on the sphere
    the loss is at least :math:`-2 t M / (M - 1)`. The regular simplex attains the bound
    for `M <= D + 1`. The bound holds for more features and with all pairs too, but is
    not attained. Without normalisation there is no bound.
    """

    def _least(self, M, D):
        return -M / jnp.maximum(M - 1, 1.0) if self.normalize else -jnp.inf


class MaximumLoss(SeparationLoss):
    r"""The maximum loss, :math:`\max_{u \ne v} -t \|\Phi(u) - \Phi(v)\|^2`.

    On the sphere it is at least :math:`-2 t M / (M - 1)` for `M <= D + 1`, as the
    average loss, else :math:`-2 t`, since some cosine is then at least zero (Rankin
    1955); attained for `M <= 2 D`. Without normalisation there is no bound.
    """

    def _reduce(self, exponents, valid, distinct):
        exponents = jnp.where(valid & distinct, exponents, -jnp.inf)
        # The gradient of `max` compares the maximum with the entries. If XLA computes
        # them twice with different rounding, no entry equals the maximum and the
        # gradient is zero. `argmax` avoids the comparison.
        flat = exponents.reshape(*exponents.shape[:-2], -1)
        index = lax.stop_gradient(flat).argmax(-1, keepdims=True)
        top = jnp.take_along_axis(flat, index, axis=-1)[..., 0]
        return jnp.where(jnp.isfinite(top), top, 0.0)

    def _least(self, M, D):
        if not self.normalize:
            return -jnp.inf
        return jnp.where(M <= D + 1, -M / jnp.maximum(M - 1, 1.0), -1.0)


class DeepLoss(_MeanLoss):
    r"""The loss for layers [dfn:separation-loss].

    :math:`\log \mathrm{mean}_{u \ne v} \exp(2t (K(u, v)^2 - 1))`; with `pairs="all"`
    the mean takes `u = v` too. On the sphere the loss is at least :math:`2 t (c - 1)`
    with :math:`c = \max(0, (M - D) / (D (M - 1)))`, the least mean squared cosine
    (Welch 1974). For `M <= D` orthogonal features attain :math:`-2 t`; for `M > D`
    equiangular tight frames attain the bound, where they exist. Without normalisation
    the loss is at least :math:`-2 t`.
    """

    of_inner_products: ClassVar[bool] = True

    def _exponents(self, pairs):
        return 2 * self.t * (pairs * pairs - 1)

    def _least(self, M, D):
        if not self.normalize:
            return -1.0
        return jnp.maximum(M - D, 0.0) / (D * jnp.maximum(M - 1, 1.0)) - 1


LOSSES: dict[str, type[SeparationLoss]] = {
    "average": AverageLoss,
    "maximum": MaximumLoss,
    "deep": DeepLoss,
}


def loss_from_name(name: str, t: ArrayLike = 2.0) -> SeparationLoss:
    """The separation loss with the name that configs and command lines use.

    Args:
      name: `average`, `maximum` or `deep`.
      t: scale of the loss, positive.

    Raises:
      ValueError: if the name is unknown; the message lists the choices.
    """
    check_choice("separation loss", name, LOSSES)
    return LOSSES[name](t)


def check_loss(loss: Any) -> None:
    """Refuses anything but a separation loss."""
    if not isinstance(loss, SeparationLoss):
        raise ValueError(
            f"loss must be a separation loss such as AverageLoss(t=2.0), got {loss!r}"
        )


def smallest_separation(features: Float[Array, "*batch M D"]) -> Float[Array, "*batch"]:
    r""":math:`\Delta_{\min} = 1 - \max_{u \ne v} \cos(\Phi(u), \Phi(v))` of U-Hop+.

    Args:
      features: one feature vector per row, at least two.

    Returns:
      One value in `[0, 2]` for each memory set, in at least float32.

    Raises:
      ValueError: if there are fewer than two features.
    """
    features = as_floating(features, "features")
    if features.ndim < 2 or features.shape[-2] < 2:
        raise ValueError(
            f"features must be at least two rows, got shape {features.shape}"
        )
    return delta_min_of_gram(gram_matrix(scaled_rows(features)))


def scaled_rows(x: Array) -> Array:
    """Rows scaled by powers of two to largest components near one, at least float32.

    The scaling is exact and does not change cosines. Products of tiny or huge rows then
    neither underflow nor overflow.
    """
    x = x.astype(working_dtype(x))
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0.0)
    _, exponent = jnp.frexp(lax.stop_gradient(largest))
    limit = jnp.finfo(x.dtype).maxexp - 2  # no power of two is subnormal
    exponent = jnp.clip(exponent, -limit, limit)
    return x * jnp.ldexp(jnp.ones((), x.dtype), -exponent)


def squared_distances(features: Array) -> Array:
    """Squared distances `(..., M, M)`, from differences: a Gram matrix loses digits."""
    if features.ndim > 2:
        return jax.vmap(squared_distances)(features)
    return -NegativeSquaredL2().compare(features, features)


def _on_sphere(gram: Array) -> Array:
    """The Gram matrix of the normalised features; a zero feature has cosine zero."""
    squared = jnp.diagonal(gram, axis1=-2, axis2=-1)
    zero = squared <= 0
    inverse = jnp.where(zero, 0.0, lax.rsqrt(jnp.where(zero, 1.0, squared)))
    return gram * inverse[..., :, None] * inverse[..., None, :]


def _distinct(pairs: Array) -> Array:
    """True off the diagonal, in the shape `(..., M, M)` of `pairs`."""
    return jnp.broadcast_to(~jnp.eye(pairs.shape[-1], dtype=bool), pairs.shape)


def delta_min_of_gram(gram: Array) -> Array:
    """`smallest_separation`, from the `(..., M, M)` Gram matrix of the features."""
    cosines = jnp.where(_distinct(gram), _on_sphere(gram), -jnp.inf)
    return 1 - cosines.max((-2, -1))
