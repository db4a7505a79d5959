"""What the paper claims from experiments: rows of the report and what judges them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from verdicts import FAILS, HOLDS, NOT_AS_STATED, PARTLY, UNDECIDED, UNTESTED

from uhop_jax import records

Rows = Sequence[Mapping[str, Any]]
Results = Mapping[str, Rows]


class Judged(NamedTuple):
    """Our numbers in three columns of evidence, and a verdict.

    Attributes:
      reference: as the authors' code runs.
      paper: as the text has it.
      fair: every method at its own best.
      verdict: one of `verdicts.VERDICTS`.
    """

    reference: str = "-"
    paper: str = "-"
    fair: str = "-"
    verdict: str = UNTESTED


class Claim(NamedTuple):
    """A row of the report.

    Attributes:
      labels: of the paper.
      says: what it states.
      studies: whose result files the row is made from.
      judge: makes the row from those that exist.
      rule: how the verdict follows from the numbers.
      missing: why it is not tested, and what that would cost.
    """

    labels: tuple[str, ...]
    says: str
    studies: tuple[str, ...]
    judge: Callable[[Results], Judged]
    rule: str
    missing: str = ""


def judged(claim: Claim, results: Results) -> Judged:
    """The row's numbers, or that it is not tested.

    With a study missing a claim neither holds nor fails: part of the evidence is out.
    """
    there = {name: results[name] for name in claim.studies if results.get(name)}
    if not there:
        return Judged()
    found = claim.judge(there)
    if len(there) < len(claim.studies):
        less = {HOLDS: PARTLY, FAILS: UNDECIDED, NOT_AS_STATED: UNDECIDED}
        return found._replace(verdict=less.get(found.verdict, found.verdict))
    return found


def spread(sample: Sequence[float], unit: str = "") -> str:
    """Mean and standard deviation, with a unit."""
    return records.mean_and_spread(list(sample)) + unit
