"""Layers equal attention and the functional core."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from layer_parts import (
    MEMORIES,
    STATE,
    UNTIL_CONVERGED,
    B,
    D,
    H,
    L,
    S,
    layer,
    patterns,
    static,
)

import uhop_jax as uhop
from uhop_jax.layers import (
    Association,
    Hopfield,
    LearnedAlpha,
    LinearFeatures,
    dropped,
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options", [{}, dict(separation="entmax"), dict(steps=3)], ids=repr
)
def test_any_inverse_temperature(options):
    """At a high beta the layer returns the nearest memory, and nothing overflows."""

    def loss(association):
        return association(STATE, MEMORIES).sum()

    sharp = layer(beta=1e6, **options)(STATE, MEMORIES)
    for beta in (1e12, 1e20, 1e38):
        association = layer(beta=beta, **options)
        assert_close(association(STATE, MEMORIES), sharp)
        gradient = nnx.grad(loss)(association)
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradient))


def attentions(separation="softmax", seed=3, **options):
    """Flax's attention, and the same with an association inside."""
    options = {"decode": False, "keep_rngs": False} | options
    return [
        nnx.MultiHeadAttention(H, D, rngs=nnx.Rngs(seed), **options, **inside)
        for inside in ({}, {"attention_fn": Association(separation)})
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_softmax_equals_attention(bias):
    attention, associative = attentions(use_bias=bias)
    hopfield = layer(num_heads=H, value_size=D, **({} if bias else {"bias_init": None}))
    for name in ("query", "key", "value", "out"):
        maps = [getattr(x, name) for x in (attention, associative)]
        maps.append(getattr(hopfield.projections, name))
        for part in ("kernel", "bias") if bias else ("kernel",):
            value = patterns(*getattr(maps[0], part).shape, seed=9)
            for one in maps:  # biases start at zero
                getattr(one, part)[...] = value
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (B, 1, L, S))
    mask = mask.at[..., 0].set(True)
    for arrays in ((STATE, MEMORIES), (STATE,), (STATE, MEMORIES, -MEMORIES)):
        expected = attention(*arrays)
        assert_close(associative(*arrays), expected)
        assert_close(hopfield(*arrays), expected)
    expected = attention(STATE, MEMORIES, mask=mask)
    assert_close(associative(STATE, MEMORIES, mask=mask), expected)
    assert_close(hopfield(STATE, MEMORIES, association_mask=mask), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("separation", ["softmax", "softmax1", "entmax", "polynomial"])
def test_values_of_few_states_are_means_of_values(separation, dropout):
    """Few states project the mean they read, many project the memories; both agree."""
    hopfield = layer(separation=separation, dropout=dropout, kernel=True)
    maps = hopfield.projections
    maps.value.bias[...] = patterns(1, D, seed=9)
    mask = jnp.asarray(np.arange(S) < np.asarray([[S], [3], [0]]))
    state, key = STATE[:, :1], jax.random.key(5)
    weights = hopfield.associate(state, MEMORIES, mask=mask).weights
    values = maps.value(maps.key(MEMORIES))
    mean = jnp.einsum("bhls,bshv->blhv", dropped(weights, dropout, key), values)
    result = hopfield(state, MEMORIES, mask=mask, key=key)
    assert_close(result, maps.out(mean))
    many = jnp.broadcast_to(state, (B, S, D))
    together = hopfield(many, MEMORIES, mask=mask)
    assert_close(hopfield(state, MEMORIES, mask=mask), together[:, :1])

    def loss(model, state):
        return jnp.sin(model(state, MEMORIES, mask=mask)[:, :1]).sum()

    slopes = [jax.jit(nnx.grad(loss))(hopfield, x) for x in (state, many)]
    for one, other in zip(*map(jax.tree.leaves, slopes), strict=True):
        assert_close(one, other, scale=10)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "separation, dropout",
    [("softmax", 0.5), ("entmax", 0.0), ("topk", 0.0), ("softmax1", 0.5)],
)
def test_heads_of_few_states_read_memories_themselves(separation, dropout):
    """A call with few states has the output of keys and values, without either."""
    bias = {"bias_init": None} if separation == "softmax1" else {}
    hopfield = layer(
        size=32,
        separation=separation,
        dropout=dropout,
        beta=(0.5, 2.0),
        num_heads=2,
        value_size=D,
        value_head_size=6,
        kernel=True,
        **bias,
    )
    if not bias:
        for name in ("key", "value"):
            one = getattr(hopfield.projections, name)
            one.bias[...] = patterns(*one.bias.shape, seed=9)
    state, memories = patterns(2, 32), patterns(B, S, 32, seed=1)
    mask = jnp.asarray(np.arange(S) < np.asarray([[S], [3], [0]]))
    values, key = patterns(B, S, D, seed=2), jax.random.key(5)

    def read(model, state, memories, values):
        return model(state, memories, values, mask=mask, key=key)

    def projected(model, state, memories, values):
        return model.associate(state, memories, values, mask=mask, key=key).output

    program = str(jax.make_jaxpr(read)(hopfield, state, memories, values))
    assert f"f32[{B},{S},2,16]" not in program  # the keys
    arrays = state, memories, values
    assert_close(read(hopfield, *arrays), projected(hopfield, *arrays))

    def slopes(function):
        def loss(model, *arrays):
            return jnp.sin(function(model, *arrays)).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(hopfield, *arrays)

    both = [jax.tree.leaves(slopes(function)) for function in (read, projected)]
    for one, other in zip(*both, strict=True):
        assert_close(one, other, scale=10)


