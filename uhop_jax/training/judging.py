"""Epochs of a run judged by their metrics: the best, the last, and when to stop."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from uhop_jax import records
from uhop_jax.training.steps import Trainer
from uhop_jax.training.task import SEPARATIONS


class Goal(NamedTuple):
    """The end of a run, and the metric of its best epoch.

    Attributes:
      epochs: at most.
      metric: such as `accuracy`, of the validation split; without such a split, of the
        test split (then the metric decides on patience only, see `judged_epoch`).
      least: whether the least value is best.
      patience: epochs without improvement after which the run ends; None for no limit.
      test_train: whether each epoch also judges the train split, without dropout.
    """

    epochs: int
    metric: str
    least: bool = False
    patience: int | None = None
    test_train: bool = False


def columns(trainer: Trainer, goal: Goal) -> dict[str, type]:
    """Columns of `metrics.csv`, with their types."""
    types: dict[str, type] = {"phase": str, "epoch": int, "step": int, "seed": int}
    parts = ["train", trainer.task.judge, *(["fit"] if goal.test_train else [])]
    for part in parts:
        types |= {f"{part}_{name}": float for name in trainer.metrics}
    return types | dict.fromkeys(SEPARATIONS, float)


def judged_epoch(
    trainer: Trainer, goal: Goal, rows: Sequence[Mapping[str, Any]]
) -> int:
    """Number of the epoch whose checkpoint a run is judged by, from 1; 0 if none is.

    The epoch is the best by the validation split. Without such a split it is the last,
    since the test split must not choose.
    """
    if trainer.task.validation is None:
        return max((r["epoch"] for r in rows if r["phase"] == "task"), default=0)
    return best_epoch(rows, f"{trainer.task.judge}_{goal.metric}", goal.least)


def judged_step(
    trainer: Trainer, goal: Goal, rows: Sequence[Mapping[str, Any]]
) -> int | None:
    """The step at the end of `judged_epoch`; None if no epoch is finished."""
    key = ("task", judged_epoch(trainer, goal, rows))
    return next((r["step"] for r in rows if (r["phase"], r["epoch"]) == key), None)


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over seeds of each metric."""
    parts = ("train_", "validation_", "test_", "fit_")
    names = [name for name in rows[0] if name.startswith(parts)]
    return {name: float(np.mean([row[name] for row in rows])) for name in names}


def best_epoch(rows: Sequence[Mapping[str, Any]], metric: str, least: bool) -> int:
    """Number of the best epoch of the task, from 1, by the mean over seeds.

    Of equal epochs the first is best. A value that is not finite is best only if no
    value is finite. Without an epoch the number is 0.
    """
    scores = _scores(rows, metric, least)
    return 1 + int(scores.argmax()) if len(scores) else 0


def _scores(rows: Sequence[Mapping[str, Any]], metric: str, least: bool) -> np.ndarray:
    """The metric of each epoch of the task, with the sign by which more is better."""
    epochs = records.grouped([r for r in rows if r["phase"] == "task"], ("epoch",))
    values = np.array([means(group)[metric] for group in epochs.values()])
    return np.where(np.isfinite(values), -values if least else values, -np.inf)


def patience_is_over(
    rows: Sequence[Mapping[str, Any]], metric: str, goal: Goal
) -> bool:
    """Whether the last `goal.patience` epochs have brought no improvement."""
    if goal.patience is None:
        return False
    scores = _scores(rows, metric, goal.least)
    return len(scores) > 0 and len(scores) - 1 - int(scores.argmax()) >= goal.patience
