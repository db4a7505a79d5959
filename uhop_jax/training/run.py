"""A run: from its seed, or from its latest checkpoint, to its files."""

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from uhop_jax._checks import check_count
from uhop_jax.progress import Progress
from uhop_jax.training.checkpoints import Checkpoints
from uhop_jax.training.display import Board, draw_curves
from uhop_jax.training.examples import Data, Phase
from uhop_jax.training.judging import (
    Goal,
    columns,
    judged_step,
    means,
    patience_is_over,
)
from uhop_jax.training.steps import Trainer
from uhop_jax.training.task import SEPARATIONS, TrainState
from uhop_jax.workdir import AGAIN, read_table, write_table


class Options(NamedTuple):
    """Options that change no result of a run.

    Attributes:
      on_device: whether device memory holds all examples; otherwise they are streamed.
      checkpoint_seconds: between two checkpoints within an epoch.
      progress: whether progress is shown.
      title: above the curves of the run.
    """

    on_device: bool = True
    checkpoint_seconds: float = 60.0
    progress: bool = True
    title: str = ""


def train(
    trainer: Trainer, goal: Goal, workdir: Path, *, options: Options = Options()
) -> list[dict[str, Any]]:
    """Trains to the end, or continues a run that was interrupted.

    Writes `metrics.csv` (one line for each epoch and seed: metrics while training, of
    the validation or else the test split, and with `test_train` of the train split as
    `fit_`; the separation loss and its gap to the least value, means over the
    layers and the steps of Stage I), `curves.png`, TensorBoard events and checkpoints
    into `workdir`. Interrupted by a signal, a run saves a checkpoint first; killed, it
    loses at most the steps after the last checkpoint, and repeats them bit for bit.

    Returns:
      The records of `metrics.csv`.

    Raises:
      ValueError: if `workdir` holds another run, or a checkpoint of another model.
      OSError: if a checkpoint cannot be read or written.
      FloatingPointError: if the loss is no longer finite; checkpoints stay.
    """
    check_count("epochs", goal.epochs, 1)
    with closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        rows = _train(trainer, goal, workdir, checkpoints, options)
    if jax.process_index() == 0:
        draw_curves(workdir / "curves.png", options.title, rows, trainer, goal)
    return rows


def _train(
    trainer: Trainer,
    goal: Goal,
    workdir: Path,
    checkpoints: Checkpoints,
    options: Options,
) -> list[dict[str, Any]]:
    chief = jax.process_index() == 0
    path = workdir / "metrics.csv"
    rows = read_table(path, columns(trainer, goal))
    metric = f"{trainer.task.judge}_{goal.metric}"
    state = trainer.init()
    step = checkpoints.latest() or 0
    if step:
        state = checkpoints.restore(step, state)
    rows = [row for row in rows if row["step"] <= step]
    phases = _phases(trainer, goal)
    _check_whole(path, rows, phases, trainer.seeds, step)
    total = sum(phase.epochs * phase.steps for phase in phases)
    data = Data(trainer, on_device=options.on_device)
    saved = time.monotonic()
    board = Board(workdir / "tensorboard")
    progress = Progress(
        workdir.name,
        total * trainer.batch_size,
        "examples",
        done=step * trainer.batch_size,
        show=options.progress and chief,
    )
    try:
        with _signals() as stopped:
            for phase, epoch, offset, begun in _epochs(phases, step):
                if patience_is_over(rows, metric, goal):
                    break
                for done, new_state in data.run(state, phase, epoch, offset):
                    state, step = new_state, begun + done
                    progress.advance(step * trainer.batch_size - progress.done)
                    _check_finite(state, phase, epoch, checkpoints)
                    late = time.monotonic() - saved > options.checkpoint_seconds
                    if done < phase.steps and (late or stopped):
                        checkpoints.save(step, state, judged_step(trainer, goal, rows))
                        saved = time.monotonic()
                        if stopped:
                            raise KeyboardInterrupt
                new = _records(data, goal, state, phase, epoch, step)
                rows += new
                if chief:
                    write_table(path, rows)
                    board.log(new)
                state = state._replace(sums=trainer.place(trainer.no_sums()))
                checkpoints.save(step, state, judged_step(trainer, goal, rows))
                saved = time.monotonic()
                if phase.name == "task":
                    value = means(new)[metric]
                    progress.note(f"epoch {epoch + 1}, {metric} {value:.4g}")
                if stopped:
                    raise KeyboardInterrupt
    finally:
        progress.close()
        board.close()
    return rows


