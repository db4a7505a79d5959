"""Corruptions and their likelihoods, against definitions written out."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import assert_close, every_dtype

from uhop_jax import (
    Cosine,
    Mask,
    Model,
    NegativeSquaredL2,
    Noise,
    NormNoise,
    calibrate,
    fit_likelihood,
    posterior_mean,
    retrieve,
    theory,
)
from uhop_jax.corruption import Corruption

KEY = jax.random.key(0)
log_likelihood = jax.jit(lambda corrupt, *arrays: corrupt.log_likelihood(*arrays))


def halve(key, patterns):
    return patterns / 2


CORRUPTIONS = [
    Mask(0.3),
    Mask(0.3, known=True),
    Noise(0.3),
    Noise(0.3, low=None, high=None),
    Noise(0.3, low=-0.1, high=None),
    NormNoise(0.5),
    halve,
]


def images(*shape, seed=0, dtype=jnp.float64):
    """Uniform numbers with many exact zeros and ones."""
    numbers = np.random.default_rng(seed).uniform(-0.3, 1.3, size=shape)
    return jnp.asarray(numbers.clip(0, 1), dtype)


IMAGES = images(3, 20)


@pytest.mark.few(14)
@every_dtype
@pytest.mark.parametrize(
    "corrupt", CORRUPTIONS, ids=lambda c: c.__name__ if c is halve else repr(c)
)
def test_corruption_keeps_shape_and_dtype_and_follows_its_key(corrupt, dtype):
    patterns, corruption = images(3, 20, 30, dtype=dtype), Corruption.of(corrupt)
    query, observed = corruption(KEY, patterns)
    assert query.shape == patterns.shape
    assert query.dtype == dtype
    np.testing.assert_array_equal(query, corruption(KEY, patterns)[0])
    other, _ = corruption(jax.random.key(1), patterns)
    assert (query == other).all() == (corrupt is halve)
    if observed is None:
        assert not getattr(corrupt, "known", False)
    else:
        assert observed.dtype == bool
        np.testing.assert_array_equal(query, jnp.where(observed, patterns, 0 * query))


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.8, 1.0])
def test_mask_hides_its_fraction_of_every_pattern(fraction):
    patterns = jnp.ones((400, 100))
    query = np.asarray(Mask(fraction)(KEY, patterns))
    assert set(np.unique(query)) <= {0.0, 1.0}
    deviation = np.sqrt(fraction * (1 - fraction))
    assert abs(1 - query.mean() - fraction) <= 4 * deviation / 200
    for axis in (0, 1):  # independent over patterns and over components
        hidden = (query == 0).sum(axis)
        expected = deviation * np.sqrt(query.shape[axis])
        assert abs(hidden.std() - expected) <= 0.3 * expected


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
def test_noise_has_its_scale_and_is_clamped(scale):
    patterns = images(300, 100).clip(0.2, 0.7)
    raw = np.asarray(Noise(scale, low=None, high=None)(KEY, patterns) - patterns)
    assert abs(raw.mean()) <= 5 * scale / raw.size**0.5
    assert abs(raw.std() - scale) <= 0.02 * scale
    for low, high in [(0.0, 1.0), (0.2, None), (None, 0.7)]:
        clamped = Noise(scale, low=low, high=high)(KEY, patterns)
        np.testing.assert_array_equal(clamped, np.clip(patterns + raw, low, high))


@every_dtype
def test_clamped_patterns_are_in_the_range_of_their_dtype(dtype):
    noise = Noise(0.1, low=-0.3, high=0.1)  # neither is a binary fraction
    query = noise(KEY, jnp.zeros((3, 4), dtype))
    noise(KEY, jnp.clip(10 * query, noise.low, noise.high))
    noise(KEY, jnp.zeros((0, 4), dtype))


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_norm_noise_has_the_given_norm(scale):
    noise = NormNoise(scale, low=None, high=None)
    patterns = images(5, 7, 12)
    norms = np.linalg.norm(noise(KEY, patterns) - patterns, axis=-1)
    assert_close(norms, np.full((5, 7), scale))


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_mask_likelihood_is_the_product_over_components(fraction):
    memories = images(6, 8)
    query = jnp.concatenate([Mask(0.3)(KEY, memories), jnp.zeros((1, 8)), memories])
    expected = np.ones((len(query), 6))
    for (i, q), (j, m) in itertools.product(
        enumerate(np.asarray(query)), enumerate(np.asarray(memories))
    ):
        for a, c in zip(m, q, strict=True):
            expected[i, j] *= (1 - fraction) * (a == c) + fraction * (c == 0)
    with np.errstate(divide="ignore"):
        expected = np.log(expected)
    assert_close(log_likelihood(Mask(fraction), memories, query), expected)
    single = log_likelihood(Mask(fraction), memories, query[0])
    assert_close(single, expected[0])


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (None, 1.0), (0.0, None), (None, None)]
)
@pytest.mark.parametrize("scale", [0.2, 1.0])
def test_noise_likelihood_is_the_likelihood_of_clamped_gaussians(scale, low, high):
    memories, noise = images(6, 8), Noise(scale, low=low, high=high)
    query = noise(KEY, images(2, 5, 8, seed=1))
    a, c = np.asarray(memories), np.asarray(query)[..., None, :]
    log_p = scipy.stats.norm.logpdf(c, a, scale)
    if low is not None:
        assert (query == low).any()
        log_p = np.where(c == low, scipy.stats.norm.logcdf(low, a, scale), log_p)
    if high is not None:
        assert (query == high).any()
        log_p = np.where(c == high, scipy.stats.norm.logsf(high, a, scale), log_p)
    actual, expected = log_likelihood(noise, memories, query), log_p.sum(-1)
    assert_close(actual - actual[..., :1], expected - expected[..., :1])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "corrupt", [Mask(0.4), Noise(0.4), Noise(0.4, low=None), Noise(0.0)], ids=repr
)
def test_the_likelihood_ignores_unobserved_components(corrupt):
    memories = images(6, 8)
    query = corrupt(KEY, memories)
    order = np.random.default_rng(1).permuted(np.tile(np.arange(8), (6, 1)), axis=1)
    observed = jnp.asarray(order < 5)  # as many in each row: each number is a program
    hidden = jnp.where(observed, query, jnp.nan)
    of = jax.jit(corrupt.log_likelihood)
    likelihood = of(memories, hidden, observed=observed)
    for row, q, seen in zip(likelihood, query, observed, strict=True):
        expected = of(memories[:, seen], q[seen])
        assert np.isfinite(expected).any()
        assert_close(row, expected)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_known_mask_likelihood_is_over_the_observed_components(fraction):
    memories = jnp.round(images(20, 5))
    query, observed = Mask(fraction, known=True)(KEY, memories)
    likelihood = jax.jit(Mask(fraction, known=True).log_likelihood)(
        memories, query, observed=observed
    )
    fits = np.asarray((query[:, None] == memories[None]) | ~observed[:, None])
    seen = np.asarray(observed).sum(-1, keepdims=True)
    p = fits.all(-1) * fraction ** (5 - seen) * (1 - fraction) ** seen
    with np.errstate(divide="ignore"):
        assert_close(likelihood, np.log(p))


@pytest.mark.parametrize("fraction", [0.3, 0.8])
def test_the_limit_of_a_known_mask_is_the_mean_of_matching_memories(fraction):
    memories = jnp.round(images(20, 6))
    query, observed = Mask(fraction, known=True)(KEY, memories)
    hidden = jnp.where(observed, query, jnp.nan)
    fits = ((query[:, None] == memories[None]) | ~observed[:, None]).all(-1)
    expected = np.stack([np.asarray(memories[row]).mean(0) for row in fits])
    mask = Mask(fraction, known=True)
    assert_close(posterior_mean(mask, memories, hidden, observed=observed), expected)


def test_without_noise_a_query_is_its_memory():
    memories = images(6, 4)
    assert_close(posterior_mean(Noise(0.0), memories, memories[2]), memories[2])
    inside = jax.jit(posterior_mean)
    assert_close(inside(Noise(0.0), memories, memories), memories)
    nobody = inside(Noise(0.0), memories, memories / 2)  # outside of jit it is refused
    assert_close(nobody, np.tile(memories.mean(0), (6, 1)))


def test_posterior_mean_is_bayes_on_a_tiny_example():
    memories = jnp.asarray([[1.0, 2.0, 0.0], [1.0, 3.0, 4.0]])
    query = jnp.asarray([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    p, q = 0.4, 0.6
    first, second = (q * p, q * p * p), (p * p, p**3)  # of rows 0 and 2
    expected = [
        np.average(memories, axis=0, weights=first),
        memories[1],
        np.average(memories, axis=0, weights=second),
    ]
    assert_close(posterior_mean(Mask(p), memories, query), expected)
    half = memories.astype(jnp.bfloat16)
    assert posterior_mean(Mask(p), half, half).dtype == jnp.float32


def test_posterior_mean_of_raw_noise_is_softmax_of_squared_distance():
    memories, noise = images(6, 4), Noise(0.3, low=None, high=None)
    query = noise(KEY, memories)
    expected = retrieve(
        Model(NegativeSquaredL2(), beta=1 / (2 * 0.3**2)), memories, query
    )
    assert_close(posterior_mean(noise, memories, query), expected.state)


@pytest.mark.parametrize(
    "corrupt", [Mask(0.7), Noise(0.5), Noise(0.5, low=None)], ids=repr
)
def test_no_beta_does_better_than_the_posterior_mean(corrupt):
    memories = images(20, 6)
    target = jnp.tile(memories, (50, 1))
    query = corrupt(KEY, target)

    def errors(state):
        return np.asarray(((state - target) ** 2).sum(-1))

    limit = errors(jax.jit(posterior_mean)(corrupt, memories, query))
    for similarity in (Cosine(), NegativeSquaredL2()):
        for beta in (0.3, 1.0, 2.0, 5.0, 10.0, 30.0, 1000.0):
            state = retrieve(Model(similarity, beta=beta), memories, query).state
            worse = errors(state) - limit
            assert worse.mean() > -3 * worse.std() / worse.size**0.5


def test_new_numbers_of_a_corruption_do_not_recompile(compilations):
    apply = jax.jit(lambda corruption, key, x: corruption(key, x))
    patterns, other = images(4, 5), images(4, 5, seed=1)
    for make in (Mask, Noise, lambda _: halve):
        apply(Corruption.of(make(0.3)), KEY, patterns)
        before = len(compilations)
        assert before
        query, _ = apply(Corruption.of(make(0.9)), KEY, other)
        assert len(compilations) == before
        expected, _ = Corruption.of(make(0.9))(KEY, other)
        assert_close(query, expected)


def test_a_corruption_is_wrapped_once_and_keeps_the_dtype():
    wrapped = Corruption.of(Mask(0.3))
    assert Corruption.of(wrapped) is wrapped
    assert jax.tree.leaves(wrapped) == [0.3]
    doubled = Corruption.of(lambda key, x: (x.astype(jnp.float64), x > 0))
    query, observed = doubled(KEY, images(3, 4, dtype=jnp.float32))
    assert query.dtype == jnp.float32
    np.testing.assert_array_equal(observed, query > 0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: Mask()(key, jnp.zeros((2, 3))),
        lambda key: Noise()(key, jnp.zeros((2, 3))),
        lambda key: fit_likelihood(key, jnp.eye(3), Mask()),
        lambda key: calibrate(key, jnp.eye(3), Mask()),
        lambda key: theory.stored(key, Model(beta=1.0), jnp.eye(3)),
    ],
)
def test_only_one_random_key_is_a_key(untyped, draw):
    for key, got in (
        (0, "got 0"),
        (None, "got None"),
        (np.int64(3), r"got .*3"),
        (jnp.zeros(2), r"got shape \(2,\) and dtype float64"),
        (jax.random.split(KEY, 3), r"got shape \(3,\) and dtype key"),
    ):
        message = rf"key must be a JAX random key such as jax.random.key\(0\), {got}"
        with pytest.raises(ValueError, match=message):
            draw(key)


def test_a_key_of_unsigned_integers_is_the_same_key():
    for key in (jax.random.PRNGKey(0), jax.random.key_data(KEY)):
        np.testing.assert_array_equal(Mask()(key, IMAGES), Mask()(KEY, IMAGES))


def test_keys_of_either_kind_reach_a_corruption():
    def halves(key, patterns):
        kept = jax.random.bernoulli(jax.random.wrap_key_data(key), shape=patterns.shape)
        return jnp.where(kept, patterns, 0)

    kernel = fit_likelihood(jax.random.PRNGKey(0), IMAGES, halves, copies=2)
    assert np.isfinite(kernel.memory_table).all()


def unkeyed(key, patterns):
    return patterns * np.random.default_rng().uniform(size=patterns.shape)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: Corruption.of(0.5), "must be a function of a key.*got 0.5"),
        (
            lambda x: Corruption.of(lambda key, x: x[:2])(KEY, x),
            r"must keep the shape \(3, 4\), it returned \(2, 4\)",
        ),
        (lambda x: Mask(1.5)(KEY, x), r"fraction must be in \[0, 1\], got 1.5"),
        (lambda x: Mask(-0.5)(KEY, x), r"fraction must be in \[0, 1\], got -0.5"),
        (lambda x: Mask(np.nan)(KEY, x), r"fraction must be in \[0, 1\], got nan"),
        (lambda x: Mask("a")(KEY, x), "fraction must be a number, got 'a'"),
        (lambda x: Noise("a")(KEY, x), "scale must be a number, got 'a'"),
        (lambda x: calibrate(KEY, x, unkeyed), "corrupt must draw from its key alone"),
        (
            lambda x: fit_likelihood(KEY, jnp.stack([x, 1 - x]), unkeyed),
            "other draws, as of numpy.random, are made once",
        ),
        (
            lambda x: fit_likelihood(KEY, x, Corruption.of(unkeyed)),
            "corrupt must draw from its key alone",
        ),
        (lambda x: Mask(True)(KEY, x), "fraction must be a number, got True"),
        (lambda x: Noise(-1.0)(KEY, x), "scale must be at least 0, got -1"),
        (lambda x: Noise(np.nan)(KEY, x), "scale must be at least 0, got nan"),
        (lambda x: NormNoise(-1.0)(KEY, x), "scale must be at least 0, got -1"),
        (
            lambda x: NormNoise()(KEY, 3 * x - 1),
            r"patterns must be in the range \[0.0, 1.0\] to which NormNoise clamps",
        ),
        (
            lambda x: Noise()(KEY, 3 * x - 1),
            r"patterns must be in the range \[0.0, 1.0\] to which Noise clamps, got "
            r"values from -1 to 2: set low and high to their range, or to None",
        ),
        (
            lambda x: Noise(low=None, high=0.5)(KEY, x),
            r"in the range \[-inf, 0.5\] to which Noise clamps, got values from 0 to 1",
        ),
        (
            lambda x: jax.jit(functools.partial(Noise(), patterns=2 * x))(KEY),
            "patterns must be in the range",
        ),
        (
            lambda x: posterior_mean(Noise(), x - 1, x),
            r"memories must be in the range \[0.0, 1.0\] to which Noise clamps",
        ),
        (lambda x: posterior_mean(Noise(), x, 2 * x), "query must be in the range"),
        (
            lambda x: calibrate(KEY, 2 * x, Noise(0.1)),
            "memories must be in the range",
        ),
        (
            lambda x: fit_likelihood(KEY, 2 * x, Corruption.of(Noise(0.1))),
            "memories must be in the range",
        ),
        (
            lambda x: Noise(low=1.0, high=0.0)(KEY, x),
            "low must be below high, got low 1.0 and high 0.0",
        ),
        (lambda x: Noise(low=1.0)(KEY, x), "low must be below high"),
        (
            lambda x: Mask(jnp.asarray([0.1, 0.2]))(KEY, x),
            r"fraction must be one number, got shape \(2,\)",
        ),
        (lambda x: Noise(np.ones(4))(KEY, x), "scale must be one number"),
        (
            lambda x: posterior_mean(NormNoise(), x, x),
            "corruption must have a likelihood in closed form, .*, got NormNoise",
        ),
        (lambda x: posterior_mean(Mask(), x, x[:, :3]), "dimension 4, queries 3"),
        (
            lambda x: posterior_mean(halve, x, x),
            "must have a likelihood in closed form, as Mask.* got <function halve",
        ),
        (
            lambda x: posterior_mean(Mask(2.0), x, x),
            r"fraction must be in \[0, 1\], got 2.0",
        ),
        (lambda x: posterior_mean(Noise(-1.0), x, x), "scale must be at least 0"),
        (
            lambda x: posterior_mean(Mask(), x, x.at[1, 2].set(jnp.nan)),
            "query must be finite, got 1 NaN or infinite of 12",
        ),
        (
            lambda x: posterior_mean(Mask(), x.at[1, 2].set(jnp.nan), x),
            "memories must be finite, got 1",
        ),
        (
            lambda x: posterior_mean(Mask(), x, x.at[1].add(1)),
            r"no memory can have become 1 of the 3 queries under Mask\(fraction=0.5",
        ),
        (
            lambda x: posterior_mean(Noise(0.0), x, x / 2),
            "no memory can have become 3 of the 3 queries under Noise",
        ),
        (
            lambda x: posterior_mean(Mask(known=True), x, x),
            "observed must be given with the queries of a known mask",
        ),
        (
            lambda x: posterior_mean(Mask(known=True), x, x, observed=x),
            "observed must be boolean",
        ),
        (
            lambda x: posterior_mean(Mask(), x, x, observed=x[:, :3] > 0),
            r"observed has shape \(3, 3\), which does not broadcast to \(3, 4\)",
        ),
    ],
)
def test_bad_corruptions_are_refused(untyped, call, message):
    with pytest.raises(ValueError, match=message):
        call(images(3, 4))