def test_start_values_equal_the_start_values_of_attention():
    starts = {
        "kernel_init": nnx.initializers.normal(),
        "bias_init": nnx.initializers.ones,
    }
    attention, _ = attentions(**starts)
    hopfield = layer(
        seed=3,
        num_heads=H,
        value_size=D,
        weight_init=starts["kernel_init"],
        bias_init=starts["bias_init"],
    )
    assert_close(hopfield(STATE, MEMORIES), attention(STATE, MEMORIES))


@pytest.mark.few(6)
@pytest.mark.parametrize("shape", [(L, S), (H, L, S), (B, 1, 1, S), (1, 1, L, S)])
@pytest.mark.parametrize("dtype", [bool, jnp.float32, jnp.int8])
def test_masks_of_attention(shape, dtype):
    attention, associative = attentions()
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, shape).at[..., 0].set(True)
    result = associative(STATE, MEMORIES, mask=mask.astype(dtype))
    assert_close(result, attention(STATE, MEMORIES, mask=mask))


def test_causal_attention():
    attention, associative = attentions()
    mask = nnx.make_causal_mask(STATE[..., 0])
    result = associative(STATE, mask=mask)
    assert_close(result, attention(STATE, mask=mask.astype(bool)))
    padding = jnp.ones((B, 1, 1, L), bool).at[1, ..., 3].set(False)
    expected = attention(STATE, mask=mask.astype(bool) & padding)
    if "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters:
        np.testing.assert_array_equal(associative(STATE, is_causal=True), result)
        causal = associative(STATE, mask=padding, is_causal=True)
        assert_close(causal, expected)
    heads = STATE.reshape(B, L, H, -1)
    causal = Association()(heads, heads, heads, mask=padding, is_causal=True)
    both = mask.astype(bool) & padding
    assert_close(causal, nnx.dot_product_attention(heads, heads, heads, mask=both))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint8], ids=str)
def test_a_traced_mask_of_other_numbers_gives_nan(dtype):
    """No forbidden memory shows: a float mask may mean a term added to overlaps."""
    query = jnp.asarray([[[1.0, 0]]], jnp.float32)
    keys = jnp.eye(2, dtype=jnp.float32)[:, None]
    association = Association()

    @jax.jit
    def attend(mask):
        return association(query, keys, keys, mask=mask)[..., 0, :]

    for allowed, expected in (((1, 0), [[1, 0]]), ((0, 1), [[0, 1]])):
        assert_close(attend(jnp.asarray(allowed, dtype)), expected)
    wrong = [(0, 2), (1, 255)]
    if dtype == jnp.float32:
        wrong += [(0, -1e9), (0.5, 1), (-1, 1), (np.nan, 1), (0, -np.inf)]
    for mask in wrong:
        assert np.isnan(attend(jnp.asarray(mask, dtype))).all()
        with pytest.raises(ValueError, match="mask must be boolean, or 1 where a"):
            association(query, keys, keys, mask=jnp.asarray(mask, dtype))


