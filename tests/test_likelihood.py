"""The likelihood kernel, and its free and smooth tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from uhop_jax import (
    Cosine,
    Dot,
    Mask,
    Model,
    Noise,
    fit_likelihood,
    posterior_mean,
    retrieve,
)
from uhop_jax.kernels import bins
from uhop_jax.likelihood import factors, probabilities, smooth_probabilities

KEY = jax.random.key(0)


def draw(*shape, seed=0, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def expected_table(counts):
    """Row probabilities, smoothed towards pairs of bins by a leave-one-out weight."""
    K = len(counts)
    if K == 1:
        return np.ones((1, 1))
    groups = np.arange(K)[:, None] // 2 == np.arange(-(-K // 2))
    common = counts.sum(0) + 0.5
    coarse = expected_table(groups.T @ counts @ groups)
    total = counts.sum(1)

    def prior(a, c):
        pair = common[c // 2 * 2 : c // 2 * 2 + 2].sum()
        return max(coarse[a // 2, c // 2] * common[c] / pair, 1e-16)

    p = np.array([[prior(a, c) for c in range(K)] for a in range(K)])
    rows, columns = np.nonzero(counts)
    seen, all_seen = counts[rows, columns], total[rows]

    def left_out(m):
        return (
            seen * np.log((seen - 1 + m * p[rows, columns]) / (all_seen - 1 + m))
        ).sum()

    m = max(np.geomspace(0.1, 1e6, 71), key=left_out)
    return (counts + m * p) / (total + m)[:, None]


@pytest.mark.few(1)
@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_likelihood_table_is_of_counts(scale):
    def corruption(key, x):  # rounded, so that compilation cannot change a bin
        return jnp.round(32 * Noise(scale)(key, x)) / 32

    memories = jnp.clip(draw(12, 9), 0, 1)
    kernel = fit_likelihood(KEY, memories, corruption, copies=3)
    stored, counts = np.asarray(bins(memories, kernel.edges)), np.zeros((65, 65))
    for key in jax.random.split(KEY, 3):
        query = np.asarray(bins(corruption(key, memories), kernel.edges))
        np.add.at(counts, (stored, query), 1)
    table = np.log(expected_table(counts))
    shares = (np.maximum(counts.sum(i) / counts.sum(), 1e-4) for i in (1, 0))
    rows, columns = (np.sqrt(share) for share in shares)
    table -= rows**2 @ table / (rows**2).sum()
    assert kernel.memory_table.shape == kernel.query_table.shape == (65, 65)
    assert_close(kernel.memory_table @ kernel.query_table.T, table, scale=100)

    query = corruption(jax.random.key(1), memories)
    seen = np.asarray(bins(query, kernel.edges))
    expected = table[stored[None], seen[:, None]].sum(-1)
    assert_close(Dot(kernel)(memories, query), expected, scale=100)

    def weighed(table):
        return rows[:, None] * np.asarray(table) * columns

    singular = np.linalg.svd(weighed(table), compute_uv=False)
    for rank in (1, 4, 65, None):
        cut = kernel.cut(rank)
        error = weighed(cut.memory_table @ cut.query_table.T - table)
        least = np.sqrt((singular[rank or 65 :] ** 2).sum())
        assert_close(np.linalg.norm(error), least, scale=100)
        again = fit_likelihood(KEY, memories, corruption, copies=3, rank=rank)
        jax.tree.map(np.testing.assert_array_equal, cut, again)


@pytest.mark.slow
def test_likelihood_learns_from_two_million_values():
    memories = draw(50, 400)
    default = fit_likelihood(KEY, memories, Mask(0.5))
    jax.tree.map(
        np.testing.assert_array_equal,
        default,
        fit_likelihood(KEY, memories, Mask(0.5), copies=100),
    )


def test_bins_have_equal_mass_except_for_repeated_values():
    # Most nonzero values are within a hundredth of the range, as in scans. A tenth of
    # them are one value, which is too rare for an atom.
    values = np.random.default_rng(0).uniform(size=(100, 300))
    grey = np.where(values < 0.7, 0, 1 - values**40)
    grey = jnp.asarray(np.where(values > 0.97, 0.99, grey))
    kernel = fit_likelihood(KEY, grey, Mask(0.5), copies=1)
    some = grey[(grey > 0) & (grey != 0.99)]
    masses = np.bincount(np.asarray(bins(some, kernel.edges)), minlength=65)
    # 64 edges: 16 on a grid, 2 around each of 0, the least and the largest of both.
    assert masses.max() < 1.1 * some.size / (64 - 16 - 2 * 3)
    assert np.diff(kernel.edges).max() < 1 / 14


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("corrupt", "rank", "most"),
    [
        (Mask(0.95), None, 1.2),
        (Noise(1.0), None, 1.07),
        (Noise(1.0), 2, 1.03),
        (Noise(2.0), 1, 1.03),
    ],
)
def test_likelihood_is_near_the_limit(corrupt, rank, most):
    # Like ink: mostly nothing, then any grey, or one of four that are nearly white.
    values, level = np.random.default_rng(0).uniform(size=(2, 100, 300))
    grey = np.where(values < 0.9, np.floor(256 * level), 252 + np.floor(4 * level))
    memories = jnp.asarray(np.where(values < 0.8, 0, grey) / 255)
    target = jnp.tile(memories, (20, 1))
    query = corrupt(jax.random.key(1), target)
    kernel = fit_likelihood(jax.random.key(2), memories, corrupt, rank=rank)
    state = retrieve(Model(Dot(kernel), beta=1.0), memories, query).state
    exact = posterior_mean(corrupt, memories, query)
    error, limit = (((x - target) ** 2).sum(-1).mean() for x in (state, exact))
    assert limit > 0.3
    assert error < most * limit


@pytest.mark.few(1)
@pytest.mark.parametrize(("number", "low"), [(20, 10), (25, 12)])
def test_likelihood_of_few_memories_learns_from_each(number, low):
    memories = jnp.append(0.0, jnp.arange(low, low + number - 1.0))[:, None]
    noise = Noise(0.3, low=None, high=None)
    kernel = fit_likelihood(jax.random.key(1), memories, noise)
    target = jnp.tile(memories, (100, 1))
    query = noise(jax.random.key(2), target)
    state = retrieve(Model(Dot(kernel), beta=1.0), memories, query).state
    exact = posterior_mean(noise, memories, query)
    error, limit = (((x - target) ** 2).mean() for x in (state, exact))
    assert error < 2 * limit


def test_likelihood_of_a_value_inside_the_range():
    # Masked to zero, a seventh of the values, which is not an end of the range.
    memories = draw(50, 100)
    kernel = fit_likelihood(KEY, memories, Mask(1 / 7))
    own = bins(jnp.zeros(()), kernel.edges)
    assert not (bins(memories, kernel.edges) == own).any()


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=jnp.dtype)
def test_likelihood_gives_atoms_bins_of_their_own(dtype):
    memories = jnp.clip(draw(30, 20, dtype=dtype) + 0.5, 0, 1)
    kernel = fit_likelihood(KEY, memories, Mask(0.3))
    inside = memories[(memories > 0) & (memories < 1)]
    assert inside.size > 100
    assert kernel.edges.dtype == dtype
    assert (np.diff(kernel.edges) >= 0).all()
    for atom in (0.0, 1.0):
        own = bins(jnp.asarray(atom, dtype), kernel.edges)
        assert not (bins(inside, kernel.edges) == own).any()


@pytest.mark.slow
def test_likelihood_of_batches_is_a_loop():
    memories = jnp.clip(draw(2, 30, 20), 0, 1)
    batch = fit_likelihood(KEY, memories, Mask(0.4), rank=3)
    assert batch.memory_table.shape == (2, 65, 3)
    for index, key in enumerate(jax.random.split(KEY, 2)):
        single = fit_likelihood(key, memories[index], Mask(0.4), rank=3)
        overlaps = (
            Dot(kernel)(memories[index], memories[index])
            for kernel in (jax.tree.map(lambda x, i=index: x[i], batch), single)
        )
        assert_close(*overlaps, scale=10)


def test_likelihood_retrieves_what_cosine_cannot():
    memories = jnp.asarray(np.random.default_rng(0).uniform(size=(30, 20)))
    query = Mask(0.8)(jax.random.key(1), memories)

    def error(similarity, beta):
        state = retrieve(Model(similarity, beta=beta), memories, query).state
        return float(((state - memories) ** 2).sum(-1).mean())

    kernel = fit_likelihood(jax.random.key(2), memories, Mask(0.8))
    cosine = min(error(Cosine(), beta) for beta in (1.0, 3.0, 10.0, 30.0, 100.0))
    assert error(Dot(kernel), 1.0) < 0.5 * cosine


@pytest.mark.parametrize("hidden", [0.0, np.nan])
def test_likelihood_of_known_masks_is_the_posterior_given_the_observed(hidden):
    def known_mask(key, x):
        query, observed = Mask(0.5, known=True)(key, x)
        return jnp.where(observed, query, hidden), observed

    numbers = np.random.default_rng(0).permutation(64)[:20, None]
    memories = jnp.asarray(numbers >> np.arange(6) & 1, jnp.float64)
    query, observed = known_mask(jax.random.key(1), memories)
    kernel = fit_likelihood(KEY, memories, known_mask, copies=1000)
    state = retrieve(
        Model(Dot(kernel), beta=1.0), memories, query, observed=observed
    ).state
    exact = posterior_mean(Mask(0.5, known=True), memories, query, observed=observed)
    np.testing.assert_allclose(state, exact, atol=0.01)


def test_likelihood_of_nothing_observed_prefers_no_memory():
    memories = draw(5, 4)
    kernel = fit_likelihood(KEY, memories, Mask(1.0, known=True))
    assert np.isfinite(kernel.edges).all()
    overlaps = Dot(kernel)(memories, memories)
    assert_close(overlaps, np.zeros((5, 5)))


def test_a_rank_is_refused_before_anything_is_counted(untyped):
    def corrupt(key, patterns):
        raise AssertionError("called")

    with pytest.raises(ValueError, match="rank must be at most 65, got 66"):
        fit_likelihood(KEY, draw(6, 8), corrupt, rank=66)


def test_likelihood_kernel_is_constant_to_derivatives():
    def total(memories):
        kernel = fit_likelihood(KEY, memories, Noise(0.3, None, None), copies=2)
        return sum(x.sum() for x in (kernel.memory_table, kernel.edges))

    assert not jax.grad(total)(draw(6, 8)).any()


def test_factors_of_a_table_are_its_logarithm():
    counts = jnp.asarray(np.random.default_rng(0).integers(1, 9, (5, 5)), jnp.float64)
    rows, columns = factors(counts)
    difference = rows @ columns.T - jnp.log(probabilities(counts))
    assert_close(difference - difference[:1], np.zeros((5, 5)))


def polynomial_table(theta, number=65):
    """Probabilities whose logarithm is a polynomial of both bins, and their rows."""
    x = np.linspace(-1, 1, number)
    powers = np.stack([x, x * x])
    table = np.exp(powers.T @ theta @ powers - 2 * x[None])
    rows = 1 + np.arange(number) % 3
    return table / table.sum(1, keepdims=True), rows


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_a_smooth_table_is_that_of_its_counts(scale):
    """Weak associations leave the share of a column, as the docstring says."""
    table, rows = polynomial_table(scale * np.array([[0.5, 0.2], [-0.3, 0.4]]))
    counts = jnp.asarray(1e5 * rows[:, None] * table)
    smooth = smooth_probabilities(counts)
    assert_close(smooth.sum(1), np.ones(65))
    share = np.asarray(counts.sum(0) / counts.sum())
    far = np.abs(np.asarray(table) / share - 1).mean()
    assert np.abs(np.asarray(smooth) / np.asarray(table) - 1).mean() <= 0.1 * far + 1e-5


def test_few_counts_of_a_smooth_table_need_few_coefficients():
    table, rows = polynomial_table(np.array([[1.0, 0.2], [-0.3, 0.4]]))
    rng = np.random.default_rng(0)
    counts = jnp.asarray(
        [rng.multinomial(10 * n, p) for n, p in zip(rows, table, strict=True)],
        jnp.float64,
    )

    def association(table):
        log = np.log(np.asarray(table))
        return log - log.mean(0) - log.mean(1, keepdims=True) + log.mean()

    def error(estimate):
        return float(((association(estimate) - association(table)) ** 2).mean())

    assert error(smooth_probabilities(counts)) < 0.2 * error(probabilities(counts))
    assert error(smooth_probabilities(counts)) < 0.2 * error(np.ones((65, 65)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_smooth_tables_of_extreme_counts(dtype):
    diagonal = 1e6 * jnp.eye(65, dtype=dtype)
    one = jnp.zeros((65, 65), dtype).at[3, 60].set(7.0)
    certain = jnp.zeros((65, 65), dtype).at[0, 1:].set(1e-3)
    certain = certain.at[(0, -1, -1), (0, -1, 0)].set(1e3)
    cases = jnp.zeros((65, 65), dtype), one, diagonal, diagonal[::-1], certain
    for counts in cases:
        smooth = smooth_probabilities(counts)
        assert smooth.dtype == dtype and bool(jnp.isfinite(smooth).all())
        # A table with zeros once gave a model of NaN (MNIST, blurred).
        assert bool((smooth >= 1e-16).all())
        assert_close(smooth.sum(1).astype(jnp.float64), np.ones(65), floor=1e-5)
    rising, falling = (
        smooth_probabilities(diagonal),
        smooth_probabilities(diagonal[::-1]),
    )
    assert (rising[10].argmax() < 20) and (falling[10].argmax() > 45)
