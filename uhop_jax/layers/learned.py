"""Learned parts of an association: an `alpha`, and a memory of each head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uhop_jax._checks import (
    as_numbers,
    check_count,
    check_floating,
    check_rngs,
    check_sizes,
    working_dtype,
)
from uhop_jax.separation import Entmax, Separation, bounded_alpha


class LearnedAlpha(nnx.Module):
    """A separation whose `alpha` is learned within (1, 2).

    Args:
      separation: a separation with a leaf `alpha`, from which learning starts: a number
        for all heads, or `(num_heads,)`, one for each.
      param_dtype: of the parameter.

    Raises:
      ValueError: if the separation has no `alpha`, or one that is not within (1, 2).
    """

    def __init__(
        self, separation: Separation = Entmax(1.5), *, param_dtype: Any = jnp.float32
    ):
        if not hasattr(separation, "alpha"):
            raise ValueError(
                f"LearnedAlpha needs a separation with an alpha, got {separation!r}"
            )
        check_floating("param_dtype", param_dtype)
        alpha = as_numbers("alpha", separation.alpha)
        if not ((alpha > 1) & (alpha < 2)).all():
            raise ValueError(f"a learned alpha must start within (1, 2), got {alpha}")
        self.start = with_hashable_leaves(separation.specialised(("alpha",)))
        raw = np.log((alpha - 1) / (2 - alpha))  # the inverse of `bounded_alpha`
        self.raw = nnx.Param(jnp.asarray(raw).astype(param_dtype))

    def __call__(self) -> Separation:
        """The separation at the present `alpha`."""
        replaced: Any = dataclasses.replace
        raw = self.raw[...].astype(working_dtype(self.raw))  # the ends are then near
        return replaced(self.start, alpha=bounded_alpha(raw))


class BiasPattern(nnx.Module):
    """One learned memory of each head, a key and a value, drawn from `N(0, 0.02^2)`.

    Args:
      num_heads: number of heads; 1 in a static layer.
      key_size: dimension of a head's keys; of the features in a static layer.
      value_size: dimension of a head's values; `key_size` by default.
      param_dtype: of the parameters.
      rngs: for the start values.

    Raises:
      ValueError: if a size is no positive integer.
    """

    def __init__(
        self,
        num_heads: int,
        key_size: int,
        value_size: int | None = None,
        *,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_count("num_heads", num_heads, 1)
        check_count("key_size", key_size, 1)
        check_sizes(value_size=value_size)
        check_floating("param_dtype", param_dtype)
        check_rngs(rngs)
        init, size = nnx.initializers.normal(0.02), value_size or key_size
        self.key = nnx.Param(init(rngs.params(), (num_heads, key_size), param_dtype))
        self.value = nnx.Param(init(rngs.params(), (num_heads, size), param_dtype))


def with_hashable_leaves(separation: Separation) -> Separation:
    """The separation, its leaves numbers or tuples: static data must be hashable."""

    def hashable(x: Any) -> Any:
        number = as_numbers(f"each leaf of {type(separation).__name__}", x)
        return tuple(number.tolist()) if number.ndim else number.item()

    return jax.tree.map(hashable, separation)


def with_array_leaves(separation: Separation) -> Separation:
    """The separation, its leaves arrays: the inverse of `with_hashable_leaves`."""
    return jax.tree.map(jnp.asarray, separation, is_leaf=lambda x: isinstance(x, tuple))
