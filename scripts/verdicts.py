"""Verdicts, and the rules by which they follow from numbers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from uhop_jax import records

HOLDS, PARTLY, FAILS = "holds", "holds partly", "does not hold"
NOT_AS_STATED = "not reproducible as stated"
UNDECIDED, UNTESTED = "undecided", "not tested"
VERDICTS = (HOLDS, PARTLY, FAILS, NOT_AS_STATED, UNDECIDED, UNTESTED)

FOR, OPEN, AGAINST = 1, 0, -1  # one reading: for the claim, open, or against it
LEAST = (
    0.01  # differences below this are ties, and errors below it leave nothing to win
)


def of_readings(readings: Sequence[int]) -> str:
    """Holds if all readings are for the claim, fails if all are against it."""
    if not readings:
        return UNTESTED
    if min(readings) == FOR:
        return HOLDS
    return FAILS if max(readings) == AGAINST else PARTLY


def of_value(value: float, full: float, some: float) -> int:
    """A reading for the claim from `full` on, and against it below `some`."""
    return FOR if value >= full else AGAINST if value < some else OPEN


def of_gain(gain: float, error: float, stated: float) -> str:
    """The verdict on a gain in learning that the paper states.

    Where the paper has no gain, the claim is that there is no gain. One seed has no
    standard error, and decides nothing.
    """
    if not np.isfinite(error):
        return UNDECIDED
    significant = gain > 2 * error
    if stated <= 0:
        return FAILS if significant else HOLDS
    if significant:
        return HOLDS if gain >= stated / 2 else PARTLY
    return UNDECIDED if gain + 2 * error >= stated / 2 else FAILS


# -- Paired differences ----------------------------------------------------------------


class Difference(NamedTuple):
    """A mean of paired differences, and the half-width of its 95 % interval."""

    mean: float
    half: float

    @property
    def sign(self) -> int:
        """1 or -1 beyond the interval, 0 within it."""
        if abs(self.mean) <= max(self.half, LEAST):
            return 0
        return 1 if self.mean > 0 else -1

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ± {self.half:.2g}"


def difference(a: Mapping[int, float], b: Mapping[int, float]) -> Difference:
    """`a - b` over the memory sets that both have seen."""
    pairs = [a[run] - b[run] for run in sorted(a.keys() & b.keys())]
    half = records.half_width(pairs) if len(pairs) > 1 else float("inf")
    return Difference(float(np.mean(pairs)), half)


class Tally(NamedTuple):
    """Numbers of cells won, tied and lost, and of cells that could be won."""

    won: int = 0
    tied: int = 0
    lost: int = 0
    winnable: int = 0

    @property
    def total(self) -> int:
        """Number of cells."""
        return self.won + self.tied + self.lost

    @property
    def reading(self) -> int:
        """For the claim, open, or against it, by the rule of cells."""
        if self.lost > self.total / 2:
            return AGAINST
        mostly = self.lost <= self.total / 10 and self.won >= self.winnable / 2
        return FOR if mostly else OPEN

    def with_cell(self, change: Difference, *, winnable: bool = True) -> "Tally":
        """The tally with one more cell, won where the change is negative."""
        won, lost = change.sign < 0, change.sign > 0
        return Tally(
            self.won + won,
            self.tied + (not won and not lost),
            self.lost + lost,
            self.winnable + winnable,
        )

    def __str__(self) -> str:
        return f"{self.won} won, {self.tied} tied, {self.lost} lost"


# -- Samples ---------------------------------------------------------------------------


def gain(
    plain: Sequence[float], other: Sequence[float], scale: float = 1.0
) -> tuple[float, float]:
    """The difference of two means and its standard error, infinite for one seed."""
    change = scale * float(np.mean(other) - np.mean(plain))
    if min(len(plain), len(other)) < 2:
        return change, float("inf")
    parts = [np.var(x, ddof=1) / len(x) for x in (plain, other)]
    return change, scale * float(np.sqrt(sum(parts)))
