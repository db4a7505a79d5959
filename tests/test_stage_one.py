"""Stage I: losses, gradient descent, closed form, and U-Hop+."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, slow_where
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from uhop_jax import (
    AverageLoss,
    DeepLoss,
    LinearKernel,
    LowRankKernel,
    Mask,
    MaximumLoss,
    fit,
    fit_annealed,
    fit_closed_form,
    fit_likelihood,
    fit_sgd,
    gaussian_start,
    identity_start,
    smallest_separation,
)
from uhop_jax.closed_form import whitenings
from uhop_jax.losses import LOSSES, SeparationLoss, loss_from_name

KEY = jax.random.key(0)
VARIANTS = [
    AverageLoss(),
    AverageLoss(pairs="all"),
    AverageLoss(normalize=False),
    AverageLoss(normalize=False, pairs="all"),
    MaximumLoss(),
    MaximumLoss(normalize=False),
    DeepLoss(),
    DeepLoss(pairs="all"),
    DeepLoss(normalize=False),
    DeepLoss(normalize=False, pairs="all"),
]


def all_pairs(loss):
    return getattr(loss, "pairs", "distinct") == "all"


every_variant = pytest.mark.parametrize("loss", VARIANTS, ids=repr)
every_space = pytest.mark.parametrize(
    "loss", [loss for loss in VARIANTS if not all_pairs(loss)], ids=repr
)
every_kind = pytest.mark.parametrize("kind", LOSSES.values())
of_distances = pytest.mark.parametrize("kind", [AverageLoss, MaximumLoss])
few_examples = settings(deadline=None, max_examples=25)
some_features = npst.arrays(np.float64, (5, 3), elements=st.floats(-2, 2, width=16))


@pytest.fixture
def standard_promotion():
    """Optax's Adam multiplies arrays of unlike dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def draw(*shape, seed=0, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def naive_loss(features, loss):
    if len(features) < 2:
        return 0.0
    features = np.asarray(features)
    if loss.normalize:
        features = [f / np.linalg.norm(f) for f in features]
    exponents = []
    for (u, f), (v, g) in itertools.product(enumerate(features), repeat=2):
        if u == v and not all_pairs(loss):
            continue
        if isinstance(loss, DeepLoss):
            exponents.append(2 * loss.t * ((f @ g) ** 2 - 1))
        else:
            exponents.append(-loss.t * ((f - g) ** 2).sum())
    if isinstance(loss, MaximumLoss):
        return max(exponents)
    top = max(exponents)
    return top + np.log(np.mean(np.exp(np.asarray(exponents) - top)))


def naive_separation(features):
    unit = [f / np.linalg.norm(f) for f in np.asarray(features)]
    return min(1 - f @ g for f, g in itertools.combinations(unit, 2))


# The losses.


@jax.jit
def value_of(loss, features, where=None):
    return loss(features, where=where)


@jax.jit
def slope_of(loss, features, where=None):
    return jax.grad(lambda features: loss(features, where=where))(features)


@pytest.mark.few(3)
@slow_where(all_pairs)
@every_variant
def test_loss_is_the_double_loop_over_batches_and_valid_patterns(loss):
    loss = dataclasses.replace(loss, t=1.3)
    features = draw(2, 3, 5, 4)
    where = np.ones((2, 3, 5), bool)
    where[0, 1, 3:] = where[1, 0, 1:] = where[1, 2] = False
    padded = jnp.where(where[..., None], features, jnp.nan)
    unmasked = loss(features)
    masked = loss(padded, where=jnp.asarray(where))
    assert unmasked.shape == masked.shape == (2, 3)
    for index in np.ndindex(2, 3):
        assert_close(unmasked[index], naive_loss(features[index], loss))
        valid = features[index][where[index]]
        assert_close(masked[index], naive_loss(valid, loss))


@every_space
def test_loss_has_the_slope_of_finite_differences(loss):
    features, where = draw(4, 3), jnp.asarray([True, True, False, True])
    slope = slope_of(loss, features, where)
    for index in np.ndindex(4, 3):
        step = 1e-5 * (np.arange(12) == 3 * index[0] + index[1]).reshape(4, 3)
        up, down = (value_of(loss, features + x, where) for x in (step, -step))
        assert_close(slope[index], (up - down) / 2e-5, floor=1e-7)
    padded = slope_of(loss, features.at[2].set(jnp.nan), where)
    assert_close(padded, slope)
    assert not slope[2].any()


@every_variant
def test_loss_has_a_slope_in_t(loss):
    def of_t(t):
        return dataclasses.replace(loss, t=t)(draw(4, 3))

    slope = jax.jit(jax.grad(of_t))(2.0)
    assert_close(slope, (of_t(2 + 1e-5) - of_t(2 - 1e-5)) / 2e-5, floor=1e-7)


