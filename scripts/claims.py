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
      beside: those of the studies that stand beside and decide nothing.
      part: which files of the studies it reads: "" for `NAME.csv`, or an ending.
    """

    labels: tuple[str, ...]
    says: str
    studies: tuple[str, ...]
    judge: Callable[[Results], Judged]
    rule: str
    missing: str = ""
    beside: tuple[str, ...] = ()
    part: str = ""


def judged(claim: Claim, results: Results) -> Judged:
    """The row's numbers, or that it is not tested.

    With a study missing a claim neither holds nor fails, since part of the evidence is
    out, unless that study decides nothing.
    """
    files = {name: results.get(name + claim.part) for name in claim.studies}
    present = {name: rows for name, rows in files.items() if rows}
    if not present:
        return Judged()
    judgement = claim.judge(present)
    if files.keys() - present.keys() - set(claim.beside):
        less = {HOLDS: PARTLY, FAILS: UNDECIDED, NOT_AS_STATED: UNDECIDED}
        return judgement._replace(
            verdict=less.get(judgement.verdict, judgement.verdict)
        )
    return judgement


def spread(sample: Sequence[float], unit: str = "") -> str:
    """Mean and standard deviation, with a unit."""
    return records.mean_and_spread(list(sample)) + unit
