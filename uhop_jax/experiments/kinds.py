"""Corruptions of the authors' code, and corruptions that treat an image as a whole."""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray

from uhop_jax._checks import check_choice
from uhop_jax._pytree import Pytree
from uhop_jax.corruption import Corruption, Mask, Noise, NormNoise, scale_of
from uhop_jax.transformations import Shape, Shifts, blurred

Patterns = Float[Array, "*batch d"]

_DISTANCE = 2  # pixels that `shift_noise` moves

KINDS = (
    *("mask", "known_mask", "noise", "folded_noise", "norm_noise"),
    *("salt_and_pepper", "inverted", "gamma"),
    *("block", "blur", "shift", "shift_noise"),
)


class Dropout(Pytree):
    """Masks components with a probability, and scales up the rest, as dropout does.

    The authors' code uses dropout in place of a mask.

    Attributes:
      fraction: probability that a component is masked, in `[0, 1)`.
    """

    fraction: ArrayLike = 0.5

    def __call__(self, key: PRNGKeyArray, patterns: Patterns) -> Patterns:
        return Mask(self.fraction)(key, patterns) / (1 - self.fraction)


class FoldedNoise(Pytree):
    """Adds Gaussian noise, takes the magnitude of the sum and clamps it to `[0, 1]`.

    The authors' code does so: negative values come back as positive values.

    Attributes:
      scale: standard deviation of the noise of each component.
    """

    scale: ArrayLike = 0.5

    def __call__(self, key: PRNGKeyArray, patterns: Patterns) -> Patterns:
        return _folded(Noise(self.scale, low=None, high=None)(key, patterns))

    def log_likelihood(
        self,
        memories: Float[Array, "M d"],
        query: Float[Array, "Q d"],
        *,
        observed: None = None,
    ) -> Float[Array, "Q M"]:
        """`log p(query | memory)` up to a constant of the query."""
        del observed  # this noise hides nothing
        scale, exact = scale_of(self.scale, memories.dtype)
        clamped = query >= 1
        logcdf = jax.scipy.stats.norm.logcdf
        beyond = jnp.logaddexp(
            logcdf((memories - 1) / scale), logcdf((-1 - memories) / scale)
        )
        intact = _folded(memories)

        def folded(row: tuple[Array, Array]) -> Array:
            value, inside = (x[None] for x in row)
            straight = -0.5 * ((value - memories) / scale) ** 2
            both = straight + jnp.log1p(jnp.exp(-2 * value * memories / scale**2))
            noisy = jnp.where(inside, both, beyond).sum(-1)
            same = (value == intact).all(-1)
            return jnp.where(exact, jnp.where(same, 0.0, -jnp.inf), noisy)

        return jax.lax.map(folded, (query, ~clamped))


class FoldedNormNoise(Pytree):
    """Like `FoldedNoise`, with noise whose whole vector has a given norm.

    Attributes:
      scale: the Euclidean norm of the noise vector.
    """

    scale: ArrayLike = 0.5

    def __call__(self, key: PRNGKeyArray, patterns: Patterns) -> Patterns:
        return _folded(NormNoise(self.scale, low=None, high=None)(key, patterns))


def _folded(patterns: Array) -> Array:
    return jnp.clip(jnp.abs(patterns), 0, 1)


class SaltAndPepper(Pytree):
    """Sets components, each with a probability, to 0 or 1 at random.

    Attributes:
      fraction: probability that a component is replaced, in `[0, 1]`.
    """

    fraction: ArrayLike = 0.5

    def __call__(self, key: PRNGKeyArray, patterns: Patterns) -> Patterns:
        which, values = jax.random.split(key)
        hit = jax.random.bernoulli(which, self.fraction, patterns.shape)
        ends = jax.random.bernoulli(values, 0.5, patterns.shape)
        return jnp.where(hit, ends.astype(patterns.dtype), patterns)


class _NoiseAfter(Pytree, abc.ABC):
    """Maps patterns, then adds Gaussian noise and clamps to `[0, 1]`.

    Attributes:
      scale: standard deviation of the noise of each component.
    """

    scale: ArrayLike = 0.5

    @abc.abstractmethod
    def mapped(self, patterns: Patterns) -> Patterns:
        """The patterns before the noise."""

    @property
    def _noise(self) -> Noise:
        return Noise(self.scale, low=0.0, high=1.0)

    def __call__(self, key: PRNGKeyArray, patterns: Patterns) -> Patterns:
        return self._noise(key, self.mapped(patterns))

    def log_likelihood(
        self,
        memories: Float[Array, "M d"],
        query: Float[Array, "Q d"],
        *,
        observed: None = None,
    ) -> Float[Array, "Q M"]:
        """`log p(query | memory)` up to a constant of the query."""
        memories = self.mapped(memories)
        return self._noise.log_likelihood(memories, query, observed=observed)


