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
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from uhop_jax._checks import (
    as_counts,
    as_floating,
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
from uhop_jax._descent import Fitted, fit_gram, fit_weights
from uhop_jax._pytree import varying_alike
from uhop_jax.kernels import LinearKernel, LowRankKernel
from uhop_jax.losses import AverageLoss, SeparationLoss, check_loss


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
    loss: SeparationLoss = AverageLoss(),
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
      loss: separation loss to minimise.
      normalize_rows: scale each row of the final `W` to unit norm (Algorithm 1, line
        4).
      snapshots: steps after which to keep the kernel, each in `[0, steps]`.

    Returns:
      `StageOne`, in at least float32.

    Raises:
      ValueError: if the memories are fewer than two or have duplicates, NaN or
        infinity, or an argument is out of range.
    """
    arguments = _arguments(memories, steps, start, loss, snapshots)
    if not callable(getattr(optimizer, "update", None)):
        raise ValueError(
            f"optimizer must be an Optax transformation, got {optimizer!r}"
        )
    run = functools.partial(
        fit_weights, optimizer, steps, len(arguments[-1]), normalize_rows
    )
    return _over_sets(run, *arguments)


def fit_sgd(
    memories: Float[Array, "*sets M d"],
    *,
    relative_rate: ArrayLike | optax.Schedule,
    steps: int,
    momentum: ArrayLike = 0.0,
    start: Fitted | None = None,
    loss: SeparationLoss = AverageLoss(),
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
      relative_rate: learning rate in units of `d`: `W` moves by `relative_rate * d`
        times the gradient, which is the paper's learning rate. A relative rate has the
        same effect for every `d`. A number, an array `(steps,)`, or an Optax schedule.
        A negative rate increases the loss, as in half of the runs of the paper's
        scatter plot.
      steps: number of updates; 0 returns the start.
      momentum: heavy-ball momentum, in `[0, 1)`.
      start: initial kernel; None is `identity_start`. The path `gram` needs a start
        without a centre.
      loss: separation loss to minimise.
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
    arguments = _arguments(memories, steps, start, loss, snapshots)
    check_choice("path", path, ("auto", "gram", "weights"))
    check_scalar("momentum", momentum)
    check_at_least("momentum", momentum, 0)
    if not is_traced(momentum) and np.any(np.asarray(momentum) >= 1):
        raise ValueError(f"momentum must be below 1, got {momentum}")
    memories, start, _, marks = arguments
    M, d = memories.shape[-2:]
    if path == "auto":
        D = start.weights.shape[-2] if isinstance(start, LinearKernel) else d
        # A step costs four products of M x M x M, or two products of M x d x D.
        path = "gram" if start.center is None and 2 * M * M < d * D else "weights"
    if path == "gram" and start.center is not None:
        raise ValueError("the gram path needs a start kernel without a center")
    rates = _relative_rates(relative_rate, steps).astype(memories.dtype) * d
    momentum = jnp.asarray(momentum).astype(memories.dtype)
    momentum = jnp.where((momentum >= 0) & (momentum < 1), momentum, jnp.nan)
    gram = path == "gram"
    function: Any = fit_gram if gram else functools.partial(fit_weights, None)
    run = functools.partial(function, steps, len(marks), normalize_rows)
    return _over_sets(run, *arguments, (rates, momentum))


def _arguments(
    memories: Any, steps: int, start: Any, loss: Any, snapshots: Sequence[int]
) -> tuple[Array, Fitted, SeparationLoss, Array]:
    """Checked memories, start, loss and steps of snapshots, of `fit` and `fit_sgd`."""
    check_loss(loss)
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
    return memories, start, loss.in_dtype(memories.dtype), jnp.asarray(marks, int)


def _relative_rates(rate: ArrayLike | optax.Schedule, steps: int) -> Array:
    """The rates `(steps,)` of a number, an array or a schedule."""
    if callable(rate):
        rate = jax.vmap(rate)(jnp.arange(steps))
    rate = as_floating(rate, "relative_rate")
    check_finite("relative_rate", rate)
    return broadcast_rows("relative_rate", rate, (steps,))


def _over_sets(run, memories: Array, start: Fitted, *rest: Any) -> StageOne:
    """Calls `run(memories, start, *rest)`, mapped over the axes of memory sets."""
    arguments = varying_alike((memories, start, *rest))
    axes = (0, 0 if start.set_axes else None, *(None for _ in rest))
    for _ in memories.shape[:-2]:
        run = jax.vmap(run, in_axes=axes)
    return StageOne(*run(*arguments))
