"""The interface of applications: a kind of task, such as image classification."""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax
from flax import nnx
from ml_collections import ConfigDict

from uhop_jax import plotting
from uhop_jax._checks import check_choice, check_count, check_positive, check_seed
from uhop_jax.contrastive import stage_one_loss
from uhop_jax.training.arms import Arm, arm_of, features_of
from uhop_jax.training.cells import AnyCell, directory_name
from uhop_jax.training.judging import Goal
from uhop_jax.training.steps import Trainer
from uhop_jax.training.task import (
    StageOneOptions,
    Task,
    TrainState,
    number_of_parameters,
)

Rows = list[dict[str, Any]]
DTYPES = ("float32", "bfloat16", "float16")


class Application(abc.ABC):
    """A kind of task, with the config of a study of it.

    Args:
      config: as `configs/` makes it, with `seeds`, `arms`, `train` and `stage_one`.
      workdir: directory of the study.

    Raises:
      ValueError: if a value is out of range.
    """

    #: Keys of the config that change no result, and may differ when a run goes on.
    free: tuple[str, ...] = (
        "arms",
        "eval_only",
        "predict",
        "export",
        "distributed",
        "data.dir",
        "train.checkpoint_seconds",
    )

    def __init__(self, config: ConfigDict, workdir: Path = Path()):
        self.config, self.workdir = config, workdir
        if not config.seeds:
            raise ValueError("seeds must name at least one seed")
        for seed in config.seeds:
            check_seed("seeds", seed)
        for arm in config.arms:
            arm_of(arm)
        check_choice("model.dtype", config.model.dtype, DTYPES)
        check_count("train.epochs", config.train.epochs, 1)
        check_count("train.batch_size", config.train.batch_size, 1)
        check_count("train.patience", config.train.patience, 0)
        check_positive("train.learning_rate", config.train.learning_rate)

    def trainer(self, cell: AnyCell) -> Trainer:
        """The trainer of a cell."""
        arm, task = arm_of(cell.arm), self.task(cell)
        batch = min(self.config.train.batch_size, task.train.size)
        options = self.config.stage_one
        return Trainer(
            task,
            self.optimizer(-(-task.train.size // batch)),
            StageOneOptions(
                arm.schedule,
                steps=options.steps,
                epochs=options.epochs,
                batch_size=options.batch_size,
                learning_rate=options.learning_rate,
                loss=stage_one_loss(
                    arm.loss or options.loss, options.t, options.masked
                ),
                by_task=arm.by_task,
            ),
            batch_size=batch,
            seeds=self.seeds(cell),
        )

    def check(self) -> None:
        """Loads data and builds models, so that errors come before a run begins."""
        for cell in self.cells():
            self.trainer(cell)

    def run_of(self, cell: AnyCell) -> AnyCell:
        """The cell whose run a cell judges: itself, or an earlier cell."""
        return cell

    def directory(self, cell: AnyCell) -> Path:
        """Directory of the run of a cell: `workdir`, or within it for several runs."""
        if len(self.cells()) == 1:
            return self.workdir
        return self.workdir / directory_name(cell)

    def read(self, cell: AnyCell) -> dict[str, Any]:
        """Data that the run of a cell reads, by name, see `uhop_jax.workdir.check`."""
        del cell
        return self.read_by_all

    @functools.cached_property
    def read_by_all(self) -> dict[str, Any]:
        """Data that the run of every cell reads, by name."""
        return {}

    def seeds(self, cell: AnyCell) -> tuple[int, ...]:
        """Seeds that are trained side by side in a cell."""
        del cell
        return tuple(self.config.seeds)

    def curves_title(self, cell: AnyCell) -> str:
        """The title above the curves of a run."""
        return cell.title

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """Title of the study, for table and figure."""

    @abc.abstractmethod
    def cells(self) -> Sequence[Any]:
        """Models of the study, in order."""

    @abc.abstractmethod
    def task(self, cell: AnyCell) -> Task:
        """Data, model and loss of a cell."""

    @abc.abstractmethod
    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """Optimizer of the task; `steps` is the number of steps of an epoch."""

    def goal(self) -> Goal:
        """End of a run, and the metric of its best epoch: the least loss."""
        options = self.config.train
        return Goal(options.epochs, "loss", True, options.patience or None)

    @abc.abstractmethod
    def summary(
        self, cell: AnyCell, trainer: Trainer, history: Rows, directory: Path
    ) -> Rows:
        """Records of a finished run; may write further files into its directory."""

    @abc.abstractmethod
    def report(self, rows: Rows) -> str:
        """Text table of all records."""

    @abc.abstractmethod
    def figures(
        self, histories: Mapping[AnyCell, Rows], rows: Rows
    ) -> Mapping[str, Sequence[plotting.Panel]]:
        """Panels that compare the runs of a study, by the file they go to."""

    @abc.abstractmethod
    def predict(
        self, cell: AnyCell, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        """Applies a model to `config.predict`; returns a message about the result."""

    @abc.abstractmethod
    def export(
        self, cell: AnyCell, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        """Writes by `write_export` what `predict` applies; returns its message."""

    def untrained(self) -> Rows:
        """Records of methods that need no training."""
        return []


def parameters_of(build: Callable[[nnx.Rngs], nnx.Module]) -> int:
    """Number of parameters of a model, without allocating its arrays."""
    return number_of_parameters(nnx.eval_shape(lambda: build(nnx.Rngs(0))))


def model_of(
    arm: Arm,
    build: Callable[..., nnx.Module],
    size: int,
    step: int,
    *,
    start: str,
    dtype: Any,
    width: int = 0,
) -> Callable[[nnx.Rngs], nnx.Module]:
    """A function that builds the model of an arm.

    Args:
      arm: says whether layers have a kernel. Where the size is to be matched, it grows
        until the model has as many parameters as one with a kernel of the size given.
      build: `build(size=, kernel=, rngs=)`; `kernel` makes the kernel of a layer, or is
        False.
      size: of tokens.
      step: difference of the sizes that are tried.
      start: of kernels, unless the arm has a start of its own.
      dtype: of kernels.
      width: of kernels where the size is 0.
    """

    def made(size: int, kernel: bool, rngs: nnx.Rngs) -> nnx.Module:
        def features() -> nnx.Module:
            first = arm.start or start
            return features_of(arm, size or width, start=first, dtype=dtype, rngs=rngs)

        return build(size=size, kernel=features if kernel else False, rngs=rngs)

    if arm.matched:
        target = parameters_of(functools.partial(made, size, True))
        while parameters_of(functools.partial(made, size, False)) < target:
            size += step
    return functools.partial(made, size, arm.kernel)
