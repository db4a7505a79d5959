"""Models made of Hopfield layers."""

from uhop_jax.models.vision import ViH, VisionHopfield

__all__ = ["ViH", "VisionHopfield"]
