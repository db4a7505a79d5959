"""Patterns to store and queries to retrieve: known, synthetic, or the user's own."""

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from uhop_jax._checks import check_choice, check_count, check_rate
from uhop_jax._files import (
    check_fits,
    mapped_array,
    read_archive,
    shown_name,
    user_path,
)
from uhop_jax.data.images import IMAGES, images
from uhop_jax.data.pictures import ENDINGS, picture_files, read_pictures

CHANNELS = (1, 3, 4)  # of images
# Ratios of typical values beyond which two sets have different scales, by whether the
# set of larger values is never negative. Pictures never are: one scale ends at 1, the
# next at 16 or 255. Negative values may be noise, many times as large as a pattern.
SCALES = {True: 12, False: 1000}
SYNTHETIC = ("sphere", "gaussian", "correlated")


class Patterns(NamedTuple):
    """Patterns to store, or queries.

    Attributes:
      values: one pattern per row, float32; images in `[0, 1]`.
      shape: of one pattern: `(height, width, channels)`, or `(d,)` if it is no image.
      names: of the patterns: file names, or their numbers.
    """

    values: Float[np.ndarray, "n d"]
    shape: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def in_unit_range(self) -> bool:
        """Whether all values are in `[0, 1]`, as in images."""
        return bool(self.values.min() >= 0 and self.values.max() <= 1)


