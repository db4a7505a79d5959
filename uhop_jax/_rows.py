"""A retrieval as arrays: arguments checked once, then mapped over sets and queries.

`Model` has all arguments of a retrieval (shapes as in `uhop_jax.retrieval`). `Row` has
one query and its memory set. `over_rows` maps a function of a row over the leading
axes. Arrays that several rows share are passed on as they are, never tiled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax._checks import (
    as_boolean,
    as_floating,
    as_positive,
    broadcast_rows,
    check_finite,
    wider_dtype,
    working_dtype,
)
from uhop_jax._products import weigh
from uhop_jax._pytree import varying_alike
from uhop_jax.kernels import Kernel
from uhop_jax.separation import Separation, check_separation
from uhop_jax.similarity import Similarity, check_observed, check_patterns


class Model(NamedTuple):
    """All arguments of a retrieval, checked and converted to arrays of one dtype."""

    memories: Array
    query: Array
    values: Array | None
    mask: Array | None
    observed: Array | None
    beta: Array
    separation: Separation
    similarity: Similarity


# Trailing axes of each row-wise argument; the axes before them are the rows.
_ROW_AXES = {"query": 1, "mask": 1, "observed": 1, "beta": 0, "separation": 0}


def model_of(
    memories, query, beta, separation, similarity, values, mask, observed
) -> Model:
    """Checks the arguments of `uhop_jax.retrieve` and converts them.

    Raises:
      ValueError: as `uhop_jax.retrieve` does for these arguments.
    """
    check_separation(separation)
    memories = as_floating(memories, "memories")
    query = as_floating(query, "query")
    check_patterns(memories, query, similarity)
    sets = memories.shape[:-2]
    _check_sets(similarity.kernel, sets)
    if values is not None:
        values = as_floating(values, "values")
        if values.ndim < 2 or values.shape[:-1] != memories.shape[:-1]:
            raise ValueError(
                f"values have shape {values.shape}, memories {memories.shape}: all "
                "axes but the last must agree"
            )
    if sets and all(number == 1 for number in sets):
        memories, values, similarity = _only_set(
            len(sets), memories, values, similarity
        )
        sets = ()
    if sets and query.shape[: len(sets)] != sets or query.ndim <= len(sets):
        raise ValueError(
            f"memories of shape {memories.shape} are {sets} memory sets, so query must "
            f"have shape ({', '.join(map(str, sets))}, ..., d), got {query.shape}"
        )
    rows = query.shape[:-1]
    if mask is not None:
        mask = as_boolean("mask", mask, "true for valid memories")
        broadcast_rows("mask", mask, (*rows, memories.shape[-2]))
    used = _used(mask, len(rows), len(sets))
    dtype = wider_dtype(memories, query)
    if values is not None:
        dtype = wider_dtype(memories, query, values)
        values = values.astype(dtype)
        check_finite("values", values, used)
    observed = check_observed(observed, query)
    working = working_dtype(jnp.zeros((), dtype))
    beta = as_positive("beta", beta, working)
    broadcast_rows("beta", beta, rows)
    for leaf in jax.tree.leaves(separation):
        broadcast_rows("alpha", leaf, rows)
    check_finite("memories", memories, used)
    check_finite("query", query, observed)
    separation = jax.tree.map(jnp.asarray, separation)
    model = Model(
        memories.astype(dtype),
        query.astype(dtype),
        values,
        mask,
        observed,
        beta,
        separation,
        similarity,
    )
    return varying_alike(model)


def _check_sets(kernel: Kernel, sets: tuple[int, ...]) -> None:
    """Refuses a batch of kernels that does not match the memory sets."""
    if not kernel.set_axes:
        return
    if kernel.set_axes != len(sets):
        raise ValueError(
            f"kernel has {kernel.set_axes} axes of memory sets, memories have "
            f"{len(sets)}"
        )
    for leaf in jax.tree.leaves(kernel):
        if leaf.shape[: len(sets)] != sets:
            raise ValueError(
                f"kernel is for {leaf.shape[: len(sets)]} memory sets, memories are "
                f"{sets}"
            )


def _only_set(axes: int, memories: Array, values: Any, similarity: Similarity) -> Any:
    """Drops the axes of memory sets, all of length one, from the arguments."""

    def drop(x: Array) -> Array:
        return x.reshape(x.shape[axes:])

    kernel = similarity.kernel
    if kernel.set_axes:
        similarity = jax.tree.map(drop, similarity)
    return drop(memories), None if values is None else drop(values), similarity


def _used(mask: Array | None, rows: int, sets: int) -> Array | None:
    """Memories that at least one query may use, boolean `(*sets, M, 1)`.

    The mask broadcasts against `rows` axes of queries, of which the first `sets` are
    the axes of the memory sets. Axes that the mask lacks have length one.
    """
    if mask is None:
        return None
    mask = mask.reshape((1,) * (rows + 1 - mask.ndim) + mask.shape)
    return mask.any(axis=tuple(range(sets, rows)))[..., None]


class Row(NamedTuple):
    """One query and its memory set, with the updates that act on the state `y`.

    Attributes:
      keys: features of the memories `(M, D)`.
      values: what the weights average `(M, v)`.
      broken: memories or values that are not finite `(M,)`; None without a mask.
      model: the arguments of this row.
    """

    keys: Array
    values: Array
    broken: Array | None
    model: Model

    def weights(self, y: Array) -> Array:
        """Weights over the memories `(M,)`."""
        model = self.model
        weights = model.separation.tempered(
            self._overlaps(y), model.beta, where=model.mask
        )
        return self._unless_broken(weights)

    def update(self, y: Array) -> Array:
        """The state after one update."""
        similarity, observed = self.model.similarity, self.model.observed
        new = similarity.combine(self.keys, self.weights(y), observed)
        return new.astype(y.dtype)

    def energy(self, y: Array) -> Array:
        """Energy of the state, a scalar."""
        model = self.model
        value = model.separation.tempered_conjugate(
            self._overlaps(y), model.beta, where=model.mask
        )
        self_energy = model.similarity.self_energy(y).astype(value.dtype)
        return self_energy - self._unless_broken(value)

    def start(self) -> Array:
        """The first state `(D,)`, in at least float32."""
        y = self.model.similarity.state(self.model.query, self.model.observed)
        return y.astype(working_dtype(y))

    def read_out(self, y: Array) -> tuple[Array, Array]:
        """The retrieved pattern `(v,)` and the weights over the memories `(M,)`."""
        weights = self.weights(y)
        dtype = self.values.dtype
        return weigh(weights, self.values).astype(dtype), weights.astype(dtype)

    def _overlaps(self, y: Array) -> Array:
        return self.model.similarity.compare(self.keys, y, self.model.observed)

    def _unless_broken(self, result: Array) -> Array:
        """The result, or NaN if the mask allows a memory that is not finite."""
        if self.broken is None or self.model.mask is None:
            return result
        return jnp.where(jnp.any(self.broken & self.model.mask), jnp.nan, result)  # type: ignore[operator]


def over_rows(model: Model, function: Callable[[Row], Any]) -> Any:
    """Maps `function` over memory sets, then over queries; no array is tiled."""
    if model.memories.ndim > 2:
        stacked = model.similarity.kernel.set_axes
        shared = {"memories": 0, "values": 0, "similarity": 0 if stacked else None}
        return _over_axis(model, shared, lambda m: over_rows(m, function), False)

    memories = model.memories
    values = memories if model.values is None else model.values
    broken = None
    if model.mask is not None:
        finite = jnp.isfinite(memories).all(-1) & jnp.isfinite(values).all(-1)
        memories = jnp.where(finite[:, None], memories, 0.0)
        values = jnp.where(finite[:, None], values, 0.0)
        broken = ~finite
    similarity = model.similarity
    local = model.observed is not None and similarity.kernel.local
    keys = memories if local else similarity.keys(memories)

    def rows(model: Model) -> Any:
        if model.query.ndim > 1:
            return _over_axis(model, {}, rows, sequential=local)
        row_keys = similarity.keys(memories, model.observed) if local else keys
        return function(Row(row_keys, values, broken, model))

    return rows(model)


def _over_axis(
    model: Model,
    axes: dict[str, int | None],
    function: Callable[[Model], Any],
    sequential: bool,
) -> Any:
    """Maps `function` over the first axis of the query.

    Args:
      model: arguments whose query has at least two axes.
      axes: by field, the mapped axis of a field that has no rows; None or missing if
        all rows share the field.
      function: of the model without that axis.
      sequential: maps in small batches, in less memory than `jax.vmap`.
    """
    depth, size = model.query.ndim - 1, model.query.shape[0]

    def split(leaf: Array, trailing: int) -> tuple[Array, int | None]:
        if leaf.ndim - trailing < depth:
            return leaf, None
        if leaf.shape[0] == 1 and size != 1:
            return leaf[0], None
        return leaf, 0

    in_axes: dict[str, Any] = {name: axes.get(name) for name in Model._fields}
    for name, trailing in _ROW_AXES.items():
        leaves, structure = jax.tree.flatten(getattr(model, name))
        pairs = [split(leaf, trailing) for leaf in leaves]
        model = model._replace(
            **{name: jax.tree.unflatten(structure, [leaf for leaf, _ in pairs])}
        )
        in_axes[name] = tuple(axis for _, axis in pairs)

    # `vmap` takes a tree of axes, `lax.map` takes mapped leaves only: flatten for both.
    flat_axes = []
    for name in Model._fields:
        count = len(jax.tree.leaves(getattr(model, name)))
        axis = in_axes[name]
        flat_axes += list(axis) if isinstance(axis, tuple) else [axis] * count
    leaves, structure = jax.tree.flatten(model)
    mapped = [leaf for leaf, axis in zip(leaves, flat_axes, strict=True) if axis == 0]

    def call(parts: list[Array]) -> Any:
        slices = iter(parts)
        row_leaves = [
            next(slices) if axis == 0 else leaf
            for leaf, axis in zip(leaves, flat_axes, strict=True)
        ]
        return function(jax.tree.unflatten(structure, row_leaves))

    if sequential:  # each row has keys of its own: a batch bounds their memory
        return lax.map(call, mapped, batch_size=8 if depth == 1 else None)
    return jax.vmap(call)(mapped)
