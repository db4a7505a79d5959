"""The result of a Hopfield layer's retrieval, with or without an axis of heads."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Association(NamedTuple):
    """Result of `Hopfield.associate`.

    Attributes:
      output: `(..., L, out_size)`, the array that `__call__` returns.
      weights: `(..., heads, L, S)` before dropout; `(..., L, S)` for a static layer. A
        bias pattern and a zero memory add a column each.
      energy: energy of the retrieved state for each row of the weights; None if the
        model has no energy.
      steps: int32, number of updates for each row of the weights.
      converged: whether the state of each row reached a fixed point; None if the number
        of steps is fixed.
    """

    output: Float[Array, "*batch L out"]
    weights: Float[Array, "*rows S"]
    energy: Float[Array, "*rows"] | None
    steps: Int[Array, "*rows"]
    converged: Bool[Array, "*rows"] | None


# The axis of heads in each field while a layer computes.
HEAD_AXES: Any = Association._make((-2, -3, -2, -2, -2))


def map_head_axis(
    result: Association, change: Callable[[Array, int], Array]
) -> Association:
    """The result with `jnp.squeeze` or `jnp.expand_dims` applied to its heads axis."""
    fields = zip(result, HEAD_AXES, strict=True)
    return Association._make(x if x is None else change(x, at) for x, at in fields)
