"""Tables of the README, written between their marks from result files."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare_reference
import numpy as np
from files import RESULTS, rows_of

README = Path(__file__).parent.parent / "README.md"
FOUND = ("calibrated", "limit")  # the other methods of these files are fixed
GRID = (
    ("mask 50 %", "mask", 0.5),
    ("mask 80 %", "mask", 0.8),
    ("mask 95 %", "mask", 0.95),
    ("noise 0.5, clamped", "noise", 0.5),
    ("noise 1, clamped", "noise", 1.0),
    ("noise 0.5, folded", "folded_noise", 0.5),
    ("noise 1, folded", "folded_noise", 1.0),
)
DEPENDENT = (
    ("a quarter under one square", "block", 0.25),
    ("blur, 2 pixels", "blur", 2.0),
    ("shift, 2 pixels", "shift", 2.0),
)
AGREEMENT = (
    ("capacity, MNIST", "reference_mnist"),
    ("capacity, CIFAR-10", "reference_cifar"),
    ("noise, MNIST", "reference_noise_mnist"),
    ("noise, CIFAR-10", "reference_noise_cifar"),
)


def with_error(sample: Sequence[float]) -> str:
    """Mean and its standard error."""
    error = np.std(sample, ddof=1) / len(sample) ** 0.5
    return f"{np.mean(sample):.3g} ± {error:.1g}"


def line(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def comparison(study: str, memories: int, cells: Sequence[tuple], limit: bool) -> str:
    """The best fixed similarity, the calibrated memory and the limit, by corruption.

    What each knows besides the memories stands in the head: a fixed similarity nothing,
    but that its beta was chosen under this corruption.
    """
    head = [f"M = {memories}"]
    for data in ("MNIST", "CIFAR-10"):
        head.append(f"{data}: best fixed similarity (its beta fits the corruption)")
        head.append("calibrated (corrupts copies itself)")
        if limit:
            head.append("limit (knows the law of the corruption)")
    text = [line(*head), "|" + "---|" * len(head)]
    rows = {data: rows_of(f"{study}_{data}") for data in ("mnist", "cifar")}
    for title, kind, level in cells:
        found = [title]
        for data in rows:
            where = {"corruption": kind, "level": level, "memories": memories}
            samples = _samples(rows[data], where)
            fixed = {k: v for k, v in samples.items() if k not in FOUND}
            best = min(fixed, key=lambda name: float(np.mean(fixed[name])))
            found.append(f"{best} {with_error(fixed[best])}")
            found += [with_error(samples[name]) for name in FOUND[: 1 + limit]]
        text.append(line(*found))
    return "\n".join(text)


def _samples(rows: Sequence[dict], where: dict[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if all(row[key] == value for key, value in where.items()):
            found.setdefault(row["method"], []).append(row["error"])
    return found


def agreement() -> str:
    """How many numbers of the reference protocol agree with the released code's."""
    text = [
        "| run | numbers | within 2 standard errors | within 3 |",
        "|---|---|---|---|",
    ]
    for title, name in AGREEMENT:
        z = [abs(row[-1]) for row in compare_reference.compare(RESULTS / f"{name}.csv")]
        sets = 1 + max(row["run"] for row in rows_of(name))
        counts = len(z), sum(x <= 2 for x in z), sum(x <= 3 for x in z)
        text.append(line(f"{title}, {sets} sets", *map(str, counts)))
    return "\n".join(text)


TABLES = {
    "agreement": agreement,
    "grid": lambda: comparison("grid", 500, GRID, True),
    "dependent": lambda: comparison("dependent", 100, DEPENDENT, False),
}


def written(text: str) -> str:
    """The README with its tables as the files have them.

    Raises:
      ValueError: if a mark is missing.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md must have {begin} and {end} once each")
        block = f"{begin}\n{table()}\n{end}"
        text = re.sub(f"{begin}.*{end}", lambda _, b=block: b, text, flags=re.DOTALL)
    return text