@every_space
def test_loss_of_coincident_features_has_finite_gradients(loss):
    for features in (jnp.zeros((4, 3)), jnp.ones((4, 3)), draw(4, 3).at[0].set(0.0)):
        where = jnp.ones(4, bool)
        assert np.isfinite(value_of(loss, features, where))
        assert np.isfinite(slope_of(loss, features, where)).all()


@every_variant
@few_examples
@given(features=some_features, scale=st.floats(0.1, 10), seed=st.integers(0, 99))
def test_loss_invariances(loss, features, scale, seed):
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    value = value_of(loss, features)
    for same in (-features, rng.permutation(features), features @ rotation):
        assert_close(value_of(loss, same), value)
    scaled = value_of(loss, scale * features)
    if loss.normalize:
        assert_close(scaled, value)
    elif not isinstance(loss, DeepLoss):  # larger features have a lower loss
        assert (value - scaled) * np.sign(scale - 1) >= -1e-10


@of_distances
@few_examples
@given(weights=some_features)
def test_unnormalised_loss_is_even_with_its_maximum_at_zero(kind, weights):
    memories = draw(4, 3)

    def loss(weights):
        features = LinearKernel(jnp.asarray(weights)).memory_features(memories)
        return value_of(kind(normalize=False), features)

    assert loss(weights) == loss(-weights)
    assert loss(0 * weights) == 0 >= loss(weights)


@of_distances
def test_loss_is_not_convex(kind):
    weights, memories = draw(2, 3, seed=1), draw(4, 3)
    ends, middle = (
        kind(normalize=False)(memories @ w.T) for w in (weights, 0 * weights)
    )
    assert middle > ends + 0.1  # the chord from -W to W is below the loss at 0


@few_examples
@given(features=some_features, normalize=st.booleans())
def test_average_loss_tends_to_the_maximum(features, normalize):
    t = 1e4
    average, maximum = (
        value_of(kind(t, normalize), features) / t
        for kind in (AverageLoss, MaximumLoss)
    )
    assert maximum - np.log(20) / t - 1e-12 <= average <= maximum + 1e-12


@pytest.mark.parametrize("tau", [0.05, 0.1, 0.25, 1.0])
def test_average_loss_equals_the_loss_of_u_hop_plus(tau):
    features = draw(6, 4)
    unit = np.asarray(features) / np.linalg.norm(features, axis=-1, keepdims=True)
    cosines = (unit @ unit.T)[~np.eye(6, dtype=bool)]
    expected = np.log(np.mean(np.exp(cosines / tau))) - 1 / tau
    assert_close(AverageLoss(1 / (2 * tau))(features), expected)


FAR = {
    "two": np.array([[512695.0], [512804.0]]),
    "two groups": np.array([[0, 3], [1, 3], [10**4, 7], [10**4, 8.5]]),
}


@pytest.mark.few(2)
@of_distances
@pytest.mark.parametrize("far", FAR.values(), ids=FAR)
def test_distances_of_far_features_do_not_cancel(far, kind):
    loss, t = kind(normalize=False), 2.0
    features, d = jnp.asarray(far, jnp.float32), far.shape[1]
    assert_close(loss(features), naive_loss(far, loss))
    expected = naive_loss(far, kind(t * d, normalize=False))  # W = sqrt(d) I
    for path in ("weights", "gram"):
        fitted = fit_sgd(features, relative_rate=1e-9, steps=1, path=path, loss=loss)
        assert_close(fitted.loss[0], expected, floor=5e-3)  # the features are rounded
    if d == 1:
        moved = 1e-9 * d * 2 * t * (far[1] - far[0]) ** 2
        assert_close(fitted.kernel.weights, [1 + moved])


def simplex(vertices):
    """A regular simplex, in one dimension less than it has vertices."""
    centred = np.eye(vertices) - 1 / vertices
    return jnp.asarray(np.linalg.qr(centred)[1][:-1].T)


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        (AverageLoss, simplex(14)),
        (MaximumLoss, simplex(14)),
        (MaximumLoss, jnp.concatenate([jnp.eye(3), -jnp.eye(3)])),
        (DeepLoss, jnp.eye(5)[:3]),
        (DeepLoss, simplex(3)),  # more than can be orthogonal
    ],
)
def test_bound_of_the_loss_is_attained(kind, features):
    M, D = features.shape
    loss = kind(t=2.0)
    bound = loss.least(M, D)
    assert_close(loss(3 * features), bound)
    if M == 14:
        assert_close(bound, -4 * 14 / 13)
    elif M <= D:
        assert_close(bound, -4.0)


@pytest.mark.few(3)
@every_variant
def test_no_loss_is_below_its_bound(loss):
    """Also where gradient descent has separated as far as it can."""
    rate = 0.3 if loss.normalize else 1e-3

    @jax.jit
    def separated(features):
        step = lambda _, x: x - rate * slope_of(loss, x)  # noqa: E731
        return loss(jax.lax.fori_loop(0, 50, step, features))

    for M, D in ((1, 2), (2, 1), (4, 6), (9, 3)):
        assert separated(draw(M, D)) >= loss.least(M, D) - 1e-9
    bounds = loss.least(jnp.asarray([0, 1, 2, 5]), 4)
    assert_close(bounds[:2], np.zeros(2))
    assert (bounds[2:] < 0).all()


