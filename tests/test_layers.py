"""Layers: what each option does, and what is refused."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, every_dtype
from flax import nnx
from jaxtyping import ArrayLike
from layer_parts import (
    MEMORIES,
    OF_ASSOCIATION,
    STATE,
    UNTIL_CONVERGED,
    B,
    D,
    H,
    L,
    S,
    layer,
    number_of_parameters,
    patterns,
    static,
)

import uhop_jax as uhop
from uhop_jax.layers import (
    Association,
    BiasPattern,
    Hopfield,
    HopfieldLayer,
    HopfieldPooling,
    LearnedAlpha,
    LinearFeatures,
    Recall,
    StaticHopfield,
    dropped,
)
from uhop_jax.layers import recall as heads
from uhop_jax.models import (
    BagClassifier,
    SequenceModel,
    STanHop,
    ViH,
    VisionHopfield,
)

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


# Empty inputs and wrong arguments -----------------------------------------------------


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
