"""Separation losses of the kernels of a model, in one forward pass."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from uhop_jax.contrastive import ContrastiveLoss
from uhop_jax.layers.base import Layer
from uhop_jax.layers.features import SeparationRecord, modules_of
from uhop_jax.losses import AverageLoss, SeparationLoss, check_loss


class SeparationLosses(NamedTuple):
    """Result of `separation_losses`: means over the memory sets that a layer sees.

    Attributes:
      loss: `(layers,)`, the separation loss of each layer's kernel.
      gap: `(layers,)`, the loss minus its `least` value. Stage I cannot lower a loss
        whose gap is zero.
    """

    loss: Float[Array, " layers"]
    gap: Float[Array, " layers"]


def separation_losses(
    model: nnx.Module,
    *inputs: Any,
    loss: SeparationLoss | ContrastiveLoss = AverageLoss(),
    states: bool = False,
    through: bool = False,
    **options: Any,
) -> SeparationLosses:
    """Separation loss of the kernel of each layer, in one forward pass.

    The memories that a layer sees are constants: a loss has gradients in the kernel of
    its own layer alone. With `through`, gradients also reach the layers before it. The
    model does not change, nor do its random streams and statistics.

    Args:
      model: a module with `Hopfield` layers that have a kernel.
      *inputs: positional arguments of the model.
      loss: a separation loss, or a `ContrastiveLoss`, whose views are drawn by the
        `key` of the model's call; its `t` is a number, not an array.
      states: take each loss over states and memories together, not over the memories
        alone.
      through: let gradients pass through the memories to the layers before, as the
        authors' code does.
      **options: keyword arguments of the model.

    Returns:
      `SeparationLosses`, one entry for each layer, in the order of their paths. A layer
      that is called twice has two entries; stacked layers (`nnx.vmap`, `nnx.scan`) have
      one each.

    Raises:
      ValueError: if no layer has a kernel, or `loss` is no separation loss.
    """
    if not isinstance(loss, ContrastiveLoss):
        check_loss(loss)
    model = nnx.clone(model)  # the model may be a constant of a trace
    for module in modules_of(model):
        if isinstance(module, Layer) and module.kernel is not None:
            module.record = SeparationRecord(
                (), loss=loss, states=states, through=through
            )
    model(*inputs, **options)
    records = [x for x in nnx.iter_graph(model) if isinstance(x[1], SeparationRecord)]
    records.sort(key=lambda x: [(isinstance(key, str), key) for key in x[0]])
    calls = [jax.tree.leaves(record) for _, record in records]
    losses = [x.reshape(-1) for numbers in calls for x in numbers[::2]]
    gaps = [x.reshape(-1) for numbers in calls for x in numbers[1::2]]
    if not losses:
        raise ValueError("the model has no Hopfield layer with a kernel")
    return SeparationLosses(jnp.concatenate(losses), jnp.concatenate(gaps))
