"""Compiled programs that live as long as their object."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def jitted(**options: Any) -> Callable[[Callable], Any]:
    """Makes `jax.jit` of a method an attribute of each object.

    A program goes with its object: as a static argument, the object, with all data that
    it holds, would stay in a cache of JAX for as long as the process runs.
    """

    def attribute(method: Callable) -> Any:
        @functools.wraps(method)
        def compiled(self: Any) -> Callable:
            return jax.jit(functools.partial(method, self), **options)

        return functools.cached_property(compiled)

    return attribute
