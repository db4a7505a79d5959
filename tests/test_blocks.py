"""Layers by blocks: equal to layers that hold all scores, in less memory."""

import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FAST, ROOT, assert_close
from flax import nnx

import uhop_jax as uhop
from uhop_jax.layers import (
    Association,
    BiasPattern,
    Hopfield,
    HopfieldPooling,
    IndexedMemories,
    LearnedAlpha,
    StaticHopfield,
    separation_losses,
)

B, L, S, D, H, BLOCK = 3, 2, 21, 8, 2, 8


class Doubled(uhop.Separation):
    """A separation of which no block knows anything: softmax at twice the beta."""

    def _weights(self, z):
        return uhop.Softmax()(2 * z)


def draw(*shape, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape)).astype(dtype)


def seen(*shape):
    return jnp.asarray(np.random.default_rng(5).random(shape) < 0.6)


def layer(separation, block, kind=Hopfield, own=False, layer_options=(), **options):
    if own:
        bias = BiasPattern(H, D // H, rngs=nnx.Rngs(7))
        options |= {"bias": bias, "zero_memory": True}
    if isinstance(separation, type):
        separation = separation()
    association = Association(separation, block=block, **options)
    heads = {"num_heads": H} if kind is Hopfield else {}
    return kind(D, association, rngs=nnx.Rngs(0), **heads, **dict(layer_options))


def value_and_gradients(module, *arrays, **options):
    """Output, and derivatives of a product in parameters and arrays."""
    graphdef, parameters = nnx.split(module)

    def call(parameters, *arrays):
        return nnx.merge(graphdef, parameters)(*arrays, **options)

    @jax.jit
    def run(parameters, *arrays):
        output, pull = jax.vjp(call, parameters, *arrays)
        slope = draw(*output.shape, seed=9, dtype=output.dtype)
        return output, pull(slope)

    return run(nnx.to_pure_dict(parameters), *arrays)


def assert_alike(one, other, scale=3.0):
    """All numbers equal, relative to the largest derivative of all."""
    one, other = jax.tree.leaves(one), jax.tree.leaves(other)
    assert len(one) == len(other)
    floor = 1e-5 * max(float(jnp.abs(x).max(initial=0)) for x in one)
    for x, y in zip(one, other, strict=True):
        assert_close(y, x, floor=scale * floor, scale=scale)


SHARED = draw(S, D, seed=1)
BATCH = draw(B, S, D, seed=1)
STATE = draw(B, L, D)
CASES = {
    "plain": ({}, (STATE, BATCH), {}),
    "itself": (
        {"layer_options": {"kernel": True, "normalize": ("memory", "pattern")}},
        (STATE,),
        {},
    ),
    "own": (
        {"own": True, "steps": 2, "dropout": 0.3},
        (STATE, BATCH),
        {"mask": seen(B, S), "association_mask": seen(B, H, L, S)},
    ),
    "values": (
        {"learn_beta": True, "layer_options": {"value_size": 6}},
        (STATE, BATCH, draw(B, S, 6)),
        {"mask": seen(S)},
    ),
    "shared memories": (
        {"zero_memory": True, "dropout": 0.3},
        (STATE, SHARED),
        {"mask": seen(B, S)},
    ),
    "shared states": ({}, (draw(L, D), BATCH), {"association_mask": seen(L, S)}),
    "static": ({"kind": StaticHopfield, "steps": 2}, (STATE, BATCH), {}),
}
SEPARATIONS = {
    "softmax": "softmax",
    "softmax1": "softmax1",
    "sparsemax": "sparsemax",
    "learned alpha": LearnedAlpha,
    "steep": uhop.Entmax(np.array([1.3, 3.0])),
    "polynomial": uhop.Polynomial(4),
    "two": uhop.TopK(2),
    "unknown": Doubled(),
}
QUICK = {
    ("softmax", "own"),
    ("softmax", "shared memories"),
    ("sparsemax", "itself"),
    ("learned alpha", "values"),
    ("unknown", "own"),
    ("two", "plain"),
    ("polynomial", "static"),
}


@pytest.mark.few(4)
@pytest.mark.slow_where(lambda separation, case: (separation, case) not in QUICK)
@pytest.mark.parametrize(
    ("separation", "case"),
    [
        pair
        for pair in itertools.product(SEPARATIONS, CASES)
        if pair != ("steep", "static")  # which has one head, not two
    ],
)
def test_blocks_change_no_number(separation, case):
    """Output and gradients are those of the layer that holds all scores."""
    options, arrays, call = CASES[case]
    key = {"key": jax.random.key(1)} if "dropout" in options else {}
    one, other = (
        value_and_gradients(
            layer(SEPARATIONS[separation], block, **options), *arrays, **call, **key
        )
        for block in (None, BLOCK)
    )
    assert_alike(one, other)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16, jnp.float16], ids=str)
