"""What a Hopfield layer finds, with or without its axis of heads."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Association(NamedTuple):
    """What `associate` found.

    Attributes:
      output: `(..., L, out_size)`, what `__call__` returns.
      weights: `(..., heads, L, S)` before dropout; `(..., L, S)` of a static layer. A
        bias pattern and a zero memory are further columns.
      energy: one for each row of the weights, of the retrieved state; None if the model
        has no energy.
      steps: int32, updates used by each row.
      converged: whether each row stood still; None if the number of steps is fixed.
    """

    output: Float[Array, "*batch L out"]
    weights: Float[Array, "*rows S"]
    energy: Float[Array, "*rows"] | None
    steps: Int[Array, "*rows"]
    converged: Bool[Array, "*rows"] | None


# Where the heads are while a layer computes.
HEAD_AXES: Any = Association._make((-2, -3, -2, -2, -2))


def moved(found: Association, change: Callable[[Array, int], Array]) -> Association:
    """The single axis of heads squeezed out or put in."""
    fields = zip(found, HEAD_AXES, strict=True)
    return Association._make(x if x is None else change(x, at) for x, at in fields)
