"""Kernels, similarities, memories and calibrations as files: learn once, query later.

A file is an uncompressed `.npz`: the arrays, and a description in JSON of the types
that hold them. Nothing is pickled, and loading builds types of this library alone.
"""

import dataclasses
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from uhop_jax import (
    calibration,
    corruption,
    kernels,
    memory,
    separation,
    similarity,
)

_TYPES: dict[str, type] = {
    cls.__name__: cls
    for module in (kernels, similarity, separation, calibration, corruption, memory)
    for cls in vars(module).values()
    if isinstance(cls, type)
    and dataclasses.is_dataclass(cls)
    and cls is not corruption.Corruption
}
_VERSION = 1


def save(path: str | Path, tree: Any) -> Path:
    """Saves a kernel, similarity, separation, memory, calibration or corruption.

    The file appears whole or not at all: an earlier one of that name is replaced only
    once everything is written.

    Args:
      path: file to write; `.npz` is added and directories are made if missing.
      tree: what to save.

    Returns:
      The path written.

    Raises:
      ValueError: if the type cannot be saved.
    """
    path = Path(path)
    if path.suffix != ".npz":
        path = path.with_name(path.name + ".npz")
    arrays: dict[str, np.ndarray] = {}
    description = {"uhop_jax": _VERSION, "tree": _describe(tree, "tree", arrays)}
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            arrays["description"] = np.asarray(json.dumps(description))
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load(path: str | Path) -> Any:
    """Loads what `save` wrote, bit for bit.

    Without `jax_enable_x64` JAX has no 64-bit arrays: those of a file are rounded to 32
    bits, with a warning.

    Args:
      path: a file that `save` wrote.

    Returns:
      An object of the type saved, its arrays on the default device.

    Raises:
      ValueError: if the file is missing, damaged, or not one of these.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        description = json.loads(str(arrays.pop("description")))
        version, tree = description["uhop_jax"], description["tree"]
        if version <= _VERSION:
            return _build(tree, arrays)
    except _UnknownTypeError as error:
        raise ValueError(f"{path} holds a {error}, unknown to this version") from None
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, TypeError):
        raise ValueError(f"{path} is damaged, or was not saved by uhop_jax") from None
    raise ValueError(
        f"{path} has format {version}, this version of uhop_jax reads up to {_VERSION}"
    )


class _UnknownTypeError(Exception):
    """A type of another version, or of none."""


def _describe(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"plain": value}
    if isinstance(value, (tuple, list)):
        parts = [_describe(v, f"{name}.{i}", arrays) for i, v in enumerate(value)]
        return {"tuple": parts}
    if type(value).__name__ in _TYPES:
        fields = {
            field.name: _describe(
                getattr(value, field.name), f"{name}.{field.name}", arrays
            )
            for field in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, "fields": fields}
    try:
        array = np.asarray(value)
    except TypeError:
        array = np.asarray(None)
    if array.dtype == object:
        raise ValueError(
            f"{name} cannot be saved: got {type(value).__name__}, expected an array or "
            f"one of {', '.join(sorted(_TYPES))}"
        )
    # NumPy's format has no bfloat16: every array travels as bytes, under its name.
    arrays[name] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return {"array": name, "dtype": array.dtype.name, "shape": list(array.shape)}


def _build(node: Any, arrays: dict[str, np.ndarray]) -> Any:
    if "plain" in node:
        return node["plain"]
    if "tuple" in node:
        return tuple(_build(part, arrays) for part in node["tuple"])
    if "array" in node:
        raw = arrays[node["array"]].tobytes()
        array = np.frombuffer(raw, jnp.dtype(node["dtype"])).reshape(node["shape"])
        loaded = jnp.asarray(array)
        if loaded.dtype != array.dtype:
            warnings.warn(
                f"the file holds {array.dtype}, loaded as {loaded.dtype}: set "
                "jax_enable_x64 to keep every digit",
                stacklevel=3,
            )
        return loaded
    if node["type"] not in _TYPES:
        raise _UnknownTypeError(node["type"])
    cls = _TYPES[node["type"]]
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    saved = node["fields"].keys()
    # A field that came later has a default, under which older files mean what they did.
    missing = [name for name in fields.keys() - saved]
    unknown = any(fields[name] is dataclasses.MISSING for name in missing)
    if unknown or saved - fields.keys():
        raise _UnknownTypeError(f"{node['type']} of other fields")
    return cls(**{k: _build(v, arrays) for k, v in node["fields"].items()})
