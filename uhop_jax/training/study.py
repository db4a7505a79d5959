"""Image classification from a config: one run, or a study of many, and their files."""

import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from uhop_jax import data, plotting, records
from uhop_jax._checks import check_count, check_positive
from uhop_jax.data import Images
from uhop_jax.data.pictures import picture_files, read_pictures
from uhop_jax.training.arms import arm_of
from uhop_jax.training.run import Data, Goal, Options, best_state, train
from uhop_jax.training.steps import StageOne, Trainer
from uhop_jax.training.vision import Cell, parameters_of, scaled, task_of

# What does not change a result, and may differ when a run is continued.
FREE = (
    "arms",
    "sizes",
    "patches",
    "eval_only",
    "predict",
    "distributed",
    "data.dir",
    "data.on_device",
    "train.checkpoint_seconds",
)


def train_and_evaluate(config: ConfigDict, workdir: Path) -> None:
    """Trains every arm, size and patch of a config of `configs/vision.py`.

    Each is a run with its own directory (`workdir` itself if there is but one): config,
    `metrics.csv`, `curves.png`, TensorBoard events, checkpoints. A run that is finished
    is not repeated, one that was interrupted goes on. `workdir` gets `results.csv` over
    all of them, and `figure.png` if there are several.

    Raises:
      ValueError: if the config cannot be run, or `workdir` holds another run.
      FloatingPointError: if a loss is no longer finite.
    """
    if config.distributed:
        jax.distributed.initialize()
    cells = _cells(config)
    _check(config)
    loaded = {
        split: data.labelled_images(
            config.data.name, split=split, directory=config.data.dir or None
        )
        for split in ("train", "test")
    }
    if config.data.test_limit:
        loaded["test"] = data.subset(loaded["test"], config.data.test_limit)
    trainers = {cell: _trainer(config, cell, loaded) for cell in cells}
    directories = {
        cell: workdir if len(cells) == 1 else workdir / _slug(cell.title)
        for cell in cells
    }
    if config.predict or config.eval_only:
        for cell in cells:
            if config.predict:
                _predict(config, trainers[cell], loaded["train"], directories[cell])
            else:
                _judge(config, cell, trainers[cell], directories[cell])
        return
    if len(cells) > 1:
        records.claim(_fixed(config), workdir)
    rows: list[dict[str, Any]] = []
    histories: dict[Cell, list[dict[str, Any]]] = {}
    for cell in cells:
        records.claim(_fixed(config, cell), directories[cell])
        began = time.monotonic()
        history = train(
            trainers[cell],
            _goal(config),
            directories[cell],
            options=Options(config.data.on_device, config.train.checkpoint_seconds),
        )
        histories[cell] = history
        rows += _summary(config, cell, trainers[cell], history)
        if jax.process_index() == 0:
            records.write_csv(workdir / "results.csv", rows)
            print(f"{cell.title}: {time.monotonic() - began:.0f} s", flush=True)
    if jax.process_index() == 0:
        if len(cells) > 1:
            parts = _panels(cells, histories, rows)
            plotting.panels(workdir / "figure.png", parts, title=_title(config))
        print(f"\n{_title(config)}\n\n{_report(rows)}\n")
        print(f"written to {workdir}: {', '.join(_files(workdir))}")


def _check(config: ConfigDict) -> None:
    if not config.seeds:
        raise ValueError("seeds must name at least one seed")
    for seed in config.seeds:
        check_count("seeds", seed, 0)
    check_count("train.epochs", config.train.epochs, 1)
    check_count("train.batch_size", config.train.batch_size, 1)
    check_count("train.patience", config.train.patience, 0)
    check_count("data.test_limit", config.data.test_limit, 0)
    check_positive("train.learning_rate", config.train.learning_rate)
    if config.train.weight_decay < 0:
        raise ValueError(
            f"train.weight_decay must be at least 0, got {config.train.weight_decay}"
        )


