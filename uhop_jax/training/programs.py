"""Compiled programs that live as long as the objects that share them."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def jitted(**options: Any) -> Any:
    """Makes a method a program, compiled once for all objects that share `programs`.

    Callers leave out its first argument, the `keys` of the object: they are an argument
    of the program, so that objects of other seeds can share it. A program goes with its
    objects: as a static argument, the object, with all data that it holds, would stay
    in a cache of JAX for as long as the process runs.
    """

    def attribute(method: Callable) -> property:
        name = method.__name__

        @functools.wraps(method)
        def bound(self: Any) -> Callable:
            if name not in self.programs:
                program = functools.partial(method, self)
                self.programs[name] = jax.jit(program, **options)
            return functools.partial(self.programs[name], self.keys)

        return property(bound)

    return attribute
