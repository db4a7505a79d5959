"""A step of Stage I: the separation losses of all layers move kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from uhop_jax.contrastive import ContrastiveLoss
from uhop_jax.layers import separation_losses
from uhop_jax.training.task import SEPARATIONS, StageOneOptions, TrainState


def separation_step(
    graphdef: Any,
    options: StageOneOptions,
    state: TrainState,
    inputs: tuple,
    states: bool,
    through: bool,
    key: Array,
) -> TrainState:
    """One SGD step on the separation losses of all layers [algo:bi-level].

    The state is of one seed. With `through`, all parameters move, not only kernels. By
    the key a contrastive loss draws its views. `states` is as in `separation_losses`.
    """
    contrastive = isinstance(options.loss, ContrastiveLoss)
    drawn: dict[str, Any] = {"key": key} if contrastive else {}

    def loss(learned: Any) -> tuple[Array, Array]:
        kernels, rest = learned if through else (learned, state.rest)
        model = nnx.merge(graphdef, kernels, rest)
        losses = separation_losses(
            model, *inputs, loss=options.loss, states=states, through=through, **drawn
        )
        return losses.loss.mean(), losses.gap.mean()

    learned = (state.kernels, state.rest) if through else state.kernels
    (value, gap), gradients = jax.value_and_grad(loss, has_aux=True)(learned)
    learned = jax.tree.map(
        lambda w, g: w - jnp.asarray(options.learning_rate, w.dtype) * g,
        learned,
        gradients,
    )
    kernels, rest = learned if through else (learned, state.rest)
    sums = dict(state.sums)
    for name, mean in zip(SEPARATIONS, (value, gap), strict=True):
        sums[name] = sums[name] + mean
    return state._replace(kernels=kernels, rest=rest, sums=sums)
