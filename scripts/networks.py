"""What Stage I does in networks: differences of each arm from the plain layer.

    python scripts/networks.py    # prints the table and the sentence that follows

`python scripts/reproduction.py --run NAME` makes the studies that are named below.
Differences are paired: same fold and seed, means over the seeds of a fold; where a set
has no folds, same seed.
"""

from typing import Any, NamedTuple

import numpy as np
from files import read

from uhop_jax import records

PLAIN = "MHM"
# Arms in which a kernel is learned for separation or alignment.
LEARNED = (
    "MHM + U-Hop",
    "MHM + U-Hop, deep loss",
    "MHM + contrastive",
    "MHM + contrastive, then task",
    "MHM + residual contrastive, then task",
)
SCORES = {
    "networks_recall": ("associative recall", "test_accuracy"),
    "networks_musk1": ("musk1", "test_auc"),
    "networks_musk2": ("musk2", "test_auc"),
    "networks_elephant": ("elephant", "test_auc"),
    "networks_ucsb": ("ucsb", "test_auc"),
    "networks_etth1": ("ETTh1", "test_mse"),
    "patches": ("CIFAR-10, patches", "test_accuracy"),
}


class Gain(NamedTuple):
    """A paired difference of an arm from the plain layer, in points.

    Attributes:
      mean: of the differences.
      half: half of its 95 % interval.
    """

    mean: float
    half: float

    @property
    def counts(self) -> bool:
        """Whether the gain is at least one point, and its interval above zero."""
        return self.mean >= 1 and self.mean > self.half

    @property
    def possible(self) -> bool:
        """Whether the interval allows a gain of one point."""
        return self.mean + self.half >= 1


def samples(rows: list[dict[str, Any]], score: str) -> dict[Any, float]:
    """Scores in per cent: of each fold, a mean over seeds; else of each seed.

    In place of the squared error of standardised series, the variance explained.
    """
    by = "fold" if "fold" in rows[0] and rows[0]["fold"] else "seed"
    scores = {}
    for (key,), group in records.grouped(rows, (by,)).items():
        mean = float(np.mean([row[score] for row in group]))
        scores[key] = 100 * (1 - mean if score == "test_mse" else mean)
    return scores


def gains() -> dict[str, dict[str, Gain | float]]:
    """For each task the score of the plain layer, and the gain of each other arm."""
    tasks: dict[str, dict[str, Gain | float]] = {}
    for study, (task, score) in SCORES.items():
        # Forecasts that need no training have no seed. GSH is the layer of forecasters.
        if not (rows := [row for row in read(study) if row["seed"] != ""]):
            continue
        arms = {
            arm.replace("GSH", PLAIN): samples(group, score)
            for (arm,), group in records.grouped(rows, ("arm",)).items()
        }
        plain = arms.pop(PLAIN)
        tasks[task] = {PLAIN: float(np.mean([*plain.values()]))}
        for arm, own in arms.items():
            pairs = [own[key] - plain[key] for key in plain]
            tasks[task][arm] = Gain(float(np.mean(pairs)), records.half_width(pairs))
    return tasks


def table() -> str:
    """A line for each arm, a column for each task."""
    every = gains()
    names = list(dict.fromkeys(arm for arms in every.values() for arm in arms))
    lines = ["| | " + " | ".join(every) + " |", "|---" * (len(every) + 1) + "|"]
    for arm in names:
        cells = []
        for arms in every.values():
            value = arms.get(arm, "")
            if isinstance(value, Gain):
                cells.append(f"{value.mean:+.1f} ± {value.half:.1f}")
            else:
                cells.append(f"{value:.1f}" if value != "" else "")
        title = f"{arm} (per cent)" if arm == PLAIN else arm
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return "\n".join(lines)


def verdict() -> str:
    """The sentence that follows from the table."""
    every = gains()
    if not every:
        return "No task has been measured."
    number = {
        arm: [task for task, arms in every.items() if _counts(arms.get(arm))]
        for arm in LEARNED
    }
    winners = {arm: tasks for arm, tasks in number.items() if len(tasks) >= 2}
    if winners:
        words = "; ".join(f"{arm} ({', '.join(x)})" for arm, x in winners.items())
        return f"Stage I gains a point or more on two tasks or more: {words}."
    if missing := [task for task, _ in SCORES.values() if task not in every]:
        return (
            "Whether Stage I helps in a network is undecided: not measured on "
            f"{', '.join(missing)}. The plain layer is the choice until they are."
        )
    some = [f"{arm} on {', '.join(x)}" for arm, x in number.items() if x]
    alone = f" One task alone: {'; '.join(some)}." if some else ""
    allowed = sum(_possible(every, arm) >= 2 for arm in LEARNED)
    wide = f" For {allowed} of {len(LEARNED)} arms the intervals do not rule it out."
    return (
        "Stage I is for retrieval, not for layers: no kernel learned for separation or "
        "alignment gains one point, with an interval above zero, on two of the "
        f"{len(every)} tasks.{alone}{wide * (allowed > 0)}"
    )


def _possible(every: dict[str, dict[str, Gain | float]], arm: str) -> int:
    """On how many tasks an arm may gain one point."""
    gains = [arms.get(arm) for arms in every.values()]
    return sum(isinstance(gain, Gain) and gain.possible for gain in gains)


def _counts(gain: Any) -> bool:
    return isinstance(gain, Gain) and gain.counts


if __name__ == "__main__":
    print(table())
    print(f"\n{verdict()}")
