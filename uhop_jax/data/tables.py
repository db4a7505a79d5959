"""Tables in text: a header, rows of cells, numbers with decimal points or commas.

A table is a data frame of text whose index is the line of the file. A fault of a table
is an error that names line and column, and shows the cell as the file has it.
"""

import csv
import gzip
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from uhop_jax._files import reading

MISSING = frozenset(("", "na", "n/a", "<na>", "#n/a", "nan", "null", "none"))
MARKS = {"point": ".", "comma": ","}
DECIMALS = ("auto", *MARKS)
LARGEST = 2**30  # bytes of text; the cells take ten times as much memory


def text_of(path: Path) -> str:
    """The text of a file, which may be packed by gzip.

    Raises:
      ValueError: if the file does not exist, cannot be read, is too large, or is not in
        UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    with reading(path, "csv or csv.gz"), path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        source: Any = gzip.GzipFile(fileobj=file) if packed else file
        raw = source.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise ValueError(
            f"{path} holds more than {LARGEST / 2**20:.0f} MiB of text, too much for a "
            "table: give a part of it"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8") from None


def cells_of(path: Path, text: str) -> tuple[str, dict[int, list[str]]]:
    """The delimiter of a text, and the cells of its lines by their numbers, from 1.

    Commas, semicolons or tabs are between the cells. Blank lines are left out.

    Raises:
      ValueError: if a line cannot be split, or no line has cells.
    """
    delimiter = max(",;\t", key=text.lstrip().partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = {}
    try:
        for row in reader:
            if any(row):
                rows[reader.line_num] = [cell.strip() for cell in row]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty")
    return delimiter, rows


def read_table(path: Path, text: str) -> pd.DataFrame:
    """Splits a text into a header and rows of cells, by `cells_of`.

    Raises:
      ValueError: if the header is missing or names a column twice, there is one column,
        a row has another number of cells, or there are fewer than 3 rows.
    """
    delimiter, rows = cells_of(path, text)
    first, header = next(iter(rows.items()))
    names = [name or f"column {i + 1}" for i, name in enumerate(header)]
    if len(names) < 2:
        raise ValueError(
            f"{path} holds one column, {names[0]!r}; it needs dates in the first and "
            "numbers in others"
        )
    if re.match(r"[+-]?\d", header[0]) and any(map(is_number, header[1:])):
        raise ValueError(
            f"{path}, line {first}: there is no header, the first line must name the "
            f"columns, got {header[0]}{delimiter}{header[1]}"
        )
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"{path}, line {first}: two columns are named {twice[0]!r}")
    for line, row in rows.items():
        if len(row) != len(names):
            raise ValueError(
                f"{path}, line {line}: {len(row)} cells, the header has {len(names)}"
            )
    del rows[first]
    if len(rows) < 3:
        raise ValueError(f"{path} holds {len(rows)} rows, a series needs at least 3")
    table = pd.DataFrame([*rows.values()], [*rows], names, dtype=str)
    table.attrs["delimiter"] = delimiter
    return table


def chosen(path: Path, table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Columns beside the first, by their names; () is all."""
    known = table.columns[1:]
    for name in names:
        if name not in known:
            raise ValueError(
                f"{path} has no column {name!r} beside the dates; it has "
                f"{', '.join(known)}"
            )
    return table[[*names] or known]


def numbers(
    path: Path, table: pd.DataFrame, decimal: str, missing_values: Sequence[Any]
) -> pd.DataFrame:
    """A table of text as numbers, NaN where a value is missing.

    The decimal mark is `point`, `comma`, or `auto`, by which all cells are numbers; the
    second mark may separate thousands. Missing values are cells, or numbers.

    Raises:
      ValueError: if a cell is no number or not finite, two decimal marks fit all cells
        and make a difference, or a column holds no number.
    """
    cells = table.stack(future_stack=True)  # indexed by line and column
    marks = MISSING | {str(x).strip().lower() for x in missing_values}
    cells = cells.mask(cells.str.lower().isin(marks), "nan")

    def fail(wrong: pd.Series, why: str) -> None:
        line, name = place = wrong.idxmax()
        raise ValueError(
            f"{path}, line {line}, column {name!r}: {cells[place]!r} {why}"
        )

    tried = [decimal] if decimal in MARKS else list(MARKS)
    commas = table.attrs["delimiter"] != "," or cells.str.contains(",").any()
    if decimal == "auto" and not commas:
        tried = ["point"]
    readings = {mark: _read(cells, MARKS[mark]) for mark in tried}
    unread = {mark: x.isna() & (cells != "nan") for mark, x in readings.items()}
    fitting = [readings[mark] for mark, wrong in unread.items() if not wrong.any()]
    if not fitting:
        mark, wrong = min(unread.items(), key=lambda x: x[1].sum())
        cell = cells[[wrong.idxmax()]]
        other = [m for m in MARKS if m != mark and _read(cell, MARKS[m]).notna().all()]
        if other:
            why = f"is no number with a decimal {mark}, but with a decimal {other[0]}"
            why += "; all cells of a file are read in one way"
        else:
            why = (
                "is no number; if it marks a missing value, missing_values="
                f"({cell.iloc[0]!r},) says so; columns=(...) names the columns to read"
            )
        fail(wrong, why)
    values, *rest = fitting
    for second in rest:
        if (different := (values != second) & values.notna()).any():
            one, two = values[different].iloc[0], second[different].iloc[0]
            why = f"is {one:.15g} or {two:.15g}, and no cell of the file tells which; "
            fail(different, why + "decimal='point' or 'comma' does")
    if np.isinf(values).any():
        fail(np.isinf(values), "is not finite")
    coded = [float(x) for x in map(str, missing_values) if is_number(x)]
    known = values.mask(values.isin(coded)).to_numpy().reshape(table.shape)
    frame = pd.DataFrame(known, table.index, table.columns)
    if (empty := frame.isna().all()).any():
        raise ValueError(f"{path}, column {empty.idxmax()!r} holds no value at all")
    return frame


def _read(cells: pd.Series, decimal: str) -> pd.Series:
    """Numbers of cells with a decimal mark; NaN for cells that are no numbers.

    The second mark may separate all thousands of a cell, not after a leading zero.
    """
    thousands = {".": ",", ",": "."}[decimal]
    number = re.compile(
        rf"[+-]?(?=[{decimal}]?\d)(?:\d+|[1-9]\d{{0,2}}(?:[{thousands}]\d{{3}})+)?"
        rf"(?:[{decimal}]\d*)?(?:e[+-]?\d+)?|nan|[+-]?inf(?:inity)?",
        re.IGNORECASE | re.ASCII,
    )
    python = str.maketrans({decimal: ".", thousands: None})
    texts = [x.translate(python) if number.fullmatch(x) else "nan" for x in cells]
    return pd.Series(np.asarray(texts, np.float64), cells.index)


def is_number(cell: str) -> bool:
    """Whether the cell is a number, NaN and infinity too; `1_0` is none."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell
