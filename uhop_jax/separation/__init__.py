r"""Separation functions: from overlaps to weights over the memories.

Each separation is a frozen pytree. `__call__` gives the weights; `conjugate`, where a
separation has one, is the convex function whose gradient the weights are. All methods
act on the last axis; leading axes are free. Nothing sorts: every step is a sum or a
maximum over the memory axis, so it fuses, vectorises and shards.

A masked entry (`where` false, or an overlap of `-inf`) has weight zero and gradient
zero whatever its value, NaN included. A row without any valid entry has all-zero
weights and conjugate zero. NaN at a valid entry makes every weight of the row NaN,
under `Exponentials` its own weight alone. Half-precision overlaps are computed in
float32 and their results returned in half precision.
"""

import dataclasses
from typing import Any

from uhop_jax._checks import check_choice
from uhop_jax.separation.base import Separation
from uhop_jax.separation.density import Epanechnikov, Exponentials
from uhop_jax.separation.entmax import Entmax, Entmax15, Sparsemax, bounded_alpha
from uhop_jax.separation.exponential import Softmax, Softmax1
from uhop_jax.separation.polynomial import Polynomial
from uhop_jax.separation.top_k import TopK

__all__ = [
    "Entmax",
    "Entmax15",
    "Epanechnikov",
    "Exponentials",
    "Polynomial",
    "Separation",
    "Softmax",
    "Softmax1",
    "Sparsemax",
    "TopK",
    "bounded_alpha",
    "separation_from_name",
]

SEPARATIONS: dict[str, type[Separation]] = {
    "softmax": Softmax,
    "softmax1": Softmax1,
    "entmax": Entmax,
    "entmax15": Entmax15,
    "sparsemax": Sparsemax,
    "polynomial": Polynomial,
    "topk": TopK,
}


def check_separation(separation: Any) -> None:
    """Refuses anything but a separation with parameters in range."""
    if not isinstance(separation, Separation):
        names = ", ".join(c.__name__ for c in SEPARATIONS.values())
        raise ValueError(f"separation must be one of {names}, got {separation!r}")
    separation.check()


def separation_from_name(name: str, **parameters: Any) -> Separation:
    """The separation with the name that configs and command lines use.

    Args:
      name: `softmax`, `softmax1`, `entmax`, `entmax15`, `sparsemax`, `polynomial` or
        `topk`.
      **parameters: fields of the separation, such as `alpha`.

    Raises:
      ValueError: if the name or a parameter is unknown; the message lists the choices.
    """
    check_choice("separation", name, SEPARATIONS)
    fields = [field.name for field in dataclasses.fields(SEPARATIONS[name])]  # type: ignore[arg-type]
    for parameter in parameters:
        if parameter not in fields:
            raise ValueError(
                f"unknown parameter {parameter!r} of {name}, which has "
                f"{', '.join(fields) or 'none'}"
            )
    return SEPARATIONS[name](**parameters)