def _cells(config: ConfigDict) -> list[Cell]:
    """Every size with every patch and arm."""
    for arm in config.arms:
        arm_of(arm)
    found = [
        Cell(arm, int(size), int(patch))
        for size, patch, arm in itertools.product(
            config.sizes, config.patches, config.arms
        )
    ]
    if not found:
        raise ValueError("arms, sizes and patches must each name at least one")
    return found


def _trainer(config: ConfigDict, cell: Cell, loaded: Mapping[str, Images]) -> Trainer:
    arm, stage = arm_of(cell.arm), dict(config.stage_one)
    task = task_of(config, cell, loaded["train"], loaded["test"])
    steps = config.train.epochs * (
        task.train.size // min(config.train.batch_size, task.train.size)
    )
    rate: Any = config.train.learning_rate
    if config.train.cosine:
        rate = optax.cosine_decay_schedule(rate, steps)
    optimizer = optax.adam(rate)
    if config.train.weight_decay:
        optimizer = optax.adamw(rate, weight_decay=config.train.weight_decay)
    return Trainer(
        task,
        optimizer,
        StageOne(schedule=arm.schedule, by_task=arm.by_task, **stage),
        batch_size=config.train.batch_size,
        seeds=config.seeds,
    )


def _goal(config: ConfigDict) -> Goal:
    return Goal(
        config.train.epochs,
        "accuracy",
        patience=config.train.patience or None,
        test_train=config.train.test_train,
    )


def _fixed(config: ConfigDict, cell: Cell | None = None) -> ConfigDict:
    """The part of a config that a directory is bound to."""
    copy = ConfigDict(config.to_dict())
    for name in FREE:
        *path, last = name.split(".")
        node = copy
        for part in path:
            node = node[part]
        del node[last]
    if cell is not None:
        copy.cell = ConfigDict(cell._asdict())
    return copy


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", title.lower().replace("+", "with")).strip("_")


def _summary(
    config: ConfigDict, cell: Cell, trainer: Trainer, history: Sequence[Mapping]
) -> list[dict[str, Any]]:
    """One record for each seed of a run."""
    part = "fit" if config.train.test_train else "train"
    count = parameters_of(trainer.task.build)
    rows = []
    ours = [row for row in history if row["phase"] == "task"]
    for (seed,), epochs in records.grouped(ours, ("seed",)).items():
        rows.append(
            {
                "data": config.data.name,
                "model": config.model.name,
                **cell._asdict(),
                "seed": seed,
                "parameters": count,
                "max_train_accuracy": max(r[f"{part}_accuracy"] for r in epochs),
                "test_accuracy": epochs[-1]["test_accuracy"],
                "best_test_accuracy": max(r["test_accuracy"] for r in epochs),
                "test_loss": epochs[-1]["test_loss"],
                "separation": epochs[-1]["separation"],
            }
        )
    return rows


def _title(config: ConfigDict) -> str:
    name = Path(config.data.name).name
    seeds = f"{len(config.seeds)} seed{'s' * (len(config.seeds) > 1)}"
    return f"{name}, {config.model.name}, {seeds}"


