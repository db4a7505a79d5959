"""The Hopfield layer: projections around an association."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from uhop_jax._checks import check_count, check_sizes, surely_less
from uhop_jax.layers.association import Association
from uhop_jax.layers.base import Kernel, Layer
from uhop_jax.layers.features import applied, feature_size
from uhop_jax.layers.inputs import Inputs, Sizes
from uhop_jax.layers.projections import Initializer, Projections


class Hopfield(Layer):
    """Association of states with stored patterns (Ramsauer et al. 2020; [sec:DL]).

    Args:
      state_size: dimension of states.
      association: separation, inverse temperature, updates and dropout; softmax and one
        update by default.
      memory_size: dimension of memories; `state_size` by default.
      value_size: dimension of values that `W_V` maps directly, `W_V Y`: the memories,
        unless a call has separate values. None reads out `W_V W_K Y`, as in the paper.
      num_heads: number of heads.
      head_size: dimension of a head's queries and keys; `state_size / num_heads` by
        default.
      value_head_size: dimension of a head's values; `head_size` by default.
      out_size: dimension of the output; `state_size` by default. 0 leaves out the
        output projection.
      normalize: which LayerNorms there are: of `state`, `memory` and `value`, as they
        come in (`value` if there is a `value_size`); and of `pattern`, the projected
        queries and keys, head by head.
      kernel: `Phi`, applied to states and memories before the projections. True is
        `LinearFeatures`; else a module, or a function that makes one, so that each
        layer has its own. A module with parameters that are not `KernelParam`s is
        copied; in the copy they are.
      weight_init: initializer of the projections' weights.
      bias_init: initializer of the projections' biases; None leaves them out.
      dtype: of the computation; None follows inputs and parameters.
      param_dtype: of the parameters.
      rngs: for the start values.

    Raises:
      ValueError: if an argument is out of range, or sizes do not fit together.
    """

    def __init__(
        self,
        state_size: int,
        association: Association | None = None,
        *,
        memory_size: int | None = None,
        value_size: int | None = None,
        num_heads: int = 1,
        head_size: int | None = None,
        value_head_size: int | None = None,
        out_size: int | None = None,
        normalize: Sequence[str] = (),
        kernel: Kernel = False,
        weight_init: Initializer = nnx.initializers.lecun_normal(),
        bias_init: Initializer | None = nnx.initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_count("state_size", state_size, 1)
        check_count("num_heads", num_heads, 1)
        check_sizes(
            memory_size=memory_size,
            value_size=value_size,
            head_size=head_size,
            value_head_size=value_head_size,
        )
        out_size = state_size if out_size is None else out_size
        check_count("out_size", out_size, 0)
        for name, init in (("weight_init", weight_init), ("bias_init", bias_init)):
            if not callable(init) and (init is not None or name == "weight_init"):
                raise ValueError(
                    f"{name} must be an initializer of jax.nn.initializers, got "
                    f"{init!r}"
                )
        memory_size = state_size if memory_size is None else memory_size
        if head_size is None:
            head_size = state_size // num_heads
            if head_size * num_heads != state_size:
                raise ValueError(
                    f"num_heads {num_heads} must divide state_size {state_size}, or "
                    "head_size be given"
                )
        sizes = Sizes(state_size, memory_size, value_size, num_heads)
        super().__init__(
            sizes, association, normalize, kernel, dtype, param_dtype, rngs
        )
        features = state_size, memory_size
        if self.kernel is not None:
            features = (feature_size(self.kernel, state_size, param_dtype),) * 2
            if value_size is None and features[1] != memory_size:
                raise ValueError(
                    "without a value_size W_K acts on memories too, so the kernel must "
                    f"keep the dimension: it maps {memory_size} to {features[1]}"
                )
        self.projections = Projections(
            *features,
            value_size,
            num_heads=num_heads,
            head_size=head_size,
            value_head_size=head_size if value_head_size is None else value_head_size,
            out_size=out_size,
            normalize="pattern" in normalize,
            weight_init=weight_init,
            bias_init=bias_init,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def _recalled(self, state, mapped, memories, read, inputs, key, energies):
        maps, association = self.projections, self.association
        if not energies and self._reads_memories(mapped, inputs):
            query = maps.pulled_back(maps.query(state))
            recall = association.associate(
                jnp.broadcast_to(query, (*inputs.batch, *query.shape[-3:])),
                mapped,
                read,
                where=inputs.where,
                key=key,
                size=maps.query.kernel.shape[-1],
                energies=False,
                shared=True,
            )
            weights = association.dropped(recall.weights, key)  # compiled to one draw
            heads = maps.value_of_mean(recall.output, weights, shared=True)
            return recall._replace(output=maps.output(heads))
        keys = maps.key(mapped)
        late = False  # whether the value projection follows the weighted sum
        if self.sizes.value is None:
            read = self._projected(keys, memories)
            states = math.prod(inputs.batch) * state.shape[-2]
            fewer = surely_less(states, math.prod(read.shape[:-2]))
            late = fewer and self.sizes.heads == 1 and not association.own_memories
        if not late:
            read = maps.value(read)
        recall = association.associate(
            self._queries(state, inputs.batch),
            applied(maps.norm_key, keys),
            read,
            where=inputs.where,
            key=key,
            energies=energies,
            weights=energies or late,
        )
        heads = recall.output
        if late:
            weights = association.dropped(recall.weights, key)  # compiled to one draw
            heads = maps.value_of_mean(heads, weights)
        return recall._replace(output=maps.output(heads))

    def _reads_memories(self, mapped: Array, inputs: Inputs) -> bool:
        """Whether heads read memories themselves, which costs less if states are few.

        A memory then costs its inner products with the states of each head, and no
        projections.
        """
        maps, association = self.projections, self.association
        if self.sizes.value is None or maps.norm_query is not None:
            return False
        several = association.steps > 1 or association.until_converged
        if several or association.ridge is not None:
            return False
        separation = association.current_separation()
        if association.own_memories or not (
            separation.shift_invariant or maps.key.bias is None
        ):
            return False
        sets = 1 if mapped.ndim > 2 else math.prod(inputs.batch)
        states = sets * inputs.state.shape[-2]
        sizes = maps.query.kernel.shape[-1], maps.value.kernel.shape[-1]
        return mapped.dtype.itemsize > 2 and surely_less(2 * states - 1, min(sizes))

    def _projected(self, keys: Array, memories: Array) -> Array:
        """The keys of the memories without a kernel, which `W_V` maps."""
        return keys if self.kernel is None else self.projections.key(memories)

    def _queries(self, state, batch):
        maps = self.projections
        query = applied(maps.norm_query, maps.query(state))
        return jnp.broadcast_to(query, (*batch, *query.shape[-3:]))

    def _stored(self, mapped, memories, read):
        maps = self.projections
        keys = maps.key(mapped)
        if self.sizes.value is None:
            read = self._projected(keys, memories)
        return applied(maps.norm_key, keys), maps.value(read)

    def _outputs(self, heads):
        return self.projections.output(heads)
