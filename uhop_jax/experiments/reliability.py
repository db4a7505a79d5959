"""Reliability of confidences: how often an answer given with confidence is right."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from uhop_jax import records
from uhop_jax._checks import check_finite
from uhop_jax.plotting import Curve, Panel, reliability_panel

BINS = 10  # of equal width
Z = 1.96  # standard errors of a 95 % interval


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Confidences and outcomes, summed in bins of confidence.

    Attributes:
      totals: `(bins, 3)`: how many answers a bin has, and the sums of their confidences
        and of their outcomes.
    """

    totals: Float[np.ndarray, "bins 3"]

    @classmethod
    def of(cls, confidence: ArrayLike, right: ArrayLike) -> "Reliability":
        """The reliability of answers.

        Args:
          confidence: probabilities in `[0, 1]` that answers are right.
          right: whether they are.

        Raises:
          ValueError: if a confidence is not finite.
        """
        confidence, right = np.asarray(confidence, float), np.asarray(right, float)
        check_finite("confidence", confidence)
        place = np.minimum((confidence * BINS).astype(int), BINS - 1)
        totals = np.zeros((BINS, 3))
        rows = np.stack([np.ones_like(right), confidence, right], -1)
        np.add.at(totals, place, rows)
        return cls(totals)

    def __add__(self, other: "Reliability") -> "Reliability":
        return Reliability(self.totals + other.totals)

    @property
    def error(self) -> float:
        """The expected calibration error.

        It is the mean distance of confidence and frequency in a bin, over all answers.
        """
        number, confidence, right = self.totals.T
        return float(np.abs(confidence - right).sum() / number.sum())

    @property
    def curve(self) -> Curve:
        """Frequency against confidence, with 95 % intervals; none for empty bins.

        The intervals are Wilson's (1927): they lie within `[0, 1]`, and are no points
        where all answers are right.
        """
        number, confidence, right = self.totals[self.totals[:, 0] > 0].T
        mean = right / number
        weight = Z**2 / number
        center = (mean + weight / 2) / (1 + weight)
        half = np.sqrt(weight * (mean * (1 - mean) + weight / 4)) / (1 + weight)
        spread = np.stack([mean - (center - half), center + half - mean], -1)
        spread = np.maximum(spread, 0.0)  # a half of zero, before rounding
        return Curve((confidence / number).tolist(), mean.tolist(), spread.tolist())

    def __str__(self) -> str:
        """The totals, as tables keep them."""
        return " ".join(":".join(f"{x:.6g}" for x in row) for row in self.totals)

    @classmethod
    def parsed(cls, text: str) -> "Reliability":
        """The totals of which `str` is the text."""
        rows = [[float(x) for x in row.split(":")] for row in text.split()]
        return cls(np.asarray(rows))


def reliability_panels(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """A diagram of each kind of corruption, methods with confidences as curves.

    All memory sets, sizes, levels and numbers of queries are in one curve.
    """
    rows = [row for row in rows if row["reliability"]]
    panels = []
    for (kind,), group in records.grouped(rows, ("corruption",)).items():
        curves = {}
        for (name,), lot in records.grouped(group, ("method",)).items():
            first, *others = (Reliability.parsed(row["reliability"]) for row in lot)
            total = sum(others, first)
            curves[f"{name}, error {total.error:.3f}"] = total.curve
        panels.append(reliability_panel(kind.replace("_", " "), curves))
    return panels
