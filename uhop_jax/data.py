"""Data sets as NumPy arrays: patterns to store and queries to retrieve.

Image sets come prepared by TFDS (array_record). Reading them needs no TensorFlow;
preparing them, once, does: `pip install 'uhop-jax[data]'`.
"""

import importlib.util
import io
import json
import os
import socket
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from uhop_jax._checks import check_choice, check_count

VERSIONS = {"mnist": "3.0.1", "cifar10": "3.0.2", "cifar100": "3.0.2"}
HOSTS = {
    "mnist": "storage.googleapis.com",
    "cifar10": "www.cs.toronto.edu",
    "cifar100": "www.cs.toronto.edu",
    "tiny_imagenet": "cs231n.stanford.edu",
}
IMAGES = ("digits", *VERSIONS, "tiny_imagenet")
SYNTHETIC = ("sphere", "gaussian", "correlated")
SHAPES = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3), "cifar100": (32, 32, 3)}
SPLITS = ("train", "test")
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
TINY_IMAGENET = (
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "md5:90528d7ca1a48142e341f4ef8d21d0de",
)
INSTALL = "pip install 'uhop-jax[data]'"


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
        """Whether all values are in `[0, 1]`, as those of images are."""
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
      limit: how many to load; None is all, or 10,000 synthetic ones.
      seed: of synthetic patterns.

    Raises:
      ValueError: if the source is unknown or cannot be read.
    """
    if limit is not None:
        check_count("limit", limit, 1)
    if source in IMAGES:
        found = images(source, split=split, directory=directory, limit=limit)
        return _patterns(found.patterns, found.pixels.shape[1:])
    if source.startswith("synthetic:"):
        _, kind, *rest = source.split(":")
        if len(rest) > 1 or not all(x.isdecimal() for x in rest):
            raise ValueError(
                f"synthetic data is synthetic:KIND:DIMENSION, got {source!r}"
            )
        dimension = int(rest[0]) if rest else 64
        return _patterns(synthetic(kind, limit or 10_000, dimension, seed=seed))
    is_word = os.sep not in source and "." not in source
    if not source or is_word and not Path(source).exists():
        kinds = ", ".join(f"synthetic:{kind}" for kind in SYNTHETIC)
        raise ValueError(
            f"unknown data {source!r}; choose one of {', '.join(IMAGES)}, {kinds}, or "
            "give the path of a .npy, a .npz or a folder of images"
        )
    return read_patterns(source, limit=limit)


def images(
    name: str,
    *,
    split: str = "train",
    directory: str | Path | None = None,
    limit: int | None = None,
) -> Images:
    """Loads a set of images, and downloads it first if it is not there.

    Args:
      name: `digits`, 1,797 handwritten digits of 8 x 8 pixels that come with
        scikit-learn (the test part of Alpaydin & Kaynak, UCI 1998; it has no splits);
        `mnist`, `cifar10` or `cifar100`, by TFDS; or `tiny_imagenet`.
      split: `train` or `test`; of Tiny ImageNet, whose test labels are not published,
        `test` is the validation split.
      directory: where prepared sets lie; None is TFDS's own place.
      limit: only the first so many images.

    Returns:
      Images of the split, in its own order.

    Raises:
      ValueError: if the name is unknown, or the set is not there and cannot be
        downloaded.
    """
    check_choice("data set", name, IMAGES)
    check_choice("split", split, SPLITS)
    if limit is not None:
        check_count("limit", limit, 1)
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = digits.images.astype(np.float32)[..., None] / 16
        return Images(pixels[:limit], digits.target.astype(np.int32)[:limit])
    if name == "tiny_imagenet":
        return _tiny_imagenet(split, _place(directory), limit)
    return _tfds_images(name, split, _place(directory), limit)


def prepare(
    name: str,
    directory: str | Path,
    *,
    source: str | Path | None = None,
    limit: int | None = None,
) -> None:
    """Prepares `mnist`, `cifar10` or `cifar100` with TFDS's own builder.

    Args:
      name: the set.
      directory: where the prepared set goes.
      source: folder that holds the original archives; None downloads them.
      limit: only the first so many examples of each split, for tests.

    Raises:
      ValueError: if a package is missing, or the host cannot be reached.
    """
    check_choice("data set", name, VERSIONS)
    tfds = _import_tfds()
    if importlib.util.find_spec("tensorflow") is None:
        raise ValueError(
            f"{name} is not prepared in data.dir {directory}, and preparing it needs "
            f"TensorFlow: {INSTALL}"
        )
    if source is None:
        check_reachable(name, directory)
    builder = tfds.builder(name, data_dir=directory, file_format="array_record")
    if source is not None:
        files = [info.filename for info in builder.url_infos.values()]
        missing = [file for file in files if not (Path(source) / file).exists()]
        if missing:
            raise ValueError(f"{source} lacks {', '.join(missing)} of {name}")
    config = tfds.download.DownloadConfig(
        manual_dir=source, max_examples_per_split=limit
    )
    try:
        builder.download_and_prepare(download_config=config)
    except Exception as error:  # downloads fail in many ways
        raise ValueError(
            f"{name} could not be prepared in data.dir {directory}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def check_reachable(name: str, directory: str | Path) -> None:
    """Fails within seconds where a set cannot be downloaded."""
    if urllib.request.getproxies():  # then only the proxy knows
        return
    try:
        socket.create_connection((HOSTS[name], 80), timeout=3).close()
    except OSError:
        raise ValueError(
            f"{name} is not prepared in data.dir {directory}, and {HOSTS[name]} cannot "
            "be reached to download it; set data.dir to a directory that holds it"
        ) from None


def synthetic(
    kind: str, number: int, dimension: int, *, seed: int = 0, correlation: float = 0.9
) -> Float[np.ndarray, "n d"]:
    """Random patterns, float32.

    Args:
      kind: `sphere`, unit vectors; `gaussian`, `N(0, 1)` components; `correlated`,
        vectors around a common direction, as images are.
      number: how many.
      dimension: of each.
      seed: of the draw.
      correlation: expected cosine of two `correlated` patterns.

    Raises:
      ValueError: if the kind is unknown or a number is out of range.
    """
    check_choice("kind of synthetic data", kind, SYNTHETIC)
    check_count("number", number, 1)
    check_count("dimension", dimension, 2)
    if not 0 <= correlation < 1:
        raise ValueError(f"correlation must be in [0, 1), got {correlation}")
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
        channels)`; a `.npz` with one such array, or one named `patterns`; or a folder
        of images of one size, all grey or all colour, in the order of their names;
        transparency is dropped. Images and uint8 arrays are divided by 255.
      limit: only the first so many.

    Raises:
      ValueError: if nothing can be read there, or what is read does not fit together.
    """
    path = Path(path)
    if limit is not None:
        check_count("limit", limit, 1)
    if path.is_dir():
        return _read_folder(path, limit)
    if not path.exists():
        raise ValueError(f"no such file or folder: {path}")
    if path.suffix.lower() not in (".npy", ".npz"):
        raise ValueError(
            f"{path} is no .npy, .npz or folder of images; put single images into a "
            "folder"
        )
    try:
        with path.open("rb") as file:
            array = np.load(file, allow_pickle=False)
            names: list[str] | None = getattr(array, "files", None)
            if names is not None:
                rest = [name for name in names if name != "labels"]
                chosen = ["patterns"] if "patterns" in names else rest
                array = array[chosen[0]] if len(chosen) == 1 else None
    except ValueError:
        raise ValueError(
            f"{path} is damaged, or holds Python objects in place of numbers"
        ) from None
    except Exception:  # also of zlib, zipfile and tokenize, which NumPy lets through
        raise ValueError(f"{path} is damaged or truncated") from None
    if array is None:
        raise ValueError(
            f"{path} must hold one array, or one named patterns; it holds "
            f"{', '.join(names or ()) or 'none'}"
        )
    return _from_array(path, array, limit)


