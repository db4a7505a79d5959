"""The contrastive loss: patterns that find themselves from corrupted views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from ml_collections import ConfigDict

import uhop_jax as uhop
from uhop_jax.contrastive import stage_one_loss
from uhop_jax.layers import (
    Hopfield,
    KernelParam,
    ResidualFeatures,
    separation_losses,
)
from uhop_jax.training.arms import ARMS, arm_of, features_of


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_is_a_cross_entropy(normalize):
    """Against NumPy; patterns that are not valid count nowhere, even if NaN."""
    features, views = draw(2, 5, 3), draw(2, 5, 3, seed=1)
    valid = np.array([[True, True, False, True, True], [True, False, True, True, True]])
    broken = jnp.where(jnp.asarray(valid)[..., None], features, jnp.nan)
    loss = uhop.ContrastiveLoss(0.7, normalize=normalize)
    got = loss(broken, views, where=jnp.asarray(valid))
    for i in range(2):
        f, v = (np.asarray(x[i], np.float64)[valid[i]] for x in (features, views))
        if normalize:
            f, v = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (f, v))
        p = np.exp(1.4 * v @ f.T)
        expected = -np.log(np.diag(p) / p.sum(1)).mean()
        assert_close(got[i], expected, scale=3)
    assert not loss(features, views, where=jnp.zeros((2, 5), bool)).any()


def test_stage_one_of_a_layer_draws_views():
    """The views come from the key of the call; the kernel alone has a gradient."""
    layer = Hopfield(6, kernel=True, rngs=nnx.Rngs(0))
    loss, state = uhop.ContrastiveLoss(), draw(3, 4, 6)
    one, same, other = (
        separation_losses(layer, state, loss=loss, key=jax.random.key(seed)).loss
        for seed in (0, 0, 1)
    )
    assert one == same != other
    with pytest.raises(ValueError, match="key must be a key of jax.random, with which"):
        separation_losses(layer, state, loss=loss)
    slope = nnx.grad(
        lambda m: separation_losses(m, state, loss=loss, key=jax.random.key(0)).loss[0],
        argnums=nnx.DiffState(0, KernelParam),
    )(layer)
    assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(slope))


def test_views_of_a_layer_are_checked(untyped):
    model, x = Hopfield(5, kernel=True, rngs=nnx.Rngs(1)), draw(3, 4, 5)
    options = {"key": jax.random.key(0)}

    def losses(view):
        loss = uhop.ContrastiveLoss(view=view)
        return separation_losses(model, x, loss=loss, **options).loss

    assert_close(losses(uhop.Mask(0.5, known=True)), losses(uhop.Mask(0.5)))
    with pytest.raises(ValueError, match="got None"):
        losses(None)
    options["key"] = 3
    with pytest.raises(ValueError, match="key must be a JAX random key .*, got 3"):
        losses(uhop.Mask(0.5))


def test_alignment_is_what_uniformity_lacks():
    """A kernel by the contrastive loss finds masked patterns better than one by U-Hop.

    Half of the components are noise of no use, and larger than the rest: the average
    loss is content to spread it, the contrastive loss learns to leave it out.
    """
    signal, noise = draw(40, 8), 4 * draw(40, 8, seed=1)
    memories = jnp.concatenate([signal, noise], axis=1)

    def view(key, patterns):
        fresh = 4 * jax.random.normal(key, (*patterns.shape[:-1], 8), patterns.dtype)
        return jnp.concatenate([patterns[..., :8], fresh], axis=-1)

    contrastive = uhop.ContrastiveLoss(view=view)

    @jax.jit
    def steps(weights, keys):
        def step(w, key):
            def value(w):
                return contrastive(memories @ w, view(key, memories) @ w)

            return w - 0.3 * jax.grad(value)(w), None

        return jax.lax.scan(step, weights, keys)[0]

    weights = steps(
        jnp.eye(16, dtype=jnp.float32), jax.random.split(jax.random.key(0), 150)
    )
    average = uhop.fit_sgd(memories, relative_rate=0.01, steps=150).kernel
    query, errors = view(jax.random.key(9), memories), []
    for kernel in (uhop.LinearKernel(weights.T), average):
        similarity = uhop.Cosine(kernel)
        weights = uhop.retrieve(uhop.Model(similarity, beta=20.0), memories, query)[1]
        errors.append(float((weights.argmax(-1) != jnp.arange(40)).mean()))
    assert errors[0] < 0.2 < 0.5 < errors[1]


def test_a_residual_kernel_begins_as_the_identity():
    kernel = ResidualFeatures(5, rngs=nnx.Rngs(0))
    x = draw(3, 5)
    assert_close(kernel(x), x)
    layer = Hopfield(5, kernel=kernel, rngs=nnx.Rngs(1))
    assert_close(layer(x), Hopfield(5, rngs=nnx.Rngs(1))(x))
    assert isinstance(kernel.hidden.weights, KernelParam)
    assert kernel.hidden.feature_size == 10


def test_names_of_losses_and_arms():
    assert isinstance(stage_one_loss("deep", 3.0), uhop.DeepLoss)
    loss = stage_one_loss("contrastive", 3.0, 0.25)
    assert (loss.t, loss.view) == (3.0, uhop.Mask(0.25))
    with pytest.raises(ValueError, match="separation loss"):
        stage_one_loss("contrastively")
    options = ConfigDict({"start": "identity", "rngs": nnx.Rngs(0)})
    for name, arm in ARMS.items():
        if arm.kernel:
            kernel = features_of(arm_of(name), 4, **options)
            assert isinstance(kernel, ResidualFeatures) == ("residual" in name)
