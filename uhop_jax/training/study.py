"""A study from its config: one run, or many, and their files."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from uhop_jax import plotting, records
from uhop_jax._checks import check_choice
from uhop_jax.command_line import start_distributed
from uhop_jax.training.application import Application, Cell, Rows
from uhop_jax.training.forecasting import Forecasting
from uhop_jax.training.run import Data, Options, best_state, train
from uhop_jax.training.vision import Vision

APPLICATIONS: dict[str, type[Application]] = {
    "vision": Vision,
    "forecasting": Forecasting,
}


def train_and_evaluate(config: ConfigDict, workdir: Path) -> None:
    """Trains every cell of a config of `configs/vision.py` or `configs/time_series.py`.

    Each is a run with its own directory (`workdir` itself if there is but one): config,
    `metrics.csv`, `curves.png`, TensorBoard events, checkpoints. A run that is finished
    is not repeated, one that was interrupted goes on. `workdir` gets `results.csv` over
    all of them; `figure.png` if there are several, and `curves.png` if images are
    classified and their number varies.

    Raises:
      ValueError: if the config cannot be run, or `workdir` holds another run.
      FloatingPointError: if a loss is no longer finite.
    """
    if config.distributed:
        start_distributed()
    check_choice("task", config.task, APPLICATIONS)
    study = APPLICATIONS[config.task](config, workdir)
    cells = study.cells()
    if config.predict or config.eval_only:
        for cell in cells:
            print(_judged(study, cell))
        return
    study.check()
    if workdir not in map(study.directory, cells):
        records.claim(_fixed(study), workdir)
    rows = study.untrained()
    histories: dict[Any, Rows] = {}
    runs: dict[Path, Rows] = {}
    chief = jax.process_index() == 0
    for cell in cells:
        began = time.monotonic()
        trainer, directory = study.trainer(cell), study.directory(cell)
        if directory not in runs:
            records.claim(_fixed(study, cell), directory)
            options = _options(config)._replace(title=study.curves_title(cell))
            runs[directory] = train(trainer, study.goal(), directory, options=options)
        histories[cell] = runs[directory]
        rows += study.summary(cell, trainer, histories[cell], directory)
        if chief:
            records.write_csv(workdir / "results.csv", rows)
            print(f"{cell.title}: {time.monotonic() - began:.0f} s", flush=True)
    if chief:
        if len(cells) > 1:
            spread = " (mean ± standard deviation)" * (len(config.seeds) > 1)
            for name, parts in study.figures(histories, rows).items():
                title = study.title + spread
                plotting.panels(workdir / name, parts, title=title, columns=2)
        print(f"\n{study.title}\n\n{study.report(rows)}\n")
        print(f"written to {workdir}: {', '.join(_files(workdir))}")


def _judged(study: Application, cell: Cell) -> str:
    """What the best checkpoint of a run says of `config.predict`, or scores."""
    given, directory = study.config.predict, study.directory(cell)
    if given and not Path(given).exists():
        raise ValueError(f"predict: no such file or folder: {given}")
    trainer = study.trainer(cell)
    step, state = best_state(trainer, study.goal(), directory)
    if study.config.predict:
        return f"checkpoint {step}: {study.predict(cell, trainer, state, directory)}"
    found = Data(trainer, on_device=_options(study.config).on_device).evaluate(
        state, "test"
    )
    text = ", ".join(
        f"{name} {records.mean_and_spread(list(values))}"
        for name, values in found.items()
    )
    return f"{cell.title}, step {step}, {trainer.task.test.size} test examples: {text}"


def _options(config: ConfigDict) -> Options:
    return Options(config.data.get("on_device", True), config.train.checkpoint_seconds)


def _fixed(study: Application, cell: Cell | None = None) -> ConfigDict:
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


def _files(workdir: Path) -> Iterator[str]:
    for path in sorted(workdir.iterdir()):
        if not path.name.startswith("."):
            yield path.name + "/" * path.is_dir()
