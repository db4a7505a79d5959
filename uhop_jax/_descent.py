"""Descent on a separation loss: on `W`, or by SGD on a matrix of `M x M`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, ArrayLike

from uhop_jax._products import contract, gram_matrix
from uhop_jax.kernels import LinearKernel, LowRankKernel
from uhop_jax.losses import SeparationLoss, delta_min_of_gram, scaled_rows

Fitted = LinearKernel | LowRankKernel
Report = tuple[Array, Array]  # the loss and `delta_min`
Result = tuple[Fitted, Array, Array, Fitted | None]  # the fields of `StageOne`


class Space(NamedTuple):
    """The variable of a descent, and what it stands for."""

    first: Array  # the first iterate
    evaluate: Callable[[Array], tuple[Report, Array]]  # report and gradient
    kernel: Callable[[Array], Any]  # of an iterate
    last: Callable[[Any, Array], Report]  # of fitted kernel and last iterate


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def fit_weights(
    optimizer: optax.GradientTransformation | None,
    steps: int,
    number_kept: int,
    normalize_rows: bool,
    memories: Array,
    start: Fitted,
    loss: SeparationLoss,
    marks: Array,
    sgd: tuple[Array, Array] | None = None,
) -> Result:
    """Stage I on `W`, by the optimiser, or without one by `_sgd`."""
    center = start.center
    if center is not None:
        memories = memories - center[None]
    if loss.normalize:  # scaled memories give the same loss as a function of `W`
        memories = scaled_rows(memories)

    def evaluate(weights: Array) -> tuple[Report, Array]:
        return descend(memories, weights, loss)

    def kernel(weights: Array) -> LinearKernel:
        return LinearKernel(_unit_rows(weights) if normalize_rows else weights, center)

    def last(fitted: LinearKernel, weights: Array) -> Report:
        del weights  # the rows of the fitted weights may be normalised
        return evaluate(fitted.weights)[0]

    if optimizer is None:
        assert sgd is not None
        optimizer = _sgd(*sgd)
    space = Space(start.weights, evaluate, kernel, last)
    return _minimize(space, optimizer, steps, number_kept, marks)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def fit_gram(
    steps: int,
    number_kept: int,
    normalize_rows: bool,
    memories: Array,
    start: Fitted,
    loss: SeparationLoss,
    marks: Array,
    sgd: tuple[Array, Array],
) -> Result:
    r"""Stage I by SGD on `B`, where :math:`W = W_0 (I - \Xi^T B\, \Xi)`.

    Let :math:`G = \Xi \Xi^T`, let `A` be the Gram matrix of the first features
    :math:`\Xi W_0^T`, and let :math:`E = I - B G`. The features under `W` are
    :math:`E^T \Xi W_0^T`, with the Gram matrix :math:`Q = E^T A E`. The gradient in `W`
    is :math:`W_0 \Xi^T (2 E S) \Xi` with `S` the symmetric part of :math:`dL/dQ`: a
    step of SGD on `W` is a step on `B` along `-2 E S`.
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

    def evaluate(B: Array) -> tuple[Report, Array]:
        """Loss and `delta_min` at `B`, and the gradient `-2 E S`."""
        E = identity - product(B, G)
        if not loss.of_distances:
            Q = product(E.T, product(A, E))
            value, slope = loss.value_and_slope(Q)
            return (value, delta_min_of_gram(Q)), -product(E, slope)
        features = product(E.T, coordinates[:-1])
        value, slope = loss.value_and_slope(features)
        shift = product(product(B, center_products).T, coordinates[:-1])
        center_features = coordinates[-1:] - shift
        gram = gram_matrix(features + center_features)
        return (value, delta_min_of_gram(gram)), -product(E, slope)

    def kernel(B: Array) -> Fitted:
        right = product(B, memories)
        if isinstance(start, LowRankKernel) and not normalize_rows:
            left = jnp.concatenate([start.left, -first.T], axis=1)
            right = jnp.concatenate([start.right, right], axis=0)
            return LowRankKernel(start.scale, left, right)
        weights = start.weights - product(first.T, right)
        return LinearKernel(_unit_rows(weights) if normalize_rows else weights)

    def last(fitted: Fitted, B: Array) -> Report:
        if normalize_rows:  # `B` does not describe a `W` with normalised rows
            return descend(uncentered, fitted.weights, loss)[0]
        return evaluate(B)[0]

    space = Space(jnp.zeros_like(G), evaluate, kernel, last)
    return _minimize(space, _sgd(*sgd), steps, number_kept, marks)


def _sgd(rates: Array, momentum: Array) -> optax.GradientTransformation:
    """SGD with one learning rate for each step."""
    rates = jnp.append(rates, 0.0)  # tracing reads a rate even for zero steps
    return optax.sgd(rates.__getitem__, momentum)


def _minimize(
    space: Space,
    optimizer: optax.GradientTransformation,
    steps: int,
    number_kept: int,
    marks: Array,
) -> Result:
    """Steps of an optimiser in a space; the iterates at the marks are kept."""
    order = jnp.sort(marks)

    def kept(slots: Array, x: Array, step: ArrayLike) -> Array:
        """The slots with `x` in the slot of the first mark at or after `step`.

        Later steps overwrite the slot up to the step of the mark.
        """
        slot = jnp.searchsorted(order, step)
        return slots.at[slot].set(x, mode="drop") if number_kept else slots

    def body(carry, step):
        x, state, slots = carry
        slots = kept(slots, x, step)
        report, gradient = space.evaluate(x)
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes dtypes
            updates, state = optimizer.update(gradient, state, x)
        return (optax.apply_updates(x, updates), state, slots), report

    x = space.first
    slots = jnp.full_like(x, 0, shape=(number_kept, *x.shape))
    carry = (x, optimizer.init(x), slots)
    (x, _, slots), history = lax.scan(body, carry, jnp.arange(steps))
    slots = kept(slots, x, steps)[jnp.searchsorted(order, marks)]
    kernel = space.kernel(x)
    ends = zip(history, space.last(kernel, x), strict=True)
    losses, deltas = (jnp.append(before, last) for before, last in ends)
    snapshots = lax.map(space.kernel, slots) if number_kept else None
    return kernel, losses, deltas, snapshots


def descend(
    memories: Array, weights: Array, loss: SeparationLoss
) -> tuple[Report, Array]:
    """Loss and `delta_min` of `W`, and the gradient of the loss in `W (D, d)`."""
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    features = contract(memories, weights)
    gram = gram_matrix(features)
    delta = delta_min_of_gram(gram)
    if loss.of_distances:  # distances do not depend on the origin; less cancels here
        memories = memories - memories.mean(0, keepdims=True)
        features = contract(memories, weights)
    value, slope = loss.value_and_slope(features if loss.of_distances else gram)
    gradient = product(product(slope, features).T, memories)
    return (value, delta), gradient


def _unit_rows(weights: Array) -> Array:
    """Rows scaled to unit norm; a zero row stays zero."""
    squared = (weights * weights).sum(-1, keepdims=True)
    return weights / jnp.sqrt(jnp.where(squared == 0, 1.0, squared))
