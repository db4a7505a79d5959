"""Separations whose weights are exponentials: softmax, softmax with a null memory."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax._fast import remembered
from uhop_jax.separation.base import Separation, largest_valid, scaled_about
from uhop_jax.separation.forms import Exponential


@jax.custom_jvp
def _exp(difference: Array, largest: Array) -> Array:
    """`exp` of differences from the maximum; exactly one where `largest`.

    XLA may fuse a product into its difference from the maximum, without rounding the
    product. At the maximum the difference is then the rounding error of the product
    instead of zero. For products beyond 1e9 its exponential overflows.

    JAX differentiates the body, not the rule, in a second derivative through `lax.scan`
    (0.10): the zero must have the derivative of the difference.
    """
    zero = difference - lax.stop_gradient(difference)
    zero = jnp.where(jnp.isfinite(difference), zero, 0.0)
    return jnp.exp(jnp.where(largest, zero, difference))


@_exp.defjvp
def _exp_jvp(primals, tangents):
    e = _exp(*primals)
    return e, e * tangents[0]


def _exponentials(z: Array, null: Array | None) -> tuple[Array, Array, Array]:
    """The maximum `(..., 1)`, and the exponentials about it `(..., M)` and their sum.

    `null (..., 1)`, if given, is one more entry in the maximum and in the sum.
    """
    top = jnp.max(z, axis=-1, keepdims=True, initial=-jnp.inf)
    top = top if null is None else jnp.maximum(top, null)
    top = remembered(lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top)))
    e = _exp(z - top, z == top)
    return top, e, _total(e, None if null is None else _exp(null - top, null == top))


def _total(e: Array, null: Array | None = None) -> Array:
    """What divides the exponentials of each row, `(..., 1)`."""
    total = e.sum(-1, keepdims=True)
    if null is not None:
        total = total + null
    return remembered(jnp.where(total == 0, 1.0, total))


def softmax(z: Array, null: Array | None) -> Array:
    """Softmax weights `(..., M)` of the entries; the weight of `null` is dropped."""
    _, e, total = _exponentials(z, null)
    return e / total


def log_sum_exp(z: Array, null: Array | None) -> Array:
    """`log(sum exp z)`, zero for an empty row."""
    top, _, total = _exponentials(z, null)
    return (top + jnp.log(total))[..., 0]


class Softmax(Separation):
    r"""The dense separation of Ramsauer et al. 2020, `alpha = 1` [eqn:retrival_dyn].

    Weights :math:`p_\mu = e^{z_\mu} / \sum_\nu e^{z_\nu}`, conjugate :math:`\log
    \sum_\nu e^{z_\nu}`.
    """

    shift_invariant: ClassVar[bool] = True

    @property
    def form(self):
        return Exponential()

    def _weights(self, z):
        return softmax(z, None)

    def _conjugate(self, z):
        return log_sum_exp(z, None)

    def _shares(self, overlaps, beta, where):
        top = remembered(largest_valid(overlaps, where))
        z = scaled_about(overlaps, top, beta, where)
        e = _exp(z, (overlaps == top[..., None]) & (z > -jnp.inf))
        return e, _total(e)


class Softmax1(Separation):
    r"""Softmax with a null memory: one more entry with overlap zero and value zero.

    Weights :math:`p_\mu = e^{z_\mu} / (1 + \sum_\nu e^{z_\nu})`, conjugate
    :math:`\log(1 + \sum_\nu e^{z_\nu})`. A query that matches no memory retrieves
    almost zero (Hu et al. 2024, OutEffHop).
    """

    normalized: ClassVar[bool] = False

    @property
    def form(self):
        return Exponential(null=True)

    def _weights(self, z):
        return softmax(z, _null(z))

    def _conjugate(self, z):
        return log_sum_exp(z, _null(z))

    def _shares(self, overlaps, beta, where):
        z, null, _ = self._with_null(overlaps, beta, where)
        return _exponentials(z, null)[1:]

    def _tempered_conjugate(self, overlaps, beta, where):
        z, null, top = self._with_null(overlaps, beta, where)
        return log_sum_exp(z, null) / beta + top

    def _with_null(self, overlaps, beta, where):
        """Scaled overlaps `(..., M)` and null overlap `(..., 1)`, and their maximum.

        Both are relative to the maximum `(...,)`, which is not scaled.
        """
        top = jnp.maximum(largest_valid(overlaps, where), 0.0)
        z = scaled_about(overlaps, top, beta, where)
        return z, -(beta * top)[..., None], top


def _null(z: Array) -> Array:
    """The overlap of the null memory of each row."""
    return jnp.zeros((*z.shape[:-1], 1), z.dtype)
