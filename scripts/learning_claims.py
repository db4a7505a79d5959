"""Claims about learning: means over seeds, with standard errors of their differences.

*Reference* is the released model and schedule, *paper* is Algorithm 2 on the same data,
*fair* has patches that a kernel can compare.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from claims import Judged, Results, Rows, spread
from studies import CONTROLS, RELEASED
from verdicts import (
    AGAINST,
    FAILS,
    FOR,
    HOLDS,
    OPEN,
    PARTLY,
    UNDECIDED,
    UNTESTED,
    gain,
    of_columns,
    of_gain,
)

from uhop_jax import paper, records

WITHOUT = f"{RELEASED}, no Stage I"
OFFICIAL = Path(__file__).parent.parent / "tests" / "official_vision.csv"
TRAINING, TEST = "max_train_accuracy", "test_accuracy"
PATCHES = "patches"  # the study with tokens that a kernel can compare


def sample(rows: Rows, arm: str, value: str) -> list[float]:
    """A measure of an arm, seed by seed."""
    return [row[value] for row in rows if row["arm"] == arm]


def points(rows: Rows, arm: str, value: str) -> str:
    """Mean and standard deviation of an accuracy in per cent."""
    return spread([100 * x for x in sample(rows, arm, value)], " %")


def change(rows: Rows, arms: tuple[str, str], value: str) -> tuple[float, float] | None:
    """The gain of the second arm in points and its standard error, if both are there.

    Over several data sets or sizes: the mean of their gains.
    """
    found = []
    for ours in records.grouped(rows, ("data", "size")).values():
        plain, other = (sample(ours, arm, value) for arm in arms)
        if plain and other:
            found.append(gain(plain, other, 100))
    if not found:
        return None
    gains, errors = np.asarray(found).T
    return float(gains.mean()), float(np.sqrt((errors**2).sum()) / len(found))


def worst(verdicts: Sequence[str]) -> str:
    """One verdict of several: partly if they differ and one of them holds."""
    if len(set(verdicts)) == 1:
        return verdicts[0]
    some = {HOLDS, PARTLY} & set(verdicts)
    return PARTLY if some else UNDECIDED if UNDECIDED in verdicts else FAILS


# -- Images ----------------------------------------------------------------------------


def accuracy(data: str, model: str, column: int) -> Callable[[Results], Judged]:
    """Judges a pair of cells of the image table, by the released model.

    On CIFAR there is one memory, of weight 1 under any separation: the sparse model is
    the dense one, and is judged by its runs. Tiny ImageNet is there with 20 classes of
    200, on which accuracies are others: a gain is judged by its sign.
    """
    value, stated = (TRAINING, TEST)[column], paper.ACCURACIES[data, model]

    def judge(results: Results) -> Judged:
        ((name, rows),) = results.items()
        base = "MHM" if data.startswith("cifar") else model
        texts, verdict = {}, UNTESTED
        arms = {"reference": RELEASED, "paper": f"{base} + U-Hop"}
        for place, arm in arms.items():
            found = change(rows, (base, arm), value)
            if found is None:
                continue
            texts[place] = f"{points(rows, base, value)}, with U-Hop "
            texts[place] += f"{points(rows, arm, value)}, gain {found[0]:+.2f} ± "
            texts[place] += f"{found[1]:.2f}"
            if verdict == UNTESTED:
                verdict = of_gain(*found, stated.uhop[column] - stated.plain[column])
        if name == "tiny20" and verdict == HOLDS:
            verdict = PARTLY  # on a tenth of the classes
        return Judged(**texts, verdict=verdict)

    return judge


def learning_margin(results: Results) -> Judged:
    """The mean gain in test accuracy over the data sets there are."""
    rows = [row for name, found in results.items() for row in found if name != PATCHES]
    texts, verdict = {}, UNTESTED
    for place, arm in (("reference", RELEASED), ("paper", "MHM + U-Hop")):
        found = change(rows, ("MHM", arm), TEST)
        if found is not None:
            which = ", ".join(dict.fromkeys(row["data"] for row in rows))
            texts[place] = f"{found[0]:+.2f} points ± {found[1]:.2f} ({which})"
            if place == "reference":
                verdict = of_gain(*found, 100 * paper.LEARNING_MARGIN)
    if PATCHES in results:
        found = change(results[PATCHES], ("MHM", "MHM + U-Hop"), TEST)
        if found is not None:
            texts["fair"] = f"{found[0]:+.2f} points ± {found[1]:.2f} (patches of 8)"
    return Judged(**texts, verdict=verdict)


def algorithm_two(results: Results) -> Judged:
    """The gain of the paper's bi-level Algorithm 2."""
    texts, verdicts = {}, []
    for place, with_patches in (("paper", False), ("fair", True)):
        rows = [
            r for n, x in results.items() for r in x if (n == PATCHES) is with_patches
        ]
        found = change(rows, ("MHM", "MHM + U-Hop"), TEST)
        if found is not None:
            texts[place] = f"{found[0]:+.2f} points ± {found[1]:.2f}"
            verdicts.append(of_gain(*found, 100 * paper.LEARNING_MARGIN))
    return Judged(**texts, verdict=worst(verdicts) if verdicts else UNTESTED)


