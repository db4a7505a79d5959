"""Separations and their derivatives, against references in float64 and in mpmath."""

import functools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.special
from conftest import assert_close, every_dtype, slow_where
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from jax.test_util import check_grads

from uhop_jax import (
    Entmax,
    Entmax15,
    Polynomial,
    Softmax,
    Softmax1,
    Sparsemax,
    TopK,
    bounded_alpha,
    separation_from_name,
)
from uhop_jax.separation import SEPARATIONS as REGISTERED

ALPHAS = (1.0, 1.0001, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)
SEPARATIONS = [
    Softmax(),
    Softmax1(),
    Sparsemax(),
    *map(Entmax, (1.0, 1.3, 1.5, 2.0, 3.0)),
    Polynomial(10),
    TopK(1),
    TopK(3),
]
every_separation = pytest.mark.parametrize("sep", SEPARATIONS, ids=repr)
with_conjugate = pytest.mark.parametrize(
    "sep", [sep for sep in SEPARATIONS if sep.has_conjugate], ids=repr
)
every_alpha = pytest.mark.parametrize("alpha", ALPHAS)


def tsallis(p, alpha):
    """Negative entropy whose argmax is alpha-entmax."""
    if alpha == 1:
        return scipy.special.xlogy(p, p).sum()
    return (p**alpha - p).sum() / (alpha * (alpha - 1))


def _sparsemax(z):
    ordered = np.sort(z)[::-1]
    counts = np.arange(1, z.size + 1)
    thresholds = (np.cumsum(ordered) - 1) / counts
    return np.maximum(z - thresholds[ordered > thresholds][-1], 0)


def _entmax_1_5(z):
    ordered = np.sort(z / 2)[::-1]
    counts = np.arange(1, z.size + 1)
    mean = np.cumsum(ordered) / counts
    spread = counts * (np.cumsum(ordered**2) / counts - mean**2)
    thresholds = mean - np.sqrt(np.maximum((1 - spread) / counts, 0))
    support = np.sum(thresholds <= ordered)
    return np.maximum(z / 2 - thresholds[support - 1], 0) ** 2


def _entmax(z, alpha):
    v = (alpha - 1) * (z - z.max())
    power = 1 / (alpha - 1)
    low, high = -1.0, 0.0
    for _ in range(100):
        middle = (low + high) / 2
        if (np.maximum(v - middle, 0) ** power).sum() >= 1:
            low = middle
        else:
            high = middle
    p = np.maximum(v - low, 0) ** power
    return p / p.sum()


def _naive_row(sep, z):
    p = np.zeros(z.shape)
    valid = z > -np.inf
    if not valid.any():
        return p
    x = z[valid]
    match sep:
        case Softmax() | Entmax(alpha=1.0):
            p[valid] = scipy.special.softmax(x)
        case Softmax1():
            p[valid] = scipy.special.softmax(np.append(x, 0.0))[:-1]
        case Sparsemax() | Entmax(alpha=2.0):
            p[valid] = _sparsemax(x - x.max())
        case Entmax(alpha=1.5):
            p[valid] = _entmax_1_5(x - x.max())
        case Entmax(alpha=alpha):
            p[valid] = _entmax(x, float(alpha))
        case Polynomial(degree=degree):
            positive = np.maximum(x, 0)
            powers = (positive / max(positive.max(), 1e-300)) ** degree
            p[valid] = powers / max(powers.sum(), 1e-300)
        case TopK(k=k):
            best = np.argsort(-z, kind="stable")[:k]
            p[best] = scipy.special.softmax(z[best])
    return p


def naive_weights(sep, z):
    """Weights in float64 by sorting and bisection, one row at a time."""
    z = np.asarray(z, dtype=np.float64)
    return np.apply_along_axis(functools.partial(_naive_row, sep), -1, z)


def _naive_conjugate_row(sep, z):
    if not (z > -np.inf).any():
        return 0.0
    match sep:
        case Softmax() | Entmax(alpha=1.0):
            return scipy.special.logsumexp(z)
        case Softmax1():
            return scipy.special.logsumexp(np.append(z, 0.0))
        case TopK(k=k):
            return scipy.special.logsumexp(np.sort(z)[-k:])
    p = _naive_row(sep, z)
    alpha = 2.0 if isinstance(sep, Sparsemax) else float(sep.alpha)
    return p[p > 0] @ z[p > 0] - tsallis(p, alpha)


def naive_conjugate(sep, z):
    """`<p, z> - Omega(p)` in float64, as a logsumexp where it has this form."""
    z = np.asarray(z, dtype=np.float64)
    return np.apply_along_axis(functools.partial(_naive_conjugate_row, sep), -1, z)


