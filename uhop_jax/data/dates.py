"""Dates of series: read from text in any common style, and laid on a calendar."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

SECOND = np.timedelta64(1, "s")
DAY = np.timedelta64(86_400, "s")
MONTH = DAY * 30.436875

# Dates that are not ISO 8601. Numbers alone: every reading is tried on all rows.
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


def parsed_dates(
    path: Path, name: str, lines: np.ndarray, cells: list[str], date_format: str
) -> np.ndarray:
    """A column of dates, datetime64[s]."""
    import pandas as pd

    column = pd.Series(cells, dtype=str)

    def parsed(form: str, column: pd.Series = column) -> np.ndarray:
        found = pd.to_datetime(column, format=form, utc=True, errors="coerce")
        return found.dt.tz_localize(None).to_numpy()

    def fail(dates: np.ndarray, why: str) -> None:
        row = int(np.isnat(dates).argmax())
        raise ValueError(
            f"{path}, line {lines[row]}, column {name!r}: {cells[row]!r} {why}"
        )

    if date_format:
        try:
            dates = parsed(date_format)
        except ValueError as error:
            raise ValueError(f"date_format {date_format!r}: {error}") from None
        if np.isnat(dates).any():
            fail(dates, f"is no date of the form {date_format!r}")
    else:
        dates = parsed("ISO8601")
        if np.isnat(dates).any():
            forms = [form + _time(cells[0]) for form in DATES]
            fitting = [f for f in forms if not np.isnat(parsed(f, column[:1])[0])]
            readings = {form: parsed(form) for form in fitting} or {"": dates}
            whole = {f: x for f, x in readings.items() if not np.isnat(x).any()}
            if not whole:
                best = min(readings.values(), key=lambda x: np.isnat(x).sum())
                fail(best, "is no date; date_format='%d/%m/%Y %H:%M' tells its form")
            dates = _one_reading(path, name, whole)
    zoned = column.str.contains(r":\d\d\S*\s*(?:Z|[+-]\d\d(?::?\d\d)?)$").to_numpy(bool)
    if zoned.any() and not zoned.all():
        row = int((zoned != zoned[0]).argmax())
        raise ValueError(
            f"{path}, line {lines[row]}, column {name!r}: {cells[row]!r} "
            f"{'has an' if zoned[row] else 'has no'} offset from UTC, unlike the dates "
            "before"
        )
    seconds = dates.astype("datetime64[s]")
    if (seconds != dates).any():
        row = int((seconds != dates).argmax())
        raise ValueError(
            f"{path}, line {lines[row]}, column {name!r}: {cells[row]!r} is finer than "
            "a second"
        )
    return seconds


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
    """Of the readings that fit every row, the one, or the only one without gaps."""
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
    """Places of dates, counted from the first; meaningless off the grid."""
    if calendar == "weekdays":
        days = dates.astype("datetime64[D]")
        return np.busday_count(days[0], days)
    if calendar:
        months = dates.astype("datetime64[M]").astype(np.int64)
        return (months - months[0]) // months_in(step)
    return ((dates - dates[0]) // step).astype(np.int64)


def _calendars(dates: np.ndarray) -> tuple[np.timedelta64, dict[str, np.ndarray]]:
    """The commonest step, and the places of the dates in each calendar that fits."""
    differences, counts = np.unique(np.diff(dates), return_counts=True)
    step = differences[counts.argmax()]
    calendars = [""]
    if step == DAY and np.is_busday(dates.astype("datetime64[D]")).all():
        calendars = ["", "weekdays"]
    if step >= 28 * DAY:  # two months of 31 days are months
        calendars = ["months", "month ends", ""]
    found: dict[str, np.ndarray] = {}
    for calendar in calendars if step > 0 * SECOND else ():
        places = _counted(dates, step, calendar)
        if (stamps(dates[0], places, step, calendar) == dates).all():
            found[calendar] = places
    return step, found


def is_even(dates: np.ndarray) -> bool:
    """Whether dates follow each other by one step."""
    _, found = _calendars(dates)
    return any((np.diff(places) == 1).all() for places in found.values())


def steps_of(
    path: Path, lines: np.ndarray, dates: np.ndarray
) -> tuple[np.timedelta64, str, Int[np.ndarray, " n"]]:
    """Step and calendar with the fewest gaps, and the places of the dates in it."""
    step, found = _calendars(dates)
    if not found:
        off = stamps(dates[0], _counted(dates, step, ""), step, "") != dates
        row = int(off.argmax())
        raise ValueError(
            f"{path}, line {lines[row]}: {date_text(dates[row])} does not lie on the "
            f"grid of {duration_text(step)} steps from {date_text(dates[0])}; put the "
            "rows on an even grid first"
        )
    calendar = min(found, key=lambda x: found[x][-1])
    return step, calendar, found[calendar]


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
