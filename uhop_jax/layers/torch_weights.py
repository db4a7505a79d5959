"""Weights of PyTorch's layers, read into the layers of this library and of Flax."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from uhop_jax._checks import check_positive
from uhop_jax.layers.association import Association
from uhop_jax.layers.derived import HopfieldLayer, HopfieldPooling
from uhop_jax.layers.hopfield import Hopfield

T = TypeVar("T", bound=nnx.Module)

CORE = "association_core."  # before the names of the projections in hopfield-layers
# Which option of a layer gives it the parameters of an entry.
OPTIONS = {
    "norm_stored_pattern": "'memory' in normalize",
    "norm_state_pattern": "'state' in normalize",
    "norm_pattern_projection": "'value' in normalize, with a value_size",
    "p_norm": "'pattern' in normalize",
    "bias_k": "bias=BiasPattern(...) of the association",
    "bias_v": "bias=BiasPattern(...) of the association",
    "in_proj_bias": "bias_init (use_bias in Flax)",
    "out_proj.bias": "bias_init (use_bias in Flax)",
    "out_proj.weight": "out_size",
    "target_weights": "learn_values",
}


class _Entry(NamedTuple):
    """Place of an entry of a state dict in a module."""

    shape: tuple[int, ...]
    write: Callable[[np.ndarray], None]  # sets the parameters from the entry


def from_torch(module: T, state_dict: Mapping[str, Any], *, epsilon: float = 1e-5) -> T:
    """A copy of a module that computes what its PyTorch counterpart computes.

    Counterparts of `Hopfield`, `HopfieldPooling` and `HopfieldLayer` are the modules of
    these names in `hopfield-layers` (github.com/ml-jku/hopfield-layers). The
    counterpart of `Hopfield` with a `value_size`, and of `nnx.MultiHeadAttention`, is
    `torch.nn.MultiheadAttention`. Parameters that PyTorch's modules lack (of a kernel,
    of `beta`, of `alpha`) keep their values.

    Options are no part of a state dict: the module must have the options of its
    counterpart, see the page "Coming from hopfield-layers".

    `bias_k` and `bias_v` of hopfield-layers are not read: its code never adds them to
    the memories.

    Args:
      module: module of the sizes and options of the counterpart.
      state_dict: arrays by name, such as
        `{name: x.numpy() for name, x in module.state_dict().items()}`.
      epsilon: of all LayerNorms of the copy; PyTorch's default.

    Returns:
      The copy, whose parameters keep their dtypes.

    Raises:
      ValueError: if the module is of another type, or an entry is missing, has no
        place in the module, or has the wrong shape.
    """
    check_positive("epsilon", epsilon)
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            "state_dict must be a dictionary of arrays by name, got "
            f"{type(state_dict).__name__}"
        )
    module = nnx.clone(module)
    given = {name: _array(name, x) for name, x in state_dict.items()}
    entries: dict[str, _Entry] = {}
    if isinstance(module, nnx.MultiHeadAttention):
        if module.normalize_qk:
            raise ValueError(
                "normalize_qk of nnx.MultiHeadAttention must be False: PyTorch's "
                "attention has no such norms"
            )
        _add_projections(entries, module, module.attention_fn, given)
    elif isinstance(module, Hopfield):
        _add_hopfield(entries, "", module, given, epsilon)
    elif isinstance(module, (HopfieldPooling, HopfieldLayer)):
        learned = {"pooling_weights": getattr(module, "state", None)}
        learned["lookup_weights"] = getattr(module, "memories", None)
        learned["target_weights"] = getattr(module, "targets", None)
        for name, parameter in learned.items():
            if parameter is not None:
                entries[name] = _Entry((1, *parameter.shape), _rows((parameter, None)))
            if name in given and given[name].shape[1:-1] == (1,):  # not batch_first
                given[name] = given[name].swapaxes(0, 1)
        _add_hopfield(entries, "hopfield.", module.layer, given, epsilon)
    else:
        raise ValueError(
            "module must be a Hopfield, HopfieldPooling, HopfieldLayer or "
            f"nnx.MultiHeadAttention, got {type(module).__name__}"
        )
    _check(entries, given)
    for name, entry in entries.items():
        entry.write(given[name])
    return module


def _array(name: str, x: Any) -> np.ndarray:
    """An entry as an array of numbers."""
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if array.dtype == jnp.bfloat16:  # a dtype of JAX, of no kind that NumPy knows
        array = array.astype(np.float32)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be an array of numbers, got {type(x).__name__}")
    return array


def _check(entries: Mapping[str, _Entry], given: Mapping[str, np.ndarray]) -> None:
    """Refuses a state dict that does not fit."""
    for name, array in given.items():
        if name not in entries:
            raise ValueError(
                f"the state dict has {name} of shape {array.shape}, for which the "
                f"module has no place (shape none){_hint(name)}"
            )
        if array.shape != entries[name].shape:
            raise ValueError(
                f"{name} must have shape {entries[name].shape} for this module, got "
                f"{array.shape}"
            )
    for name, entry in entries.items():
        if name not in given:
            raise ValueError(
                f"the state dict lacks {name} (shape none), to which the module gives "
                f"shape {entry.shape}{_hint(name)}"
            )


def _hint(name: str) -> str:
    """The option that decides on an entry, for a message."""
    for part, option in OPTIONS.items():
        if part in name:
            return f"; {option} decides"
    return ""


def _rows(*parts: tuple[Any, int | None]) -> Callable[[np.ndarray], None]:
    """Writes the rows of an entry to parameters, one after another.

    Each parameter comes with the number of inputs of its linear map, whose matrix
    PyTorch stores as `(outputs, inputs)`; None is a vector, or an array as it is.
    """

    def write(array: np.ndarray) -> None:
        first = 0
        for parameter, inputs in parts:
            shape = parameter.shape
            if inputs is None:
                part = array.reshape(-1)[first : first + math.prod(shape)]
                first += part.size
            else:
                part = array[first : first + math.prod(shape) // inputs].T
                first += part.shape[1]
            # A copy: PyTorch trains its parameters, which the entries may be, in place.
            parameter[...] = jnp.array(part.reshape(shape), parameter[...].dtype)

    return write


def _linear(*maps: tuple[Any, int]) -> _Entry:
    """The matrices of linear maps, stacked by rows; each with its number of inputs."""
    inputs = maps[0][1]
    rows = sum(math.prod(parameter.shape) // inputs for parameter, _ in maps)
    return _Entry((rows, inputs), _rows(*maps))


def _vector(*parameters: Any) -> _Entry:
    """Vectors, one after another."""
    size = sum(math.prod(parameter.shape) for parameter in parameters)
    return _Entry((size,), _rows(*((parameter, None) for parameter in parameters)))


def _add_projections(
    entries: dict[str, _Entry],
    maps: Any,
    association: Any,
    given: Mapping[str, np.ndarray],
    prefix: str = "",
) -> None:
    """Adds the entries of the linear maps, and of a bias pattern, to `entries`.

    The state dict that is given decides whether three matrices are one entry.
    """
    value_size = math.prod(maps.value.kernel.shape[:-2])
    three = [
        (maps.query.kernel, maps.query.kernel.shape[0]),
        (maps.key.kernel, maps.key.kernel.shape[0]),
        (maps.value.kernel, value_size),
    ]
    together = len({inputs for _, inputs in three}) == 1
    if together and f"{prefix}q_proj_weight" not in given:
        entries[f"{prefix}in_proj_weight"] = _linear(*three)
    else:
        for name, one in zip("qkv", three, strict=True):
            entries[f"{prefix}{name}_proj_weight"] = _linear(one)
    if maps.query.bias is not None:
        biases = (maps.query.bias, maps.key.bias, maps.value.bias)
        entries[f"{prefix}in_proj_bias"] = _vector(*biases)
    if maps.out is not None:
        width = math.prod(maps.out.kernel.shape[:-1])
        entries[f"{prefix}out_proj.weight"] = _linear((maps.out.kernel, width))
        if maps.out.bias is not None:
            entries[f"{prefix}out_proj.bias"] = _vector(maps.out.bias)
    if isinstance(association, Association) and association.bias is not None:
        pattern = association.bias
        for name, part in (("bias_k", pattern.key), ("bias_v", pattern.value)):
            shape = (1, 1, math.prod(part.shape))
            entries[f"{prefix}{name}"] = _Entry(shape, _rows((part, None)))


def _add_hopfield(
    entries: dict[str, _Entry],
    prefix: str,
    layer: Any,
    given: dict[str, np.ndarray],
    epsilon: float,
) -> None:
    """Adds the entries of a layer, and sets the epsilon of its norms."""
    if not isinstance(layer, Hopfield):
        raise ValueError(
            "layer must be a Hopfield, whose projections have weights, got "
            f"{type(layer).__name__}"
        )
    core = prefix
    if prefix or any(name.startswith(CORE) for name in given):
        core += CORE
        if layer.association.bias is not None:
            raise ValueError(
                "bias of the association must be None: hopfield-layers has bias_k and "
                "bias_v in its state dict and never adds them to the memories"
            )
        for name in (f"{core}bias_k", f"{core}bias_v"):
            given.pop(name, None)
    maps = layer.projections
    _add_projections(entries, maps, layer.association, given, core)
    for name, norm in (
        ("norm_stored_pattern", layer.norm_memory),
        ("norm_state_pattern", layer.norm_state),
        ("norm_pattern_projection", layer.norm_value),
    ):
        if norm is not None:
            norm.epsilon = epsilon
            entries[f"{prefix}{name}.weight"] = _vector(norm.scale)
            entries[f"{prefix}{name}.bias"] = _vector(norm.bias)
    if maps.norm_query is not None:  # queries and keys share a norm in PyTorch
        both = (maps.norm_query, maps.norm_key)
        for norm in both:
            norm.epsilon = epsilon
        for name, part in (("weight", "scale"), ("bias", "bias")):
            parameters = [getattr(norm, part) for norm in both]
            entries[f"{core}p_norm_{name}"] = _shared(parameters)


def _shared(parameters: list[Any]) -> _Entry:
    """One vector that several parameters take."""

    def write(array: np.ndarray) -> None:
        for parameter in parameters:
            _rows((parameter, None))(array)

    return _Entry(tuple(parameters[0].shape), write)
