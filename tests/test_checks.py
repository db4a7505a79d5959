"""Wrong input of every public function is refused in one sentence that names it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close

import uhop_jax as uj
from uhop_jax import theory

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
ONES = np.ones(3)
MEMORY = uj.Memory.empty(3).add(X)[0]


def retrieving(**options):
    return lambda: uj.retrieve(X, X, **({"beta": 1.0} | options))


def fitting(**options):
    return lambda: uj.fit_sgd(X, **({"relative_rate": 0.1, "steps": 2} | options))


def with_kernel(make):
    return lambda: retrieving(similarity=uj.Dot(make()))()


CASES = [
    # One number, and not a name.
    (retrieving(beta="a"), "beta must be a number, got 'a'"),
    (lambda: uj.Entmax("a")(X), "alpha must be a number, got 'a'"),
    (lambda: uj.Entmax(None)(X), "alpha must be a number, got None"),
    (fitting(loss=uj.AverageLoss(ONES)), r"t must be one number, got shape \(3,\)"),
    (fitting(momentum=ONES / 2), r"momentum must be one number, got shape \(3,\)"),
    (
        lambda: uj.AverageLoss(jnp.asarray([1.0, 2.0]))(X[None]),
        r"t must be one number, got shape \(2,\)",
    ),
    (
        lambda: uj.converge(X, X, beta=1.0, tolerance=ONES),
        r"tolerance must be one number, got shape \(3,\)",
    ),
    (
        lambda: uj.fit_annealed(KEY, X, learning_rate=ONES),
        r"learning_rate must be one number, got shape \(3,\)",
    ),
    (
        lambda: theory.log_rbf(X, X, t=ONES),
        r"t must be one number, got shape \(3,\)",
    ),
    (
        lambda: theory.stored(KEY, X, beta=1.0, tolerance=ONES),
        r"tolerance must be one number, got shape \(3,\)",
    ),
    (
        lambda: theory.pattern_separation(X, distance="a"),
        "distance must be a number, got 'a'",
    ),
    # Arrays and sequences.
    (retrieving(mask="yes"), "mask must be boolean .* got 'yes'"),
    (fitting(relative_rate="fast"), "relative_rate must be a numeric array"),
    (
        lambda: theory.representation(
            jnp.eye(2), jnp.full((2, 2), 0.5), beta=1.0, scale=ONES
        ),
        r"scale has shape \(3,\), which does not broadcast to \(2,\)",
    ),
    (lambda: theory.metastable_size(0.5), r"weights must have shape \(..., M\)"),
    (lambda: theory.effective_memories(0.5), r"weights must have shape \(..., M\)"),
    (
        lambda: uj.AverageLoss()(X, where=np.ones(5)),
        r"where must be boolean \(true for valid patterns\), got dtype float64",
    ),
    (fitting(snapshots=1), "snapshots must be a sequence of integers, got 1"),
    (
        lambda: theory.capacity(KEY, X, sizes=3, beta=1.0),
        "sizes must be a sequence of integers, got 3",
    ),
    (
        lambda: theory.capacity(KEY, X, sizes=np.array([2, 6]), beta=1.0),
        "sizes must be at most 5, got 6",
    ),
    # Keys.
    *(
        (call, "key must be a JAX random key such as jax.random.key.0., got 0")
        for call in (
            lambda: uj.fit_annealed(0, X),
            lambda: uj.gaussian_start(0, 3),
            lambda: theory.stored(0, X, beta=1.0),
        )
    ),
    (
        lambda: uj.gaussian_start(jax.random.split(KEY), 3),
        r"key must be a JAX random key .* got shape \(2,\) and dtype key",
    ),
    # Kernels and other parts of a model.
    (
        with_kernel(lambda: uj.LinearKernel([[1.0]])),
        r"weights of LinearKernel must be a floating array, got \[\[1.0\]\]",
    ),
    (
        with_kernel(lambda: uj.LinearKernel(jnp.eye(3, dtype=int))),
        "weights of LinearKernel must be a floating array, got dtype int",
    ),
    (
        with_kernel(lambda: uj.LinearKernel(jnp.ones(3))),
        r"weights of LinearKernel must have shape \(..., D, d\), got \(3,\)",
    ),
    (
        with_kernel(lambda: uj.LinearKernel(jnp.eye(3), jnp.ones(2))),
        r"center of LinearKernel must have shape \(3,\), got \(2,\)",
    ),
    (
        with_kernel(
            lambda: uj.LowRankKernel(jnp.ones(2), jnp.ones((3, 2)), jnp.ones((2, 3)))
        ),
        r"scale of LowRankKernel must have shape \(\), got \(2,\)",
    ),
    (
        with_kernel(
            lambda: uj.LowRankKernel(jnp.ones(()), jnp.ones((2, 3)), jnp.ones((2, 3)))
        ),
        r"left of LowRankKernel must have shape \(3, 2\), got \(2, 3\)",
    ),
    (
        with_kernel(lambda: uj.Centering(jnp.ones(()))),
        r"center of Centering must have shape \(..., d\), got \(\)",
    ),
    (
        with_kernel(
            lambda: uj.LikelihoodKernel(
                jnp.ones((4, 2)), jnp.ones((4, 3)), jnp.ones(3), 3
            )
        ),
        r"query_table of LikelihoodKernel must have shape \(4, 2\), got \(4, 3\)",
    ),
    (
        with_kernel(
            lambda: uj.LikelihoodKernel(
                jnp.ones((4, 2)), jnp.ones((4, 2)), jnp.ones(4), 3
            )
        ),
        r"edges of LikelihoodKernel must have shape \(3,\), got \(4,\)",
    ),
    (
        lambda: theory.exact_retrieval_distance(
            uj.LinearKernel(jnp.ones(3)), beta=1.0, separation=uj.Sparsemax()
        ),
        r"weights of LinearKernel must have shape \(..., D, d\), got \(3,\)",
    ),
    (
        lambda: fitting(start=uj.LinearKernel(jnp.ones(3)))(),
        r"weights of LinearKernel must have shape \(..., D, d\), got \(3,\)",
    ),
    *(
        (
            lambda make=make: fitting(start=make())(),
            f"start must be a LinearKernel or a LowRankKernel, got {name}",
        )
        for make, name in [
            (lambda: np.eye(3), "ndarray"),
            (lambda: uj.Centering(jnp.ones(3)), "Centering"),
        ]
    ),
    (
        lambda: uj.fit(X, optimizer=None, steps=2),
        "optimizer must be an Optax transformation, got None",
    ),
    (
        lambda: uj.fit(X, optimizer=optax.sgd, steps=2),
        "optimizer must be an Optax transformation, got <function sgd",
    ),
    (
        lambda: uj.separation_from_name("entmax", alfa=2),
        "unknown parameter 'alfa' of entmax, which has alpha, power",
    ),
    (
        lambda: uj.separation_from_name("softmax", alpha=2),
        "unknown parameter 'alpha' of softmax, which has none",
    ),
    (
        lambda: theory.exact_retrieval_slack(X, beta=1.0, separation="softmax"),
        "separation must be one of Softmax, .* got 'softmax'",
    ),
    (
        lambda: uj.has_energy("softmax", uj.Dot()),
        "separation must be one of Softmax, .* got 'softmax'",
    ),
    (
        lambda: uj.has_energy(uj.Softmax(), "dot"),
        "similarity must be one of Dot, .* got 'dot'",
    ),
    (
        lambda: MEMORY.retrieve(X, beta=1.0, mask=MEMORY.used),
        "mask must be left out: the memory has its own",
    ),
    (
        lambda: MEMORY.retrieve(X, beta=1.0, values=X),
        "values must be left out: the memory has its own",
    ),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[m for _, m in CASES])
def test_wrong_input_is_refused(untyped, call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unusual_but_valid_input_is_accepted(untyped):
    expected = theory.pattern_separation(X)
    for zero in (0, np.float32(0), jnp.zeros(())):
        result = theory.pattern_separation(X, distance=zero)
        np.testing.assert_array_equal(result, expected)
    result = theory.capacity(KEY, X, sizes=np.array([2, 3]), beta=1.0)
    np.testing.assert_array_equal(result.sizes, [2, 3])
    old, new = (uj.gaussian_start(k, 3) for k in (jax.random.PRNGKey(0), KEY))
    np.testing.assert_array_equal(old.weights, new.weights)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i4"])
def test_arrays_in_another_byte_order(dtype, tmp_path, untyped):
    given = (np.random.default_rng(0).normal(size=(6, 4)) * 5).astype(dtype)
    native = given.astype(given.dtype.newbyteorder("="))
    path = tmp_path / "memories.npy"
    np.save(path, given)
    one = np.asarray(1.0, ">f8")
    expected = uj.retrieve(native, native[:2], beta=1.0).state
    states = [
        uj.retrieve(given, given[:2], beta=one).state,
        uj.retrieve_streamed(jnp.asarray(native), given[:2], beta=one).state,
    ]
    for memories in (given, path, lambda: iter([given[:4], given[4:]])):
        states.append(uj.retrieve_streamed(memories, given[:2], beta=1.0).state)
    top = uj.retrieve_streamed(given, given[:2], beta=1.0, separation=uj.TopK(6))
    for state in (*states, top.state):
        assert state.dtype == expected.dtype
        assert_close(state, expected)
    memory, _ = uj.Memory.empty(4, dtype=jnp.float64).add(given)
    np.testing.assert_array_equal(memory.patterns[:6], native)
    split = uj.shard_memories(given, uj.memory_mesh(1)).memories
    np.testing.assert_array_equal(split, native)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (np.ones((2, 4), np.longdouble), "dtype float128"),
        (np.ones((2, 4), object), "dtype object"),
        (np.full((2, 4), "one"), "dtype <U3"),
        (np.zeros((2, 4), "M8[D]"), r"dtype datetime64\[D\]"),
        ([[1.0, 2], [3]], "a list with parts of unlike lengths"),
    ],
    ids=["long double", "objects", "text", "dates", "ragged"],
)
def test_objects_that_are_no_array_of_numbers_are_named(given, got, untyped):
    memories = np.ones((2, 4))
    for call in (
        lambda: uj.retrieve(given, memories, beta=1.0),
        lambda: uj.retrieve(memories, given, beta=1.0),
        lambda: uj.retrieve_streamed(given, memories, beta=1.0),
        lambda: uj.Memory.empty(4).add(given),
    ):
        with pytest.raises(ValueError, match=f"must be .*, got {got}$"):
            call()


def test_a_traced_number_out_of_range_gives_nan():
    memories = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))

    @jax.jit
    def results(x):
        return (
            uj.retrieve(memories, memories, beta=x).state,
            uj.retrieve_streamed(memories, memories, beta=x).state,
            uj.AverageLoss(x)(memories),
            theory.pattern_separation(memories, distance=x),
        )

    for value in (1.5, -1.0, 0.0, np.inf, np.nan):
        finite = [bool(np.isfinite(x).all()) for x in results(value)]
        assert finite == [value == 1.5] * 4


def test_a_memory_is_not_traced():
    memory = uj.Memory.empty(3)
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(ValueError, match="add, remove and replace outside of"):
            transform(lambda x: memory.add(x)[0].patterns)(jnp.ones((2, 3)))
