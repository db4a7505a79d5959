r"""Stored memories and capacity by sampling, and the size of metastable states."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from uhop_jax._checks import (
    as_counts,
    as_floating,
    as_scalar,
    check_at_least,
    check_count,
    check_key,
    check_on_host,
    working_dtype,
)
from uhop_jax.kernels import Identity
from uhop_jax.model import Model, check_model
from uhop_jax.retrieval import converge
from uhop_jax.similarity import Cosine
from uhop_jax.theory._geometry import (
    check_linear,
    checked_memories,
    divide,
    geometry_of,
    image_of,
)


class Stored(NamedTuple):
    """Result of `stored`.

    Attributes:
      stored: `(M,)`, whether all sampled points of the memory's ball count, as
        `uhop_jax.theory.stored` counts them.
      fraction: `(M,)`, the share of the sampled points that count.
      radius: scalar, the radius of the balls.
    """

    stored: Bool[Array, " M"]
    fraction: Float[Array, " M"]
    radius: Float[Array, ""]


def stored(
    key: Array,
    model: Model,
    memories: Float[Array, "M d"],
    *,
    samples: int = 32,
    max_steps: int = 256,
    tolerance: float = 1e-3,
) -> Stored:
    r"""Which memories are stored, by sampling their balls [def:stored_and_retrieved].

    A point counts if it converges to the same fixed point as the memory itself, and the
    fixed point lies in the ball. Points are uniform in the image of :math:`\Phi` within
    :math:`R_\Phi` of the memory; for `Cosine` they are nearly uniform on a cap of the
    sphere. Sampling can refute that a memory is stored, but not prove it;
    `well_separated` proves it. Balls are open, since the closed balls of the two
    closest memories always meet. If two memories coincide up to rounding,
    :math:`R_\Phi` is zero, all balls are empty, and no memory is stored.

    Consider the two closest memories under `Dot` with a large enough `beta`. The memory
    with the smaller feature norm is never stored: in part of its ball the overlap with
    the closest memory is larger.

    Args:
      key: random key.
      model: the memory model, with a linear kernel or none.
      memories: stored patterns.
      samples: number of points in each ball, at least 1.
      max_steps: cap on the updates of a point; points that reach it do not count.
      tolerance: largest distance, relative to the radius, of two limits that count as
        the same fixed point.

    Returns:
      `Stored`.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    memories, run = _storage_test(key, model, memories, samples, max_steps, tolerance)
    return run(jnp.ones(memories.shape[0], jnp.bool_))


class Capacity(NamedTuple):
    """Result of `capacity`.

    Attributes:
      capacity: the largest of `sizes` at which all patterns are stored; zero if there
        is none.
      sizes: `(sizes,)`, the numbers of memories that were tried.
      stored: `(sizes,)`, the share of the patterns that are stored.
    """

    capacity: int
    sizes: Int[Array, " sizes"]
    stored: Float[Array, " sizes"]


def capacity(
    key: Array,
    model: Model,
    patterns: Float[Array, "N d"],
    *,
    sizes: Sequence[int],
    samples: int = 32,
    max_steps: int = 256,
    tolerance: float = 1e-3,
) -> Capacity:
    """The number of patterns that can be stored at once, by sampling.

    A memory set holds the first `size` patterns. One compiled program serves all sizes.
    The function runs on the host, and cannot be traced.

    Args:
      key: random key; every size samples with the same key.
      model: as in `stored`.
      patterns: patterns to store, in the order in which they are added.
      sizes: numbers of memories to try, each from 2 to `N`.
      samples: as in `stored`.
      max_steps: as in `stored`.
      tolerance: as in `stored`.

    Returns:
      `Capacity`.

    Raises:
      ValueError: if an argument is out of range or traced, or shapes do not fit.
    """
    check_on_host("capacity", key, model, patterns, tolerance)
    patterns, run = _storage_test(key, model, patterns, samples, max_steps, tolerance)
    sizes = as_counts("sizes", sizes, 2, patterns.shape[0])
    if not sizes:
        raise ValueError("sizes must name at least one number of memories, got none")
    index = jnp.arange(patterns.shape[0])
    counts = [int(run(index < size).stored.sum()) for size in sizes]
    full = [size for size, count in zip(sizes, counts, strict=True) if count == size]
    share = jnp.asarray(np.divide(counts, sizes)).astype(patterns.dtype)
    return Capacity(max(full, default=0), jnp.asarray(sizes), share)


