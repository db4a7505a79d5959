"""Layers: what each option does, against attention and against the functional core."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, every_dtype
from flax import nnx
from jaxtyping import ArrayLike

import uhop_jax as uhop
from uhop_jax.layers import (
    Association,
    BiasPattern,
    Hopfield,
    HopfieldLayer,
    HopfieldPooling,
    KernelParam,
    LearnedAlpha,
    LinearFeatures,
    Recall,
    StaticHopfield,
    dropped,
    separation_losses,
)
from uhop_jax.layers import recall as heads
from uhop_jax.models import (
    BagClassifier,
    SequenceModel,
    STanHop,
    ViH,
    VisionHopfield,
)

B, L, S, D, H = 3, 5, 7, 16, 4


def patterns(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


STATE, MEMORIES = patterns(B, L, D), patterns(B, S, D, seed=1)


# Options of the association of a layer; all others are of the layer.
OF_ASSOCIATION = set(inspect.signature(Association.__init__).parameters) - {
    "self",
    "param_dtype",
}


def layer(size=D, seed=0, kind=Hopfield, **options):
    parts = {name: options.pop(name) for name in OF_ASSOCIATION & set(options)}
    return kind(size, Association(**parts), rngs=nnx.Rngs(seed), **options)


def static(**options):
    return layer(kind=StaticHopfield, **options)


UNTIL_CONVERGED = {"steps": 64, "until_converged": True}


def number_of_parameters(model):
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))


# Equality with attention and with the functional core ---------------------------------


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


# Options (UC-27) ----------------------------------------------------------------------

ZEROS = nnx.initializers.zeros
DIRECT = {"value_size": D}
OPTIONS = {
    "memory_size": (12, {}),
    "value_size": (D, {}),
    "num_heads": (H, {}),
    "head_size": (8, {}),
    "value_head_size": (8, {}),
    "out_size": (0, {"bias_init": nnx.initializers.ones}),
    "normalize": (("state",), {}),
    "kernel": (True, {}),
    "weight_init": (ZEROS, {}),
    "bias_init": (nnx.initializers.ones, {}),
    "dtype": (jnp.bfloat16, {}),
    "param_dtype": (jnp.float64, {}),
    "separation": ("sparsemax", {}),
    "beta": (2.0, {}),
    "learn_beta": (True, {}),
    "steps": (3, {}),
    "until_converged": (True, {"steps": 2, "beta": 2.0}),
    "bias": (BiasPattern(1, D, rngs=nnx.Rngs(7)), {}),
    "zero_memory": (True, {}),
    "dropout": (0.5, {}),
    "ridge": (0.5, {}),
}


def test_every_option_is_in_the_table():
    parameters = set(inspect.signature(Hopfield.__init__).parameters)
    parameters -= {"self", "state_size", "association", "rngs"}
    by_blocks = {"block", "axis_name"}  # test_blocks.py
    assert set(OPTIONS) | by_blocks == parameters | OF_ASSOCIATION


@pytest.mark.parametrize(
    "kind",
    [Association, BiasPattern, Hopfield, HopfieldLayer, HopfieldPooling, LearnedAlpha]
    + [LinearFeatures, StaticHopfield],
)
def test_constructors_are_small(kind):
    parameters = inspect.signature(kind.__init__).parameters
    assert "rngs" in parameters or "separation" in parameters
    assert len(parameters) - 1 <= 15


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_does_something(name):
    value, base = OPTIONS[name]
    plain, changed = layer(**base), layer(**base, **{name: value})
    if number_of_parameters(plain) != number_of_parameters(changed):
        return
    shapes = [
        jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(m))
        for m in (plain, changed)
    ]
    if str(shapes[0]) != str(shapes[1]):
        return
    key = jax.random.key(0)
    associate = nnx.jit(lambda m: m.associate(3 * STATE, 3 * MEMORIES, key=key))
    results = [associate(m) for m in (plain, changed)]
    if results[0].output.shape != results[1].output.shape:
        return
    differ = results[0].weights.shape != results[1].weights.shape
    differ |= results[0].output.dtype != results[1].output.dtype
    differ |= len({m.converged is None for m in results}) > 1
    assert differ or float(abs(results[0].output - results[1].output).max()) > 1e-3


def test_one_normalisation_without_the_others():  # UC-28
    names = ("state", "memory", "value", "pattern")
    number = number_of_parameters(layer(**DIRECT))
    for off in names:
        others = [name for name in names if name != off]
        for model in (layer(normalize=others, **DIRECT), static(normalize=others)):
            assert bool(jnp.isfinite(model(STATE, MEMORIES)).all())
        alone = layer(normalize=(off,), **DIRECT)
        assert number_of_parameters(alone) > number
        result = float(abs(alone(STATE, 3 * MEMORIES)).max())
        assert (
            abs(result - float(abs(layer(**DIRECT)(STATE, 3 * MEMORIES)).max())) > 1e-3
        )


@pytest.mark.parametrize("beta", [None, 1, 1.0, np.float32(1), np.full(1, 1.0)])
def test_types_of_beta(beta):  # UC-28
    result = layer(beta=beta)(STATE, MEMORIES)
    expected = layer(beta=D**-0.5 if beta is None else 1.0)(STATE, MEMORIES)
    np.testing.assert_array_equal(result, expected)
    assert float(abs(result - layer(beta=2.0)(STATE, MEMORIES)).max()) > 1e-3


def test_the_default_beta():  # UC-28: scores 1, 2, 3 in a head of 4
    model = layer(4, kind=StaticHopfield)
    state = jnp.asarray([[1.0, 0, 0, 0]])
    memories = jnp.zeros((3, 4)).at[:, 0].set(jnp.asarray([1.0, 2, 3]))
    weights = model.associate(state, memories).weights
    assert_close(weights, [[0.18632372, 0.30719589, 0.50648039]], floor=1e-8)


def test_heads_with_their_own_alpha_and_beta():
    alpha, beta = np.asarray([1.0, 1.3, 1.5, 2.0]), np.asarray([0.1, 0.5, 1.0, 3.0])
    together = layer(num_heads=H, separation=uhop.Entmax(alpha), beta=beta)
    result = together.associate(STATE, MEMORIES).weights
    for h in range(H):
        single = layer(
            num_heads=H, separation=uhop.Entmax(float(alpha[h])), beta=float(beta[h])
        )
        expected = single.associate(STATE, MEMORIES).weights
        assert_close(result[:, h], expected[:, h])


IN_TURN = {
    "softmax": {},
    "softmax1": {"separation": "softmax1"},
    "sparsemax": {"separation": "sparsemax"},
    "entmax 1.5": {"separation": "entmax"},
    "beta of heads": {"beta": np.asarray([0.1, 0.5, 1.0, 3.0]), "learn_beta": True},
    "own memories": {
        "bias": BiasPattern(H, D // H, rngs=nnx.Rngs(6)),
        "zero_memory": True,
    },
}


@pytest.mark.parametrize("options", IN_TURN.values(), ids=IN_TURN)
@pytest.mark.parametrize("memories", [MEMORIES, MEMORIES[0]], ids=["own", "shared"])
def test_heads_in_turn_change_no_number(monkeypatch, options, memories):
    """Large scores are made for some heads at a time, and again backward.

    In float64: derivatives at a large beta have few digits in float32, in both ways.
    """
    graphdef, state, rest = nnx.split(layer(num_heads=H, **options), nnx.Param, ...)
    wide = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float64))
    state, states, memories = wide((state, STATE, memories))
    seen = jnp.asarray(np.random.default_rng(0).random((B, H, L, S)) < 0.7)

    def run(state, x):
        call = nnx.merge(graphdef, state, rest)
        masked = call(x, memories, association_mask=seen)
        return ((call(x, memories) + masked) ** 2).sum()

    def all_of(state, x):
        slope = jax.grad(run, (0, 1))
        curvature = jax.jvp(lambda x: slope(state, x)[1], (x,), (x,))[1]
        again = jax.grad(lambda x: jnp.vdot(slope(state, x)[1], states))(x)
        return run(state, x), slope(state, x), curvature, again

    expected = jax.jit(all_of)(state, states)
    called = []

    def few(number, size):
        called.append(number)
        return 2

    monkeypatch.setattr(heads, "entries_at_once", few)
    result = jax.jit(lambda *x: all_of(*x))(state, states)
    assert set(called) == {B * H}
    for x, y in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_heads_in_turn_meet_broken_memories_and_half_precision(monkeypatch, dtype):
    """NaN is what a state that sees a broken memory gets, and no other state."""
    model = layer(num_heads=H, dtype=jnp.dtype(dtype))
    broken = MEMORIES.at[0, 1].set(jnp.nan)
    seen = jnp.ones((B, H, L, S), bool).at[0, :, 1:, 1].set(False)
    seen = seen.at[1, :, 0].set(False)
    states, broken = (x.astype(dtype) for x in (STATE, broken))
    expected = model(states, broken, association_mask=seen)
    monkeypatch.setattr(heads, "entries_at_once", lambda number, size: 2)
    result = model(states, broken, association_mask=seen)
    assert result.dtype == jnp.dtype(dtype)
    assert (jnp.isnan(result) == jnp.isnan(expected)).all()
    nan = jnp.isnan(result).all(-1)
    assert bool(nan[0, 0]) and int(nan.sum()) == 1
    result, expected = (
        jnp.nan_to_num(x.astype(jnp.float32)) for x in (result, expected)
    )
    tolerance = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(result, expected, rtol=8 * tolerance, atol=8 * tolerance)


class Tempered(uhop.Separation):
    """Softmax whose temperature is a number of its own."""

    temperature: ArrayLike = 1.0
    form = uhop.Softmax().form

    def _weights(self, z):
        return jax.nn.softmax(z / jnp.asarray(self.temperature, z.dtype)[..., None])


def test_dense_separations_with_numbers_of_heads_are_not_taken_in_turn(monkeypatch):
    separation = Tempered(np.asarray([0.5, 1.0, 2.0, 4.0]))
    model = layer(num_heads=H, separation=separation)
    expected = model(STATE, MEMORIES)
    monkeypatch.setattr(heads, "entries_at_once", lambda number, size: 2)
    assert_close(model(STATE, MEMORIES), expected)


@pytest.mark.parametrize("shape", [(), (H,)])
def test_alpha_and_beta_are_learned(shape):
    alpha = jnp.full(shape, 1.3)
    model = layer(
        num_heads=H,
        separation=LearnedAlpha(uhop.Entmax(alpha)),
        beta=np.full(shape, 0.4),
        learn_beta=True,
    )
    fixed = layer(num_heads=H, separation=uhop.Entmax(1.3), beta=0.4)
    assert_close(model(STATE, MEMORIES), fixed(STATE, MEMORIES), scale=10)
    association = model.association
    assert association.separation.raw.shape == association.log_factor.shape == shape
    graphdef, state = nnx.split(model)

    def loss(state):
        return (nnx.merge(graphdef, state)(STATE, MEMORIES) ** 2).sum()

    slope = jax.grad(loss)(state)["association"]
    for x in (slope["separation"]["raw"], slope["log_factor"]):
        assert float(abs(x[...]).min()) > 0


# Masks (UC-24, UC-25) -----------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("separation, steps", [("softmax", 1), ("sparsemax", 64)])
def test_an_empty_bag_leaves_the_others_alone(separation, steps):
    model = layer(
        num_heads=H, separation=separation, steps=steps, until_converged=steps > 1
    )
    mask = jnp.ones((2, S), bool).at[1].set(False)
    bags = MEMORIES[:2].at[1].set(jnp.nan)
    graphdef, state = nnx.split(model)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def slopes(state, bags, mask, states):
        result = nnx.merge(graphdef, state)(states, bags, mask=mask)
        return (result[0] ** 2).sum(), result

    slope, result = slopes(state, bags, mask, STATE[:2])
    alone, expected = slopes(state, bags[:1], mask[:1], STATE[:1])
    assert_close(result[0], expected[0])
    for leaf, expected_leaf in zip(
        jax.tree.leaves(slope), jax.tree.leaves(alone), strict=True
    ):
        assert bool(jnp.isfinite(leaf).all())
        assert_close(leaf, expected_leaf, scale=20)
    assert_close(result[1], jnp.broadcast_to(model.projections.out.bias[...], (L, D)))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["mask", "association_mask"])
@pytest.mark.parametrize("memories", ["batch", "shared"])
@pytest.mark.parametrize("value_size", [None, D])
def test_memories_hidden_from_all_states_never_show(name, memories, value_size):
    model = layer(num_heads=H, value_size=value_size, dropout=0.5)
    seen = jnp.arange(S) != 2
    masks = {name: seen if name == "mask" else jnp.broadcast_to(seen, (L, S))}
    stored = MEMORIES if memories == "batch" else MEMORIES[0]
    graphdef, state = nnx.split(model)

    @functools.partial(jax.jit, static_argnums=2)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def slopes(state, stored, dropout):
        key = jax.random.key(0) if dropout else None
        model = nnx.merge(graphdef, state)
        output = model(STATE, stored, key=key, **masks)
        return (output**2).sum(), output

    for dropout in (False, True):
        result = slopes(state, stored.at[..., 2, :].set(jnp.nan), dropout)
        expected = slopes(state, stored.at[..., 2, :].set(0), dropout)
        for x, y in zip(
            jax.tree.leaves(result), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(x, y)


def test_dropout_keeps_nan_from_states_that_may_not_see_it():
    model = layer(dropout=0.5, **DIRECT)
    memories = STATE.at[:, -1].set(jnp.nan)
    causal = jnp.tril(jnp.ones((L, L), bool))
    key = jax.random.key(0)
    run = jax.jit(lambda y: model(STATE, y, association_mask=causal, key=key))
    result, expected = run(memories), run(STATE)
    assert_close(result[:, :-1], expected[:, :-1])
    assert bool(jnp.isnan(result[:, -1]).all())


def test_exactly_one_memory_allowed():
    model = static()
    mask = jnp.zeros((B, S), bool).at[jnp.arange(B), jnp.asarray([0, 3, 6])].set(True)
    result = model(STATE, MEMORIES, mask=mask)
    for b, s in enumerate((0, 3, 6)):
        assert_close(result[b], jnp.broadcast_to(MEMORIES[b, s], (L, D)))


def bias_pattern():
    return BiasPattern(H, D // H, rngs=nnx.Rngs(6))


@pytest.mark.parametrize("memories", ["batch", "shared"])
def test_masked_memories_equal_their_absence(memories):
    model = layer(num_heads=H, bias=bias_pattern(), zero_memory=True)
    stored = MEMORIES if memories == "batch" else MEMORIES[0]
    kept = jnp.asarray([0, 2, 5])
    mask = jnp.zeros(S, bool).at[kept].set(True)
    expected = model(STATE, stored[..., kept, :])
    assert_close(model(STATE, stored, mask=mask), expected)
    full = jnp.broadcast_to(mask, (B, S))
    assert_close(model(STATE, stored, mask=full), expected)
    pairs = jnp.broadcast_to(mask, (L, S))
    for shape in ((L, S), (B, L, S), (B, 1, L, S), (B, H, L, S)):
        seen = jnp.broadcast_to(pairs, shape)
        assert_close(model(STATE, stored, association_mask=seen), expected)
    assert_close(model(STATE, stored, mask=mask, association_mask=pairs), expected)


def test_heads_see_the_memories_of_their_mask():
    model = layer(num_heads=H)
    seen = jax.random.bernoulli(jax.random.key(4), 0.5, (B, H, L, S))
    seen = seen.at[..., 2].set(True)
    weights = model.associate(STATE, MEMORIES, association_mask=seen).weights
    assert float(jnp.where(seen, 0.0, weights).max()) == 0.0
    assert_close(weights.sum(-1), jnp.ones((B, H, L)))


WRONG_MASKS = [
    ({"mask": np.ones((L, S), bool)}, r"mask must have shape \(7,\) or \(3, 7\)"),
    ({"mask": np.ones(S, np.uint8)}, "mask must be boolean.*uint8"),
    ({"mask": np.ones(S, np.float32)}, "mask must be boolean.*float32"),
    ({"mask": "yes"}, "mask must be boolean.*got 'yes'"),
    ({"association_mask": "yes"}, "association_mask must be boolean.*got 'yes'"),
    ({"association_mask": np.ones((S, L), bool)}, "association_mask must have shape"),
    ({"association_mask": np.ones((B, 2, L, S), bool)}, "association_mask must have"),
]


@pytest.mark.parametrize("options, message", WRONG_MASKS)
def test_wrong_masks(untyped, options, message):
    with pytest.raises(ValueError, match=message):
        layer(num_heads=H)(STATE, MEMORIES, **options)


# Learned memories, pooling, zero memory -----------------------------------------------


def test_bias_pattern_and_zero_memory():  # UC-27
    bias = layer(num_heads=H, bias=bias_pattern()).associate(STATE, MEMORIES)
    assert bias.weights.shape == (B, H, L, S + 1)
    zero = layer(num_heads=H, zero_memory=True).associate(STATE, MEMORIES)
    assert zero.weights.shape == (B, H, L, S + 1)
    assert_close(zero.weights.sum(-1), jnp.ones((B, H, L)))
    assert_close(bias.weights.sum(-1), jnp.ones((B, H, L)))


def test_a_zero_memory_is_softmax1():
    zero, null = layer(zero_memory=True), layer(separation="softmax1")
    assert_close(zero(STATE, MEMORIES), null(STATE, MEMORIES))


@pytest.mark.parametrize("make", [HopfieldPooling, HopfieldLayer])
def test_learned_patterns(make):  # UC-31
    def built(seed):
        rngs = nnx.Rngs(seed)
        return make(Hopfield(D, rngs=rngs), 3, rngs=rngs)

    same, again, other = built(0), built(0), built(1)
    for a, b, c in zip(
        *(jax.tree.leaves(nnx.state(m)) for m in (same, again, other)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
        assert bool(jnp.isfinite(a).all())
        assert bool((a != c).any()) or not a.any()  # biases begin at zero
    learned = same.state if make is HopfieldPooling else same.memories
    assert bool((learned[...] != 0).all())
    shape = (1, 3, D) if make is HopfieldPooling else (1, S, D)
    assert same(MEMORIES[:1]).shape == shape
    assert isinstance(same.associate(MEMORIES[:1]), Recall)


def test_pooling_is_association_with_learned_states():
    pool = HopfieldPooling(layer(num_heads=H), 3, rngs=nnx.Rngs(0))
    mask = jnp.arange(S) < 4
    states = jnp.broadcast_to(pool.state[...], (B, 3, D))
    expected = pool.layer(states, MEMORIES, mask=mask)
    assert_close(pool(MEMORIES, mask=mask), expected)


def test_lookup_reads_out_learned_values():
    for inner in (layer(value_size=5), static(value_size=5)):
        model = HopfieldLayer(inner, 9, learn_values=True, rngs=nnx.Rngs(0))
        expected = inner(STATE, model.memories[...], model.targets[...])
        assert_close(model(STATE), expected)
    with pytest.raises(
        ValueError, match="learn_values needs a layer with a value_size"
    ):
        HopfieldLayer(layer(), 9, learn_values=True, rngs=nnx.Rngs(0))


def test_shared_memories_equal_tiled_ones():
    for model in (layer(num_heads=H), static(), layer(**UNTIL_CONVERGED)):
        tiled = jnp.broadcast_to(MEMORIES[0], (B, S, D))
        result = model.associate(STATE, MEMORIES[0])
        expected = model.associate(STATE, tiled)
        assert_close(result.output, expected.output)
        assert_close(result.weights, expected.weights)
        assert_close(model(STATE, MEMORIES[:1]), expected.output)


# Dropout and weights (UC-29, UC-30) ---------------------------------------------------


def test_dropout():
    model = layer(num_heads=H, dropout=0.5)
    key = jax.random.key(0)
    np.testing.assert_array_equal(model(STATE, MEMORIES), model(STATE, MEMORIES))
    one, two = model(STATE, MEMORIES, key=key), model(STATE, MEMORIES, key=key)
    np.testing.assert_array_equal(one, two)
    assert float(abs(one - model(STATE, MEMORIES)).max()) > 1e-3
    assert float(abs(one - model(STATE, MEMORIES, key=jax.random.key(1))).max()) > 1e-3
    details = model.associate(STATE, MEMORIES, key=key)
    np.testing.assert_array_equal(details.output, one)
    expected = model.associate(STATE, MEMORIES).weights
    np.testing.assert_array_equal(details.weights, expected)
    assert_close(expected.sum(-1), jnp.ones((B, H, L)))


def test_dropout_differs_between_heads_and_rows():
    """With constant values and equal weights the output counts the kept weights."""
    model = layer(num_heads=H, dropout=0.5, out_size=0, **DIRECT)
    ones = jnp.ones((B, 64, D), jnp.float32)
    result = model(ones[:, :L], ones, key=jax.random.key(0)).reshape(B, L, H, -1)
    kept = np.asarray(result[..., 0])
    counts = (kept / kept.mean((0, 1))).round(4)
    assert len(np.unique(counts.transpose(0, 2, 1).reshape(B * H, L), axis=0)) == B * H
    masks = np.asarray(dropped(jnp.ones((B, H, L, 64)), 0.5, jax.random.key(0))) == 0
    assert len(np.unique(masks.reshape(-1, 64), axis=0)) == B * H * L
    assert 0.4 < masks.mean() < 0.6


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_dropout_rates(untyped, rate):
    with pytest.raises(ValueError, match="dropout must be in"):
        layer(dropout=rate)
    with pytest.raises(ValueError, match="rate must be in"):
        dropped(STATE, rate, jax.random.key(0))


def test_the_highest_rate_of_dropout():
    result = dropped(STATE, 1 - 2**-53, jax.random.key(0))
    assert not result.any()


@pytest.mark.parametrize("key", [0, np.zeros(2), nnx.Rngs(0), jnp.zeros(3, jnp.int32)])
def test_wrong_random_keys(untyped, key):
    for call in (lambda: dropped(STATE, 0.5, key), lambda: layer()(STATE, key=key)):
        with pytest.raises(ValueError, match="key must be a JAX random key"):
            call()


WRONG_ATTENTION = [
    ({}, {"query": STATE[0]}, "query must have shape .*heads, d.*got"),
    ({}, {"key": patterns(B, S, H, 3)}, "keys and values of queries .*must agree"),
    ({}, {"key": patterns(S, H, 4)}, "keys and values of queries .*must agree"),
    ({}, {"value": patterns(B, L, H, 4)}, "keys and values of queries .*must agree"),
    ({}, {"key": patterns(B, S, 3, 4)}, "keys and values of queries .*must agree"),
    ({}, {"bias": jnp.zeros((L, S))}, r"bias must be None, got shape \(5, 7\)"),
    ({}, {"mask": jnp.ones((L, L), bool)}, "^mask has shape .* does not broadcast"),
    ({}, {"mask": jnp.full((L, S), -jnp.inf)}, "^mask must be boolean, or 1 .*got 35"),
    ({"dropout": 0.5}, {}, "dropout of an association must be 0 .*got 0.5"),
    ({}, {"dropout_rate": 0.5}, "dropout needs a dropout_rng, or deterministic=True"),
    ({"beta": np.ones(3)}, {}, r"beta must be a number or have shape \(4,\)"),
    ({}, {"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\), got 1.0"),
    ({}, {"dropout_rate": 0.5, "dropout_rng": 1}, "key must be a JAX random key"),
    (
        {"ridge": 0.1},
        {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
        "ridge needs no dropout, got ridge 0.1 and dropout_rate 0.5",
    ),
    *(
        (
            {"block": block},
            {name: jnp.zeros((B, 0, H, 4), jnp.float32) for name in ("key", "value")},
            "at least one",
        )
        for block in (None, 4)
    ),
    (
        {},
        {name: patterns(B, S, 0, 4) for name in ("key", "value")},
        "keys and values of queries .*must agree",
    ),
]


@pytest.mark.parametrize("options, call, message", WRONG_ATTENTION)
def test_attention_names_wrong_arguments(untyped, options, call, message):
    arrays = {
        "query": patterns(B, L, H, 4),
        "key": patterns(B, S, H, 4),
        "value": patterns(B, S, H, 4),
    }
    with pytest.raises(ValueError, match=message):
        Association(**options)(**arrays | call)


def test_sparse_layers_have_exact_zeros():  # UC-26
    weights = layer(separation="sparsemax", beta=50.0).associate(STATE).weights
    assert float((weights == 0).mean()) > 0.5


# Kernels and separation losses --------------------------------------------------------


def test_separation_losses_move_the_kernel_alone():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first = Hopfield(D, kernel=True, rngs=rngs)
            self.second = Hopfield(D, kernel=True, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    model = Two(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    losses, gaps = separation_losses(model, STATE)
    features = [STATE, model.first(STATE)]
    expected = [uhop.AverageLoss()(f).mean() for f in features]
    assert_close(losses, jnp.stack(expected))
    number, size = STATE.shape[-2:]
    least = uhop.AverageLoss().least(number, size)
    assert_close(gaps, losses - float(least))
    after = nnx.to_pure_dict(nnx.state(model))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    graphdef, kernels, rest = nnx.split(model, KernelParam, ...)
    assert len(jax.tree.leaves(kernels)) == 2

    def total(kernels, rest, through):
        merged = nnx.merge(graphdef, kernels, rest)
        return separation_losses(merged, STATE, through=through).loss[1]

    slope = jax.jit(jax.grad(total, (0, 1)), static_argnums=2)
    own, others = slope(kernels, rest, False)
    assert float(abs(own["first"]["kernel"]["weights"][...]).max()) == 0
    assert float(abs(own["second"]["kernel"]["weights"][...]).max()) > 0
    assert all(float(abs(x).max()) == 0 for x in jax.tree.leaves(others))
    through, _ = slope(kernels, rest, True)
    assert float(abs(through["first"]["kernel"]["weights"][...]).max()) > 0


@pytest.mark.parametrize(
    "options", [{}, {"kernel": True, "separation": "sparsemax"}, UNTIL_CONVERGED]
)
def test_an_empty_batch(options):
    association = layer(8, num_heads=2, **options)
    nothing = jnp.zeros((0, 3, 8), jnp.float32)
    assert association(nothing).shape == (0, 3, 8)
    mask = jnp.ones((0, 5), bool)
    result = association(nothing, jnp.zeros((0, 5, 8), jnp.float32), mask=mask)
    assert result.shape == (0, 3, 8)


def test_an_empty_bag_is_named_by_its_shape(untyped):
    bags, empty = patterns(2, 3, 8), jnp.zeros((2, 0, 8), jnp.float32)
    for call in (
        lambda: layer(8, num_heads=2)(bags, empty),
        lambda: HopfieldPooling(layer(8), rngs=nnx.Rngs(0))(empty),
        lambda: layer(8, kind=StaticHopfield)(bags, empty),
    ):
        with pytest.raises(ValueError, match=r"at least one pattern.*\(2, 0, 8\)"):
            call()
    result = layer(8, num_heads=2, zero_memory=True).associate(bags, empty)
    assert result.output.shape == (2, 3, 8) and result.weights.shape == (2, 2, 3, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hopfield(4, rngs=jax.random.key(0)), "rngs must be nnx.Rngs"),
        (lambda: HopfieldPooling(layer(4), rngs=0), "rngs must be nnx.Rngs"),
        (lambda: LinearFeatures(4, rngs=None), "rngs must be nnx.Rngs"),
        (lambda: layer(beta="x"), "beta must be a number, got 'x'"),
        (lambda: layer(weight_init=3), "weight_init must be an initializer"),
        (lambda: layer(param_dtype=int), "param_dtype must be a floating dtype"),
        (lambda: layer(dtype="x"), "dtype must be a floating dtype, got 'x'"),
        (lambda: LinearFeatures(0, rngs=nnx.Rngs(0)), "size must be at least 1"),
        (
            lambda: HopfieldPooling(layer(4), sets=3, rngs=nnx.Rngs(0)),
            "sets must be a seq",
        ),
        (lambda: ViH((8, 8, 1), 0, rngs=nnx.Rngs(0)), "classes must be at least 1"),
        (lambda: ViH((8, 8), 2, rngs=nnx.Rngs(0)), "image_shape must be"),
        (
            lambda: ViH((8, 8, 1), 2, rngs=jax.random.key(0)),
            "rngs must be nnx.Rngs",
        ),
        (
            lambda: VisionHopfield((8, 8, 1), 0, rngs=nnx.Rngs(0)),
            "classes must be at least 1",
        ),
        (lambda: STanHop(2, 24, 12, rngs=jax.random.key(0)), "rngs must be nnx.Rngs"),
    ],
)
def test_wrong_arguments_are_named(make, message, untyped):
    with pytest.raises(ValueError, match=message):
        make()


def test_separation_losses_of_a_model_that_is_a_constant_of_a_trace():
    model = layer(8, kernel=True)
    x = patterns(2, 3, 8)
    expected = separation_losses(model, x).loss
    assert_close(jax.jit(lambda x: separation_losses(model, x).loss)(x), expected)

    def total(x):
        return separation_losses(model, x, through=True).loss.sum()

    slope = jax.grad(total)(x)
    assert_close(jax.jit(jax.grad(total))(x), slope)
    assert np.abs(slope).max() > 1e-3


def test_separation_losses_of_layers_in_a_loop_or_a_map():
    x = jax.random.normal(jax.random.key(0), (3, 5, 8), jnp.float32)

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stacked(rngs):
        return Hopfield(8, num_heads=2, kernel=True, rngs=rngs)

    class Scanned(nnx.Module):
        def __init__(self):
            self.layers = stacked(nnx.Rngs(0))

        def __call__(self, x):
            def step(x, layer):
                return x + layer(x)

            return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    class Mapped(Scanned):
        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(
                self.layers, x
            )

    class Listed(nnx.Module):
        def __init__(self, layers, one_after_the_other):
            graph, state = nnx.split(layers)
            parts = [jax.tree.map(lambda x, i=i: x[i], state) for i in range(3)]
            self.layers = nnx.data([nnx.merge(graph, part) for part in parts])
            self.scanned = one_after_the_other

        def __call__(self, x):
            for layer in self.layers:
                y = layer(x)
                x = x + y if self.scanned else x
            return x

    for together in (Scanned(), Mapped()):
        scanned = not isinstance(together, Mapped)
        apart = Listed(together.layers, scanned)
        losses = nnx.jit(separation_losses)
        result, expected = (losses(m, x) for m in (together, apart))
        assert result.loss.shape == (3,)
        jax.tree.map(assert_close, result, expected)
        if scanned:
            assert_close(result.loss, [-3.67165, -3.09467, -2.41936], floor=1e-4)
        slopes = [
            nnx.jit(nnx.grad(lambda m: separation_losses(m, x).loss.sum()))(model)
            for model in (together, apart)
        ]
        kernels = [
            jnp.stack([layer["kernel"]["weights"][...] for layer in layers])
            if i
            else layers["kernel"]["weights"][...]
            for i, layers in enumerate(
                (slopes[0]["layers"], [slopes[1]["layers"][j] for j in range(3)])
            )
        ]
        assert_close(kernels[0], kernels[1])
        assert np.abs(kernels[0]).max() > 1e-2


def test_separation_losses_leave_masked_memories_out():
    model = layer(kernel=True)
    mask, losses = jnp.arange(S) < 4, nnx.jit(separation_losses)
    result = losses(model, STATE, MEMORIES, mask=mask)
    expected = losses(model, STATE, MEMORIES[:, :4])
    assert_close(result.loss, expected.loss)
    assert_close(result.gap, expected.gap)
    pairs = jnp.broadcast_to(mask, (L, S))
    hidden = losses(model, STATE, MEMORIES, association_mask=pairs)
    assert_close(hidden.loss, expected.loss)
    bags = jnp.broadcast_to(mask, (B, S))
    shared = losses(model, STATE, MEMORIES[0], mask=bags)
    assert_close(shared.loss, losses(model, STATE, MEMORIES[0, :4]).loss)
    with pytest.raises(ValueError, match="no Hopfield layer with a kernel"):
        separation_losses(layer(), STATE)


def stacked(rngs):
    """Three layers whose parameters have a leading axis."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return Hopfield(8, num_heads=2, kernel=True, rngs=rngs)

    return make(rngs)


