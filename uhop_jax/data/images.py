"""Image sets as NumPy arrays.

TFDS prepares the sets (array_record). Reading a prepared set needs no TensorFlow;
preparing it, once, does: the extra `data`.
"""

import importlib.util
import io
import json
import os
import socket
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from jaxtyping import Float, Int32, UInt8

from uhop_jax._checks import check_choice, check_count
from uhop_jax._files import reading, user_path

VERSIONS = {"mnist": "3.0.1", "cifar10": "3.0.2", "cifar100": "3.0.2"}
HOSTS = {
    "mnist": "storage.googleapis.com",
    "cifar10": "www.cs.toronto.edu",
    "cifar100": "www.cs.toronto.edu",
}
IMAGES = ("digits", *VERSIONS, "tiny_imagenet")
SHAPES = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3), "cifar100": (32, 32, 3)}
SPLITS = ("train", "test")
TINY_IMAGENET = (
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "md5:90528d7ca1a48142e341f4ef8d21d0de",
)
INSTALL = "pip install 'uhop-jax[data]'"


class Images(NamedTuple):
    """A set of images.

    Attributes:
      raw: `(n, height, width, channels)`, uint8, as stored.
      labels: `(n,)`, int32.
      top: the value of white; 255, but 16 for `digits`.
      classes: names of the labels; their numbers where the set has no names.
    """

    raw: UInt8[np.ndarray, "n height width channels"]
    labels: Int32[np.ndarray, " n"]
    top: int = 255
    classes: tuple[str, ...] = ()

    @property
    def pixels(self) -> Float[np.ndarray, "n height width channels"]:
        """Float32 in `[0, 1]`."""
        return np.divide(self.raw, np.float32(self.top))

    @property
    def patterns(self) -> Float[np.ndarray, "n d"]:
        """One flattened image per row."""
        return self.pixels.reshape(len(self.raw), -1)


def images(
    name: str,
    *,
    split: str = "train",
    directory: str | Path | None = None,
    limit: int | None = None,
) -> Images:
    """Loads a set of images, and downloads it first if it is missing.

    Args:
      name: `digits`, 1,797 handwritten digits of 8 x 8 pixels that come with
        scikit-learn (the test part of Alpaydin & Kaynak, UCI 1998; it has no splits);
        `mnist`, `cifar10` or `cifar100`, by TFDS; or `tiny_imagenet`.
      split: `train` or `test`; of Tiny ImageNet, whose test labels are not published,
        `test` is the validation split.
      directory: of prepared sets; None is the default of TFDS.
      limit: number of images to load, the first ones; None is all.

    Returns:
      Images of the split, in the order of the set.

    Raises:
      ValueError: if the name is unknown, or a missing set cannot be downloaded.
    """
    check_choice("data set", name, IMAGES)
    check_choice("split", split, SPLITS)
    if limit is not None:
        check_count("limit", limit, 1)
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        raw = digits.images.astype(np.uint8)[..., None]
        return Images(raw[:limit], digits.target.astype(np.int32)[:limit], 16)
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
    """Prepares `mnist`, `cifar10` or `cifar100` with the builder of TFDS.

    Args:
      name: the set.
      directory: of prepared sets.
      source: folder that holds the original archives; None downloads them.
      limit: number of examples of each split, for tests; None is all.

    Raises:
      ValueError: if a package is missing, or the host cannot be reached.
    """
    check_choice("data set", name, VERSIONS)
    directory = user_path(directory)
    source = None if source is None else user_path(source)
    tfds = _import_tfds()
    if importlib.util.find_spec("tensorflow") is None:
        raise ValueError(
            f"{name} is not prepared in data.dir {directory}, and preparing it needs "
            f"TensorFlow: {INSTALL}"
        )
    if source is None:
        _check_reachable(name, HOSTS[name], directory)
    builder = tfds.builder(name, data_dir=directory, file_format="array_record")
    if source is not None:
        files = [info.filename for info in builder.url_infos.values()]
        missing = [file for file in files if not (source / file).exists()]
        if missing:
            raise ValueError(f"{source} lacks {', '.join(missing)} of {name}")
    config = tfds.download.DownloadConfig(
        manual_dir=source, max_examples_per_split=limit
    )
    try:
        builder.download_and_prepare(download_config=config)
    except Exception as error:  # downloads fail in many ways
        raise ValueError(
            f"{name} could not be prepared in data.dir {directory}: {_cause(error)}"
        ) from error


