"""Queries that belong to no stored pattern."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, queries_of

import uhop_jax as uhop
from uhop_jax import data
from uhop_jax.corruption import Corruption
from uhop_jax.experiments.kinds import Inverted
from uhop_jax.foreign import (
    LONGEST,
    NEWTON,
    _drawn,
    _logistic,
    foreign_probability,
)
from uhop_jax.likelihood import _counts, factors, probabilities


def test_foreign_queries_are_told_from_own_ones(digits):
    memories = digits
    others = jnp.asarray(data.load("digits", limit=90).values[60:], jnp.float32)
    own, target = queries_of(memories, Inverted(0.1), 90)
    query = jnp.concatenate([own, Inverted(0.1)(jax.random.key(5), others)])
    calibration = uhop.calibrate_blind(memories, query)
    foreign = np.asarray(calibration.foreign(memories, query))
    assert foreign.shape == (120,) and foreign.min() >= 0 and foreign.max() <= 1
    assert np.median(foreign[:90]) < 0.1 and np.median(foreign[90:]) > 0.9
    assert abs(foreign.mean() - 30 / 120) < 0.08
    # A copy of a memory is no other memory, and does not make queries own or foreign.
    twice = jnp.concatenate([memories, memories[:7]])
    np.testing.assert_array_equal(calibration.foreign(twice, query), foreign)
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), calibration)
    assert_close(wide.foreign(memories, query), foreign.astype(float), floor=0.1)
    with pytest.raises(ValueError, match="memories must be three at least"):
        calibration.foreign(memories[:2], query)


def test_the_regression_recovers_from_sure_and_wrong_weights():
    """Full steps of Newton's method are a thousand times too long there."""
    rng = np.random.default_rng(0)
    z = np.concatenate([rng.normal(2, 1, (100, 2)), rng.normal(-2, 1, (100, 2))])
    design = jnp.asarray(np.concatenate([np.ones((200, 1)), z, z * z], -1))
    labels = jnp.asarray(np.repeat([1.0, 0.0], 100))
    weights = jnp.asarray([0.0, -5.0, -5.0, 0.0, 0.0])
    for _ in range(40):
        before, weights = weights, _logistic(design, labels, labels * 0 + 1, weights)
        moved = jnp.abs(design @ (weights - before)).max()
        assert moved <= LONGEST * NEWTON * (1 + 1e-9)
    assert moved < 1e-6
    assert ((design @ weights > 0) == (labels > 0)).mean() > 0.99


@pytest.mark.few(1)
@pytest.mark.parametrize(("own", "foreign"), [(90, 30), (90, 0), (2, 1)])
def test_foreign_queries_of_a_known_table(own, foreign):
    everything = jnp.asarray(data.load("digits", limit=300).values, jnp.float32)
    memories, others = everything[:100], everything[100:]
    corruption = Inverted(0.02)
    counts, edges = _counts(
        jax.random.key(0), memories, Corruption.of(corruption), copies=8
    )
    kernel = uhop.LikelihoodKernel(*factors(counts), edges, 64)
    stored = jnp.concatenate([memories[:own], others[:foreign]])
    query = corruption(jax.random.key(1), stored)
    about = uhop.Dot(kernel), probabilities(counts), memories, query
    p = np.asarray(foreign_probability(*about))
    assert p[:own].max() < 0.2 and (p[own:] > 0.8).all()


def test_columns_are_drawn_with_their_probabilities():
    table = jnp.asarray([[0.1, 0.0, 0.9], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    rows = jnp.tile(jnp.arange(3), (20_000, 1))
    drawn = np.asarray(_drawn(jax.random.key(0), table, rows))
    for row in range(3):
        share = np.bincount(drawn[:, row], minlength=3) / len(drawn)
        np.testing.assert_allclose(share, table[row], atol=0.01)
        assert (share[np.asarray(table[row]) == 0] == 0).all()
