r"""Retrieval dynamics: energy, updates, iteration to a fixed point.

One update is :math:`T(x) = \mathrm{sep}(\beta K(\Xi, x))\, \Xi` [lemma:retrieval_dyn].
`retrieve` applies a fixed number of updates, `converge` applies updates until the state
no longer moves, and `trajectory` returns the state after each update.

The dynamics run in the space of features in which the similarity compares. A query is
mapped to its features. Each update is a weighted mean of the keys, which are the
features of the memories; for `Cosine` queries, keys and means are unit vectors. An
energy is a function of features. A retrieved pattern is the mean of the memories under
the same weights.

The functions share these arguments:

- `memories (M, d)`, one pattern per row, shared by all queries and never tiled; or
  `(sets, M, d)`, one memory set for each entry of the first axis of the query (an axis
  of length one is shared).
- `query (..., d)`; every leading axis is a batch of independent retrievals.
- `model`, a `Model`. Its `beta`, and the parameters of its separation such as `alpha`,
  are numbers, or arrays that broadcast against the leading axes of the query.
- `mask (..., M)`: true for valid memories. A masked memory affects neither a result nor
  a gradient, even if it is NaN; a query without a valid memory retrieves zero.
- `observed (..., d)`: true for the known components of the query; overlaps and norms
  are restricted to these components.

Shapes, dtypes and numbers of Python and NumPy are checked; entries of JAX arrays are
not, so that no call waits for the device. NaN in a visible memory or in a query gives
NaN, and so does a `beta` that is not positive; `check` looks for both. Half precision
sums in float32.

Results have derivatives of any order, in both modes. One exception: of several updates
by entmax of an alpha other than 1.5 and 2, JAX takes second derivatives forward over
reverse, as `jax.hessian` does. The search for the threshold is a loop, which JAX does
not reverse twice.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from uhop_jax._checks import (
    as_scalar,
    check_count,
    check_finite,
    check_on_host,
    check_positive,
    working_dtype,
)
from uhop_jax._fixed_point import fixed_point
from uhop_jax._rows import Problem, Row, over_rows, problem_of
from uhop_jax.kernels import check_numbers
from uhop_jax.model import Model
from uhop_jax.similarity import Dot, Similarity


class Retrieval(NamedTuple):
    """Result of `retrieve`.

    Attributes:
      state: `(..., d)`, the retrieved pattern (or value): the mean of the memories (or
        values) under `weights`.
      weights: `(..., M)`, the weights of the last update.
    """

    state: Float[Array, "*batch d"]
    weights: Float[Array, "*batch M"]


class Convergence(NamedTuple):
    """Result of `converge`, row by row.

    Attributes:
      pattern: `(..., d)`, the retrieved pattern (or value): the mean of the memories
        (or values) under `weights`.
      weights: `(..., M)`, the weights of the last update.
      features: `(..., D)`, the features after the last update: the mean of the keys
        under `weights`, for `Cosine` of unit length; float32 for half precision.
      energy: `(...)`, the energy of the features; None if the model has no energy.
      steps: `(...)`, int32, the number of updates.
      converged: `(...)`, whether the features moved by no more than the tolerance.
    """

    pattern: Float[Array, "*batch d"]
    weights: Float[Array, "*batch M"]
    features: Float[Array, "*batch D"]
    energy: Float[Array, "*batch"] | None
    steps: Int[Array, "*batch"]
    converged: Bool[Array, "*batch"]


class Trajectory(NamedTuple):
    """Result of `trajectory`.

    Attributes:
      patterns: `(..., steps + 1, d)`, the query and the pattern retrieved by each
        update.
      features: `(..., steps + 1, D)`, the features of the query and after each update,
        for `Cosine` of unit length; float32 for half precision.
      energies: `(..., steps + 1)`, the energies of the features, which never rise; None
        if the model has no energy.
    """

    patterns: Float[Array, "*batch steps_plus_1 d"]
    features: Float[Array, "*batch steps_plus_1 D"]
    energies: Float[Array, "*batch steps_plus_1"] | None


def retrieve(
    model: Model,
    memories: Float[Array, "*sets M d"],
    query: Float[Array, "*batch d"],
    *,
    steps: int = 1,
    values: Float[Array, "*sets M v"] | None = None,
    mask: Bool[Array, "*#batch M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
) -> Retrieval:
    r"""Applies `steps` updates of the retrieval dynamics [eqn:ret-dyn].

    With one step and `Softmax` this is attention with keys `memories` and values
    `values`.

    Several steps pass features, not patterns, from update to update. Calling `retrieve`
    with one step several times, each time on the last pattern, gives the same result
    with three exceptions: for `Cosine`, whose keys have unit length whatever the norms
    of the memories; for weights that do not sum to one with a centred kernel; and with
    `values`.

    Args:
      model: similarity, separation and inverse temperature.
      memories: stored patterns.
      query: initial states.
      steps: number of updates, at least 1.
      values: rows `(M, v)` that the last weights average; the memories by default.
        Earlier updates always average the memories (hetero-association).
      mask: true for valid memories.
      observed: true for known components of the query.

    Returns:
      `Retrieval` in the promoted dtype of `memories` and `query`.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    check_count("steps", steps, 1)
    problem = problem_of(model, memories, query, values, mask, observed)
    if steps > 1:
        check_iterable(model.similarity)
    return _retrieve(problem, steps)


