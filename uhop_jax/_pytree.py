"""Frozen dataclasses as pytrees, and pytrees inside of `jax.shard_map`.

The type of a frozen dataclass is its behaviour; its numbers are leaves.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from uhop_jax._checks import native

T = TypeVar("T")

# Every class of values by the name under which files store it.
TYPES: dict[str, type["Pytree"]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls: type[T]) -> type[T]:
    """A class as a frozen dataclass and a pytree, which `uhop_jax.save` does not know.

    Fields are leaves, except static fields, as in `Pytree`.
    """
    frozen = dataclasses.dataclass(frozen=True)(cls)
    _register(frozen)
    return frozen


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Pytree:
    """The base of frozen dataclasses that are pytrees; subclassing is all.

    Fields are leaves, except static fields, which are declared as
    `dataclasses.field(metadata={"static": True})`. `uhop_jax.save` and `uhop_jax.load`
    know every subclass. Leaves of NumPy are kept in native byte order, which JAX needs.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        pytree(cls)
        TYPES[stored_name(cls)] = cls

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if not field.metadata.get("static"):
                object.__setattr__(self, field.name, native(getattr(self, field.name)))


def stored_name(cls: type) -> str:
    """The name of a class in files: bare for this library's classes, else in full."""
    own = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    return cls.__name__ if own else f"{cls.__module__}.{cls.__qualname__}"


def _register(cls: type) -> None:
    """Registers a frozen dataclass as a pytree.

    The class is part of the static data. `jax.tree_util.register_dataclass` does not
    compare the classes of two structures (jaxlib 0.10), so that the cache of compiled
    programs sometimes confuses two classes with the same number of leaves.
    """
    leaves: list[str] = []
    static: list[str] = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        (static if field.metadata.get("static") else leaves).append(field.name)
    keys = [jax.tree_util.GetAttrKey(name) for name in leaves]

    def flatten(x: Any) -> tuple[tuple, tuple]:
        return (
            tuple(getattr(x, name) for name in leaves),
            (cls, *(getattr(x, name) for name in static)),
        )

    def flatten_with_keys(x: Any) -> tuple[tuple, tuple]:
        children, aux = flatten(x)
        return tuple(zip(keys, children, strict=True)), aux

    def unflatten(aux: tuple, children: Iterable[Any]) -> Any:
        x: Any = object.__new__(cls)
        for name, value in zip(static + leaves, (*aux[1:], *children), strict=True):
            object.__setattr__(x, name, value)
        return x

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def varying_alike(tree: T) -> T:
    """The tree, its leaves made to vary over the same mesh axes in `jax.shard_map`.

    The carry of a loop in `jax.shard_map` must vary from the start over every mesh axis
    over which any later carry varies. Begin a carry with `jnp.full_like` of a leaf, not
    with a constant.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    zeros = [jnp.full_like(x, 0, jnp.int32, shape=()) for x in leaves]
    zero = functools.reduce(jnp.add, zeros, jnp.int32(0))
    return jax.tree.unflatten(
        structure,
        [
            x ^ (zero > 0) if x.dtype == jnp.bool_ else x + zero.astype(x.dtype)
            for x in map(jnp.asarray, leaves)
        ],
    )