def spherical_code_bounds(size: int, dimension: int) -> tuple[float, float]:
    r"""Bounds on the :math:`\Delta_{\min}` of the best code of unit features (U-Hop+).

    Here :math:`\Delta_{\min} = 1 - \max \cos`, hence :math:`R_\Phi^2 =
    \Delta_{\min}/2`. Both bounds are exact in three cases: a simplex (`M <= D + 1`,
    :math:`M/(M - 1)`), an orthoplex (`M <= 2 D`, one), and codes on the circle (`D =
    2`). Else let :math:`s^{D-1} = 2\sqrt\pi\, \Gamma((D+1)/2) / (M \Gamma(D/2))`:
    disjoint caps give the upper bound :math:`2 s^2`, and caps that cover the sphere the
    lower bound :math:`s^2/2`. Both lie within the bounds of the released code of
    U-Hop+, which bounds the smallest *distance* by :math:`2 s` from above.

    Args:
      size: number `M` of features, at least 2.
      dimension: dimension `D` of features, at least 2.

    Returns:
      The lower and the upper bound.

    Raises:
      ValueError: if an argument is out of range.
    """
    check_count("size", size, 2)
    check_count("dimension", dimension, 2)
    if size <= dimension + 1:
        return (size / (size - 1),) * 2
    if size <= 2 * dimension:
        return 1.0, 1.0
    if dimension == 2:
        return (1 - math.cos(2 * math.pi / size),) * 2
    log_s = math.log(2 * math.sqrt(math.pi) / size)
    log_s += math.lgamma((dimension + 1) / 2) - math.lgamma(dimension / 2)
    squared = math.exp(2 * log_s / (dimension - 1))
    return squared / 2, min(2 * squared, 1.0)


def _storage_test(key, model, memories, samples, max_steps, tolerance):
    """The checked memories, and a function that tests the memories of a mask."""
    check_key(key)
    check_model(model)
    memories = checked_memories(memories, model.similarity, features=True)
    check_linear(model.similarity.kernel)
    beta = as_scalar("beta", model.beta, memories.dtype)
    model = dataclasses.replace(model, beta=beta)
    check_count("samples", samples, 1)
    check_count("max_steps", max_steps, 1)
    tolerance = as_scalar("tolerance", tolerance, memories.dtype)
    image = image_of(model.similarity.kernel)

    def run(mask: Array) -> Stored:
        return _stored(key, model, memories, mask, image, tolerance, samples, max_steps)

    return memories, run


