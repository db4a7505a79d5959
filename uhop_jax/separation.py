r"""Separation functions: from overlaps to weights over the memories.

Each separation is a frozen pytree. `__call__` gives the weights; `conjugate`, where a
separation has one, is the convex function whose gradient the weights are. All methods
act on the last axis; leading axes are free. Nothing sorts: every step is a sum or a
maximum over the memory axis, so it fuses, vectorises and shards.

A masked entry (`where` false, or an overlap of `-inf`) has weight zero and gradient
zero whatever its value, NaN included. A row without any valid entry has all-zero
weights and conjugate zero. Half-precision overlaps are computed in float32 and their
results returned in half precision.
"""

import abc
import dataclasses
import math
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from uhop_jax._checks import (
    as_boolean,
    as_floating,
    as_numbers,
    broadcast_rows,
    check_at_least,
    check_choice,
    check_count,
    working_dtype,
)
from uhop_jax._entmax import (
    Power,
    entmax_conjugate,
    entmax_weights,
    from_ordered,
    ordered_bits,
)
from uhop_jax._pytree import frozen_pytree


class Separation(abc.ABC):
    """Maps overlaps `z (..., M)` to weights `(..., M)`; the base of all separations.

    A new separation implements `_weights` and, where its weights are the gradient of a
    convex function, `_conjugate`. Both receive float32 or float64 overlaps in which
    masked entries are `-inf`.

    Attributes:
      normalized: whether the weights of a row sum to one.
      has_conjugate: whether the weights are the gradient of `conjugate`.
      shift_invariant: whether adding a constant to all overlaps of a row leaves the
        weights as they are and adds the constant to the conjugate.
    """

    normalized: ClassVar[bool] = True
    has_conjugate: ClassVar[bool] = True
    shift_invariant: ClassVar[bool] = False

    def __call__(
        self,
        z: Float[Array, "*batch M"],
        *,
        where: Bool[Array, "*#batch M"] | None = None,
    ) -> Float[Array, "*batch M"]:
        """Weights over the last axis, in the dtype of `z`.

        Args:
          z: overlaps multiplied by the inverse temperature.
          where: true for valid entries; broadcasts against `z`.

        Returns:
          Non-negative weights, zero at masked entries.

        Raises:
          ValueError: if a concrete parameter is out of range or does not fit `z`.
        """
        z, dtype = self._prepare(z, where)
        return _jit_weights(self, z).astype(dtype)

    def conjugate(
        self,
        z: Float[Array, "*batch M"],
        *,
        where: Bool[Array, "*#batch M"] | None = None,
    ) -> Float[Array, "*batch"]:
        """The convex function of each row whose gradient is `__call__`.

        Args:
          z: overlaps multiplied by the inverse temperature.
          where: true for valid entries; broadcasts against `z`.

        Returns:
          One value for each row; zero for a row without a valid entry.

        Raises:
          ValueError: if this separation has no conjugate, or as in `__call__`.
        """
        self._check_conjugate()
        z, dtype = self._prepare(z, where)
        return _jit_conjugate(self, z).astype(dtype)

    def tempered(
        self,
        overlaps: Float[Array, "*batch M"],
        beta: ArrayLike,
        *,
        where: Bool[Array, "*#batch M"] | None = None,
    ) -> Float[Array, "*batch M"]:
        """Weights at `beta * overlaps`, correct even where the product overflows.

        Args:
          overlaps: finite overlaps.
          beta: inverse temperature; broadcasts against the leading axes of `overlaps`.
          where: true for valid entries; broadcasts against `overlaps`.

        Returns:
          As `__call__`.

        Raises:
          ValueError: as in `__call__`.
        """
        *prepared, dtype = self._prepare_both(overlaps, beta, where)
        return self._tempered(*prepared).astype(dtype)

    def tempered_conjugate(
        self,
        overlaps: Float[Array, "*batch M"],
        beta: ArrayLike,
        *,
        where: Bool[Array, "*#batch M"] | None = None,
    ) -> Float[Array, "*batch"]:
        r"""`conjugate(beta * overlaps) / beta`, :math:`\Psi^\star(\beta, z)`.

        Args:
          overlaps: finite overlaps.
          beta: inverse temperature; broadcasts against the leading axes of `overlaps`.
          where: true for valid entries; broadcasts against `overlaps`.

        Returns:
          As `conjugate`.

        Raises:
          ValueError: as in `conjugate`.
        """
        self._check_conjugate()
        *prepared, dtype = self._prepare_both(overlaps, beta, where)
        return self._tempered_conjugate(*prepared).astype(dtype)

    def margin(self) -> ArrayLike:
        """The least lead of the largest entry at which weights are exactly one-hot.

        The margin is infinite if weights are never exactly one-hot.
        """
        return jnp.inf

    def check(self) -> None:
        """Raises `ValueError` if a concrete parameter is out of range."""
        return

    def specialised(self, learned: Collection[str] = ()) -> "Separation":
        """An equal separation that may compile to less.

        Args:
          learned: names of the numbers that will change; all others stay as they are.

        Returns:
          By default the separation itself.
        """
        del learned
        return self

    @abc.abstractmethod
    def _weights(self, z: Float[Array, "*batch M"]) -> Float[Array, "*batch M"]:
        """Weights, zero where `z` is `-inf`."""

    def _conjugate(self, z: Float[Array, "*batch M"]) -> Float[Array, "*batch"]:
        """The convex function of each row, zero for a row of `-inf`."""
        raise TypeError(f"{type(self).__name__} declares a conjugate but defines none")

    def _tempered(self, overlaps: Array, beta: Array, where: Any) -> Array:
        """`tempered` for prepared arguments."""
        top = self._reference(overlaps, where)
        return self._weights(scaled_about(overlaps, top, beta, where))

    def _tempered_conjugate(self, overlaps: Array, beta: Array, where: Any) -> Array:
        """`tempered_conjugate` for prepared arguments."""
        top = self._reference(overlaps, where)
        return self._conjugate(scaled_about(overlaps, top, beta, where)) / beta + top

    def _reference(self, overlaps: Array, where: Any) -> Array:
        """Number `(...,)` to subtract from the overlaps before `beta` scales them."""
        if self.shift_invariant:
            return largest_valid(overlaps, where)
        return jnp.zeros(overlaps.shape[:-1], overlaps.dtype)

    def _check_conjugate(self) -> None:
        if not self.has_conjugate:
            raise ValueError(
                f"{self} has no convex conjugate: its weights are no gradient"
            )

    def _prepare_both(self, overlaps: Any, beta: Any, where: Any) -> tuple[Any, ...]:
        """Checked overlaps, `beta (...,)` and `where`, and the dtype of the result."""
        overlaps, dtype = self._prepare(overlaps, None)
        if where is not None:
            where = broadcast_rows("where", as_boolean("where", where), overlaps.shape)
        beta = jnp.asarray(beta).astype(overlaps.dtype)
        beta = broadcast_rows("beta", beta, overlaps.shape[:-1])
        return overlaps, beta, where, dtype

    def _prepare(self, z: Any, where: Any) -> tuple[Array, Any]:
        """Checked overlaps, `-inf` where masked, and the dtype of the result."""
        self.check()
        z = as_floating(z, "z")
        dtype = z.dtype
        if z.ndim == 0:
            raise ValueError("z must have at least one axis, got a scalar")
        z = z.astype(working_dtype(z))
        if where is not None:
            where = as_boolean("where", where)
            z = jnp.where(broadcast_rows("where", where, z.shape), z, -jnp.inf)
        return z, dtype


