"""What Hopfield layers share: inputs, norms, and the kernel that Stage I learns."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.random import fold_in
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import check_choice, check_floating, check_key, check_rngs
from uhop_jax.contrastive import ContrastiveLoss
from uhop_jax.corruption import Corruption
from uhop_jax.layers.association import Association
from uhop_jax.layers.features import (
    LinearFeatures,
    SeparationFeatures,
    SeparationRecord,
    applied,
    as_kernel,
)
from uhop_jax.layers.inputs import IndexedMemories, Inputs, Sizes, as_inputs, as_rows
from uhop_jax.layers.masks import first_seen, mask_rows
from uhop_jax.layers.recall import Recall
from uhop_jax.layers.tiles import Maps, Rows

VIEW = 1  # stream of the views of a call's key, whose dropout hashes the key itself
Kernel = bool | nnx.Module | Callable[[], nnx.Module]


class Layer(nnx.Module):
    """What layers with and without projections share: inputs, norms and the kernel.

    A subclass implements `_recalled`, `_queries`, `_stored` and `_outputs`.

    Attributes:
      association: what retrieves.
      kernel: the feature map, or None.
      record: losses of the calls while `separation_losses` runs, else None.
    """

    def __init__(
        self,
        sizes: Sizes,
        association: Association | None,
        normalize: Sequence[str],
        kernel: Kernel,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        check_floating("param_dtype", param_dtype)
        if dtype is not None:
            check_floating("dtype", dtype)
        check_rngs(rngs)
        association = Association() if association is None else association
        if not isinstance(association, Association):
            raise ValueError(f"association must be an Association, got {association!r}")
        association.check_heads(sizes.heads)
        named = {"state": sizes.state, "memory": sizes.memory}
        if sizes.value is not None:
            named["value"] = sizes.value
        for name in normalize:
            check_choice("normalize", name, (*named, "pattern"))
        if kernel is not False and sizes.memory != sizes.state:
            raise ValueError(
                "one kernel maps states and memories, so they need one dimension, got "
                f"state_size {sizes.state} and memory_size {sizes.memory}"
            )
        self.sizes, self.param_dtype = sizes, param_dtype
        self.association = association
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        norms = {
            name: nnx.LayerNorm(size, rngs=rngs, **dtypes)
            for name, size in named.items()
            if name in normalize
        }
        self.norm_state = nnx.data(norms.get("state"))
        self.norm_memory = nnx.data(norms.get("memory"))
        self.norm_value = nnx.data(norms.get("value"))
        self.kernel: Any = nnx.data(None)
        if kernel is True:
            kernel = LinearFeatures(sizes.state, rngs=rngs, **dtypes)
        if kernel is not False:
            self.kernel = as_kernel(kernel)
        self.record: SeparationRecord | None = nnx.data(None)

    def __call__(
        self,
        state: Float[Array, "*states L state_size"],
        memories: Float[Array, "..."] | IndexedMemories | None = None,
        values: Float[Array, "..."] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        association_mask: Bool[Array, "..."] | None = None,
        lengths: Int[Array, " bags"] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "*batch L out"]:
        """Retrieves the average of the associated memories for each state.

        An association with a `block` holds keys, values and scores of one block at a
        time; so does a call with `lengths`, or with `IndexedMemories`.

        Args:
          state: queries `(*batch, L, state_size)`. Leading axes of the batch may be
            missing: memory sets along them share the states.
          memories: `(*batch, S, memory_size)`, or `(S, memory_size)` or
            `IndexedMemories`, which all states share; the states themselves by default.
          values: `(..., S, value_size)`, read out in place of the memories.
          mask: `(S,)` or `(*batch, S)`, true for valid memories. A state without any
            valid memory retrieves zero, before the output projection.
          association_mask: `(L, S)`, `(*batch, L, S)` or `(*batch, heads, L, S)` with 1
            or all heads: true where a state may see a memory. A memory that no state
            may see, by either mask, affects no result and no gradient, even if it is
            NaN.
          lengths: number of memories of each bag. The memories `(S, memory_size)` are
            then those of all bags, one bag behind another; states have shape
            `(L, state_size)` or `(bags, L, state_size)`, the mask `(S,)`. Not for
            separations without a `form`, nor for `TopK`.
          key: key of `jax.random` for dropout; None switches dropout off.

        Returns:
          `(*batch, L, out_size)`. Without the output projection the last axis has
          `num_heads * value_head_size` entries, and `value_size` in a static layer.

        Raises:
          ValueError: if shapes do not fit, a mask is not boolean, or `key` is not a key
            of `jax.random`.
        """
        arguments = (state, memories, values, mask, association_mask)
        made = isinstance(memories, IndexedMemories)
        if self.association.block is None and lengths is None and not made:
            return self._associated(arguments, key, False).output
        if lengths is None and not made:
            inputs = self._inputs(arguments)
        elif association_mask is not None:
            raise ValueError(
                "association_mask must be None with lengths or IndexedMemories, got "
                f"shape {jnp.shape(association_mask)}"
            )
        else:
            inputs = as_rows(self.sizes, state, memories, values, mask, lengths)
        return self._by_blocks(inputs, key)

    def associate(
        self,
        state: Float[Array, "*states L state_size"],
        memories: Float[Array, "..."] | None = None,
        values: Float[Array, "..."] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        association_mask: Bool[Array, "..."] | None = None,
        key: Array | None = None,
    ) -> Recall:
        """As `__call__`, with weights, energies and convergence beside the output.

        All weights are in memory at once, also with a `block`.
        """
        if isinstance(memories, IndexedMemories):
            raise ValueError(
                "memories of associate must be an array, which has all weights in "
                f"memory, got IndexedMemories of {memories.length}"
            )
        arguments = (state, memories, values, mask, association_mask)
        return self._associated(arguments, key, True)

    def separation_features(
        self,
        state: Float[Array, "*states L state_size"],
        memories: Float[Array, "..."] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        association_mask: Bool[Array, "..."] | None = None,
        states: bool = False,
        through: bool = False,
    ) -> SeparationFeatures:
        """The features that Stage I separates: the kernel of the memories of a call.

        Args:
          state: as in a call.
          memories: as in a call.
          mask: as in a call.
          association_mask: as in a call; memories that no state may see are not valid.
          states: the features of states come first, before those of memories.
          through: let gradients pass to states and memories, not to the kernel alone.

        Raises:
          ValueError: if the layer has no kernel, or as in a call.
        """
        if self.kernel is None:
            raise ValueError("separation_features need a layer with a kernel")
        inputs = self._inputs((state, memories, None, mask, association_mask))
        return self._separated(*self._normalized(inputs), inputs, states, through)

    def _separated(
        self,
        state: Array,
        memories: Array,
        inputs: Inputs,
        states: bool,
        through: bool,
        view: Callable[[Array], Array] | None = None,
    ) -> SeparationFeatures:
        """`separation_features`, from states and memories after the norms.

        The features are of views of the patterns, if there is a view.
        """
        patterns, where = memories, inputs.visible
        if states:
            parts = [
                jnp.broadcast_to(x, (*inputs.batch, *x.shape[-2:]))
                for x in (state, memories)
            ]
            patterns = jnp.concatenate(parts, axis=-2)
            if where is not None:
                valid = jnp.ones(parts[0].shape[:-1], bool)
                where = jnp.concatenate([valid, where], axis=-1)
        elif where is not None and memories.ndim == 2:
            where = where.any(tuple(range(len(inputs.batch))))
        patterns = patterns if through else lax.stop_gradient(patterns)
        features = self.kernel(patterns if view is None else view(patterns))
        if where is not None:
            where = jnp.broadcast_to(where, features.shape[:-1])
        return SeparationFeatures(features, where)

    def _inputs(self, arguments: tuple[Any, ...]) -> Inputs:
        may_be_empty = self.association.own_memories > 0
        return as_inputs(self.sizes, *arguments, may_be_empty=may_be_empty)

    def _normalized(self, inputs: Inputs) -> tuple[Array, Array]:
        """States and memories after the norms."""
        memories: Any = inputs.memories
        state = applied(self.norm_state, inputs.state)
        return state, applied(self.norm_memory, memories)

    def _associated(
        self, arguments: tuple[Any, ...], key: Array | None, energies: bool
    ) -> Recall:
        inputs = self._inputs(arguments)
        self._check_read(inputs)
        state, memories = self._normalized(inputs)
        self._record(state, memories, inputs, key)
        features, read = self._mapped(memories, inputs.memories, inputs.values)
        arguments = self._mapped_state(state), features, memories, read, inputs
        return self._recalled(*arguments, key, energies)

    def _by_blocks(self, inputs: Inputs, key: Array | None) -> Array:
        """The output of a call, a block of memories at a time."""
        self._check_read(inputs)
        memories, values = inputs.memories, inputs.values
        made = memories if isinstance(memories, IndexedMemories) else None
        rows = memories if made is None else None, values
        if self.record is not None:
            if made is not None or inputs.lengths is not None:
                raise ValueError(
                    "separation_losses need memories (..., S, memory_size), got "
                    f"{memories.shape} with lengths or IndexedMemories"
                )
            self._record(*self._normalized(inputs), inputs, key)
        shared = len(memories.shape) == 2
        mask = inputs.mask
        if mask is None or (shared and mask.ndim > 1):
            mask = mask_rows(inputs.where, shared)
        elif not shared:
            mask = jnp.broadcast_to(mask, memories.shape[:-1]).reshape(-1)
        record = self.record
        if record is not None:  # static data, but its loss may hold arrays
            self.record = None
        graphdef, parameters = nnx.split(self)
        if record is not None:
            self.record = record
        arguments = nnx.to_pure_dict(parameters), made
        length = math.prod(memories.shape[:-1])
        stored = Rows(
            length,
            Maps.of(_KeysAndValues(graphdef), arguments),
            jax.tree.map(lambda x: x.reshape(length, x.shape[-1]), rows),
            mask,
            spare=None if made is None else first_seen(mask),
        )
        state = applied(self.norm_state, inputs.state)
        output = self.association.associate_blocks(
            self._queries(self._mapped_state(state), inputs.batch),
            stored,
            () if shared else inputs.batch,
            lengths=inputs.lengths,
            key=key,
            size=self._default_size,
        )
        return self._outputs(output)

    def _check_read(self, inputs: Inputs) -> None:
        if inputs.values is None and self.sizes.value not in (None, self.sizes.memory):
            raise ValueError(
                "values must be given to a layer with value_size "
                f"{self.sizes.value} and memory_size {self.sizes.memory}"
            )

    def _record(
        self, state: Array, memories: Array, inputs: Inputs, key: Array | None
    ) -> None:
        """Keeps the losses of the kernel, while `separation_losses` asks for them."""
        if self.kernel is None or self.record is None:
            return
        asked, views = self.record.get_metadata(), None
        arguments = state, memories, inputs, asked["states"], asked["through"]
        if isinstance(asked["loss"], ContrastiveLoss):
            if key is None:
                raise ValueError(
                    "key must be a key of jax.random, with which ContrastiveLoss draws "
                    "views, got None"
                )
            check_key(key)
            corrupted, view_key = Corruption.of(asked["loss"].view), fold_in(key, VIEW)
            view = lambda x: corrupted(view_key, x)[0]  # noqa: E731
            views = self._separated(*arguments, view).features
        self.record = self.record.extended(self._separated(*arguments), views)

    def _mapped_state(self, state: Array) -> Array:
        """Features of states, from states after the norm."""
        return applied(self.kernel, state)

    def _mapped(
        self, memories: Array, raw: Any, values: Array | None
    ) -> tuple[Array, Array]:
        """Features of memories after their norm, and what is read out in their place.

        Raw memories are the values if there are none; values have their own norm.
        """
        read = memories if values is None else values
        if self.norm_value is not None:  # memories are not normalised twice
            read = self.norm_value(raw if values is None else values)
        return applied(self.kernel, memories), read

    # A subclass implements the following.

    _default_size: int | None = None  # the default `beta` is its inverse root, if given

    @abc.abstractmethod
    def _queries(self, state: Array, batch: tuple[int, ...]) -> Array:
        """Queries `(*batch, L, heads, d)` from the features of states."""

    @abc.abstractmethod
    def _stored(
        self, mapped: Array, memories: Array, read: Array
    ) -> tuple[Array, Array]:
        """Keys `(..., S, heads, d)` and values `(..., S, heads, v)`, see `_mapped`."""

    @abc.abstractmethod
    def _outputs(self, heads: Array) -> Array:
        """The output of a call, from the outputs of heads `(*batch, L, heads, v)`."""

    @abc.abstractmethod
    def _recalled(
        self,
        state: Array,
        mapped: Array,
        memories: Array,
        read: Array,
        inputs: Inputs,
        key: Array | None,
        energies: bool,
    ) -> Recall:
        """The recall, from features of states and memories; see `_mapped` for `read`.

        The key is for dropout; `inputs` are the arguments of the call.
        """


@dataclasses.dataclass(frozen=True)
class _KeysAndValues:
    """Keys and values of the rows of a block, by a layer of this structure."""

    graphdef: nnx.GraphDef

    def __call__(self, arguments: Any, rows: Any, index: Array) -> tuple[Array, Array]:
        parameters, made = arguments
        memories, values = rows
        layer = nnx.merge(self.graphdef, parameters)
        raw = memories if made is None else made(index)
        memories = applied(layer.norm_memory, raw)
        features, read = layer._mapped(memories, raw, values)
        return layer._stored(features, memories, read)
