"""Association: retrieval of each head, from queries, keys and values as they are."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
)
from uhop_jax.layers.blocks import associate_blocks
from uhop_jax.layers.dropout import dropped
from uhop_jax.layers.learned import (
    BiasPattern,
    with_array_leaves,
    with_hashable_leaves,
)
from uhop_jax.layers.masks import attention_mask, extended_mask, zero_unless
from uhop_jax.layers.tiles import Rows, stored_rows
from uhop_jax.model import Model
from uhop_jax.retrieval import converge, energy, retrieve
from uhop_jax.separation import Separation, separation_from_name

DEFAULT_BLOCK = 1024  # memories in a block where bags have different lengths


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
      block: number of memories in a block. Keys, values and scores then exist for one
        block at a time, forward and backward, whatever the number of memories. A call
        of a layer has first derivatives alone, and `associate`, whose result has all
        weights, holds all of them. None computes all scores at once.
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
        self.axis_name = axis_name
        check_rate("dropout", dropout)
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
        self.zero_memory, self.dropout, self.block = zero_memory, float(dropout), block

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
        keys: Float[Array, "*sets S heads d"],
        values: Float[Array, "*sets S heads v"],
        *,
        where: Bool[Array, "..."] | None = None,
        key: Array | None = None,
        size: int | None = None,
        energies: bool = True,
    ) -> Recall:
        """Retrieves the average of the associated values for each query.

        Args:
          query: states of each head.
          keys: memories of each head; all queries share them if they lack the batch.
          values: what the last weights of each head average.
          where: `(*batch, 1 or heads, L, S)`, true where a query may see a memory.
          key: key of `jax.random` for dropout; None switches dropout off.
          size: the default `beta` is `1 / sqrt(size)`; `d` by default.
          energies: whether the result has energies.

        Returns:
          `Recall` with the output `(*batch, L, heads, v)`. A query that may see no
          memory retrieves zero.

        Raises:
          ValueError: if numbers of the association do not fit the heads, or `key` is
            not a key of `jax.random`.
        """
        if key is not None:
            check_key(key)
        drop = lambda weights: self.dropped(weights, key)  # noqa: E731
        return self._recalled(query, keys, values, where, drop, size, energies)

    def associate_shared(
        self,
        query: Float[Array, "*batch L heads d"],
        keys: Float[Array, "*sets S d"],
        values: Float[Array, "*sets S v"],
        *,
        where: Bool[Array, "..."] | None = None,
        key: Array | None = None,
        size: int | None = None,
    ) -> Recall:
        """As `associate` without energies, with keys and values that all heads share.

        Raises:
          ValueError: as `associate`.
        """
        if key is not None:
            check_key(key)
        drop = lambda weights: self.dropped(weights, key)  # noqa: E731
        options = where, drop, size, False
        return self._recalled(query, keys, values, *options, shared=True)

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
        if self.own_memories:
            empty = (jnp.zeros((0, heads, n), query.dtype) for n in stored.sizes())
            own: Any = tuple(map(self._extended, empty, self._bias_patterns()))
            stored = dataclasses.replace(stored, own_memories=own)
        bags = math.prod(batch) if lengths is None else lengths.shape[0]
        entries = 1 if lengths is not None else math.prod(rows[:-1]) // max(bags, 1)
        output = associate_blocks(
            self.current_separation(),
            self.current_beta(d if size is None else size),
            query.reshape(bags, -1, heads, d),
            stored,
            lengths,
            entries=entries,
            steps=self.steps,
            block=DEFAULT_BLOCK if self.block is None else self.block,
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
            has dropout, or it has a block and there is dropout or a module.
        """
        del precision
        if bias is not None:
            raise ValueError(
                f"bias must be None, got shape {bias.shape}: use a mask to hide keys"
            )
        if self.dropout:
            raise ValueError(
                "dropout of an association must be 0 in an attention of Flax, which "
                f"has a dropout_rate, got {self.dropout}"
            )
        if deterministic or not dropout_rate:
            dropout_rng = None
        elif dropout_rng is None:
            raise ValueError("dropout needs a dropout_rng, or deterministic=True")
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        if min(x.ndim for x in (query, key, value)) < 3:
            raise ValueError(
                "query must have shape (..., L, heads, d), key and value alike, got "
                f"{query.shape}, {key.shape} and {value.shape}"
            )
        *batch, L, heads, _ = query.shape
        S, kv_heads = key.shape[-3:-1]
        shapes = ((*batch, S, kv_heads, query.shape[-1]), (*batch, S, kv_heads))
        if key.shape != shapes[0] or value.shape[:-1] != shapes[1] or heads % kv_heads:
            raise ValueError(
                f"keys and values of queries {query.shape} must agree in all axes but "
                "their length, their heads divide those of the queries, got "
                f"{key.shape} and {value.shape}"
            )
        where = invalid = None
        if mask is not None or is_causal:
            where, invalid = attention_mask(mask, is_causal, (*batch, heads, L, S))

        def drop(weights: Array) -> Array:
            if dropout_rng is None:
                return weights
            shape = weights.shape
            if broadcast_dropout:
                shape = (*(1 for _ in shape[:-2]), *shape[-2:])
            keep = jax.random.bernoulli(dropout_rng, 1 - dropout_rate, shape)
            kept = weights * jnp.asarray(1 / (1 - dropout_rate), weights.dtype)
            return jnp.where(keep, kept, jnp.zeros((), weights.dtype))

        keys, values = (
            x if heads == kv_heads else jnp.repeat(x, heads // kv_heads, axis=-2)
            for x in (key, value)
        )
        if self.block is not None:
            if dropout_rng is not None or module is not None:
                raise ValueError(
                    "block makes no weights for dropout or module of an attention of "
                    f"Flax, got dropout_rate {dropout_rate} and module {module!r}"
                )
            stored = stored_rows(keys, values, where)
            output = self.associate_blocks(query, stored, tuple(batch))
            return output if invalid is None else jnp.where(invalid, jnp.nan, output)
        recall = self._recalled(query, keys, values, where, drop, None, False)
        if module is not None:
            module.sow(nnx.Intermediate, "attention_weights", recall.weights)
        output = recall.output
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
        *,
        shared: bool = False,
    ) -> Recall:
        """The recall of `associate`, with weights after `drop` in the output.

        With `shared`, keys and values have no axis of heads; all heads share them, and
        there are no own memories.
        """
        self.check_heads(query.shape[-2])
        beta = self.current_beta(query.shape[-1] if size is None else size)
        if not shared:
            of_keys, of_values = self._bias_patterns()
            keys = self._extended(keys, of_keys)
            values = self._extended(values, of_values)
            if where is not None:
                where = extended_mask(where, self.own_memories)
        arrays = query, keys, values, beta, where
        recall = self._over_heads(*arrays, energies, None if shared else -2)
        weights = drop(recall.weights)
        if weights is recall.weights:
            return recall
        if where is not None:  # a weight of zero times NaN is not zero
            values = zero_unless(jnp.isfinite(values).all(-1), values)
        rows = "...sv" if shared else "...shv"
        output = jnp.einsum(f"...hls,{rows}->...lhv", weights, values)
        return recall._replace(output=output)

    def _over_heads(
        self, query, keys, values, beta, where, energies, stored_axis
    ) -> Recall:
        """Retrieval of each head; arrays have an axis of heads before and after.

        The axis of keys and values is `stored_axis`, or None if heads share them.
        """
        numbers, structure = jax.tree.flatten(self.current_separation())

        def one_head(query, keys, values, beta, numbers, where) -> Recall:
            separation = jax.tree.unflatten(structure, numbers)
            model = Model(separation=separation, beta=beta)
            if self.until_converged:
                options = {"values": values, "mask": where}
                end = converge(model, keys, query, max_steps=self.steps, **options)
                return Recall(
                    end.pattern, end.weights, end.energy, end.steps, end.converged
                )
            options = {"mask": where, "steps": self.steps}
            state, weights = retrieve(model, keys, query, values=values, **options)
            of_state = None
            if energies and model.has_energy:
                last = retrieve(model, keys, query, **options).state
                of_state = energy(model, keys, last, mask=where)
            steps = jnp.full(weights.shape[:-1], self.steps, jnp.int32)
            return Recall(state, weights, of_state, steps, None)

        masked = where is not None and where.shape[-3] > 1
        if where is not None and not masked:
            where = where.squeeze(-3)
        arguments = (query, keys, values, beta, numbers, where)
        axes = (
            *(-2, stored_axis, stored_axis),
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

    def _bias_patterns(self) -> tuple[Array | None, Array | None]:
        """Key and value `(heads, size)` of the bias pattern, if there is one."""
        if self.bias is None:
            return None, None
        return self.bias.key[...], self.bias.value[...]

    def _extended(self, x: Array, bias: Array | None) -> Array:
        """`x (..., S, heads, size)` with the bias pattern and the zero memory added."""
        added = [] if bias is None else [bias.astype(x.dtype)]
        if self.zero_memory:
            added.append(jnp.zeros(x.shape[-2:], x.dtype))
        shape = (*x.shape[:-3], 1, *x.shape[-2:])
        added = [jnp.broadcast_to(pattern, shape) for pattern in added]
        return jnp.concatenate([x, *added], axis=-3) if added else x


def _head_axis(x: Array) -> int | None:
    """The axis of heads of a number of an association; None if all heads share it."""
    return 0 if x.ndim else None