def largest_valid(overlaps: Array, where: Any) -> Array:
    """The largest overlap of each row `(...,)`, zero if there is none."""
    if where is not None:
        overlaps = jnp.where(where, overlaps, -jnp.inf)
    top = jnp.max(overlaps, axis=-1, initial=-jnp.inf)
    return lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))


def scaled_about(overlaps: Array, top: Array, beta: Array, where: Any) -> Array:
    """`beta * (overlaps - top)`, `-inf` where masked.

    The largest entry cannot overflow. Smaller entries can overflow to `-inf`, which
    gives weight zero.
    """
    # An infinite difference would give NaN in the gradient of `beta`.
    limit = float(jnp.finfo(overlaps.dtype).max)
    z = beta[..., None] * jnp.clip(overlaps - top[..., None], -limit, limit)
    return z if where is None else jnp.where(where, z, -jnp.inf)


# Without `jax.jit` every call would compile the loops again.
@jax.jit
def _jit_weights(separation: Separation, z: Array) -> Array:
    return separation._weights(z)


@jax.jit
def _jit_conjugate(separation: Separation, z: Array) -> Array:
    return separation._conjugate(z)


@jax.custom_jvp
def _exp_about(z: Array, top: Array) -> Array:
    """`exp(z - top)` for a constant `top`; exactly one where `z == top`.

    XLA may fuse the product that made `z` into the difference, without rounding the
    product. `z - top` at the maximum is then the rounding error of the product instead
    of zero. For products beyond 1e9 its exponential overflows.
    """
    return jnp.exp(jnp.where(z == top, 0.0, z - top))