def test_attention_sows_its_weights():
    sown = []
    for model in attentions():
        if hasattr(nnx, "capture"):
            call = nnx.capture(model, nnx.Intermediate)
            _, state = call(STATE, MEMORIES, sow_weights=True)
        else:  # an older Flax leaves the weights in the module
            model(STATE, MEMORIES, sow_weights=True)
            state = nnx.pop(model, nnx.Intermediate)
        sown.append(jax.tree.leaves(state["attention_weights"]))
    (expected,), (result,) = sown
    assert_close(result, expected)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_of_attention(broadcast):
    options = {"dropout_rate": 0.5, "broadcast_dropout": broadcast}
    options["deterministic"] = False
    attention, associative = attentions(**options)
    key = nnx.Rngs(dropout=5)
    result = associative(STATE, MEMORIES, rngs=nnx.Rngs(dropout=5))
    expected = attention(STATE, MEMORIES, rngs=key)
    assert_close(result, expected)
    plain = attention(STATE, MEMORIES, deterministic=True)
    assert float(abs(expected - plain).max()) > 1e-3
    assert_close(associative(STATE, MEMORIES, deterministic=True), plain)
    if hasattr(nnx, "view"):  # not in an older Flax
        model = nnx.view(associative, deterministic=True)
        assert_close(model(STATE, MEMORIES), plain)
    associative.eval()
    assert_close(associative(STATE, MEMORIES), plain)


def test_attention_in_half_precision():
    with jax.numpy_dtype_promotion("standard"):  # Flax's own layers mix dtypes
        attention, associative = attentions(dtype=jnp.bfloat16)
        result = associative(STATE, MEMORIES)
        assert result.dtype == jnp.bfloat16
        assert_close(result, attention(STATE, MEMORIES), scale=5)


def test_a_head_of_keys_may_serve_several_heads_of_queries():
    query, keys = patterns(B, L, H, 4), patterns(B, S, 2, 4, seed=1)
    values = patterns(B, S, 2, 4, seed=2)
    repeated = [jnp.repeat(x, 2, axis=-2) for x in (keys, values)]
    expected = nnx.dot_product_attention(query, *repeated)
    assert_close(Association()(query, keys, values), expected)


def test_decoding_with_a_cache():
    """A token at a time, a sparse attention gives what it gives for all together."""
    model = attentions("sparsemax", decode=True)[1]
    with jax.numpy_dtype_promotion("standard"):  # Flax compares int32 with int64
        model.init_cache((B, L, D), jnp.float32)
        parts = [model(STATE[:, i : i + 1]) for i in range(L)]
    causal = jnp.tril(jnp.ones((L, L), bool))
    expected = model(STATE, mask=causal, decode=False)
    assert_close(jnp.concatenate(parts, axis=1), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("separation", "options"),
    [
        ("entmax", {}),
        (LearnedAlpha(), {"steps": 2}),
        (uhop.TopK(2), {"zero_memory": True}),
    ],
    ids=str,
)
def test_any_association_in_an_attention_of_flax(separation, options):
    """It is the layer with the same projections; what it learns, Flax's layer has."""
    association = Association(separation, beta=2.0, learn_beta=True, **options)
    model = nnx.MultiHeadAttention(
        H, D, attention_fn=association, decode=False, rngs=nnx.Rngs(0)
    )
    hopfield = Hopfield(D, association, num_heads=H, value_size=D, rngs=nnx.Rngs(0))
    expected = hopfield(STATE, MEMORIES)
    assert_close(model(STATE, MEMORIES), expected)
    slope = nnx.grad(lambda model: (model(STATE, MEMORIES) ** 2).sum())(model)
    learned = jax.tree.leaves(slope["attention_fn"])
    assert len(learned) == 1 + isinstance(separation, LearnedAlpha)
    assert all(x != 0 for x in learned)


@pytest.mark.few(2)
@pytest.mark.parametrize("separation", ["softmax", "sparsemax"])
@pytest.mark.parametrize("steps", [1, 3])
def test_static_layers_equal_the_core_bit_for_bit(separation, steps):
    model = static(separation=separation, steps=steps, beta=0.7)
    core = uhop.separation_from_name(separation)
    for memories in (MEMORIES, MEMORIES[0]):
        result = model.associate(STATE, memories)
        expected = uhop.retrieve(
            uhop.Model(separation=core, beta=0.7), memories, STATE, steps=steps
        )
        np.testing.assert_array_equal(result.output, expected.state)
        np.testing.assert_array_equal(result.weights, expected.weights)


def test_until_convergence_equals_the_core():
    model = static(beta=0.5, **UNTIL_CONVERGED)
    result = model.associate(STATE, MEMORIES)
    expected = uhop.converge(uhop.Model(beta=0.5), MEMORIES, STATE, max_steps=64)
    np.testing.assert_array_equal(result.output, expected.pattern)
    np.testing.assert_array_equal(result.energy, expected.energy)
    np.testing.assert_array_equal(result.steps, expected.steps)
    assert bool(result.converged.all())


