"""Classifiers of bags of the arms: functions that build them from a config."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from uhop_jax.models import BagClassifier
from uhop_jax.training.application import model_of
from uhop_jax.training.arms import RETRIEVAL, arm_of, association_of
from uhop_jax.training.cells import BagCell


def bag_model(
    config: ConfigDict, cell: BagCell, features: int
) -> Callable[[nnx.Rngs], nnx.Module]:
    """A function that builds the model of a cell.

    Args:
      config: as `configs/bags.py` makes it.
      cell: arm, beta and dropout.
      features: of an instance.

    Raises:
      ValueError: if a value is out of range.
    """
    arm, options = arm_of(cell.arm), dict(config.model)
    options["dtype"] = jnp.dtype(options["dtype"])
    options["normalize"] = tuple(options["normalize"])
    options["head_size"] = options["head_size"] or None
    options |= {"beta": cell.beta, "dropout": cell.dropout}
    retrieval = {name: options.pop(name) for name in ("alpha", *RETRIEVAL)}
    association = association_of(arm, **retrieval)
    start, size = options.pop("kernel_start"), options.pop("size")
    if arm.matched and not size:
        raise ValueError(
            f"arm {cell.arm!r} makes the embedding wider and needs one, got model.size "
            f"{size}"
        )
    build = functools.partial(
        BagClassifier, features, association=association, **options
    )
    heads, dtype = options["num_heads"], options["dtype"]
    return model_of(arm, build, size, heads, start=start, dtype=dtype, width=features)
