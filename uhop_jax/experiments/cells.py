"""Cells of a sweep, and the memory sets, queries and fitted methods of each."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from ml_collections import ConfigDict

from uhop_jax import data
from uhop_jax._checks import check_choice, check_count, check_seed
from uhop_jax.calibration import Calibration, calibrate
from uhop_jax.corruption import Corruption
from uhop_jax.experiments import evaluation, figures
from uhop_jax.experiments.evaluation import Entry, Queries
from uhop_jax.experiments.kinds import KINDS, corruption_of
from uhop_jax.experiments.methods import fit_kernels
from uhop_jax.experiments.protocols import Protocol
from uhop_jax.workdir import fingerprint

# Streams of random numbers.
TUNING, SCORED, TUNING_KERNELS, SCORED_KERNELS, CALIBRATION = range(5)


class Cell(NamedTuple):
    """One point of the grid.

    Attributes:
      memories: number of stored patterns.
      kind: of corruption, see `corruption_of`.
      level: of corruption.
    """

    memories: int
    kind: str
    level: float

    @property
    def title(self) -> str:
        return f"{self.memories} memories, {self.kind} {self.level:g}"


@dataclasses.dataclass
class Study:
    """The config, patterns and protocol that all cells of a run share."""

    config: ConfigDict
    patterns: data.Patterns
    protocol: Protocol

    def corruption(self, cell: Cell) -> Corruption:
        """The corruption of a cell."""
        return Corruption.of(
            corruption_of(
                cell.kind,
                cell.level,
                self.patterns.shape,
                clamped=self.patterns.in_unit_range,
                reference=self.config.protocol == "reference",
            )
        )

    def share(self, cell: Cell) -> float:
        """The part of the memories of a cell that Stage I sees."""
        return self.protocol.settings.masked_share if cell.kind == "mask" else 1.0

    def key(self, *numbers: int) -> Array:
        """The key of the config's seed, with numbers folded in."""
        key = jax.random.key(self.config.seed)
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return key

    def queries(self, cell: Cell, stream: int, runs: range) -> Queries:
        """Memory sets of some runs, from the half of the data that a stream has.

        The memories of a run are the same at every level and kind of corruption.
        """
        values = self.patterns.values
        order = np.random.default_rng(self.config.seed).permutation(len(values))
        half = values[np.array_split(order, 2)[stream]]
        seed = (self.config.seed, stream, cell.memories)
        sets = evaluation.draw_sets(half, cell.memories, runs, seed)
        base = self.key(stream, cell.memories, _number(cell))
        keys = jax.vmap(lambda i: jax.random.fold_in(base, i))(jnp.asarray(runs))
        return evaluation.corrupt_sets(keys, jnp.asarray(sets), self.corruption(cell))

    def entries(
        self, cell: Cell, stream: int, queries: Queries, runs: range
    ) -> list[Entry]:
        """Every method with every kernel of its family, fitted to the memory sets."""
        families = [m.family for m in self.protocol.methods if m.family]
        kernels = {TUNING: TUNING_KERNELS, SCORED: SCORED_KERNELS}[stream]
        base = self.key(kernels, cell.memories)
        fitted = fit_kernels(
            families,
            jax.vmap(lambda i: jax.random.fold_in(base, i))(jnp.asarray(runs)),
            queries.memories,
            self.corruption(cell),
            self.protocol.settings,
            share=self.share(cell),
        )
        return evaluation.entries_of(self.protocol.methods, fitted)

    def calibrated(self, cell: Cell, memories: Array, run: int) -> Calibration:
        """The model calibrated for the memory set of a run."""
        return calibrate(
            self.key(CALIBRATION, cell.memories, _number(cell), run),
            memories,
            self.corruption(cell),
            queries=self.config.calibration_queries,
            accuracy=None,  # the expected error is not compared
        )


def _number(cell: Cell) -> int:
    """A number for the corruption of a cell, the same in every process."""
    return zlib.crc32(f"{cell.kind} {cell.level:g}".encode()) & 0x7FFFFFFF


def patterns_read(name: str, patterns: Any) -> dict[str, Any]:
    """The fingerprint of patterns by name, for `workdir.check`."""
    return {name: fingerprint(np.asarray(patterns.values), patterns.names)}


def load_patterns(config: ConfigDict) -> data.Patterns:
    """The patterns that `config.data` names."""
    return data.load(
        config.data.name,
        split=config.data.split,
        directory=config.data.dir or None,
        limit=config.data.limit or None,
        seed=config.seed,
    )


def cells_of(config: ConfigDict) -> list[Cell]:
    """The cells of a config: every size with every kind and level of corruption."""
    levels = config.corruption.levels
    kinds = config.corruption.kinds
    for kind in kinds:
        check_choice("corruption.kinds", kind, KINDS)
    pairs = [(kind, float(level)) for kind in kinds for level in levels[kind]]
    return [Cell(int(M), *pair) for M in config.memories for pair in pairs]


def base_row(study: Study, cell: Cell, method: str, setting: str, index: int) -> dict:
    """The columns of a record before its scores, see `ABOUT`."""
    config = study.config
    return {
        "data": config.data.name,
        "protocol": config.protocol,
        "memories": cell.memories,
        "corruption": cell.kind,
        "level": cell.level,
        "method": method,
        "setting": setting,
        "run": index,
    }


def sets_scored(study: Study, cell: Cell) -> int:
    """Number of memory sets of a cell that are scored."""
    del cell
    return study.config.runs


def check_cells(study: Study, cells: Sequence[Cell]) -> None:
    """Refuses values out of range, and more memories than half of the patterns."""
    config, available = study.config, len(study.patterns.values)
    check_seed("seed", config.seed)
    check_count("runs", config.runs, 1)
    check_count("tuning_queries", config.tuning_queries, 1)
    check_count("calibration_queries", config.calibration_queries, 1)
    check_count("images", config.images, 0, figures.MOST_IMAGES)
    if not cells:
        raise ValueError("memories and corruption.levels must name at least one cell")
    for cell in cells:
        check_count("memories", cell.memories, 2)
        if cell.memories > available // 2:
            raise ValueError(
                f"memories must be at most {available // 2}, half of the {available} "
                f"patterns of {config.data.name} (one half is for tuning), got "
                f"{cell.memories}"
            )
        study.corruption(cell)
