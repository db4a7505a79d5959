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
import enum
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike, Bool, Float

from uhop_jax._checks import (
    as_floating,
    broadcast_rows,
    check_at_least,
    check_choice,
    check_count,
    working_dtype,
)
from uhop_jax._pytree import frozen_pytree

# From this length on, the root is first bounded on the maxima of blocks of the row.
_BLOCKED_LENGTH = 2048
_BLOCKS = 256
_MAX_STEPS = 128


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
            where = jnp.asarray(where)
            if where.dtype != jnp.bool_:
                raise ValueError(f"where must be boolean, got dtype {where.dtype}")
            z = jnp.where(broadcast_rows("where", where, z.shape), z, -jnp.inf)
        return z, dtype


# Outside of `jax.jit` a loop would be compiled anew at every call.
@jax.jit
def _jit_weights(separation: Separation, z: Array) -> Array:
    return separation._weights(z)


@jax.jit
def _jit_conjugate(separation: Separation, z: Array) -> Array:
    return separation._conjugate(z)


# --------------------------------------------------------------------------------------
# The entmax family. With e = alpha - 1 and u = z - max(z) <= 0 the weights are
#     p_i = exp_e(u_i - s),    exp_e(x) = (1 + e x)_+^(1/e)    (exp(x) at e = 0),
# where s >= 0 makes them sum to one. This is `tau = e s - 1` of Peters et al. 2019, in
# the variable that stays accurate as alpha tends to 1.
# --------------------------------------------------------------------------------------


class _Power(enum.IntEnum):
    """How `b^(1/e)` is computed; all but GENERAL need no transcendental function."""

    GENERAL = 0
    SQUARE = 1  # alpha = 1.5
    LINEAR = 2  # alpha = 2


def _exp_and_slope(u: Array, s: Array, e: Array, power: _Power) -> tuple[Array, Array]:
    """`p = exp_e(u - s)` and its derivative `p^(1 - e)`, both zero off the support."""
    if power is _Power.LINEAR:
        p = jnp.maximum(u - (s - 1.0), 0.0)
        return p, jnp.ceil(p)  # 0 or 1; unlike a comparison, it vectorises
    if power is _Power.SQUARE:
        root = jnp.maximum(0.5 * u - (0.5 * s - 1.0), 0.0)
        return root * root, root
    x = u - s
    inside = 1.0 + e * x > 0
    safe_e = jnp.where(e == 0, 1.0, e)
    log_p = jnp.where(e == 0, x, jnp.log1p(jnp.where(inside, e * x, 0.0)) / safe_e)
    p = jnp.where(inside, jnp.exp(log_p), 0.0)
    return p, jnp.where(inside, p / (1.0 + e * x), 0.0)


def _log_sum(f: Array, e: Array) -> Array:
    """`(1 - f^-e) / e`, which is `log f` at e = 0."""
    safe_e = jnp.where(e == 0, 1.0, e)
    return jnp.where(e == 0, jnp.log(f), -jnp.expm1(-e * jnp.log(f)) / safe_e)


def _root(u: Array, e: Array, start: Array, power: _Power | Array) -> Array:
    """The `s >= start` at which the weights of each row sum to one, `(..., 1)`.

    Newton's method on `f^e`, `f` the sum of the weights, which is convex and decreasing
    in `s` for `e <= 1`: the iterates climb to the root and never pass it. For `e > 1`
    it is not convex and the bracket is halved instead. A row that is done stays as it
    is, so that it does not depend on the other rows.
    """
    length = u.shape[-1]
    eps = float(jnp.finfo(u.dtype).eps)
    tolerance = eps * (4.0 + 0.25 * length**0.5)
    e_rows = jnp.broadcast_to(e, start.shape)
    convex = e_rows <= 1
    # Were all entries equal to the largest, the root would be this; it is never larger.
    upper = jnp.maximum(_log_sum(jnp.full_like(start, length), e_rows), start)

    def sums(s: Array, power: _Power) -> tuple[Array, Array]:
        p, slope = _exp_and_slope(u, s, e, power)
        return p.sum(-1, keepdims=True), slope.sum(-1, keepdims=True)

    def body(carry):
        low, high, s, active, step = carry
        f, slope = _switch(power, functools.partial(sums, s))
        above = f > 1
        low = jnp.where(active & above, s, low)
        high = jnp.where(active & ~above, s, high)
        newton = s + f * _log_sum(f, e_rows) / jnp.where(slope == 0, 1.0, slope)
        target = jnp.where(convex, jnp.minimum(newton, upper), 0.5 * (low + high))
        moving = jnp.where(convex, (f - 1 > tolerance) & (target > s), target != s)
        active = active & moving
        return low, high, jnp.where(active, target, s), active, step + 1

    def unfinished(carry):
        *_, active, step = carry
        return jnp.any(active) & (step < _MAX_STEPS)

    active = jnp.full(start.shape, True)
    carry = (start, upper, start, active, 0)
    return lax.while_loop(unfinished, body, carry)[2]


