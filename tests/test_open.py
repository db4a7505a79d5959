"""A separation and a similarity that a user defines work wherever shipped ones do."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx

import uhop_jax as uhop
from uhop_jax import layers
from uhop_jax.similarity import Similarity


class Smoothed(uhop.Separation):
    """Softmax, mixed with the uniform distribution over the valid memories."""

    share: float = 0.1

    def _weights(self, z):
        valid = (z > -jnp.inf).astype(z.dtype)
        uniform = valid / jnp.maximum(valid.sum(-1, keepdims=True), 1)
        return (1 - self.share) * uhop.Softmax()(z) + self.share * uniform

    def _conjugate(self, z):
        valid = z > -jnp.inf
        count = jnp.maximum(valid.sum(-1), 1).astype(z.dtype)
        mean = jnp.where(valid, z, 0.0).sum(-1) / count
        return (1 - self.share) * uhop.Softmax().conjugate(z) + self.share * mean


class Huber(Similarity):
    """Minus the Huber distance: squares of small differences, sizes of large ones."""

    def _compare(self, keys, state, restrict):
        keys = keys.reshape((1,) * (state.ndim - 1) + keys.shape)
        far = jnp.abs(state[..., None, :] - keys)
        each = jnp.where(far < 1, 0.5 * far**2, far - 0.5)
        if restrict is not None:
            each = jnp.where(restrict[..., None, :], each, 0.0)
        return -each.sum(-1)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


M, D = 41, 5
MEMORIES, QUERY, VALUES = draw(M, D), draw(3, D, seed=1), draw(M, 2, seed=2)
MASK, OBSERVED = jnp.arange(M) % 5 > 0, draw(3, D, seed=3) > -0.5
MODELS = [
    uhop.Model(separation=Smoothed(0.2), beta=2.0),
    uhop.Model(Huber(), beta=1.5),
    uhop.Model(Huber(), Smoothed(), beta=1.5),
]
every_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def naive(model, query, mask=None):
    """Overlaps and weights in NumPy."""
    if isinstance(model.similarity, Huber):
        far = np.abs(np.asarray(query)[:, None] - np.asarray(MEMORIES)[None])
        z = -np.where(far < 1, 0.5 * far**2, far - 0.5).sum(-1)
    else:
        z = np.asarray(query) @ np.asarray(MEMORIES).T
    valid = np.ones(M, bool) if mask is None else np.asarray(mask)
    e = np.where(valid, np.exp(float(model.beta) * z), 0.0)
    share = getattr(model.separation, "share", 0.0)
    return (1 - share) * e / e.sum(-1, keepdims=True) + share * valid / valid.sum()


@every_model
def test_retrieval_equals_the_naive_one(model):
    result = uhop.retrieve(model, MEMORIES, QUERY, values=VALUES, mask=MASK)
    weights = naive(model, QUERY, MASK)
    assert_close(result.weights, weights)
    assert_close(result.state, weights @ np.asarray(VALUES))
    state = uhop.retrieve(model, MEMORIES, QUERY, steps=3).state
    expected = QUERY
    for _ in range(3):
        expected = naive(model, expected) @ np.asarray(MEMORIES)
    assert_close(state, expected)
    seen = uhop.retrieve(model, MEMORIES, QUERY, observed=OBSERVED)
    hidden = jnp.where(OBSERVED, QUERY, 7.0)
    again = uhop.retrieve(model, MEMORIES, hidden, observed=OBSERVED)
    assert_close(seen.state, again.state)


@every_model
def test_fixed_points_energies_and_trajectories(model):
    end = uhop.converge(model, MEMORIES, QUERY, max_steps=2000)
    assert end.converged.all()
    again = uhop.retrieve(model, MEMORIES, end.pattern)
    assert_close(again.state, end.pattern, scale=100)
    path = uhop.trajectory(model, MEMORIES, QUERY, steps=4)
    if isinstance(model.similarity, Huber):
        assert not model.has_energy and path.energies is None
        with pytest.raises(ValueError, match="no energy is known that Huber"):
            uhop.energy(model, MEMORIES, QUERY)
        return
    assert (jnp.diff(path.energies) <= 1e-12).all()
    slope = jax.grad(lambda x: uhop.energy(model, MEMORIES, x).sum())(QUERY)
    assert_close(slope, QUERY - uhop.retrieve(model, MEMORIES, QUERY).state)


@pytest.mark.few(2)
@every_model
def test_streaming_from_an_array_a_file_and_an_iterator(model, tmp_path):
    np.save(tmp_path / "m.npy", MEMORIES)
    expected = uhop.retrieve(model, MEMORIES, QUERY, steps=2)
    best, index = jax.lax.top_k(expected.weights, 3)
    pieces = np.split(np.asarray(MEMORIES), [7, 30])
    for source in (MEMORIES, tmp_path / "m.npy", lambda: iter(pieces)):
        options = {"steps": 2, "top": 3, "block": 8, "query_block": 2}
        streamed = uhop.retrieve_streamed(model, source, QUERY, **options)
        assert_close(streamed.state, expected.state)
        assert_close(streamed.weights, best)
        np.testing.assert_array_equal(streamed.nearest, index)
    broken = MEMORIES.at[0].set(jnp.nan)  # masked
    masked = uhop.retrieve(model, broken, QUERY, mask=MASK, values=VALUES)
    options = {"mask": MASK, "values": VALUES, "block": 8}
    streamed = uhop.retrieve_streamed(model, broken, QUERY, **options)
    assert_close(streamed.state, masked.state)
    with_values = uhop.retrieve_streamed(
        model, np.asarray(MEMORIES), QUERY, values=np.asarray(VALUES), block=8
    )
    direct = uhop.retrieve(model, MEMORIES, QUERY, values=VALUES)
    assert_close(with_values.state, direct.state)


@every_model
def test_gradients_in_everything(model):
    def loss(run, model, memories, query):
        return (run(model, memories, query).state ** 2).sum()

    direct, streamed = (
        jax.jit(jax.grad(lambda *x, run=run: loss(run, *x), (0, 1, 2)))(
            jax.tree.map(jnp.asarray, model), MEMORIES, QUERY
        )
        for run in (uhop.retrieve, uhop.retrieve_streamed)
    )
    for a, b in zip(*map(jax.tree.leaves, (direct, streamed)), strict=True):
        assert_close(a, b, scale=10)


@pytest.mark.parametrize("heads", [1, 2])
def test_layers(heads):
    association = layers.Association(Smoothed(0.3))
    layer = layers.Hopfield(
        D, association, num_heads=heads, head_size=4, rngs=nnx.Rngs(0)
    )
    weights = layer.associate(
        *(x[None].astype(jnp.float32) for x in (QUERY, MEMORIES))
    ).weights
    assert_close(weights.sum(-1), np.ones(weights.shape[:-1]))
    assert weights.min() >= 0.3 / M * (1 - 1e-6)


def test_calibration_chooses_among_them():
    candidates = {"huber": Huber(), "dot": uhop.Dot()}
    calibration = uhop.calibrate(
        jax.random.key(0),
        MEMORIES,
        uhop.Noise(0.1, None, None),
        queries=80,
        separations=(Smoothed(0.01), uhop.Softmax()),
        candidates=candidates,
    )
    assert calibration.name == "huber"
    assert isinstance(calibration.model.similarity, Huber)
    assert type(calibration.model.separation) in (Smoothed, uhop.Softmax)


def test_a_saved_model_is_loaded_in_another_process_and_sharded(tmp_path):
    model = uhop.Model(Huber(), Smoothed(0.25), beta=1.5)
    path = uhop.save(tmp_path / "model", model)
    loaded = uhop.load(path)
    assert loaded == model
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path.parent)!r})
import uhop_jax
try:
    uhop_jax.load({str(path)!r})
except ValueError as error:
    print(error)
"""
    program_with_classes = f"""
import sys
sys.path.insert(0, {__file__.rpartition("/")[0]!r})
import jax
jax.config.update("jax_enable_x64", True)
import test_open, uhop_jax
model = uhop_jax.load({str(path)!r})
print(type(model.separation) is test_open.Smoothed, model.separation.share)
mesh = uhop_jax.memory_mesh(4)
split = uhop_jax.shard_memories(test_open.MEMORIES, mesh)
for memories, mask in ((test_open.MEMORIES, None), split):
    result = uhop_jax.retrieve(model, memories, test_open.QUERY, mask=mask, steps=2)
    print(float((result.state ** 2).sum()))
"""
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
    refused, result = (
        subprocess.run(
            [sys.executable, "-c", text],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"XLA_FLAGS": flags},
        ).stdout
        for text in (program, program_with_classes)
    )
    assert "a test_open.Huber is unknown to this program" in refused
    state = uhop.retrieve(model, MEMORIES, QUERY, steps=2).state
    flag, *totals = result.splitlines()
    assert flag == "True 0.25"
    for total in totals:
        assert_close(float(total), (state**2).sum())


class Sharper(uhop.Softmax):
    """Weights of its own in a subclass of a shipped separation."""

    def _weights(self, z):
        return uhop.Softmax()(2 * z)


def test_a_subclass_with_other_weights_inherits_nothing_that_belongs_to_the_old_ones():
    model, twice = uhop.Model(separation=Sharper(), beta=1.0), uhop.Model(beta=2.0)
    expected = uhop.retrieve(twice, MEMORIES, QUERY)
    assert_close(uhop.retrieve(model, MEMORIES, QUERY).state, expected.state)
    streamed = uhop.retrieve_streamed(model, np.asarray(MEMORIES), QUERY, block=8)
    assert_close(streamed.state, expected.state)
    assert not model.has_energy and model.separation.margin() == jnp.inf


def test_a_static_hint_cannot_contradict_a_leaf():
    for alpha in (1.0, 1.3, 1.5, 2.0, 3.0):
        for cases in (True, False):
            weights = uhop.Entmax(alpha, cases=cases)(QUERY)
            assert_close(weights, uhop.Entmax(alpha)(QUERY))
            assert_close(weights.sum(-1), np.ones(3))
    assert_close(uhop.Entmax15()(QUERY), uhop.Entmax(1.5)(QUERY))
