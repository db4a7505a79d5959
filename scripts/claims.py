"""Claims of the paper from experiments: rows of the report, and their judges."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from verdicts import FAILS, HOLDS, NOT_AS_STATED, PARTLY, UNDECIDED, UNTESTED

from uhop_jax import records

Rows = Sequence[Mapping[str, Any]]
Results = Mapping[str, Rows]


class Judged(NamedTuple):
    """The evidence on a claim in three readings, and a verdict.

    Attributes:
      reference: numbers measured as the authors' code runs.
      paper: numbers measured as the text of the paper describes.
      fair: numbers with every method at its own best settings.
      verdict: one of `verdicts.VERDICTS`.
    """

    reference: str = "-"
    paper: str = "-"
    fair: str = "-"
    verdict: str = UNTESTED


class Claim(NamedTuple):
    """A row of the report.

    Attributes:
      labels: labels of the paper's sections, figures, tables and equations.
      says: the statement of the paper.
      studies: names of the studies whose result files are read.
      judge: function from the rows of the existing result files to the judgement.
      rule: how the verdict follows from the numbers.
      missing: why the claim is not tested, and what a test would cost.
      compared: studies that are printed for comparison and decide no verdict.
      part: ending of the files that are read: "" for `NAME.csv`, "_curves" for
        `NAME_curves.csv`.
    """

    labels: tuple[str, ...]
    says: str
    studies: tuple[str, ...]
    judge: Callable[[Results], Judged]
    rule: str
    missing: str = ""
    compared: tuple[str, ...] = ()
    part: str = ""


def judged(claim: Claim, results: Results) -> Judged:
    """The judgement of a claim; "not tested" if no result file exists.

    A claim with a missing study neither holds nor fails, since part of the evidence is
    missing, unless the study is in `compared`.
    """
    files = {name: results.get(name + claim.part) for name in claim.studies}
    present = {name: rows for name, rows in files.items() if rows}
    if not present:
        return Judged()
    judgement = claim.judge(present)
    if files.keys() - present.keys() - set(claim.compared):
        less = {HOLDS: PARTLY, FAILS: UNDECIDED, NOT_AS_STATED: UNDECIDED}
        return judgement._replace(
            verdict=less.get(judgement.verdict, judgement.verdict)
        )
    return judgement


def spread(sample: Sequence[float], unit: str = "") -> str:
    """Mean and standard deviation, with a unit."""
    return records.mean_and_spread(list(sample)) + unit
