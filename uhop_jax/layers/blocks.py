"""Association a block of memories at a time, forward and backward.

A bag of a million instances has a million keys, values and scores for each head. Here
they exist for one block at a time: maps make keys and values from the rows of a block,
and the passes of `uhop_jax.streaming` do the rest. The backward pass makes them again.

Bags lie one behind another in one array. A bag is a window of it, so that bags of any
lengths need no padding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from uhop_jax._checks import working_dtype
from uhop_jax._pytree import varying_alike
from uhop_jax.layers.tiles import Dropout, HeadTile, Maps, Rows
from uhop_jax.separation import Separation
from uhop_jax.separation.forms import Largest, Whole
from uhop_jax.similarity import Dot
from uhop_jax.streaming._device import (
    OnDevice,
    Window,
    differentiated_once,
    first_on,
    pull_back,
)
from uhop_jax.streaming._passes import average, weights_of_rows
from uhop_jax.streaming._tiles import Plan, QueryModel

DEFAULT_BLOCK = 1024  # memories in a block where bags have different lengths


class Bags(NamedTuple):
    """Windows of the memories.

    Attributes:
      offsets: `(B,)`, int32, the first memory of each bag.
      counts: `(B,)`, int32, the number of memories of each bag; None if all bags have
        the same number.
      base: `(B, 2, Q)`, uint32, `Dropout.base` of each bag; or None.
    """

    offsets: Int[Array, " B"]
    counts: Int[Array, " B"] | None
    base: UInt[Array, "B 2 Q"] | None


def associate_blocks(
    separation: Separation,
    beta: Float[Array, "*heads"],
    query: Float[Array, "B L heads d"],
    stored: Rows,
    lengths: Int[Array, " B"] | None,
    *,
    entries: int,
    steps: int,
    block: int,
    dropout: tuple[float, Array] | None,
    axis: str | None,
) -> Float[Array, "B L heads v"]:
    """What the states of all bags retrieve, see `Association.associate_blocks`.

    Numbers of the separation have shape `(heads,)` or none. The states of `entries`
    entries of the batch are behind one another in `L`, since they share a bag.
    `dropout` is a rate and a key of `jax.random`.
    """
    form = separation.form
    for name, given in (("lengths", lengths), ("axis_name", axis)):
        if given is not None and isinstance(form, Largest | Whole):
            raise ValueError(
                f"{name} needs a separation with one threshold, such as Softmax or "
                f"Entmax, got {separation!r}"
            )
    if axis is not None:
        _check_axis(axis)
    B, L, heads, d = query.shape
    working = working_dtype(query)

    def by_query(x: Array) -> Array:  # one number for each of the queries of a bag
        x = jnp.broadcast_to(x.astype(working).reshape(-1, 1), (heads, L))
        return x.reshape(heads * L)

    model = QueryModel(
        Dot(), jax.tree.map(by_query, separation), None, beta=by_query(beta)
    )
    if lengths is None:
        offsets = jnp.arange(B, dtype=jnp.int32) * (stored.length // B)
    else:
        offsets = jnp.cumsum(lengths, dtype=jnp.int32) - lengths
    base = None
    if dropout is not None:
        shape = B, heads, entries, L // entries
        base = _positions(stored, offsets, lengths is None, shape)
        rate, key = dropout
        if axis is not None:
            key = jax.random.fold_in(key, lax.axis_index(axis))
        stored = dataclasses.replace(stored, dropout=Dropout(rate, key, base))
    if axis is not None and stored.own:  # they count once
        stored = dataclasses.replace(stored, own_seen=first_on(axis))
    y = jnp.swapaxes(query, 1, 2).reshape(B, heads * L, d)
    bags = Bags(offsets, lengths, base)
    out = _recalled(model, y, stored, bags, axis, steps=steps, block=block)
    if lengths is not None:  # traced lengths may be out of range
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        valid = (lengths >= 0).all() & ((ends >= 0) & (ends <= stored.length)).all()
        out = jnp.where(valid, out, jnp.nan)
    return jnp.swapaxes(out.reshape(B, heads, L, -1), 1, 2)


def _check_axis(axis: str) -> None:
    """Refuses a name that no `jax.shard_map` around the call gives to an axis."""
    try:
        lax.axis_index(axis)
    except NameError:
        raise ValueError(
            "axis_name must be a mesh axis of jax.shard_map around the call, got "
            f"{axis!r}"
        ) from None


def _positions(
    stored: Rows, offsets: Array, regular: bool, shape: tuple[int, int, int, int]
) -> Array:
    """`Bags.base`; in a regular batch the positions in weights `(..., heads, L, S)`."""
    B, heads, entries, L = shape
    count = entries * heads * L
    query = jnp.arange(count, dtype=jnp.uint32).reshape(entries, heads, L)
    query = jnp.swapaxes(query, 0, 1).reshape(1, -1)
    bag = jnp.arange(B, dtype=jnp.uint32)[:, None]
    if regular:
        length = stored.length // B
        first = (bag * jnp.uint32(count) + query) * jnp.uint32(length + stored.own)
        base = first - offsets.astype(jnp.uint32)[:, None]
        own = first + jnp.uint32(length) - jnp.uint32(stored.length)
    else:
        base = query * jnp.uint32(stored.length + B * stored.own)
        base = jnp.broadcast_to(base, (B, count))
        own = base + bag * jnp.uint32(stored.own)
    return jnp.stack([base, own], axis=1)


def _recalled(
    model: QueryModel,
    y: Array,
    stored: Rows,
    bags: Bags,
    axis: str | None,
    *,
    steps: int,
    block: int,
) -> Array:
    """The result `(B, Q, v)` for states `(B, Q, d)`, those of each head together."""
    of_keys = stored.shapes()[0].dtype
    plan = Plan(steps, 0, max(min(block, stored.length), 1), 0, None, of_keys)
    model, y, stored, bags = varying_alike((model, y, stored, bags))
    dtype = y.dtype
    y = y.astype(working_dtype(y))
    averages: Any = functools.partial(_averages, plan, axis)
    if isinstance(model.separation.form, Largest | Whole):
        averages = functools.partial(_averages_of_all, plan)
    for _ in range(steps - 1):
        y = averages(True, model, y, stored, bags)
        model, y, stored, bags = varying_alike((model, y, stored, bags))
    return averages(False, model, y, stored, bags).astype(dtype)


def _drivers(
    plan: Plan, axis: str | None, stored: Rows, bags: Bags
) -> Callable[[Bags], OnDevice]:
    """The driver of one bag."""
    number = bags.offsets.shape[0]

    def driver(bag: Bags) -> OnDevice:
        drop = stored.dropout
        if drop is not None and bag.base is not None:
            drop = dataclasses.replace(drop, base=bag.base)
        rows = dataclasses.replace(stored, dropout=drop)
        count = stored.length // number if bag.counts is None else bag.counts
        return OnDevice(plan, rows, Window(count, bag.offsets), axis)

    return driver


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _averages(plan: Plan, axis: str | None, update: bool, model, y, stored, bags):
    """Weighted averages `(B, Q, v)`."""
    return _forward(plan, axis, update, model, y, stored, bags)[0]


def _forward(plan, axis, update, model, y, stored, bags):
    driver = _drivers(plan, axis, stored, bags)

    def one(parts: Any) -> Any:
        y, bag = parts
        return average(driver(bag), model, y, update)

    out, threshold = _map(one, (y, bags))
    if axis is not None:  # all devices have the same averages: this tells JAX so
        out = lax.psum(jnp.where(first_on(axis), out, 0.0), axis)
    return out, threshold


def _forward_with_residuals(plan, axis, update, *arguments):
    out, threshold = _forward(plan, axis, update, *arguments)
    return out, (*arguments, out, threshold)


def _backward(plan, axis, update, residuals, g):
    residuals, g = differentiated_once((residuals, g))
    residuals, g = varying_alike((residuals, g))
    model, y, stored, bags, out, threshold = residuals
    driver = _drivers(plan, axis, stored, bags)

    def one(carry: Any, parts: Any) -> Any:
        y, g, out, threshold, bag = parts
        by_model, of_parts = carry
        zeros = (by_model, jnp.zeros_like(y)), of_parts
        (by_model, by_y), of_parts = pull_back(
            driver(bag), model, y, (threshold, g, out), zeros, update
        )
        return (by_model, of_parts), by_y

    zeros = jax.tree.map(jnp.zeros_like, model), stored.zero_parts()
    parts = y, g, out, threshold, bags
    if y.shape[0] == 1:
        end, by_y = one(zeros, jax.tree.map(lambda x: x[0], parts))
        by_y = by_y[None]
    else:
        end, by_y = lax.scan(one, zeros, parts)
    by_model, (numbers, rows, own) = end
    by_stored = Rows(
        stored.length, Maps(stored.maps.call, numbers, None), rows, None, own, None
    )
    return by_model, by_y, by_stored, None


_averages.defvjp(_forward_with_residuals, _backward)


def _map(function: Callable[[Any], Any], parts: Any) -> Any:
    """`function` of the entries along the first axis, one after another."""
    if jax.tree.leaves(parts)[0].shape[0] > 1:
        return lax.map(function, parts)
    one = function(jax.tree.map(lambda x: x[0], parts))
    return jax.tree.map(lambda x: x[None], one)


def _averages_of_all(plan, update, model, y, stored: Rows, bags: Bags) -> Array:
    """`_averages` with all overlaps of a bag in memory, for any separation.

    Keys and values exist for one block at a time here too.
    """
    number = y.shape[0]
    length = stored.length // number
    blocks = -(-length // plan.tile)
    room = blocks * plan.tile - length

    def split(x: Array) -> Array:  # (bags, blocks, tile, ...)
        x = x.reshape(number, length, *x.shape[1:])
        x = jnp.pad(x, ((0, 0), (0, room), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(number, blocks, plan.tile, *x.shape[2:])

    valid = jnp.ones((stored.length,), bool)
    mask: Any = None
    if room or stored.mask is not None:
        mask = split(valid if stored.mask is None else stored.mask)
    index = split(jnp.arange(stored.length, dtype=jnp.int32))
    maps, drop = stored.maps, stored.dropout

    def one(parts: Any) -> Array:
        y, bag, *blocks = parts
        dropout = drop and dataclasses.replace(drop, base=bag.base)

        def tile(rows: Any, mask: Any, index: Array) -> HeadTile:
            of_maps = maps.call, maps.others, index, dropout
            ends = plan.dtype, *of_maps, stored.spare
            return HeadTile((maps.numbers, rows), mask, index[0], *ends)

        @jax.checkpoint
        def compare(_, block):
            return None, tile(*block).overlaps(model, y)[1]

        @jax.checkpoint
        def weigh(total, block):
            p, *block = block
            part = tile(*block)
            keys, _ = part.overlaps(model, y)
            return total + part.weigh(p, keys, update).astype(total.dtype), None

        _, z = lax.scan(compare, None, blocks)
        z = jnp.moveaxis(z, 0, 1).reshape(y.shape[0], -1)[:, :length]
        own = None
        if stored.own:
            own = dataclasses.replace(
                stored, dropout=dropout, rows=None, mask=None
            ).own_tile(plan.dtype)
            own_keys, own_z = own.overlaps(model, y)
            z = jnp.concatenate([z, own_z], axis=-1)
        p = weights_of_rows(model.separation, z, model.beta)
        out = jnp.zeros((y.shape[0], stored.width(y, update)), y.dtype)
        if own is not None:
            out += own.weigh(p[:, length:], own_keys, update).astype(y.dtype)
        p = jnp.pad(p[:, :length], ((0, 0), (0, room)))
        p = p.reshape(y.shape[0], -1, plan.tile)
        out, _ = lax.scan(weigh, out, (jnp.moveaxis(p, 1, 0), *blocks))
        return out

    rows = jax.tree.map(split, stored.rows)
    return _map(one, (y, bags, rows, mask, index))
