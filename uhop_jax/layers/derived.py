"""Layers around a Hopfield layer: pooling by learned states, lookup in memories."""

from collections.abc import Sequence

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import as_counts, check_count, check_rngs
from uhop_jax.layers.base import Layer
from uhop_jax.layers.inputs import IndexedMemories
from uhop_jax.layers.recall import Recall


class HopfieldPooling(nnx.Module):
    """Pools a bag of memories by learned states (Ramsauer et al. 2020).

    Args:
      layer: associates the learned states with the memories: a `Hopfield`, or a
        `StaticHopfield`.
      quantity: number of learned states; each gives one output.
      sets: sizes of the last batch axes of the memories; each position along them then
        has learned states of its own.
      rngs: for the start values of the states, drawn from `N(0, 1)`.

    Raises:
      ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        layer: Layer,
        quantity: int = 1,
        *,
        sets: Sequence[int] = (),
        rngs: nnx.Rngs,
    ):
        check_count("quantity", quantity, 1)
        sets = as_counts("sets", sets, 1, 2**31)
        _check_layer(layer, rngs)
        self.layer = layer
        self.state = _patterns((*sets, quantity, layer.sizes.state), layer, rngs)

    def __call__(
        self,
        memories: Float[Array, "*sets S memory_size"] | IndexedMemories,
        values: Float[Array, "*sets S value_size"] | None = None,
        *,
        mask: Bool[Array, "*#sets S"] | None = None,
        lengths: Int[Array, " bags"] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "*batch quantity out"]:
        """One vector for each bag and learned state; arguments as in `Hopfield`.

        A bag is an entry of the batch; with lengths, a part of the memories.
        """
        options = {"mask": mask, "lengths": lengths, "key": key}
        return self.layer(self.state[...], memories, values, **options)

    def associate(
        self,
        memories: Float[Array, "*batch S memory_size"],
        values: Float[Array, "*batch S value_size"] | None = None,
        *,
        mask: Bool[Array, "*#batch S"] | None = None,
        key: Array | None = None,
    ) -> Recall:
        """As `__call__`, with weights, energies and convergence beside the output."""
        return self.layer.associate(
            self.state[...], memories, values, mask=mask, key=key
        )


class HopfieldLayer(nnx.Module):
    """Associates states with learned memories: a lookup (Ramsauer et al. 2020).

    Args:
      layer: associates states with the learned memories: a `Hopfield`, or a
        `StaticHopfield`.
      quantity: number of learned memories.
      learn_values: learn a separate value for each memory; needs a layer with a
        `value_size`.
      rngs: for the start values of memories and values, drawn from `N(0, 1)`.

    Raises:
      ValueError: if an argument is out of range, or the layer takes no values.
    """

    def __init__(
        self, layer: Layer, quantity: int, *, learn_values: bool = False, rngs: nnx.Rngs
    ):
        check_count("quantity", quantity, 1)
        _check_layer(layer, rngs)
        size = layer.sizes.value
        if learn_values and size is None:
            raise ValueError("learn_values needs a layer with a value_size")
        self.layer = layer
        self.memories = _patterns((quantity, layer.sizes.memory), layer, rngs)
        self.targets = nnx.data(None)
        if learn_values and size is not None:
            self.targets = _patterns((quantity, size), layer, rngs)

    def __call__(
        self, state: Float[Array, "*batch L state_size"], *, key: Array | None = None
    ) -> Float[Array, "*batch L out"]:
        """One output for each state; arguments as in `Hopfield`."""
        return self.layer(state, *self._stored(), key=key)

    def associate(
        self, state: Float[Array, "*batch L state_size"], *, key: Array | None = None
    ) -> Recall:
        """As `__call__`, with weights, energies and convergence beside the output."""
        return self.layer.associate(state, *self._stored(), key=key)

    def _stored(self) -> tuple[Array, Array | None]:
        targets = None if self.targets is None else self.targets[...]
        return self.memories[...], targets


def _check_layer(layer: Layer, rngs: nnx.Rngs) -> None:
    """Refuses anything but a layer, and anything but random streams."""
    if not isinstance(layer, Layer):
        raise ValueError(f"layer must be a Hopfield or StaticHopfield, got {layer!r}")
    check_rngs(rngs)


def _patterns(shape: tuple[int, ...], layer: Layer, rngs: nnx.Rngs) -> nnx.Param:
    """Learned patterns, drawn from `N(0, 1)`."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, layer.param_dtype))
