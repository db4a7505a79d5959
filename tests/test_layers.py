"""Layers: what each option does, against attention and against the functional core."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, every_dtype
from flax import nnx

import uhop_jax as uhop
from uhop_jax.layers import (
    Association,
    Hopfield,
    HopfieldAttention,
    HopfieldLayer,
    HopfieldPooling,
    KernelParam,
    LinearFeatures,
    dropped,
    separation_losses,
)
from uhop_jax.models import STanHop, ViH, VisionHopfield

B, L, S, D, H = 3, 5, 7, 16, 4


def patterns(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


STATE, MEMORIES = patterns(B, L, D), patterns(B, S, D, seed=1)


def layer(size=D, seed=0, **options):
    return Hopfield(size, rngs=nnx.Rngs(seed), **options)


def number_of_parameters(model):
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))


# Equality with attention and with the functional core ---------------------------------


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


@pytest.mark.parametrize("bias", [True, False])
def test_softmax_and_direct_values_equal_attention(bias):
    attention = nnx.MultiHeadAttention(
        H, D, decode=False, use_bias=bias, rngs=nnx.Rngs(3), keep_rngs=False
    )
    hopfield = HopfieldAttention(H, D, use_bias=bias, rngs=nnx.Rngs(4))
    for name in ("query", "key", "value", "out"):
        weights = getattr(attention, name).kernel[...]
        getattr(hopfield.association, name).kernel[...] = weights
        if bias:  # biases start at zero
            value = patterns(*getattr(attention, name).bias.shape, seed=9)
            getattr(attention, name).bias[...] = value
            getattr(hopfield.association, name).bias[...] = value
    assert_close(hopfield(STATE, MEMORIES), attention(STATE, MEMORIES))
    assert_close(hopfield(STATE), attention(STATE))
    assert_close(
        hopfield(STATE, MEMORIES, -MEMORIES), attention(STATE, MEMORIES, -MEMORIES)
    )
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (B, 1, L, S))
    mask = mask.at[..., 0].set(True)
    assert_close(
        hopfield(STATE, MEMORIES, mask=mask), attention(STATE, MEMORIES, mask=mask)
    )


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("separation", ["softmax", "softmax1", "entmax", "polynomial"])
def test_values_of_few_states_are_means_of_values(separation, dropout):
    """Few states project the mean they read, many project the memories; both agree."""
    hopfield = layer(separation=separation, dropout=dropout, kernel=True)
    hopfield.value.bias[...] = patterns(1, D, seed=9)
    mask = jnp.asarray(np.arange(S) < np.asarray([[S], [3], [0]]))
    state, key = STATE[:, :1], jax.random.key(5)
    weights = hopfield.associate(state, MEMORIES, mask=mask).weights
    values = hopfield.value(hopfield.key(MEMORIES))
    mean = jnp.einsum("bhls,bshv->blhv", dropped(weights, dropout, key), values)
    result = hopfield(state, MEMORIES, mask=mask, key=key)
    assert_close(result, hopfield.out(mean))
    many = jnp.broadcast_to(state, (B, S, D))
    together = hopfield(many, MEMORIES, mask=mask)
    assert_close(hopfield(state, MEMORIES, mask=mask), together[:, :1])

    def loss(model, state):
        return jnp.sin(model(state, MEMORIES, mask=mask)[:, :1]).sum()

    slopes = [jax.jit(nnx.grad(loss))(hopfield, x) for x in (state, many)]
    for one, other in zip(*map(jax.tree.leaves, slopes), strict=True):
        assert_close(one, other, scale=10)


def attentions(**options):
    """Flax's attention and the Hopfield attention, with the same weights."""
    attention = nnx.MultiHeadAttention(
        H, D, decode=False, keep_rngs=False, rngs=nnx.Rngs(3), **options
    )
    hopfield = HopfieldAttention(
        H, D, decode=False, keep_rngs=False, rngs=nnx.Rngs(3), **options
    )
    return attention, hopfield


def test_start_values_equal_the_start_values_of_attention():
    attention, hopfield = attentions(
        kernel_init=nnx.initializers.normal(), bias_init=nnx.initializers.ones
    )
    assert_close(hopfield(STATE, MEMORIES), attention(STATE, MEMORIES))