def work_of_stage_one(results: Results) -> Judged:
    """The gain of the released model beside the same model without Stage I."""
    rows = [row for name, found in results.items() for row in found if name != PATCHES]
    texts, verdict = {}, UNTESTED
    total, without, stage = (
        change(rows, arms, TEST)
        for arms in (("MHM", RELEASED), ("MHM", WITHOUT), (WITHOUT, RELEASED))
    )
    if total and without and stage:
        texts["reference"] = "; ".join(
            f"{name} {found[0]:+.2f} ± {found[1]:.2f}"
            for name, found in (
                ("over MHM", total),
                ("the same model without Stage I over MHM", without),
                ("by Stage I", stage),
            )
        )
        verdict = _cause(total, without, stage)
    for place, names in (("paper", rows), ("fair", results.get(PATCHES, ()))):
        parts = []
        for control in ("MHM", *CONTROLS):
            found = change(names, (control, "MHM + U-Hop"), TEST)
            if found:
                parts.append(f"to {control} {found[0]:+.2f} ± {found[1]:.2f}")
        texts[place] = "; ".join(parts) or "-"
    return Judged(**texts, verdict=verdict)


def _cause(total: tuple, without: tuple, stage: tuple) -> str:
    """Holds if most of a gain comes with Stage I, fails if it is there without."""
    if not np.isfinite([total[1], without[1], stage[1]]).all():
        return UNDECIDED
    if total[0] <= 2 * total[1]:
        return UNDECIDED  # no gain, and so no cause of it
    if stage[0] > 2 * stage[1]:
        return HOLDS if stage[0] >= total[0] / 2 else PARTLY
    return FAILS if without[0] > 2 * without[1] else UNDECIDED


def complexity(results: Results) -> Judged:
    """Parameters, and whether a plain model of equal size gains as much."""
    (rows,) = results.values()
    plain, uhop = (
        next((int(r["parameters"]) for r in rows if r["arm"] == arm), 0)
        for arm in ("MHM", RELEASED)
    )
    if not (plain and uhop):
        return Judged()
    says = [FOR if uhop <= 1.01 * plain else AGAINST]
    text = f"{plain:,} parameters without, {uhop:,} with"
    found = change(rows, ("MHM, matched size", RELEASED), TRAINING)
    if found is not None:
        text += f"; training accuracy over a plain model of as many {found[0]:+.2f} ± "
        text += f"{found[1]:.2f} points"
        above = found[0] > 2 * found[1]
        says.append(FOR if above else AGAINST if found[0] < -2 * found[1] else OPEN)
    return Judged(reference=text, verdict=of_columns(says))


def by_size(value: str) -> Callable[[Results], Judged]:
    """Judges gains at every sample size, of one data set or several."""

    def judge(results: Results) -> Judged:
        rows = [row for found in results.values() for row in found]
        texts, verdicts = {}, []
        for place, arm in (("reference", RELEASED), ("paper", "MHM + U-Hop")):
            gains = {}
            for (data, size), ours in records.grouped(rows, ("data", "size")).items():
                found = change(ours, ("MHM", arm), value)
                if found is not None:
                    gains[data, size] = found
            if gains:
                texts[place] = "; ".join(
                    f"{data} {size or 'all'}: {g:+.2f} ± {e:.2f}"
                    for (data, size), (g, e) in gains.items()
                )
                verdicts.append(_at_every_size(list(gains.values())))
        # The figures are of the released code; Algorithm 2 stands beside it.
        return Judged(**texts, verdict=verdicts[0] if verdicts else UNTESTED)

    return judge