def test_blocks_in_every_dtype(dtype):
    outputs = []
    for block in (None, BLOCK):
        module = layer("entmax", block, layer_options={"dtype": dtype})
        outputs.append(module(STATE.astype(dtype), BATCH.astype(dtype)))
    assert outputs[0].dtype == outputs[1].dtype == dtype
    assert_close(outputs[1], outputs[0], scale=2.0)


LENGTHS = np.array([5, 0, 11, 1])


def bags():
    """Bags one behind another, with a tail of NaN; and padded, with their mask."""
    rows = np.array(draw(LENGTHS.sum() + 3, D, seed=2))
    rows[LENGTHS.sum() :] = np.nan
    padded = np.zeros((len(LENGTHS), LENGTHS.max(), D), np.float32)
    mask = np.arange(LENGTHS.max()) < LENGTHS[:, None]
    padded[mask] = rows[: LENGTHS.sum()]
    return jnp.asarray(rows), jnp.asarray(padded), jnp.asarray(mask)


@pytest.mark.parametrize("separation", ["softmax", "sparsemax"])
def test_bags_of_any_length_need_no_padding(separation):
    """Bags behind one another retrieve, and learn, as padded bags do."""
    rows, padded, mask = bags()

    def pool(block):
        return HopfieldPooling(layer(separation, block), L, rngs=nnx.Rngs(1))

    output, (parameters, of_padded) = value_and_gradients(pool(None), padded, mask=mask)
    one = output, parameters, of_padded[mask]
    lengths = {"lengths": jnp.asarray(LENGTHS)}
    output, (parameters, of_rows) = value_and_gradients(pool(4), rows, **lengths)
    assert_alike(one, (output, parameters, of_rows[: LENGTHS.sum()]))
    assert not of_rows[LENGTHS.sum() :].any()


def embedded(index, weights):
    """Instances of an index, as an encoder of images would make them."""
    phase = (
        index[:, None].astype(jnp.float32) * jnp.arange(1, 5, dtype=jnp.float32)[None]
    )
    return jnp.tanh(jnp.sin(phase) @ weights)


EYE = jnp.eye(4, D, dtype=jnp.float32)


def test_memories_of_an_index_are_never_held():
    """The embedding of the instances is computed again on the way back, and learns."""
    number, weights = 2**17, draw(4, D)
    pool = HopfieldPooling(layer("sparsemax", 512), L, rngs=nnx.Rngs(1))

    def of_index(weights):
        return (pool(IndexedMemories(embedded, number, (weights,))) ** 2).sum()

    def of_array(weights):
        memories = embedded(jnp.arange(number, dtype=jnp.int32), weights)
        return (pool.layer(pool.state[...], memories) ** 2).sum()

    one, other = (
        jax.jit(jax.value_and_grad(f)).lower(weights).compile()
        for f in (of_index, of_array)
    )
    assert_alike(other(weights), one(weights), scale=10.0)
    whole = 4 * number * D
    assert one.memory_analysis().temp_size_in_bytes < whole / 8
    assert other.memory_analysis().temp_size_in_bytes > whole


def poles(index, weights):
    """Memories of an index, of which memory 2 is infinite."""
    return weights[0][None] / (index - 2).astype(jnp.float32)[:, None]


MASKS = {"one": [1, 1, 0, 1, 1], "a block": [1, 1, 0, 0, 1], "all": [0] * 5}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_memories_that_nobody_sees_may_be_made_of_nan(mask):
    """They change no output and no gradient, as in an array."""
    module, weights = layer("softmax", 2, kind=StaticHopfield), draw(1, D)
    seen, state = jnp.asarray(mask, bool), draw(L, D, seed=3)

    def recalled(weights, made):
        memories = made(weights)
        return (module(state, memories, mask=seen) ** 2).sum()

    def stored(weights):
        finite = jnp.where(seen, jnp.arange(5, dtype=jnp.int32), 0)
        return poles(finite, weights)

    indexed = lambda weights: IndexedMemories(poles, 5, (weights,))  # noqa: E731
    one, other = (
        jax.jit(jax.value_and_grad(recalled), static_argnums=1)(weights, made)
        for made in (stored, indexed)
    )
    assert_alike(one, other)
    lengths = jnp.asarray([1, 1, 1, 2], jnp.int32)
    bags = module(state, indexed(weights), lengths=lengths)
    finite = jnp.isfinite(bags).all((1, 2))
    assert finite.tolist() == [True, True, False, True]


