"""An external memory for a trained forecaster: the futures of similar windows."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from uhop_jax.layers import Association, LearnedAlpha, StaticHopfield
from uhop_jax.models.stanhop import STanHop, start_linear_maps


class TuneAndPlay(nnx.Module):
    """A frozen forecaster with a hint: the futures of similar past windows.

    Each series compares its window with the windows of the bank by their cosines, and
    retrieves a convex combination of the bank's futures. The combination is embedded
    and added to the decoder's input, through a gate that begins at zero. Training and
    Stage I change the parameters of this module, not of the backbone.

    Args:
      backbone: trained forecaster.
      windows: windows of the bank, `(K, in_len, series)`.
      futures: rows that follow each window of the bank, `(K, out_len, series)`.
      beta: start of the inverse temperature, which is learned.
      kernel: feature map of the windows, before they are scaled to unit length.
      rngs: for the start values.

    Raises:
      ValueError: if the bank does not fit the backbone.
    """

    def __init__(
        self,
        backbone: STanHop,
        windows: Float[Array, "K in_len series"],
        futures: Float[Array, "K out_len series"],
        *,
        beta: float = 10.0,
        kernel: nnx.Module | None = None,
        rngs: nnx.Rngs,
    ):
        series, in_len, out_len = backbone.sizes
        for name, given, length in (
            ("windows", windows, in_len),
            ("futures", futures, out_len),
        ):
            shape = (windows.shape[0], length, series)
            if given.shape != shape or not len(given):
                raise ValueError(f"{name} must have shape {shape}, got {given.shape}")
        self.backbone = backbone
        self.windows = nnx.Variable(jnp.moveaxis(jnp.asarray(windows), -1, 0))
        self.futures = nnx.Variable(jnp.moveaxis(jnp.asarray(futures), -1, 0))
        self.association = StaticHopfield(
            in_len,
            Association(LearnedAlpha(), beta=beta, learn_beta=True),
            value_size=out_len,
            kernel=_UnitLength(kernel),
            rngs=rngs,
        )
        size = backbone.embed.out_features
        self.embed = nnx.Linear(backbone.segment, size, rngs=rngs)
        start_linear_maps(self.embed, rngs)
        self.gate = nnx.Param(jnp.zeros(()))

    def __call__(
        self, inputs: Float[Array, "*batch in_len series"], *, key: Array | None = None
    ) -> Float[Array, "*batch out_len series"]:
        """The forecast of the backbone, with the hint; no dropout without a key."""
        retrieved = self.pseudo_labels(inputs)
        if self.association.record is not None:  # `separation_losses` are asked for
            return retrieved  # the backbone's kernels are frozen
        retrieved = jnp.swapaxes(retrieved, -1, -2)
        missing = -retrieved.shape[-1] % self.backbone.segment
        width = [(0, 0)] * (retrieved.ndim - 1) + [(0, missing)]
        cut = jnp.pad(retrieved, width, mode="edge")
        cut = cut.reshape(*retrieved.shape[:-1], -1, self.backbone.segment)
        graphdef, state = nnx.split(self.backbone)
        frozen = nnx.merge(graphdef, jax.tree.map(lax.stop_gradient, state))
        return frozen(inputs, hint=self.gate[...] * self.embed(cut), key=key)

    def pseudo_labels(
        self, inputs: Float[Array, "*batch in_len series"]
    ) -> Float[Array, "*batch out_len series"]:
        """The future that each window retrieves from the bank."""
        flat = inputs.reshape(-1, *inputs.shape[-2:])
        states = jnp.moveaxis(flat, -1, 0)
        bank = lax.stop_gradient((self.windows[...], self.futures[...]))
        labels = self.association(states, *bank)
        labels = jnp.moveaxis(labels, 0, -1)
        return labels.reshape(*inputs.shape[:-2], *labels.shape[-2:])


class _UnitLength(nnx.Module):
    """Features of unit length, so that overlaps are cosines."""

    def __init__(self, kernel: nnx.Module | None):
        self.kernel: Any = nnx.data(kernel)

    def __call__(self, patterns: Array) -> Array:
        features = patterns if self.kernel is None else self.kernel(patterns)
        squared = (features * features).sum(-1, keepdims=True)
        return features * lax.rsqrt(jnp.maximum(squared, jnp.finfo(squared.dtype).tiny))
