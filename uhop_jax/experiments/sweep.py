"""Retrieval over a grid of cells: memory size by corruption by level.

Each cell is finished, and saved, before the next begins; an interrupted run continues
where it stopped, and ends with the file of an uninterrupted one.
"""

import dataclasses
import functools
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from ml_collections import ConfigDict

from uhop_jax import data, records
from uhop_jax._checks import check_choice, check_count, check_seed
from uhop_jax.calibration import Calibration, calibrate
from uhop_jax.command_line import cost
from uhop_jax.corruption import Corruption
from uhop_jax.experiments import evaluation, figures
from uhop_jax.experiments.corruptions import KINDS, corruption_of
from uhop_jax.experiments.evaluation import Entry, Queries, Scores
from uhop_jax.experiments.methods import (
    CALIBRATED,
    FAIR,
    LIMIT,
    fit_kernels,
)
from uhop_jax.experiments.protocols import (
    Protocol,
    check,
    meaning,
    protocol_of,
    resolve,
)
from uhop_jax.plotting import Comparison, Panel
from uhop_jax.progress import Progress
from uhop_jax.workdir import claimed, fingerprint, read_table, write_file, write_table

BYTES = 6e8  # most bytes of one block of memory sets
# Streams of random numbers.
TUNING, SCORED, TUNING_KERNELS, SCORED_KERNELS, CALIBRATION = range(5)
BASELINE = "MHM"


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


class Experiment(NamedTuple):
    """The records, figure and report of a variant.

    Attributes:
      columns: of `results.csv`, with their types.
      cell: `cell(study, cell, timed)` gives the records of a cell; it calls functions
        by `timed`, see `Timed`, and reports finished memory sets to it.
      sets: `sets(study, cell)` gives the number of memory sets that `cell` reports.
      figure: panels of all records.
      report: table of all records, as text.
      compare: whether methods see the same queries, and are compared in pairs.
    """

    columns: Mapping[str, type]
    cell: Callable[[Study, Cell, Any], list[dict]]
    sets: Callable[[Study, Cell], int]
    figure: Callable[[Sequence[Mapping]], list[Panel] | list[Comparison]]
    report: Callable[[Sequence[Mapping]], str]
    compare: bool = True


ABOUT = {
    "data": str,
    "protocol": str,
    "memories": int,
    "corruption": str,
    "level": float,
    "method": str,
    "setting": str,
    "run": int,
}
SCORES = {
    "beta": float,
    "error": float,
    "top1": float,
    "exact": float,
}
SEPARATION = {"loss": float, "delta_min": float}


def run(experiment: Experiment, config: ConfigDict, workdir: Path) -> None:
    """Runs the cells of a config; writes results, differences, figure and images.

    Raises:
      ValueError: if the config cannot be run, or `workdir` holds another run.
    """
    check(config)
    cells = cells_of(config)
    config = resolve(config)
    patterns = load_patterns(config)
    study = Study(config, patterns, protocol_of(config, patterns.values.shape[1]))
    _check(study, cells)
    with claimed(workdir, config, patterns_read(config.data.name, patterns)):
        _run(experiment, study, cells, workdir)


class Timed:
    """Calls functions, measures their seconds by stage, and shows the progress."""

    def __init__(self, progress: Progress):
        self.progress, self.seconds, self.title = progress, dict[str, float](), ""

    def __call__(self, stage: str, function: Callable, *args: Any, **options: Any):
        began = time.perf_counter()
        self.progress.note(f"{self.title}: {stage}")
        result = jax.block_until_ready(function(*args, **options))
        spent = time.perf_counter() - began
        self.seconds[stage] = self.seconds.get(stage, 0.0) + spent
        return result

    def done(self, sets: int) -> None:
        """Counts some memory sets as finished."""
        self.progress.advance(sets)