@jax.jit
def weights(sep, z, where=None):
    return sep(z, where=where)


@jax.jit
def conjugate(sep, z, where=None):
    return sep.conjugate(z, where=where)


@jax.jit
def pull_back(sep, z, cotangent, where=None):
    return jax.vjp(lambda z: sep(z, where=where), z)[1](cotangent)[0]


@jax.jit
def conjugate_gradient(sep, z):
    return jax.grad(lambda z: sep.conjugate(z).sum())(z)


def tempered(sep, overlaps, beta):
    return sep.tempered(overlaps, beta)


def of_product(sep, overlaps, beta):
    return sep(beta.astype(overlaps.dtype)[..., None] * overlaps)


jitted_tempered, jitted_of_product = jax.jit(tempered), jax.jit(of_product)
jacobians_of_tempered = jax.jit(jax.jacrev(tempered, (1, 2)))


@jax.jit
def tempered_conjugate(sep, overlaps, beta):
    return sep.tempered_conjugate(overlaps, beta)


def normal(*shape, seed=0, scale=1.0, dtype=jnp.float64):
    draws = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(scale * draws, dtype)


@every_separation
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_weights_equal_the_naive_ones(sep, scale):
    z = normal(20, 9, scale=scale)
    p = np.asarray(weights(sep, z))
    assert (p >= 0).all()
    if sep.normalized:
        has_weight = (np.asarray(z) > 0).any(-1) | (not isinstance(sep, Polynomial))
        assert_close(p.sum(-1), np.where(has_weight, 1.0, 0.0))
    assert_close(p, naive_weights(sep, z))


@with_conjugate
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_conjugate_equals_the_naive_one_and_has_the_weights_as_gradient(sep, scale):
    z = normal(20, 9, scale=scale)
    assert_close(conjugate(sep, z), naive_conjugate(sep, z))
    assert_close(conjugate_gradient(sep, z), weights(sep, z))


@pytest.mark.parametrize(
    "sep", [sep for sep in SEPARATIONS if not sep.has_conjugate], ids=repr
)
def test_a_separation_without_conjugate_says_so(sep):
    with pytest.raises(ValueError, match="has no convex conjugate"):
        sep.conjugate(normal(4))


@with_conjugate
def test_conjugate_is_convex(sep):
    a, b = normal(2, 20, 9, scale=4)
    t = jnp.linspace(0.1, 0.9, 20)
    between = conjugate(sep, t[:, None] * a + (1 - t)[:, None] * b)
    chord = t * conjugate(sep, a) + (1 - t) * conjugate(sep, b)
    assert (between <= chord + 1e-12).all()


def test_an_alpha_known_in_advance():
    """A known `alpha` compiles one case of three; the general case is right too."""
    z = jnp.asarray(np.random.default_rng(0).normal(size=(3, 40)))
    for alpha, kind in ((1.3, Entmax), (1.5, Entmax15), (2, Sparsemax)):
        known = Entmax(np.full(3, alpha)).specialised()
        assert type(known) is kind
        for sep in (known, Entmax(alpha, cases=False)):
            assert_close(sep(z), Entmax(alpha)(z))
    assert Entmax(np.asarray([1.5, 2.0])).specialised().cases is False
    assert Entmax(2.0).specialised(learned=("alpha",)) == Entmax(2.0, cases=False)
    for sep in (Entmax15(), Sparsemax()):
        assert "stablehlo.case" not in jax.jit(sep).lower(z).as_text()
    assert "stablehlo.case" in jax.jit(Entmax(1.5)).lower(z).as_text()


SMOOTH = (Softmax(), Softmax1(), Entmax(1.0), Entmax(1.3), Polynomial(3))


@pytest.mark.few(6)
@every_separation
def test_derivatives_of_the_weights(sep):
    f = functools.partial(weights, sep)
    z = normal(2, 9, seed=3)
    check_grads(f, (z,), 1, ("fwd", "rev"))
    if sep in SMOOTH:
        check_grads(f, (z,), 2, ("rev",))


@pytest.mark.parametrize("sep", [Sparsemax(), Entmax15()], ids=str)
@pytest.mark.parametrize("beta", [0.3, 1.0, 1e3, 1e12])
def test_derivatives_change_no_weight(sep, beta):
    """The zero that carries the derivative of the threshold is exactly zero."""
    first, second = (normal(9, 5, seed=s).astype(jnp.float32) for s in (3, 4))

    def f(first):  # a product that XLA may fuse into what follows
        return sep(beta * (first[:, None] * second[None]).sum(-1))

    plain = jax.jit(f)(first)
    differentiated, _ = jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(first)
    assert (differentiated == plain).all()
    assert ((plain == 1).any(-1) | (beta < 1e3)).all()