def import_pooch(name: str) -> Any:
    """The package that downloads files."""
    try:
        import pooch
    except ImportError:
        raise ValueError(f"downloading {name} needs pooch: {INSTALL}") from None
    return pooch


def download(name: str, url: str, digest: str, folder: Path, **options: Any) -> None:
    """Downloads the file of a set into a folder, by `pooch.retrieve`.

    Raises:
      ValueError: if the file cannot be downloaded, or is not the file expected.
    """
    pooch = import_pooch(name)
    _check_reachable(name, urlsplit(url).netloc, folder)
    try:
        pooch.retrieve(url, digest, path=folder, progressbar=True, **options)
    except Exception as error:  # downloads fail in many ways
        raise ValueError(
            f"{name} could not be downloaded into data.dir {folder}: {_cause(error)}"
        ) from error


def _cause(error: Exception) -> str:
    """Type and first line of an error that a download raised."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def _check_reachable(name: str, host: str, directory: str | Path) -> None:
    """Raises `ValueError` within seconds if a set cannot be downloaded."""
    if urllib.request.getproxies():  # then only the proxy knows
        return
    try:
        socket.create_connection((host, 80), timeout=3).close()
    except OSError:
        raise ValueError(
            f"{name} is not in data.dir {directory}, and {host} cannot be reached to "
            "download it; set data.dir to a directory that holds it"
        ) from None


def _place(directory: str | Path | None) -> Path:
    """The directory given, or the default of TFDS."""
    default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    return user_path(default if directory is None else directory)


def _import_tfds() -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            f"reading this data set needs the package {error.name}: {INSTALL}"
        ) from None
    return tfds


def _tfds_images(name: str, split: str, directory: Path, limit: int | None) -> Images:
    """A set that TFDS prepares, which happens here if it is missing."""
    from PIL import Image

    prepared = directory / name / VERSIONS[name]
    if not (prepared / "dataset_info.json").exists():
        prepare(name, directory)
    about = prepared / "dataset_info.json"
    with reading(about, "description by TFDS"):
        info = json.loads(about.read_text("utf-8"))
        sizes = {s["name"]: sum(map(int, s["shardLengths"])) for s in info["splits"]}
    if sizes.get(split, 0) == 0:
        raise ValueError(
            f"data.split {split!r} of {name} is not in data.dir {directory}; it holds "
            f"{', '.join(s for s in sizes if sizes[s])}"
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
    except ImportError as error:
        raise ValueError(f"{name} needs {error.name} to be read: {INSTALL}") from None
    except Exception as error:  # a damaged record or another file format
        raise ValueError(
            f"{name} in data.dir {directory} cannot be read, set data.dir to another "
            "directory to prepare it anew"
        ) from error
    return Images(pixels, labels)


def _tiny_imagenet(split: str, directory: Path, limit: int | None) -> Images:
    """Tiny ImageNet from its folder, which is downloaded and unpacked if missing."""
    from PIL import Image

    root = directory / "tiny-imagenet-200"
    if not root.exists():
        root = directory / "tiny_imagenet" / "tiny-imagenet-200"
    if not (root / "wnids.txt").exists():
        unzip = import_pooch("tiny_imagenet").Unzip(extract_dir=root.parent)
        download("tiny_imagenet", *TINY_IMAGENET, root.parent, processor=unzip)
    with reading(root, "folder of Tiny ImageNet"):
        files = _tiny_imagenet_files(root, split)[:limit]
    pixels = np.empty((len(files), 64, 64, 3), np.uint8)
    for index, (file, _) in enumerate(files):
        with reading(file, "picture of 64 x 64"), Image.open(file) as picture:
            pixels[index] = np.asarray(picture.convert("RGB"))
    labels = np.asarray([label for _, label in files], np.int32)
    return Images(pixels, labels)


def _tiny_imagenet_files(root: Path, split: str) -> list[tuple[Path, int]]:
    """Pictures of a split and their labels."""
    classes = (root / "wnids.txt").read_text("utf-8").split()
    number = {wnid: index for index, wnid in enumerate(classes)}
    if split == "train":
        labelled = []
        for wnid in classes:
            files = sorted((root / "train" / wnid / "images").glob("*.JPEG"))
            if not files:
                raise ValueError(f"{wnid} is empty")
            labelled += [(file, number[wnid]) for file in files]
        return labelled
    notes = (root / "val" / "val_annotations.txt").read_text("utf-8")
    pairs = [line.split("\t")[:2] for line in notes.splitlines()]
    return [(root / "val" / "images" / f, number[wnid]) for f, wnid in pairs]
