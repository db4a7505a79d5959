r"""Retrieval from more memories than fit on the device, a block at a time.

The weight of a memory, under the separations here, depends on the memory's own overlap
and on one number of the query: :math:`p_\mu = f(z_\mu, \theta)`. For softmax the number
is the log-normaliser, for sparsemax the threshold. Memories can therefore pass in
blocks of any size, and only the overlaps of one tile are in memory at a time.

- `Softmax`, `Softmax1`, `Polynomial`: one pass. The sums are relative to a reference
  overlap, and are rescaled when a much larger overlap comes.
- `Sparsemax`, `Entmax`: the first pass keeps the two largest overlaps of each group of
  memories. The threshold of these overlaps is a lower bound of the true threshold; both
  are equal unless three memories of a support share a group. Newton passes follow if
  many memories are in a support. The last pass computes the weighted sum and skips
  every tile without support. Newton passes and the last pass are repeated for queries
  whose weights sum to more than one. An `alpha > 2` has no such threshold: passes find
  the lowest overlap of the support and its weight, about ten passes, or forty to
  seventy if many memories are in a support.
- `TopK`: one pass keeps the `k` largest overlaps; their patterns are then fetched.
- Any other separation: all overlaps of a block of queries are in memory at once.

The `form` of a separation chooses the algorithm. Each algorithm is written once, in
`_passes.average`, and two drivers run it. `_device` is a compiled loop over an array.
`_host` reads blocks from a file or an iterator, and transfers the next block while the
device works.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import (
    as_floating,
    as_positive,
    broadcast_rows,
    check_count,
    wider_dtype,
    working_dtype,
)
from uhop_jax.model import Model, check_model
from uhop_jax.retrieval import check_iterable
from uhop_jax.similarity import check_observed, check_patterns, check_sets
from uhop_jax.streaming._device import ArraySource, check_unsplit
from uhop_jax.streaming._host import HostSource
from uhop_jax.streaming._passes import check_numbers
from uhop_jax.streaming._tiles import Plan, QueryModel

__all__ = ["Streamed", "retrieve_streamed"]

TILE = 2**19  # overlaps in a tile, which fit into the cache of a core
TILE_ROWS = 8192  # memories in a tile, at most
QUERY_BLOCK = 256  # queries in a block, by default
Source = Any  # Array | np.ndarray | str | Path | Blocks


class Streamed(NamedTuple):
    """Result of `retrieve_streamed`.

    Attributes:
      state: `(..., d)`, the retrieved pattern (or value).
      weights: `(..., top)`, the largest weights of the last update, in falling order.
      nearest: `(..., top)`, int32, the indices of the memories with these weights.
    """

    state: Float[Array, "*batch d"]
    weights: Float[Array, "*batch top"]
    nearest: Int[Array, "*batch top"]


def retrieve_streamed(
    model: Model,
    memories: Source,
    query: Float[Array, "*batch d"],
    *,
    steps: int = 1,
    values: Source | None = None,
    mask: Bool[Array, " M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
    top: int = 0,
    block: int | None = None,
    query_block: int | None = None,
) -> Streamed:
    r"""`uhop_jax.retrieve` [eqn:ret-dyn] with one block of memories at a time.

    A JAX array is read on its device, in one compiled program. The program works under
    `jax.jit` and `jax.vmap`, and has first derivatives (reverse mode) in everything but
    the masks. The backward pass computes the overlaps again, tile by tile. Derivatives
    for an `alpha` above 6 are large and lose digits as `alpha` grows.

    Other sources are read on the host and have no derivatives: a NumPy array,
    memory-mapped or not; the path of a `.npy` file, which is memory-mapped; or a
    function without arguments that returns an iterator over arrays `(n, d)`, with any
    `n`. The function is called once for every pass, and must return a new iterator over
    the same rows each time. These memories are not checked for NaN; a NaN in a memory
    makes the result NaN.

    Args:
      model: similarity, separation and inverse temperature; `beta` and the parameters
        of the separation broadcast against the leading axes of `query`.
      memories: stored patterns `(M, d)`, one per row.
      query: initial states.
      steps: number of updates, at least 1.
      values: patterns `(M, v)` that the last weights average, a source of the same kind
        as `memories`; the memories by default.
      mask: true for valid memories, the same for all queries; for JAX arrays alone.
      observed: true for known components of the query; needs `steps=1`. Not for linear
        kernels, whose features of a memory would differ from query to query.
      top: number of largest weights to report; costs a pass.
      block: number of memories in a block, at least 1; None chooses it by their size.
      query_block: number of queries in a block, at least 1; None is 256. Memories on
        the host are read again for each block of queries.

    Returns:
      `Streamed`, in the promoted dtype of `memories` and `query`.

    Raises:
      ValueError: as in `retrieve`; or if a source cannot be read, a separation cannot
        be streamed, an array is split over mesh axes of type `AxisType.Explicit`, or a
        second derivative is taken.
    """
    check_count("steps", steps, 1)
    check_count("top", top, 0)
    for name, size in (("block", block), ("query_block", query_block)):
        if size is not None:
            check_count(name, size, 1)
    check_model(model)
    similarity, separation = model.similarity, model.separation
    query = as_floating(query, "query")
    observed = check_observed(observed, query)
    stored: Any = ArraySource if isinstance(memories, jax.Array) else HostSource
    source = stored.of(memories, values, mask)
    check_unsplit(
        model=model,
        memories=memories,
        query=query,
        values=values,
        mask=mask,
        observed=observed,
    )
    check_patterns(source.sample, query, similarity)
    check_numbers(separation, top, source.length)
    rows, d = query.shape[:-1], query.shape[-1]
    number = int(np.prod(rows))
    kernel = similarity.kernel
    check_sets(kernel)
    if steps > 1:
        check_iterable(similarity)
    if observed is not None:
        if steps > 1:
            raise ValueError(f"observed is streamed with steps 1, got steps {steps}")
        if kernel.local:
            raise ValueError(
                "observed is streamed without a kernel or with LikelihoodKernel, "
                f"got {type(kernel).__name__}"
            )
        observed = jnp.broadcast_to(observed, query.shape).reshape(number, d)
    dtype = wider_dtype(source.sample, query, *source.value_samples)
    working = working_dtype(dtype)
    beta = as_positive("beta", model.beta, working)

    def each(name: str, x: Any) -> Array:
        return broadcast_rows(name, x, rows).astype(working).reshape(number)

    separation = jax.tree.map(functools.partial(each, "alpha"), separation)
    queries = QueryModel(similarity, separation, observed, beta=each("beta", beta))
    size = min(query_block or QUERY_BLOCK, max(number, 1))
    tile = min(TILE_ROWS, max(TILE // size, 1), block or TILE_ROWS)
    plan = Plan(steps, top, tile, size, block, dtype)
    results = source.run(plan, queries, query.astype(dtype).reshape(number, d))
    return Streamed(*(x.reshape(*rows, *x.shape[1:]) for x in results))
