"""Weights of PyTorch's layers in ours: the outputs that PyTorch itself computed."""

import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx

from uhop_jax.layers import (
    Association,
    BiasPattern,
    Hopfield,
    HopfieldLayer,
    HopfieldPooling,
    StaticHopfield,
    from_torch,
)

NUMBERS = json.loads((ROOT / "tests/torch_numbers.json").read_text())
NORMS = ("state", "memory", "value")
PYTORCH = ("attention", "attention of other sizes")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def rngs():
    return nnx.Rngs(0)


def hopfield(association=None, *, normalize=NORMS, value_size=8, **options):
    options |= {"normalize": normalize, "value_size": value_size, "rngs": rngs()}
    return Hopfield(8, association, **options)


def attention(association=None, **options):
    options |= {"decode": False, "rngs": rngs()}
    if association is not None:
        options["attention_fn"] = association
    return nnx.MultiHeadAttention(2, 8, **options)


def extended():
    """The association of an attention with `add_bias_kv` and `add_zero_attn`."""
    return Association(zero_memory=True, bias=BiasPattern(2, 4, rngs=rngs()))


UPDATES = {"steps": 3, "beta": 0.7}
HEADS = {"num_heads": 2, "head_size": 4}
ENDLESS = {"steps": 500, "until_converged": True}
OTHERS = {"memory_size": 6, "value_size": 7, "value_head_size": 3, "out_size": 5}
# Each case of benchmarks/torch_numbers.py, with the options of its module.
MODULES = {
    "self": lambda: [hopfield()],
    "sizes": lambda: [hopfield(**HEADS, **OTHERS)],
    "updates": lambda: [
        hopfield(
            Association(**UPDATES, zero_memory=True),
            normalize=(*NORMS, "pattern"),
            **HEADS,
        )
    ],
    "converged": lambda: [hopfield(Association(**ENDLESS))],
    "connected": lambda: [hopfield(normalize=("state",), value_size=None)],
    "connected, with norms": lambda: [hopfield()],
    "bare": lambda: [hopfield(normalize=(), bias_init=None, out_size=0, num_heads=2)],
    "pooling": lambda: [HopfieldPooling(hopfield(**HEADS), 2, rngs=rngs())],
    "lookup": lambda: [HopfieldLayer(hopfield(), 4, rngs=rngs())],
    "lookup of values": lambda: [
        HopfieldLayer(hopfield(value_size=6), 4, learn_values=True, rngs=rngs())
    ],
    "attention": lambda: [
        hopfield(normalize=(), **HEADS),
        attention(),
        attention(Association()),
    ],
    "attention of other sizes": lambda: [
        hopfield(extended(), normalize=(), memory_size=6, value_size=6, **HEADS),
        attention(extended(), in_kv_features=6),
    ],
}


def case(name):
    """State dict, inputs, mask and output of a case."""
    numbers = NUMBERS[name]
    drawn = importlib.import_module("torch_numbers").drawn
    state, inputs = drawn(numbers["shapes"], numbers["sizes"])
    if name == "connected, with norms":
        state = with_direct_values(state)
    mask = inputs.pop("mask", None)
    expected = np.reshape(numbers["output"], numbers["shape"])
    return state, [jnp.asarray(x) for x in inputs.values()], mask, expected


def with_direct_values(state):
    """The entries with `W_V W_K` in place of `W_V`, which acts on memories directly."""
    core = "association_core."
    value, keys = (state[f"{core}{name}_proj_weight"] for name in "vk")
    biases = np.split(state[f"{core}in_proj_bias"], 3)
    biases[2] = biases[2] + value @ biases[1]
    return state | {
        f"{core}v_proj_weight": value @ keys,
        f"{core}in_proj_bias": np.concatenate(biases),
    }


def test_every_case_is_tested():
    assert list(MODULES) == list(NUMBERS) == list(case_names())


def case_names():
    return importlib.import_module("torch_numbers").CASES


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MODULES)
def test_outputs_are_the_outputs_of_pytorch(name):
    state, inputs, mask, expected = case(name)
    for module in MODULES[name]():
        copy = from_torch(module, state)
        options = {}
        if mask is not None:
            options = {"mask": jnp.asarray(mask)}
            if isinstance(module, nnx.MultiHeadAttention):
                options["mask"] = options["mask"][:, None, None]
        run = nnx.jit(lambda module: module(*inputs, **options))  # noqa: B023
        np.testing.assert_allclose(
            np.asarray(run(copy)).reshape(expected.shape),
            expected,
            rtol=1e-5,
            atol=1e-5,
        )
        other = run(module)  # the module itself keeps its weights
        assert abs(np.asarray(other).reshape(expected.shape) - expected).max() > 0.1


def test_weights_in_bfloat16():
    state = {name: jnp.asarray(x) for name, x in case("pooling")[0].items()}
    half = {name: x.astype(jnp.bfloat16) for name, x in state.items()}
    rounded = {name: x.astype(jnp.float32) for name, x in half.items()}
    one, other = (from_torch(MODULES["pooling"]()[0], x) for x in (half, rounded))
    np.testing.assert_array_equal(one.state[...], other.state[...])


