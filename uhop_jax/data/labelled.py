"""Images with labels, to train classifiers on: known sets, or the user's folders."""

from pathlib import Path

import numpy as np

from uhop_jax._checks import check_choice, check_count
from uhop_jax._files import shown_name, user_path
from uhop_jax.data.images import IMAGES, SPLITS, Images, images
from uhop_jax.data.pictures import (
    entries_of,
    picture_files,
    read_pictures,
    warn_not_read,
)


def labelled_images(
    source: str, *, split: str, directory: str | Path | None = None
) -> Images:
    """Loads images with labels.

    Args:
      source: a name in `IMAGES` (every fifth image of `digits` is of the test split);
        or a folder with `train/CLASS/*.png` and `test/CLASS/*.png`, all of one size.
      split: `train` or `test`.
      directory: of prepared sets.

    Raises:
      ValueError: if the source is unknown, or a folder is not as described: a class
        without pictures, mixed sizes, a damaged file.
    """
    check_choice("split", split, SPLITS)
    if source == "digits":
        digits = images(source)
        test = np.arange(len(digits.raw)) % 5 == 0
        return _rows(digits, test if split == "test" else ~test)
    if source in IMAGES:
        return images(source, split=split, directory=directory)
    return _class_folders(user_path(source), split)


def subset(source: Images, number: int) -> Images:
    """A number of images, spread evenly over the set, in the order of the set.

    Raises:
      ValueError: if the number is below 1, or above the number of images.
    """
    check_count("number of images", number, 1, len(source.raw))
    rows = np.linspace(0, len(source.raw), number, endpoint=False).astype(int)
    return _rows(source, rows)


def _rows(source: Images, rows: np.ndarray) -> Images:
    """Some rows of a set."""
    return source._replace(raw=source.raw[rows], labels=source.labels[rows])


def _class_folders(root: Path, split: str) -> Images:
    """The images of a folder with `train/CLASS/` and `test/CLASS/`."""
    if not root.is_dir():
        raise ValueError(
            f"unknown data {str(root)!r}; choose one of {', '.join(IMAGES)}, or give "
            "the path of a folder with train/CLASS/ and test/CLASS/"
        )
    names = {}
    for part in SPLITS:
        if not (root / part).is_dir():
            raise ValueError(
                f"{root} must hold the folders {' and '.join(SPLITS)}, {part} is "
                "missing"
            )
        names[part] = [x.name for x in entries_of(root / part) if x.is_dir()]
    classes = names["train"]
    if len(classes) < 2:
        raise ValueError(
            f"{root}/train must hold a folder for each class, at least two, got "
            f"{len(classes)}"
        )
    if names["test"] != classes:
        odd = sorted(set(classes) ^ set(names["test"]))
        raise ValueError(
            f"{root}: train and test must hold the same classes, {odd[0]} is in one "
            "alone"
        )
    files, labels = [], []
    folders = [root / split / name for name in classes]
    if loose := [x.name for x in entries_of(root / split) if not x.is_dir()]:
        warn_not_read(f"{root / split}: pictures of the folders there", loose)
    for label, pictures in enumerate(picture_files(folders)):
        if not pictures:
            raise ValueError(f"class {classes[label]} is empty: {folders[label]}")
        files += pictures
        labels += [label] * len(pictures)
    return Images(
        read_pictures(files),
        np.asarray(labels, np.int32),
        classes=tuple(map(shown_name, folders)),
    )
