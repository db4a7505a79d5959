"""A user's own memory: store patterns, choose a model, answer queries, reload later."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from ml_collections import ConfigDict

from uhop_jax import data, records
from uhop_jax._checks import check_count, check_seed
from uhop_jax._files import mapped_array
from uhop_jax.blind import BlindCalibration, calibrate_blind
from uhop_jax.calibration import calibrate
from uhop_jax.data.patterns import check_scale, mapped_patterns
from uhop_jax.experiments import figures
from uhop_jax.experiments.answers import (
    Answers,
    CalibratedMemory,
    answer,
    answer_in_blocks,
)
from uhop_jax.experiments.cells import load_patterns, patterns_read
from uhop_jax.experiments.kinds import KnownMasks, corruption_of
from uhop_jax.sharding import memory_mesh
from uhop_jax.transformations import image_transformations
from uhop_jax.workdir import check, claimed, fingerprint, write_file, write_table

ASSUMED = "mask"  # the corruption of queries that are not there to learn from


def run(config: ConfigDict, workdir: Path) -> None:
    """Stores or loads memories, answers the queries, and writes the answers.

    Writes `memory.npz` (patterns and model, for `--config.memory` of a later run),
    `answers.csv` (one row for each query), `retrieved.npz` (patterns, indices, weights)
    and, for images, `retrieved.png`.

    Raises:
      ValueError: if a file cannot be read, a value is out of range, or queries and
        memories do not fit together.
    """
    began = time.perf_counter()
    check_count("images", config.images, 0, figures.MOST_IMAGES)
    check_seed("seed", config.seed)
    memory = CalibratedMemory.load(config.memory) if config.memory else None
    stored: Any = memory or _patterns(config)
    read = patterns_read(config.memory or config.data.name, stored)
    queries = data.read_patterns(config.queries) if config.queries else None
    if queries is not None and tuple(queries.shape) != tuple(stored.shape):
        raise ValueError(
            f"queries have shape {queries.shape}, the memories {stored.shape}"
        )
    if queries is not None:
        read |= patterns_read(config.queries, queries)
    observed = _observed(config.observed, queries)
    if observed is not None:
        read[config.observed] = fingerprint(np.asarray(observed))
    check_count("block", config.block, 0)
    check_count("shards", config.shards, 0)
    if config.shards:
        memory_mesh(config.shards)
    in_blocks = bool(config.block or config.mapped)
    if in_blocks and config.shards:
        raise ValueError(
            f"block {config.block} and mapped {config.mapped!r} stream the memories, "
            f"shards {config.shards} hold them all: choose one"
        )
    known = np.asarray(stored.values)
    if queries is not None:
        seen = queries.values if observed is None else queries.values * observed
        check_scale("queries", np.asarray(seen), known)
    mapped = mapped_patterns(config.mapped, known) if config.mapped else None
    if mapped is not None:
        read[config.mapped] = fingerprint(mapped)
    shape = tuple(stored.shape)
    options = config.corruption
    clamped = bool(stored.values.min() >= 0 and stored.values.max() <= 1)
    kind = options.kind or ASSUMED
    corruption = corruption_of(kind, options.level, shape, clamped=clamped)
    if observed is not None:
        corruption = KnownMasks(observed, corruption if options.kind else None)
    check(workdir, config, read)
    if memory is None:
        values = jnp.asarray(stored.values)
        learn = not options.kind and observed is None and mapped is None
        if learn and queries is not None:
            calibration: Any = _blind(values, jnp.asarray(queries.values), shape)
        else:
            calibration = calibrate(jax.random.key(config.seed), values, corruption)
            if not options.kind:
                assumed = f"queries with {ASSUMED} {options.level:g}"
                if observed is not None:
                    assumed = "queries whose known components are intact"
                script = Path(sys.argv[0]).name
                print(
                    f"{script}: calibrated for {assumed}; corruption.kind names "
                    "another corruption",
                    file=sys.stderr,
                )
        memory = CalibratedMemory(values, calibration, shape, stored.names)
    answers = None
    patterns = np.asarray(memory.values) if mapped is None else mapped
    if queries is not None:
        query = jnp.asarray(queries.values)
        if in_blocks:
            answers = answer_in_blocks(
                memory.calibration.model,
                patterns,
                query,
                observed,
                block=config.block or None,
            )
        else:
            answers = answer(memory, query, observed, shards=config.shards)
    with claimed(workdir, config, read):
        written = _write(config, workdir, memory, patterns, queries, answers)
    print(
        f"{len(memory.names)} memories of shape {shape}: {memory.calibration.summary()}"
    )
    if queries is not None and answers is not None:
        names = memory.names if mapped is None else range(len(mapped))
        rows = _rows(names, queries, answers)
        shown = [list(rows[0]), *([str(x) for x in r.values()] for r in rows[:10])]
        print(records.aligned(shown))
        if len(rows) > 10:
            print(f"... and {len(rows) - 10} more in answers.csv")
        foreign = 0 if answers.foreign is None else int((answers.foreign > 0.5).sum())
        if foreign:
            print(
                f"{foreign} of {len(rows)} queries seem to belong to no memory: see "
                "the column foreign"
            )
    spent = time.perf_counter() - began
    print(f"{spent:.1f} s; written to {workdir}: {', '.join(written) or 'nothing new'}")


def _blind(values: Array, queries: Array, shape: tuple[int, ...]) -> BlindCalibration:
    """Calibrates on the queries alone, moved and blurred as images may be."""
    if len(queries) < 2:
        raise ValueError(
            "one query does not tell how queries are corrupted: name the corruption by "
            "corruption.kind, or give more queries"
        )
    moves = image_transformations(shape) if len(shape) == 3 else None
    return calibrate_blind(values, queries, transformations=moves)


def _write(
    config: ConfigDict,
    workdir: Path,
    memory: CalibratedMemory,
    patterns: np.ndarray,
    queries: data.Patterns | None,
    answers: Answers | None,
) -> list[str]:
    """Writes the files of a run; returns their names."""
    written = []
    if not config.memory:
        write_file(workdir / "memory.npz", memory.save)
        written.append("memory.npz")
    if queries is None or answers is None:
        return written
    names = range(len(patterns)) if config.mapped else memory.names
    write_table(workdir / "answers.csv", _rows(names, queries, answers))
    arrays: Any = answers.state, answers.nearest, answers.weights
    named = dict(zip(("patterns", "index", "weights"), arrays, strict=True))
    write_file(workdir / "retrieved.npz", lambda path: np.savez(path, **named))
    written += ["answers.csv", "retrieved.npz"]
    drawn = len(memory.shape) == 3 and memory.shape[-1] in data.CHANNELS
    if drawn and config.images:
        path = workdir / "retrieved.png"
        _picture(path, memory, patterns, names, queries, answers, config.images)
        written.append("retrieved.png")
    return written


def _patterns(config: ConfigDict) -> data.Patterns:
    """The patterns to store, two at least."""
    stored = load_patterns(config)
    if len(stored.values) < 2:
        raise ValueError(f"{config.data.name} holds one pattern; a memory needs two")
    return stored


def _observed(path: str, queries: data.Patterns | None) -> Array | None:
    """The mask of known components, `(queries, d)`."""
    if not path:
        return None
    if queries is None:
        raise ValueError("observed belongs to queries, which are missing")
    mask = mapped_array(path, "observed")
    if mask.dtype != bool:
        raise ValueError(f"observed must be boolean, {path} has dtype {mask.dtype}")
    try:
        flat = mask.reshape(mask.shape[0], -1) if mask.ndim > 2 else mask
        known = np.broadcast_to(flat, queries.values.shape)
    except ValueError:
        raise ValueError(
            f"observed has shape {mask.shape}, queries {queries.values.shape}"
        ) from None
    return jnp.asarray(known)


def _rows(names: Sequence[Any], queries: data.Patterns, answers: Answers) -> list[dict]:
    """One record for each query, as `answers.csv` has it."""
    rows = []
    for i, name in enumerate(queries.names):

        def number(x: Any, i: int = i) -> str:
            return "" if x is None else f"{float(x[i]):.4g}"

        index = int(answers.nearest[i])
        converged: Any = "one step"
        if answers.converged is not None:
            converged = "yes" if answers.converged[i] else "no"
        rows.append(
            {
                "query": name,
                "memory": names[index],
                "index": index,
                "weight": number(answers.largest),
                "margin": number(answers.margin),
                "memories_mixed": number(answers.effective),
                "expected_error": number(answers.expected_error),
                "foreign": number(answers.foreign),
                "converged": converged,
            }
        )
    return rows


def _picture(
    path: Path,
    memory: CalibratedMemory,
    patterns: np.ndarray,
    names: Sequence[Any],
    queries: data.Patterns,
    answers: Answers,
    number: int,
) -> None:
    """Draws queries, the patterns they retrieve, and the nearest memories."""
    number = min(number, len(queries.values))
    nearest = np.asarray(answers.nearest[:number])
    columns = {
        "query": queries.values[:number],
        "retrieved": np.asarray(answers.state[:number]),
        "stored": np.asarray(patterns[nearest]),
    }
    shaped = {name: x.reshape(-1, *memory.shape) for name, x in columns.items()}
    captions = {
        "query": queries.names[:number],
        "retrieved": [f"weight {float(x):.3g}" for x in answers.largest[:number]],
        "stored": [names[index] for index in nearest],
    }
    title = f"{memory.calibration.name}, one update"
    figures.images(path, shaped, title, captions=captions)
