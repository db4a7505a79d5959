r"""Retrieval from more memories than fit: the same dynamics, a block at a time.

Every separation here weighs a memory by its own overlap and one number of the query,
:math:`p_\mu = f(z_\mu, \theta)`, such as the log-normaliser of softmax or the threshold
of sparsemax. So memories can pass in blocks, in any order of sizes: overlaps are
computed, used and forgotten, never more than a tile of them at a time.

- `Softmax`, `Softmax1`, `Polynomial`: one pass. The sums refer to the largest overlap
  so far and are rescaled when it rises.
- `Sparsemax`, `Entmax`: a pass for the maxima of groups of memories, whose own
  threshold is a lower bound of the one sought, and equal to it unless two memories of a
  support share a group; a pass for the weighted sum, which skips every tile without
  support; and, for the queries whose weights sum to more than one, Newton passes in
  between.
- `TopK`: a pass that keeps the `k` largest, which are then fetched.

Each algorithm is written once, in `_average`. Two drivers run it: `_OnDevice` in a
compiled loop over an array, `_OnHost` over blocks that come from a file or an iterator,
the next on its way while the device works.
"""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from uhop_jax import _entmax
from uhop_jax._checks import (
    as_floating,
    broadcast_rows,
    check_count,
    check_finite,
    check_positive,
    is_traced,
    wider_dtype,
    working_dtype,
)
from uhop_jax._entmax import Power, exp_and_slope, run_time_power, switch, weights_at
from uhop_jax._products import weigh
from uhop_jax.retrieval import check_iterable
from uhop_jax.separation import (
    Entmax,
    Polynomial,
    Separation,
    Softmax,
    Softmax1,
    Sparsemax,
    TopK,
)
from uhop_jax.similarity import Cosine, Dot, Similarity, check_patterns

STREAMED = (Softmax, Softmax1, Sparsemax, Entmax, Polynomial, TopK)
TILE = 2**18  # overlaps at a time: what stays in the cache of a core
TILE_ROWS = 8192  # memories in a tile, at most
BLOCK_BYTES = 2**23  # of memories that the host hands over at a time
QUERY_BLOCK = 256
GROUPS = 512  # of memories, whose maxima bound a threshold

Blocks = Callable[[], Iterator[Any]]
Source = Any  # Array | np.ndarray | str | Path | Blocks


class Streamed(NamedTuple):
    """Result of `retrieve_streamed`.

    Attributes:
      state: `(..., d)`, the retrieved pattern (or value).
      weights: `(..., top)`, the largest of the last update, in falling order.
      nearest: `(..., top)`, the memories they belong to.
    """

    state: Float[Array, "*batch d"]
    weights: Float[Array, "*batch top"]
    nearest: Int[Array, "*batch top"]


