"""Kernels, similarities, memories and calibrations as files: learn once, query later.

A file is an uncompressed `.npz` with the arrays and a JSON description of the objects
that contain them. Nothing is pickled: loading creates only subclasses of `Pytree`, of
this library or defined by the running program.
"""

import dataclasses
import inspect
import json
import os
import secrets
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Array

from uhop_jax import kernels
from uhop_jax._checks import native
from uhop_jax._files import read_archive, reading, user_path
from uhop_jax._pytree import TYPES, Pytree, stored_name

_VERSION = 2
DEEPEST = 50  # largest depth of nested descriptions


def _is_kernel(x: Any) -> bool:
    return isinstance(x, kernels.Kernel)


def save(path: str | Path, tree: Any) -> Path:
    """Saves a model, kernel, similarity, separation, loss, memory or calibration.

    The file is written completely or not at all: an existing file is replaced only
    after everything is written. If several processes write, the last one wins.

    Args:
      path: file to write. The suffix `.npz` and missing directories are added.
      tree: the object to save, or a tuple of such objects.

    Returns:
      The path of the file.

    Raises:
      ValueError: if the type cannot be saved, or a kernel holds NaN.
    """
    for part in jax.tree.leaves(tree, is_leaf=_is_kernel):
        if _is_kernel(part):
            kernels.check_numbers(part)
    path = user_path(path)
    if path.suffix != ".npz":
        path = path.with_name(path.name + ".npz")
    arrays: dict[str, np.ndarray] = {}
    description = {"uhop_jax": _VERSION, "tree": _describe(tree, "tree", arrays)}
    arrays["description"] = np.asarray(json.dumps(description))
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    write_whole(path, write)
    return path


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file, in a directory that exists, completely or not at all.

    `write` writes it to a temporary path with the suffix of `path`, where it is then
    renamed to `path`.
    """
    partial = path.with_name(
        f".{path.stem[:40]}.{secrets.token_hex(8)}.partial{path.suffix}"
    )
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | Path) -> Any:
    """Loads the object in a file of `save`, its arrays bit for bit.

    Without `jax_enable_x64` JAX has no 64-bit arrays: 64-bit arrays of the file are
    then rounded to 32 bits, with a warning.

    Args:
      path: a file written by `save`.

    Returns:
      An object of the saved type, its arrays on the default device.

    Raises:
      ValueError: if the file is missing, damaged, or was not written by `save`.
    """
    path = user_path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    arrays = read_archive(path)
    with reading(path, "file that uhop_jax saved"):
        description = json.loads(str(arrays.pop("description")))
        version, tree = description["uhop_jax"], description["tree"]
        readable = version <= _VERSION
    if not readable:
        raise ValueError(
            f"{path} has format {version}, this version of uhop_jax reads up to "
            f"{_VERSION}"
        )
    try:
        return _build(tree, "tree", arrays)
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None


def _describe(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """The JSON description of a value; its arrays are added to `arrays`.

    `name` is the path of the value in the saved object, such as `tree.kernel.weights`.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"plain": value}
    if isinstance(value, (tuple, list)):
        parts = [_describe(v, f"{name}.{i}", arrays) for i, v in enumerate(value)]
        return {"tuple": parts}
    if isinstance(value, Pytree):
        fields = {}
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            x = getattr(value, field.name)
            x = _plain(x) if field.metadata.get("static") else x
            fields[field.name] = _describe(x, f"{name}.{field.name}", arrays)
        return {"type": stored_name(type(value)), "fields": fields}
    try:
        array = native(np.asarray(value))
    except TypeError:
        array = np.asarray(None)
    if array.dtype == object:
        raise ValueError(
            f"{name} cannot be saved: got {type(value).__name__}, expected an array or "
            "a subclass of Pytree such as a kernel, similarity, separation or memory"
        )
    # NumPy's format has no bfloat16: every array is stored as bytes.
    arrays[name] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return {"array": name, "dtype": array.dtype.name, "shape": list(array.shape)}


def _plain(value: Any) -> Any:
    """A static value with numbers of Python for numbers of NumPy."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _build(node: Any, name: str, arrays: Mapping[str, np.ndarray]) -> Any:
    """The object of a description; `name` is its path in the saved object."""
    if name.count(".") > DEEPEST:
        raise ValueError(f"{name[:20]}... is nested more than {DEEPEST} deep")
    match node:
        case {"plain": None | bool() | int() | float() | str() as value}:
            return value
        case {"tuple": [*parts]}:
            return tuple(_build(x, f"{name}.{i}", arrays) for i, x in enumerate(parts))
        case {"array": str(key), "dtype": str(dtype), "shape": [*shape]}:
            return _array(name, arrays.get(key), dtype, shape)
        case {"type": str(kind), "fields": {**nodes}} if _creates(kind):
            return _object(TYPES[kind], name, nodes, arrays)
        case {"type": str(kind)}:
            hint = "this version of uhop_jax"
            if "." in kind:
                hint = "this program, which has to import its module first"
            raise ValueError(f"{name}: a {kind} is unknown to {hint}")
    raise ValueError(f"{name} is damaged, or was not saved by uhop_jax")


def _creates(kind: str) -> bool:
    """Whether objects of a stored type can be created."""
    return kind in TYPES and not inspect.isabstract(TYPES[kind])


def _array(name: str, stored: Any, dtype: str, shape: list) -> Array:
    """The array of stored bytes."""
    try:
        array = np.frombuffer(stored.tobytes(), jnp.dtype(dtype)).reshape(shape)
        loaded = jnp.asarray(array)
    except Exception:  # NumPy and JAX raise many types for invalid dtypes and shapes
        raise ValueError(
            f"{name}: there are no numbers of dtype {dtype} and shape {shape}"
        ) from None
    if loaded.dtype != array.dtype:
        warnings.warn(
            f"the file holds {array.dtype}, loaded as {loaded.dtype}: set "
            "jax_enable_x64 to keep every digit",
            stacklevel=3,
        )
    return loaded


def _object(cls: type, name: str, nodes: dict, arrays: Mapping[str, np.ndarray]) -> Any:
    """The dataclass whose fields have the descriptions `nodes`."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    # A field that older files lack has a default, which keeps their meaning.
    missing = [field for field in defaults.keys() - nodes.keys()]
    unknown = any(defaults[field] is dataclasses.MISSING for field in missing)
    if unknown or nodes.keys() - defaults.keys():
        raise ValueError(
            f"{name}: a {cls.__name__} of other fields is unknown to this version of "
            "uhop_jax"
        )
    hints = typing.get_type_hints(cls)
    fields = {}
    for field, node in nodes.items():
        value = _build(node, f"{name}.{field}", arrays)
        if not _fits(value, hints[field]):
            raise ValueError(
                f"{name}.{field} of a {cls.__name__} has a wrong type, "
                f"{type(value).__name__}"
            )
        fields[field] = value
    return cls(**fields)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation; array shapes are not checked."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        return isinstance(value, tuple) and all(_fits(x, kind) for x in value)
    if hint is Any:
        return True
    if issubclass(hint, jaxtyping.AbstractArray):
        hint = Array | float
    if hint is float:
        hint = float | int
    return isinstance(value, hint)
