"""Separations that are kernels, and kernel regression, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, every_dtype
from jax.test_util import check_grads

import uhop_jax as uhop
from uhop_jax import Epanechnikov, Exponentials, Model, NegativeSquaredL2

M, D = 9, 4
RNG = np.random.default_rng(0)
MEMORIES = jnp.asarray(RNG.normal(size=(M, D)))
QUERY = jnp.asarray(RNG.normal(size=(5, D)))
MASK = jnp.arange(M) % 3 > 0
SEPARATIONS = [Epanechnikov(0), Epanechnikov(1), Exponentials()]
every_separation = pytest.mark.parametrize("sep", SEPARATIONS, ids=repr)


def model_of(sep, beta=0.4):
    return Model(NegativeSquaredL2(), sep, beta=beta)


def naive(sep, query, mask=None, beta=0.4):
    """Weights in NumPy."""
    memories, query = np.asarray(MEMORIES), np.asarray(query)
    squared = ((query[:, None] - memories[None]) ** 2).sum(-1)
    valid = np.ones(M, bool) if mask is None else np.asarray(mask)
    if isinstance(sep, Exponentials):
        return np.where(valid, np.exp(-beta * squared), 0.0)
    kernel = np.where(valid, np.maximum(1 - beta * squared / 2, 0.0), 0.0)
    if sep.degree == 0:
        kernel = (kernel > 0).astype(float)
    total = kernel.sum(-1, keepdims=True)
    return kernel / np.where(total == 0, 1.0, total)


@every_separation
def test_weights_streams_and_masks(sep):
    model = model_of(sep)
    for mask in (None, MASK):
        whole = uhop.retrieve(model, MEMORIES, QUERY, mask=mask)
        assert_close(whole.weights, naive(sep, QUERY, mask))
        streamed = uhop.retrieve_streamed(model, MEMORIES, QUERY, mask=mask, block=4)
        assert_close(streamed.state, whole.state)
    on_host = uhop.retrieve_streamed(model, np.asarray(MEMORIES), QUERY, block=4)
    assert_close(on_host.state, uhop.retrieve(model, MEMORIES, QUERY).state)
    hidden = uhop.retrieve(model, MEMORIES.at[0].set(jnp.nan), QUERY, mask=MASK)
    assert_close(hidden.weights, naive(sep, QUERY, MASK))
    shown = uhop.retrieve(model, MEMORIES.at[0].set(jnp.nan), QUERY)
    assert jnp.isnan(shown.state).all()


@every_separation
def test_derivatives(sep):
    @jax.jit
    def f(memories, query):
        return uhop.retrieve(model_of(sep), memories, query).state

    check_grads(f, (MEMORIES, QUERY), 1, ("fwd", "rev"))


@every_separation
@every_dtype
def test_dtypes(sep, dtype):
    z = jnp.asarray(RNG.normal(size=(6, M)) - 1, dtype)
    assert sep(z).dtype == dtype
    assert_close(sep(z), sep(z.astype(jnp.float64)))


def test_without_an_active_memory_nothing_is_retrieved():
    for degree in (0, 1):
        result = uhop.retrieve(model_of(Epanechnikov(degree)), MEMORIES, QUERY + 100)
        assert (result.weights == 0).all() and (result.state == 0).all()


def test_the_mean_of_active_memories_lowers_the_lsr_energy_and_stops_at_memories():
    beta = 0.4

    def energy(x):
        squared = ((x[:, None] - np.asarray(MEMORIES)[None]) ** 2).sum(-1)
        return -np.log(np.maximum(1 - beta * squared / 2, 0).sum(-1)) / beta

    model = model_of(Epanechnikov(0), beta)
    x = MEMORIES + 0.5
    energies = [energy(np.asarray(x))]
    for _ in range(6):
        x = uhop.retrieve(model, MEMORIES, x).state
        energies.append(energy(np.asarray(x)))
    assert (np.diff(energies, axis=0) <= 1e-12).all()
    # A memory is exact as soon as no other memory is within the radius.
    squared = -NegativeSquaredL2().gram(MEMORIES) + 1e9 * jnp.eye(M)
    for factor, exact in ((0.99, True), (1.01, False)):
        narrow = model_of(Epanechnikov(0), 2 / (factor * float(squared.min())))
        state = uhop.retrieve(narrow, MEMORIES, MEMORIES).state
        assert bool((state == MEMORIES).all()) == exact
    with pytest.raises(ValueError, match="degree must be at most 1, got 2"):
        Epanechnikov(2)(QUERY)


def test_exponentials_are_the_gradient_of_their_conjugate():
    z = jnp.asarray(RNG.normal(size=(3, M)))
    slope = jax.grad(lambda z: Exponentials().conjugate(z).sum())(z)
    assert_close(slope, Exponentials()(z))


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_kernel_regression_is_its_formula(ridge):
    model = model_of(Exponentials())
    values = uhop.fit_values(model, MEMORIES, ridge=ridge)
    state = uhop.retrieve(model, MEMORIES, QUERY, values=values).state
    gram = naive(Exponentials(), MEMORIES)
    solved = np.linalg.solve(gram + ridge * np.eye(M), naive(Exponentials(), QUERY).T)
    assert_close(state, solved.T @ np.asarray(MEMORIES))
    if ridge == 0:  # every memory is a fixed point
        again = uhop.retrieve(model, MEMORIES, MEMORIES, values=values).state
        assert_close(again, MEMORIES)


def test_values_of_any_separation():
    values = jnp.asarray(RNG.normal(size=(M, 2)))
    model = Model(uhop.Cosine(), beta=5.0)
    fitted = uhop.fit_values(model, MEMORIES, values)
    read = uhop.retrieve(model, MEMORIES, MEMORIES, values=fitted).state
    assert_close(read, values)

    @jax.jit
    def f(memories):
        return uhop.fit_values(model_of(Exponentials()), memories, ridge=0.1)

    check_grads(f, (MEMORIES,), 1, ("fwd", "rev"))


def test_equations_without_a_solution_are_named(untyped):
    twice = jnp.concatenate([MEMORIES, MEMORIES])
    model = model_of(Exponentials())
    with pytest.raises(ValueError, match="ridge 0 leaves the equations of 18 memories"):
        uhop.fit_values(model, twice)
    for dtype in (jnp.float32, jnp.float64):  # rounding hides that they are singular
        one = jnp.asarray(np.random.default_rng(1).normal(size=(50, 20)), dtype)
        twice_one = one.at[7].set(one[3])
        for values in (None, jnp.arange(50.0, dtype=dtype)[:, None]):
            with pytest.raises(ValueError, match="ridge 0 leaves the equations of 50"):
                uhop.fit_values(model, twice_one, values)
    assert jnp.isfinite(uhop.fit_values(model, twice, ridge=0.1)).all()
    assert jnp.isnan(jax.jit(uhop.fit_values)(model, twice)).all()
    with pytest.raises(ValueError, match=r"values must have shape \(9, v\)"):
        uhop.fit_values(model, MEMORIES, jnp.ones((8, 2)))
    with pytest.raises(ValueError, match="ridge must be at least 0, got -1"):
        uhop.fit_values(model, MEMORIES, ridge=-1.0)
    with pytest.raises(ValueError, match=r"ridge must be one number, got shape \(2,\)"):
        uhop.fit_values(model, MEMORIES, ridge=jnp.ones(2))
