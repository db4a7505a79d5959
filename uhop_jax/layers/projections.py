"""The linear maps of a Hopfield layer."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Initializer = Callable[..., Array]


class Projections(nnx.Module):
    r"""The maps :math:`W_Q, W_K, W_V, W_O` of a layer, and the norms of its heads.

    The first three arguments are the dimensions that `W_Q`, `W_K` and `W_V` map;
    without a `value_size`, `W_V` maps the keys of all heads. `normalize` is whether
    queries and keys have a LayerNorm. All other arguments are those of `Hopfield`.
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        value_size: int | None,
        *,
        num_heads: int,
        head_size: int,
        value_head_size: int,
        out_size: int,
        normalize: bool,
        weight_init: Initializer,
        bias_init: Initializer | None,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.norm_query: Any = nnx.data(None)
        self.norm_key: Any = nnx.data(None)
        if normalize:
            self.norm_query = nnx.LayerNorm(head_size, **options)
            self.norm_key = nnx.LayerNorm(head_size, **options)
        options |= {
            "use_bias": bias_init is not None,
            "kernel_init": weight_init,
            "bias_init": bias_init or nnx.initializers.zeros,
        }
        keys, values = (num_heads, head_size), (num_heads, value_head_size)
        self.query = nnx.LinearGeneral(query_size, keys, **options)
        self.key = nnx.LinearGeneral(key_size, keys, **options)
        if value_size is None:
            self.value = nnx.LinearGeneral(keys, values, axis=(-2, -1), **options)
        else:
            self.value = nnx.LinearGeneral(value_size, values, **options)
        self.out = nnx.data(None)
        if out_size:
            self.out = nnx.LinearGeneral(values, out_size, axis=(-2, -1), **options)

    def pulled_back(
        self, query: Float[Array, "*states L heads d"]
    ) -> Float[Array, "*states L heads size"]:
        """`W_K^T q`: inner products with memories are those of queries with keys.

        They lack the bias of the keys, which adds one number to all overlaps of a
        query.
        """
        query, kernel = nnx.nn.dtypes.promote_dtype(
            (query, self.key.kernel[...]), dtype=self.key.dtype
        )
        return jnp.einsum("...lhd,mhd->...lhm", query, kernel)

    def value_of_mean(
        self,
        mean: Float[Array, "*batch L heads d"],
        weights: Float[Array, "*batch heads L S"],
        *,
        shared: bool = False,
    ) -> Float[Array, "*batch L heads v"]:
        """The weighted sum of values, from the weighted sum of what they project.

        The two differ in the bias alone, which the sum of the weights scales. With
        `shared`, the heads have means of what all of them share.
        """
        if shared:
            mean, kernel = nnx.nn.dtypes.promote_dtype(
                (mean, self.value.kernel[...]), dtype=self.value.dtype
            )
            output = jnp.einsum("...lhm,mhv->...lhv", mean, kernel)
        else:
            output = self.value(mean)  # with the bias once
        if self.value.bias is None:
            return output
        excess = (weights.sum(-1) - (0 if shared else 1)).astype(output.dtype)
        bias = self.value.bias[...].astype(output.dtype)
        return output + jnp.einsum("...hl,hv->...lhv", excess, bias)

    def output(
        self, heads: Float[Array, "*batch L heads v"]
    ) -> Float[Array, "*batch L out"]:
        """The output of all heads together."""
        if self.out is None:
            return heads.reshape(*heads.shape[:-2], -1)
        return self.out(heads)