@_exp_about.defjvp
def _exp_about_jvp(primals, tangents):
    e = _exp_about(*primals)
    return e, e * tangents[0]


def _exponentials(z: Array, null: Array | None) -> tuple[Array, Array, Array]:
    """The maximum `(..., 1)`, and the exponentials about it `(..., M)` and their sum.

    `null (..., 1)`, if given, is one more entry in the maximum and in the sum.
    """
    top = jnp.max(z, axis=-1, keepdims=True, initial=-jnp.inf)
    top = top if null is None else jnp.maximum(top, null)
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    e = _exp_about(z, top)
    total = e.sum(-1, keepdims=True)
    if null is not None:
        total = total + _exp_about(null, top)
    return top, e, jnp.where(total == 0, 1.0, total)


def _softmax(z: Array, null: Array | None) -> Array:
    """Softmax weights `(..., M)` of the entries; the weight of `null` is dropped."""
    _, e, total = _exponentials(z, null)
    return e / total


def _log_sum_exp(z: Array, null: Array | None) -> Array:
    """`log(sum exp z)`, zero for an empty row."""
    top, _, total = _exponentials(z, null)
    return (top + jnp.log(total))[..., 0]


@frozen_pytree
class Softmax(Separation):
    r"""The dense separation of Ramsauer et al. 2020, `alpha = 1` [eqn:retrival_dyn].

    Weights :math:`p_\mu = e^{z_\mu} / \sum_\nu e^{z_\nu}`, conjugate :math:`\log
    \sum_\nu e^{z_\nu}`.
    """

    shift_invariant: ClassVar[bool] = True

    def _weights(self, z):
        return _softmax(z, None)

    def _conjugate(self, z):
        return _log_sum_exp(z, None)


@frozen_pytree
class Softmax1(Separation):
    r"""Softmax with a null memory: one more entry with overlap zero and value zero.

    Weights :math:`p_\mu = e^{z_\mu} / (1 + \sum_\nu e^{z_\nu})`, conjugate
    :math:`\log(1 + \sum_\nu e^{z_\nu})`. A query that matches no memory retrieves
    almost zero (Hu et al. 2024, OutEffHop).
    """

    normalized: ClassVar[bool] = False

    def _weights(self, z):
        return _softmax(z, _null(z))

    def _conjugate(self, z):
        return _log_sum_exp(z, _null(z))

    def _tempered(self, overlaps, beta, where):
        z, null, _ = self._with_null(overlaps, beta, where)
        return _softmax(z, null)

    def _tempered_conjugate(self, overlaps, beta, where):
        z, null, top = self._with_null(overlaps, beta, where)
        return _log_sum_exp(z, null) / beta + top

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


