"""The likelihood kernel, learned from corrupted copies of the memories."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from uhop_jax._checks import (
    as_floating,
    check_count,
    check_key,
    check_memory_set,
    check_positive,
    working_dtype,
)
from uhop_jax.corruption import Corruption
from uhop_jax.kernels import LikelihoodKernel, bins

_BINS = 65
_LEVELS = 8
_VALUES = 2_000_000  # corrupted component values to learn from, at least
_SMOOTHING = (0.1, 1e5, 61)  # first, last and number of those tried, on a log grid


def fit_likelihood(
    key: PRNGKeyArray,
    memories: Float[Array, "*sets M d"],
    corrupt: Callable[[PRNGKeyArray, Array], Any],
    *,
    copies: int | None = None,
    rank: int | None = None,
    smoothing: float | None = None,
) -> LikelihoodKernel:
    """Learns how corruption changes component values, as a kernel.

    Counts, over corrupted copies of the memories, how often a stored value of one bin
    became a query value of another, and factors the table of log-probabilities; see
    `LikelihoodKernel`. Of a corruption that says what is observed, that alone
    counts, as in retrieval with `observed`. Values met often enough to be atoms (exact
    zeros, a clamp's ends) have bins of their own; half of the others have equal widths
    and half equal numbers of values.

    Rows of few counts lean on the distribution over query bins of all rows together:
    with `n` counts in a row and `k` of them in a bin, the probability is
    `(k + smoothing p) / (n + smoothing)`, where `p` is the share of that bin in all
    counts (and half a count more in each bin).

    Args:
      key: random key.
      memories: stored patterns, one per row.
      corrupt: a corruption, see `uhop_jax.corruption`.
      copies: corrupted copies of each memory; None is as many as two million component
        values take, and at least 4.
      rank: rank of the table, from 1; None is the full rank, 65.
      smoothing: counts that the common distribution weighs in each row; None is the
        number that makes each count likeliest given all the others.

    Returns:
      The kernel, to be used with `Dot`; its natural `beta` is 1.

    Raises:
      ValueError: if an argument is out of range.
    """
    check_key(key)
    if copies is not None:
        check_count("copies", copies, 1)
    if smoothing is not None:
        check_positive("smoothing", smoothing)
    if rank is not None:
        check_count("rank", rank, 1, _BINS)
    memories = as_floating(memories, "memories")
    check_memory_set(memories, distinct=False)
    memories = memories.astype(working_dtype(memories))
    corruption = Corruption.of(corrupt, memories=memories)
    if copies is None:
        copies = max(4, -(-_VALUES // (memories.shape[-2] * memories.shape[-1])))

    def run(key: PRNGKeyArray, memories: Array) -> LikelihoodKernel:
        return _fit_likelihood(key, memories, corruption, smoothing, copies)

    sets = memories.shape[:-2]
    keys = jax.random.split(key, sets) if sets else key
    for _ in sets:
        run = jax.vmap(run)
    return run(keys, memories).cut(rank)


@functools.partial(jax.jit, static_argnames="copies")
def _fit_likelihood(
    key: PRNGKeyArray,
    memories: Array,
    corruption: Corruption,
    smoothing: ArrayLike | None,
    copies: int,
) -> LikelihoodKernel:
    keys = jax.random.split(key, copies)
    queries, observed = jax.vmap(lambda key: corruption(key, memories))(keys)
    memory_edges, query_edges = _edges(memories), _edges(queries, observed)
    stored = jnp.broadcast_to(bins(memories, memory_edges), queries.shape)
    pairs = stored * _BINS + bins(queries, query_edges)
    number = _BINS * _BINS
    if observed is not None:  # the others are counted apart
        pairs = jnp.where(observed, pairs, number)
    counts = jnp.bincount(pairs.ravel(), length=number + 1)[:number]
    counts = counts.reshape(_BINS, _BINS).astype(memories.dtype)
    table = _log_probabilities(counts, smoothing)
    u, s, vt = jnp.linalg.svd(table - table.mean(0, keepdims=True))
    s = s[None, :]
    return LikelihoodKernel(u * s, vt.T, memory_edges, query_edges, memories.shape[-1])


def _log_probabilities(counts: Array, smoothing: ArrayLike | None) -> Array:
    """Logarithm of the share of each column in its row, leaning on the common one."""
    total = counts.sum(1, keepdims=True)
    common = counts.sum(0) + 0.5  # no query value is impossible
    common = common / common.sum()

    def left_out(smoothing: Array) -> Array:
        """Log-probability of each count given the others, summed."""
        others, all_others = (jnp.maximum(n - 1, 0.0) for n in (counts, total))
        share = (others + smoothing * common[None]) / (all_others + smoothing)
        return (counts * jnp.log(share)).sum()

    if smoothing is None:
        grid = jnp.geomspace(*_SMOOTHING, dtype=counts.dtype)
        smoothing = grid[jnp.argmax(lax.map(left_out, grid))]
    return jnp.log((counts + smoothing * common[None]) / (total + smoothing))


def _edges(values: Array, observed: Array | None = None) -> Array:
    """Edges of `_BINS` bins: two grids over the range, and a bin for each atom.

    A value as frequent as `1 / _LEVELS` is a quantile, and has edges at itself and at
    the next number; so have both ends of the range, where clamping puts atoms. One grid
    is even; the other has equally many of the values between its edges that are no
    atoms. Values that are not observed do not count; if none is, any edges will do.
    """
    stride = max(1, values.size // 200_000)
    values = values.ravel()[::stride]
    number = jnp.asarray(values.size)
    if observed is not None:
        observed = observed.ravel()[::stride]
        values = jnp.where(observed, values, jnp.where(observed.any(), jnp.inf, 0.0))
        number = jnp.maximum(observed.sum(), 1)
    values = jnp.sort(values)

    def quantiles(values: Array, number: Array, q: Array) -> Array:
        last = (number - 1).astype(q.dtype)
        return values[jnp.round(q * last).astype(jnp.int32)]

    levels = quantiles(values, number, jnp.linspace(0, 1, _LEVELS))
    low, high = quantiles(values, number, jnp.asarray([1e-3, 1 - 1e-3]))
    atoms = jnp.where(levels[1:] == levels[:-1], levels[1:], jnp.nan)
    is_atom = (values[:, None] == atoms[None]).any(-1)
    others = jnp.sort(jnp.where(is_atom, jnp.inf, values))
    between = number - is_atom.sum()
    others, between = lax.cond(
        between > 0, lambda: (others, between), lambda: (values, number)
    )
    # Smaller numbers than `tiny` compare as zeros.
    tiny = float(jnp.finfo(values.dtype).tiny)
    above = jnp.nextafter(levels, jnp.inf)
    above = jnp.where(jnp.abs(levels) < tiny, tiny, above)
    grids = _BINS - 1 - 2 * _LEVELS
    even = jnp.linspace(low, high, grids - grids // 2)
    full = quantiles(others, between, jnp.linspace(0, 1, grids // 2))
    edges = jnp.concatenate([levels, above, even, full])
    return jnp.sort(edges.astype(values.dtype))
