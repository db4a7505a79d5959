"""What a layer recalls: outputs, weights, energies, convergence."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import wider_dtype, working_dtype
from uhop_jax._fast import entries_at_once, mapped, row_major
from uhop_jax._products import product
from uhop_jax.model import Model
from uhop_jax.retrieval import converge, energy, retrieve
from uhop_jax.separation import Separation
from uhop_jax.separation.forms import Exponential, Root


class Recall(NamedTuple):
    """Result of `associate`, of an association or of a layer.

    Attributes:
      output: `(..., L, out)`, the array that a layer returns; `(..., L, heads, v)` for
        an `Association`.
      weights: `(..., heads, L, S)` before dropout; `(..., L, S)` for a static layer. A
        bias pattern and a zero memory add a column each.
      energy: energy of the retrieved state for each row of the weights; None if the
        model has no energy, or energies were not asked for.
      steps: int32, number of updates for each row of the weights.
      converged: whether the state of each row reached a fixed point; None if the number
        of updates is fixed.
    """

    output: Float[Array, "..."]
    weights: Float[Array, "*rows S"]
    energy: Float[Array, "*rows"] | None
    steps: Int[Array, "*rows"]
    converged: Bool[Array, "*rows"] | None


# The axis of heads in each field of a `Recall`.
HEAD_AXES: Any = Recall._make((-2, -3, -2, -2, -2))


def map_head_axis(recall: Recall, change: Callable[[Array, int], Array]) -> Recall:
    """The recall with `jnp.squeeze` or `jnp.expand_dims` applied to its heads axis."""
    fields = zip(recall, HEAD_AXES, strict=True)
    return Recall._make(x if x is None else change(x, at) for x, at in fields)


def recall_of_heads(
    separation: Separation,
    arrays: tuple[Array, Array, Array, Array, Array | None],
    *,
    steps: int,
    until_converged: bool,
    energies: bool,
    shared: bool = False,
    whole: bool = True,
) -> Recall:
    """Retrieval of each head; arrays have an axis of heads before and after.

    Numbers of the separation have shape `(heads,)` or none. The arrays are queries
    `(..., L, heads, d)`, keys, values, `beta` and mask; all other arguments are those
    of `Association` and its `associate`. If it need not be whole, the recall may be
    the output alone.
    """
    query, keys, values, beta, where = arrays
    # Numbers of a separation could belong to heads.
    apart = isinstance(separation.form, Exponential | Root)
    apart = apart and not jax.tree.leaves(separation)
    if apart and steps == 1 and not (whole or energies or shared or until_converged):
        *batch, L, heads, _ = query.shape
        number = math.prod(batch) * heads
        scores = L * keys.shape[-3] * working_dtype(query).itemsize
        if (few := entries_at_once(number, scores)) < number:
            absent: Any = None
            output = _output_in_turn(separation, arrays, few)
            return Recall(output, absent, absent, absent, absent)
    numbers, structure = jax.tree.flatten(separation)

    def one_head(query, keys, values, beta, numbers, where) -> Recall:
        separation = jax.tree.unflatten(structure, numbers)
        model = Model(separation=separation, beta=beta)
        if until_converged:
            options = {"values": values, "mask": where}
            end = converge(model, keys, query, max_steps=steps, **options)
            return Recall(
                end.pattern, end.weights, end.energy, end.steps, end.converged
            )
        options = {"mask": where, "steps": steps}
        state, weights = retrieve(model, keys, query, values=values, **options)
        of_state = None
        if energies and model.has_energy:
            last = retrieve(model, keys, query, **options).state
            of_state = energy(model, keys, last, mask=where)
        number = jnp.full(weights.shape[:-1], steps, jnp.int32)
        return Recall(state, weights, of_state, number, None)

    masked = where is not None and where.shape[-3] > 1
    if where is not None and not masked:
        where = where.squeeze(-3)
    arguments = (query, keys, values, beta, numbers, where)
    axes = (
        *((-2, None, None) if shared else (-2, -2, -2)),
        _head_axis(beta),
        [_head_axis(x) for x in numbers],
        -3 if masked else None,
    )
    if query.shape[-2] > 1:
        return jax.vmap(one_head, axes, HEAD_AXES)(*arguments)
    squeezed = jax.tree.map(
        lambda axis, x: x if axis is None else x.squeeze(axis),
        axes,
        arguments,
        is_leaf=lambda x: x is None,
    )
    return map_head_axis(one_head(*squeezed), jnp.expand_dims)


@functools.partial(jax.jit, static_argnums=2)
def _output_in_turn(
    separation: Separation,
    arrays: tuple[Array, Array, Array, Array, Array | None],
    few: int,
) -> Array:
    """The output `(..., L, heads, v)` after one update, a few heads at a time.

    The separation has no numbers, which could belong to heads.
    """
    query, keys, values, beta, where = arrays
    *batch, L, heads, _ = query.shape

    def columns(x: Array) -> Array:  # (batch and heads, size, n)
        x = jnp.moveaxis(jnp.broadcast_to(x, (*batch, *x.shape[-3:])), -3, -1)
        return x.reshape(-1, *x.shape[-2:])

    if where is not None:
        S = where.shape[-1]
        where = jnp.broadcast_to(where, (*batch, heads, L, S)).reshape(-1, L, S)
    beta = jnp.broadcast_to(beta, (*batch, heads)).reshape(-1)
    parts = *map(columns, (query, keys, values)), beta, where
    one = functools.partial(_output_of_head, separation)
    output = mapped(one, parts, few).reshape(*batch, heads, -1, L)
    return jnp.moveaxis(output, -1, -3)


def _output_of_head(
    separation: Separation,
    parts: tuple[Array, Array, Array, Array, Array | None],
) -> Array:
    """The output `(v, L)` of queries `(d, L)`, keys `(d, S)` and values `(v, S)`."""
    query, keys, values, beta, where = parts
    dtype = wider_dtype(query, keys, values)
    query, keys, values = (x.astype(dtype) for x in (query, keys, values))
    if where is not None:  # a weight of zero times NaN is not zero
        finite = jnp.isfinite(keys).all(0) & jnp.isfinite(values).all(0)
        finite = finite[None]
        keys, values = (jnp.where(finite, x, 0.0) for x in (keys, values))
    overlaps = product("dl,ds->ls", row_major(query), row_major(keys))
    beta = beta.astype(overlaps.dtype)
    beta = jnp.where((beta > 0) & (beta < jnp.inf), beta, jnp.nan)
    shares, total = separation.shares(overlaps, beta, where=where)
    output = product("vs,ls->vl", row_major(values), shares.astype(dtype))
    output = row_major(output)
    if total is not None:
        output = output / total.T
    if where is not None:
        output = jnp.where((where & ~finite).any(-1)[None], jnp.nan, output)
    return output.astype(dtype)


def _head_axis(x: Array) -> int | None:
    """The axis of heads of a number of an association; None if all heads share it."""
    return 0 if x.ndim else None


def with_own(x: Array, bias: Array | None, zero_memory: bool) -> Array:
    """`x (..., S, heads, size)` with a bias pattern and a zero memory added."""
    added = [] if bias is None else [bias.astype(x.dtype)]
    if zero_memory:
        added.append(jnp.zeros(x.shape[-2:], x.dtype))
    shape = (*x.shape[:-3], 1, *x.shape[-2:])
    added = [jnp.broadcast_to(pattern, shape) for pattern in added]
    return jnp.concatenate([x, *added], axis=-3) if added else x