class Scanned(nnx.Module):
    def __init__(self, layers):
        self.layers = layers

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def step(x, layer):
            return x + layer(x)

        return step(x, self.layers)


class Listed(nnx.Module):
    def __init__(self, layers):
        one = [jax.tree.map(lambda x: x[number], layers) for number in range(3)]  # noqa: B023
        self.layers = nnx.data(one)

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Mapped(nnx.Module):
    def __init__(self, layers):
        self.layers = layers

    def __call__(self, x):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)


def test_separation_losses_of_stacked_layers():  # C2-02
    layers = stacked(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 5, 8), jnp.float32)

    def losses(kind):
        """Losses and gaps, and the slope of their sum in each of the three kernels."""
        graphdef, state = nnx.split(kind(layers))

        def total(state):
            result = separation_losses(nnx.merge(graphdef, state), x)
            return result.loss.sum(), result

        slope, result = jax.jit(jax.grad(total, has_aux=True))(state)
        slope = nnx.to_pure_dict(slope)["layers"]
        if kind is Listed:
            slope = jax.tree.map(lambda *x: jnp.stack(x), *slope.values())
        return result, slope["kernel"]["weights"]

    scanned, slope = losses(Scanned)
    assert_close(scanned.loss, [-3.67165, -3.09467, -2.41936], floor=1e-5)
    listed, slopes = losses(Listed)
    assert_close(scanned.loss, listed.loss)
    assert_close(scanned.gap, listed.gap)
    assert_close(slope, slopes)
    mapped, _ = losses(Mapped)
    assert mapped.loss.shape == (3,)
    assert_close(mapped.loss[0], scanned.loss[0])


