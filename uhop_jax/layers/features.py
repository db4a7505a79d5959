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
from uhop_jax.losses import least_separation_loss, separation_loss

STARTS = ("identity", "random", "uniform")


def fan_in_uniform() -> Callable[..., Array]:
    """Start values uniform within `1 / sqrt(fan in)` of zero, PyTorch's for weights."""
    return nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def fan_in_bound(size: int) -> Callable[..., Array]:
    """Start values uniform within `1 / sqrt(size)` of zero, PyTorch's for biases."""
    bound = size**-0.5

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class KernelParam(nnx.Param):
    """A parameter of a kernel: what Stage I learns."""


class SeparationRecord(nnx.Intermediate):
    """What `separation_losses` gathers in a layer: loss and gap of each of its calls.

    The numbers are a flat tuple; the metadata are the options of `separation_losses`.
    """

    def extended(self, kernel: Any, patterns: Array, where: Array | None) -> Any:
        """The record of one call more, which separates the features of the patterns."""
        options = self.get_metadata()
        kind, t, through = (options[name] for name in ("kind", "t", "through"))
        features = kernel(patterns if through else lax.stop_gradient(patterns))
        *_, number, dimension = features.shape
        if where is not None:
            where = jnp.broadcast_to(where, features.shape[:-1])
            number = where.sum(-1)
        loss = separation_loss(features, kind=kind, t=t, where=where)
        least = least_separation_loss(number, dimension, kind=kind, t=t)
        gap = loss - least.astype(loss.dtype)
        return self.replace((*jax.tree.leaves(self), loss.mean(), gap.mean()))


class LinearFeatures(nnx.Module):
    r"""The linear kernel :math:`\Phi(u) = W u` [eqn:linear_kernel].

    Args:
      size: dimension `d` of patterns.
      feature_size: `D`; `d` by default.
      start: `identity` (so that a new layer equals one without a kernel), `random`
        (`N(0, 1 / d)`), or `uniform` (within `1 / sqrt(d)` of zero, the bias too, as in
        the authors' code).
      use_bias: add a bias, as the authors' code does; it begins at zero, unless the
        start is `uniform`.
      dtype: of the computation; None follows inputs and parameters.
      param_dtype: of the parameters.
      rngs: for the random start.

    Raises:
      ValueError: if the start is unknown, or an argument is of another type.
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
    """Of the kernel of each layer, the mean over the memory sets that it sees.

    Attributes:
      loss: `(layers,)`, the separation loss.
      gap: `(layers,)`, how far it is above `least_separation_loss`. Where it is closed,
        Stage I has nothing left to do.
    """

    loss: Float[Array, " layers"]
    gap: Float[Array, " layers"]


def separation_losses(
    model: nnx.Module,
    *inputs: Any,
    kind: str = "average",
    t: float = 2.0,
    through: bool = False,
    **options: Any,
) -> SeparationLosses:
    """Separation loss of the kernel of each layer, in one forward pass.

    The memories that a layer sees are taken as they are: a loss moves the kernel of its
    own layer, and nothing else; but with `through`, all that comes before it. The model
    stays as it is, its random streams and statistics too.

    Args:
      model: a module with `Hopfield` layers that have a kernel.
      *inputs: of the model.
      kind: of the loss, see `separation_loss`.
      t: its scale.
      through: let gradients pass into what memories are computed by, as the authors'
        code does.
      **options: keyword arguments of the model.

    Returns:
      `SeparationLosses`, layers in the order of their paths; a layer that is called
      twice counts twice, and layers that are stacked (`nnx.vmap`, `nnx.scan`) each.

    Raises:
      ValueError: if no layer has a kernel.
    """
    model = nnx.clone(model)  # which may be a constant of a trace
    for node in modules_of(model):
        node.separation_record = SeparationRecord((), kind=kind, t=t, through=through)
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
    """The module, or what a function makes, its parameters turned `KernelParam`s."""
    if callable(module) and not isinstance(module, (nnx.Module, type)):
        module = module()
    if not isinstance(module, nnx.Module):
        raise ValueError(
            f"kernel must be True, an nnx.Module or make one, got {module!r}"
        )
    other = nnx.All(nnx.Param, nnx.Not(KernelParam))
    made: dict[int, nnx.Variable] = {}  # a parameter in two places stays one
    for node in modules_of(module):
        for name, x in list(vars(node).items()):
            if isinstance(x, nnx.Param) and not isinstance(x, KernelParam):
                if id(x) not in made:
                    (value,) = jax.tree.leaves(x)
                    made[id(x)] = KernelParam.from_metadata(value, x.get_metadata())
                setattr(node, name, made[id(x)])
    if jax.tree.leaves(nnx.state(module, other)):
        raise ValueError(
            "kernel must hold its parameters as attributes of modules (lists may hold "
            "modules), where Stage I finds them"
        )
    return module
