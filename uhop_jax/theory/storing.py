r"""What is stored, how much can be, and how many memories a state mixes."""

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
from uhop_jax.retrieval import converge
from uhop_jax.separation import Separation, Softmax
from uhop_jax.similarity import (
    Cosine,
    Dot,
    Similarity,
)
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
      stored: `(M,)`, whether all sampled points of the ball went where they should.
      fraction: `(M,)`, the share of them that did.
      radius: scalar, of the balls.
    """

    stored: Bool[Array, " M"]
    fraction: Float[Array, " M"]
    radius: Float[Array, ""]


def stored(
    key: Array,
    memories: Float[Array, "M d"],
    *,
    beta: ArrayLike,
    separation: Separation = Softmax(),
    similarity: Similarity = Dot(),
    samples: int = 32,
    max_steps: int = 256,
    tolerance: float = 1e-3,
) -> Stored:
    r"""Which memories are stored, by sampling their balls [def:stored_and_retrieved].

    A point counts if it converges to the fixed point that the memory itself converges
    to, and that lies in the ball. Points are uniform in the image of :math:`\Phi`
    within :math:`R_\Phi` of the memory; for `Cosine` on the cap of the sphere, nearly
    uniform. Sampling can refute, not prove; `well_separated` proves. Balls are open:
    closed ones of the two closest memories always meet. Where two memories coincide, up
    to rounding, no ball has a point, and none is stored.

    With `Dot` and a large enough `beta`, of the two closest memories the one of smaller
    feature norm is never stored: part of its ball overlaps more with the other.

    Args:
      key: random key.
      memories: stored patterns.
      beta: inverse temperature, positive.
      separation: maps scaled overlaps to weights over the memories.
      similarity: overlap of states with memories, of a linear kernel or none.
      samples: points in each ball, at least 1.
      max_steps: cap on the updates of a point; points that reach it do not count.
      tolerance: how far apart, relative to the radius, two limits may be and count as
        one.

    Returns:
      `Stored`.

    Raises:
      ValueError: if an argument is out of range, or shapes do not fit.
    """
    memories, run = _storage_test(
        key, memories, beta, separation, similarity, samples, max_steps, tolerance
    )
    return run(jnp.ones(memories.shape[0], jnp.bool_))


class Capacity(NamedTuple):
    """Result of `capacity`.

    Attributes:
      capacity: the largest size of which all patterns are stored, zero if none.
      sizes: `(sizes,)`, as given.
      stored: `(sizes,)`, the share of the patterns that are stored.
    """

    capacity: int
    sizes: Int[Array, " sizes"]
    stored: Float[Array, " sizes"]


def capacity(
    key: Array,
    patterns: Float[Array, "N d"],
    *,
    sizes: Sequence[int],
    beta: ArrayLike,
    separation: Separation = Softmax(),
    similarity: Similarity = Dot(),
    samples: int = 32,
    max_steps: int = 256,
    tolerance: float = 1e-3,
) -> Capacity:
    """How many of the patterns can be stored at once, by sampling.

    Memory sets are the first `size` patterns; one compiled program serves all sizes. It
    runs on the host, and cannot be traced.

    Args:
      key: random key, the same points for every size.
      patterns: patterns to store, in the order in which they are added.
      sizes: numbers of memories to try, each from 2 to `N`.
      beta: as in `stored`.
      separation: as in `stored`.
      similarity: as in `stored`.
      samples: as in `stored`.
      max_steps: as in `stored`.
      tolerance: as in `stored`.

    Returns:
      `Capacity`.

    Raises:
      ValueError: if an argument is out of range, shapes do not fit, or it is traced.
    """
    check_on_host("capacity", key, patterns, beta, separation, similarity, tolerance)
    patterns, run = _storage_test(
        key, patterns, beta, separation, similarity, samples, max_steps, tolerance
    )
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

    :math:`\Delta_{\min} = 1 - \max \cos`, hence :math:`R_\Phi^2 = \Delta_{\min}/2`.
    Exact for a simplex (`M <= D + 1`, :math:`M/(M - 1)`), an orthoplex (`M <= 2 D`,
    one) and on the circle. Else, with :math:`s^{D-1} = 2\sqrt\pi\, \Gamma((D+1)/2) / (M
    \Gamma(D/2))`, caps that fit give at most :math:`2 s^2` and caps that cover at least
    :math:`s^2/2`. Both are inside the bounds of the released code of U-Hop+, which
    bounds the smallest *distance*, :math:`2 s`, from above.

    Args:
      size: number `M` of features, at least 2.
      dimension: `D`, at least 2.

    Returns:
      A lower and an upper bound.

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


def _storage_test(
    key, memories, beta, separation, similarity, samples, max_steps, tolerance
):
    """The checked memories, and what tests those of a mask."""
    check_key(key)
    memories = checked_memories(memories, similarity, features=True)
    check_linear(similarity.kernel)
    beta = as_scalar("beta", beta, memories.dtype)
    check_count("samples", samples, 1)
    check_count("max_steps", max_steps, 1)
    tolerance = as_scalar("tolerance", tolerance, memories.dtype)
    image = image_of(similarity.kernel)

    def run(mask: Array) -> Stored:
        return _stored(
            key, memories, mask, image, beta, separation, similarity, tolerance,
            samples=samples, max_steps=max_steps,
        )  # fmt: skip

    return memories, run


@functools.partial(jax.jit, static_argnames=("samples", "max_steps"))
def _stored(
    key, memories, mask, image, beta, separation, similarity, tolerance, *, samples,
    max_steps,
) -> Stored:  # fmt: skip
    keys, _, _, radius = geometry_of(memories, similarity, mask)
    # The dynamics run on features, where all kernels are none.
    on_features = dataclasses.replace(similarity, kernel=None)
    on_sphere = isinstance(similarity, Cosine)

    def balls(rows: Array) -> Array:
        """Which points of the balls of a few memories went where they should."""
        centres = keys[rows]
        points = jax.vmap(
            lambda key, centre: _sample_ball(
                key, centre, radius, image, samples, on_sphere
            )
        )(row_keys[rows], centres)
        end = converge(
            keys,
            jnp.concatenate([centres[:, None], points], axis=1),
            beta=beta,
            separation=separation,
            similarity=on_features,
            max_steps=max_steps,
            mask=mask,
        )
        limits = end.features
        inside = jnp.linalg.norm(limits - centres[:, None], axis=-1) <= radius
        common = jnp.linalg.norm(limits - limits[:, :1], axis=-1) <= tolerance * radius
        there = end.converged & inside & common
        return there[:, 1:] & there[:, :1]

    # A few balls at a time: bounded memory, and none waits for the slowest of all.
    count = keys.shape[0]
    row_keys, batch = jax.random.split(key, count), min(count, 8)
    rows = jnp.arange(-(-count // batch) * batch).reshape(-1, batch) % count
    there = lax.map(balls, rows).reshape(-1, samples)[:count]
    there = there & mask[:, None] & (radius > 0)
    return Stored(there.all(-1), there.mean(-1, dtype=keys.dtype), radius)


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
    # A chord c of the unit sphere subtends the angle of cosine 1 - c^2/2.
    along = chord * jnp.sqrt(jnp.maximum(1 - chord**2 / 4, 0.0))
    return (1 - chord**2 / 2) * centre[None] + along * toward


def metastable_size(
    weights: Float[Array, "*batch M"], *, threshold: ArrayLike = 0.0
) -> Int[Array, "*batch"]:
    """How many memories a state mixes: weights above the threshold.

    Args:
      weights: weights over the memories.
      threshold: 0 counts the support of a sparse separation; 0.01 is usual for
        `Softmax`.

    Returns:
      A number for each state; 1 is a pattern retrieved alone.

    Raises:
      ValueError: if `threshold` is negative, or the weights are one number.
    """
    check_at_least("threshold", threshold, 0.0)
    weights = _checked_weights(weights)
    threshold = jnp.asarray(threshold).astype(weights.dtype)
    return (weights > threshold).sum(-1, dtype=jnp.int32)


def effective_memories(weights: Float[Array, "*batch M"]) -> Float[Array, "*batch"]:
    r"""The participation ratio :math:`(\sum p)^2 / \sum p^2`, a soft `metastable_size`.

    Args:
      weights: non-negative weights over the memories; their scale has no effect.

    Returns:
      From 1 (one memory) to `M` (all alike); zero for a row without any weight.

    Raises:
      ValueError: if the weights are one number.
    """
    return _participation_ratio(_checked_weights(weights))


def _checked_weights(weights: Any) -> Array:
    weights = as_floating(weights, "weights")
    if weights.ndim < 1:
        raise ValueError("weights must have shape (..., M), got one number")
    return weights


@jax.jit
def _participation_ratio(weights: Array) -> Array:
    weights = weights.astype(working_dtype(weights))
    top = weights.max(-1, keepdims=True, initial=0.0)
    weights = weights / jnp.where(top == 0, 1.0, top)
    return divide(weights.sum(-1) ** 2, (weights * weights).sum(-1), empty=0.0)
