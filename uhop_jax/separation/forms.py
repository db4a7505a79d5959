r"""Forms of weights: what streamed retrieval has to know about a separation.

Retrieval that reads memories block by block cannot see all overlaps of a query at once.
If a weight depends on its own overlap and on one number of the query,
:math:`p_\mu = f(z_\mu, \theta)`, the number is enough. A form says what `f` is;
`Whole` says that there is no such number that the algorithms know.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from uhop_jax.separation._root import Power


class Exponential(NamedTuple):
    """Weights `e^z / sum e^z`, with `null` over a null memory of overlap zero too."""

    null: bool = False


class Powers(NamedTuple):
    """Weights `[z]_+^degree / sum [z]_+^degree`."""

    degree: int


class Root(NamedTuple):
    """Weights of `Entmax`.

    Attributes:
      alpha: the index of each query, a number or an array.
      power: static arithmetic that is right for `alpha`; None chooses it at run time.
    """

    alpha: ArrayLike
    power: Power | None = None


class Largest(NamedTuple):
    """Softmax over the `k` largest overlaps."""

    k: int


class Whole(NamedTuple):
    """Any weights: all overlaps of a block of queries are in memory at once."""


Form = Exponential | Powers | Root | Largest | Whole


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