def test_an_argument_of_memories_may_be_a_number():
    indexed = IndexedMemories(lambda index, x: x + embedded(index, EYE), 9, (2.0,))
    pool = HopfieldPooling(layer("softmax", 4, own=True), L, rngs=nnx.Rngs(1))
    stored = pool(2.0 + embedded(jnp.arange(9, dtype=jnp.int32), EYE))
    assert_close(pool(indexed), stored)


@pytest.mark.parametrize("lengths", [[15, 15], [3, -2], [-3, 5], [2**30] * 4])
def test_traced_lengths_out_of_range_give_nan(lengths):
    pool = HopfieldPooling(layer("softmax", 4), L, rngs=nnx.Rngs(1))
    rows = bags()[0]
    call = jax.jit(lambda lengths: pool(rows, lengths=lengths))
    assert jnp.isnan(call(jnp.asarray(lengths, jnp.int64))).all()
    assert jnp.isfinite(call(jnp.asarray(LENGTHS[: len(lengths)]))).all()


@pytest.mark.parametrize("kind", [Hopfield, StaticHopfield])
def test_blocks_of_nothing(kind):
    """An empty array gives what it gives without blocks."""
    cases = [(L, D), (0, D)], [(B, L, D), (B, 0, D)]
    cases = *cases, [(0, L, D), (0, S, D)], [(0, D), (S, D)]
    for state, memories in cases:
        arrays = draw(*state), draw(*memories)
        options = {"kind": kind, "zero_memory": True}
        mask = {"association_mask": jnp.ones((state[-2], memories[-2]), bool)}
        one, other = (
            value_and_gradients(layer("softmax", block, **options), *arrays, **mask)
            for block in (None, BLOCK)
        )
        assert_alike(one, other)
    pool = HopfieldPooling(layer("softmax", 4, kind=kind), L, rngs=nnx.Rngs(1))
    rows = draw(5, D)
    assert pool(rows, lengths=jnp.zeros(0, jnp.int32)).shape == (0, L, D)
    assert not pool(rows[:0], lengths=jnp.zeros(2, jnp.int32)).any()


def test_ties_of_blocks():
    """Of equal overlaps the first memory is kept; own memories come last."""
    memories = jnp.zeros((3, D), jnp.float32).at[0, 0].set(1.0)
    state = jnp.zeros((1, D), jnp.float32).at[0, 1].set(1.0)
    one, other = (
        layer(uhop.TopK(1), block, kind=StaticHopfield, zero_memory=True)(
            state, memories
        )
        for block in (None, 2)
    )
    assert one.any()
    assert_close(other, one)
    for block in (None, 2):  # padding of the last block is no memory
        with pytest.raises(ValueError, match="k must be at most 3, got 4"):
            layer(uhop.TopK(4), block, kind=StaticHopfield)(state, memories)


def test_transformations_of_jax():
    """Blocks work under vmap and remat, in an attention of Flax, and derive once."""
    whole, blocked = (layer("sparsemax", block) for block in (None, BLOCK))
    expected = nnx.jit(lambda m: m(STATE, BATCH))(whole)
    mapped = nnx.vmap(lambda *x: blocked(*x), in_axes=0)
    assert_close(nnx.jit(lambda *x: mapped(*x))(STATE, BATCH), expected)
    loss = lambda m, x: (m(x, BATCH) ** 2).sum()  # noqa: E731
    again = nnx.remat(loss)
    one, other = (
        nnx.jit(nnx.grad(f))(m, STATE) for f, m in ((loss, whole), (again, blocked))
    )
    assert_alike(one, other)
    outputs = [
        nnx.MultiHeadAttention(
            H,
            D,
            attention_fn=Association("entmax", block=block),
            decode=False,
            rngs=nnx.Rngs(0),
        )(BATCH, mask=seen(B, H, S, S))
        for block in (None, BLOCK)
    ]
    assert_close(outputs[1], outputs[0])
    with pytest.raises(ValueError, match="first derivatives alone"):
        slope = jax.grad(functools.partial(loss, blocked))
        jax.eval_shape(lambda x: jax.jvp(slope, (x,), (x,)), STATE)


def test_stage_one_of_blocks():
    """The separation losses of a layer do not depend on its block."""
    layers = [
        layer("softmax", block, layer_options={"kernel": True})
        for block in (None, BLOCK)
    ]
    one, other = (separation_losses(x, BATCH) for x in layers)
    assert_alike(one, other)
    loss = uhop.AverageLoss(jnp.asarray(2.0, jnp.float32))  # metadata with an array
    assert_alike(*(separation_losses(x, BATCH, loss=loss) for x in layers))
    assert layers[1].record is None