def test_separation_losses_leave_the_model_unchanged():
    class Random(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.layer = Hopfield(D, kernel=True, rngs=rngs)

        def __call__(self, x):
            return self.layer(self.dropout(x))

    model = Random(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    expected = separation_losses(model, STATE)
    closed = jax.jit(lambda x: separation_losses(model, x))(STATE)
    assert_close(closed.loss, expected.loss)
    slope = jax.grad(lambda x: separation_losses(model, x, through=True).loss.sum())
    assert float(abs(slope(STATE)).max()) > 0
    after = nnx.to_pure_dict(nnx.state(model))
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), before, after))
    assert model.layer.record is None


def test_any_module_can_be_a_kernel():
    features = nnx.Sequential(
        nnx.Linear(D, 24, rngs=nnx.Rngs(0)),
        jax.nn.relu,
        nnx.Linear(24, 6, rngs=nnx.Rngs(1)),
    )
    model = layer(kernel=features, **DIRECT)
    _, kernels, _ = nnx.split(model, KernelParam, ...)
    assert sum(x.size for x in jax.tree.leaves(kernels)) == 24 * (D + 1) + 6 * 25
    assert model(STATE, MEMORIES).shape == STATE.shape
    own = nnx.state(features, KernelParam)  # the caller's module is as it was
    assert not jax.tree.leaves(own)
    with pytest.raises(ValueError, match="keep the dimension"):
        layer(kernel=LinearFeatures(D, 6, rngs=nnx.Rngs(0)))