def _from_array(path: Path, array: Any, limit: int | None = None) -> Patterns:
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
    array = array[:limit]
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
    from PIL import Image

    files = sorted(
        file
        for file in path.iterdir()
        if file.suffix.lower() in ENDINGS
        and not file.name.startswith(".")
        and file.is_file()
    )
    if not files:
        raise ValueError(f"{path} holds no images ({', '.join(ENDINGS)})")
    arrays = []
    for file in files[:limit]:
        try:
            with Image.open(file) as picture:
                mode = picture.mode
                grey = mode in ("1", "L", "LA")
                arrays.append(np.asarray(picture.convert("L" if grey else "RGB")))
        except Exception:  # damaged files make Pillow raise errors of many types
            raise ValueError(f"{file} is no image, or is truncated or huge") from None
        if mode[0] in "IF":  # Pillow would clip them
            raise ValueError(f"{file} has more than 8 bits a channel: save it with 8")
        first, last = arrays[0], arrays[-1]
        if first.ndim != last.ndim:
            kinds = ["grey" if x.ndim == 2 else "colour" for x in (first, last)]
            raise ValueError(
                f"images must be all grey or all colour: {files[0].name} is {kinds[0]},"
                f" {file.name} {kinds[1]}"
            )
        if first.shape != last.shape:
            sizes = [f"{x.shape[1]} x {x.shape[0]}" for x in (first, last)]
            raise ValueError(
                f"images must have one size: {files[0].name} is {sizes[0]}, "
                f"{file.name} {sizes[1]}"
            )
    found = _from_array(path, np.stack(arrays))
    return found._replace(names=tuple(file.name for file in files[:limit]))


