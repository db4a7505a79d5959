"""Separations with exact zeros: entmax for every alpha, and sparsemax."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from uhop_jax._checks import as_floating, as_numbers, broadcast_rows, check_at_least
from uhop_jax.separation._entmax import entmax_conjugate, entmax_weights
from uhop_jax.separation._root import Power
from uhop_jax.separation.base import Separation
from uhop_jax.separation.forms import Root


class Entmax(Separation):
    r"""`alpha`-entmax, the separation of the generalised sparse Hopfield model.

    :math:`\mathrm{entmax}_\alpha(z) = \arg\max_{p \in \Delta} \langle p, z\rangle -
    \Omega_\alpha(p)` with :math:`\Omega_\alpha(p) = \sum_i (p_i^\alpha - p_i) / (\alpha
    (\alpha - 1))` [eqn:entmax; the sign of eqn:T_entropy corrected]. The weights are
    dense at `alpha = 1` (softmax) and sparse above; `alpha = 2` is sparsemax. The
    derivatives in the overlaps and in `alpha` are in closed form (Correia et al. 2019,
    Prop. 1, in a form that holds at `alpha = 1` too) and can be differentiated again.

    Rows sum to one at every `alpha`. Above `alpha = 2` weights are steep functions of
    the overlaps: overlaps that differ by :math:`\delta` can have weights that differ by
    :math:`((\alpha - 1) \delta)^{1 / (\alpha - 1)}`. The rounding of an overlap of one
    in float32, 6e-8, can change a weight by 3e-4 at `alpha = 3`, by 0.02 at 5 and by
    0.2 at 10. Derivatives grow as :math:`p^{2 - \alpha}`; this factor is capped at the
    square root of the largest float.

    Attributes:
      alpha: index, at least 1 and finite; a number or an array that broadcasts against
        the leading axes of the overlaps (for example, one `alpha` for each row or each
        head). Under `jax.jit`, where values cannot be checked, an invalid `alpha` gives
        NaN. To learn `alpha`, see `bounded_alpha`.
      cases: static; whether arithmetic without transcendental functions, for an `alpha`
        of 1.5 and of 2, is compiled too and chosen at run time. Where `alpha` is mapped
        by `jax.vmap` or never equals 1.5 or 2, False saves time. `Entmax15` and
        `Sparsemax` compile the one case.
    """

    shift_invariant: ClassVar[bool] = True

    alpha: ArrayLike = 1.5
    cases: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def form(self):
        return Root(self.alpha, self._power)

    @property
    def _power(self) -> Power | None:
        return None if self.cases else Power.GENERAL

    def check(self):
        check_at_least("alpha", self.alpha, 1.0)

    def specialised(self, learned=()):
        """`Entmax15`, `Sparsemax`, or `Entmax` without further cases."""
        if "alpha" not in learned:
            alpha = as_numbers("alpha", self.alpha)
            for fixed, separation in ((1.5, Entmax15()), (2.0, Sparsemax())):
                if (alpha == fixed).all():
                    return separation
        return Entmax(self.alpha, cases=False)

    def margin(self):
        """`1 / (alpha - 1)`, infinite at `alpha = 1`."""
        e = jnp.asarray(self.alpha, dtype=float) - 1
        return jnp.where(e > 0, 1 / jnp.where(e > 0, e, 1.0), jnp.inf)

    def _weights(self, z):
        return entmax_weights(z, self._aligned(z), self._power)

    def _conjugate(self, z):
        return entmax_conjugate(z, self._aligned(z))

    def _aligned(self, z: Array) -> Array:
        """`alpha` in the dtype of `z` with as many axes, NaN where it is invalid."""
        alpha = valid_alpha(jnp.asarray(self.alpha).astype(z.dtype))
        if alpha.ndim == 0:
            return alpha.reshape((1,) * z.ndim)
        return broadcast_rows("alpha", alpha, z.shape[:-1])[..., None]


def valid_alpha(alpha: Array) -> Array:
    """`alpha`, or NaN where it is below 1 or infinite: entmax is not defined there."""
    return jnp.where((alpha >= 1) & (alpha < jnp.inf), alpha, jnp.nan)


def bounded_alpha(
    raw: Float[Array, "*shape"], *, low: float | int = 1.0, high: float | int = 2.0
) -> Float[Array, "*shape"]:
    """An `alpha` in the open range `(low, high)` from an unbounded parameter.

    `low + (high - low) sigmoid(raw)`, kept from both ends by a small multiple of the
    machine epsilon. No optimiser can therefore push a learned `alpha` out of the range
    in which `Entmax` is defined and the energy falls.

    Args:
      raw: unbounded parameter; zero gives the middle of the range.
      low: lower end, at least 1.
      high: upper end, above `low`.

    Returns:
      `alpha`, in the shape and dtype of `raw`.

    Raises:
      ValueError: if the range is empty or begins below 1.
    """
    check_at_least("low", low, 1.0)
    if not high > low:
        raise ValueError(f"high must exceed low, got low {low} and high {high}")
    raw = as_floating(raw, "raw")
    gap = 8 * float(jnp.finfo(raw.dtype).eps) * high / (high - low)
    return low + (high - low) * (gap + (1 - 2 * gap) * jax.nn.sigmoid(raw))


class _AtOneAlpha:
    """Entmax at the one `alpha` of its form, a `Root`, with its arithmetic."""

    shift_invariant: ClassVar[bool] = True
    form: Any

    def margin(self):
        """`1 / (alpha - 1)`."""
        return 1 / (self.form.alpha - 1)

    def _weights(self, z):
        return entmax_weights(z, self._alpha(z), self.form.power)

    def _conjugate(self, z):
        return entmax_conjugate(z, self._alpha(z))

    def _alpha(self, z: Array) -> Array:
        """One `alpha` for all rows of `z`."""
        return jnp.full((1,) * z.ndim, self.form.alpha, z.dtype)


class Entmax15(_AtOneAlpha, Separation):
    r"""Entmax at `alpha = 1.5`, without transcendental functions.

    Weights are exactly one-hot if the largest overlap exceeds all other overlaps by at
    least two.
    """

    form = Root(1.5, Power.SQUARE)


class Sparsemax(_AtOneAlpha, Separation):
    r"""Euclidean projection onto the simplex, `alpha = 2` [eqn:sparsemax_exact].

    The separation of the sparse Hopfield model (Hu et al. 2023), by the sort-free
    algorithm of Michelot (1986). Weights are exactly one-hot if the largest overlap
    exceeds all other overlaps by at least one.
    """

    form = Root(2.0, Power.LINEAR)
