"""Calibration: the choice of kernel, similarity, separation and beta by their errors.

The memories are known, so copies of them can be corrupted as queries will be. Every
candidate model retrieves the copies, in one compiled sweep. The model with the least
error is chosen, and its expected error is estimated. Candidates with equal errors, such
as zero, are compared on more copies.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from uhop_jax._checks import (
    as_floating,
    check_count,
    check_finite,
    check_key,
    check_on_host,
    check_positive,
    working_dtype,
)
from uhop_jax._products import weigh
from uhop_jax._pytree import Pytree
from uhop_jax.candidates import check_candidates, default_candidates
from uhop_jax.corruption import Corruption
from uhop_jax.model import Model
from uhop_jax.separation import Entmax, Separation, Softmax, Sparsemax
from uhop_jax.similarity import Similarity
from uhop_jax.trials import (
    beta_grid,
    corrupted_copies,
    overlaps_of,
    sweep_errors,
    with_one_of,
)

SEPARATION_CHOICES: tuple[Separation, ...] = (Softmax(), Entmax(1.5), Sparsemax())
SCREENING = 256  # about how many copies all candidates retrieve
FINALISTS = 5  # candidates that retrieve all copies, with all separations
MIN_BATCHES, MAX_BATCHES = 2, 64  # batches of copies for the expected error
MULTIPLICATIONS = 2e11  # most multiplications that the expected error may cost
TIE_BATCHES = 4  # batches of copies on which candidates of equal errors are compared
NEGLIGIBLE = 1e-6  # difference of errors, over the variance of the memories, to ignore


class Calibration(Pytree):
    """A calibrated memory model and its expected error.

    Attributes:
      model: the chosen model, its kernel fitted.
      expected_error: sum of squared component differences between a pattern and the
        retrieval from its corrupted copy, averaged over copies that took no part in the
        choice.
      standard_error: standard error of `expected_error`.
      expected_top1: share of the same copies whose largest weight is at the right
        memory.
      screening: `(candidates, betas)`, the error of every candidate with the first
        separation on a few copies, by which the finalists were chosen.
      trials: `(candidates, separations, betas)`, the error of every finalist on all
        copies; NaN for candidates that are no finalists.
      betas: `(candidates, betas)`, the inverse temperatures of `screening` and
        `trials`.
      name: name of the chosen candidate.
      names: names of all candidates, in the order of `trials`.
      separations: names of all separations, in the order of `trials`.
    """

    model: Model
    expected_error: Float[Array, ""]
    standard_error: Float[Array, ""]
    expected_top1: Float[Array, ""]
    screening: Float[Array, "candidates betas"]
    trials: Float[Array, "candidates separations betas"]
    betas: Float[Array, "candidates betas"]
    name: str = dataclasses.field(metadata={"static": True})
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    separations: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def summary(self) -> str:
        """One line: the chosen model and its expected error."""
        return (
            f"{self.name} with {self.model.setting}: expected error "
            f"{float(self.expected_error):.3g} ± {float(self.standard_error):.2g}, "
            f"top-1 {float(self.expected_top1):.3f}"
        )


def calibrate(
    key: PRNGKeyArray,
    memories: Float[Array, "M d"],
    corrupt: Callable[[PRNGKeyArray, Array], Any],
    *,
    queries: int = 1000,
    accuracy: float | None = 0.02,
    separations: Sequence[Separation] = SEPARATION_CHOICES,
    candidates: Mapping[str, Similarity] | None = None,
) -> Calibration:
    """Chooses similarity, kernel, separation and beta by the error on corrupted copies.

    `calibrate` runs on the host and cannot be traced; `corrupt` is traced.

    Args:
      key: random key.
      memories: stored patterns, one per row.
      corrupt: `corrupt(key, patterns)` corrupts any number of patterns in the way in
        which queries will be corrupted, such as `Mask(0.5)`, `Noise(0.3)` or a function
        of JAX arrays; it returns patterns of the same shape, or `(patterns, observed)`.
      queries: about how many corrupted copies the finalists retrieve. All memories have
        equally many copies; if there are more memories than `queries`, `queries`
        memories chosen at random have one copy each.
      accuracy: relative standard error of the expected error. New copies are drawn
        until it is reached, or until they cost too much. None draws no new copies: the
        expected error is then NaN, and the choice is the same.
      separations: separations to try. All candidates are tried with the first; the
        finalists, which are best with the first, are tried with all.
      candidates: similarities to try by name, their kernels fitted; None is
        `default_candidates`.

    Returns:
      `Calibration`.

    Raises:
      ValueError: if an argument is out of range, all memories are equal, `corrupt`
        changes the shape, is no function of JAX arrays or draws without its key, every
        candidate gives NaN, or `calibrate` is traced.
    """
    check_on_host("calibrate", key, memories, corrupt, separations, candidates)
    check_key(key)
    check_count("queries", queries, 1)
    if accuracy is not None:
        check_positive("accuracy", accuracy)
    memories = as_floating(memories, "memories")
    if memories.ndim != 2 or memories.shape[0] < 2:
        raise ValueError(
            "calibration needs at least two memories of shape (M, d), got "
            f"{memories.shape}"
        )
    check_finite("memories", memories)
    if (memories == memories[:1]).all():
        raise ValueError("memories must differ: all are equal, and any model will do")
    listed = isinstance(separations, Sequence)
    if not (listed and all(isinstance(s, Separation) for s in separations)):
        raise ValueError(
            "separations must be a sequence of separations such as (Softmax(),), got "
            f"{separations!r}"
        )
    if not separations:
        raise ValueError("separations must name at least one, got none")
    for separation in separations:
        separation.check()
    memories = memories.astype(working_dtype(memories))
    corruption = Corruption.of(corrupt, memories=memories)
    corruption.check_draws(key, memories)
    fit_key, sweep_key, tie_key, fresh_key = jax.random.split(key, 4)
    if candidates is None:
        candidates = default_candidates(fit_key, memories, corruption)
    check_candidates(candidates, memories)

    M = memories.shape[0]
    number = queries if M > queries else M * round(queries / M)
    copies = _copies(sweep_key, memories, corruption, number)
    check_finite("the corrupted patterns", *copies[:2])
    models = tuple(candidates.values())
    spread = float(memories.var(0).sum())
    negligible = NEGLIGIBLE * spread
    screening, finalists, finalist_errors, betas = _sweep(
        memories, copies, models, tuple(separations), negligible
    )
    # The table is built on the host, where `jax_debug_nans` does not object to NaN.
    shape = (len(models), *finalist_errors.shape[1:])
    errors = np.full(shape, np.nan, finalist_errors.dtype)
    errors[np.asarray(finalists)] = finalist_errors
    if not np.isfinite(errors).any():
        raise ValueError("every candidate gave NaN on the corrupted copies")
    tied = _tied_indices(errors, np.asarray(betas), negligible)
    tied_models = [
        Model(models[i], jax.tree.map(jnp.asarray, separations[sep]), beta=betas[i, b])
        for i, sep, b in tied
    ]
    winner = _first_of_least(
        tie_key, memories, corruption, number, tied_models, negligible
    )
    best, sep, b = tied[winner]
    # The least of many noisy errors is biased downwards; fresh copies are not.
    model = tied_models[winner]
    squared = hits = np.full(1, np.nan)
    if accuracy is not None:
        squared, hits = _fresh_errors(
            fresh_key, memories, corruption, number, model, accuracy, 1e-4 * spread
        )

    # No program is compiled here: with `jax_debug_nans` it would raise for NaN.
    def on_device(x: Any) -> Array:
        return jax.device_put(np.asarray(x, memories.dtype))

    return Calibration(
        Model(models[best], separations[sep], beta=betas[best, b]),
        expected_error=on_device(squared.mean()),
        standard_error=on_device(_standard_error(squared)),
        expected_top1=on_device(hits.mean()),
        screening=screening,
        trials=on_device(errors),
        betas=betas,
        name=tuple(candidates)[best],
        names=tuple(candidates),
        separations=tuple(repr(s) for s in separations),
    )


_copies = jax.jit(corrupted_copies, static_argnames="number")


def screened(number: int, memories: int) -> np.ndarray:
    """The copies that all candidates retrieve, `SCREENING` at most.

    Copies go through all memories in turn: the first ones, or even steps through one
    copy of each memory, so that no memories are screened much more than others.
    """
    last = min(number, max(memories, SCREENING)) - 1
    return np.linspace(0, last, min(number, SCREENING)).round().astype(int)


@jax.jit
def _sweep(
    memories: Array,
    copies: tuple[Array, Array | None, Array],
    models: tuple[Similarity, ...],
    separations: tuple[Separation, ...],
    negligible: ArrayLike,
) -> tuple[Array, Array, Array, Array]:
    """The screening of all candidates and the trials of the finalists.

    These are errors on few copies `(candidates, betas)`, the finalists, their errors on
    all copies `(finalists, separations, betas)`, and the inverse temperatures.
    """
    few = jax.tree.map(lambda x: x[screened(len(x), len(memories))], copies)

    def errors(chosen: Array, copies: tuple, separations: tuple) -> tuple[Array, Array]:
        query, observed, target = copies

        def candidate_errors(index: Array) -> tuple[Array, Array]:
            overlaps = overlaps_of(models, index, memories, query, observed)
            betas = beta_grid(overlaps)

            def sweep(number: Array) -> Array:
                def weights(overlaps: Array, beta: Array) -> Array:
                    return with_one_of(
                        separations, number, lambda s: s.tempered(overlaps, beta)
                    )

                return sweep_errors(memories, overlaps, target, weights, betas)

            return lax.map(sweep, jnp.arange(len(separations))), betas

        return lax.map(candidate_errors, chosen)

    screening, betas = errors(jnp.arange(len(models)), few, separations[:1])
    screening = screening[:, 0]
    # Negligible errors are equal, so that their candidates keep their order.
    rank = jnp.where(jnp.isnan(screening), jnp.inf, screening).min(-1)
    _, best = lax.top_k(-jnp.maximum(rank, negligible), min(FINALISTS, len(models)))
    finalist_errors, finalist_betas = errors(best, copies, separations)
    return screening, best, finalist_errors, betas.at[best].set(finalist_betas)


@jax.jit
def _copy_errors(
    memories: Array, query: Array, observed: Array | None, target: Array, model: Model
) -> tuple[Array, Array]:
    """Squared error of each copy, and whether its largest weight is at its memory."""
    weights = model.weights(model.similarity(memories, query, observed=observed))
    squared = ((weigh(weights, memories) - memories[target]) ** 2).sum(-1)
    return squared, weights.argmax(-1) == target


def _fresh_errors(
    key: PRNGKeyArray,
    memories: Array,
    corruption: Corruption,
    number: int,
    model: Model,
    accuracy: float,
    negligible: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Errors and hits of new copies, in batches until the mean error is accurate."""
    features = jax.eval_shape(model.similarity.keys, memories).shape[-1]
    affordable = int(MULTIPLICATIONS / (number * memories.shape[0] * features))
    last = min(max(affordable, MIN_BATCHES), MAX_BATCHES)
    squared, hits = np.zeros(0), np.zeros(0)
    for batch in range(last):
        copies = _copies(jax.random.fold_in(key, batch), memories, corruption, number)
        batch_squared, batch_hits = _copy_errors(memories, *copies, model)
        squared = np.append(squared, np.asarray(batch_squared, np.float64))
        hits = np.append(hits, np.asarray(batch_hits))
        enough = max(accuracy * squared.mean(), negligible)
        if batch + 1 >= MIN_BATCHES and _standard_error(squared) <= enough:
            break
    return squared, hits


