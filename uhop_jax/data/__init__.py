"""Data sets as NumPy arrays: patterns to store, images to classify, time series."""

from uhop_jax.data.bags import PUBLISHED, Bags, bags, image_bags, read_bags
from uhop_jax.data.folds import Fold, folds
from uhop_jax.data.house import simulated_house
from uhop_jax.data.images import IMAGES, Images, images, prepare
from uhop_jax.data.labelled import labelled_images, subset
from uhop_jax.data.patterns import (
    CHANNELS,
    SYNTHETIC,
    Patterns,
    load,
    read_patterns,
    synthetic,
)
from uhop_jax.data.pictures import read_pictures
from uhop_jax.data.series import SERIES, SOURCES, Series, read_series, series
from uhop_jax.data.windows import (
    Borders,
    Scaler,
    Splits,
    Windows,
    borders,
    scaler_of,
    splits,
    window_batch,
    windows,
)

__all__ = [
    "CHANNELS",
    "IMAGES",
    "PUBLISHED",
    "SERIES",
    "SOURCES",
    "SYNTHETIC",
    "Bags",
    "Borders",
    "Fold",
    "Images",
    "Patterns",
    "Scaler",
    "Series",
    "Splits",
    "Windows",
    "bags",
    "borders",
    "folds",
    "image_bags",
    "images",
    "labelled_images",
    "load",
    "prepare",
    "read_bags",
    "read_patterns",
    "read_pictures",
    "read_series",
    "scaler_of",
    "series",
    "simulated_house",
    "splits",
    "subset",
    "synthetic",
    "window_batch",
    "windows",
]
