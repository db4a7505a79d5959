r"""Retrieval dynamics: energy, updates, iteration to a fixed point.

One update is :math:`T(x) = \mathrm{sep}(\beta K(\Xi, x))\, \Xi` [lemma:retrieval_dyn].
The functions here apply it a fixed number of times (`retrieve`), until nothing moves
(`converge`), or keeping all on the way (`trajectory`).

The dynamics run in the features in which the similarity compares: a query is mapped
into them, and each update takes a weighted mean of the keys, the features of the
memories; for `Cosine` all of them are unit vectors. Energies are of such features. What
is retrieved is a pattern: the mean of the memories under the same weights.

All share one set of arguments:

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

Values are checked only outside of `jax.jit`, where they are known; shapes always.
Inside, a `beta` that is not positive gives NaN. Half precision sums in float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from uhop_jax._checks import (
    as_scalar,
    check_count,
    working_dtype,
)
from uhop_jax._fixed_point import fixed_point
from uhop_jax._rows import Model, Row, model_of, over_rows
from uhop_jax.separation import Separation, Softmax, check_separation
from uhop_jax.similarity import (
    Dot,
    Similarity,
    check_similarity,
)


class Retrieval(NamedTuple):
    """Result of `retrieve`.

    Attributes:
      state: `(..., d)`, the retrieved pattern (or value), the mean of the memories
        under `weights`.
      weights: `(..., M)`, those of the last update.
    """

    state: Float[Array, "*batch d"]
    weights: Float[Array, "*batch M"]


class Convergence(NamedTuple):
    """Result of `converge`, row by row.

    Attributes:
      pattern: `(..., d)`, the retrieved pattern (or value), the mean of the memories
        under `weights`.
      weights: `(..., M)`, those of the last update.
      features: `(..., D)`, what the last update made of them: the mean of the keys
        under `weights`, for `Cosine` of unit length; float32 for half precision.
      energy: `(...)`, of the features; None if the model has no energy.
      steps: `(...)`, int32, updates used.
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
      patterns: `(..., steps + 1, d)`, the query and what each update retrieves.
      features: `(..., steps + 1, D)`, those of the query and after each update, for
        `Cosine` of unit length; float32 for half precision.
      energies: `(..., steps + 1)`, of the features, never rising; None if the model has
        no energy.
    """

    patterns: Float[Array, "*batch steps_plus_1 d"]
    features: Float[Array, "*batch steps_plus_1 D"]
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

    Several steps go from features to features. That is one step several times, each
    from the pattern retrieved before, but where a pattern between two steps says less
    than its features: for `Cosine`, whose keys are of unit length whatever the norms of
    the memories, for weights that do not sum to one with a centred kernel, and with
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
    model = model_of(
        memories, query, beta, separation, similarity, values, mask, observed
    )
    if steps > 1 and model.similarity.kernel is not None:
        check_iterable(model.similarity)
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
    r"""Applies updates to each row until it stands still [lemma:convergence].

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
      tolerance: a row has converged once no component of its features moves by more
        than this, relative to the largest component; None is 16 units of rounding.
      values: what the last weights average; the memories by default.
      mask: true for valid memories.
      observed: true for known components of the query.

    Returns:
      `Convergence`; rows that reached the cap have `converged` false.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    check_count("max_steps", max_steps, 1)
    model = model_of(
        memories, query, beta, separation, similarity, values, mask, observed
    )
    check_iterable(model.similarity)
    if tolerance is None:
        tolerance = 16 * float(jnp.finfo(working_dtype(model.query)).eps)
    tolerance = as_scalar("tolerance", tolerance, working_dtype(model.query))
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
    """What every update retrieves, with its features and their energy.

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
    model = model_of(
        memories, query, beta, separation, similarity, None, mask, observed
    )
    check_iterable(model.similarity)
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
    r"""Energy of the features of states, which an update never raises.

    - `Dot`: :math:`K(x, x)/2 - \Psi^\star(\beta, K(\Xi, x))` [eqn:eng-fn], with the
      conjugate :math:`\Psi^\star(\beta, z) = \mathrm{conjugate}(\beta z)/\beta` (the
      factor :math:`1/\beta`, which the paper omits for `alpha = 2`, is needed).
    - `Cosine`: :math:`-\Psi^\star(\beta, \bar K(\Xi, x))`.
    - `NegativeSquaredL2`: :math:`-\Psi^\star(\beta, -\|\Xi - x\|^2)`.

    Features themselves, such as those of `trajectory`, are states among the keys:
    `energy(similarity.keys(memories), features, ...)` with the similarity without its
    kernel is their energy.

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
    model = model_of(
        memories, query, beta, separation, similarity, None, mask, observed
    )
    if not has_energy(model.separation, model.similarity):
        raise ValueError(
            f"no energy is known that {_name(model.similarity)} with "
            f"{_name(model.separation)} never raises"
        )
    return _energy(model)


def has_energy(separation: Separation, similarity: Similarity) -> bool:
    """Whether the model has an energy that its update never raises.

    Raises:
      ValueError: if either is of another type.
    """
    check_separation(separation)
    check_similarity(similarity)
    return (
        separation.has_conjugate
        and similarity.has_energy()
        and (separation.normalized or not similarity.needs_normalized)
    )


def check_iterable(similarity: Similarity) -> None:
    """Refuses a kernel that has one update only."""
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


@functools.partial(jax.jit, static_argnames="steps")
def _retrieve(model: Model, steps: int) -> Retrieval:
    def run(row: Row) -> Retrieval:
        y = row.start()
        if steps > 1:
            y, _ = lax.scan(
                lambda y, _: (row.update(y), None), y, None, length=steps - 1
            )
        return Retrieval(*row.read_out(y))

    return over_rows(model, run)


@functools.partial(jax.jit, static_argnames="steps")
def _trajectory(model: Model, steps: int) -> Trajectory:
    known = has_energy(model.separation, model.similarity)

    def run(row: Row) -> Trajectory:
        def step(y: Array, _: None) -> tuple[Array, Any]:
            new = row.update(y)
            return new, Trajectory(
                row.read_out(y)[0], new, row.energy(new) if known else None
            )

        y = row.start()
        first = Trajectory(row.model.query, y, row.energy(y) if known else None)
        _, rest = lax.scan(step, y, None, length=steps)
        return jax.tree.map(
            lambda one, others: jnp.concatenate([one[None], others]), first, rest
        )

    return over_rows(model, run)


@jax.jit
def _energy(model: Model) -> Array:
    return over_rows(model, lambda row: row.energy(row.start()))


@functools.partial(jax.jit, static_argnames="max_steps")
def _converge(model: Model, max_steps: int, tolerance: ArrayLike) -> Convergence:
    known = has_energy(model.separation, model.similarity)

    def run(row: Row) -> Convergence:
        y, steps, converged = fixed_point(
            row.update, row.start(), max_steps - 1, tolerance
        )
        pattern, weights = row.read_out(y)
        features = row.update(y)
        return Convergence(
            pattern,
            weights,
            features,
            row.energy(features) if known else None,
            steps + 1,
            converged,
        )

    return over_rows(model, run)