def test_weights_without_batch_first():
    state, inputs, mask, expected = case("pooling")
    weights = state["pooling_weights"]
    state["pooling_weights"] = weights.swapaxes(0, 1)
    copy = from_torch(MODULES["pooling"]()[0], state)
    np.testing.assert_array_equal(copy.state[...], weights[0])
    state = case("lookup")[0]
    weights = state["lookup_weights"]
    state["lookup_weights"] = weights.reshape(2, 2, -1)
    with pytest.raises(ValueError, match="lookup_weights must have shape"):
        from_torch(MODULES["lookup"]()[0], state)


def test_a_state_dict_is_a_dictionary(untyped):
    with pytest.raises(ValueError, match="state_dict must be a dictionary .* got list"):
        from_torch(MODULES["pooling"]()[0], [1.0])


def test_weights_are_copied():
    """PyTorch trains parameters in place, and their arrays share its memory."""
    state, inputs, mask, expected = case("pooling")
    copy = from_torch(MODULES["pooling"]()[0], state)
    for array in state.values():
        array += 1
    result = np.asarray(copy(*inputs, mask=jnp.asarray(mask))).reshape(expected.shape)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_three_matrices_may_be_separate():
    state, inputs, mask, expected = case("attention")
    whole = state.pop("in_proj_weight")
    for name, part in zip("qkv", np.split(whole, 3), strict=True):
        state[f"{name}_proj_weight"] = part
    copy = from_torch(MODULES["attention"]()[0], state)
    result = copy(*inputs, mask=jnp.asarray(mask))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_keeps_its_weights():
    state, inputs, mask, expected = case("self")
    copy = from_torch(hopfield(kernel=True), state)
    np.testing.assert_array_equal(copy.kernel.weights[...], np.eye(8))
    np.testing.assert_allclose(copy(*inputs), expected, rtol=1e-5, atol=1e-5)
    copy = from_torch(hopfield(kernel=True, param_dtype=jnp.bfloat16), state)
    assert copy.projections.query.kernel.dtype == jnp.bfloat16


def without(name):
    return lambda state: state.pop(name)


def with_entry(name, value):
    return lambda state: state.update({name: value})


NORM = "norm_state_pattern.weight"
CORE = "association_core."


@pytest.mark.parametrize(
    "name, change, make, message",
    [
        (
            "self",
            without(NORM),
            hopfield,
            f"lacks {NORM} .shape none.*gives shape .8,.; 'state' in normalize decides",
        ),
        (
            "self",
            with_entry("head.weight", np.zeros((2, 8))),
            hopfield,
            r"has head.weight of shape \(2, 8\), for which the module has no place",
        ),
        (
            "self",
            lambda state: None,
            lambda: hopfield(head_size=3),
            r"in_proj_bias must have shape \(9,\) for this module, got \(24,\)",
        ),
        (
            "self",
            lambda state: None,
            lambda: hopfield(normalize=("state", "memory")),
            "has norm_pattern_projection.* of shape .8,., .*'value' in normalize",
        ),
        (
            "self",
            lambda state: None,
            lambda: hopfield(out_size=0),
            "has association_core.out_proj.* of shape .*; .* decides",
        ),
        (
            "connected",
            lambda state: None,
            lambda: hopfield(normalize=("state",), value_size=6),
            r"v_proj_weight must have shape \(8, 6\) for this module, got \(8, 8\)",
        ),
        (
            "lookup of values",
            lambda state: None,
            lambda: HopfieldLayer(hopfield(value_size=6), 4, rngs=rngs()),
            r"has target_weights of shape \(1, 4, 6\), .*; learn_values decides",
        ),
        (
            "attention of other sizes",
            lambda state: None,
            lambda: attention(Association(), in_kv_features=6),
            r"has bias_k of shape \(1, 1, 8\), .*; bias=BiasPattern",
        ),
        (
            "attention",
            lambda state: None,
            lambda: attention(normalize_qk=True),
            "normalize_qk of nnx.MultiHeadAttention must be False",
        ),
        (
            "updates",
            lambda state: None,
            lambda: hopfield(extended(), **HEADS),
            "bias of the association must be None: hopfield-layers has bias_k",
        ),
        (
            "self",
            with_entry(NORM, ["a"]),
            hopfield,
            f"{NORM} must be an array of numbers, got list",
        ),
        (
            "self",
            lambda state: None,
            lambda: StaticHopfield(8, rngs=rngs()),
            "module must be a Hopfield, HopfieldPooling, HopfieldLayer or nnx.Multi",
        ),
        (
            "pooling",
            lambda state: None,
            lambda: HopfieldPooling(StaticHopfield(8, rngs=rngs()), 2, rngs=rngs()),
            "layer must be a Hopfield, whose projections have weights, got Static",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit(name, change, make, message, untyped):
    state, *_ = case(name)
    change(state)
    with pytest.raises(ValueError, match=message) as caught:
        from_torch(make(), state)
    assert len(str(caught.value).splitlines()) == 1
