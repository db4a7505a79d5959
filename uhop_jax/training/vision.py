"""Image classification: data, model, loss, augmentation and tables of a config."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, UInt8
from ml_collections import ConfigDict

from uhop_jax import data, plotting, records
from uhop_jax._checks import check_at_least, check_count, check_named, check_rate
from uhop_jax._files import shown_name, user_path
from uhop_jax.data import Images
from uhop_jax.data.pictures import ENDINGS, picture_files, read_pictures
from uhop_jax.training.application import Application, Rows
from uhop_jax.training.arms import arm_of, of_task, panel
from uhop_jax.training.cells import ImageCell
from uhop_jax.training.exporting import FILE, write_export
from uhop_jax.training.image_model import image_model
from uhop_jax.training.judging import Goal
from uhop_jax.training.steps import Trainer
from uhop_jax.training.task import SEPARATIONS, Batch, Split, Task, TrainState
from uhop_jax.workdir import fingerprint, write_table


class Vision(Application):
    """Studies of `configs/vision.py`: arms, sample sizes and patches."""

    free = (*Application.free, "sizes", "patches", "data.on_device")

    def __init__(self, config: ConfigDict, workdir: Path = Path()):
        super().__init__(config, workdir)
        check_count("data.test_limit", config.data.test_limit, 0)
        check_count("data.held_out", config.data.held_out, 0)
        check_at_least("train.weight_decay", config.train.weight_decay, 0)

    @functools.cached_property
    def images(self) -> dict[str, Images]:
        """Images of the splits; images held out of `train` replace `test`."""
        options = self.config.data
        splits = {
            split: data.labelled_images(
                options.name, split=split, directory=options.dir or None
            )
            for split in ("train", "test")
        }
        if options.held_out:
            splits["train"], splits["test"] = held_out(
                splits["train"], options.held_out
            )
        if options.test_limit:
            splits["test"] = data.subset(splits["test"], options.test_limit)
        return splits

    @functools.cached_property
    def read_by_all(self) -> dict[str, Any]:
        name = self.config.data.name
        return {
            f"{name}, {split} split": fingerprint(
                images.raw, images.labels, images.classes
            )
            for split, images in self.images.items()
        }

    @property
    def title(self) -> str:
        name = Path(self.config.data.name).name
        number, drawn = len(self.config.seeds), self.config.data.held_out
        text = f"{name}, {self.config.model.name}, {number} seed{'s' * (number > 1)}"
        return text + f", judged by {drawn} training images held out" * (drawn > 0)

    def curves_title(self, cell: Any) -> str:
        return f"{Path(self.config.data.name).name}, {cell.title}"

    def cells(self) -> list[ImageCell]:
        config = self.config
        check_named(arms=config.arms, sizes=config.sizes, patches=config.patches)
        return [
            ImageCell(arm, int(size), int(patch))
            for size, patch, arm in itertools.product(
                config.sizes, config.patches, config.arms
            )
        ]

    def task(self, cell: Any) -> Task:
        return task_of(self.config, cell, self.images["train"], self.images["test"])

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        options = self.config.train
        rate: Any = options.learning_rate
        if options.cosine:
            decay = optax.cosine_decay_schedule(rate, options.epochs)
            rate = lambda step: decay(step // steps)  # noqa: E731
        if options.weight_decay:
            return optax.adamw(rate, weight_decay=options.weight_decay)
        return optax.adam(rate)

    def goal(self) -> Goal:
        test_train = self.config.train.test_train
        return (
            super()
            .goal()
            ._replace(metric="accuracy", least=False, test_train=test_train)
        )

    def summary(
        self, cell: Any, trainer: Trainer, history: Rows, directory: Path
    ) -> Rows:
        del directory
        config = self.config
        part = "fit" if config.train.test_train else "train"
        rows = []
        task_rows = [row for row in history if row["phase"] == "task"]
        for (seed,), epochs in records.grouped(task_rows, ("seed",)).items():
            rows.append(
                {
                    "data": config.data.name,
                    "model": config.model.name,
                    **cell._asdict(),
                    "seed": seed,
                    "parameters": trainer.parameters,
                    "max_train_accuracy": max(r[f"{part}_accuracy"] for r in epochs),
                    "train_accuracy": epochs[-1][f"{part}_accuracy"],
                    "test_accuracy": epochs[-1]["test_accuracy"],
                    "best_test_accuracy": max(r["test_accuracy"] for r in epochs),
                    "test_loss": epochs[-1]["test_loss"],
                    **{name: epochs[-1][name] for name in SEPARATIONS},
                }
            )
        return rows

    def report(self, rows: Rows) -> str:
        """One line for each run: the columns of the paper's table, and parameters."""
        several = {
            name: len({row[name] for row in rows}) > 1 for name in ("size", "patch")
        }
        extra = [name for name, varies in several.items() if varies]
        lines = [["arm", *extra, "parameters", "max train acc. %", "test acc. %"]]
        for (arm, *_), group in records.grouped(rows, ("arm", "size", "patch")).items():
            line = [arm, *(str(group[0][name] or "all") for name in extra)]
            line.append(f"{group[0]['parameters']:,}")
            for name in ("max_train_accuracy", "test_accuracy"):
                line.append(records.mean_and_spread([100 * row[name] for row in group]))
            lines.append(line)
        return records.aligned(lines)

    def figures(
        self, histories: Mapping[Any, Rows], rows: Rows
    ) -> Mapping[str, Sequence[plotting.Panel]]:
        """Curves by arm; with several sizes also accuracy against sample size."""
        curves: list[plotting.Panel] = []
        sizes = list(dict.fromkeys(cell.size for cell in histories))
        patches = list(dict.fromkeys(cell.patch for cell in histories))
        for size, patch in itertools.product(sizes, patches):
            epochs = of_task(
                (cell.arm, history)
                for cell, history in histories.items()
                if (cell.size, cell.patch) == (size, patch)
            )
            title = f"{size or 'all'} images, patch {patch}"
            for key, name in (
                ("train_accuracy", "training accuracy"),
                ("test_accuracy", "test accuracy"),
                ("train_loss", "training loss"),
                ("test_loss", "test loss"),
            ):
                curves.append(panel(title, epochs, "epoch", key, "epoch", name))
        if len(sizes) == 1:
            return {"figure.png": curves}
        parts = []
        full = max(row["size"] for row in rows) * 2
        label = f"training images ({full}: all)" if 0 in sizes else "training images"
        for patch, (key, name) in itertools.product(
            patches,
            (
                ("max_train_accuracy", "maximum training accuracy"),
                ("test_accuracy", "test accuracy"),
            ),
        ):
            chosen = [
                dict(r, size=r["size"] or full) for r in rows if r["patch"] == patch
            ]
            about = (f"patch {patch}", chosen, "size", key)
            parts.append(panel(*about, label, name, xscale="log"))
        return {"figure.png": parts, "curves.png": curves}

    def predict(
        self, cell: Any, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        """Writes `predictions.csv`: class and probability of each image."""
        del cell
        path, train = user_path(self.config.predict), self.images["train"]
        function = jax.jit(self._function(trainer, state))
        [files] = picture_files([path]) if path.is_dir() else [[path]]
        if not files:
            raise ValueError(f"predict: {path} holds no images ({', '.join(ENDINGS)})")
        pictures, shape = read_pictures(files), train.raw.shape[1:]
        if pictures.shape[1:] != shape:
            raise ValueError(
                f"predict: the model takes images of {shape[1]} x {shape[0]} with "
                f"{shape[2]} channels, {path} has {pictures.shape[2]} x "
                f"{pictures.shape[1]} with {pictures.shape[3]}"
            )
        rows = []
        for first in range(0, len(files), trainer.batch_size):
            odds = np.asarray(function(pictures[first : first + trainer.batch_size]))
            for file, chances in zip(files[first:], odds, strict=False):
                label = int(chances.argmax())
                name = train.classes[label] if train.classes else str(label)
                rows.append(
                    {
                        "image": shown_name(file),
                        "class": name,
                        "probability": chances.max(),
                    }
                )
        write_table(directory / "predictions.csv", rows)
        lines = [
            f"{row['image']}: {row['class']} ({100 * row['probability']:.0f} %)"
            for row in rows[:20]
        ]
        return "\n".join([f"written to {directory / 'predictions.csv'}", *lines])

    def export(
        self, cell: Any, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        """Writes a function from images, with white at 255, to probabilities."""
        del cell
        train, function = self.images["train"], self._function(trainer, state)
        shape = train.raw.shape[1:]
        text = write_export(directory / FILE, function, shape, jnp.uint8)
        return text + f"; classes {', '.join(train.classes)}" * bool(train.classes)

    def _function(
        self, trainer: Trainer, state: TrainState
    ) -> Callable[[UInt8[Array, "n h w channels"]], Float[Array, "n classes"]]:
        """The model of the first seed, from pictures to probabilities."""
        train, model = self.images["train"], trainer.model_on_host(state)
        statistics = channel_statistics(train.raw)

        def probabilities(pictures: Array) -> Array:
            raw = jnp.round(pictures.astype(jnp.float32) * np.float32(train.top / 255))
            images = standardised(raw.astype(jnp.uint8), statistics)
            logits = model(images).astype(jnp.float32)
            return jax.nn.softmax(logits)

        return probabilities


def task_of(config: ConfigDict, cell: ImageCell, train: Images, test: Images) -> Task:
    """The task of a cell on loaded images.

    Raises:
      ValueError: if a value is out of range, or images do not fit.
    """
    classes = len(train.classes) or int(max(train.labels.max(), test.labels.max())) + 1
    shape = train.raw.shape[1:]
    for name, images in (("train", train), ("test", test)):
        if images.labels.min() < 0 or images.labels.max() >= classes:
            raise ValueError(
                f"labels of the {name} split must be 0 to {classes - 1}, got "
                f"{images.labels.min()} to {images.labels.max()}"
            )
        if images.raw.shape[1:] != shape:
            raise ValueError(
                f"train images have shape {shape}, {name} images {images.raw.shape[1:]}"
            )
    smoothing = float(config.train.label_smoothing)
    check_rate("train.label_smoothing", smoothing)
    flip, crop = bool(config.augment.flip), config.augment.crop
    check_count("augment.crop", crop, 0)
    statistics = channel_statistics(train.raw)
    check_count("number of images", cell.size, 0, len(train.raw))

    def inputs(batch: Batch) -> tuple:
        return (standardised(batch["images"], statistics),)

    def score(model: Any, batch: Batch, key: Array | None) -> dict[str, Array]:
        logits = model(*inputs(batch), key=key).astype(jnp.float32)
        target = jax.nn.one_hot(batch["labels"], classes, dtype=jnp.float32)
        if key is not None and smoothing:
            target = optax.smooth_labels(target, smoothing)
        correct = logits.argmax(-1) == batch["labels"]
        loss = optax.softmax_cross_entropy(logits, target)
        return {"loss": loss, "accuracy": correct.astype(jnp.float32)}

    def changed(batch: Batch, key: Array) -> Batch:
        return dict(batch, images=augmented(batch["images"], key, flip, crop))

    def split_of(images: Images) -> Split:
        arrays = {"images": images.raw, "labels": images.labels.astype(np.int32)}
        return Split(arrays, len(images.raw), _rows)

    seen = split_of(train)
    if cell.size:
        seen = seen._replace(size=cell.size, drawn_from=seen.size)
    build = image_model(config, cell, shape, classes)
    # The state of a ViH, its class token, is not among its memories.
    states = arm_of(cell.arm).reference and config.model.name == "vih"
    test_split = split_of(test)
    return Task(build, score, inputs, seen, test_split, None, states, changed)


def _rows(arrays: Mapping[str, Array], index: Array) -> Batch:
    """Some rows of each array."""
    return {name: array[index] for name, array in arrays.items()}


class Statistics(NamedTuple):
    """Mean and standard deviation of each channel, in the units of raw pixels."""

    mean: Float[np.ndarray, " channels"]
    deviation: Float[np.ndarray, " channels"]


def channel_statistics(images: UInt8[np.ndarray, "n h w channels"]) -> Statistics:
    """Statistics of a set of images; a channel without spread is left unscaled."""
    value = np.arange(256.0)
    moments = []
    for channel in np.moveaxis(images, -1, 0):
        share = np.bincount(channel.ravel(), minlength=256) / channel.size
        mean = share @ value
        moments.append((mean, np.sqrt(share @ (value - mean) ** 2) or 1.0))
    return Statistics(*np.asarray(moments, np.float32).T)


def standardised(
    images: UInt8[Array, "*batch height width channels"], statistics: Statistics
) -> Float[Array, "*batch height width channels"]:
    """Pixels with mean 0 and standard deviation 1 in each channel of the train split.

    The authors' code does so too (`image_classification.py`). It uses the numbers of
    CIFAR-10 for CIFAR-100 as well, and for the test split numbers that differ by a
    tenth of a grey level.
    """
    return (images.astype(jnp.float32) - statistics.mean) / statistics.deviation


def held_out(train: Images, number: int) -> tuple[Images, Images]:
    """The train split without some images drawn at random, and the drawn images.

    Raises:
      ValueError: if nothing is left to train on.
    """
    check_count("data.held_out", number, 1, len(train.raw) - 1)
    order = np.random.default_rng(0).permutation(len(train.raw))
    parts = np.sort(order[:-number]), np.sort(order[-number:])
    kept, drawn = (
        train._replace(raw=train.raw[part], labels=train.labels[part]) for part in parts
    )
    return kept, drawn


def augmented(
    images: UInt8[Array, "n height width channels"], key: Array, flip: bool, crop: int
) -> UInt8[Array, "n height width channels"]:
    """Each image flipped or not, and shifted by up to `crop` pixels over black."""
    flip_key, crop_key = jax.random.split(key)
    number = images.shape[0]
    if flip:
        flipped = jax.random.bernoulli(flip_key, shape=(number, 1, 1, 1))
        images = jnp.where(flipped, images[:, :, ::-1], images)
    if crop:
        padding = ((0, 0), (crop, crop), (crop, crop), (0, 0))
        padded = jnp.pad(images, padding)
        corners = jax.random.randint(crop_key, (number, 2), 0, 2 * crop + 1)
        shape = images.shape[1:]

        def cut(image: Array, corner: Array) -> Array:
            start = (corner[0], corner[1], jnp.zeros((), corner.dtype))
            return lax.dynamic_slice(image, start, shape)

        images = jax.vmap(cut)(padded, corners)
    return images
