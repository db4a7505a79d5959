r"""Separation losses: how close the features of a memory set are to one another.

A loss depends on the features :math:`F = \Xi W^T` only through their Gram matrix, or
without normalisation through their distances. No function builds an `(M, M, D)` array.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from uhop_jax._checks import (
    as_boolean,
    as_floating,
    as_scalar,
    broadcast_rows,
    check_choice,
    check_count,
    check_positive,
    working_dtype,
)
from uhop_jax._products import gram_matrix
from uhop_jax.similarity import NegativeSquaredL2

LOSSES = ("average", "maximum", "deep")
PAIRS = ("distinct", "all")


def separation_loss(
    features: Float[Array, "*batch M D"],
    *,
    kind: str = "average",
    t: ArrayLike = 2.0,
    normalize: bool = True,
    pairs: str = "distinct",
    where: Bool[Array, "*batch M"] | None = None,
) -> Float[Array, "*batch"]:
    r"""Separation loss of the features of a memory set.

    - `average` [def:max-loss]: :math:`\log \mathrm{mean}_{u \ne v} \exp(-t \|\Phi(u) -
      \Phi(v)\|^2)`.
    - `maximum`: :math:`\max_{u \ne v} -t \|\Phi(u) - \Phi(v)\|^2`.
    - `deep` [dfn:separation-loss]: :math:`\log \mathrm{mean}_{u \ne v} \exp(2t (K(u,
      v)^2 - 1))`.

    The losses are not convex in `W`, contrary to the paper: they are even in `W`, and
    without normalisation `W = 0` maximises the average and the maximum loss.

    Args:
      features: one feature vector per row.
      kind: `average`, `maximum` or `deep`.
      t: scale of the Gaussian, positive; the paper has 2. On the sphere the average
        loss is the loss of U-Hop+ at temperature `1 / (2 t)`, up to a constant.
      normalize: whether features are first scaled to unit norm. Without normalisation
        the average loss has no minimiser: larger features always lower it.
      pairs: `distinct` (u != v, as in the authors' code) or `all` (as in the paper's
        expectation).
      where: true for valid patterns; a set with fewer than two valid patterns has loss
        zero.

    Returns:
      One loss for each memory set, in at least float32.

    Raises:
      ValueError: if an argument is out of range or unknown.
    """
    features = as_floating(features, "features")
    if features.ndim < 2:
        raise ValueError(f"features must have shape (..., M, D), got {features.shape}")
    check_choice("separation loss", kind, LOSSES)
    check_choice("pairs", pairs, PAIRS)
    t = as_scalar("t", t, working_dtype(features))
    if where is not None:
        where = as_boolean("where", where, "true for valid patterns")
        where = broadcast_rows("where", where, features.shape[:-1])
        features = jnp.where(where[..., None], features, 0.0)
    loss = Loss(kind, normalize, pairs)
    if loss.of_distances:
        return loss_of_distances(squared_distances(features), loss, t, where)
    if normalize:
        features = scaled_rows(features)
    return loss_of_gram(gram_matrix(features), loss, t, where)


def least_separation_loss(
    number: Int[ArrayLike, "*batch"],
    dimension: int,
    *,
    kind: str = "average",
    t: ArrayLike = 2.0,
) -> Float[Array, "*batch"]:
    r"""A lower bound of `separation_loss` for normalised features and distinct pairs.

    The mean of the exponentials is at least the exponential of the mean exponent
    (Jensen), and the largest exponent is at least the mean exponent. For `M` features
    in `D` dimensions the bounds are:

    - `average`: :math:`-2 t M / (M - 1)`, since the mean cosine is least if the
      features sum to zero. The regular simplex attains the bound for `M <= D + 1`. The
      bound holds for more features too, but is not attained.
    - `maximum`: the same for `M <= D + 1`, else :math:`-2 t`, since some cosine is then
      at least zero (Rankin 1955); attained for `M <= 2 D`.
    - `deep`: :math:`2 t (c - 1)` with :math:`c = \max(0, (M - D) / (D (M - 1)))`, the
      least mean squared cosine (Welch 1974). For `M <= D` orthogonal features attain
      :math:`-2 t`; for `M > D` equiangular tight frames attain the bound, where they
      exist.

    Args:
      number: `M`, the number of valid features.
      dimension: `D`, the dimension of the features.
      kind: `average`, `maximum` or `deep`.
      t: scale of the loss, positive.

    Returns:
      The bound; 0 for fewer than two features, whose loss is 0.

    Raises:
      ValueError: if an argument is out of range or unknown.
    """
    check_count("dimension", dimension, 1)
    check_choice("separation loss", kind, LOSSES)
    check_positive("t", t)
    M = jnp.asarray(number).astype(jnp.result_type(float))
    D, M_minus_1 = float(dimension), jnp.maximum(M - 1, 1.0)
    if kind == "deep":
        least = jnp.maximum(M - D, 0.0) / (D * M_minus_1) - 1
    else:
        least = -M / M_minus_1
        if kind == "maximum":
            least = jnp.where(M <= D + 1, least, -1.0)
    return jnp.where(M < 2, 0.0, 2 * jnp.asarray(t).astype(M.dtype) * least)


def smallest_separation(
    features: Float[Array, "*batch M D"],
) -> Float[Array, "*batch"]:
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


class Loss(NamedTuple):
    """The static options of `separation_loss`."""

    kind: str
    normalize: bool
    pairs: str

    @property
    def of_distances(self) -> bool:
        """Whether the loss depends on distances alone, wherever the origin is."""
        return not self.normalize and self.kind != "deep"


def squared_distances(features: Array) -> Array:
    """Squared distances `(..., M, M)`, from differences: a Gram matrix loses digits."""
    if features.ndim > 2:
        return jax.vmap(squared_distances)(features)
    return -NegativeSquaredL2().compare(features, features)


def _diagonal(gram: Array) -> Array:
    return jnp.diagonal(gram, axis1=-2, axis2=-1)


def _on_sphere(gram: Array) -> Array:
    """The Gram matrix of the normalised features; a zero feature has cosine zero."""
    squared = _diagonal(gram)
    zero = squared <= 0
    inverse = jnp.where(zero, 0.0, lax.rsqrt(jnp.where(zero, 1.0, squared)))
    return gram * inverse[..., :, None] * inverse[..., None, :]


def loss_of_gram(
    gram: Array, loss: Loss, t: Array, where: Array | None = None
) -> Array:
    """`separation_loss`, from the `(..., M, M)` Gram matrix of the features."""
    if loss.normalize:
        gram = _on_sphere(gram)
    if loss.kind == "deep":
        exponent = 2 * t * (gram * gram - 1)
    else:
        exponent = jnp.where(_distinct(gram), -2 * t * (1 - gram), 0.0)
    return _over_pairs(exponent, loss, where)


def loss_of_distances(
    squared: Array, loss: Loss, t: Array, where: Array | None = None
) -> Array:
    """`separation_loss`, from the `(..., M, M)` squared distances of the features."""
    return _over_pairs(-t * squared, loss, where)


def _distinct(pairs: Array) -> Array:
    """True off the diagonal, in the shape `(..., M, M)` of `pairs`."""
    return jnp.broadcast_to(~jnp.eye(pairs.shape[-1], dtype=bool), pairs.shape)


def _over_pairs(exponent: Array, loss: Loss, where: Array | None) -> Array:
    """The largest exponent `(..., M, M)`, or the logarithm of the mean exponential."""
    distinct = _distinct(exponent)
    counted = jnp.ones_like(distinct) if loss.pairs == "all" else distinct
    if where is not None:
        counted = counted & where[..., :, None] & where[..., None, :]
    exponent = jnp.where(counted, exponent, -jnp.inf)
    if loss.kind == "maximum":
        exponent = jnp.where(distinct, exponent, -jnp.inf)
        # The gradient of `max` compares the maximum with the entries. If XLA computes
        # them twice with different rounding, no entry equals the maximum and the
        # gradient is zero. `argmax` avoids the comparison.
        flat = exponent.reshape(*exponent.shape[:-2], -1)
        index = lax.stop_gradient(flat).argmax(-1, keepdims=True)
        top = jnp.take_along_axis(flat, index, axis=-1)[..., 0]
        return jnp.where(jnp.isfinite(top), top, 0.0)
    number = jnp.where((counted & distinct).any((-2, -1)), counted.sum((-2, -1)), 0)
    top = lax.stop_gradient(exponent.max((-2, -1)))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.exp(exponent - top[..., None, None]).sum((-2, -1))
    mean = total / jnp.maximum(number, 1).astype(total.dtype)
    return jnp.where(number > 0, top + jnp.log(jnp.where(number > 0, mean, 1.0)), 0.0)


def delta_min_of_gram(gram: Array) -> Array:
    """`smallest_separation`, from the `(..., M, M)` Gram matrix of the features."""
    cosines = jnp.where(_distinct(gram), _on_sphere(gram), -jnp.inf)
    return 1 - cosines.max((-2, -1))
