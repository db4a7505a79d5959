"""Claims about how fast a model learns, from its accuracies after every epoch."""

from collections.abc import Sequence

import numpy as np
from claims import Judged, Results, Rows
from learning_claims import gains_by_size, of_images, shown, worst
from studies import RELEASED
from verdicts import FAILS, HOLDS, PARTLY, UNDECIDED

from uhop_jax import records

KEYS = ("data", "size", "arm", "seed")
PARTS = {"test": "test_accuracy", "training": "train_accuracy"}


def averages(rows: Rows) -> Rows:
    """The mean of each accuracy over the epochs of a run: the area under its curve."""
    return [
        dict(zip(KEYS, key, strict=True))
        | {
            name: float(np.mean([row[name] for row in epochs]))
            for name in PARTS.values()
        }
        for key, epochs in records.grouped(rows, KEYS).items()
    ]


def epochs_needed(rows: Rows) -> str:
    """Epochs until U-Hop reaches the last training accuracy of MHM, in words.

    The mean over seeds of one data set and size; "never" if a seed does not reach it.
    """
    runs: dict[str, list[list[float]]] = {"MHM": [], RELEASED: []}
    for (arm, _), epochs in records.grouped(rows, ("arm", "seed")).items():
        if arm in runs:
            ordered = sorted(epochs, key=lambda row: row["epoch"])
            runs[arm].append([row["train_accuracy"] for row in ordered])
    goal = np.mean([curve[-1] for curve in runs["MHM"]])
    curves = np.asarray(runs[RELEASED])
    reached = curves >= goal
    if not reached.any(axis=1).all():
        return f"never in all seeds of {curves.shape[1]}"
    return f"{np.mean(reached.argmax(axis=1) + 1):.1f} of {curves.shape[1]}"


def faster(results: Results) -> Judged:
    """Judges the speed at every sample size, on the test and the training images."""
    rows = of_images(results)
    means, texts, verdicts = averages(rows), [], []
    for part, value in PARTS.items():
        gains = gains_by_size(means, value)
        if not gains:
            return Judged()
        listed = "; ".join(f"{_size(key)}: {shown(x)}" for key, x in gains.items())
        texts.append(f"mean {part} accuracy, {listed}")
        verdicts.append(_everywhere(list(gains.values())))
    by_size = records.grouped(rows, ("data", "size"))
    needed = [f"{_size(key)}: {epochs_needed(by_size[key])}" for key in gains]
    texts.append(f"epochs to MHM's last training accuracy, {'; '.join(needed)}")
    return Judged(reference=". ".join(texts), verdict=worst(verdicts))


def _size(key: Sequence) -> str:
    return str(key[1] or "all")


def _everywhere(gains: Sequence[tuple[float, float]]) -> str:
    """Holds if every size gains beyond 2 standard errors, partly if some size does.

    It fails if no size does, and none gains at all or one loses beyond 2.
    """
    values, errors = np.asarray(gains).T
    if not np.isfinite(errors).all():
        return UNDECIDED
    winning = values > 2 * errors
    if winning.any():
        return HOLDS if winning.all() else PARTLY
    return FAILS if (values <= 0).all() or (values < -2 * errors).any() else UNDECIDED
