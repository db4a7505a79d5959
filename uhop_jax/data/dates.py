"""Dates of series: read from text of any common form, and the steps between them.

Columns are pandas series whose index is the line of the file.
"""

import datetime
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int
from pandas.tseries.offsets import BaseOffset, BDay, MonthEnd

DAY = pd.Timedelta(days=1)
MONTH = DAY * 30.436875

# Forms of dates beside ISO 8601. Each form that fits one row is tried on all rows.
DATES = (
    *("%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y", "%d.%m.%Y", "%Y.%m.%d"),
    *("%m/%d/%y", "%d/%m/%y", "%d.%m.%y", "%Y-%m-%d", "%Y/%m/%d"),
    *("%d-%b-%Y", "%d-%b-%y", "%d %b %Y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y"),
)
TIMES = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f") + tuple(
    f" {clock}{half}" for clock in ("%I:%M", "%I:%M:%S") for half in (" %p", "%p")
)
# A time of day, such as T00, 0030 or 1:30 PM, and an offset from UTC behind it.
ZONED = re.compile(
    r"((?:T|\s)\d[\d:.]*(?:\s*[AP]M)?)\s*(Z|[+-]\d\d(?::?\d\d)?)$", re.IGNORECASE
)
YEARS = 1800, 2100  # range in which sorted whole numbers of four digits are years

Step = pd.Timedelta | BaseOffset  # a fixed time, or weekdays, months, month ends


def parsed_dates(path: Path, cells: pd.Series, date_format: str) -> pd.DataFrame:
    """Reads a column of dates.

    Returns:
      Columns `utc` and `local`, datetime64[s], equal for dates without an offset from
      UTC; and `zone`, the offset as the file writes it, or "".

    Raises:
      ValueError: if a cell is no date, or the form of the dates is not certain.
    """
    where = f"{path}, column {cells.name!r}"

    def fail(wrong: pd.Series, why: str) -> None:
        line = wrong.idxmax()
        raise ValueError(
            f"{path}, line {line}, column {cells.name!r}: {cells[line]!r} {why}"
        )

    zone = cells.str.extract(ZONED)[1].fillna("")
    zoned = zone != ""
    if date_format:
        try:
            times = _parsed(cells, date_format)
        except ValueError as error:
            raise ValueError(f"date_format {date_format!r}: {error}") from None
        if times.isna().any():
            fail(times.isna(), f"is no date of the form {date_format!r}")
        if not zoned.any() and _has_offset(cells, date_format):
            why = "has an offset from UTC that is not read: it must follow the time "
            fail(~zoned, why + "of day, as in 2020-01-31 12:00+01:00")
    else:
        _refuse_counters(where, cells)
        bare = cells.str.replace(ZONED, r"\1", regex=True)
        times = _parsed(bare, "ISO8601")
        if times.isna().any():
            forms = [date + time for date in DATES for time in TIMES]
            fitting = [f for f in forms if not _parsed(bare[:1], f).isna().any()]
            readings = [(form, _parsed(bare, form)) for form in fitting]
            whole = {form: x for form, x in readings if not x.isna().any()}
            if not whole:
                parts = [x.isna() for _, x in readings] or [times.isna()]
                why = "is no date; date_format='%d/%m/%Y %H:%M' tells the form of dates"
                fail(min(parts, key=lambda wrong: wrong.sum()), why)
            times = _one_reading(where, whole)
    if zoned.nunique() > 1:
        other = zoned != zoned.iloc[0]
        has = "has no" if zoned.iloc[0] else "has an"
        fail(other, f"{has} offset from UTC, unlike the dates before")
    seconds = times.dt.as_unit("s")
    if (seconds != times).any():
        fail(seconds != times, "is finer than a second")
    offset = zone.map({z: _offset(z) for z in zone.unique()}).dt.as_unit("s")
    utc = seconds if "%z" in date_format else seconds - offset
    return pd.DataFrame({"utc": utc, "local": utc + offset, "zone": zone})


def _parsed(cells: pd.Series, form: str) -> pd.Series:
    """Dates of cells, in UTC if the form has an offset; NaT for cells of other form."""
    times = pd.to_datetime(cells, format=form, utc=True, errors="coerce")
    return times.dt.tz_localize(None)


def _has_offset(cells: pd.Series, form: str) -> bool:
    """Whether a form reads an offset from UTC out of dates, other than zero."""
    try:
        zone = pd.to_datetime(cells, format=form).dt.tz
    except ValueError:  # several offsets
        return True
    return zone is not None and bool(zone.utcoffset(datetime.datetime(2000, 1, 1)))


def _offset(zone: str) -> pd.Timedelta:
    """The offset from UTC that a zone writes; "" is zero."""
    return pd.Timedelta(
        pd.Timestamp(f"2000-01-01T00:00{zone.upper()}").utcoffset() or 0
    )


def _refuse_counters(where: str, cells: pd.Series) -> None:
    """Refuses numbers, except for dates such as 20200131 and sorted years."""
    if not cells.str.fullmatch(r"[+-]?\d*[.,]?\d+").all():
        return
    if cells.str.fullmatch(r"\d{8}").all():
        return
    advice = "dates belong in the first column, as in 2020-01-31"
    if cells.str.fullmatch(r"\d{4}").all():
        years = cells.astype(int)
        ordered = years.is_monotonic_increasing or years.is_monotonic_decreasing
        if ordered and years.between(*YEARS).all():
            return
        advice += "; date_format='%Y' says that the numbers are years"
    raise ValueError(
        f"{where} holds the numbers {cells.iloc[0]}, {cells.iloc[1]}, ..., which are "
        f"no dates: {advice}"
    )


