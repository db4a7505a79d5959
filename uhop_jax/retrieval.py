r"""Retrieval dynamics: energy, updates, iteration to a fixed point.

One update is :math:`T(x) = \mathrm{sep}(\beta K(\Xi, x))\, \Xi` [lemma:retrieval_dyn].
The functions here apply it a fixed number of times (`retrieve`), until nothing moves
(`converge`), or keeping every state (`trajectory`). All share one set of arguments:

- `memories (M, d)`, one pattern per row, shared by all queries and never tiled; or
  `(sets, M, d)`, one memory set for each entry of the first axis of the query (an axis
  of one is shared).
- `query (..., d)`; every leading axis is a batch of independent retrievals.
- `beta`, and the parameters of the separation such as `alpha`: numbers, or arrays that
  broadcast against the leading axes of the query.
- `mask (..., M)`: true for valid memories. What a masked memory holds, NaN included,
  reaches neither a result nor a gradient; a query without a valid memory retrieves
  zero.
- `observed (..., d)`: true for the known components of the query; overlaps and norms
  are over those alone.

Values are checked only outside of `jax.jit`, where they are known; shapes always. Half
precision sums in float32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from uhop_jax._checks import (
    as_floating,
    broadcast_rows,
    check_count,
    check_finite,
    check_positive,
    wider_dtype,
    working_dtype,
)
from uhop_jax._products import weigh
from uhop_jax.separation import SEPARATIONS, Separation, Softmax
from uhop_jax.similarity import (
    Dot,
    Similarity,
    check_observed,
    check_patterns,
)


class Retrieval(NamedTuple):
    """Result of `retrieve`.

    Attributes:
      state: `(..., d)`, the retrieved pattern (or value).
      weights: `(..., M)`, those of the last update.
    """

    state: Float[Array, "*batch d"]
    weights: Float[Array, "*batch M"]


class Convergence(NamedTuple):
    """Result of `converge`, row by row.

    Attributes:
      state: `(..., d)`, the retrieved pattern (or value).
      weights: `(..., M)`, those of the last update.
      energy: `(...)`, at the state; None if the model has no energy.
      steps: `(...)`, int32, updates used.
      converged: `(...)`, whether the state moved by no more than the tolerance.
    """

    state: Float[Array, "*batch d"]
    weights: Float[Array, "*batch M"]
    energy: Float[Array, "*batch"] | None
    steps: Int[Array, "*batch"]
    converged: Bool[Array, "*batch"]


class Trajectory(NamedTuple):
    """Result of `trajectory`.

    Attributes:
      states: `(..., steps + 1, d)`, the query and the state after each update.
      energies: `(..., steps + 1)`, at those states; None if the model has no energy.
    """

    states: Float[Array, "*batch steps_plus_1 d"]
    energies: Float[Array, "*batch steps_plus_1"] | None


def retrieve(
    memories: Float[Array, "*sets M d"],
    query: Float[Array, "*batch d"],
    *,
    beta: ArrayLike,
    separation: Separation = Softmax(),
    similarity: Similarity = Dot(),
    steps: int = 1,
    values: Float[Array, "*sets M v"] | None = None,
    mask: Bool[Array, "*#batch M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
) -> Retrieval:
    r"""Applies `steps` updates of the retrieval dynamics [eqn:ret-dyn].

    With one step and `Softmax` this is attention with keys `memories` and values
    `values`.

    Args:
      memories: stored patterns.
      query: initial states.
      beta: inverse temperature, positive; it multiplies the overlaps, inside the
        separation.
      separation: maps scaled overlaps to weights over the memories.
      similarity: overlap of states with memories; larger is closer.
      steps: number of updates, at least 1.
      values: what the last weights average, `(M, v)`; the memories by default. Earlier
        updates always average the memories (hetero-association).
      mask: true for valid memories.
      observed: true for known components of the query.

    Returns:
      `Retrieval` in the promoted dtype of `memories` and `query`.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    check_count("steps", steps, 1)
    model = _model(
        memories, query, beta, separation, similarity, values, mask, observed
    )
    if steps > 1 and model.similarity.kernel is not None:
        _check_iterable(model.similarity)
    return _retrieve(model, steps)


