"""The models that the experiments compare, and the kernels that they use."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from uhop_jax.candidates import two_sided_centering
from uhop_jax.closed_form import whitenings
from uhop_jax.corruption import Corruption
from uhop_jax.kernels import Centering, Kernel, LikelihoodKernel
from uhop_jax.likelihood import fit_likelihood
from uhop_jax.losses import loss_from_name
from uhop_jax.separation import (
    Entmax15,
    Polynomial,
    Separation,
    Softmax,
    Sparsemax,
    TopK,
)
from uhop_jax.similarity import (
    Cosine,
    Dot,
    NegativeL1,
    NegativeL2,
    NegativeSquaredL2,
    Similarity,
)
from uhop_jax.stage_one import fit_sgd, gaussian_start, identity_start
from uhop_jax.uhop_plus import fit_annealed

CALIBRATED, BLIND, LIMIT = "calibrated", "blind", "limit"
OTHER = "other fixed similarities"


class Method(NamedTuple):
    """A model; the best beta, and the best of several kernels, are chosen for it.

    Attributes:
      name: label in tables.
      similarity: makes the similarity from the kernel.
      separation: maps scaled overlaps to weights.
      family: key into the kernels of `fit_kernels`, or "" for `Identity`.
      group: heading under which figures draw it.
    """

    name: str
    similarity: Callable[[Kernel], Similarity]
    separation: Separation
    family: str = ""
    group: str = "models of the paper"


class Settings(NamedTuple):
    """Settings of Stage I and of the closed form in a protocol.

    Attributes:
      start: of the kernel: `identity`, or `gaussian` as in the paper.
      relative_rates: learning rates of each family in units of `d`, one number or one
        for each step.
      steps: numbers of steps of each family; each number gives a kernel.
      factors: multiples of the rates; each gives a kernel.
      t: scale of the separation loss.
      ridges: of the closed form; each gives a kernel.
      masked_share: part of the memories that Stage I sees where queries are masked;
        elsewhere it sees all.
      normalize_rows: whether the rows of `W` are scaled to unit norm at the end.
    """

    start: str
    relative_rates: Mapping[str, Any]
    steps: Mapping[str, tuple[int, ...]]
    factors: tuple[float, ...] = (1.0,)
    t: float = 2.0
    ridges: tuple[float, ...] = ()
    masked_share: float = 1.0
    normalize_rows: bool = False


class Powers(Separation):
    """Weights `z^n`, not normalised: the dense associative memory of the paper.

    The retrieved pattern has any magnitude; it is clamped before it is scored.

    Attributes:
      degree: the exponent `n`.
    """

    normalized: ClassVar[bool] = False

    degree: int = dataclasses.field(default=10, metadata={"static": True})

    def _weights(self, z: Array) -> Array:
        return z**self.degree


FAIR = (
    Method("MHM", Dot, Softmax()),
    Method("Sparse MHM", Dot, Sparsemax()),
    Method("entmax 1.5", Dot, Entmax15()),
    Method("DAM 10", Dot, Polynomial(10)),
    Method("l2", NegativeL2, Softmax()),
    Method("squared l2", NegativeSquaredL2, Softmax(), group=OTHER),
    Method("l1", NegativeL1, Softmax()),
    Method("cosine", Cosine, Softmax(), group=OTHER),
    Method("centred cosine", Cosine, Softmax(), "centred", OTHER),
    Method("two-sided centred cosine", Cosine, Softmax(), "two-sided", OTHER),
    Method("nearest (cosine)", Cosine, TopK(1), group=OTHER),
    Method("nearest (l2)", NegativeSquaredL2, TopK(1), group=OTHER),
    Method("random W", Dot, Softmax(), "random", "kernel"),
    Method("random W, angular", Cosine, Softmax(), "random", "angular kernel"),
    Method("U-Hop", Dot, Softmax(), "average", "kernel"),
    Method("U-Hop sparse", Dot, Sparsemax(), "average", "kernel"),
    Method("U-Hop, angular", Cosine, Softmax(), "average", "angular kernel"),
    Method("U-Hop max", Dot, Softmax(), "maximum", "kernel"),
    Method("U-Hop max, angular", Cosine, Softmax(), "maximum", "angular kernel"),
    Method("U-Hop+", Dot, Softmax(), "annealed", "kernel"),
    Method("U-Hop+, angular", Cosine, Softmax(), "annealed", "angular kernel"),
    Method("closed form", Dot, Softmax(), "closed form", "kernel"),
    Method("closed form, angular", Cosine, Softmax(), "closed form", "angular kernel"),
    Method("likelihood, rank 2", Dot, Softmax(), "likelihood 2", "calibration"),
    Method("likelihood, rank 8", Dot, Softmax(), "likelihood 8", "calibration"),
    Method("likelihood, full", Dot, Softmax(), "likelihood full", "calibration"),
)

# The models of the paper's figures, at one beta.
PAPER = (
    Method("MHM", Dot, Softmax()),
    Method("Sparse MHM", Dot, Sparsemax()),
    Method("DAM 10", Dot, Powers(10)),
    Method("l2", NegativeL2, Softmax()),
    Method("l1", NegativeL1, Softmax()),
    Method("random W", Dot, Softmax(), "random", "kernel"),
    Method("U-Hop", Dot, Softmax(), "average", "kernel"),
    Method("U-Hop sparse", Dot, Sparsemax(), "average", "kernel"),
    Method("U-Hop max", Dot, Softmax(), "maximum", "kernel"),
    Method("U-Hop max sparse", Dot, Sparsemax(), "maximum", "kernel"),
)


def fit_kernels(
    families: Iterable[str],
    keys: Array,
    memories: Array,
    corruption: Corruption,
    settings: Settings,
    *,
    share: float = 1.0,
) -> dict[str, dict[str, Kernel]]:
    """Fits the kernels of each family to memory sets `(sets, M, d)`.

    Each set has a key of its own. Several numbers of steps are snapshots of one run.
    Families that know the corruption make corrupted copies of their own: no kernel sees
    the queries that are scored. Stage I sees a `share` of the memories.

    Returns:
      Kernels by family and setting; a kernel that depends on the memories has a leading
      axis of sets.
    """
    families, d = set(families), memories.shape[-1]
    learned = seen_by_stage_one(memories, share)
    kernels: dict[str, dict[str, Kernel]] = {}
    gaussian, full = None, None
    start_keys, annealed_keys, likelihood_keys, mean_keys = jax.vmap(
        lambda key: jax.random.split(key, 4), out_axes=1
    )(keys)
    if settings.start == "gaussian" or "random" in families:
        gaussian = jax.vmap(lambda key: gaussian_start(key, d))(start_keys)
    start = gaussian if settings.start == "gaussian" else identity_start(d)
    for family in sorted(families):
        kind = family.split()[0]
        if family == "centred":
            kernels[family] = {"": Centering(memories.mean(1))}
        elif family == "two-sided":
            kernels[family] = {"": _two_sided(mean_keys, memories, corruption)}
        elif family == "random":
            assert gaussian is not None
            kernels[family] = {"": gaussian}
        elif kind in ("average", "maximum"):
            steps = tuple(sorted(set(settings.steps[family])))
            kernels[family] = {}
            for factor in settings.factors:
                fitted = fit_sgd(
                    learned,
                    relative_rate=factor * settings.relative_rates[family],
                    steps=steps[-1],
                    start=start,
                    loss=loss_from_name(kind, settings.t),
                    snapshots=steps,
                    normalize_rows=settings.normalize_rows,
                    path="gram",
                )
                suffix = f", rate {factor:g}" if len(settings.factors) > 1 else ""
                for i, number in enumerate(steps):
                    kernel = jax.tree.map(lambda x, i=i: x[:, i], fitted.snapshots)
                    kernels[family][f"N={number}{suffix}"] = kernel
        elif family == "annealed":
            number = max(1, *settings.steps["average"])
            fitted = fit_annealed(annealed_keys[0], learned, steps=number, restarts=1)
            kernels[family] = {f"N={number}": fitted.kernel}
        elif family == "closed form":
            whitened = whitenings(learned, settings.ridges)
            kernels[family] = {f"ridge {r:g}": kernel for r, kernel in whitened.items()}
        elif kind == "likelihood":
            if full is None:
                full = _likelihoods(likelihood_keys, memories, corruption)
            rank = family.split()[1]
            kernels[family] = {"": full.cut(None if rank == "full" else int(rank))}
    return kernels


def seen_by_stage_one(memories: Array, share: float) -> Array:
    """The first memories `(..., M, d)` of each set: a `share`, two at least."""
    return memories[..., : max(2, int(share * memories.shape[-2])), :]


@jax.jit
def _two_sided(keys: Array, memories: Array, corruption: Corruption) -> Centering:
    """Two-sided centring of each memory set, one after another: copies take room."""

    def one(row: tuple[Array, Array]) -> Centering:
        return two_sided_centering(*row, corruption)

    return jax.lax.map(one, (keys, memories))


def _likelihoods(
    keys: Array, memories: Array, corruption: Corruption
) -> LikelihoodKernel:
    """The likelihood kernel of each memory set, each from a key of its own."""
    each = [
        fit_likelihood(key, m, corruption)
        for key, m in zip(keys, memories, strict=True)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)
