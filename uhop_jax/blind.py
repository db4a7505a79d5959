"""Blind calibration: a similarity chosen and learned from queries without labels.

Nobody says how the queries are corrupted, or which memory each belongs to. Expectation
maximisation learns from them how stored values become query values, and the predictive
likelihood of components that a posterior has not seen compares the result with every
fixed similarity (Fellegi and Sunter 1969 have the maximisation, for linked records).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from uhop_jax._blind_trials import (
    CERTAIN,
    Problem,
    Trial,
    even_sample,
    fixed_trial,
    inverted_trial,
    learned_trial,
    likelihood_of,
    moved_trial,
)
from uhop_jax._checks import (
    as_floating,
    check_finite,
    check_on_host,
    is_traced,
    wider_dtype,
    working_dtype,
)
from uhop_jax._pytree import Pytree
from uhop_jax.candidates import PLAIN, check_candidates
from uhop_jax.foreign import foreign_probability
from uhop_jax.kernels import Centering
from uhop_jax.model import Model
from uhop_jax.posterior import mean_and_variance, with_squares
from uhop_jax.similarity import (
    Cosine,
    Dot,
    Similarity,
    check_observed,
    check_patterns,
)
from uhop_jax.streaming import retrieve_streamed
from uhop_jax.transformations import Transformations, check_transformations

LEARNED, MOVED = "blind likelihood", "blind likelihood over transformations"
VALUES = 1_000_000  # about how many component values of queries are learned from
TEMPLATES = 2**31  # most bytes of transformed memories
WORK = 1e10  # about how many pairs of components of queries and memories
MOST = 2000  # queries that are learned from


class BlindCalibration(Pytree):
    """A memory model calibrated on queries without labels.

    Attributes:
      model: the chosen model.
      scores: `(candidates, betas)`, the predictive likelihood of each candidate: how
        much more likely, in nats a query, it makes components that it has not seen than
        the shares of values among other queries do. It is `-inf` where a posterior
        claims more about the memory than it predicts. Of the betas whose score
        is within a standard error of the best, a likelihood has the one nearest to 1,
        another similarity the smallest.
      betas: `(candidates, betas)`; NaN beyond the betas of a candidate.
      advantage: mean score of the chosen model less the score of its rival.
      standard_error: standard error of `advantage`, over queries.
      expected_error: mean over the queries of the expected sum of squared differences
        from the true memory, where the weights are its probabilities.
      name: name of the chosen candidate.
      names: names of all candidates, in the order of `scores`.
      rival: the best candidate of another kind, fixed or learned.
      queries: number of queries that were learned from.
      likelihood: the likelihood that the chosen model implies, by which foreign queries
        are told.
      table: `(K, K)`, its probabilities of query bins, a row for each bin of memories.
    """

    model: Model
    scores: Float[Array, "candidates betas"]
    betas: Float[Array, "candidates betas"]
    advantage: Float[Array, ""]
    standard_error: Float[Array, ""]
    expected_error: Float[Array, ""]
    likelihood: Similarity
    table: Float[Array, "K K"]
    name: str = dataclasses.field(metadata={"static": True})
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    rival: str = dataclasses.field(metadata={"static": True})
    queries: int = dataclasses.field(metadata={"static": True})

    @property
    def certain(self) -> bool:
        """Whether there were queries enough to tell the model from its rival."""
        return bool(self.advantage > CERTAIN * self.standard_error)

    def foreign(
        self,
        memories: Float[Array, "M d"],
        queries: Float[Array, "Q d"],
        *,
        observed: Bool[Array, "Q d"] | None = None,
    ) -> Float[Array, " Q"]:
        """The probability of each query that none of the memories belongs to it.

        It is most accurate from many queries, which tell how many of them are foreign
        and how own queries compare, and for queries that took no part in the
        calibration: foreign queries among those have taught the table, and seem own.
        Where queries tell nothing about their memory, it means nothing.

        Args:
          memories: stored patterns, three at least; copies count once.
          queries: corrupted patterns.
          observed: true for the known components of the queries.

        Raises:
          ValueError: if shapes do not fit, or there are fewer than three memories.
        """
        memories, queries, observed = _checked(memories, queries, observed, least=1)
        dtype = wider_dtype(memories, queries, self.table)
        if not is_traced(memories):
            _, first = np.unique(np.asarray(memories), axis=0, return_index=True)
            memories = memories[np.sort(first)]
        if len(memories) < 3:
            raise ValueError(
                f"memories must be three at least to tell foreign queries, got "
                f"{len(memories)} that differ"
            )
        about = memories.astype(dtype), queries.astype(dtype), observed
        return foreign_probability(self.likelihood, self.table, *about)

    def summary(self) -> str:
        """One line: the chosen model, and how sure the choice is."""
        told = (
            f"{float(self.advantage):.3g} ± {float(self.standard_error):.2g} nats a "
            f"query ahead of {self.rival}"
        )
        if not self.certain:
            told += ", not enough queries to tell"
        return (
            f"{self.name} with {self.model.setting}, from {self.queries} queries "
            f"without labels: {told}; expected error {float(self.expected_error):.3g}"
        )


def calibrate_blind(
    memories: Float[Array, "M d"],
    queries: Float[Array, "Q d"],
    *,
    observed: Bool[Array, "Q d"] | None = None,
    transformations: Transformations | None = None,
    candidates: Mapping[str, Similarity] | None = None,
) -> BlindCalibration:
    """Chooses similarity, kernel and beta from queries, without knowing the corruption.

    A likelihood table is learned by expectation maximisation, see
    `uhop_jax._expectation`, from the table that the best fixed similarity implies, or
    the cosine of inverted queries where it is better: a map of values that descends is
    out of reach of the others. The table is free or has four coefficients, see
    `uhop_jax.likelihood.smooth_probabilities`, whichever predicts better; so has the
    table by which a fixed similarity is judged. Among the learned and the fixed
    similarities the one is chosen whose posterior, from three quarters of the
    components, makes the last quarter most likely. A query is judged by what other
    queries teach.

    `calibrate_blind` runs on the host and cannot be traced. It draws nothing at random.

    Args:
      memories: stored patterns, one per row.
      queries: corrupted patterns, at least two; some hundred are enough. If they hold
        more than a million values, an even sample of them is learned from.
      observed: true for the known components of the queries.
      transformations: maps of patterns by which queries may differ from memories, such
        as `image_transformations((28, 28, 1))`. The likelihood over them is one more
        candidate, unless the first part of the queries shows no advantage over the best
        of the others. It has many weights: it is chosen where it is ahead for certain.
      candidates: fixed similarities to try by name; None is `fixed_similarities`.

    Returns:
      `BlindCalibration`.

    Raises:
      ValueError: if shapes do not fit, patterns are not finite, memories or queries are
        all equal, there are fewer than two queries, or it is traced.
    """
    arguments = (memories, queries, observed, transformations, candidates)
    check_on_host("calibrate_blind", *arguments)
    memories, queries, observed = _checked(memories, queries, observed)
    if transformations is not None:
        check_transformations(transformations)
        _check_templates(memories, transformations)
    if candidates is None:
        candidates = fixed_similarities(memories, queries, observed)
    check_candidates(candidates, memories, (LEARNED, MOVED))
    used = _used(memories, queries, observed)

    problem = Problem.of(memories, *used)
    trials: dict[str, Trial] = {}
    for name, similarity in candidates.items():
        trials[name] = fixed_trial(problem, similarity)
    if max(trial.best for trial in trials.values()) == -np.inf:
        raise ValueError(
            "every candidate gave NaN: memories or queries are too large or too small "
            f"for {memories.dtype}, up to {float(jnp.abs(memories).max()):.3g} and "
            f"{float(jnp.abs(queries).max()):.3g}"
        )
    starts = *trials.values(), inverted_trial(problem)
    start = max(starts, key=lambda trial: trial.best)
    trials[LEARNED] = learned_trial(problem, start.counts)
    name, rival = _chosen(trials)
    if transformations is not None:
        start = trials[LEARNED]
        moved = moved_trial(problem, start, transformations, trials[name])
        if moved is not None:
            trials[MOVED] = moved
            advantage, error = moved.ahead_of(trials[name])
            if advantage > CERTAIN * error:
                name, rival = MOVED, name
    advantage, error = trials[name].ahead_of(trials[rival])
    model = trials[name].model
    implied = likelihood_of(problem, trials[name])

    def on_device(x: Any) -> Array:
        return jax.device_put(np.asarray(x, memories.dtype))

    return BlindCalibration(
        model,
        scores=on_device(_table([trial.scores.mean(0) for trial in trials.values()])),
        betas=on_device(_table([trial.betas for trial in trials.values()])),
        advantage=on_device(advantage),
        standard_error=on_device(error),
        expected_error=_expected_error(memories, *used, model),
        likelihood=implied,
        table=trials[name].tabulate(trials[name].counts),
        name=name,
        names=tuple(trials),
        rival=rival,
        queries=len(used[0]),
    )


def fixed_similarities(
    memories: Float[Array, "M d"],
    queries: Float[Array, "Q d"],
    observed: Bool[Array, "Q d"] | None = None,
) -> dict[str, Similarity]:
    """The fixed similarities that `calibrate_blind` tries, by name.

    Centred ones are left out where components are unobserved.

    Args:
      memories: stored patterns, one per row; their mean centres them.
      queries: corrupted patterns, whose mean is the centre of queries in two-sided
        centring.
      observed: true for the known components of the queries.
    """
    if observed is not None:
        return dict(PLAIN)
    center = memories.mean(0)
    return PLAIN | {
        "centred cosine": Cosine(Centering(center)),
        "two-sided centred cosine": Cosine(Centering(center, queries.mean(0))),
    }


def _chosen(trials: dict[str, Trial]) -> tuple[str, str]:
    """The candidate of the best score, and the best of the other kind."""
    by_kind: dict[bool, str] = {}
    for name in sorted(trials, key=lambda name: trials[name].best):
        by_kind[name == LEARNED] = name
    rival, name = sorted(by_kind.values(), key=lambda name: trials[name].best)
    return name, rival


def _expected_error(
    memories: Array, queries: Array, observed: Array | None, model: Model
) -> Array:
    """Mean over the queries of the variance of their posterior."""
    center = memories.mean(0)
    values = with_squares(memories, center)
    moments = retrieve_streamed(
        model, memories, queries, values=values, observed=observed
    ).state
    return mean_and_variance(moments, center, normalized=True)[1].mean()


def _table(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of unlike length as one array, filled up with NaN."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def _used(
    memories: Array, queries: Array, observed: Array | None
) -> tuple[Array, Array | None]:
    """An even sample of the queries, as many as `VALUES` and `WORK` allow."""
    most = min(VALUES // queries.shape[1], int(WORK / memories.size), MOST)
    rows = even_sample(len(queries), most)
    return queries[rows], None if observed is None else observed[rows]


def _checked(
    memories: Any, queries: Any, observed: Any, least: int = 2
) -> tuple[Array, Array, Array | None]:
    """The arguments in one working dtype, or a sentence that says what is wrong."""
    memories = as_floating(memories, "memories")
    queries = as_floating(queries, "queries")
    for name, x, rows in (("memories", memories, "M"), ("queries", queries, "Q")):
        if x.ndim != 2 or x.shape[0] < least:
            raise ValueError(
                f"blind calibration needs {name} of shape ({rows}, d), at least "
                f"{least}, got {x.shape}"
            )
    check_patterns(memories, queries, Dot())
    observed = check_observed(observed, queries)
    if observed is not None:
        observed = jnp.broadcast_to(observed, queries.shape)
    check_finite("memories", memories)
    check_finite("queries", queries, observed)
    for name, x in (("memories", memories), ("queries", queries)):
        if least > 1 and bool((x == x[:1]).all()):
            raise ValueError(f"{name} must differ: all are equal, and tell nothing")
    dtype = working_dtype(jnp.zeros((), wider_dtype(memories, queries)))
    queries = queries.astype(dtype)
    if observed is not None:
        queries = jnp.where(observed, queries, jnp.zeros((), dtype))
    return memories.astype(dtype), queries, observed


def _check_templates(memories: Array, transformations: Transformations) -> None:
    """Refuses a set whose transformed memories take too much room, or change shape."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    result = jax.eval_shape(transformations, index, memories)
    if result.shape != memories.shape:
        raise ValueError(
            f"transformations must keep the shape {memories.shape}, they returned "
            f"{result.shape}"
        )
    size = transformations.number * memories.size
    if size > TEMPLATES:
        raise ValueError(
            f"{transformations.number} transformations of memories of shape "
            f"{memories.shape} take {size / 2**30:.1f} GiB, at most "
            f"{TEMPLATES / 2**30:.0f} are allowed: learn from a sample of the memories"
        )
