"""A classifier of bags: embedding, pooling by Hopfield association, a linear head.

Attention-based deep multiple-instance learning (Ilse et al. 2018) with the pooling of
Ramsauer et al. 2020: learned states retrieve from the instances of a bag.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from uhop_jax._checks import check_count, check_floating, check_rngs
from uhop_jax.layers import Association, Hopfield, HopfieldPooling


class BagClassifier(nnx.Module):
    """One logit for a bag of instances.

    Args:
      features: of an instance.
      size: of an embedded instance, `relu(W x + b)`; 0 leaves the embedding out.
      quantity: number of learned states that pool a bag.
      association: makes the association of the layer.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: for the start values.
      **options: further options of `Hopfield`, whose output has the size of an
        embedded instance.

    Raises:
      ValueError: if a size is out of range, or sizes do not fit together.
    """

    def __init__(
        self,
        features: int,
        *,
        size: int = 64,
        quantity: int = 1,
        association: Callable[[], Association] = Association,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_count("features", features, 1)
        check_count("size", size, 0)
        check_floating("param_dtype", param_dtype)
        check_rngs(rngs)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.features = features
        self.embed = nnx.data(None)
        if size:
            self.embed = nnx.Linear(features, size, rngs=rngs, **dtypes)
        width = size or features
        options |= dtypes | {"out_size": width}
        layer = Hopfield(width, association(), rngs=rngs, **options)
        self.pool = HopfieldPooling(layer, quantity, rngs=rngs)
        self.head = nnx.Linear(quantity * width, 1, rngs=rngs, **dtypes)

    def __call__(
        self,
        instances: Float[Array, "*batch S features"],
        mask: Bool[Array, "*batch S"] | None = None,
        *,
        key: Array | None = None,
    ) -> Float[Array, "*batch"]:
        """Logits; no dropout without a key.

        Args:
          instances: of each bag.
          mask: true for instances; false for padding.
          key: key of `jax.random` for dropout of the weights over instances.

        Raises:
          ValueError: if shapes do not fit.
        """
        return self._logits(self.pool(self._embedded(instances), mask=mask, key=key))

    def explained(
        self,
        instances: Float[Array, "*batch S features"],
        mask: Bool[Array, "*batch S"] | None = None,
    ) -> tuple[Float[Array, "*batch"], Float[Array, "*batch S"]]:
        """Logits, and the weight of each instance in its bag.

        The weight is a mean over heads, and over states by the sizes of their parts of
        the logit, which is a sum over states: states that decide nothing count little.
        """
        recall = self.pool.associate(self._embedded(instances), mask=mask)
        pooled = recall.output
        slopes = self.head.kernel[...].reshape(pooled.shape[-2:]).astype(pooled.dtype)
        parts = jnp.abs((pooled * slopes).sum(-1))
        tiny = jnp.finfo(parts.dtype).tiny
        shares = parts / jnp.maximum(parts.sum(-1, keepdims=True), tiny)
        weights = (recall.weights.mean(-3) * shares[..., None]).sum(-2)
        return self._logits(pooled), weights

    def _embedded(self, instances: Array) -> Array:
        shape = jnp.shape(instances)
        if len(shape) < 2 or shape[-1] != self.features:
            raise ValueError(
                f"instances must have shape (..., S, {self.features}), got {shape}"
            )
        return instances if self.embed is None else jax.nn.relu(self.embed(instances))

    def _logits(self, pooled: Array) -> Array:
        return self.head(pooled.reshape(*pooled.shape[:-2], -1)).squeeze(-1)
