"""Streamed retrieval and growing memories, against direct retrieval."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, every_dtype, slow_where
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import uhop_jax
from uhop_jax import (
    Cosine,
    Dot,
    Entmax,
    Epanechnikov,
    Exponentials,
    LinearKernel,
    Memory,
    Model,
    NegativeL1,
    NegativeSquaredL2,
    Polynomial,
    Softmax,
    Softmax1,
    Sparsemax,
    TopK,
    retrieve,
    retrieve_streamed,
)

COUNT, D = 101, 6  # odd: no block divides it


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


MEMORIES, VALUES, QUERY = normal(COUNT, D), normal(COUNT, 3, seed=1), normal(2, 4, D)
KERNEL = LinearKernel(jnp.asarray(normal(7, D, seed=2)))
SEPARATIONS = [
    Softmax(),
    Softmax1(),
    Sparsemax(),
    Entmax(1.5),
    Entmax(1.3),
    Entmax(3.0),
    Polynomial(4),
    TopK(3),
]
CASES = [(s, Dot()) for s in SEPARATIONS] + [
    (Softmax(), Dot(KERNEL)),
    (Softmax(), NegativeL1()),
    (Sparsemax(), NegativeSquaredL2()),
    (TopK(3), Cosine(KERNEL)),
    (Entmax(jnp.asarray([[1.0], [2.0]]), cases=False), Cosine()),
]


def slow(*case):
    """A slow case, whose parts other cases cover."""
    return pytest.param(*case, marks=pytest.mark.slow)


def label(x):
    return type(x).__name__


def sources(x, path):
    """The same rows as an array, a file, and pieces of any lengths."""
    np.save(path, x)
    cuts = [3, 4, 40, 41, 90]
    yield jnp.asarray(x)
    yield path
    yield lambda: iter(np.split(x, cuts))


@pytest.mark.few(2)
@pytest.mark.parametrize(("separation", "similarity"), CASES, ids=label)
def test_equal_to_direct_retrieval(separation, similarity, tmp_path):
    beta = jnp.asarray([0.3, 1.0, 2.0, 6.0])
    model = Model(similarity, separation, beta=beta)
    query, values = jnp.asarray(QUERY), jnp.asarray(VALUES)
    direct = retrieve(model, jnp.asarray(MEMORIES), query, values=values, steps=2)
    best, index = jax.lax.top_k(direct.weights, 2)
    pairs = zip(
        sources(MEMORIES, tmp_path / "m.npy"),
        sources(VALUES, tmp_path / "v.npy"),
        strict=True,
    )
    for memories, own in pairs:
        streamed = retrieve_streamed(
            model,
            memories,
            query,
            steps=2,
            values=own,
            block=16,
            query_block=3,
            top=2,
        )
        assert_close(streamed.state, direct.state, scale=100)
        assert_close(streamed.weights, best, floor=1e-8)
        np.testing.assert_array_equal(streamed.nearest[best > 0], index[best > 0])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("separation", "similarity"),
    [
        (Softmax(), Dot()),
        (TopK(3), Cosine()),
        (Sparsemax(), NegativeSquaredL2()),
        (Softmax(), "likelihood"),
        slow(Entmax(1.5), Cosine()),
    ],
    ids=label,
)
def test_known_components_alone_are_compared(separation, similarity, tmp_path):
    if similarity == "likelihood":
        stored, noise = jnp.asarray(MEMORIES), uhop_jax.Noise(0.3, None, None)
        kernel = uhop_jax.fit_likelihood(jax.random.key(0), stored, noise)
        similarity = Dot(kernel)
    observed = jnp.asarray(normal(4, D, seed=3) > -0.3)
    query = jnp.where(observed, jnp.asarray(QUERY), jnp.nan)
    model = Model(similarity, separation, beta=jnp.asarray([0.3, 1.0, 2.0, 6.0]))
    known = {"observed": observed}
    direct = retrieve(model, jnp.asarray(MEMORIES), query, **known)
    for memories in sources(MEMORIES, tmp_path / "m.npy"):
        streamed = retrieve_streamed(
            model, memories, query, block=16, query_block=3, top=1, **known
        )
        assert_close(streamed.state, direct.state, scale=100)
        assert_close(streamed.weights[..., 0], direct.weights.max(-1), floor=1e-8)
        np.testing.assert_array_equal(
            streamed.nearest[..., 0], direct.weights.argmax(-1)
        )


@pytest.mark.parametrize("beta", [0.01, 0.3, 2.0])
def test_steep_weights_equal_the_direct_ones(beta):
    alphas = jnp.asarray([2.01, 3.0, 5.0, 10.0, 20.0, 50.0, 1.0, 1.5])
    query = jnp.asarray(QUERY.reshape(8, D))
    ties = np.concatenate([MEMORIES[:20], MEMORIES[:20], np.zeros((61, D))])
    for rows in (MEMORIES, ties):
        model = Model(separation=Entmax(alphas), beta=beta)
        direct = retrieve(model, jnp.asarray(rows), query)
        best, _ = jax.lax.top_k(direct.weights, 3)
        for source in (jnp.asarray(rows), rows):
            streamed = retrieve_streamed(model, source, query, block=16, top=3)
            assert_close(streamed.state, direct.state, floor=1e-7)
            assert_close(streamed.weights, best, floor=1e-7)


@pytest.mark.few(1)
@pytest.mark.parametrize("alpha", [2.5, 3.0, 5.0])
def test_steep_gradients_equal_the_direct_ones(alpha):
    def loss(run, memories, query, beta, alpha):
        state = run(Model(separation=Entmax(alpha), beta=beta), memories, query).state
        return (state * jnp.arange(float(D))[None, None]).sum()

    arguments = (jnp.asarray(MEMORIES), jnp.asarray(QUERY), 0.3, alpha)
    streamed, direct = (
        jax.jit(jax.grad(functools.partial(loss, run), (0, 1, 2, 3)))(*arguments)
        for run in (retrieve_streamed, retrieve)
    )
    for a, b in zip(streamed, direct, strict=True):
        size = jnp.abs(b).max()
        assert_close(a / size, b / size, floor=1e-8)


def test_second_derivatives_are_refused():
    def loss(query):
        return (
            retrieve_streamed(Model(beta=1.0), jnp.asarray(MEMORIES), query).state ** 2
        ).sum()

    with pytest.raises(ValueError, match="has first derivatives alone"):
        jax.jacrev(jax.grad(loss))(jnp.asarray(QUERY))


def test_gradient_with_known_components():
    observed = jnp.asarray(normal(4, D, seed=3) > -0.3)

    def loss(function, memories, query):
        model = Model(Cosine(), beta=2.0)
        return (function(model, memories, query, observed=observed).state ** 2).sum()

    arguments = jnp.asarray(MEMORIES), jnp.asarray(QUERY)
    streamed = jax.grad(lambda *x: loss(retrieve_streamed, *x), (0, 1))(*arguments)
    direct = jax.grad(lambda *x: loss(retrieve, *x), (0, 1))(*arguments)
    jax.tree.map(lambda a, b: assert_close(a, b, scale=100), streamed, direct)


@pytest.mark.few(3)
@pytest.mark.parametrize("block", [7, 101, None, *map(slow, (1, 100, 1000))])
@pytest.mark.parametrize("on_host", [False, True])
def test_any_block(block, on_host):
    memories = MEMORIES if on_host else jnp.asarray(MEMORIES)
    model = Model(separation=Sparsemax(), beta=1.0)
    query = jnp.asarray(QUERY)
    streamed = retrieve_streamed(model, memories, query, block=block)
    direct = retrieve(model, jnp.asarray(MEMORIES), query)
    assert_close(streamed.state, direct.state)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("separation", "similarity"),
    [
        slow(*c) if i in (1, 3, 4, 9, 10, 11, 12) else c
        for i, c in enumerate(CASES)
        if i != 5
    ],
    ids=label,
)
def test_gradients_equal_the_gradients_of_direct_retrieval(separation, similarity):
    mask = jnp.arange(COUNT) % 7 > 0
    separation = jax.tree.map(jnp.asarray, separation)
    arrays = [jnp.asarray(x) for x in (MEMORIES, QUERY, VALUES)]
    arrays[0] = arrays[0].at[0].set(jnp.nan)  # masked
    arguments = *arrays, jnp.asarray(1.3), separation, similarity

    def gradients(run, **options):
        def loss(memories, query, values, beta, separation, similarity):
            state = run(
                Model(similarity, separation, beta=beta),
                memories,
                query,
                steps=2,
                values=values,
                mask=mask,
                **options,
            ).state
            return (state * jnp.arange(1.0, 4.0)[None, None]).sum()

        return jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*arguments)

    direct = gradients(retrieve)
    streamed = gradients(retrieve_streamed, block=10, query_block=3)
    for a, b in zip(*map(jax.tree.leaves, (streamed, direct)), strict=True):
        assert_close(a, b, scale=10)


@pytest.mark.few(4)
@slow_where(lambda separation, dtype: dtype != jnp.float32 and separation != Softmax())
@every_dtype
@pytest.mark.parametrize("separation", [*SEPARATIONS[:4], *map(slow, SEPARATIONS[4:])])
def test_dtypes(separation, dtype):
    memories, query = (jnp.asarray(x, dtype) for x in (MEMORIES, QUERY))
    streamed = retrieve_streamed(
        Model(separation=separation, beta=2.0), memories, query, block=16, top=1
    )
    exact = retrieve(
        Model(separation=separation, beta=2.0),
        memories.astype(float),
        query.astype(float),
    )
    assert streamed.state.dtype == streamed.weights.dtype == dtype
    steep = 30 if separation == Entmax(3.0) else 4
    assert_close(streamed.state, exact.state, scale=steep)


def test_half_precision_sums_in_float32():
    """Ten thousand equal weights: in float16 their sum would stand still at 2048."""
    memories = jnp.ones((10_000, 2), jnp.float16)
    for separation in (Softmax(), Sparsemax(), Entmax(1.5)):
        streamed = retrieve_streamed(
            Model(separation=separation, beta=1.0), memories, jnp.ones(2, jnp.float16)
        )
        assert_close(streamed.state, np.ones(2))


@pytest.mark.few(2)
@pytest.mark.parametrize("separation", SEPARATIONS[:5], ids=label)
def test_no_array_has_the_size_of_all_overlaps(separation):
    def run(memories, query):
        return retrieve_streamed(
            Model(separation=separation, beta=1.0), memories, query, block=64
        ).state.sum()

    memories = jax.ShapeDtypeStruct((20_001, 4), jnp.float32)
    query = jax.ShapeDtypeStruct((32, 4), jnp.float32)
    program = jax.jit(jax.grad(run, argnums=1)).lower(memories, query).compile()
    held = program.memory_analysis().temp_size_in_bytes
    assert held < 20_001 * 32 * 4 / 2


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("separation", "on_host"),
    [
        *((s, False) for s in (Entmax(1.3), TopK(3), Epanechnikov())),
        *((s, True) for s in (Entmax(3.0), Exponentials())),
        *(slow(s, False) for s in (Softmax(), Sparsemax(), Polynomial(4))),
        *(slow(s, True) for s in (Entmax(1.3), TopK(3), Epanechnikov())),
    ],
    ids=label,
)
def test_nan_shows(separation, on_host):
    model = Model(NegativeSquaredL2(), separation, beta=0.1)
    memories, query = MEMORIES[:40].copy(), normal(3, D, seed=3)

    def states():
        values, kept = VALUES[:40], memories.copy()
        sources = (lambda: iter([kept]), lambda: iter([values]))
        if not on_host:
            sources = jnp.asarray(kept), jnp.asarray(values)
        stored, own = sources
        streamed = retrieve_streamed(
            model, stored, jnp.asarray(query), values=own, block=16, top=1
        )
        return jnp.isnan(streamed.state).all(-1)

    query[1, 0] = np.nan
    np.testing.assert_array_equal(states(), [False, True, False])
    memories[30, 0] = np.nan
    assert states().all()


def test_an_iterator_is_opened_once_for_every_pass():
    opened = []

    def blocks():
        opened.append(1)
        return iter(np.split(MEMORIES, [3, 40]))

    streamed = retrieve_streamed(Model(beta=1.0), blocks, jnp.asarray(QUERY))
    direct = retrieve(Model(beta=1.0), jnp.asarray(MEMORIES), jnp.asarray(QUERY))
    assert_close(streamed.state, direct.state)
    assert len(opened) == 1


@pytest.mark.parametrize("options", [dict(top=2), dict(steps=2), dict(query_block=3)])
@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (lambda x: x, "a new iterator at every call, got the same one twice"),
        (lambda x: (row for row in x), f"yields 0 rows, the first one {COUNT}"),
    ],
    ids=["same", "empty"],
)
def test_an_iterator_that_has_been_read_is_refused(options, wrapped, message):
    once = iter(np.split(MEMORIES, [3, 40]))
    with pytest.raises(ValueError, match=f"memories: .*{message}"):
        retrieve_streamed(
            Model(beta=1.0), lambda: wrapped(once), jnp.asarray(QUERY), **options
        )


@pytest.mark.parametrize(
    ("separation", "top", "message"),
    [
        (Softmax(), COUNT + 1, f"top must be at most {COUNT}, got {COUNT + 1}"),
        (TopK(COUNT + 1), 0, f"k must be at most {COUNT}"),
    ],
)
def test_the_rows_of_an_iterator_are_counted(separation, top, message):
    model = Model(separation=separation, beta=1.0)
    with pytest.raises(ValueError, match=message):
        retrieve_streamed(model, lambda: iter([MEMORIES]), jnp.asarray(QUERY), top=top)


PARTS = ("similarity", "separation", "beta")
WRONG = [
    (
        dict(memories="nowhere.npy"),
        "memories: nowhere.npy cannot be read: No such file or directory",
    ),
    (dict(memories=np.zeros(3)), r"memories must have shape \(n, d\)"),
    (
        dict(memories=MEMORIES.astype(np.longdouble)),
        "memories must be real numbers of at most 64 bits, got dtype float128",
    ),
    (dict(memories=object()), "real numbers of at most 64 bits, got dtype object"),
    (
        dict(memories=(block for block in [MEMORIES])),
        "memories is a generator, which can be read but once: pass a function",
    ),
    (
        dict(memories=lambda: iter([MEMORIES, MEMORIES[:, 1:]])),
        f"blocks must have one width, the first has {D}, one that follows {D - 1}",
    ),
    (dict(memories=lambda: iter(())), "memories: the iterator holds no block"),
    (dict(memories=MEMORIES, mask=np.ones(COUNT, bool)), "mask belongs to memories"),
    (dict(values=jnp.zeros((3, 2))), r"values have shape \(3, 2\), memories"),
    (dict(values=normal(9, 2), memories=MEMORIES), r"values have shape \(9, 2\)"),
    (
        dict(memories=lambda: iter([MEMORIES]), values=lambda: iter([VALUES[:9]])),
        "values end before the memories, or after",
    ),
    *(
        (
            dict(memories=memories, values=values, separation=TopK(2)),
            f"values have {rows} rows, memories {COUNT}: they must agree",
        )
        for memories, values, rows in (
            (MEMORIES, lambda: iter([VALUES[:9]]), 9),
            (lambda: iter([MEMORIES]), lambda: iter([VALUES, VALUES]), 2 * COUNT),
            (lambda: iter([MEMORIES]), VALUES[:9], 9),
        )
    ),
    (
        dict(memories=jnp.ones((3, D), "f"), query=jnp.ones(D, "f"), beta=1e40),
        r"beta must be positive and finite in float32, got 1e\+40",
    ),
    (dict(block=0), "block must be at least 1, got 0"),
    (dict(top=COUNT + 1), f"top must be at most {COUNT}, got {COUNT + 1}"),
    (dict(separation=TopK(COUNT + 1)), f"k must be at most {COUNT}"),
    (dict(observed=np.ones(D)), "observed must be boolean"),
    (dict(observed=np.ones(D, bool), steps=2), "observed is streamed with steps 1"),
    (
        dict(observed=np.ones(D, bool), similarity=Dot(KERNEL)),
        "observed is streamed without a kernel .* got LinearKernel",
    ),
    (dict(mask=jnp.ones(3, bool)), rf"mask must have shape \({COUNT},\), got \(3,\)"),
    (dict(mask="yes"), "mask must be boolean, got 'yes'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_input(change, message, untyped):
    arguments = dict(memories=jnp.asarray(MEMORIES), query=jnp.asarray(QUERY), beta=1.0)
    arguments |= change
    parts = {name: arguments.pop(name) for name in PARTS if name in arguments}
    with pytest.raises(ValueError, match=message):
        retrieve_streamed(Model(**parts), **arguments)


def test_explicit_axes_may_hold_an_array_but_not_split_it(untyped):
    """JAX cannot follow tiles of a split array, and said so in its own words."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    arguments = {"memories": MEMORIES, "query": QUERY[0], "values": VALUES}
    arguments |= {"mask": np.ones(COUNT, bool), "model": Model(beta=np.ones(4))}
    expected = retrieve_streamed(**jax.tree.map(jnp.asarray, arguments))
    whole = jax.device_put(arguments, NamedSharding(mesh, PartitionSpec()))
    use = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh  # in jax 0.7.0
    with use(mesh):
        assert_close(retrieve_streamed(**whole).state, expected.state)
    for name, x in arguments.items():
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        message = f"{name} must not be split over mesh axes of type AxisType.Explicit"
        for call in (retrieve_streamed, jax.jit(retrieve_streamed)):
            with pytest.raises(ValueError, match=message):
                call(**whole | {name: split})


