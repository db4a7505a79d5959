"""The separation of dense associative memory: rectified polynomials."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax._checks import check_count
from uhop_jax.separation.base import Separation
from uhop_jax.separation.forms import Powers, rectified_power


class Polynomial(Separation):
    r"""Rectified polynomial of dense associative memory (Krotov & Hopfield 2016).

    Weights :math:`[z_\mu]_+^n / \sum_\nu [z_\nu]_+^n`, all zero if no overlap is
    positive. The weights do not depend on the scale of the overlaps, so the inverse
    temperature has no effect. They are not the gradient of any function, so there is no
    conjugate.

    Attributes:
      degree: `n`, at least 1.
    """

    degree: int = dataclasses.field(default=10, metadata={"static": True})

    @property
    def form(self):
        return Powers(self.degree)

    def check(self):
        check_count("degree", self.degree, 1)

    def _weights(self, z):
        powers = rectified_power(z, _largest_positive(z), self.degree)
        total = powers.sum(-1, keepdims=True)
        return powers / jnp.where(total == 0, 1.0, total)

    def _shares(self, overlaps, beta, where):
        # The scale of the overlaps has no effect, but NaN is no scale.
        overlaps = jnp.where(jnp.isnan(beta)[..., None], jnp.nan, overlaps)
        if where is not None:
            overlaps = jnp.where(where, overlaps, -jnp.inf)
        return self._weights(overlaps), None


def _largest_positive(z: Array) -> Array:
    """The largest entry of each row `(..., 1)`, at least zero."""
    return lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True, initial=0.0))
