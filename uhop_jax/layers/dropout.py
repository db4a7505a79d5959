"""Dropout by a hash of the position, which costs little to compile and to run.

The 25 masks of a forecaster, drawn by `jax.random`, take two thirds of the compile time
of its training step, and a sixth of the step's time on a CPU. A mask needs far less
randomness than `jax.random` offers. Here a 32-bit mixing function, applied to an
element's position and then to each word of the key, decides whether the element is
kept. The computation is elementwise, so that XLA fuses it into the masked array and
shards both alike.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from uhop_jax._checks import check_key, check_rate


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
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        position += lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    bits = position
    for word in range(key.shape[-1]):
        bits = _mixed(bits ^ key[word])
    keep = bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    scale = jnp.asarray(1 / (1 - rate), x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros((), x.dtype))


def _mixed(bits: Array) -> Array:
    """A bijection of 32 bits in which each bit of the input flips half of the output.

    The constants are those that C. Wellons found by search ("Prospecting for Hash
    Functions", 2018).
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
