"""Memory retrieval.

    python retrieve.py --config=configs/retrieval.py:demo

`demo` (the default) stores 100 handwritten digits at a time, masks half of the pixels
of each, and retrieves them with every method at its own best inverse temperature. It
downloads nothing and takes under a minute on two CPU cores.
"""

import ml_collections

VARIANTS = ("demo",)


def get_config(variant: str = "demo") -> ml_collections.ConfigDict:
    """The config of a variant.

    Raises:
      ValueError: if the variant is unknown.
    """
    if variant not in VARIANTS:
        raise ValueError(
            f"unknown variant {variant!r}; choose one of {', '.join(VARIANTS)}"
        )
    config = ml_collections.ConfigDict()
    config.variant = variant
    config.seed = 0
    config.data = "digits"
    config.memories = 100  # patterns in a memory set
    config.sets = 10  # memory sets that are scored
    config.tuning_sets = 5  # other memory sets, on which each beta is chosen
    config.images = 6  # rows of the figure

    config.corruption = ml_collections.ConfigDict()
    config.corruption.kind = "mask"  # or "noise"
    config.corruption.fraction = 0.5  # of the pixels, set to zero
    config.corruption.scale = 0.5  # standard deviation of the noise, then clamped

    config.stage_one = ml_collections.ConfigDict()
    config.stage_one.loss = "average"  # or "maximum", "deep"
    config.stage_one.t = 2.0
    config.stage_one.rate = 0.03  # in units of the dimension: W moves by rate * d
    config.stage_one.steps = (
        1,
        3,
        10,
        30,
        100,
    )  # of which the best is chosen, as beta is
    config.stage_one.start = "identity"  # or "gaussian", the paper's
    return config
