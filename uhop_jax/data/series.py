"""Time series: known sets by name, a simulation, and the user's csv files.

A csv has a header, a date in its first column and numbers in all further columns. A
fault of a csv is an error that names line and column, unless an option mends it.
"""

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from uhop_jax._checks import check_choice
from uhop_jax._files import user_path
from uhop_jax.data.dates import (
    DAY,
    Step,
    clock_of,
    months_of,
    parsed_dates,
    stamps,
    step_of,
    step_text,
)
from uhop_jax.data.house import simulated_house
from uhop_jax.data.images import download, import_pooch
from uhop_jax.data.tables import DECIMALS, chosen, numbers, read_table, text_of
from uhop_jax.data.windows import constant_columns

ETT = (
    "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/"
    "1d16c8f4f943005d613b5bc962e9eeb06058cf07/ETT-small/"
)
WTH = (  # a copy at an address that does not change
    "https://raw.githubusercontent.com/xun468/Time-GNN/"
    "68c3c6cd970f102b35139cff97eee4837a0fc200/datasets/"
)


class Source(NamedTuple):
    """The file of a known set on the web."""

    file: str
    place: str  # address of its folder
    sha256: str  # of its text


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

FAR = 1000  # standard deviations, of the column without the value
OPTIONS = {
    "decimal": DECIMALS,
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
      dates: of the rows, datetime64[s]. If the file gives offsets from UTC, dates are
        local time: hours by the offset of the last row throughout, days by the clock of
        the file, so that steps are even.
      step: between rows: a `pandas.Timedelta`, or an offset of pandas: `BDay` for
        weekdays, `DateOffset` for months (same day of the month), `MonthEnd`.
      zone: offset from UTC of the last row, as the file writes it, or "".
    """

    values: Float[np.ndarray, "n D"]
    names: tuple[str, ...]
    dates: np.ndarray
    step: Step
    zone: str = ""

    @property
    def steps(self) -> str:
        """Steps between rows in words: `1 hour`, `weekdays`, `3 months`."""
        return step_text(self.step)

    def goes_on_like(self, other: "Series") -> bool:
        """Whether the rows have the steps of another series."""
        stamped = stamps(self.dates[0], len(self.dates), other.step)
        return bool((stamped == self.dates).all())

    def following(self, number: int) -> np.ndarray:
        """Dates of the next rows beyond the end, datetime64[s]."""
        known = len(self.dates)
        return stamps(self.dates[0], known + number, self.step)[known:].to_numpy()

    @property
    def period(self) -> int:
        """Rows in a day; in a week for days; in a year for weeks or months; or 1."""
        if isinstance(self.step, pd.offsets.BDay):
            return 5
        if months := months_of(self.step):
            return max(1, 12 // months)
        cycles = (DAY, 7 * DAY, 364 * DAY)
        return next((int(c // self.step) for c in cycles if self.step < c), 1)


def series(name: str, *, directory: str | Path | None = None, **options: Any) -> Series:
    """Loads series by name or from the user's csv; downloads a known set if missing.

    Args:
      name: `demo`, the simulation `uhop_jax.data.simulated_house`, without download;
        `etth1`, `ettm1` (Zhou et al., Informer, 2021) or `wth` (weather, NCEI); or the
        path of a csv, see `read_series`.
      directory: of `ETTh1.csv`, `ETTm1.csv`, `WTH.csv`, each also with `.gz`; downloads
        go there too. None is the default of pooch.
      **options: of `read_series`, for every file.

    Raises:
      ValueError: if the name is unknown, a missing set cannot be downloaded, or a file
        is not as described.
    """
    if name == "demo":
        values, names = simulated_house()
        hour = pd.Timedelta(hours=1)
        dates = stamps("2023-11-01", len(values), hour)
        return Series(values, names, dates.to_numpy(), hour)
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
    decimal: str = "auto",
    missing_values: Sequence[Any] = (),
    missing: str = "error",
    gaps: str = "error",
    duplicates: str = "error",
    unsorted: str = "error",
    constant: str = "error",
) -> Series:
    """Reads a csv or csv.gz: a header, dates in the first column, then numbers.

    Cells are separated by commas, semicolons or tabs. The decimal mark of numbers is a
    point or a comma, and the second mark may separate thousands. Dates may be ISO 8601,
    month/day/year, day/month/year, day.month.year or have the month's English name.
    Where a cell has two readings, all cells together decide, or an option does.
    The rows must follow each other by one step: a fixed time, weekdays, or months.
    A value far from all others, by a thousand standard deviations, gives a warning.

    Args:
      path: of the file.
      columns: names of the columns to read; () is all.
      date_format: of `strptime`, for other dates and where two readings fit.
      decimal: mark of numbers: `point`, `comma`, or `auto`, the mark that fits all.
      missing_values: cells that mark a missing value, as `-9999` or `?`, beside empty
        cells, `NA`, `nan`, `null`, `none`, `#N/A`.
      missing: for missing values: `error`, or `interpolate` in time (the nearest value
        at the ends).
      gaps: for rows that are missing: `error`, or `fill` by interpolation.
      duplicates: for rows of one date: `error`, the `first`, or their `mean`.
      unsorted: for dates that go back: `error`, or `sort`.
      constant: for columns of one value: `error`, `keep` or `drop`.

    Raises:
      ValueError: if an option is unknown, the file cannot be read, or is not as
        described; it names the line and the column.
    """
    given = (decimal, missing, gaps, duplicates, unsorted, constant)
    for (option, choices), value in zip(OPTIONS.items(), given, strict=True):
        check_choice(option, value, choices)
    path = user_path(path)
    table = read_table(path, text_of(path))
    selected = chosen(path, table, columns)
    dates = parsed_dates(path, table.iloc[:, 0], date_format)
    values = numbers(path, selected, decimal, missing_values)

    backward = dates.utc.diff() < pd.Timedelta(0)
    if backward.any() and unsorted == "error":
        line, before = backward.idxmax(), dates.local.shift()
        raise ValueError(
            f"{path}, line {line}: {dates.local[line]} comes after {before[line]}; "
            "unsorted='sort' sorts the rows"
        )
    dates = dates.sort_values("utc", kind="stable")
    values = values.loc[dates.index]

    repeated = dates.utc.duplicated()
    if repeated.any() and duplicates == "error":
        line = repeated.idxmax()
        first = dates.index[dates.utc == dates.utc[line]][0]
        raise ValueError(
            f"{path}, line {line}: {dates.local[line]} is there already, in line "
            f"{first}; duplicates='first' or 'mean' makes one row of them"
        )
    if duplicates == "mean":  # a mean with a missing value is missing
        unknown = values.isna().groupby(dates.utc).transform("any")
        values = values.groupby(dates.utc).transform("mean").mask(unknown)
    dates, values = dates[~repeated], values[~repeated]
    if len(dates) < 3:
        raise ValueError(f"{path} holds {len(dates)} rows, a series needs at least 3")

    absent = values.isna().stack(future_stack=True)
    if absent.any() and missing == "error":
        line, name = absent.idxmax()
        raise ValueError(
            f"{path}, line {line}, column {name!r}: the value is missing "
            f"({absent.sum()} are); missing='interpolate' fills them in"
        )
    clock = clock_of(dates)
    step, places = step_of(path, clock)
    number, known = int(places[-1]) + 1, len(places)
    if number > known and (gaps == "error" or number > 2 * known):
        row = int(np.argmax(np.diff(places) > 1)) + 1
        advice = f"the whole file lacks {number - known}, too many to fill"
        if number <= 2 * known:
            advice = "gaps='fill' interpolates them"
        raise ValueError(
            f"{path}, line {dates.index[row]}: {dates.local.iloc[row]} follows "
            f"{dates.local.iloc[row - 1]}, with a step of {step_text(step)} "
            f"{places[row] - places[row - 1] - 1} rows are missing between them; "
            f"{advice}"
        )
    even = values.set_axis(places).reindex(range(number))
    even = even.interpolate(limit_direction="both")

    flat = constant_columns(even.to_numpy())
    if flat.any() and constant == "error":
        name = even.columns[flat.argmax()]
        raise ValueError(
            f"{path}, column {name!r} is {even[name].iloc[0]:g} in every row; "
            "constant='keep' or 'drop' keeps or drops such columns"
        )
    _warn_of_far_values(path, even)
    if constant == "drop":
        even = even.loc[:, ~flat]
    if even.empty:
        raise ValueError(f"{path} holds no column that varies")
    return Series(
        even.to_numpy(),
        tuple(even.columns),
        stamps(clock.iloc[0], number, step).to_numpy(),
        step,
        dates.zone.iloc[-1],
    )


# Files


def _place(name: str, directory: str | Path | None) -> Path:
    """Path of the file of a known set, which is downloaded if missing."""
    source = SOURCES[name]
    if directory is None:
        directory = import_pooch(name).os_cache("uhop_jax")
    folder = user_path(directory)
    for path in (folder / source.file, folder / f"{source.file}.gz"):
        if path.exists():
            text = text_of(path).replace("\r\n", "\n")
            if hashlib.sha256(text.encode()).hexdigest() != source.sha256:
                raise ValueError(
                    f"{path} is not the {source.file} that {name} stands for (its "
                    "SHA-256 differs); give its path as data.name to read it as it is"
                )
            return path
    address = source.place + source.file
    download(name, address, f"sha256:{source.sha256}", folder, fname=source.file)
    return folder / source.file


def _warn_of_far_values(path: Path, frame: pd.DataFrame) -> None:
    """Warns of a value that is very far from all others, once for each column."""
    for name, column in frame.items():
        away = (column - column.median()).abs()
        value = column[away.idxmax()]
        others = column[column != value]
        if len(others) > 1 and away.max() > FAR * others.std(ddof=0) > 0:
            warnings.warn(
                f"{path}, column {name!r}: {value:.15g} ({len(column) - len(others)} "
                f"times) is {FAR} standard deviations away from all other values; if "
                f"it marks missing values, missing_values=('{value:.15g}',) says so",
                stacklevel=3,
            )
