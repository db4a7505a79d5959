r"""Separation functions: from overlaps to weights over the memories.

Each separation is a frozen pytree with two methods that cannot disagree: `__call__`
gives the weights, `conjugate` the convex function whose gradient they are. All act on
the last axis, leading axes are free. Nothing sorts: every step is a sum or a maximum
over the memory axis, so it fuses, vectorises and shards.

A masked entry (`where` false, or an overlap of `-inf`) has weight zero and gradient
zero whatever its value, NaN included; a row without any valid entry has all-zero
weights and conjugate zero. Half precision is computed in float32 and returned as it
came.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from uhop_jax._checks import (
    as_boolean,
    as_floating,
    broadcast_rows,
    check_at_least,
    check_choice,
    check_count,
    working_dtype,
)
from uhop_jax._entmax import Power, entmax_conjugate, entmax_weights
from uhop_jax._pytree import frozen_pytree


class Separation(abc.ABC):
    """Maps overlaps `z (..., M)` to weights `(..., M)`; the base of all separations.

    A new separation implements `_weights` and, where its weights are the gradient of a
    convex function, `_conjugate`. Both receive float32 or float64 overlaps in which
    masked entries are `-inf`.

    Attributes:
      normalized: whether the weights of a row sum to one.
      has_conjugate: whether the weights are the gradient of `conjugate`.
    """

    normalized: ClassVar[bool] = True
    has_conjugate: ClassVar[bool] = True

    def __call__(
        self,
        z: Float[Array, "*batch M"],
        *,
        where: Bool[Array, "*#batch M"] | None = None,
    ) -> Float[Array, "*batch M"]:
        """Weights over the last axis, in the dtype of `z`.

        Args:
          z: overlaps already multiplied by the inverse temperature.
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
          z: overlaps already multiplied by the inverse temperature.
          where: true for valid entries; broadcasts against `z`.

        Returns:
          One value a row; zero for a row without a valid entry.

        Raises:
          ValueError: if this separation has no conjugate, or as in `__call__`.
        """
        if not self.has_conjugate:
            raise ValueError(
                f"{self} has no convex conjugate: its weights are no gradient"
            )
        z, dtype = self._prepare(z, where)
        return _jit_conjugate(self, z).astype(dtype)

    def margin(self) -> ArrayLike:
        """Lead of the largest entry from which on the weights are exactly one-hot.

        Infinite for separations whose weights are never exactly one-hot.
        """
        return jnp.inf

    def check(self) -> None:
        """Raises `ValueError` if a concrete parameter is out of range."""
        return

    @abc.abstractmethod
    def _weights(self, z: Float[Array, "*batch M"]) -> Float[Array, "*batch M"]: ...

    def _conjugate(self, z: Float[Array, "*batch M"]) -> Float[Array, "*batch"]:
        raise TypeError(f"{type(self).__name__} declares a conjugate but defines none")

    def _prepare(self, z: Any, where: Any) -> tuple[Array, Any]:
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


# Outside of `jax.jit` a loop would be compiled anew at every call.
@jax.jit
def _jit_weights(separation: Separation, z: Array) -> Array:
    return separation._weights(z)


@jax.jit
def _jit_conjugate(separation: Separation, z: Array) -> Array:
    return separation._conjugate(z)


def _log_sum_exp(z: Array, *, null: bool = False) -> Array:
    """`log(sum exp z)`, zero for an empty row; with `null`, one more entry of zero."""
    top = jnp.max(z, axis=-1, initial=0.0 if null else -jnp.inf)
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.exp(z - top[..., None]).sum(-1) + (jnp.exp(-top) if null else 0.0)
    return top + jnp.log(jnp.where(total == 0, 1.0, total))


@frozen_pytree
class Softmax(Separation):
    r"""The dense separation of Ramsauer et al. 2020, `alpha = 1` [eqn:retrival_dyn].

    Weights :math:`p_\mu = e^{z_\mu} / \sum_\nu e^{z_\nu}`, conjugate :math:`\log
    \sum_\nu e^{z_\nu}`.
    """

    def _weights(self, z):
        return _softmax(z, null=False)

    def _conjugate(self, z):
        return _log_sum_exp(z)


@frozen_pytree
class Softmax1(Separation):
    r"""Softmax with a null memory: one more entry, of overlap zero and value zero.

    Weights :math:`p_\mu = e^{z_\mu} / (1 + \sum_\nu e^{z_\nu})`, so that a query that
    matches nothing retrieves almost nothing (Hu et al. 2024, OutEffHop); conjugate
    :math:`\log(1 + \sum_\nu e^{z_\nu})`.
    """

    normalized: ClassVar[bool] = False

    def _weights(self, z):
        return _softmax(z, null=True)

    def _conjugate(self, z):
        return _log_sum_exp(z, null=True)


def _softmax(z: Array, *, null: bool) -> Array:
    top = jnp.max(z, axis=-1, keepdims=True, initial=0.0 if null else -jnp.inf)
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    e = jnp.exp(z - top)
    total = e.sum(-1, keepdims=True) + (jnp.exp(-top) if null else 0.0)
    return e / jnp.where(total == 0, 1.0, total)


@frozen_pytree
class Entmax(Separation):
    r"""`alpha`-entmax, the separation of the generalised sparse Hopfield model.

    :math:`\mathrm{entmax}_\alpha(z) = \arg\max_{p \in \Delta} \langle p, z\rangle -
    \Omega_\alpha(p)` with :math:`\Omega_\alpha(p) = \sum_i (p_i^\alpha - p_i) / (\alpha
    (\alpha - 1))` [eqn:entmax; the sign of eqn:T_entropy corrected]. Dense at `alpha =
    1` (softmax), sparse above, sparsemax at 2. The derivatives are closed-form, that in
    `alpha` included (Correia et al. 2019, Prop. 1, in a form that is right at `alpha =
    1`).

    Attributes:
      alpha: index, at least 1 and finite; a number or an array that broadcasts against
        the leading axes of the overlaps (one a row, one a head). Under `jax.jit`, where
        it cannot be checked, any other `alpha` gives NaN. To learn it, see
        `bounded_alpha`.
      power: static; a `Power` that serves every `alpha` to come, as layers know it.
        None compiles all three and chooses when it sees `alpha`: 1.5 and 2 need no
        transcendental functions.
    """

    alpha: ArrayLike = 1.5
    power: int | None = dataclasses.field(default=None, metadata={"static": True})

    def check(self):
        check_at_least("alpha", self.alpha, 1.0)

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
        """`alpha` in the dtype of `z` with as many axes, NaN where it is wrong."""
        alpha = valid_alpha(jnp.asarray(self.alpha).astype(z.dtype))
        if alpha.ndim == 0:
            return alpha.reshape((1,) * z.ndim)
        return broadcast_rows("alpha", alpha, z.shape[:-1])[..., None]


def valid_alpha(alpha: Array) -> Array:
    """NaN where it is below 1 or infinite: those have no weights."""
    return jnp.where((alpha >= 1) & (alpha < jnp.inf), alpha, jnp.nan)


def bounded_alpha(
    raw: Float[Array, "*shape"], *, low: float | int = 1.0, high: float | int = 2.0
) -> Float[Array, "*shape"]:
    """An `alpha` in the open range `(low, high)` from an unbounded parameter.

    `low + (high - low) sigmoid(raw)`, kept off both ends by a small multiple of the
    precision, so that no optimiser can push a learned `alpha` out of the range in which
    `Entmax` is defined and the energy falls.

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
    algorithm of Michelot (1986). Exactly one-hot from a margin of one on.
    """

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

    Weights :math:`[z_\mu]_+^n / \sum_\nu [z_\nu]_+^n`. Homogeneous: the inverse
    temperature has no effect. No gradient of any function, hence no conjugate. All-zero
    if no overlap is positive.

    Attributes:
      degree: `n`, at least 1.
    """

    has_conjugate: ClassVar[bool] = False

    degree: int = dataclasses.field(default=10, metadata={"static": True})

    def check(self):
        check_count("degree", self.degree, 1)

    def _weights(self, z):
        z = jnp.maximum(z, 0.0)
        top = lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True, initial=0.0))
        powers = (z / jnp.where(top == 0, 1.0, top)) ** self.degree
        total = powers.sum(-1, keepdims=True)
        return powers / jnp.where(total == 0, 1.0, total)


