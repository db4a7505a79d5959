"""Layers made of `Hopfield`: pooling, lookup, and a replacement for attention."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from uhop_jax._checks import check_count
from uhop_jax.layers.association import Association
from uhop_jax.layers.hopfield import Hopfield


class HopfieldPooling(nnx.Module):
    """Pools a bag of memories by learned states (Ramsauer et al. 2020).

    Args:
      memory_size: dimension of memories.
      quantity: learned states, one output each.
      sets: the last of the batch axes of memories, if each place along them is to have
        learned states of its own.
      state_size: dimension of the states; as memories by default.
      rngs: for the start values.
      **options: of `Hopfield`.
    """

    def __init__(
        self,
        memory_size: int,
        quantity: int = 1,
        *,
        sets: Sequence[int] = (),
        state_size: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_count("quantity", quantity, 1)
        state_size = memory_size if state_size is None else state_size
        self.association = Hopfield(state_size, memory_size, rngs=rngs, **options)
        self.state = _patterns((*sets, quantity), state_size, options, rngs)

    def __call__(
        self,
        memories: Float[Array, "*batch S memory_size"],
        values: Float[Array, "*batch S value_size"] | None = None,
        *,
        mask: Bool[Array, "*#batch S"] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "*batch quantity out"]:
        """One vector for each bag and learned state; arguments as of `Hopfield`."""
        return self.association(self.state[...], memories, values, mask=mask, key=key)

    def associate(
        self,
        memories: Float[Array, "*batch S memory_size"],
        values: Float[Array, "*batch S value_size"] | None = None,
        *,
        mask: Bool[Array, "*#batch S"] | None = None,
        key: Array | None = None,
    ) -> Association:
        """As `__call__`, with weights, energies and convergence beside the output."""
        return self.association.associate(
            self.state[...], memories, values, mask=mask, key=key
        )


class HopfieldLayer(nnx.Module):
    """Associates states with learned memories: a lookup (Ramsauer et al. 2020).

    Args:
      state_size: dimension of states.
      quantity: learned memories.
      memory_size: their dimension; as states by default.
      learn_values: learn what each memory reads out too, apart from the memory; needs
        `values="direct"`.
      rngs: for the start values.
      **options: of `Hopfield`.

    Raises:
      ValueError: as `Hopfield`.
    """

    def __init__(
        self,
        state_size: int,
        quantity: int,
        *,
        memory_size: int | None = None,
        learn_values: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_count("quantity", quantity, 1)
        memory_size = state_size if memory_size is None else memory_size
        direct = options.get("values") == "direct" or options.get("static")
        if learn_values and not direct:
            raise ValueError("learn_values needs values='direct'")
        self.association = Hopfield(state_size, memory_size, rngs=rngs, **options)
        self.memories = _patterns((quantity,), memory_size, options, rngs)
        self.targets = nnx.data(None)
        if learn_values:
            size = options.get("value_size") or memory_size
            self.targets = _patterns((quantity,), size, options, rngs)

    def __call__(
        self,
        state: Float[Array, "*batch L state_size"],
        *,
        key: Array | None = None,
    ) -> Float[Array, "*batch L out"]:
        """Reads out for each state; arguments as of `Hopfield`."""
        return self.association(state, *self._stored(), key=key)

    def associate(
        self,
        state: Float[Array, "*batch L state_size"],
        *,
        key: Array | None = None,
    ) -> Association:
        """As `__call__`, with weights, energies and convergence beside the output."""
        return self.association.associate(state, *self._stored(), key=key)

    def _stored(self) -> tuple[Array, Array | None]:
        targets = None if self.targets is None else self.targets[...]
        return self.memories[...], targets


class HopfieldAttention(nnx.Module):
    """A replacement for `nnx.MultiHeadAttention`: its arguments, `Hopfield` inside.

    Args:
      num_heads: heads.
      in_features: dimension of queries.
      qkv_features: of all heads together; as queries by default.
      out_features: of the output; as queries by default.
      in_kv_features: dimension of keys and values; as queries by default.
      dropout_rate: of the weights.
      deterministic: no dropout, unless the call says otherwise.
      use_bias: biases in the projections.
      dtype: of the computation; None follows inputs and parameters.
      param_dtype: of the parameters.
      rngs: for the start values.
      **options: further options of `Hopfield`, such as `separation` and `kernel`.

    Raises:
      ValueError: as `Hopfield`.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        *,
        in_kv_features: int | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_count("num_heads", num_heads, 1)
        size = in_features if qkv_features is None else qkv_features
        if size % num_heads:
            raise ValueError(f"num_heads {num_heads} must divide qkv_features {size}")
        self.deterministic = deterministic
        self.association = Hopfield(
            in_features,
            in_kv_features,
            num_heads=num_heads,
            head_size=size // num_heads,
            out_size=out_features,
            dropout=dropout_rate,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
            **({"values": "direct"} | options),
        )

    def __call__(
        self,
        inputs_q: Float[Array, "*batch L in_features"],
        inputs_k: Float[Array, "*batch S in_kv_features"] | None = None,
        inputs_v: Float[Array, "*batch S in_kv_features"] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        deterministic: bool | None = None,
        rngs: Any = None,
    ) -> Float[Array, "*batch L out"]:
        """Attention as retrieval.

        Args:
          inputs_q: queries.
          inputs_k: keys; the queries by default.
          inputs_v: values; the keys by default.
          mask: `(*batch, heads or 1, L, S)`, true where a query may see a key.
          deterministic: no dropout; overrides what the constructor said.
          rngs: a key, or `nnx.Rngs` with a stream `dropout`.

        Raises:
          ValueError: as `Hopfield`; or if dropout is asked for without `rngs`.
        """
        if deterministic is None:
            deterministic = self.deterministic
        key = None
        if not deterministic and self.association.dropout:
            if rngs is None:
                raise ValueError(
                    "dropout needs rngs=, a key or nnx.Rngs(dropout=...); or say "
                    "deterministic=True"
                )
            key = rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs
        return self.association(
            inputs_q, inputs_k, inputs_v, association_mask=mask, key=key
        )


def _patterns(
    quantity: tuple[int, ...], size: int, options: Any, rngs: nnx.Rngs
) -> nnx.Param:
    dtype = options.get("param_dtype", jnp.float32)
    return nnx.Param(jax.random.normal(rngs.params(), (*quantity, size), dtype))