def _switch(power: _Power | Array, function):
    """Calls `function(power)`, choosing at run time if `power` is an array."""
    if isinstance(power, _Power):
        return function(power)
    return lax.switch(power, [functools.partial(function, p) for p in _Power])


def _run_time_power(e: Array) -> Array:
    square, linear = jnp.all(e == 0.5), jnp.all(e == 1)
    return jnp.where(linear, _Power.LINEAR, jnp.where(square, _Power.SQUARE, 0))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _entmax(z: Array, alpha: Array, power: _Power | None) -> Array:
    """Weights of `alpha`-entmax, with an `alpha` that broadcasts against `z`.

    `power` fixes the arithmetic; None chooses it when the value of `alpha` is known.
    """
    e = (alpha - 1).astype(z.dtype)
    if z.shape[-1] == 0:
        return z
    mode = _run_time_power(e) if power is None else power
    top = jnp.max(z, axis=-1, keepdims=True)
    # XLA may fuse the product that made `z` into the difference and round it once only:
    # that of the largest must stay exactly zero, else one-hot weights are not.
    safe_top = jnp.where(top == -jnp.inf, 0.0, top)
    u = jnp.where((z == top) & (top > -jnp.inf), 0.0, z - safe_top)
    start = jnp.zeros_like(top)
    if z.shape[-1] >= _BLOCKED_LENGTH:
        # A part of the entries has a smaller sum, hence a smaller root: a lower bound
        # that costs little, and mostly the right support already.
        size = z.shape[-1] // _BLOCKS
        blocks = u[..., : _BLOCKS * size].reshape(*u.shape[:-1], _BLOCKS, size).max(-1)
        start = _root(blocks, e, start, mode)
    s = _root(u, e, start, mode)
    p = _switch(mode, lambda power: _exp_and_slope(u, s, e, power)[0])
    # For alpha > 2 an ulp of the root is much more than an ulp of a weight.
    total = p.sum(-1, keepdims=True)
    steep = (e > 1) & (total > 0)
    p = jnp.where(steep, p / jnp.where(steep, total, 1.0), p)
    return jnp.where(jnp.isnan(e), e, p)


@functools.partial(_entmax.defjvp, symbolic_zeros=True)
def _entmax_jvp(power, primals, tangents):
    z, alpha = primals
    dz, dalpha = tangents
    p = _entmax(z, alpha, power)
    e = (alpha - 1).astype(p.dtype)
    log_p = jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)
    cap = 0.5 * math.log(float(jnp.finfo(p.dtype).max))
    mode = _run_time_power(e) if power is None else power
    slope = _switch(mode, functools.partial(_support_power, p, log_p, e, cap))
    total = slope.sum(-1, keepdims=True)
    share = slope / jnp.where(total > 0, total, 1.0)
    dp = jnp.zeros_like(p)
    if not isinstance(dz, SymbolicZero):
        dz = jnp.where(p > 0, dz, 0.0)
        dp += slope * (dz - (share * dz).sum(-1, keepdims=True))
    if not isinstance(dalpha, SymbolicZero):
        # At a fixed x = u - s, d log(p)/d alpha = -log(p)^2 phi(e log p).
        direct = -p * log_p**2 * _phi(e * log_p)
        shift = share * direct.sum(-1, keepdims=True)
        dp += (direct - shift) * jnp.asarray(dalpha).astype(p.dtype)
    return p, dp


def _support_power(p, log_p, e, cap, power: _Power) -> Array:
    """`p^(2 - alpha)` on the support, zero off it."""
    if power is _Power.LINEAR:
        return (p > 0).astype(p.dtype)
    if power is _Power.SQUARE:
        return jnp.sqrt(jnp.where(p > 0, p, 1.0)) * jnp.where(p > 0, 1.0, 0.0)
    return jnp.where(p > 0, jnp.exp(jnp.minimum((1 - e) * log_p, cap)), 0.0)


def _phi(y: Array) -> Array:
    """`(exp(-y) - 1 + y) / y^2` for `y <= 0`, by its series near zero."""
    small = jnp.abs(y) < 0.5
    series = jnp.zeros_like(y)
    for k in range(15, 1, -1):  # sum_k (-y)^(k-2) / k!, by Horner's rule
        series = 1.0 + series * (-y) / (k + 1)
    far = jnp.where(small, -1.0, y)
    return jnp.where(small, 0.5 * series, (jnp.expm1(-far) + far) / far**2)


@jax.custom_jvp
def _entmax_conjugate(z: Array, alpha: Array) -> Array:
    p = _entmax(z, alpha, None)
    top = jnp.max(z, axis=-1, initial=-jnp.inf)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    u = jnp.where(p > 0, z - top[..., None], 0.0)
    return top + (p * u).sum(-1) - _negative_entropy(p, alpha)