@pytest.mark.parametrize("kind", ["zip", "npz", "header", "objects", "long double"])
def test_files_that_cannot_be_streamed(kind, tmp_path):
    path, message = tmp_path / "x.npy", "is damaged or truncated, or is no .npy file"
    np.save(path, MEMORIES)
    whole = path.read_bytes()
    match kind:
        case "zip":
            path.write_bytes(b"PK\3\4" + bytes(100))
        case "npz":
            path, message = tmp_path / "x.npz", "is a .npz archive, expected a .npy"
            np.savez(path, MEMORIES)
        case "header":
            path.write_bytes(whole[:40])
        case "objects":
            np.save(path, np.asarray([{}]), allow_pickle=True)
        case "long double":
            np.save(path, MEMORIES.astype(np.longdouble))
            message = "at most 64 bits, got dtype float128"
    name = "x.npz" if kind == "npz" else "x.npy"
    message = message if kind == "long double" else f"{name} {message}"
    with pytest.raises(ValueError, match=f"memories.*{message}"):
        retrieve_streamed(Model(beta=1.0), path, jnp.asarray(QUERY))


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.save(tmp_path / "home.npy", MEMORIES)
    streamed = retrieve_streamed(Model(beta=1.0), "~/home.npy", jnp.asarray(QUERY))
    direct = retrieve_streamed(Model(beta=1.0), MEMORIES, jnp.asarray(QUERY))
    np.testing.assert_array_equal(streamed.state, direct.state)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i4"])
