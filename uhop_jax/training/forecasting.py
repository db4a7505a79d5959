"""Forecasting: series, STanHop-Net and its recipe from a config, tables and figures."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array
from ml_collections import ConfigDict

from uhop_jax import data, paper, plotting, records
from uhop_jax._checks import (
    check_choice,
    check_count,
    check_distinct,
    check_named,
    check_positive,
)
from uhop_jax.data.dates import date_text
from uhop_jax.layers import LinearFeatures
from uhop_jax.models import STanHop, TuneAndPlay, baselines
from uhop_jax.training import forecasts
from uhop_jax.training.application import (
    Application,
    Rows,
    directory_name,
    with_matched_size,
)
from uhop_jax.training.arms import arm_of, separation_of, styles
from uhop_jax.training.run import Data, Goal, best_epoch, best_state
from uhop_jax.training.steps import (
    SEPARATIONS,
    Batch,
    Split,
    Task,
    Trainer,
    TrainState,
)
from uhop_jax.workdir import fingerprint, read_table, write_table

LOSSES = ("mae", "mse")
# Epochs after which the learning rate is halved.
SCHEDULES = {
    "type1": (2, 4, 6, 8, 10),
    "type2": (5, 10, 15, 20, 25),
    "constant": (),
}
# External memories of a trained model. `plug` needs no training; `tune` trains the
# layers of the memory, beside the frozen model.
MEMORIES = ("plug", "tune")
TWO_SCALES_FROM = 336  # the paper's horizon from which its encoder has two scales
# Columns for the errors of the best checkpoint.
ERRORS = {"validation_loss": float, "test_mse": float, "test_mae": float}


class Cell(NamedTuple):
    """One model of a study.

    Attributes:
      data: name or path of the series.
      horizon: steps of the forecast.
      window: steps of the input.
      arm: name in `ARMS`.
      seed: of start values, order and dropout.
      memory: "", or the external memory that a trained model has, of `MEMORIES`.
      bank: windows in the memory.
    """

    data: str
    horizon: int
    window: int
    arm: str
    seed: int
    memory: str = ""
    bank: int = 0

    @property
    def label(self) -> str:
        """The arm, with its memory."""
        return f"{self.arm}, {self.memory} memory" if self.memory else self.arm

    @property
    def title(self) -> str:
        name = f"{Path(self.data).name}, horizon {self.horizon}, window {self.window}"
        return f"{name}, {self.label}, seed {self.seed}"


class Forecasting(Application):
    """Studies of `configs/time_series.py`: data sets, horizons, windows, arms, seeds.

    Each seed is a run of its own, with its own best epoch.
    """

    free = (
        *Application.free,
        "horizon",
        "window",
        "seeds",
        "data.name",
        "external_memory",
        "bank",
    )

    def __init__(self, config: ConfigDict, workdir: Path = Path()):
        super().__init__(config, workdir)
        if config.external_memory:
            check_choice("external_memory", config.external_memory, MEMORIES)
        check_choice("train.loss", config.train.loss, LOSSES)
        check_choice("train.schedule", config.train.schedule, SCHEDULES)
        check_positive("train.clip", config.train.clip)
        for name in ("horizon", "window"):
            for steps in config[name]:
                check_count(name, steps, 1)
        for arm in config.arms:
            if arm_of(arm).reference:
                raise ValueError(
                    f"arm {arm!r} is of the authors' image code; they have released "
                    "none for series"
                )

    @property
    def title(self) -> str:
        names = ", ".join(forecasts.labels(self._names()).values())
        windows = ", ".join(map(str, self.config.window))
        return f"{names}, window {windows}"

    def _names(self) -> list[str]:
        """Names and paths of all series of the config."""
        names = [name.strip() for name in self.config.data.name.split(",")]
        return [name for name in names if name]

    def cells(self) -> list[Cell]:
        """Each model, and after it the same model with an external memory."""
        config, cells = self.config, []
        if not self._names():
            raise ValueError(
                "data.name must name a data set or a csv file, as in "
                f"--config.data.name=FILE.csv, got {config.data.name!r}"
            )
        check_distinct("data.name", self._names())
        check_named(horizon=config.horizon, window=config.window, arms=config.arms)
        for place, seed, arm in itertools.product(
            self._places(), config.seeds, config.arms
        ):
            cell = Cell(*place, arm, int(seed))
            cells.append(cell)
            if config.external_memory:
                memory = {"memory": config.external_memory, "bank": config.bank}
                cells.append(cell._replace(**memory))
        return cells

    def _places(self) -> list[tuple[str, int, int]]:
        """Data, horizon and window of every comparison."""
        return list(
            itertools.product(self._names(), self.config.horizon, self.config.window)
        )

    def check(self) -> None:
        """Loads all series, and builds each arm for the first."""
        for cell in self.cells():
            self._loaded(*cell[:3])
            if cell.memory:
                self._bank(cell)
        first = self.cells()[0]
        for arm in self.config.arms:
            self.trainer(first._replace(arm=arm))

    def run_of(self, cell: Any) -> Any:
        return _backbone(cell) if cell.memory == "plug" else cell

    def directory(self, cell: Any) -> Path:
        """Directory of the model; a tuned memory is a run within it."""
        several = len([one for one in self.cells() if not one.memory]) > 1
        place = self.workdir
        if several:
            place = place / directory_name(_backbone(cell))
        return place / "tuned_memory" if cell.memory == "tune" else place

    def read(self, cell: Any) -> dict[str, Any]:
        series, splits = self._loaded(*cell[:3])
        scaler = {name: x.tolist() for name, x in splits.scaler._asdict().items()}
        return {
            cell.data: fingerprint(series.values, series.dates, series.names),
            f"scaler of {cell.data}": scaler,
        }

    def seeds(self, cell: Any) -> tuple[int, ...]:
        return (cell.seed,)

    def series(self, name: str, **changes: Any) -> data.Series:
        """The series of that name, read by the options of `config.data`."""
        options = dict(self.config.data) | changes
        for own in ("name", "split"):
            del options[own]
        directory = options.pop("dir") or None
        for name_list in ("columns", "missing_values"):
            options[name_list] = tuple(options[name_list])
        return data.series(name, directory=directory, **options)

    @functools.cached_property
    def _loaded(self) -> Callable[[str, int, int], tuple[data.Series, data.Splits]]:
        """Series and splits of a data set, horizon and window; each is read once."""
        series = functools.cache(self.series)

        @functools.cache
        def load(
            name: str, horizon: int, window: int
        ) -> tuple[data.Series, data.Splits]:
            loaded = series(name)
            split = tuple(self.config.data.split) or name
            where = data.borders(split, len(loaded.values))
            splits = data.splits(loaded.values, where, in_len=window, out_len=horizon)
            return loaded, splits

        return load

    def task(self, cell: Any) -> Task:
        series, splits = self._loaded(*cell[:3])
        kind, plugged = self.config.train.loss, self._plugged(cell)

        def inputs(batch: Batch) -> tuple:
            return (batch["inputs"],)

        def score(model: Any, batch: Batch, key: Array | None) -> dict[str, Array]:
            forecast = model(*inputs(batch), key=key, **plugged).astype(jnp.float32)
            error = forecast - batch["targets"]
            metrics = {
                "mse": jnp.square(error).mean((-2, -1)),
                "mae": jnp.abs(error).mean((-2, -1)),
            }
            return {"loss": metrics[kind]} | metrics

        def unchanged(batch: Batch, key: Array) -> Batch:
            del key
            return batch

        build = model_of(self.config, cell, len(series.names))
        if cell.memory == "tune":
            build = self._tuned(cell)
        train, validation, test = _splits_of(splits)
        # The authors' code judges an epoch by the mean over batches, not over windows.
        released = self.config.model.preset == "released"
        validation = validation._replace(by_batch=released)
        return Task(build, score, inputs, unchanged, train, test, validation)

    def _bank(self, cell: Cell) -> tuple[np.ndarray, np.ndarray]:
        """Windows of the training split, evenly spaced in time, and their futures.

        While a memory is tuned, training windows next to a stored window find some of
        their own future in it; windows of validation and test never do.
        """
        train = self._loaded(*cell[:3])[1].train
        check_count("bank", cell.bank, 1, train.size)
        first = np.linspace(0, train.size - 1, cell.bank).round().astype(int)
        whole = train.rows[first[:, None] + np.arange(train.in_len + train.out_len)]
        return whole[:, : train.in_len], whole[:, train.in_len :]

    def _plugged(self, cell: Cell) -> dict[str, Array]:
        """Further arguments of the model: the windows of a plugged memory, or none."""
        if cell.memory != "plug":
            return {}
        return {"bank": jnp.asarray(self._bank(cell)[0])}

    def _tuned(self, cell: Cell) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that adds a memory to the best checkpoint of a trained model."""
        trainer = self.trainer(_backbone(cell))
        _, state = best_state(trainer, self.goal(), self.directory(_backbone(cell)))
        graphdef, trained = nnx.split(trainer.model(state))
        windows, futures = map(jnp.asarray, self._bank(cell))
        arm = arm_of(cell.arm)
        start = arm.start or self.config.model.kernel_start

        def build(rngs: nnx.Rngs) -> nnx.Module:
            kernel = None
            if arm.kernel:
                kernel = LinearFeatures(cell.window, start=start, rngs=rngs)
            backbone = nnx.merge(graphdef, trained)
            return TuneAndPlay(backbone, windows, futures, kernel=kernel, rngs=rngs)

        return build

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        options = self.config.train
        halved = {epoch * steps: 0.5 for epoch in SCHEDULES[options.schedule]}
        rate = optax.piecewise_constant_schedule(options.learning_rate, halved)
        return optax.chain(optax.clip_by_global_norm(options.clip), optax.adam(rate))

    def goal(self) -> Goal:
        options = self.config.train
        return Goal(options.epochs, "loss", True, options.patience or None)

    def untrained(self) -> Rows:
        rows = []
        kind = self.config.train.loss
        for place in self._places():
            series, splits = self._loaded(*place)
            cheap = baselines.baselines(splits.train, period=series.period)
            judged = baselines.evaluate(cheap, splits.validation)
            tested = baselines.evaluate(cheap, splits.test)
            for validation, test in zip(judged, tested, strict=True):
                row = self._record(Cell(*place, test["method"], 0))
                row |= {"seed": "", "test_mse": test["mse"], "test_mae": test["mae"]}
                rows.append(row | {"validation_loss": validation[kind]})
        return rows

    def summary(
        self, cell: Any, trainer: Trainer, history: Rows, directory: Path
    ) -> Rows:
        epochs = [row for row in history if row["phase"] == "task"]
        best = best_epoch(epochs, "validation_loss", True)
        tested = self._tested(cell, trainer, epochs[best - 1], directory)
        row = self._record(cell) | {
            "parameters": trainer.parameters,
            "epochs": len(epochs),
            "best_epoch": best,
        }
        row |= {name: tested[name] for name in ERRORS}
        row |= {name: epochs[-1][name] for name in SEPARATIONS}
        return [row]

    def _record(self, cell: Cell) -> dict[str, Any]:
        """The columns of a cell with the paper's numbers; results are empty."""
        row: dict[str, Any] = cell._asdict() | {"arm": cell.label}
        empty = ("parameters", "epochs", "best_epoch", *ERRORS, *SEPARATIONS)
        row |= dict.fromkeys(empty, "")
        stated = paper.FORECASTS.get((cell.data, cell.horizon))
        pairs = {"GSH": "plain", "GSH + U-Hop": "uhop"}
        known = stated is not None and cell.label in pairs
        numbers = getattr(stated, pairs[cell.label]) if known else ("", "")
        return row | dict(zip(("paper_mse", "paper_mae"), numbers, strict=True))

    def _tested(
        self, cell: Any, trainer: Trainer, best: dict[str, Any], directory: Path
    ) -> dict[str, Any]:
        """Errors of the best checkpoint on the test split, kept in `test.csv`."""
        path = _file(directory, cell, "test.csv")
        predictions = _file(directory, cell, "predictions.csv")
        picture = _file(directory, cell, "forecasts.png")
        for row in read_table(path, {"step": int, "bank": int, **ERRORS}):
            same = (row["step"], row["bank"]) == (best["step"], cell.bank)
            if same and predictions.exists() and picture.exists():
                return row
        step, state = best_state(trainer, self.goal(), directory)
        judge = Data(trainer)
        row = {"step": step, "bank": cell.bank}
        row["validation_loss"] = best["validation_loss"]
        if cell.memory == "plug":  # the run had no memory
            metrics = judge.evaluate(state, "validation")
            row["validation_loss"] = float(metrics["loss"][0])
        metrics = judge.evaluate(state, "test")
        row |= {f"test_{n}": float(metrics[n][0]) for n in forecasts.METRICS}
        series, splits = self._loaded(*cell[:3])
        places = np.linspace(0, splits.test.size - 1, forecasts.COLUMNS).astype(int)
        rows = splits.test.rows
        windows = [rows[i : i + cell.window] for i in places]
        windows.append(splits.scaler.scaled(series.values[-cell.window :]))
        *shown, ahead = self._forecasts(cell, trainer, state, windows)
        forecasts.export(predictions, series, ahead)
        starts = (splits.test.start + places + cell.window).tolist()
        forecasts.draw(picture, cell.title, series, starts, shown, cell.window)
        if jax.process_index() == 0:
            write_table(path, [row])
        return row

    def report(self, rows: Rows) -> str:
        return forecasts.table(rows)

    def figures(
        self, histories: Mapping[Any, Rows], rows: Rows
    ) -> Mapping[str, Sequence[plotting.Panel]]:
        """Errors against window or horizon if there are several, else curves."""
        config, parts = self.config, []
        for name, title in forecasts.labels(self._names()).items():
            chosen = [row for row in rows if row["data"] == name]
            if len(config.window) > 1:
                for horizon in config.horizon:
                    lot = [row for row in chosen if row["horizon"] == horizon]
                    parts += forecasts.errors(
                        f"{title}, horizon {horizon}", lot, "window"
                    )
                continue
            if len(config.horizon) > 1:
                parts += forecasts.errors(title, chosen, "horizon")
                continue
            for part in ("train", "validation"):
                long = [
                    dict(row, arm=cell.label)
                    for cell, history in histories.items()
                    if cell.data == name and cell.memory != "plug"
                    for row in history
                    if row["phase"] == "task"
                ]
                curves = records.curves(long, "epoch", f"{part}_loss", "arm")
                about = (title, curves, "epoch", f"{part} {config.train.loss.upper()}")
                parts.append(plotting.Panel(*about, styles=styles(curves)))
        return {"figure.png": parts}

    def predict(
        self, cell: Any, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        """Writes `predictions.csv`: the forecast from the last window of a csv."""
        series, splits = self._loaded(*cell[:3])
        given = self.series(self.config.predict, constant="keep")
        if given.names != series.names:
            raise ValueError(
                f"predict: the model has the columns {', '.join(series.names)}, "
                f"{self.config.predict} has {', '.join(given.names)}"
            )
        if len(given.values) < cell.window:
            raise ValueError(
                f"predict: a window takes {cell.window} rows, {self.config.predict} "
                f"has {len(given.values)}"
            )
        if not given.goes_on_like(series):
            raise ValueError(
                f"predict: the model has learned steps of {series.steps}, the rows of "
                f"{self.config.predict} have steps of {given.steps}"
            )
        given = given._replace(step=series.step, calendar=series.calendar)
        windows = [splits.scaler.scaled(given.values[-cell.window :])]
        (ahead,) = self._forecasts(cell, trainer, state, windows)
        path = _file(directory, cell, "predictions.csv")
        forecasts.export(path, given, ahead)
        return f"{len(ahead)} rows after {date_text(given.dates[-1])} written to {path}"

    def _forecasts(
        self,
        cell: Cell,
        trainer: Trainer,
        state: TrainState,
        windows: Sequence[np.ndarray],
    ) -> Sequence[np.ndarray]:
        """Forecasts `(horizon, D)` from standardised windows, in the original units."""
        inputs = jnp.asarray(np.stack(windows), jnp.float32)
        outputs = trainer.outputs(state, (inputs,), **self._plugged(cell))
        scaler = self._loaded(*cell[:3])[1].scaler
        return list(scaler.unscaled(np.asarray(outputs)))


def model_of(
    config: ConfigDict, cell: Cell, series: int
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
    size = options.pop("size")

    def with_size(size: int, kernel: bool, rngs: nnx.Rngs) -> nnx.Module:
        def features() -> nnx.Module:
            return LinearFeatures(
                size, start=arm.start or start, dtype=options["dtype"], rngs=rngs
            )

        return STanHop(
            series,
            cell.window,
            cell.horizon,
            size=size,
            kernel=features if kernel else False,
            rngs=rngs,
            **options,
        )

    heads = options["num_heads"]
    return with_matched_size(
        with_size, size, heads, matched=arm.matched, kernel=arm.kernel
    )


def _backbone(cell: Cell) -> Cell:
    """The cell without an external memory."""
    return cell._replace(memory="", bank=0)


def _file(directory: Path, cell: Cell, name: str) -> Path:
    """Path of a file of a cell; a plugged memory shares the backbone's directory."""
    return directory / (f"plug_{name}" if cell.memory == "plug" else name)


def _splits_of(splits: data.Splits) -> list[Split]:
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
