"""A run: from its seed, or from its latest checkpoint, to its files."""

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from uhop_jax import plotting, records
from uhop_jax._checks import check_count
from uhop_jax.progress import Progress
from uhop_jax.training.checkpoints import Checkpoints
from uhop_jax.training.steps import SEPARATIONS, Split, Trainer, TrainState
from uhop_jax.workdir import AGAIN, read_table, write_file, write_table

CHUNK_SECONDS = 1.0  # of steps between two looks at the clock
STREAM_BYTES = 256e6  # of examples that are streamed at once


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


class Goal(NamedTuple):
    """The end of a run, and the metric of its best epoch.

    Attributes:
      epochs: at most.
      metric: such as `accuracy`, of the validation split; without such a split, of the
        test split (then the metric decides on patience only, see `judged_epoch`).
      least: whether the least value is best.
      patience: epochs without improvement after which the run ends; None for no limit.
      test_train: whether each epoch also judges the train split, without dropout.
    """

    epochs: int
    metric: str
    least: bool = False
    patience: int | None = None
    test_train: bool = False


def columns(trainer: Trainer, goal: Goal) -> dict[str, type]:
    """Columns of `metrics.csv`, with their types."""
    types: dict[str, type] = {"phase": str, "epoch": int, "step": int, "seed": int}
    parts = ["train", trainer.task.judge, *(["fit"] if goal.test_train else [])]
    for part in parts:
        types |= {f"{part}_{name}": float for name in trainer.metrics}
    return types | dict.fromkeys(SEPARATIONS, float)