def test_the_byte_order_does_not_matter(dtype, tmp_path):
    swapped = (MEMORIES * 4).astype(dtype)
    native = swapped.astype(swapped.dtype.newbyteorder("="))
    np.save(tmp_path / "x.npy", swapped)
    model, query = Model(separation=TopK(3), beta=1.0), jnp.asarray(QUERY)
    expected = retrieve_streamed(model, native, query, top=2)
    for source in (swapped, tmp_path / "x.npy", lambda: iter([swapped])):
        streamed = retrieve_streamed(model, source, query, top=2)
        for part, expected_part in zip(streamed, expected, strict=True):
            np.testing.assert_array_equal(part, expected_part)


def test_host_memories_inside_jit_are_refused():
    with pytest.raises(ValueError, match="read on the host, which jit"):
        jax.jit(lambda q: retrieve_streamed(Model(beta=1.0), MEMORIES, q))(
            jnp.asarray(QUERY)
        )


def test_a_growing_memory(tmp_path):
    memory = Memory.empty(D, value_dimension=3)
    memory, slots = memory.add(MEMORIES[:20], VALUES[:20])
    assert memory.capacity == 32 and len(memory) == 20
    np.testing.assert_array_equal(slots, range(20))
    memory = memory.remove([3, 7]).replace(5, MEMORIES[30], VALUES[30])
    memory, slots = memory.add(MEMORIES[31], VALUES[31])
    np.testing.assert_array_equal(slots, [3])
    kept = [0, 1, 2, 31, 4, 30, 6, *range(8, 20)]
    model = Model(separation=Entmax(1.5), beta=2.0)
    query = jnp.asarray(QUERY)
    expected = retrieve(
        model,
        jnp.asarray(MEMORIES[kept]),
        query,
        values=jnp.asarray(VALUES[kept]),
        steps=2,
    )
    for one in (memory, uhop_jax.load(uhop_jax.save(tmp_path / "m", memory))):
        result = one.retrieve(model, query, steps=2)
        assert_close(result.state, expected.state)
        assert_close(result.weights[..., memory.slots], expected.weights)


