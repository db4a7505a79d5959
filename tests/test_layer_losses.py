"""Kernels of layers, and the separation losses that move them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from layer_parts import MEMORIES, STATE, B, D, L, S, layer, patterns

import uhop_jax as uhop
from uhop_jax.layers import (
    Hopfield,
    KernelParam,
    LinearFeatures,
    separation_losses,
)

DIRECT = {"value_size": D}


def test_separation_losses_move_the_kernel_alone():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first = Hopfield(D, kernel=True, rngs=rngs)
            self.second = Hopfield(D, kernel=True, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    model = Two(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    losses, gaps = separation_losses(model, STATE)
    features = [STATE, model.first(STATE)]
    expected = [uhop.AverageLoss()(f).mean() for f in features]
    assert_close(losses, jnp.stack(expected))
    number, size = STATE.shape[-2:]
    least = uhop.AverageLoss().least(number, size)
    assert_close(gaps, losses - float(least))
    after = nnx.to_pure_dict(nnx.state(model))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    graphdef, kernels, rest = nnx.split(model, KernelParam, ...)
    assert len(jax.tree.leaves(kernels)) == 2

    def total(kernels, rest, through):
        merged = nnx.merge(graphdef, kernels, rest)
        return separation_losses(merged, STATE, through=through).loss[1]

    slope = jax.jit(jax.grad(total, (0, 1)), static_argnums=2)
    own, others = slope(kernels, rest, False)
    assert float(abs(own["first"]["kernel"]["weights"][...]).max()) == 0
    assert float(abs(own["second"]["kernel"]["weights"][...]).max()) > 0
    assert all(float(abs(x).max()) == 0 for x in jax.tree.leaves(others))
    through, _ = slope(kernels, rest, True)
    assert float(abs(through["first"]["kernel"]["weights"][...]).max()) > 0


def test_separation_losses_of_a_model_that_is_a_constant_of_a_trace():
    model = layer(8, kernel=True)
    x = patterns(2, 3, 8)
    expected = separation_losses(model, x).loss
    assert_close(jax.jit(lambda x: separation_losses(model, x).loss)(x), expected)

    def total(x):
        return separation_losses(model, x, through=True).loss.sum()

    slope = jax.grad(total)(x)
    assert_close(jax.jit(jax.grad(total))(x), slope)
    assert np.abs(slope).max() > 1e-3


def test_separation_losses_of_layers_in_a_loop_or_a_map():
    x = jax.random.normal(jax.random.key(0), (3, 5, 8), jnp.float32)

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stacked(rngs):
        return Hopfield(8, num_heads=2, kernel=True, rngs=rngs)

    class Scanned(nnx.Module):
        def __init__(self):
            self.layers = stacked(nnx.Rngs(0))

        def __call__(self, x):
            def step(x, layer):
                return x + layer(x)

            return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    class Mapped(Scanned):
        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(
                self.layers, x
            )

    class Listed(nnx.Module):
        def __init__(self, layers, one_after_the_other):
            graph, state = nnx.split(layers)
            parts = [jax.tree.map(lambda x, i=i: x[i], state) for i in range(3)]
            self.layers = nnx.data([nnx.merge(graph, part) for part in parts])
            self.scanned = one_after_the_other

        def __call__(self, x):
            for one in self.layers:
                y = one(x)
                x = x + y if self.scanned else x
            return x

    for together in (Scanned(), Mapped()):
        scanned = not isinstance(together, Mapped)
        apart = Listed(together.layers, scanned)
        losses = nnx.jit(separation_losses)
        result, expected = (losses(m, x) for m in (together, apart))
        assert result.loss.shape == (3,)
        jax.tree.map(assert_close, result, expected)
        if scanned:
            assert_close(result.loss, [-3.67165, -3.09467, -2.41936], floor=1e-4)
        slopes = [
            nnx.jit(nnx.grad(lambda m: separation_losses(m, x).loss.sum()))(model)
            for model in (together, apart)
        ]
        kernels = [
            jnp.stack([layer["kernel"]["weights"][...] for layer in layers])
            if i
            else layers["kernel"]["weights"][...]
            for i, layers in enumerate(
                (slopes[0]["layers"], [slopes[1]["layers"][j] for j in range(3)])
            )
        ]
        assert_close(kernels[0], kernels[1])
        assert np.abs(kernels[0]).max() > 1e-2


def test_separation_losses_leave_masked_memories_out():
    model = layer(kernel=True)
    mask, losses = jnp.arange(S) < 4, nnx.jit(separation_losses)
    result = losses(model, STATE, MEMORIES, mask=mask)
    expected = losses(model, STATE, MEMORIES[:, :4])
    assert_close(result.loss, expected.loss)
    assert_close(result.gap, expected.gap)
    pairs = jnp.broadcast_to(mask, (L, S))
    hidden = losses(model, STATE, MEMORIES, association_mask=pairs)
    assert_close(hidden.loss, expected.loss)
    bags = jnp.broadcast_to(mask, (B, S))
    shared = losses(model, STATE, MEMORIES[0], mask=bags)
    assert_close(shared.loss, losses(model, STATE, MEMORIES[0, :4]).loss)
    with pytest.raises(ValueError, match="no Hopfield layer with a kernel"):
        separation_losses(layer(), STATE)


def stacked(rngs):
    """Three layers whose parameters have a leading axis."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return Hopfield(8, num_heads=2, kernel=True, rngs=rngs)

    return make(rngs)


