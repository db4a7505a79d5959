"""STanHop-Net against its specification: sizes, symmetries, layers, external memory."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close
from flax import nnx
from scipy.optimize import brentq

from uhop_jax.layers import KernelParam, LinearFeatures, separation_losses
from uhop_jax.models import STanHop, TuneAndPlay
from uhop_jax.models.stanhop import segments_of
from uhop_jax.models.stanhop_parts import Merge

SMALL = {"size": 8, "mlp_size": 12, "num_heads": 2, "segment": 4, "pooled": 3}
PLAIN = {"separation": "softmax"}  # compiles in a third of the time of entmax


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax's own layers mix dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def small(series=3, in_len=12, out_len=8, *, seed=0, dtype=jnp.float64, **options):
    options = SMALL | options
    return STanHop(
        series, in_len, out_len, param_dtype=dtype, rngs=nnx.Rngs(seed), **options
    )


run = nnx.jit(lambda model, *inputs, **options: model(*inputs, **options))


def windows(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def count(*arguments, **options):
    model = nnx.eval_shape(lambda: STanHop(*arguments, rngs=nnx.Rngs(0), **options))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model)))


def kernels(size, **options):
    return lambda: LinearFeatures(
        size, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **options
    )


# Series, horizon, scales: parameters of the release, of the paper's preset, with U-Hop.
COUNTS = [
    (7, 96, 1, 4_800_814, 4_869_923, 5_590_819),
    (12, 96, 1, 4_828_974, 4_898_083, 5_618_979),
    (7, 336, 2, 8_007_752, 8_263_734, 9_443_382),
    (7, 720, 2, 8_065_096, 8_566_838, 9_746_486),
]


@pytest.mark.parametrize(
    "series, horizon, scales, released, paper, uhop",
    [COUNTS[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in COUNTS[1:])],
)
def test_parameter_counts(series, horizon, scales, released, paper, uhop):
    model = functools.partial(count, series, 168, horizon, scales=scales)
    assert model() == paper
    assert model(kernel=kernels(256)) == uhop
    dead = 3 * scales + 4 * (scales + 1)  # an unused scalar in each layer
    assert model(preset="released") == released - dead


SHAPES = [
    {"in_len": 13, "out_len": 7},
    {"series": 1},
    {"in_len": 3},
    {"in_len": 20, "scales": 2},
    pytest.param({"in_len": 20, "scales": 3, "merge": 4}, marks=pytest.mark.slow),
    pytest.param({"in_len": 20, "scales": 4, "merge": 1}, marks=pytest.mark.slow),
    {"preset": "released", "in_len": 13, "scales": 2},
    {"separation": "softmax", "dtype": jnp.float32},
]


@pytest.mark.few(3)
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_shapes(options):
    def forecast():
        model = small(**options)
        series, in_len, _ = model.sizes
        return model(jnp.ones((2, in_len, series)), key=jax.random.key(0))

    shape = nnx.eval_shape(forecast).shape
    assert shape == (2, options.get("out_len", 8), options.get("series", 3))


EVERY = {"residual_mean": True, "pool_queries": "shared", "alpha_per_head": True}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"preset": "released"}, EVERY], ids=str)
def test_every_parameter_is_learned(options):
    model, x = small(**options), windows(2, 12, 3)

    @nnx.jit
    @nnx.grad
    def slopes(model):
        return jnp.square(model(x, key=jax.random.key(0))).mean()

    for path, slope in nnx.to_flat_state(slopes(model)):
        unused = options != EVERY and "pool" in path and "key" not in path
        moved = bool(jnp.isfinite(slope[...]).all() & (slope[...] != 0).any())
        assert moved or unused, path


def test_first_step_fills_the_first_segment():
    x = windows(1, 5, 2)
    cut = segments_of(x, 4)
    assert cut.shape == (1, 2, 2, 4)
    np.testing.assert_array_equal(cut[0, 1, 0], [x[0, 0, 1]] * 4)
    np.testing.assert_array_equal(cut[0, 1, 1], x[0, 1:, 1])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "segments, number, order",
    [(3, 2, [0, 1, 2, 2]), (5, 4, [0, 1, 2, 3, 4, 2, 3, 4]), (1, 4, [0, 0, 0, 0])],
)
def test_merging_repeats_the_last_segments(segments, number, order):
    model = small(in_len=4 * segments, scales=2, merge=number)
    merge = model.merges[0]
    tokens = windows(1, segments, 8)
    filled = jnp.take(tokens, jnp.asarray(order), axis=1)
    whole = Merge.__call__(merge, filled)
    np.testing.assert_array_equal(merge(tokens), whole)


def naive_entmax(z, alpha):
    if alpha == 1:
        e = np.exp(z - z.max())
        return e / e.sum()

    def p(tau):
        return np.maximum((alpha - 1) * z - tau, 0) ** (1 / (alpha - 1))

    top = (alpha - 1) * z.max()
    return p(brentq(lambda tau: p(tau).sum() - 1, top - 1, top, xtol=1e-15))


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_a_layer_is_the_double_loop(alpha):
    """GSH: four linear maps, values of projected keys, one update per head."""
    options = {"separation": "softmax"} if alpha == 1 else {}
    if alpha == 2:
        options = {"separation": "sparsemax"}
    model = small(alpha_start=math.log(0.3 / 0.7), **options)
    layer = model.decoder[0].cross
    if alpha in (1.3, 1.5):
        raw = layer.association.separation.raw
        raw[...] = jnp.asarray(math.log((alpha - 1) / (2 - alpha)))
    maps = layer.projections
    R, Y = np.asarray(windows(5, 8)), np.asarray(windows(4, 8, seed=1))

    def linear(x, part, shape):
        weights = np.asarray(part.kernel[...]).reshape(shape)
        return x @ weights + np.asarray(part.bias[...]).reshape(-1)

    q, k = (linear(x, part, (8, 8)) for x, part in ((R, maps.query), (Y, maps.key)))
    v = linear(k, maps.value, (8, 8))
    heads = np.zeros((5, 8))
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        for i in range(5):
            scores = np.array([q[i, part] @ k[m, part] for m in range(4)]) / 2
            heads[i, part] = naive_entmax(scores, alpha) @ v[:, part]
    assert_close(layer(jnp.asarray(R), jnp.asarray(Y)), linear(heads, maps.out, (8, 8)))


@pytest.mark.few(2)
@pytest.mark.parametrize("alpha", [1 + 1e-9, 1.5, 2 - 1e-9])
def test_gradient_of_alpha(alpha):
    layer = small(alpha_start=0.0).encoder[0].time
    learned = layer.association.separation.raw
    raw = math.log((alpha - 1) / (2 - alpha))
    tokens = windows(6, 8)

    def value(layer, tokens):
        return jnp.square(layer(tokens)).sum()

    def at(raw):
        learned[...] = jnp.asarray(raw)
        return value(layer, tokens)

    h = 1e-4
    expected = (at(raw + h) - at(raw - h)) / (2 * h)
    learned[...] = jnp.asarray(raw)

    def slope_of(tokens):
        return nnx.grad(value)(layer, tokens).association.separation.raw[...]

    slope = slope_of(tokens)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-9)
    assert np.isfinite(slope_of(jnp.ones((6, 8))))


def test_alpha_of_each_layer_starts_at_its_own_value():
    state = nnx.to_flat_state(nnx.state(small()))
    alphas = [p for path, p in state if path[-2:] == ("separation", "raw")]
    raw = np.array([float(variable[...]) for variable in alphas])
    assert len(raw) == 11 and len(set(raw)) == 11 and np.abs(raw).max() < 4


def permuted(model, order):
    """A copy of the model with its series in another order."""
    copy = nnx.clone(model)
    for array in (copy.positions, copy.start):
        array[...] = array[...][order]
    return copy


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_order_of_series(preset):
    model, order = small(preset=preset, **PLAIN), jnp.asarray([2, 0, 1])
    x = windows(2, 12, 3)
    output = run(permuted(model, order), x[..., order])
    difference = np.abs(output - run(model, x)[..., order]).max()
    # The release mixes heads with tokens, so that it is not equivariant.
    assert difference < 1e-10 if preset == "paper" else difference > 1e-3


def test_without_the_series_layer_a_series_is_alone():
    model = small(**PLAIN)
    x = windows(1, 12, 3)
    other = x.at[..., 1].add(1.0)
    assert np.abs(run(model, other) - run(model, x))[..., 0].max() > 1e-6
    for block in (model.encoder[0], *(layer.block for layer in model.decoder)):
        out = block.across.projections.out
        for part in (out.kernel, out.bias):
            part[...] = jnp.zeros_like(part[...])
    np.testing.assert_array_equal(run(model, other)[..., 0], run(model, x)[..., 0])


def test_kernels():
    """At the start a model with kernels is the plain one; Stage I moves them alone."""
    x = windows(2, 12, 3)
    model = small(kernel=kernels(8), **PLAIN)
    assert_close(run(model, x), run(small(**PLAIN), x))
    losses = nnx.jit(separation_losses)(model, x).loss
    assert losses.shape == (11,)
    slopes = jax.jit(
        jax.grad(
            lambda state: separation_losses(nnx.merge(graphdef, state), x).loss.sum()
        )
    )
    graphdef, state = nnx.split(model)
    for path, slope in nnx.to_flat_state(slopes(state)):
        is_kernel = isinstance(slope, KernelParam)
        assert bool((slope[...] != 0).any()) == is_kernel, path


@pytest.mark.slow  # most of a minute
def test_a_small_model_overfits():
    options = {"size": 32, "mlp_size": 64, "num_heads": 4, "segment": 6, "dropout": 0.0}
    model = STanHop(2, 24, 24, pooled=3, rngs=nnx.Rngs(0), **options)
    graphdef, state = nnx.split(model)
    t = jnp.arange(64 + 48, dtype=jnp.float32)
    rows = jnp.stack([jnp.sin(t / 3), jnp.cos(t / 5)], 1)
    rows += 0.1 * jax.random.normal(jax.random.key(0), rows.shape, jnp.float32)
    place = jnp.arange(64)[:, None] + jnp.arange(48)
    x, y = jnp.split(rows[place], 2, axis=1)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 400))

    def error(state):
        return jnp.abs(nnx.merge(graphdef, state)(x) - y).mean()

    @jax.jit
    def fit(state):
        def step(carry, _):
            state, moments = carry
            value, slope = jax.value_and_grad(error)(state)
            moves, moments = optimizer.update(slope, moments)
            return (optax.apply_updates(state, moves), moments), value

        return jax.lax.scan(step, (state, optimizer.init(state)), length=400)[1]

    assert fit(state)[-1] < 0.05


def test_plug_and_play_memory():
    model = small(**PLAIN, scales=1)
    x, bank = windows(2, 12, 3), windows(5, 12, 3, seed=1)
    plain = run(model, x)
    assert_close(run(model, x, bank=bank[:0]), plain)
    without = nnx.jit(lambda model: model(x, bank=bank, bank_weight=0.0))
    assert_close(without(model), plain)
    output = run(model, x, bank=bank)
    assert np.abs(output - plain).max() > 1e-3
    assert_close(run(model, x, bank=bank[::-1]), output)
    # The memory read by hand, from the parts of the block.
    block, tokens = model.encoder[0], model.embedded(x)
    over_time = block.over_time(tokens, None)
    stored = block.over_time(model.embedded(bank), None)
    memories = jnp.moveaxis(stored, 0, 1).reshape(3, -1, 8)
    for series in range(3):
        read = block.time(over_time[1, series], memories[series])
        expected = block.norms[0](over_time[1, series] + 0.5 * read)
        given = block._from_bank(over_time, memories, 0.5)[1, series]
        assert_close(given, expected)


def test_tune_and_play_memory():
    backbone = small(**PLAIN, scales=1)
    past, futures = windows(6, 12, 3, seed=1), windows(6, 8, 3, seed=2)
    model = TuneAndPlay(backbone, past, futures, beta=2e3, rngs=nnx.Rngs(0))
    x = jnp.concatenate([past[2:4], windows(1, 12, 3, seed=3)])
    assert_close(run(model, x), run(backbone, x))  # the gate is closed
    labels = nnx.jit(lambda model, x: model.pseudo_labels(x))
    np.testing.assert_allclose(labels(model, x)[:2], futures[2:4], atol=1e-5)
    order = jnp.asarray([5, 3, 1, 0, 2, 4])
    mixed = TuneAndPlay(
        backbone, past[order], futures[order], beta=2e3, rngs=nnx.Rngs(0)
    )
    np.testing.assert_allclose(labels(mixed, x), labels(model, x), rtol=1e-4, atol=1e-5)
    # Stage I reaches the kernel of the memory alone.
    phi = LinearFeatures(12, rngs=nnx.Rngs(0))
    options = {"kernel": phi, "rngs": nnx.Rngs(0)}
    own = small(kernel=kernels(8), **PLAIN, scales=1)
    with_kernel = TuneAndPlay(own, past, futures, **options)
    assert nnx.jit(separation_losses)(with_kernel, x).loss.shape == (1,)
    model.gate[...] = jnp.ones_like(model.gate[...])

    @nnx.jit
    def loss(model):
        return jnp.square(model(x)).sum()

    assert abs(loss(model) - loss(backbone)) > 1e-3
    moved = {
        path[0]
        for path, g in nnx.to_flat_state(nnx.jit(nnx.grad(loss))(model))
        if (g[...] != 0).any()
    }
    assert "backbone" not in moved and {"gate", "embed"} <= moved


WRONG = [
    (lambda: small(preset="authors"), "unknown preset 'authors'; choose one of paper"),
    (lambda: small(in_len=0), "in_len must be at least 1, got 0"),
    (lambda: small(num_heads=3), "num_heads 3 must divide state_size 8"),
    (lambda: small(pool_queries="own"), "unknown pool_queries 'own'"),
    (lambda: small()(windows(2, 9, 3)), r"inputs must have shape \(..., 12, 3\), got"),
    (
        lambda: small()(windows(2, 12, 3), bank=windows(2, 12, 4)),
        r"bank must have shape \(..., 12, 3\), got \(2, 12, 4\)",
    ),
    (
        lambda: TuneAndPlay(
            small(), windows(4, 12, 3), windows(3, 8, 3), rngs=nnx.Rngs(0)
        ),
        r"futures must have shape \(4, 8, 3\), got \(3, 8, 3\)",
    ),
]


@pytest.mark.parametrize("make, message", WRONG)
def test_errors(untyped, make, message):
    with pytest.raises(ValueError, match=message):
        make()
