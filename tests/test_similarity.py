"""Similarities, against definitions written out for one query at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOLERANCES, assert_close, every_dtype, slow_where
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from jax.test_util import check_grads

from uhop_jax import (
    Centering,
    Cosine,
    Dot,
    Identity,
    LikelihoodKernel,
    LinearKernel,
    LowRankKernel,
    NegativeL1,
    NegativeL2,
    NegativeSquaredL2,
    similarity_from_name,
)
from uhop_jax.similarity import SIMILARITIES as REGISTERED

COUNT, DIMENSION = 6, 5
COMPARISONS = (Dot, Cosine, NegativeSquaredL2, NegativeL2, NegativeL1)
DISTANCES = (NegativeSquaredL2, NegativeL2, NegativeL1)


def normal(*shape, seed=0, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


KERNELS = {
    "none": Identity(),
    "square": LinearKernel(normal(DIMENSION, DIMENSION, seed=1)),
    "rectangular": LinearKernel(
        normal(3, DIMENSION, seed=2), normal(DIMENSION, seed=3)
    ),
    "low rank": LowRankKernel(
        jnp.asarray(0.7),
        normal(DIMENSION, 2, seed=8),
        normal(2, DIMENSION, seed=9),
    ),
    "centering": Centering(normal(DIMENSION, seed=4)),
    "two-sided": Centering(normal(DIMENSION, seed=4), normal(DIMENSION, seed=10)),
}
LIKELIHOOD = LikelihoodKernel(
    memory_table=normal(4, 2, seed=5),
    query_table=normal(4, 2, seed=6),
    edges=jnp.asarray([-0.5, 0.1, 0.8]),
    pattern_dimension=DIMENSION,
)
SIMILARITIES = {
    f"{comparison.__name__}-{name}": comparison(kernel)
    for comparison in COMPARISONS
    for name, kernel in KERNELS.items()
}
SIMILARITIES["Dot-likelihood"] = Dot(LIKELIHOOD)


def each(similarities):
    return pytest.mark.parametrize(
        "similarity", similarities.values(), ids=list(similarities)
    )


def plain(similarity):
    """Whether a similarity compares raw patterns."""
    return isinstance(similarity.kernel, Identity)


def combines(similarity):
    """Whether a similarity is a distance of features; other cases cover its parts."""
    return isinstance(similarity, DISTANCES) and not plain(similarity)


every_similarity = each(SIMILARITIES)
without_kernel = each({k: s for k, s in SIMILARITIES.items() if plain(s)})
on_features = each({k: s for k, s in SIMILARITIES.items() if s.kernel != LIKELIHOOD})


def _features(kernel, x, observed, center="center"):
    x = np.asarray(x, np.float64)
    seen = np.ones(x.shape[-1], bool) if observed is None else np.asarray(observed)
    match kernel:
        case Identity():
            return x[..., seen]
        case LinearKernel():
            center = 0.0 if kernel.center is None else np.asarray(kernel.center)
            weights = np.asarray(kernel.weights, np.float64)
            return (x - center)[..., seen] @ weights[:, seen].T
        case LowRankKernel():
            return x[..., seen] @ np.asarray(kernel.weights)[:, seen].T
        case Centering():
            center = getattr(kernel, center)
            center = kernel.center if center is None else center
            return (x - np.asarray(center))[..., seen]


def naive_features(similarity, memories, query, observed=None):
    """Keys and state of one query, over its observed components alone."""
    kernel = similarity.kernel
    keys = _features(kernel, memories, observed)
    state = _features(kernel, query, observed, center="query_center")
    if isinstance(similarity, Cosine):
        keys, state = unit(keys), unit(state)
    return keys, state


def unit(x):
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(norm == 0, 1, norm)


def naive_compare(similarity, keys, state):
    match similarity:
        case Dot() | Cosine():
            return keys @ state
        case NegativeSquaredL2():
            return -((keys - state) ** 2).sum(-1)
        case NegativeL2():
            return -np.sqrt(((keys - state) ** 2).sum(-1))
        case NegativeL1():
            return -np.abs(keys - state).sum(-1)


def naive_overlaps(similarity, memories, query, observed=None):
    """Overlaps in float64, one query at a time."""
    if query.ndim > 1:
        seen = [None] * len(query) if observed is None else observed
        return np.stack(
            [
                naive_overlaps(similarity, memories, *row)
                for row in zip(query, seen, strict=True)
            ]
        )
    if isinstance(similarity.kernel, LikelihoodKernel):
        seen = slice(None) if observed is None else np.asarray(observed)
        stored = _tabulated(similarity.kernel, memories, "memory")[:, seen]
        asked = _tabulated(similarity.kernel, query, "query")[seen]
        return np.einsum("mjk,jk->m", stored, asked)
    return naive_compare(
        similarity, *naive_features(similarity, memories, query, observed)
    )


def _tabulated(kernel, x, side):
    table = np.asarray(getattr(kernel, f"{side}_table"))
    edges = np.asarray(kernel.edges)
    return table[(np.asarray(x)[..., None] >= edges).sum(-1)]


@jax.jit
def overlaps(similarity, memories, query, observed=None):
    return similarity(memories, query, observed=observed)


@jax.jit
def pull_back(similarity, memories, query, cotangent, observed=None):
    def f(memories, query):
        return similarity(memories, query, observed=observed)

    return jax.vjp(f, memories, query)[1](cotangent)


@slow_where(combines)
@every_similarity
def test_overlaps_equal_the_naive_ones(similarity):
    memories, query = normal(COUNT, DIMENSION), normal(4, DIMENSION, seed=7)
    expected = naive_overlaps(similarity, memories, query)
    assert_close(overlaps(similarity, memories, query), expected)
    assert_close(overlaps(similarity, memories, query[0]), expected[0])
    blocks = overlaps(similarity, memories, query.reshape(2, 2, DIMENSION))
    assert_close(blocks.reshape(4, COUNT), expected)


@slow_where(combines)
@every_similarity
def test_gram(similarity):
    memories = normal(COUNT, DIMENSION)
    gram = similarity.gram(memories)
    assert_close(gram, naive_overlaps(similarity, memories, memories))
    one_map = similarity.kernel.has_energy
    if isinstance(similarity, Cosine) and one_map:
        assert_close(jnp.diagonal(gram), np.ones(COUNT))
    if isinstance(similarity, DISTANCES) and one_map:
        np.testing.assert_array_equal(jnp.diagonal(gram), 0)


@pytest.mark.few(16)
@slow_where(combines)
@every_similarity
@pytest.mark.parametrize("hidden", [3.0, jnp.nan])
def test_unobserved_components_never_show(similarity, hidden):
    memories, query = normal(COUNT, DIMENSION), normal(4, DIMENSION, seed=7)
    observed = jnp.asarray(np.random.default_rng(8).random((4, DIMENSION)) < 0.6)
    observed = observed.at[0].set(True).at[1].set(False)
    expected = naive_overlaps(similarity, memories, query, observed)
    query = jnp.where(observed, query, hidden)
    assert_close(overlaps(similarity, memories, query, observed), expected)
    cotangent = normal(4, COUNT, seed=9)
    by_memory, by_query = pull_back(similarity, memories, query, cotangent, observed)
    assert jnp.isfinite(by_memory).all()
    assert jnp.isfinite(by_query).all()
    assert (jnp.where(observed, 0.0, by_query) == 0).all()


@every_similarity
def test_nan_shows(similarity):
    memories, query = normal(COUNT, DIMENSION), normal(4, DIMENSION, seed=7)
    z = overlaps(
        similarity, memories.at[1, 0].set(jnp.nan), query.at[2, 1].set(jnp.nan)
    )
    bad = (jnp.arange(4) == 2)[:, None] | (jnp.arange(COUNT) == 1)[None]
    np.testing.assert_array_equal(jnp.isnan(z), bad)


@pytest.mark.few(8)
@slow_where(combines)
@on_features
def test_gradient_over_the_observed(similarity):
    memories, query = normal(COUNT, DIMENSION), normal(2, DIMENSION, seed=7)
    observed = query > -0.5

    def f(memories, query):
        return overlaps(similarity, memories, query, observed)

    check_grads(f, (memories, query), 1, ("rev",))


@pytest.mark.few(8)
@slow_where(combines)
@every_similarity
def test_gradient(similarity):
    memories, query = normal(COUNT, DIMENSION), normal(2, DIMENSION, seed=7)
    modes = ("fwd", "rev") if plain(similarity) else ("rev",)
    check_grads(overlaps, (similarity, memories, query), 1, modes)


@slow_where(combines)
@on_features
def test_gradient_where_query_and_memory_coincide(similarity):
    similarity, memories = jax.tree.map(  # sums of which are exact
        lambda x: jnp.round(256 * x) / 256, (similarity, normal(COUNT, DIMENSION))
    )
    query = memories[:2]
    if getattr(similarity.kernel, "query_center", None) is not None:
        query += (similarity.kernel.query_center - similarity.kernel.center)[None]
    weight = jnp.zeros((2, COUNT)).at[0, 0].set(1.0)
    gradients = pull_back(similarity, memories, query, weight)
    for gradient in gradients:
        assert jnp.isfinite(gradient).all()
        if isinstance(similarity, DISTANCES):
            assert (gradient == 0).all()
    zero = jnp.zeros((COUNT, DIMENSION))
    for gradient in pull_back(similarity, zero, zero[:2], weight):
        assert jnp.isfinite(gradient).all()


@pytest.mark.few(3)
@pytest.mark.parametrize("comparison", DISTANCES)
@pytest.mark.parametrize("restricted", [False, True])
def test_a_large_common_offset_costs_no_digits(comparison, restricted):
    rng = np.random.default_rng(0)
    memories = jnp.asarray(1e4 + rng.normal(size=(8, 50)), jnp.float32)
    query = memories[:3] + jnp.asarray(rng.choice([0, 2**-9], (3, 50)), jnp.float32)
    observed = jnp.asarray(rng.random((3, 50)) < 0.7) if restricted else None
    expected = naive_overlaps(comparison(), memories, query, observed)
    actual = np.asarray(overlaps(comparison(), memories, query, observed))
    np.testing.assert_allclose(actual, expected, rtol=1e-3)

    cotangent = jnp.eye(3, 8, dtype=jnp.float32)
    _, by_query = pull_back(comparison(), memories, query, cotangent, observed)
    _, exact = pull_back(
        comparison(),
        memories.astype(jnp.float64),
        query.astype(jnp.float64),
        cotangent.astype(jnp.float64),
        observed,
    )
    np.testing.assert_allclose(
        by_query, exact, rtol=1e-3, atol=1e-3 * float(jnp.abs(exact).max())
    )


@pytest.mark.parametrize("size", [1e-30, 1e-160, 1e150])
def test_cosine_of_tiny_and_huge_vectors(size):
    memories, query = normal(COUNT, DIMENSION), normal(4, DIMENSION, seed=7)
    expected = naive_overlaps(Cosine(), memories, query)
    assert_close(overlaps(Cosine(), size * memories, size * query), expected)


@pytest.mark.few(27)
@slow_where(
    lambda similarity, dtype: (
        combines(similarity) or (not plain(similarity) and dtype == jnp.float16)
    )
)
@every_dtype
@every_similarity
def test_dtypes(similarity, dtype):
    memories = normal(COUNT, DIMENSION, dtype=dtype)
    query = normal(4, DIMENSION, seed=7, dtype=dtype)
    similarity = jax.tree.map(lambda leaf: leaf.astype(dtype), similarity)
    z = overlaps(similarity, memories, query)
    assert z.dtype == max(dtype, jnp.dtype(jnp.float32), key=lambda d: d.itemsize)
    floor = TOLERANCES[dtype] * (1 if plain(similarity) else 5)
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), similarity)
    assert_close(z, naive_overlaps(widened, memories, query), floor=floor)


coordinates = st.floats(-100, 100, width=64)


@pytest.mark.parametrize("comparison", DISTANCES)
@given(
    memories=npst.arrays(np.float64, (COUNT, DIMENSION), elements=coordinates),
    query=npst.arrays(np.float64, DIMENSION, elements=coordinates),
)
def test_the_nearest_pattern_has_the_largest_overlap(comparison, memories, query):
    order = 1 if comparison is NegativeL1 else 2
    distances = np.linalg.norm(memories - query, axis=-1, ord=order)
    z = np.asarray(overlaps(comparison(), jnp.asarray(memories), jnp.asarray(query)))
    assert z[distances.argmin()] >= z.max() - 1e-12 * max(1, abs(z).max())
    assert (z <= 0).all()


@given(
    x=npst.arrays(np.float64, (COUNT, DIMENSION), elements=coordinates),
    factor=st.floats(1e-3, 1e3),
)
def test_cosine_sees_no_length(x, factor):
    memories = jnp.asarray(x)
    z = np.asarray(overlaps(Cosine(), memories, memories))
    assert (np.abs(z) <= 1 + 1e-12).all()
    assert_close(overlaps(Cosine(), factor * memories, memories), z)


def test_no_two_similarities_share_a_structure():
    structures = [jax.tree.structure(s) for s in SIMILARITIES.values()]
    equal = [[a == b for a in structures] for b in structures]
    kinds = [
        (
            type(s),
            type(s.kernel),
            getattr(s.kernel, "center", None) is None,
            getattr(s.kernel, "query_center", None) is None,
        )
        for s in SIMILARITIES.values()
    ]
    assert equal == [[a == b for a in kinds] for b in kinds]


@pytest.mark.parametrize("name", REGISTERED)
@pytest.mark.parametrize("kernel", [Identity(), KERNELS["square"]])
def test_similarity_from_name(name, kernel):
    similarity = similarity_from_name(name, kernel)
    assert type(similarity) is REGISTERED[name]
    assert similarity.kernel is kernel


MEMORIES, QUERY = jnp.ones((3, 5)), jnp.ones(5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Dot()(MEMORIES, jnp.ones(4)),
            "memories have dimension 5, queries 4",
        ),
        (lambda: Dot()(jnp.ones(5), QUERY), r"memories must have .*got \(5,\)"),
        (lambda: Dot()(jnp.ones((0, 5)), QUERY), r"at least one, got \(0, 5\)"),
        (lambda: Dot()(MEMORIES, jnp.float64(1)), "query must have .* got a scalar"),
        (
            lambda: Dot(LinearKernel(jnp.ones((5, 4))))(MEMORIES, QUERY),
            "kernel maps dimension 4, memories have dimension 5",
        ),
        (
            lambda: Dot(Centering(jnp.ones(4)))(MEMORIES, QUERY),
            "kernel maps dimension 4, memories have dimension 5",
        ),
        (
            lambda: Dot(jnp.ones((5, 5)))(MEMORIES, QUERY),
            r"kernel must be a Kernel such as LinearKernel\(weights\)",
        ),
        (lambda: Dot(None)(MEMORIES, QUERY), "kernel must be .* got NoneType"),
        (
            lambda: Cosine(LIKELIHOOD)(MEMORIES, QUERY),
            "LikelihoodKernel compares by Dot alone, got Cosine",
        ),
        (
            lambda: Dot()(MEMORIES, QUERY, observed=jnp.ones(5)),
            "observed must be boolean .* got dtype float64",
        ),
        (
            lambda: Dot()(MEMORIES, QUERY, observed=jnp.ones(4, bool)),
            r"observed has shape \(4,\), which does not broadcast to \(5,\)",
        ),
        (lambda: Dot()("text", QUERY), "memories must be a numeric array"),
        (
            lambda: Dot()(MEMORIES, jnp.ones(5, complex)),
            "query must be real, got dtype complex",
        ),
        (
            lambda: similarity_from_name("manhattan"),
            "unknown similarity 'manhattan'; choose one of dot, cosine, squared_l2",
        ),
    ],
)
def test_bad_input(untyped, call, message):
    with pytest.raises(ValueError, match=message):
        call()
