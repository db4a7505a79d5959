"""Windows of series: borders of the splits, scaling, and batches gathered on a device.

The input of window `i` begins at row `i` and has `in_len` rows; its target, `out_len`
rows, follows. Windows slide by one row and none is left out.
"""

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import check_count

# Rows at which the splits end, after months of 30 days: 12, 4, 4 of ETT, 28, 10, 10 of
# WTH.
PRESETS = {
    "etth1": (8640, 11520, 14400),
    "ettm1": (34560, 46080, 57600),
    "wth": (20160, 27360, 34560),
}
FRACTIONS = (0.7, 0.1, 0.2)


class Borders(NamedTuple):
    """First row of each split, and the row after its last; targets lie within."""

    train: tuple[int, int]
    validation: tuple[int, int]
    test: tuple[int, int]


class Scaler(NamedTuple):
    """Standardisation by the train split.

    Attributes:
      mean: of each column.
      deviation: population standard deviation of each; 1 where a column is constant
        but for rounding.
    """

    mean: Float[np.ndarray, " D"]
    deviation: Float[np.ndarray, " D"]

    def scaled(self, values: Float[np.ndarray, "*n D"]) -> Float[np.ndarray, "*n D"]:
        """Standardised values, float64."""
        return (values - self.mean) / self.deviation

    def unscaled(self, values: Float[np.ndarray, "*n D"]) -> Float[np.ndarray, "*n D"]:
        """Standardised values in the original units, float64."""
        return values * self.deviation + self.mean


class Windows(NamedTuple):
    """All windows of one split.

    Attributes:
      rows: standardised, float32: `in_len` rows before the split, and its own rows.
      start: index of the first row in the whole series.
      in_len: rows of an input.
      out_len: rows of a target.
    """

    rows: Float[np.ndarray, "r D"]
    start: int
    in_len: int
    out_len: int

    @property
    def size(self) -> int:
        """Number of windows."""
        return windows(len(self.rows), self.in_len, self.out_len)


class Splits(NamedTuple):
    """The three splits of a series, standardised by the train split."""

    train: Windows
    validation: Windows
    test: Windows
    scaler: Scaler


def windows(rows: int, in_len: int, out_len: int) -> int:
    """Number of windows in a number of rows.

    Raises:
      ValueError: if the rows are too few for one window, or a length is below 1.
    """
    check_count("in_len", in_len, 1)
    check_count("out_len", out_len, 1)
    number = rows - in_len - out_len + 1
    if number < 1:
        raise ValueError(
            f"a window takes {in_len + out_len} rows (in_len {in_len} and out_len "
            f"{out_len}), the series has {rows}"
        )
    return number


def borders(split: str | Sequence[float], rows: int) -> Borders:
    """Borders of the splits.

    Args:
      split: the name of a series: `etth1`, `ettm1` and `wth` have borders of their own,
        every other series 70 % for training, 10 % for validation, 20 % for the test; or
        three such fractions, whose sum is 1 at most.
      rows: number of rows of the series.

    Raises:
      ValueError: if the series is too short for a preset, or a fraction out of range.
    """
    if isinstance(split, str) and split in PRESETS:
        ends: Sequence[int] = PRESETS[split]
        if ends[-1] > rows:
            raise ValueError(
                f"the borders of {split} need {ends[-1]} rows, the series has {rows}"
            )
    else:
        fractions = FRACTIONS if isinstance(split, str) else tuple(split)
        numbers = all(isinstance(x, Real) for x in fractions)
        if len(fractions) != 3 or not numbers or not all(0 < x < 1 for x in fractions):
            raise ValueError(
                "a split is three fractions between 0 and 1, for train, validation and "
                f"test, got {fractions}"
            )
        total = sum(fractions)
        if total > 1 + 1e-9:
            raise ValueError(
                f"the fractions of a split sum to 1 at most, {fractions} to {total:g}"
            )
        ends = [round(rows * sum(fractions[: i + 1])) for i in range(3)]
    return Borders((0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2]))


def splits(
    values: Float[np.ndarray, "n D"], where: Borders, *, in_len: int, out_len: int
) -> Splits:
    """Windows of the three splits, standardised by the train rows alone.

    The rows of validation and test begin `in_len` before their borders, so that the
    first target is the first row of the split, and the targets do not depend on
    `in_len`.

    Raises:
      ValueError: if a split is too short for one window.
    """
    scaler = scaler_of(values[slice(*where.train)])
    parts: dict[str, Windows] = {}
    for name, (begin, end) in zip(where._fields, where, strict=True):
        start = max(0, begin - in_len) if begin else 0
        try:
            windows(end - start, in_len, out_len)
        except ValueError as error:
            raise ValueError(
                f"{name} split, rows {start} to {end}: {str(error)}"
            ) from None
        rows = scaler.scaled(values[start:end]).astype(np.float32)
        parts[name] = Windows(rows, start, in_len, out_len)
    return Splits(**parts, scaler=scaler)


def scaler_of(values: Float[np.ndarray, "n D"]) -> Scaler:
    """The scaling that gives each column mean 0 and variance 1, in float64."""
    values = np.asarray(values, np.float64)
    deviation = np.where(constant_columns(values), 1.0, values.std(0))
    return Scaler(values.mean(0), deviation)


def constant_columns(values: Float[np.ndarray, "n D"]) -> Bool[np.ndarray, " D"]:
    """Whether each column varies by no more than rounding errors of its mean."""
    rounding = len(values) * np.finfo(values.dtype).eps * np.abs(values).max(0)
    return values.std(0) <= rounding


def window_batch(
    rows: Float[Array, "r D"], index: Int[Array, " B"], in_len: int, out_len: int
) -> dict[str, Array]:
    """Some windows, by their indices, which must be below `windows(r, ...)`.

    Returns:
      `inputs (B, in_len, D)` and `targets (B, out_len, D)`.
    """
    whole = jax.vmap(
        lambda i: lax.dynamic_slice_in_dim(rows, i, in_len + out_len, axis=0)
    )(index)
    return {"inputs": whole[:, :in_len], "targets": whole[:, in_len:]}