@every_alpha
@pytest.mark.parametrize("function", [weights, conjugate])
def test_derivative_in_alpha(function, alpha):
    z = normal(20, 9, seed=3)
    h = 1e-5

    def f(alpha):
        return function(Entmax(alpha), z)

    expected = (-3 * f(alpha) + 4 * f(alpha + h) - f(alpha + 2 * h)) / (2 * h)
    assert_close(jax.jacfwd(f)(alpha), expected, floor=1e-5)


@functools.cache  # one program for every alpha
def derivatives_of_totals(function, cases):
    """First derivatives in alpha and the overlaps, and second ones in both modes."""

    def total(alpha, z, cotangent):
        result = function(Entmax(alpha, cases=cases), z)
        return (cotangent * result).sum() if result.ndim else result

    first = jax.grad(total, (0, 1))
    seconds = [outer(first, (0, 1)) for outer in (jax.jacfwd, jax.jacrev)]
    return jax.jit(first), [jax.jit(second) for second in seconds]


@pytest.mark.few(8)
@pytest.mark.parametrize("cases", [True, False])
@pytest.mark.parametrize("alpha", [1.0, 1.0001, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0])
def test_second_derivatives(alpha, cases):
    """Second derivatives are differences of first ones, for every branch of `alpha`."""
    z, cotangent = normal(2, 5, seed=3)
    h = 1e-4
    for function in (weights, conjugate):
        first, seconds = derivatives_of_totals(function, cases)
        by_alpha = jax.tree.map(  # from above alone, where alpha is 1
            lambda *x: (-11 * x[0] + 18 * x[1] - 9 * x[2] + 2 * x[3]) / (6 * h),
            *(first(alpha + k * h, z, cotangent) for k in range(4)),
        )
        above, below = (
            jnp.stack([first(alpha, z + step * e, cotangent)[1] for e in jnp.eye(5)])
            for step in (h, -h)
        )
        rows = (above - below) / (2 * h)
        for second in seconds:
            second = second(alpha, z, cotangent)
            assert_close(second[0][0], by_alpha[0], floor=1e-5)
            assert_close(second[0][1], by_alpha[1], floor=1e-5)
            assert_close(second[1][0], by_alpha[1], floor=1e-5)
            assert_close(second[1][1], rows, floor=1e-5)


def test_derivative_in_alpha_row_by_row():
    z, cotangent = normal(2, len(ALPHAS), 5, seed=3)
    gradient = jax.jit(jax.grad(lambda a, z, c: (c * Entmax(a)(z)).sum()))
    alphas = jnp.asarray(ALPHAS)
    expected = [gradient(*row) for row in zip(alphas, z, cotangent, strict=True)]
    assert_close(gradient(alphas, z, cotangent), expected)


def test_alpha_row_by_row():
    z = normal(20, 9, scale=2)
    alphas = np.resize(ALPHAS, 20)
    for function in (weights, conjugate):
        alone = [function(Entmax(a), row) for a, row in zip(alphas, z, strict=True)]
        assert_close(function(Entmax(alphas), z), alone)


@every_separation
def test_a_row_depends_on_no_other_row(sep):
    z = normal(20, 9) * jnp.logspace(-2, 2, 20)[:, None]
    alone = [weights(sep, row) for row in z]
    for together in (
        weights(sep, z),
        weights(sep, z.reshape(2, 10, 9)),
        jax.vmap(functools.partial(weights, sep))(z),
    ):
        difference = np.reshape(together, (20, 9)) - np.stack(alone)
        assert np.abs(difference).max() <= 2 * np.finfo(np.float64).eps


@pytest.mark.few(14)
@slow_where(
    lambda sep, dtype: (
        dtype == jnp.bfloat16
        and (isinstance(sep, (Polynomial, TopK)) or sep == Entmax(1.3))
    )
)
@every_separation
@every_dtype
def test_dtype_and_accuracy(sep, dtype):
    z = normal(20, 9, scale=2, dtype=dtype)
    p = weights(sep, z)
    assert p.dtype == dtype
    assert_close(p, naive_weights(sep, z))
    gradient = pull_back(sep, z, jnp.cos(z))
    assert gradient.dtype == dtype
    exact = pull_back(sep, z.astype(jnp.float64), jnp.cos(z).astype(jnp.float64))
    assert_close(gradient, exact, scale=20)
    if sep.has_conjugate:
        value = conjugate(sep, z)
        assert value.dtype == dtype
        assert_close(value, naive_conjugate(sep, z))