class MeanCosine(SeparationLoss):
    """The mean cosine of distinct features, a loss as a user would write it."""

    of_inner_products = True

    def _exponents(self, pairs):
        return self.t * pairs

    def _reduce(self, exponents, valid, distinct):
        counted = valid & distinct
        total = jnp.where(counted, exponents, 0.0).sum((-2, -1))
        return total / jnp.maximum(counted.sum((-2, -1), dtype=total.dtype), 1.0)

    def _least(self, M, D):
        return -0.5 / jnp.maximum(M - 1, 1.0)


def test_a_loss_is_a_subclass():
    loss, memories = MeanCosine(t=1.0), draw(M, D)
    unit = np.asarray(memories) / np.linalg.norm(memories, axis=-1, keepdims=True)
    expected = (unit @ unit.T)[~np.eye(M, dtype=bool)].mean()
    assert_close(loss(memories), expected)
    for path in ("gram", "weights"):
        fitted = fit_sgd(memories, loss=loss, relative_rate=5, steps=300, path=path)
        assert_close(fitted.loss[0], expected)
        assert_close(fitted.loss[-1], loss.least(M, D), floor=1e-3)


def test_smallest_separation_is_the_double_loop():
    features = draw(2, 3, 5, 4)
    separation = smallest_separation(features)
    for index in np.ndindex(2, 3):
        assert_close(separation[index], naive_separation(features[index]))
    assert_close(smallest_separation(jnp.asarray([[1.0, 2.0], [-2.0, -4.0]])), 2.0)


# Gradient descent.

D, M = 6, 4
STARTS = {
    "identity": identity_start(D),
    "gaussian": LinearKernel(draw(D, D)),
    "wide": LinearKernel(draw(9, D)),
}
RATES = {
    "constant": 0.02,
    "array": np.linspace(0.03, 0.01, 8),
    "decay": optax.exponential_decay(0.05, 3, 0.5),
    "python schedule": lambda count: 0.02,
}


def rates_of(rate, steps):
    if callable(rate):
        return np.asarray([rate(n) for n in range(steps)])
    return np.broadcast_to(rate, steps)


def reference_sgd(memories, weights, rates, momentum, loss):
    """Algorithm 1 as it is written: all weights from `W_0` to `W_N`."""
    path, velocity = [np.asarray(weights)], 0
    for rate in rates:
        slope = slope_of(loss, np.asarray(memories) @ path[-1].T)
        velocity = momentum * velocity + np.asarray(slope).T @ memories
        path.append(path[-1] - rate * D * velocity)
    return np.stack(path)


