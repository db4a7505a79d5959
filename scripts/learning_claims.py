"""Claims about learning: means over seeds, with standard errors of their differences.

*Reference* is the released model and schedule, *paper* is Algorithm 2 on the same data,
*fair* has patches that a kernel can compare. Algorithm 2 is compared with the arm
without U-Hop in the table of the same data set.
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
    NOT_AS_STATED,
    OPEN,
    PARTLY,
    UNDECIDED,
    UNTESTED,
    gain,
    of_gain,
    of_readings,
)

from uhop_jax import paper, records

WITHOUT = f"{RELEASED}, no Stage I"
ALGORITHM = "MHM + U-Hop"
DEEP = f"{RELEASED}, deep loss"  # the same arm in a study of its own
ONE_MEMORY = (
    f"with one patch the kernel of Algorithm 2 changes the logits by exactly 0: "
    f"{NOT_AS_STATED}"
)
ONE_FUNCTION = 5.0  # points by which two runs of one function may differ
OFFICIAL = Path(__file__).parent.parent / "tests" / "official_vision.csv"
# The authors' plots label the training accuracy of the last epoch as the maximal one.
TRAINING, TEST = "train_accuracy", "test_accuracy"
PATCHES = "patches"  # the study with tokens that a kernel can compare


def sample(rows: Rows, arm: str, value: str) -> list[float]:
    """Values of a measure for an arm, one for each seed."""
    return [row[value] for row in rows if row["arm"] == arm]


def points(rows: Rows, arm: str, value: str) -> str:
    """Mean and standard deviation of an accuracy in per cent."""
    return spread([100 * x for x in sample(rows, arm, value)], " %")


def change(rows: Rows, arms: tuple[str, str], value: str) -> tuple[float, float] | None:
    """The gain of the second arm in points and its standard error; None without an arm.

    Over several data sets or sizes the gain is the mean of their gains.
    """
    changes = []
    for group in records.grouped(rows, ("data", "size")).values():
        plain, other = (sample(group, arm, value) for arm in arms)
        if plain and other:
            changes.append(gain(plain, other, 100))
    if not changes:
        return None
    gains, errors = np.asarray(changes).T
    return float(gains.mean()), float(np.sqrt((errors**2).sum()) / len(changes))


def worst(verdicts: Sequence[str]) -> str:
    """One verdict from several: partly if they differ and one holds at least partly."""
    if len(set(verdicts)) == 1:
        return verdicts[0]
    some = {HOLDS, PARTLY} & set(verdicts)
    return PARTLY if some else UNDECIDED if UNDECIDED in verdicts else FAILS


# -- Images ----------------------------------------------------------------------------


def of_images(results: Results, *, one_memory: bool = False) -> Rows:
    """Rows of all studies except `patches`; rows of the deep loss get the arm `DEEP`.

    `one_memory` selects CIFAR alone, where an image is one patch.
    """
    selected = []
    for name, rows in results.items():
        if name == PATCHES or (one_memory and not name.startswith("cifar")):
            continue
        deep = name.endswith("_deep")
        selected += [{**r, "arm": DEEP} if deep else r for r in rows]
    return selected


def shown(estimate: tuple[float, float], unit: str = "") -> str:
    """A gain and its standard error."""
    return f"{estimate[0]:+.2f}{unit} ± {estimate[1]:.2f}"


def accuracy(data: str, model: str, column: int) -> Callable[[Results], Judged]:
    """Judges two cells of the image table, without U-Hop and with the released model.

    On CIFAR there is one memory, of weight 1 under any separation. The sparse model is
    then the dense model, and is judged by the runs of the dense model. Where the
    paper's numbers of the two models differ too much for one function, no run gives
    both. Tiny ImageNet has 20 of its 200 classes here: a gain holds partly at most.
    """
    value, stated = (TRAINING, TEST)[column], paper.ACCURACIES[data, model]
    single = data.startswith("cifar")
    base = "MHM" if single else model

    def judge(results: Results) -> Judged:
        rows, texts, verdict = of_images(results), {}, UNTESTED
        arms = {"reference": f"{base} + U-Hop, reference", "paper": f"{base} + U-Hop"}
        for place, arm in arms.items():
            estimate = change(rows, (base, arm), value)
            if estimate is None:
                continue
            texts[place] = f"{points(rows, base, value)}, with U-Hop "
            texts[place] += f"{points(rows, arm, value)}, gain {shown(estimate)}"
            if single and place == "paper":
                texts[place] += f"; {ONE_MEMORY}"
            elif verdict == UNTESTED:
                verdict = of_gain(*estimate, stated.uhop[column] - stated.plain[column])
        # With one memory the two plain models are one function, in the paper too.
        dense = paper.ACCURACIES[data, "MHM"].plain[column]
        apart = abs(stated.plain[column] - dense) > ONE_FUNCTION
        if single and apart and verdict == FAILS:
            verdict = NOT_AS_STATED
        if not single and verdict == HOLDS:
            verdict = PARTLY  # on a tenth of the classes
        return Judged(**texts, verdict=verdict)

    return judge


def learning_margin(results: Results) -> Judged:
    """The mean gain in test accuracy over the data sets that have results."""
    rows, texts, verdict = of_images(results), {}, UNTESTED
    for place, arm in (("reference", RELEASED), ("paper", ALGORITHM)):
        estimate = change(rows, ("MHM", arm), TEST)
        if estimate is not None:
            which = ", ".join(
                data
                for (data,), group in records.grouped(rows, ("data",)).items()
                if change(group, ("MHM", arm), TEST)
            )
            texts[place] = f"{shown(estimate, ' points')} ({which})"
            if place == "reference":
                verdict = of_gain(*estimate, 100 * paper.LEARNING_MARGIN)
    if "cifar" in texts.get("paper", ""):
        texts["paper"] += f"; on CIFAR {ONE_MEMORY}"
    estimate = change(results.get(PATCHES, ()), ("MHM", ALGORITHM), TEST)
    if estimate is not None:
        texts["fair"] = f"{shown(estimate, ' points')} (Algorithm 2, patches of 8)"
    return Judged(**texts, verdict=verdict)


def algorithm_two(results: Results) -> Judged:
    """The gain of the paper's bi-level Algorithm 2.

    On CIFAR the kernel cannot act, so that no gain comes from it. On Tiny ImageNet the
    class token is a second memory.
    """
    arms = ("MHM", ALGORITHM)
    single = change(of_images(results, one_memory=True), arms, TEST)
    tiny = change(results.get("tiny20", ()), arms, TEST)
    patches = change(results.get(PATCHES, ()), arms, TEST)
    parts = []
    if single:
        parts.append(f"CIFAR {shown(single, ' points')}, where {ONE_MEMORY}")
    if tiny:
        parts.append(f"Tiny ImageNet, 20 classes, {shown(tiny, ' points')}")
    acts = [
        of_gain(*estimate, 100 * paper.LEARNING_MARGIN)
        for estimate in (tiny, patches)
        if estimate
    ]
    verdict = worst(acts) if acts else UNTESTED
    if single:
        verdict = PARTLY if {HOLDS, PARTLY} & set(acts) else NOT_AS_STATED
    fair = f"{shown(patches, ' points')} (patches of 8)" if patches else "-"
    return Judged(paper="; ".join(parts) or "-", fair=fair, verdict=verdict)


def work_of_stage_one(results: Results) -> Judged:
    """Compares the gains of the released model with Stage I and without.

    The same schedule with the paper's loss for deep learning decides nothing.
    """
    rows, texts, verdict = of_images(results), {}, UNTESTED
    names = {
        "over MHM": ("MHM", RELEASED),
        "the same model without Stage I over MHM": ("MHM", WITHOUT),
        "by Stage I": (WITHOUT, RELEASED),
        "with the deep-learning loss, by Stage I": (WITHOUT, DEEP),
        "that loss over the average loss": (RELEASED, DEEP),
    }
    gains = {name: change(rows, arms, TEST) for name, arms in names.items()}
    parts = [
        f"{name} {shown(estimate)}" for name, estimate in gains.items() if estimate
    ]
    texts["reference"] = "; ".join(parts) or "-"
    total, without, stage, *_ = gains.values()
    if total and without and stage:
        verdict = _cause(total, without, stage)
    for place, group in (("paper", rows), ("fair", results.get(PATCHES, ()))):
        estimates = {c: change(group, (c, ALGORITHM), TEST) for c in ("MHM", *CONTROLS)}
        parts = [f"to {control} {shown(x)}" for control, x in estimates.items() if x]
        if parts and place == "paper":
            parts.append(ONE_MEMORY)
        texts[place] = "; ".join(parts) or "-"
    return Judged(**texts, verdict=verdict)


def _cause(total: tuple, without: tuple, stage: tuple) -> str:
    """Holds if half of a gain comes with Stage I, fails if the gain comes without."""
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
    readings = [FOR if uhop <= 1.01 * plain else AGAINST]
    text = f"{plain:,} parameters without, {uhop:,} with"
    estimate = change(rows, ("MHM, matched size", RELEASED), TRAINING)
    if estimate is not None:
        text += "; training accuracy over a plain model of as many "
        text += f"{shown(estimate)} points"
        above = estimate[0] > 2 * estimate[1]
        readings.append(
            FOR if above else AGAINST if estimate[0] < -2 * estimate[1] else OPEN
        )
    return Judged(reference=text, verdict=of_readings(readings))


def by_size(value: str) -> Callable[[Results], Judged]:
    """Judges gains at every sample size, of one data set or several."""

    def judge(results: Results) -> Judged:
        gains = gains_by_size(of_images(results), value)
        if not gains:
            return Judged()
        text = "; ".join(
            f"{data} {size or 'all'}: {shown(estimate)}"
            for (data, size), estimate in gains.items()
        )
        return Judged(reference=text, verdict=_at_every_size(list(gains.values())))

    return judge


def gains_by_size(rows: Rows, value: str) -> dict[tuple, tuple[float, float]]:
    """Gains of the released model by data set and size, all images (0) last."""
    gains = {
        key: change(group, ("MHM", RELEASED), value)
        for key, group in records.grouped(rows, ("data", "size")).items()
    }
    order = sorted(gains, key=lambda key: (key[0], key[1] or np.inf))
    return {key: x for key in order if (x := gains[key]) is not None}


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
    gains = gains_by_size(of_images(results), TRAINING)
    if len(gains) < 2:
        return Judged()
    text = "; ".join(f"{size or 'all'}: {shown(x)}" for (_, size), x in gains.items())
    few, *_, most = gains.values()
    return Judged(reference=text, verdict=_grown(few, most))


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
            if (group := [r for r in rows if r["arm"] == arm])
            for row in records.of_least(group, ("window",), "validation_loss")
        ]
        if not {r["arm"] for r in rows} >= set(arms):
            return Judged()
        texts, verdicts = [], []
        for i, metric in enumerate(("mse", "mae")):
            plain, uhop = (sample(rows, arm, f"test_{metric}") for arm in arms)
            estimate, error = gain(plain, uhop)
            texts.append(f"{metric.upper()} {spread(plain)}, with U-Hop {spread(uhop)}")
            verdicts.append(of_gain(-estimate, error, stated.plain[i] - stated.uhop[i]))
        return Judged(paper="; ".join(texts), verdict=worst(verdicts))

    return judge


# -- Agreement with the released code --------------------------------------------------


class Agreement(NamedTuple):
    """An accuracy of the released code and of this library, in per cent.

    Attributes:
      size: training images; 0 is all.
      part: `training`, measured during the last epoch, or `test`, measured after it.
      z: the difference of the means over its standard error, which takes the larger of
        the two standard deviations for both.
    """

    data: str
    size: int
    arm: str
    part: str
    official: str
    measured: str
    z: float

    @property
    def where(self) -> str:
        """Data set, number of images, arm and part, in words."""
        return f"{self.data}, {self.size or 'all'} images, {self.arm}, {self.part}"


def official_runs() -> dict[tuple[str, int, str], dict[str, str]]:
    """Lines of the released code's accuracies, by data set, size and arm."""
    with OFFICIAL.open(encoding="utf-8", newline="") as file:
        return {
            (line["data"], int(line["size"]), line["arm"]): line
            for line in csv.DictReader(file)
        }


