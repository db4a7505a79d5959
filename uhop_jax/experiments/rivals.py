"""Published rivals of calibration, each at its best setting on the scored queries.

A rival has its own options, its inverse temperature, and a choice that its publication
does not discuss: it compares patterns as they are, or patterns of unit norm, so that a
copy that is fainter than its memory is no farther from it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PRNGKeyArray

from uhop_jax._products import weigh
from uhop_jax.closed_form import fit_values
from uhop_jax.corruption import Mask
from uhop_jax.footprint import fit_footprint
from uhop_jax.kernels import Identity, Kernel
from uhop_jax.model import Model
from uhop_jax.separation import Epanechnikov, Exponentials, Softmax
from uhop_jax.similarity import Cosine, NegativeSquaredL2
from uhop_jax.trials import beta_grid, sweep_errors

LSR, REGRESSION = "LSR", "kernel regression"
SELF_MADE, LABELLED = "A-Hop, self-made pairs", "A-Hop, labelled pairs"
RIVALS = {
    LSR: "the memories within a radius (log-sum-ReLU, Epanechnikov)",
    REGRESSION: "Gaussian kernel ridge regression of the memories on themselves",
    SELF_MADE: "footprints read out as learned from copies with half of them masked",
    LABELLED: "footprints read out as learned from copies corrupted as queries are",
}
ASSUMED = Mask(0.5)  # what the maker of self-made pairs takes for the corruption
RADII = 40  # of LSR
RIDGES = (0.0, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
WIDTHS = (3e-4, 30.0, 18)  # of regression, as `sharpness` in `beta_grid`


class UnitNorm(Kernel):
    """The feature map `u / |u|`, of patterns whose components are all observed."""

    def query_features(self, query, observed=None):
        assert observed is None
        return Cosine().state(query)


KERNELS = {"": Identity(), "unit norm": UnitNorm()}


def rival_scores(
    names: tuple[str, ...],
    key: PRNGKeyArray,
    memories: Array,
    query: Array,
    target: np.ndarray,
    corruption: Callable[[PRNGKeyArray, Array], Any],
    timed: Any,
) -> dict[str, tuple[str, dict[str, float]]]:
    """Setting and scores of each rival, after one update.

    Args:
      names: some of `RIVALS`.
      key: random key, for the pairs that A-Hop learns from.
      memories: stored patterns `(M, d)`.
      query: corrupted patterns `(Q, d)`.
      target: the memory of each query.
      corruption: how the queries were made; labelled pairs are made so too.
      timed: calls a function and keeps its time under a name.
    """
    about = memories, query, jnp.asarray(target)
    scores: dict[str, tuple[str, dict[str, float]]] = {}
    pairs = {SELF_MADE: ASSUMED, LABELLED: corruption}
    learned = [name for name in pairs if name in names]
    for norm, kernel in KERNELS.items():
        options: tuple[str, ...]
        if LSR in names:
            options = ("equal weights", "weights of the kernel")
            scored = timed(LSR, _by_radius, kernel, *about)
            _keep_best(scores, LSR, scored, options, norm)
        if REGRESSION in names:
            options = tuple(f"ridge {x:g}" for x in RIDGES)
            scored = timed(REGRESSION, _by_width, kernel, *about)
            _keep_best(scores, REGRESSION, scored, options, norm)
        footprints = [
            timed("A-Hop", fit_footprint, key, memories, pairs[name], kernel=kernel)
            for name in learned
        ]
        if footprints:
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *footprints)
            errors, betas = timed("A-Hop", _by_footprint, stacked, *about)
            for i, name in enumerate(learned):
                _keep_best(scores, name, (errors[i : i + 1], betas[i]), ("",), norm)
    return scores


def _keep_best(
    scores: dict[str, tuple[str, dict[str, float]]],
    name: str,
    errors_and_betas: tuple[Array, Array],
    options: tuple[str, ...],
    norm: str,
) -> None:
    """Keeps the setting of the least error `(options, betas)`, if it leads."""
    errors, betas = map(np.asarray, errors_and_betas)
    i, j = np.unravel_index(int(np.nanargmin(errors)), errors.shape)
    if name not in scores or errors[i, j] < scores[name][1]["error"]:
        setting = ", ".join(filter(None, (options[i], norm)))
        scores[name] = setting, {"error": float(errors[i, j]), "beta": float(betas[j])}


@jax.jit
def _by_radius(
    kernel: Kernel, memories: Array, query: Array, target: Array
) -> tuple[Array, Array]:
    """Errors of LSR `(2, radii)` by its degree, and the inverse temperatures.

    A query without a memory within the radius stays where it is.
    """
    overlaps = NegativeSquaredL2(kernel)(memories, query)
    # Radii from the nearest memory of any query to the middle of all distances.
    far = -jnp.median(overlaps)
    near = jnp.clip(-overlaps.max(), 1e-4 * far, far)
    steps = jnp.linspace(0, 1, RADII, dtype=overlaps.dtype)
    betas = 2 / (near * (1.01 * far / near) ** steps)

    def errors(degree: int) -> Array:
        separation = Epanechnikov(degree)

        def error(beta: Array) -> Array:
            weights = separation.tempered(overlaps, beta)
            reached = (weights > 0).any(-1, keepdims=True)
            state = jnp.where(reached, weigh(weights, memories), query)
            return ((state - memories[target]) ** 2).sum(-1).mean()

        return lax.map(error, betas)

    return jnp.stack([errors(0), errors(1)]), betas


@jax.jit
def _by_width(
    kernel: Kernel, memories: Array, query: Array, target: Array
) -> tuple[Array, Array]:
    """Errors of regression `(ridges, widths)`, and the inverse temperatures.

    Patterns are clamped to the range of the memories, which they may leave.
    """
    overlaps = NegativeSquaredL2(kernel)(memories, query)
    betas = beta_grid(overlaps, WIDTHS)[1:]
    ridges = jnp.asarray(RIDGES, memories.dtype)
    low, high = memories.min(), memories.max()

    def error(beta: Array, ridge: Array) -> Array:
        model = Model(NegativeSquaredL2(kernel), Exponentials(), beta=beta)
        values = fit_values(model, memories, ridge=ridge)
        state = jnp.clip(weigh(model.weights(overlaps), values), low, high)
        return ((state - memories[target]) ** 2).sum(-1).mean()

    def at_ridge(ridge: Array) -> Array:
        return lax.map(lambda beta: error(beta, ridge), betas)

    return lax.map(at_ridge, ridges), betas


@jax.jit
def _by_footprint(
    footprints: Any, memories: Array, query: Array, target: Array
) -> tuple[Array, Array]:
    """Errors and inverse temperatures `(footprints, betas)`.

    Components are sorted once for all footprints: the order does not depend on them.
    """
    overlaps = jax.vmap(lambda footprint: footprint(memories, query))(footprints)

    def one(overlaps: Array) -> tuple[Array, Array]:
        betas = beta_grid(overlaps)
        weights = Softmax().tempered
        return sweep_errors(memories, overlaps, target, weights, betas), betas

    return lax.map(one, overlaps)
