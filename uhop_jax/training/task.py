"""What a run is made of: examples, model and loss, settings of Stage I, state."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from uhop_jax._checks import (
    check_choice,
    check_count,
    check_positive,
    check_probability,
)
from uhop_jax._files import machine_memory
from uhop_jax.contrastive import ContrastiveLoss
from uhop_jax.corruption import Mask
from uhop_jax.losses import AverageLoss, SeparationLoss, check_loss

SCHEDULES = ("none", "bilevel", "warmup", "reference")
# Sums over Stage I steps of means over layers: the separation loss, and its gap to the
# lower bound.
SEPARATIONS = ("separation", "separation_gap")
# The axis of curves of runs some of which stop early.
REACHED = "epoch (mean of the runs that reach it)"

Batch = Mapping[str, Array]
Take = Callable[[Mapping[str, Array], Array], Batch]


class Split(NamedTuple):
    """Examples of one part of a data set.

    Attributes:
      arrays: by name; one row for each example, or data from which `take` makes one.
      size: number of examples.
      take: `take(arrays, index)` gives the batch of some examples.
      by_row: whether each array has one row for each example, so that a part of the
        rows can be streamed.
      drawn_from: number of examples from which each seed draws `size` at random, once;
        None where all seeds see the same.
      by_batch: whether metrics are means over batches, not over examples; a last batch
        that is not full then counts as much as a full batch.
    """

    arrays: Mapping[str, np.ndarray]
    size: int
    take: Take
    by_row: bool = True
    drawn_from: int | None = None
    by_batch: bool = False


def unchanged(batch: Batch, key: Array) -> Batch:
    """The batch itself."""
    del key
    return batch


class Task(NamedTuple):
    """Model, loss and examples.

    Attributes:
      build: `build(rngs)` makes the model.
      score: `score(model, batch, key)` gives metrics by name, one for each example;
        `loss` is minimised. Without a key nothing is random.
      inputs: `inputs(batch)` gives the arguments of the model, for separation losses.
      train: examples to learn from.
      test: examples to be judged by.
      validation: examples by which the best checkpoint is chosen; without them the test
        split judges the epochs, and the last is chosen.
      separate_states: whether Stage I separates states from memories too, as
        `separation_losses` with `states`.
      augment: `augment(batch, key)` changes a batch before training on it.
      sample: `sample(batch, key)` is the part of a batch that Stage I separates.
    """

    build: Callable[[nnx.Rngs], nnx.Module]
    score: Callable[[Any, Batch, Array | None], dict[str, Array]]
    inputs: Callable[[Batch], tuple]
    train: Split
    test: Split
    validation: Split | None = None
    separate_states: bool = False
    augment: Callable[[Batch, Array], Batch] = unchanged
    sample: Callable[[Batch, Array], Batch] = unchanged

    @property
    def judge(self) -> str:
        """The split that judges an epoch: `validation` if there is one, or `test`."""
        return "test" if self.validation is None else "validation"


class StageOneOptions(NamedTuple):
    """Settings of Stage I, which learns kernels beside the task.

    Attributes:
      schedule: `none`; `bilevel`, `steps` Stage I steps before each step of the task
        [algo:bi-level]; `warmup`, `epochs` of Stage I before the task; or `reference`,
        as the authors' code: like `warmup`, but over all parameters, not only kernels.
      steps: `N_i`.
      epochs: of the schedules `warmup` and `reference`.
      batch_size: `B_1`, memory sets in a step.
      learning_rate: of SGD.
      loss: the separation loss, or a contrastive one.
      by_task: whether the task moves the kernels too.
    """

    schedule: str = "none"
    steps: int = 1
    epochs: int = 1
    batch_size: int = 128
    learning_rate: float = 0.1
    loss: SeparationLoss | ContrastiveLoss = AverageLoss()
    by_task: bool = False

    def check(self) -> None:
        """Raises `ValueError` if a value is out of range."""
        check_choice("stage_one.schedule", self.schedule, SCHEDULES)
        if not isinstance(self.loss, ContrastiveLoss):
            check_loss(self.loss)
        check_count("stage_one.steps", self.steps, 1)
        check_count("stage_one.epochs", self.epochs, 1)
        check_count("stage_one.batch_size", self.batch_size, 1)
        check_positive("stage_one.learning_rate", self.learning_rate)
        check_positive("stage_one.t", self.loss.t)
        view = getattr(self.loss, "view", None)
        if isinstance(view, Mask):
            check_probability("stage_one.masked", view.fraction)


class TrainState(NamedTuple):
    """All that a run carries from step to step, with a leading axis of seeds.

    Attributes:
      kernels: parameters that Stage I moves.
      rest: all further parameters.
      optimizer: state of the task's optimizer.
      sums: metrics of the epoch so far, added up over examples.
    """

    kernels: Any
    rest: Any
    optimizer: Any
    sums: dict[str, Array]


def number_of_parameters(model: nnx.Module) -> int:
    """Number of scalars that a model learns."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def keys_of(seeds: Sequence[int]) -> Array:
    """A key for each seed."""
    return jnp.stack([jax.random.key(seed) for seed in seeds])


def check_memory(parameters: int, seeds: int, device: Any) -> None:
    """Refuses a state that memory cannot hold: parameters and moments in float32."""
    needed = 3 * 4 * parameters * seeds
    available = (device.memory_stats() or {}).get("bytes_limit")
    if available is None:  # a CPU
        available = machine_memory()
    if needed > available:
        raise ValueError(
            f"there is not enough memory for sizes of this config: a model of "
            f"{parameters:,} parameters takes {needed / 1e9:.0f} GB to train for "
            f"{seeds} seeds, the device has {available / 1e9:.0f}; make model.size "
            "smaller"
        )
