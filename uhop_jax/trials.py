"""Many models on the same corrupted copies, in one compiled program.

Models are tried at many inverse temperatures: their overlaps are computed once, and
errors follow without the retrieved patterns where that is cheaper.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from uhop_jax._products import contract, gram_matrix, shifted, weigh
from uhop_jax.corruption import Corruption
from uhop_jax.similarity import Similarity

SHARPNESS = (0.1, 1000.0, 17)  # first, last and number of beta * spread on a log grid


def corrupted_copies(
    key: PRNGKeyArray,
    memories: Float[Array, "M d"],
    corrupt: Callable[[PRNGKeyArray, Array], Any],
    number: int,
) -> tuple[Float[Array, "Q d"], Bool[Array, "Q d"] | None, Int[Array, " Q"]]:
    """Corrupted copies of the memories, and the memory of each copy.

    Args:
      key: random key.
      memories: stored patterns, one per row.
      corrupt: as in `calibrate`.
      number: `Q`, how many copies; the numbers of copies of two memories differ by at
        most one.

    Returns:
      The queries, `observed` (None if the corruption does not return it), and the index
      of the memory of each query.

    Raises:
      ValueError: if the corruption changes the shape of patterns.
    """
    draw_key, corrupt_key = jax.random.split(key)
    M = memories.shape[0]
    order = jnp.arange(M)
    if number % M:
        order = jax.random.permutation(draw_key, order)
    target = jnp.tile(order, -(-number // M))[:number]
    query, observed = Corruption.of(corrupt)(corrupt_key, memories[target])
    return query, observed, target


def sweep_errors(
    memories: Float[Array, "M d"],
    overlaps: Float[Array, "Q M"],
    target: Int[Array, " Q"],
    weights: Callable[[Array, Array], Array],
    betas: Float[Array, " B"],
) -> Float[Array, " B"]:
    """Mean squared error of one retrieval step at each inverse temperature.

    Args:
      memories: stored patterns, one per row.
      overlaps: overlap of each query with each memory.
      target: index of the memory that each query should retrieve.
      weights: weights over the memories, of overlaps and an inverse temperature.
      betas: inverse temperatures.

    Returns:
      Mean over the queries of the sum of squared component differences.
    """
    M, d = memories.shape
    if M >= d:

        def squared(weights: Array) -> Array:
            return ((weigh(weights, memories) - memories[target]) ** 2).sum(-1)
    else:  # in the span of the memories; the origin is their mean: nothing cancels
        mean = memories.mean(0)
        gram = gram_matrix(shifted(memories, mean))
        along = contract(mean, shifted(memories, mean))
        target_weights = jax.nn.one_hot(target, M, dtype=memories.dtype)

        def squared(weights: Array) -> Array:
            q = weights - target_weights
            total = q.sum(-1)  # zero if the weights sum to one
            q_gram = contract(q, gram)
            inside = (q_gram * q).sum(-1) + 2 * total * contract(q, along[None])[..., 0]
            return inside + total**2 * (mean * mean).sum()

    return lax.map(lambda beta: squared(weights(overlaps, beta)).mean(), betas)


def beta_grid(
    overlaps: Float[Array, "Q M"], sharpness: tuple[float, float, int] = SHARPNESS
) -> Float[Array, " B"]:
    """Inverse temperatures of a sweep, from nearly uniform to nearly one-hot weights.

    The first is 1, the natural inverse temperature of a log-likelihood. The others are
    a log grid in units of the inverse spread of the overlaps, so that the grid suits
    every similarity at any scale.

    Args:
      overlaps: overlap of each query with each memory.
      sharpness: first and last value of `beta * spread`, and their number.

    Returns:
      The inverse temperatures, one more than the number in `sharpness`.
    """
    spread = jnp.std(overlaps, axis=-1).mean()
    # Equal overlaps have no spread: the bound keeps their betas finite.
    spread = jnp.maximum(spread, sharpness[1] * float(jnp.finfo(overlaps.dtype).tiny))
    grid = jnp.geomspace(*sharpness, dtype=overlaps.dtype) / spread
    return jnp.concatenate([jnp.ones(1, overlaps.dtype), grid])


def overlaps_of(
    similarities: tuple[Similarity, ...],
    index: Array,
    memories: Array,
    query: Array,
    observed: Array | None,
) -> Array:
    """Overlaps `(Q, M)` of the similarity at the traced `index`, as `with_one_of`."""
    return with_one_of(
        similarities, index, lambda s: s(memories, query, observed=observed)
    )


def with_one_of(items: Sequence[Any], index: Array, call: Callable[[Any], Any]) -> Any:
    """`call(items[index])` for a traced index.

    Items with the same pytree structure and the same shapes share one compiled branch.
    """
    groups: dict[Any, list[int]] = {}
    for number, item in enumerate(items):
        leaves, structure = jax.tree.flatten(item)
        kind = (structure, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))
        groups.setdefault(kind, []).append(number)
    group = np.zeros(len(items), np.int32)
    position = np.zeros(len(items), np.int32)
    branches = []
    for number, members in enumerate(groups.values()):
        group[members], position[members] = number, np.arange(len(members))
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(items[i] for i in members))

        def branch(place: Array, stacked: Any = stacked) -> Any:
            return call(jax.tree.map(lambda x: x[place], stacked))

        branches.append(branch)
    place = jnp.asarray(position)[index]
    return lax.switch(jnp.asarray(group)[index], branches, place)