def test_stage_one_may_move_every_parameter_of_a_kernel():
    class Special(nnx.Param):
        pass

    class Tied(nnx.Module):
        def __init__(self):
            self.first = self.second = Special(jnp.eye(D, dtype=jnp.float32), mark=1)

        def __call__(self, x):
            return x @ self.first[...] @ self.second[...]

    model = layer(kernel=Tied())
    _, kernels, _ = nnx.split(model, KernelParam, ...)
    assert len(jax.tree.leaves(kernels)) == 1  # one kernel in two places
    assert model.kernel.first.get_metadata()["mark"] == 1

    class Hidden(Tied):
        def __init__(self):
            self.first = self.second = nnx.Param(jnp.eye(D, dtype=jnp.float32))
            self.others = nnx.data((Special(jnp.ones(D)),))

    with pytest.raises(ValueError, match="kernel must hold its parameters as"):
        layer(kernel=Hidden())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("alpha", [1.05, 1.9])
def test_a_learned_alpha_starts_where_it_is_told(dtype, alpha):
    start = LearnedAlpha(uhop.Entmax(alpha), param_dtype=dtype)
    assert start.raw[...].dtype == dtype
    assert float(start().alpha) == pytest.approx(alpha, abs=2e-3)


@pytest.mark.parametrize("block", [None, 4])
def test_integers_and_lists_are_arrays(untyped, block):
    states = np.arange(2 * D).reshape(2, D) % 3
    mask = [True, False]
    module = layer(kind=StaticHopfield, block=block)
    expected = module(jnp.asarray(states).astype(float), mask=jnp.asarray(mask))
    assert_close(module(states, mask=mask), expected)