def relative(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@slow_where(lambda loss: not isinstance(loss, AverageLoss) or all_pairs(loss))
@pytest.mark.parametrize(
    "loss",
    [
        *(loss for loss in VARIANTS if loss.normalize != all_pairs(loss)),
        MaximumLoss(normalize=False),
    ],
    ids=repr,
)
def test_sgd_is_algorithm_1_in_both_spaces(loss):
    memories = 0.3 * draw(M, D)
    for name, rate, momentum in [
        ("identity", 1e-3, 0.0),
        ("gaussian", optax.exponential_decay(2e-3, 3, 0.5), 0.9),
    ]:
        start = STARTS[name].weights
        expected = reference_sgd(memories, start, rates_of(rate, 8), momentum, loss)
        assert np.linalg.norm(expected[-1] - start) > 1e-3
        options = {"relative_rate": rate, "momentum": momentum, "start": STARTS[name]}
        for path in ("gram", "weights"):
            fitted = fit_sgd(
                memories, steps=8, path=path, snapshots=range(9), loss=loss, **options
            )
            moved = np.asarray(fitted.snapshots.weights) - expected[:1]
            assert relative(moved, expected - expected[:1]) < 1e-9
            assert_close(fitted.kernel.weights, expected[-1])
            features = jnp.asarray(memories @ np.swapaxes(expected, 1, 2))
            assert_close(fitted.loss, loss(features))
            assert_close(fitted.delta_min, smallest_separation(features))
            if not momentum:  # a small rate
                assert fitted.loss[-1] < fitted.loss[0]
                falls = (np.diff(fitted.loss) < 0).all()
                assert falls or isinstance(loss, MaximumLoss)


@pytest.mark.parametrize(
    ("rate", "momentum", "optimizer"),
    [
        ("constant", 0.0, optax.sgd(RATES["constant"] * D)),
        ("decay", 0.9, optax.sgd(lambda n: RATES["decay"](n.astype(int)) * D, 0.9)),
    ],
)
def test_sgd_is_optax_sgd(rate, momentum, optimizer, standard_promotion):
    memories, start, rate = draw(M, D), STARTS["wide"], RATES[rate]
    expected = fit(memories, optimizer=optimizer, steps=8, start=start)
    moved = expected.kernel.weights - start.weights
    for path in ("gram", "weights", "auto"):
        options = {
            "relative_rate": rate,
            "steps": 8,
            "momentum": momentum,
            "path": path,
        }
        fitted = fit_sgd(memories, start=start, **options)
        assert relative(fitted.kernel.weights - start.weights, moved) < 1e-9
        assert_close(fitted.loss, expected.loss)
        assert_close(fitted.delta_min, expected.delta_min)
        single = fit_sgd(memories.astype(jnp.float32), start=start, **options)
        assert single.kernel.weights.dtype == single.loss.dtype == jnp.float32
        assert relative(single.kernel.weights - start.weights, moved) < 1e-2


def test_a_traced_momentum_out_of_range_gives_nan():
    fit = jax.jit(
        lambda x: fit_sgd(draw(5, 3), relative_rate=0.1, steps=2, momentum=x).loss
    )
    for momentum, fitted in ((0.5, True), (1.0, False), (-0.1, False)):
        assert np.isfinite(fit(momentum)[-1]) == fitted


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
def test_rates_are_numbers_or_schedules(rate):
    options = {"steps": 8, "start": STARTS["wide"], "path": "gram"}
    fitted = fit_sgd(draw(M, D), relative_rate=rate, **options)
    same = fit_sgd(draw(M, D), relative_rate=rates_of(rate, 8), **options)
    jax.tree.map(assert_close, fitted, same)


@pytest.mark.parametrize("path", ["gram", "weights"])
def test_snapshots_are_shorter_runs(path):
    memories, options = draw(M, D), {"relative_rate": 0.01, "path": path}
    marks = (0, 8, 3, 0, 7, 7, 1, 2, 8)  # unordered and repeated
    fitted = fit_sgd(memories, steps=8, snapshots=marks, **options)
    assert fitted.snapshots.weights.shape == (9, D, D)
    by_mark = dict(zip(marks, fitted.snapshots.weights, strict=True))
    for mark, weights in zip(marks, fitted.snapshots.weights, strict=True):
        np.testing.assert_array_equal(weights, by_mark[mark])
    shorter = fit_sgd(memories, steps=3, **options)
    assert shorter.snapshots is None
    assert shorter.loss.shape == shorter.delta_min.shape == (4,)
    assert_close(shorter.loss, fitted.loss[:4])
    assert_close(by_mark[0], identity_start(D).weights)
    assert_close(by_mark[3], shorter.kernel.weights)
    assert_close(by_mark[8], fitted.kernel.weights)
    assert len({float(w.sum()) for w in by_mark.values()}) == 6


def test_rows_are_normalised_at_the_end_alone():
    memories, options = draw(M, D), {"relative_rate": 0.01, "steps": 3, "path": "gram"}
    plain = fit_sgd(memories, **options)
    fitted = fit_sgd(memories, normalize_rows=True, snapshots=(3,), **options)
    weights = np.asarray(plain.kernel.weights)
    unit = weights / np.linalg.norm(weights, axis=-1, keepdims=True)
    assert_close(fitted.kernel.weights, unit)
    assert_close(fitted.snapshots.weights, unit[None])
    assert_close(fitted.loss[:-1], plain.loss[:-1])


@pytest.mark.few(2)
@pytest.mark.parametrize("start", [None, LinearKernel(draw(9, D, seed=3))])
@every_space
def test_the_last_report_is_of_the_kernel_with_normalised_rows(loss, start):
    memories, loss = draw(M, D), dataclasses.replace(loss, t=1.3)
    options = {"relative_rate": 0.05, "steps": 4, "start": start, "loss": loss}
    gram, weights = (
        fit_sgd(memories, path=path, snapshots=(2, 4), normalize_rows=True, **options)
        for path in ("gram", "weights")
    )
    assert_close(gram.loss, weights.loss, floor=1e-8)
    assert_close(gram.delta_min, weights.delta_min, floor=1e-8)
    assert_close(gram.snapshots.weights, weights.snapshots.weights, floor=1e-8)
    features = np.asarray(memories @ gram.kernel.weights.T)
    if loss.normalize:
        assert_close(gram.loss[-1], naive_loss(features, loss), floor=1e-8)
        assert_close(gram.delta_min[-1], naive_separation(features), floor=1e-8)


def test_gram_path_builds_no_matrix_of_the_dimension():
    memories = draw(M, D)
    fitted = fit_sgd(
        memories, relative_rate=0.01, steps=3, snapshots=(0, 3), path="gram"
    )
    assert isinstance(fitted.kernel, LowRankKernel)
    assert fitted.kernel.left.shape == (D, min(M, D))
    dense = LinearKernel(fitted.kernel.weights)
    queries = draw(3, D, seed=5)
    assert_close(fitted.kernel.query_features(queries), dense.query_features(queries))
    again = fit_sgd(
        memories, relative_rate=0.01, steps=2, start=fitted.kernel, path="gram"
    )
    longer = fit_sgd(memories, relative_rate=0.01, steps=5, path="gram")
    assert_close(again.kernel.weights, longer.kernel.weights)


@pytest.mark.parametrize("path", ["gram", "weights"])
def test_no_steps_return_the_start(path):
    memories, start = draw(M, D), STARTS["wide"]
    features = start.memory_features(memories)
    for rate in (0.02, RATES["decay"], RATES["python schedule"], np.zeros(0)):
        fitted = fit_sgd(memories, relative_rate=rate, steps=0, start=start, path=path)
        np.testing.assert_array_equal(fitted.kernel.weights, start.weights)
        assert_close(fitted.loss, [AverageLoss()(features)])
        assert_close(fitted.delta_min, [smallest_separation(features)])


@pytest.mark.parametrize(("path", "stacked"), [("gram", False), ("weights", True)])
def test_batches_of_memory_sets_are_a_loop(path, stacked):
    memories = draw(2, 3, M, D)
    start = LinearKernel(draw(2, 3, 9, D) if stacked else draw(9, D))
    options = {"relative_rate": 0.05, "steps": 8, "momentum": 0.5, "path": path}
    fitted = fit_sgd(memories, start=start, snapshots=(1, 8), **options)
    assert fitted.loss.shape == fitted.delta_min.shape == (2, 3, 9)
    assert fitted.snapshots.weights.shape == (2, 3, 2, 9, D)
    assert_close(fitted.snapshots.weights[:, :, 1], fitted.kernel.weights)
    for index in np.ndindex(2, 3):
        one = LinearKernel(start.weights[index]) if stacked else start
        single = fit_sgd(memories[index], start=one, **options)
        part = fitted._replace(snapshots=None)
        part = jax.tree.map(lambda x, index=index: x[index], part)
        jax.tree.map(assert_close, part, single)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=jnp.dtype)