def _at_every_size(gains: Sequence[tuple[float, float]]) -> str:
    """Holds if a mean gain is beyond 2 errors and no size loses beyond 2 errors."""
    values, errors = np.asarray(gains).T
    if not np.isfinite(errors).all():
        return UNDECIDED
    average, error = values.mean(), np.sqrt((errors**2).sum()) / len(values)
    losing = (values < -2 * errors).any()
    if average > 2 * error:
        return PARTLY if losing else HOLDS
    winning = (values > 2 * errors).any()
    return PARTLY if winning else FAILS if average < 0 or losing else UNDECIDED


def grows(results: Results) -> Judged:
    """Whether the gain in training accuracy is larger on all images than on few."""
    (rows,) = results.values()
    texts, verdict = {}, UNTESTED
    for place, arm in (("reference", RELEASED), ("paper", "MHM + U-Hop")):
        found = {
            int(size) or int(1e9): change(ours, ("MHM", arm), TRAINING)
            for (size,), ours in records.grouped(rows, ("size",)).items()
        }
        there = {size: x for size, x in sorted(found.items()) if x is not None}
        if len(there) < 2:
            continue
        few, most = list(there.values())[0], list(there.values())[-1]
        texts[place] = "; ".join(
            f"{'all' if size == int(1e9) else size}: {g:+.2f} ± {e:.2f}"
            for size, (g, e) in there.items()
        )
        if verdict == UNTESTED:
            verdict = _grown(few, most)
    return Judged(**texts, verdict=verdict)


def _grown(few: tuple[float, float], most: tuple[float, float]) -> str:
    """Holds if there is a gain on all images, and a larger one than on few."""
    error = float(np.hypot(few[1], most[1]))
    if not np.isfinite(error):
        return UNDECIDED
    if most[0] <= 2 * most[1]:
        return UNDECIDED if most[0] > 0 else FAILS
    return HOLDS if most[0] - few[0] > 2 * error else PARTLY


# -- Forecasts -------------------------------------------------------------------------


def forecast(data: str, horizon: int) -> Callable[[Results], Judged]:
    """Judges a row of the forecasting table."""
    stated = paper.FORECASTS[data, horizon]

    def judge(results: Results) -> Judged:
        (rows,) = results.values()
        arms = ("GSH", "GSH + U-Hop")
        rows = [r for r in rows if (r["data"], int(r["horizon"])) == (data, horizon)]
        rows = [
            row
            for arm in arms
            if (ours := [r for r in rows if r["arm"] == arm])
            for row in records.of_least(ours, "window", "validation_loss")
        ]
        if not {r["arm"] for r in rows} >= set(arms):
            return Judged()
        texts, verdicts = [], []
        for i, metric in enumerate(("mse", "mae")):
            plain, uhop = (sample(rows, arm, f"test_{metric}") for arm in arms)
            found, error = gain(plain, uhop)
            texts.append(f"{metric.upper()} {spread(plain)}, with U-Hop {spread(uhop)}")
            verdicts.append(of_gain(-found, error, stated.plain[i] - stated.uhop[i]))
        return Judged(paper="; ".join(texts), verdict=worst(verdicts))

    return judge


# -- Agreement with the released code --------------------------------------------------


class Agreement(NamedTuple):
    """A number of the released code beside ours."""

    where: str
    official: str
    measured: str
    z: float


def agreement(results: Mapping[str, Rows]) -> list[Agreement]:
    """Accuracies of the released image code beside ours, where both are there.

    `z` is the difference of means in its standard errors, with the larger of the two
    standard deviations for both.
    """
    rows = [
        row
        for name in ("vision_reference", "cifar10_table")
        for row in results.get(name, ())
    ]
    found = []
    with OFFICIAL.open(newline="") as file:
        for line in csv.DictReader(file):
            for name, value in (("training", TRAINING), ("test", TEST)):
                ours = [
                    100 * r[value]
                    for r in rows
                    if (r["data"], r["arm"], r["size"])
                    == (line["data"], line["arm"], int(line["size"]))
                ]
                if len(ours) < 2:
                    continue
                n, official = int(line["seeds"]), float(line[name])
                deviation = max(float(line[f"{name}_sd"] or 0), np.std(ours, ddof=1))
                error = float(deviation) * (1 / n + 1 / len(ours)) ** 0.5
                size = f"{line['size']} images" if line["size"] != "0" else "all images"
                shown = f"{official:g} ({n} seed{'s' * (n > 1)})"
                about = f"{line['data']}, {size}, {line['arm']}, {name}"
                z = (float(np.mean(ours)) - official) / error
                found.append(Agreement(about, shown, spread(ours), z))
    return found
