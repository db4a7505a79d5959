"""What an attention of Flax asks of its `attention_fn`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def check_attention(query: Array, key: Array, value: Array) -> None:
    """Refuses queries, keys and values whose shapes do not fit.

    Raises:
      ValueError: if shapes do not fit.
    """
    if min(x.ndim for x in (query, key, value)) < 3:
        raise ValueError(
            "query must have shape (..., L, heads, d), key and value alike, got "
            f"{query.shape}, {key.shape} and {value.shape}"
        )
    *batch, _, heads, d = query.shape
    S, kv_heads = key.shape[-3:-1]
    shapes = ((*batch, S, kv_heads, d), (*batch, S, kv_heads))
    if key.shape != shapes[0] or value.shape[:-1] != shapes[1] or heads % kv_heads:
        raise ValueError(
            f"keys and values of queries {query.shape} must agree in all axes but "
            "their length, their heads divide those of the queries, got "
            f"{key.shape} and {value.shape}"
        )


def dropout_key(key: Array | None, rate: float, deterministic: bool) -> Array | None:
    """The key of a call that has dropout, else None.

    Raises:
      ValueError: if there is dropout and no key.
    """
    if deterministic or not rate:
        return None
    if key is None:
        raise ValueError("dropout needs a dropout_rng, or deterministic=True")
    return key


def flax_dropped(
    weights: Array, rate: float, key: Array | None, broadcast: bool
) -> Array:
    """Dropout as `nnx.dot_product_attention` has it, the masks included.

    Args:
      weights: `(*batch, heads, L, S)`.
      rate: share of the weights that is dropped.
      key: key of `jax.random`; None leaves the weights as they are.
      broadcast: whether all heads and entries of the batch share a mask.
    """
    if key is None:
        return weights
    shape = weights.shape
    if broadcast:
        shape = (*(1 for _ in shape[:-2]), *shape[-2:])
    keep = jax.random.bernoulli(key, 1 - rate, shape)
    kept = weights * jnp.asarray(1 / (1 - rate), weights.dtype)
    return jnp.where(keep, kept, jnp.zeros((), weights.dtype))