def test_the_energy_is_the_energy_of_the_retrieved_state():
    model = static(steps=2, beta=0.5)
    result = model.associate(STATE, MEMORIES)
    expected = uhop.energy(uhop.Model(beta=0.5), MEMORIES, result.output)
    assert_close(result.energy, expected)
    assert layer(separation="polynomial").associate(STATE).energy is None


def test_an_identity_kernel_equals_the_plain_layer():
    plain, kernel = layer(num_heads=H), layer(num_heads=H, kernel=True)
    assert_close(kernel(STATE, MEMORIES), plain(STATE, MEMORIES))


@pytest.mark.parametrize("value_size", [None, D])
def test_equals_the_equation_of_the_paper(value_size):
    """`sep(beta (W_Q Phi(R)) (W_K Phi(Y))^T) W_V W_K Y`, head by head [sec:DL]."""
    kernel = LinearFeatures(D, start="random", rngs=nnx.Rngs(5))
    model = layer(num_heads=H, kernel=kernel, value_size=value_size)
    weights = {
        name: np.asarray(getattr(model.projections, name).kernel[...], np.float64)
        for name in ("query", "key", "value", "out")
    }
    phi = np.asarray(kernel.weights[...], np.float64)
    R, Y = np.asarray(STATE[0], np.float64), np.asarray(MEMORIES[0], np.float64)
    expected = 0.0
    for h in range(H):
        q, k = R @ phi @ weights["query"][:, h], Y @ phi @ weights["key"][:, h]
        z = q @ k.T / np.sqrt(D // H)
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        if value_size:
            v = Y @ weights["value"][:, h]
        else:
            raw = np.einsum("sd,dhe->she", Y, weights["key"])
            v = np.einsum("she,hev->sv", raw, weights["value"][:, :, h])
        expected = expected + p @ v @ weights["out"][h]
    assert_close(model(STATE[0], MEMORIES[0]), expected, scale=3)


def test_a_ridge_reads_out_by_local_regression():
    """Against a weighted regression of each row by NumPy's least squares."""
    association = Association("softmax", ridge=0.3)
    q, k, v = patterns(L, H, 4), patterns(S, H, 4, seed=1), patterns(S, H, 3, seed=2)
    recall = association.associate(q, k, v)
    for h in range(H):
        for row in range(L):
            root = np.sqrt(np.asarray(recall.weights[h, row], np.float64))[:, None]
            centered = np.asarray(k[:, h] - q[row, h][None], np.float64)
            # The constant at the query is the value there; the ridge spares it.
            design = root * np.hstack([np.ones((S, 1)), centered])
            design = np.vstack([design, np.sqrt(0.3) * np.eye(5)[1:]])
            target = np.vstack(
                [root * np.asarray(v[:, h], np.float64), np.zeros((4, 3))]
            )
            value = np.linalg.lstsq(design, target, rcond=None)[0][0]
            assert_close(recall.output[row, h], value, scale=10)
    mean = Association("softmax").associate(q, k, v).output
    flat = Association("softmax", ridge=1e6).associate(q, k, v).output
    assert_close(flat, mean, scale=10)
    for options in ({"steps": 2}, {"dropout": 0.5}, {"block": 4}):
        with pytest.raises(ValueError, match="ridge needs one update, no block and no"):
            Association(ridge=0.3, **options)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"ridge": 0.3}])
def test_all_products_of_an_association_are_at_full_precision(options):
    q, k = patterns(L, H, 4), patterns(S, H, 4)
    associate = functools.partial(Association(**options).associate, energies=False)
    program = str(jax.make_jaxpr(associate)(q, k, k, key=jax.random.key(0)))
    products = program.count("dot_general[")
    assert products == program.count("precision=(Precision.HIGHEST") > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("separation", ["softmax", "softmax1"])
def test_a_ridge_of_keys_far_from_zero(separation):
    """Covariances do not cancel, and queries of no memory retrieve zero."""
    association = Association(separation, ridge=0.1, beta=1e-5)
    q, k, v = patterns(L, 1, 4), patterns(S, 1, 4, seed=2), patterns(S, 1, 3, seed=3)
    for offset in (0.0, 1000.0):
        arrays = q + offset, k + offset, v
        near, wide = (
            association.associate(*(x.astype(dtype) for x in arrays))
            for dtype in (jnp.float32, jnp.float64)
        )
        assert_close(near.output, wide.output.astype(jnp.float32), scale=100)
    where = jnp.zeros((1, L, S), bool)
    assert not association.associate(q, k, v, where=where).output.any()
