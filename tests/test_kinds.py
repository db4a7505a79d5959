"""Corruptions of the experiments: from the authors' code, and dependent pixels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from scipy.stats import norm

from uhop_jax import Noise
from uhop_jax.experiments.evaluation import Queries, posterior_weights
from uhop_jax.experiments.kinds import (
    KINDS,
    Blur,
    Dropout,
    FoldedNoise,
    HiddenSquare,
    KnownMasks,
    Shift,
    corruption_of,
)

KEY = jax.random.key(0)
SHAPE = (6, 5, 3)
IMAGES = jnp.asarray(np.random.default_rng(0).uniform(0.1, 0.9, (4, 90)))


def as_images(x):
    return np.asarray(x).reshape(-1, *SHAPE)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_shape_and_is_a_function_of_its_key(kind):
    level = {"shift": 2.0, "blur": 1.0}.get(kind, 0.4)
    corrupt = corruption_of(kind, level, SHAPE)
    once, again = corrupt(KEY, IMAGES), corrupt(KEY, IMAGES)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    query = once[0] if isinstance(once, tuple) else once
    assert query.shape == IMAGES.shape and query.dtype == IMAGES.dtype
    assert (query != IMAGES).any()


def test_dropout_doubles_the_kept_components():
    query = np.asarray(Dropout(0.5)(KEY, IMAGES))
    kept = query != 0
    assert_close(query[kept], 2 * np.asarray(IMAGES)[kept])
    assert 0.3 < kept.mean() < 0.7


def test_folded_noise_is_never_negative_and_its_likelihood_is_bayes():
    scale, memories = 0.7, IMAGES[:3, :4]
    query = FoldedNoise(scale)(KEY, memories)
    assert (query >= 0).all() and (query <= 1).all()
    likelihood = FoldedNoise(scale).log_likelihood(memories, query)
    for q, row in zip(np.asarray(query), np.asarray(likelihood), strict=True):
        expected = []
        for m in np.asarray(memories):
            density = norm.pdf(q, m, scale) + norm.pdf(-q, m, scale)
            density = np.where(
                q >= 1, norm.sf(1, m, scale) + norm.cdf(-1, m, scale), density
            )
            expected.append(np.log(density).sum())
        assert_close(row - row[0], np.asarray(expected) - expected[0])


def maps_of(kind):
    """The patterns that noise is added to: one, or as many as are equally likely."""
    images = np.asarray(IMAGES).reshape(-1, *SHAPE)
    if kind == "inverted":
        return [1 - images]
    if kind == "gamma":
        return [0.6 * images**3]
    moved = []
    for rows, columns in ((0, 2), (0, -2), (2, 0), (-2, 0)):
        padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
        rolled = np.roll(padded, (rows, columns), (1, 2))
        moved.append(rolled[:, 2:-2, 2:-2])
    return moved


@pytest.mark.parametrize("kind", ["inverted", "gamma", "shift_noise"])
def test_likelihoods_of_noise_after_a_map_are_bayes(kind):
    scale = 0.4
    corrupt = corruption_of(kind, scale, SHAPE)
    query = np.asarray(corrupt(KEY, IMAGES))
    total = 0.0
    maps = maps_of(kind)
    for images in maps:
        m, q = images.reshape(len(images), -1)[None], query[:, None]
        density = np.where(q <= 0, norm.cdf(0, m, scale), norm.pdf(q, m, scale))
        density = np.where(q >= 1, norm.sf(1, m, scale), density)
        total = total + np.exp(np.log(density).sum(-1)) / len(maps)
    expected = np.log(total)
    actual = np.asarray(corrupt.log_likelihood(IMAGES, jnp.asarray(query)))
    # Up to a constant of the query.
    assert_close(actual - actual[:, :1], expected - expected[:, :1])
    assert (actual.argmax(1) == np.arange(len(IMAGES))).all()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("scale", [0.0, 1e-200, 1e-25])
def test_noise_of_scale_zero_identifies_the_memory(scale, dtype):
    memories = IMAGES[:4, :6].astype(dtype).at[0, 0].set(1.0)
    query = jnp.stack([memories[2], memories[0]])
    for noise in (FoldedNoise(scale), Noise(scale)):
        likelihood = noise.log_likelihood(memories, query)
        np.testing.assert_array_equal(
            jnp.exp(likelihood - likelihood.max(-1, keepdims=True)),
            jnp.eye(4)[jnp.array([2, 0])],
        )


@pytest.mark.parametrize("kind", ["mask", "known_mask", "noise", "folded_noise"])
def test_the_limit_of_no_corruption_is_the_memory_itself(kind):
    corruption = corruption_of(kind, 0.0, SHAPE)
    memories = IMAGES[None]
    observed = jnp.ones(memories.shape, bool) if kind == "known_mask" else None
    queries = Queries(memories, memories, observed)
    np.testing.assert_array_equal(
        posterior_weights(corruption, queries), jnp.eye(4)[None]
    )
    # A query that copies no memory leaves the prior, and no NaN.
    strangers = queries._replace(query=0.5 * memories.at[:, :2].multiply(2.0))
    weights = posterior_weights(corruption, strangers)[0]
    np.testing.assert_array_equal(weights[:2], jnp.eye(2, 4))
    np.testing.assert_allclose(weights[2:], 0.25, rtol=1e-6)


def test_values_clamped_far_from_a_memory_have_a_finite_likelihood():
    memories = jnp.asarray([[0.0, 0.1], [0.1, 0.0]], jnp.float32)
    likelihood = FoldedNoise(0.05).log_likelihood(
        memories, jnp.ones((1, 2), jnp.float32)
    )
    assert jnp.isfinite(likelihood).all()


def test_a_block_is_one_square_of_the_size_asked_for():
    images = as_images(HiddenSquare(0.3, SHAPE)(KEY, IMAGES))
    for image in images:
        gone = (image == 0).all(-1)
        rows, columns = np.flatnonzero(gone.any(1)), np.flatnonzero(gone.any(0))
        assert len(rows) == len(columns) == 3 == gone.sum() / 3
        assert np.ptp(rows) == np.ptp(columns) == 2


def test_a_blur_keeps_constants_and_is_a_gaussian():
    flat = jnp.full((1, 90), 0.4)
    assert_close(Blur(1.3, SHAPE)(KEY, flat), flat)
    dot = np.zeros(SHAPE)
    dot[3, 2] = 1
    blurred = as_images(Blur(0.5, SHAPE)(KEY, jnp.asarray(dot.reshape(1, -1))))[0]
    weights = np.exp(-0.5 * (np.arange(-6, 7) / 0.5) ** 2)
    assert_close(blurred[2, 2, 0] / blurred[3, 2, 0], weights[5] / weights[6])


def test_a_shift_moves_by_whole_pixels():
    images = as_images(IMAGES)
    for before, after in zip(
        images, as_images(Shift(2, SHAPE)(KEY, IMAGES)), strict=True
    ):
        moves = []
        for axis, step in ((0, 2), (0, -2), (1, 2), (1, -2)):
            moved = np.roll(before, step, axis)
            index = [slice(None)] * 3
            index[axis] = slice(0, 2) if step > 0 else slice(-2, None)
            moved[tuple(index)] = 0
            moves.append(np.array_equal(moved, after))
        assert sum(moves) == 1


def test_known_masks_are_the_given_ones():
    masks = jnp.asarray(np.random.default_rng(1).random((3, 90)) < 0.5)
    query, known = KnownMasks(masks)(KEY, IMAGES)
    given = {np.asarray(mask).tobytes() for mask in masks}
    assert {np.asarray(mask).tobytes() for mask in known} <= given
    np.testing.assert_array_equal(query, np.where(known, IMAGES, 0))
    worse, known = KnownMasks(masks, lambda key, x: 1 - x)(KEY, IMAGES)
    np.testing.assert_array_equal(worse, np.where(known, 1 - IMAGES, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("smear", 0.5, SHAPE), "unknown corruption.kinds 'smear'"),
        (("noise", -1.0, SHAPE), "levels must be at least 0, got -1"),
        (("block", 1.5, SHAPE), r"of a block must be in \[0, 1\], got 1.5"),
        (("block", 0.5, (20, 80, 1)), "image of 20 x 80 has 28 pixels a side"),
        (("blur", 0.0, SHAPE), "of a blur must be positive"),
        (("shift", 1.5, SHAPE), "must be whole pixels, fewer than 5, got 1.5"),
        (("blur", 1.0, (90,)), r"a blur needs images, got patterns of shape \(90,\)"),
    ],
)
def test_bad_corruptions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        corruption_of(*arguments)
    with pytest.raises(ValueError, match="the reference protocol has mask"):
        corruption_of("shift", 1.0, SHAPE, reference=True)
    with pytest.raises(ValueError, match="must be below 1 in the reference .* got 1.0"):
        corruption_of("mask", 1.0, SHAPE, reference=True)  # 0/0 is no pixel
