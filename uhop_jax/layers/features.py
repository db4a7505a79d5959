"""Kernels in models: feature maps that Stage I learns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from uhop_jax._checks import (
    check_choice,
    check_count,
    check_floating,
    check_rngs,
    check_sizes,
)

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


class SeparationFeatures(NamedTuple):
    """The features that a kernel must separate, of each memory set.

    Attributes:
      features: `(*sets, S, D)`, one row for each pattern.
      where: `(*sets, S)`, true for valid patterns; None if all are.
    """

    features: Float[Array, "*sets S D"]
    where: Bool[Array, "*sets S"] | None


class SeparationRecord(nnx.Variable):
    """Losses of the calls of one layer: a tuple `(loss, gap, loss, gap, ...)`.

    The metadata are the options of `separation_losses`. A layer with a record extends
    it at each call. `nnx.scan` and `nnx.vmap` stack the numbers of stacked layers.
    """

    def extended(
        self, separated: SeparationFeatures, views: Array | None = None
    ) -> Any:
        """The record after one more call; a contrastive loss has views of patterns."""
        options = self.get_metadata()
        loss = options["loss"]
        features, where = separated
        if views is not None:  # of a contrastive loss, whose least value is zero
            value = gap = loss(features, views, where=where)
        else:
            number = features.shape[-2] if where is None else where.sum(-1)
            value = loss(features, where=where)
            gap = value - loss.least(number, features.shape[-1]).astype(value.dtype)
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
        bias = self.bias[...].astype(features.dtype)
        return features + jnp.broadcast_to(bias, features.shape)


class ResidualFeatures(nnx.Module):
    r"""The kernel :math:`\Phi(u) = u + W_2\,\mathrm{gelu}(W_1 u + b)`.

    A linear kernel before :math:`W_Q` and :math:`W_K` is absorbed by them, so that a
    layer with one has no function that a layer without one lacks. This kernel is not
    linear. At the start `W_2` is zero, and the layer equals one without a kernel.

    All other arguments are those of `LinearFeatures`.

    Args:
      size: dimension of patterns and features.
      hidden_size: of the hidden layer; `2 * size` by default.

    Raises:
      ValueError: if an argument has the wrong type.
    """

    def __init__(
        self,
        size: int,
        hidden_size: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_count("size", size, 1)
        check_sizes(hidden_size=hidden_size)
        options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        hidden_size = hidden_size or 2 * size
        self.hidden = LinearFeatures(
            size, hidden_size, start="random", use_bias=True, **options
        )
        self.change = LinearFeatures(hidden_size, size, **options)
        self.change.weights[...] = jnp.zeros_like(self.change.weights[...])

    def __call__(self, patterns: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """Features, one vector for each pattern."""
        return patterns + self.change(jax.nn.gelu(self.hidden(patterns)))


def applied(module: Any, x: Array) -> Array:
    """`module(x)`; `x` itself without a module."""
    return x if module is None else module(x)


def modules_of(module: nnx.Module) -> list[Any]:
    """The module and all modules within it."""
    return [x for _, x in nnx.iter_graph(module) if isinstance(x, nnx.Module)]


def as_kernel(module: Any) -> Any:
    """The module, or the one that a function makes, as a kernel of a layer.

    A module that has other parameters than `KernelParam`s is left as it is, and a copy
    with `KernelParam`s in their place returned.

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
    if not jax.tree.leaves(nnx.state(module, other)):
        return module
    module = nnx.clone(module)
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


def feature_size(kernel: nnx.Module, size: int, dtype: Any) -> int:
    """Dimension of the features of a kernel of patterns of dimension `size`."""
    function: Any = kernel
    shape = jax.eval_shape(function, jax.ShapeDtypeStruct((2, size), dtype)).shape
    if len(shape) != 2:
        raise ValueError(f"kernel must map (n, {size}) to (n, D), got {shape}")
    return shape[1]
