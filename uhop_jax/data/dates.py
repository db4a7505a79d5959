"""Dates of series: read from text of any common form, and counted on a calendar."""

import functools
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

SECOND = np.timedelta64(1, "s")
DAY = np.timedelta64(86_400, "s")
MONTH = DAY * 30.436875

# Forms of dates beside ISO 8601. Each form that fits one row is tried on all rows.
DATES = (
    *("%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y", "%d.%m.%Y", "%Y.%m.%d"),
    *("%m/%d/%y", "%d/%m/%y", "%d.%m.%y", "%Y-%m-%d", "%Y/%m/%d"),
    *("%d-%b-%Y", "%d-%b-%y", "%d %b %Y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y"),
)
TIME = re.compile(
    r".*?(?:(?P<minute>[ T]+\d{1,2}:\d\d)(?P<second>:\d\d)?(?P<fraction>\.\d+)?"
    r"(?P<half>\s*[AP]M)?(?P<zone>\s*(?:Z|[+-]\d\d:?\d\d))?)?",
    re.IGNORECASE,
)


# An offset from UTC, behind a time of day.
ZONE = re.compile(r":\d\d\S*(?:\s*[AP]M)?\s*(Z|[+-]\d\d(?::?\d\d)?)$", re.IGNORECASE)
YEARS = 1800, 2100  # range in which sorted whole numbers of four digits are years


class Dates(NamedTuple):
    """A column of dates.

    Attributes:
      utc: datetime64[s]; dates without an offset are left as the file has them.
      offsets: of local time from UTC, timedelta64[s]; zero for dates without.
      zones: the offsets as the file writes them, or "".
    """

    utc: np.ndarray
    offsets: np.ndarray
    zones: np.ndarray

    @property
    def local(self) -> np.ndarray:
        """The dates as the file has them, without their offsets."""
        return self.utc + self.offsets

    def rows(self, index: Any) -> "Dates":
        """The dates of some rows."""
        return Dates(*(part[index] for part in self))


def parsed_dates(
    path: Path, name: str, lines: np.ndarray, cells: list[str], date_format: str
) -> Dates:
    """Reads a column of dates.

    Raises:
      ValueError: if a cell is no date, or the form of the dates is not certain.
    """
    import pandas as pd

    column = pd.Series(cells, dtype=str)

    def parsed(form: str, column: pd.Series = column) -> np.ndarray:
        times = pd.to_datetime(column, format=form, utc=True, errors="coerce")
        return times.dt.tz_localize(None).to_numpy()

    def fail(row: int, why: str) -> None:
        raise ValueError(
            f"{path}, line {lines[row]}, column {name!r}: {cells[row]!r} {why}"
        )

    if date_format:
        try:
            dates = parsed(date_format)
        except ValueError as error:
            raise ValueError(f"date_format {date_format!r}: {error}") from None
        if np.isnat(dates).any():
            why = f"is no date of the form {date_format!r}"
            fail(int(np.isnat(dates).argmax()), why)
    else:
        _refuse_counters(path, name, column)
        dates = parsed("ISO8601")
        if np.isnat(dates).any():
            forms = [form + _time(cells[0]) for form in DATES]
            fitting = [f for f in forms if not np.isnat(parsed(f, column[:1])[0])]
            readings = {form: parsed(form) for form in fitting} or {"": dates}
            whole = {f: x for f, x in readings.items() if not np.isnat(x).any()}
            if not whole:
                best = min(readings.values(), key=lambda x: np.isnat(x).sum())
                why = "is no date; date_format='%d/%m/%Y %H:%M' tells the form of dates"
                fail(int(np.isnat(best).argmax()), why)
            dates = _one_reading(path, name, whole)
    matches = [ZONE.search(cell) for cell in cells]
    zones = np.asarray([match[1] if match else "" for match in matches])
    zoned = zones != ""
    if zoned.any() and not zoned.all():
        row = int((zoned != zoned[0]).argmax())
        has = "has an" if zoned[row] else "has no"
        fail(row, f"{has} offset from UTC, unlike the dates before")
    seconds = dates.astype("datetime64[s]")
    if (seconds != dates).any():
        fail(int((seconds != dates).argmax()), "is finer than a second")
    offsets = np.asarray([_offset(zone) for zone in zones.tolist()], "timedelta64[s]")
    return Dates(seconds, offsets, zones)


def _refuse_counters(path: Path, name: str, column: Any) -> None:
    """Refuses numbers, except for dates such as 20200131 and sorted years."""
    if not column.str.fullmatch(r"[+-]?\d*[.,]?\d+").all():
        return
    if column.str.fullmatch(r"\d{8}").all():
        return
    advice = "dates belong in the first column, as in 2020-01-31"
    if column.str.fullmatch(r"\d{4}").all():
        years = column.astype(int)
        ordered = years.is_monotonic_increasing or years.is_monotonic_decreasing
        if ordered and years.between(*YEARS).all():
            return
        advice += "; date_format='%Y' says that the numbers are years"
    raise ValueError(
        f"{path}, column {name!r} holds the numbers {column.iloc[0]}, "
        f"{column.iloc[1]}, ..., which are no dates: {advice}"
    )


@functools.cache
def _offset(zone: str) -> timedelta:
    """The offset from UTC that a zone writes; "" is zero."""
    zone = zone.upper() + "00" * (len(zone) == 3) or "Z"  # +02 is +0200
    offset = datetime.strptime(zone, "%z").utcoffset()
    assert offset is not None
    return offset