# Robustness ---------------------------------------------------------------------------

WRONG = [
    ({"separation": "reluu"}, "unknown separation 'reluu'; choose one of softmax"),
    ({"separation": jax.nn.softmax}, "separation must be a Separation, its name or"),
    ({"num_heads": 3}, "num_heads 3 must divide state_size 16"),
    ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"steps": 0}, "steps must be at least 1, got 0"),
    ({"beta": -1.0}, "beta must be positive and finite, got -1.0"),
    ({"ridge": (0.1, 50.0)}, r"ridge must be one number, got shape \(2,\)"),
    ({"ridge": jnp.asarray(-0.1)}, "ridge must be positive and finite, got -0.1"),
    ({"ridge": 1.0, "dropout": 0.5}, "block None and dropout 0.5"),
    (
        {"beta": np.ones(3), "num_heads": 4},
        r"beta must be a number or have shape \(4,\)",
    ),
    (
        {"separation": uhop.Entmax(np.ones(3)), "num_heads": 4},
        r"alpha must be a number or have shape \(4,\)",
    ),
    ({"separation": uhop.Entmax(0.5)}, "alpha must be at least 1, got 0.5"),
    ({"kernel": True, "memory_size": 4}, "got state_size 16 and memory_size 4"),
    ({"kernel": "linear"}, "kernel must be True, an nnx.Module"),
    ({"normalize": ("value",)}, "unknown normalize 'value'; choose one of state, mem"),
    ({"value_size": "a"}, "value_size must be an integer, got 'a'"),
    ({"head_size": 0}, "head_size must be at least 1, got 0"),
    ({"out_size": -1}, "out_size must be at least 0, got -1"),
]


