"""Forecasting: series, STanHop-Net and its recipe from a config, tables and figures."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array
from ml_collections import ConfigDict

from uhop_jax import data, plotting
from uhop_jax._checks import (
    check_choice,
    check_count,
    check_distinct,
    check_named,
    check_positive,
)
from uhop_jax.data.dates import date_text
from uhop_jax.layers import LinearFeatures
from uhop_jax.models import TuneAndPlay, baselines
from uhop_jax.training import forecast_report
from uhop_jax.training.application import Application, Rows
from uhop_jax.training.arms import arm_of, check_own_arms
from uhop_jax.training.cells import ForecastCell, directory_name
from uhop_jax.training.examples import Data
from uhop_jax.training.exporting import FILE, write_export
from uhop_jax.training.forecast_model import forecast_model, splits_of
from uhop_jax.training.judging import best_epoch
from uhop_jax.training.run import best_state
from uhop_jax.training.steps import Trainer
from uhop_jax.training.task import SEPARATIONS, Batch, Task, TrainState
from uhop_jax.workdir import fingerprint, read_table, write_table

LOSSES = ("mae", "mse")
# Epochs after which the learning rate is halved.
SCHEDULES = {"type1": (2, 4, 6, 8, 10), "type2": (5, 10, 15, 20, 25), "constant": ()}
# External memories of a trained model. `plug` needs no training; `tune` trains the
# layers of the memory, beside the frozen model.
MEMORIES = ("plug", "tune")


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
        check_own_arms(config.arms, "series")

    @property
    def title(self) -> str:
        names = ", ".join(forecast_report.labels(self._names()).values())
        windows = ", ".join(map(str, self.config.window))
        return f"{names}, window {windows}"

    def _names(self) -> list[str]:
        """Names and paths of all series of the config."""
        names = [name.strip() for name in self.config.data.name.split(",")]
        return [name for name in names if name]

    def cells(self) -> list[ForecastCell]:
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
            cell = ForecastCell(*place, arm, int(seed))
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

    def trainer(self, cell: Any) -> Trainer:
        """The trainer of a cell; seeds share the compiled programs."""
        if cell.memory:
            return super().trainer(cell)
        like = self._trainer_of(cell._replace(seed=0))
        return like.on(like.task, self.seeds(cell))

    @functools.cached_property
    def _trainer_of(self) -> Callable[[ForecastCell], Trainer]:
        """The trainer of each arm for one place."""
        return functools.lru_cache(len(self.config.arms))(super().trainer)

    def run_of(self, cell: Any) -> Any:
        return cell.backbone if cell.memory == "plug" else cell

    def directory(self, cell: Any) -> Path:
        """Directory of the model; a tuned memory is a run within it."""
        several = len([one for one in self.cells() if not one.memory]) > 1
        place = self.workdir
        if several:
            place = place / directory_name(cell.backbone)
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

        build = forecast_model(self.config, cell, len(series.names))
        if cell.memory == "tune":
            build = self._tuned(cell)
        train, validation, test = splits_of(splits)
        # The authors' code judges an epoch by the mean over batches, not over windows.
        released = self.config.model.preset == "released"
        validation = validation._replace(by_batch=released)
        return Task(build, score, inputs, train, test, validation)

    def _bank(self, cell: ForecastCell) -> tuple[np.ndarray, np.ndarray]:
        """Windows of the training split, evenly spaced in time, and their futures.

        While a memory is tuned, training windows next to a stored window find some of
        their own future in it; windows of validation and test never do.
        """
        train = self._loaded(*cell[:3])[1].train
        check_count("bank", cell.bank, 1, train.size)
        first = np.linspace(0, train.size - 1, cell.bank).round().astype(int)
        whole = train.rows[first[:, None] + np.arange(train.in_len + train.out_len)]
        return whole[:, : train.in_len], whole[:, train.in_len :]

    def _plugged(self, cell: ForecastCell) -> dict[str, Array]:
        """Further arguments of the model: the windows of a plugged memory, or none."""
        if cell.memory != "plug":
            return {}
        return {"bank": jnp.asarray(self._bank(cell)[0])}

    def _tuned(self, cell: ForecastCell) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that adds a memory to the best checkpoint of a trained model."""
        trainer = self.trainer(cell.backbone)
        _, state = best_state(trainer, self.goal(), self.directory(cell.backbone))
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

    def untrained(self) -> Rows:
        rows = []
        kind = self.config.train.loss
        for place in self._places():
            series, splits = self._loaded(*place)
            cheap = baselines.baselines(splits.train, period=series.period)
            judged = baselines.evaluate(cheap, splits.validation)
            tested = baselines.evaluate(cheap, splits.test)
            for validation, test in zip(judged, tested, strict=True):
                row = forecast_report.record(ForecastCell(*place, test["method"], 0))
                row |= {"seed": "", "test_mse": test["mse"], "test_mae": test["mae"]}
                rows.append(row | {"validation_loss": validation[kind]})
        return rows

    def summary(
        self, cell: Any, trainer: Trainer, history: Rows, directory: Path
    ) -> Rows:
        epochs = [row for row in history if row["phase"] == "task"]
        best = best_epoch(epochs, "validation_loss", True)
        tested = self._tested(cell, trainer, epochs[best - 1], directory)
        row = forecast_report.record(cell) | {
            "parameters": trainer.parameters,
            "epochs": len(epochs),
            "best_epoch": best,
        }
        row |= {name: tested[name] for name in forecast_report.ERRORS}
        row |= {name: epochs[-1][name] for name in SEPARATIONS}
        return [row]

    def _tested(
        self, cell: Any, trainer: Trainer, best: dict[str, Any], directory: Path
    ) -> dict[str, Any]:
        """Errors of the best checkpoint on the test split, kept in `test.csv`."""
        path = _file(directory, cell, "test.csv")
        predictions = _file(directory, cell, "predictions.csv")
        picture = _file(directory, cell, "forecasts.png")
        for row in read_table(
            path, {"step": int, "bank": int, **forecast_report.ERRORS}
        ):
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
        row |= {f"test_{n}": float(metrics[n][0]) for n in forecast_report.METRICS}
        series, splits = self._loaded(*cell[:3])
        places = np.linspace(0, splits.test.size - 1, forecast_report.COLUMNS).astype(
            int
        )
        rows = splits.test.rows
        windows = [rows[i : i + cell.window] for i in places]
        windows.append(splits.scaler.scaled(series.values[-cell.window :]))
        *shown, ahead = self._forecasts(cell, trainer, state, windows)
        forecast_report.export(predictions, series, ahead)
        starts = (splits.test.start + places + cell.window).tolist()
        forecast_report.draw(picture, cell.title, series, starts, shown, cell.window)
        if jax.process_index() == 0:
            write_table(path, [row])
        return row

    def report(self, rows: Rows) -> str:
        return forecast_report.table(rows)

    def figures(
        self, histories: Mapping[Any, Rows], rows: Rows
    ) -> Mapping[str, Sequence[plotting.Panel]]:
        """Errors against window or horizon if there are several, else curves."""
        parts = forecast_report.panels(self.config, self._names(), histories, rows)
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
        given = given._replace(step=series.step)
        windows = [splits.scaler.scaled(given.values[-cell.window :])]
        (ahead,) = self._forecasts(cell, trainer, state, windows)
        path = _file(directory, cell, "predictions.csv")
        forecast_report.export(path, given, ahead)
        return f"{len(ahead)} rows after {date_text(given.dates[-1])} written to {path}"

    def export(
        self, cell: Any, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        """Writes a function from windows to forecasts, in the original units."""
        series, splits = self._loaded(*cell[:3])
        model, plugged = trainer.model_on_host(state), self._plugged(cell)
        mean, deviation = (x.astype(np.float32) for x in splits.scaler)

        def forecasts(windows: Array) -> Array:
            return model((windows - mean) / deviation, **plugged) * deviation + mean

        shape = cell.window, len(series.names)
        path = _file(directory, cell, FILE)
        return write_export(path, forecasts, shape, jnp.float32)

    def _forecasts(
        self,
        cell: ForecastCell,
        trainer: Trainer,
        state: TrainState,
        windows: Sequence[np.ndarray],
    ) -> Sequence[np.ndarray]:
        """Forecasts `(horizon, D)` from standardised windows, in the original units."""
        inputs = jnp.asarray(np.stack(windows), jnp.float32)
        outputs = trainer.outputs(state, (inputs,), **self._plugged(cell))
        scaler = self._loaded(*cell[:3])[1].scaler
        return list(scaler.unscaled(np.asarray(outputs)))


def _file(directory: Path, cell: ForecastCell, name: str) -> Path:
    """Path of a file of a cell; a plugged memory shares the backbone's directory."""
    return directory / (f"plug_{name}" if cell.memory == "plug" else name)