def _one_reading(where: str, readings: dict[str, pd.Series]) -> pd.Series:
    """The only reading that fits every row, or the only such reading without gaps."""
    distinct = {tuple(dates): form for form, dates in readings.items()}
    if len(distinct) > 1:
        even = [form for form in distinct.values() if _is_even(readings[form])]
        if len(even) != 1:
            first, second, *_ = distinct.values()
            raise ValueError(
                f"{where}: every date can be read as {first!r} and as {second!r}; "
                "date_format tells which it is"
            )
        return readings[even[0]]
    return next(iter(readings.values()))


# -- Steps -----------------------------------------------------------------------------


def stamps(first: Any, number: int, step: Step) -> pd.DatetimeIndex:
    """Dates of a number of rows, from the first.

    Steps of months keep the day of the first, in months that have it: 30 January, 28
    February, 30 March.
    """
    if months := _same_days(step):  # pandas itself would go on from 28 February
        day = pd.Timestamp(first)
        dates = [day + pd.DateOffset(months=months * n) for n in range(number)]
        return pd.DatetimeIndex(dates).as_unit("s")
    return pd.date_range(first, periods=number, freq=step, unit="s")


def _same_days(step: Step) -> int:
    """Months of a step to the same day of a month; 0 for any other."""
    return 0 if isinstance(step, MonthEnd) else months_of(step)


def _places(dates: pd.DatetimeIndex, step: Step) -> Int[np.ndarray, " n"]:
    """Places of dates counted from the first; -1 for dates off the grid."""
    if isinstance(step, pd.Timedelta):  # the grid may be too long to be written out
        passed = dates - dates[0]
        even = passed % step == pd.Timedelta(0)
        return np.where(even, passed // step, -1).astype(np.int64)
    if months := _same_days(step):
        days = 1 + (dates[-1] - dates[0]).days
        grid = stamps(dates[0], 1 + days // (28 * months), step)
    else:
        grid = pd.date_range(*dates[[0, -1]], freq=step, unit="s")
    return grid.get_indexer(dates)


def _candidates(dates: pd.DatetimeIndex) -> list[tuple[Step, np.ndarray]]:
    """The steps that dates may have, by their commonest difference, and the places."""
    fixed = dates.to_series().diff().mode()[0]
    steps: list[Step] = [fixed]
    if fixed == DAY and (dates.day_of_week < 5).all():
        steps.append(BDay())
    if fixed >= 28 * DAY:  # two months of 31 days are months
        months = max(1, round(fixed / MONTH))
        steps[:0] = [MonthEnd(months), pd.DateOffset(months=months)]
    if fixed <= pd.Timedelta(0):
        steps = []
    return [(step, _places(dates, step)) for step in steps]


def _fitting(dates: Any) -> list[tuple[Step, np.ndarray]]:
    """The steps that dates have, and the places of the dates."""
    candidates = _candidates(pd.DatetimeIndex(dates))
    return [(step, places) for step, places in candidates if _increase(places)]


def _increase(places: np.ndarray) -> bool:
    return bool(places[0] == 0 and (np.diff(places) > 0).all())


def _is_even(dates: pd.Series) -> bool:
    """Whether dates follow each other by one step."""
    return any((np.diff(places) == 1).all() for _, places in _fitting(dates))


def clock_of(dates: pd.DataFrame) -> pd.Series:
    """Local time of sorted rows, by the clock that makes their steps even.

    Steps of hours are even by a clock that is never changed, with the offset of the
    last row throughout. Where steps are not even by it, as steps of days, the clock
    of the file is taken.
    """
    steady = dates.utc + (dates.local - dates.utc).iloc[-1]
    if _fitting(steady) or not dates.local.is_monotonic_increasing:
        return steady
    return dates.local


def step_of(path: Path, dates: pd.Series) -> tuple[Step, Int[np.ndarray, " n"]]:
    """The step with the fewest gaps, and the places of the dates.

    Raises:
      ValueError: if a date lies off the grid of every step.
    """
    if fitting := _fitting(dates):
        return min(fitting, key=lambda x: x[1][-1])
    candidates = _candidates(pd.DatetimeIndex(dates))
    step, places = min(candidates, key=lambda x: (x[1] < 0).sum())
    line = (pd.Series(places, dates.index) < 0).idxmax()
    steps = step_text(step) + " steps" * isinstance(step, pd.Timedelta)
    raise ValueError(
        f"{path}, line {line}: {dates[line]} does not lie on the grid of {steps} from "
        f"{dates.iloc[0]}; put the rows on an even grid first"
    )


def months_of(step: Step) -> int:
    """Months of a step of months or month ends; 0 for any other."""
    if isinstance(step, MonthEnd):
        return step.n
    return getattr(step, "kwds", {}).get("months", 0)


def step_text(step: Step) -> str:
    """A step in words: `1 hour`, `weekdays`, `3 months`."""
    if isinstance(step, BDay):
        return "weekdays"
    if months := months_of(step):
        name = "month ends" if isinstance(step, MonthEnd) else "months"
        return f"{months} {name}" if months > 1 else name
    seconds = int(step / pd.Timedelta(seconds=1))
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds % length == 0:
            return f"{seconds // length} {unit}{'s' * (seconds != length)}"
    return f"{seconds} s"


def date_text(date: Any) -> str:
    """A date as in a csv, with a space before the time."""
    return str(pd.Timestamp(date))
