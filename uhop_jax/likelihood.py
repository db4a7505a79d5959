"""The likelihood kernel, learned from corrupted copies of the memories."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from uhop_jax._checks import (
    as_floating,
    check_count,
    check_key,
    check_memory_set,
    working_dtype,
)
from uhop_jax._products import contract
from uhop_jax.corruption import Corruption
from uhop_jax.kernels import LikelihoodKernel, bins

_BINS = 65
_EVEN = 16  # edges on an even grid
_FREQUENT = 8  # atoms are as frequent as one in so many values
_SAMPLE = 100_000  # values that edges are made from, about
_VALUES = 2_000_000  # corrupted component values to learn from, at least
_LEANING = (0.1, 1e6, 71)  # first, last and number of those tried, on a log grid
_FLOOR = 1e-16  # of probabilities that a table leans on
_RARE = 1e-4  # share of all counts below which a bin weighs no less


def fit_likelihood(
    key: PRNGKeyArray,
    memories: Float[Array, "*sets M d"],
    corrupt: Callable[[PRNGKeyArray, Array], Any],
    *,
    copies: int | None = None,
    rank: int | None = None,
) -> LikelihoodKernel:
    """Learns how corruption changes component values, as a kernel.

    Counts, over corrupted copies of the memories, how often a stored value of one bin
    became a query value of another, and factors the table of log-probabilities; see
    `LikelihoodKernel`. Of a corruption that says what is observed, that alone
    counts, as in retrieval with `observed`.

    Bins are common to memories and queries, so that what is not corrupted falls into
    the same one. Values met often enough to be atoms (exact zeros, a clamp's ends) have
    bins of their own; most others have equal numbers of values.

    Few counts tell little, so a table leans on the one of pairs of bins, which leans on
    pairs of pairs: with `n` counts in a row and `k` of them in a bin to which the
    coarser table gives the probability `p`, the probability is `(k + m p) / (n + m)`,
    at the `m` under which the counts are likeliest, each given the others of its row.

    The kernel is constant to derivatives in the memories, as counts are.

    A cut keeps what matters to values that occur: the factors are those of the table
    with each bin weighed by its share of the counts.

    Args:
      key: random key.
      memories: stored patterns, one per row.
      corrupt: a corruption, see `uhop_jax.corruption`.
      copies: corrupted copies of each memory; None is as many as make two million
        component values of a memory set, and at least 4.
      rank: rank of the table, from 1; None is the full rank, 65.

    Returns:
      The kernel, to be used with `Dot`; its natural `beta` is 1.

    Raises:
      ValueError: if an argument is out of range, or `corrupt` draws without its key.
    """
    check_key(key)
    if copies is not None:
        check_count("copies", copies, 1)
    if rank is not None:
        check_count("rank", rank, 1, _BINS)
    memories = as_floating(memories, "memories")
    check_memory_set(memories, distinct=False)
    # Counts do not change with the memories, but where they jump.
    memories = lax.stop_gradient(memories.astype(working_dtype(memories)))
    corruption = Corruption.of(corrupt, memories=memories)
    corruption.check_draws(key, memories)
    *sets, M, d = memories.shape
    if copies is None:
        copies = max(4, -(-_VALUES // (M * d)))

    def run(key: PRNGKeyArray, memories: Array) -> LikelihoodKernel:
        counts, edges = _counts(key, memories, corruption, copies)
        memory_table, query_table = _factors(counts)
        return LikelihoodKernel(memory_table, query_table, edges, d)

    if not sets:
        return run(key, memories).cut(rank)
    keys = jax.random.split(key, math.prod(sets))
    # One after the other: the copies of all sets may not fit.
    flat = lax.map(lambda pair: run(*pair), (keys, memories.reshape(-1, M, d)))
    return jax.tree.map(lambda x: x.reshape(*sets, *x.shape[1:]), flat).cut(rank)


@functools.partial(jax.jit, static_argnames="copies")
def _counts(
    key: PRNGKeyArray, memories: Array, corruption: Corruption, copies: int
) -> tuple[Array, Array]:
    """How often a value of each bin became one of each bin, and the edges of bins."""
    keys = jax.random.split(key, copies)
    queries, observed = jax.vmap(lambda key: corruption(key, memories))(keys)
    edges = _edges(_sample(memories), _sample(queries, observed))
    stored = jnp.broadcast_to(bins(memories, edges), queries.shape)
    pairs = stored * _BINS + bins(queries, edges)
    number = _BINS * _BINS
    if observed is not None:  # the others are counted apart
        pairs = jnp.where(observed, pairs, number)
    counts = jnp.bincount(pairs.ravel(), length=number + 1)[:number]
    return counts.reshape(_BINS, _BINS).astype(memories.dtype), edges


@jax.jit  # apart from `_counts`, since it is one program for all memories
def _factors(counts: Array) -> tuple[Array, Array]:
    """Tables of memories and queries, whose product is that of log-probabilities."""
    table = jnp.log(_probabilities(counts))
    rows, columns = _weights(counts.sum(1)), _weights(counts.sum(0))
    table -= contract(rows**2 / (rows**2).sum(), table.T)[None]  # the query's constant
    u, s, vt = jnp.linalg.svd(rows[:, None] * table * columns[None])
    return u * s[None] / rows[:, None], vt.T / columns[:, None]


def _probabilities(counts: Array) -> Array:
    """Probability of each column in its row, leaning on coarser bins."""
    number = counts.shape[0]
    if number == 1:
        return jnp.ones_like(counts)
    pair = jnp.arange(number) // 2
    common = counts.sum(0) + 0.5  # no query value is impossible
    within = common / _paired(common)[pair]
    coarse = _probabilities(_paired(_paired(counts).T).T)
    prior = jnp.maximum(coarse[pair][:, pair] * within[None], _FLOOR)
    total = counts.sum(1, keepdims=True)

    def left_out(m: Array) -> Array:
        """Log-probability of each count given the others of its row, summed."""
        others, all_others = (jnp.maximum(n - 1, 0.0) for n in (counts, total))
        return (counts * jnp.log((others + m * prior) / (all_others + m))).sum()

    grid = jnp.geomspace(*_LEANING, dtype=counts.dtype)
    m = grid[jnp.argmax(jax.vmap(left_out)(grid))]
    return (counts + m * prior) / (total + m)


def _paired(x: Array) -> Array:
    """Sums of pairs of rows; the last may be alone."""
    x = jnp.pad(x, ((0, x.shape[0] % 2), *((0, 0),) * (x.ndim - 1)))
    return x[::2] + x[1::2]


def _weights(counts: Array) -> Array:
    """Square root of the share of each bin; rare ones count as less rare."""
    share = counts / jnp.maximum(counts.sum(), 1.0)
    return jnp.sqrt(jnp.maximum(share, _RARE))


class _Sample(NamedTuple):
    """Some observed values, sorted; what lies behind their number is infinite."""

    values: Array
    number: Array

    def places(self, q: Array) -> Array:
        """Where the quantiles are."""
        last = jnp.maximum(self.number - 1, 0).astype(q.dtype)
        return jnp.round(q * last).astype(jnp.int32)


def _sample(values: Array, observed: Array | None = None) -> _Sample:
    stride = max(1, values.size // _SAMPLE)
    # Every component of every memory takes its turn.
    while math.gcd(stride, math.prod(values.shape[-2:])) > 1:
        stride += 1
    values = values.ravel()[::stride]
    if observed is None:
        return _Sample(jnp.sort(values), jnp.asarray(values.size))
    observed = observed.ravel()[::stride]
    values = jnp.where(observed, values, jnp.inf)
    return _Sample(jnp.sort(values), observed.sum())


def _edges(memories: _Sample, queries: _Sample) -> Array:
    """Edges of `_BINS` bins: around each atom, an even grid, and quantiles.

    An atom is an end of the range of memories or queries, where clamping puts many
    values, or as frequent as `1 / _FREQUENT`. It has edges at itself and at the next
    number. Quantiles are of the other values, of which none counts as more than it
    takes for one edge; they take what atoms leave.
    """
    joined = jnp.sort(jnp.concatenate([memories.values, queries.values]))
    values = _Sample(joined, memories.number + queries.number)
    atoms = jnp.sort(jnp.concatenate([_atoms(memories), _atoms(queries)]))
    is_atom = (joined[:, None] == atoms[None]).any(-1)
    others = jnp.sort(jnp.where(is_atom, jnp.inf, joined))
    between = jnp.isfinite(others).sum()
    others = jnp.where(between > 0, others, joined)
    between = jnp.where(between > 0, between, values.number)

    free = jnp.isinf(atoms) | jnp.append(False, atoms[1:] == atoms[:-1])
    tiny = float(jnp.finfo(joined.dtype).tiny)  # smaller ones compare as zeros
    above = jnp.nextafter(atoms, jnp.inf)
    above = jnp.where(jnp.abs(atoms) < tiny, tiny, above)
    taken = jnp.concatenate([atoms, above])
    low, high = values.values[values.places(jnp.asarray([1e-3, 1 - 1e-3]))]

    more = _BINS - 1 - _EVEN - taken.size
    slot = jnp.concatenate([jnp.ones(more, bool), free, free])
    place = (jnp.cumsum(slot) - 1).astype(joined.dtype)
    at = jnp.arange(others.size)
    repeats = _repeats(others)
    most = between.astype(joined.dtype) / (place[-1] + 1)  # values to an edge
    weight = jnp.minimum(most / repeats.astype(joined.dtype), 1.0)
    rank = jnp.cumsum(jnp.where(at < between, weight, 0.0))
    found = jnp.searchsorted(rank, place / place[-1] * rank[-1])
    quantiles = others[found]
    even = jnp.linspace(low, high, _EVEN, dtype=joined.dtype)
    taken = jnp.concatenate([jnp.zeros(more, joined.dtype), taken])
    return jnp.sort(jnp.concatenate([even, jnp.where(slot, quantiles, taken)]))


def _atoms(sample: _Sample) -> Array:
    """The ends and what is frequent, each once, ascending; infinite behind them."""
    q = jnp.linspace(0, 1, 2 * _FREQUENT + 1, dtype=sample.values.dtype)
    at = sample.places(q)  # two of them in what is frequent
    many = _repeats(sample.values)[at] * _FREQUENT >= sample.number
    many = many.at[jnp.asarray([0, -1])].set(True)
    atoms = jnp.sort(jnp.where(many, sample.values[at], jnp.inf))
    again = jnp.append(False, atoms[1:] == atoms[:-1])
    return jnp.sort(jnp.where(again, jnp.inf, atoms))[: _FREQUENT + 2]


def _repeats(ascending: Array) -> Array:
    """How often each value occurs."""
    at = jnp.arange(ascending.size)
    change = ascending[1:] != ascending[:-1]
    first = lax.cummax(jnp.where(jnp.append(True, change), at, 0))
    last = jnp.where(jnp.append(change, True), at, ascending.size)
    return lax.cummin(last, reverse=True) - first + 1