@pytest.mark.parametrize(
    "sep",
    [sep for sep in SEPARATIONS if sep.normalized and not isinstance(sep, Polynomial)],
    ids=repr,
)
def test_a_shift_of_all_overlaps_changes_nothing(sep):
    z = normal(20, 9, scale=2)
    shift = normal(20, 1, seed=1, scale=100)
    assert_close(weights(sep, z + shift), weights(sep, z), scale=10)
    assert_close(conjugate(sep, z + shift) - shift[:, 0], conjugate(sep, z), scale=10)


@every_separation
def test_permuting_the_memories_permutes_the_weights(sep):
    z = normal(20, 9, scale=2)
    order = np.random.default_rng(0).permutation(9)
    assert_close(weights(sep, z[:, order]), weights(sep, z)[:, order])


@pytest.mark.few(11)
@slow_where(lambda hidden: hidden in (3.0, jnp.inf))
@every_separation
@pytest.mark.parametrize("hidden", [3.0, jnp.nan, jnp.inf, -jnp.inf])
def test_a_masked_entry_never_shows(sep, hidden):
    z = normal(20, 9, scale=2)
    where = jnp.asarray(np.random.default_rng(1).random((20, 9)) < 0.6)
    where = where.at[0].set(True).at[1].set(False)
    absent = jnp.where(where, z, -jnp.inf)
    z = jnp.where(where, z, hidden)
    p = weights(sep, z, where)
    assert_close(p, naive_weights(sep, absent))
    assert_close(p, weights(sep, absent))
    assert (p[1] == 0).all()
    cotangent = jnp.cos(jnp.arange(180.0)).reshape(20, 9)
    gradient = pull_back(sep, z, cotangent, where)
    assert jnp.isfinite(gradient).all()
    assert (jnp.where(where, 0.0, gradient) == 0).all()
    assert_close(gradient, pull_back(sep, absent, cotangent))
    if sep.has_conjugate:
        assert_close(conjugate(sep, z, where), naive_conjugate(sep, absent))


@every_separation
def test_nan_of_either_sign_shows(sep):
    z = normal(20, 9, scale=2).at[1, 4].set(jnp.nan).at[2, 0].set(-jnp.nan)
    bad = jnp.isnan(z).any(-1)
    p = weights(sep, z)
    np.testing.assert_array_equal(jnp.isnan(p).all(-1), bad)
    np.testing.assert_array_equal(jnp.isnan(p).any(-1), bad)
    gradient = pull_back(sep, z, jnp.cos(jnp.arange(180.0)).reshape(20, 9))
    np.testing.assert_array_equal(jnp.isnan(gradient).any(-1), bad)
    if sep.has_conjugate:
        np.testing.assert_array_equal(jnp.isnan(conjugate(sep, z)), bad)


@every_separation
def test_masks_broadcast(sep):
    z = normal(2, 10, 9)
    where = jnp.arange(9) < 5
    expected = weights(sep, jnp.where(where[None, None], z, -jnp.inf))
    for shape in [(9,), (2, 1, 9)]:
        assert_close(weights(sep, z, jnp.broadcast_to(where, shape)), expected)


@pytest.mark.few(11)
@every_separation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_huge_and_tied_overlaps(sep, dtype):
    z = jnp.asarray([[1e30, 1e30, 0, -1e30], [1e30, 0, -1e30, -1e30]], dtype)
    first = [1.0, 0.0] if sep == TopK(1) else [0.5, 0.5]
    assert_close(weights(sep, z), [[*first, 0, 0], [1, 0, 0, 0]])
    assert jnp.isfinite(pull_back(sep, z, jnp.ones_like(z))).all()


BETAS = (1e-6, 1e-3, 1.0, 1e3, 1e6, 1e10, 1e20, 1e30, 1e38)
LEVELS = ([0.875, 0.875, 0.5, -1], [-0.25, -0.5, -2, -3], [0.7, 0.1, 0.3, 0.2])


@pytest.mark.few(22)
@slow_where(
    lambda jitted, dtype: dtype == jnp.float64 or (not jitted and dtype != jnp.float32)
)
@every_separation
@every_dtype
@pytest.mark.parametrize("jitted", [False, True])
def test_any_inverse_temperature(sep, dtype, jitted):
    """Inside of jit the product with `beta` is fused into the separation."""
    beta = jnp.asarray(BETAS, jnp.float32)[:, None] * jnp.ones((1, len(LEVELS)), "f")
    overlaps = jnp.broadcast_to(jnp.asarray(LEVELS, dtype), (len(BETAS), 3, 4))
    scaled = np.asarray(beta, np.float64)[..., None] * np.asarray(overlaps, np.float64)
    expected = naive_weights(sep, scaled)
    products = [jitted_tempered if jitted else tempered]
    if np.dtype(dtype).itemsize > 2:
        products.append(jitted_of_product if jitted else of_product)
    for product in products:
        f = functools.partial(product, sep, overlaps)
        p, slope = jax.jvp(f, (beta,), (jnp.ones_like(beta),))
        assert p.dtype == dtype
        assert_close(f(beta), expected)
        assert_close(p, expected)
        assert jnp.isfinite(slope).all()