def best_state(trainer: Trainer, goal: Goal, workdir: Path) -> tuple[int, TrainState]:
    """Step and state of the checkpoint that a run is judged by, see `judged_epoch`.

    Raises:
      ValueError: if the run has no such checkpoint that can be read.
    """
    directory = workdir / "checkpoints"
    rows = read_table(workdir / "metrics.csv", columns(trainer, goal))
    if not rows or not directory.is_dir():
        raise ValueError(f"there is no checkpoint in {directory}; train first")
    like = jax.eval_shape(trainer.init)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=trainer.replicated),
        like,
    )
    with closing(Checkpoints(directory, read_only=True)) as checkpoints:
        last = checkpoints.latest() or 0
        rows = [row for row in rows if row["step"] <= last]
        step = judged_step(trainer, goal, rows)
        if step is None:
            raise ValueError(f"no epoch in {workdir} is finished; train first")
        return step, checkpoints.restore(step, like)


def _phases(trainer: Trainer, goal: Goal) -> list[Phase]:
    """The task, after Stage I alone if the schedule has such a phase."""
    task = Phase("task", goal.epochs, trainer.steps_per_epoch)
    stage = trainer.stage_one
    if stage.schedule not in ("warmup", "reference"):
        return [task]
    steps = trainer.task.train.size // trainer.stage_batch
    return [Phase("stage_one", stage.epochs, steps), task]


def _epochs(
    phases: Sequence[Phase], step: int
) -> Iterator[tuple[Phase, int, int, int]]:
    """Phase, epoch, first step within it, and the number of the epoch's first step."""
    begun = 0
    for phase in phases:
        for epoch in range(phase.epochs):
            if step < begun + phase.steps:
                yield phase, epoch, max(step - begun, 0), begun
            begun += phase.steps


def _check_whole(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    phases: Sequence[Phase],
    seeds: Sequence[int],
    step: int,
) -> None:
    """Refuses metrics that lack an epoch from before the checkpoint at `step`."""
    ended, expected = 0, []
    for phase in phases:
        for epoch in range(1, phase.epochs + 1):
            ended += phase.steps
            if ended > step:
                break
            expected += [(phase.name, epoch, ended, seed) for seed in seeds]
    keys = ("phase", "epoch", "step", "seed")
    present = {tuple(row[key] for key in keys) for row in rows}
    if missing := [key for key in expected if key not in present]:
        name, epoch, _, seed = missing[0]
        raise ValueError(
            f"{path} lacks epoch {epoch} of phase {name}, seed {seed}, which "
            f"checkpoint {step} has behind it; {AGAIN}"
        )


def _records(
    data: Data, goal: Goal, state: TrainState, phase: Phase, epoch: int, step: int
) -> list[dict[str, Any]]:
    """One record for each seed at the end of an epoch."""
    trainer, seeds = data.trainer, data.trainer.seeds
    sums = {name: np.asarray(x, np.float64) for name, x in state.sums.items()}
    by_seed: dict[str, Any] = {
        name: [""] * len(seeds) for name in columns(trainer, goal)
    }
    if phase.name == "task":
        for name in trainer.metrics:
            by_seed[f"train_{name}"] = sums[name] / sums["examples"]
        judge = trainer.task.judge
        parts = {judge: judge} | ({"fit": "train"} if goal.test_train else {})
        for prefix, part in parts.items():
            for name, values in data.evaluate(state, part).items():
                by_seed[f"{prefix}_{name}"] = values
    separations = phase.steps
    if phase.name == "task":
        bilevel = trainer.stage_one.schedule == "bilevel"
        separations *= trainer.stage_one.steps if bilevel else 0
    if separations:
        by_seed |= {name: sums[name] / separations for name in SEPARATIONS}
    rows = []
    for number, seed in enumerate(seeds):
        row: dict[str, Any] = {name: x[number] for name, x in by_seed.items()}
        row = {name: x if x == "" else float(x) for name, x in row.items()}
        row |= {"phase": phase.name, "epoch": epoch + 1, "step": step, "seed": seed}
        rows.append(row)
    return rows


def _check_finite(
    state: TrainState, phase: Phase, epoch: int, checkpoints: Checkpoints
) -> None:
    """Refuses to go on with a loss that is not finite."""
    for name in ("loss", "separation"):
        if not np.isfinite(np.asarray(state.sums[name])).all():
            part = "train" if name == "loss" else "stage_one"
            raise FloatingPointError(
                f"the {name} is no longer finite in epoch {epoch + 1} of phase "
                f"{phase.name}; checkpoints in {checkpoints.directory} are from "
                f"before; lower {part}.learning_rate"
            )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the first SIGINT or SIGTERM, so that the current steps are finished."""
    caught: list[int] = []
    handlers: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        del frame
        caught.append(number)
        for one, handler in handlers.items():  # a second signal acts at once
            signal.signal(one, handler)

    for which in (signal.SIGINT, signal.SIGTERM):
        try:
            handlers[which] = signal.signal(which, note)
        except ValueError:  # not the main thread
            break
    try:
        yield caught
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
