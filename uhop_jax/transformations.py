r"""Finite sets of transformations of patterns, and the likelihood over them.

A corruption that moves components, such as a shift of an image, leaves no component
likely by itself. Over a finite set of transformations the likelihood of a query is
:math:`p(x | \xi) = \sum_T \pi_T\, p(x | T \xi)`.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from uhop_jax._checks import (
    as_numbers,
    as_positive,
    check_count,
    check_finite,
    check_positive,
)
from uhop_jax._products import contract
from uhop_jax._pytree import Pytree
from uhop_jax.kernels import with_zeros
from uhop_jax.similarity import Dot

_REACH = 2  # pixels by which `image_transformations` shifts
_WIDTHS = (0.7, 1.0, 1.5, 2.0, 3.0)  # standard deviations of its blurs, in pixels

Shape = tuple[int, int, int]


class Transformations(Pytree, abc.ABC):
    """A finite set of maps of patterns to patterns; subclasses define both members.

    Raises:
      ValueError: if a field of a subclass is out of range.
    """

    @property
    @abc.abstractmethod
    def number(self) -> int:
        """How many transformations the set has."""

    @abc.abstractmethod
    def __call__(
        self, index: Int[Array, ""], patterns: Float[Array, "M d"]
    ) -> Float[Array, "M d"]:
        """The patterns after the transformation `index`, which may be traced."""


class Union(Transformations):
    """All transformations of several sets, in their order.

    Attributes:
      parts: the sets.
    """

    parts: tuple[Transformations, ...]

    def __post_init__(self):
        _keep(self, parts=_some("parts", self.parts))
        for part in self.parts:
            check_transformations(part)

    @property
    def number(self) -> int:
        return sum(part.number for part in self.parts)

    def __call__(self, index, patterns):
        firsts = np.cumsum([0, *(part.number for part in self.parts)])
        which = (index >= jnp.asarray(firsts[1:-1], index.dtype)).sum(dtype=jnp.int32)
        branches = [
            lambda i, x, part=part, first=int(first): part(i - first, x)
            for part, first in zip(self.parts, firsts, strict=False)
        ]
        return lax.switch(which, branches, index, patterns)


class Shifts(Transformations):
    """Moves each image by whole pixels, up to `reach` each way; zeros come in.

    Attributes:
      reach: largest number of pixels; 0 leaves images as they are.
      shape: height, width and channels of the images.
    """

    reach: int = dataclasses.field(metadata={"static": True})
    shape: Shape = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        _keep(self, shape=_image_shape(self.shape))
        check_count("reach", self.reach, 0)

    @property
    def number(self) -> int:
        return (2 * self.reach + 1) ** 2

    def __call__(self, index, patterns):
        n, side = self.reach, 2 * self.reach + 1
        images = _images(patterns, self.shape)
        padded = jnp.pad(images, ((0, 0), (n, n), (n, n), (0, 0)))
        zero = jnp.zeros_like(index)
        start = (zero, index // side, index % side, zero)
        return lax.dynamic_slice(padded, start, images.shape).reshape(patterns.shape)


class Flips(Transformations):
    """The mirror images: left to right, top to bottom, and both.

    Attributes:
      shape: height, width and channels of the images.
    """

    shape: Shape = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        _keep(self, shape=_image_shape(self.shape))

    @property
    def number(self) -> int:
        return 3

    def __call__(self, index, patterns):
        images = _images(patterns, self.shape)
        flipped = jnp.stack(
            [images[:, :, ::-1], images[:, ::-1], images[:, ::-1, ::-1]]
        )
        return flipped[index].reshape(patterns.shape)


class Blurs(Transformations):
    """Convolves each image with a Gaussian, its edges repeated.

    Attributes:
      widths: standard deviations in pixels, one for each transformation.
      shape: height, width and channels of the images.
    """

    widths: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    shape: Shape = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        shape = _image_shape(self.shape)
        _keep(self, widths=_some("widths", self.widths), shape=shape)
        check_positive("widths", self.widths)

    @property
    def number(self) -> int:
        return len(self.widths)

    def __call__(self, index, patterns):
        width = jnp.asarray(self.widths, patterns.dtype)[index]
        return blurred(patterns, width, self.shape)


class Warps(Transformations):
    """Turns and scales each image about its centre, interpolated; zeros come in.

    Attributes:
      degrees: angles, one for each transformation, counter-clockwise.
      scales: magnifications, one for each transformation.
      shape: height, width and channels of the images.
    """

    degrees: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    scales: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    shape: Shape = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        degrees, scales = _some("degrees", self.degrees), _some("scales", self.scales)
        _keep(self, degrees=degrees, scales=scales, shape=_image_shape(self.shape))
        check_finite("degrees", as_numbers("degrees", self.degrees))
        check_positive("scales", self.scales)
        if len(self.degrees) != len(self.scales):
            raise ValueError(
                f"degrees and scales must be of one length, got {len(self.degrees)} "
                f"and {len(self.scales)}"
            )

    @property
    def number(self) -> int:
        return len(self.degrees)

    def __call__(self, index, patterns):
        height, width, channels = self.shape
        angle = jnp.asarray(np.deg2rad(self.degrees), patterns.dtype)[index]
        scale = jnp.asarray(self.scales, patterns.dtype)[index]
        rows, columns = jnp.meshgrid(
            jnp.arange(height, dtype=patterns.dtype) - (height - 1) / 2,
            jnp.arange(width, dtype=patterns.dtype) - (width - 1) / 2,
            indexing="ij",
        )
        cos, sin = jnp.cos(angle) / scale, jnp.sin(angle) / scale
        source = jnp.stack(
            [
                cos * rows + sin * columns + (height - 1) / 2,
                cos * columns - sin * rows + (width - 1) / 2,
            ]
        )

        def plane(image: Array) -> Array:
            return jax.scipy.ndimage.map_coordinates(image, list(source), order=1)

        images = _images(patterns, self.shape).transpose(0, 3, 1, 2)
        planes = images.reshape(-1, height, width)
        warped = jax.vmap(plane)(planes).reshape(-1, channels, height, width)
        return warped.transpose(0, 2, 3, 1).reshape(patterns.shape)


class Occlusions(Transformations):
    """Sets one square of each image to zero, at the places of a grid.

    Attributes:
      side: of the square, in pixels.
      stride: distance of neighbouring places, in pixels.
      shape: height, width and channels of the images.
    """

    side: int = dataclasses.field(metadata={"static": True})
    stride: int = dataclasses.field(metadata={"static": True})
    shape: Shape = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        _keep(self, shape=_image_shape(self.shape))
        check_count("side", self.side, 1)
        check_count("stride", self.stride, 1)

    @property
    def _places(self) -> tuple[int, int]:
        rows, columns = (
            max(0, length - self.side) // self.stride + 1 for length in self.shape[:2]
        )
        return rows, columns

    @property
    def number(self) -> int:
        return math.prod(self._places)

    def __call__(self, index, patterns):
        height, width, _ = self.shape
        columns = jnp.asarray(self._places[1], index.dtype)
        top, left = (self.stride * x for x in jnp.divmod(index, columns))
        row = jnp.arange(height, dtype=index.dtype)[:, None]
        column = jnp.arange(width, dtype=index.dtype)[None]
        hidden = (row >= top) & (row < top + self.side)
        hidden &= (column >= left) & (column < left + self.side)
        images = _images(patterns, self.shape)
        images = jnp.where(hidden[None, :, :, None], jnp.zeros_like(images), images)
        return images.reshape(patterns.shape)


def image_transformations(shape: Sequence[int]) -> Transformations:
    """What scanners and cameras do most: shifts up to two pixels, and blurs.

    Args:
      shape: height, width and channels of the images.

    Raises:
      ValueError: if the shape does not have three positive integers.
    """
    size = _image_shape(shape)
    reach = min(_REACH, min(size[:2]) - 1)
    return Union((Shifts(reach, size), Blurs(_WIDTHS, size)))


class Transformed(Dot):
    r"""The log-likelihood of a query over transformed memories.

    :math:`\log \sum_T \pi_T \exp \langle \Phi_K(T \xi), \Phi_Q(x) \rangle`: one product
    for each transformation, in the memory of one. The kernel is a log-likelihood, such
    as `LikelihoodKernel`; the natural `beta` is 1.

    Attributes:
      transformations: the set.
      log_weights: `(T,)`, the logarithms of the probabilities `pi_T`.
    """

    transformations: Transformations = dataclasses.field(kw_only=True)
    log_weights: Float[Array, " T"] = dataclasses.field(kw_only=True)

    def keys(self, memories, observed=None):
        del observed  # the features of the query use it
        return memories

    def state(self, query, observed=None):
        return with_zeros(query, observed)

    def has_energy(self) -> bool:
        return False

    def _restriction(self, observed):
        return observed

    def _compare(self, keys, state, restrict):
        state = self.kernel.query_features(state, restrict)

        number = self.transformations.number
        if jnp.shape(self.log_weights) != (number,):
            raise ValueError(
                f"log_weights must have shape ({number},), one for each "
                f"transformation, got {jnp.shape(self.log_weights)}"
            )

        def product(index: Array, log_weight: Array) -> Array:
            features = self.kernel.memory_features(self.transformations(index, keys))
            overlaps = contract(state, features)
            return overlaps + log_weight.astype(overlaps.dtype)

        def add(total: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
            return jnp.logaddexp(total, product(*row)), None

        index = jnp.arange(number, dtype=jnp.int32)
        first = product(index[0], self.log_weights[0])
        return lax.scan(add, first, (index[1:], self.log_weights[1:]))[0]


def _image_shape(shape: Any) -> Shape:
    """Height, width and channels as integers of Python."""
    try:
        height, width, channels = shape
    except (TypeError, ValueError):
        raise ValueError(
            f"shape must be (height, width, channels), got {shape!r}"
        ) from None
    for name, value in (("height", height), ("width", width), ("channels", channels)):
        check_count(name, value, 1)
    return int(height), int(width), int(channels)


def _some(name: str, values: Any) -> tuple:
    """At least one value as a tuple, which can be static."""
    values = tuple(values) if np.iterable(values) else ()
    if not values:
        raise ValueError(f"{name} must be a tuple of at least one, got {values!r}")
    return values


def _keep(transformations: Transformations, **fields: Any) -> None:
    """Sets fields of a new set of transformations to their checked values."""
    for name, value in fields.items():
        object.__setattr__(transformations, name, value)


def _images(patterns: Array, shape: Shape) -> Array:
    """Patterns as images `(M, height, width, channels)`."""
    if patterns.shape[-1] != math.prod(shape):
        raise ValueError(
            f"images of shape {shape} have dimension {math.prod(shape)}, patterns have "
            f"{patterns.shape[-1]}"
        )
    return patterns.reshape(-1, *shape)


def blurred(
    patterns: Float[Array, "*batch d"], width: ArrayLike, shape: Shape
) -> Float[Array, "*batch d"]:
    """Images convolved with a Gaussian, their edges repeated.

    Args:
      patterns: images, one per row.
      width: standard deviation in pixels, positive.
      shape: height, width and channels of the images.

    Raises:
      ValueError: if the width is not positive, or shapes do not fit.
    """
    images = _images(patterns, shape)
    width = as_positive("width", width, patterns.dtype)
    for axis in (1, 2):
        size = shape[axis - 1]
        at = jnp.arange(size, dtype=patterns.dtype)
        offsets = jnp.arange(-size, size + 1, dtype=patterns.dtype)
        weights = jnp.exp(-0.5 * (offsets / width) ** 2)
        weights = weights / weights.sum()
        sources = jnp.clip(at[:, None] + offsets[None], 0, size - 1).astype(int)
        rows = jnp.arange(size)[:, None]
        matrix = jnp.zeros((size, size), patterns.dtype)
        spread = jnp.broadcast_to(weights[None], sources.shape)
        matrix = matrix.at[rows, sources].add(spread)
        moved = jnp.tensordot(
            images, matrix.T, axes=(axis, 0), precision=lax.Precision.HIGHEST
        )
        images = jnp.moveaxis(moved, -1, axis)
    return images.reshape(patterns.shape)


def check_transformations(transformations: Any) -> None:
    """Refuses anything but a set of transformations."""
    if not isinstance(transformations, Transformations):
        raise ValueError(
            "transformations must be Transformations such as Shifts(2, (28, 28, 1)), "
            f"got {transformations!r}"
        )