@pytest.mark.few(6)
@slow_where(lambda dtype: dtype == jnp.float64)  # both scale with the largest float
@every_separation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_product_that_overflows(sep, dtype):
    """The largest overlap has all weight, even if its product with beta overflows."""
    largest = float(jnp.finfo(dtype).max)
    overlaps = jnp.asarray(
        [[3, 3, 2, 1], [-4, -2, -2, -3], [1, -1, -1, -1]], dtype
    ) * jnp.asarray(largest / 4, dtype)
    beta = jnp.asarray([1e30, 1e10, 3.0], dtype)
    p = jitted_tempered(sep, overlaps, beta)
    halves = [1.0, 0.0] if sep == TopK(1) else [0.5, 0.5]
    expected = np.asarray([[*halves, 0, 0], [0, *halves, 0], [1, 0, 0, 0]])
    if isinstance(sep, Softmax1 | Polynomial):
        expected[1] = 0.0
    if isinstance(sep, Polynomial):
        powers = np.asarray([3, 3, 2, 1.0]) ** sep.degree
        expected[0] = powers / powers.sum()
    assert_close(p, expected)
    tied = jnp.asarray([jnp.inf, jnp.inf, 0, -jnp.inf], dtype)
    assert_close(weights(sep, tied), [*halves, 0, 0])
    gradient = jacobians_of_tempered(sep, overlaps, beta)
    assert all(jnp.isfinite(x).all() for x in gradient)
    if sep.has_conjugate:
        value = tempered_conjugate(sep, overlaps, beta)
        lowest = 0.0 if sep == Softmax1() else overlaps[1, 1]
        expected = jnp.asarray([overlaps[0, 0], lowest, overlaps[2, 0]])
        assert_close(value / largest, expected / largest)
        assert not jnp.isnan(conjugate(sep, tied))


@jax.jit
def conjugates_and_slopes(sep, overlaps, beta, where):
    """Tempered conjugates and conjugates of products, with derivatives along beta."""

    def tempered(beta):
        return sep.tempered_conjugate(overlaps, beta, where=where)

    def scaled(beta):
        return sep.conjugate(beta[..., None] * overlaps, where=where) / beta

    return [jax.jvp(f, (beta,), (beta,)) for f in (tempered, scaled)]


@with_conjugate
def test_conjugate_at_an_inverse_temperature(sep):
    overlaps, where = jnp.asarray(LEVELS), jnp.asarray([True, True, False, True])
    beta = jnp.asarray([0.01, 1.0, 1e3])[:, None] * jnp.ones((1, 3))
    overlaps = jnp.broadcast_to(overlaps, (3, 3, 4))

    (a, slope), (b, expected) = conjugates_and_slopes(sep, overlaps, beta, where)
    assert_close(a, b)
    assert_close(slope, expected, scale=100)


def exact_entmax(z, alpha):
    """Weights to 50 digits, from the smallest of the support."""
    with mpmath.workdps(50):
        e = mpmath.mpf(float(alpha)) - 1
        z = [mpmath.mpf(float(x)) for x in z]
        if e == 0:
            powers = [mpmath.exp(x - max(z)) for x in z]
            return [float(p / sum(powers)) for p in powers]
        ordered, count = sorted(z, reverse=True), 1
        while count < len(z) and 1 > sum(
            (e * (x - ordered[count])) ** (1 / e) for x in ordered[:count]
        ):
            count += 1
        least, low, high = ordered[count - 1], mpmath.mpf(0), mpmath.mpf(1)
        scaled = [e * (x - least) for x in ordered[:count]]
        power = max(e, 1)  # the unknown is p, or p**e where that moves weights less
        for _ in range(80):
            middle = (low + high) / 2
            start = middle**power
            total = sum((start + x) ** (1 / e) for x in scaled)
            low, high = (middle, high) if total < 1 else (low, middle)
        start = low**power
        return [
            float((start + e * (x - least)) ** (1 / e)) if x >= least else 0.0
            for x in z
        ]


EVERY_ALPHA = (1, 1.01, 1.5, 1.99, 2, 2.01, 2.5, 3, 5, 7, 10, 20, 35, 50)


