"""Dropout by a hash of the position, which costs little to compile and to run.

A draw of `jax.random` for each of the 25 masks of a forecaster takes two thirds of the
compile time of its training step, and a sixth of the step on a CPU. A mask needs far
less randomness than it offers. Here an element is kept or dropped by two rounds of a
32-bit mixing function, of its position and of the key: elementwise, so that XLA fuses
it into what it is applied to, and shards it as that.
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
    """`x` with each element zero with probability `rate`, else scaled by what is kept.

    Args:
      x: any array.
      rate: in `[0, 1)`.
      key: of `jax.random`; None leaves `x` as it is.

    Raises:
      ValueError: if the rate is out of range, or the key is none.
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
