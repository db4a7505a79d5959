"""Wrong input of every public function is refused in one sentence that names it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close

import uhop_jax as uj
from uhop_jax import Model, theory
from uhop_jax import transformations as moves

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
ONES = np.ones(3)
IMAGE = (8, 8, 1)
MEMORY = uj.Memory.empty(3).add(X)[0]


def retrieving(mask=None, **options):
    return lambda: uj.retrieve(uj.Model(**({"beta": 1.0} | options)), X, X, mask=mask)


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
        lambda: uj.converge(uj.Model(beta=1.0), X, X, tolerance=ONES),
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
        lambda: theory.stored(KEY, Model(beta=1.0), X, tolerance=ONES),
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
        lambda: theory.capacity(KEY, Model(beta=1.0), X, sizes=3),
        "sizes must be a sequence of integers, got 3",
    ),
    (
        lambda: theory.capacity(KEY, Model(beta=1.0), X, sizes=np.array([2, 6])),
        "sizes must be at most 5, got 6",
    ),
    # Keys.
    *(
        (call, "key must be a JAX random key such as jax.random.key.0., got 0")
        for call in (
            lambda: uj.fit_annealed(0, X),
            lambda: uj.gaussian_start(0, 3),
            lambda: theory.stored(0, Model(beta=1.0), X),
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
            Model(uj.Dot(uj.LinearKernel(jnp.ones(3))), uj.Sparsemax(), beta=1.0)
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
        "unknown parameter 'alfa' of entmax, which has alpha, cases",
    ),
    (
        lambda: uj.separation_from_name("softmax", alpha=2),
        "unknown parameter 'alpha' of softmax, which has none",
    ),
    (
        lambda: theory.exact_retrieval_slack(Model(separation="softmax", beta=1.0), X),
        "separation must be one of Softmax, .* got 'softmax'",
    ),
    (
        lambda: uj.Model(uj.Dot(), "softmax", beta=1.0),
        "separation must be one of Softmax, .* got 'softmax'",
    ),
    (
        lambda: uj.Model("dot", beta=1.0),
        "similarity must be one of Dot, .* got 'dot'",
    ),
    (
        lambda: MEMORY.retrieve(uj.Model(beta=1.0), X, mask=MEMORY.used),
        "mask must be left out: the memory has its own",
    ),
    (
        lambda: MEMORY.retrieve(uj.Model(beta=1.0), X, values=X),
        "values must be left out: the memory has its own",
    ),
    # Kernels that do not fit.
    (
        lambda: uj.Dot(uj.Centering(jnp.ones((5, 3))))(X, X),
        "kernel has 1 axes of memory sets, memories have 0",
    ),
    (
        lambda: uj.fit_footprint(KEY, X, uj.Mask(0.5), kernel="x"),
        "kernel must be a Kernel such as .*, got str",
    ),
    (
        lambda: uj.fit_footprint(
            KEY, X, uj.Mask(0.5), kernel=uj.LinearKernel(jnp.eye(2))
        ),
        "kernel maps dimension 2, memories have dimension 3",
    ),
    # Numbers out of range.
    (
        lambda: uj.Softmax().tempered(X, -1.0),
        "beta must be positive and finite, got -1.0",
    ),
    (
        lambda: theory.weight_error_bound(X, uj.Exponentials()(jnp.ones(5))),
        "weights must be non-negative and sum to at most 1, .* a sum of 13.59",
    ),
    (
        lambda: theory.weight_error_bound(X, -jnp.ones(5)),
        "weights must be non-negative .* got a weight of -1",
    ),
    (
        lambda: MEMORY.remove(np.zeros((1, 2), int)),
        r"slots must have shape \(n,\), got \(1, 2\)",
    ),
    # Transformations of images.
    (lambda: moves.Shifts(-1, IMAGE), "reach must be at least 0, got -1"),
    (lambda: moves.Shifts(1.5, IMAGE), "reach must be an integer, got 1.5"),
    (
        lambda: moves.Shifts(1, (8, 8)),
        r"shape must be \(height, width, channels\), got \(8, 8\)",
    ),
    (lambda: moves.Flips((8, 0, 1)), "width must be at least 1, got 0"),
    (
        lambda: moves.image_transformations((8, 8)),
        r"shape must be \(height, width, channels\), got \(8, 8\)",
    ),
    (
        lambda: moves.Blurs((0.0, 1.0), IMAGE),
        "widths must be positive and finite, got 0.0",
    ),
    (lambda: moves.Blurs((), IMAGE), r"widths must be a tuple of at least one, got"),
    (
        lambda: moves.blurred(jnp.ones((1, 64)), 0, IMAGE),
        "width must be positive and finite, got 0",
    ),
    (
        lambda: moves.Warps((0.0,), (-1.0,), IMAGE),
        "scales must be positive and finite, got -1.0",
    ),
    (
        lambda: moves.Warps((np.nan,), (1.0,), IMAGE),
        "degrees must be finite, got 1 NaN or infinite of 1",
    ),
    (lambda: moves.Occlusions(0, 1, IMAGE), "side must be at least 1, got 0"),
    (lambda: moves.Occlusions(2, 0, IMAGE), "stride must be at least 1, got 0"),
    (lambda: moves.Union(()), "parts must be a tuple of at least one, got"),
    (
        lambda: moves.Union((3,)),
        "transformations must be Transformations such as .*, got 3",
    ),
    (
        lambda: moves.Transformed(
            transformations=moves.Flips((1, 3, 1)), log_weights=jnp.zeros(2)
        )(X, X),
        r"log_weights must have shape \(3,\), one for each transformation, got \(2,\)",
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
    result = theory.capacity(KEY, Model(beta=1.0), X, sizes=np.array([2, 3]))
    np.testing.assert_array_equal(result.sizes, [2, 3])
    old, new = (uj.gaussian_start(k, 3) for k in (jax.random.PRNGKey(0), KEY))
    np.testing.assert_array_equal(old.weights, new.weights)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i4"])
def test_arrays_in_another_byte_order(dtype, tmp_path, untyped):
    given = (np.random.default_rng(0).normal(size=(6, 4)) * 5).astype(dtype)
    native = given.astype(given.dtype.newbyteorder("="))
    path = tmp_path / "memories.npy"
    np.save(path, given)
    one = np.asarray(1.0, ">f8")
    expected = uj.retrieve(uj.Model(beta=1.0), native, native[:2]).state
    states = [
        uj.retrieve(uj.Model(beta=one), given, given[:2]).state,
        uj.retrieve_streamed(uj.Model(beta=one), jnp.asarray(native), given[:2]).state,
    ]
    for memories in (given, path, lambda: iter([given[:4], given[4:]])):
        states.append(
            uj.retrieve_streamed(uj.Model(beta=1.0), memories, given[:2]).state
        )
    top = uj.retrieve_streamed(
        uj.Model(separation=uj.TopK(6), beta=1.0), given, given[:2]
    )
    for state in (*states, top.state):
        assert state.dtype == expected.dtype
        assert_close(state, expected)
    memory, _ = uj.Memory.empty(4, dtype=jnp.float64).add(given)
    np.testing.assert_array_equal(memory.patterns[:6], native)
    split = uj.shard_memories(given, uj.memory_mesh(1)).memories
    np.testing.assert_array_equal(split, native)


def test_numbers_of_a_model_in_another_byte_order(tmp_path, untyped):
    alpha, weights = np.asarray([1.5, 2.0], ">f4"), np.eye(3).astype(">f8")
    given = uj.Model(uj.Dot(uj.LinearKernel(weights)), uj.Entmax(alpha), beta=1.0)
    loaded = uj.load(uj.save(tmp_path / "model", given))
    native = uj.Model(
        uj.Dot(uj.LinearKernel(jnp.eye(3))),
        uj.Entmax(jnp.asarray([1.5, 2.0])),
        beta=1.0,
    )
    expected = uj.retrieve(native, X, X[:2]).state
    for model in (given, loaded):
        np.testing.assert_array_equal(uj.retrieve(model, X, X[:2]).state, expected)


@pytest.mark.parametrize("dtype", ["i8", ">i8", "u8", list])
def test_integers_of_more_than_32_bits_are_not_cut(dtype, untyped):
    large = [[3_000_000_000, 0], [0, 5]]
    given = large if dtype is list else np.asarray(large, dtype)
    array = np.asarray(given)
    with jax.enable_x64(False):
        beta = array[0, 0]
        model = uj.Model(uj.NegativeSquaredL2(), beta=beta)
        wide = uj.Model(uj.NegativeSquaredL2(), beta=int(beta))
        states = [
            uj.retrieve(model, given, given).state,
            uj.retrieve_streamed(wide, array, given).state,
            uj.retrieve_streamed(model, lambda: iter([array]), array).state,
            uj.shard_memories(array, uj.memory_mesh(1)).memories,
        ]
        for state in states:
            assert state.dtype == jnp.float32
            np.testing.assert_array_equal(state, np.asarray(large, np.float32))


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
        lambda: uj.retrieve(uj.Model(beta=1.0), given, memories),
        lambda: uj.retrieve(uj.Model(beta=1.0), memories, given),
        lambda: uj.retrieve_streamed(uj.Model(beta=1.0), given, memories),
        lambda: uj.Memory.empty(4).add(given),
    ):
        with pytest.raises(ValueError, match=f"must be .*, got {got}$"):
            call()


def test_a_traced_number_out_of_range_gives_nan():
    memories = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))

    @jax.jit
    def results(x):
        return (
            uj.retrieve(uj.Model(beta=x), memories, memories).state,
            uj.retrieve_streamed(uj.Model(beta=x), memories, memories).state,
            uj.AverageLoss(x)(memories),
            theory.pattern_separation(memories, distance=x),
            theory.gradient_descent_bound(1.0, learning_rate=x, steps=1),
            uj.Polynomial(3).tempered(memories, x),
            uj.Noise(x - 0.1, None, None)(KEY, memories),
            uj.Noise(x - 0.1, None, None).log_likelihood(memories, memories),
            uj.retrieve_streamed(
                uj.Model(separation=uj.Polynomial(3), beta=x), memories, memories
            ).state,
            uj.fit_closed_form(memories, ridge=x - 0.1).weights,
        )

    for value in (1.5, -1.0, 0.0, np.inf, np.nan):
        finite = [bool(np.isfinite(x).all()) for x in results(value)]
        expected = [value == 1.5] * 10
        expected[3] |= value == 0  # the separation at the memory itself
        assert finite == expected


def test_a_memory_of_64_bits_needs_them():
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="dtype float64 needs jax_enable_x64"):
            uj.Memory.empty(2, dtype=np.float64)


def test_a_memory_is_not_traced():
    memory = uj.Memory.empty(3)
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(ValueError, match="add, remove and replace outside of"):
            transform(lambda x: memory.add(x)[0].patterns)(jnp.ones((2, 3)))
