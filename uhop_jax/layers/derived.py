"""Layers made of `Hopfield`: pooling, lookup, and a replacement for attention."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Shaped

from uhop_jax._checks import as_counts, check_count, check_rate, check_sizes
from uhop_jax.layers.association import Association
from uhop_jax.layers.hopfield import Hopfield, Initializer
from uhop_jax.layers.masks import attention_mask


class HopfieldPooling(nnx.Module):
    """Pools a bag of memories by learned states (Ramsauer et al. 2020).

    Args:
      memory_size: dimension of memories.
      quantity: number of learned states; each gives one output.
      sets: sizes of the last batch axes of the memories; each position along them then
        has learned states of its own.
      state_size: dimension of the states; `memory_size` by default.
      rngs: for the start values.
      **options: options of `Hopfield`.

    Raises:
      ValueError: as `Hopfield`; or if `quantity` or `sets` are not positive integers.
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
        sets = as_counts("sets", sets, 1, 2**31)
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
        """One vector for each bag and learned state; arguments as in `Hopfield`."""
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
      quantity: number of learned memories.
      memory_size: dimension of the memories; `state_size` by default.
      learn_values: learn a separate value for each memory; needs `values="direct"` or
        `static`.
      rngs: for the start values.
      **options: options of `Hopfield`.

    Raises:
      ValueError: as `Hopfield`; or if `quantity` is not a positive integer.
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
        """One output for each state; arguments as in `Hopfield`."""
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
    """Replaces `nnx.MultiHeadAttention`: Flax's arguments, `Hopfield` inside.

    The arguments below have Flax's names and meaning; with the same weights both layers
    give the same output. Five more are accepted with one value alone, or None:
    `num_kv_heads` equal to `num_heads`, and False for `broadcast_dropout`, `decode`,
    `normalize_qk` and `keep_rngs`. Not accepted are `precision`, `attention_fn`,
    `init_cache`, `out_kernel_init`, `out_bias_init`, and the arguments for promotion,
    `dot_general`, metadata and sharding.

    Two behaviours differ. Dropout is drawn for each head and batch entry, from the
    `rngs` of each call, since a module holds no random state. A query that may see no
    key retrieves zero.

    Args:
      num_heads: number of heads.
      in_features: dimension of queries.
      qkv_features: dimension of all heads together; `in_features` by default.
      out_features: dimension of the output; `in_features` by default.
      in_kv_features: dimension of keys and values; `in_features` by default.
      dropout_rate: share of the weights that is dropped, in `[0, 1)`.
      deterministic: no dropout, unless a call overrides it.
      kernel_init: initializer of the projections' weights, `weight_init` in `Hopfield`.
      bias_init: initializer of the projections' biases.
      use_bias: biases in the projections.
      dtype: of the computation; None follows inputs and parameters.
      param_dtype: of the parameters.
      rngs: for the start values.
      **options: further options of `Hopfield`, such as `separation` and `kernel`, but
        not `static`; `normalize_pattern` takes the place of `normalize_qk`.

    Raises:
      ValueError: as `Hopfield`; or if an argument has a value that only Flax's layer
        supports.
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
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_count("num_heads", num_heads, 1)
        check_count("in_features", in_features, 1)
        check_sizes(
            qkv_features=qkv_features,
            out_features=out_features,
            in_kv_features=in_kv_features,
        )
        check_rate("dropout_rate", dropout_rate)
        for name, value in (
            ("num_kv_heads", num_heads),
            ("broadcast_dropout", False),
            ("decode", False),
            ("normalize_qk", False),
            ("keep_rngs", False),
            ("static", False),
        ):
            _check_only(name, options.pop(name, None), value)
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
            weight_init=kernel_init,
            bias_init=bias_init if use_bias else None,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
            **({"values": "direct"} | options),
        )
        self.association.names = ("inputs_q", "inputs_k", "inputs_v")

    def __call__(
        self,
        inputs_q: Float[Array, "*batch L in_features"],
        inputs_k: Float[Array, "*batch S in_kv_features"] | None = None,
        inputs_v: Float[Array, "*batch S in_kv_features"] | None = None,
        *,
        mask: Shaped[Array, "..."] | None = None,
        deterministic: bool | None = None,
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
    ) -> Float[Array, "*batch L out"]:
        """Attention as retrieval.

        Args:
          inputs_q: queries.
          inputs_k: keys; the queries by default.
          inputs_v: values; the keys by default.
          mask: broadcasts to `(*batch, heads, L, S)`; true, or 1 in any dtype, where a
            query may see a key, else false or 0. Other numbers are an error; in a
            traced mask they make the whole output NaN.
          deterministic: no dropout; overrides the constructor's value.
          rngs: for dropout: `nnx.Rngs` with a stream `dropout`, a stream, or a key.
          sow_weights: store the weights, before dropout, as the `nnx.Intermediate`
            `attention_weights`.
          decode: False or None; the layer has no cache.
          is_causal: a query sees no key at a later position.

        Raises:
          ValueError: as `Hopfield`; or if dropout is on and `rngs` is missing.
        """
        _check_only("decode", decode, False)
        if deterministic is None:
            deterministic = self.deterministic
        key = None
        if not deterministic and self.association.dropout:
            key = _drawn(rngs)
        association_mask = invalid = None
        if mask is not None or is_causal:
            q = jnp.shape(inputs_q)
            k = q if inputs_k is None else jnp.shape(inputs_k)
            batch, heads = max(q[:-2], k[:-2], key=len), self.association.num_heads
            shape = (*batch, heads, *q[-2:-1], *k[-2:-1])
            association_mask, invalid = attention_mask(mask, is_causal, shape)
        arguments = inputs_q, inputs_k, inputs_v
        options: dict[str, Any] = {"key": key, "association_mask": association_mask}
        if sow_weights:
            result = self.association.associate(*arguments, **options)
            self.sow(nnx.Intermediate, "attention_weights", result.weights)
            output = result.output
        else:
            output = self.association(*arguments, **options)
        return output if invalid is None else jnp.where(invalid, jnp.nan, output)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the attributes that `nnx.view` changes.

        Args:
          deterministic: no dropout, unless a call overrides it.
        """
        if deterministic is not None:
            self.deterministic = deterministic


def _check_only(name: str, given: Any, value: Any) -> None:
    """Refuses a value that only `nnx.MultiHeadAttention` supports."""
    if given is not None and given != value:
        raise ValueError(f"{name} must be {value} or None here, got {given!r}")


def _drawn(rngs: Any) -> Array:
    """A key for dropout from `rngs`: `nnx.Rngs`, one of its streams, or a key."""
    stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
    key = stream() if isinstance(stream, nnx.RngStream) else stream
    if not isinstance(key, jax.Array):
        raise ValueError(
            "dropout needs rngs=, nnx.Rngs(dropout=...), one of its streams or a key, "
            f"got {rngs!r}; or set deterministic=True"
        )
    return key


def _patterns(
    quantity: tuple[int, ...], size: int, options: Any, rngs: nnx.Rngs
) -> nnx.Param:
    """Learned patterns `(*quantity, size)`, drawn from `N(0, 1)`."""
    dtype = options.get("param_dtype", jnp.float32)
    return nnx.Param(jax.random.normal(rngs.params(), (*quantity, size), dtype))