@pytest.mark.parametrize("shape", [(L, S), (H, L, S), (B, 1, 1, S), (1, 1, L, S)])
@pytest.mark.parametrize("dtype", [bool, jnp.float32, jnp.int8])
def test_masks_of_attention(shape, dtype):
    attention, hopfield = attentions()
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, shape).at[..., 0].set(True)
    result = hopfield(STATE, MEMORIES, mask=mask.astype(dtype))
    assert_close(result, attention(STATE, MEMORIES, mask=mask))


def test_causal_attention():
    attention, hopfield = attentions()
    result = hopfield(STATE, is_causal=True)
    mask = nnx.make_causal_mask(STATE[..., 0])
    assert_close(result, attention(STATE, mask=mask.astype(bool)))
    np.testing.assert_array_equal(hopfield(STATE, mask=mask), result)
    padding = jnp.ones((B, 1, 1, L), bool).at[1, ..., 3].set(False)
    expected = attention(STATE, mask=mask.astype(bool) & padding)
    assert_close(hopfield(STATE, mask=padding, is_causal=True), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint8], ids=str)
def test_a_traced_mask_of_other_numbers_gives_nan(dtype):
    """No forbidden memory shows: a float mask may mean a term added to overlaps."""
    attention = HopfieldAttention(1, 2, use_bias=False, rngs=nnx.Rngs(0))
    eye = jnp.eye(2)
    for module in ("query", "key", "value", "out"):
        weights = getattr(attention.association, module).kernel
        weights[...] = eye.reshape(weights.shape).astype(weights.dtype)
    query, keys = jnp.asarray([[1.0, 0]], jnp.float32), jnp.eye(2, dtype=jnp.float32)

    @jax.jit
    def attend(mask):
        return attention(query, keys, mask=mask)

    for allowed, expected in (((1, 0), [[1, 0]]), ((0, 1), [[0, 1]])):
        assert_close(attend(jnp.asarray(allowed, dtype)), expected)
    wrong = [(0, 2), (1, 255)]
    if dtype == jnp.float32:
        wrong += [(0, -1e9), (0.5, 1), (-1, 1), (np.nan, 1), (0, -np.inf)]
    for mask in wrong:
        assert np.isnan(attend(jnp.asarray(mask, dtype))).all()
        with pytest.raises(ValueError, match="mask must be boolean, or 1 where a"):
            attention(query, keys, mask=jnp.asarray(mask, dtype))


def test_attention_sows_its_weights():
    attention, hopfield = attentions()
    sown = []
    for model in (attention, hopfield):
        if hasattr(nnx, "capture"):
            call = nnx.capture(model, nnx.Intermediate)
            _, state = call(STATE, MEMORIES, sow_weights=True)
        else:  # an older Flax leaves the weights in the module
            model(STATE, MEMORIES, sow_weights=True)
            state = nnx.pop(model, nnx.Intermediate)
        sown.append(jax.tree.leaves(state["attention_weights"]))
    (expected,), (result,) = sown
    assert_close(result, expected)


@pytest.mark.parametrize("separation", ["softmax", "sparsemax"])
@pytest.mark.parametrize("steps", [1, 3])
def test_static_layers_equal_the_core_bit_for_bit(separation, steps):
    static = layer(static=True, separation=separation, steps=steps, beta=0.7)
    core = uhop.separation_from_name(separation)
    for memories in (MEMORIES, MEMORIES[0]):
        result = static.associate(STATE, memories)
        expected = uhop.retrieve(
            uhop.Model(separation=core, beta=0.7), memories, STATE, steps=steps
        )
        np.testing.assert_array_equal(result.output, expected.state)
        np.testing.assert_array_equal(result.weights, expected.weights)


def test_until_convergence_equals_the_core():
    static = layer(static=True, steps=None, beta=0.5)
    result = static.associate(STATE, MEMORIES)
    expected = uhop.converge(uhop.Model(beta=0.5), MEMORIES, STATE, max_steps=64)
    np.testing.assert_array_equal(result.output, expected.pattern)
    np.testing.assert_array_equal(result.energy, expected.energy)
    np.testing.assert_array_equal(result.steps, expected.steps)
    assert bool(result.converged.all())


def test_the_energy_is_the_energy_of_the_retrieved_state():
    static = layer(static=True, steps=2, beta=0.5)
    result = static.associate(STATE, MEMORIES)
    expected = uhop.energy(uhop.Model(beta=0.5), MEMORIES, result.output)
    assert_close(result.energy, expected)
    assert layer(separation="polynomial").associate(STATE).energy is None


