"""Prepares data sets for `uhop_jax.data.images` from raw files, without a network.

    python scripts/prepare_data.py SOURCE DIRECTORY [NAME ...] [--limit=N]

writes into DIRECTORY what a download would have written:

- `mnist` from its four original `.gz` files;
- `cifar10` and `cifar100` from lossless pictures of 32 x 32 tiles, row by row
  (`cifar10_train_1.webp` to `_5`, `cifar10_test.webp`, `cifar100_test.webp`), with the
  labels in `NAME_labels.npz` (arrays `train` and `test`). The files lack the coarse
  labels of CIFAR-100, which are set to 0;
- `tiny_imagenet` from `tiny_imagenet_20.npz`, the JPEG files of 20 of its 200 classes:
  the same files, byte for byte, in the folders of the original set. `wnids.txt` and
  `words.txt` name only the 20 classes.

It needs `pip install -e '.[data]'`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from uhop_jax import data

TILE = 32


def tiles(path: Path) -> np.ndarray:
    """The images of a picture of tiles, `(n, 32, 32, 3)` uint8."""
    picture = np.asarray(Image.open(path).convert("RGB"))
    rows, columns = picture.shape[0] // TILE, picture.shape[1] // TILE
    picture = picture.reshape(rows, TILE, columns, TILE, 3)
    return picture.swapaxes(1, 2).reshape(-1, TILE, TILE, 3)


def pictures(source: Path, name: str, split: str) -> list[Path]:
    """The files of a split, in order; none if the folder lacks it."""
    stems = [f"{name}_{split}", *(f"{name}_{split}_{part}" for part in range(1, 6))]
    return [f for stem in stems if (f := source / f"{stem}.webp").exists()]


def cifar_examples(source: Path, name: str, split: str) -> Iterator[tuple[int, dict]]:
    """The examples of a split in order; each picture is decoded when it is needed."""
    labels = np.load(source / f"{name}_labels.npz")[split]
    extra = {"coarse_label": 0} if name == "cifar100" else {}
    index = 0
    for path in pictures(source, name, split):
        for image in tiles(path):
            identity = f"{split}_{index:05d}"
            label = int(labels[index])
            yield index, {"id": identity, "image": image, "label": label, **extra}
            index += 1


def prepare_cifar(
    dataset: str, source: Path, directory: Path, limit: int | None
) -> None:
    """Runs TFDS's own builder on the tiles in place of its download."""
    import tensorflow_datasets as tfds

    parent = tfds.core.registered.imported_builder_cls(dataset)

    class Builder(parent, skip_registration=True):
        name = dataset

        def _split_generators(self, dl_manager):
            labels = np.load(source / f"{dataset}_labels.npz")
            self.info.features["label"].names = labels["classes"].tolist()
            return {
                split: cifar_examples(source, dataset, split)
                for split in ("train", "test")
                if pictures(source, dataset, split)
            }

    config = tfds.download.DownloadConfig(max_examples_per_split=limit)
    builder = Builder(data_dir=directory, file_format="array_record")
    builder.download_and_prepare(download_config=config)


def prepare_tiny_imagenet(source: Path, directory: Path, limit: int | None) -> None:
    """Writes the folders of Tiny ImageNet, for the classes in the file.

    Raises:
      ValueError: if the folder lacks the file.
    """
    path = source / "tiny_imagenet_20.npz"
    if not path.exists():
        raise ValueError(f"{source} lacks {path.name} of tiny_imagenet")
    with np.load(path) as file:
        arrays = dict(file)
    root = directory / "tiny_imagenet" / "tiny-imagenet-200"
    wnids, names = arrays["wnids"].tolist(), arrays["names"].tolist()
    notes = []
    for wnid, number, picture in jpegs(arrays, "train", limit):
        place = root / "train" / wnid / "images"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{wnid}_{number}.JPEG").write_bytes(picture)
    (root / "val" / "images").mkdir(parents=True, exist_ok=True)
    for wnid, number, picture in jpegs(arrays, "val", limit):
        (root / "val" / "images" / f"val_{number}.JPEG").write_bytes(picture)
        notes.append(f"val_{number}.JPEG\t{wnid}\n")
    (root / "val" / "val_annotations.txt").write_text("".join(notes), "utf-8")
    words = [f"{wnid}\t{name}\n" for wnid, name in zip(wnids, names, strict=True)]
    (root / "words.txt").write_text("".join(words), "utf-8")
    # This file is written last: readers take it as a sign that the set is complete.
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n", "utf-8")


def jpegs(
    arrays: dict[str, np.ndarray], split: str, limit: int | None
) -> Iterator[tuple[str, int, bytes]]:
    """Class, number and bytes of the pictures of a split."""
    ends, whole = arrays[f"{split}_offset"], arrays[f"{split}_jpeg"]
    labels, numbers = arrays[f"{split}_label"], arrays[f"{split}_number"]
    for index in range(len(labels))[:limit]:
        picture = whole[ends[index] : ends[index + 1]].tobytes()
        yield str(arrays["wnids"][labels[index]]), int(numbers[index]), picture


def main() -> None:
    """Prepares the sets that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", default=["mnist", "cifar10"])
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    for name in arguments.names:
        if name == "mnist":
            place, limit = arguments.source, arguments.limit
            data.prepare(name, arguments.directory, source=place, limit=limit)
        elif name == "tiny_imagenet":
            prepare_tiny_imagenet(
                arguments.source, arguments.directory, arguments.limit
            )
        else:
            prepare_cifar(name, arguments.source, arguments.directory, arguments.limit)


if __name__ == "__main__":
    main()
