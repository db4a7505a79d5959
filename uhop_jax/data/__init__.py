"""Data sets as NumPy arrays: patterns to store, images to classify."""

from uhop_jax.data.images import IMAGES, Images, images, prepare
from uhop_jax.data.labelled import labelled_images, subset
from uhop_jax.data.patterns import SYNTHETIC, Patterns, load, read_patterns, synthetic
from uhop_jax.data.pictures import read_pictures

__all__ = [
    "IMAGES",
    "SYNTHETIC",
    "Images",
    "Patterns",
    "images",
    "labelled_images",
    "load",
    "prepare",
    "read_patterns",
    "read_pictures",
    "subset",
    "synthetic",
]
