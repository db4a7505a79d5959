"""A study from its config: one run, or many, and their files."""

import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from uhop_jax import plotting, records
from uhop_jax import workdir as workdirs
from uhop_jax._files import user_path
from uhop_jax.command_line import check_config, cost, start_distributed
from uhop_jax.training.application import Application, Rows
from uhop_jax.training.bags import BagClassification
from uhop_jax.training.cells import AnyCell
from uhop_jax.training.examples import Data
from uhop_jax.training.forecasting import Forecasting
from uhop_jax.training.recall import Recall
from uhop_jax.training.run import Options, best_state, train
from uhop_jax.training.vision import Vision

APPLICATIONS: dict[str, type[Application]] = {
    "vision": Vision,
    "forecasting": Forecasting,
    "bags": BagClassification,
    "recall": Recall,
}
FEW = 4  # directories of runs that are named after a study
# Files of `configs/` by task.
CONFIGS = {
    "vision": "vision",
    "forecasting": "time_series",
    "bags": "bags",
    "recall": "recall",
}


def train_and_evaluate(config: ConfigDict, workdir: Path) -> None:
    """Trains every cell of a config of `configs/` with a task.

    Each cell is a run with its own directory (`workdir` itself for a single run):
    config, `metrics.csv`, `curves.png`, TensorBoard events, checkpoints. A finished run
    is not repeated, and an interrupted run goes on. `workdir` gets `results.csv` over
    all runs; `figure.png` if there are several, and `curves.png` if images are
    classified and their number varies.

    With `config.eval_only`, `config.predict` or `config.export` the checkpoint of each
    run is used instead: the best by the validation split or, without such a split, the
    last. The table of results shows the same checkpoint.

    Raises:
      ValueError: if the config cannot be run, or `workdir` holds another run, a run on
        other data, or files of something else.
      OSError: if a file cannot be read or written.
      FloatingPointError: if a loss is no longer finite.
    """
    check_config(config, *CONFIGS.values())
    if config.distributed:
        start_distributed()
    study = APPLICATIONS[config.task](config, workdir)
    cells = study.cells()
    if config.predict or config.export or config.eval_only:
        for cell in cells:
            print(_judged(study, cell))
        return
    study.check()
    places = list(map(study.directory, cells))
    for cell, directory in zip(cells, places, strict=True):
        workdirs.check(directory, *_bound(study, cell))
    with contextlib.ExitStack() as held:
        if workdir not in places:
            held.enter_context(workdirs.claimed(workdir, _fixed(study), {}))
        _train_cells(study, cells, held)


def _train_cells(
    study: Application, cells: Sequence[AnyCell], held: contextlib.ExitStack
) -> None:
    """Trains and judges every cell; holds the directories of all runs to the end."""
    config, workdir, rows = study.config, study.workdir, study.untrained()
    histories: dict[Any, Rows] = {}
    chief = jax.process_index() == 0
    if chief:
        runs, shipped = len(set(map(study.run_of, cells))), ""
        if text := cost(CONFIGS[config.task], config.variant):
            shipped = f"; cost of {config.variant} as shipped, on 2 cores: {text}"
        number = f"{runs} run{'s' * (runs > 1)} of up to {config.train.epochs} epochs"
        print(f"{number}{shipped}", flush=True)
    for cell in cells:
        began = time.monotonic()
        run, directory = study.run_of(cell), study.directory(cell)
        trainer = study.trainer(cell)
        if run not in histories:
            held.enter_context(workdirs.claimed(directory, *_bound(study, run)))
            options = _options(config)._replace(title=study.curves_title(cell))
            histories[run] = train(trainer, study.goal(), directory, options=options)
        histories[cell] = histories[run]
        rows += study.summary(cell, trainer, histories[cell], directory)
        if chief:
            workdirs.write_table(workdir / "results.csv", rows)
            print(f"{cell.title}: {time.monotonic() - began:.0f} s", flush=True)
    if chief:
        if len(cells) > 1:
            for name, parts in study.figures(histories, rows).items():
                title = titled(study.title, parts)
                draw = functools.partial(
                    plotting.panels, parts=parts, title=title, columns=2
                )
                workdirs.write_file(workdir / name, draw)
        print(f"\n{study.title}\n\n{study.report(rows)}\n")
        print(f"written to {workdir}: {_files(workdir)}")


def titled(title: str, parts: Sequence[plotting.Panel]) -> str:
    """The title of a figure, which says what its error bars are, if it has any."""
    curves = [curve for part in parts for curve in part.series.values()]
    spread = any(any(curve.spread) for curve in curves)
    return title + " (mean ± standard deviation)" * spread


def _judged(study: Application, cell: AnyCell) -> str:
    """Applies the checkpoint of a run to `config.predict` or to the test split.

    With `config.export` it writes the checkpoint as a function.
    """
    given, directory = study.config.predict, study.directory(cell)
    if given and not user_path(given).exists():
        raise ValueError(f"predict: no such file or folder: {given}")
    bound = _bound(study, cell)
    workdirs.check(directory, *bound)
    trainer = study.trainer(cell)
    step, state = best_state(trainer, study.goal(), directory)
    asked = [study.predict] * bool(given) + [study.export] * bool(study.config.export)
    if asked:
        with workdirs.claimed(directory, *bound):
            done = [use(cell, trainer, state, directory) for use in asked]
        return "\n".join(f"checkpoint {step}: {message}" for message in done)
    scores = Data(trainer, on_device=_options(study.config).on_device).evaluate(
        state, "test"
    )
    text = ", ".join(
        f"{name} {records.mean_and_spread(list(values))}"
        for name, values in scores.items()
    )
    chosen = "best by validation" if trainer.task.validation else "last epoch"
    number = f"{trainer.task.test.size} test examples"
    return f"{cell.title}, step {step} ({chosen}), {number}: {text}"


def _bound(study: Application, cell: AnyCell) -> tuple[ConfigDict, dict[str, Any]]:
    """Config and data that the directory of a cell is bound to."""
    run = study.run_of(cell)
    return _fixed(study, run), study.read(run)


def _options(config: ConfigDict) -> Options:
    """The options of a run that the config names."""
    return Options(config.data.get("on_device", True), config.train.checkpoint_seconds)


def _fixed(study: Application, cell: AnyCell | None = None) -> ConfigDict:
    """The part of a config that a directory is bound to."""
    copy = ConfigDict(study.config.to_dict())
    for name in study.free:
        *path, last = name.split(".")
        node = copy
        for part in path:
            node = node[part]
        del node[last]
    if cell is not None:
        copy.cell = ConfigDict(cell._asdict())
        copy.seeds = study.seeds(cell)
    return copy


def _files(workdir: Path) -> str:
    """Names of the files of a study, and of its directories if they are few."""
    paths = [path for path in sorted(workdir.iterdir()) if path.name[0] != "."]
    files = [path.name for path in paths if path.is_file()]
    runs = [f"{path.name}/" for path in paths if path.is_dir()]
    return ", ".join([*files, *(runs if len(runs) <= FEW else [f"{len(runs)} runs"])])
