"""The footprint similarity, and how it is learned from pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, every_dtype
from jax.test_util import check_grads

import uhop_jax as uhop
from uhop_jax import data
from uhop_jax.experiments.kinds import SaltAndPepper
from uhop_jax.experiments.rivals import LSR, REGRESSION, RIVALS, rival_scores

D = 6
RNG = np.random.default_rng(0)
MEMORIES, QUERY = (
    jnp.asarray(RNG.normal(size=(7, D))),
    jnp.asarray(RNG.normal(size=(2, 3, D))),
)
A, B = jnp.asarray(RNG.normal(size=(2, D)))
FOOTPRINT = uhop.Footprint(distance=A, product=B)


def naive(memories, query, observed=None):
    """The definition, in NumPy, for one memory and one query."""
    keep = np.ones(len(query), bool) if observed is None else observed
    total = 0.0
    for similarity, weights in (
        (-((memories - query) ** 2)[keep], A),
        ((memories * query)[keep], B),
    ):
        ordered = np.sort(similarity)[::-1]
        total += float(ordered @ np.asarray(weights)[: len(ordered)])
    return total


@pytest.mark.parametrize("partly", [False, True])
def test_overlaps_equal_the_definition(partly):
    observed = jnp.asarray(RNG.random(QUERY.shape) < 0.6) if partly else None
    actual = FOOTPRINT(MEMORIES, QUERY, observed=observed)
    memories, query = np.asarray(MEMORIES), np.asarray(QUERY)
    for place in np.ndindex(actual.shape):
        *row, m = place
        seen = None if observed is None else np.asarray(observed)[tuple(row)]
        assert_close(actual[place], naive(memories[m], query[tuple(row)], seen))


def test_equal_weights_give_the_distance_and_the_product():
    one, zero = jnp.ones(D), jnp.zeros(D)
    for distance, product, similarity in (
        (one, zero, uhop.NegativeSquaredL2()),
        (zero, one, uhop.Dot()),
    ):
        footprint = uhop.Footprint(distance=distance, product=product)
        assert_close(footprint(MEMORIES, QUERY), similarity(MEMORIES, QUERY))


def test_a_model_retrieves_streams_and_has_derivatives():
    model = uhop.Model(FOOTPRINT, beta=0.3)
    whole = uhop.retrieve(model, MEMORIES, QUERY, steps=2)
    for source in (MEMORIES, np.asarray(MEMORIES)):
        streamed = uhop.retrieve_streamed(model, source, QUERY, steps=2, block=3)
        assert_close(streamed.state, whole.state)
    assert not model.has_energy

    @jax.jit
    def total(distance, product, memories, query):
        similarity = uhop.Footprint(distance=distance, product=product)
        return similarity(memories, query).sum()

    check_grads(total, (A, B, MEMORIES, QUERY), 1, ("fwd", "rev"))


@every_dtype
def test_dtypes_and_wrong_lengths(dtype):
    result = FOOTPRINT(MEMORIES.astype(dtype), QUERY.astype(dtype))
    assert result.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
    assert jnp.isnan(FOOTPRINT(MEMORIES.at[1, 2].set(jnp.nan), QUERY)[..., 1]).all()
    with pytest.raises(ValueError, match=r"distance of Footprint must have shape \(5,"):
        FOOTPRINT(MEMORIES[:, :5], QUERY[..., :5])


def test_learned_from_pairs_it_beats_every_fixed_similarity():
    memories = jnp.asarray(data.load("digits", limit=40).values, jnp.float32)
    corruption = SaltAndPepper(0.7)
    footprint = uhop.fit_footprint(jax.random.key(0), memories, corruption, pairs=200)
    queries = corruption(jax.random.key(1), jnp.tile(memories, (5, 1)))

    def top1(similarity):
        nearest = similarity(memories, queries).argmax(-1)
        return float((nearest == jnp.arange(200) % 40).mean())

    fixed = (uhop.Dot(), uhop.Cosine(), uhop.NegativeSquaredL2(), uhop.NegativeL1())
    assert top1(footprint) > max(map(top1, fixed)) + 0.03
    # The softmax is the posterior: beta 1 is near the best.
    loss = [
        -jnp.log(
            uhop.retrieve(uhop.Model(footprint, beta=beta), memories, queries).weights[
                jnp.arange(200), jnp.arange(200) % 40
            ]
        ).mean()
        for beta in (0.3, 1.0, 3.0)
    ]
    assert loss[1] == min(loss)
    with pytest.raises(ValueError, match="scales must be at least 1, got 0"):
        uhop.fit_footprint(jax.random.key(0), memories, corruption, scales=0)


def test_footprints_of_features():
    """The features of a kernel are compared; a linear one may stand before."""
    key, memories = jax.random.key(0), MEMORIES.astype(jnp.float32)
    W = jnp.asarray(RNG.normal(size=(4, D)), jnp.float32)
    corrupt = uhop.Mask(0.3)
    kernel = uhop.LinearKernel(W)
    footprint = uhop.fit_footprint(key, memories, corrupt, kernel=kernel, pairs=20)
    assert footprint.distance.shape == (4,) and footprint.kernel is kernel
    copies = uhop.Footprint(distance=footprint.distance, product=footprint.product)
    query = QUERY.astype(jnp.float32)
    assert_close(footprint(memories, query), copies(memories @ W.T, query @ W.T))

    def partly(key, x):
        return x, jax.random.bernoulli(key, 0.5, x.shape)

    with pytest.raises(ValueError, match="kernel: copies with .* got LinearKernel"):
        uhop.fit_footprint(key, memories, partly, kernel=kernel)


@pytest.mark.slow  # the learned rivals are tested one by one
def test_rivals_may_compare_patterns_of_unit_norm():
    """Copies at a tenth of their strength: raw distances do not tell memories apart."""
    memories = jnp.asarray(data.load("digits", limit=30).values, jnp.float32)
    target = np.arange(30)

    def timed(name, call, *args, **options):
        return call(*args, **options)

    scores = rival_scores(
        tuple(RIVALS),
        jax.random.key(0),
        memories,
        0.1 * memories,
        target,
        lambda key, x: 0.1 * x,
        timed,
    )
    assert scores.keys() == RIVALS.keys()
    for name in (LSR, REGRESSION):
        setting, numbers = scores[name]
        assert setting.endswith("unit norm") and numbers["error"] < 1e-3
