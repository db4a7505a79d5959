"""Tables of results: csv files, paired differences, curves and text."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from uhop_jax.plotting import Curve
from uhop_jax.storage import write_whole

CELL = ("memories", "corruption", "level")  # columns that identify a cell
ROUNDING = 1e-12  # smaller numbers are shown as 0


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes records that share their keys as a csv with a header."""
    text = csv_text(rows)
    write_whole(path, lambda partial: partial.write_bytes(text))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Records that share their keys as a csv with a header, in UTF-8.

    Characters without UTF-8, as in some names of files, are escaped.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def csv_lines(text: bytes) -> list[list[str]]:
    """The cells of each line of a csv."""
    return list(csv.reader(io.StringIO(text.decode("utf-8"), newline=""), strict=True))


def differences(rows: Sequence[Mapping[str, Any]], baseline: str) -> list[dict]:
    """Paired differences of the error between each method and a baseline, by cell.

    Args:
      rows: records with `memories`, `corruption`, `level`, `method`, `setting`, `run`
        and `error`; methods saw the same memories and queries in a run.
      baseline: the method that all are compared with.

    Returns:
      Records with the mean difference, and the half-width of its 95 % confidence
      interval by Student's t ("" for a single run).
    """
    table = []
    for cell, members in grouped(labelled(rows), CELL).items():
        base = {r["run"]: r["error"] for r in members if r["method"] == baseline}
        for (label,), group in grouped(members, ("label",)).items():
            pairs = [r["error"] - base[r["run"]] for r in group if r["run"] in base]
            if pairs:
                row = dict(zip(CELL, cell, strict=True))
                row |= {"method": label, "baseline": baseline, "runs": len(pairs)}
                row["difference"] = float(np.mean(pairs))
                row["ci95"] = half_width(pairs) if len(pairs) > 1 else ""
                table.append(row)
    return table


def labelled(rows: Sequence[Mapping[str, Any]]) -> list[dict]:
    """Records with a `label`: the method, with its setting if it has several."""
    frame = pd.DataFrame(rows)
    several = frame.method[frame.duplicated(["method", *CELL, "run"])].unique()
    return [
        dict(row, label=f"{row['method']}, {row['setting']}")
        if row["method"] in several
        else dict(row, label=row["method"])
        for row in rows
    ]


def deviation(sample: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 for a single value."""
    return float(np.std(sample, ddof=1)) if len(sample) > 1 else 0.0


def half_width(sample: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean, by Student's t; 0 for a single value."""
    from scipy.stats import t

    n = len(sample)
    return float(t.ppf(0.975, n - 1) * deviation(sample) / n**0.5) if n > 1 else 0.0


def grouped(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> dict[tuple, list]:
    """Records by the values of some columns, in order of appearance."""
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def curves(
    rows: Sequence[Mapping[str, Any]], x: str, y: str, by: str, interval: bool = False
) -> dict[str, Curve]:
    """Mean and standard deviation of `y` against `x`, one curve for each value of `by`.

    With `interval`, half of the 95 % interval of the mean in place of the deviation.
    """
    spread = half_width if interval else deviation
    frame = pd.DataFrame(rows, columns=[x, y, by])
    by_name = {}
    for name, group in frame[frame[y] != ""].groupby(by, sort=False):
        samples = group.groupby(x)[y].agg(list)  # pandas itself leaves NaN out
        means = [float(np.mean(sample)) for sample in samples]
        by_name[name] = Curve([*samples.index], means, [spread(s) for s in samples])
    return by_name


def of_least(rows: Sequence[Mapping[str, Any]], by: Sequence[str], value: str) -> list:
    """The records of the group whose mean `value` is least; `by` gives the groups."""
    groups = grouped(rows, by).values()
    return min(groups, key=lambda group: ranked(np.mean([row[value] for row in group])))


def ranked(error: float | np.floating) -> float:
    """The key that an error is sorted by: NaN is the largest error."""
    return math.inf if np.isnan(error) else float(error)


def pivot(rows: Sequence[Mapping[str, Any]], value: str) -> str:
    """Text table of `value`, mean ± standard deviation: methods by cells."""
    table = pd.DataFrame(labelled(rows)).pivot_table(
        value, "label", CELL, lambda x: mean_and_spread([*x]), sort=False
    )
    cells = (f"M={m} {kind} {level:g}" for m, kind, level in table.columns)
    lines = table.fillna("-").reset_index().to_numpy().tolist()
    return aligned([["method", *cells], *lines])


def mean_and_spread(sample: Sequence[float]) -> str:
    """`mean ± standard deviation`; a dash for no value."""
    if not sample:
        return "-"
    spread = f" ± {_number(deviation(sample)):.2g}" * (len(sample) > 1)
    return f"{_number(np.mean(sample)):.3g}{spread}"


def _number(x: Any) -> float:
    """The number as a float, zero where rounding made it."""
    return 0.0 if abs(x) < ROUNDING else float(x)


def mean_and_interval(sample: Sequence[float]) -> str:
    """`mean ± half of its 95 % interval`, of a sample in per cent."""
    spread = f" ± {half_width(sample):.1f}" * (len(sample) > 1)
    return f"{np.mean(sample):.1f}{spread}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as text: the first column left-aligned, further ones right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join(cells))
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])
