"""Baselines for forecasts: simple methods that need no training, in NumPy on the host.

A forecast maps inputs `(B, L, D)` to `(B, H, D)`: windows, steps, series.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.lib.stride_tricks import sliding_window_view

from uhop_jax._checks import check_count
from uhop_jax.data import Windows

Inputs = Float[np.ndarray, "B L D"]
Ahead = Float[np.ndarray, "B H D"]
Forecast = Callable[[Inputs], Ahead]

RIDGE = 1e-3


@dataclasses.dataclass(frozen=True)
class LastValue:
    """Repeats the last value for `out_len` steps."""

    out_len: int

    def __call__(self, inputs: Inputs) -> Ahead:
        return np.repeat(inputs[:, -1:], self.out_len, axis=1)


@dataclasses.dataclass(frozen=True)
class WindowMean:
    """Repeats the mean of the input for `out_len` steps."""

    out_len: int

    def __call__(self, inputs: Inputs) -> Ahead:
        return np.repeat(inputs.mean(1, keepdims=True), self.out_len, axis=1)


@dataclasses.dataclass(frozen=True)
class Seasonal:
    """Repeats the last period.

    Attributes:
      out_len: steps of the forecast, `H`.
      period: length of the period in steps, from 1 to `L`; a call raises a `ValueError`
        for others.
    """

    out_len: int
    period: int

    def __call__(self, inputs: Inputs) -> Ahead:
        check_count("period", self.period, 1, inputs.shape[1])
        index = np.arange(self.out_len) % self.period - self.period
        return inputs[:, index]


@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear map for all series, on inputs whose last value is subtracted.

    Attributes:
      weights: `(L, H)`, from steps of the input to steps of the forecast.
    """

    weights: Float[np.ndarray, "L H"]

    def __call__(self, inputs: Inputs) -> Ahead:
        last = inputs[:, -1:]
        size, in_len, columns = inputs.shape
        rows = np.swapaxes(inputs - last, 1, 2).reshape(-1, in_len)  # one product
        ahead = (rows @ self.weights.astype(rows.dtype)).reshape(size, columns, -1)
        return np.swapaxes(ahead, 1, 2) + last


def fit_linear(train: Windows, *, ridge: float = RIDGE) -> Linear:
    r"""The linear map of least squared error over all windows and series.

    The normal equations need only the products :math:`C_{ab} = \sum_{i, d} z_{i+a, d}\,
    z_{i+b, d}`, summed over windows `i` and series `d`. Each diagonal of `C` is a
    difference of running sums, so that no window is copied.

    Args:
      train: windows to fit.
      ridge: number added to the diagonal of the Gram matrix, in units of its mean.

    Returns:
      The fitted `Linear`.
    """
    from scipy.linalg import solve

    z, number = train.rows.astype(np.float64), train.size
    in_len, length = train.in_len, train.in_len + train.out_len
    products = np.empty((in_len, length))  # C
    for lag in range(length):
        running = np.zeros(len(z) - lag + 1)
        np.cumsum(np.einsum("rd,rd->r", z[: len(z) - lag], z[lag:]), out=running[1:])
        row = np.arange(min(in_len, length - lag))
        products[row, row + lag] = running[row + number] - running[row]
    lower = np.tril_indices(in_len, -1)
    products[lower] = products.T[:in_len][lower]
    last = products[in_len - 1]
    centred = products - products[:, in_len - 1, None] - last + last[in_len - 1]
    gram, moments = centred[:, :in_len], centred[:, in_len:]
    gram = gram + ridge * np.trace(gram) / in_len * np.eye(in_len)
    return Linear(solve(gram, moments, assume_a="pos"))


def baselines(train: Windows, *, period: int) -> dict[str, Forecast]:
    """Every baseline, by name.

    Args:
      train: windows that the linear map is fitted to.
      period: period of `Seasonal` in steps. `Seasonal` is left out if the period is
        longer than the input.

    Returns:
      The forecasts by name.
    """
    forecasts: dict[str, Forecast] = {
        "last value": LastValue(train.out_len),
        "window mean": WindowMean(train.out_len),
    }
    if period <= train.in_len:
        forecasts["seasonal"] = Seasonal(train.out_len, period)
    return forecasts | {"linear": fit_linear(train)}


def evaluate(
    forecasts: Mapping[str, Forecast], split: Windows, *, block: int = 128
) -> list[dict[str, Any]]:
    """Errors on a split, exact means over all windows, steps and series.

    Args:
      forecasts: forecasts by name.
      split: windows to forecast.
      block: number of windows at a time.

    Returns:
      A record for each forecast: `method`, `windows`, `mse` and `mae`.
    """
    length = split.in_len + split.out_len
    view = sliding_window_view(split.rows, length, axis=0)  # (windows, D, length)
    sums = {name: np.zeros(2) for name in forecasts}
    for start in range(0, split.size, block):
        whole = np.swapaxes(view[start : start + block], 1, 2)
        inputs, targets = whole[:, : split.in_len], whole[:, split.in_len :]
        for name, forecast in forecasts.items():
            error = np.abs(forecast(inputs) - targets)
            sums[name] += (
                np.square(error).sum(dtype=np.float64),
                error.sum(dtype=np.float64),
            )
    number = split.size * split.out_len * split.rows.shape[1]
    return [
        {
            "method": name,
            "windows": split.size,
            "mse": float(squared / number),
            "mae": float(absolute / number),
        }
        for name, (squared, absolute) in sums.items()
    ]
