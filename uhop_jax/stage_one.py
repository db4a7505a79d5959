r"""Stage I: learn a kernel that separates the stored patterns.

- `fit`: any Optax optimiser on `W` (Algorithm 1).
- `fit_sgd`: gradient descent with any schedule and momentum. It runs on `M x M`
  matrices where they are cheaper, with the same iterates.

`uhop_jax.uhop_plus` has Stage I with a falling temperature and restarts.
`uhop_jax.closed_form` and `uhop_jax.likelihood` need no iterations.

All functions take one memory set `(M, d)` or a batch `(sets, M, d)`, fitted in one
compiled call. Start kernels have the scale of the paper's `W ~ N(0, 1)`, under which
:math:`K(u, v)` is about `d` times the dot product: compare kernels at their own best
`beta`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from uhop_jax._checks import (
    as_counts,
    as_floating,
    as_scalar,
    broadcast_rows,
    check_at_least,
    check_choice,
    check_count,
    check_finite,
    check_key,
    check_memory_set,
    check_scalar,
    is_traced,
    working_dtype,
)
from uhop_jax._products import contract, gram_matrix
from uhop_jax._pytree import varying_alike
from uhop_jax.kernels import LinearKernel, LowRankKernel
from uhop_jax.losses import (
    LOSSES,
    PAIRS,
    Loss,
    delta_min_of_gram,
    loss_of_distances,
    loss_of_gram,
    scaled_rows,
    squared_distances,
)

Fitted = LinearKernel | LowRankKernel


class StageOne(NamedTuple):
    """Result of an iterative fit; a batch of memory sets adds a leading axis to all.

    Attributes:
      kernel: the fitted kernel; `kernel.weights` is the matrix `W`.
      loss: `(steps + 1,)`, the separation loss before each step, and of `kernel`.
      delta_min: `(steps + 1,)`, the smallest separation `1 - max cos` before each step,
        and of `kernel`.
      snapshots: kernels `(snapshots, D, d)` after the requested steps, with normalised
        rows if `normalize_rows` was true; None if no steps were requested.
    """

    kernel: Fitted
    loss: Float[Array, "*sets steps_plus_1"]
    delta_min: Float[Array, "*sets steps_plus_1"]
    snapshots: Fitted | None = None


def gaussian_start(
    key: PRNGKeyArray, dimension: int, features: int | None = None
) -> LinearKernel:
    """The paper's start, `W_0 ~ N(0, 1)` of shape `(features, dimension)`.

    Args:
      key: random key.
      dimension: `d` of the patterns.
      features: `D`, by default `d`. The noise that the random projection adds to every
        overlap falls as `1 / sqrt(D)`.

    Returns:
      A `LinearKernel` in the default float dtype.

    Raises:
      ValueError: if the key is no key, or a dimension is no positive integer.
    """
    check_key(key)
    check_count("dimension", dimension, 1)
    features = dimension if features is None else features
    check_count("features", features, 1)
    return LinearKernel(jax.random.normal(key, (features, dimension)))


def identity_start(dimension: int) -> LowRankKernel:
    r"""The deterministic start, `W_0 = sqrt(d) I`, as a kernel of rank 0.

    It is the limit of `gaussian_start` as `D` grows, with `W_0` scaled by `sqrt(d /
    D)`: Stage I depends on `W_0` only through :math:`A_0 = W_0^T W_0`, which tends to
    `d I`. It has the scale of the paper's start without the noise.

    Args:
      dimension: `d` of the patterns.

    Raises:
      ValueError: if the dimension is no positive integer.
    """
    check_count("dimension", dimension, 1)
    scale = jnp.asarray(float(dimension) ** 0.5)
    return LowRankKernel(scale, jnp.zeros((dimension, 0)), jnp.zeros((0, dimension)))


def fit(
    memories: Float[Array, "*sets M d"],
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    start: Fitted | None = None,
    kind: str = "average",
    t: ArrayLike = 2.0,
    normalize: bool = True,
    pairs: str = "distinct",
    normalize_rows: bool = False,
    snapshots: Sequence[int] = (),
) -> StageOne:
    """Minimises a separation loss over `W` with any Optax optimiser [algorithm1].

    Args:
      memories: stored patterns, one per row.
      optimizer: an Optax transformation. Create it once and reuse it: each new object
        compiles a new program.
      steps: number of updates; 0 returns the start.
      start: initial kernel; None is `identity_start`.
      kind: separation loss, see `separation_loss`.
      t: scale of the loss.
      normalize: whether features are compared on the sphere.
      pairs: pairs that the loss averages, see `separation_loss`.
      normalize_rows: scale each row of the final `W` to unit norm (Algorithm 1, line
        4).
      snapshots: steps after which to keep the kernel, each in `[0, steps]`.

    Returns:
      `StageOne`, in at least float32.

    Raises:
      ValueError: if the memories are fewer than two or have duplicates, NaN or
        infinity, or an argument is out of range.
    """
    loss, memories, start, t, marks = _stage_one_arguments(
        memories, steps, start, kind, t, normalize, pairs, snapshots
    )
    if not callable(getattr(optimizer, "update", None)):
        raise ValueError(
            f"optimizer must be an Optax transformation, got {optimizer!r}"
        )
    run = functools.partial(
        _fit_weights, loss, optimizer, steps, len(marks), normalize_rows
    )
    return _over_sets(run, memories, start, t, jnp.asarray(marks, int))


def fit_sgd(
    memories: Float[Array, "*sets M d"],
    *,
    rate: ArrayLike | optax.Schedule,
    steps: int,
    momentum: ArrayLike = 0.0,
    start: Fitted | None = None,
    kind: str = "average",
    t: ArrayLike = 2.0,
    normalize: bool = True,
    pairs: str = "distinct",
    normalize_rows: bool = False,
    snapshots: Sequence[int] = (),
    path: str = "auto",
) -> StageOne:
    r"""Gradient descent on a separation loss [algorithm1], in the cheaper space.

    Every gradient in `W` lies in the span of the memories, and so does every velocity:
    :math:`W_n = W_0 - U_n \Xi` with `U_n` in the span of :math:`W_0 \Xi^T`. The
    recursion therefore needs `M x M` matrices only. An iteration costs `O(M^3)` instead
    of `O(M d D)`, whatever `d` and `D` are. From `identity_start` the result is a
    `LowRankKernel`, and no `d x d` matrix is built.

    Args:
      memories: stored patterns, one per row.
      rate: step size in units of `d`: `W` moves by `rate * d` times the gradient. The
        paper's learning rate is `rate * d`; a rate has the same effect for every `d`. A
        number, an array `(steps,)`, or an Optax schedule. A negative rate increases the
        loss, as in half of the runs of the paper's scatter plot.
      steps: number of updates; 0 returns the start.
      momentum: heavy-ball momentum, in `[0, 1)`.
      start: initial kernel; None is `identity_start`. The path `gram` needs a start
        without a centre.
      kind: separation loss, see `separation_loss`.
      t: scale of the loss.
      normalize: whether features are compared on the sphere.
      pairs: pairs that the loss averages, see `separation_loss`.
      normalize_rows: scale each row of the final `W` to unit norm (Algorithm 1, line
        4).
      snapshots: steps after which to keep the kernel, each in `[0, steps]`.
      path: `gram` iterates on `M x M` matrices, `weights` on `W`; `auto` takes the path
        with fewer operations.

    Returns:
      `StageOne`, in at least float32.

    Raises:
      ValueError: as in `fit`.
    """
    loss, memories, start, t, marks = _stage_one_arguments(
        memories, steps, start, kind, t, normalize, pairs, snapshots
    )
    check_choice("path", path, ("auto", "gram", "weights"))
    check_scalar("momentum", momentum)
    check_at_least("momentum", momentum, 0)
    if not is_traced(momentum) and np.any(np.asarray(momentum) >= 1):
        raise ValueError(f"momentum must be below 1, got {momentum}")
    M, d = memories.shape[-2:]
    if path == "auto":
        D = start.weights.shape[-2] if _is_dense(start) else d
        # A step costs four products of M x M x M, or two products of M x d x D.
        path = "gram" if _center(start) is None and 2 * M * M < d * D else "weights"
    rates = _rates(rate, steps).astype(memories.dtype) * d
    momentum = jnp.asarray(momentum).astype(memories.dtype)
    if path == "gram":
        if _center(start) is not None:
            raise ValueError("the gram path needs a start kernel without a center")
        run = functools.partial(_fit_gram, loss, steps, len(marks), normalize_rows)
        return _over_sets(
            run, memories, start, t, jnp.asarray(marks, int), rates, momentum
        )
    run = functools.partial(_fit_weights, loss, None, steps, len(marks), normalize_rows)
    return _over_sets(run, memories, start, t, jnp.asarray(marks, int), rates, momentum)


# --------------------------------------------------------------------------------------
# Iterations
# --------------------------------------------------------------------------------------


def _stage_one_arguments(
    memories, steps, start, kind, t, normalize, pairs, snapshots
) -> tuple[Loss, Array, Fitted, Array, tuple[int, ...]]:
    """Checks the arguments that `fit` and `fit_sgd` share.

    Returns:
      The loss, the memories, the start, `t` and the steps of snapshots.
    """
    check_choice("separation loss", kind, LOSSES)
    check_choice("pairs", pairs, PAIRS)
    check_count("steps", steps, 0)
    marks = as_counts("snapshots", snapshots, 0, steps)
    memories = as_floating(memories, "memories")
    check_memory_set(memories)
    memories = memories.astype(working_dtype(memories))
    d = memories.shape[-1]
    if start is None:
        start = identity_start(d)
    if not isinstance(start, Fitted):
        raise ValueError(
            "start must be a LinearKernel or a LowRankKernel, got "
            f"{type(start).__name__}"
        )
    start.check()
    if start.dimension != d:
        raise ValueError(f"start maps dimension {start.dimension}, memories have {d}")
    sets = memories.ndim - 2
    if start.set_axes not in (0, sets):
        raise ValueError(
            f"start has {start.set_axes} axes of memory sets, memories have {sets}"
        )
    start = jax.tree.map(lambda x: x.astype(memories.dtype), start)
    t = as_scalar("t", t, memories.dtype)
    return Loss(kind, normalize, pairs), memories, start, t, marks


def _is_dense(start: Fitted) -> bool:
    return isinstance(start, LinearKernel)


def _center(start: Fitted) -> Array | None:
    """The centre of a kernel, None without one."""
    return start.center if isinstance(start, LinearKernel) else None


def _rates(rate: ArrayLike | optax.Schedule, steps: int) -> Array:
    """Step sizes `(steps,)` of a number, an array or a schedule."""
    if callable(rate):
        rate = jax.vmap(rate)(jnp.arange(steps))
    rate = as_floating(rate, "rate")
    check_finite("rate", rate)
    return broadcast_rows("rate", rate, (steps,))


def _over_sets(run, memories: Array, start: Fitted, *rest: Any) -> StageOne:
    """Calls `run(memories, start, *rest)`, mapped over the axes of memory sets."""
    arguments = varying_alike((memories, start, *rest))
    axes = (0, 0 if start.set_axes else None, *(None for _ in rest))
    for _ in memories.shape[:-2]:
        run = jax.vmap(run, in_axes=axes)
    return run(*arguments)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _fit_weights(
    loss: Loss,
    optimizer: optax.GradientTransformation | None,
    steps: int,
    number_kept: int,
    normalize_rows: bool,
    memories: Array,
    start: Fitted,
    t: Array,
    marks: Array,
    rates: Array | None = None,
    momentum: Array | None = None,
) -> StageOne:
    """Stage I on `W`, by the optimiser, or without one by SGD at the given rates."""
    if optimizer is None:
        assert rates is not None
        rates = jnp.append(rates, 0.0)  # tracing reads a rate even for zero steps
        optimizer = optax.sgd(rates.__getitem__, momentum)
    center = _center(start)
    if center is not None:
        memories = memories - center[None]
    if loss.normalize:  # scaled memories give the same loss as a function of `W`
        memories = scaled_rows(memories)

    def body(carry, step):
        weights, state, slots = carry
        slots = _record(slots, order, step, weights)
        history, gradient = descend(memories, weights, loss, t)
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes dtypes
            updates, state = optimizer.update(gradient, state, weights)
        return (optax.apply_updates(weights, updates), state, slots), history

    weights, order = start.weights, jnp.sort(marks)
    slots = jnp.full_like(weights, 0, shape=(number_kept, *weights.shape))
    carry = (weights, optimizer.init(weights), slots)
    (weights, _, slots), history = lax.scan(body, carry, jnp.arange(steps))
    slots = _record(slots, order, steps, weights)[jnp.searchsorted(order, marks)]
    if normalize_rows:
        weights, slots = _unit_rows(weights), _unit_rows(slots)
    snapshots = None
    if number_kept:
        centers = None if center is None else jnp.tile(center, (number_kept, 1))
        snapshots = LinearKernel(slots, centers)
    kernel = LinearKernel(weights, center)
    last = descend(memories, weights, loss, t)[0]
    return _result(kernel, snapshots, history, last)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _fit_gram(
    loss: Loss,
    steps: int,
    number_kept: int,
    normalize_rows: bool,
    memories: Array,
    start: Fitted,
    t: Array,
    marks: Array,
    rates: Array,
    momentum: Array,
) -> StageOne:
    r"""Stage I by SGD on `B`, where :math:`W = W_0 (I - \Xi^T B\, \Xi)`.

    Let :math:`G = \Xi \Xi^T`, let `A` be the Gram matrix of the first features
    :math:`\Xi W_0^T`, and let :math:`E = I - B G`. The features under `W` are
    :math:`E^T \Xi W_0^T`, with the Gram matrix :math:`Q = E^T A E`. The gradient in `W`
    is :math:`W_0 \Xi^T (2 E S) \Xi` with `S` the symmetric part of :math:`dL/dQ`.
    """
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    if loss.normalize:  # scaled memories give the same loss as a function of `W`
        memories = scaled_rows(memories)
    uncentered, center = memories, memories.mean(0, keepdims=True)
    if loss.of_distances:  # distances do not depend on the origin
        memories = memories - center
    first = start.memory_features(memories)
    G = gram_matrix(memories)
    identity = jnp.eye(G.shape[-1], dtype=G.dtype)
    if loss.of_distances:
        # Coordinates of the first features and of the centre in an orthonormal basis of
        # their span, of dimension at most M + 1.
        coordinates = jnp.concatenate([first, start.memory_features(center)])
        coordinates = jnp.linalg.qr(coordinates.T, mode="r").T
        center_products = contract(memories, center)
    else:
        A = gram_matrix(first)

    def evaluate(B: Array) -> tuple[tuple[Array, Array], Array]:
        """Loss and `delta_min` at `B`, and the slope `2 E S`."""
        E = identity - product(B, G)
        if not loss.of_distances:
            Q = product(E.T, product(A, E))
            value, slope = _loss_and_slope(loss, t, Q)
            return (value, delta_min_of_gram(Q)), product(E, slope)
        features = product(E.T, coordinates[:-1])
        value, slope = _loss_and_slope(loss, t, features)
        shift = product(product(B, center_products).T, coordinates[:-1])
        center_features = coordinates[-1:] - shift
        gram = gram_matrix(features + center_features)
        return (value, delta_min_of_gram(gram)), product(E, slope)

    def body(carry, inputs):
        B, velocity, slots = carry
        rate, step = inputs
        slots = _record(slots, order, step, B)
        history, slope = evaluate(B)
        velocity = momentum * velocity + slope
        return (B + rate * velocity, velocity, slots), history

    zero, order = jnp.zeros_like(G), jnp.sort(marks)
    carry = (zero, zero, jnp.full_like(zero, 0, shape=(number_kept, *zero.shape)))
    (B, _, slots), history = lax.scan(body, carry, (rates, jnp.arange(steps)))
    slots = _record(slots, order, steps, B)[jnp.searchsorted(order, marks)]

    def kernel(B: Array) -> Fitted:
        right = product(B, memories)
        if isinstance(start, LowRankKernel) and not normalize_rows:
            left = jnp.concatenate([start.left, -first.T], axis=1)
            right = jnp.concatenate([start.right, right], axis=0)
            return LowRankKernel(start.scale, left, right)
        weights = start.weights - product(first.T, right)
        return LinearKernel(_unit_rows(weights) if normalize_rows else weights)

    snapshots = lax.map(kernel, slots) if number_kept else None
    fitted = kernel(B)
    if normalize_rows:  # `B` does not describe a `W` with normalised rows
        last = descend(uncentered, fitted.weights, loss, t)[0]
    else:
        last = evaluate(B)[0]
    return _result(fitted, snapshots, history, last)


def descend(
    memories: Array, weights: Array, loss: Loss, t: Array
) -> tuple[tuple[Array, Array], Array]:
    """Loss and `delta_min` of `W`, and the gradient of the loss in `W (D, d)`."""
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    features = contract(memories, weights)
    gram = gram_matrix(features)
    delta = delta_min_of_gram(gram)
    if loss.of_distances:  # distances do not depend on the origin; less cancels here
        memories = memories - memories.mean(0, keepdims=True)
        features = contract(memories, weights)
    value, slope = _loss_and_slope(loss, t, features if loss.of_distances else gram)
    gradient = product(product(slope, features).T, memories)
    return (value, delta), gradient


def _loss_and_slope(loss: Loss, t: Array, x: Array) -> tuple[Array, Array]:
    """The loss, and twice the symmetric part of its derivative in the Gram matrix.

    `x` is the features `(M, D)` for a loss of distances, else their Gram matrix.
    """
    if not loss.of_distances:
        value, slope = jax.value_and_grad(loss_of_gram)(x, loss, t)
        return value, slope + slope.T
    squared = squared_distances(x)
    value, slope = jax.value_and_grad(loss_of_distances)(squared, loss, t)
    slope = slope + slope.T
    return value, 2 * (jnp.diag(slope.sum(0)) - slope)


def _record(slots: Array, order: Array, step: ArrayLike, value: Array) -> Array:
    """Writes `value` into the slot of the first mark at or after `step`.

    Later steps overwrite the slot up to the step of the mark, so that in the end each
    slot has the value at the step of its mark.
    """
    if slots.shape[0] == 0:
        return slots
    slot = jnp.searchsorted(order, step, side="left")
    slot = jnp.where(slot < slots.shape[0], slot, slots.shape[0])  # dropped
    return slots.at[slot].set(value, mode="drop")


def _result(
    kernel: Fitted,
    snapshots: Fitted | None,
    history: tuple[Array, Array],
    last: tuple[Array, Array],
) -> StageOne:
    """The result, with the last loss and `delta_min` appended to the history."""
    losses, deltas = (
        jnp.concatenate([h, jnp.asarray(x)[None]])
        for h, x in zip(history, last, strict=True)
    )
    return StageOne(kernel, losses, deltas, snapshots)


def _unit_rows(weights: Array) -> Array:
    """Rows scaled to unit norm; a zero row stays zero."""
    squared = (weights * weights).sum(-1, keepdims=True)
    return weights / jnp.sqrt(jnp.where(squared == 0, 1.0, squared))