class Inverted(_NoiseAfter):
    """Inverts the contrast, adds Gaussian noise and clamps to `[0, 1]`.

    Attributes:
      scale: standard deviation of the noise of each component.
    """

    def mapped(self, patterns: Patterns) -> Patterns:
        return 1 - patterns


class Darkened(_NoiseAfter):
    """Darkens by `0.6 x^3`, adds Gaussian noise and clamps to `[0, 1]`.

    Attributes:
      scale: standard deviation of the noise of each component.
    """

    def mapped(self, patterns: Patterns) -> Patterns:
        return 0.6 * patterns**3


class HiddenSquare(Pytree):
    """Sets a square of each image to zero, at a random place.

    Attributes:
      fraction: part of the image that the square covers.
      shape: height, width and channels of the images.
    """

    fraction: ArrayLike
    shape: Shape = dataclasses.field(metadata={"static": True})

    def __call__(self, key: PRNGKeyArray, patterns: Patterns) -> Patterns:
        height, width, _ = self.shape
        images = patterns.reshape(-1, *self.shape)
        area = jnp.asarray(self.fraction) * (height * width)
        side = jnp.round(jnp.sqrt(area))
        places = jax.random.uniform(key, (2, len(images), 1))
        top = jnp.floor(places[0] * (height - side + 1))
        left = jnp.floor(places[1] * (width - side + 1))
        rows = jnp.arange(height, dtype=top.dtype)[None]
        columns = jnp.arange(width, dtype=top.dtype)[None]
        inside = ((rows >= top) & (rows < top + side))[:, :, None] & (
            (columns >= left) & (columns < left + side)
        )[:, None, :]
        return jnp.where(inside[..., None], 0, images).reshape(patterns.shape)


class Blur(Pytree):
    """Convolves each image with a Gaussian, its edges repeated.

    Attributes:
      width: standard deviation in pixels.
      shape: height, width and channels of the images.
    """

    width: ArrayLike
    shape: Shape = dataclasses.field(metadata={"static": True})

    def __call__(self, key: PRNGKeyArray, patterns: Patterns) -> Patterns:
        del key
        return blurred(patterns, self.width, self.shape)


class Shift(Pytree):
    """Moves each image by `distance` pixels in one of four directions; zeros come in.

    Attributes:
      distance: whole pixels.
      shape: height, width and channels of the images.
    """

    distance: int = dataclasses.field(metadata={"static": True})
    shape: Shape = dataclasses.field(metadata={"static": True})

    def moved(self, patterns: Float[Array, "M d"]) -> Float[Array, "4 M d"]:
        """The patterns after a move in each direction."""
        n, moves = self.distance, Shifts(self.distance, self.shape)
        # Places of the four directions among all shifts up to `n` pixels each way.
        side = 2 * n + 1
        ways = (n, 2 * n * side + n, n * side, n * side + 2 * n)
        return jnp.stack([moves(jnp.asarray(way, jnp.int32), patterns) for way in ways])

    def __call__(self, key: PRNGKeyArray, patterns: Patterns) -> Patterns:
        rows = patterns.reshape(-1, math.prod(self.shape))
        way = jax.random.randint(key, (len(rows),), 0, 4)
        return self.moved(rows)[way, jnp.arange(len(rows))].reshape(patterns.shape)


class ShiftedNoise(Pytree):
    """Moves each image by two pixels, as `Shift`, then adds noise and clamps.

    Attributes:
      scale: standard deviation of the noise of each component.
      shape: height, width and channels of the images.
    """

    scale: ArrayLike
    shape: Shape = dataclasses.field(metadata={"static": True})

    def __call__(self, key: PRNGKeyArray, patterns: Patterns) -> Patterns:
        way, noise = jax.random.split(key)
        moved = Shift(_DISTANCE, self.shape)(way, patterns)
        return Noise(self.scale, low=0.0, high=1.0)(noise, moved)

    def log_likelihood(
        self,
        memories: Float[Array, "M d"],
        query: Float[Array, "Q d"],
        *,
        observed: None = None,
    ) -> Float[Array, "Q M"]:
        """`log p(query | memory)` up to a constant: each direction has chance 1/4."""
        noise = Noise(self.scale, low=0.0, high=1.0)

        def one(moved: Array) -> Array:
            return noise.log_likelihood(moved, query, observed=observed)

        log_p = jax.lax.map(one, Shift(_DISTANCE, self.shape).moved(memories))
        return jax.nn.logsumexp(log_p, axis=0) - math.log(4)