def test_an_identity_kernel_equals_the_plain_layer():
    plain, kernel = layer(num_heads=H), layer(num_heads=H, kernel=True)
    assert_close(kernel(STATE, MEMORIES), plain(STATE, MEMORIES))


@pytest.mark.parametrize("values", ["keys", "direct"])
def test_equals_the_equation_of_the_paper(values):
    """`sep(beta (W_Q Phi(R)) (W_K Phi(Y))^T) W_V W_K Y`, head by head [sec:DL]."""
    kernel = LinearFeatures(D, start="random", rngs=nnx.Rngs(5))
    model = layer(num_heads=H, kernel=kernel, values=values)
    weights = {
        name: np.asarray(getattr(model, name).kernel[...], np.float64)
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
        if values == "direct":
            v = Y @ weights["value"][:, h]
        else:
            raw = np.einsum("sd,dhe->she", Y, weights["key"])
            v = np.einsum("she,hev->sv", raw, weights["value"][:, :, h])
        expected = expected + p @ v @ weights["out"][h]
    assert_close(model(STATE[0], MEMORIES[0]), expected, scale=3)


# Options (UC-27) ----------------------------------------------------------------------

ZEROS = nnx.initializers.zeros
OPTIONS = {
    "memory_size": (12, {}),
    "value_size": (12, {"values": "direct"}),
    "num_heads": (H, {}),
    "head_size": (8, {}),
    "value_head_size": (8, {}),
    "out_size": (8, {}),
    "separation": ("sparsemax", {}),
    "learn_alpha": (True, {"separation": uhop.Entmax(1.5)}),
    "beta": (2.0, {}),
    "learn_beta": (True, {}),
    "steps": (3, {}),
    "max_steps": (2, {"steps": None, "beta": 2.0}),
    "kernel": (True, {}),
    "separate_states": (True, {"kernel": True}),
    "values": ("direct", {}),
    "static": (True, {}),
    "project_out": (False, {}),
    "use_bias": (False, {}),
    "normalize_state": (True, {}),
    "normalize_memory": (True, {}),
    "normalize_value": (True, {"values": "direct"}),
    "normalize_pattern": (True, {}),
    "bias_pattern": (True, {}),
    "zero_memory": (True, {}),
    "weight_init": (ZEROS, {}),
    "bias_init": (nnx.initializers.ones, {}),
    "dropout": (0.5, {}),
    "dtype": (jnp.bfloat16, {}),
    "param_dtype": (jnp.float64, {}),
}


def test_every_option_is_in_the_table():
    parameters = inspect.signature(Hopfield.__init__).parameters
    assert set(OPTIONS) == set(parameters) - {"self", "state_size", "rngs"}


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
    if name == "separate_states":
        losses = [separation_losses(m, STATE, MEMORIES) for m in (plain, changed)]
        assert abs(losses[0].loss - losses[1].loss) > 1e-3
        return
    key = jax.random.key(0)
    results = [m.associate(3 * STATE, 3 * MEMORIES, key=key) for m in (plain, changed)]
    if results[0].output.shape != results[1].output.shape:
        return
    differ = results[0].weights.shape != results[1].weights.shape
    differ |= results[0].output.dtype != results[1].output.dtype
    differ |= bool((results[0].steps != results[1].steps).any()) and name == "max_steps"
    assert differ or float(abs(results[0].output - results[1].output).max()) > 1e-3


def test_one_normalisation_without_the_others():  # UC-28
    flags = [name for name in OPTIONS if name.startswith("normalize")]
    for off in flags:
        options = {name: name != off for name in flags}
        result = layer(values="direct", **options)(STATE, MEMORIES)
        assert bool(jnp.isfinite(result).all())


@pytest.mark.parametrize("beta", [None, 1, 1.0, np.float32(1), np.full(1, 1.0)])
def test_types_of_beta(beta):  # UC-28
    result = layer(beta=beta)(STATE, MEMORIES)
    expected = layer(beta=D**-0.5 if beta is None else 1.0)(STATE, MEMORIES)
    np.testing.assert_array_equal(result, expected)
    assert float(abs(result - layer(beta=2.0)(STATE, MEMORIES)).max()) > 1e-3


def test_the_default_beta():  # UC-28: scores 1, 2, 3 in a head of 4
    static = layer(4, static=True)
    state = jnp.asarray([[1.0, 0, 0, 0]])
    memories = jnp.zeros((3, 4)).at[:, 0].set(jnp.asarray([1.0, 2, 3]))
    weights = static.associate(state, memories).weights
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


@pytest.mark.parametrize("shape", [(), (H,)])
def test_alpha_and_beta_are_learned(shape):
    alpha = jnp.full(shape, 1.3)
    model = layer(
        num_heads=H,
        separation=uhop.Entmax(alpha),
        learn_alpha=True,
        beta=np.full(shape, 0.4),
        learn_beta=True,
    )
    fixed = layer(num_heads=H, separation=uhop.Entmax(1.3), beta=0.4)
    assert_close(model(STATE, MEMORIES), fixed(STATE, MEMORIES), scale=10)
    assert model.alpha.shape == model.log_beta.shape == shape
    graphdef, state = nnx.split(model)

    def loss(state):
        return (nnx.merge(graphdef, state)(STATE, MEMORIES) ** 2).sum()

    slope = jax.grad(loss)(state)
    for name in ("alpha", "log_beta"):
        assert float(abs(slope[name][...]).min()) > 0


# Masks (UC-24, UC-25) -----------------------------------------------------------------


@pytest.mark.parametrize("separation, steps", [("softmax", 1), ("sparsemax", None)])
def test_an_empty_bag_leaves_the_others_alone(separation, steps):
    model = layer(num_heads=H, separation=separation, steps=steps)
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
    assert_close(result[1], jnp.broadcast_to(model.out.bias[...], (L, D)))


@pytest.mark.parametrize("name", ["mask", "association_mask"])
@pytest.mark.parametrize("memories", ["batch", "shared"])
@pytest.mark.parametrize("values", ["keys", "direct"])
def test_memories_hidden_from_all_states_never_show(name, memories, values):
    model = layer(num_heads=H, values=values, dropout=0.5)
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
    model = layer(values="direct", dropout=0.5)
    memories = STATE.at[:, -1].set(jnp.nan)
    causal = jnp.tril(jnp.ones((L, L), bool))
    key = jax.random.key(0)
    run = jax.jit(lambda y: model(STATE, y, association_mask=causal, key=key))
    result, expected = run(memories), run(STATE)
    assert_close(result[:, :-1], expected[:, :-1])
    assert bool(jnp.isnan(result[:, -1]).all())


def test_exactly_one_memory_allowed():
    model = layer(static=True)
    mask = jnp.zeros((B, S), bool).at[jnp.arange(B), jnp.asarray([0, 3, 6])].set(True)
    result = model(STATE, MEMORIES, mask=mask)
    for b, s in enumerate((0, 3, 6)):
        assert_close(result[b], jnp.broadcast_to(MEMORIES[b, s], (L, D)))


@pytest.mark.parametrize("memories", ["batch", "shared"])
def test_masked_memories_equal_their_absence(memories):
    model = layer(num_heads=H, bias_pattern=True, zero_memory=True)
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
    ({"association_mask": np.ones((S, L), bool)}, "association_mask must have shape"),
    ({"association_mask": np.ones((B, 2, L, S), bool)}, "association_mask must have"),
]


