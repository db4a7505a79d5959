"""Image classifiers of the arms: functions that build them from a config."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from uhop_jax._checks import check_choice
from uhop_jax.models import ViH, VisionHopfield
from uhop_jax.training.application import with_matched_size
from uhop_jax.training.arms import RETRIEVAL, arm_of, association_of, features_of
from uhop_jax.training.cells import ImageCell

MODELS = ("vih", "transformer")
DTYPES = ("float32", "bfloat16", "float16")


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
    check_choice("model.dtype", options["dtype"], DTYPES)
    dtype = jnp.dtype(options.pop("dtype"))
    retrieval = {key: options.pop(key) for key in ("alpha", *RETRIEVAL)}
    association = association_of(arm, **retrieval)
    start = options.pop("kernel_start")
    options["patch"] = cell.patch
    blocks = {key: options.pop(key) for key in ("depth", "mlp_size", "mlp_dropout")}
    kind = ViH if name == "vih" else VisionHopfield
    if kind is VisionHopfield:
        options |= blocks | {"mlp_size": blocks["mlp_size"] or None}

    def with_size(size: int, kernel: bool, rngs: nnx.Rngs) -> nnx.Module:
        def features() -> nnx.Module:
            first = arm.start or start
            return features_of(arm, size, start=first, dtype=dtype, rngs=rngs)

        return kind(
            image_shape,
            classes,
            association=association,
            kernel=features if kernel else False,
            value_size=size if arm.reference else None,
            dtype=dtype,
            rngs=rngs,
            **options | {"size": size},
        )

    return with_matched_size(
        with_size,
        options["size"],
        options["num_heads"],
        matched=arm.matched,
        kernel=arm.kernel,
    )