class KnownMasks(Pytree):
    """Hides the unknown components of a mask, drawn for each pattern.

    A call returns the patterns and, for each, the mask that was drawn.

    Attributes:
      masks: `(n, d)`, true where a component is known.
      corruption: of the known components, which are intact if it is None.
    """

    masks: Bool[Array, "n d"]
    corruption: Any = None

    def __call__(
        self, key: PRNGKeyArray, patterns: Patterns
    ) -> tuple[Patterns, Bool[Array, "*batch d"]]:
        key, other = jax.random.split(key)
        which = jax.random.randint(key, patterns.shape[:-1], 0, len(self.masks))
        known = self.masks[which]
        if self.corruption is not None:
            patterns, seen = Corruption.of(self.corruption)(other, patterns)
            known = known if seen is None else known & seen
        return jnp.where(known, patterns, jnp.zeros((), patterns.dtype)), known


def corruption_of(
    kind: str,
    level: float,
    shape: tuple[int, ...],
    *,
    clamped: bool = True,
    reference: bool = False,
) -> Any:
    """Builds the corruption of a kind at a level.

    Args:
      kind: one of `KINDS`.
      level: fraction that is masked or covered, standard deviation or norm of the
        noise, width of the blur in pixels, or pixels of the shift.
      shape: height, width and channels of the images, or the dimension of patterns.
      clamped: whether patterns are in `[0, 1]`, and noise is clamped to it.
      reference: whether masks and noise follow the authors' code.

    Raises:
      ValueError: if the kind is unknown, the level is out of range, or a corruption
        of images is given other patterns.
    """
    check_choice("corruption.kinds", kind, KINDS)
    if not (math.isfinite(level) and level >= 0):
        raise ValueError(f"corruption.levels must be at least 0, got {level}")
    if kind in ("mask", "known_mask", "block", "salt_and_pepper") and level > 1:
        raise ValueError(
            f"corruption.levels of a {kind} must be in [0, 1], got {level}"
        )
    if kind in ("block", "blur", "shift", "shift_noise") and len(shape) != 3:
        raise ValueError(f"a {kind} needs images, got patterns of shape {shape}")
    if reference and kind == "mask" and level == 1:
        raise ValueError(
            "corruption.levels of a mask must be below 1 in the reference protocol, "
            f"which divides by what is left, got {level}"
        )
    if reference and kind not in ("mask", "noise", "norm_noise"):
        raise ValueError(
            f"the reference protocol has mask, noise and norm_noise, got {kind!r}"
        )
    bounded = ("folded_noise", "salt_and_pepper", "inverted", "gamma", "shift_noise")
    if not clamped and (reference or kind in bounded):
        raise ValueError(f"{kind} of this protocol needs patterns in [0, 1]")
    limits: dict[str, Any] = {} if clamped else {"low": None, "high": None}
    images = shape if len(shape) == 3 else (1, 1, shape[0])
    height, width, channels = images
    size = (height, width, channels)
    match kind:
        case "mask":
            return Dropout(level) if reference else Mask(level)
        case "known_mask":
            return Mask(level, known=True)
        case "noise":
            return FoldedNoise(level) if reference else Noise(level, **limits)
        case "folded_noise":
            return FoldedNoise(level)
        case "norm_noise":
            if reference:
                return FoldedNormNoise(level)
            return NormNoise(level, **limits)
        case "salt_and_pepper":
            return SaltAndPepper(level)
        case "inverted":
            return Inverted(level)
        case "gamma":
            return Darkened(level)
        case "shift_noise":
            return ShiftedNoise(level, size)
        case "block":
            side = round(math.sqrt(level * height * width))
            if side > min(height, width):
                raise ValueError(
                    f"corruption.levels of a block: a square of {level} of an image of "
                    f"{height} x {width} has {side} pixels a side, more than the image"
                )
            return HiddenSquare(level, size)
        case "blur":
            if level == 0:
                raise ValueError("corruption.levels of a blur must be positive, got 0")
            return Blur(level, size)
        case _:
            if level != int(level) or level >= min(height, width):
                raise ValueError(
                    "corruption.levels of a shift must be whole pixels, fewer than "
                    f"{min(height, width)}, got {level}"
                )
            return Shift(int(level), size)