def _report(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each run: what the paper's table shows, and the parameters."""
    several = {name: len({row[name] for row in rows}) > 1 for name in ("size", "patch")}
    extra = [name for name, wanted in several.items() if wanted]
    lines = [["arm", *extra, "parameters", "max train acc. %", "test acc. %"]]
    for (arm, *_), ours in records.grouped(rows, ("arm", "size", "patch")).items():
        line = [arm, *(str(ours[0][name] or "all") for name in extra)]
        line.append(f"{ours[0]['parameters']:,}")
        for name in ("max_train_accuracy", "test_accuracy"):
            line.append(records.mean_and_spread([100 * row[name] for row in ours]))
        lines.append(line)
    return records.aligned(lines)


def _panels(
    cells: Sequence[Cell],
    histories: Mapping[Cell, Sequence[Mapping]],
    rows: Sequence[Mapping[str, Any]],
) -> list[plotting.Panel]:
    """Accuracy against sample size if there are several, else curves of each arm."""
    parts = []
    patches = list(dict.fromkeys(cell.patch for cell in cells))
    if len({cell.size for cell in cells}) > 1:
        full = max(row["size"] for row in rows) * 2
        for patch, (key, name) in itertools.product(
            patches,
            (
                ("max_train_accuracy", "maximum training accuracy"),
                ("test_accuracy", "test accuracy"),
            ),
        ):
            ours = [
                dict(r, size=r["size"] or full) for r in rows if r["patch"] == patch
            ]
            parts.append(
                plotting.Panel(
                    f"patch {patch}",
                    records.curves(ours, "size", key, "arm"),
                    f"training images ({full}: all)",
                    name,
                    xscale="log",
                )
            )
        return parts
    for patch in patches:
        for key, name in (
            ("train_accuracy", "training accuracy"),
            ("test_accuracy", "test accuracy"),
            ("train_loss", "training loss"),
            ("test_loss", "test loss"),
        ):
            long = [
                dict(row, arm=cell.arm)
                for cell in cells
                if cell.patch == patch
                for row in histories[cell]
                if row["phase"] == "task"
            ]
            curves = records.curves(long, "epoch", key, "arm")
            parts.append(plotting.Panel(f"patch {patch}", curves, "epoch", name))
    return parts


def _files(workdir: Path) -> Iterator[str]:
    for path in sorted(workdir.iterdir()):
        if not path.name.startswith("."):
            yield path.name + "/" * path.is_dir()


def _judge(config: ConfigDict, cell: Cell, trainer: Trainer, directory: Path) -> None:
    """Prints what the best checkpoint of a run scores on the whole test split."""
    step, state = best_state(trainer, _goal(config), directory)
    found = Data(trainer, on_device=config.data.on_device).evaluate(state, "test")
    text = ", ".join(
        f"{name} {records.mean_and_spread(list(values))}"
        for name, values in found.items()
    )
    print(f"{cell.title}, step {step}, {trainer.task.test.size} test images: {text}")


def _predict(
    config: ConfigDict, trainer: Trainer, train: Images, directory: Path
) -> None:
    """Writes `predictions.csv`: class and probability of each image."""
    path = Path(config.predict)
    if not path.exists():
        raise ValueError(f"predict: no such image or folder: {path}")
    files = picture_files(path) if path.is_dir() else [path]
    pictures, shape = read_pictures(files), train.raw.shape[1:]
    if pictures.shape[1:] != shape:
        raise ValueError(
            f"predict: the model takes images of {shape[1]} x {shape[0]} with "
            f"{shape[2]} channels, {path} has {pictures.shape[2]} x "
            f"{pictures.shape[1]} with {pictures.shape[3]}"
        )
    pictures = np.round(pictures * (train.top / 255)).astype(np.uint8)
    step, state = best_state(trainer, _goal(config), directory)
    rows = []
    for first in range(0, len(files), trainer.batch_size):
        part = jnp.asarray(pictures[first : first + trainer.batch_size])
        logits = np.asarray(
            trainer.outputs(state, (scaled(part, train.top),)), np.float64
        )
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        odds /= odds.sum(-1, keepdims=True)
        for file, chances in zip(files[first:], odds, strict=False):
            label = int(chances.argmax())
            name = train.classes[label] if train.classes else str(label)
            rows.append(
                {"image": file.name, "class": name, "probability": chances.max()}
            )
    records.write_csv(directory / "predictions.csv", rows)
    for row in rows[:20]:
        print(f"{row['image']}: {row['class']} ({100 * row['probability']:.0f} %)")
    print(f"checkpoint {step}; written to {directory / 'predictions.csv'}")
