"""Examples of a run: kept on the device, or streamed to it beside the computation."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from uhop_jax.training.steps import Trainer
from uhop_jax.training.task import Split, TrainState

CHUNK_SECONDS = 1.0  # of steps between two looks at the clock
STREAM_BYTES = 256e6  # of examples that are streamed at once


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
            number = epoch * phase.steps + first - at
            state = trainer.advance(state, arrays, rows, at, at + count, number)
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
