"""Kernels in models: feature maps that Stage I learns, and their separation loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from uhop_jax._checks import (
    check_choice,
    check_count,
    check_floating,
    check_rngs,
    check_sizes,
)
from uhop_jax.losses import AverageLoss, SeparationLoss, check_loss

STARTS = ("identity", "random", "uniform")


def fan_in_uniform() -> Callable[..., Array]:
    """Initializer: uniform within `1 / sqrt(fan in)` of zero, as PyTorch's weights."""
    return nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def fan_in_bound(size: int) -> Callable[..., Array]:
    """Initializer: uniform within `1 / sqrt(size)` of zero, as PyTorch's biases."""
    bound = size**-0.5

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class KernelParam(nnx.Param):
    """A parameter of a kernel, which Stage I trains."""


class SeparationRecord(nnx.Intermediate):
    """Loss and gap of each call of a layer, gathered for `separation_losses`.

    The numbers are a flat tuple `(loss, gap, loss, gap, ...)`; the metadata are the
    options of `separation_losses`.
    """

    def extended(self, kernel: Any, patterns: Array, where: Array | None) -> Any:
        """The record with one more call, whose loss is on the features of `patterns`.

        Patterns are `(*sets, S, d)`; `where (*sets, S)` is true for valid patterns.
        """
        options = self.get_metadata()
        loss, through = options["loss"], options["through"]
        features = kernel(patterns if through else lax.stop_gradient(patterns))
        *_, number, dimension = features.shape
        if where is not None:
            where = jnp.broadcast_to(where, features.shape[:-1])
            number = where.sum(-1)
        value = loss(features, where=where)
        gap = value - loss.least(number, dimension).astype(value.dtype)
        return self.replace((*jax.tree.leaves(self), value.mean(), gap.mean()))


class LinearFeatures(nnx.Module):
    r"""The linear kernel :math:`\Phi(u) = W u` [eqn:linear_kernel].

    Args:
      size: dimension `d` of patterns.
      feature_size: dimension `D` of features; `d` by default.
      start: `identity` (so that a new layer equals one without a kernel), `random`
        (`N(0, 1 / d)`), or `uniform` (within `1 / sqrt(d)` of zero, the bias too, as in
        the authors' code).
      use_bias: add a bias, as the authors' code does; it begins at zero, unless the
        start is `uniform`.
      dtype: of the computation; None follows inputs and parameters.
      param_dtype: of the parameters.
      rngs: for the random start.

    Raises:
      ValueError: if the start is unknown, or an argument has the wrong type.
    """

    def __init__(
        self,
        size: int,
        feature_size: int | None = None,
        *,
        start: str = "identity",
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_count("size", size, 1)
        check_sizes(feature_size=feature_size)
        check_choice("start", start, STARTS)
        check_floating("param_dtype", param_dtype)
        check_rngs(rngs)
        shape = (size, feature_size or size)
        if start == "identity":
            weights = jnp.eye(*shape, dtype=param_dtype)
        else:
            uniform = start == "uniform"
            init = fan_in_uniform() if uniform else nnx.initializers.lecun_normal()
            weights = init(rngs.params(), shape, param_dtype)
        self.feature_size = shape[1]
        self.dtype = dtype
        self.weights = KernelParam(weights)
        self.bias = nnx.data(None)
        if use_bias:
            zeros = nnx.initializers.zeros
            init = fan_in_bound(size) if start == "uniform" else zeros
            self.bias = KernelParam(init(rngs.params(), shape[1:], param_dtype))

    def __call__(self, patterns: Float[Array, "*batch d"]) -> Float[Array, "*batch D"]:
        """Features, one vector for each pattern."""
        patterns, weights = nnx.nn.dtypes.promote_dtype(
            (patterns, self.weights[...]), dtype=self.dtype
        )
        features = patterns @ weights
        if self.bias is None:
            return features
        return features + self.bias[...].astype(features.dtype)


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
    loss: SeparationLoss = AverageLoss(),
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
      loss: the separation loss; its `t` is a number, not an array.
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
    check_loss(loss)
    model = nnx.clone(model)  # the model may be a constant of a trace
    for node in modules_of(model):
        node.separation_record = SeparationRecord((), loss=loss, through=through)
    model(*inputs, **options)
    records = [x for x in nnx.iter_graph(model) if isinstance(x[1], SeparationRecord)]
    records.sort(key=lambda x: [(isinstance(key, str), key) for key in x[0]])
    calls = [jax.tree.leaves(record) for _, record in records]
    losses = [x.reshape(-1) for numbers in calls for x in numbers[::2]]
    gaps = [x.reshape(-1) for numbers in calls for x in numbers[1::2]]
    if not losses:
        raise ValueError("the model has no Hopfield layer with a kernel")
    return SeparationLosses(jnp.concatenate(losses), jnp.concatenate(gaps))


def modules_of(module: nnx.Module) -> list[Any]:
    """The module and all modules within it."""
    return [x for _, x in nnx.iter_graph(module) if isinstance(x, nnx.Module)]


def as_kernel(module: Any) -> Any:
    """The module, or the one that a function makes, with `KernelParam`s for `Param`s.

    Raises:
      ValueError: if `module` is neither, or has parameters outside of attributes.
    """
    if callable(module) and not isinstance(module, (nnx.Module, type)):
        module = module()
    if not isinstance(module, nnx.Module):
        raise ValueError(
            "kernel must be True, an nnx.Module or a function that makes one, got "
            f"{module!r}"
        )
    other = nnx.All(nnx.Param, nnx.Not(KernelParam))
    converted: dict[int, nnx.Variable] = {}  # a parameter in two places stays one
    for node in modules_of(module):
        for name, x in list(vars(node).items()):
            if isinstance(x, nnx.Param) and not isinstance(x, KernelParam):
                if id(x) not in converted:
                    (value,) = jax.tree.leaves(x)
                    metadata = x.get_metadata()
                    converted[id(x)] = KernelParam.from_metadata(value, metadata)
                setattr(node, name, converted[id(x)])
    if jax.tree.leaves(nnx.state(module, other)):
        raise ValueError(
            "kernel must hold its parameters as attributes of modules (lists may hold "
            "modules), where Stage I finds them"
        )
    return module