@pytest.mark.few(2)
@every_dtype
def test_weights_to_fifty_digits(dtype):
    """At every `alpha` and scale, with ties and near ties among the overlaps."""
    z = np.random.default_rng(0).normal(size=(7, 1, 8))
    z = z * np.asarray([1e-30, 1e-12, 1e-6, 1e-3, 0.1, 1.0, 10.0])[:, None, None]
    z[..., 3], z[..., 5] = z[..., 4], z[..., 6] * (1 + 1e-6)
    z = np.broadcast_to(z, (7, len(EVERY_ALPHA), 8))
    z = np.concatenate([z, np.zeros((1, *z.shape[1:]))])
    z = np.where(np.abs(z) < float(jnp.finfo(dtype).tiny), 0.0, z)
    z = jnp.asarray(z, dtype)
    alpha = jnp.asarray(np.broadcast_to(EVERY_ALPHA, z.shape[:-1]), jnp.float32)
    p = weights(Entmax(alpha), z)
    rows = zip(np.reshape(z, (-1, 8)), np.ravel(alpha), strict=True)
    expected = [exact_entmax(*row) for row in rows]
    assert_close(p, np.reshape(expected, z.shape), scale=0.2)
    np.testing.assert_array_equal(p[..., 3], p[..., 4])
    total = np.asarray(p, np.float64).sum(-1)
    assert np.abs(total - 1).max() <= 16 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("alpha", "z", "expected"),
    [
        (5.0, np.zeros(100), np.full(100, 0.01)),
        (20.0, [1.0, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, 0]),
        (10.0, [-0.1, 0], [0.01163847, 0.98836153]),
        (50.0, np.zeros(5000), np.full(5000, 1 / 5000)),
        (3.0, [2.0, -np.inf, 2], [0.5, 0, 0.5]),
        (3.0, [-np.inf, -np.inf], [0, 0]),
        (3.0, [1e300, 1e300, -1e300], [0.5, 0.5, 0]),
        (3.0, [np.nan, 1.0], [np.nan, np.nan]),
    ],
)
def test_steep_weights(alpha, z, expected):
    for run in (weights, jax.vmap(weights, (0, 0))):
        batched = run is not weights
        sep, z_ = Entmax(jnp.asarray(alpha)), jnp.asarray(z)
        if batched:
            sep, z_ = jax.tree.map(lambda x: x[None], (sep, z_))
        p = run(sep, z_)[0] if batched else run(sep, z_)
        np.testing.assert_allclose(p, expected, rtol=1e-6)


@jax.jit
def jacobian_of_entmax(alpha, z):
    return jax.jacfwd(Entmax(alpha))(z)


@jax.jit
def jacobian_of_entmax_backwards(alpha, z):
    return jax.jacrev(Entmax(alpha))(z)


@jax.jit
def jacobians_of_rows(alphas, z):
    """Jacobians in alpha and in `z`, mapped over `alphas`."""
    jacobians = jax.jacrev(lambda alpha, z: Entmax(alpha)(z), (0, 1))
    return jax.vmap(jacobians, (0, None))(alphas, z)


@pytest.mark.parametrize("alpha", [2.2, 3.0, 5.0, 10.0, 20.0])
def test_steep_derivatives_to_fifty_digits(alpha):
    """Where the slope of the smallest weight is up to 1e17 times the others'."""
    z = jnp.asarray([0.0, -0.02, -0.03, -0.1, -2.0]) * (4 / alpha)
    p = np.asarray(weights(Entmax(alpha), z))
    with mpmath.workdps(50):
        s = [mpmath.mpf(float(x)) ** (2 - mpmath.mpf(alpha)) if x else 0 for x in p]
        exact = [
            [float((a if i == j else 0) - a * b / sum(s)) for j, b in enumerate(s)]
            for i, a in enumerate(s)
        ]
    for jacobian in (jacobian_of_entmax, jacobian_of_entmax_backwards):
        result = jacobian(alpha, z)
        np.testing.assert_allclose(result, exact, rtol=1e-7, atol=1e-12)
    rows = jnp.asarray([alpha, 1.5])  # mapped: either arithmetic, chosen by row
    _, gradient = jacobians_of_rows(rows, z)
    assert_close(gradient[0] / np.abs(exact).max(), exact / np.abs(exact).max())
    assert_close(gradient[1], jacobian_of_entmax_backwards(1.5, z))


@slow_where(lambda length: length == 5000)
@every_separation
@pytest.mark.parametrize("length", [5000, 5120])
def test_long_rows(sep, length):
    z = normal(3, length) * jnp.asarray([[0.1], [1.0], [10.0]])
    assert_close(weights(sep, z), naive_weights(sep, z))


