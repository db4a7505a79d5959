"""Read-outs of an association beside the weighted mean of the values."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from uhop_jax._checks import working_dtype


def local_linear(
    weights: Float[Array, "*batch heads L S"],
    query: Float[Array, "*batch L heads d"],
    keys: Float[Array, "*sets S heads d"],
    values: Float[Array, "*sets S heads v"],
    ridge: float,
) -> Float[Array, "*batch L heads v"]:
    r"""Regression of values on keys under the weights, at the query.

    The weighted mean is the regression by a constant (Nadaraya 1964, Watson 1964). Here
    the regression is linear: :math:`\bar v + (q - \bar k)^T (C_{kk} + \lambda I)^{-1}
    C_{kv}`, with means and covariances under the weights. A large ridge gives the mean,
    and equal weights give ridge regression.

    Args:
      weights: of each query, which sum to one.
      query: where the regression is evaluated.
      keys: of each head.
      values: of each head.
      ridge: :math:`\lambda`, positive, in units of squared keys.

    Returns:
      One vector for each query and head, in the dtype of the values. Cost and memory
      grow as `S d (d + v)` and `L d (d + v)`.
    """
    dtype = working_dtype(values)
    p, q, k, v = (x.astype(dtype) for x in (weights, query, keys, values))
    mean_k = jnp.einsum("...hls,...shd->...lhd", p, k)
    mean_v = jnp.einsum("...hls,...shv->...lhv", p, v)
    both = jnp.concatenate([k, v], axis=-1)
    products = jnp.einsum("...shd,...she->...shde", k, both)
    second = jnp.einsum("...hls,...shde->...lhde", p, products)
    first = jnp.concatenate([mean_k, mean_v], axis=-1)
    covariance = second - mean_k[..., :, None] * first[..., None, :]
    d = k.shape[-1]
    diagonal = jnp.broadcast_to(jnp.eye(d, dtype=dtype), covariance[..., :d].shape)
    matrix = covariance[..., :d] + jnp.asarray(ridge, dtype) * diagonal
    slope = jnp.linalg.solve(matrix, covariance[..., d:])
    out = mean_v + jnp.einsum("...lhd,...lhdv->...lhv", q - mean_k, slope)
    return out.astype(values.dtype)