@pytest.mark.parametrize("path", ["gram", "weights"])
def test_half_precision_memories_are_handled_in_float32(dtype, path):
    memories = draw(M, D, dtype=dtype)
    options = {"relative_rate": 0.05, "steps": 8, "path": path, "start": STARTS["wide"]}
    fitted = fit_sgd(memories, **options)
    same = fit_sgd(memories.astype(jnp.float32), **options)
    assert {x.dtype for x in jax.tree.leaves(fitted)} == {jnp.dtype(jnp.float32)}
    jax.tree.map(np.testing.assert_array_equal, fitted, same)
    assert fit_closed_form(memories).weights.dtype == jnp.float32
    assert AverageLoss()(memories).dtype == jnp.float32
    nothing = jnp.zeros((2, 0, 3), jnp.float32)
    assert not AverageLoss()(nothing).any() and AverageLoss()(nothing).shape == (2,)


def test_a_centred_start_compares_about_its_centre():
    memories, center, start = draw(M, D), draw(D, seed=1), STARTS["wide"]
    centred = LinearKernel(start.weights, center)
    options = {"relative_rate": 0.05, "steps": 8}
    same = fit_sgd(memories - center[None], start=start, path="gram", **options)
    for path in ("weights", "auto"):
        fitted = fit_sgd(
            memories, start=centred, path=path, snapshots=(2, 8), **options
        )
        assert_close(fitted.kernel.weights, same.kernel.weights)
        assert_close(fitted.loss, same.loss)
        assert_close(fitted.kernel.center, center)
        assert_close(fitted.snapshots.weights[1], same.kernel.weights)
        assert_close(fitted.snapshots.center, np.stack([center, center]))
    with pytest.raises(ValueError, match="gram path needs a start kernel without"):
        fit_sgd(memories, start=centred, path="gram", **options)


def test_identity_start_is_the_limit_of_gaussian_starts():
    memories, options = draw(M, D), {"relative_rate": 0.05, "steps": 8, "path": "gram"}
    limit = fit_sgd(memories, snapshots=range(9), **options)
    wide = gaussian_start(KEY, D, 20_000).weights
    assert abs(wide.mean()) < 0.02
    assert abs(wide.std() - 1) < 0.02
    weights = (D / 20_000) ** 0.5 * wide
    assert relative(weights.T @ weights, D * np.eye(D)) < 0.03
    fitted = fit_sgd(memories, start=LinearKernel(weights), **options)
    W, limit_W = fitted.kernel.weights, limit.kernel.weights
    assert relative(W.T @ W, limit_W.T @ limit_W) < 0.03
    assert_close(fitted.delta_min, limit.delta_min, floor=0.02)
    assert limit.delta_min[-1] > limit.delta_min[0] + 0.05
    np.testing.assert_array_equal(identity_start(9).weights, 3 * np.eye(9))
    assert gaussian_start(KEY, D).weights.shape == (D, D)


