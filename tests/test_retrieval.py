"""Retrieval, convergence and energies, against loops over single queries."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, every_dtype, slow_where
from test_separation import naive_weights
from test_similarity import (
    LIKELIHOOD,
    naive_compare,
    naive_features,
    naive_overlaps,
    unit,
)

from uhop_jax import (
    Centering,
    Cosine,
    Dot,
    Entmax,
    Entmax15,
    Identity,
    LikelihoodKernel,
    LinearKernel,
    Model,
    NegativeL1,
    NegativeL2,
    NegativeSquaredL2,
    Polynomial,
    Softmax,
    Softmax1,
    Sparsemax,
    TopK,
    check,
    converge,
    energy,
    retrieve,
    retrieve_streamed,
    trajectory,
)

COUNT, DIMENSION = 6, 5


def normal(*shape, seed=0, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


SQUARE = LinearKernel(normal(DIMENSION, DIMENSION, seed=1))
WIDE = LinearKernel(normal(7, DIMENSION, seed=2), normal(DIMENSION, seed=3))
CENTERING = Centering(normal(DIMENSION, seed=4))
TWO_SIDED = Centering(normal(DIMENSION, seed=4), normal(DIMENSION, seed=6))
PLAIN = [Dot(), Cosine(), NegativeSquaredL2(), NegativeL2(), NegativeL1()]
WITH_KERNEL = [Dot(SQUARE), Cosine(WIDE), NegativeSquaredL2(CENTERING)]
ITERABLE = PLAIN + WITH_KERNEL
SEPARATIONS = [
    Softmax(),
    Softmax1(),
    Sparsemax(),
    Entmax(1.0),
    Entmax(1.5),
    Polynomial(10),
    Polynomial(3),
    TopK(1),
    TopK(3),
]


def label(x):
    kernel = getattr(x, "kernel", Identity())
    plain = kernel == Identity()
    return repr(x) if plain else f"{type(x).__name__}-{type(kernel).__name__}"


def each(name, members):
    return pytest.mark.parametrize(name, members, ids=label)


def with_kernel(similarity, kernel):
    return type(similarity)(kernel)


def naive_retrieve(
    memories,
    query,
    *,
    beta,
    separation,
    similarity,
    steps,
    values=None,
    mask=None,
    observed=None,
):
    """State and weights of one query, by the definition."""
    memories = np.asarray(memories, np.float64)
    valid = np.ones(len(memories), bool) if mask is None else np.asarray(mask)
    values = memories if values is None else np.asarray(values, np.float64)

    def weigh(z):
        return naive_weights(separation, np.where(valid, beta * z, -np.inf))

    if isinstance(similarity.kernel, LikelihoodKernel):
        p = weigh(naive_overlaps(similarity, memories, query, observed))
        return p @ values, p
    keys, state = naive_features(similarity, memories, query, observed)
    for step in range(steps):
        p = weigh(naive_compare(similarity, keys, state))
        state = p @ np.where(valid[:, None], keys, 0)
        if isinstance(similarity, Cosine):
            state = unit(state)
        if step == steps - 1:
            return p @ np.where(valid[:, None], values, 0), p


def assert_rows_equal_naive(result, memories, query, **arguments):
    """Compares rows; an argument that is a list has an entry for each row."""
    rows = {k: v for k, v in arguments.items() if isinstance(v, list)}
    shared = {k: v for k, v in arguments.items() if k not in rows}
    states = result.state.reshape(-1, result.state.shape[-1])
    weights = result.weights.reshape(-1, result.weights.shape[-1])
    for i, row in enumerate(query.reshape(-1, query.shape[-1])):
        own = {k: v[i] for k, v in rows.items()}
        state, p = naive_retrieve(memories, row, **shared, **own)
        assert_close(weights[i], p)
        assert_close(states[i], state)


def shares_code(similarity):
    """Whether another distance, which is tested, has the same code."""
    return isinstance(similarity, (NegativeL2, NegativeL1))


one_distance = slow_where(shares_code)


@each("similarity", PLAIN)
@each("separation", SEPARATIONS)
@slow_where(
    lambda similarity, separation: similarity != Dot() and separation != Entmax(1.5)
)
def test_three_updates_equal_the_naive_ones(similarity, separation):
    memories, query = normal(COUNT, DIMENSION), normal(2, DIMENSION, seed=5)
    model = Model(similarity, separation, beta=1.5)
    result = retrieve(model, memories, query, steps=3)
    assert_rows_equal_naive(result, memories, query, **vars(model), steps=3)


def test_every_similarity_meets_entmax_and_every_separation_dot_products(request):
    name = test_three_updates_equal_the_naive_ones.__name__
    items = [x for x in request.session.items if x.originalname == name]
    default = [x.callspec.params for x in items if not x.get_closest_marker("slow")]
    if not default:
        pytest.skip(f"{name} is not collected")
    pairs = [(case["similarity"], case["separation"]) for case in default]
    assert [x for x, separation in pairs if separation == Entmax(1.5)] == PLAIN
    assert [x for similarity, x in pairs if similarity == Dot()] == SEPARATIONS
    assert len(pairs) == len(PLAIN) + len(SEPARATIONS) - 1


@slow_where(
    lambda similarity, steps: (
        steps == 1
        or isinstance(similarity, (NegativeSquaredL2, NegativeL2, NegativeL1))
    )
)
@pytest.mark.parametrize(
    ("similarity", "separation", "steps"),
    [(s, Softmax(), steps) for s in ITERABLE for steps in (1, 2)]
    + [(Dot(), s, 1) for s in SEPARATIONS[1:]],
    ids=label,
)
def test_one_and_two_updates_equal_the_naive_ones(similarity, separation, steps):
    memories, query = normal(COUNT, DIMENSION), normal(2, DIMENSION, seed=5)
    model = Model(similarity, separation, beta=1.5)
    result = retrieve(model, memories, query, steps=steps)
    assert_rows_equal_naive(result, memories, query, **vars(model), steps=steps)


@pytest.mark.few(4)
@one_distance
@each("similarity", [*ITERABLE, Dot(LIKELIHOOD)])
def test_all_options_at_once_equal_the_naive_loop(similarity):
    rng = np.random.default_rng(6)
    rows = (2, 3)
    memories, query = normal(COUNT, DIMENSION), normal(*rows, DIMENSION, seed=5)
    values = normal(COUNT, 2, seed=7)
    mask = jnp.asarray(rng.random((*rows, COUNT)) < 0.7).at[0, 0].set(False)
    observed = jnp.asarray(rng.random((*rows, DIMENSION)) < 0.7).at[0, 1].set(False)
    beta, alpha = rng.uniform(0.5, 2, rows), rng.uniform(1, 2, (2, 1))
    steps = 1 if similarity == Dot(LIKELIHOOD) else 3
    result = retrieve(
        Model(similarity, Entmax(alpha), beta=beta),
        memories.at[3].set(jnp.where(mask[..., 3].any(), memories[3], jnp.nan)),
        jnp.where(observed, query, jnp.nan),
        steps=steps,
        values=values,
        mask=mask,
        observed=observed,
    )
    assert (result.state[0, 0] == 0).all()
    assert_rows_equal_naive(
        result,
        memories,
        query,
        beta=list(beta.flatten()),
        separation=[Entmax(a) for a in np.repeat(alpha, 3)],
        similarity=similarity,
        steps=steps,
        values=values,
        mask=list(mask.reshape(6, -1)),
        observed=list(observed.reshape(6, -1)),
    )


STACKED = [
    Dot(),
    Cosine(SQUARE),
    Dot(LinearKernel(normal(3, 4, DIMENSION), normal(3, DIMENSION))),
    Cosine(LinearKernel(normal(3, 4, DIMENSION))),
    NegativeSquaredL2(Centering(normal(3, DIMENSION))),
    Cosine(Centering(normal(3, DIMENSION), normal(3, DIMENSION, seed=6))),
    Dot(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1, 2 * leaf]), LIKELIHOOD)),
]


@pytest.mark.few(5)
@slow_where(
    lambda similarity, restricted: restricted and not isinstance(similarity, Dot)
)
@pytest.mark.parametrize(
    ("similarity", "restricted"),
    [(s, False) for s in STACKED] + [(s, True) for s in STACKED[:3]],
    ids=label,
)
def test_memory_sets_equal_a_loop_over_sets(similarity, restricted):
    memories = normal(3, COUNT, DIMENSION)
    query = normal(3, 2, DIMENSION, seed=5)
    observed = query < 0.5 if restricted else None
    beta, mask = jnp.asarray([[0.5], [1.0], [2.0]]), memories[:, None, :, 0] < 0.8
    options = dict(
        steps=2 if similarity.kernel.has_energy else 1,
        values=memories[..., :2],
    )
    result = retrieve(
        Model(similarity, beta=beta),
        memories,
        query,
        mask=mask,
        observed=observed,
        **options,
    )
    stacked = similarity.kernel.set_axes
    for i in range(3):
        kernel = similarity.kernel
        if stacked:
            kernel = jax.tree.map(lambda leaf, i=i: leaf[i], kernel)
        own = {"values": memories[i, :, :2], "steps": options["steps"]}
        alone = retrieve(
            Model(with_kernel(similarity, kernel), beta=beta[i]),
            memories[i],
            query[i],
            **own,
            mask=mask[i],
            observed=None if observed is None else observed[i],
        )
        assert_close(result.state[i], alone.state)
        assert_close(result.weights[i], alone.weights)


@each("similarity", STACKED[2:])
def test_one_memory_set_with_its_own_kernel(similarity):
    memories, values = normal(1, COUNT, DIMENSION), normal(1, COUNT, 2, seed=6)
    own = jax.tree.map(lambda leaf: leaf[:1], similarity)
    alone = jax.tree.map(lambda leaf: leaf[0], similarity)
    query = normal(2, DIMENSION, seed=5)
    result = retrieve(Model(own, beta=2.0), memories, query, values=values)
    expected = retrieve(Model(alone, beta=2.0), memories[0], query, values=values[0])
    np.testing.assert_array_equal(result.state, expected.state)


def test_fifty_memory_sets_in_one_call():
    memories, query = normal(50, COUNT, DIMENSION), normal(50, DIMENSION, seed=5)
    model = Model(separation=Entmax(1.5), beta=2.0)
    together = retrieve(model, memories, query, steps=2).state
    alone = [
        retrieve(model, m, q, steps=2).state
        for m, q in zip(memories, query, strict=True)
    ]
    assert_close(together, alone)


@pytest.mark.parametrize("rows", [(), (1,), (4,), (2, 3), (1, 2, 3), (0,)])
def test_any_leading_axes(rows):
    memories, query = normal(COUNT, DIMENSION), normal(*rows, DIMENSION, seed=5)
    result = retrieve(Model(beta=2.0), memories, query, steps=2)
    assert result.state.shape == query.shape
    assert result.weights.shape == (*rows, COUNT)
    flat = query.reshape(-1, DIMENSION)
    loop = [retrieve(Model(beta=2.0), memories, row, steps=2).state for row in flat]
    assert_close(result.state.reshape(-1, DIMENSION), np.reshape(loop, (-1, DIMENSION)))
    shared = retrieve(Model(beta=2.0), memories[None], query, steps=2)
    np.testing.assert_array_equal(shared.state, result.state)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (1, 3), (2, 3)])
def test_beta_and_alpha_broadcast_against_the_rows(shape):
    memories, query = normal(COUNT, DIMENSION), normal(2, 3, DIMENSION, seed=5)
    rng = np.random.default_rng(0)
    beta, alpha = rng.uniform(0.5, 2, shape), rng.uniform(1, 2, shape)
    result = retrieve(Model(separation=Entmax(alpha), beta=beta), memories, query)
    for i, j in itertools.product(range(2), range(3)):
        own_beta = np.broadcast_to(beta, (2, 3))[i, j]
        own_alpha = np.broadcast_to(alpha, (2, 3))[i, j]
        alone = retrieve(
            Model(separation=Entmax(own_alpha), beta=own_beta), memories, query[i, j]
        )
        assert_close(result.state[i, j], alone.state)


@pytest.mark.parametrize("shape", [(COUNT,), (1, 1, COUNT), (2, 1, COUNT)])
def test_masks_broadcast(shape):
    memories, query = normal(COUNT, DIMENSION), normal(2, 3, DIMENSION, seed=5)
    mask = jnp.asarray(np.random.default_rng(1).random(shape) < 0.6)
    result = retrieve(Model(beta=2.0), memories, query, mask=mask)
    full = retrieve(
        Model(beta=2.0), memories, query, mask=jnp.broadcast_to(mask, (2, 3, COUNT))
    )
    assert_close(result.state, full.state)
    assert (jnp.where(mask, 0.0, result.weights) == 0).all()


@pytest.mark.parametrize(
    ("shape", "query_0_of_set_1"),
    [((3,), (0,)), ((2,), (0,)), ((2, 1), (1, 0)), ((2, 3), (1, 0)), ((1, 3), (0, 0))],
)
def test_masks_broadcast_over_memory_sets(shape, query_0_of_set_1):
    memories, query = normal(2, COUNT, DIMENSION), normal(2, 3, DIMENSION, seed=5)
    if shape == (2,):
        query = query[:, :2]  # as many queries as sets
    rows = query.shape[:-1]
    mask = jnp.ones((*shape, COUNT), bool).at[..., 0].set(False)
    broken = memories.at[1, 0].set(jnp.nan)
    full = jnp.broadcast_to(mask, (*rows, COUNT))
    expected = retrieve(Model(beta=2.0), memories, query, mask=full).state
    result = retrieve(Model(beta=2.0), broken, query, mask=mask, values=broken).state
    assert_close(result, expected)
    one_sees_it = mask.at[(*query_0_of_set_1, 0)].set(True)
    for name, options in [("memories", {}), ("values", {"values": broken})]:
        with pytest.raises(ValueError, match=f"{name} must be finite, got {DIMENSION}"):
            check(
                Model(beta=2.0),
                memories if options else broken,
                query,
                mask=one_sees_it,
                **options,
            )
    check(Model(beta=2.0), broken, query, mask=mask, values=broken)


@pytest.mark.few(4)
@one_distance
@each("similarity", [*ITERABLE, Dot(LIKELIHOOD)])
def test_masked_memories_never_show(similarity):
    memories, query = normal(COUNT, DIMENSION), normal(3, DIMENSION, seed=5)
    values = normal(COUNT, 2, seed=6)
    valid = jnp.arange(COUNT) != 2
    mask = jnp.stack([valid, valid & (jnp.arange(COUNT) < 4), jnp.zeros(COUNT, bool)])
    steps = 1 if similarity == Dot(LIKELIHOOD) else 2

    def run(memories, query, values):
        return retrieve(
            Model(similarity, beta=2.0),
            memories,
            query,
            steps=steps,
            values=values,
            mask=mask,
        ).state

    @jax.jit
    def both(*arguments):
        state, pull_back = jax.vjp(run, *arguments)
        return state, pull_back(jnp.ones_like(state))

    clean_state, clean = both(memories, query, values)
    state, gradients = both(
        memories.at[2].set(jnp.nan), query, values.at[2].set(jnp.inf)
    )
    np.testing.assert_array_equal(state, clean_state)
    assert (state[2] == 0).all()
    for actual, expected in zip(gradients, clean, strict=True):
        assert_close(actual, expected)
    by_memory, by_query, by_value = gradients
    assert (by_memory[2] == 0).all() and (by_value[2] == 0).all()
    assert (by_query[2] == 0).all()
    outside = run(memories.at[2].set(jnp.nan), query, values)
    assert_close(outside, clean_state)  # another program


def test_nan_in_a_valid_memory_shows():
    memories, query = normal(COUNT, DIMENSION), normal(3, DIMENSION, seed=5)
    broken = memories.at[2, 1].set(jnp.nan)
    mask = jnp.ones((3, COUNT), bool).at[0, 2].set(False)
    with pytest.raises(ValueError, match="memories must be finite, got 1 NaN"):
        check(Model(beta=2.0), broken, query, mask=mask)
    check(Model(beta=2.0), broken, query[:1], mask=mask[:1])
    for run in (retrieve, jax.jit(retrieve)):
        state = run(Model(beta=2.0), broken, query, mask=mask).state
        assert jnp.isfinite(state[0]).all()
        assert jnp.isnan(state[1:]).all()


def test_arguments_may_be_constants_of_a_jitted_function():
    memories, query = normal(COUNT, DIMENSION), normal(3, DIMENSION, seed=5)
    mask = jnp.arange(COUNT) < 4
    expected = retrieve(Model(beta=2.0), memories, query, mask=mask).state

    def run(query):
        return retrieve(Model(beta=2.0), memories, query, mask=mask).state

    np.testing.assert_array_equal(jax.jit(run)(query), expected)
    np.testing.assert_array_equal(jax.jit(lambda: run(query))(), expected)


@each("separation", [Softmax(), Entmax(1.5)])
def test_converge_row_by_row(separation):
    memories, query = normal(COUNT, DIMENSION), normal(4, DIMENSION, seed=5)
    beta = jnp.asarray([0.1, 0.5, 2.0, 20.0])
    model = Model(separation=separation, beta=beta)
    together = converge(model, memories, query, max_steps=1000)
    assert together.converged.all()
    assert len(set(together.steps.tolist())) > 1
    for i in range(4):
        one = dataclasses.replace(model, beta=beta[i])
        alone = converge(one, memories, query[i], max_steps=1000)
        assert alone.steps == together.steps[i]
        assert_close(alone.pattern, together.pattern[i])
        again = retrieve(one, memories, together.pattern[i])
        assert_close(again.state, together.pattern[i])
    at_state = energy(
        Model(separation=separation, beta=beta), memories, together.pattern
    )
    assert_close(together.energy, at_state)
    assert_close(together.weights @ memories, together.pattern)


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
def optimised_weights(memories, query, beta, alpha):
    return retrieve(
        Model(separation=Entmax(alpha), beta=beta), memories, query, steps=2
    ).weights


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_one_hot_weights_are_exact(alpha):
    """A fused multiply and subtract leaves the rounding of `beta z` in the largest."""
    memories, query = normal(COUNT, DIMENSION), normal(4, DIMENSION, seed=5)
    p = optimised_weights(memories, query, jnp.linspace(17, 20, 4), alpha)
    np.testing.assert_array_equal(p, jnp.eye(COUNT)[p.argmax(-1)])


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_converge_stops_at_the_cap(cap):
    memories, query = normal(COUNT, DIMENSION), normal(3, DIMENSION, seed=5)
    result = converge(Model(beta=0.5), memories, query, max_steps=cap)
    np.testing.assert_array_equal(result.steps, cap)
    assert not result.converged.any()
    assert_close(
        result.pattern, retrieve(Model(beta=0.5), memories, query, steps=cap).state
    )


def test_a_looser_tolerance_stops_earlier():
    memories, query = normal(COUNT, DIMENSION), normal(3, DIMENSION, seed=5)
    tight = converge(Model(beta=0.5), memories, query)
    loose = converge(Model(beta=0.5), memories, query, tolerance=1e-3)
    assert loose.converged.all()
    assert (loose.steps < tight.steps).all()
    assert_close(loose.pattern, tight.pattern, floor=1e-2)


CONVERGING = [
    *[(similarity, Softmax()) for similarity in ITERABLE],
    (Dot(), Entmax(1.3)),
]


@pytest.mark.few(3)
@one_distance
@pytest.mark.parametrize(("similarity", "separation"), CONVERGING, ids=label)
def test_implicit_gradient_equals_the_unrolled_one(similarity, separation):
    memories, query = normal(COUNT, DIMENSION), normal(2, DIMENSION, seed=5)
    beta = 0.2

    def loss(state):
        return (jnp.arange(1.0, 11.0).reshape(2, DIMENSION) * state).sum()

    def implicit(memories, beta, similarity, separation, query):
        result = converge(
            Model(similarity, separation, beta=beta), memories, query, max_steps=2000
        )
        return loss(result.pattern), result.converged

    def unrolled(memories, beta, similarity, separation, query):
        return loss(
            retrieve(
                Model(similarity, separation, beta=beta), memories, query, steps=300
            ).state
        )

    arguments = (memories, beta, similarity, separation, query)
    everything = (0, 1, 2, 3, 4)
    actual, converged = jax.jit(jax.grad(implicit, everything, has_aux=True))(
        *arguments
    )
    expected = jax.jit(jax.grad(unrolled, everything))(*arguments)
    assert converged.all()
    np.testing.assert_array_equal(actual[-1], 0)
    np.testing.assert_allclose(expected[-1], 0, atol=1e-9)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.abs(e).max())
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-6 * max(scale, 1.0))


def test_implicit_gradient_under_vmap():
    memories, query = normal(COUNT, DIMENSION), normal(2, DIMENSION, seed=5)

    def state(beta, query):
        return converge(Model(beta=beta), memories, query, max_steps=1000).pattern

    betas = jnp.asarray([0.3, 0.6])
    reverse = jax.jit(jax.vmap(jax.jacrev(state)))(betas, query)
    single = jax.jit(jax.jacrev(state))
    alone = [single(b, q) for b, q in zip(betas, query, strict=True)]
    assert_close(reverse, alone, floor=1e-8)


def temporary_bytes(function):
    memories, query = normal(40, DIMENSION), normal(3, DIMENSION, seed=5)
    gradient = jax.jit(jax.grad(lambda m: function(Model(beta=2.0), m, query)[0].sum()))
    return gradient.lower(memories).compile().memory_analysis().temp_size_in_bytes


def test_gradient_at_a_fixed_point_needs_no_memory_per_step():
    implicit, unrolled = (
        [temporary_bytes(functools.partial(f, **{name: n})) for n in (64, 1024)]
        for f, name in ((converge, "max_steps"), (retrieve, "steps"))
    )
    assert implicit[0] == implicit[1]
    assert unrolled[1] > 8 * unrolled[0]


@pytest.mark.few(4)
@each("similarity", ITERABLE)
def test_trajectory_equals_retrieve(similarity):
    memories = jnp.asarray(unit(normal(COUNT, DIMENSION)))
    query = normal(2, DIMENSION, seed=5)
    model = Model(similarity, beta=1.5)
    patterns, _, energies = trajectory(model, memories, query, steps=3)
    assert patterns.shape == (2, 4, DIMENSION)
    np.testing.assert_array_equal(patterns[:, 0], query)
    for steps in (1, 3):
        expected = retrieve(model, memories, query, steps=steps).state
        assert_close(patterns[:, steps], expected)
    if not Model(similarity, beta=1.0).has_energy:
        assert energies is None
        return
    assert energies.shape == (2, 4)
    first = energy(model, memories, query)
    assert_close(energies[:, 0], first)


@pytest.mark.few(1)
@each(
    "similarity",
    [
        *(Dot(), Cosine(), NegativeSquaredL2(), Dot(WIDE), Cosine(WIDE)),
        *(NegativeSquaredL2(CENTERING), Cosine(CENTERING)),
    ],
)
def test_energies_are_of_the_returned_features_and_never_rise(similarity):
    rng = np.random.default_rng(0)
    memories = normal(COUNT, DIMENSION) * rng.uniform(0.1, 3, (COUNT, 1))
    query = normal(20, DIMENSION, seed=5)
    options = dict(
        beta=10 ** rng.uniform(-1, 1, 20), separation=Entmax(rng.uniform(1, 2, 20))
    )
    path = trajectory(Model(similarity=similarity, **options), memories, query, steps=4)
    keys, bare = similarity.keys(memories), with_kernel(similarity, Identity())
    assert path.features.shape == (20, 5, keys.shape[-1])
    for step in range(5):
        own = energy(Model(similarity=bare, **options), keys, path.features[:, step])
        assert_close(path.energies[:, step], own)
    rise = jnp.diff(path.energies, axis=-1)
    assert (rise <= 1e-9 * (1 + jnp.abs(path.energies[:, :-1]))).all()
    if isinstance(similarity, Cosine):
        assert_close(jnp.linalg.norm(path.features, axis=-1), np.ones((20, 5)))
    for steps in (1, 4):
        end = converge(
            Model(similarity=similarity, **options),
            memories,
            query,
            max_steps=steps,
            tolerance=1e-15,
        )
        assert_close(end.pattern, path.patterns[:, steps])
        assert_close(end.features, path.features[:, steps])
        assert_close(end.energy, path.energies[:, steps])


def test_patterns_of_different_norms_are_not_the_features_of_the_cosine():
    memories = jnp.asarray([[3.0, 0.0], [0.0, 0.3], [-0.5, -0.5]])
    query = jnp.asarray([-0.04, -1.31])
    model = Model(Cosine(), beta=2.0)
    path = trajectory(model, memories, query, steps=1)
    assert_close(path.energies[1], energy(model, memories, path.features[1]))
    assert_close(path.energies[1], -1.021, floor=1e-3)
    assert_close(energy(model, memories, path.patterns[1]), -0.751, floor=1e-3)


ENERGETIC = [
    (similarity, separation)
    for similarity in (
        Dot(),
        Cosine(),
        NegativeSquaredL2(),
        Dot(LinearKernel(normal(6, 4, seed=1))),
        Cosine(LinearKernel(normal(6, 4, seed=1))),
        NegativeSquaredL2(LinearKernel(normal(6, 4, seed=1))),
    )
    for separation in (Entmax(), TopK(3), Softmax1())
    if isinstance(separation, Entmax)
    or (
        similarity.kernel == Identity()
        and Model(similarity, separation, beta=1.0).has_energy
    )
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("similarity", "separation"), ENERGETIC, ids=label)
def test_an_update_never_raises_the_energy(similarity, separation):
    rng = np.random.default_rng(0)
    rows = (100, 100)
    if isinstance(separation, Entmax):
        separation = Entmax(rng.uniform(1, 2, rows))
    energies = trajectory(
        Model(similarity, separation, beta=10 ** rng.uniform(-2, 2, rows)),
        normal(100, COUNT, 4),
        2 * normal(*rows, 4, seed=5),
        steps=2,
    ).energies
    before, after = energies[..., :-1], energies[..., 1:]
    assert jnp.isfinite(energies).all()
    assert (after <= before + 1e-9 * (1 + jnp.abs(before))).all()
    assert (after < before).mean() > 0.1


@pytest.mark.few(2)
@pytest.mark.parametrize("alpha", [1.0, 1.5])
@each("similarity", [Dot(), Dot(SQUARE), NegativeSquaredL2()])
def test_fixed_points_are_stationary_points_of_the_energy(similarity, alpha):
    memories, query = normal(COUNT, DIMENSION), normal(3, DIMENSION, seed=5)
    model = Model(similarity, Entmax(alpha), beta=0.3)
    result = converge(model, memories, query, max_steps=5000)
    assert result.converged.all()

    @jax.jit
    @jax.grad
    def slope(state):
        return energy(model, memories, state).sum()

    assert jnp.abs(slope(query)).max() > 0.1
    np.testing.assert_allclose(slope(result.pattern), 0, atol=1e-7)


@pytest.mark.parametrize(
    ("separation", "similarity", "expected"),
    [
        (Softmax(), Dot(), True),
        (Softmax1(), Cosine(), True),
        (TopK(3), NegativeSquaredL2(), True),
        (Entmax(1.5), Dot(SQUARE), True),
        (Softmax1(), NegativeSquaredL2(), False),
        (Polynomial(10), Dot(), False),
        (Softmax(), NegativeL2(), False),
        (Softmax(), NegativeL1(), False),
        (Softmax(), Dot(LIKELIHOOD), False),
        (Softmax(), Dot(CENTERING), True),
        (Softmax(), Cosine(TWO_SIDED), False),
    ],
    ids=label,
)
def test_which_models_have_an_energy(separation, similarity, expected):
    assert Model(similarity, separation, beta=1.0).has_energy == expected
    memories, query = normal(COUNT, DIMENSION), normal(DIMENSION, seed=5)
    model = Model(similarity, separation, beta=1.0)
    if expected:
        assert jnp.isfinite(energy(model, memories, query))
        return
    with pytest.raises(
        ValueError, match=f"no energy is known that .*{type(separation).__name__}"
    ):
        energy(model, memories, query)
    if similarity.kernel == Identity():
        assert converge(model, memories, query).energy is None


@pytest.mark.parametrize(
    "separation",
    [Softmax(), Softmax1(), Sparsemax(), Entmax15(), Entmax(1.3), Polynomial(3)],
    ids=str,
)
def test_second_derivatives_through_several_updates(separation):
    """JAX drops the rules of derivatives there: the functions themselves must do."""
    memories, query = normal(COUNT, 4), normal(3, 4, seed=5)
    model = Model(separation=separation, beta=0.7)

    def total(query, memories):
        return (retrieve(model, memories, query, steps=3).state ** 2).sum()

    slope, step = jax.jit(jax.grad(total, (0, 1))), 1e-6
    single = query.astype(jnp.float32), memories.astype(jnp.float32)
    in_float32 = jax.jvp(slope, single, (single[0], -single[1]))[1]
    at, along = (query, memories), (query, -memories)
    _, curvature = jax.jvp(slope, at, along)
    ahead, behind = (
        slope(*(x + sign * dx for x, dx in zip(at, along, strict=True)))
        for sign in (step, -step)
    )
    for c, a, b in zip(curvature, ahead, behind, strict=True):
        assert_close(c, (a - b) / (2 * step), floor=1e-6)
    for s, c in zip(in_float32, curvature, strict=True):
        assert_close(s, c, scale=10)
    if separation != Entmax(1.3):  # JAX does not reverse a search twice

        def product(*at):
            return sum(map(jnp.vdot, slope(*at), along))

        for x, c in zip(jax.grad(product, (0, 1))(*at), curvature, strict=True):
            assert_close(x, c, scale=10)


def test_third_derivatives_through_several_updates():
    memories, query = normal(COUNT, 4), normal(4, seed=5)
    model = Model(separation=Entmax15(), beta=0.2)

    def one_by_one(query):
        for _ in range(3):
            query = retrieve(model, memories, query).state
        return (query**3).sum()

    def in_a_loop(query):
        return (retrieve(model, memories, query, steps=3).state ** 3).sum()

    forward, reverse = jax.jacfwd, jax.jacrev
    expected = jax.jit(forward(forward(forward(one_by_one))))(query)
    assert abs(expected).max() > 1e-3
    for order in ((forward, forward, reverse), (reverse, reverse, reverse)):
        result = in_a_loop
        for derivative in order:
            result = derivative(result)
        assert_close(jax.jit(result)(query), expected, scale=100)


def test_one_program_for_many_numbers(compilations):
    memories, query = normal(COUNT, 12), normal(3, 12)
    kernels = normal(4, 12, 12)
    counts = []
    for beta, alpha, kernel in zip(
        (1.0, 2.0, 3.0, 0.5), (1.2, 1.7, 2.5, 1.0), kernels, strict=True
    ):
        retrieve(
            Model(Dot(LinearKernel(kernel)), Entmax(alpha), beta=beta),
            memories,
            query,
            steps=2,
        )
        counts.append(len(compilations))
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_a_known_alpha_has_the_program_of_its_arithmetic(compilations):
    memories, query = normal(COUNT, 12), normal(3, 12)
    for alpha, fixed in ((1.5, Entmax15()), (2.0, Sparsemax())):
        expected = retrieve(Model(Dot(), fixed, beta=1.0), memories, query)
        number = len(compilations)
        known = retrieve(Model(Dot(), Entmax(alpha), beta=1.0), memories, query)
        assert len(compilations) == number
        assert (known.weights == expected.weights).all()
        traced = jax.jit(
            lambda alpha: retrieve(
                Model(Dot(), Entmax(alpha), beta=1.0), memories, query
            )
        )(alpha)
        assert_close(traced.weights, expected.weights)


@one_distance
@every_dtype
@each("similarity", PLAIN)
def test_dtypes(similarity, dtype):
    memories = normal(COUNT, DIMENSION, dtype=dtype)
    query = normal(2, DIMENSION, seed=5, dtype=dtype)
    model = Model(similarity, beta=1.0)
    result = retrieve(model, memories, query, steps=2)
    assert result.state.dtype == result.weights.dtype == dtype
    assert_rows_equal_naive(result, memories, query, **vars(model), steps=2)


@every_dtype
def test_converge_in_every_dtype(dtype):
    memories = normal(COUNT, DIMENSION, dtype=dtype)
    query = normal(2, DIMENSION, seed=5, dtype=dtype)
    result = converge(Model(beta=0.5), memories, query)
    assert result.pattern.dtype == result.weights.dtype == dtype
    assert result.converged.all()
    exact = converge(
        Model(beta=0.5), memories.astype(jnp.float64), query.astype(jnp.float64)
    )
    assert_close(result.pattern, exact.pattern, floor=1e-5)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("float32", "float64", "float64"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float16", "float32"),
    ],
)
@each("similarity", [Dot(), NegativeL2()])
def test_mixed_dtypes(similarity, first, second, expected):
    for one, other in ((first, second), (second, first)):
        memories = normal(COUNT, DIMENSION, dtype=one)
        query = normal(2, DIMENSION, seed=5, dtype=other)
        model = Model(similarity, beta=1.0)
        result = retrieve(model, memories, query)
        assert result.state.dtype == expected
        assert_rows_equal_naive(result, memories, query, **vars(model), steps=1)


@pytest.mark.parametrize("restricted", [False, True])
@each("similarity", [Dot(), Cosine(), NegativeSquaredL2(), NegativeL1()])
def test_memories_are_never_tiled(similarity, restricted):
    memories, query = normal(100, 33), normal(64, 33)
    observed = query > 0 if restricted else None
    shapes = itertools.permutations(("64", "100", "33"))
    spellings = [("x".join(s) + "x", f"[{','.join(s)}]") for s in shapes]

    def tiled(function):
        lowered = jax.jit(function).lower(memories, query)
        text = lowered.as_text() + lowered.compile().as_text()
        return any(name in text for pair in spellings for name in pair)

    model = Model(similarity, beta=1.0)
    assert not tiled(
        lambda memories, query: retrieve(model, memories, query, observed=observed)
    )
    assert tiled(lambda memories, query: abs(query[:, None] - memories[None]).sum(-1))


MEMORIES, QUERY = jnp.ones((4, 5)), jnp.ones((2, 5))
PARTS = [field.name for field in dataclasses.fields(Model)]


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (retrieve, dict(steps=0), "steps must be at least 1, got 0"),
        (retrieve, dict(steps=1.5), "steps must be an integer, got 1.5"),
        (retrieve, dict(steps=True), "steps must be an integer, got True"),
        (trajectory, dict(steps=0), "steps must be at least 1, got 0"),
        (converge, dict(max_steps=0), "max_steps must be at least 1, got 0"),
        (converge, dict(tolerance=0.0), "tolerance must be positive and finite, got 0"),
        (retrieve, dict(beta=0.0), "beta must be positive and finite, got 0.0"),
        (retrieve, dict(beta=-1.0), "beta must be positive and finite, got -1.0"),
        (retrieve, dict(beta=np.inf), "beta must be positive and finite, got inf"),
        (retrieve, dict(beta=np.nan), "beta must be positive and finite, got nan"),
        (retrieve, dict(beta=np.ones(3)), r"beta has shape \(3,\).*\(2,\)"),
        (
            retrieve,
            dict(separation=Entmax(np.full(3, 1.5))),
            r"alpha has shape \(3,\).*\(2,\)",
        ),
        (
            retrieve,
            dict(separation=Entmax(0.5)),
            "alpha must be at least 1, got 0.5",
        ),
        (retrieve, dict(separation=TopK(5)), "k must be at most 4, got 5"),
        (
            retrieve,
            dict(separation="softmax"),
            "separation must be one of Softmax, .*got 'softmax'",
        ),
        (
            retrieve,
            dict(similarity="dot"),
            "similarity must be one of Dot, .*got 'dot'",
        ),
        (
            retrieve,
            dict(memories=jnp.ones((4, 5), "f"), query=jnp.ones(5, "f"), beta=1e40),
            r"beta must be positive and finite in float32, got 1e\+40",
        ),
        (retrieve, dict(query=jnp.ones((2, 3))), "have dimension 5, queries 3"),
        (retrieve, dict(query=jnp.float64(1)), "query must have shape"),
        (retrieve, dict(memories=jnp.ones(5)), r"memories must have .*got \(5,\)"),
        (retrieve, dict(memories=jnp.ones((0, 5))), r"memories must have .*\(0, 5\)"),
        (
            retrieve,
            dict(memories=jnp.ones((3, 4, 5))),
            r"\(3,\) memory sets, so query .*got \(2, 5\)",
        ),
        (
            retrieve,
            dict(memories=jnp.ones((2, 4, 5)), query=jnp.ones(5)),
            r"\(2,\) memory sets, so query .*got \(5,\)",
        ),
        (
            check,
            dict(memories=MEMORIES * jnp.nan),
            "memories must be finite, got 20",
        ),
        (check, dict(beta=jnp.zeros(2)), "beta must be positive and finite, got 0"),
        (
            check,
            dict(separation=Entmax(jnp.zeros(()))),
            "alpha must be at least 1, got 0",
        ),
        (check, dict(query=QUERY * jnp.inf), "query must be finite, got 10"),
        (
            check,
            dict(values=jnp.full((4, 1), jnp.nan)),
            "values must be finite, got 4",
        ),
        (
            retrieve,
            dict(values=jnp.ones((3, 5))),
            r"values have shape \(3, 5\), memories \(4, 5\)",
        ),
        (retrieve, dict(values=jnp.ones(4)), r"values have shape \(4,\)"),
        (
            retrieve,
            dict(memories=MEMORIES[None], values=jnp.ones((3, 4, 2))),
            r"values have shape \(3, 4, 2\), memories \(1, 4, 5\)",
        ),
        (retrieve, dict(mask=jnp.ones(4)), "mask must be boolean .*got dtype float64"),
        (
            retrieve,
            dict(mask=jnp.ones(4, int)),
            "mask must be boolean .*got dtype int64",
        ),
        (
            retrieve,
            dict(mask=jnp.ones(3, bool)),
            r"mask has shape \(3,\).*\(2, 4\)",
        ),
        (retrieve, dict(observed=jnp.ones(5)), "observed must be boolean"),
        (
            retrieve,
            dict(observed=jnp.ones(4, bool)),
            r"observed has shape \(4,\).*\(2, 5\)",
        ),
        (
            retrieve,
            dict(similarity=Dot(LinearKernel(jnp.ones((3, 4))))),
            "kernel maps dimension 4, memories have dimension 5",
        ),
        (
            retrieve,
            dict(similarity=Dot(LinearKernel(jnp.ones((3, 5, 5))))),
            "kernel has 1 axes of memory sets, memories have 0",
        ),
        (
            retrieve,
            dict(
                memories=MEMORIES[None],
                similarity=Dot(LinearKernel(jnp.ones((3, 5, 5)))),
            ),
            r"kernel is for \(3,\) memory sets, memories are \(1,\)",
        ),
        (
            retrieve,
            dict(similarity=Dot(LIKELIHOOD), steps=2),
            "LikelihoodKernel maps queries and memories differently",
        ),
        (
            converge,
            dict(similarity=Dot(LIKELIHOOD)),
            "LikelihoodKernel maps queries and memories differently",
        ),
        (
            converge,
            dict(similarity=Cosine(TWO_SIDED)),
            "Centering maps queries and memories differently",
        ),
        (
            trajectory,
            dict(similarity=Dot(LIKELIHOOD)),
            "LikelihoodKernel maps queries and memories differently",
        ),
        (retrieve, dict(memories="text"), "memories must be a numeric array"),
        (
            retrieve,
            dict(query=jnp.ones(5, complex)),
            "query must be real, got dtype complex",
        ),
    ],
)
def test_bad_input(untyped, call, arguments, message):
    arguments = {"memories": MEMORIES, "query": QUERY, "beta": 1.0, **arguments}
    parts = {name: arguments.pop(name) for name in PARTS if name in arguments}
    with pytest.raises(ValueError, match=message):
        call(Model(**parts), **arguments)


@pytest.mark.parametrize("separation", [*SEPARATIONS[:-1], TopK(2)], ids=repr)
@pytest.mark.parametrize("scale", [1.0, -1.0, 1e10])
@slow_where(
    lambda separation, scale: (
        separation in (Polynomial(3), TopK(1), Entmax(1.0), Entmax(1.5))
        or (scale != 1 and separation not in (Softmax(), Softmax1(), Sparsemax()))
    )
)
def test_any_inverse_temperature(separation, scale):
    rows = np.asarray([[0.1, 0.2, 0.7], [0.9, 0.3, 0.5]])
    betas = jnp.asarray([1e-6, 1.0, 1e10, 1e20, 1e30, 1e38], jnp.float32)
    query = jnp.asarray(np.broadcast_to(rows, (6, 2, 3)), jnp.float32)
    memories = jnp.asarray(scale * rows, jnp.float32)
    overlaps = scale * rows @ rows.T
    z = np.asarray(betas, np.float64)[:, None, None] * overlaps
    expected = naive_weights(separation, z)
    model = Model(separation=separation, beta=betas[:, None])
    assert_close(retrieve(model, memories, query).weights, expected)
    for source in (memories, np.asarray(memories)):
        result = retrieve_streamed(model, source, query, top=2, block=1)
        assert_close(result.weights, -np.sort(-expected))
        assert_close(result.state / scale, expected @ rows)
    fixed = converge(model, memories, query)
    path = trajectory(model, memories, query, steps=2)
    assert jnp.isfinite(fixed.pattern).all() and jnp.isfinite(path.patterns).all()
    if fixed.energy is not None:
        assert jnp.isfinite(fixed.energy).all() and jnp.isfinite(path.energies).all()
        top = overlaps.max(-1)
        top = np.maximum(top, 0.0) if separation == Softmax1() else top
        own = 0.5 * (rows * rows).sum(-1)
        result = energy(model, memories, query)[2:]  # one-hot
        assert_close(result / scale, np.tile((own - top) / scale, (4, 1)))

    def total(run, memories, query, beta):
        model = Model(separation=separation, beta=beta[:, None])
        result = run(model, memories, query)
        return result.state.sum()

    for run in (retrieve, retrieve_streamed):
        slopes = jax.jit(jax.grad(functools.partial(total, run), (0, 1, 2)))
        for slope in slopes(memories, query, betas):
            assert jnp.isfinite(slope).all()


def test_raw_images_at_a_high_inverse_temperature():
    """Overlaps of 3072 bytes are beyond 1e8."""
    memories = np.random.default_rng(0).integers(0, 256, (10, 3072))
    memories = jnp.asarray(memories, jnp.float32)
    for run in (retrieve, retrieve_streamed):
        assert_close(run(Model(beta=100.0), memories, memories).state, memories)