@pytest.mark.parametrize("options, message", WRONG)
def test_wrong_options(untyped, options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)


def test_wrong_parts(untyped):
    for make, message in (
        (lambda: Hopfield(D, 4, rngs=nnx.Rngs(0)), "association must be an Assoc.*4"),
        (
            lambda: HopfieldLayer(D, 9, rngs=nnx.Rngs(0)),
            "layer must be a Hopfield or StaticHopfield, got 16",
        ),
        (lambda: LearnedAlpha(uhop.Softmax()), r"with an alpha, got Softmax\(\)"),
        (lambda: LearnedAlpha(uhop.Entmax(2.0)), r"must start within \(1, 2\), got 2"),
        (lambda: BiasPattern(0, 4, rngs=nnx.Rngs(0)), "num_heads must be at least 1"),
        (lambda: layer().separation_features(STATE), "need a layer with a kernel"),
        (lambda: static(value_size=5)(STATE), "must be given .* 5 and memory_size 16"),
        (
            lambda: static()(STATE, MEMORIES[:1], patterns(7, S, D)),
            r"values must have shape \(7, 16\), got \(7, 7, 16\)",
        ),
        (
            lambda: Association().associate(
                *(patterns(S, H, 4) for _ in "qkv"), where=jnp.ones((S,), bool)
            ),
            r"where must have shape \(4, 7, 7\), or 1 .* got \(7,\)",
        ),
        (
            lambda: BagClassifier(5, rngs=nnx.Rngs(0))(STATE),
            r"instances must have shape \(..., S, 5\), got \(3, 5, 16\)",
        ),
        (
            lambda: SequenceModel(9, 6, rngs=nnx.Rngs(0))(jnp.zeros((2, 5, 2), int)),
            r"tokens must be integers of shape \(..., 6, parts\), got int.* \(2, 5",
        ),
        (lambda: static(beta=np.ones(4)), r"beta must be a number or have shape \(1,"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


WRONG_CALLS = [
    ((STATE[..., :4],), r"state must have shape \(..., L, 16\), got \(3, 5, 4\)"),
    ((STATE, MEMORIES[..., :4]), r"memories must have shape \(..., S, 16\)"),
    ((STATE, MEMORIES[:2]), r"memories have shape \(2, 7, 16\), state \(3, 5, 16\)"),
    ((STATE, MEMORIES, MEMORIES), "values need a layer with a value_size"),
    ((STATE, "abc"), "memories must be a numeric array"),
]


@pytest.mark.parametrize("arguments, message", WRONG_CALLS)
def test_wrong_calls(untyped, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer()(*arguments)


@pytest.mark.few(2)
@every_dtype
def test_dtypes(dtype):
    model = layer(num_heads=H, kernel=True, steps=2, param_dtype=dtype)
    state, memories = STATE.astype(dtype), MEMORIES.astype(dtype)
    result = model(state, memories)
    assert result.dtype == dtype
    exact = layer(num_heads=H, kernel=True, steps=2, param_dtype=jnp.float64)
    for leaf, other in zip(
        jax.tree.leaves(nnx.state(exact)),
        jax.tree.leaves(nnx.state(model)),
        strict=True,
    ):
        assert leaf.shape == other.shape
    exact_state = jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(model))
    nnx.update(exact, exact_state)
    expected = exact(state.astype(jnp.float64), memories.astype(jnp.float64))
    assert_close(result, expected, scale=5)


def test_bfloat16_computation_keeps_float32_parameters():
    model = layer(num_heads=H, kernel=True, dtype=jnp.bfloat16, normalize=("state",))
    with jax.numpy_dtype_promotion("standard"):  # Flax's own LayerNorm needs it
        assert model(STATE, MEMORIES).dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {
        jnp.dtype(jnp.float32)
    }


def test_compiles_once(compilations):  # UC-33
    model = layer(num_heads=H, kernel=True, separation=uhop.Entmax(1.5))
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, x):
        return nnx.merge(graphdef, state)(x)

    run(state, STATE)
    before = len(compilations)
    run(jax.tree.map(lambda x: 2 * x, state), STATE)
    # Doubling each parameter compiles, the layer does not.
    assert all(seconds < 1 for seconds in compilations[before:])
    doubled = jax.tree.map(lambda x: 2 * x, state)
    before = len(compilations)
    run(doubled, STATE)
    assert len(compilations) == before


def test_in_linen():
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            bridged = nnx.bridge.ToLinen(
                Hopfield, args=(D,), kwargs={"num_heads": H, "kernel": True}
            )
            return nn.Dense(2)(bridged(x))

    model = Model()
    variables = model.init(jax.random.key(0), STATE)
    result = jax.jit(model.apply)(variables, STATE)
    assert result.shape == (B, L, 2)
    slope = jax.grad(lambda v: model.apply(v, STATE).sum())(variables)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(slope))