SPLIT = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P
from uhop_jax import Entmax
from uhop_jax.layers import Association, BiasPattern, Hopfield, HopfieldPooling
mesh = jax.make_mesh((4,), ("bag",), axis_types=(AxisType.Auto,))
bag = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 8)), jnp.float32)
def run(separation, axis_name):
    bias = BiasPattern(2, 4, rngs=nnx.Rngs(1))
    association = Association(separation, block=8, axis_name=axis_name, bias=bias)
    layer = Hopfield(8, association, num_heads=2, rngs=nnx.Rngs(0))
    graphdef, parameters = nnx.split(HopfieldPooling(layer, 2, rngs=nnx.Rngs(1)))
    f = lambda parameters, bag: nnx.merge(graphdef, parameters)(bag)
    if axis_name:
        f = jax.shard_map(f, mesh=mesh, in_specs=(P(), P(None, "bag")), out_specs=P())
    loss = lambda *x: (f(*x) ** 2).sum()
    parameters = nnx.to_pure_dict(parameters)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(parameters, bag)
for separation in ("softmax1", Entmax(1.3)):
    whole, parts = (run(separation, name) for name in (None, "bag"))
    for one, part in zip(*map(jax.tree.leaves, (whole, parts)), strict=True):
        np.testing.assert_allclose(part, one, rtol=1e-4, atol=1e-5)
print("equal")
"""


@pytest.mark.slow
def test_a_bag_split_over_devices():
    """Four devices with a quarter of each bag retrieve and learn as one does."""
    flags = f"{FAST} --xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-c", SPLIT],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and "equal" in run.stdout, run.stderr[-3000:]


def pooled(**options):
    rows = options.pop("memories", bags()[0])
    block = options.pop("block", 4)
    separation = options.pop("separation", "softmax")
    pool = HopfieldPooling(layer(separation, block), L, rngs=nnx.Rngs(1))
    return pool(rows, **options)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"lengths": np.array([5, 16])}, "at most the 20 memories, .* a sum of 21"),
        ({"lengths": np.array([5, -1])}, "a least length of -1"),
        ({"lengths": np.array([5.0])}, "lengths must be integers .* got float"),
        ({"lengths": LENGTHS, "memories": BATCH}, r"shape \(S, 8\), all bags one"),
        ({"lengths": LENGTHS, "mask": seen(B, S)}, r"mask must have shape \(20,\)"),
        (
            {"lengths": LENGTHS, "separation": uhop.TopK(2)},
            "lengths needs a separation with one threshold",
        ),
        (
            {"memories": IndexedMemories(embedded, 9, (draw(4, 5),))},
            r"memories must have shape \(S, 8\), .* got \(9, 5\)",
        ),
        (
            {"memories": IndexedMemories(lambda i: jnp.ones((1, 8)), 9)},
            r"function must give \(2, memory_size\) for 2 indices, got \(1, 8\)",
        ),
    ],
)
def test_wrong_bags_are_refused(untyped, wrong, message):
    with pytest.raises(ValueError, match=message):
        pooled(**wrong)


def test_what_blocks_cannot_do_is_refused(untyped):
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        Association(block=0)
    with pytest.raises(ValueError, match="until_converged True and block 8"):
        Association(block=8, until_converged=True)
    indexed = IndexedMemories(embedded, 9, (draw(4, D),))
    module = layer("softmax", 8)
    with pytest.raises(ValueError, match="memories of associate must be an array"):
        module.associate(STATE, indexed)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        IndexedMemories(embedded, 0)
    with pytest.raises(ValueError, match="function must be a function, got None"):
        IndexedMemories(None, 9)
    with pytest.raises(ValueError, match="memories must be given with lengths"):
        module(draw(S, D), lengths=LENGTHS)
    with pytest.raises(ValueError, match="association_mask must be None with lengths"):
        module(STATE, indexed, association_mask=seen(L, 9))
    split = layer("softmax", None, axis_name="bag")
    with pytest.raises(ValueError, match="associate needs no axis_name, got 'bag'"):
        split.associate(STATE, BATCH)
    with pytest.raises(ValueError, match="axis of jax.shard_map around .*, got 'bag'"):
        split(STATE, BATCH)
    attention = Association("softmax", block=8)
    heads = draw(B, S, H, 4)
    with pytest.raises(ValueError, match="block makes no weights for dropout"):
        attention(heads, heads, heads, dropout_rng=jax.random.key(0), dropout_rate=0.1)