def train(
    trainer: Trainer,
    goal: Goal,
    workdir: Path,
    *,
    options: Options = Options(),
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
        _curves(workdir / "curves.png", options.title, rows, trainer, goal)
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
                if _patience_is_over(rows, metric, goal):
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
                    value = _means(new)[metric]
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


def judged_epoch(
    trainer: Trainer, goal: Goal, rows: Sequence[Mapping[str, Any]]
) -> int:
    """Number of the epoch whose checkpoint a run is judged by, from 1; 0 if none is.

    The epoch is the best by the validation split. Without such a split it is the last,
    since the test split must not choose.
    """
    if trainer.task.validation is None:
        return max((r["epoch"] for r in rows if r["phase"] == "task"), default=0)
    return best_epoch(rows, f"{trainer.task.judge}_{goal.metric}", goal.least)


def judged_step(
    trainer: Trainer, goal: Goal, rows: Sequence[Mapping[str, Any]]
) -> int | None:
    """The step at the end of `judged_epoch`; None if no epoch is finished."""
    key = ("task", judged_epoch(trainer, goal, rows))
    return next((r["step"] for r in rows if (r["phase"], r["epoch"]) == key), None)


class Phase(NamedTuple):
    """A part of a run: `stage_one` alone, or the `task`."""

    name: str
    epochs: int
    steps: int  # of an epoch


class Data:
    """The examples of a run, on the device or streamed to it.

    Args:
      trainer: trainer of the task that has the examples.
      on_device: whether examples stay on the device once they are used.
    """

    def __init__(self, trainer: Trainer, *, on_device: bool = True):
        self.trainer, self.on_device = trainer, on_device
        self._placed: dict[int, Any] = {}
        self._steps = 1

    def run(
        self, state: TrainState, phase: Phase, epoch: int, first: int
    ) -> Iterator[tuple[int, TrainState]]:
        """Runs an epoch from step `first` on; yields step and state by chunks."""
        trainer, split = self.trainer, self.trainer.task.train
        if phase.name == "task":
            order = trainer.order(epoch)
        else:
            order = {"stage": trainer.stage_order(epoch)}
        resident = self._resident(split)
        if not resident:
            order = jax.tree.map(np.asarray, order)
            self._steps = self._streamed_steps(split, order)
            chunk = self._gathered(split, order, first)
        while first < phase.steps:
            began = time.monotonic()
            count = min(self._steps, phase.steps - first)
            arrays, rows, at = (self._arrays(split), order, first)
            if not resident:
                (arrays, rows), at = chunk, 0
            if phase.name == "task":
                number = epoch * phase.steps + first - at
                state = trainer.advance(state, arrays, rows, at, at + count, number)
            else:
                state = trainer.separate(state, arrays, rows["stage"], at, at + count)
            first += count
            if not resident and first < phase.steps:  # while the device works
                chunk = self._gathered(split, order, first)
            jax.block_until_ready(state.sums)
            if resident and time.monotonic() - began < CHUNK_SECONDS / 2:
                self._steps *= 2
            yield first, state

    def evaluate(self, state: TrainState, part: str) -> dict[str, np.ndarray]:
        """Mean of each metric over the split named `part`, `(seeds,)` each."""
        split: Split = getattr(self.trainer.task, part)
        names, batch = self.trainer.metrics, self.trainer.batch_size
        drawn = split.drawn_from is not None
        if drawn and not self._resident(split):
            raise ValueError(
                "train.test_train judges examples that each seed draws, which are not "
                "streamed: data.on_device must be True, got False"
            )
        count, last = split.size, 1.0
        if split.by_batch and split.size % batch:
            last = batch / (split.size % batch)
            count = -(-split.size // batch) * batch
        sums = {name: np.zeros(len(self.trainer.keys)) for name in names}
        for arrays, number in self._blocks(split):
            totals = self.trainer.evaluate(
                state, arrays, number, split.take, last, drawn=drawn
            )
            for name in names:
                sums[name] += np.asarray(totals[name], np.float64)
        return {name: total / count for name, total in sums.items()}

    def _resident(self, split: Split) -> bool:
        """Whether the arrays of a split stay on the device."""
        return self.on_device or not split.by_row

    def _arrays(self, split: Split) -> Any:
        """The arrays of a split on the device, placed once."""
        if id(split) not in self._placed:
            self._placed[id(split)] = self.trainer.place(dict(split.arrays))
        return self._placed[id(split)]

    def _blocks(self, split: Split) -> Iterator[tuple[Any, int]]:
        """Arrays of a split, whole or in parts, and the number of their examples."""
        if self._resident(split):
            yield self._arrays(split), split.size
            return
        batch = self.trainer.batch_size
        size = max(int(STREAM_BYTES / _row_bytes(split)) // batch, 1) * batch
        for first in range(0, split.size, size):
            index = np.minimum(np.arange(first, first + size), split.size - 1)
            arrays = {name: x[index] for name, x in split.arrays.items()}
            yield self.trainer.place(arrays), min(size, split.size - first)

    def _streamed_steps(self, split: Split, order: dict[str, np.ndarray]) -> int:
        """Number of steps whose examples fit into `STREAM_BYTES`."""
        examples = sum(x.shape[0] * x.shape[2] for x in order.values())
        return max(int(STREAM_BYTES / (_row_bytes(split) * examples)), 1)

    def _gathered(
        self, split: Split, order: dict[str, np.ndarray], first: int
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """The examples of the next steps, and the order as rows among them."""
        rows, parts, begun = {}, [], 0
        for name, index in order.items():
            part = index[:, first : first + self._steps]
            missing = self._steps - part.shape[1]  # all chunks share one program
            part = np.pad(part, ((0, 0), (0, missing), (0, 0)))
            parts.append(part.ravel())
            rows[name] = np.arange(begun, begun + part.size, dtype=np.int32).reshape(
                part.shape
            )
            begun += part.size
        index = np.concatenate(parts)
        arrays = {name: x[index] for name, x in split.arrays.items()}
        return self.trainer.place(arrays), rows


def _row_bytes(split: Split) -> float:
    """Bytes of one example."""
    examples = split.drawn_from or split.size
    return max(sum(x.nbytes for x in split.arrays.values()) / examples, 1.0)


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
    data: Data,
    goal: Goal,
    state: TrainState,
    phase: Phase,
    epoch: int,
    step: int,
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


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over seeds of each metric."""
    parts = ("train_", "validation_", "test_", "fit_")
    names = [name for name in rows[0] if name.startswith(parts)]
    return {name: float(np.mean([row[name] for row in rows])) for name in names}


def best_epoch(rows: Sequence[Mapping[str, Any]], metric: str, least: bool) -> int:
    """Number of the best epoch of the task, from 1, by the mean over seeds.

    Of equal epochs the first is best. A value that is not finite is best only if no
    value is finite. Without an epoch the number is 0.
    """
    scores = _scores(rows, metric, least)
    return 1 + int(scores.argmax()) if len(scores) else 0


def _scores(rows: Sequence[Mapping[str, Any]], metric: str, least: bool) -> np.ndarray:
    """The metric of each epoch of the task, with the sign by which more is better."""
    epochs = records.grouped([r for r in rows if r["phase"] == "task"], ("epoch",))
    values = np.array([_means(group)[metric] for group in epochs.values()])
    return np.where(np.isfinite(values), -values if least else values, -np.inf)


def _patience_is_over(
    rows: Sequence[Mapping[str, Any]], metric: str, goal: Goal
) -> bool:
    """Whether the last `goal.patience` epochs have brought no improvement."""
    if goal.patience is None:
        return False
    scores = _scores(rows, metric, goal.least)
    return len(scores) > 0 and len(scores) - 1 - int(scores.argmax()) >= goal.patience


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


class Board:
    """TensorBoard events of a run; the first makes the directory.

    Events are written at once and by no thread, so that errors reach the run.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._writer: Any = None

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the numbers of an epoch."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        if self._writer is None:
            self.directory.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(self.directory / "events"))
        for row in rows:
            for name, value in row.items():
                if isinstance(value, float) and math.isfinite(value):
                    summary = scalar(f"{name}/seed {row['seed']}", value)
                    now = time.time()
                    event = Event(wall_time=now, step=row["step"], summary=summary)
                    self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.close()


def _curves(
    path: Path,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    trainer: Trainer,
    goal: Goal,
) -> None:
    """Metrics against epochs, as in the paper's figures of convergence."""
    names = {
        "train": "while training",
        "validation": "validation",
        "test": "test",
        "fit": "train, no dropout",
    }
    parts: list[plotting.Panel] = []
    task = [row for row in rows if row["phase"] == "task"]
    for metric in reversed(trainer.metrics):
        long = [
            {"epoch": row["epoch"], "value": row[f"{part}_{metric}"], "part": name}
            for part, name in names.items()
            if f"{part}_{metric}" in columns(trainer, goal)
            for row in task
        ]
        curves = records.curves(long, "epoch", "value", "part")
        if all(curves != panel.series for panel in parts):  # the loss may be a metric
            parts.append(plotting.Panel(metric, curves, "epoch", metric))
    for phase, group in records.grouped(rows, ("phase",)).items():
        long = [dict(row, part="separation") for row in group]
        curves = records.curves(long, "epoch", "separation", "part")
        if curves:
            name = "separation loss" + (", Stage I" if phase[0] != "task" else "")
            parts.append(plotting.Panel(name, curves, "epoch", "separation loss"))
    seeds = len({row["seed"] for row in rows})
    spread = f", {seeds} seeds (mean ± standard deviation)" * (seeds > 1)
    write_file(path, lambda file: plotting.panels(file, parts, title=title + spread))
