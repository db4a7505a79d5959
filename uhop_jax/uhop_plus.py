"""U-Hop+: Stage I with a falling temperature and restarts.

Several runs minimise the average separation loss while its scale `t` grows. The iterate
with the largest `delta_min` is the result.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from uhop_jax._checks import (
    as_floating,
    as_scalar,
    check_count,
    check_key,
    check_memory_set,
    working_dtype,
)
from uhop_jax._descent import descend
from uhop_jax._pytree import varying_alike
from uhop_jax.kernels import LinearKernel
from uhop_jax.losses import AverageLoss, scaled_rows
from uhop_jax.stage_one import StageOne


def fit_annealed(
    key: PRNGKeyArray,
    memories: Float[Array, "*sets M d"],
    *,
    features: int | None = None,
    steps: int = 1000,
    restarts: int = 8,
    t_range: tuple[float | int, float | int] = (1.0, 100.0),
    learning_rate: ArrayLike = 0.05,
) -> StageOne:
    r"""U-Hop+ (Hu et al. 2024): the average loss with falling temperature and restarts.

    On the sphere the loss of U-Hop+ at temperature `tau` is the average loss at `t = 1
    / (2 tau)` up to a constant. As `t` grows its minimisers become optimal spherical
    codes. Adam runs from several Gaussian starts while `t` grows geometrically; the
    result is the iterate of all runs with the largest `delta_min`. A linear map can
    place the memories freely only if they are independent, which needs `M <= d`.

    The loss depends on `W` only through its restriction to the span of the memories,
    which has at most `M` dimensions. The runs therefore act on a matrix of at most
    `M x M`, whatever `d` and `D` are. The kernel maps patterns that are orthogonal to
    every memory to zero.

    Args:
      key: random key.
      memories: stored patterns, one per row.
      features: dimension `D` of the features, by default `d`; at most `M` features are
        used.
      steps: number of updates of each run.
      restarts: number of independent runs, in one compiled call. The first run starts
        at the memories themselves if `D >= min(M, d)`.
      t_range: first and last `t`.
      learning_rate: first learning rate of Adam; it falls to zero along a cosine.

    Returns:
      `StageOne` with the best kernel and the histories of its run; each loss is at the
      `t` of its step.

    Raises:
      ValueError: as in `fit`.
    """
    check_key(key)
    check_count("restarts", restarts, 1)
    if not hasattr(t_range, "__len__") or len(t_range) != 2:
        raise ValueError(f"t_range must be two numbers, got {t_range}")
    memories = as_floating(memories, "memories")
    check_memory_set(memories)
    d = memories.shape[-1]
    sets = memories.shape[:-2]
    keys = jax.random.split(key, (*sets, restarts))
    features = d if features is None else features
    check_count("features", features, 1)
    check_count("steps", steps, 1)
    memories = memories.astype(working_dtype(memories))
    first, last = (as_scalar("t_range", t, memories.dtype) for t in t_range)
    learning_rate = as_scalar("learning_rate", learning_rate, memories.dtype)
    ts = jnp.geomspace(first, last, steps + 1)

    def run(memories: Array, keys: Array) -> StageOne:
        return _fit_annealed(memories, keys, ts, learning_rate, features)

    for _ in sets:
        run = jax.vmap(run)
    return run(memories, keys)


@functools.partial(jax.jit, static_argnames="features")
def _fit_annealed(
    memories: Array, keys: Array, ts: Array, learning_rate: ArrayLike, features: int
) -> StageOne:
    """`fit_annealed` of one memory set, one run for each of `keys`."""
    basis, coordinates = jnp.linalg.qr(scaled_rows(memories).T)  # (d, r) and (r, M)
    memories = coordinates.T
    M, r = memories.shape
    D = min(features, M)

    def start(key: Array, number: Array) -> Array:
        gaussian = jax.random.normal(key, (D, r), memories.dtype)
        first = (number == 0) & (D >= r)
        return jnp.where(first, jnp.eye(D, r, dtype=memories.dtype), gaussian)

    steps = ts.shape[0] - 1
    optimizer = optax.adam(1.0)
    ts = ts.astype(memories.dtype)
    fall = 0.5 + 0.5 * jnp.cos(jnp.pi * jnp.linspace(0.0, 1.0, steps, dtype=ts.dtype))
    rates = learning_rate * fall

    def run(weights: Array):
        def body(carry, inputs):
            weights, state, best, best_delta = carry
            t, rate = inputs
            (value, delta), gradient = descend(memories, weights, AverageLoss(t))
            better = delta > best_delta
            best = jnp.where(better, weights, best)
            best_delta = jnp.where(better, delta, best_delta)
            with jax.numpy_dtype_promotion("standard"):  # Optax mixes dtypes
                updates, state = optimizer.update(gradient, state)
            weights = weights + rate * updates
            # The loss does not depend on the scale of `W`: the scale is fixed, so that
            # the effect of a learning rate does not change during the run.
            return (_unit(weights), state, best, best_delta), (value, delta)

        weights = _unit(weights)
        worst = jnp.full_like(weights, -jnp.inf, shape=())
        carry = (weights, optimizer.init(weights), weights, worst)
        (weights, _, best, best_delta), history = lax.scan(
            body, carry, (ts[:-1], rates)
        )
        (value, delta), _ = descend(memories, weights, AverageLoss(ts[-1]))
        better = delta > best_delta
        best = jnp.where(better, weights, best)
        losses, deltas = (
            jnp.concatenate([h, jnp.asarray(x)[None]])
            for h, x in zip(history, (value, delta), strict=True)
        )
        return best, losses, deltas

    def _unit(weights: Array) -> Array:
        return weights / jnp.sqrt(jnp.mean(weights * weights))

    starts = jax.vmap(start)(keys, jnp.arange(keys.shape[0]))
    memories, starts, ts, rates = varying_alike((memories, starts, ts, rates))
    best, losses, deltas = jax.vmap(run)(starts)
    winner = jnp.argmax(deltas.max(-1))
    weights = jnp.matmul(best[winner], basis.T, precision=lax.Precision.HIGHEST)
    return StageOne(LinearKernel(weights), losses[winner], deltas[winner])
