"""Memory sets and queries, and the scores of models on them: whole sweeps on device.

One model is an `Entry`; all entries of a cell are evaluated by one compiled program,
which visits one memory set after another so that memory stays bounded.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from uhop_jax._products import weigh
from uhop_jax.corruption import Corruption
from uhop_jax.experiments.methods import Method
from uhop_jax.kernels import Identity, Kernel
from uhop_jax.losses import AverageLoss, delta_min_of_gram
from uhop_jax.model import Model
from uhop_jax.posterior import posterior
from uhop_jax.separation import Separation
from uhop_jax.similarity import Dot, Similarity
from uhop_jax.trials import (
    beta_grid,
    corrupted_copies,
    overlaps_of,
    sweep_errors,
    with_one_of,
)

EXACT = 0.01  # a pattern is recalled exactly if no component is further off


class Queries(NamedTuple):
    """Memory sets `(sets, M, d)` and a corrupted copy of each memory.

    Attributes:
      memories: stored patterns.
      query: corrupted copies, `(sets, M, d)`, in the order of the memories.
      observed: `(sets, M, d)`, true where a component is intact; None if the corruption
        does not tell.
    """

    memories: Float[Array, "sets M d"]
    query: Float[Array, "sets M d"]
    observed: Array | None


class Entry(NamedTuple):
    """A model to evaluate: a method with one of its kernels.

    Attributes:
      method: the method.
      setting: name of the kernel within the family of the method.
      model: the model at the natural beta, 1; its kernel has a leading axis of memory
        sets.
    """

    method: Method
    setting: str
    model: Model


class Scores(NamedTuple):
    """Scores of retrieved patterns against the memories, `(sets, entries)` each.

    Attributes:
      error: sum of squared component differences, mean over the queries; the retrieved
        pattern is first clamped to `[0, 1]`, or to the range of the memories where the
        range is wider.
      top1: share of queries whose largest weight is at the right memory.
      exact: share of queries with no component off by more than `EXACT`.
    """

    error: np.ndarray
    top1: np.ndarray
    exact: np.ndarray


def draw_sets(
    patterns: np.ndarray, memories: int, runs: Sequence[int], seed: Sequence[int]
) -> np.ndarray:
    """Memory sets `(sets, M, d)` of distinct patterns; a run has a seed of its own."""
    sets = []
    for index in runs:
        rng = np.random.default_rng([*seed, index])
        sets.append(patterns[rng.choice(len(patterns), memories, replace=False)])
    return np.stack(sets)


@jax.jit
def corrupt_sets(keys: Array, memories: Array, corruption: Corruption) -> Queries:
    """One corrupted copy of each memory of each set, a key for each set."""

    def one(row: tuple[Array, Array]) -> tuple[Array, Array | None]:
        key, memories = row
        query, observed, _ = corrupted_copies(
            key, memories, corruption, memories.shape[0]
        )
        return query, observed

    return Queries(memories, *lax.map(one, (keys, memories)))


def entries_of(
    methods: Sequence[Method], kernels: dict[str, dict[str, Kernel]]
) -> list[Entry]:
    """Every method with every kernel of its family."""
    entries = []
    for method in methods:
        family = kernels[method.family] if method.family else {"": Identity()}
        for setting, kernel in family.items():
            model = Model(method.similarity(kernel), method.separation, beta=1.0)
            entries.append(Entry(method, setting, model))
    return entries


def overlaps(entries: Sequence[Entry], queries: Queries) -> Array:
    """Overlaps of every query with every memory, `(sets, entries, Q, M)`."""
    return _overlaps(tuple(e.model.similarity for e in entries), queries)


def errors_by_beta(
    entries: Sequence[Entry], overlaps: Array, memories: Array
) -> tuple[np.ndarray, np.ndarray]:
    """Errors `(sets, entries, betas)`, and the betas `(entries, betas)`.

    Each entry has a grid of betas of its own, common to all sets.
    """
    betas = grids(overlaps)
    separations = tuple(entry.model.separation for entry in entries)
    errors = _sweep(memories, overlaps, separations, betas)
    return np.asarray(errors), np.asarray(betas)


def best_entries(
    entries: Sequence[Entry],
    errors: np.ndarray,
    betas: np.ndarray,
    *,
    every_setting: bool = False,
) -> list[tuple[int, float]]:
    """Index and beta of the least mean error: one for each method, or for each entry.

    Where the errors of several kernels or betas are the least up to rounding, the
    middle one is chosen: rounding differs between machines, and must not decide.
    Errors are `(sets, entries, betas)`, betas `(entries, betas)`. With `every_setting`,
    every kernel of a family is kept, not only the best.
    """
    mean = errors.mean(0)
    mean = np.where(np.isnan(mean), np.inf, mean)
    families: dict[object, list[int]] = {}
    for index, entry in enumerate(entries):
        key = index if every_setting else entry.method.name
        families.setdefault(key, []).append(index)
    chosen = []
    for members in families.values():
        least = mean[members].min(-1)
        i = members[_middle_of_least(least, np.arange(len(least)), mean[members])]
        chosen.append(
            (i, float(betas[i, _middle_of_least(mean[i], betas[i], mean[i])]))
        )
    return chosen


def score(
    entries: Sequence[Entry], overlaps: Array, betas: Sequence[float], memories: Array
) -> Scores:
    """Scores of each entry at its beta, after one update."""
    separations = tuple(entry.model.separation for entry in entries)
    scores = _score(memories, overlaps, separations, jnp.asarray(betas, overlaps.dtype))
    return Scores(*(np.asarray(x) for x in scores))


def scores_of_weights(weights: Array, memories: Array) -> Scores:
    """Scores `(sets, 1)` of weights `(sets, Q, M)` over the memories."""
    scores = jax.vmap(_scores)(weights, memories)
    return Scores(*(np.asarray(x)[:, None] for x in scores))


def weights(entry: Entry, beta: float, queries: Queries) -> Array:
    """Weights `(sets, Q, M)` of one entry over the memories, after one update."""
    model = dataclasses.replace(entry.model, beta=beta)
    return model.weights(overlaps([entry], queries)[:, 0])


@jax.jit
def posterior_weights(corruption: Any, queries: Queries) -> Array:
    """Probabilities `(sets, Q, M)` of the memories under the known corruption."""

    def one(row: Queries) -> Array:
        memories, query, observed = row
        log_likelihood = corruption.log_likelihood(memories, query, observed=observed)
        return posterior(log_likelihood)

    return lax.map(one, queries)


def separations(
    entries: Sequence[Entry], memories: Array, t: float
) -> tuple[np.ndarray, np.ndarray]:
    """Average separation loss and `Delta_min` of kernels, `(sets, entries)` each."""
    plain = tuple(Dot(entry.model.similarity.kernel) for entry in entries)
    grams = _overlaps(plain, Queries(memories, memories, None))
    loss, delta = _separations(grams, jnp.asarray(t, grams.dtype))
    return np.asarray(loss), np.asarray(delta)


@jax.jit
def _separations(grams: Array, t: Array) -> tuple[Array, Array]:
    """Loss and `Delta_min` of Gram matrices `(sets, entries, M, M)`."""
    return AverageLoss(t).from_pairs(grams), delta_min_of_gram(grams)


def _middle_of_least(errors: np.ndarray, places: np.ndarray, scale: np.ndarray) -> int:
    """Index of the middle place among the places of least error, up to rounding.

    The median of the errors in `scale` sets the size of the rounding.
    """
    order = np.argsort(places)
    finite = scale[np.isfinite(scale)]
    slack = 1e-6 * (1e-6 + (np.median(finite) if finite.size else 0.0))
    equal = [i for i in order if errors[i] <= errors.min() + slack]
    return int(equal[len(equal) // 2])


@jax.jit
def _overlaps(similarities: tuple[Similarity, ...], queries: Queries) -> Array:
    """Overlaps `(sets, entries, Q, M)`, one set and entry after another."""

    def one(row: tuple[tuple[Similarity, ...], Queries]) -> Array:
        similarities, (memories, query, observed) = row
        return lax.map(
            lambda index: overlaps_of(similarities, index, memories, query, observed),
            jnp.arange(len(similarities)),
        )

    return lax.map(one, (similarities, queries))


@jax.jit
def grids(overlaps: Array) -> Array:
    """Inverse temperatures `(entries, betas)`, common to all memory sets."""
    return jax.vmap(lambda x: beta_grid(x.reshape(-1, x.shape[-1])), in_axes=1)(
        overlaps
    )


def _over_entries(
    function: Callable[[Array, Array, Callable[[Array, Array], Array], Array], Any],
    memories: Array,
    overlaps: Array,
    separations: tuple[Separation, ...],
    betas: Array,
) -> Any:
    """`function(memories, overlaps, weights, beta)` for each set and entry."""

    def of_set(row: tuple[Array, Array]) -> Any:
        memories, overlaps = row

        def of_entry(row: tuple[Array, Array, Array]) -> Any:
            index, overlaps, beta = row

            def weights(overlaps: Array, beta: Array) -> Array:
                return with_one_of(
                    separations, index, lambda s: s.tempered(overlaps, beta)
                )

            return function(memories, overlaps, weights, beta)

        return lax.map(of_entry, (jnp.arange(len(separations)), overlaps, betas))

    return lax.map(of_set, (memories, overlaps))


@jax.jit
def _sweep(
    memories: Array, overlaps: Array, separations: tuple[Separation, ...], betas: Array
) -> Array:
    """Errors `(sets, entries, betas)`."""
    target = jnp.arange(memories.shape[1])

    def sweep(memories, overlaps, weights, betas):
        return sweep_errors(memories, overlaps, target, weights, betas)

    return _over_entries(sweep, memories, overlaps, separations, betas)


@jax.jit
def _score(
    memories: Array, overlaps: Array, separations: tuple[Separation, ...], betas: Array
) -> tuple[Array, Array, Array]:
    """Scores `(sets, entries)`, each entry at its beta."""

    def score(memories, overlaps, weights, beta):
        return _scores(weights(overlaps, beta), memories)

    return _over_entries(score, memories, overlaps, separations, betas)


def mean_error(weights: Array, memories: Array) -> Array:
    """Mean error of weights `(Q, M)`; query `i` is a copy of memory `i`."""
    return _scores(weights, memories)[0]


def _scores(weights: Array, memories: Array) -> tuple[Array, Array, Array]:
    """Mean error, top-1 and exact recall of weights, see `mean_error`."""
    low, high = jnp.minimum(memories.min(), 0), jnp.maximum(memories.max(), 1)
    differences = jnp.clip(weigh(weights, memories), low, high) - memories
    correct = weights.argmax(-1) == jnp.arange(memories.shape[0])
    exact = jnp.abs(differences).max(-1) <= EXACT
    return (differences * differences).sum(-1).mean(), correct.mean(), exact.mean()