@every_separation
def test_long_rows_of_ties_and_masks(sep):
    z = jnp.zeros((3, 5000)).at[1, 4990:].set(0.5).at[2].set(-jnp.inf)
    assert_close(weights(sep, z), naive_weights(sep, z))


@pytest.mark.parametrize("function", [weights, conjugate])
def test_one_program_serves_every_alpha(function):
    traces = []

    @jax.jit
    def count(sep, z):
        traces.append(sep)
        return function(sep, z)

    z = normal(20, 9)
    for alpha in (1.0, 1.2, 1.5, 2.0, 3.0):
        count(Entmax(alpha), z)
    assert len(traces) == 1


def test_no_two_separations_share_a_structure():
    """jaxlib compares dataclass nodes without their class, and then caches go wrong."""
    structures = [jax.tree.structure(sep) for sep in (*SEPARATIONS, TopK(10))]
    equal = [[a == b for a in structures] for b in structures]
    kinds = [type(sep) if isinstance(sep, Entmax) else sep for sep in SEPARATIONS]
    kinds.append(TopK(10))
    assert equal == [[a == b for a in kinds] for b in kinds]


@pytest.mark.few(6)
@every_separation
def test_calls_outside_of_jit_compile_once(sep, compilations):
    z, beta = normal(20, 9), jnp.asarray(2.0)
    for _ in range(2):
        before = len(compilations)
        sep(z)
        sep.tempered(z, beta)
        if sep.has_conjugate:
            sep.tempered_conjugate(z, beta)
        jax.grad(lambda z: sep(z)[0, 0])(z)
    assert len(compilations) == before


@pytest.mark.parametrize(
    "alpha", [0.9, 0.0, -1.0, np.nan, np.inf, np.resize([1.5, 0.9], 20)]
)
def test_alpha_out_of_range(alpha):
    z = normal(20, 9)
    rule = "finite" if np.all(np.isposinf(alpha)) else "at least 1"
    with pytest.raises(ValueError, match=f"alpha must be {rule}, got"):
        Entmax(alpha)(z)
    with pytest.raises(ValueError, match=f"alpha must be {rule}, got"):
        Entmax(alpha).conjugate(z)
    p = weights(Entmax(alpha), z)
    bad = np.broadcast_to(~(np.asarray(alpha) >= 1) | np.isposinf(alpha), 20)
    np.testing.assert_array_equal(np.isnan(p).all(-1), bad)
    np.testing.assert_array_equal(np.isnan(p).any(-1), bad)
    np.testing.assert_array_equal(np.isnan(conjugate(Entmax(alpha), z)), bad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Entmax(jnp.ones(3))(normal(2, 4)), r"alpha has shape \(3,\).*\(2,\)"),
        (lambda: Softmax()(jnp.float64(1.0)), "z must have at least one axis"),
        (
            lambda: Softmax()(normal(2, 4), where=jnp.ones((2, 4))),
            "where must be boolean, got dtype float64",
        ),
        (
            lambda: Softmax()(normal(2, 4), where=jnp.ones((3, 4), bool)),
            r"where has shape \(3, 4\).*\(2, 4\)",
        ),
        (lambda: Softmax()(jnp.ones(3, complex)), "z must be real, got dtype complex"),
        (
            lambda: Softmax()("text"),
            "z must be a numeric array of at most 64",
        ),
        (lambda: TopK(0)(normal(4)), "k must be at least 1, got 0"),
        (lambda: TopK(5)(normal(4)), "k must be at most 4, got 5"),
        (lambda: TopK(0.5)(normal(4)), "k must be an integer, got 0.5"),
        (lambda: TopK(True)(normal(4)), "k must be an integer, got True"),
        (lambda: Polynomial(0)(normal(4)), "degree must be at least 1, got 0"),
        (lambda: Polynomial(2.5)(normal(4)), "degree must be an integer, got 2.5"),
        (lambda: bounded_alpha(normal(), low=0.5), "low must be at least 1, got 0.5"),
        (lambda: bounded_alpha(normal(), low=2.0), "high must exceed low"),
        (
            lambda: separation_from_name("sparsmax"),
            "unknown separation 'sparsmax'; choose one of softmax, softmax1, entmax, "
            "entmax15, sparsemax, polynomial, topk",
        ),
    ],
)
def test_bad_input(untyped, call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", REGISTERED)
def test_separation_from_name(name):
    assert separation_from_name(name) == REGISTERED[name]()
    assert separation_from_name("entmax", alpha=1.2) == Entmax(1.2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16])
