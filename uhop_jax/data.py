"""Data sets as NumPy arrays: patterns to store and queries to retrieve."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from uhop_jax._checks import check_choice

IMAGES = ("digits",)


class Images(NamedTuple):
    """A set of images.

    Attributes:
      pixels: `(n, height, width, channels)`, float32 in `[0, 1]`.
      labels: `(n,)`.
    """

    pixels: Float[np.ndarray, "n height width channels"]
    labels: Int[np.ndarray, " n"]

    @property
    def patterns(self) -> Float[np.ndarray, "n d"]:
        """One flattened image per row."""
        return self.pixels.reshape(len(self.pixels), -1)


def images(name: str) -> Images:
    """Loads a set of images.

    Args:
      name: `digits`, 1,797 handwritten digits of 8 x 8 pixels that come with
        scikit-learn (the test part of Alpaydin & Kaynak, UCI 1998).

    Returns:
      All images of the set, in its own order.

    Raises:
      ValueError: if the name is unknown (the choices are listed).
    """
    check_choice("data set", name, IMAGES)
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = digits.images.astype(np.float32)[..., None] / 16
    return Images(pixels, digits.target.astype(np.int32))
