"""Table, figures and files of a study of forecasts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from uhop_jax import data, paper, plotting, records
from uhop_jax.data.dates import date_text
from uhop_jax.training.application import Rows
from uhop_jax.training.arms import of_task, panel
from uhop_jax.training.cells import ForecastCell
from uhop_jax.training.task import REACHED, SEPARATIONS
from uhop_jax.workdir import write_file, write_table

METRICS = ("mse", "mae")
COLUMNS = 3  # windows in a figure of forecasts
SHOWN = 8  # most series in a figure of forecasts


# Columns for the errors of the best checkpoint.
ERRORS = {"validation_loss": float, "test_mse": float, "test_mae": float}


def record(cell: ForecastCell) -> dict[str, Any]:
    """The columns of a cell with the paper's numbers; results are empty."""
    row: dict[str, Any] = cell._asdict() | {"arm": cell.label}
    empty = ("parameters", "epochs", "best_epoch", *ERRORS, *SEPARATIONS)
    row |= dict.fromkeys(empty, "")
    stated = paper.FORECASTS.get((cell.data, cell.horizon))
    pairs = {"GSH": "plain", "GSH + U-Hop": "uhop"}
    known = stated is not None and cell.label in pairs
    numbers = getattr(stated, pairs[cell.label]) if known else ("", "")
    return row | dict(zip(("paper_mse", "paper_mae"), numbers, strict=True))


def table(rows: Rows) -> str:
    """One line for each data set, horizon, window and arm, beside the paper's.

    Of several windows, the window of least validation loss is marked.
    """
    several = len({row["window"] for row in rows}) > 1
    lines = [["data, horizon, window, arm" if several else "data, horizon, arm"]]
    lines[0] += ["parameters", "seeds", "MSE", "MAE", "paper's MSE", "MAE"]
    order = list(dict.fromkeys((r["data"], r["horizon"]) for r in rows))
    rows = sorted(rows, key=lambda r: order.index((r["data"], r["horizon"])))
    group, label = ("data", "horizon", "arm"), labels([row["data"] for row in rows])
    for (name, horizon, arm), members in records.grouped(rows, group).items():
        best = records.of_least(members, ("window",), "validation_loss")
        for (window,), lot in records.grouped(members, ("window",)).items():
            names = [label[name], str(horizon), str(window), arm]
            if several:
                names[-1] += " *" * (lot[0] in best)
            else:
                del names[2]
            count = lot[0]["parameters"]
            line = [", ".join(names), f"{count:,}" if count else "-"]
            line.append(str(len(lot)) if count else "-")
            for metric in METRICS:
                line.append(records.mean_and_spread([r[f"test_{metric}"] for r in lot]))
            line += [str(lot[0][f"paper_{m}"] or "-") for m in METRICS]
            lines.append(line)
    text = records.aligned(lines)
    return text + "\n* the window of least validation loss" * several


def labels(names: Sequence[str]) -> dict[str, str]:
    """A short label of each data set: its file's name, if no other file has it."""
    distinct = list(dict.fromkeys(names))
    files = [Path(name).name for name in distinct]
    return {
        name: file if files.count(file) == 1 else name
        for name, file in zip(distinct, files, strict=True)
    }


def errors(title: str, rows: Rows, against: str) -> list[plotting.Panel]:
    """Test errors of each arm against the horizon or the window."""
    about, x = (title, rows, against), f"{against} in steps"
    return [
        panel(*about, f"test_{m}", x, f"test {m.upper()} of standardised values")
        for m in METRICS
    ]


def panels(
    config: ConfigDict,
    names: Sequence[str],
    histories: Mapping[ForecastCell, Rows],
    rows: Rows,
) -> list[plotting.Panel]:
    """Errors against window or horizon if there are several, else curves."""
    parts: list[plotting.Panel] = []
    for name, title in labels(names).items():
        chosen = [row for row in rows if row["data"] == name]
        if len(config.window) > 1:
            for horizon in config.horizon:
                lot = [row for row in chosen if row["horizon"] == horizon]
                parts += errors(f"{title}, horizon {horizon}", lot, "window")
            continue
        if len(config.horizon) > 1:
            parts += errors(title, chosen, "horizon")
            continue
        epochs = of_task(
            (cell.label, history)
            for cell, history in histories.items()
            if cell.data == name and cell.memory != "plug"
        )
        loss = config.train.loss.upper()
        for part in ("train", "validation"):
            about = (title, epochs, "epoch", f"{part}_loss", REACHED)
            parts.append(panel(*about, f"{part} {loss}"))
    return parts


def export(path: Path, series: data.Series, ahead: np.ndarray) -> None:
    """Writes a forecast `(horizon, D)` as a csv, with the next dates of the series."""
    dates = series.following(len(ahead))
    rows = [
        {"date": date_text(date) + series.zone}
        | dict(zip(series.names, map(float, values), strict=True))
        for date, values in zip(dates, ahead, strict=True)
    ]
    if jax.process_index() == 0:
        write_table(path, rows)


def draw(
    path: Path,
    title: str,
    series: data.Series,
    starts: Sequence[int],
    forecasts: Sequence[np.ndarray],
    window: int,
) -> None:
    """Draws forecasts against truth, a row of panels for each series.

    Of many series the first are drawn, and the last, which is often the target.
    Forecasts `(horizon, D)` are in the units of the series. They begin at rows `starts`
    and were made from `window` steps each.
    """
    horizon = len(forecasts[0])
    before, last = min(window, 2 * horizon), len(series.names) - 1
    shown = [*range(min(last, SHOWN - 1)), last]
    steps = series.steps  # `weekdays`, or `1 hour`
    steps = f"steps of {steps}" if steps[0].isdecimal() else steps
    truth = [series.values[i - before : i + horizon, shown] for i in starts]
    if jax.process_index() == 0:
        write_file(
            path,
            lambda file: plotting.forecasts(
                file,
                np.stack(truth),
                np.stack(forecasts)[:, :, shown],
                names=[series.names[i] for i in shown],
                titles=[f"from {date_text(series.dates[i])}" for i in starts],
                xlabel=steps,
                title=title,
            ),
        )
