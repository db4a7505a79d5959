"""Time series: known sets by name, a simulation, and the user's csv files.

A csv has a header, a date in its first column and numbers in the others. What is wrong
with one is an error that names line and column, unless an option says what to do.
"""

import csv
import gzip
import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from uhop_jax._checks import check_choice
from uhop_jax._files import reading, user_path
from uhop_jax.data.dates import (
    DAY,
    SECOND,
    date_text,
    duration_text,
    months_in,
    parsed_dates,
    stamps,
    steps_of,
)
from uhop_jax.data.house import simulated_house
from uhop_jax.data.images import INSTALL, cause, check_reachable

ETT = (
    "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/"
    "1d16c8f4f943005d613b5bc962e9eeb06058cf07/ETT-small/"
)
WTH = (  # a copy with an address that does not change; the SHA-256 tells if it is ours
    "https://raw.githubusercontent.com/xun468/Time-GNN/"
    "68c3c6cd970f102b35139cff97eee4837a0fc200/datasets/"
)
LARGEST = 2**30  # bytes of text; its cells take ten times as much
HOST = "raw.githubusercontent.com"


class Source(NamedTuple):
    """Where a set comes from.

    Attributes:
      file: its name.
      place: address of the folder that holds it.
      sha256: of its text.
    """

    file: str
    place: str
    sha256: str


SOURCES = {
    "etth1": Source(
        "ETTh1.csv",
        ETT,
        "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066",
    ),
    "ettm1": Source(
        "ETTm1.csv",
        ETT,
        "6ce1759b1a18e3328421d5d75fadcb316c449fcd7cec32820c8dafda71986c9e",
    ),
    "wth": Source(
        "WTH.csv",
        WTH,
        "153fead3ea2a83dc5c4127d3994af6b167322f6f5e292c99491f43a2caf14cd4",
    ),
}
SERIES = ("demo", *SOURCES)

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none"))
OPTIONS = {
    "missing": ("error", "interpolate"),
    "gaps": ("error", "fill"),
    "duplicates": ("error", "first", "mean"),
    "unsorted": ("error", "sort"),
    "constant": ("error", "keep", "drop"),
}