def agreement(results: Mapping[str, Rows]) -> list[Agreement]:
    """Accuracies of the released image code and of this library, where both exist."""
    names = ("vision_reference", "cifar10_table")
    rows = [row for name in names for row in results.get(name, ())]
    agreements = []
    for where, line in official_runs().items():
        own = [r for r in rows if (r["data"], r["size"], r["arm"]) == where]
        for part, value in (("training", TRAINING), ("test", TEST)):
            if len(own) > 1:
                accuracies = [100 * r[value] for r in own]
                agreements.append(
                    Agreement(*where, part, *_beside(line, part, accuracies))
                )
    return agreements


def official_accuracy(line: Mapping[str, str], part: str) -> str:
    """Mean, standard deviation if there is one, and seeds of the released code."""
    n, deviation = int(line["seeds"]), float(line[f"{part}_sd"] or 0)
    text = f"{float(line[part]):g}" + f" ± {deviation:g}" * (deviation > 0)
    return f"{text} ({n} seed{'s' * (n > 1)})"


def _beside(
    line: Mapping[str, str], part: str, own: Sequence[float]
) -> tuple[str, str, float]:
    """Both accuracies in words, and their difference over its standard error."""
    larger = max(float(line[f"{part}_sd"] or 0), float(np.std(own, ddof=1)))
    error = larger * (1 / int(line["seeds"]) + 1 / len(own)) ** 0.5
    z = (float(np.mean(own)) - float(line[part])) / error
    return official_accuracy(line, part), spread(own), z
