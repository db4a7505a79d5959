"""Image classifiers of the arms: functions that build them from a config."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from uhop_jax._checks import check_choice
from uhop_jax.models import ViH, VisionHopfield
from uhop_jax.training.application import model_of
from uhop_jax.training.arms import RETRIEVAL, arm_of, association_of
from uhop_jax.training.cells import ImageCell

MODELS = ("vih", "transformer")


def image_model(
    config: ConfigDict, cell: ImageCell, image_shape: Any, classes: int
) -> Callable[[nnx.Rngs], nnx.Module]:
    """A function that builds the model of a cell.

    Raises:
      ValueError: if a value is out of range.
    """
    arm, options = arm_of(cell.arm), dict(config.model)
    name = options.pop("name")
    check_choice("model.name", name, MODELS)
    dtype = jnp.dtype(options.pop("dtype"))
    retrieval = {key: options.pop(key) for key in ("alpha", *RETRIEVAL)}
    association = association_of(arm, **retrieval)
    start = options.pop("kernel_start")
    options["patch"] = cell.patch
    blocks = {key: options.pop(key) for key in ("depth", "mlp_size", "mlp_dropout")}
    kind = ViH if name == "vih" else VisionHopfield
    if kind is VisionHopfield:
        options |= blocks | {"mlp_size": blocks["mlp_size"] or None}
    size, heads = options.pop("size"), options["num_heads"]
    options |= {"association": association, "dtype": dtype}
    options["value_size"] = size if arm.reference else None
    build = functools.partial(kind, image_shape, classes, **options)
    return model_of(arm, build, size, heads, start=start, dtype=dtype)