def _standard_error(sample: np.ndarray) -> float:
    """Standard error of the mean of a sample."""
    return float(sample.std() / sample.size**0.5)


def _tied_indices(
    errors: np.ndarray, betas: np.ndarray, negligible: float
) -> list[tuple[int, int, int]]:
    """Indices `(candidate, separation, beta)` of the candidates with the least error.

    Errors that differ by a negligible amount count as equal. The separation is the
    first with the least error. The beta is the middle of the betas with the least
    error, so that a small change of beta matters little.
    """
    equal = errors <= np.nanmin(errors) + negligible
    indices = []
    for best in np.flatnonzero(equal.any((1, 2))):
        sep = int(np.argmax(equal[best].any(-1)))
        order = np.argsort(betas[best])
        tied_betas = [int(i) for i in order if equal[best, sep, i]]
        indices.append((int(best), sep, tied_betas[len(tied_betas) // 2]))
    return indices


def _first_of_least(
    key: PRNGKeyArray,
    memories: Array,
    corruption: Corruption,
    number: int,
    models: list[Model],
    negligible: float,
) -> int:
    """Index of the first model whose error on new copies is the least."""
    if len(models) == 1:
        return 0
    batches = [
        _copies(batch_key, memories, corruption, number)
        for batch_key in jax.random.split(key, TIE_BATCHES)
    ]
    means: list[float] = []
    for model in models:
        errors = [_copy_errors(memories, *copies, model)[0] for copies in batches]
        means.append(float(jnp.stack(errors).mean()))
        if means[-1] <= negligible:  # no later model can have a smaller error
            break
    ranked = np.where(np.isnan(means), np.inf, means)
    return int(np.argmax(ranked <= ranked.min() + negligible))
