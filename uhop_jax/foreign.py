"""Foreign queries: the probability that no stored pattern belongs to a query.

A query whose memory is taken away compares with the other memories as a foreign query
does. The queries themselves, each with and without its nearest memory, therefore show
how own and foreign queries compare, whatever has corrupted them. Queries that the
likelihood table makes of stored patterns join them, each with and without its memory.
Which queries are own, and how many, is learned in turn, by expectation maximisation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from uhop_jax._expectation import leading_by_similarity
from uhop_jax.kernels import LikelihoodKernel, bins
from uhop_jax.similarity import Similarity
from uhop_jax.transformations import Transformed

CHUNK, BLOCK = 512, 1024  # queries and memories that are compared at a time
SIMULATED = 1000  # about how many queries are made
ROUNDS = 30  # of expectation maximisation
NEWTON, STEPS = 5, 50  # of the regression in a round; for the share of foreign queries
LONGEST = 2.0  # change of a log-ratio in a step, beyond which steps diverge
PENALTY = 1e-2  # on squared weights of standardised features
FARTHEST = 10.0  # standard deviations at which features are clipped

product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


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
    largest, of_made = (
        _largest(likelihood, memories, *rows)
        for rows in ((queries, observed), (made, seen))
    )
    # Own queries and queries without their memory, then the same of made queries.
    samples = [f(x) for x in (largest, of_made) for f in (_own, _without)]
    both = jnp.concatenate(samples)
    center, scale = both.mean(0), jnp.maximum(both.std(0), 1e-6)
    z = jnp.clip((both - center[None]) / scale[None], -FARTHEST, FARTHEST)
    design = jnp.concatenate([jnp.ones_like(z[:, :1]), z, z * z], -1)
    Q, number = len(queries), len(made)
    sizes = (Q, Q, number, number)
    is_own = jnp.asarray(np.repeat([1, 0, 1, 0], sizes), z.dtype)
    of_table = jnp.ones_like(z, shape=(2 * number,))

    def improve(_, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        foreign, share, weights = carry
        counts = jnp.concatenate([1 - foreign, 1 - foreign, of_table])
        weights = _logistic(design, is_own, counts, weights)
        log_ratio = product(design[:Q], weights)  # of own to foreign densities

        def posterior(share: Array) -> Array:
            return jax.nn.sigmoid(jnp.log(share) - jnp.log1p(-share) - log_ratio)

        def settle(_, share: Array) -> Array:
            return jnp.clip(posterior(share).mean(), 1e-4, 1 - 1e-4)

        share = lax.fori_loop(0, STEPS, settle, share)
        return posterior(share), share, weights

    half = jnp.full_like(largest, 0.5, shape=())
    start = jnp.broadcast_to(half, (Q,)), half, jnp.zeros_like(design[0])
    return lax.fori_loop(0, ROUNDS, improve, start)[0]


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


def _own(largest: Array) -> Array:
    """The largest overlap, and its lead."""
    return jnp.stack([largest[:, 0], largest[:, 0] - largest[:, 1]], -1)


def _without(largest: Array) -> Array:
    """The same, with the nearest memory taken away."""
    return _own(largest[:, 1:])


def _logistic(x: Array, labels: Array, counts: Array, weights: Array) -> Array:
    """Improved weights of a logistic regression on counted rows, by Newton's method.

    Where a line separates the labels, full steps would diverge.
    """
    penalty = jnp.full_like(weights, PENALTY)

    def step(_, weights: Array) -> Array:
        p = jax.nn.sigmoid(product(x, weights))
        gradient = product(x.T, counts * (p - labels)) + penalty * weights
        rows = (counts * p * (1 - p))[:, None] * x
        change = jnp.linalg.solve(product(x.T, rows) + jnp.diag(penalty), gradient)
        longest = jnp.abs(product(x, change)).max()
        return weights - change * jnp.minimum(1.0, LONGEST / longest)

    return lax.fori_loop(0, NEWTON, step, weights)


def _drawn(
    key: PRNGKeyArray, table: Float[Array, "K K"], rows: Int[Array, "N d"]
) -> Int[Array, "N d"]:
    """A column of each row of a table of probabilities, drawn at random."""
    number = len(table)
    # Each row adds 1 to what is below it, so that one search serves all rows.
    below = jnp.cumsum(table / table.sum(1, keepdims=True), 1)[:, :-1]
    row = jnp.arange(number, dtype=table.dtype)
    below = jnp.pad(below, ((0, 0), (0, 1)), constant_values=1.0) + row[:, None]
    place = jax.random.uniform(key, rows.shape, table.dtype) + rows.astype(table.dtype)
    drawn = jnp.searchsorted(below.ravel(), place, side="right").astype(rows.dtype)
    return jnp.clip(drawn - rows * number, 0, number - 1)


def _made(
    likelihood: Similarity, table: Array, memories: Array, observed: Array | None
) -> tuple[Array, Array | None]:
    """Queries that the table makes of memories, and which components are known."""
    kernel = likelihood.kernel
    assert isinstance(kernel, LikelihoodKernel)
    M = len(memories)
    last = SIMULATED - 1 if M <= SIMULATED else M - 1  # each in turn, or even steps
    patterns = memories[np.linspace(0, last, SIMULATED).astype(int) % M]
    move_key, value_key = jax.random.split(jax.random.key(0))
    if isinstance(likelihood, Transformed):
        shape = (len(patterns),)
        index = jax.random.categorical(move_key, likelihood.log_weights, shape=shape)

        def moved(row: tuple[Array, Array]) -> Array:
            index, pattern = row
            return likelihood.transformations(index, pattern[None])[0]

        patterns = lax.map(moved, (index.astype(jnp.int32), patterns))
    drawn = _drawn(value_key, table, bins(patterns, kernel.edges))
    # Any value of a bin stands for the bin.
    edges = kernel.edges
    low = jnp.concatenate([edges[:1] - 1, edges])
    seen = None
    if observed is not None:
        seen = observed[jnp.arange(len(patterns)) % len(observed)]
    return low[drawn], seen