def converge(
    model: Model,
    memories: Float[Array, "*sets M d"],
    query: Float[Array, "*batch d"],
    *,
    max_steps: int = 256,
    tolerance: ArrayLike | None = None,
    values: Float[Array, "*sets M v"] | None = None,
    mask: Bool[Array, "*#batch M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
) -> Convergence:
    r"""Applies updates to each query until its features converge [lemma:convergence].

    Each query stops by itself, so that its result does not depend on other queries.
    Gradients are the gradients of the fixed point (implicit function theorem). They are
    exact where the query has converged, and zero in `query`. Their memory does not grow
    with the number of steps.

    Args:
      model: similarity, separation and inverse temperature.
      memories: stored patterns.
      query: initial states.
      max_steps: largest number of updates of a query, at least 1.
      tolerance: a query has converged when no component of its features moves by more
        than this, relative to the largest component; None is 16 times the machine
        epsilon.
      values: rows that the last weights average; the memories by default.
      mask: true for valid memories.
      observed: true for known components of the query.

    Returns:
      `Convergence`; queries that reached `max_steps` first have `converged` false.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    check_count("max_steps", max_steps, 1)
    problem = problem_of(model, memories, query, values, mask, observed)
    check_iterable(model.similarity)
    dtype = working_dtype(problem.dtype)
    if tolerance is None:
        tolerance = 16 * float(jnp.finfo(dtype).eps)
    return _converge(problem, max_steps, as_scalar("tolerance", tolerance, dtype))


def trajectory(
    model: Model,
    memories: Float[Array, "*sets M d"],
    query: Float[Array, "*batch d"],
    *,
    steps: int = 10,
    mask: Bool[Array, "*#batch M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
) -> Trajectory:
    """The pattern, the features and the energy after every update.

    Args:
      model: similarity, separation and inverse temperature.
      memories: stored patterns.
      query: initial states.
      steps: number of updates, at least 1.
      mask: true for valid memories.
      observed: true for known components of the query.

    Returns:
      `Trajectory`, the query itself first.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    check_count("steps", steps, 1)
    problem = problem_of(model, memories, query, None, mask, observed)
    check_iterable(model.similarity)
    return _trajectory(problem, steps)


def energy(
    model: Model,
    memories: Float[Array, "*sets M d"],
    query: Float[Array, "*batch d"],
    *,
    mask: Bool[Array, "*#batch M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
) -> Float[Array, "*batch"]:
    r"""Energy of the features of states; an update never raises it.

    - `Dot`: :math:`K(x, x)/2 - \Psi^\star(\beta, K(\Xi, x))` [eqn:eng-fn], with the
      conjugate :math:`\Psi^\star(\beta, z) = \mathrm{conjugate}(\beta z)/\beta` (the
      factor :math:`1/\beta`, which the paper omits for `alpha = 2`, is needed).
    - `Cosine`: :math:`-\Psi^\star(\beta, \bar K(\Xi, x))`.
    - `NegativeSquaredL2`: :math:`-\Psi^\star(\beta, -\|\Xi - x\|^2)`.

    The energy of features, such as `Trajectory.features`, is
    `energy(similarity.keys(memories), features, ...)` under the same similarity without
    its kernel.

    Args:
      model: similarity, separation and inverse temperature.
      memories: stored patterns.
      query: states.
      mask: true for valid memories.
      observed: true for known components of the query.

    Returns:
      One energy for each state, in the working dtype (float32 for half precision).

    Raises:
      ValueError: if the model has no energy, or as in `retrieve`.
    """
    problem = problem_of(model, memories, query, None, mask, observed)
    if not model.has_energy:
        raise ValueError(f"no energy is known that {model.name} never raises")
    return _energy(problem)


def check(
    model: Model,
    memories: Float[Array, "*sets M d"],
    query: Float[Array, "*batch d"],
    *,
    values: Float[Array, "*sets M v"] | None = None,
    mask: Bool[Array, "*#batch M"] | None = None,
    observed: Bool[Array, "*#batch d"] | None = None,
) -> None:
    """Refuses arguments of `retrieve` under which a result would be NaN.

    `retrieve` itself reads no arrays, since that would wait for the device.

    Args:
      model: similarity, separation and inverse temperature.
      memories: stored patterns.
      query: initial states.
      values: rows that the last weights average.
      mask: true for valid memories.
      observed: true for known components of the query.

    Raises:
      ValueError: if a visible memory or value, or a known component of a query, is not
        finite; a parameter of the model is out of range; or as in `retrieve`.
    """
    problem = problem_of(model, memories, query, values, mask, observed)
    check_on_host("check", problem)
    seen = None
    if problem.mask is not None:
        seen = jnp.broadcast_to(
            problem.mask, (*problem.query.shape[:-1], problem.memories.shape[-2])
        )
        sets = problem.memories.ndim - 2
        seen = seen.any(tuple(range(sets, seen.ndim - 1)))[..., None]
    check_finite("memories", problem.memories, seen)
    if problem.values is not None:
        check_finite("values", problem.values, seen)
    check_finite("query", problem.query, problem.observed)
    check_numbers(model.similarity.kernel)
    numbers: Any = jax.tree.map(
        np.asarray, dataclasses.replace(model, similarity=Dot())
    )
    check_positive("beta", numbers.beta, working_dtype(problem.dtype))
    numbers.separation.check()


def check_iterable(similarity: Similarity) -> None:
    """Refuses a kernel that maps memories and queries differently."""
    kernel = similarity.kernel
    if not kernel.has_energy:
        raise ValueError(
            f"{type(kernel).__name__} maps queries and memories differently: it has "
            "one update only and cannot be iterated"
        )


@functools.partial(jax.jit, static_argnames="steps")
def _retrieve(problem: Problem, steps: int) -> Retrieval:
    def run(row: Row) -> Retrieval:
        y = row.start()
        if steps > 1:
            y, _ = lax.scan(
                lambda y, _: (row.update(y), None), y, None, length=steps - 1
            )
        return Retrieval(*row.read_out(y))

    return over_rows(problem, run)


@functools.partial(jax.jit, static_argnames="steps")
def _trajectory(problem: Problem, steps: int) -> Trajectory:
    def run(row: Row) -> Trajectory:
        def step(y: Array, _: None) -> tuple[Array, Any]:
            new = row.update(y)
            return new, Trajectory(row.read_out(y)[0], new, row.energy(new))

        y = row.start()
        first = Trajectory(row.problem.query, y, row.energy(y))
        _, rest = lax.scan(step, y, None, length=steps)
        return jax.tree.map(
            lambda head, tail: jnp.concatenate([head[None], tail]), first, rest
        )

    return over_rows(problem, run)


@jax.jit
def _energy(problem: Problem) -> Array:
    return over_rows(problem, lambda row: row.energy(row.start()))


@functools.partial(jax.jit, static_argnames="max_steps")
def _converge(problem: Problem, max_steps: int, tolerance: ArrayLike) -> Convergence:
    def run(row: Row) -> Convergence:
        y, steps, converged = fixed_point(
            row.update, row.start(), max_steps - 1, tolerance
        )
        pattern, weights = row.read_out(y)
        features = row.update(y)
        return Convergence(
            pattern, weights, features, row.energy(features), steps + 1, converged
        )

    return over_rows(problem, run)