def _time(cell: str) -> str:
    """The format of the time of day in a cell."""
    parts = TIME.fullmatch(cell)
    if parts is None or not parts["minute"]:
        return ""
    form = re.sub(r"\d.*", "%I:%M" if parts["half"] else "%H:%M", parts["minute"])
    form += ":%S" if parts["second"] else ""
    form += ".%f" if parts["fraction"] else ""
    for part, sign in (("half", "%p"), ("zone", "%z")):
        if parts[part]:
            form += " " * (len(parts[part]) - len(parts[part].lstrip())) + sign
    return form


def _one_reading(path: Path, name: str, readings: dict[str, np.ndarray]) -> np.ndarray:
    """The only reading that fits every row, or the only such reading without gaps."""
    distinct = {dates.tobytes(): form for form, dates in readings.items()}
    if len(distinct) > 1:
        even = [form for form in distinct.values() if is_even(readings[form])]
        if len(even) != 1:
            first, second, *_ = distinct.values()
            raise ValueError(
                f"{path}, column {name!r}: every date can be read as {first!r} and as "
                f"{second!r}; date_format tells which it is"
            )
        return readings[even[0]]
    return next(iter(readings.values()))


def months_in(step: np.timedelta64) -> int:
    """Whole months nearest to a step, at least one."""
    return max(1, round(step / MONTH))


def stamps(
    first: np.datetime64, places: Int[np.ndarray, " n"], step: Any, calendar: str
) -> np.ndarray:
    """Dates of the rows at some places, counted from the first."""
    if calendar == "weekdays":
        day = first.astype("datetime64[D]")
        return np.busday_offset(day, places).astype("datetime64[s]") + (first - day)
    if calendar:
        month = first.astype("datetime64[M]") + (calendar == "month ends")
        moved = month + months_in(step) * places
        return moved.astype("datetime64[s]") + (first - month.astype("datetime64[s]"))
    return first + places * step


def _counted(dates: np.ndarray, step: Any, calendar: str) -> Int[np.ndarray, " n"]:
    """Places of dates, counted from the first; meaningless for dates off the grid."""
    if calendar == "weekdays":
        days = dates.astype("datetime64[D]")
        return np.busday_count(days[0], days)
    if calendar:
        months = dates.astype("datetime64[M]").astype(np.int64)
        return (months - months[0]) // months_in(step)
    return ((dates - dates[0]) // step).astype(np.int64)


def _calendars(dates: np.ndarray) -> tuple[np.timedelta64, dict[str, np.ndarray]]:
    """The commonest step, and the places of the dates in each calendar that may fit."""
    differences, counts = np.unique(np.diff(dates), return_counts=True)
    step = differences[counts.argmax()]
    calendars = [""]
    if step == DAY and np.is_busday(dates.astype("datetime64[D]")).all():
        calendars = ["", "weekdays"]
    if step >= 28 * DAY:  # two months of 31 days are months
        calendars = ["months", "month ends", ""]
    if step <= 0 * SECOND:
        calendars = []
    return step, {calendar: _counted(dates, step, calendar) for calendar in calendars}


def _fitting(dates: np.ndarray) -> tuple[np.timedelta64, dict[str, np.ndarray]]:
    """The commonest step, and the places of the dates in each calendar that fits."""
    step, places = _calendars(dates)
    return step, {
        calendar: x
        for calendar, x in places.items()
        if (stamps(dates[0], x, step, calendar) == dates).all()
        and (np.diff(x) > 0).all()
    }


def is_even(dates: np.ndarray) -> bool:
    """Whether dates follow each other by one step."""
    _, fitting = _fitting(dates)
    return any((np.diff(places) == 1).all() for places in fitting.values())


def clock_of(dates: Dates) -> np.ndarray:
    """Local time of sorted rows, by the clock that makes their steps even.

    Steps of hours are even by a clock that is never changed, with the offset of the
    last row throughout. Where steps are not even by it, as steps of days, the clock
    of the file is taken.
    """
    steady = dates.utc + dates.offsets[-1]
    if _fitting(steady)[1] or (np.diff(dates.local) <= 0 * SECOND).any():
        return steady
    return dates.local


def steps_of(
    path: Path, lines: np.ndarray, dates: np.ndarray
) -> tuple[np.timedelta64, str, Int[np.ndarray, " n"]]:
    """Step and calendar with the fewest gaps, and the places of the dates.

    Raises:
      ValueError: if a date lies off the grid of every calendar.
    """
    step, fitting = _fitting(dates)
    if not fitting:
        off, calendar = min(
            (
                (stamps(dates[0], places, step, calendar) != dates, calendar)
                for calendar, places in _calendars(dates)[1].items()
            ),
            key=lambda x: x[0].sum(),
        )
        row = int(off.argmax())
        steps = steps_text(step, calendar) + " steps" * (not calendar)
        raise ValueError(
            f"{path}, line {lines[row]}: {date_text(dates[row])} does not lie on the "
            f"grid of {steps} from {date_text(dates[0])}; put the rows on an even grid "
            "first"
        )
    calendar = min(fitting, key=lambda x: fitting[x][-1])
    return step, calendar, fitting[calendar]


def steps_text(step: np.timedelta64, calendar: str) -> str:
    """Steps between rows in words: `1 hour`, `weekdays`, `3 months`."""
    if not calendar or calendar == "weekdays":
        return calendar or duration_text(step)
    months = months_in(step)
    return f"{months} {calendar}" if months > 1 else calendar


def date_text(date: np.datetime64) -> str:
    """A date as in a csv, with a space before the time."""
    return str(date).replace("T", " ")


def duration_text(step: np.timedelta64) -> str:
    """A step in the largest unit that divides it."""
    seconds = int(step / SECOND)
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds % length == 0:
            return f"{seconds // length} {unit}{'s' * (seconds != length)}"
    return f"{seconds} s"
