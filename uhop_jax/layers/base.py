"""What Hopfield layers share: inputs, norms, and the kernel that Stage I learns."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from uhop_jax._checks import (
    check_choice,
    check_floating,
    check_rngs,
)
from uhop_jax.layers.association import Association, Recall
from uhop_jax.layers.features import (
    LinearFeatures,
    SeparationFeatures,
    SeparationRecord,
    as_kernel,
)
from uhop_jax.layers.inputs import Inputs, Sizes, as_inputs

Kernel = bool | nnx.Module | Callable[[], nnx.Module]


class Layer(nnx.Module):
    """What layers with and without projections share: inputs, norms and the kernel.

    A subclass implements `_recalled`.

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
        memories: Float[Array, "..."] | None = None,
        values: Float[Array, "..."] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        association_mask: Bool[Array, "..."] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "*batch L out"]:
        """Retrieves the average of the associated memories for each state.

        Args:
          state: queries `(*batch, L, state_size)`. Leading axes of the batch may be
            missing: memory sets along them share the states.
          memories: `(*batch, S, memory_size)`, or `(S, memory_size)`, which all states
            share; the states themselves by default.
          values: `(..., S, value_size)`, read out in place of the memories.
          mask: `(S,)` or `(*batch, S)`, true for valid memories. A state without any
            valid memory retrieves zero, before the output projection.
          association_mask: `(L, S)`, `(*batch, L, S)` or `(*batch, heads, L, S)` with 1
            or all heads: true where a state may see a memory. A memory that no state
            may see, by either mask, affects no result and no gradient, even if it is
            NaN.
          key: key of `jax.random` for dropout; None switches dropout off.

        Returns:
          `(*batch, L, out_size)`. Without the output projection the last axis has
          `num_heads * value_head_size` entries, and `value_size` in a static layer.

        Raises:
          ValueError: if shapes do not fit, a mask is not boolean, or `key` is not a key
            of `jax.random`.
        """
        arguments = (state, memories, values, mask, association_mask)
        return self._associated(arguments, key, False).output

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
        """As `__call__`, with weights, energies and convergence beside the output."""
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
        self, state: Array, memories: Array, inputs: Inputs, states: bool, through: bool
    ) -> SeparationFeatures:
        """`separation_features`, from states and memories after the norms."""
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
        features = self.kernel(patterns if through else lax.stop_gradient(patterns))
        if where is not None:
            where = jnp.broadcast_to(where, features.shape[:-1])
        return SeparationFeatures(features, where)

    def _inputs(self, arguments: tuple[Any, ...]) -> Inputs:
        may_be_empty = self.association.own_memories > 0
        return as_inputs(self.sizes, *arguments, may_be_empty=may_be_empty)

    def _normalized(self, inputs: Inputs) -> tuple[Array, Array]:
        """States and memories after the norms."""
        state, memories = inputs.state, inputs.memories
        if self.norm_state is not None:
            state = self.norm_state(state)
        if self.norm_memory is not None:
            memories = self.norm_memory(memories)
        return state, memories

    def _associated(
        self, arguments: tuple[Any, ...], key: Array | None, energies: bool
    ) -> Recall:
        inputs = self._inputs(arguments)
        if inputs.values is None and self.sizes.value not in (None, self.sizes.memory):
            raise ValueError(
                "values must be given to a layer with value_size "
                f"{self.sizes.value} and memory_size {self.sizes.memory}"
            )
        state, memories = self._normalized(inputs)
        values = inputs.values
        read = memories if values is None else values
        if self.norm_value is not None:  # memories are not normalised twice
            read = self.norm_value(inputs.memories if values is None else values)
        mapped = state, memories
        if self.kernel is not None:
            if self.record is not None:
                asked = self.record.get_metadata()
                features = self._separated(
                    state, memories, inputs, asked["states"], asked["through"]
                )
                self.record = self.record.extended(features)
            mapped = self.kernel(state), self.kernel(memories)
        return self._recalled(*mapped, memories, read, inputs, key, energies)

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
        """The recall of a call.

        Args:
          state: features of the states.
          mapped: features of the memories.
          memories: the memories themselves.
          read: the rows that are read out, in place of the memories.
          inputs: the arguments of the call.
          key: for dropout, or None.
          energies: whether the result has energies.
        """
        raise NotImplementedError


def feature_size(kernel: nnx.Module, size: int, dtype: Any) -> int:
    """Dimension of the features of a kernel of patterns of dimension `size`."""
    function: Any = kernel
    shape = jax.eval_shape(function, jax.ShapeDtypeStruct((2, size), dtype)).shape
    if len(shape) != 2:
        raise ValueError(f"kernel must map (n, {size}) to (n, D), got {shape}")
    return shape[1]