@frozen_pytree
class TopK(Separation):
    r"""Softmax over exactly the `k` largest overlaps; ties go to the lower index.

    Its conjugate is the `logsumexp` of the `k` largest, convex as a maximum over
    subsets.

    Attributes:
      k: how many memories keep a weight, at least 1 and at most their number.
    """

    k: int = dataclasses.field(default=1, metadata={"static": True})

    def check(self):
        check_count("k", self.k, 1)

    def margin(self):
        """Zero for `k = 1`, else infinite."""
        return 0.0 if self.k == 1 else jnp.inf

    def _weights(self, z):
        return _softmax(self._largest(z), null=False)

    def _conjugate(self, z):
        return _log_sum_exp(self._largest(z))

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
        # They lie in the `k` strides with the largest maxima: look there alone.
        padding = [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % size)]
        z = jnp.pad(z, padding, constant_values=-jnp.inf)
        z = z.reshape(*z.shape[:-1], size, -1)
        best = lax.top_k(z.max(-2), k)[1]
        z = jnp.take_along_axis(z, best[..., None, :], axis=-1)
        z = z.reshape(*z.shape[:-2], k * size)
    # Bit by bit from the top, in unsigned integers ordered as the floats are.
    bits = jnp.finfo(z.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    raw = lax.bitcast_convert_type(z, unsigned)
    sign = jnp.asarray(1 << (bits - 1), unsigned)
    keys = jnp.where(raw >= sign, ~raw, raw | sign)

    def body(i, prefix):
        bit = jnp.left_shift(jnp.ones((), unsigned), (bits - 1 - i).astype(unsigned))
        candidate = prefix | bit
        count = (keys >= candidate).sum(-1, keepdims=True, dtype=jnp.int32)
        return jnp.where(count >= k, candidate, prefix)

    key = lax.fori_loop(0, bits, body, jnp.zeros((*keys.shape[:-1], 1), unsigned))
    return lax.bitcast_convert_type(jnp.where(key >= sign, key ^ sign, ~key), z.dtype)


def _is_among(z: Array, threshold: Array, k: int) -> Array:
    """Which entries are the `k` largest, given the last of them; the first of ties."""
    index = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)

    def count(chosen: Array) -> Array:
        return chosen.sum(-1, keepdims=True, dtype=jnp.int32)

    room = k - count(z > threshold)

    def halve(ends):
        low, high = ends
        middle = (low + high) // 2
        fits = count((z == threshold) & (index < middle)) <= room
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    # Mostly there is room for all that equal the threshold, and nothing to halve.
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
    """Refuses what is no separation, or has a parameter out of range."""
    if not isinstance(separation, Separation):
        names = ", ".join(c.__name__ for c in SEPARATIONS.values())
        raise ValueError(f"separation must be one of {names}, got {separation!r}")
    separation.check()


def separation_from_name(name: str, **parameters: Any) -> Separation:
    """The separation of that name, as configs and command lines spell it.

    Args:
      name: a key of `SEPARATIONS`.
      **parameters: its fields, such as `alpha`.

    Raises:
      ValueError: if the name, or that of a field, is unknown (the choices are listed).
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
