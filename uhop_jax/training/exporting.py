"""A trained model as a file that JAX alone can run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export
from jaxtyping import Array

from uhop_jax.workdir import write_file

FILE = "model.jax_export"
PLATFORMS = ("cpu", "cuda", "tpu")


def write_export(
    path: Path,
    function: Callable[[Array], Array],
    shape: Sequence[int],
    dtype: Any,
    *,
    axis: str = "batch",
) -> str:
    """Writes a function of a batch of examples, with its numbers, by `jax.export`.

    `jax.export.deserialize(bytearray(path.read_bytes())).call(examples)` applies it in
    a program that has neither this library nor Flax, to any number of examples.

    Args:
      path: file in the directory of a run.
      function: of examples `(batch, *shape)`.
      shape: of one example.
      dtype: of an example.
      axis: name of the number of examples.

    Returns:
      A message that names the file, and what the function takes and returns.

    Raises:
      ValueError: if the file exists, and the run has not written it.
    """
    sizes = export.symbolic_shape(", ".join(map(str, (axis, *shape))))
    examples = jax.ShapeDtypeStruct(sizes, dtype)
    exported = export.export(jax.jit(function), platforms=PLATFORMS)(examples)
    data = exported.serialize()
    write_file(path, lambda partial: partial.write_bytes(data))
    (given,), (result,) = exported.in_avals, exported.out_avals
    return f"written to {path}: a function of {given.str_short()} that returns " + (
        result.str_short()
    )
