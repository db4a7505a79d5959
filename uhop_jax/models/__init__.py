"""Models made of Hopfield layers."""

from uhop_jax.models.stanhop import STanHop, TuneAndPlay
from uhop_jax.models.vision import ViH, VisionHopfield

__all__ = ["STanHop", "TuneAndPlay", "ViH", "VisionHopfield"]
