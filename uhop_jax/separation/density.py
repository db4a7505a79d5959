r"""Separations that are kernels: of density estimates, and of kernel regression.

With `NegativeSquaredL2` the overlaps are :math:`z_\mu = -\beta \|x - \xi_\mu\|^2`.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from uhop_jax._checks import check_count
from uhop_jax.separation.base import Separation


class Epanechnikov(Separation):
    r"""The memories within a radius: log-sum-ReLU memory (Hoover et al. 2025).

    With `NegativeSquaredL2` the memories within the radius :math:`\sqrt{2 / \beta}` of
    the state are *active*. The energy :math:`-\log \sum_\mu [1 - \beta \|x -
    \xi_\mu\|^2 / 2]_+ / \beta` (LSR, arXiv 2506.10801) is stationary where the state is
    the mean of its active memories. Degree 0 goes there: weights :math:`[1 + z_\mu /
    2]_+^0`, normalised, as in mean shift. Degree 1 weighs the active memories by the
    Epanechnikov kernel itself.

    A state without an active memory has weights zero, as has a row without a valid
    memory: it retrieves zero. (The gradient of the energy is zero there: its flow stays
    at the state, which is no mean of memories.)

    Attributes:
      degree: 0 for equal weights, 1 for the weights of the kernel.
    """

    degree: int = dataclasses.field(default=0, metadata={"static": True})

    def check(self):
        check_count("degree", self.degree, 0, 1)

    def _weights(self, z):
        active = jnp.maximum(1 + z / 2, 0.0)
        if self.degree == 0:
            # A comparison would turn the NaN of a memory into zero.
            active = jnp.where(active > 0, 1.0, 0.0 * active)
        total = active.sum(-1, keepdims=True)
        return active / jnp.where(total == 0, 1.0, total)


class Exponentials(Separation):
    r"""Weights :math:`e^{z_\mu}`, not normalised: the kernel of kernel regression.

    With `NegativeSquaredL2` the weights are Gaussian kernels, and with the values of
    `uhop_jax.fit_values` retrieval is kernel ridge regression. The conjugate is
    :math:`\sum_\mu e^{z_\mu}`. Weights of overlaps far above zero overflow.
    """

    normalized: ClassVar[bool] = False

    def _weights(self, z: Array) -> Array:
        return jnp.exp(z)

    def _conjugate(self, z):
        return jnp.exp(z).sum(-1)
