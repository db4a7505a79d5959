"""Digits, stored, corrupted and retrieved by every method at its own best beta."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from ml_collections import ConfigDict
from tqdm import tqdm

from uhop_jax import data, plotting
from uhop_jax._checks import (
    check_at_least,
    check_choice,
    check_count,
    check_positive,
)
from uhop_jax.calibration import beta_grid, calibrate, corrupted_copies, sweep_errors
from uhop_jax.corruption import Corruption, Mask, Noise, posterior_mean
from uhop_jax.experiments import records
from uhop_jax.kernels import Kernel, LinearKernel
from uhop_jax.losses import LOSSES
from uhop_jax.retrieval import Retrieval, retrieve
from uhop_jax.separation import Separation, Softmax, Sparsemax, TopK
from uhop_jax.similarity import (
    Cosine,
    Dot,
    NegativeSquaredL2,
    Similarity,
)
from uhop_jax.stage_one import fit_sgd, gaussian_start, identity_start

EXACT = 0.01  # a pattern is recalled exactly if no component is further off


class Method(NamedTuple):
    """A model; its beta, and the kernel if there are several, are chosen for it."""

    name: str
    similarity: Callable[[Kernel | None], Similarity]
    separation: Separation
    kernels: str = "none"  # or "start", or "learned"


METHODS = (
    Method("MHM", Dot, Softmax()),
    Method("Sparse MHM", Dot, Sparsemax()),
    Method("squared l2", NegativeSquaredL2, Softmax()),
    Method("cosine", Cosine, Softmax()),
    Method("nearest (cosine)", Cosine, TopK(1)),
    Method("U-Hop untrained", Dot, Softmax(), "start"),
    Method("U-Hop", Dot, Softmax(), "learned"),
    Method("U-Hop sparse", Dot, Sparsemax(), "learned"),
    Method("U-Hop angular", Cosine, Softmax(), "learned"),
)
CALIBRATED, LIMIT = "calibrated", "limit"
PICTURED = ("MHM", "Sparse MHM", "cosine", "U-Hop", CALIBRATED)


class Choice(NamedTuple):
    """What was chosen for a method: its beta, and which of its kernels."""

    beta: float
    kernel: int


class Queries(NamedTuple):
    """Memory sets `(sets, M, d)` and one corrupted copy of each memory."""

    memories: Array
    query: Array
    observed: Array | None
    target: Array


def run(config: ConfigDict, workdir: Path) -> None:
    """Writes `config.json`, `results.csv` and `retrieved.png`, and prints the table.

    Raises:
      ValueError: if the config cannot be run, or `workdir` holds another run.
    """
    corruption = _corruption(config)
    images = data.images(config.data)
    _check(config, len(images.pixels))
    records.claim(config, workdir)

    seconds: dict[str, float] = {}
    bar = tqdm(total=3 + config.sets, desc="retrieval", unit="step", leave=False)

    def timed(stage: str, function: Callable[..., Any], *args: Any) -> Any:
        bar.set_description(stage)
        began = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began
        bar.update()
        return result

    draw_key, calibration_key = jax.random.split(jax.random.key(config.seed))
    tuning, scored = _draw(draw_key, images.patterns, config, corruption)
    memories = jnp.concatenate([tuning.memories, scored.memories])
    kernels = timed("Stage I", _fit, config, memories)
    first = [LinearKernel(k.weights[: config.tuning_sets]) for k in kernels]
    rest = [LinearKernel(k.weights[config.tuning_sets :]) for k in kernels]
    choices = timed("choice of beta", _choose, tuning, first)
    retrieved = timed("retrieval", _retrieve, scored, rest, choices)

    models, parts = [], []
    for index in range(config.sets):
        key = jax.random.fold_in(calibration_key, index)
        memories = scored.memories[index]
        model = timed("calibration", calibrate, key, memories, corruption)
        observed = None if scored.observed is None else scored.observed[index]
        models.append(model)
        parts.append(model.retrieve(memories, scored.query[index], observed=observed))
    bar.close()
    retrieved[CALIBRATED] = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    retrieved[LIMIT] = _limit(corruption.function, scored)

    betas = {name: [choice.beta] * config.sets for name, choice in choices.items()}
    betas |= {CALIBRATED: [float(model.beta) for model in models]}
    betas |= {LIMIT: [""] * config.sets}
    rows = _score(scored, retrieved, betas)
    records.write_csv(workdir / "results.csv", rows)
    _picture(workdir / "retrieved.png", images, config, scored, retrieved, rows)

    columns = {"beta": "beta", "error ±": "error", "top-1": "top1", "exact": "exact"}
    print(
        f"{config.sets} sets of {config.memories} {config.data}, "
        f"{corruption.function}, error = sum of squared pixel differences\n"
    )
    print(records.table(rows, "method", columns))
    print(f"\ncalibrated, first set: {models[0].summary()}")
    print(", ".join(f"{stage} {spent:.1f} s" for stage, spent in seconds.items()))
    print(f"written: {workdir}/results.csv, retrieved.png, config.json")


def _check(config: ConfigDict, available: int) -> None:
    check_count("sets", config.sets, 1)
    check_count("tuning_sets", config.tuning_sets, 1)
    check_count("memories", config.memories, 2, available // 2)
    check_count("images", config.images, 1, config.memories)
    options = config.stage_one
    check_choice("stage_one.loss", options.loss, LOSSES)
    check_choice("stage_one.start", options.start, ("gaussian", "identity"))
    check_positive("stage_one.t", options.t)
    check_positive("stage_one.rate", options.rate)
    if not options.steps:
        raise ValueError("stage_one.steps must hold at least one number, got none")
    for steps in options.steps:
        check_count("stage_one.steps", steps, 1)


def _corruption(config: ConfigDict) -> Corruption:
    check_choice("corruption.kind", config.corruption.kind, ("mask", "noise"))
    if config.corruption.kind == "noise":
        check_at_least("corruption.scale", config.corruption.scale, 0)
        return Corruption.of(Noise(config.corruption.scale))
    if not 0 <= config.corruption.fraction <= 1:
        raise ValueError(
            f"corruption.fraction must be in [0, 1], got {config.corruption.fraction}"
        )
    return Corruption.of(Mask(config.corruption.fraction))


def _draw(
    key: PRNGKeyArray, patterns: np.ndarray, config: ConfigDict, corruption: Corruption
) -> tuple[Queries, Queries]:
    """Memory sets for tuning and for scoring, from different halves of the data."""
    rng = np.random.default_rng(config.seed)
    order = rng.permutation(len(patterns))
    halves = np.split(order[: len(order) // 2 * 2], 2)

    @jax.jit
    def corrupted(keys: Array, memories: Array) -> Queries:
        def one(key: PRNGKeyArray, memories: Array) -> tuple:
            return corrupted_copies(key, memories, corruption, config.memories)

        return Queries(memories, *jax.vmap(one)(keys, memories))

    drawn: list[Queries] = []
    for half, sets in zip(halves, (config.tuning_sets, config.sets), strict=True):
        chosen = [rng.choice(half, config.memories, replace=False) for _ in range(sets)]
        keys = jax.random.split(jax.random.fold_in(key, len(drawn)), sets)
        drawn.append(corrupted(keys, jnp.asarray(patterns[np.stack(chosen)])))
    return drawn[0], drawn[1]


def _fit(config: ConfigDict, memories: Array) -> list[LinearKernel]:
    """Kernels of every memory set after 0 and after each number of steps."""
    options = config.stage_one
    steps = sorted({int(n) for n in options.steps})
    d = memories.shape[-1]
    start = identity_start(d)
    if options.start == "gaussian":
        keys = jax.random.split(jax.random.key(config.seed), len(memories))
        start = jax.vmap(lambda key: gaussian_start(key, d))(keys)
    fitted = fit_sgd(
        memories,
        rate=options.rate,
        steps=steps[-1],
        start=start,
        kind=options.loss,
        t=options.t,
        snapshots=(0, *steps),
    )
    assert fitted.snapshots is not None
    weights = jnp.moveaxis(fitted.snapshots.weights, 1, 0)
    return [LinearKernel(w) for w in weights]


def _variants(method: Method, kernels: list[LinearKernel]) -> list[Similarity]:
    """The method with each kernel that it may use."""
    allowed: dict[str, Sequence[Kernel | None]] = {
        "none": [None],
        "start": kernels[:1],
        "learned": kernels[1:],
    }
    return [method.similarity(kernel) for kernel in allowed[method.kernels]]


def _choose(queries: Queries, kernels: list[LinearKernel]) -> dict[str, Choice]:
    """For each method the beta and the kernel with the least error over the sets."""
    tried: list[tuple[Method, int, Array]] = []
    for method in METHODS:
        for number, overlaps in enumerate(
            _overlaps(_variants(method, kernels), queries)
        ):
            tried.append((method, number, overlaps))
    best: dict[str, tuple[float, Choice]] = {}
    for separation in dict.fromkeys(method.separation for method in METHODS):
        members = [entry for entry in tried if entry[0].separation == separation]
        stacked = jnp.stack([overlaps for *_, overlaps in members])
        errors, betas = _sweep(queries.memories, stacked, queries.target, separation)
        for (method, number, _), error, beta in zip(
            members, errors, betas, strict=True
        ):
            least = int(error.argmin())
            found = float(error[least]), Choice(float(beta[least]), number)
            best[method.name] = min(best.get(method.name, found), found)
    return {name: choice for name, (_, choice) in best.items()}


@jax.jit
def _overlaps(models: list[Similarity], queries: Queries) -> list[Array]:
    def one(model: Similarity) -> Array:
        axis = None if model.kernel is None else 0
        return jax.vmap(
            lambda model, q: model(q.memories, q.query, observed=q.observed),
            in_axes=(axis, 0),
        )(model, queries)

    return [one(model) for model in models]


@jax.jit
def _sweep(
    memories: Array, overlaps: Array, target: Array, separation: Separation
) -> tuple[Array, Array]:
    """Errors and betas `(variants, betas)` of overlaps `(variants, sets, Q, M)`."""

    def one(overlaps: Array) -> tuple[Array, Array]:
        betas = beta_grid(overlaps.reshape(-1, overlaps.shape[-1]))
        errors = jax.vmap(sweep_errors, in_axes=(0, 0, 0, None, None))(
            memories, overlaps, target, separation, betas
        )
        return errors.mean(0), betas

    return jax.lax.map(one, overlaps)


def _retrieve(
    queries: Queries, kernels: list[LinearKernel], choices: dict[str, Choice]
) -> dict[str, Retrieval]:
    """What every method retrieves with its choice, in one update."""
    return {
        method.name: retrieve(
            queries.memories,
            queries.query,
            beta=choices[method.name].beta,
            similarity=_variants(method, kernels)[choices[method.name].kernel],
            separation=method.separation,
            observed=queries.observed,
        )
        for method in METHODS
    }


def _limit(corruption: Mask | Noise, queries: Queries) -> Retrieval:
    """The best that anyone can do who knows the corruption."""

    def one(memories: Array, query: Array) -> Retrieval:
        weights = jax.nn.softmax(corruption.log_likelihood(memories, query))
        return Retrieval(posterior_mean(corruption, memories, query), weights)

    return jax.vmap(one)(queries.memories, queries.query)


def _score(
    queries: Queries,
    retrieved: dict[str, Retrieval],
    betas: dict[str, list[Any]],
) -> list[dict[str, Any]]:
    """One record for each method and memory set."""
    rows = []
    truth = jnp.take_along_axis(queries.memories, queries.target[..., None], axis=1)
    for name, (state, weights) in retrieved.items():
        off = jnp.clip(state, 0, 1) - truth
        errors = np.asarray((off**2).sum(-1).mean(-1))
        exact = np.asarray((jnp.abs(off).max(-1) <= EXACT).mean(-1))
        top1 = np.asarray((weights.argmax(-1) == queries.target).mean(-1))
        for index, error in enumerate(errors):
            rows.append(
                {
                    "method": name,
                    "set": index,
                    "beta": betas[name][index],
                    "error": float(error),
                    "top1": float(top1[index]),
                    "exact": float(exact[index]),
                }
            )
    return rows


def _picture(
    path: Path,
    images: data.Images,
    config: ConfigDict,
    queries: Queries,
    retrieved: dict[str, Retrieval],
    rows: list[dict[str, Any]],
) -> None:
    """The first queries of the first set, as they were drawn."""
    queries_are = {"mask": "masked", "noise": "noisy"}[config.corruption.kind]
    shape = (config.images, *images.pixels.shape[1:])
    truth = queries.memories[0][queries.target[0][: config.images]]
    columns = {"memory": truth, "query": queries.query[0][: config.images]}
    columns |= {name: retrieved[name].state[0][: config.images] for name in PICTURED}
    captions = {}
    for name in PICTURED:
        errors = ((columns[name] - truth) ** 2).sum(-1)
        captions[name] = [f"error {float(e):.2f}" for e in errors]
    titles = {name: name for name in ("memory", "query")}
    for name in PICTURED:
        mean = np.mean([row["error"] for row in rows if row["method"] == name])
        titles[name] = f"{name}\nmean {mean:.2f}"
    records.write_whole(
        path,
        lambda temporary: plotting.image_grid(
            temporary,
            {titles[k]: np.asarray(v).reshape(shape) for k, v in columns.items()},
            captions={titles[k]: v for k, v in captions.items()},
            title=f"{config.memories} {config.data} stored, {queries_are} queries, "
            "one update (error: sum of squared pixel differences)",
        ),
    )
