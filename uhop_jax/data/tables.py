"""Tables in text: a header, rows of cells, numbers with decimal points or commas.

A fault of a table is an error that names line and column, and shows the cell as the
file has it.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

MISSING = frozenset(("", "na", "n/a", "<na>", "#n/a", "nan", "null", "none"))
MARKS = {"point": ".", "comma": ","}
DECIMALS = ("auto", *MARKS)


class Table(NamedTuple):
    """A table of text.

    Attributes:
      path: of the file, for errors.
      names: of the columns.
      lines: number of the line in the file, for each row.
      cells: of the rows, without the header.
      delimiter: between cells.
    """

    path: Path
    names: list[str]
    lines: Int[np.ndarray, " n"]
    cells: list[list[str]]
    delimiter: str

    def columns(self, names: Sequence[str]) -> list[int]:
        """Indices of columns beside the first, by their names; () is all."""
        for name in names:
            if name not in self.names[1:]:
                raise ValueError(
                    f"{self.path} has no column {name!r} beside the dates; it has "
                    f"{', '.join(self.names[1:])}"
                )
        return [self.names.index(n) for n in names] or [*range(1, len(self.names))]


def read_table(path: Path, text: str) -> Table:
    """Splits a text into a header and rows of cells; blank lines are left out.

    Args:
      path: of the file, for errors.
      text: lines of cells, with commas, semicolons or tabs between.

    Raises:
      ValueError: if the header is missing or names a column twice, there is one column,
        a row has another number of cells, or there are fewer than 3 rows.
    """
    head = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines, rows = [], []
    try:
        for row in reader:
            if any(row):
                lines.append(reader.line_num)
                rows.append([cell.strip() for cell in row])
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty")
    names = [name or f"column {i + 1}" for i, name in enumerate(rows[0])]
    if len(names) < 2:
        raise ValueError(
            f"{path} holds one column, {names[0]!r}; it needs dates in the first and "
            "numbers in others"
        )
    if re.match(r"[+-]?\d", rows[0][0]) and any(map(_is_number, rows[0][1:])):
        raise ValueError(
            f"{path}, line {lines[0]}: there is no header, the first line must name "
            f"the columns, got {rows[0][0]}{delimiter}{rows[0][1]}"
        )
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ValueError(f"{path}, line {lines[0]}: two columns are named {twice[0]!r}")
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(names):
            raise ValueError(
                f"{path}, line {line}: {len(row)} cells, the header has {len(names)}"
            )
    if len(rows) < 4:
        raise ValueError(
            f"{path} holds {len(rows) - 1} rows, a series needs at least 3"
        )
    return Table(path, names, np.asarray(lines[1:]), rows[1:], delimiter)


def numbers(
    table: Table, columns: Sequence[int], decimal: str, missing_values: Sequence[Any]
) -> Float[np.ndarray, "n k"]:
    """Some columns of a table as numbers, NaN where a value is missing.

    Args:
      table: of text.
      columns: indices of the columns.
      decimal: `point`, `comma`, or `auto`, the mark by which all cells are numbers; the
        second mark may separate thousands.
      missing_values: cells, or numbers, that mark a missing value.

    Raises:
      ValueError: if a cell is no number or not finite, two decimal marks fit all cells
        and make a difference, or a column holds no number.
    """
    cells = [row[column] for row in table.cells for column in columns]
    marks = MISSING | {str(x).strip().lower() for x in missing_values}
    cells = ["nan" if cell.lower() in marks else cell for cell in cells]

    def place(index: int) -> str:
        row, column = divmod(index, len(columns))
        name = table.names[columns[column]]
        return f"{table.path}, line {table.lines[row]}, column {name!r}"

    tried = [decimal] if decimal in MARKS else list(MARKS)
    if decimal == "auto" and table.delimiter == "," and "," not in "".join(cells):
        tried = ["point"]
    readings = {mark: _read(cells, MARKS[mark]) for mark in tried}
    fitting = {m: values for m, (values, wrong) in readings.items() if not wrong.any()}
    if not fitting:
        mark, (_, wrong) = min(readings.items(), key=lambda x: x[1][1].sum())
        cell = cells[index := int(wrong.argmax())]
        other = [m for m in MARKS if m != mark and not _read([cell], MARKS[m])[1][0]]
        if other:
            why = f"is no number with a decimal {mark}, but with a decimal {other[0]}"
            why += f"; decimal={decimal!r} reads all cells of a file in one way"
        else:
            why = (
                f"is no number; if it marks a missing value, missing_values=({cell!r},)"
                " says so; columns=(...) names the columns to read"
            )
        raise ValueError(f"{place(index)}: {cell!r} {why}")
    values, *rest = fitting.values()
    for second in rest:
        if (different := (values != second) & ~np.isnan(values)).any():
            index = int(different.argmax())
            raise ValueError(
                f"{place(index)}: {cells[index]!r} is {values[index]:.15g} or "
                f"{second[index]:.15g}, and no cell of the file tells which; "
                "decimal='point' or 'comma' does"
            )
    if np.isinf(values).any():
        index = int(np.isinf(values).argmax())
        raise ValueError(f"{place(index)}: {cells[index]!r} is not finite")
    coded = [float(x) for x in map(str, missing_values) if _is_number(x)]
    values[np.isin(values, coded)] = np.nan
    values = values.reshape(len(table.cells), len(columns))
    empty = np.isnan(values).all(0)
    if empty.any():
        name = table.names[columns[int(empty.argmax())]]
        raise ValueError(f"{table.path}, column {name!r} holds no value at all")
    return values


def _read(
    cells: Sequence[str], decimal: str
) -> tuple[Float[np.ndarray, " n"], np.ndarray]:
    """Numbers of cells with a decimal mark, and whether each cell is no number.

    The second mark may separate all thousands of a cell, not after a leading zero.
    """
    thousands = {".": ",", ",": "."}[decimal]
    number = re.compile(
        rf"[+-]?(?=[{decimal}]?\d)(?:\d+|[1-9]\d{{0,2}}(?:[{thousands}]\d{{3}})+)?"
        rf"(?:[{decimal}]\d*)?(?:e[+-]?\d+)?|nan|[+-]?inf(?:inity)?",
        re.IGNORECASE | re.ASCII,
    )
    wrong = np.asarray([number.fullmatch(cell) is None for cell in cells])
    to_python = str.maketrans({decimal: ".", thousands: None})
    texts = ["nan" if bad else x for x, bad in zip(cells, wrong, strict=True)]
    values = np.asarray([x.translate(to_python) for x in texts], np.float64)
    return values, wrong


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