def test_patterns_of_a_static_layer_are_normalised_in_the_features():
    kernel = LinearFeatures(D, 3, start="random", rngs=nnx.Rngs(3))
    model = static(normalize=("pattern",), kernel=kernel)
    query, keys = (
        nnx.LayerNorm(3, rngs=nnx.Rngs(0))(kernel(x)) for x in (STATE, MEMORIES)
    )
    weights = jax.nn.softmax(D**-0.5 * jnp.einsum("bld,bsd->bls", query, keys))
    assert_close(model.associate(STATE, MEMORIES).weights, weights)


# Options of the other layers (UC-27) --------------------------------------------------

OTHER_OPTIONS = {
    HopfieldPooling: {"quantity": 2, "sets": (3,)},
    HopfieldLayer: {"quantity": 7, "learn_values": True},
}
OTHERS = [(kind, name) for kind, table in OTHER_OPTIONS.items() for name in table]


@pytest.mark.parametrize("kind", OTHER_OPTIONS)
def test_every_option_of_the_other_layers_is_in_the_table(kind):
    names = set(inspect.signature(kind.__init__).parameters)
    assert set(OTHER_OPTIONS[kind]) == names - {"self", "layer", "rngs"}


@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_every_option_of_the_other_layers_does_something(kind, name):
    options = {"quantity": 5}
    layers = [
        kind(layer(8, **DIRECT), **options | changed, rngs=nnx.Rngs(0))
        for changed in ({}, {name: OTHER_OPTIONS[kind][name]})
    ]
    described = [
        str(jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(model)))
        for model in layers
    ]
    assert described[0] != described[1]


