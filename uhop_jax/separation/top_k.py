"""The separation of the nearest memories, whose number is fixed."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import export, lax
from jaxtyping import Array

from uhop_jax._checks import check_count, surely_less
from uhop_jax._fast import kth_largest
from uhop_jax.separation.base import Separation
from uhop_jax.separation.exponential import log_sum_exp, softmax
from uhop_jax.separation.forms import Largest


class TopK(Separation):
    r"""Softmax over exactly the `k` largest overlaps; ties go to the lower index.

    The conjugate is the `logsumexp` of the `k` largest overlaps. It is convex as the
    maximum of the `logsumexp` over all subsets of `k` overlaps.

    Attributes:
      k: number of memories with a weight, at least 1 and at most `M`.
    """

    shift_invariant: ClassVar[bool] = True

    k: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def form(self):
        return Largest(self.k)

    def check(self):
        check_count("k", self.k, 1)

    def margin(self):
        """Zero for `k = 1`, else infinite."""
        return 0.0 if self.k == 1 else jnp.inf

    def _weights(self, z):
        return softmax(self._largest(z), None)

    def _conjugate(self, z):
        return log_sum_exp(self._largest(z), None)

    def _largest(self, z: Array) -> Array:
        """`z` with all but its `k` largest entries, and NaN, at `-inf`."""
        number = z.shape[-1]
        if not export.is_symbolic_dim(number):
            check_count("k", self.k, 1, number)
        elif not surely_less(self.k - 1, number):
            raise ValueError(
                f"k is {self.k}, and the number of memories {number} may be less: give "
                f"jax.export.symbolic_shape the constraint '{number} >= {self.k}'"
            )
        fixed = lax.stop_gradient(z)
        among = _is_among(fixed, kth_largest(fixed, self.k), self.k)
        return jnp.where(among | jnp.isnan(z), z, -jnp.inf)


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
