"""The base of all separations: masks, half precision, temperatures and checks."""

import abc
import functools
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from uhop_jax._checks import (
    as_boolean,
    as_floating,
    as_positive,
    broadcast_rows,
    working_dtype,
)
from uhop_jax._pytree import Pytree
from uhop_jax.separation.forms import Form, Whole


class Separation(Pytree, abc.ABC):
    """Maps overlaps `z (..., M)` to weights `(..., M)`; the base of all separations.

    A new separation implements `_weights` and, where its weights are the gradient of a
    convex function, `_conjugate`. Both receive float32 or float64 overlaps in which
    masked entries are `-inf`. A subclass that has weights of its own inherits nothing
    that belongs to the weights of another separation.

    Attributes:
      normalized: whether the weights of a row sum to one.
      shift_invariant: whether adding a constant to all overlaps of a row leaves the
        weights as they are and adds the constant to the conjugate.
    """

    normalized: ClassVar[bool] = True
    shift_invariant: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any):
        if "_weights" in vars(cls):
            for name in _OF_WEIGHTS:
                if name not in vars(cls):
                    setattr(cls, name, vars(Separation)[name])
        super().__init_subclass__(**options)

    @property
    def has_conjugate(self) -> bool:
        """Whether the weights are the gradient of `conjugate`."""
        return type(self)._conjugate is not Separation._conjugate

    @property
    def form(self) -> Form:
        """What streamed retrieval has to know; the default is right and slow."""
        return Whole()

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
        return _jitted("_weights", self, z).astype(dtype)

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
        return _jitted("_conjugate", self, z).astype(dtype)

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
          beta: inverse temperature, positive; broadcasts against the leading axes of
            `overlaps`.
          where: true for valid entries; broadcasts against `overlaps`.

        Returns:
          As `__call__`.

        Raises:
          ValueError: if `beta` is not positive, or as in `__call__`.
        """
        *prepared, dtype = self._prepare_both(overlaps, beta, where)
        return _jitted("_tempered", self, *prepared).astype(dtype)

    def shares(
        self,
        overlaps: Float[Array, "*batch M"],
        beta: ArrayLike,
        *,
        where: Bool[Array, "*#batch M"] | None = None,
    ) -> tuple[Float[Array, "*batch M"], Float[Array, "*batch 1"] | None]:
        """`tempered` before its last division.

        An average divides faster after its product than all weights before it.

        Args:
          overlaps: as in `tempered`.
          beta: as in `tempered`.
          where: as in `tempered`.

        Returns:
          Shares between 0 and 1, in at least float32, and what divides them; None
          stands for weights that need no division.

        Raises:
          ValueError: as `tempered`.
        """
        *prepared, _ = self._prepare_both(overlaps, beta, where)
        return _jitted("_shares", self, *prepared)

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
          beta: inverse temperature, positive; broadcasts against the leading axes of
            `overlaps`.
          where: true for valid entries; broadcasts against `overlaps`.

        Returns:
          As `conjugate`.

        Raises:
          ValueError: if `beta` is not positive, or as in `conjugate`.
        """
        self._check_conjugate()
        *prepared, dtype = self._prepare_both(overlaps, beta, where)
        return _jitted("_tempered_conjugate", self, *prepared).astype(dtype)

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
        """The convex function of each row, zero for a row of `-inf`.

        A separation that leaves it undefined has no conjugate, see `has_conjugate`.
        """
        raise NotImplementedError

    def _shares(
        self, overlaps: Array, beta: Array, where: Any
    ) -> tuple[Array, Array | None]:
        """`shares` for prepared arguments."""
        top = self._reference(overlaps, where)
        return self._weights(scaled_about(overlaps, top, beta, where)), None

    def _tempered(self, overlaps: Array, beta: Array, where: Any) -> Array:
        """`tempered` for prepared arguments."""
        shares, total = self._shares(overlaps, beta, where)
        return shares if total is None else shares / total

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
        beta = as_positive("beta", beta, overlaps.dtype)
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


# What a subclass with weights of its own does not inherit.
_OF_WEIGHTS = (
    *("form", "margin", "shift_invariant"),
    *("_conjugate", "_shares", "_tempered_conjugate", "_reference"),
)


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
@functools.partial(jax.jit, static_argnums=0)
def _jitted(method: str, separation: Separation, *prepared: Any) -> Any:
    return getattr(separation, method)(*prepared)
