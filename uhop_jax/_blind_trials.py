"""The candidates of blind calibration, each scored by its predictive likelihood."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from uhop_jax._expectation import (
    Folded,
    fold,
    judged,
    leading_by_likelihood,
    leading_of,
    maximised,
)
from uhop_jax.kernels import Centering, LikelihoodKernel, bins
from uhop_jax.likelihood import BINS, edges_of, factors
from uhop_jax.model import Model
from uhop_jax.separation import Softmax
from uhop_jax.similarity import Dot, Similarity
from uhop_jax.transformations import Transformations, Transformed
from uhop_jax.trials import beta_grid

RANK = 12  # of the table
ITERATIONS, FEWER = 30, 8  # of maximisation, at most; fewer over transformations
INTERLEAVED = 8  # folds of the maximisation: components at random
STRIPS = 4  # folds of the choice: neighbouring components together
WORK = 2e9  # about how many pairs of components of queries and transformed memories
SHARPNESS = (0.3, 300.0, 12)  # of fixed similarities, as in `beta_grid`
BETAS = tuple(2.0**n for n in range(-6, 3))  # of the likelihood
LEAST = 20  # queries that are learned from, if there are as many


class Problem(NamedTuple):
    """Memories and the queries that are learned from, with their bins."""

    memories: Array
    queries: Array
    observed: Array | None
    edges: Array
    query_bins: Array
    interleaved: Folded
    strips: Folded

    @classmethod
    def of(cls, memories: Array, queries: Array, observed: Array | None) -> "Problem":
        edges = edges_of(memories, queries, observed)
        query_bins = bins(queries, edges)
        if observed is not None:
            query_bins = jnp.where(observed, query_bins, BINS)
        folded = _folded(bins(memories, edges), query_bins)
        return cls(memories, queries, observed, edges, query_bins, *folded)


class Trial(NamedTuple):
    """A candidate with its scores.

    Attributes:
      model: at the best beta.
      scores: `(Q, betas)`.
      betas: inverse temperatures.
      counts: of the table that the candidate implies.
      rows: the queries that were scored; all by default.
    """

    model: Model
    scores: np.ndarray
    betas: np.ndarray
    counts: Array
    rows: Any = slice(None)

    @property
    def each(self) -> np.ndarray:
        """The score of each query at the best beta."""
        return self.scores[:, int(self.scores.mean(0).argmax())]

    @property
    def best(self) -> float:
        """The mean score at the best beta."""
        return float(self.each.mean())


def _trial(similarity: Similarity, scores: Array, betas: Array, counts: Array) -> Trial:
    """The trial of a similarity, its model at the beta of the best score."""
    means = np.asarray(scores, np.float64)
    best = int(means.mean(0).argmax())
    model = Model(similarity, Softmax(), beta=betas[best])
    return Trial(model, means, np.asarray(betas), counts)


def fixed_trial(problem: Problem, similarity: Similarity) -> Trial:
    """The trial of a similarity as it is."""
    logits = _overlaps_without_strips(
        problem.memories, problem.queries, problem.observed, similarity
    )
    betas = beta_grid(logits.reshape(-1, logits.shape[-1]), SHARPNESS)[1:]
    scores, counts = judged(problem.strips, leading_of(logits, betas), betas)
    return _trial(similarity, scores, betas, counts)


def learned_trial(problem: Problem, start: Array) -> Trial:
    """The trial of a likelihood learned from the counts of a table."""
    counts, _ = maximised(problem.interleaved, start, rank=RANK, iterations=ITERATIONS)
    even = jnp.zeros(len(problem.memories), counts.dtype)
    betas = jnp.asarray(BETAS, counts.dtype)
    leading = leading_by_likelihood(problem.strips, counts, even, betas, rank=RANK)
    scores, counts = judged(problem.strips, leading, betas, counts)
    return _trial(Dot(_kernel(problem, counts)), scores, betas, counts)


def moved_trial(
    problem: Problem, start: Array, transformations: Transformations
) -> Trial:
    """The trial of a likelihood over transformed memories, from some queries."""
    templates = _templates(problem.memories, problem.edges, transformations)
    number = transformations.number
    rows = even_sample(len(problem.queries), int(WORK / templates.size))
    interleaved, strips = _folded(templates, problem.query_bins[rows])
    counts, log_weights = maximised(
        interleaved, start, rank=RANK, iterations=FEWER, groups=number
    )
    betas = jnp.asarray(BETAS, counts.dtype)
    prior = jnp.repeat(log_weights, len(problem.memories))
    leading = leading_by_likelihood(strips, counts, prior, betas, rank=RANK)
    scores, counts = judged(strips, leading, betas, counts)
    similarity = Transformed(
        _kernel(problem, counts),
        transformations=transformations,
        log_weights=log_weights,
    )
    return _trial(similarity, scores, betas, counts)._replace(rows=rows)


def _kernel(problem: Problem, counts: Array) -> LikelihoodKernel:
    """The kernel of a table of counts."""
    memory_table, query_table = factors(counts)
    d = problem.memories.shape[1]
    return LikelihoodKernel(memory_table, query_table, problem.edges, d).cut(RANK)


def _folded(templates: Array, queries: Array) -> tuple[Folded, Folded]:
    """Components dealt at random, the same way in every call, and in strips."""
    d = queries.shape[-1]
    random = np.random.default_rng(0).permutation(d)
    return (
        fold(templates, queries, random, min(INTERLEAVED, d), BINS),
        fold(templates, queries, np.arange(d), min(STRIPS, d), BINS),
    )


@jax.jit
def _templates(
    memories: Array, edges: Array, transformations: Transformations
) -> Array:
    """Bins of the transformed memories, `(T M, d)`."""
    number = jnp.arange(transformations.number)

    def one(index: Array) -> Array:
        return bins(transformations(index, memories), edges).astype(jnp.uint8)

    return lax.map(one, number).reshape(-1, memories.shape[1])


@jax.jit
def _overlaps_without_strips(
    memories: Array, queries: Array, observed: Array | None, similarity: Similarity
) -> Array:
    """Overlaps `(F, Q, M)`, each without the components of one strip.

    Components that are left out are zero, or at the centres of `Centering`.
    """
    d = memories.shape[1]
    folds = min(STRIPS, d)
    strip = jnp.arange(d) // -(-d // folds)
    kernel = similarity.kernel
    empty = query_empty = jnp.zeros(d, memories.dtype)
    if isinstance(kernel, Centering):
        empty = query_empty = kernel.center
        if kernel.query_center is not None:
            query_empty = kernel.query_center

    def without(number: Array) -> Array:
        out = (strip == number)[None]
        return similarity(
            jnp.where(out, empty[None], memories),
            jnp.where(out, query_empty[None], queries),
            observed=observed,
        )

    return lax.map(without, jnp.arange(folds))


def even_sample(number: int, most: int) -> np.ndarray:
    """Even steps through `number` rows: about `most` of them, `LEAST` at least."""
    kept = min(max(most, LEAST), number)
    return np.linspace(0, number - 1, kept).round().astype(int)