# Separations that others define -------------------------------------------------------


class Powers(uhop.Separation):
    """`e^(alpha z)`, normalised: of nothing that the layers know."""

    alpha: float = 1.5

    def _weights(self, z):
        alpha = jnp.asarray(self.alpha).astype(z.dtype)
        return uhop.Softmax()._weights(alpha[..., None] * z)

    def _conjugate(self, z):
        alpha = jnp.asarray(self.alpha).astype(z.dtype)
        return uhop.Softmax()._conjugate(alpha[..., None] * z) / alpha


def test_layers_take_a_separation_of_the_user():
    for alpha in (1.5, np.asarray([1.1, 1.9, 3.0, 0.5])):
        own = layer(num_heads=H, separation=Powers(alpha), beta=0.4)
        known = layer(num_heads=H, beta=0.4 * alpha)
        result, expected = (m.associate(STATE, MEMORIES) for m in (own, known))
        assert_close(result.output, expected.output)
        assert result.energy.shape == (B, H, L)
    learned = layer(separation=LearnedAlpha(Powers(1.5)), beta=0.4)
    assert_close(learned(STATE, MEMORIES), layer(beta=0.6)(STATE, MEMORIES))
    slope = nnx.grad(lambda model: model(STATE, MEMORIES).sum())(learned)
    assert float(slope["association"]["separation"]["raw"][...]) != 0


def test_separation_features_are_the_kernel_of_what_a_layer_sees():
    model = layer(kernel=True, normalize=("state", "memory"))
    features, where = model.separation_features(STATE, MEMORIES)
    assert where is None
    assert_close(features, model.kernel(model.norm_memory(MEMORIES)))
    mask = jnp.arange(S) < 4
    features, where = model.separation_features(STATE, MEMORIES, mask=mask, states=True)
    states = model.kernel(model.norm_state(STATE))
    assert_close(features[:, :L], states)
    np.testing.assert_array_equal(where[0], jnp.arange(L + S) < L + 4)
    loss = uhop.AverageLoss()(features, where=where).mean()
    losses = separation_losses(model, STATE, MEMORIES, mask=mask, states=True)
    assert_close(losses.loss, loss[None])
    alone = separation_losses(model, STATE, MEMORIES, mask=mask).loss
    assert float(abs(alone - losses.loss)[0]) > 1e-3
