"""The three protocols: which methods are compared, and under which settings.

- `fair`: every method at its own best beta and kernel, chosen on other memories.
- `paper`: one beta, a Gaussian start, constant rates (1 unless others are given), rows
  of `W` normalised at the end; distances with the sign that retrieves the nearest.
- `reference`: as the authors' code runs, oddities included: kept pixels are divided by
  their share, noise is folded, distances retrieve the farthest, powers are not
  normalised, Stage I sees half of the memories in the mask task, rows are not
  normalised, and the rate of its average-loss trainer falls as `1 / sqrt(n!)`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array
from ml_collections import ConfigDict

from uhop_jax._checks import (
    check_at_least,
    check_choice,
    check_count,
    check_named,
    check_positive,
)
from uhop_jax.experiments.methods import (
    BLIND,
    CALIBRATED,
    FAIR,
    LIMIT,
    PAPER,
    Method,
    Settings,
)
from uhop_jax.experiments.rivals import RIVALS
from uhop_jax.separation import Polynomial, Softmax
from uhop_jax.separation.forms import Largest
from uhop_jax.similarity import Cosine, Dot, NegativeL1, NegativeL2, NegativeSquaredL2


class Protocol(NamedTuple):
    """Methods and their settings.

    Attributes:
      methods: the methods compared.
      settings: of the kernels of the methods.
      beta: inverse temperature of all methods, or None to choose it for each.
    """

    methods: tuple[Method, ...]
    settings: Settings
    beta: float | None


class PositiveL2(NegativeL2):
    """The distance itself as a similarity, which retrieves the farthest memory."""

    def _compare(self, keys, state, restrict) -> Array:
        return -super()._compare(keys, state, restrict)


class PositiveL1(NegativeL1):
    """The distance itself as a similarity, which retrieves the farthest memory."""

    def _compare(self, keys, state, restrict) -> Array:
        return -super()._compare(keys, state, restrict)


REFERENCE = (
    *PAPER,
    Method("DAM 10, normalised", Dot, Polynomial(10)),
    Method("l2, released sign", PositiveL2, Softmax()),
    Method("l1, released sign", PositiveL1, Softmax()),
    Method("U-Hop, rate 1", Dot, Softmax(), "average 1", "kernel"),
    Method("U-Hop, rate 10", Dot, Softmax(), "average 10", "kernel"),
)


METHODS: dict[str, tuple[Method, ...]] = {
    "fair": FAIR,
    "paper": PAPER,
    "reference": REFERENCE,
}


_SIMILARITIES: dict[Any, str] = {
    Dot: "dot product",
    Cosine: "cosine",
    NegativeSquaredL2: "squared l2 distance",
    NegativeL2: "l2 distance",
    NegativeL1: "l1 distance",
    PositiveL2: "l2 distance, the farthest first",
    PositiveL1: "l1 distance, the farthest first",
}
_FAMILIES = {
    "centred": " of patterns less the mean of the memories",
    "two-sided": " of memories and queries, each less their own mean",
    "random": " of features of a Gaussian kernel",
    "average": " of features learned by Stage I, average loss",
    "maximum": " of features learned by Stage I, maximum loss",
    "annealed": " of features learned by U-Hop+",
    "closed": " of whitened patterns",
    "likelihood": ", the log-likelihood learned from corrupted copies",
}
_OTHERS = {
    CALIBRATED: "similarity, kernel and beta by `calibrate`, on corrupted copies",
    BLIND: "similarity, kernel and beta by `calibrate_blind`, on the queries alone",
    "known corruption": "the likelihood learned from corrupted copies, at beta 1",
    LIMIT: "the posterior mean, which knows the corruption: the least expected error",
    **RIVALS,
}


# Families of kernels that Stage I learns in steps.
LEARNED = ("average", "maximum", "annealed", "average 1", "average 10")


def meaning(name: str) -> str:
    """Similarity and separation that the name of a method stands for, in words."""
    if name in _OTHERS:
        return _OTHERS[name]
    methods = {method.name: method for method in (*REFERENCE, *FAIR)}
    methods["dot"] = methods["MHM"]
    method = methods[name]
    family = _FAMILIES[method.family.split()[0]] if method.family else ""
    separation = type(method.separation).__name__.lower()
    nearest = method.separation.form == Largest(1)
    return f"{_SIMILARITIES[method.similarity]}{family}; " + (
        "the nearest memory alone" if nearest else separation
    )


def check(config: ConfigDict) -> None:
    """Refuses a protocol, method or setting that is unknown or out of range.

    Raises:
      ValueError: if one is; the message names it.
    """
    check_choice("protocol", config.protocol, METHODS)
    options = config.stage_one
    check_positive("stage_one.t", options.t)
    check_positive("stage_one.relative_rate", options.relative_rate)
    if not options.rate_factors:
        raise ValueError("stage_one.rate_factors must name at least one, got none")
    for factor in options.rate_factors:
        check_positive("stage_one.rate_factors", factor)
    fixed = config.protocol == "reference" or config.variant == "scatter"
    if fixed and set(options.rate_factors) != {1}:
        raise ValueError(
            "stage_one.rate_factors must be (1.0,) where rates are given, in the "
            "reference protocol and the scatter variant, got "
            f"{tuple(options.rate_factors)}"
        )
    check_choice("stage_one.start", options.start, ("gaussian", "identity"))
    check_positive("beta", config.beta)
    for number in options.steps:
        check_count("stage_one.steps", number, 0)
    for ridge in options.ridges:
        check_positive("stage_one.ridges", ridge)
    if config.variant == "metastability":
        check_named(alphas=config.alphas)
        for alpha in config.alphas:
            check_at_least("alphas", alpha, 1.0)
    if config.variant == "blind":
        check_named(queries=config.queries)
        for number in config.queries:
            check_count("queries", number, 1)
        for name in config.methods:
            check_choice("method of the blind variant", name, RIVALS)
        if "known_mask" in config.corruption.kinds:
            raise ValueError(
                "corruption.kinds: the blind variant hides which components are known, "
                "got known_mask"
            )
        return
    known = [method.name for method in METHODS[config.protocol]]
    extra = [CALIBRATED, BLIND, LIMIT] if config.protocol == "fair" else []
    for name in config.methods:
        what = f"method of the {config.protocol} protocol"
        check_choice(what, name, [*known, *extra])
    if config.methods and not set(known) & set(config.methods):
        raise ValueError(
            "methods must name at least one besides calibrated, blind, limit"
        )
    alone = {"scatter": ["U-Hop"], "metastability": ["MHM", "U-Hop"]}
    alone["temperature"] = known  # what is calibrated has one beta, the limit none
    for name in config.methods:
        check_choice(
            f"method of the {config.variant} variant",
            name,
            alone.get(config.variant, [*known, *extra]),
        )
    learned = [m.name for m in METHODS[config.protocol] if m.family in LEARNED]
    by_steps = config.variant in ("stage_one", "losses")
    if by_steps and config.methods and not set(learned) & set(config.methods):
        raise ValueError(
            f"methods of the {config.variant} variant must name at least one of "
            f"{', '.join(learned)}, got {', '.join(config.methods)}"
        )


def protocol_of(config: ConfigDict, dimension: int) -> Protocol:
    """The protocol of a config that `check` passed, for patterns of a dimension."""
    options = config.stage_one
    steps = tuple(sorted({int(n) for n in options.steps}))
    factors = tuple(sorted({float(factor) for factor in options.rate_factors}))
    if config.protocol == "fair":
        settings = Settings(
            options.start,
            relative_rates=dict.fromkeys(("average", "maximum"), options.relative_rate),
            steps={"average": steps, "maximum": steps},
            factors=factors,
            t=options.t,
            ridges=tuple(options.ridges),
        )
    elif config.protocol == "paper":
        settings = Settings(
            "gaussian",
            relative_rates={"average": 1 / dimension, "maximum": 1 / dimension},
            steps={"average": steps, "maximum": steps},
            factors=factors,
            t=options.t,
            normalize_rows=True,
        )
    else:
        rates = {
            "average": falling_rates(max(steps)) / dimension,
            "maximum": 10 / dimension,
            "average 1": 1 / dimension,
            "average 10": 10 / dimension,
        }
        settings = Settings(
            "gaussian",
            relative_rates=rates,
            steps=dict.fromkeys(rates, steps),
            t=options.t,
            masked_share=0.5,
        )
    methods = METHODS[config.protocol]
    if config.methods:
        methods = tuple(m for m in methods if m.name in config.methods)
    beta = None if config.protocol == "fair" else config.beta
    return Protocol(methods, settings, beta)


def resolve(config: ConfigDict) -> ConfigDict:
    """The config, with numbers of Stage I steps if it names none.

    The paper's number is 100 for small grey images, 200 for other images in the noise
    variant, and 500 elsewhere. The fair protocol chooses among a tenth of the number,
    three tenths and the whole.
    """
    if config.stage_one.steps:
        return config
    number = 200 if config.variant == "noise" else 500
    if config.data.name in ("digits", "mnist"):
        number = 100
    steps = (number // 10, 3 * number // 10, number)
    resolved = ConfigDict(config.to_dict())
    resolved.stage_one.steps = steps if config.protocol == "fair" else (number,)
    return resolved.lock()


def falling_rates(steps: int) -> np.ndarray:
    """Rates `1 / sqrt(n!)` of steps `n = 0, 1, ...`: the decay of the authors' code."""
    return np.asarray([math.exp(-0.5 * math.lgamma(n + 1)) for n in range(steps)])
