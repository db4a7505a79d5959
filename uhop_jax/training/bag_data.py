"""Bags of a config: stored and padded, or simulated from a key each."""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, PRNGKeyArray
from ml_collections import ConfigDict

from uhop_jax import data
from uhop_jax._checks import check_count, check_positive
from uhop_jax.data.bags import PUBLISHED, Bags
from uhop_jax.data.folds import Fold, label_counts, validated
from uhop_jax.training.task import Batch, Split, Take
from uhop_jax.workdir import fingerprint

TARGET = 9  # the digit that makes a bag of images positive
SIMULATED = ("mnist_bags", "needle")


class Source(abc.ABC):
    """Bags of a data set, with the parts of each fold.

    Attributes:
      labels: 1 for positive bags, else 0.
      names: of the bags.
      features: number of features of an instance.
      folds: parts of the bags, one for each run.
    """

    labels: Int32[np.ndarray, " bags"]
    names: tuple[str, ...]
    features: int
    folds: list[Fold]

    @abc.abstractmethod
    def split(self, chosen: Int[np.ndarray, " some"], fold: Fold) -> Split:
        """Some bags, standardised by the bags that a fold trains on."""

    @abc.abstractmethod
    def marked(self, bag: int) -> Bool[np.ndarray, " S"] | None:
        """Which instances make a bag positive; None if that is not known."""

    @abc.abstractmethod
    def read(self) -> dict[str, Any]:
        """What was read, by name, see `uhop_jax.workdir.check`."""


def source_of(config: ConfigDict) -> Source:
    """The bags of a config.

    Raises:
      ValueError: if a value is out of range, or data are missing or wrong.
    """
    options, share = config.data, config.train.validation
    if not 0 < share < 1:
        raise ValueError(f"train.validation must be within (0, 1), got {share}")
    if options.name not in SIMULATED:
        if not options.name:
            raise ValueError(
                "data.name must name a data set, a csv or a folder, as in "
                f"--config.data.name=FILE.csv, got {options.name!r}; known sets are "
                f"{', '.join((*PUBLISHED, *SIMULATED))}"
            )
        bags = data.bags(options.name, directory=options.dir or None)
        parts = data.folds(bags.labels, config.folds, held_out=share, seed=options.draw)
        return Stored(options.name, bags, parts)
    if config.folds:
        raise ValueError(
            f"folds must be 0 for {options.name}, which has test bags of its own, got "
            f"{config.folds}"
        )
    check_count("data.bags", options.bags, 4)
    check_count("data.test_bags", options.test_bags, 2)
    check_count("data.instances", options.instances, 1)
    if options.name == "needle":
        return Needles(options, share)
    sets = []
    for number, (part, count) in enumerate(
        (("train", options.bags), ("test", options.test_bags))
    ):
        images = data.images("mnist", split=part, directory=options.dir or None)
        sets.append(
            data.image_bags(
                images,
                count,
                mean=float(options.instances),
                target=TARGET,
                seed=2 * options.draw + number,
                name=f"{part} ",
            )
        )
    return Stored(
        options.name, _joined(*sets), [_own(options, share, *(x.labels for x in sets))]
    )


def _joined(one: Bags, two: Bags) -> Bags:
    """The bags of both."""
    fields: dict[str, Any] = {
        name: np.concatenate([getattr(one, name), getattr(two, name)])
        for name in ("instances", "sizes", "labels", "marked")
    }
    return one._replace(names=one.names + two.names, **fields)


def _own(
    options: ConfigDict,
    share: float,
    train: Int32[np.ndarray, " train"],
    test: Int32[np.ndarray, " test"],
) -> Fold:
    """The parts of a set whose test bags follow its training bags, from both labels."""
    label_counts(test)
    number = np.arange(len(train))
    seen, validation = validated(number, train, share, options.draw)
    return Fold(seen, validation, len(train) + np.arange(len(test)))


class Stored(Source):
    """Bags that memory holds, standardised and padded to the longest."""

    def __init__(self, name: str, bags: Bags, parts: list[Fold]):
        self.name, self.bags, self.folds = name, bags, parts
        self.labels, self.names = bags.labels, bags.names
        self.features = bags.instances.shape[1]

    def split(self, chosen: Int[np.ndarray, " some"], fold: Fold) -> Split:
        scaled = self.scaled(self.bags, fold)
        return padded(self.bags, chosen, scaled, self.take)

    @functools.cached_property
    def take(self) -> Take:
        """The function that makes batches, one for all splits."""
        return padding(int(self.bags.sizes.max()))

    def scaled(self, bags: Bags, fold: Fold) -> Float[np.ndarray, "n d"]:
        """Instances of any bags, standardised by the bags that a fold trains on."""
        return self.scaler(fold).scaled(bags.instances).astype(np.float32)

    def scaler(self, fold: Fold) -> data.Scaler:
        """The scaler of the bags that a fold trains on."""
        seen = self.bags.instances[self.bags.rows(fold.train)]
        if self.bags.alike:
            seen = seen.reshape(-1, 1)
        return data.scaler_of(seen.astype(np.float64))

    def marked(self, bag: int) -> Bool[np.ndarray, " S"] | None:
        if self.bags.marked is None:
            return None
        return self.bags.marked[self.bags.rows(np.asarray([bag]))]

    def read(self) -> dict[str, Any]:
        bags = self.bags
        return {
            self.name: fingerprint(
                bags.instances, bags.sizes, bags.labels, bags.names, bags.features
            )
        }