def _run(
    experiment: Experiment, study: Study, cells: Sequence[Cell], workdir: Path
) -> None:
    config, columns = study.config, experiment.columns
    path = workdir / "results.csv"
    rows = read_table(path, columns)
    finished = {tuple(row[key] for key in records.CELL) for row in rows}
    sets = {cell: experiment.sets(study, cell) for cell in cells}
    before = sum(number for cell, number in sets.items() if cell in finished)
    progress = Progress(config.variant, sum(sets.values()), "memory sets", done=before)
    timed = Timed(progress)
    shipped = cost("retrieval", config.variant)
    print(
        f"{config.variant}: {len(cells)} cells, {progress.total:,} memory sets, "
        f"{before:,} of them done; cost as shipped, on 2 cores: {shipped}",
        flush=True,
    )
    try:
        for cell in cells:
            if cell not in finished:
                timed.title = cell.title
                new = experiment.cell(study, cell, timed)
                rows += [{name: row.get(name, "") for name in columns} for row in new]
                write_table(path, rows)
    finally:
        progress.close()
    written = ["config.json", "results.csv", "figure.png"]
    title = title_of(config)
    spread = " (mean ± standard deviation)"
    draw = functools.partial(figures.draw, parts=experiment.figure(rows), title=title)
    write_file(workdir / "figure.png", draw)
    if experiment.compare and any(row["method"] == BASELINE for row in rows):
        pairs = records.differences(rows, BASELINE)
        write_table(workdir / "differences.csv", pairs)
        written.append("differences.csv")
    if experiment.compare and len(study.patterns.shape) == 3 and config.images:
        _picture(study, cells[len(cells) // 2], rows, workdir / "retrieved.png")
        written.append("retrieved.png")
    print(f"{title}{spread}; {figures.ERROR}\n\n{experiment.report(rows)}\n")
    names = dict.fromkeys(row["method"] for row in rows)
    print("\n".join(f"{name:<26}{meaning(name)}" for name in names) + "\n")
    print(", ".join(f"{stage} {spent:.1f} s" for stage, spent in timed.seconds.items()))
    print(f"written to {workdir}: {', '.join(written)}")


def patterns_read(name: str, patterns: Any) -> dict[str, Any]:
    """The fingerprint of patterns by name, for `workdir.check`."""
    return {name: fingerprint(np.asarray(patterns.values), patterns.names)}


def title_of(config: ConfigDict) -> str:
    """The title of a run, for table and figure."""
    return f"{config.data.name}, {config.protocol} protocol, {config.runs} memory sets"


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


def retrieval_cell(study: Study, cell: Cell, timed: Any) -> list[dict]:
    """One record for each method and memory set of a cell."""
    config, protocol = study.config, study.protocol
    size = _block_size(study, cell)
    chosen: list[tuple[int, float]] | None = None
    if protocol.beta is None:
        parts, memories = [], []
        for block in _blocks(_tuning_sets(config, cell), size):
            queries = study.queries(cell, TUNING, block)
            entries = timed("Stage I", study.entries, cell, TUNING, queries, block)
            parts.append(timed("choice", evaluation.overlaps, entries, queries))
            memories.append(queries.memories)
            timed.done(len(block))
        tuning = jnp.concatenate(parts), jnp.concatenate(memories)
        errors, betas = timed("choice", evaluation.errors_by_beta, entries, *tuning)
        chosen = evaluation.best_entries(
            entries, errors, betas, every_setting=config.every_setting
        )

    rows: list[dict[str, Any]] = []
    for block in _blocks(config.runs, size):
        queries = study.queries(cell, SCORED, block)
        entries = timed("Stage I", study.entries, cell, SCORED, queries, block)
        overlaps = timed("retrieval", evaluation.overlaps, entries, queries)
        picked = chosen or [(i, config.beta) for i in range(len(entries))]
        index, betas = (list(x) for x in zip(*picked, strict=True))
        entries = [entries[i] for i in index]
        scores = timed(
            "retrieval",
            evaluation.score,
            entries,
            overlaps[:, jnp.asarray(index)],
            betas,
            queries.memories,
        )
        losses = {}
        if config.every_setting:
            losses = _losses(entries, queries, protocol.settings.t)
        for i, entry in enumerate(entries):
            for j, run in enumerate(block):
                rows.append(
                    base_row(study, cell, entry.method.name, entry.setting, run)
                    | _numbers(scores, j, i)
                    | {"beta": betas[i]}
                    | (losses[i][j] if i in losses else {})
                )
        if _includes(config, LIMIT):
            limit = _limit(study.corruption(cell).function, queries)
            if limit is not None:
                for j, run in enumerate(block):
                    about = base_row(study, cell, LIMIT, "", run)
                    rows.append(about | _numbers(limit, j, 0))
        for j, run in enumerate(block):
            if _includes(config, CALIBRATED):
                row = timed("calibration", _calibrated, study, cell, queries, j, run)
                rows.append(row)
            timed.done(1)
    # Models in the order of the protocol, and their runs, whatever the block size.
    names = [(e.method.name, e.setting) for e in entries]
    order = {name: number for number, name in enumerate(names)}
    last = {CALIBRATED: len(order), LIMIT: len(order) + 1}

    def place(row: dict) -> tuple[int, int]:
        number = order.get((row["method"], row["setting"]))
        return last[row["method"]] if number is None else number, row["run"]

    return sorted(rows, key=place)


def _includes(config: ConfigDict, name: str) -> bool:
    """Whether a run has the calibrated memory, or the limit; only a fair run can."""
    return config.protocol == "fair" and (not config.methods or name in config.methods)


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


def _numbers(scores: Scores, j: int, i: int) -> dict[str, float]:
    """Scores of entry `i` on memory set `j`, by name."""
    return {name: float(getattr(scores, name)[j, i]) for name in Scores._fields}


def _losses(entries: Sequence[Entry], queries: Queries, t: float) -> dict:
    """Separation loss and `Delta_min`, by entry and memory set.

    Only entries whose kernel has an energy are listed.
    """
    index = [
        i
        for i, entry in enumerate(entries)
        if entry.model.kernel is not None and entry.model.kernel.has_energy
    ]
    if not index:
        return {}
    chosen = [entries[i] for i in index]
    losses, deltas = evaluation.separations(chosen, queries.memories, t)
    return {
        i: [
            {"loss": float(loss), "delta_min": float(delta)}
            for loss, delta in zip(losses[:, n], deltas[:, n], strict=True)
        ]
        for n, i in enumerate(index)
    }


def _calibrated(study: Study, cell: Cell, queries: Queries, j: int, index: int) -> dict:
    """The record of the calibrated memory on one memory set."""
    memories = queries.memories[j]
    model = study.calibrated(cell, memories, index)
    observed = None if queries.observed is None else queries.observed[j]
    weights = model.retrieve(memories, queries.query[j], observed=observed).weights
    scores = evaluation.scores_of_weights(weights[None], memories[None])
    setting = f"{model.name}, {type(model.separation).__name__.lower()}"
    beta = {"beta": float(model.beta)}
    return (
        base_row(study, cell, CALIBRATED, setting, index)
        | _numbers(scores, 0, 0)
        | beta
    )


def _limit(corruption: Any, queries: Queries) -> Scores | None:
    """Scores of the posterior mean, where the likelihood is known in closed form."""
    if not hasattr(corruption, "log_likelihood"):
        return None
    if getattr(corruption, "kind", "pixel") != "pixel":
        return None
    return evaluation.scores_of_weights(
        evaluation.posterior_weights(corruption, queries), queries.memories
    )


def _block_size(study: Study, cell: Cell) -> int:
    """Number of memory sets that are handled at once, and fit into `BYTES`.

    The number divides the number of runs, so that all blocks share their compiled
    programs, and is no larger than the choice of beta needs.
    """
    methods, settings = study.protocol.methods, study.protocol.settings
    M, d = cell.memories, study.patterns.values.shape[1]
    variants = {"closed form": len(settings.ridges)}
    runs = len(settings.factors)
    variants |= {family: runs * len(steps) for family, steps in settings.steps.items()}
    numbers = 0
    for family in {method.family for method in methods if method.family}:
        dense = family == "random" or settings.start == "gaussian"
        numbers += variants.get(family, 1) * (d * d if dense else 2 * M * d)
    numbers += M * M * sum(variants.get(m.family, 1) for m in methods)
    most = max(BYTES // (4 * numbers), 1)
    runs = study.config.runs
    small = [n for n in range(1, math.isqrt(runs) + 1) if runs % n == 0]
    sizes = sorted({*small, *(runs // n for n in small)})
    enough = [n for n in sizes if n >= _tuning_sets(study.config, cell)]
    return max(n for n in sizes if n <= min([most, *enough[:1]]))


def _blocks(sets: int, size: int) -> Iterator[range]:
    """Ranges of `size` runs each that cover `sets` runs; the last may reach beyond."""
    for first in range(0, sets, size):
        yield range(first, first + size)


def sets_of_retrieval(study: Study, cell: Cell) -> int:
    """Number of memory sets of a cell, for the choice of beta and for the scores."""
    size, number = _block_size(study, cell), 0
    if study.protocol.beta is None:
        number = sum(map(len, _blocks(_tuning_sets(study.config, cell), size)))
    return number + study.config.runs


def sets_scored(study: Study, cell: Cell) -> int:
    """Number of memory sets of a cell that are scored."""
    del cell
    return study.config.runs


def _tuning_sets(config: ConfigDict, cell: Cell) -> int:
    """Number of memory sets that beta is chosen on, three at least."""
    return max(3, -(-config.tuning_queries // cell.memories))


def _check(study: Study, cells: Sequence[Cell]) -> None:
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


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tables of the error and of top-1, methods by cells."""
    text = "error\n" + records.pivot(rows, "error")
    return text + "\n\ntop-1\n" + records.pivot(rows, "top1")


def grid_report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables, and for each cell the best methods, the limit and the calibrated."""
    fixed = {m.name for m in FAIR if m.family in ("", "centred", "two-sided")}
    titles = "cell, best fixed similarity, best of all, calibrated, limit, chosen"
    lines = [titles.split(", ")]
    for cell, group in records.grouped(rows, records.CELL).items():
        means = {
            name: float(np.mean([row["error"] for row in members]))
            for (name,), members in records.grouped(group, ("method",)).items()
        }
        limit = means.pop(LIMIT, math.nan)
        line = [Cell(*cell).title]
        for names in (fixed & means.keys(), means):
            best = min(names, key=lambda name: records.ranked(means[name]), default="")
            line.append(f"{best} {means[best]:.3g}" if best else "-")
        chosen = Counter(r["setting"] for r in group if r["method"] == CALIBRATED)
        line += [f"{means.get(CALIBRATED, math.nan):.3g}", f"{limit:.3g}"]
        line.append(", ".join(f"{n} x {name}" for name, n in chosen.most_common(2)))
        lines.append(line)
    return report(rows) + "\n\n" + records.aligned(lines)


def _picture(study: Study, cell: Cell, rows: Sequence[dict], path: Path) -> None:
    """Draws memories of the first run of a cell, and what each method retrieves."""
    shape = study.patterns.shape
    queries = study.queries(cell, SCORED, range(1))
    entries = study.entries(cell, SCORED, queries, range(1))
    of_cell = [
        row
        for row in rows
        if (row["memories"], row["corruption"], row["level"]) == cell
        and row["run"] == 0
    ]
    entries_by_name = {(e.method.name, e.setting): e for e in entries}
    number = min(study.config.images, cell.memories)
    memories = queries.memories[0]
    columns = {"memory": memories[:number], "query": queries.query[0][:number]}
    for row in of_cell:
        entry = entries_by_name.get((row["method"], row["setting"]))
        if entry is None or row["method"] not in study.config.pictured:
            continue
        weights = evaluation.weights(entry, row["beta"], queries)[0][:number]
        title = f"{row['method']}\nerror {row['error']:.2f}"
        columns[title] = jnp.clip(weights @ memories, 0, 1)
    for row in of_cell:
        if row["method"] == CALIBRATED and CALIBRATED in study.config.pictured:
            model = study.calibrated(cell, memories, 0)
            observed = None if queries.observed is None else queries.observed[0]
            state = model.retrieve(memories, queries.query[0], observed=observed).state
            columns[f"{CALIBRATED}\nerror {row['error']:.2f}"] = state[:number]
    figures.images(
        path,
        {name: np.asarray(x).reshape(-1, *shape) for name, x in columns.items()},
        f"{cell.title}, {study.config.data.name}; error: mean over the memory set",
    )
