"""Foreign queries: the probability that no stored pattern belongs to a query.

A likelihood table makes queries of stored patterns. With all memories in place they
show how own queries compare; with the memory of each taken away they show how foreign
queries compare, as queries of patterns that were never stored. The share of foreign
queries follows from the queries themselves.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from uhop_jax._expectation import leading_by_similarity
from uhop_jax.kernels import LikelihoodKernel, bins
from uhop_jax.similarity import Similarity
from uhop_jax.transformations import Transformed

CHUNK, BLOCK = 512, 1024  # queries and memories that are compared at a time
SIMULATED = 1000  # about how many queries are made
NEWTON, STEPS = 30, 100  # of the logistic regression; for the share of foreign queries
PENALTY = 1e-2  # on squared weights of standardised features


@jax.jit
def foreign_probability(
    likelihood: Similarity,
    table: Float[Array, "K K"],
    memories: Float[Array, "M d"],
    queries: Float[Array, "Q d"],
    observed: Bool[Array, "Q d"] | None = None,
) -> Float[Array, " Q"]:
    """The probability of each query that none of the memories belongs to it.

    Args:
      likelihood: a log-likelihood as a similarity, with a `LikelihoodKernel`.
      table: probabilities of query bins, a row for each bin of stored values.
      memories: stored patterns, three at least.
      queries: corrupted patterns; from many of them the share of foreign ones is known
        better.
      observed: true for the known components of the queries.
    """
    made, seen = _made(likelihood, table, memories, observed)
    largest = _largest(likelihood, memories, made, seen)
    own, foreign = _features(largest), _features(largest[:, 1:])
    both = jnp.concatenate([own, foreign])
    center, scale = both.mean(0), jnp.maximum(both.std(0), 1e-6)

    def design(features: Array) -> Array:
        z = (features - center[None]) / scale[None]
        return jnp.concatenate([jnp.ones_like(z[:, :1]), z, z * z], -1)

    labels = (jnp.arange(len(both)) < len(own)).astype(both.dtype)
    weights = _logistic(design(both), labels)
    actual = _largest(likelihood, memories, queries, observed)
    log_ratio = design(_features(actual)) @ weights  # of own to foreign densities

    def posterior(share: Array) -> Array:
        return jax.nn.sigmoid(jnp.log(share) - jnp.log1p(-share) - log_ratio)

    def improve(_, share: Array) -> Array:
        return jnp.clip(posterior(share).mean(), 1e-4, 1 - 1e-4)

    start = jnp.full_like(log_ratio, 0.5, shape=())
    return posterior(lax.fori_loop(0, STEPS, improve, start))


def _largest(
    likelihood: Similarity, memories: Array, queries: Array, observed: Array | None
) -> Array:
    """The three largest overlaps of each query `(Q, 3)`, some queries at a time."""
    number = len(queries)
    size = min(CHUNK, number)
    one = jnp.ones(1, queries.dtype)

    def padded(x: Array) -> Array:
        x = jnp.pad(x, ((0, -number % size), (0, 0)))
        return x.reshape(-1, size, x.shape[1])

    def chunk(rows: tuple[Array, Array | None]) -> Array:
        leading = leading_by_similarity(likelihood, memories, *rows, one, size=BLOCK)
        return leading.logits[0, :, :3]

    rows = padded(queries), None if observed is None else padded(observed)
    return lax.map(chunk, rows).reshape(-1, 3)[:number]


def _features(largest: Array) -> Array:
    """The largest overlap, and its lead."""
    return jnp.stack([largest[:, 0], largest[:, 0] - largest[:, 1]], -1)


def _logistic(x: Array, labels: Array) -> Array:
    """Weights of a logistic regression, by Newton's method."""
    penalty = jnp.full(x.shape[-1], PENALTY, x.dtype)

    def step(_, weights: Array) -> Array:
        p = jax.nn.sigmoid(x @ weights)
        gradient = x.T @ (p - labels) + penalty * weights
        hessian = x.T @ ((p * (1 - p))[:, None] * x) + jnp.diag(penalty)
        return weights - jnp.linalg.solve(hessian, gradient)

    return lax.fori_loop(0, NEWTON, step, jnp.zeros(x.shape[-1], x.dtype))


def _made(
    likelihood: Similarity, table: Array, memories: Array, observed: Array | None
) -> tuple[Array, Array | None]:
    """Queries that the table makes of memories, and which components are known."""
    kernel = likelihood.kernel
    assert isinstance(kernel, LikelihoodKernel)
    copies = -(-SIMULATED // len(memories))
    patterns = jnp.tile(memories, (copies, 1))[: max(SIMULATED, 3)]
    move_key, value_key = jax.random.split(jax.random.key(0))
    if isinstance(likelihood, Transformed):
        shape = (len(patterns),)
        index = jax.random.categorical(move_key, likelihood.log_weights, shape=shape)

        def moved(row: tuple[Array, Array]) -> Array:
            index, pattern = row
            return likelihood.transformations(index, pattern[None])[0]

        patterns = lax.map(moved, (index.astype(jnp.int32), patterns))
    stored = bins(patterns, kernel.edges)
    drawn = jax.random.categorical(value_key, jnp.log(table)[stored])
    # Any value of a bin stands for the bin.
    edges = kernel.edges
    low = jnp.concatenate([edges[:1] - 1, edges])
    seen = None
    if observed is not None:
        seen = observed[jnp.arange(len(patterns)) % len(observed)]
    return low[drawn], seen
