"""The likelihood kernel, learned from corrupted copies of the memories."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

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

BINS = 65
_EVEN = 16  # edges on an even grid
_FREQUENT = 8  # an atom is at least one in so many values
_SAMPLE = 100_000  # about how many values determine the edges
_VALUES = 2_000_000  # least number of corrupted component values to learn from
_PRIOR_STRENGTHS = (0.1, 1e6, 71)  # first, last and number of `m` on a log grid
_FLOOR = 1e-16  # least prior probability
_RARE = 1e-4  # least share of the counts with which a bin is weighed
_DEGREE = 2  # of the polynomials of a smooth table
_NEWTON = 12  # steps to its coefficients


def fit_likelihood(
    key: PRNGKeyArray,
    memories: Float[Array, "*sets M d"],
    corrupt: Callable[[PRNGKeyArray, Array], Any],
    *,
    copies: int | None = None,
    rank: int | None = None,
) -> LikelihoodKernel:
    """Learns how a corruption changes component values, as a kernel.

    Over corrupted copies of the memories it counts how often a stored value of one bin
    becomes a query value of another bin. From the counts it estimates a table of
    log-probabilities, and factors the table; see `LikelihoodKernel`. If the corruption
    returns `observed`, only observed components are counted, as in retrieval.

    Bins are common to memories and queries, so that an intact value stays in its bin.
    Frequent values (atoms, such as exact zeros and the ends of a clamp) have bins of
    their own. Most remaining bins have equal numbers of values.

    Estimates from few counts are smoothed: the prior of a table is the table of pairs
    of bins, whose prior is the table of pairs of pairs. If a row has `n` counts, of
    which `k` are in a bin with the prior probability `p`, the probability of the bin is
    `(k + m p) / (n + m)`. The strength `m` of the prior maximises the leave-one-out
    likelihood of the counts.

    The kernel is constant to derivatives in the memories, since counts are.

    Each bin is weighed by its share of the counts before the table is factored, so that
    a table of lower rank is most accurate for frequent values.

    Args:
      key: random key.
      memories: stored patterns, one per row.
      corrupt: a corruption, see `uhop_jax.corruption`.
      copies: number of corrupted copies of each memory; None is the number that gives
        two million component values of a memory set, and at least 4.
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
        check_count("rank", rank, 1, BINS)
    memories = as_floating(memories, "memories")
    check_memory_set(memories, distinct=False)
    # Counts are piecewise constant in the memories.
    memories = lax.stop_gradient(memories.astype(working_dtype(memories)))
    corruption = Corruption.of(corrupt, memories=memories)
    corruption.check_draws(key, memories)
    *sets, M, d = memories.shape
    if copies is None:
        copies = max(4, -(-_VALUES // (M * d)))

    def run(key: PRNGKeyArray, memories: Array) -> LikelihoodKernel:
        counts, edges = _counts(key, memories, corruption, copies)
        memory_table, query_table = factors(counts)
        return LikelihoodKernel(memory_table, query_table, edges, d)

    if not sets:
        return run(key, memories).cut(rank)
    keys = jax.random.split(key, math.prod(sets))
    # Sets are fitted in sequence: the copies of all sets may not fit into memory.
    flat = lax.map(lambda pair: run(*pair), (keys, memories.reshape(-1, M, d)))
    return jax.tree.map(lambda x: x.reshape(*sets, *x.shape[1:]), flat).cut(rank)


@functools.partial(jax.jit, static_argnames="copies")
def _counts(
    key: PRNGKeyArray, memories: Array, corruption: Corruption, copies: int
) -> tuple[Array, Array]:
    """Counts `(stored bin, query bin)` of component values, and the edges of bins."""
    keys = jax.random.split(key, copies)
    queries, observed = jax.vmap(lambda key: corruption(key, memories))(keys)
    edges = edges_of(memories, queries, observed)
    stored = jnp.broadcast_to(bins(memories, edges), queries.shape)
    pairs = stored * BINS + bins(queries, edges)
    number = BINS * BINS
    if observed is not None:  # unobserved values go to one more count, dropped below
        pairs = jnp.where(observed, pairs, number)
    counts = jnp.bincount(pairs.ravel(), length=number + 1)[:number]
    return counts.reshape(BINS, BINS).astype(memories.dtype), edges


@jax.jit
def probabilities(counts: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """Probability of each column in its row, smoothed by the table of coarser bins."""
    number = counts.shape[0]
    if number == 1:
        return jnp.ones_like(counts)
    pair = jnp.arange(number) // 2
    column_counts = counts.sum(0) + 0.5  # no query value is impossible
    within = column_counts / _paired(column_counts)[pair]
    coarse = probabilities(_paired(_paired(counts).T).T)
    prior = jnp.maximum(coarse[pair][:, pair] * within[None], _FLOOR)
    total = counts.sum(1, keepdims=True)

    def leave_one_out(m: Array) -> Array:
        """Sum of the log-probabilities of each count given the rest of its row."""
        rest, rest_total = (jnp.maximum(n - 1, 0.0) for n in (counts, total))
        return (counts * jnp.log((rest + m * prior) / (rest_total + m))).sum()

    grid = jnp.geomspace(*_PRIOR_STRENGTHS, dtype=counts.dtype)
    m = grid[jnp.argmax(jax.vmap(leave_one_out)(grid))]
    return (counts + m * prior) / (total + m)


@functools.partial(jax.jit, static_argnames="tabulate")
def factors(
    counts: Float[Array, "K K"], tabulate: Callable[[Array], Array] = probabilities
) -> tuple[Array, Array]:
    """Tables of memories and queries, whose product is the table of log-probabilities.

    Log-probabilities are up to a constant of the query. `tabulate` makes probabilities
    of counts.
    """
    # A program apart from `_counts`, since it is one for all memories.
    table = jnp.log(tabulate(counts))
    rows, columns = _weights(counts.sum(1)), _weights(counts.sum(0))
    # The mean over stored values is a constant of the query.
    table -= contract(rows**2 / (rows**2).sum(), table.T)[None]
    u, s, vt = jnp.linalg.svd(rows[:, None] * table * columns[None])
    return u * s[None] / rows[:, None], vt.T / columns[:, None]


@jax.jit
def smooth_probabilities(counts: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """Probability of each column in its row, from a handful of coefficients.

    The probability is a weight of the column times the exponential of a polynomial of
    both bins, of degree 2 in each (an association model of ordered categories, Goodman
    1979). The four coefficients, whose prior is a standard normal distribution,
    maximise the posterior by Newton's method; in turn with them, the weights give each
    column its share of the counts.
    """
    rows, share = counts.sum(1), counts.sum(0) + 0.5
    rows_share, share = rows / jnp.maximum(rows.sum(), 1.0), share / share.sum()
    u, v = _polynomials(rows_share), _polynomials(share)
    observed = contract(contract(u.T, counts.T), v.T)

    def table(theta: Array, log_weights: Array) -> Array:
        polynomial = contract(contract(u, theta.T), v)
        return jax.nn.softmax(log_weights[None] + polynomial, axis=1)

    def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        theta, log_weights = carry
        p = table(theta, log_weights)
        mean = contract(p, v.T)
        spread = jnp.einsum("ac,cl,cj->alj", p, v, v) - mean[:, :, None] * mean[:, None]
        gradient = observed - contract((rows[:, None] * u).T, mean.T) - theta
        curvature = jnp.einsum("a,ak,ai,alj->klij", rows, u, u, spread)
        curvature = curvature.reshape(theta.size, -1)
        curvature += jnp.eye(theta.size, dtype=u.dtype)
        move = jnp.linalg.solve(curvature, gradient.ravel()).reshape(theta.shape)
        theta += move / jnp.maximum(jnp.abs(move).max(), 1.0)
        of_columns = (rows_share[:, None] * table(theta, log_weights)).sum(0)
        log_weights += jnp.log(share) - jnp.log(jnp.maximum(of_columns, _FLOOR))
        return (theta, log_weights), None

    start = jnp.zeros((_DEGREE, _DEGREE), counts.dtype), jnp.log(share)
    last = lax.scan(step, start, length=_NEWTON)[0]
    return jnp.maximum(table(*last), _FLOOR)  # no pair of bins is impossible


def _polynomials(share: Array) -> Array:
    """Orthonormal polynomials of the number of a bin, `(K, degree)`, no constant."""
    number = share.size
    x = jnp.linspace(-1, 1, number, dtype=share.dtype)
    weight = jnp.sqrt((share + 1 / number) / 2)[:, None]  # no bin counts for nothing
    powers = jnp.stack([x**degree for degree in range(_DEGREE + 1)], axis=1)
    return (jnp.linalg.qr(weight * powers)[0] / weight)[:, 1:]


def _paired(x: Array) -> Array:
    """Sums of pairs of rows; an odd last row is a pair with zeros."""
    x = jnp.pad(x, ((0, x.shape[0] % 2), *((0, 0),) * (x.ndim - 1)))
    return x[::2] + x[1::2]


def _weights(counts: Array) -> Array:
    """Square root of the share of each bin, the share at least `_RARE`."""
    share = counts / jnp.maximum(counts.sum(), 1.0)
    return jnp.sqrt(jnp.maximum(share, _RARE))


class _Sample(NamedTuple):
    """A sample of observed values, sorted; entries beyond `number` are infinite."""

    values: Array
    number: Array

    def places(self, q: Array) -> Array:
        """Indices of the quantiles `q`, int32."""
        last = jnp.maximum(self.number - 1, 0).astype(q.dtype)
        return jnp.round(q * last).astype(jnp.int32)


def _sample(values: Array, observed: Array | None = None) -> _Sample:
    """About `_SAMPLE` of the values, at a regular stride."""
    stride = max(1, values.size // _SAMPLE)
    # A stride coprime to the sizes visits every component of every memory.
    while math.gcd(stride, math.prod(values.shape[-2:])) > 1:
        stride += 1
    values = values.ravel()[::stride]
    if observed is None:
        return _Sample(jnp.sort(values), jnp.asarray(values.size))
    observed = observed.ravel()[::stride]
    values = jnp.where(observed, values, jnp.inf)
    return _Sample(jnp.sort(values), observed.sum())


@jax.jit
def edges_of(
    memories: Float[Array, "*rows d"],
    queries: Float[Array, "*copies d"],
    observed: Bool[Array, "*copies d"] | None = None,
) -> Float[Array, " edges"]:
    """Edges of bins that suit the values of memories and observed queries."""
    return _edges(_sample(memories), _sample(queries, observed))


def _edges(memories: _Sample, queries: _Sample) -> Array:
    """Edges of `BINS` bins: two edges for each atom, an even grid, and quantiles.

    An atom is an end of the range of memories or queries, where clamping puts many
    values, or a value at least as frequent as `1 / _FREQUENT`. Its edges are the atom
    and the next larger number. The remaining edges are quantiles of the values that are
    no atoms; a repeated value counts at most as much as one edge.
    """
    joined = jnp.sort(jnp.concatenate([memories.values, queries.values]))
    values = _Sample(joined, memories.number + queries.number)
    atoms = jnp.sort(jnp.concatenate([_atoms(memories), _atoms(queries)]))
    is_atom = (joined[:, None] == atoms[None]).any(-1)
    non_atoms = jnp.sort(jnp.where(is_atom, jnp.inf, joined))
    count = jnp.isfinite(non_atoms).sum()
    non_atoms = jnp.where(count > 0, non_atoms, joined)
    count = jnp.where(count > 0, count, values.number)

    free = jnp.isinf(atoms) | jnp.append(False, atoms[1:] == atoms[:-1])
    tiny = float(jnp.finfo(joined.dtype).tiny)  # smaller numbers compare as zeros
    above = jnp.nextafter(atoms, jnp.inf)
    above = jnp.where(jnp.abs(atoms) < tiny, tiny, above)
    atom_edges = jnp.concatenate([atoms, above])
    low, high = values.values[values.places(jnp.asarray([1e-3, 1 - 1e-3]))]

    # Slots of edges: true where a quantile goes, false where an atom has its edge.
    extra = BINS - 1 - _EVEN - atom_edges.size
    is_quantile = jnp.concatenate([jnp.ones(extra, bool), free, free])
    order = (jnp.cumsum(is_quantile) - 1).astype(joined.dtype)
    index = jnp.arange(non_atoms.size)
    repeats = _repeats(non_atoms)
    per_edge = count.astype(joined.dtype) / (order[-1] + 1)  # values to an edge
    weight = jnp.minimum(per_edge / repeats.astype(joined.dtype), 1.0)
    rank = jnp.cumsum(jnp.where(index < count, weight, 0.0))
    quantile_index = jnp.searchsorted(rank, order / order[-1] * rank[-1])
    quantiles = non_atoms[quantile_index]
    even = jnp.linspace(low, high, _EVEN, dtype=joined.dtype)
    atom_edges = jnp.concatenate([jnp.zeros(extra, joined.dtype), atom_edges])
    slots = jnp.where(is_quantile, quantiles, atom_edges)
    return jnp.sort(jnp.concatenate([even, slots]))


def _atoms(sample: _Sample) -> Array:
    """Both ends and all frequent values, distinct, ascending, then infinities."""
    # Any run of a frequent value contains at least one of these quantiles.
    q = jnp.linspace(0, 1, 2 * _FREQUENT + 1, dtype=sample.values.dtype)
    index = sample.places(q)
    frequent = _repeats(sample.values)[index] * _FREQUENT >= sample.number
    frequent = frequent.at[jnp.asarray([0, -1])].set(True)
    atoms = jnp.sort(jnp.where(frequent, sample.values[index], jnp.inf))
    repeated = jnp.append(False, atoms[1:] == atoms[:-1])
    return jnp.sort(jnp.where(repeated, jnp.inf, atoms))[: _FREQUENT + 2]


def _repeats(ascending: Array) -> Array:
    """How often the value of each entry occurs."""
    index = jnp.arange(ascending.size)
    change = ascending[1:] != ascending[:-1]
    first = lax.cummax(jnp.where(jnp.append(True, change), index, 0))
    last = jnp.where(jnp.append(change, True), index, ascending.size)
    return lax.cummin(last, reverse=True) - first + 1