def _patterns(values: np.ndarray, shape: Sequence[int] | None = None) -> Patterns:
    names = tuple(map(str, range(len(values))))
    return Patterns(values, tuple(shape or values.shape[1:]), names)


def _place(directory: str | Path | None) -> Path:
    if directory is not None:
        return Path(directory).expanduser()
    default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    return Path(default).expanduser()


def _import_tfds() -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            f"reading this data set needs tensorflow-datasets ({error}): {INSTALL}"
        ) from None
    return tfds


def _tfds_images(name: str, split: str, directory: Path, limit: int | None) -> Images:
    from PIL import Image

    prepared = directory / name / VERSIONS[name]
    if not (prepared / "dataset_info.json").exists():
        prepare(name, directory)
    info = json.loads((prepared / "dataset_info.json").read_text())
    found = {s["name"]: sum(map(int, s["shardLengths"])) for s in info["splits"]}
    if found.get(split, 0) == 0:
        raise ValueError(
            f"data.split {split!r} of {name} is not in data.dir {directory}; it holds "
            f"{', '.join(s for s in found if found[s])}"
        )
    tfds = _import_tfds()
    skip = {"image": tfds.decode.SkipDecoding()}  # Pillow needs half of TFDS's time
    try:
        source = tfds.builder(name, data_dir=directory).as_data_source(
            split, decoders=skip
        )
        number = min(limit or len(source), len(source))
        pixels = np.empty((number, *SHAPES[name]), np.uint8)
        labels = np.empty(number, np.int32)
        for start in range(0, number, 1000):
            indices = list(range(start, min(start + 1000, number)))
            for index, example in zip(
                indices, source.__getitems__(indices), strict=True
            ):
                with Image.open(io.BytesIO(example["image"])) as picture:
                    pixels[index] = np.asarray(picture).reshape(SHAPES[name])
                labels[index] = example["label"]
    except Exception as error:  # a damaged record or another file format
        raise ValueError(
            f"{name} in data.dir {directory} cannot be read, set data.dir to another "
            f"directory to prepare it anew: {str(error).splitlines()[0]}"
        ) from error
    return Images(np.divide(pixels, np.float32(255)), labels)


def _tiny_imagenet(split: str, directory: Path, limit: int | None) -> Images:
    """Tiny ImageNet from its folder, which is downloaded and unpacked if missing."""
    from PIL import Image

    root = directory / "tiny-imagenet-200"
    if not root.exists():
        root = directory / "tiny_imagenet" / "tiny-imagenet-200"
    if not (root / "wnids.txt").exists():
        try:
            import pooch
        except ImportError:
            raise ValueError(
                f"downloading tiny_imagenet needs pooch: {INSTALL}"
            ) from None
        check_reachable("tiny_imagenet", directory)
        url, digest = TINY_IMAGENET
        folder = root.parent
        unzip = pooch.Unzip(extract_dir=folder)
        pooch.retrieve(url, digest, path=folder, processor=unzip, progressbar=True)
    classes = (root / "wnids.txt").read_text().split()
    number = {wnid: index for index, wnid in enumerate(classes)}
    if split == "train":
        files = [
            (file, number[wnid])
            for wnid in classes
            for file in sorted((root / "train" / wnid / "images").glob("*.JPEG"))
        ]
    else:
        lines = (root / "val" / "val_annotations.txt").read_text().splitlines()
        pairs = [line.split("\t")[:2] for line in lines]
        files = [(root / "val" / "images" / f, number[wnid]) for f, wnid in pairs]
    files = files[:limit]
    pixels = np.empty((len(files), 64, 64, 3), np.uint8)
    for index, (file, _) in enumerate(files):
        try:
            with Image.open(file) as picture:
                pixels[index] = np.asarray(picture.convert("RGB"))
        except (OSError, SyntaxError, ValueError):
            raise ValueError(f"{file} is missing, truncated or no image") from None
    labels = np.asarray([label for _, label in files], np.int32)
    return Images(np.divide(pixels, np.float32(255)), labels)