@_entmax_conjugate.defjvp
def _entmax_conjugate_jvp(primals, tangents):
    (z, alpha), (dz, dalpha) = primals, tangents
    p = _entmax(z, alpha, None)
    _, domega = jax.jvp(lambda a: _negative_entropy(p, a), (alpha,), (dalpha,))
    dz = jnp.where(p > 0, dz, 0.0)
    return _entmax_conjugate(z, alpha), (p * dz).sum(-1) - domega


def _negative_entropy(p: Array, alpha: Array) -> Array:
    r"""Tsallis :math:`\Omega_\alpha(p)`, see `Entmax`; its limit at `alpha = 1`."""
    alpha = alpha.astype(p.dtype)
    e = alpha - 1
    log_p = jnp.log(jnp.where(p > 0, p, 1.0))
    # p (p^e - 1) / e = p log(p) (1 - exp(y)) / -y with y = e log p; smooth at e = 0.
    return (p * log_p * _expm1_ratio(e * log_p) / alpha).sum(-1)


def _expm1_ratio(y: Array) -> Array:
    """`(exp(y) - 1) / y`, smooth at zero."""
    small = jnp.abs(y) < 1e-3
    far = jnp.where(small, 1.0, y)
    series = 1.0 + y / 2 * (1.0 + y / 3 * (1.0 + y / 4 * (1.0 + y / 5)))
    return jnp.where(small, series, jnp.expm1(far) / far)


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
      alpha: index, at least 1; a number or an array that broadcasts against the leading
        axes of the overlaps (one a row, one a head). Under `jax.jit`, where it cannot
        be checked, an `alpha` below 1 gives NaN. To learn it, see `bounded_alpha`.
    """

    alpha: ArrayLike = 1.5

    def check(self):
        check_at_least("alpha", self.alpha, 1.0)

    def margin(self):
        """`1 / (alpha - 1)`, infinite at `alpha = 1`."""
        e = jnp.asarray(self.alpha, dtype=float) - 1
        return jnp.where(e > 0, 1 / jnp.where(e > 0, e, 1.0), jnp.inf)

    def _weights(self, z):
        return _entmax(z, self._aligned(z), None)

    def _conjugate(self, z):
        return _entmax_conjugate(z, self._aligned(z))

    def _aligned(self, z: Array) -> Array:
        """`alpha` in the dtype of `z` with as many axes, NaN where it is below 1."""
        alpha = jnp.asarray(self.alpha).astype(z.dtype)
        alpha = jnp.where(alpha >= 1, alpha, jnp.nan)
        if alpha.ndim == 0:
            return alpha.reshape((1,) * z.ndim)
        return broadcast_rows("alpha", alpha, z.shape[:-1])[..., None]


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
        return _entmax(z, jnp.full((1,) * z.ndim, 2.0, z.dtype), _Power.LINEAR)

    def _conjugate(self, z):
        return _entmax_conjugate(z, jnp.full((1,) * z.ndim, 2.0, z.dtype))


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
        keys = _ordered_integers(lax.stop_gradient(z))
        threshold = _kth_largest(keys, self.k)
        above = keys > threshold
        tied = keys == threshold
        room = self.k - above.sum(-1, keepdims=True, dtype=jnp.int32)
        rank = jnp.cumsum(tied, axis=-1, dtype=jnp.int32)
        return jnp.where(above | (tied & (rank <= room)), z, -jnp.inf)


def _ordered_integers(z: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    bits = jnp.finfo(z.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    # -0.0 must equal 0.0; XLA would drop the sum `z + 0.0`.
    raw = lax.bitcast_convert_type(jnp.where(z == 0, 0.0, z), unsigned)
    sign = jnp.asarray(1 << (bits - 1), unsigned)
    return jnp.where(raw >= sign, ~raw, raw | sign)


def _kth_largest(keys: Array, k: int) -> Array:
    """The `k`-th largest key of each row `(..., 1)`, fixed bit by bit from the top."""
    bits = keys.dtype.itemsize * 8

    def body(i, prefix):
        bit = jnp.left_shift(
            jnp.ones((), keys.dtype), (bits - 1 - i).astype(keys.dtype)
        )
        candidate = prefix | bit
        count = (keys >= candidate).sum(-1, keepdims=True, dtype=jnp.int32)
        return jnp.where(count >= k, candidate, prefix)

    start = jnp.zeros((*keys.shape[:-1], 1), keys.dtype)
    return lax.fori_loop(0, bits, body, start)


SEPARATIONS: dict[str, type[Separation]] = {
    "softmax": Softmax,
    "softmax1": Softmax1,
    "entmax": Entmax,
    "sparsemax": Sparsemax,
    "polynomial": Polynomial,
    "topk": TopK,
}


def separation_from_name(name: str, **parameters: Any) -> Separation:
    """The separation of that name, as configs and command lines spell it.

    Args:
      name: a key of `SEPARATIONS`.
      **parameters: its fields, such as `alpha`.

    Raises:
      ValueError: if the name is unknown (the choices are listed).
    """
    check_choice("separation", name, SEPARATIONS)
    return SEPARATIONS[name](**parameters)
