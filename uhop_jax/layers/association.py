"""Association: retrieval of each head, from queries, keys and values as they are."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Shaped

from uhop_jax._checks import (
    as_numbers,
    check_count,
    check_floating,
    check_key,
    check_positive,
    check_rate,
    check_scalar,
)
from uhop_jax.layers.attention import check_attention, dropout_key, flax_dropped
from uhop_jax.layers.blocks import DEFAULT_BLOCK, associate_blocks
from uhop_jax.layers.dropout import dropped
from uhop_jax.layers.learned import BiasPattern, with_array_leaves, with_hashable_leaves
from uhop_jax.layers.masks import attention_mask, check_where, extended_mask
from uhop_jax.layers.readout import read_out
from uhop_jax.layers.recall import Recall, recall_of_heads, with_own
from uhop_jax.layers.tiles import Rows, stored_rows
from uhop_jax.separation import Separation, separation_from_name


class Association(nnx.Module):
    """Retrieval of each head, with any separation.

    `associate` takes queries, keys and values that are projected already. A call takes
    the arguments of `nnx.dot_product_attention`, so that an association serves every
    attention of Flax:

        nnx.MultiHeadAttention(8, 256, attention_fn=Association("sparsemax"), rngs=rngs)

    An association belongs to one layer; layers that are given the same one share its
    parameters.

    Args:
      separation: a `Separation`, its name, or a module whose call gives a `Separation`,
        such as `LearnedAlpha`. Numbers of a separation may have shape `(num_heads,)`.
      beta: inverse temperature, a number or `(num_heads,)`; None is the inverse root of
        the dimension of the keys, in a static layer of the states.
      learn_beta: learn a factor of `beta`, in the shape of `beta`.
      steps: number of updates of the state.
      until_converged: repeat the update until the state converges, at most `steps`
        times, with implicit gradients.
      bias: one more memory, which is learned.
      zero_memory: add one memory of zeros, which attracts states that match no other
        memory.
      dropout: share of the weights that is dropped when a call has a key, in `[0, 1)`.
      ridge: read out by a regression of values on keys with this ridge, see
        `local_linear`, after one update, without dropout; None reads out the mean.
      block: number of memories in a block. Keys, values and scores then exist for one
        block at a time, forward and backward, and a call of a layer has first
        derivatives alone. None computes all scores at once, as `associate` does.
      axis_name: mesh axis of `jax.shard_map` over which the memories of a call are
        split, by blocks; every device has the same states, and gets the same output.
      param_dtype: of the factor of `beta`.

    Raises:
      ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        separation: Separation | str | nnx.Module = "softmax",
        *,
        beta: ArrayLike | Sequence[float] | None = None,
        learn_beta: bool = False,
        steps: int = 1,
        until_converged: bool = False,
        bias: BiasPattern | None = None,
        zero_memory: bool = False,
        dropout: float = 0.0,
        ridge: float | None = None,
        block: int | None = None,
        axis_name: str | None = None,
        param_dtype: Any = jnp.float32,
    ):
        check_count("steps", steps, 1)
        if axis_name is not None and block is None:
            block = DEFAULT_BLOCK
        if block is not None:
            check_count("block", block, 1)
            if until_converged:
                raise ValueError(
                    "block needs a fixed number of updates, got until_converged "
                    f"{until_converged} and block {block}"
                )
        check_rate("dropout", dropout)
        if ridge is not None:
            check_scalar("ridge", ridge)
            ridge = as_numbers("ridge", ridge).item()
            check_positive("ridge", ridge)
            if steps > 1 or block is not None or dropout:
                raise ValueError(
                    "ridge needs one update, no block and no dropout, got steps "
                    f"{steps}, block {block} and dropout {dropout}"
                )
        self.ridge, self.block, self.axis_name = ridge, block, axis_name
        check_floating("param_dtype", param_dtype)
        if isinstance(separation, str):
            separation = separation_from_name(separation)
        if isinstance(separation, Separation):
            separation.check()
            separation = with_hashable_leaves(separation.specialised())
        elif not isinstance(separation, nnx.Module):
            raise ValueError(
                "separation must be a Separation, its name or a module that gives one, "
                f"got {separation!r}"
            )
        self.separation = separation
        shape: tuple[int, ...] = ()
        if beta is not None:
            numbers = as_numbers("beta", beta)
            check_positive("beta", numbers)
            shape = numbers.shape
            beta = tuple(numbers.tolist()) if shape else numbers.item()
        self.beta = beta
        self.log_factor = nnx.data(None)
        if learn_beta:
            self.log_factor = nnx.Param(jnp.zeros(shape, param_dtype))
        self.steps, self.until_converged = steps, until_converged
        self.bias = nnx.data(bias)
        self.zero_memory, self.dropout = zero_memory, float(dropout)

    @property
    def own_memories(self) -> int:
        """Number of memories that the association adds to the memories of a call."""
        return int(self.bias is not None) + int(self.zero_memory)

    def current_separation(self) -> Separation:
        """The separation, with the present values of what is learned."""
        if isinstance(self.separation, nnx.Module):
            return self.separation()
        return with_array_leaves(self.separation)

    def current_beta(self, size: int) -> Float[Array, "*heads"]:
        """`beta` at present, if the default is `1 / sqrt(size)`."""
        beta = jnp.asarray(size**-0.5 if self.beta is None else self.beta)
        if self.log_factor is None:
            return beta
        factor = jnp.exp(self.log_factor[...])
        return beta.astype(factor.dtype) * factor

    def check_heads(self, num_heads: int) -> None:
        """Refuses numbers that are neither one for all heads nor one for each.

        Raises:
          ValueError: if `beta` or a number of the separation has another shape.
        """
        separation = self.current_separation()
        leaves, _ = jax.tree_util.tree_flatten_with_path(separation)
        named = [(jax.tree_util.keystr(path)[1:], np.shape(x)) for path, x in leaves]
        for name, shape in (("beta", np.shape(self.beta or 1)), *named):
            if shape not in ((), (num_heads,)):
                raise ValueError(
                    f"{name} must be a number or have shape ({num_heads},), one for "
                    f"each head, got {shape}"
                )

    def associate(
        self,
        query: Float[Array, "*batch L heads d"],
        keys: Float[Array, "..."],
        values: Float[Array, "..."],
        *,
        where: Bool[Array, "..."] | None = None,
        key: Array | None = None,
        size: int | None = None,
        energies: bool = True,
        weights: bool = True,
        shared: bool = False,
    ) -> Recall:
        """Retrieves the average of the associated values for each query.

        Args:
          query: states of each head.
          keys: memories `(*batch, S, heads, d)`; all queries share them if they lack
            the batch.
          values: `(*batch, S, heads, v)`, which the last weights of each head average.
          where: `(*batch, 1 or heads, L, S)`, true where a query may see a memory.
          key: key of `jax.random` for dropout; None switches dropout off.
          size: the default `beta` is `1 / sqrt(size)`; `d` by default.
          energies: whether the result has energies.
          weights: False may leave out all but the output, which saves time and memory.
          shared: keys and values have no axis of heads: all heads share them. There are
            then no own memories and no ridge.

        Returns:
          `Recall` with the output `(*batch, L, heads, v)`. A query that may see no
          memory retrieves zero.

        Raises:
          ValueError: if numbers of the association do not fit the heads, the mask has
            another shape, `key` is no key, or there is an `axis_name`.
        """
        if self.axis_name is not None:
            raise ValueError(f"associate needs no axis_name, got {self.axis_name!r}")
        if key is not None:
            check_key(key)
        if where is not None:
            *batch, rows, heads, _ = query.shape
            check_where(where, (*batch, heads, rows, keys.shape[-2 if shared else -3]))
        options = where, lambda x: self.dropped(x, key), size, energies, shared
        whole = weights or self.ridge is not None or (self.dropout and key is not None)
        return self._recalled(query, keys, values, *options, bool(whole))

    def associate_blocks(
        self,
        query: Float[Array, "*batch L heads d"],
        stored: Rows,
        batch: tuple[int, ...],
        *,
        lengths: Int[Array, " bags"] | None = None,
        key: Array | None = None,
        size: int | None = None,
    ) -> Float[Array, "*batch L heads v"]:
        """The output of `associate`, with a block of memories at a time.

        Args:
          query: states of each head.
          stored: memories of all bags, one bag behind another.
          batch: axes of the query along which memories differ, all bags of the same
            number of memories; empty if all states share them, or there are lengths.
          lengths: number of memories of each bag, of bags of different lengths.
          key: as in `associate`.
          size: as in `associate`.

        Raises:
          ValueError: as `associate`.
        """
        if key is not None:
            check_key(key)
        *rows, heads, d = query.shape
        self.check_heads(heads)
        bags = math.prod(batch) if lengths is None else lengths.shape[0]
        stored = stored.filled(bags)
        if 0 in rows:
            shape = (*rows, heads, stored.sizes()[1])
            return jnp.zeros(shape, query.dtype)
        if self.own_memories:
            own: Any = tuple(
                with_own(jnp.zeros((0, heads, n), query.dtype), x, self.zero_memory)
                for n, x in zip(stored.sizes(), self._bias_patterns(), strict=True)
            )
            stored = dataclasses.replace(stored, own_memories=own)
        entries = 1 if lengths is not None else math.prod(rows[:-1]) // bags
        output = associate_blocks(
            self.current_separation(),
            self.current_beta(d if size is None else size),
            query.reshape(bags, math.prod(rows) // bags, heads, d),
            stored,
            lengths,
            entries=entries,
            steps=self.steps,
            block=self.block or DEFAULT_BLOCK,
            dropout=(self.dropout, key) if self.dropout and key is not None else None,
            axis=self.axis_name,
        )
        return output.reshape(*rows, heads, output.shape[-1])

    def dropped(
        self, weights: Float[Array, "*shape"], key: Array | None
    ) -> Float[Array, "*shape"]:
        """The weights after dropout; the weights themselves without a key."""
        return dropped(weights, self.dropout, key if self.dropout else None)

    def __call__(
        self,
        query: Float[Array, "*batch L heads d"],
        key: Float[Array, "*batch S kv_heads d"],
        value: Float[Array, "*batch S kv_heads v"],
        bias: Shaped[Array, "..."] | None = None,
        mask: Shaped[Array, "..."] | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        promote_dtype: Callable[..., Any] = nnx.nn.dtypes.promote_dtype,
        is_causal: bool = False,
    ) -> Float[Array, "*batch L heads v"]:
        """Attention as retrieval, with the arguments of `nnx.dot_product_attention`.

        With `Softmax` and one update both give the same, dropout included, but a query
        that may see no key retrieves zero.

        Args:
          query: queries.
          key: keys; a head of theirs serves `heads / kv_heads` heads of the queries.
          value: values.
          bias: None; an association adds nothing to overlaps.
          mask: broadcasts to `(*batch, heads, L, S)`; true, or 1 in any dtype, where a
            query may see a key, else false or 0. Other numbers are an error; in a
            traced mask they make the whole output NaN.
          broadcast_dropout: drop the same weights in all heads and batch entries.
          dropout_rng: key of `jax.random` for dropout.
          dropout_rate: share of the weights that is dropped.
          deterministic: no dropout.
          dtype: of the computation; None follows the arrays.
          precision: without effect: products are at full precision.
          module: sows the weights, before dropout, as the `nnx.Intermediate`
            `attention_weights`.
          promote_dtype: promotes arrays to one dtype.
          is_causal: a query sees no key at a later position.

        Raises:
          ValueError: if shapes do not fit, there is a bias, the association itself
            has dropout, or it has a block or a ridge and there is dropout.
        """
        if bias is not None:
            raise ValueError(f"bias must be None, got shape {bias.shape}: use a mask")
        rate = 0.0 if deterministic else dropout_rate
        dropout_rng = dropout_key(self, dropout_rng, rate, module)
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        check_attention(query, key, value, may_be_empty=self.own_memories > 0)
        *batch, L, heads, _ = query.shape
        S, kv_heads = key.shape[-3:-1]
        where = invalid = None
        if mask is not None or is_causal:
            where, invalid = attention_mask(mask, is_causal, (*batch, heads, L, S))

        def drop(weights: Array) -> Array:
            return flax_dropped(weights, dropout_rate, dropout_rng, broadcast_dropout)

        keys, values = (
            x if heads == kv_heads else jnp.repeat(x, heads // kv_heads, axis=-2)
            for x in (key, value)
        )
        if self.block is not None:
            stored = stored_rows(keys, values, where)
            output = self.associate_blocks(query, stored, tuple(batch))
        else:
            whole = module is not None or dropout_rng is not None
            options = where, drop, None, False, False, whole or self.ridge is not None
            recall = self._recalled(query, keys, values, *options)
            output = recall.output
            if module is not None:
                module.sow(nnx.Intermediate, "attention_weights", recall.weights)
        return output if invalid is None else jnp.where(invalid, jnp.nan, output)

    def _recalled(
        self,
        query: Array,
        keys: Array,
        values: Array,
        where: Array | None,
        drop: Callable[[Array], Array],
        size: int | None,
        energies: bool,
        shared: bool = False,
        whole: bool = True,
    ) -> Recall:
        """The recall of `associate`, with weights after `drop` in the output."""
        self.check_heads(query.shape[-2])
        beta = self.current_beta(query.shape[-1] if size is None else size)
        if not shared:
            of_keys, of_values = self._bias_patterns()
            keys = with_own(keys, of_keys, self.zero_memory)
            values = with_own(values, of_values, self.zero_memory)
            if where is not None:
                where = extended_mask(where, self.own_memories)
        recall = recall_of_heads(
            self.current_separation(),
            (query, keys, values, beta, where),
            steps=self.steps,
            until_converged=self.until_converged,
            energies=energies,
            shared=shared,
            whole=whole,
        )
        weights = drop(recall.weights) if whole else recall.weights
        if weights is recall.weights and self.ridge is None:
            return recall
        output = read_out(
            weights,
            (query, keys, values),
            ridge=self.ridge,
            masked=where is not None,
            whole=self.current_separation().shift_invariant,
            shared=shared,
        )
        return recall._replace(output=output)

    def _bias_patterns(self) -> tuple[Array | None, Array | None]:
        """Key and value `(heads, size)` of the bias pattern, if there is one."""
        if self.bias is None:
            return None, None
        return self.bias.key[...], self.bias.value[...]
