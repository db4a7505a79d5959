"""The candidates of blind calibration, each scored by its predictive likelihood."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from uhop_jax._blind_scores import chosen_beta, judged, narrowed, supported
from uhop_jax._expectation import (
    Folded,
    Tabulate,
    fold,
    leading_by_likelihood,
    leading_by_similarity,
    maximised,
    predictive,
    shares,
)
from uhop_jax.kernels import LikelihoodKernel, bins
from uhop_jax.likelihood import (
    BINS,
    edges_of,
    factors,
    probabilities,
    smooth_probabilities,
)
from uhop_jax.model import Model
from uhop_jax.separation import Softmax
from uhop_jax.similarity import Cosine, Dot, Similarity
from uhop_jax.transformations import Transformations, Transformed
from uhop_jax.trials import beta_grid

TABLES = probabilities, smooth_probabilities  # kinds, for many counts and for few
RANK = 12  # of the table
ITERATIONS, FEWER = 30, 8  # of maximisation, at most; fewer over transformations
INTERLEAVED = 8  # folds of the maximisation: components at random
PARTS = 3  # of the queries: each is judged by what the others teach
STRIPS = 4  # folds of the choice: neighbouring components together
WORK = 1e9  # about how many pairs of components of queries and transformed memories
SPREAD = 1000  # memories whose overlaps have the spread that betas are relative to
SHARPNESS = (0.3, 300.0, 12)  # of fixed similarities, as in `beta_grid`
BETAS = tuple(2.0**n for n in range(-6, 3))  # of the likelihood
LEAST = 20  # queries that are learned from, if there are as many
CERTAIN = 3.0  # standard errors by which a difference is certain


class Problem(NamedTuple):
    """Memories and the queries that are learned from, with their bins.

    Query `q` is in part `q % parts`.
    """

    memories: Array
    queries: Array
    observed: Array | None
    edges: Array
    query_bins: Array
    interleaved: Folded
    strips: Folded
    parts: int

    @classmethod
    def of(cls, memories: Array, queries: Array, observed: Array | None) -> "Problem":
        edges = edges_of(memories, queries, observed)
        query_bins = bins(queries, edges)
        if observed is not None:
            query_bins = jnp.where(observed, query_bins, BINS)
        folded = _folded(bins(memories, edges), query_bins)
        parts = parts_of(len(queries))
        return cls(memories, queries, observed, edges, query_bins, *folded, parts)


class Trial(NamedTuple):
    """A candidate with its scores."""

    model: Model  # at the chosen beta
    scores: np.ndarray  # `(Q, betas)`
    betas: np.ndarray
    chosen: int  # which beta
    counts: Array  # of the table that the candidate implies
    tabulate: Tabulate  # which makes probabilities of the counts
    rows: Any = slice(None)  # the queries that were scored

    @property
    def each(self) -> np.ndarray:
        """The score of each query at the chosen beta."""
        return self.scores[:, self.chosen]

    @property
    def best(self) -> float:
        """The mean score at the chosen beta."""
        return float(self.each.mean())

    def ahead_of(self, other: "Trial") -> tuple[float, float]:
        """Mean difference of the scores, and its standard error.

        One of the trials at most has scored a sample of the queries.
        """
        shared = other.rows if isinstance(self.rows, slice) else self.rows
        first, second = (
            trial.each[shared] if isinstance(trial.rows, slice) else trial.each
            for trial in (self, other)
        )
        if other.best == -np.inf:  # it gave NaN
            return np.inf, 0.0
        difference = first - second
        return float(difference.mean()), float(difference.std() / difference.size**0.5)


def _better(trial: Callable[[Tabulate], Trial]) -> Trial:
    """The trial with the kind of table by which it predicts better."""
    return max(map(trial, TABLES), key=lambda trial: trial.best)


def _trial(
    similarity: Similarity,
    scores: Array,
    betas: Array,
    counts: Array,
    tabulate: Tabulate,
) -> Trial:
    """The trial of a similarity, its model at the chosen beta.

    A likelihood is the posterior at beta 1, and stays as near to it as the scores
    allow. A sharp posterior of another similarity costs nothing under a table that
    hardly depends on the memory: where the scores do not tell betas apart, it stays
    flat.
    """
    values, means = (np.asarray(x, np.float64) for x in (betas, scores))
    means = np.where(np.isnan(means), -np.inf, means)
    likely = isinstance(similarity.kernel, LikelihoodKernel)
    chosen = chosen_beta(means, np.abs(np.log(values)) if likely else values)
    model = Model(similarity, Softmax(), beta=betas[chosen])
    return Trial(model, means, np.asarray(betas), chosen, counts, tabulate)


def fixed_trial(problem: Problem, similarity: Similarity) -> Trial:
    """The trial of a similarity as it is."""
    memories, queries, observed = problem[:3]
    some = even_sample(len(memories), SPREAD)
    betas = _betas(similarity, memories[some], queries, observed)
    strips = problem.strips.templates.shape[1]
    leading = leading_by_similarity(
        similarity, memories, queries, observed, betas, strips=strips
    )
    queries = problem.strips.queries
    common = shares(queries, BINS, betas.dtype, parts=problem.parts)
    narrowing = narrowed(leading, betas, jnp.zeros(len(memories), betas.dtype))
    about = problem.strips, leading, betas, common, narrowing

    def trial(tabulate: Tabulate) -> Trial:
        scores, counts = judged(*about, tabulate=tabulate)
        return _trial(similarity, scores, betas, counts, tabulate)

    return _better(trial)


def inverted_trial(problem: Problem) -> Trial:
    """The trial of the cosine of memories and inverted queries, each less their mean.

    Its table is one of values that fall where stored values rise.
    """
    memories, queries, observed = problem[:3]
    seen = (
        jnp.ones_like(queries) if observed is None else observed.astype(queries.dtype)
    )
    mean = (seen * queries).sum(0) / jnp.maximum(seen.sum(0), 1)
    inverted = problem._replace(
        memories=memories - memories.mean(0)[None],
        queries=seen * (mean[None] - queries),
    )
    return fixed_trial(inverted, Cosine())


@jax.jit
def _betas(
    similarity: Similarity, memories: Array, queries: Array, observed: Array | None
) -> Array:
    """Inverse temperatures for the spread of the overlaps."""
    overlaps = similarity(memories, queries, observed=observed)
    return beta_grid(overlaps, SHARPNESS)[1:]


def learned_trial(problem: Problem, start: Array) -> Trial:
    """The trial of a likelihood learned from the counts of a table."""
    betas = jnp.asarray(BETAS, start.dtype)

    def trial(tabulate: Tabulate) -> Trial:
        options = {"tabulate": tabulate, "rank": RANK, "iterations": ITERATIONS}
        counts, _ = maximised(problem.interleaved, start, **options)
        about = problem.interleaved, problem.strips, start, _common(problem), options
        scores = _together([_of_part(*about, part) for part in range(problem.parts)])
        similarity = Dot(_kernel(problem, counts, tabulate))
        return _trial(similarity, scores, betas, counts, tabulate)

    return _better(trial)


def moved_trial(
    problem: Problem, start: Trial, transformations: Transformations, rival: Trial
) -> Trial | None:
    """The trial of a likelihood over transformed memories, from some queries.

    It is None where the likelihood does not predict the first part of the queries
    better than its rival does, by a standard error.
    """
    templates = _templates(problem.memories, problem.edges, transformations)
    rows = even_sample(len(problem.queries), int(WORK / templates.size))
    interleaved, strips = _folded(templates, problem.query_bins[rows])
    options = {"tabulate": start.tabulate, "rank": RANK, "iterations": FEWER}
    options["groups"] = transformations.number
    about = interleaved, strips, start.counts, _common(problem), options
    first = _of_part(*about, 0)
    seen = np.asarray(first[0], np.float64)
    advantage = seen[:, seen.mean(0).argmax()] - rival.each[rows][:: problem.parts]
    if not advantage.mean() > advantage.std() / len(advantage) ** 0.5:
        return None
    others = [_of_part(*about, number) for number in range(1, problem.parts)]
    counts, log_weights = maximised(interleaved, start.counts, **options)
    similarity = Transformed(
        _kernel(problem, counts, start.tabulate),
        transformations=transformations,
        log_weights=log_weights,
    )
    scores = _together([first, *others])
    betas = jnp.asarray(BETAS, scores.dtype)
    trial = _trial(similarity, scores, betas, counts, start.tabulate)
    return trial._replace(rows=rows)


def likelihood_of(problem: Problem, trial: Trial) -> Similarity:
    """The likelihood of a trial: its own, or of the table that it implies."""
    similarity = trial.model.similarity
    if isinstance(similarity.kernel, LikelihoodKernel):
        return similarity
    return Dot(_kernel(problem, trial.counts, trial.tabulate))


def _common(problem: Problem) -> Array:
    """The shares of bins by part of the queries."""
    dtype = problem.edges.dtype
    return shares(problem.strips.queries, BINS, dtype, parts=problem.parts)


def _of_part(
    interleaved: Folded,
    strips: Folded,
    start: Array,
    common: Array,
    options: dict,
    number: int,
) -> tuple[Array, Array]:
    """Scores of a part of the queries under the table of the others, and narrowing."""
    parts, betas = len(common), jnp.asarray(BETAS, start.dtype)
    inside = np.arange(len(strips.queries)) % parts == number
    kept, largest = inside.sum(), -(-inside.size // parts)
    others = _filled(interleaved, ~inside, inside.size - inside.size // parts)
    counts, log_weights = maximised(others, start, **options)
    part = _filled(strips, inside, largest)
    prior = jnp.repeat(log_weights, len(strips.templates) // log_weights.size)
    tabulate = options["tabulate"]
    leading = leading_by_likelihood(
        part, counts, prior, betas, tabulate=tabulate, rank=RANK
    )
    scores = predictive(
        part, leading, betas, common[number][None], tabulate(counts)[None]
    )
    return scores[:kept], narrowed(leading, betas, prior)[:kept]


def _filled(data: Folded, inside: np.ndarray, size: int) -> Folded:
    """The queries inside and, up to a size, some of which no component is observed.

    Parts of one size share a program; queries without components say nothing.
    """
    queries = data.queries[inside]
    empty = ((0, size - len(queries)), (0, 0), (0, 0))
    return data._replace(queries=jnp.pad(queries, empty, constant_values=BINS))


def _together(parts: list[tuple[Array, Array]]) -> Array:
    """Scores of all queries from those of their parts, less what is not supported."""
    number = sum(len(scores) for scores, _ in parts)
    both = np.zeros((2, number, len(BETAS)), parts[0][0].dtype)
    for part, (scores, narrowing) in enumerate(parts):
        both[:, part :: len(parts)] = scores, narrowing
    return supported(*jnp.asarray(both))


def _kernel(problem: Problem, counts: Array, tabulate: Tabulate) -> LikelihoodKernel:
    """The kernel of a table of counts."""
    memory_table, query_table = factors(counts, tabulate)
    d = problem.memories.shape[1]
    return LikelihoodKernel(memory_table, query_table, problem.edges, d).cut(RANK)


def _folded(templates: Array, queries: Array) -> tuple[Folded, Folded]:
    """Components dealt at random, the same way in every call, and in strips."""
    d = queries.shape[-1]
    orders = np.random.default_rng(0).permutation(d), np.arange(d)
    folds = min(INTERLEAVED, d), min(STRIPS, d)
    interleaved, strips = (
        fold(templates, queries, jnp.asarray(order), folds=F, number=BINS)
        for order, F in zip(orders, folds, strict=True)
    )
    return interleaved, strips


@jax.jit
def _templates(
    memories: Array, edges: Array, transformations: Transformations
) -> Array:
    """Bins of the transformed memories, `(T M, d)`."""
    number = jnp.arange(transformations.number, dtype=jnp.int32)

    def one(index: Array) -> Array:
        return bins(transformations(index, memories), edges).astype(jnp.uint8)

    return lax.map(one, number).reshape(-1, memories.shape[1])


def even_sample(number: int, most: int) -> np.ndarray:
    """Even steps through `number` rows: `most` of them, or `LEAST` if that is more."""
    kept = min(max(most, LEAST), number)
    return np.linspace(0, number - 1, kept).round().astype(int)


def parts_of(queries: int) -> int:
    """Into how many parts queries are dealt, each judged by what the others teach."""
    return max(2, min(PARTS, queries // 2))
