"""The similarities that calibration tries, with kernels fitted to the memories."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from uhop_jax._checks import check_key
from uhop_jax.closed_form import whitenings
from uhop_jax.corruption import Corruption
from uhop_jax.kernels import Centering, check_numbers
from uhop_jax.likelihood import fit_likelihood
from uhop_jax.similarity import (
    Cosine,
    Dot,
    NegativeL1,
    NegativeL2,
    NegativeSquaredL2,
    Similarity,
    check_patterns,
)
from uhop_jax.trials import corrupted_copies

RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RANKS = (2, 8, None)
PLAIN: dict[str, Similarity] = {  # without a kernel
    "cosine": Cosine(),
    "dot": Dot(),
    "squared l2": NegativeSquaredL2(),
    "l2": NegativeL2(),
    "l1": NegativeL1(),
}
CENTERED = 2000  # least number of copies from which the mean of queries is estimated


def check_candidates(
    candidates: Any, memories: Array, reserved: Sequence[str] = ()
) -> None:
    """Refuses anything but similarities of these memories, by names not reserved."""
    if not isinstance(candidates, Mapping):
        raise ValueError(
            f"candidates must be a mapping of names to similarities, got {candidates!r}"
        )
    if not candidates:
        raise ValueError("candidates must name at least one similarity, got none")
    for name, similarity in candidates.items():
        if name in reserved:
            raise ValueError(f"candidates must not be named {name!r}, got it")
        check_patterns(memories, memories, similarity)
        check_numbers(similarity.kernel)


def default_candidates(
    key: PRNGKeyArray,
    memories: Float[Array, "M d"],
    corrupt: Callable[[PRNGKeyArray, Array], Any],
    *,
    ridges: Sequence[float] = RIDGES,
    ranks: Sequence[int | None] = RANKS,
) -> dict[str, Similarity]:
    """The similarities that `calibrate` tries; of equal errors it takes the first.

    In order: the likelihood kernel at low ranks, learned for this corruption; the
    similarities without a kernel; the cosine of centred patterns, with queries centred
    about the mean of the memories or about the mean of queries; the closed-form kernel
    at each ridge, plain and angular; the likelihood kernel at full rank, which costs
    most.

    Args:
      key: random key, for the copies from which the likelihood kernel and the mean of
        queries are learned.
      memories: stored patterns, one per row.
      corrupt: as in `calibrate`. If it returns `observed`, the closed-form kernels and
        centred patterns are left out: each query would need a kernel of its own.
      ridges: ridges of `fit_closed_form`, positive.
      ranks: ranks of `fit_likelihood`; None is the full rank.

    Returns:
      Similarities by name.
    """
    check_key(key)
    likelihood_key, mean_key = jax.random.split(key)
    likelihood = fit_likelihood(likelihood_key, memories, corrupt)
    low, full = (
        {
            f"likelihood, rank {rank or 'full'}": Dot(likelihood.cut(rank))
            for rank in ranks
            if (rank is None) == is_full
        }
        for is_full in (False, True)
    )
    models: dict[str, Similarity] = {**low, **PLAIN}
    _, observed = jax.eval_shape(Corruption.of(corrupt), mean_key, memories)
    if observed is None:
        two_sided = two_sided_centering(mean_key, memories, corrupt)
        models["centred cosine"] = Cosine(Centering(two_sided.center))
        models["two-sided centred cosine"] = Cosine(two_sided)
        for ridge, kernel in whitenings(memories, tuple(ridges)).items():
            models[f"closed form {ridge:g}, angular"] = Cosine(kernel)
            models[f"closed form {ridge:g}"] = Dot(kernel)
    return models | full


def two_sided_centering(
    key: PRNGKeyArray,
    memories: Float[Array, "M d"],
    corrupt: Callable[[PRNGKeyArray, Array], Any],
) -> Centering:
    """Centring of memories about their mean, and of queries about the mean of queries.

    The mean of queries is estimated from corrupted copies of the memories.

    Args:
      key: random key, for the copies.
      memories: stored patterns, one per row.
      corrupt: as in `calibrate`; if it returns `observed`, the mean is over observed
        components.
    """
    M = memories.shape[0]
    number = M * -(-CENTERED // M)
    query, observed, _ = corrupted_copies(key, memories, corrupt, number)
    if observed is None:
        return Centering(memories.mean(0), query.mean(0))
    total = jnp.where(observed, query, jnp.zeros((), query.dtype)).sum(0)
    count = jnp.maximum(observed.sum(0), 1).astype(query.dtype)
    return Centering(memories.mean(0), total / count)