def converge(
    memories: Float[Array, "*sets M d"],
    query: Float[Array, "*batch d"],
    *,
    beta: ArrayLike,
    separation: Separation = Softmax(),
    similarity: Similarity = Dot(),
    max_steps: int = 256,
    tolerance: ArrayLike | None = None,
    values: Float[Array, "*sets M v"] | None = None,
    mask: Bool[Array, "*#batch M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
) -> Convergence:
    r"""Applies updates to each row until its state stands still [lemma:convergence].

    A row stops by itself, so that it does not depend on the rows beside it. Gradients
    are those of the fixed point (implicit function theorem): exact where the row has
    converged, zero in `query`, and in memory that does not grow with the number of
    steps.

    Args:
      memories: stored patterns.
      query: initial states.
      beta: inverse temperature, positive.
      separation: maps scaled overlaps to weights over the memories.
      similarity: overlap of states with memories; larger is closer.
      max_steps: cap on the updates of a row, at least 1.
      tolerance: a row has converged once no component of its state moves by more than
        this, relative to the largest component; None is 16 units of rounding.
      values: what the last weights average; the memories by default.
      mask: true for valid memories.
      observed: true for known components of the query.

    Returns:
      `Convergence`; rows that reached the cap have `converged` false.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    check_count("max_steps", max_steps, 1)
    model = _model(
        memories, query, beta, separation, similarity, values, mask, observed
    )
    _check_iterable(model.similarity)
    if tolerance is None:
        tolerance = 16 * float(jnp.finfo(working_dtype(model.query)).eps)
    check_positive("tolerance", tolerance)
    return _converge(model, max_steps, tolerance)


def trajectory(
    memories: Float[Array, "*sets M d"],
    query: Float[Array, "*batch d"],
    *,
    beta: ArrayLike,
    separation: Separation = Softmax(),
    similarity: Similarity = Dot(),
    steps: int = 10,
    mask: Bool[Array, "*#batch M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
) -> Trajectory:
    """Every state on the way, and its energy.

    Args:
      memories: stored patterns.
      query: initial states.
      beta: inverse temperature, positive.
      separation: maps scaled overlaps to weights over the memories.
      similarity: overlap of states with memories; larger is closer.
      steps: number of updates, at least 1.
      mask: true for valid memories.
      observed: true for known components of the query.

    Returns:
      `Trajectory`, the query itself first.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    check_count("steps", steps, 1)
    model = _model(memories, query, beta, separation, similarity, None, mask, observed)
    _check_iterable(model.similarity)
    return _trajectory(model, steps)


def energy(
    memories: Float[Array, "*sets M d"],
    query: Float[Array, "*batch d"],
    *,
    beta: ArrayLike,
    separation: Separation = Softmax(),
    similarity: Similarity = Dot(),
    mask: Bool[Array, "*#batch M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
) -> Float[Array, "*batch"]:
    r"""Energy of states, which an update never raises.

    - `Dot`: :math:`K(x, x)/2 - \Psi^\star(\beta, K(\Xi, x))` [eqn:eng-fn], with the
      conjugate :math:`\Psi^\star(\beta, z) = \mathrm{conjugate}(\beta z)/\beta` (the
      factor :math:`1/\beta`, which the paper omits for `alpha = 2`, is needed).
    - `Cosine`: :math:`-\Psi^\star(\beta, \bar K(\Xi, x))`.
    - `NegativeSquaredL2`: :math:`-\Psi^\star(\beta, -\|\Xi - x\|^2)`.

    Args:
      memories: stored patterns.
      query: states.
      beta: inverse temperature, positive.
      separation: the separation whose conjugate is used.
      similarity: overlap of states with memories.
      mask: true for valid memories.
      observed: true for known components of the query.

    Returns:
      One energy a state, in the working dtype (float32 for half precision).

    Raises:
      ValueError: if the model has no energy, or as in `retrieve`.
    """
    model = _model(memories, query, beta, separation, similarity, None, mask, observed)
    if not has_energy(model.separation, model.similarity):
        raise ValueError(
            f"no energy is known that {_name(model.similarity)} with "
            f"{_name(model.separation)} never raises"
        )
    return _energy(model)


def has_energy(separation: Separation, similarity: Similarity) -> bool:
    """Whether the model has an energy that its update never raises."""
    return (
        separation.has_conjugate
        and similarity.has_energy()
        and (separation.normalized or not similarity.needs_normalized)
    )


class _Model(NamedTuple):
    """All arguments, checked and converted; see the module docstring for shapes."""

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


def _model(
    memories, query, beta, separation, similarity, values, mask, observed
) -> _Model:
    if not isinstance(separation, Separation):
        raise ValueError(
            f"separation must be one of {', '.join(c.__name__ for c in _CLASSES)}, "
            f"got {separation!r}"
        )
    separation.check()
    memories = as_floating(memories, "memories")
    query = as_floating(query, "query")
    while memories.ndim > 2 and memories.shape[0] == 1:
        memories = memories[0]
        values = values if values is None else values[0]
    check_patterns(memories, query, similarity)
    sets = memories.shape[:-2]
    if sets and query.shape[: len(sets)] != sets or query.ndim <= len(sets):
        raise ValueError(
            f"memories of shape {memories.shape} are {sets} memory sets, so query must "
            f"have shape ({', '.join(map(str, sets))}, ..., d), got {query.shape}"
        )
    kernel = similarity.kernel
    if kernel is not None and kernel.set_axes not in (0, len(sets)):
        raise ValueError(
            f"kernel has {kernel.set_axes} axes of memory sets, memories have "
            f"{len(sets)}"
        )
    rows = query.shape[:-1]
    dtype = wider_dtype(memories, query)
    if values is not None:
        values = as_floating(values, "values")
        if values.ndim < 2 or values.shape[:-1] != memories.shape[:-1]:
            raise ValueError(
                f"values have shape {values.shape}, memories {memories.shape}: all "
                "axes but the last must agree"
            )
        dtype = wider_dtype(memories, query, values)
        values = values.astype(dtype)
        check_finite("values", values, _used(mask, sets))
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != jnp.bool_:
            raise ValueError(
                "mask must be boolean (true for valid memories), got dtype "
                f"{mask.dtype}"
            )
        broadcast_rows("mask", mask, (*rows, memories.shape[-2]))
    observed = check_observed(observed, query)
    check_positive("beta", beta)
    beta = jnp.asarray(beta).astype(working_dtype(jnp.zeros((), dtype)))
    broadcast_rows("beta", beta, rows)
    for leaf in jax.tree.leaves(separation):
        broadcast_rows("alpha", leaf, rows)
    check_finite("memories", memories, _used(mask, sets))
    check_finite("query", query, observed)
    separation = jax.tree.map(jnp.asarray, separation)
    return _Model(
        memories.astype(dtype),
        query.astype(dtype),
        values,
        mask,
        observed,
        beta,
        separation,
        similarity,
    )


def _used(mask: Any, sets: tuple[int, ...]) -> Any:
    """Which entries of the memories some query may use `(sets, M, 1)`."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.ndim <= len(sets) + 1:
        return mask[..., None]
    return mask.any(axis=tuple(range(len(sets), mask.ndim - 1)))[..., None]


def _check_iterable(similarity: Similarity) -> None:
    kernel = similarity.kernel
    if kernel is not None and not kernel.has_energy:
        raise ValueError(
            f"{type(kernel).__name__} maps queries and memories differently: it has "
            "one update only and cannot be iterated"
        )


def _name(x: Any) -> str:
    kernel = getattr(x, "kernel", None)
    inner = "" if kernel is None else f"({type(kernel).__name__})"
    return f"{type(x).__name__}{inner}"


class _Row(NamedTuple):
    """One query and its memory set, with the updates that act on the state `y`."""

    keys: Array
    values: Array
    broken: Array | None
    model: _Model

    def weights(self, y: Array) -> Array:
        return self.model.separation(self._scaled(y), where=self.model.mask)

    def update(self, y: Array) -> Array:
        similarity, observed = self.model.similarity, self.model.observed
        new = similarity.combine(self.keys, self.weights(y), observed)
        return new.astype(y.dtype)

    def energy(self, y: Array) -> Array:
        z = self._scaled(y)
        conjugate = self.model.separation.conjugate(z, where=self.model.mask)
        own = self.model.similarity.self_energy(y).astype(z.dtype)
        return own - conjugate / self.model.beta.astype(z.dtype)

    def start(self) -> Array:
        y = self.model.similarity.state(self.model.query, self.model.observed)
        return y.astype(working_dtype(y))

    def read_out(self, y: Array) -> Retrieval:
        weights = self.weights(y)
        dtype = self.values.dtype
        return Retrieval(
            weigh(weights, self.values).astype(dtype), weights.astype(dtype)
        )

    def _scaled(self, y: Array) -> Array:
        z = self.model.similarity.compare(self.keys, y, self.model.observed)
        if self.broken is not None:  # reaches the result only where it is not masked
            z = jnp.where(self.broken, jnp.nan, z)
        return self.model.beta.astype(z.dtype) * z


def _over_rows(model: _Model, function: Callable[[_Row], Any]) -> Any:
    """Maps `function` over memory sets, then over queries; shared parts stay so."""
    if model.memories.ndim > 2:
        stacked = (
            model.similarity.kernel is not None and model.similarity.kernel.set_axes
        )
        shared = {"memories": 0, "values": 0, "similarity": 0 if stacked else None}
        return _over_axis(model, shared, lambda m: _over_rows(m, function), False)

    memories = model.memories
    values = memories if model.values is None else model.values
    broken = None
    if model.mask is not None:
        fine = jnp.isfinite(memories).all(-1) & jnp.isfinite(values).all(-1)
        memories = jnp.where(fine[:, None], memories, 0.0)
        values = jnp.where(fine[:, None], values, 0.0)
        broken = ~fine
    similarity = model.similarity
    local = (
        model.observed is not None
        and similarity.kernel is not None
        and similarity.kernel.local
    )
    keys = memories if local else similarity.keys(memories)

    def rows(model: _Model) -> Any:
        if model.query.ndim > 1:
            return _over_axis(model, {}, rows, sequential=local)
        own = similarity.keys(memories, model.observed) if local else keys
        return function(_Row(own, values, broken, model))

    return rows(model)


def _over_axis(
    model: _Model,
    axes: dict[str, int | None],
    function: Callable[[_Model], Any],
    sequential: bool,
) -> Any:
    """Maps over the first axis of the query, and over that axis of all that has it."""
    depth, size = model.query.ndim - 1, model.query.shape[0]

    def split(leaf: Array, trailing: int) -> tuple[Array, int | None]:
        if leaf.ndim - trailing < depth:
            return leaf, None
        if leaf.shape[0] == 1 and size != 1:
            return leaf[0], None
        return leaf, 0

    in_axes: dict[str, Any] = {name: axes.get(name) for name in _Model._fields}
    for name, trailing in _ROW_AXES.items():
        leaves, structure = jax.tree.flatten(getattr(model, name))
        pairs = [split(leaf, trailing) for leaf in leaves]
        model = model._replace(
            **{name: jax.tree.unflatten(structure, [leaf for leaf, _ in pairs])}
        )
        in_axes[name] = tuple(axis for _, axis in pairs)

    # `vmap` wants a tree of axes, `lax.map` only what is mapped: flatten for both.
    flat_axes = []
    for name in _Model._fields:
        count = len(jax.tree.leaves(getattr(model, name)))
        axis = in_axes[name]
        flat_axes += list(axis) if isinstance(axis, tuple) else [axis] * count
    leaves, structure = jax.tree.flatten(model)
    mapped = [leaf for leaf, axis in zip(leaves, flat_axes, strict=True) if axis == 0]

    def call(parts: list[Array]) -> Any:
        rest = iter(parts)
        whole = [
            next(rest) if axis == 0 else leaf
            for leaf, axis in zip(leaves, flat_axes, strict=True)
        ]
        return function(jax.tree.unflatten(structure, whole))

    if sequential:  # a key matrix for each row: bounded memory
        return lax.map(call, mapped, batch_size=8 if depth == 1 else None)
    return jax.vmap(call)(mapped)


@functools.partial(jax.jit, static_argnames="steps")
def _retrieve(model: _Model, steps: int) -> Retrieval:
    def run(row: _Row) -> Retrieval:
        y = row.start()
        if steps > 1:
            y, _ = lax.scan(
                lambda y, _: (row.update(y), None), y, None, length=steps - 1
            )
        return row.read_out(y)

    return _over_rows(model, run)


@functools.partial(jax.jit, static_argnames="steps")
def _trajectory(model: _Model, steps: int) -> Trajectory:
    known = has_energy(model.separation, model.similarity)

    def run(row: _Row) -> Trajectory:
        def step(y: Array, _: None) -> tuple[Array, Any]:
            new = row.update(y)
            return new, (row.read_out(y).state, row.energy(new) if known else None)

        y = row.start()
        first = row.energy(y) if known else None
        _, (states, energies) = lax.scan(step, y, None, length=steps)
        states = jnp.concatenate([row.model.query[None], states])
        if known:
            energies = jnp.concatenate([jnp.asarray(first)[None], energies])
        return Trajectory(states, energies)

    return _over_rows(model, run)


@jax.jit
def _energy(model: _Model) -> Array:
    return _over_rows(model, lambda row: row.energy(row.start()))


@functools.partial(jax.jit, static_argnames="max_steps")
def _converge(model: _Model, max_steps: int, tolerance: ArrayLike) -> Convergence:
    known = has_energy(model.separation, model.similarity)

    def run(row: _Row) -> Convergence:
        def residual(y: Array) -> Array:
            return row.update(y) - y

        y, (steps, converged) = lax.custom_root(
            residual,
            row.start(),
            functools.partial(_iterate, max_steps - 1, tolerance),
            _solve_linear,
            has_aux=True,
        )
        state, weights = row.read_out(y)
        return Convergence(
            state,
            weights,
            row.energy(y) if known else None,
            steps.astype(jnp.int32) + 1,
            converged > 0,
        )

    return _over_rows(model, run)


def _iterate(cap: int, tolerance: ArrayLike, residual, y: Array):
    """Adds the residual until it is small: plain fixed-point iteration."""

    def unfinished(carry):
        _, steps, converged = carry
        return ~converged & (steps < cap)

    def body(carry):
        y, steps, _ = carry
        move = residual(y)
        new = y + move
        scale = jnp.max(jnp.abs(new), initial=0.0)
        small = jnp.max(jnp.abs(move), initial=0.0) <= tolerance * scale
        return new, steps + 1, small

    y, steps, converged = lax.while_loop(
        unfinished, body, (y, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.bool_))
    )
    # custom_root differentiates what comes beside the root: only floats have tangents.
    return y, (steps.astype(y.dtype), converged.astype(y.dtype))


def _solve_linear(linear, right: Array) -> Array:
    """Solves the tangent system of a fixed point without forming its matrix."""
    tolerance = 4 * float(jnp.finfo(right.dtype).eps)

    def solve(matvec, right):
        solver = jax.scipy.sparse.linalg.bicgstab
        return solver(matvec, right, tol=tolerance, maxiter=200)[0]

    return lax.custom_linear_solve(linear, right, solve, transpose_solve=solve)


_CLASSES = tuple(SEPARATIONS.values())
