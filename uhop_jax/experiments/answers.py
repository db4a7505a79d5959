"""Answers of a calibrated memory to queries, with their confidence."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import working_dtype
from uhop_jax._products import weigh
from uhop_jax.blind import BlindCalibration
from uhop_jax.calibration import Calibration
from uhop_jax.kernels import check_numbers
from uhop_jax.model import Model
from uhop_jax.posterior import mean_and_variance, with_squares
from uhop_jax.retrieval import converge, retrieve
from uhop_jax.sharding import memory_mesh, shard_memories
from uhop_jax.storage import load, save
from uhop_jax.streaming import retrieve_streamed
from uhop_jax.theory import effective_memories

MAX_UPDATES = 100


class CalibratedMemory(NamedTuple):
    """Stored patterns with the model calibrated for them.

    Attributes:
      values: patterns, one per row.
      calibration: the model, and how it was chosen.
      shape: of a pattern: height, width and channels, or its dimension.
      names: of the patterns: file names, or their numbers.
    """

    values: Float[Array, "M d"]
    calibration: Calibration | BlindCalibration
    shape: tuple[int, ...]
    names: tuple[str, ...]

    def save(self, path: str | Path) -> Path:
        """Writes the memory to a file, see `uhop_jax.save`; returns the path."""
        return save(path, tuple(self))

    @classmethod
    def load(cls, path: str | Path) -> "CalibratedMemory":
        """Reads a memory that `save` wrote.

        Raises:
          ValueError: if the file is missing or damaged, or holds something else.
        """
        fields = load(path)
        whole = isinstance(fields, tuple) and len(fields) == 4
        memory = cls(*fields) if whole else None
        if memory is None or not isinstance(
            memory.calibration, Calibration | BlindCalibration
        ):
            raise ValueError(f"{path} is no memory that the query variant saved")
        if wrong := memory._wrong():
            raise ValueError(f"{path} is damaged: {wrong}")
        return memory

    def _wrong(self) -> str:
        """The first contradiction among the fields, in words; "" if there is none."""
        values, shape, names = self.values, self.shape, self.names
        floating = isinstance(values, Array) and jnp.issubdtype(
            values.dtype, jnp.floating
        )
        if not floating or values.ndim != 2 or len(values) < 2:
            return "values are no array (M, d) of at least two patterns"
        bad = np.flatnonzero(~np.isfinite(values).all(-1))
        if bad.size:
            return f"values hold NaN or infinity, the first in row {bad[0]}"
        sizes = isinstance(shape, tuple) and all(type(x) is int for x in shape)
        if not sizes or len(shape) not in (1, 3) or np.prod(shape) != values.shape[1]:
            return f"shape is {shape!r:.40}, of patterns of dimension {values.shape[1]}"
        words = isinstance(names, tuple) and all(isinstance(x, str) for x in names)
        if not words or len(names) != len(values):
            return (
                f"names must be a tuple of {len(values)} strings, one for each pattern"
            )
        return ""


class Answers(NamedTuple):
    """Retrieved patterns of the queries, with their confidence.

    Attributes:
      state: retrieved patterns.
      nearest: index of the memory of the largest weight.
      weights: over the memories; only the two largest, `(Q, 2)`, if the memories were
        read in blocks.
      largest: the largest weight.
      margin: largest weight less the second largest.
      effective: effective number of memories mixed, 1 for a single memory; None if the
        memories were read in blocks.
      expected_error: expected sum of squared differences from the true memory, where
        the weights are its probabilities.
      foreign: probability that none of the memories belongs to the query; None unless
        the memory was calibrated on queries, and if the memories were read in blocks.
      converged: whether further updates stay at the same memory; None for a model
        without an energy, and if the memories were read in blocks.
    """

    state: Float[Array, "Q d"]
    nearest: Int[Array, " Q"]
    weights: Float[Array, "Q M"]
    largest: Float[Array, " Q"]
    margin: Float[Array, " Q"]
    effective: Float[Array, " Q"] | None
    expected_error: Float[Array, " Q"]
    converged: Bool[Array, " Q"] | None
    foreign: Float[Array, " Q"] | None = None


def answer(
    memory: CalibratedMemory,
    query: Float[Array, "Q d"],
    observed: Bool[Array, "Q d"] | None = None,
    *,
    shards: int = 0,
) -> Answers:
    """Updates each query once by the calibrated model.

    Args:
      memory: patterns and model.
      query: queries, one per row.
      observed: true for the known components of the queries.
      shards: devices over which the patterns are split; 0 leaves them on one.
    """
    model, patterns, mask = memory.calibration.model, memory.values, None
    check_numbers(model.similarity.kernel)
    if shards:
        patterns, mask = shard_memories(patterns, memory_mesh(shards))
    result = retrieve(model, patterns, query, observed=observed, mask=mask)
    top, index = jax.lax.top_k(result.weights, 2)
    working = patterns.astype(working_dtype(patterns))
    center = working.mean(0)
    moments = weigh(result.weights, with_squares(working, center))
    normalized = model.separation.normalized
    _, variance = mean_and_variance(moments, center, normalized=normalized)
    converged = None
    if model.has_energy:
        end = converge(
            model, patterns, query, observed=observed, mask=mask, max_steps=MAX_UPDATES
        )
        converged = end.converged & (end.weights.argmax(-1) == index[:, 0])
    foreign, calibration = None, memory.calibration
    if isinstance(calibration, BlindCalibration) and len(memory.values) > 2:
        foreign = calibration.foreign(memory.values, query, observed=observed)
    return Answers(
        result.state,
        index[:, 0],
        result.weights[:, : len(memory.values)],
        top[:, 0],
        top[:, 0] - top[:, 1],
        effective_memories(result.weights),
        variance,
        converged,
        foreign,
    )


def answer_in_blocks(
    model: Model,
    patterns: Float[np.ndarray, "M d"],
    query: Float[Array, "Q d"],
    observed: Bool[Array, "Q d"] | None = None,
    *,
    block: int | None = None,
) -> Answers:
    """Answers as `answer` does, with one block of the patterns in memory at a time.

    The patterns may lie in a file. The default size of a block follows from their
    dimension.
    """
    size = block or max(2**20 // patterns.shape[1], 1)
    working = np.promote_types(patterns.dtype.newbyteorder("="), np.float32)
    center = np.asarray(patterns[:size], working).mean(0)

    def values() -> Iterator[np.ndarray]:
        for start in range(0, len(patterns), size):
            rows = np.asarray(patterns[start : start + size], working)
            yield with_squares(rows, center)

    result = retrieve_streamed(
        model, patterns, query, values=values, observed=observed, top=2, block=block
    )
    normalized = model.separation.normalized
    state, variance = mean_and_variance(result.state, center, normalized=normalized)
    return Answers(
        state,
        result.nearest[:, 0],
        result.weights,
        result.weights[:, 0],
        result.weights[:, 0] - result.weights[:, 1],
        None,
        variance,
        None,
    )