def test_fit_is_a_loop_of_its_optimiser(standard_promotion):
    memories, start = draw(M, D), STARTS["wide"]
    optimizer = optax.adam(0.05)
    slope = jax.jit(jax.grad(lambda w: DeepLoss(t=3.0)(memories @ w.T)))
    weights = start.weights
    state = optimizer.init(weights)
    for _ in range(30):
        updates, state = optimizer.update(slope(weights), state, weights)
        weights = optax.apply_updates(weights, updates)
    loss = DeepLoss(t=3.0)
    fitted = fit(memories, optimizer=optimizer, steps=30, start=start, loss=loss)
    assert_close(fitted.kernel.weights, weights)
    assert fitted.loss[-1] < fitted.loss[0]


def test_new_numbers_do_not_recompile(compilations):
    def run(seed, rate, t, momentum, mark):
        options = {"steps": 8, "loss": AverageLoss(t), "snapshots": 9 * [mark]}
        options |= {"relative_rate": rate, "momentum": momentum}
        for path in ("gram", "weights"):
            fit_sgd(memories[seed], path=path, **options)
        fit(memories[seed], optimizer=optimizer, steps=2, loss=AverageLoss(t))
        fit_closed_form(memories[seed], ridge=t)
        fit_likelihood(jax.random.key(seed), memories[seed], Mask(rate))

    optimizer = optax.sgd(0.1)
    memories = [draw(M, D, seed=seed) for seed in (0, 1)]
    run(0, 0.1, 2.0, 0.0, 3)
    before = len(compilations)
    assert before
    run(1, 0.2, 3.0, 0.5, 1)
    assert len(compilations) == before


# Without iterations.


@pytest.mark.parametrize("shape", [(4, 7), (7, 7), (12, 7)])
@pytest.mark.parametrize("ridge", [0.03, 1.0, 30.0])
def test_closed_form_is_the_ridge_formula(shape, ridge):
    memories = draw(2, *shape)
    kernel = fit_closed_form(memories, ridge=ridge)
    assert kernel.weights.shape == (2, 7, 7)
    for Xi, W in zip(np.asarray(memories), np.asarray(kernel.weights), strict=True):
        C = Xi.T @ Xi / len(Xi)
        A = np.linalg.inv(C + ridge * np.trace(C) / 7 * np.eye(7))
        assert_close(W.T @ W, A)
        single = fit_closed_form(jnp.asarray(Xi), ridge=ridge).weights
        assert_close(W, single)


@pytest.mark.parametrize("shape", [(4, 7), (12, 7)])
def test_several_ridges_are_several_kernels(shape):
    """With fewer memories than components, one factor was of one kernel alone."""
    memories, ridges = draw(*shape), np.array([0.1, 1.0])
    several = fit_closed_form(memories, ridge=ridges)
    assert several.set_axes == 1
    for kernel, one in enumerate(ridges):
        single = fit_closed_form(memories, ridge=one).weights
        assert_close(several.weights[kernel], single)
    pair = jnp.stack([memories, memories + 1])
    assert fit_closed_form(pair, ridge=ridges).weights.shape == (2, 7, 7)
    with pytest.raises(ValueError, match=r"ridge has shape \(3,\), .* \(2, .*, 7\)"):
        fit_closed_form(pair, ridge=np.ones(3))


@pytest.mark.parametrize("shape", [(4, 7), (7, 7)])
def test_closed_form_without_ridge_makes_memories_orthonormal(shape):
    memories = draw(2, *shape)
    kernel = fit_closed_form(memories, ridge=0)
    for Xi, W in zip(memories, kernel.weights, strict=True):
        features = LinearKernel(W).memory_features(Xi)
        assert_close(features @ features.T, np.eye(len(Xi)), scale=100)
        loss = DeepLoss()(features)
        assert_close(loss, -4.0)  # 2 t (0 - 1), the lowest loss
        assert loss < DeepLoss()(Xi) - 0.01


