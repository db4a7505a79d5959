"""Models made of Hopfield layers."""

from uhop_jax.models.bags import BagClassifier
from uhop_jax.models.recall import SequenceModel
from uhop_jax.models.stanhop import STanHop
from uhop_jax.models.tune_and_play import TuneAndPlay
from uhop_jax.models.vision import ViH, VisionHopfield

__all__ = [
    "BagClassifier",
    "STanHop",
    "SequenceModel",
    "TuneAndPlay",
    "ViH",
    "VisionHopfield",
]
