r"""The footprint similarity of adaptive Hopfield networks, learned from pairs.

Wang et al. (2025, arXiv 2511.20609) compare a memory and a query component by
component, :math:`q_j = \mathrm{sim}(\xi_j, x_j)`, sort these similarities in falling
order, and read out their cumulative sums linearly: :math:`s(\xi, x) = w^T U\,
\mathrm{sort}(q)`. Read-outs of minus the squared distance and of the product are added.
The weights are learned from pairs of memory and query by cross-entropy, so that the
softmax of `s` is the posterior of the memory that a query came from.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from uhop_jax._checks import (
    as_floating,
    check_count,
    check_key,
    check_memory_set,
    wider_dtype,
    working_dtype,
)
from uhop_jax._fast import descending
from uhop_jax._pytree import varying_alike
from uhop_jax.kernels import Identity, Kernel
from uhop_jax.similarity import Similarity, check_patterns, check_sets
from uhop_jax.trials import corrupted_copies

COMPARISONS = 100_000  # about how many memories and queries are compared in learning
PAIRS = 1000  # most pairs that are made
SCALES = 64  # entries of each footprint that are learned
STEPS, RATE = 200, 0.1  # of Adam, as published; the rate falls
_ROWS = 8  # queries whose components are sorted at a time


class Footprint(Similarity):
    r"""A linear read-out of sorted similarities of components.

    :math:`s(\xi, x) = \sum_k a_k q^{(k)} + \sum_k b_k r^{(k)}`, where `q^(k)` is the
    `k`-th largest of :math:`-(\xi_j - x_j)^2` and `r^(k)` the `k`-th largest of
    :math:`\xi_j x_j`. A read-out `w` of cumulative sums has the weights :math:`a = U^T
    w`. Equal weights give `NegativeSquaredL2` and `Dot`. Components that are not
    observed come last and count for nothing.

    A call sorts `d` numbers for each pair of memory and query, twice. No energy is
    known that an update never raises.

    Attributes:
      distance: `a (D,)`, by rank; `D` is the dimension of the features.
      product: `b (D,)`, by rank.
    """

    distance: Float[Array, " D"] = dataclasses.field(kw_only=True)
    product: Float[Array, " D"] = dataclasses.field(kw_only=True)

    def _compare(self, keys, state, restrict):
        D = keys.shape[-1]
        for name in ("distance", "product"):
            x = getattr(self, name)
            if jnp.shape(x) != (D,):
                raise ValueError(
                    f"{name} of Footprint must have shape ({D},), the dimension of the "
                    f"features, got {jnp.shape(x)}"
                )
        dtype = wider_dtype(keys, state, jnp.zeros((), jnp.float32))
        rows = state.reshape(-1, D).astype(dtype)
        if restrict is not None:
            restrict = jnp.broadcast_to(restrict, state.shape).reshape(-1, D)
        weights = tuple(jnp.asarray(x, dtype) for x in (self.distance, self.product))
        keys, rows, weights = varying_alike((keys.astype(dtype), rows, weights))

        def row(pair: tuple[Array, Array | None]) -> Array:
            parts = zip(_footprints(keys, *pair), weights, strict=True)
            return sum((q * w[None]).sum(-1) for q, w in parts)  # type: ignore[return-value]

        overlaps = lax.map(row, (rows, restrict), batch_size=_ROWS)
        return overlaps.reshape(*state.shape[:-1], len(keys))


def _footprints(
    keys: Array, state: Array, observed: Array | None
) -> tuple[Array, Array]:
    """Similarities of components `(M, D)` in falling order: distances, and products."""

    def ordered(similarity: Array) -> Array:
        if observed is None:
            return descending(similarity)
        low = -jnp.full_like(similarity, jnp.inf)
        order = descending(jnp.where(observed[None], similarity, low))
        return jnp.where(order == -jnp.inf, 0.0, order)

    return ordered(-((keys - state[None]) ** 2)), ordered(keys * state[None])


def fit_footprint(
    key: PRNGKeyArray,
    memories: Float[Array, "M d"],
    corrupt: Callable[[PRNGKeyArray, Array], Any],
    *,
    kernel: Kernel = Identity(),
    pairs: int | None = None,
    scales: int = SCALES,
) -> Footprint:
    r"""Learns a footprint similarity from corrupted copies of the memories.

    The loss is the cross-entropy of the memory that a copy came from, under the softmax
    of the similarity over all memories. Adam lowers it in 200 steps from the rate 0.1,
    as published but for the fall of the rate to zero: a constant rate may end badly.
    The footprint is learned at some of its `d` scales, and each of its entries is
    divided by its standard deviation: the publication does not say how entries of
    different sizes are treated.

    Args:
      key: random key.
      memories: stored patterns, one per row.
      corrupt: the corruption that pairs are made with, as in `calibrate`.
      kernel: the features whose components are compared.
      pairs: number of copies, each compared with all memories; None is the number that
        gives 100,000 comparisons, from 1 to 1,000.
      scales: number of entries of each footprint, evenly spread; at most `d` are used.

    Returns:
      The similarity, whose natural `beta` is 1. It is constant to derivatives in the
      memories.

    Raises:
      ValueError: if an argument is out of range, or the features of memories depend on
        which components of a copy are observed.
    """
    check_key(key)
    check_count("scales", scales, 1)
    memories = as_floating(memories, "memories")
    check_memory_set(memories, distinct=False)
    if memories.ndim != 2:
        raise ValueError(f"memories must have shape (M, d), got {memories.shape}")
    start = jnp.zeros(memories.shape[-1], memories.dtype)
    empty = Footprint(kernel=kernel, distance=start, product=start)
    check_patterns(memories, memories, empty)
    check_sets(kernel)
    M = len(memories)
    if pairs is None:
        pairs = min(PAIRS, max(1, COMPARISONS // M))
    check_count("pairs", pairs, 1)
    memories = lax.stop_gradient(memories.astype(working_dtype(memories)))
    query, observed, target = corrupted_copies(key, memories, corrupt, pairs)
    if observed is not None and kernel.local:
        raise ValueError(
            "kernel: copies with components that are not observed need features of "
            f"memories that do not depend on them, got {type(kernel).__name__}"
        )
    keys = kernel.memory_features(memories)
    states = kernel.query_features(query, observed)
    D = keys.shape[-1]
    # The last rank of each scale.
    ends = np.unique(np.linspace(0, D, min(scales, D) + 1).round().astype(int))[1:]
    features = _entries(keys, states, observed, tuple(ends.tolist()))
    weights = _learned(features, target, STEPS)
    # A scale is a cumulative sum: its weight counts for all ranks up to its last.
    by_rank = jnp.cumsum(weights[:, ::-1], -1)[:, ::-1]
    by_rank = by_rank[:, np.searchsorted(ends, np.arange(D) + 1)]
    return Footprint(kernel=kernel, distance=by_rank[0], product=by_rank[1])


@functools.partial(jax.jit, static_argnames="ends")
def _entries(
    keys: Array, states: Array, observed: Array | None, ends: tuple[int, ...]
) -> Array:
    """Entries `(P, M, 2, scales)` of the footprints: cumulative sums up to `ends`."""
    last = np.asarray(ends) - 1

    def row(pair: tuple[Array, Array | None]) -> Array:
        ordered = jnp.stack(_footprints(keys, *pair), 1)
        return jnp.cumsum(ordered, -1)[..., last]

    return lax.map(row, (states, observed), batch_size=_ROWS)


@functools.partial(jax.jit, static_argnames="steps")
def _learned(features: Array, target: Array, steps: int) -> Array:
    """Weights `(2, scales)` of the entries, by Adam."""
    scale = features.std((0, 1))
    scale = jnp.maximum(scale, 1e-3 * scale.max())
    scale = jnp.where(scale == 0, 1.0, scale)
    scaled = features / scale[None, None]
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps))

    def loss(weights: Array) -> Array:
        logits = jnp.einsum("pmks,ks->pm", scaled, weights, precision="highest")
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

    def step(carry, _):
        weights, state = carry
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes dtypes
            updates, state = optimizer.update(jax.grad(loss)(weights), state)
        return (optax.apply_updates(weights, updates), state), None

    start = jnp.zeros_like(scale)
    return lax.scan(step, (start, optimizer.init(start)), None, length=steps)[0][0]