def padding(longest: int) -> Take:
    """A function that makes batches of bags with `longest` instances, and a mask."""

    def take(arrays: Mapping[str, Any], index: Array) -> Batch:
        place = jnp.arange(longest, dtype=jnp.int32)[None]
        mask = place < arrays["sizes"][index][:, None]
        rows = jnp.where(mask, arrays["first"][index][:, None] + place, 0)
        return {
            "instances": arrays["instances"][rows],
            "mask": mask,
            "labels": arrays["labels"][index],
        }

    return take


@functools.cache
def sampling(number: int) -> Callable[[Batch, Array], Batch]:
    """A function that draws `number` instances of each bag, without repetition.

    Stage I compares all pairs of a bag. The function takes a batch with `instances`
    `(B, S, d)`, and `mask` `(B, S)` if bags are padded, and returns instances
    `(B, number, d)` with their mask. Each of `number` equal parts of a longer bag gives
    one instance; a shorter bag gives all. A batch with `S <= number` is returned
    itself.
    """

    def sample(batch: Batch, key: Array) -> Batch:
        instances = batch["instances"]
        bags, longest, _ = instances.shape
        if longest <= number:
            return batch
        sizes = batch["mask"].sum(1) if "mask" in batch else jnp.full(bags, longest)
        part = jnp.arange(number, dtype=jnp.int32)[None]
        size = sizes.astype(jnp.int32)[:, None]
        whole, rest = size // number, size % number

        def cut(part: Array) -> Array:  # `part * size // number` without overflow
            return part * whole + part * rest // number

        first, end = cut(part), cut(part + 1)
        draw = jax.random.uniform(key, (bags, number))
        place = first + (draw * (end - first).astype(draw.dtype)).astype(jnp.int32)
        place = jnp.where(size > number, jnp.minimum(place, end - 1), part)
        drawn = jnp.take_along_axis(instances, place[..., None], axis=1)
        return {"instances": drawn, "mask": part < size, "labels": batch["labels"]}

    return sample


def padded(
    bags: Bags,
    chosen: Int[np.ndarray, " some"],
    instances: Float[np.ndarray, "n d"],
    take: Take,
) -> Split:
    """Some bags as a split, with the instances given in place of their own."""
    arrays = {
        "instances": instances,
        "first": bags.first[chosen].astype(np.int32),
        "sizes": bags.sizes[chosen].astype(np.int32),
        "labels": bags.labels[chosen].astype(np.int32),
    }
    return Split(arrays, len(chosen), take, by_row=False)


class Needles(Source):
    """Simulated bags, half of them with one marked instance among very many others.

    Instances are standard normal vectors. The marked instance of a positive bag is
    shifted by `mark` along a direction that all bags share. A bag is made from its key
    when it is used, and never stored.
    """

    def __init__(self, options: ConfigDict, share: float):
        check_count("data.features", options.features, 1)
        check_positive("data.mark", options.mark)
        number = options.bags + options.test_bags
        self.features, self.size = int(options.features), int(options.instances)
        draws = np.random.default_rng(options.draw)
        direction = draws.normal(size=self.features)
        direction *= options.mark / np.linalg.norm(direction)
        self.direction = direction.astype(np.float32)
        self.labels = np.arange(number, dtype=np.int32) % 2
        parts = (("train", options.bags), ("test", options.test_bags))
        self.names = tuple(
            f"{p} {n}" for p, count in parts for n in range(1, count + 1)
        )
        self.key = jax.random.key(options.draw)
        cut = self.labels[: options.bags], self.labels[options.bags :]
        self.folds = [_own(options, share, *cut)]

    def split(self, chosen: Int[np.ndarray, " some"], fold: Fold) -> Split:
        del fold  # instances are standard normal already
        arrays = {"number": chosen.astype(np.int32), "labels": self.labels[chosen]}
        return Split(arrays, len(chosen), self.take, by_row=False)

    def take(self, arrays: Mapping[str, Any], index: Array) -> Batch:
        """Makes the bags of a batch."""
        number, labels = arrays["number"][index], arrays["labels"][index]
        return {"instances": jax.vmap(self.made)(number, labels), "labels": labels}

    def made(self, number: Array, label: Array) -> Float[Array, "S d"]:
        """The instances of a bag."""
        key = jax.random.fold_in(self.key, number)
        instances = jax.random.normal(key, (self.size, self.features), jnp.float32)
        mark = label.astype(jnp.float32) * self.direction
        return instances.at[self.place(key)].add(mark)

    def place(self, key: PRNGKeyArray) -> Array:
        """The place of the marked instance."""
        return jax.random.randint(jax.random.fold_in(key, 1), (), 0, self.size)

    def marked(self, bag: int) -> Bool[np.ndarray, " S"] | None:
        place = int(self.place(jax.random.fold_in(self.key, bag)))
        return (np.arange(self.size) == place) & bool(self.labels[bag])

    def read(self) -> dict[str, Any]:
        return {}
