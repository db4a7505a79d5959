"""Dropout, whose masks a hash of the position draws (`uhop_jax._fast`)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from uhop_jax._checks import check_key, check_rate
from uhop_jax._fast import kept


def dropped(
    x: Float[Array, "*shape"], rate: float, key: Array | None
) -> Float[Array, "*shape"]:
    """Dropout: each element of `x` is zero with probability `rate`.

    The elements that are kept are divided by `1 - rate`.

    Args:
      x: array of a floating dtype.
      rate: probability in `[0, 1)`.
      key: key of `jax.random`; None leaves `x` as it is.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      ValueError: if `rate` is out of range, or `key` is not a key of `jax.random`.
    """
    check_rate("rate", rate)
    if key is None or rate == 0:
        return x
    check_key(key)
    keep = kept(key, x.shape, rate)
    scale = jnp.asarray(1 / (1 - rate), x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros((), x.dtype))
