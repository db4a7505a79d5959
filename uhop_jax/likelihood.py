"""The likelihood kernel, learned from corrupted copies of the memories."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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


def fit_likelihood(
    key: PRNGKeyArray,
    memories: Float[Array, "*sets M d"],
    corrupt: Callable[[PRNGKeyArray, Array], Any],
    *,
    copies: int = 4,
    rank: int | None = None,
    smoothing: float = 0.5,
) -> LikelihoodKernel:
    """Learns how corruption changes component values, as a kernel.

    Counts, over corrupted copies of the memories, how often a stored value of one bin
    became a query value of another, and factors the table of log-probabilities; see
    `LikelihoodKernel`. Of a corruption that says what is observed, that alone
    counts, as in retrieval with `observed`. Values met often enough to be atoms (exact
    zeros, a clamp's ends) have bins of their own.

    Args:
      key: random key.
      memories: stored patterns, one per row.
      corrupt: a corruption, see `uhop_jax.corruption`.
      copies: corrupted copies of each memory.
      rank: rank of the table, from 1; None is the full rank, 65.
      smoothing: added to every count.

    Returns:
      The kernel, to be used with `Dot`; its natural `beta` is 1.

    Raises:
      ValueError: if an argument is out of range.
    """
    check_key(key)
    check_count("copies", copies, 1)
    check_positive("smoothing", smoothing)
    if rank is not None:
        check_count("rank", rank, 1, _BINS)
    memories = as_floating(memories, "memories")
    check_memory_set(memories, distinct=False)
    memories = memories.astype(working_dtype(memories))
    corruption = Corruption.of(corrupt, memories=memories)

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
    smoothing: ArrayLike,
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
    counts = counts.reshape(_BINS, _BINS).astype(memories.dtype) + smoothing
    table = jnp.log(counts / counts.sum(1, keepdims=True))
    u, s, vt = jnp.linalg.svd(table - table.mean(0, keepdims=True))
    s = s[None, :]
    return LikelihoodKernel(u * s, vt.T, memory_edges, query_edges, memories.shape[-1])


def _edges(values: Array, observed: Array | None = None) -> Array:
    """Edges of `_BINS` bins: an even grid over the range, and a bin for each atom.

    A value as frequent as `1 / _LEVELS` is a quantile, and has edges at itself and at
    the next number; so have both ends of the range, where clamping puts atoms. Values
    that are not observed do not count; if none is, any edges will do.
    """
    stride = max(1, values.size // 200_000)
    values = values.ravel()[::stride]
    last = jnp.asarray(values.size - 1)
    if observed is not None:
        observed = observed.ravel()[::stride]
        values = jnp.where(observed, values, jnp.where(observed.any(), jnp.inf, 0.0))
        last = jnp.maximum(observed.sum() - 1, 0)
    values = jnp.sort(values)

    def quantile(q: Array | list[float]) -> Array:
        q = jnp.asarray(q)
        return values[jnp.round(q * last.astype(q.dtype)).astype(jnp.int32)]

    quantiles = quantile(jnp.linspace(0, 1, _LEVELS))
    low, high = quantile([1e-3, 1 - 1e-3])
    # Smaller numbers than `tiny` compare as zeros.
    tiny = float(jnp.finfo(values.dtype).tiny)
    above = jnp.nextafter(quantiles, jnp.inf)
    above = jnp.where(jnp.abs(quantiles) < tiny, tiny, above)
    atoms = jnp.concatenate([quantiles, above])
    grid = jnp.linspace(low, high, _BINS - 1 - atoms.size)
    return jnp.sort(jnp.concatenate([grid, atoms]).astype(values.dtype))