def load(
    source: str,
    *,
    split: str = "test",
    directory: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Patterns:
    """Loads patterns by name or from the user's own files.

    Args:
      source: a name in `IMAGES`; `synthetic:KIND` or `synthetic:KIND:DIMENSION`; or a
        path, see `read_patterns`.
      split: of an image set.
      directory: of prepared image sets.
      limit: number of patterns to load; None is all, or 10,000 synthetic patterns.
      seed: of synthetic patterns.

    Raises:
      ValueError: if the source is unknown or cannot be read.
    """
    if limit is not None:
        check_count("limit", limit, 1)
    if source in IMAGES:
        loaded = images(source, split=split, directory=directory, limit=limit)
        return _patterns(loaded.patterns, loaded.pixels.shape[1:])
    if source.startswith("synthetic:"):
        _, kind, *rest = source.split(":")
        if len(rest) > 1 or not all(re.fullmatch("[0-9]{1,9}", x) for x in rest):
            raise ValueError(
                f"synthetic data is synthetic:KIND:DIMENSION, got {source!r}"
            )
        dimension = int(rest[0]) if rest else 64
        return _patterns(synthetic(kind, limit or 10_000, dimension, seed=seed))
    is_word = os.sep not in source and "." not in source
    if not source or is_word and not user_path(source).exists():
        kinds = ", ".join(f"synthetic:{kind}" for kind in SYNTHETIC)
        raise ValueError(
            f"unknown data {source!r}; choose one of {', '.join(IMAGES)}, {kinds}, or "
            "give the path of a .npy, a .npz or a folder of images"
        )
    return read_patterns(source, limit=limit)


def synthetic(
    kind: str, number: int, dimension: int, *, seed: int = 0, correlation: float = 0.9
) -> Float[np.ndarray, "n d"]:
    """Random patterns, float32.

    Args:
      kind: `sphere`, unit vectors; `gaussian`, `N(0, 1)` components; `correlated`,
        vectors around a common direction, as images are.
      number: of patterns.
      dimension: of a pattern.
      seed: of the draw.
      correlation: expected cosine of two `correlated` patterns.

    Raises:
      ValueError: if the kind is unknown, a number is out of range, or there is not
        enough memory.
    """
    check_choice("kind of synthetic data", kind, SYNTHETIC)
    check_count("number", number, 1)
    check_count("dimension", dimension, 2)
    check_rate("correlation", correlation)
    check_fits(f"{number} patterns of dimension {dimension}", 4 * number * dimension)
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((number, dimension), np.float32)
    if kind == "sphere":
        values /= np.linalg.norm(values, axis=1, keepdims=True)
    if kind == "correlated":
        common = rng.standard_normal(dimension).astype(np.float32)
        common /= np.linalg.norm(common)
        length = np.sqrt(correlation * dimension)
        values = np.sqrt(1 - correlation) * values + length * common
    return values.astype(np.float32)


def read_patterns(path: str | Path, *, limit: int | None = None) -> Patterns:
    """Reads a user's patterns.

    Args:
      path: a `.npy` of shape `(n, d)`, `(n, height, width)` or `(n, height, width,
        channels)` with 1, 3 or 4 channels; a `.npz` with one such array, or one named
        `patterns`; or a folder of images of one size, all grey or all colour, in the
        order of their names, see `read_pictures`. Images and uint8 arrays are divided
        by 255.
      limit: number of patterns to read, the first ones; None is all.

    Raises:
      ValueError: if the path cannot be read, or holds no patterns of one shape.
    """
    path = user_path(path)
    if limit is not None:
        check_count("limit", limit, 1)
    if path.is_dir():
        return _read_folder(path, limit)
    if not path.exists():
        raise ValueError(f"no such file or folder: {path}")
    match path.suffix.lower():
        case ".npy":
            return _from_array(path, mapped_array(path), limit)
        case ".npz":
            [array] = read_archive(path, functools.partial(_one_of, path)).values()
            return _from_array(path, array, limit)
    raise ValueError(
        f"{path} is no .npy, .npz or folder of images; put single images into a folder"
    )


def mapped_patterns(
    path: str | Path, like: Float[np.ndarray, "M d"]
) -> Float[np.ndarray, "n d"]:
    """Patterns that stay in a `.npy` file, one per row.

    Args:
      path: of floats `(n, ...)`, of 16, 32 or 64 bits, in C order.
      like: patterns of the same dimension and scale.

    Returns:
      The array in the file, which is read once here to check its values.

    Raises:
      ValueError: if the file cannot be read, or holds something else, NaN or infinity.
    """
    array = mapped_array(path, "mapped")
    floating = array.dtype.kind == "f" and array.dtype.itemsize <= 8
    if not floating or array.ndim < 2:
        raise ValueError(
            "mapped must hold floating patterns (n, ...) of 16, 32 or 64 bits, "
            f"{path} has dtype {array.dtype} and shape {array.shape}"
        )
    if array.ndim > 2 and not array.flags.c_contiguous:
        raise ValueError(f"mapped must be in C order, {path} is in Fortran order")
    array = array.reshape(len(array), -1)
    dimension = like.shape[1]
    if array.shape[1] != dimension or len(array) < 2:
        raise ValueError(
            f"mapped has shape {array.shape}, patterns have dimension {dimension}"
        )
    size = max(2**22 // dimension, 1)
    for start in range(0, len(array), size):
        with np.errstate(over="ignore"):  # what overflows float32 is infinite here
            block = array[start : start + size].astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(block).all(-1))
        if bad.size:
            raise ValueError(
                f"mapped: {path} holds NaN or infinity, the first in row "
                f"{start + bad[0]}: replace or remove such patterns"
            )
    sample = np.linspace(0, len(array) - 1, min(len(array), 1000)).astype(int)
    check_scale("mapped", np.asarray(array[sample], np.float32), like)
    return array


def check_scale(
    name: str, values: Float[np.ndarray, "n d"], stored: Float[np.ndarray, "M d"]
) -> None:
    """Refuses patterns of another scale than the memories.

    Raises:
      ValueError: if typical values differ by more than a ratio of `SCALES`.
    """
    typical = [float(np.median(np.abs(x).max(-1))) for x in (values, stored)]
    larger = values if typical[0] > typical[1] else stored
    limit = SCALES[bool(larger.min() >= 0)]
    if max(typical) > 1 and max(typical) > limit * min(typical) > 0:
        ranges = [f"from {x.min():.4g} to {x.max():.4g}" for x in (values, stored)]
        raise ValueError(
            f"{name} hold values {ranges[0]}, the memories {ranges[1]}: both must have "
            "one scale; pictures and uint8 arrays are divided by 255 when they are "
            "read, other numbers are taken as they are"
        )


def _one_of(path: Path, names: list[str]) -> list[str]:
    """The array of an archive that holds the patterns."""
    rest = [name for name in names if name != "labels"]
    chosen = ["patterns"] if "patterns" in names else rest
    if len(chosen) != 1:
        raise ValueError(
            f"{path} must hold one array, or one named patterns; it holds "
            f"{', '.join(names) or 'none'}"
        )
    return chosen


def _from_array(path: Path, array: Any, limit: int | None = None) -> Patterns:
    """Patterns from an array that a file holds."""
    kind = getattr(array, "dtype", type(array).__name__)
    if not isinstance(kind, np.dtype) or kind.kind not in "biuf":
        raise ValueError(f"{path} must hold real numbers, got dtype {kind}")
    if array.ndim not in (2, 3, 4):
        raise ValueError(
            f"{path} must have shape (n, d), (n, height, width) or (n, height, width, "
            f"channels), got {array.shape}"
        )
    if array.size == 0:
        raise ValueError(f"{path} holds no patterns, its shape is {array.shape}")
    if array.ndim == 4 and array.shape[-1] not in CHANNELS:
        raise ValueError(
            f"{path} must have 1, 3 or 4 channels, on the last axis, got shape "
            f"{array.shape}: numpy.moveaxis(x, 1, -1) puts the first there; patterns "
            "that are no pictures have shape (n, d)"
        )
    array = array[:limit]
    check_fits(path, array.size * 4)
    with np.errstate(over="ignore"):  # what overflows float32 is reported below
        values = array.reshape(len(array), -1).astype(np.float32)
    if array.dtype == np.uint8:
        values /= 255
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise ValueError(f"{path} holds {bad} NaN or infinite values of {values.size}")
    shape = array.shape[1:] if array.ndim != 3 else (*array.shape[1:], 1)
    return _patterns(values, shape)


def _read_folder(path: Path, limit: int | None) -> Patterns:
    """Patterns from a folder of images, with the names of the files."""
    [files] = picture_files([path])
    if not files:
        raise ValueError(f"{path} holds no images ({', '.join(ENDINGS)})")
    patterns = _from_array(path, read_pictures(files[:limit]))
    return patterns._replace(names=tuple(map(shown_name, files[:limit])))


def _patterns(values: np.ndarray, shape: Sequence[int] | None = None) -> Patterns:
    """Patterns named by their numbers."""
    names = tuple(map(str, range(len(values))))
    return Patterns(values, tuple(shape or values.shape[1:]), names)
