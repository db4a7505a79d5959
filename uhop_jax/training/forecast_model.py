"""Forecasters of the arms, built from a config, and their examples."""

import functools
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array
from ml_collections import ConfigDict

from uhop_jax import data
from uhop_jax.models import STanHop
from uhop_jax.training.application import model_of
from uhop_jax.training.arms import arm_of, separation_of
from uhop_jax.training.cells import ForecastCell
from uhop_jax.training.task import Batch, Split

TWO_SCALES_FROM = 336  # the paper's horizon from which its encoder has two scales


def forecast_model(
    config: ConfigDict, cell: ForecastCell, series: int
) -> Callable[[nnx.Rngs], nnx.Module]:
    """A function that builds the model of a cell.

    Raises:
      ValueError: if a value is out of range.
    """
    arm, options = arm_of(cell.arm), dict(config.model)
    start = options.pop("kernel_start")
    separation = separation_of(arm, options.pop("alpha"))
    options["separation"] = None if arm.separation == "learned" else separation
    options["scales"] = options["scales"] or 1 + (cell.horizon >= TWO_SCALES_FROM)
    options["dtype"] = jnp.dtype(options["dtype"])
    size, heads = options.pop("size"), options["num_heads"]
    build = functools.partial(STanHop, series, cell.window, cell.horizon, **options)
    return model_of(arm, build, size, heads, start=start, dtype=options["dtype"])


def splits_of(splits: data.Splits) -> list[Split]:
    """Train, validation and test; the last two have one length and one program."""
    in_len, out_len = splits.train.in_len, splits.train.out_len

    def take(arrays: Mapping[str, Array], index: Array) -> Batch:
        return data.window_batch(arrays["rows"], index, in_len, out_len)

    length = max(len(splits.validation.rows), len(splits.test.rows))
    parts = [Split({"rows": splits.train.rows}, splits.train.size, take, by_row=False)]
    for windows in (splits.validation, splits.test):
        missing = length - len(windows.rows)
        rows = np.pad(windows.rows, ((0, missing), (0, 0)))
        parts.append(Split({"rows": rows}, windows.size, take, by_row=False))
    return parts
