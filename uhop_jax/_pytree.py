"""Frozen dataclasses as pytrees: behaviour is the type, numbers are leaves."""

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen_pytree(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are leaves, but for those marked `static`.

    A static field is `dataclasses.field(metadata={"static": True})`.
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