# U-Hop+.


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("M", "features", "least", "most"),
    [
        pytest.param(8, 3, 0.73, 0.7389, id="sphere-8"),
        pytest.param(24, 3, 0.27, 0.2770, id="sphere-24"),
        pytest.param(4, 3, 4 / 3 - 1e-4, 4 / 3, id="simplex-4"),
        pytest.param(
            10, 16, 10 / 9 - 1e-4, 10 / 9, id="simplex-10", marks=pytest.mark.slow
        ),
        pytest.param(6, 3, 1 - 1e-4, 1, id="orthoplex-6"),
        pytest.param(8, 4, 1 - 1e-4, 1, id="orthoplex-8"),
        pytest.param(
            5,
            2,
            1 - np.cos(2 * np.pi / 5) - 1e-4,
            1 - np.cos(2 * np.pi / 5),
            id="pentagon",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_annealing_finds_optimal_codes(M, features, least, most, standard_promotion):
    memories = draw(M, 32, dtype=jnp.float32)
    fitted = fit_annealed(KEY, memories, features=features)
    reached = smallest_separation(fitted.kernel.memory_features(memories))
    assert least <= reached <= most + 1e-5
    assert_close(fitted.delta_min.max(), reached)


def test_annealing_is_reproducible_over_sets_and_keeps_the_best(standard_promotion):
    memories = draw(2, M, D)
    options = {"features": 3, "steps": 40, "restarts": 3, "t_range": (1.0, 10.0)}
    fitted = fit_annealed(KEY, memories, learning_rate=2000.0, **options)
    assert fitted.kernel.weights.shape == (2, 3, D)
    assert fitted.loss.shape == fitted.delta_min.shape == (2, 41)
    for index in range(2):
        kernel = LinearKernel(fitted.kernel.weights[index])
        reached = smallest_separation(kernel.memory_features(memories[index]))
        assert_close(fitted.delta_min[index].max(), reached)
        assert reached > fitted.delta_min[index, -1]  # too fast to end at the best
    same = fit_annealed(KEY, memories, learning_rate=2000.0, **options)
    jax.tree.map(np.testing.assert_array_equal, fitted, same)


@every_kind
def test_every_loss_moves_batches_of_single_precision(kind):
    rng = np.random.default_rng(0)  # as large as images, where sums round
    memories = jnp.asarray(rng.uniform(size=(2, 30, 80)), jnp.float32)
    fitted = fit_sgd(memories, relative_rate=0.01, steps=5, loss=kind(), path="gram")
    assert (fitted.loss[:, -1] < fitted.loss[:, 0]).all()


@pytest.mark.parametrize("shape", [(4, 6), (8, 6), (2, 4, 6)], ids=str)
def test_many_ridges_share_one_decomposition(shape):
    memories = draw(*shape)
    for ridge, kernel in whitenings(memories, (0.1, 10.0)).items():
        single = fit_closed_form(memories, ridge=ridge)
        assert type(kernel) is type(single)
        assert_close(kernel.weights, single.weights)


# Bad input.

SCALE_FREE = {
    "loss": AverageLoss(),
    "smallest separation": smallest_separation,
    "sgd gram": lambda x: fit_sgd(x, relative_rate=0.1, steps=3, path="gram")[1:3],
    "sgd weights": lambda x: fit_sgd(x, relative_rate=0.1, steps=3, path="weights")[
        1:3
    ],
    "annealed": lambda x: fit_annealed(KEY, x, steps=3, restarts=2)[1:3],
}


@pytest.mark.parametrize("function", SCALE_FREE.values(), ids=SCALE_FREE)
@pytest.mark.parametrize("exponent", [-700, 600])
def test_cosines_have_no_scale(function, exponent, standard_promotion):
    memories = draw(M, D)
    scaled = memories * 2.0**exponent
    jax.tree.map(np.testing.assert_array_equal, function(scaled), function(memories))


GOOD = np.random.default_rng(0).normal(size=(M, D))
TWICE = GOOD[[0, 1, 2, 1]]
METHODS = {
    "fit": lambda memories, **options: fit(
        memories, optimizer=optax.sgd(0.1), **{"steps": 2, **options}
    ),
    "sgd": lambda memories, **options: fit_sgd(
        memories, **{"relative_rate": 0.1, "steps": 2, **options}
    ),
    "annealed": lambda memories, **options: fit_annealed(KEY, memories, **options),
    "closed form": fit_closed_form,
    "likelihood": lambda memories, corrupt=Mask(), **options: fit_likelihood(  # noqa: B008
        KEY, memories, corrupt, **options
    ),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@every_method
@pytest.mark.parametrize(
    ("memories", "message"),
    [
        (GOOD[:1], "at least two memories of shape"),
        (GOOD[0], r"shape \(.*, d\)"),
        (GOOD[:, :0], r"must have components and sets, got shape \(.*, 0\)"),
        (GOOD[None][:0], r"must have components and sets, got shape \(0, .*\)"),
        (np.where(GOOD == GOOD[1, 2], np.nan, GOOD), "memories must be finite, got 1"),
        (np.where(GOOD > 0, np.inf, GOOD), "memories must be finite"),
        (GOOD + 1j, "memories must be real"),
    ],
)
def test_bad_memories_are_refused(untyped, method, memories, message):
    with pytest.raises(ValueError, match=message):
        method(jnp.asarray(memories))


@pytest.mark.parametrize("name", ["fit", "sgd", "annealed", "closed form"])
@pytest.mark.parametrize("memories", [TWICE, np.stack([GOOD, TWICE])])
def test_duplicates_are_refused_by_index(name, memories):
    with pytest.raises(ValueError, match="memories 1 and 3 are equal"):
        METHODS[name](jnp.asarray(memories))


BAD_OPTIONS = [
    ("fit sgd", {"loss": "media"}, "loss must be a separation loss .*, got 'media'"),
    ("fit sgd", {"loss": AverageLoss}, "loss must be a separation loss .*AverageLoss'"),
    ("fit sgd", {"steps": -1}, "steps must be at least 0, got -1"),
    ("fit sgd", {"steps": 1.5}, "steps must be an integer, got 1.5"),
    ("fit sgd", {"loss": AverageLoss(0.0)}, "t must be positive and finite, got 0.0"),
    ("fit sgd", {"loss": DeepLoss(-1.0)}, "t must be positive and finite, got -1.0"),
    ("fit sgd", {"snapshots": (0, 3)}, "snapshots must be at most 2, got 3"),
    ("fit sgd", {"snapshots": (-1,)}, "snapshots must be at least 0, got -1"),
    ("fit sgd", {"start": identity_start(5)}, "start maps dimension 5, memories .* 6"),
    (
        "fit sgd",
        {"start": LinearKernel(jnp.zeros((2, 3, D)))},
        "start has 1 axes of memory sets, memories have 0",
    ),
    ("sgd", {"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
    ("sgd", {"momentum": 1.0}, "momentum must be below 1, got 1.0"),
    ("sgd", {"relative_rate": np.nan}, "relative_rate must be finite"),
    ("sgd", {"relative_rate": lambda n: np.inf}, "relative_rate must be finite"),
    ("sgd", {"relative_rate": np.ones(3)}, r"relative_rate has shape \(3,\).* \(2,\)"),
    ("sgd", {"path": "short"}, "unknown path 'short'; choose one of auto, gram, we"),
    ("annealed", {"features": 0}, "features must be at least 1, got 0"),
    ("annealed", {"steps": 0}, "steps must be at least 1, got 0"),
    ("annealed", {"restarts": 0}, "restarts must be at least 1, got 0"),
    ("annealed", {"t_range": (0.0, 9.0)}, "t_range must be positive"),
    ("annealed", {"t_range": (1.0,)}, r"t_range must be two numbers, got \(1.0,\)"),
    ("annealed", {"t_range": 2.0}, "t_range must be two numbers, got 2.0"),
    ("annealed", {"learning_rate": 0.0}, "learning_rate must be positive"),
    ("closed form", {"ridge": -0.1}, "ridge must be at least 0, got -0.1"),
    ("closed form", {"ridge": np.nan}, "ridge must be at least 0, got nan"),
    ("likelihood", {"copies": 0}, "copies must be at least 1, got 0"),
    ("likelihood", {"rank": 0}, "rank must be at least 1, got 0"),
    ("likelihood", {"rank": 66}, "rank must be at most 65, got 66"),
    ("likelihood", {"corrupt": 0.5}, "corrupt must be a function.*got 0.5"),
]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        pytest.param(METHODS[name], options, message, id=f"{name}-{message}")
        for names, options, message in BAD_OPTIONS
        for name in ([names] if names in METHODS else names.split())
    ],
)
def test_bad_options_are_refused(untyped, method, options, message):
    with pytest.raises(ValueError, match=message):
        method(jnp.asarray(GOOD), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: AverageLoss()(draw(3)),
            "features must have shape (..., M, D), got (3,)",
        ),
        (lambda: loss_from_name("mean"), "choose one of average, maximum, deep"),
        (lambda: AverageLoss(pairs="each"), "choose one of distinct, all"),
        (
            lambda: MaximumLoss(t=0.0)(draw(4, 3)),
            "t must be positive and finite, got 0.0",
        ),
        (
            lambda: DeepLoss()(draw(4, 3), where=np.ones(5, bool)),
            "where has shape (5,), which does not broadcast to (4,)",
        ),
        (lambda: DeepLoss().least(4, 0), "dimension must be at least 1, got 0"),
        (lambda: DeepLoss(-1.0).least(4, 3), "t must be positive and finite, got -1.0"),
    ],
)
def test_bad_losses_are_refused(untyped, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("shape", [(5, 3), (3, 3)])
def test_dependent_memories_need_a_ridge(shape):
    memories = draw(*shape)
    if shape[0] == 3:
        memories = memories.at[2].set(memories[0] + memories[1])
    with pytest.raises(ValueError, match="needs linearly independent memories"):
        fit_closed_form(memories, ridge=0)
    assert np.isfinite(fit_closed_form(memories, ridge=0.1).weights).all()


def test_bad_starts_are_refused():
    for call in (
        lambda: identity_start(0),
        lambda: gaussian_start(KEY, 0),
        lambda: gaussian_start(KEY, 3, 0),
    ):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            call()


def test_annealing_and_adam_under_strict_promotion():
    memories = draw(M, D)
    annealed = fit_annealed(KEY, memories, steps=2, restarts=2)
    fitted = fit(memories, optimizer=optax.adam(0.1), steps=2)
    for result in (annealed, fitted):
        assert np.isfinite(result.loss).all() and result.loss[-1] < result.loss[0]
