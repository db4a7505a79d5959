"""Progress of long work, with an estimate of the time left."""

import sys
import time

from tqdm import tqdm

FIRST, LONGEST = 5.0, 300.0  # seconds before a line; each wait is twice the last


class Progress:
    """A bar on a terminal; elsewhere, as in a log, lines at growing intervals.

    Args:
      title: of the work.
      total: units of work in all.
      unit: name of the units, in the plural.
      done: units done in earlier runs.
      show: whether anything is shown.
    """

    def __init__(
        self, title: str, total: int, unit: str, *, done: int = 0, show: bool = True
    ):
        self.title, self.total, self.unit = title, total, unit
        self.done = self._before = done
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=title,
            unit=f" {unit}",
            unit_scale=True,
            disable=None if show else True,  # None: shown on a terminal alone
        )
        self._lines = show and self._bar.disable
        self._began, self._wait = time.monotonic(), FIRST
        self._next = self._began + FIRST

    def advance(self, units: int) -> None:
        """Counts further units as done."""
        self.done += units
        self._bar.update(units)
        now = time.monotonic()
        if self._lines and now >= self._next and self.done < self.total:
            self._wait = min(2 * self._wait, LONGEST)
            self._next = now + self._wait
            print(self.line(now - self._began), file=sys.stderr, flush=True)

    def line(self, spent: float) -> str:
        """The line to print after `spent` seconds."""
        text = f"{self.title}: {self.done:,} of {self.total:,} {self.unit}"
        fresh = self.done - self._before
        if fresh > 0 and 100 * fresh >= self.total - self._before:  # else compilation
            left = spent / fresh * (self.total - self.done)
            return f"{text}, {_time(spent)}, about {_time(left)} left"
        return f"{text}, {_time(spent)}"

    def note(self, text: str) -> None:
        """Shows a text behind the bar."""
        self._bar.set_postfix_str(text)

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()


def _time(seconds: float) -> str:
    """A duration in the largest unit that fits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 90 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"