@functools.partial(jax.jit, static_argnames=("samples", "max_steps"))
def _stored(key, model, memories, mask, image, tolerance, samples, max_steps) -> Stored:
    """`stored` for the memories of a mask, with checked arguments."""
    keys, _, _, radius = geometry_of(memories, model.similarity, mask)
    # The dynamics run on features, which need no kernel.
    bare = dataclasses.replace(model.similarity, kernel=Identity())
    on_features = dataclasses.replace(model, similarity=bare)
    on_sphere = isinstance(bare, Cosine)

    def balls(rows: Array) -> Array:
        """Which points of the balls of a few memories count, `(rows, samples)`."""
        centres = keys[rows]
        points = jax.vmap(
            lambda key, centre: _sample_ball(
                key, centre, radius, image, samples, on_sphere
            )
        )(row_keys[rows], centres)
        end = converge(
            on_features,
            keys,
            jnp.concatenate([centres[:, None], points], axis=1),
            max_steps=max_steps,
            mask=mask,
        )
        limits = end.features
        inside = jnp.linalg.norm(limits - centres[:, None], axis=-1) <= radius
        common = jnp.linalg.norm(limits - limits[:, :1], axis=-1) <= tolerance * radius
        recalled = end.converged & inside & common
        return recalled[:, 1:] & recalled[:, :1]

    # A few balls at a time bound the memory, and do not wait for the slowest of all.
    count = keys.shape[0]
    row_keys, batch = jax.random.split(key, count), min(count, 8)
    rows = jnp.arange(-(-count // batch) * batch).reshape(-1, batch) % count
    recalled = lax.map(balls, rows).reshape(-1, samples)[:count]
    recalled = recalled & mask[:, None] & (radius > 0)
    return Stored(recalled.all(-1), recalled.mean(-1, dtype=keys.dtype), radius)


def _sample_ball(key, centre, radius, image, samples, on_sphere) -> Array:
    """Points `(samples, D)` within `radius` of `centre`, in the image of the kernel."""
    key, radius_key = jax.random.split(key)
    axes = centre.shape[0] if image is None else image.shape[1]
    rank = jnp.asarray(axes).astype(centre.dtype)
    toward = jax.random.normal(key, (samples, axes), centre.dtype)
    if image is not None:
        image = image.astype(centre.dtype)
        rank = (image != 0).any(0).sum().astype(centre.dtype)
        toward = jnp.matmul(toward, image.T, precision=lax.Precision.HIGHEST)
    if on_sphere:
        toward = toward - (toward * centre[None]).sum(-1, keepdims=True) * centre[None]
        rank = jnp.maximum(rank - 1, 1.0)
    norm = jnp.linalg.norm(toward, axis=-1, keepdims=True)
    toward = toward / jnp.where(norm == 0, 1.0, norm)
    share = jax.random.uniform(radius_key, (samples, 1), centre.dtype) ** (1 / rank)
    chord = radius * share
    if not on_sphere:
        return centre[None] + chord * toward
    # A chord c of the unit sphere subtends an angle with cosine 1 - c^2/2.
    along = chord * jnp.sqrt(jnp.maximum(1 - chord**2 / 4, 0.0))
    return (1 - chord**2 / 2) * centre[None] + along * toward


def metastable_size(
    weights: Float[Array, "*batch M"], *, threshold: ArrayLike = 0.0
) -> Int[Array, "*batch"]:
    """The number of memories that a state mixes: weights above the threshold.

    Args:
      weights: weights over the memories.
      threshold: weights must exceed it to count; at least 0. The default 0 counts
        the support of a sparse separation; 0.01 is usual for `Softmax`.

    Returns:
      A number for each state; 1 means that one memory is retrieved alone. -1 stands
      for a threshold in a JAX array that is negative or NaN.

    Raises:
      ValueError: if `threshold` is negative, or `weights` is a scalar.
    """
    check_at_least("threshold", threshold, 0.0)
    weights = _checked_weights(weights)
    threshold = jnp.asarray(threshold).astype(weights.dtype)
    size = (weights > threshold).sum(-1, dtype=jnp.int32)
    return jnp.where(threshold >= 0, size, -1)


def effective_memories(weights: Float[Array, "*batch M"]) -> Float[Array, "*batch"]:
    r"""The participation ratio :math:`(\sum p)^2 / \sum p^2`, a soft `metastable_size`.

    Args:
      weights: non-negative weights over the memories; their scale has no effect.

    Returns:
      A number from 1 (one memory) to `M` (equal weights) for each row; zero for a row
      of zeros.

    Raises:
      ValueError: if `weights` is a scalar.
    """
    return _participation_ratio(_checked_weights(weights))


def _checked_weights(weights: Any) -> Array:
    """The weights as floats, with at least one axis."""
    weights = as_floating(weights, "weights")
    if weights.ndim < 1:
        raise ValueError("weights must have shape (..., M), got one number")
    return weights


@jax.jit
def _participation_ratio(weights: Array) -> Array:
    """`effective_memories`, with weights scaled so that no square overflows."""
    weights = weights.astype(working_dtype(weights))
    top = weights.max(-1, keepdims=True, initial=0.0)
    weights = weights / jnp.where(top == 0, 1.0, top)
    return divide(weights.sum(-1) ** 2, (weights * weights).sum(-1), empty=0.0)
