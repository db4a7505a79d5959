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
    path: Path, function: Callable[..., Array], *arrays: tuple[Sequence[Any], Any]
) -> str:
    """Writes a function of a batch of examples, with its numbers, by `jax.export`.

    `jax.export.deserialize(bytearray(path.read_bytes())).call(examples)` applies it in
    a program that has neither this library nor Flax, to any number of examples.

    Args:
      path: file in the directory of a run.
      function: of one or several arrays.
      *arrays: shape and dtype of each; names in a shape stand for any size, as in
        `(("batch", 8, 8, 1), jnp.uint8)`.

    Returns:
      A message that names the file, and what the function takes and returns.

    Raises:
      ValueError: if the file exists, and the run has not written it.
    """
    scope = export.SymbolicScope()
    given = [
        jax.ShapeDtypeStruct(
            export.symbolic_shape(", ".join(map(str, shape)), scope=scope), dtype
        )
        for shape, dtype in arrays
    ]
    exported = export.export(jax.jit(function), platforms=PLATFORMS)(*given)
    data = exported.serialize()
    write_file(path, lambda partial: partial.write_bytes(data))
    taken = ", ".join(x.str_short() for x in exported.in_avals)
    (result,) = exported.out_avals
    return f"written to {path}: a function of {taken} that returns {result.str_short()}"