@pytest.mark.parametrize("options, message", WRONG_MASKS)
def test_wrong_masks(untyped, options, message):
    with pytest.raises(ValueError, match=message):
        layer(num_heads=H)(STATE, MEMORIES, **options)


# Learned memories, pooling, zero memory -----------------------------------------------


def test_bias_pattern_and_zero_memory():  # UC-27
    bias = layer(num_heads=H, bias_pattern=True).associate(STATE, MEMORIES)
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
        return make(D, 3, rngs=nnx.Rngs(seed))

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
    assert isinstance(same.associate(MEMORIES[:1]), Association)


def test_pooling_is_association_with_learned_states():
    pool = HopfieldPooling(D, 3, num_heads=H, rngs=nnx.Rngs(0))
    mask = jnp.arange(S) < 4
    states = jnp.broadcast_to(pool.state[...], (B, 3, D))
    expected = pool.association(states, MEMORIES, mask=mask)
    assert_close(pool(MEMORIES, mask=mask), expected)


def test_lookup_reads_out_learned_values():
    model = HopfieldLayer(
        D, 9, values="direct", value_size=5, learn_values=True, rngs=nnx.Rngs(0)
    )
    expected = model.association(STATE, model.memories[...], model.targets[...])
    assert_close(model(STATE), expected)
    with pytest.raises(ValueError, match="learn_values needs values='direct'"):
        HopfieldLayer(D, 9, learn_values=True, rngs=nnx.Rngs(0))


