"""A retrieval as arrays: arguments checked once, then mapped over sets and queries.

`Problem` has all arguments of a retrieval (shapes as in `uhop_jax.retrieval`). `Row`
has one query and its memory set. `over_rows` maps a function of a row over the leading
axes. Arrays that several rows share are passed on as they are, never tiled.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax._checks import (
    as_boolean,
    as_floating,
    check_broadcast,
    check_positive,
    wider_dtype,
    working_dtype,
)
from uhop_jax._products import weigh
from uhop_jax._pytree import varying_alike
from uhop_jax.model import Model, check_model
from uhop_jax.similarity import check_observed, check_patterns, check_sets


class Problem(NamedTuple):
    """All arguments of a retrieval."""

    model: Model
    memories: Array
    query: Array
    values: Array | None
    mask: Array | None
    observed: Array | None

    @property
    def dtype(self) -> Any:
        """The promoted dtype of the patterns."""
        return wider_dtype(
            self.memories, self.query, *(() if self.values is None else (self.values,))
        )

    @property
    def local(self) -> bool:
        """Whether each query needs keys of its own, of its observed components."""
        return self.observed is not None and self.model.similarity.kernel.local


def problem_of(model, memories, query, values, mask, observed) -> Problem:
    """Checks types, shapes, dtypes and numbers, without a look at arrays on the device.

    Raises:
      ValueError: as `uhop_jax.retrieve` does for these arguments.
    """
    check_model(model)
    memories = as_floating(memories, "memories")
    query = as_floating(query, "query")
    check_patterns(memories, query, model.similarity)
    sets = memories.shape[:-2]
    check_sets(model.similarity.kernel, sets)
    if values is not None:
        values = as_floating(values, "values")
        if values.ndim < 2 or values.shape[:-1] != memories.shape[:-1]:
            raise ValueError(
                f"values have shape {values.shape}, memories {memories.shape}: all "
                "axes but the last must agree"
            )
    several = any(number != 1 for number in sets)
    if several and (query.shape[: len(sets)] != sets or query.ndim <= len(sets)):
        raise ValueError(
            f"memories of shape {memories.shape} are {sets} memory sets, so query must "
            f"have shape ({', '.join(map(str, sets))}, ..., d), got {query.shape}"
        )
    rows = query.shape[:-1]
    if mask is not None:
        mask = as_boolean("mask", mask, "true for valid memories")
        check_broadcast("mask", mask, (*rows, memories.shape[-2]))
    observed = check_observed(observed, query)
    check_broadcast("beta", model.beta, rows)
    for leaf in jax.tree.leaves(model.separation):
        check_broadcast("alpha", leaf, rows)
    model = _specialised(model)
    problem = Problem(model, memories, query, values, mask, observed)
    check_positive("beta", model.beta, working_dtype(problem.dtype))
    return problem


def _specialised(model: Model) -> Model:
    """The model with a separation that compiles to less, if its numbers are known.

    Numbers of Python are known; an array may be traced, or lie on a device.
    """
    numbers = jax.tree.leaves(model.separation)
    if not numbers or not all(isinstance(number, float | int) for number in numbers):
        return model
    return dataclasses.replace(model, separation=model.separation.specialised())


def _prepared(problem: Problem) -> Problem:
    """The arguments in their working dtypes, without axes of a single memory set.

    A `beta` that is not positive becomes NaN.
    """
    model, memories, query, values, mask, observed = problem
    dtype = problem.dtype
    sets = memories.ndim - 2
    similarity = model.similarity
    if sets and all(number == 1 for number in memories.shape[:-2]):

        def drop(x: Array) -> Array:
            return x.reshape(x.shape[sets:])

        memories = drop(memories)
        values = None if values is None else drop(values)
        if similarity.kernel.set_axes:
            similarity = jax.tree.map(drop, similarity)
    beta = jnp.asarray(model.beta).astype(working_dtype(dtype))
    beta = jnp.where((beta > 0) & (beta < jnp.inf), beta, jnp.nan)
    separation = jax.tree.map(jnp.asarray, model.separation)
    return varying_alike(
        Problem(
            Model(similarity, separation, beta=beta),
            memories.astype(dtype),
            query.astype(dtype),
            None if values is None else values.astype(dtype),
            mask,
            observed,
        )
    )


class Row(NamedTuple):
    """One query and its memory set, with the updates that act on the state `y`."""

    keys: Array  # features of the memories `(M, D)`
    values: Array  # what the weights average `(M, v)`
    broken: Array | None  # `(M,)`, not finite; None without a mask
    problem: Problem  # the arguments of this row

    def weights(self, y: Array) -> Array:
        """Weights over the memories `(M,)`."""
        model, where = self.problem.model, self.problem.mask
        return self._unless_broken(model.weights(self._overlaps(y), where))

    def update(self, y: Array) -> Array:
        """The state after one update."""
        model, observed = self.problem.model, self.problem.observed
        return model.update(self.keys, self.weights(y), observed).astype(y.dtype)

    def energy(self, y: Array) -> Array | None:
        """Energy of the state, a scalar; None if the model has no energy."""
        model, where = self.problem.model, self.problem.mask
        if not model.has_energy:
            return None
        return self._unless_broken(model.energy(self._overlaps(y), y, where))

    def start(self) -> Array:
        """The first state `(D,)`, in at least float32."""
        similarity = self.problem.model.similarity
        y = similarity.state(self.problem.query, self.problem.observed)
        return y.astype(working_dtype(y))

    def read_out(self, y: Array) -> tuple[Array, Array]:
        """The retrieved pattern `(v,)` and the weights over the memories `(M,)`."""
        weights = self.weights(y)
        dtype = self.values.dtype
        return weigh(weights, self.values).astype(dtype), weights.astype(dtype)

    def _overlaps(self, y: Array) -> Array:
        return self.problem.model.overlaps(self.keys, y, self.problem.observed)

    def _unless_broken(self, result: Array) -> Array:
        """The result, or NaN if the mask allows a memory that is not finite."""
        if self.broken is None or self.problem.mask is None:
            return result
        seen = jnp.any(self.broken & self.problem.mask)
        return jnp.where(seen, jnp.nan, result)


def over_rows(problem: Problem, function: Callable[[Row], Any]) -> Any:
    """Maps `function` over memory sets, then over queries; no array is tiled."""
    return _over_sets(_prepared(problem), function)


def _over_sets(problem: Problem, function: Callable[[Row], Any]) -> Any:
    similarity = problem.model.similarity
    if problem.memories.ndim > 2:
        return _over_axis(problem, True, lambda p: _over_sets(p, function), False)

    memories = problem.memories
    values = memories if problem.values is None else problem.values
    broken = None
    if problem.mask is not None:
        finite = jnp.isfinite(memories).all(-1) & jnp.isfinite(values).all(-1)
        memories = jnp.where(finite[:, None], memories, 0.0)
        values = jnp.where(finite[:, None], values, 0.0)
        broken = ~finite
    local = problem.local
    keys = memories if local else similarity.keys(memories)

    def rows(problem: Problem) -> Any:
        if problem.query.ndim > 1:
            return _over_axis(problem, False, rows, sequential=local)
        row_keys = similarity.keys(memories, problem.observed) if local else keys
        return function(Row(row_keys, values, broken, problem))

    return rows(problem)


def _over_axis(
    problem: Problem, sets: bool, function: Callable[[Problem], Any], sequential: bool
) -> Any:
    """Maps `function` over the first axis of the query, of memory sets too if `sets`.

    If `sequential`, it maps in small batches, in less memory than `jax.vmap`.
    """
    depth, size = problem.query.ndim - 1, problem.query.shape[0]
    leaves: list[Array] = []
    axes: list[int | None] = []

    def shared(tree: Any, mapped: bool) -> Any:
        """Adds arrays that have the axis all, or none."""
        parts, structure = jax.tree.flatten(tree)
        leaves.extend(parts)
        axes.extend([0 if mapped else None] * len(parts))
        return structure

    def by_row(tree: Any, trailing: int) -> Any:
        """Adds arrays with `trailing` axes after the rows, which may lack the axis."""
        parts, structure = jax.tree.flatten(tree)
        for x in parts:
            lacks = x.ndim - trailing < depth
            repeats = not lacks and x.shape[0] == 1 and size != 1
            leaves.append(x[0] if repeats else x)
            axes.append(None if lacks or repeats else 0)
        return structure

    model, memories, query, values, mask, observed = problem
    similarity, separation, beta = model.similarity, model.separation, model.beta
    stacked = sets and similarity.kernel.set_axes
    structures = [
        shared(similarity, bool(stacked)),
        by_row(separation, 0),
        by_row(beta, 0),
        shared(memories, sets),
        by_row(query, 1),
        shared(values, sets),
        by_row(mask, 1),
        by_row(observed, 1),
    ]
    mapped = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis == 0]

    def call(parts: list[Array]) -> Any:
        slices = iter(parts)
        rows = iter(
            [
                next(slices) if axis == 0 else x
                for x, axis in zip(leaves, axes, strict=True)
            ]
        )
        similarity, separation, beta, *arrays = (
            jax.tree.unflatten(s, [next(rows) for _ in range(s.num_leaves)])
            for s in structures
        )
        return function(Problem(Model(similarity, separation, beta=beta), *arrays))

    if sequential:  # each row has keys of its own: a batch bounds their memory
        return lax.map(call, mapped, batch_size=8 if depth == 1 else None)
    return jax.vmap(call)(mapped)