class Series(NamedTuple):
    """Several series with their dates.

    Attributes:
      values: one column for each series, float64.
      names: of the columns.
      dates: of the rows, datetime64[s]; UTC if the file gives offsets.
      step: the commonest time between rows, timedelta64[s].
      calendar: "" if every row comes one `step` after the one before; else `weekdays`,
        `months` (same day of the month) or `month ends`.
    """

    values: Float[np.ndarray, "n D"]
    names: tuple[str, ...]
    dates: np.ndarray
    step: np.timedelta64
    calendar: str = ""

    def following(self, number: int) -> np.ndarray:
        """Dates of so many rows beyond the end, datetime64[s]."""
        places = 1 + np.arange(number)
        return stamps(self.dates[-1], places, self.step, self.calendar)

    @property
    def period(self) -> int:
        """Rows in a day; in a week of days, a year of weeks or months; 1 of years."""
        if self.calendar == "weekdays":
            return 5
        if self.calendar:
            return max(1, 12 // months_in(self.step))
        cycles = (DAY, 7 * DAY, 364 * DAY)
        return next((int(c // self.step) for c in cycles if self.step < c), 1)


def series(name: str, *, directory: str | Path | None = None, **options: Any) -> Series:
    """Loads series by name or from the user's csv, downloads a known set if need be.

    Args:
      name: `demo`, the simulation `uhop_jax.data.simulated_house`, without download;
        `etth1`, `ettm1` (Zhou et al., Informer, 2021) or `wth` (weather, NCEI); or the
        path of a csv, see `read_series`.
      directory: that holds `ETTh1.csv`, `ETTm1.csv`, `WTH.csv`, each also with `.gz`,
        or into which they go; None is pooch's own place.
      **options: of `read_series`, for every file.

    Raises:
      ValueError: if the name is unknown, a set is not there and cannot be downloaded,
        or a file is not as described.
    """
    if name == "demo":
        values, names = simulated_house()
        hours = np.arange(len(values)) * np.timedelta64(3600, "s")
        dates = np.datetime64("2023-11-01", "s") + hours
        return Series(values, names, dates, np.timedelta64(3600, "s"))
    if name in SOURCES:
        return read_series(_place(name, directory), **options)
    if not Path(name).suffix and not user_path(name).exists():
        raise ValueError(
            f"unknown series {name!r}; choose one of {', '.join(SERIES)}, or give the "
            "path of a csv"
        )
    return read_series(name, **options)


def read_series(
    path: str | Path,
    *,
    columns: Sequence[str] = (),
    date_format: str = "",
    missing: str = "error",
    gaps: str = "error",
    duplicates: str = "error",
    unsorted: str = "error",
    constant: str = "error",
) -> Series:
    """Reads a csv or csv.gz with a header, dates in the first column, numbers beside.

    Cells are parted by commas, semicolons (then a comma may be the decimal point) or
    tabs. Dates may be ISO 8601, month/day/year, day/month/year, day.month.year or have
    the month's English name; which of two readings is meant is told by all rows.
    The rows must follow each other by one step: a fixed time, weekdays, or months.

    Args:
      path: of the file.
      columns: names of the columns to read; none is all.
      date_format: of `strptime`, for other dates and where two readings fit.
      missing: for empty cells, `NA`, `nan`, `null`: `error`, or `interpolate` in time
        (the nearest value at the ends).
      gaps: for rows that are missing: `error`, or `fill` by interpolation.
      duplicates: for rows of one date: `error`, the `first`, or their `mean`.
      unsorted: for dates that go back: `error`, or `sort`.
      constant: for columns of one value: `error`, `keep` or `drop`.

    Raises:
      ValueError: if an option is unknown, the file cannot be read, or is not as
        described; it names the line and the column.
    """
    chosen = (missing, gaps, duplicates, unsorted, constant)
    for (option, choices), value in zip(OPTIONS.items(), chosen, strict=True):
        check_choice(option, value, choices)
    path = user_path(path)
    names, lines, cells = _table(path)
    wanted = _wanted(path, names, columns)
    dates = parsed_dates(path, names[0], lines, [row[0] for row in cells], date_format)
    values = np.empty((len(cells), len(wanted)))
    for place, number in enumerate(wanted):
        column = [row[number] for row in cells]
        values[:, place] = _numbers(path, names[number], lines, column)
    names = [names[number] for number in wanted]

    back = np.flatnonzero(np.diff(dates) < 0 * SECOND)
    if back.size and unsorted == "error":
        raise ValueError(
            f"{path}, line {lines[back[0] + 1]}: {date_text(dates[back[0] + 1])} comes "
            f"after {date_text(dates[back[0]])}; unsorted='sort' sorts the rows"
        )
    order = np.argsort(dates, kind="stable")
    dates, values, lines = dates[order], values[order], lines[order]

    again = np.flatnonzero(np.diff(dates) == 0 * SECOND)
    if again.size and duplicates == "error":
        raise ValueError(
            f"{path}, line {lines[again[0] + 1]}: {date_text(dates[again[0]])} is "
            f"there already, in line {lines[again[0]]}; duplicates='first' or 'mean' "
            "makes one row of them"
        )
    if again.size:
        dates, first, counts = np.unique(dates, return_index=True, return_counts=True)
        if duplicates == "mean":
            values = np.add.reduceat(values, first) / counts[:, None]
        else:
            values = values[first]
        lines = lines[first]
    if len(dates) < 3:
        raise ValueError(f"{path} holds {len(dates)} rows, a series needs at least 3")

    absent = np.isnan(values)
    if absent.any() and missing == "error":
        row, place = np.argwhere(absent)[0]
        raise ValueError(
            f"{path}, line {lines[row]}, column {names[place]!r}: the value is "
            f"missing ({absent.sum()} are); missing='interpolate' fills them in"
        )
    step, calendar, places = steps_of(path, lines, dates)
    number = int(places[-1]) + 1
    if number > len(dates):
        if gaps == "error" or number > 2 * len(dates):
            row = int(np.flatnonzero(np.diff(places) > 1)[0])
            advice = (
                "gaps='fill' interpolates them"
                if number <= 2 * len(dates)
                else f"the whole file lacks {number - len(dates)}, too many to fill"
            )
            raise ValueError(
                f"{path}, line {lines[row + 1]}: {date_text(dates[row + 1])} follows "
                f"{date_text(dates[row])}, with a step of {duration_text(step)} "
                f"{places[row + 1] - places[row] - 1} rows are missing between them; "
                f"{advice}"
            )
        dates = stamps(dates[0], np.arange(number), step, calendar)
    if absent.any() or number > len(values):
        values = _interpolated(values, places, number)

    flat = np.ptp(values, axis=0) == 0
    if flat.any() and constant == "error":
        place = int(flat.argmax())
        raise ValueError(
            f"{path}, column {names[place]!r} is {values[0, place]:g} in every row; "
            "constant='keep' or 'drop' keeps or drops such columns"
        )
    if constant == "drop":
        names = [name for name, x in zip(names, flat, strict=True) if not x]
        values = values[:, ~flat]
    if not names:
        raise ValueError(f"{path} holds no column that varies")
    return Series(values, tuple(names), dates, step, calendar)


# Files


def _place(name: str, directory: str | Path | None) -> Path:
    """The file of a known set, downloaded if it is not there."""
    source = SOURCES[name]
    if directory is None:
        pooch = _import_pooch(name)
        folder = Path(pooch.os_cache("uhop_jax"))
    else:
        folder = user_path(directory)
    for path in (folder / source.file, folder / f"{source.file}.gz"):
        if path.exists():
            text = _read(path).replace("\r\n", "\n")
            if hashlib.sha256(text.encode()).hexdigest() != source.sha256:
                raise ValueError(
                    f"{path} is not the {source.file} that {name} stands for (its "
                    "SHA-256 differs); give its path as data.name to read it as it is"
                )
            return path
    pooch = _import_pooch(name)
    check_reachable(name, HOST, folder)
    try:
        pooch.retrieve(
            source.place + source.file,
            f"sha256:{source.sha256}",
            fname=source.file,
            path=folder,
            progressbar=True,
        )
    except Exception as error:  # downloads fail in many ways
        raise ValueError(
            f"{name} could not be downloaded into data.dir {folder}: {cause(error)}"
        ) from error
    return folder / source.file


def _import_pooch(name: str) -> Any:
    try:
        import pooch
    except ImportError:
        raise ValueError(f"downloading {name} needs pooch: {INSTALL}") from None
    return pooch


def _read(path: Path) -> str:
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
            "series: give a part of it"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8") from None


def _table(path: Path) -> tuple[list[str], np.ndarray, list[list[str]]]:
    """Header, and line number and cells of each row that is not blank."""
    text = _read(path)
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
    if delimiter == ";":  # then the decimal point may be a comma
        rows = [[row[0], *(x.replace(",", ".") for x in row[1:])] for row in rows]
    if len(rows) < 4:
        raise ValueError(
            f"{path} holds {len(rows) - 1} rows, a series needs at least 3"
        )
    return names, np.asarray(lines[1:]), rows[1:]


def _wanted(path: Path, names: list[str], columns: Sequence[str]) -> list[int]:
    for name in columns:
        if name not in names[1:]:
            raise ValueError(
                f"{path} has no column {name!r} beside the dates; it has "
                f"{', '.join(names[1:])}"
            )
    return [names.index(n) for n in columns] or list(range(1, len(names)))


# Cells


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers(
    path: Path, name: str, lines: np.ndarray, cells: list[str]
) -> Float[np.ndarray, " n"]:
    """A column of numbers, NaN where they are missing."""
    cells = ["nan" if cell.lower() in MISSING else cell for cell in cells]
    try:
        numbers = np.asarray(cells, np.float64)
    except ValueError:
        row = next(i for i, cell in enumerate(cells) if not _is_number(cell))
        raise ValueError(
            f"{path}, line {lines[row]}, column {name!r}: {cells[row]!r} is no number; "
            "columns=(...) names the columns to read"
        ) from None
    if np.isinf(numbers).any():
        row = int(np.isinf(numbers).argmax())
        raise ValueError(
            f"{path}, line {lines[row]}, column {name!r}: {cells[row]!r} is not finite"
        )
    if np.isnan(numbers).all():
        raise ValueError(f"{path}, column {name!r} holds no value at all")
    return numbers


def _interpolated(
    values: Float[np.ndarray, "m D"],
    places: Int[np.ndarray, " m"],
    number: int,
) -> Float[np.ndarray, "n D"]:
    """Values at every place, linear between the known ones, constant beyond them."""
    filled = np.empty((number, values.shape[1]))
    for column, known in enumerate((~np.isnan(values)).T):
        filled[:, column] = np.interp(
            np.arange(number), places[known], values[known, column]
        )
    return filled
