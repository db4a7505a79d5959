"""Expectation maximisation of a likelihood table from queries without labels.

Component values fall into bins, as in `LikelihoodKernel`. Components are dealt into
folds. The posterior of a query over the memories from all folds but one predicts the
components of that fold: the *predictive likelihood*

    sum over queries and components j of log sum_m p(m | x outside of the fold of j)
    T[bin of memory m at j, bin of query at j].

The table `T` maximises it, so that no component confirms itself. The same number
compares posteriors of any similarity, at any inverse temperature.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from uhop_jax._products import contract
from uhop_jax.kernels import Centering
from uhop_jax.likelihood import factors
from uhop_jax.similarity import Similarity

Tabulate = Callable[[Array], Array]  # from counts to the probabilities of a table

LEADING = 16  # memories of largest posterior that are looked at one by one
SETTLED = 2e-3  # change of the shares of all counts at which a table has settled
ENTRIES = 2**23  # most features of a block of memories
LOGITS = 2**24  # most logits of a block of memories


class Folded(NamedTuple):
    """Bins of templates and queries, their components dealt into folds.

    Folds are filled up with components of the bin `K`, which count for nothing; so do
    unobserved components of queries.

    Attributes:
      templates: `(N, F, e)`, bins of the memories.
      queries: `(Q, F, e)`.
    """

    templates: Integer[Array, "N F e"]
    queries: Integer[Array, "Q F e"]


class Leading(NamedTuple):
    """The memories of largest posterior of each query without each fold.

    Attributes:
      logits: `(F, Q, k)`, their log-posteriors up to a constant, at `beta = 1`.
      places: `(F, Q, k)`, which memories they are.
      total: `(F, Q, betas)`, the logarithm of the sum over all memories at each beta.
    """

    logits: Float[Array, "F Q k"]
    places: Int[Array, "F Q k"]
    total: Float[Array, "F Q B"]


@functools.partial(jax.jit, static_argnames=("folds", "number"))
def fold(
    templates: Integer[Array, "N d"],
    queries: Integer[Array, "Q d"],
    order: Integer[Array, " d"],
    folds: int,
    number: int,
) -> Folded:
    """Deals the components, in this order, into folds of one size.

    Neighbours in the order share a fold. There are `number` bins; unobserved components
    of queries have the bin `number`.
    """
    padding = -order.size % folds

    def dealt(x: Array) -> Array:
        x = jnp.pad(x[:, order], ((0, 0), (0, padding)), constant_values=number)
        return x.reshape(x.shape[0], folds, -1)

    small = jnp.uint8 if number < 256 else jnp.int32
    return Folded(dealt(templates.astype(small)), dealt(queries))


@functools.partial(jax.jit, static_argnames=("number", "parts", "dtype"))
def shares(
    queries: Integer[Array, "Q F e"], number: int, dtype: Any, *, parts: int = 1
) -> Float[Array, "P K1"]:
    """The share of each bin among the components of the other parts of the queries.

    Of one part, the shares are of all queries. The bin `number` has the share 1.
    """

    def count(part: Array) -> Array:
        inside = (_part(len(queries), parts) == part).astype(dtype)
        weights = jnp.broadcast_to(inside[:, None, None], queries.shape)
        return jnp.bincount(queries.ravel(), weights.ravel(), length=number + 1)

    counts = lax.map(count, jnp.arange(parts, dtype=jnp.int32))[:, :number]
    if parts > 1:
        counts = counts.sum(0, keepdims=True) - counts
    counts += 0.5
    counts /= counts.sum(1, keepdims=True)
    return jnp.pad(counts, ((0, 0), (0, 1)), constant_values=1.0)


@functools.partial(jax.jit, static_argnames=("tabulate", "rank"))
def leading_by_likelihood(
    data: Folded,
    counts: Float[Array, "K K"],
    log_prior: Float[Array, " N"],
    betas: Float[Array, " B"],
    *,
    tabulate: Tabulate,
    rank: int,
) -> Leading:
    """Posteriors under the table of counts at a rank, from all folds but one."""
    memory_table, query_table = (
        jnp.pad(table[:, :rank], ((0, 1), (0, 0)))
        for table in factors(counts, tabulate)
    )
    Q, F, e = data.queries.shape
    queries = query_table[data.queries].reshape(Q, F, e * rank)

    def logits(first: Array, size: int) -> Array:
        block = lax.dynamic_slice_in_dim(data.templates, first, size)
        features = memory_table[block.astype(jnp.int32)].reshape(size, F, e * rank)
        parts = lax.map(
            lambda f: contract(queries[:, f], features[:, f]), jnp.arange(F)
        )
        prior = lax.dynamic_slice_in_dim(log_prior, first, size)
        return parts.sum(0)[None] - parts + prior[None, None]

    size = max(1, ENTRIES // (F * e * rank))
    return _leading(logits, data.templates.shape[0], (F, Q), betas, size)


@functools.partial(jax.jit, static_argnames=("strips", "size"))
def leading_by_similarity(
    similarity: Similarity,
    memories: Float[Array, "M d"],
    queries: Float[Array, "Q d"],
    observed: Bool[Array, "Q d"] | None,
    betas: Float[Array, " B"],
    *,
    strips: int = 0,
    size: int | None = None,
) -> Leading:
    """Posteriors under a similarity, from all components or all but one strip.

    Components that are left out are zero, or at the centres of `Centering`.

    Each of a number of strips of neighbouring components is left out once; 0 leaves out
    none. `size` is the number of memories in a block; None chooses by their dimension.
    """
    d = memories.shape[1]
    strip = jnp.arange(d) // -(-d // max(strips, 1))
    empty = query_empty = jnp.zeros(d, memories.dtype)
    kernel = similarity.kernel
    if isinstance(kernel, Centering):
        empty = query_empty = kernel.center
        if kernel.query_center is not None:
            query_empty = kernel.query_center

    def logits(first: Array, size: int) -> Array:
        block = lax.dynamic_slice_in_dim(memories, first, size)
        if not strips:
            return similarity(block, queries, observed=observed)[None]

        def without(number: Array) -> Array:
            out = (strip == number)[None]
            return similarity(
                jnp.where(out, empty[None], block),
                jnp.where(out, query_empty[None], queries),
                observed=observed,
            )

        return lax.map(without, jnp.arange(strips))

    rows = max(strips, 1), queries.shape[0]
    return _leading(logits, len(memories), rows, betas, size or max(1, ENTRIES // d))


def _leading(logits, number, rows, betas, size) -> Leading:
    """The leading memories of `logits(first, size)`, block by block."""
    size = min(size, number, max(1, LOGITS // math.prod(rows)))
    k = min(LEADING, number)

    def add(carry: Leading, first: Array) -> tuple[Leading, None]:
        # The last block overlaps with the block before it, which is passed over.
        start = jnp.minimum(first, jnp.int32(number - size))
        z = logits(start, size)
        seen = start + jnp.arange(size, dtype=jnp.int32) < first
        z = jnp.where(seen[None, None], -jnp.inf, z)
        best, place = lax.top_k(z, min(k, size))
        both = jnp.concatenate([carry.logits, best], -1)
        index = jnp.concatenate([carry.places, start + place], -1)
        kept, order = lax.top_k(both, k)
        total = lax.map(lambda beta: jax.nn.logsumexp(beta * z, axis=-1), betas)
        return Leading(
            kept,
            jnp.take_along_axis(index, order, -1),
            jnp.logaddexp(carry.total, jnp.moveaxis(total, 0, -1)),
        ), None

    start = Leading(
        jnp.full((*rows, k), -jnp.inf, betas.dtype),
        jnp.zeros((*rows, k), jnp.int32),
        jnp.full((*rows, betas.size), -jnp.inf, betas.dtype),
    )
    return lax.scan(add, start, jnp.arange(0, number, size, dtype=jnp.int32))[0]


def counted(
    data: Folded,
    leading: Leading,
    beta: Array,
    total: Array,
    common: Float[Array, "P K1"],
    tables: Float[Array, "P K K"] | None = None,
) -> tuple[Float[Array, "P K K"], Float[Array, " N"]]:
    """Expected counts of pairs of bins by part of the queries, and of templates.

    The posteriors are without the fold of a component, and `total (F, Q)` is theirs at
    this beta. The tables have, for each part of the queries, the probabilities with
    which a component takes part in its own posterior; None leaves it out. Memories that
    are not among the leading ones give the `shares` of bins. Query `q` is in part
    `q % P`.
    """
    parts, K = common.shape[0], common.shape[1] - 1
    padded = None if tables is None else _padded(tables)
    Q = data.queries.shape[0]

    def add(carry, row):
        counts, uses = carry
        p, index, c, part = row
        pairs = _pairs(data, index, c, K + 1)
        weights = jnp.broadcast_to(p[..., None], pairs.shape)
        if padded is not None:
            weights = weights * padded[part].ravel()[pairs]
            rest = jnp.maximum(1 - p.sum(-1), 0.0)[:, None] * common[part][c]
            weights = weights / (weights.sum(1) + rest)[:, None]
        counts = counts.at[part, pairs.ravel()].add(weights.ravel())
        return (counts, uses.at[index.ravel()].add(p.ravel())), None

    start = (
        jnp.zeros((parts, (K + 1) ** 2), total.dtype),
        jnp.zeros(data.templates.shape[0], total.dtype),
    )
    p = jnp.exp(beta * leading.logits - total[..., None])
    by_query = jnp.moveaxis(p, 1, 0), jnp.moveaxis(leading.places, 1, 0)
    rows = (*by_query, data.queries, _part(Q, parts))
    (counts, uses), _ = lax.scan(add, start, rows)
    return counts.reshape(parts, K + 1, K + 1)[:, :K, :K], uses


@jax.jit
def predictive(
    data: Folded,
    leading: Leading,
    betas: Float[Array, " B"],
    common: Float[Array, "P K1"],
    tables: Float[Array, "P K K"],
) -> Float[Array, "Q B"]:
    """The predictive likelihood of each query at each beta, in nats.

    It is relative to the `shares` of bins. Memories that are not among the leading ones
    predict these shares. Each part of the queries has its shares and its table, both of
    other queries: shares that had seen the query would be ahead of any table.
    """
    padded = _padded(tables)
    Q = data.queries.shape[0]

    def of_query(row):
        logits, total, index, c, part = row
        pairs = _pairs(data, index, c, padded.shape[-1])
        chances = padded[part].ravel()[pairs] / common[part][c][:, None]

        def at(row):
            beta, total = row
            p = jnp.exp(beta * logits - total[:, None])
            rest = jnp.maximum(1 - p.sum(-1), 0.0)
            mixed = (p[..., None] * chances).sum(1) + rest[:, None]
            # A component that all leading memories make impossible has some chance.
            tiny = float(jnp.finfo(mixed.dtype).tiny)
            return jnp.log(jnp.maximum(mixed, tiny)).sum()

        return lax.map(at, (betas, total.T))

    rows = (leading.logits, leading.total, leading.places)
    by_query = tuple(jnp.moveaxis(x, 1, 0) for x in rows)
    return lax.map(of_query, (*by_query, data.queries, _part(Q, len(tables))))


@functools.partial(
    jax.jit, static_argnames=("tabulate", "rank", "iterations", "groups")
)
def maximised(
    data: Folded,
    counts: Float[Array, "K K"],
    *,
    tabulate: Tabulate,
    rank: int,
    iterations: int,
    groups: int = 1,
) -> tuple[Float[Array, "K K"], Float[Array, " G"]]:
    """Counts of the table of greatest predictive likelihood, and weights of groups.

    Templates are ordered by group, such as transformations, all groups of one size. The
    iterations begin with the table of `counts`.
    """
    one = jnp.ones(1, counts.dtype)
    common = shares(data.queries, len(counts), counts.dtype)
    size = data.templates.shape[0] // groups

    def step(carry):
        counts, log_weights, _, number = carry
        leading = leading_by_likelihood(
            data,
            counts,
            jnp.repeat(log_weights, size),
            one,
            tabulate=tabulate,
            rank=rank,
        )
        total = leading.total[..., 0]
        table = tabulate(counts)[None]
        by_part, uses = counted(data, leading, one[0], total, common, table)
        new = by_part[0]
        shares = uses.reshape(groups, size).sum(1) + 0.5
        change = jnp.abs(new / new.sum() - counts / counts.sum()).sum()
        return new, jnp.log(shares / shares.sum()), change, number + 1

    def unfinished(carry):
        *_, change, number = carry
        return (change > SETTLED) & (number < iterations)

    even = jnp.full(groups, -math.log(groups), counts.dtype)
    start = (counts, even, jnp.full_like(even, jnp.inf, shape=()), 0)
    return lax.while_loop(unfinished, step, start)[:2]


def _part(queries: int, parts: int) -> Array:
    """The part of each query."""
    return jnp.arange(queries, dtype=jnp.int32) % jnp.int32(parts)


def _pairs(data: Folded, index: Array, c: Array, number: int) -> Array:
    """Pairs of bins `(F, k, e)` of memories `index (F, k)` and of a query `(F, e)`.

    `number` is the number of bins, the bin of what counts for nothing included.
    """
    folds = jnp.arange(index.shape[0])[:, None]
    a = data.templates[index, folds].astype(jnp.int32)
    return a * number + c[:, None].astype(jnp.int32)


def _padded(tables: Array) -> Array:
    """Tables `(P, K, K)` with the bin `K`, which is certain."""
    return jnp.pad(tables, ((0, 0), (0, 1), (0, 1)), constant_values=1.0)