def test_a_thousand_additions_compile_a_logarithmic_number_of_times(compilations):
    patterns = normal(1000, 4)
    memory = Memory.empty(4)
    memory, _ = memory.add(patterns[0])
    before = len(compilations)
    for pattern in patterns[1:]:
        memory, _ = memory.add(pattern)
    assert len(memory) == 1000 and memory.capacity == 1024
    assert len(compilations) - before <= np.log2(1000)
    np.testing.assert_array_equal(memory.patterns[:1000], patterns)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.remove(9), "slot 9 holds no pattern"),
        (lambda m: m.remove([0, 0]), "slots must differ"),
        (lambda m: m.replace([0], np.ones((2, D))), "got 1 slots for 2 patterns"),
        (lambda m: m.add(np.ones(3)), r"patterns must have shape \(n, 6\), got \(3,\)"),
        (lambda m: m.add(np.ones(D), np.ones(2)), "the memory has no values"),
        (lambda m: m.add(np.full(D, np.nan)), "patterns must be finite"),
        (
            lambda m: Memory.empty(D, dtype=jnp.float16).add(np.full(D, 1e5)),
            "patterns in float16 must be finite, got 6",
        ),
        (lambda m: Memory.empty(D, dtype=int), "dtype must be a floating dtype, got"),
        (
            lambda m: jax.jit(lambda m: m.add(np.ones(D))[0])(m),
            "add, remove and replace outside of jax.jit",
        ),
    ],
)
def test_wrong_changes(call, message, untyped):
    memory, _ = Memory.empty(D).add(MEMORIES[:4])
    with pytest.raises(ValueError, match=message):
        call(memory)
