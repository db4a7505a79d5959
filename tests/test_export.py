"""Layers as files of `jax.export`, run by a program that has JAX alone."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from conftest import assert_close, slow_where
from flax import nnx
from jax import export

import uhop_jax as uhop
from uhop_jax.layers import (
    Association,
    BiasPattern,
    Hopfield,
    HopfieldLayer,
    HopfieldPooling,
    LearnedAlpha,
    StaticHopfield,
)

pytestmark = pytest.mark.usefixtures("untyped")  # jaxtyping knows no symbolic sizes

D, H = 8, 2
SIZES = {"b": 3, "L": 4, "S": 6}
SEPARATIONS = [
    *("softmax", "softmax1", "sparsemax", "entmax", "polynomial"),
    *(uhop.Entmax(1.3), uhop.Entmax(2.5), uhop.TopK(3)),
]


def rngs():
    return nnx.Rngs(0)


def layer(separation="softmax", size=D, **options):
    association = Association(separation, **options)
    return Hopfield(size, association, num_heads=H, rngs=rngs())


def learned():
    """Every parameter that an association may have, heads apart."""
    alpha = LearnedAlpha(uhop.Entmax((1.3, 1.7)))
    options = {"beta": (0.5, 2.0), "learn_beta": True, "zero_memory": True}
    bias = BiasPattern(H, D // H, rngs=rngs())
    return layer(alpha, bias=bias, steps=2, **options)


def attention():
    options = {"decode": False, "rngs": rngs()}
    return nnx.MultiHeadAttention(
        H, D, attention_fn=Association("sparsemax"), **options
    )


def mlp():
    return nnx.Sequential(nnx.Linear(D, D, rngs=rngs()), jax.nn.tanh)


def kernel_layer(kernel):
    return Hopfield(D, Association(), kernel=kernel, rngs=rngs())


PAIR, BAG = ("b,L,8", "b,S,8"), ("b,S,8",)
MASK = {"mask": "b,S"}
# Module, shapes of arrays, shapes of masks.
CASES = {
    **{str(s): (lambda s=s: layer(s), PAIR, MASK) for s in SEPARATIONS},
    "mask of each head": (layer, PAIR, {"association_mask": "b,2,L,S"}),
    "shared memories": (layer, ("b,L,8", "S,8"), {"mask": "S"}),
    "learned": (learned, PAIR, MASK),
    "converged": (lambda: layer(steps=9, until_converged=True), PAIR, MASK),
    "kernel": (lambda: kernel_layer(True), PAIR, MASK),
    "static": (lambda: StaticHopfield(D, rngs=rngs()), PAIR, MASK),
    "pooling": (lambda: HopfieldPooling(kernel_layer(mlp), 2, rngs=rngs()), BAG, MASK),
    "lookup": (lambda: HopfieldLayer(layer(), 5, rngs=rngs()), ("b,L,8",), {}),
    "attention": (attention, PAIR, {"mask": "b,1,L,S"}),
}

LOAD = """
import json, pathlib, sys
import jax, numpy as np

outputs = {}
for name in json.loads(sys.argv[1]):
    data = bytearray(pathlib.Path(f"{name}.jax_export").read_bytes())
    arrays = dict(np.load(f"{name}.npz"))
    masks = {k: arrays.pop(k) for k in ("mask", "association_mask") if k in arrays}
    outputs[name] = jax.export.deserialize(data).call(*arrays.values(), **masks)
assert not {"uhop_jax", "flax"} & set(sys.modules)
np.savez("outputs.npz", **outputs)
"""


def exported(module, shapes, masks, *, least=3):
    """The bytes of a layer, for any numbers of sets, states and memories."""
    symbols = "".join((*shapes, *masks.values()))
    scope = export.SymbolicScope([f"S >= {least}"] if "S" in symbols else [])

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)

    arrays = [struct(shape, jnp.float32) for shape in shapes]
    flags = {name: struct(shape, bool) for name, shape in masks.items()}
    return export.export(jax.jit(module.__call__))(*arrays, **flags).serialize()


def drawn(shapes, masks):
    """Arrays and masks in which every state sees a memory."""
    numbers = lambda shape: tuple(SIZES.get(x) or int(x) for x in shape.split(","))  # noqa: E731
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=numbers(s)).astype(np.float32) for s in shapes]
    flags = {name: generator.random(numbers(s)) < 0.6 for name, s in masks.items()}
    for flag in flags.values():
        flag[..., 0] = True
    return arrays, flags


@pytest.fixture(scope="module")
def loaded(request, tmp_path_factory):
    """Outputs of chosen cases in another process, and of the layers themselves."""
    jaxtyping.config.update("jaxtyping_disable", True)
    folder = tmp_path_factory.mktemp("exported")
    expected = {}
    tests = [x for x in request.session.items if "loaded" in x.fixturenames]
    for name in (test.callspec.params["name"] for test in tests):
        make, shapes, masks = CASES[name]
        module = make()
        data = exported(module, shapes, masks)
        (folder / f"{name}.jax_export").write_bytes(data)
        arrays, flags = drawn(shapes, masks)
        named = {f"array{i}": x for i, x in enumerate(arrays)}
        np.savez(folder / f"{name}.npz", **named, **flags)
        expected[name] = jax.jit(module.__call__)(*arrays, **flags)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(list(expected))],
        cwd=folder,
        env=os.environ | {"JAX_ENABLE_X64": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return expected, dict(np.load(folder / "outputs.npz"))


@slow_where(lambda name: name in map(str, SEPARATIONS[2:]))
@pytest.mark.parametrize("name", CASES)
def test_another_process_runs_an_exported_layer(loaded, name):
    expected, outputs = loaded
    assert np.abs(outputs[name]).max() > 0
    assert_close(outputs[name], expected[name])


def test_an_association_is_a_dictionary_to_other_programs():
    module = layer()

    def associate(state, memories):
        return module.associate(state, memories)._asdict()

    patterns = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4, 8"), jnp.float32)
    data = export.export(jax.jit(associate))(patterns, patterns).serialize()
    state = np.ones((2, 4, 8), np.float32)
    recall = export.deserialize(data).call(state, state)
    assert_close(recall["weights"], np.full((2, H, 4, 4), 0.25))
    assert recall["converged"] is None


def test_top_k_needs_as_many_memories():
    make, shapes, masks = CASES["TopK(k=3)"]
    with pytest.raises(ValueError, match="may be less: give .* constraint 'S >= 3'"):
        exported(make(), shapes, masks, least=2)


def test_gradients_of_an_exported_layer():
    module = layer("sparsemax")
    shape = export.symbolic_shape("b, 4, 8")
    whole = export.export(jax.jit(module.__call__))(
        jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    called = export.deserialize(whole.serialize(vjp_order=1)).call
    state = np.random.default_rng(1).normal(size=(2, 4, 8)).astype(np.float32)
    slopes = [
        jax.grad(lambda x, f=f: jnp.sin(f(x)).sum())(state) for f in (module, called)
    ]
    assert_close(slopes[1], slopes[0])
