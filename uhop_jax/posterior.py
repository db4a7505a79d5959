"""The limit of every memory: the mean over the posterior of a known corruption."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from uhop_jax._checks import check_finite, is_traced
from uhop_jax._products import weigh
from uhop_jax.corruption import Mask, Noise, aligned


def posterior_mean(
    corruption: Mask | Noise,
    memories: Float[Array, "M d"],
    query: Float[Array, "*batch d"],
    *,
    observed: Bool[Array, "*batch d"] | None = None,
) -> Float[Array, "*batch d"]:
    """The posterior mean of the memories given the query.

    It is the limit of every method: with a uniform prior over the memories and a known
    corruption, no estimate has a smaller expected squared error.

    Args:
      corruption: a corruption with a `log_likelihood`.
      memories: stored patterns, one per row.
      query: corrupted patterns.
      observed: true for the known components of the query, as the corruption returns
        it; required for `Mask(known=True)`.

    Returns:
      The estimate for each query. A traced query that is impossible under every memory
      gives the mean of all memories.

    Raises:
      ValueError: if the corruption has no likelihood in closed form or its parameters
        are invalid, shapes do not fit, patterns are not finite, or a query is
        impossible under every memory.
    """
    if not hasattr(corruption, "log_likelihood"):
        raise ValueError(
            "corruption must have a likelihood in closed form, as Mask(0.5) and "
            f"Noise(0.3) have, got {corruption!r}"
        )
    memories, query, observed = aligned(memories, query, observed)
    check_finite("memories", memories)
    check_finite("query", query, observed)
    log_p = corruption.log_likelihood(memories, query, observed=observed)
    if not is_traced(log_p):
        impossible = np.isneginf(np.asarray(log_p).max(-1))
        if impossible.any():
            raise ValueError(
                f"no memory can have become {impossible.sum()} of the "
                f"{impossible.size} queries under {corruption!r}"
            )
    return weigh(posterior(log_p), memories)


def posterior(log_p: Float[Array, "*batch M"]) -> Float[Array, "*batch M"]:
    """Probabilities of the memories, from log-likelihoods and a uniform prior.

    A query that is impossible under every memory gives the prior.
    """
    impossible = jnp.isneginf(log_p.max(-1, keepdims=True))
    return jax.nn.softmax(jnp.where(impossible, 0.0, log_p), axis=-1)


def with_squares(
    patterns: Float[Any, "M d"], center: Float[Any, " d"]
) -> Float[Any, "M d+2"]:
    """Patterns about a centre, their squared norms, and ones, of NumPy or JAX arrays.

    Weighted sums of the rows are the moments that `mean_and_variance` reads. Squares
    about a centre near the patterns do not cancel, and do not overflow.
    """
    about = patterns - center[None]
    xp = jnp if isinstance(about, jax.Array) else np
    squares = (about * about).sum(-1, keepdims=True)
    return xp.concatenate([about, squares, xp.ones_like(squares)], -1)


def mean_and_variance(
    moments: Float[Array, "Q D"], center: Float[Any, " d"], *, normalized: bool
) -> tuple[Float[Array, "Q d"], Float[Array, " Q"]]:
    """Mean and variance of patterns whose rows `with_squares` were weighted and summed.

    Weights that sum to less than one (`normalized` is false) leave the rest to zero.
    """
    mean, squared, total = moments[:, :-2], moments[:, -2], moments[:, -1]
    center = jnp.asarray(center, moments.dtype)
    if not normalized:
        rest = 1 - total
        mean = mean - rest[:, None] * center[None]
        squared = squared + rest * (center * center).sum()
    variance = jnp.maximum(squared - (mean * mean).sum(-1), 0.0)
    return mean + center[None], variance
