"""Read-outs of an association beside the weighted mean of the values."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from uhop_jax._checks import as_scalar, working_dtype
from uhop_jax.layers.masks import zero_unless


def read_out(
    weights: Float[Array, "*batch heads L S"],
    patterns: tuple[Array, Array, Array],
    *,
    ridge: float | None,
    masked: bool,
    whole: bool,
    shared: bool,
) -> Float[Array, "*batch L heads v"]:
    """What queries read out under weights that are there already.

    Args:
      weights: of each query.
      patterns: queries, keys and values.
      ridge: of `local_linear`; None reads out the mean of the values.
      masked: whether some queries may not see some memories, which may be NaN.
      whole: whether weights sum to one, see `local_linear`.
      shared: whether keys and values lack the axis of heads.
    """
    query, keys, values = patterns
    if masked:  # a weight of zero times NaN is not zero
        finite = jnp.isfinite(keys).all(-1) & jnp.isfinite(values).all(-1)
        keys, values = zero_unless(finite, keys), zero_unless(finite, values)
    if ridge is not None:
        return local_linear(weights, query, keys, values, ridge, whole=whole)
    rows = "...sv" if shared else "...shv"
    return _product(f"...hls,{rows}->...lhv", weights, values)


def local_linear(
    weights: Float[Array, "*batch heads L S"],
    query: Float[Array, "*batch L heads d"],
    keys: Float[Array, "*sets S heads d"],
    values: Float[Array, "*sets S heads v"],
    ridge: float,
    *,
    whole: bool = True,
) -> Float[Array, "*batch L heads v"]:
    r"""Regression of values on keys under the weights, at the query.

    The weighted mean is the regression by a constant (Nadaraya 1964, Watson 1964). Here
    the regression is linear: :math:`\bar v + (q - \bar k)^T (C_{kk} + \lambda I)^{-1}
    C_{kv}`, with means and covariances under the weights. A large ridge gives the mean,
    and equal weights give ridge regression.

    Args:
      weights: of each query.
      query: where the regression is evaluated.
      keys: of each head.
      values: of each head.
      ridge: :math:`\lambda`, positive, in units of squared keys.
      whole: whether weights sum to one. Otherwise a memory of zeros has what they lack
        of one.

    Returns:
      One vector for each query and head, in the dtype of the values. Cost and memory
      grow as `S d (d + v)` and `L d (d + v)`.
    """
    dtype = working_dtype(values)
    least = as_scalar("ridge", ridge, dtype)
    p, q, k, v = (x.astype(dtype) for x in (weights, query, keys, values))
    d, both = k.shape[-1], jnp.concatenate([k, v], axis=-1)
    # A covariance is a difference: around a center of the patterns little cancels.
    center = lax.stop_gradient(_center(p, both))
    both = both - jnp.broadcast_to(center[..., None, :, :], both.shape)
    first = _product("...hls,...she->...lhe", p, both)
    products = _product("...shd,...she->...shde", both[..., :d], both)
    second = _product("...hls,...shde->...lhde", p, products)
    center = jnp.broadcast_to(center[..., None, :, :], first.shape)
    total = jnp.swapaxes(p.sum(-1), -1, -2)[..., None]
    mean_v = first[..., d:] + total * center[..., d:]
    if not whole:  # the memory of zeros lies at minus the center
        first = first - (1 - total) * center
        outer = center[..., :d, None] * center[..., None, :]
        second = second + (1 - total)[..., None] * outer
    covariance = second - first[..., :d, None] * first[..., None, :]
    diagonal = jnp.broadcast_to(jnp.eye(d, dtype=dtype), covariance[..., :d].shape)
    matrix = covariance[..., :d] + least * diagonal
    slope = jnp.linalg.solve(matrix, covariance[..., d:])
    offset = q - center[..., :d] - first[..., :d]
    out = mean_v + _product("...lhd,...lhdv->...lhv", offset, slope)
    return out.astype(values.dtype)


_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _center(p: Array, x: Array) -> Array:
    """The mean `(*sets, heads, e)` of patterns `(*sets, S, heads, e)`, by weights."""
    p = jnp.where(jnp.isfinite(p), p, 0.0)  # of queries that see NaN
    p = p.sum((*range(p.ndim - x.ndim), -2))  # of queries that share the patterns
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total > 0, total, 1.0)
    return _product("...hs,...she->...he", p, x)