def test_shared_memories_equal_tiled_ones():
    for options in ({"num_heads": H}, {"static": True}, {"steps": None}):
        model = layer(**options)
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
    model = layer(num_heads=H, dropout=0.5, project_out=False, values="direct")
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


def test_a_replacement_for_attention_asks_for_rngs():
    model = HopfieldAttention(H, D, dropout_rate=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rngs="):
        model(STATE)
    with_key = model(STATE, rngs=jax.random.key(0))
    assert float(abs(with_key - model(STATE, deterministic=True)).max()) > 1e-3
    result = model(STATE, rngs=nnx.Rngs(dropout=0))
    stream = nnx.Rngs(dropout=0).dropout
    np.testing.assert_array_equal(model(STATE, rngs=stream), result)
    assert float(abs(model(STATE, rngs=stream) - result).max()) > 1e-3
    expected = model(STATE, deterministic=True)
    if hasattr(nnx, "view"):  # not in an older Flax
        np.testing.assert_array_equal(
            nnx.view(model, deterministic=True)(STATE), expected
        )
    model.eval()
    np.testing.assert_array_equal(model(STATE), expected)


WRONG_ATTENTION = [
    ({"in_features": 0}, {}, "in_features must be at least 1, got 0"),
    ({"qkv_features": 6}, {}, "num_heads 4 must divide qkv_features 6"),
    ({"out_features": "a"}, {}, "out_features must be an integer, got 'a'"),
    ({"dropout_rate": 1.0}, {}, r"dropout_rate must be in \[0, 1\), got 1.0"),
    ({"num_kv_heads": 2}, {}, "num_kv_heads must be 4 or None here, got 2"),
    ({"decode": True}, {}, "decode must be False or None here, got True"),
    ({"keep_rngs": True}, {}, "keep_rngs must be False or None here, got True"),
    ({"normalize_qk": True}, {}, "normalize_qk must be False or None here"),
    ({"static": True}, {}, "static must be False or None here, got True"),
    ({}, {"decode": True}, "decode must be False or None here, got True"),
    ({}, {"inputs_q": STATE[..., :4]}, "inputs_q must have shape"),
    ({}, {"inputs_k": STATE[..., :4]}, "inputs_k must have shape"),
    ({}, {"inputs_k": STATE, "inputs_v": MEMORIES}, "inputs_v must have shape"),
    ({}, {"mask": jnp.ones((L, S), bool)}, "^mask has shape .* does not broadcast"),
    ({}, {"mask": jnp.full((L, L), -jnp.inf)}, "^mask must be boolean, or 1 .*got 25"),
    ({"dropout_rate": 0.5}, {"rngs": 0}, "dropout needs rngs=.*got 0"),
]


@pytest.mark.parametrize("options, call, message", WRONG_ATTENTION)
def test_attention_names_wrong_arguments(untyped, options, call, message):
    with pytest.raises(ValueError, match=message):
        sizes = {"num_heads": H, "in_features": D} | options
        HopfieldAttention(**sizes, rngs=nnx.Rngs(0))(**{"inputs_q": STATE} | call)


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
    "options", [{}, {"kernel": True, "separation": "sparsemax"}, {"steps": None}]
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
    options = {"num_heads": 2, "rngs": nnx.Rngs(0)}
    for call in (
        lambda: layer(8, num_heads=2)(bags, empty),
        lambda: HopfieldPooling(8, **options)(empty),
        lambda: HopfieldAttention(2, 8, rngs=nnx.Rngs(0))(bags, empty),
        lambda: layer(8, static=True)(bags, empty),
    ):
        with pytest.raises(ValueError, match=r"at least one pattern.*\(2, 0, 8\)"):
            call()
    result = layer(8, num_heads=2, zero_memory=True).associate(bags, empty)
    assert result.output.shape == (2, 3, 8) and result.weights.shape == (2, 2, 3, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hopfield(4, rngs=jax.random.key(0)), "rngs must be nnx.Rngs"),
        (lambda: HopfieldPooling(4, rngs=0), "rngs must be nnx.Rngs"),
        (lambda: LinearFeatures(4, rngs=None), "rngs must be nnx.Rngs"),
        (lambda: layer(beta="x"), "beta must be a number, got 'x'"),
        (lambda: layer(weight_init=3), "weight_init must be an initializer"),
        (lambda: layer(param_dtype=int), "param_dtype must be a floating dtype"),
        (lambda: layer(dtype="x"), "dtype must be a floating dtype, got 'x'"),
        (lambda: LinearFeatures(0, rngs=nnx.Rngs(0)), "size must be at least 1"),
        (lambda: HopfieldPooling(4, sets=3, rngs=nnx.Rngs(0)), "sets must be a seq"),
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
        result, expected = (separation_losses(m, x) for m in (together, apart))
        assert result.loss.shape == (3,)
        jax.tree.map(assert_close, result, expected)
        if scanned:
            assert_close(result.loss, [-3.67165, -3.09467, -2.41936], floor=1e-4)
        slopes = [
            nnx.grad(lambda model: separation_losses(model, x).loss.sum())(model)
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
    mask = jnp.arange(S) < 4
    result = separation_losses(model, STATE, MEMORIES, mask=mask)
    expected = separation_losses(model, STATE, MEMORIES[:, :4])
    assert_close(result.loss, expected.loss)
    assert_close(result.gap, expected.gap)
    pairs = jnp.broadcast_to(mask, (L, S))
    hidden = separation_losses(model, STATE, MEMORIES, association_mask=pairs)
    assert_close(hidden.loss, expected.loss)
    bags = jnp.broadcast_to(mask, (B, S))
    shared = separation_losses(model, STATE, MEMORIES[0], mask=bags)
    assert_close(shared.loss, separation_losses(model, STATE, MEMORIES[0, :4]).loss)
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
    assert not hasattr(model.layer, "separation_record")


def test_any_module_can_be_a_kernel():
    features = nnx.Sequential(
        nnx.Linear(D, 24, rngs=nnx.Rngs(0)),
        jax.nn.relu,
        nnx.Linear(24, 6, rngs=nnx.Rngs(1)),
    )
    model = layer(kernel=features, values="direct")
    _, kernels, _ = nnx.split(model, KernelParam, ...)
    assert sum(x.size for x in jax.tree.leaves(kernels)) == 24 * (D + 1) + 6 * 25
    assert model(STATE, MEMORIES).shape == STATE.shape
    with pytest.raises(ValueError, match="keeps the dimension"):
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


# Robustness ---------------------------------------------------------------------------

WRONG = [
    ({"separation": "reluu"}, "unknown separation 'reluu'; choose one of softmax"),
    ({"separation": jax.nn.softmax}, "separation must be a Separation or its name"),
    ({"num_heads": 3}, "num_heads 3 must divide state_size 16"),
    ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"steps": 0}, "steps must be at least 1, got 0"),
    ({"values": "both"}, "unknown values 'both'; choose one of keys, direct"),
    ({"beta": -1.0}, "beta must be positive and finite, got -1.0"),
    (
        {"beta": np.ones(3), "num_heads": 4},
        r"beta must be a number or have shape \(4,\)",
    ),
    ({"learn_alpha": True}, "learn_alpha needs an Entmax separation"),
    ({"separation": uhop.Entmax(0.5)}, "alpha must be at least 1, got 0.5"),
    ({"static": True, "num_heads": 4}, "static layer has one head, got num_heads 4"),
    ({"static": True, "memory_size": 4}, "got state_size 16 and memory_size 4"),
    ({"kernel": True, "memory_size": 4}, "got state_size 16 and memory_size 4"),
    ({"kernel": "linear"}, "kernel must be True, an nnx.Module"),
    ({"normalize_value": True}, "normalize_value needs values='direct'"),
    ({"value_size": 4}, "value_size needs values='direct': else it would do nothing"),
    ({"value_size": "a"}, "value_size must be an integer, got 'a'"),
    ({"head_size": 0}, "head_size must be at least 1, got 0"),
    ({"out_size": 3, "project_out": False}, "out_size needs project_out=True"),
    ({"separate_states": True}, "separate_states needs a kernel"),
    ({"static": True, "head_size": 2}, "head_size needs static=False"),
    ({"static": True, "value_head_size": 2}, "value_head_size needs static=False"),
    ({"static": True, "out_size": 3}, "out_size needs static=False"),
    ({"static": True, "project_out": False}, "project_out=False needs static=False"),
    ({"static": True, "use_bias": False}, "use_bias=False needs static=False"),
    ({"static": True, "weight_init": ZEROS}, "weight_init needs static=False"),
    ({"static": True, "bias_init": ZEROS}, "bias_init needs static=False"),
    ({"use_bias": False, "bias_init": ZEROS}, "bias_init needs use_bias=True"),
    ({"max_steps": 5}, "max_steps needs steps=None: else it would do nothing"),
]