def retrieve_streamed(
    memories: Source,
    query: Float[Array, "*batch d"],
    *,
    beta: ArrayLike,
    separation: Separation = Softmax(),
    similarity: Similarity = Dot(),
    steps: int = 1,
    values: Source | None = None,
    mask: Bool[Array, " M"] | None = None,
    top: int = 0,
    block: int | None = None,
    query_block: int | None = None,
) -> Streamed:
    r"""`uhop_jax.retrieve` [eqn:ret-dyn], holding a block of memories at a time.

    A JAX array is read where it lies, inside one compiled program that can be jitted,
    mapped and differentiated in everything but the mask (reverse mode; the overlaps are
    computed again, block by block). Anything else is read on the host and cannot be
    differentiated: a NumPy array, memory-mapped or not; the path of a `.npy` file,
    which is then mapped; or a function without arguments that returns an iterator over
    arrays `(n, d)` of any lengths, called once for every pass. Such memories are not
    searched for NaN beforehand; one that is found shows in the result.

    Args:
      memories: stored patterns `(M, d)`, one per row.
      query: initial states.
      beta: inverse temperature, positive; broadcasts against the leading axes of
        `query`, and so does `alpha`.
      separation: one of this library's.
      similarity: overlap of states with memories; larger is closer.
      steps: number of updates, at least 1.
      values: what the last weights average `(M, v)`, a source as `memories` is; the
        memories by default.
      mask: true for valid memories, the same for all queries; for arrays alone.
      top: how many of the largest weights to report; costs a pass.
      block: memories at a time, any number; chosen by size if None.
      query_block: queries at a time, likewise. Memories on the host are read anew for
        each block of queries.

    Returns:
      `Streamed`, in the promoted dtype of `memories` and `query`.

    Raises:
      ValueError: as in `retrieve`; or if a source cannot be read, or a separation
        cannot be streamed.
    """
    check_count("steps", steps, 1)
    check_count("top", top, 0)
    for name, size in (("block", block), ("query_block", query_block)):
        if size is not None:
            check_count(name, size, 1)
    if not isinstance(separation, STREAMED):
        raise ValueError(
            f"separation must be one of {', '.join(c.__name__ for c in STREAMED)} to "
            f"be streamed, got {separation!r}"
        )
    separation.check()
    query = as_floating(query, "query")
    check_finite("query", query)
    check_positive("beta", beta)
    stored: Any = _Stored if isinstance(memories, jax.Array) else _Read
    source = stored.of(memories, values, mask)
    check_patterns(source.sample, query, similarity)
    for name, k in (("k", getattr(separation, "k", 0)), ("top", top)):
        check_count(name, k, 0, source.length)
    kernel = similarity.kernel
    if kernel is not None and kernel.set_axes:
        raise ValueError(
            f"kernel has {kernel.set_axes} axes of memory sets, memories have 0"
        )
    if steps > 1:
        check_iterable(similarity)
    dtype = wider_dtype(source.sample, query, *source.more)
    working = working_dtype(jnp.zeros((), dtype))
    rows, d = query.shape[:-1], query.shape[-1]
    number = int(np.prod(rows))

    def each(name: str, x: Any) -> Array:
        return broadcast_rows(name, x, rows).astype(working).reshape(number)

    separation = jax.tree.map(functools.partial(each, "alpha"), separation)
    model = _Model(similarity, separation, each("beta", beta))
    size = min(query_block or QUERY_BLOCK, max(number, 1))
    tile = min(TILE_ROWS, max(TILE // size, 1), block or TILE_ROWS)
    plan = _Plan(steps, top, tile, size, block, dtype)
    found = source.run(plan, model, query.astype(dtype).reshape(number, d))
    return Streamed(*(x.reshape(*rows, *x.shape[1:]) for x in found))


class _Plan(NamedTuple):
    """What is static: loop lengths, sizes of blocks, and the dtype of the result."""

    steps: int
    top: int
    tile: int
    queries: int
    block: int | None
    dtype: Any


class _Model(NamedTuple):
    """How states are compared, with a `beta` and an `alpha` for each query."""

    similarity: Similarity
    separation: Separation
    beta: Array

    def take(self, index: Any) -> "_Model":
        """That of some of the queries."""
        separation = jax.tree.map(lambda leaf: leaf[index], self.separation)
        return self._replace(separation=separation, beta=self.beta[index])


class _Tile(NamedTuple):
    """Some consecutive memories, the first of them number `start`."""

    memories: Array
    values: Array | None
    mask: Array | None
    start: Array

    def overlaps(
        self, model: _Model, y: Array, unit: float = 1.0
    ) -> tuple[Array, Array]:
        """Keys, and scaled overlaps `(Q, T)` in `unit`s, `-inf` where masked."""
        keys = model.similarity.keys(self.memories)
        scale = unit * model.beta[:, None].astype(y.dtype)
        # Where the overlap is linear in the state, scaling that is a pass less.
        linear = isinstance(model.similarity, Dot | Cosine) and keys.dtype == y.dtype
        z = model.similarity.compare(keys, scale * y if linear else y)
        if not linear:
            z = scale * z
        if self.mask is not None:
            z = jnp.where(self.mask[None], z, -jnp.inf)
        return keys, z

    def averaged(self, keys: Array, update: bool) -> Array:
        """What the weights average: an update the keys, the read-out the values."""
        if update:
            return keys
        return self.memories if self.values is None else self.values


# --------------------------------------------------------------------------------------
# The algorithms
# --------------------------------------------------------------------------------------


def _run(driver: Any, plan: _Plan, model: _Model, query: Array) -> tuple[Array, ...]:
    """State, largest weights and their memories for a block of queries `(Q, d)`."""
    similarity = model.similarity
    y = similarity.state(query)
    y = y.astype(working_dtype(y))
    for _ in range(plan.steps - 1):
        mean, _ = driver.average(model, y, True)
        y = _next_state(similarity, mean).astype(y.dtype)
    state, threshold = driver.average(model, y, False)
    shape = y.shape[0], plan.top
    weights, index = jnp.zeros(shape, y.dtype), jnp.zeros(shape, jnp.int32)
    if plan.top:
        overlaps, index = _largest(driver, model, y, plan.top)
        weights = _top_weights(model.separation, overlaps, threshold)
    return state.astype(plan.dtype), weights.astype(plan.dtype), index


@jax.jit
def _next_state(similarity: Similarity, mean: Array) -> Array:
    """The state that follows from a weighted sum of keys: that of one such key."""
    one = jnp.ones((1,), mean.dtype)
    return jax.vmap(lambda key: similarity.combine(key[None], one))(mean)


def _average(driver: Any, model: _Model, y: Array, update: bool) -> tuple[Array, Array]:
    """Weighted average `(Q, v)` of keys or values, and the threshold `(Q,)`."""
    separation = model.separation
    if isinstance(separation, TopK):
        return _average_of_largest(driver, model, y, update)
    zero = jnp.zeros(y.shape[:1], y.dtype)
    out = jnp.zeros((y.shape[0], driver.width(y, update)), y.dtype)
    if isinstance(separation, Sparsemax | Entmax):
        out, total, threshold = _entmax_sums(driver, model, y, (out, zero), update)
        return _finished(separation, out, total, threshold)
    top = zero if isinstance(separation, Softmax1 | Polynomial) else zero - jnp.inf
    total = zero + 1 if isinstance(separation, Softmax1) else zero
    out, total, top = driver.fold(_online, model, y, (), (out, total, top), update)
    return _finished(separation, out, total, top)


@jax.jit
def _finished(separation: Separation, out: Array, total: Array, top: Array):
    """Normalised average, and the threshold, from sums that refer to `top`."""
    safe = jnp.where(total == 0, 1.0, total)
    if isinstance(separation, Polynomial):
        threshold = top * safe ** (1 / separation.degree)
    elif isinstance(separation, Softmax | Softmax1):
        log2 = jnp.where(top == -jnp.inf, 0.0, top) + jnp.log2(safe)
        threshold = math.log(2) * log2
    else:
        threshold = top
    return out / safe[:, None], threshold


def _online(model: _Model, y: Array, extra: Any, carry: Any, tile: _Tile, update: bool):
    """Sums of the weights, and of what they average, about the largest overlap yet."""
    out, total, top = carry
    if isinstance(model.separation, Polynomial):
        keys, z = tile.overlaps(model, y)
        new = jnp.maximum(top, z.max(-1))
        safe = jnp.where(new == 0, 1.0, new)
        degree = model.separation.degree
        e = (jnp.maximum(z, 0.0) / safe[:, None]) ** degree
        scale = (top / safe) ** degree
    else:
        keys, z = tile.overlaps(model, y, unit=1 / math.log(2))
        new = jnp.maximum(top, z.max(-1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        e, scale = _exp2(z - safe[:, None]), jnp.exp2(top - safe)
    out = out * scale[:, None] + weigh(e, tile.averaged(keys, update)).astype(out.dtype)
    return out, total * scale + e.sum(-1), new


def _exp2(x: Array) -> Array:
    """`2^x` for `x <= 0`; on a CPU in half the operations that XLA takes for it."""
    if x.dtype != jnp.float32:
        return jnp.exp2(x)
    return lax.platform_dependent(x, cpu=_short_exp2, default=jnp.exp2)


def _short_exp2(x: Array) -> Array:
    """`2^n 2^f`, `|f| <= 1/2`, by a polynomial; right to 3e-7, zero below `2^-126`."""
    x = jnp.maximum(x, -127.0)
    n = jnp.round(x)
    f = x - n
    p = jnp.full_like(f, 1.32647269e-03)
    for c in (9.67151266e-03, 5.55073374e-02, 2.40222421e-01, 6.93146978e-01, 1.0):
        p = p * f + c
    # The bits of `2^n`; those of n = -127 are zero, and so is the float.
    power = (n.astype(jnp.int32) + 127) << 23
    return p * lax.bitcast_convert_type(power, jnp.float32)


def _entmax_sums(
    driver: Any, model: _Model, y: Array, start: tuple[Array, Array], update: bool
) -> tuple[Array, Array, Array]:
    """Sums of the weights and of what they average, and the threshold."""
    maxima = jnp.full((y.shape[0], driver.groups), -jnp.inf, y.dtype)
    maxima = driver.fold(_group_maxima, model, y, (), maxima, False)
    top, e, lower, likely = _lower_bound(model.separation, maxima)

    def weigh_at(root: Array, active: Any = None) -> tuple[Array, Array]:
        extra = top, root[:, 0]
        return driver.fold(_weigh, model, y, extra, start, update, active)

    def sums(root: Array, active: Array) -> tuple[Array, Array]:
        zero, extra = jnp.zeros_like(top), (top, root[:, 0])
        rows = active[:, 0]
        f, slope = driver.fold(_sums, model, y, extra, (zero, zero), False, rows)
        return f[:, None], slope[:, None]

    # Where the bound is mostly the root, trying it is a pass less.
    unknown = start[0], jnp.full_like(top, jnp.inf)
    first = driver.when(likely, lambda: weigh_at(lower), unknown)
    limit = _entmax.tolerance(driver.count, y.dtype)
    done = (first[1] - 1 <= limit)[:, None] & (e <= 1)

    def climb() -> tuple[Array, Array, Array]:
        root = _entmax.find_root(sums, driver.count, e, lower, driver.repeat, ~done)
        again = weigh_at(root, ~done[:, 0])
        out = jnp.where(done, first[0], again[0])
        return out, jnp.where(done[:, 0], first[1], again[1]), root

    out, total, root = driver.when(jnp.any(~done), climb, (*first, lower))
    return out, total, top + root[:, 0]


@jax.jit
def _lower_bound(separation: Separation, maxima: Array) -> tuple[Array, ...]:
    """The root of some of the entries is never above that of all.

    Returns the maximum, `alpha - 1`, the root, and whether that is likely the root of
    all entries for most queries: if no two entries of a support share a group.
    """
    top = maxima.max(-1)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    e, power = _exponent(separation, top)
    u = maxima - top[:, None]
    root = _entmax.root(u, e, jnp.zeros_like(top)[:, None], power)
    support = (1 + e * (u - root) > 0).sum(-1)
    return top, e, root, jnp.mean(support**2 < maxima.shape[-1]) > 0.5


def _exponent(separation: Any, like: Array) -> tuple[Array, Any]:
    """`alpha - 1` of each query `(Q, 1)`, and how powers are taken."""
    if isinstance(separation, Sparsemax):
        return jnp.ones_like(like)[:, None], Power.LINEAR
    e = jnp.where(separation.alpha >= 1, separation.alpha, jnp.nan)[:, None] - 1
    return e, run_time_power(e)


def _group_maxima(model, y, extra, carry, tile: _Tile, update):
    """Maxima of groups of memories: those whose numbers agree modulo their count."""
    del extra, update
    _, z = tile.overlaps(model, y)
    groups = carry.shape[-1]
    missing = -z.shape[-1] % groups
    z = jnp.pad(z, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return jnp.maximum(carry, z.reshape(z.shape[0], -1, groups).max(1))


def _sums(model, y, extra, carry, tile: _Tile, update):
    """Sums of the weights and of their slopes at a root."""
    del update
    _, z = tile.overlaps(model, y)
    top, root = extra
    e, power = _exponent(model.separation, root)

    def add(power: Power):
        p, slope = exp_and_slope(z - top[:, None], root[:, None], e, power)
        return carry[0] + p.sum(-1), carry[1] + slope.sum(-1)

    return switch(power, add)


def _weigh(model, y, extra, carry, tile: _Tile, update):
    """Sums of the weights at the root, and of what they average."""
    keys, z = tile.overlaps(model, y)
    averaged = tile.averaged(keys, update)
    top, root = extra
    e, power = _exponent(model.separation, root)

    def add(power: Power):
        p, _ = exp_and_slope(z - top[:, None], root[:, None], e, power)
        mass = p.sum(-1)
        out = lax.cond(  # a tile without support costs no product
            jnp.any(mass != 0),
            lambda: carry[0] + weigh(p, averaged).astype(carry[0].dtype),
            lambda: carry[0],
        )
        return out, carry[1] + mass

    return switch(power, add)


def _average_of_largest(driver: Any, model: _Model, y: Array, update: bool):
    """`TopK`: softmax over the `k` largest, whose patterns are fetched."""
    best, index = _largest(driver, model, y, model.separation.k)  # type: ignore
    return _softmax_of(model, y, driver.take(index), best != -jnp.inf, update)


@functools.partial(jax.jit, static_argnames="update")
def _softmax_of(model: _Model, y: Array, fetched: Any, valid: Array, update: bool):
    def row(y, beta, memories, values, valid):
        memories = jnp.where(valid[:, None], memories, 0.0)
        if values is not None:
            values = jnp.where(valid[:, None], values, 0.0)
        tile = _Tile(memories, values, valid, jnp.zeros((), jnp.int32))
        one = model._replace(beta=beta[None])
        keys, z = tile.overlaps(one, y[None])
        out = weigh(Softmax()(z[0]), tile.averaged(keys, update))
        return out.astype(y.dtype), Softmax().conjugate(z[0])

    memories, values = fetched
    return jax.vmap(row)(y, model.beta, memories, values, valid)


def _largest(driver: Any, model: _Model, y: Array, k: int) -> tuple[Array, Array]:
    """The `k` largest overlaps of each query and their memories; ties to the lower."""
    best = jnp.full((y.shape[0], k), -jnp.inf, y.dtype)
    index = jnp.zeros((y.shape[0], k), jnp.int32)
    return driver.fold(_merge, model, y, (), (best, index), False)


def _merge(model, y, extra, carry, tile: _Tile, update):
    """Merges a tile into the largest so far, if it has anything to add."""
    del extra, update
    best, index = carry
    _, z = tile.overlaps(model, y)

    def merged():
        k = best.shape[-1]
        found, place = lax.top_k(jnp.concatenate([best, z], axis=-1), k)
        old = jnp.take_along_axis(index, jnp.minimum(place, k - 1), axis=-1)
        return found, jnp.where(place < k, old, tile.start + place - k)

    return lax.cond(jnp.all(z.max(-1) <= best[:, -1]), lambda: carry, merged)


@jax.jit
def _top_weights(separation: Separation, z: Array, threshold: Array) -> Array:
    """Weights of the largest overlaps; those of `TopK` end at its `k`."""
    p = _weights(separation, z, threshold)
    if isinstance(separation, TopK):
        p = jnp.where(jnp.arange(z.shape[-1])[None] < separation.k, p, 0.0)
    return p


def _weights(separation: Separation, z: Array, threshold: Array) -> Array:
    """Weights `(Q, T)` of overlaps at the threshold of their query."""
    if isinstance(separation, Polynomial):
        safe = jnp.where(threshold == 0, 1.0, threshold)
        return (jnp.maximum(z, 0.0) / safe[:, None]) ** separation.degree
    x = z - threshold[:, None]
    if isinstance(separation, Sparsemax | Entmax):
        e, power = _exponent(separation, threshold)
        return switch(power, functools.partial(weights_at, x, e))
    return jnp.exp(x)


# --------------------------------------------------------------------------------------
# Memories on the device
# --------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """An array on the device, as a source."""

    memories: Array
    values: Array | None
    mask: Array | None

    @classmethod
    def of(cls, memories: Any, values: Any, mask: Any) -> "_Stored":
        memories = as_floating(memories, "memories")
        if memories.ndim != 2:
            raise ValueError(f"memories must have shape (M, d), got {memories.shape}")
        count = memories.shape[0]
        if mask is not None:
            mask = jnp.asarray(mask)
            if mask.dtype != jnp.bool_ or mask.shape != (count,):
                raise ValueError(
                    f"mask must be boolean of shape ({count},), got {mask.dtype} of "
                    f"shape {mask.shape}"
                )
        valid = None if mask is None else mask[:, None]
        check_finite("memories", memories, valid)
        if values is not None:
            values = as_floating(values, "values")
            _check_values(values.shape, memories.shape)
            check_finite("values", values, valid)
        return cls(memories, values, mask)

    @property
    def sample(self) -> Array:
        return self.memories

    @property
    def more(self) -> tuple[Array, ...]:
        return () if self.values is None else (self.values,)

    @property
    def length(self) -> int:
        return self.memories.shape[0]

    def run(self, plan: _Plan, model: _Model, query: Array) -> tuple[Array, ...]:
        return _run_on_device(plan, model, query, self)


@functools.partial(jax.jit, static_argnames="plan")
def _run_on_device(plan: _Plan, model: _Model, query: Array, stored: _Stored):
    driver = _OnDevice(plan, stored)
    count, size = query.shape[0], plan.queries
    if count <= size:
        return _run(driver, plan, model, query)
    parts = query, model.beta, model.separation

    def split(x: Array) -> Array:
        widths = ((0, -count % size), *(((0, 0),) * (x.ndim - 1)))
        return jnp.pad(x, widths, mode="edge").reshape(-1, size, *x.shape[1:])

    def block(parts):
        query, beta, separation = parts
        return _run(driver, plan, _Model(model.similarity, separation, beta), query)

    found = lax.map(block, jax.tree.map(split, parts))
    return tuple(x.reshape(x.shape[0] * size, *x.shape[2:])[:count] for x in found)


class _OnDevice:
    """Passes over an array inside of a compiled program."""

    repeat = staticmethod(lax.while_loop)

    @staticmethod
    def when(condition: Array, run: Callable[[], Any], otherwise: Any) -> Any:
        return lax.cond(condition, run, lambda: otherwise)

    def __init__(self, plan: _Plan, stored: _Stored):
        self.plan, self.stored, self.count = plan, stored, stored.length
        self.groups = min(GROUPS, plan.tile, self.count)

    def width(self, y: Array, update: bool) -> int:
        if update:
            return y.shape[-1]
        values = self.stored.values
        return (self.stored.memories if values is None else values).shape[-1]

    def fold(self, step, model, y, extra, carry, update, active=None):
        del active  # shapes are fixed
        stored, plan = self.stored, self.plan
        model, y, stored = lax.stop_gradient((model, y, stored))
        arguments = model, y, extra, carry
        return _fold(step, plan.tile, plan.dtype, arguments, stored, update, self.count)

    def average(self, model: _Model, y: Array, update: bool) -> tuple[Array, Array]:
        if isinstance(model.separation, TopK):
            return _average(self, model, y, update)
        out, threshold = _differentiable(self.plan, update, model, y, self.stored)
        return out, lax.stop_gradient(threshold)

    def take(self, index: Array) -> tuple[Array, Array | None]:
        stored = jax.tree.map(lambda x: x[index], self.stored._replace(mask=None))
        return jax.tree.map(
            lambda x: x.astype(self.plan.dtype), (stored.memories, stored.values)
        )


def _fold(
    step, size: int, dtype: Any, arguments: Any, stored: _Stored, update: bool, count
) -> Any:
    """Calls `step` on the first `count` memories, a tile of `size` at a time."""
    model, y, extra, carry = arguments
    size = min(size, stored.memories.shape[0])

    def call(carry: Any, start: Array, inside: Array | None) -> Any:
        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, start, size)

        memories, values, mask = jax.tree.map(cut, stored)
        if mask is not None:  # what is masked may be NaN
            memories = jnp.where(mask[:, None], memories, jnp.zeros((), memories.dtype))
            if values is not None:
                values = jnp.where(mask[:, None], values, jnp.zeros((), values.dtype))
        if inside is not None:
            mask = inside if mask is None else mask & inside
        memories, values = jax.tree.map(lambda x: x.astype(dtype), (memories, values))
        tile = _Tile(memories, values, mask, start)
        return step(model, y, extra, carry, tile, update)

    def last(carry: Any) -> Any:  # its first memories may have been seen already
        begin = jnp.asarray(full * size, jnp.int32)
        start = jnp.minimum(begin, stored.memories.shape[0] - size)
        place = start + jnp.arange(size, dtype=jnp.int32)
        return call(carry, start, (place >= begin) & (place < count))

    full = count // size
    carry = lax.fori_loop(0, full, lambda i, carry: call(carry, i * size, None), carry)
    if isinstance(count, int):
        return last(carry) if count % size else carry
    return lax.cond(count % size > 0, last, lambda carry: carry, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(plan: _Plan, update: bool, model: _Model, y: Array, stored):
    return _average(_OnDevice(plan, stored), model, y, update)


def _forward(plan, update, model, y, stored):
    out, threshold = _average(_OnDevice(plan, stored), model, y, update)
    return (out, threshold), (model, y, stored, out, threshold)


def _backward(plan, update, residuals, cotangents):
    r"""Gradients of :math:`\sum_\mu p_\mu v_\mu`, overlaps computed again.

    The threshold moves with the overlaps so that the weights keep their sum: with `a`
    the derivative of the result's cotangent product in the threshold and `b` that of
    the sum, every weight has one more cotangent, `-a / b`.
    """
    model, y, stored, out, threshold = residuals
    g = cotangents[0]
    driver = _OnDevice(plan, stored)
    if isinstance(model.separation, Sparsemax | Entmax):
        zero = jnp.zeros_like(threshold)
        a, b = driver.fold(_slopes, model, y, (threshold, g), (zero, zero), update)
        share = -a / jnp.where(b == 0, 1.0, b)
    else:
        share = -(g * out).sum(-1)
    start = jax.tree.map(jnp.zeros_like, (model, y, stored._replace(mask=None)))
    extra = threshold, g, share
    by_model, by_y, by_stored = driver.fold(_pull_back, model, y, extra, start, update)
    return by_model, by_y, by_stored


_differentiable.defvjp(_forward, _backward)


def _contribution(model, y, threshold, tile: _Tile, update) -> tuple[Array, Array]:
    """What a tile adds to the result and to the sum of the weights."""
    keys, z = tile.overlaps(model, y)
    p = _weights(model.separation, z, threshold)
    return weigh(p, tile.averaged(keys, update)).astype(y.dtype), p.sum(-1)


def _slopes(model, y, extra, carry, tile: _Tile, update):
    threshold, g = extra
    _, pull = jax.vjp(lambda t: _contribution(model, y, t, tile, update), threshold)
    zero = jnp.zeros_like(threshold)
    (a,), (b,) = pull((g, zero)), pull((jnp.zeros_like(g), zero + 1))
    return carry[0] + a, carry[1] + b


def _pull_back(model, y, extra, carry, tile: _Tile, update):
    threshold, g, share = extra
    by_model, by_y, by_stored = carry

    def contribution(model, y, memories, values):
        own = tile._replace(memories=memories, values=values)
        return _contribution(model, y, threshold, own, update)

    _, pull = jax.vjp(contribution, model, y, tile.memories, tile.values)
    of_model, of_y, of_memories, of_values = pull((g, share))

    def add(whole: Array, part: Array) -> Array:
        size = part.shape[0]
        before = lax.dynamic_slice_in_dim(whole, tile.start, size)
        after = before + part.astype(whole.dtype)
        return lax.dynamic_update_slice_in_dim(whole, after, tile.start, 0)

    by_stored = _Stored(
        add(by_stored.memories, of_memories),
        None if of_values is None else add(by_stored.values, of_values),
        None,
    )
    by_model, by_y = jax.tree.map(jnp.add, (by_model, by_y), (of_model, of_y))
    return by_model, by_y, by_stored


# --------------------------------------------------------------------------------------
# Memories that the host reads
# --------------------------------------------------------------------------------------


class _Pieces:
    """Rows of an array, a file or an iterator, in blocks of one size."""

    def __init__(self, source: Any, name: str):
        self.name, self.count = name, None
        if isinstance(source, str | Path):
            source = _mapped(source, name)
        if callable(source):
            self.array, self.factory = None, source
            first = next(iter(self._iterate()), None)
            if first is None:
                raise ValueError(f"{name}: the iterator holds no block")
        else:
            first = self.array = np.asarray(source)
            self.count = len(first) if first.ndim else 0
        if first.ndim != 2 or not first.size:
            raise ValueError(
                f"{name} must have shape (n, d), one pattern per row and at least one, "
                f"got {first.shape}"
            )
        if first.dtype.kind not in "biuf" and first.dtype != jnp.bfloat16:
            raise ValueError(f"{name} must be real numbers, got dtype {first.dtype}")
        self.sample = as_floating(np.zeros_like(first[:1]), name)

    def _iterate(self) -> Iterator[np.ndarray]:
        for piece in self.factory():
            piece = np.asarray(piece)
            if piece.ndim != 2:
                raise ValueError(
                    f"{self.name}: blocks must have shape (n, d), got {piece.shape}"
                )
            yield piece

    def size(self, block: int | None) -> int:
        """Rows of a block."""
        bytes_of_row = max(self.sample.nbytes, 1)
        rows = block or max(BLOCK_BYTES // bytes_of_row, 1)
        return rows if self.count is None else min(rows, self.count)

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, int]]:
        """Blocks of `size` rows, the last one padded, and how many of them count."""
        if self.array is not None:
            for start in range(0, len(self.array), size):
                yield _padded(np.asarray(self.array[start : start + size]), size)
            return
        waiting: list[np.ndarray] = []
        held = 0
        for piece in self._iterate():
            while len(piece):
                part, piece = piece[: size - held], piece[size - held :]
                waiting.append(part.copy())  # the iterator may use its buffer again
                held += len(part)
                if held == size:
                    yield np.concatenate(waiting), size
                    waiting, held = [], 0
        if held:
            yield _padded(np.concatenate(waiting), size)

    def take(self, index: np.ndarray, size: int) -> np.ndarray:
        """Rows by number."""
        if self.array is not None:
            return np.asarray(self.array[index])
        found = np.zeros((*index.shape, self.sample.shape[-1]), np.float64)
        start = 0
        for block, count in self.blocks(size):
            here = (index >= start) & (index < start + count)
            found[here] = block[index[here] - start]
            start += count
        return found


def _padded(block: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    count = len(block)
    if count < size:
        block = np.pad(block, ((0, size - count), (0, 0)))
    return block, count


def _mapped(path: str | Path, name: str) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise ValueError(f"{name}: {path} is not a readable .npy file") from None


def _check_values(values: tuple[int, ...], memories: tuple[int, ...]) -> None:
    if len(values) != 2 or values[0] != memories[0]:
        raise ValueError(
            f"values have shape {values}, memories {memories}: all axes but the last "
            "must agree"
        )


class _Read(NamedTuple):
    """What the host reads, as a source."""

    memories: _Pieces
    values: _Pieces | None

    @classmethod
    def of(cls, memories: Any, values: Any, mask: Any) -> "_Read":
        if mask is not None:
            raise ValueError("mask belongs to memories that are a JAX array")
        pieces = _Pieces(memories, "memories")
        if values is None:
            return cls(pieces, None)
        if isinstance(values, jax.core.Tracer):
            raise ValueError("values are traced, but memories are read on the host")
        others = _Pieces(values, "values")
        if others.count is not None and pieces.count is not None:
            width = pieces.sample.shape[-1], others.sample.shape[-1]
            _check_values((others.count, width[1]), (pieces.count, width[0]))
        return cls(pieces, others)

    @property
    def sample(self) -> Array:
        return self.memories.sample

    @property
    def more(self) -> tuple[Array, ...]:
        return () if self.values is None else (self.values.sample,)

    @property
    def length(self) -> int | None:
        return self.memories.count

    def run(self, plan: _Plan, model: _Model, query: Array) -> tuple[Array, ...]:
        if is_traced(query) or any(map(is_traced, jax.tree.leaves(model))):
            raise ValueError(
                "memories are read on the host, which jit, grad and vmap cannot do: "
                "pass a JAX array"
            )
        driver = _OnHost(plan, self)
        parts = []
        for start in range(0, max(len(query), 1), plan.queries):
            rows = slice(start, start + plan.queries)
            parts.append(_run(driver, plan, model.take(rows), query[rows]))
        return tuple(jnp.concatenate(x) for x in zip(*parts, strict=True))


class _OnHost:
    """Passes over blocks: one compiled program, the next block on its way meanwhile."""

    def __init__(self, plan: _Plan, source: _Read):
        self.plan, self.source, self.count = plan, source, source.length
        self.size = source.memories.size(plan.block)
        self.groups = min(GROUPS, plan.tile, self.size)

    def width(self, y: Array, update: bool) -> int:
        if update:
            return y.shape[-1]
        return (self.source.values or self.source.memories).sample.shape[-1]

    def average(self, model: _Model, y: Array, update: bool) -> tuple[Array, Array]:
        return _average(self, model, y, update)

    @staticmethod
    def when(condition: Array, run: Callable[[], Any], otherwise: Any) -> Any:
        return run() if condition else otherwise

    @staticmethod
    def repeat(unfinished, body, carry):
        while unfinished(carry):
            carry = body(carry)
        return carry

    def fold(self, step, model, y, extra, carry, update, active=None):
        if active is not None:
            active = np.flatnonzero(np.asarray(active))
            if len(active) < len(y):
                return self._fold_some(step, model, y, extra, carry, update, active)
        start, run = 0, _compiled()
        with_values = step in (_online, _weigh) and not update
        for memories, values, count in self._placed(with_values):
            arguments = model, y, extra, carry
            place = np.int32(start), np.int32(count)
            after = run(step, self.plan, update, arguments, memories, values, *place)
            jax.block_until_ready(carry)  # no more than two blocks wait
            carry, start = after, start + count
        self.count = start
        return carry

    def _fold_some(self, step, model, y, extra, carry, update, active):
        """The queries that still matter, their number rounded up to a power of two."""
        number = 1 << (len(active) - 1).bit_length()
        index = np.resize(active, number)
        y, extra, own = jax.tree.map(lambda x: x[index], (y, extra, carry))
        found = self.fold(step, model.take(index), y, extra, own, update)
        return jax.tree.map(
            lambda whole, new: whole.at[active].set(new[: len(active)]), carry, found
        )

    def take(self, index: Array) -> tuple[Array, Array | None]:
        source = self.source
        found = [
            None if x is None else x.take(np.asarray(index), self.size)
            for x in (source.memories, source.values)
        ]
        return jax.tree.map(lambda x: jnp.asarray(x).astype(self.plan.dtype), (*found,))

    def _placed(self, with_values: bool) -> Iterator[tuple[Array, Array | None, int]]:
        source = self.source
        values: Iterator[Any] = iter(())
        if with_values and source.values is not None:
            values = source.values.blocks(self.size)
        ahead = None
        for block, count in source.memories.blocks(self.size):
            value = None
            if with_values and source.values is not None:
                value, own = next(values, (None, 0))
                if own != count:
                    raise ValueError("values end before the memories, or after")
            placed = jax.device_put((block, value)), count
            if ahead is not None:
                yield *ahead[0], ahead[1]
            ahead = placed
        if next(values, None) is not None:
            raise ValueError("values end before the memories, or after")
        if ahead is not None:
            yield *ahead[0], ahead[1]


@functools.cache
def _compiled() -> Any:
    """`_fold_block`; on a CPU with vectors of full width, which XLA halves."""
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(
        _fold_block,
        static_argnames=("step", "plan", "update"),
        compiler_options={"xla_cpu_prefer_vector_width": 512} if on_cpu else None,
    )


def _fold_block(step, plan, update, arguments, memories, values, start, count):
    def shifted(model, y, extra, carry, tile: _Tile, update):
        tile = tile._replace(start=tile.start + start)
        return step(model, y, extra, carry, tile, update)

    memories, values = jax.tree.map(lambda x: x.astype(plan.dtype), (memories, values))
    stored = _Stored(memories, values, None)
    return _fold(shifted, plan.tile, plan.dtype, arguments, stored, update, count)
