"""Streamed retrieval from an array on the device: compiled loops, and gradients."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from uhop_jax._checks import as_boolean, as_floating
from uhop_jax._pytree import varying_alike
from uhop_jax.separation.forms import Largest, Root, Whole
from uhop_jax.streaming._passes import average, check_values, run_queries, weights_of
from uhop_jax.streaming._supports import GROUPS
from uhop_jax.streaming._tiles import PatternTile, Plan, QueryModel, Tile, across, total


class ArraySource(NamedTuple):
    """A source: memories `(M, d)` on the device, with values and a mask or None."""

    memories: Array
    values: Array | None
    mask: Array | None

    @classmethod
    def of(cls, memories: Any, values: Any, mask: Any) -> "ArraySource":
        """The source of checked arrays."""
        memories = as_floating(memories, "memories")
        if memories.ndim != 2:
            raise ValueError(f"memories must have shape (M, d), got {memories.shape}")
        count = memories.shape[0]
        if mask is not None:
            mask = as_boolean("mask", mask)
            if mask.shape != (count,):
                raise ValueError(f"mask must have shape ({count},), got {mask.shape}")
        if values is not None:
            values = as_floating(values, "values")
            check_values(values.shape, memories.shape)
        return cls(memories, values, mask)

    @property
    def sample(self) -> Array:
        """Memories from which dimension and dtype are read."""
        return self.memories

    @property
    def value_samples(self) -> tuple[Array, ...]:
        """The values, if any, from which their dtype is read."""
        return () if self.values is None else (self.values,)

    @property
    def length(self) -> int:
        """Number of memories."""
        return self.memories.shape[0]

    @property
    def own(self) -> int:
        """Number of memories that come before those of any window."""
        return 0

    def run(self, plan: Plan, model: QueryModel, query: Array) -> tuple[Array, ...]:
        """The fields of `Streamed` for queries `(Q, d)`."""
        return _run_on_device(plan, *varying_alike((model, query, self)))

    def width(self, y: Array, update: bool) -> int:
        """Dimension of the averaged patterns: keys in an update, else values."""
        if update:
            return y.shape[-1]
        return (self.memories if self.values is None else self.values).shape[-1]

    def tile(self, start: Array, size: int, inside: Array | None, dtype: Any) -> Tile:
        """`size` memories from `start` on, of which those `inside` are valid."""
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), self)
        memories, values = jax.tree.map(lambda x: x.astype(dtype), without_masked(part))
        mask = part.mask
        if inside is not None:
            mask = inside if mask is None else mask & inside
        return PatternTile((memories, values), mask, start, dtype)

    def zero_parts(self) -> Any:
        """Zeros to which a pass adds the derivatives in the parts of each tile."""
        return jax.tree.map(jnp.zeros_like, (self.memories, self.values))


def check_unsplit(**arguments: Any) -> None:
    """Raises if an argument, by name, holds an array that explicit mesh axes split.

    The loops cut tiles out of the arrays, whose splitting JAX cannot follow as a type.
    """
    for name, argument in arguments.items():
        for x in jax.tree.leaves(argument):
            if isinstance(x, jax.Array) and any(jax.typeof(x).sharding.spec):
                raise ValueError(
                    f"{name} must not be split over mesh axes of type "
                    "AxisType.Explicit to be streamed (memory_mesh() makes axes of "
                    f"type AxisType.Auto), got {jax.typeof(x)}"
                )


@functools.partial(jax.jit, static_argnames="plan")
def _run_on_device(plan: Plan, model: QueryModel, query: Array, stored: ArraySource):
    """Runs blocks of `plan.queries` queries, one after another."""
    driver = OnDevice(plan, stored)
    count, size = query.shape[0], plan.queries
    if count <= size:
        return run_queries(driver, plan, model, query)

    def split(x: Array) -> Array:
        widths = ((0, -count % size), *(((0, 0),) * (x.ndim - 1)))
        return jnp.pad(x, widths, mode="edge").reshape(-1, size, *x.shape[1:])

    def block(parts):
        query, per_query = parts
        return run_queries(driver, plan, model.with_rows(per_query), query)

    results = lax.map(block, jax.tree.map(split, (query, model.per_query)))
    return tuple(x.reshape(x.shape[0] * size, *x.shape[2:])[:count] for x in results)


class OnDevice:
    """The driver of passes over an array, inside a compiled program.

    A driver has loops (`repeat`), branches (`when`), passes (`fold`), averages and
    fetched patterns (`take`), which `_passes` calls.
    """

    repeat = staticmethod(lax.while_loop)

    @staticmethod
    def when(condition: Array, run: Callable[[], Any], otherwise: Any) -> Any:
        """`run()` if the condition holds, else `otherwise`."""
        return lax.cond(condition, run, lambda: otherwise)

    def __init__(
        self,
        plan: Plan,
        stored: Any,
        window: "Window | None" = None,
        axis: str | None = None,
    ):
        self.plan, self.stored, self.axis = plan, stored, axis
        self.window = Window(stored.length) if window is None else window
        self.count = self.window.count + stored.own
        self.groups = min(GROUPS, plan.tile, stored.length)
        if axis is not None:
            self.count = lax.psum(self.count, axis)

    @property
    def once(self) -> Any:
        """One on one of the devices over which memories are split, else zero."""
        return 1 if self.axis is None else first_on(self.axis).astype(jnp.float32)

    def width(self, y: Array, update: bool) -> int:
        """Dimension of the averaged patterns: keys in an update, else values."""
        return self.stored.width(y, update)

    def fold(self, step, model, y, extra, carry, update, active=None):
        """A pass: `step` carried over all tiles, without derivatives."""
        del active  # the shapes are static: all queries take part
        model, y, stored = lax.stop_gradient((model, y, self.stored))
        arguments = model, y, extra, carry
        if self.axis is None:
            return fold_tiles(step, self.plan, arguments, stored, update, self.window)
        arguments, stored = varying_alike((arguments, stored))
        end = fold_tiles(step, self.plan, arguments, stored, update, self.window)
        merge = getattr(step, "across", None)
        if merge is None:
            return end
        merged = merge(model, end, self.axis)
        # Branches and loops need one type: all carries vary, though they are equal.
        return varying_alike((merged, lax.axis_index(self.axis)))[0]

    def average(self, model: QueryModel, y: Array, update: bool) -> tuple[Array, Any]:
        """Weighted average `(Q, v)`, with derivatives, and the threshold."""
        if isinstance(model.separation.form, Largest | Whole):
            return average(self, model, y, update)
        out, threshold = _differentiable(self.plan, update, model, y, self.stored)
        return out, lax.stop_gradient(threshold)

    def overlaps(self, model: QueryModel, y: Array) -> Array:
        """All overlaps `(Q, M)`, with derivatives."""
        return self._whole().overlaps(model, y)[1]

    def weighted(
        self, weights: Array, model: QueryModel, y: Array, update: bool
    ) -> Array:
        """The average `(Q, v)` under given weights `(Q, M)`, with derivatives."""
        tile = self._whole()
        keys = tile.keys(model)
        return tile.weigh(weights, keys, update).astype(y.dtype)

    def _whole(self) -> Tile:
        """All memories as one tile."""
        start = jnp.zeros((), jnp.int32)
        return self.stored.tile(start, self.stored.length, None, self.plan.dtype)

    def take(self, index: Array) -> tuple[Array, Array | None]:
        """Memories and values at `index (Q, k)`."""
        stored = jax.tree.map(lambda x: x[index], self.stored._replace(mask=None))
        return jax.tree.map(
            lambda x: x.astype(self.plan.dtype), (stored.memories, stored.values)
        )


def without_masked(stored: ArraySource) -> tuple[Array, Array | None]:
    """Memories and values, zero where masked: a masked memory may be NaN."""

    def cleared(x: Array) -> Array:
        if stored.mask is None:
            return x
        return jnp.where(stored.mask[:, None], x, jnp.zeros((), x.dtype))

    return jax.tree.map(cleared, (stored.memories, stored.values))


def first_on(axis: str) -> Array:
    """Whether this device is the first along a mesh axis of `jax.shard_map`."""
    return lax.axis_index(axis) == 0


class Window(NamedTuple):
    """`count` consecutive memories from `offset` on; numbers, or traced scalars."""

    count: Any
    offset: Any = 0


def fold_tiles(
    step, plan: Plan, arguments: Any, stored: Any, update: bool, window: Window
) -> Any:
    """Calls `step` on the memories of a window, a tile at a time."""
    model, y, extra, carry = arguments
    count, offset = window
    size = min(plan.tile, stored.length)

    def call(carry: Any, start: Array, inside: Array | None) -> Any:
        tile = stored.tile(start, size, inside, plan.dtype)
        return step(model, y, extra, carry, tile, update)

    def last(carry: Any) -> Any:  # the last tile overlaps the tile before it
        begin = jnp.asarray(offset + full * size, jnp.int32)
        start = jnp.minimum(begin, stored.length - size)
        place = start + jnp.arange(size, dtype=jnp.int32)
        return call(carry, start, (place >= begin) & (place < offset + count))

    full = count // size
    if stored.own:
        carry = step(model, y, extra, carry, stored.own_tile(plan.dtype), update)
    carry = lax.fori_loop(
        0, full, lambda i, carry: call(carry, offset + i * size, None), carry
    )
    if isinstance(count, int):
        return last(carry) if count % size else carry
    return lax.cond(count % size > 0, last, lambda carry: carry, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(plan: Plan, update: bool, model: QueryModel, y: Array, stored):
    """`average` on the device, with the derivative of `_backward`."""
    return average(OnDevice(plan, stored), model, y, update)


def _forward(plan, update, model, y, stored):
    out, threshold = average(OnDevice(plan, stored), model, y, update)
    return (out, threshold), (model, y, stored, out, threshold)


def _backward(plan, update, residuals, cotangents):
    r"""Gradients of :math:`\sum_\mu p_\mu v_\mu`, with the overlaps computed again.

    The threshold depends on the overlaps, and keeps the sum of the weights fixed. Let
    `a` be the derivative in the threshold of the product of cotangent and result, and
    `b` the derivative in the threshold of the sum of the weights. The dependence adds
    `-a / b` (`share`) to the cotangent of every weight.
    """
    residuals, g = differentiated_once((residuals, cotangents[0]))
    model, y, stored, out, threshold = residuals
    driver = OnDevice(plan, stored)
    zeros = jax.tree.map(jnp.zeros_like, (unobserved(model), y)), stored.zero_parts()
    (by_model, by_y), parts = pull_back(
        driver, model, y, (threshold, g, out), zeros, update
    )
    memories, values = parts
    return by_model, by_y, ArraySource(memories, values, None)


_differentiable.defvjp(_forward, _backward)


@jax.custom_jvp
def differentiated_once(x: Any) -> Any:
    """`x` itself; a derivative of it raises an error.

    Without the error, a second derivative would take `x` for a constant.
    """
    return x


@differentiated_once.defjvp
def _refuse(primals, tangents):
    raise ValueError(
        "retrieval by blocks has first derivatives alone: use retrieve, or a layer "
        "without a block, for second ones"
    )


def unobserved(model: QueryModel) -> QueryModel:
    """The model without the mask of components, in which there is no derivative."""
    return dataclasses.replace(model, observed=None)


def pull_back(driver, model, y, result, zeros, update):
    """Adds the derivatives in the model, the states and the parts of all tiles.

    `result` is the threshold, the cotangent of the average, and the average itself.
    """
    threshold, g, out = result
    if isinstance(model.separation.form, Root):
        zero = jnp.zeros_like(threshold.shift)
        a, b = driver.fold(_slopes, model, y, (threshold, g), (zero, zero), update)
        share = -a / jnp.where(b == 0, 1.0, b)
    else:
        share = -(g * out).sum(-1)
    return driver.fold(_pull_back, model, y, (threshold, g, share), zeros, update)


def _contribution(model, y, threshold, tile: Tile, update) -> tuple[Array, Array]:
    """A tile's part of the weighted sum `(Q, v)`, and of the sum of the weights."""
    keys, z = tile.overlaps(model, y)
    p = weights_of(model, z, threshold)
    return tile.weigh(p, keys, update).astype(y.dtype), p.sum(-1)


@across(total)
def _slopes(model, y, extra, carry, tile: Tile, update):
    """Adds a tile's part of `a` and `b` of `_backward`."""
    threshold, g = extra

    def contribution(shift):
        return _contribution(model, y, threshold._replace(shift=shift), tile, update)

    _, pull = jax.vjp(contribution, threshold.shift)
    zero = jnp.zeros_like(threshold.shift)
    (a,), (b,) = pull((g, zero)), pull((jnp.zeros_like(g), zero + 1))
    return carry[0] + a, carry[1] + b


def _pull_back(model, y, extra, carry, tile: Tile, update):
    """Adds a tile's part of the derivatives in the model, the states and its parts."""
    threshold, g, share = extra
    of_all, of_parts = carry

    def contribution(smooth, y, parts):
        full = dataclasses.replace(smooth, observed=model.observed)
        same = dataclasses.replace(tile, parts=parts)
        return _contribution(full, y, threshold, same, update)

    _, pull = jax.vjp(contribution, unobserved(model), y, tile.parts)
    by_model, by_y, parts = pull((g, share))
    of_all = jax.tree.map(jnp.add, of_all, (by_model, by_y))
    return of_all, tile.added(of_parts, parts)