@pytest.mark.parametrize("options, message", WRONG)
def test_wrong_options(untyped, options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)


WRONG_CALLS = [
    ((STATE[..., :4],), r"state must have shape \(..., L, 16\), got \(3, 5, 4\)"),
    ((STATE, MEMORIES[..., :4]), r"memories must have shape \(..., S, 16\)"),
    ((STATE, MEMORIES[:2]), r"memories have shape \(2, 7, 16\), state \(3, 5, 16\)"),
    ((STATE, MEMORIES, MEMORIES), "values need a layer with values='direct'"),
]


@pytest.mark.parametrize("arguments, message", WRONG_CALLS)
def test_wrong_calls(untyped, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer()(*arguments)


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
    model = layer(num_heads=H, kernel=True, dtype=jnp.bfloat16, normalize_state=True)
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
    model = layer(static=True, normalize_pattern=True, kernel=kernel, num_heads=1)
    query, keys = (
        nnx.LayerNorm(3, rngs=nnx.Rngs(0))(kernel(x)) for x in (STATE, MEMORIES)
    )
    weights = jax.nn.softmax(D**-0.5 * jnp.einsum("bld,bsd->bls", query, keys))
    assert_close(model.associate(STATE, MEMORIES).weights, weights)


# Options of the other layers (UC-27): a change, and what it needs besides.
OTHER_OPTIONS = {
    HopfieldPooling: {
        "quantity": (2, {}),
        "sets": ((3,), {}),
        "state_size": (12, {}),
    },
    HopfieldLayer: {
        "quantity": (7, {}),
        "memory_size": (12, {}),
        "learn_values": (True, {"values": "direct"}),
    },
    HopfieldAttention: {
        "num_heads": (4, {}),
        "qkv_features": (16, {}),
        "out_features": (12, {}),
        "in_kv_features": (12, {}),
        "dropout_rate": (0.5, {}),
        "deterministic": (True, {"dropout_rate": 0.5}),
        "kernel_init": (ZEROS, {}),
        "bias_init": (nnx.initializers.ones, {}),
        "use_bias": (False, {}),
        "dtype": (jnp.bfloat16, {}),
        "param_dtype": (jnp.float64, {}),
    },
}
OTHERS = [(kind, name) for kind, table in OTHER_OPTIONS.items() for name in table]


def other_layer(kind, **options):
    arguments = {
        HopfieldPooling: {"memory_size": 8},
        HopfieldLayer: {"state_size": 8, "quantity": 5},
        HopfieldAttention: {"num_heads": 2, "in_features": 8},
    }[kind]
    return kind(**(arguments | options), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", OTHER_OPTIONS)
def test_every_option_of_the_other_layers_is_in_the_table(kind):
    names = set(inspect.signature(kind.__init__).parameters)
    first = {"memory_size", "state_size", "in_features"} - set(OTHER_OPTIONS[kind])
    assert set(OTHER_OPTIONS[kind]) == names - {"self", "rngs", "options"} - first


@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_every_option_of_the_other_layers_does_something(kind, name):
    value, base = OTHER_OPTIONS[kind][name]
    layers = other_layer(kind, **base), other_layer(kind, **base, **{name: value})
    described = [
        str(jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(model)))
        for model in layers
    ]
    if described[0] != described[1]:
        return
    x = jax.random.normal(jax.random.key(0), (3, 4, 8), jnp.float32)
    random = {"rngs": nnx.Rngs(1)} if kind is HopfieldAttention else {}
    outputs = [model(x, **random) for model in layers]
    if outputs[0].dtype == outputs[1].dtype:
        assert float(abs(outputs[0] - outputs[1]).max()) > 1e-3


@pytest.mark.parametrize("kind", OTHER_OPTIONS)
def test_options_of_the_association_pass_through_the_other_layers(kind):
    sparse = other_layer(kind, separation="sparsemax", bias_pattern=True)
    assert isinstance(sparse.association.separation, uhop.Sparsemax)
    assert number_of_parameters(sparse) > number_of_parameters(other_layer(kind))
    with pytest.raises((TypeError, ValueError), match="slott"):
        other_layer(kind, slott=3)