@frozen_pytree
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
      power: static; the `Power` to use for every `alpha`, if the caller knows one. None
        compiles all three and chooses by the value of `alpha`: 1.5 and 2 need no
        transcendental functions.
    """

    shift_invariant: ClassVar[bool] = True

    alpha: ArrayLike = 1.5
    power: int | None = dataclasses.field(default=None, metadata={"static": True})

    def check(self):
        check_at_least("alpha", self.alpha, 1.0)

    def specialised(self, learned=()):
        """One way of taking powers, in place of three."""
        power = Power.GENERAL
        if "alpha" not in learned:
            power = Power.of(as_numbers("alpha", self.alpha))
        return dataclasses.replace(self, power=power)

    def margin(self):
        """`1 / (alpha - 1)`, infinite at `alpha = 1`."""
        e = jnp.asarray(self.alpha, dtype=float) - 1
        return jnp.where(e > 0, 1 / jnp.where(e > 0, e, 1.0), jnp.inf)

    def _weights(self, z):
        power = None if self.power is None else Power(self.power)
        return entmax_weights(z, self._aligned(z), power)

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


@frozen_pytree
class Sparsemax(Separation):
    r"""Euclidean projection onto the simplex, `alpha = 2` [eqn:sparsemax_exact].

    The separation of the sparse Hopfield model (Hu et al. 2023), by the sort-free
    algorithm of Michelot (1986). Weights are exactly one-hot if the largest overlap
    exceeds all other overlaps by at least one.
    """

    shift_invariant: ClassVar[bool] = True

    def margin(self):
        """One."""
        return 1.0

    def _weights(self, z):
        return entmax_weights(z, jnp.full((1,) * z.ndim, 2.0, z.dtype), Power.LINEAR)

    def _conjugate(self, z):
        return entmax_conjugate(z, jnp.full((1,) * z.ndim, 2.0, z.dtype))


@frozen_pytree
class Polynomial(Separation):
    r"""Rectified polynomial of dense associative memory (Krotov & Hopfield 2016).

    Weights :math:`[z_\mu]_+^n / \sum_\nu [z_\nu]_+^n`, all zero if no overlap is
    positive. The weights do not depend on the scale of the overlaps, so the inverse
    temperature has no effect. They are not the gradient of any function, so there is no
    conjugate.

    Attributes:
      degree: `n`, at least 1.
    """

    has_conjugate: ClassVar[bool] = False

    degree: int = dataclasses.field(default=10, metadata={"static": True})

    def check(self):
        check_count("degree", self.degree, 1)

    def _weights(self, z):
        powers = rectified_power(z, _largest_positive(z), self.degree)
        total = powers.sum(-1, keepdims=True)
        return powers / jnp.where(total == 0, 1.0, total)

    def _tempered(self, overlaps, beta, where):
        del beta  # weights do not depend on the scale of the overlaps
        if where is not None:
            overlaps = jnp.where(where, overlaps, -jnp.inf)
        return self._weights(overlaps)


def _largest_positive(z: Array) -> Array:
    """The largest entry of each row `(..., 1)`, at least zero."""
    return lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True, initial=0.0))


def rectified_power(z: Array, unit: Array, degree: int) -> Array:
    """`[z / unit]_+^degree`, zero for a unit of zero.

    Infinite overlaps count as the largest float. A unit near the largest float is first
    scaled down: its inverse is subnormal, and devices flush subnormal numbers to zero.
    """
    largest = float(jnp.finfo(z.dtype).max)
    unit = jnp.minimum(unit, largest)
    factor = jnp.where(unit > largest / 8, 0.125, 1.0)
    safe = jnp.where(unit == 0, 1.0, factor * unit)
    return (factor * jnp.clip(z, 0.0, largest) / safe) ** degree


@frozen_pytree
class TopK(Separation):
    r"""Softmax over exactly the `k` largest overlaps; ties go to the lower index.

    The conjugate is the `logsumexp` of the `k` largest overlaps. It is convex as the
    maximum of the `logsumexp` over all subsets of `k` overlaps.

    Attributes:
      k: number of memories with a weight, at least 1 and at most `M`.
    """

    shift_invariant: ClassVar[bool] = True

    k: int = dataclasses.field(default=1, metadata={"static": True})

    def check(self):
        check_count("k", self.k, 1)

    def margin(self):
        """Zero for `k = 1`, else infinite."""
        return 0.0 if self.k == 1 else jnp.inf

    def _weights(self, z):
        return _softmax(self._largest(z), None)

    def _conjugate(self, z):
        return _log_sum_exp(self._largest(z), None)

    def _largest(self, z: Array) -> Array:
        """`z` with all but its `k` largest entries at `-inf`."""
        check_count("k", self.k, 1, z.shape[-1])
        fixed = lax.stop_gradient(z)
        return jnp.where(
            _is_among(fixed, _kth_largest(fixed, self.k), self.k), z, -jnp.inf
        )


def _kth_largest(z: Array, k: int) -> Array:
    """The `k`-th largest entry of each row `(..., 1)`."""
    size = math.isqrt(z.shape[-1] // k)
    if size > 7:
        # All `k` largest entries are in the `k` strides with the largest maxima.
        padding = [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % size)]
        z = jnp.pad(z, padding, constant_values=-jnp.inf)
        z = z.reshape(*z.shape[:-1], size, -1)
        best = lax.top_k(z.max(-2), k)[1]
        z = jnp.take_along_axis(z, best[..., None, :], axis=-1)
        z = z.reshape(*z.shape[:-2], k * size)
    # The bits of the result are found from the highest to the lowest, in unsigned
    # integers in the order of the floats.
    keys = ordered_bits(z)
    bits, unsigned = jnp.finfo(z.dtype).bits, keys.dtype

    def body(i, prefix):
        place = jnp.asarray(bits - 1 - i).astype(unsigned)
        bit = jnp.left_shift(jnp.ones((), unsigned), place)
        candidate = prefix | bit
        count = (keys >= candidate).sum(-1, keepdims=True, dtype=jnp.int32)
        return jnp.where(count >= k, candidate, prefix)

    start = jnp.full_like(keys, 0, shape=(*keys.shape[:-1], 1))
    key = lax.fori_loop(0, bits, body, start)
    return from_ordered(key)


def _is_among(z: Array, threshold: Array, k: int) -> Array:
    """Which entries are the `k` largest, for the `k`-th largest entry `threshold`.

    Of entries equal to the threshold those with the lowest indices count.
    """
    index = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)

    def count(chosen: Array) -> Array:
        return chosen.sum(-1, keepdims=True, dtype=jnp.int32)

    room = k - count(z > threshold)

    def halve(ends):
        low, high = ends
        middle = (low + high) // 2
        fits = count((z == threshold) & (index < middle)) <= room
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    # Without ties all entries that equal the threshold count, and no step is needed.
    high = jnp.full_like(room, z.shape[-1])
    low = jnp.where(count(z == threshold) <= room, high, 0)
    end, _ = lax.while_loop(lambda x: jnp.any(x[1] - x[0] > 1), halve, (low, high))
    return (z > threshold) | ((z == threshold) & (index < end))


SEPARATIONS: dict[str, type[Separation]] = {
    "softmax": Softmax,
    "softmax1": Softmax1,
    "entmax": Entmax,
    "sparsemax": Sparsemax,
    "polynomial": Polynomial,
    "topk": TopK,
}


def check_separation(separation: Any) -> None:
    """Refuses anything but a separation with parameters in range."""
    if not isinstance(separation, Separation):
        names = ", ".join(c.__name__ for c in SEPARATIONS.values())
        raise ValueError(f"separation must be one of {names}, got {separation!r}")
    separation.check()


def separation_from_name(name: str, **parameters: Any) -> Separation:
    """The separation with the name that configs and command lines use.

    Args:
      name: `softmax`, `softmax1`, `entmax`, `sparsemax`, `polynomial` or `topk`.
      **parameters: fields of the separation, such as `alpha`.

    Raises:
      ValueError: if the name or a parameter is unknown; the message lists the choices.
    """
    check_choice("separation", name, SEPARATIONS)
    fields = [field.name for field in dataclasses.fields(SEPARATIONS[name])]  # type: ignore[arg-type]
    for parameter in parameters:
        if parameter not in fields:
            raise ValueError(
                f"unknown parameter {parameter!r} of {name}, which has "
                f"{', '.join(fields) or 'none'}"
            )
    return SEPARATIONS[name](**parameters)
