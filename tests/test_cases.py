"""The cases of public bug reports: small inputs and their right values."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TOLERANCES, assert_close, every_dtype, slow_where
from test_separation import naive_conjugate, naive_weights
from test_stage_one import naive_loss, naive_separation

import uhop_jax
from uhop_jax import (
    AverageLoss,
    Cosine,
    DeepLoss,
    Dot,
    Entmax,
    MaximumLoss,
    Model,
    NegativeL1,
    NegativeL2,
    NegativeSquaredL2,
    Noise,
    Polynomial,
    Softmax,
    Softmax1,
    Sparsemax,
    TopK,
    bounded_alpha,
    calibrate,
    calibrate_blind,
    converge,
    energy,
    fit,
    fit_annealed,
    fit_closed_form,
    fit_footprint,
    fit_likelihood,
    fit_sgd,
    fit_values,
    identity_start,
    posterior_mean,
    retrieve,
    retrieve_streamed,
    smallest_separation,
    trajectory,
)

DECIMALS = {"floor": 2e-8}  # expected values are printed to eight digits

SEPARATIONS = [
    Softmax(),
    Softmax1(),
    Sparsemax(),
    Entmax(1.0),
    Entmax(1.5),
    Entmax(3.0),
    Polynomial(10),
    TopK(1),
    TopK(2),
]
every_separation = pytest.mark.parametrize("sep", SEPARATIONS, ids=repr)
XI3 = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
Q = np.array([0.9, 0.2])


@jax.jit
def weights(sep, z, where=None):
    return sep(z, where=where)


@jax.jit
def pull_back(sep, z, cotangent):
    return jax.vjp(sep, z)[1](cotangent)[0]


def xi3(dtype=jnp.float64):
    return jnp.asarray(XI3, dtype), jnp.asarray(Q, dtype)


@every_separation
def test_uc01_all_masked_row(sep):
    z = jnp.asarray([[-jnp.inf] * 3, [0.2, 1.0, 0.5]])
    cotangent = jnp.asarray([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    p = weights(sep, z)
    gradient = pull_back(sep, z, cotangent)
    assert (p[0] == 0).all()
    assert (gradient[0] == 0).all()
    assert_close(p[1], naive_weights(sep, z[1]))
    alone = pull_back(sep, jnp.stack([z[1], z[1]]), cotangent)
    np.testing.assert_array_equal(gradient[1], alone[1])


@pytest.mark.few(6)
@every_dtype
@pytest.mark.parametrize(
    ("sep", "expected"),
    [
        (Sparsemax(), [0.35, 0, 0.65, 0]),
        (Softmax(), [0.42555748, 0, 0.57444252, 0]),
        (Entmax(1.5), None),
    ],
    ids=repr,
)
def test_uc02_partly_masked_row(sep, expected, dtype):
    z = jnp.asarray([0.2, -jnp.inf, 0.5, -jnp.inf], dtype)
    if expected is None:
        expected = naive_weights(sep, z)
    assert_close(weights(sep, z), expected, **DECIMALS)
    gradient = pull_back(sep, z, jnp.asarray([1, 2, 3, 4], dtype))
    assert jnp.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[jnp.array([1, 3])], 0)
    assert gradient[0] != 0


@pytest.mark.few(5)
@every_separation
def test_uc03_huge_logits(sep):
    z = jnp.asarray([1.36762051e8, 1.59594639e8], jnp.float32)
    expected = [0.0, 1.0]
    if isinstance(sep, Polynomial):  # homogeneous: only ratios matter
        expected = naive_weights(sep, z)
    assert_close(weights(sep, z), expected)
    assert jnp.isfinite(pull_back(sep, z, jnp.asarray([1, 2], jnp.float32))).all()
    z = jnp.asarray([1e30, 0, -1e30], jnp.float32)
    assert_close(weights(sep, z), [1, 0, 0])
    assert jnp.isfinite(pull_back(sep, z, jnp.asarray([1, 2, 3], jnp.float32))).all()


@every_dtype
def test_uc04_threshold_of_sparsemax(dtype):
    z = jnp.asarray([[0.175, 0, -2, -2], [0.3, 0.1, 0, -0.5]], dtype)
    expected = [[0.5875, 0.4125, 0, 0], [0.5, 0.3, 0.2, 0]]
    assert_close(weights(Sparsemax(), z), expected)
    rows = np.random.default_rng(0).normal(size=(1000, 50))
    total = weights(Sparsemax(), jnp.asarray(rows, dtype)).astype(jnp.float64).sum(-1)
    unit = max(1e-5, 10 * float(jnp.finfo(dtype).eps))
    np.testing.assert_allclose(total, 1, atol=unit)


RELATIVE = {dtype: 8 * float(jnp.finfo(dtype).eps) for dtype in TOLERANCES}


@pytest.mark.few(6)
@every_dtype
@pytest.mark.parametrize("sep", [Softmax(), Sparsemax(), Entmax(1.5)], ids=repr)
def test_uc05_equal_values(sep, dtype):
    for n in (1, 3, 512):
        p = weights(sep, jnp.full(n, 5.0, dtype))
        np.testing.assert_allclose(p.astype(jnp.float64), 1 / n, rtol=RELATIVE[dtype])


UC06 = [
    (1.0, 0.57611688),
    (1.00001, 0.57611945),
    (1.0001, 0.57614256),
    (1.01, 0.57869699),
    (1.1, 0.60306722),
    (1.5, 0.74025307),
    (1.75, 0.85537881),
    (2.0, 1.0),
]


@every_dtype
@pytest.mark.parametrize(("alpha", "third"), UC06)
def test_uc06_alpha_near_and_at_one(alpha, third, dtype):
    z = jnp.asarray([0, 0, 1], dtype)
    first = (1 - third) / 2
    traced, known = weights(Entmax(alpha), z), Entmax(alpha)(z)
    assert_close(traced, [first, first, third], **DECIMALS)
    np.testing.assert_array_equal(traced, known)


@pytest.mark.parametrize("alpha", [0.9, 0.0, -1.0, np.nan])
def test_uc07_alpha_out_of_range(alpha):
    memories, query = xi3()
    for call in (
        lambda: Entmax(alpha)(query),
        lambda: retrieve(Model(separation=Entmax(alpha), beta=1.0), memories, query),
    ):
        with pytest.raises(ValueError, match=f"alpha must be at least 1, got {alpha}"):
            call()
    assert jnp.isnan(weights(Entmax(alpha), query)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_uc07_a_learned_alpha_stays_in_range(dtype):
    z = jnp.asarray([0.0, 0.0, 1.0], dtype)

    def loss(raw):
        alpha = bounded_alpha(raw)
        return alpha + Entmax(alpha)(z)[2], alpha

    def step(raw, _):
        gradient, alpha = jax.grad(loss, has_aux=True)(raw)
        return raw - gradient, (raw, alpha)

    start = jnp.asarray(0.0, dtype)
    raw, (_, alphas) = jax.jit(lambda raw: jax.lax.scan(step, raw, length=300))(start)
    assert jnp.isfinite(raw)
    assert ((alphas > 1) & (alphas < 2)).all()
    assert alphas[-1] < 1.05
    assert jnp.isfinite(weights(Entmax(alphas[-1]), z)).all()


@pytest.mark.parametrize(
    ("z", "alpha", "expected", "derivative"),
    [
        (
            [0, 0, 1],
            1.5,
            [0.12987346, 0.12987346, 0.74025307],
            [-0.20518682, -0.20518682, 0.41037363],
        ),
        (
            [-1, 0, 0.5],
            1.33,
            [0.04598203, 0.32763225, 0.62638572],
            [-0.25616772, -0.01140231, 0.26757003],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_uc08_derivative_in_alpha(z, alpha, expected, derivative, dtype):
    z, alpha = jnp.asarray(z, dtype), jnp.asarray(alpha, dtype)
    assert_close(weights(Entmax(alpha), z), expected, **DECIMALS)
    for jacobian in (jax.jacfwd, jax.jacrev):
        actual = jacobian(lambda alpha: weights(Entmax(alpha), z))(alpha)
        assert_close(actual, derivative, **DECIMALS)


def test_uc09_alpha_per_row_and_head():
    z = jnp.asarray([[0.5, 1.0], [1.5, 2.0]])
    alphas = jnp.asarray([1.5, 2.0])
    expected = [[0.32600736, 0.67399264], [0.25, 0.75]]
    assert_close(weights(Entmax(alphas), z), expected, **DECIMALS)
    scores = jnp.broadcast_to(z[None, :, None], (3, 2, 5, 2))  # (B, H, L, S)
    p = weights(Entmax(alphas[:, None]), scores)
    assert_close(p, np.broadcast_to(np.asarray(expected)[:, None], p.shape), **DECIMALS)
    with pytest.raises(ValueError, match=r"alpha has shape \(3,\).*\(3, 2, 5\)"):
        Entmax(jnp.asarray([1.5, 2.0, 1.2]))(scores)


@pytest.mark.parametrize("sep", [Softmax1(), Entmax(1.5), TopK(2)], ids=repr)
def test_uc10_any_shape(sep, untyped):
    ones = jnp.ones((2, 3))
    over_last, over_first = naive_weights(sep, ones), naive_weights(sep, ones.T).T
    assert_close(sep(ones), over_last)
    assert_close(jnp.moveaxis(sep(jnp.moveaxis(ones, 0, -1)), -1, 0), over_first)

    x = np.random.default_rng(0).normal(size=(6, 4))
    assert_close(sep(x.T[::2]), naive_weights(sep, x.T[::2]))
    five = x.reshape(1, 2, 3, 2, 2)
    assert_close(sep(five), naive_weights(sep, five))
    integers = np.array([[3, 1, 2], [0, 0, 5]])
    assert_close(sep(integers), naive_weights(sep, integers))
    assert sep(jnp.ones((0, 3))).shape == (0, 3)
    assert "axis" not in inspect.signature(sep).parameters


def test_uc11_gradient_at_ties_and_on_the_boundary():
    def jacobians(z):
        return jax.jacfwd(Sparsemax())(z), jax.jacrev(Sparsemax())(z)

    forward, reverse = jax.jit(jacobians)(jnp.ones(3))
    assert_close(forward, np.eye(3) - 1 / 3)
    assert_close(reverse, forward)
    forward, reverse = jax.jit(jacobians)(jnp.asarray([1.0, 0.0]))
    np.testing.assert_array_equal(forward, reverse)
    allowed = [np.zeros((2, 2)), np.array([[0.5, -0.5], [-0.5, 0.5]])]
    assert any(np.array_equal(forward, one) for one in allowed)
    second = jax.jit(jax.jacfwd(jax.jacrev(Sparsemax())))(jnp.ones(3))
    np.testing.assert_array_equal(second, 0)


@every_dtype
@pytest.mark.parametrize(
    ("z", "expected"),
    [
        ([0, 0], [1 / 3, 1 / 3]),
        ([2, 2], [0.46831053, 0.46831053]),
        ([1000, 0], [1, 0]),
        ([-200, -200], [0, 0]),
    ],
)
def test_uc12_softmax1(z, expected, dtype):
    z = jnp.asarray(z, dtype)
    assert_close(weights(Softmax1(), z), expected, **DECIMALS)
    assert jnp.isfinite(pull_back(Softmax1(), z, jnp.asarray([1, 2], dtype))).all()


@every_dtype
def test_uc13_top_k(dtype, untyped):
    z = jnp.asarray([-3, -2, -1, -0.5, -0.1], dtype)
    np.testing.assert_array_equal(weights(TopK(1), z), [0, 0, 0, 0, 1])
    expected = [0, 0, 0, 0.40131234, 0.59868766]
    assert_close(weights(TopK(2), z), expected, **DECIMALS)
    tied = weights(TopK(2), jnp.asarray([1, 1, 1, 0], dtype))
    np.testing.assert_array_equal(np.sort(tied), [0, 0, 0.5, 0.5])
    for k, message in [(0, "at least 1"), (6, "at most 5"), (0.1, "an integer")]:
        with pytest.raises(ValueError, match=f"k must be {message}, got {k}"):
            TopK(k)(z)


def test_uc14_polynomial():
    p = weights(Polynomial(10), jnp.asarray([-2, 1, 0.5]))
    assert_close(p, [0, 0.99902439, 0.00097561], **DECIMALS)
    p = weights(Polynomial(10), jnp.asarray([1e4, 9e3], jnp.float32))
    assert_close(p, [0.74146659, 0.25853341])


@every_dtype
@pytest.mark.parametrize(
    ("similarity", "expected"),
    [
        (NegativeL2(), [0.30965826, 0.68915714, 0.0011846]),
        (NegativeL1(), [0.30999912, 0.68991574, 0.00008514]),
        (NegativeSquaredL2(), [0.31002552, 0.68997448, 0]),
    ],
    ids=repr,
)
def test_uc15_sign_of_distances(similarity, expected, dtype):
    memories = jnp.asarray([[0, 0], [1, 0], [5, 5]], dtype)
    query = jnp.asarray([0.9, 0], dtype)
    result = retrieve(Model(similarity, beta=1.0), memories, query)
    assert_close(result.weights, expected, **DECIMALS)
    assert result.weights.argmax() == 1


SIMILARITIES = [Dot(), Cosine(), NegativeSquaredL2(), NegativeL2(), NegativeL1()]
every_similarity = pytest.mark.parametrize("similarity", SIMILARITIES, ids=repr)


@every_similarity
def test_uc16_query_equals_a_stored_pattern(similarity):
    memories, _ = xi3(jnp.float32)

    def overlaps(memories, query):
        return similarity(memories, query)

    z = overlaps(memories, memories[0])
    assert jnp.isfinite(z).all()
    by_memory, by_query = jax.jit(jax.jacrev(overlaps, (0, 1)))(memories, memories[0])
    assert jnp.isfinite(by_memory).all()
    assert jnp.isfinite(by_query).all()
    if similarity not in (Dot(), Cosine()):
        assert z[0] == 0
        assert (by_query[0] == 0).all()
        assert (by_memory[0] == 0).all()

    def retrieved(memories, query):
        return retrieve(Model(similarity, beta=2.0), memories, query, steps=2).state

    for gradient in jax.jit(jax.jacrev(retrieved, (0, 1)))(memories, memories[0]):
        assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("separation", "beta", "expected"),
    [
        (Softmax(), 5.0, [0.9919441, 0.73322514]),
        (Softmax(), 2.0, [0.90994924, 0.63482614]),
        (Entmax(1.5), 2.0, [1, 0.64]),
        (Entmax(2.0), 2.0, [1, 0.7]),
        (Sparsemax(), 2.0, [1, 0.7]),
        (Sparsemax(), 0.5, [0.93333333, 0.58333333]),
    ],
)
def test_uc17_beta_goes_inside(separation, beta, expected):
    state, _ = retrieve(Model(separation=separation, beta=beta), *xi3())
    assert_close(state, expected, **DECIMALS)


@every_separation
def test_uc17_weights_sum_to_one(sep):
    total = retrieve(Model(separation=sep, beta=5.0), *xi3()).weights.sum()
    assert_close(total, 1.0) if sep.normalized else (0 < total < 1)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1, [0.90994924, 0.63482614]),
        (2, [0.88770242, 0.80531196]),
        (3, [0.87626527, 0.85410007]),
        (5, [0.8706711, 0.86916203]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_uc18_number_of_updates(steps, expected, dtype):
    memories, query = xi3(dtype)
    state = retrieve(Model(beta=2.0), memories, query, steps=steps).state
    assert_close(state, expected, **DECIMALS)
    states = trajectory(Model(beta=2.0), memories, query, steps=5).patterns
    np.testing.assert_array_equal(states[0], query)
    assert_close(states[steps], expected, **DECIMALS)


@every_dtype
def test_uc18_to_convergence_and_zero_steps(dtype):
    result = converge(Model(beta=2.0), *xi3(dtype))
    assert result.converged
    assert_close(result.pattern, [0.8701053, 0.8701053], **DECIMALS)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        retrieve(Model(beta=2.0), *xi3(dtype), steps=0)


@pytest.mark.parametrize(
    ("separation", "expected"),
    [
        (Softmax(), [-0.97869086, -1.11262172, -1.13184811, -1.13342739]),
        (Entmax(1.5), [-0.78433333, -0.94758828, -0.99562847, -0.99996409]),
        (Sparsemax(), [-0.72, -0.955, -1, -1]),
    ],
    ids=repr,
)
def test_uc19_energy(separation, expected):
    memories, query = xi3()
    energies = trajectory(
        Model(separation=separation, beta=2.0), memories, query, steps=3
    ).energies
    assert_close(energies, expected, **DECIMALS)
    alone = energy(Model(separation=separation, beta=2.0), memories, query)
    assert_close(alone, expected[0], **DECIMALS)
    if separation == Softmax():
        constants = np.log(3) / 2 + (XI3**2).sum(-1).max() / 2
        with_constants = [0.57061529, 0.43668442, 0.41745803, 0.41587875]
        assert_close(energies + constants, with_constants, **DECIMALS)


def test_uc20_low_beta_gives_the_mean():
    result = retrieve(Model(beta=1e-6), *xi3())
    assert_close(result.state, [0.66666667, 0.66666667], floor=1e-6)


@pytest.mark.parametrize("beta", [1e-4, 1.0])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float32])
def test_uc20_raw_images(beta, dtype, untyped):
    images = np.random.default_rng(0).integers(0, 256, (10, 784), dtype=np.uint8)
    memories = images.astype(dtype)
    state, p = retrieve(Model(beta=np.float32(beta)), memories, memories[3])
    assert jnp.isfinite(state).all()
    assert_close(p.sum(), 1.0, floor=1e-6)
    effective = 1 / (p**2).sum()
    assert 1 - 1e-6 <= effective <= 10 + 1e-5


def test_uc21_gradient_through_three_updates():
    memories, query = xi3()

    def state(beta):
        return retrieve(Model(beta=beta), memories, query, steps=3).state

    for jacobian in (jax.jacfwd, jax.jacrev):
        assert_close(jax.jit(jacobian(state))(2.0), [0.09815701, 0.1015218], **DECIMALS)


def test_uc21_gradient_at_convergence():
    memories, query = xi3()

    def state(beta, query):
        return converge(Model(beta=beta), memories, query).pattern

    jacobian = jax.jit(jax.jacrev(state, (0, 1)))
    by_beta, by_query = jacobian(2.0, query)
    assert_close(by_beta, [0.10357808, 0.10357808], **DECIMALS)
    np.testing.assert_array_equal(by_query, 0)
    betas = jnp.asarray([2.0, 3.0])
    mapped, _ = jax.vmap(jacobian, (0, None))(betas, query)
    assert_close(mapped[0], [0.10357808, 0.10357808], **DECIMALS)
    assert_close(jax.jit(jax.jacfwd(state))(2.0, query), by_beta)


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, 21.79601522), (2, 24.98326348), (3, 25.84465414)]
)
def test_uc22_hetero_association(steps, expected):
    values = jnp.asarray([[10.0], [20.0], [30.0]])
    state, _ = retrieve(Model(beta=2.0), *xi3(), values=values, steps=steps)
    assert_close(state, [expected], **DECIMALS)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("rows", [(4, 7), (1, 7), (7,), ()])
def test_uc23_memory_shared_by_the_batch(count, rows):
    rng = np.random.default_rng(0)
    memories = jnp.asarray(rng.normal(size=(count, 3)))
    query = jnp.asarray(rng.normal(size=(*rows, 3)))
    result = retrieve(Model(beta=2.0), memories, query, steps=2)
    assert result.state.shape == query.shape
    assert result.weights.shape == (*rows, count)
    with_axis = retrieve(Model(beta=2.0), memories[None], query, steps=2)
    np.testing.assert_array_equal(with_axis.state, result.state)
    if rows:
        tiled = jnp.broadcast_to(memories, (rows[0], count, 3))
        assert_close(
            retrieve(Model(beta=2.0), tiled, query, steps=2).state, result.state
        )


KEY = jax.random.key(0)
PUBLIC_CALLS = {
    "retrieve": lambda x, q, sep: retrieve(
        Model(separation=sep, beta=2.0), x, q, steps=3
    ),
    "retrieve_streamed": lambda x, q, sep: retrieve_streamed(
        Model(separation=sep, beta=2.0), x, q, block=2
    ),
    "converge": lambda x, q, sep: converge(Model(separation=sep, beta=2.0), x, q),
    "trajectory": lambda x, q, sep: trajectory(Model(separation=sep, beta=2.0), x, q),
    "energy": lambda x, q, sep: energy(Model(separation=sep, beta=2.0), x, q),
    "AverageLoss": lambda x, q, sep: AverageLoss()(x),
    "smallest_separation": lambda x, q, sep: smallest_separation(x),
    "fit": lambda x, q, sep: fit(x, optimizer=optax.sgd(0.1), steps=2),
    "fit_sgd": lambda x, q, sep: fit_sgd(x, relative_rate=0.1, steps=2),
    "fit_annealed": lambda x, q, sep: fit_annealed(KEY, x, steps=2, restarts=1),
    "fit_closed_form": lambda x, q, sep: fit_closed_form(x),
    "fit_likelihood": lambda x, q, sep: fit_likelihood(KEY, x, Noise(0.1), copies=4),
    "fit_footprint": lambda x, q, sep: fit_footprint(KEY, x, Noise(0.1), pairs=4),
    "fit_values": lambda x, q, sep: fit_values(
        Model(separation=sep, beta=2.0), x, ridge=0.1
    ),
    "posterior_mean": lambda x, q, sep: posterior_mean(Noise(0.3), x, q),
    "calibrate": lambda x, q, sep: calibrate(
        KEY, x, Noise(0.3), queries=8, separations=(sep,), candidates={"dot": Dot()}
    ),
    "calibrate_blind": lambda x, q, sep: calibrate_blind(
        x, x, candidates={"dot": Dot()}
    ),
    "weights": lambda x, q, sep: sep(q),
    "conjugate": lambda x, q, sep: sep.conjugate(q),
    "bounded_alpha": lambda x, q, sep: bounded_alpha(q),
    "gram": lambda x, q, sep: Dot().gram(x),
    **{repr(s): lambda x, q, sep, s=s: s(x, q) for s in SIMILARITIES},
}
ON_HOST = {"calibrate", "calibrate_blind", "fit_closed_form"}  # they choose by numbers
NO_FLOATS = {  # no floats in, or no floats out but the floats in
    *("check", "load", "save", "memory_mesh", "shard_memories"),
    *("gaussian_start", "identity_start"),
    *("loss_from_name", "separation_from_name", "similarity_from_name"),
}


def test_uc32_every_public_function_is_called():
    functions = {name for name in uhop_jax.__all__ if name[0].islower()}
    assert functions - NO_FLOATS <= PUBLIC_CALLS.keys()


@slow_where(lambda name, dtype: name == "calibrate_blind" and dtype == jnp.float64)
@pytest.mark.parametrize("name", PUBLIC_CALLS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_uc32_dtypes_are_kept(name, dtype):
    promotion = "standard" if name.startswith("fit") else "strict"  # as Optax needs
    with jax.numpy_dtype_promotion(promotion):
        if name in ON_HOST:
            result = PUBLIC_CALLS[name](*xi3(dtype), Entmax(1.5))
        else:  # dtypes need no numbers
            result = jax.eval_shape(PUBLIC_CALLS[name], *xi3(dtype), Entmax(1.5))
    kinds = (jax.Array, jax.ShapeDtypeStruct)
    arrays = [x for x in jax.tree.leaves(result) if isinstance(x, kinds)]
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats
    assert {x.dtype for x in floats} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("sep", [Softmax(), Entmax(1.3), Sparsemax()], ids=repr)
def test_uc32_float64_is_exact(sep):
    memories, query = xi3()
    state = Q
    for _ in range(3):
        state = naive_weights(sep, 2.0 * XI3 @ state) @ XI3
    result = retrieve(Model(separation=sep, beta=2.0), memories, query, steps=3)
    np.testing.assert_allclose(result.state, state, rtol=0, atol=1e-12)
    expected = Q @ Q / 2 - naive_conjugate(sep, 2.0 * XI3 @ Q) / 2
    actual = energy(Model(separation=sep, beta=2.0), memories, query)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)

    streamed = retrieve_streamed(
        Model(separation=sep, beta=2.0), memories, query, steps=3, block=2
    )
    np.testing.assert_allclose(streamed.state, state, rtol=0, atol=1e-12)


PATTERNS = np.random.default_rng(3).normal(size=(5, 4))


@pytest.mark.parametrize("kind", [AverageLoss, MaximumLoss, DeepLoss])
@pytest.mark.parametrize("normalize", [True, False])
def test_uc32_float64_losses_are_exact(kind, normalize):
    loss = kind(t=1.3, normalize=normalize)
    expected = naive_loss(PATTERNS, loss)
    actual = loss(jnp.asarray(PATTERNS))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
    separation = smallest_separation(jnp.asarray(PATTERNS))
    np.testing.assert_allclose(separation, naive_separation(PATTERNS), atol=1e-12)


def naive_step(W, rate, t):
    """One step of Algorithm 1 on the average loss of features, not normalised."""
    features = PATTERNS @ W.T
    difference = features[:, None] - features[None]
    share = np.exp(-t * (difference**2).sum(-1)) * (1 - np.eye(len(PATTERNS)))
    share /= share.sum()
    slope = -4 * t * (share[..., None] * difference).sum(1)
    return W - rate * PATTERNS.shape[1] * slope.T @ PATTERNS


@pytest.mark.parametrize("path", ["gram", "weights"])
def test_uc32_float64_fits_are_exact(path):
    memories, W = jnp.asarray(PATTERNS), np.asarray(identity_start(4).weights)
    for _ in range(3):
        W = naive_step(W, 1e-2, 0.3)
    loss = AverageLoss(t=0.3, normalize=False)
    options = {"relative_rate": 1e-2, "loss": loss, "path": path}
    kernel = fit_sgd(memories, steps=3, **options).kernel
    np.testing.assert_allclose(kernel.weights, W, rtol=0, atol=1e-12)
    assert abs(W - identity_start(4).weights).max() > 1e-2
    C = PATTERNS.T @ PATTERNS / len(PATTERNS)
    A = np.linalg.inv(C + np.trace(C) / 4 * np.eye(4))
    W = np.asarray(fit_closed_form(memories, ridge=1.0).weights)
    np.testing.assert_allclose(W.T @ W, A, rtol=0, atol=1e-12)


@pytest.mark.parametrize("call", [retrieve, converge, energy, trajectory])
def test_uc33_one_program_for_many_betas_and_alphas(call, compilations):
    memories, query = jnp.ones((4, 11)), jnp.ones((2, 11))  # shapes of no other test
    counts = []
    for beta in (1.0, 2.0, 3.0):
        for alpha in (1.2, 1.6):
            call(Model(separation=Entmax(alpha), beta=beta), memories, query)
            counts.append(len(compilations))
    assert counts[0] > 0
    assert counts[1:] == counts[:1] * 5


@pytest.mark.parametrize("separation", [[1.5], lambda z: z, Softmax, "softmax", None])
def test_uc33_objects_that_are_no_separation_are_refused(separation, untyped):
    with pytest.raises(ValueError, match="separation must be one of Softmax, .*, got"):
        retrieve(Model(separation=separation, beta=1.0), *xi3())


def test_public_names_exist():
    assert all(hasattr(uhop_jax, name) for name in uhop_jax.__all__)
