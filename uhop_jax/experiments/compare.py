"""Methods compared on the memory sets of a cell: scores, tables and a picture."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from ml_collections import ConfigDict

from uhop_jax import records
from uhop_jax.blind import BlindCalibration, calibrate_blind
from uhop_jax.calibration import Calibration
from uhop_jax.experiments import evaluation, figures
from uhop_jax.experiments.cells import SCORED, TUNING, Cell, Study, base_row
from uhop_jax.experiments.evaluation import Entry, Queries, Scores
from uhop_jax.experiments.methods import BLIND, CALIBRATED, FAIR, LIMIT
from uhop_jax.retrieval import retrieve
from uhop_jax.transformations import image_transformations

BYTES = 6e8  # most bytes of one block of memory sets


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
            for name in (CALIBRATED, BLIND):
                if _includes(config, name):
                    args = (study, cell, queries, j, run, name)
                    rows.append(timed("calibration", _calibrated, *args))
            timed.done(1)
    # Models in the order of the protocol, and their runs, whatever the block size.
    names = [(e.method.name, e.setting) for e in entries]
    order = {name: number for number, name in enumerate(names)}
    last = {name: len(order) + i for i, name in enumerate((CALIBRATED, BLIND, LIMIT))}

    def place(row: dict) -> tuple[int, int]:
        number = order.get((row["method"], row["setting"]))
        return last[row["method"]] if number is None else number, row["run"]

    return sorted(rows, key=place)


def _includes(config: ConfigDict, name: str) -> bool:
    """Whether a run has a calibrated memory, or the limit; only a fair run can.

    Blind calibration takes its time, and must be named.
    """
    everything = not config.methods and name != BLIND
    return config.protocol == "fair" and (everything or name in config.methods)


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
        if entry.method.family and entry.model.similarity.kernel.has_energy
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


def _calibrated(
    study: Study, cell: Cell, queries: Queries, j: int, index: int, name: str
) -> dict:
    """The record of a calibrated memory on one memory set."""
    memories, query = queries.memories[j], queries.query[j]
    observed = None if queries.observed is None else queries.observed[j]
    calibration = _calibration(study, cell, memories, query, observed, index, name)
    model = calibration.model
    weights = retrieve(model, memories, query, observed=observed).weights
    scores = evaluation.scores_of_weights(weights[None], memories[None])
    setting = f"{calibration.name}, {type(model.separation).__name__.lower()}"
    beta = {"beta": float(np.asarray(model.beta))}
    return base_row(study, cell, name, setting, index) | _numbers(scores, 0, 0) | beta


def _calibration(
    study: Study,
    cell: Cell,
    memories: Array,
    query: Array,
    observed: Array | None,
    index: int,
    name: str,
) -> Calibration | BlindCalibration:
    """The calibration that a method of this name has for a memory set."""
    if name == CALIBRATED:
        return study.calibrated(cell, memories, index)
    shape = study.patterns.shape
    moves = image_transformations(shape) if len(shape) == 3 else None
    return calibrate_blind(memories, query, observed=observed, transformations=moves)


def _limit(corruption: Any, queries: Queries) -> Scores | None:
    """Scores of the posterior mean, where the likelihood is known in closed form."""
    if not hasattr(corruption, "log_likelihood"):
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


def _tuning_sets(config: ConfigDict, cell: Cell) -> int:
    """Number of memory sets that beta is chosen on, three at least."""
    return max(3, -(-config.tuning_queries // cell.memories))


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
        for names in ([name for name in means if name in fixed], means):
            best = min(names, key=lambda name: records.ranked(means[name]), default="")
            line.append(f"{best} {means[best]:.3g}" if best else "-")
        chosen = Counter(r["setting"] for r in group if r["method"] == CALIBRATED)
        line += [f"{means.get(CALIBRATED, math.nan):.3g}", f"{limit:.3g}"]
        line.append(", ".join(f"{n} x {name}" for name, n in chosen.most_common(2)))
        lines.append(line)
    return report(rows) + "\n\n" + records.aligned(lines)


def picture(study: Study, cell: Cell, rows: Sequence[dict], path: Path) -> None:
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
    observed = None if queries.observed is None else queries.observed[0]
    about = memories, queries.query[0], observed, 0
    for row in of_cell:
        name = row["method"]
        if name in (CALIBRATED, BLIND) and name in study.config.pictured:
            model = _calibration(study, cell, *about, name).model
            state = retrieve(model, *about[:2], observed=observed).state
            columns[f"{name}\nerror {row['error']:.2f}"] = state[:number]
    figures.images(
        path,
        {name: np.asarray(x).reshape(-1, *shape) for name, x in columns.items()},
        f"{cell.title}, {study.config.data.name}; error: mean over the memory set",
    )
