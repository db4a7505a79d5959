"""Sets of transformations of patterns, and the likelihood over them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

import uhop_jax as uhop
from uhop_jax.experiments.kinds import (
    Blur,
    ShiftedNoise,
)
from uhop_jax.transformations import (
    Blurs,
    Flips,
    Occlusions,
    Shifts,
    Transformations,
    Transformed,
    Union,
    Warps,
    image_transformations,
)

SHAPE = (8, 8, 1)


@pytest.mark.parametrize(
    "part",
    [
        Shifts(1, SHAPE),
        Flips(SHAPE),
        Blurs((0.5, 1.0), SHAPE),
        Warps((0.0, 10.0), (1.0, 1.2), SHAPE),
        Occlusions(4, 2, SHAPE),
    ],
    ids=lambda part: type(part).__name__,
)
def test_a_union_has_the_transformations_of_its_parts(digits, part):
    union = Union((Flips(SHAPE), part))
    assert union.number == 3 + part.number

    def every(transformations):
        index = jnp.arange(transformations.number)
        return jax.jit(jax.vmap(lambda i: transformations(i, digits[:3])))(index)

    assert_close(every(union)[3:], every(part))
    results = np.asarray(every(part)).reshape(part.number, -1)
    assert len(np.unique(results.round(4), axis=0)) == part.number


def test_shifts_blurs_and_warps_are_the_corruptions(digits):
    images = digits[:3]
    moved = ShiftedNoise(0.0, SHAPE)(jax.random.key(0), images)
    shifts = [Shifts(2, SHAPE)(i, images) for i in (2, 10, 14, 22)]
    nearest = min(float(jnp.abs(moved[0] - x[0]).max()) for x in shifts)
    assert nearest == 0
    blurred = Blur(1.0, SHAPE)(jax.random.key(0), images)
    assert_close(Blurs((1.0,), SHAPE)(jnp.int32(0), images), blurred)
    program = jax.make_jaxpr(lambda x: Blurs((1.0,), SHAPE)(jnp.int32(0), x))(images)
    assert str(program).count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2
    quarter = Warps((90.0,), (1.0,), SHAPE)(jnp.int32(0), images)
    turned = jnp.rot90(images.reshape(-1, *SHAPE), axes=(1, 2))
    assert_close(quarter.reshape(turned.shape), turned, floor=1e-4)


class Rolled(Transformations):
    """A set that a user wrote: components move in a circle."""

    @property
    def number(self):
        return 4

    def __call__(self, index, patterns):
        return jnp.roll(patterns, index, axis=1)


def test_a_likelihood_over_transformations_is_its_sum_and_is_saved(tmp_path):
    rng = np.random.default_rng(0)
    memories = jnp.asarray(rng.random((6, 5)), jnp.float64)
    query = jnp.asarray(rng.random((3, 5)), jnp.float64)
    kernel = uhop.fit_likelihood(jax.random.key(0), memories, uhop.Noise(0.2), copies=9)
    log_weights = jax.nn.log_softmax(jnp.arange(4.0))
    similarity = Transformed(kernel, transformations=Rolled(), log_weights=log_weights)
    expected = jax.nn.logsumexp(
        jnp.stack(
            [
                uhop.Dot(kernel)(jnp.roll(memories, i, axis=1), query) + log_weights[i]
                for i in range(4)
            ]
        ),
        axis=0,
    )
    assert_close(similarity(memories, query), expected)
    model = uhop.Model(similarity, beta=0.5)
    whole = uhop.retrieve(model, memories, query)
    streamed = uhop.retrieve_streamed(model, memories, query, block=4)
    assert_close(streamed.state, whole.state)
    on_host = uhop.retrieve_streamed(model, np.asarray(memories), query, block=4)
    assert_close(on_host.state, whole.state)
    path = uhop.save(tmp_path / "model.npz", model)
    assert_close(uhop.retrieve(uhop.load(path), memories, query).state, whole.state)
    assert not model.has_energy
    with pytest.raises(ValueError, match="degrees and scales"):
        Warps((1.0,), (1.0, 2.0), SHAPE)
    with pytest.raises(ValueError, match="height must be at least 1"):
        image_transformations((0, 3, 1))
    assert dataclasses.is_dataclass(similarity)