@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (1.2, 1.5), (1.0, 3.0)])
def test_bounded_alpha_stays_inside(low, high, dtype):
    raw = jnp.asarray([-1e30, -200, -1, 0, 1, 200, 1e30], dtype)
    alpha = np.asarray(bounded_alpha(raw, low=low, high=high))
    assert alpha.dtype == dtype
    assert (alpha > low).all() and (alpha < high).all()
    assert (np.diff(alpha.astype(np.float64)) >= 0).all()
    assert_close(alpha[3], (low + high) / 2)


@pytest.mark.parametrize(
    ("sep", "margin"),
    [
        (Softmax(), np.inf),
        (Softmax1(), np.inf),
        (Sparsemax(), 1.0),
        (Entmax(1.0), np.inf),
        (Entmax(1.5), 2.0),
        (Entmax(np.array([1.0, 3.0])), [np.inf, 0.5]),
        (Polynomial(10), np.inf),
        (TopK(1), 0.0),
        (TopK(3), np.inf),
    ],
    ids=repr,
)
def test_margin(sep, margin):
    np.testing.assert_array_equal(sep.margin(), margin)


finite = st.floats(-50, 50, width=64)
rows = npst.arrays(np.float64, 9, elements=finite)
shorter_rows = npst.arrays(np.float64, 8, elements=finite)
index = st.floats(1.01, 3.0)


@given(rest=shorter_rows, alpha=index, lead=st.sampled_from([0.5, 0.999, 1.001, 2.0]))
def test_one_hot_exactly_from_the_margin_on(rest, alpha, lead):
    sep = Entmax(alpha)
    top = rest.max() + lead * float(sep.margin())
    p = np.asarray(weights(sep, jnp.append(rest, top)))
    assert (p[-1] == 1 and not p[:-1].any()) == (lead >= 1)


@given(z=rows, alpha=st.floats(1.0, 3.0))
def test_entmax_is_a_distribution_in_the_order_of_the_overlaps(z, alpha):
    sep = Entmax(alpha)
    p = np.asarray(weights(sep, jnp.asarray(z)))
    assert (p >= 0).all()
    assert_close(p.sum(), 1.0)
    assert (np.diff(p[np.argsort(z)]) >= -1e-12).all()


@given(z=rows, other=rows, alpha=st.just(1.0) | index)
def test_fenchel_young_inequality(z, other, alpha):
    sep = Entmax(alpha)
    p = np.asarray(weights(sep, jnp.asarray(z)))
    q = np.asarray(weights(sep, jnp.asarray(other)))
    value = float(conjugate(sep, jnp.asarray(z)))
    assert_close(value, p @ z - tsallis(p, alpha), scale=1e2, floor=1e-7)
    assert value >= q @ z - tsallis(q, alpha) - 1e-7


@given(z=rows, alpha=st.floats(1.0, 3.0))
def test_the_jacobian_is_symmetric_positive_and_keeps_the_sum(z, alpha):
    jacobian = np.asarray(jacobian_of_entmax(alpha, jnp.asarray(z)))
    assert np.isfinite(jacobian).all()
    size = max(np.abs(jacobian).max(), 1.0)
    np.testing.assert_allclose(jacobian, jacobian.T, atol=1e-9 * size)
    np.testing.assert_allclose(jacobian.sum(-1), 0, atol=1e-9 * size)
    assert np.linalg.eigvalsh(jacobian).min() >= -1e-9 * size


@given(z=rows, factor=st.floats(1e-3, 1e3))
def test_polynomial_does_not_see_a_scale(z, factor):
    z = np.where(np.abs(z) < 1e-300, 0.0, z)  # XLA flushes subnormal products to zero
    scaled = weights(Polynomial(10), jnp.asarray(factor * z))
    assert_close(scaled, weights(Polynomial(10), jnp.asarray(z)), scale=10)


@given(z=npst.arrays(np.float64, 9, elements=st.sampled_from([-1.0, -0.0, 0.0, 1.0])))
def test_top_k_keeps_k_and_the_first_of_ties(z):
    p = np.asarray(weights(TopK(3), jnp.asarray(z)))
    kept = np.sort(np.argsort(-z, kind="stable")[:3])
    np.testing.assert_array_equal(np.flatnonzero(p), kept)


@given(z=rows)
def test_softmax1_is_softmax_with_a_null_memory(z):
    with_null = weights(Softmax(), jnp.append(jnp.asarray(z), 0.0))
    assert_close(weights(Softmax1(), jnp.asarray(z)), with_null[:-1])


@pytest.mark.few(6)
@pytest.mark.parametrize("sep", SEPARATIONS, ids=repr)
def test_nothing_needs_jit(sep):
    z = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6)))
    with jax.disable_jit():
        weights = sep(z)
    assert_close(weights, sep(z))
