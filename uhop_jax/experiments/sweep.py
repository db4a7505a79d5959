"""Retrieval over a grid of cells: memory size by corruption by level.

Each cell is finished, and saved, before the next begins; an interrupted run continues
where it stopped, and ends with the file of an uninterrupted one.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from uhop_jax import plotting, records
from uhop_jax.command_line import cost
from uhop_jax.experiments import compare, figures
from uhop_jax.experiments.cells import (
    Cell,
    Study,
    cells_of,
    check_cells,
    load_patterns,
    patterns_read,
)
from uhop_jax.experiments.protocols import check, meaning, protocol_of, resolve
from uhop_jax.plotting import Comparison, Panel
from uhop_jax.progress import Progress
from uhop_jax.workdir import claimed, read_table, write_file, write_table

BASELINE = "MHM"


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
      reliability: diagrams of the records that have confidences, or None.
    """

    columns: Mapping[str, type]
    cell: Callable[[Study, Cell, Any], list[dict]]
    sets: Callable[[Study, Cell], int]
    figure: Callable[[Sequence[Mapping]], list[Panel] | list[Comparison]]
    report: Callable[[Sequence[Mapping]], str]
    compare: bool = True
    reliability: Callable[[Sequence[Mapping]], list[Panel]] | None = None


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
SCORES = {"beta": float, "error": float, "top1": float, "exact": float}
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
    check_cells(study, cells)
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
        f"{config.variant}: {len(cells)} cell{'s' * (len(cells) > 1)}, "
        f"{progress.total:,} memory sets, "
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
    diagrams = experiment.reliability(rows) if experiment.reliability else []
    if diagrams:
        draw = functools.partial(plotting.panels, parts=diagrams, title=title)
        write_file(workdir / "reliability.png", draw)
        written.append("reliability.png")
    if experiment.compare and any(row["method"] == BASELINE for row in rows):
        pairs = records.differences(rows, BASELINE)
        write_table(workdir / "differences.csv", pairs)
        written.append("differences.csv")
    if experiment.compare and len(study.patterns.shape) == 3 and config.images:
        compare.picture(study, cells[len(cells) // 2], rows, workdir / "retrieved.png")
        written.append("retrieved.png")
    print(f"{title}{spread}; {figures.ERROR}\n\n{experiment.report(rows)}\n")
    names = dict.fromkeys(row["method"] for row in rows)
    print("\n".join(f"{name:<26}{meaning(name)}" for name in names) + "\n")
    print(", ".join(f"{stage} {spent:.1f} s" for stage, spent in timed.seconds.items()))
    print(f"written to {workdir}: {', '.join(written)}")


def title_of(config: ConfigDict) -> str:
    """The title of a run, for table and figure."""
    sets = f"{config.runs} memory set{'s' * (config.runs != 1)}"
    return f"{config.data.name}, {config.protocol} protocol, {sets}"
