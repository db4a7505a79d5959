"""What an attention of Flax asks of its `attention_fn`."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from uhop_jax._checks import check_key, check_rate

if TYPE_CHECKING:
    from uhop_jax.layers.association import Association


def check_attention(
    query: Array, key: Array, value: Array, *, may_be_empty: bool
) -> None:
    """Refuses shapes that do not fit, and no key unless keys may be empty."""
    if min(x.ndim for x in (query, key, value)) < 3:
        raise ValueError(
            "query must have shape (..., L, heads, d), key and value alike, got "
            f"{query.shape}, {key.shape} and {value.shape}"
        )
    *batch, _, heads, d = query.shape
    S, kv_heads = key.shape[-3:-1]
    shapes = ((*batch, S, kv_heads, d), (*batch, S, kv_heads))
    unlike = key.shape != shapes[0] or value.shape[:-1] != shapes[1]
    if unlike or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"keys and values of queries {query.shape} must agree in all axes but "
            "their length, their heads divide those of the queries, got "
            f"{key.shape} and {value.shape}"
        )
    if S == 0 and not may_be_empty:
        raise ValueError(f"key must hold at least one key, got shape {key.shape}")


def dropout_key(
    association: "Association", key: Array | None, rate: float, module: Any
) -> Array | None:
    """The key of a call that has dropout, else None; `module` sows the weights.

    Raises:
      ValueError: if rate or key are wrong, there is dropout and no key, or the
        association has no weights for them.
    """
    check_rate("dropout_rate", rate)
    if association.dropout:
        raise ValueError(
            "dropout of an association must be 0 in an attention of Flax, which has a "
            f"dropout_rate, got {association.dropout}"
        )
    if association.ridge is not None and rate:
        raise ValueError(
            f"ridge needs no dropout, got ridge {association.ridge} and dropout_rate "
            f"{rate}"
        )
    if association.block is not None and (rate or module is not None):
        raise ValueError(
            "block makes no weights for dropout or module of an attention of Flax, got "
            f"dropout_rate {rate} and module {module!r}"
        )
    if not rate:
        return None
    if key is None:
        raise ValueError("dropout needs a dropout_rng, or deterministic=True")
    check_key(key)
    return key


def flax_dropped(
    weights: Array, rate: float, key: Array | None, broadcast: bool
) -> Array:
    """Dropout of `(*batch, heads, L, S)` as in `nnx.dot_product_attention`.

    The masks are the same; with `broadcast` all heads and entries of the batch share
    one. Without a key the weights stay as they are.
    """
    if key is None:
        return weights
    shape = weights.shape
    if broadcast:
        shape = (*(1 for _ in shape[:-2]), *shape[-2:])
    keep = jax.random.bernoulli(key, 1 - rate, shape)
    kept = weights * jnp.asarray(1 / (1 - rate), weights.dtype)
    return jnp.where(keep, kept, jnp.zeros((), weights.dtype))
