"""Tables and figures of a study of bags."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from uhop_jax import plotting, records
from uhop_jax.training.application import Rows
from uhop_jax.training.arms import panel
from uhop_jax.training.cells import BagCell
from uhop_jax.training.task import REACHED

SCORES = ("test_auc", "test_accuracy")
CANDIDATE = ("beta", "dropout")
SHOWN = 3  # bags of each label in the figure of weights
INSTANCES = 100  # largest weights of a bag that are written


def of_chosen(rows: Rows, scores: Rows) -> Rows:
    """Records of the models that validation chooses, for each arm and fold.

    The mean over seeds of `validation_loss` in the scores, records of `results.csv`,
    chooses between values of beta and dropout.
    """
    chosen = set()
    for place, group in records.grouped(scores, ("arm", "fold")).items():
        best = records.of_least(group, CANDIDATE, "validation_loss")[0]
        chosen.add((*place, *(best[key] for key in CANDIDATE)))
    keys = ("arm", "fold", *CANDIDATE)
    return [row for row in rows if tuple(row[key] for key in keys) in chosen]


def by_fold(rows: Rows, score: str) -> list[float]:
    """Means over seeds of a score in each fold; without folds the score of each seed.

    Seeds of a fold share its bags, so that they are no sample of their own.
    """
    if not rows[0]["fold"]:
        return [row[score] for row in rows]
    groups = records.grouped(rows, ("fold",)).values()
    return [float(np.mean([row[score] for row in group])) for group in groups]


def shown(rows: Rows, score: str) -> str:
    """Mean of a score in per cent, with half of its 95 % interval."""
    return records.mean_and_interval([100 * x for x in by_fold(rows, score)])


def table(rows: Rows) -> str:
    """One line for each arm: scores in per cent, with their 95 % intervals."""
    rows, every = of_chosen(rows, rows), rows
    folds = len({row["fold"] for row in rows})
    what = "folds" if folds > 1 else "seeds"
    lines = [["arm", "parameters", "folds", "seeds", "AUC %", "accuracy %"]]
    for (arm,), group in records.grouped(rows, ("arm",)).items():
        seeds = len({row["seed"] for row in group})
        line = [arm, f"{group[0]['parameters']:,}", str(folds), str(seeds)]
        lines.append([*line, *(shown(group, score) for score in SCORES)])
    text = f"{records.aligned(lines)}\n± half of the 95 % interval over {what}"
    if len(records.grouped(every, CANDIDATE)) > 1:
        for (arm,), group in records.grouped(rows, ("arm",)).items():
            counts = [
                f"{beta:g} and {dropout:g} ({len({row['fold'] for row in lot})})"
                for (beta, dropout), lot in records.grouped(group, CANDIDATE).items()
            ]
            text += f"\n{arm}: beta and dropout chosen (folds): {', '.join(counts)}"
    return text


def panels(histories: Mapping[BagCell, Rows], rows: Rows) -> list[plotting.Panel]:
    """Losses by epoch, and the AUC of each fold, of the chosen models of each arm."""
    every = [
        row | cell._asdict()
        for cell, history in histories.items()
        for row in history
        if row["phase"] == "task"
    ]
    epochs = of_chosen(every, rows)
    chosen = of_chosen(rows, rows)
    parts = [
        panel("all folds", epochs, "epoch", f"{part}_loss", REACHED, f"{name} loss")
        for part, name in (("train", "training"), ("validation", "validation"))
    ]
    parts.append(
        panel("test bags", chosen, "fold", "test_auc", "fold", "AUC", points=True)
    )
    return parts


def weight_panels(rows: Rows) -> list[plotting.Panel]:
    """The weights over the instances of the largest bags of each label."""
    groups = records.grouped(rows, ("bag",))
    parts = []
    for label in (1, 0):
        own = [group for group in groups.values() if group[0]["label"] == label]
        for group in sorted(own, key=len, reverse=True)[:SHOWN]:
            about = group[0]
            series: dict[str, plotting.Curve] = {}
            for name, marks in (("instance", ("", 0)), ("marked instance", (1,))):
                lot = [row for row in group if row["marked"] in marks]
                places = [row["instance"] for row in lot]
                weights = [row["weight"] for row in lot]
                if lot:
                    series[name] = plotting.Curve(places, weights, [0.0] * len(lot))
            title = (
                f"bag {about['bag']}, label {label}, judged {about['probability']:.2f}"
            )
            parts.append(
                plotting.Panel(
                    title, series, "instance of the bag", "weight", points=True
                )
            )
    return parts


def weight_rows(
    about: Mapping[str, Any],
    places: Sequence[int],
    weights: Sequence[float],
    marked: np.ndarray | None,
) -> Rows:
    """A record for each instance of a bag, in the order of the bag."""
    rows = []
    for place, weight in sorted(zip(places, weights, strict=True)):
        known = "" if marked is None else int(marked[place])
        row = {"instance": place + 1, "weight": weight, "marked": known}
        rows.append(dict(about) | row)
    return rows
