r"""Retrieval from more memories than fit: the same dynamics, a block at a time.

Every separation here weighs a memory by its own overlap and one number of the query,
:math:`p_\mu = f(z_\mu, \theta)`, such as the log-normaliser of softmax or the threshold
of sparsemax. So memories can pass in blocks, in any order of sizes: overlaps are
computed, used and forgotten, never more than a tile of them at a time.

- `Softmax`, `Softmax1`, `Polynomial`: one pass. The sums refer to one of the largest
  overlaps so far and are rescaled when a much larger one comes.
- `Sparsemax`, `Entmax`: a pass for the two largest of groups of memories, whose own
  threshold is a lower bound of the one sought, and equal to it unless three memories of
  a support share a group; Newton passes, where many memories are in a support; a pass
  for the weighted sum, which skips every tile without support; and all of it again for
  the queries whose weights then sum to more than one. `alpha > 2` takes passes for the
  lowest overlap of the support and its weight instead, about ten, or forty to seventy
  where many memories are in a support.
- `TopK`: a pass that keeps the `k` largest, which are then fetched.

Each algorithm is written once, in `_passes.average`. Two drivers run it, one in a
compiled loop over an array (`_device`), one over blocks that come from a file or an
iterator, the next on its way while the device works (`_host`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from uhop_jax._checks import (
    as_floating,
    as_positive,
    broadcast_rows,
    check_count,
    check_finite,
    wider_dtype,
    working_dtype,
)
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
from uhop_jax.similarity import Dot, Similarity, check_observed, check_patterns
from uhop_jax.streaming._device import Stored
from uhop_jax.streaming._host import Read
from uhop_jax.streaming._passes import Model, Plan, check_numbers

__all__ = ["Streamed", "retrieve_streamed"]

STREAMED = (Softmax, Softmax1, Sparsemax, Entmax, Polynomial, TopK)
TILE = 2**19  # overlaps at a time: what stays in the cache of a core
TILE_ROWS = 8192  # memories in a tile, at most
QUERY_BLOCK = 256
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
    observed: Bool[Array, "*#batch d"] | None = None,
    top: int = 0,
    block: int | None = None,
    query_block: int | None = None,
) -> Streamed:
    r"""`uhop_jax.retrieve` [eqn:ret-dyn], holding a block of memories at a time.

    A JAX array is read where it lies, inside one compiled program that can be jitted,
    mapped and differentiated once in everything but the masks (reverse mode; overlaps
    are computed again, block by block; for an `alpha` above 6, whose derivatives are
    large, with ever fewer digits). Anything else is read on the host and cannot be
    differentiated: a NumPy array, memory-mapped or not; the path of a `.npy` file,
    which is then mapped; or a function without arguments that returns an iterator over
    arrays `(n, d)` of any lengths, called once for every pass: each time a new one,
    over the same rows. Such memories are not searched for NaN beforehand; one that is
    found shows in the result.

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
      observed: true for known components of the query, with one step; not for linear
        kernels, which would see other memories for each query.
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
    observed = check_observed(observed, query)
    check_finite("query", query, observed)
    stored: Any = Stored if isinstance(memories, jax.Array) else Read
    source = stored.of(memories, values, mask)
    check_patterns(source.sample, query, similarity)
    check_numbers(separation, top, source.length)
    rows, d = query.shape[:-1], query.shape[-1]
    number = int(np.prod(rows))
    kernel = similarity.kernel
    if kernel is not None and kernel.set_axes:
        raise ValueError(
            f"kernel has {kernel.set_axes} axes of memory sets, memories have 0"
        )
    if steps > 1:
        check_iterable(similarity)
    if observed is not None:
        if steps > 1:
            raise ValueError(f"observed is streamed with steps 1, got steps {steps}")
        if kernel is not None and kernel.local:
            raise ValueError(
                "observed is streamed without a kernel or with LikelihoodKernel, "
                f"got {type(kernel).__name__}"
            )
        observed = jnp.broadcast_to(observed, query.shape).reshape(number, d)
    dtype = wider_dtype(source.sample, query, *source.more)
    working = working_dtype(jnp.zeros((), dtype))
    beta = as_positive("beta", beta, working)

    def each(name: str, x: Any) -> Array:
        return broadcast_rows(name, x, rows).astype(working).reshape(number)

    separation = jax.tree.map(functools.partial(each, "alpha"), separation)
    model = Model(similarity, separation, each("beta", beta), observed)
    size = min(query_block or QUERY_BLOCK, max(number, 1))
    tile = min(TILE_ROWS, max(TILE // size, 1), block or TILE_ROWS)
    plan = Plan(steps, top, tile, size, block, dtype)
    found = source.run(plan, model, query.astype(dtype).reshape(number, d))
    return Streamed(*(x.reshape(*rows, *x.shape[1:]) for x in found))