class Scanned(nnx.Module):
    def __init__(self, layers):
        self.layers = layers

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def step(x, layer):
            return x + layer(x)

        return step(x, self.layers)


class Listed(nnx.Module):
    def __init__(self, layers):
        one = [jax.tree.map(lambda x: x[number], layers) for number in range(3)]  # noqa: B023
        self.layers = nnx.data(one)

    def __call__(self, x):
        for one in self.layers:
            x = x + one(x)
        return x


class Mapped(nnx.Module):
    def __init__(self, layers):
        self.layers = layers

    def __call__(self, x):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)


def test_separation_losses_of_stacked_layers():  # C2-02
    layers = stacked(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 5, 8), jnp.float32)

    def losses(kind):
        """Losses and gaps, and the slope of their sum in each of the three kernels."""
        graphdef, state = nnx.split(kind(layers))

        def total(state):
            result = separation_losses(nnx.merge(graphdef, state), x)
            return result.loss.sum(), result

        slope, result = jax.jit(jax.grad(total, has_aux=True))(state)
        slope = nnx.to_pure_dict(slope)["layers"]
        if kind is Listed:
            slope = jax.tree.map(lambda *x: jnp.stack(x), *slope.values())
        return result, slope["kernel"]["weights"]

    scanned, slope = losses(Scanned)
    assert_close(scanned.loss, [-3.67165, -3.09467, -2.41936], floor=1e-5)
    listed, slopes = losses(Listed)
    assert_close(scanned.loss, listed.loss)
    assert_close(scanned.gap, listed.gap)
    assert_close(slope, slopes)
    mapped, _ = losses(Mapped)
    assert mapped.loss.shape == (3,)
    assert_close(mapped.loss[0], scanned.loss[0])


def test_separation_losses_leave_the_model_unchanged():
    class Random(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.layer = Hopfield(D, kernel=True, rngs=rngs)

        def __call__(self, x):
            return self.layer(self.dropout(x))

    model = Random(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    expected = separation_losses(model, STATE)
    closed = jax.jit(lambda x: separation_losses(model, x))(STATE)
    assert_close(closed.loss, expected.loss)
    slope = jax.grad(lambda x: separation_losses(model, x, through=True).loss.sum())
    assert float(abs(slope(STATE)).max()) > 0
    after = nnx.to_pure_dict(nnx.state(model))
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), before, after))
    assert model.layer.record is None


def test_any_module_can_be_a_kernel():
    features = nnx.Sequential(
        nnx.Linear(D, 24, rngs=nnx.Rngs(0)),
        jax.nn.relu,
        nnx.Linear(24, 6, rngs=nnx.Rngs(1)),
    )
    model = layer(kernel=features, **DIRECT)
    _, kernels, _ = nnx.split(model, KernelParam, ...)
    assert sum(x.size for x in jax.tree.leaves(kernels)) == 24 * (D + 1) + 6 * 25
    assert model(STATE, MEMORIES).shape == STATE.shape
    own = nnx.state(features, KernelParam)  # the caller's module is as it was
    assert not jax.tree.leaves(own)
    with pytest.raises(ValueError, match="keep the dimension"):
        layer(kernel=LinearFeatures(D, 6, rngs=nnx.Rngs(0)))


def test_stage_one_may_move_every_parameter_of_a_kernel():
    class Special(nnx.Param):
        pass

    class Tied(nnx.Module):
        def __init__(self):
            self.first = self.second = Special(jnp.eye(D, dtype=jnp.float32), mark=1)

        def __call__(self, x):
            return x @ self.first[...] @ self.second[...]

    model = layer(kernel=Tied())
    _, kernels, _ = nnx.split(model, KernelParam, ...)
    assert len(jax.tree.leaves(kernels)) == 1  # one kernel in two places
    assert model.kernel.first.get_metadata()["mark"] == 1

    class Hidden(Tied):
        def __init__(self):
            self.first = self.second = nnx.Param(jnp.eye(D, dtype=jnp.float32))
            self.others = nnx.data((Special(jnp.ones(D)),))

    with pytest.raises(ValueError, match="kernel must hold its parameters as"):
        layer(kernel=Hidden())


def test_separation_features_are_the_kernel_of_what_a_layer_sees():
    model = layer(kernel=True, normalize=("state", "memory"))
    features, where = model.separation_features(STATE, MEMORIES)
    assert where is None
    assert_close(features, model.kernel(model.norm_memory(MEMORIES)))
    mask = jnp.arange(S) < 4
    features, where = model.separation_features(STATE, MEMORIES, mask=mask, states=True)
    states = model.kernel(model.norm_state(STATE))
    assert_close(features[:, :L], states)
    np.testing.assert_array_equal(where[0], jnp.arange(L + S) < L + 4)
    loss = uhop.AverageLoss()(features, where=where).mean()
    losses = separation_losses(model, STATE, MEMORIES, mask=mask, states=True)
    assert_close(losses.loss, loss[None])
    alone = separation_losses(model, STATE, MEMORIES, mask=mask).loss
    assert float(abs(alone - losses.loss)[0]) > 1e-3
