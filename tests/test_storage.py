"""Saved files: bit for bit, safe against interruption, damage and foreign files."""

import inspect
import json
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import every_dtype

import uhop_jax
from uhop_jax import (
    AverageLoss,
    BlindCalibration,
    Calibration,
    Centering,
    ContrastiveLoss,
    Cosine,
    Dot,
    Entmax,
    Epanechnikov,
    Exponentials,
    Footprint,
    Identity,
    LikelihoodKernel,
    LinearKernel,
    LowRankKernel,
    Mask,
    MaximumLoss,
    Memory,
    Model,
    Noise,
    NormNoise,
    Polynomial,
    Softmax,
    TopK,
    load,
    retrieve,
    save,
)
from uhop_jax.corruption import Corruption
from uhop_jax.losses import LOSSES
from uhop_jax.separation import SEPARATIONS
from uhop_jax.similarity import SIMILARITIES
from uhop_jax.transformations import Blurs


def draw(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def likelihood(dtype):
    edges = jnp.sort(draw(4, dtype=dtype))
    tables = draw(5, 2, dtype=dtype), draw(5, 2, dtype=dtype, seed=1)
    return LikelihoodKernel(*tables, edges, 3)


def calibration(dtype):
    numbers = [draw(dtype=dtype, seed=n) for n in range(4)]
    return Calibration(
        Model(
            Cosine(LinearKernel(draw(2, 3, dtype=dtype))),
            Entmax(1.5),
            beta=jnp.exp(numbers[0]),
        ),
        *numbers[1:],
        screening=draw(2, 4, dtype=dtype),
        trials=draw(2, 1, 4, dtype=dtype).at[0, 0, 1].set(jnp.nan),
        betas=draw(2, 4, dtype=dtype),
        name="größer",
        names=("größer", "kleiner"),
        separations=("Entmax(alpha=1.5)",),
    )


def blind_calibration(dtype):
    kernel = LikelihoodKernel(
        *(draw(3, 2, dtype=dtype, seed=n) for n in (1, 2)), draw(2, dtype=dtype), 5
    )
    numbers = [draw(dtype=dtype, seed=n) for n in range(3)]
    return BlindCalibration(
        Model(Dot(kernel), beta=1.0),
        *(draw(2, 4, dtype=dtype, seed=n) for n in range(2)),
        *numbers,
        likelihood=Dot(kernel),
        table=draw(3, 3, dtype=dtype),
        name="dot",
        names=("dot", "blind likelihood"),
        rival="blind likelihood",
        queries=40,
    )


OBJECTS = {
    "blind": blind_calibration,
    "array": lambda dtype: draw(2, 3, dtype=dtype),
    "scalar": lambda dtype: jnp.asarray(1.5, dtype),
    "empty": lambda dtype: jnp.zeros((0, 3), dtype),
    "linear": lambda dtype: LinearKernel(draw(4, 3, dtype=dtype)),
    "centred": lambda dtype: LinearKernel(
        draw(4, 3, dtype=dtype), draw(3, dtype=dtype)
    ),
    "sets": lambda dtype: LinearKernel(draw(2, 4, 3, dtype=dtype)),
    "low rank": lambda dtype: LowRankKernel(
        draw(dtype=dtype), draw(3, 2, dtype=dtype), draw(2, 3, dtype=dtype)
    ),
    "rank 0": lambda dtype: LowRankKernel(
        draw(dtype=dtype), draw(3, 0, dtype=dtype), draw(0, 3, dtype=dtype)
    ),
    "centring": lambda dtype: Centering(draw(3, dtype=dtype)),
    "two-sided": lambda dtype: Centering(
        draw(3, dtype=dtype), 2 * draw(3, dtype=dtype)
    ),
    "likelihood": likelihood,
    "dot likelihood": lambda dtype: Dot(likelihood(dtype)),
    "alphas": lambda dtype: Entmax(jnp.abs(draw(3, dtype=dtype)) + 1),
    "alpha": lambda dtype: Entmax(1.25),
    "epanechnikov": lambda dtype: Epanechnikov(1),
    "exponentials": lambda dtype: Exponentials(),
    "footprint": lambda dtype: Footprint(
        distance=draw(3, dtype=dtype), product=draw(3, dtype=dtype)
    ),
    "polynomial": lambda dtype: Polynomial(7),
    "top-k": lambda dtype: TopK(3),
    "mask": lambda dtype: Mask(jnp.asarray(0.3, dtype), known=True),
    "noise": lambda dtype: Noise(0.2, low=None, high=2.5),
    "norm noise": lambda dtype: NormNoise(jnp.asarray(0.2, dtype), None, 2.5),
    "plain cosine": lambda dtype: Cosine(),
    "loss": lambda dtype: AverageLoss(jnp.asarray(3, dtype), False, "all"),
    "maximum loss": lambda dtype: MaximumLoss(1.5),
    "calibration": calibration,
    "model": lambda dtype: Model(beta=3.0),
    "memory": lambda dtype: Memory.empty(3, dtype=dtype).add(draw(2, 3, dtype=dtype))[
        0
    ],
    "tuple": lambda dtype: (Softmax(), None, (True, 3, 0.1, "text")),
}
OBJECTS |= {
    cls.__name__: lambda dtype, cls=cls: cls()
    for cls in (*SEPARATIONS.values(), *LOSSES.values(), Identity, NormNoise)
}
OBJECTS["contrastive"] = lambda dtype: ContrastiveLoss(draw(dtype=dtype), Mask(0.25))
OBJECTS |= {name: lambda dtype, cls=cls: cls() for name, cls in SIMILARITIES.items()}
OBJECTS |= {
    f"{name} with a kernel": lambda dtype, cls=cls: cls(
        LinearKernel(draw(4, 3, dtype=dtype), draw(3, dtype=dtype))
    )
    for name, cls in SIMILARITIES.items()
}
KERNEL = LinearKernel(draw(4, 3))


def assert_same(actual, expected):
    """Equal bit for bit, types and static fields included."""
    actual, structure = jax.tree.flatten(actual)
    expected, same = jax.tree.flatten(expected)
    assert structure == same
    for a, b in zip(actual, expected, strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        else:
            assert a == b


@pytest.mark.few(106)
@every_dtype
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_saved_objects_are_loaded_bit_for_bit(tmp_path, make, dtype):
    tree = make(dtype)
    path = save(tmp_path / "file.npz", tree)
    assert path == tmp_path / "file.npz"
    assert os.listdir(tmp_path) == ["file.npz"]
    assert_same(load(path), tree)
    with np.load(
        path, allow_pickle=False
    ) as file:  # the file holds bytes and JSON only
        parts = dict(file)
    assert json.loads(str(parts.pop("description")))["uhop_jax"] == 2
    assert {part.dtype for part in parts.values()} <= {np.dtype(np.uint8)}


def test_lost_digits_are_announced(tmp_path):
    path = save(tmp_path / "file", draw(2, 3, dtype=jnp.float64))
    with jax.enable_x64(False):
        with pytest.warns(UserWarning, match="holds float64, loaded as float32: set"):
            loaded = load(path)
    assert loaded.dtype == jnp.float32


def test_every_public_type_can_be_saved(tmp_path):
    dataclasses = {
        name
        for name, value in vars(uhop_jax).items()
        if hasattr(value, "__dataclass_fields__") and not inspect.isabstract(value)
    }
    saved = set()
    for make in OBJECTS.values():
        tree = [make(jnp.float32)]
        for part in tree:
            saved.add(type(part).__name__)
            tree.extend(
                getattr(part, name) for name in ("kernel",) if hasattr(part, name)
            )
    assert dataclasses <= saved


@pytest.mark.parametrize(
    ("name", "written"),
    [("a", "a.npz"), ("a.npz", "a.npz"), ("a.b", "a.b.npz"), ("a.npy", "a.npy.npz")],
)
def test_the_suffix_is_added(tmp_path, name, written):
    for path in (tmp_path / name, str(tmp_path / name)):
        assert save(path, KERNEL) == tmp_path / written
        assert_same(load(str(tmp_path / written)), KERNEL)


def test_a_loaded_similarity_retrieves_as_before_without_compiling(
    tmp_path, compilations
):
    memories, query = draw(5, 3), draw(2, 3, seed=1)
    run = jax.jit(lambda model: retrieve(Model(model, beta=2.0), memories, query))
    similarity = Cosine(LinearKernel(draw(4, 3, seed=2), draw(3, seed=3)))
    expected = run(similarity)
    loaded = load(save(tmp_path / "file", similarity))
    before = len(compilations)
    assert_same(run(loaded), expected)
    assert len(compilations) == before


@pytest.mark.parametrize("fails", ["savez", "replace"])
def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch, fails):
    def interrupt(file, *args, **arrays):
        if fails == "savez":
            file.write(b"PK half of it")
        raise KeyboardInterrupt

    path = save(tmp_path / "file", KERNEL)
    monkeypatch.setattr(
        *((np, "savez") if fails == "savez" else (os, fails)), interrupt
    )
    with pytest.raises(KeyboardInterrupt):
        save(path, Softmax())
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["file.npz"]
    assert_same(load(path), KERNEL)
    save(path, Softmax())
    assert_same(load(path), Softmax())


def test_of_several_writers_the_last_wins(tmp_path):
    """Each writer has its own temporary file (C2-08)."""
    memories = []
    for n in range(3):
        patterns = draw(64 * 2**n, 50, seed=n)
        memories.append(Memory(patterns, None, jnp.ones(len(patterns), bool)))
    errors = []

    def write(memory):
        try:
            for _ in range(2):
                save(tmp_path / "memory.npz", memory)
        except Exception as error:
            errors.append(error)

    for _ in range(10):
        threads = [threading.Thread(target=write, args=(m,)) for m in 3 * memories]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        loaded = load(tmp_path / "memory.npz")
        expected = memories[len(loaded.patterns).bit_length() - 7]
        np.testing.assert_array_equal(loaded.patterns, expected.patterns)
    assert not errors
    assert [path.name for path in tmp_path.iterdir()] == ["memory.npz"]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (lambda: {"a": 1}, "tree cannot be saved: got dict, expected an array or a"),
        (lambda: object(), "tree cannot be saved: got object"),
        (lambda: print, "tree cannot be saved: got builtin_function_or_method"),
        (lambda: jax.random.key(0), "tree cannot be saved"),
        (lambda: (1, {2}), "tree.1 cannot be saved: got set"),
        (lambda: Corruption.of(print), "tree.function cannot be saved: got Partial"),
        (lambda: Dot({"a": 1}), "tree.kernel cannot be saved: got dict"),
    ],
)
def test_objects_that_cannot_be_saved_are_refused(untyped, tmp_path, tree, message):
    path = save(tmp_path / "file", KERNEL)
    with pytest.raises(ValueError, match=message):
        save(path, tree())
    assert os.listdir(tmp_path) == ["file.npz"]
    assert_same(load(path), KERNEL)


DAMAGED = "is damaged or truncated, or is no "


def damaged(path, damage):
    """Saves a kernel in `path` and damages the file."""
    content = save(path, KERNEL).read_bytes()
    path.write_bytes(damage(content))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-1], id="last byte"),
        pytest.param(lambda content: content[: len(content) // 2], id="half"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: b"a text\n", id="text"),
        pytest.param(
            lambda content: content.replace(
                np.asarray(KERNEL.weights).tobytes(), bytes(48)
            ),
            id="bits",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage):
    path = tmp_path / "file.npz"
    damaged(path, damage)
    with pytest.raises(ValueError, match=f"file.npz {DAMAGED}"):
        load(path)


def test_missing_files_are_refused(tmp_path):
    for path in (tmp_path / "file.npz", tmp_path):
        with pytest.raises(ValueError, match=f"no such file: {path}"):
            load(path)


def test_foreign_files_are_refused_and_pickles_never_opened(tmp_path):
    path = tmp_path / "file.npz"
    for arrays in ({"weights": np.zeros(3)}, {"description": np.asarray([{}], object)}):
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=f"file.npz {DAMAGED}"):
            load(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match=f"file.npz {DAMAGED}"):
        load(path)


def test_files_from_before_a_field_was_added_load_with_its_default(tmp_path):
    path = save(tmp_path / "file.npz", Centering(draw(3)))
    with np.load(path) as file:
        arrays = dict(file)
    description = json.loads(str(arrays["description"]))
    assert description["tree"]["fields"].pop("query_center") == {"plain": None}
    np.savez(path, **arrays | {"description": np.asarray(json.dumps(description))})
    assert_same(load(path), Centering(draw(3)))


ARRAY = {"array": "w", "dtype": "float32", "shape": [2, 3]}
CENTER = {"type": "Centering", "fields": {"center": {"plain": "no"}}}


def dot_with(kernel):
    return {"type": "Dot", "fields": {"kernel": kernel}}


def softmax_with(alpha):
    return {"type": "Softmax", "fields": {"alpha": alpha}}


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"uhop_jax": 3, "tree": {"plain": 1}}, "file.npz has format 3, this version"),
        ([], DAMAGED),
        ({"tree": {"plain": 1}}, DAMAGED),
        ({"uhop_jax": "1", "tree": {"plain": 1}}, DAMAGED),
        *(
            ({"uhop_jax": 1, "tree": tree}, f"file.npz, {message}")
            for tree, message in [
                ({"type": "Telepathy", "fields": {}}, "tree: a Telepathy is unknown"),
                ({"type": "Kernel", "fields": {}}, "tree: a Kernel is unknown"),
                ({}, "tree is damaged, or was not saved by uhop_jax"),
                (None, "tree is damaged"),
                ({"plain": []}, "tree is damaged"),
                ({"tuple": [{"plain": 1}, 3]}, "tree.1 is damaged"),
                ({"type": "Dot"}, "tree: a Dot is unknown"),
                ({"type": "Dot", "fields": {"a": {}}}, "tree: a Dot of other fields"),
                ({"type": "Centering", "fields": {}}, "tree: a Centering of other fie"),
                ({**ARRAY, "array": "v"}, "tree: there are no numbers of dtype float3"),
                (
                    {**ARRAY, "shape": [2, 4]},
                    "tree: there are no numbers of .* and shape .2, 4.",
                ),
                ({**ARRAY, "shape": [10**30]}, "tree: there are no numbers"),
                ({**ARRAY, "shape": ["x"]}, "tree: there are no numbers"),
                (
                    {**ARRAY, "dtype": "float33"},
                    "tree: there are no numbers of dtype float33",
                ),
                (
                    {**ARRAY, "dtype": "object"},
                    "tree: there are no numbers of dtype object",
                ),
                (softmax_with({"plain": 1}), "tree: a Softmax of other fields"),
                (dot_with({"plain": 3}), "tree.kernel of a Dot has a wrong type, int"),
                (dot_with(ARRAY), "tree.kernel of a Dot has a wrong type, Array"),
                (
                    dot_with({"tuple": []}),
                    "tree.kernel of a Dot has a wrong type, tuple",
                ),
                (
                    dot_with(CENTER),
                    "tree.kernel.center of a Centering has a wrong type, str",
                ),
            ]
        ),
    ],
    ids=str,
)
def test_unknown_and_malformed_descriptions_are_refused(tmp_path, description, message):
    path = tmp_path / "file.npz"
    arrays = {"w": np.zeros(24, np.uint8)}
    np.savez(path, description=np.asarray(json.dumps(description)), **arrays)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize("depth", [60, 100_000])
def test_deep_descriptions_are_refused(tmp_path, depth):
    deep = '{"tuple":[' * depth + '{"plain":1}' + "]}" * depth
    path = tmp_path / "file.npz"
    np.savez(path, description=np.asarray('{"uhop_jax":1,"tree":' + deep + "}"))
    message = "tree.0.0.*is nested more than 50 deep" if depth == 60 else DAMAGED
    with pytest.raises(ValueError, match=f"file.npz.*{message}"):
        load(path)


def test_numbers_of_numpy_stay_static(tmp_path, untyped):
    path = save(tmp_path / "file.npz", TopK(np.int64(3)))
    assert load(path) == TopK(3) and type(load(path).k) is int


def test_numbers_of_numpy_in_static_tuples_load(tmp_path, untyped):
    blurs = Blurs(tuple(np.float32([1, 2])), tuple(np.array([8, 8, 1])))
    loaded = load(save(tmp_path / "file.npz", blurs))
    assert loaded == Blurs((1.0, 2.0), (8, 8, 1))
    assert {type(x) for x in (*loaded.widths, *loaded.shape)} == {float, int}


@pytest.mark.parametrize("name", ["~/file", "~/file.npz"])
def test_a_path_may_begin_at_home(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save(name, KERNEL) == tmp_path / "file.npz"
    assert_same(load("~/file.npz"), KERNEL)


def test_a_locked_file_is_not_called_damaged(tmp_path, monkeypatch):
    path = save(tmp_path / "file.npz", KERNEL)

    def full(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("pathlib.Path.open", full)
    with pytest.raises(ValueError, match="npz cannot be read: Too many open files"):
        load(path)


def test_a_kernel_with_nan_is_refused_at_the_edges(tmp_path):
    memories = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
    wrong = LinearKernel(jnp.full((3, 3), jnp.nan).at[0].set(1.0))
    memory = Memory.empty(3).add(memories)[0]
    for call in (
        lambda: save(tmp_path / "kernel", wrong),
        lambda: save(tmp_path / "similarity", Cosine(wrong)),
        lambda: memory.retrieve(Model(Dot(wrong), beta=1.0), memories),
        lambda: uhop_jax.calibrate(
            jax.random.key(0), memories, Mask(0.5), candidates={"wrong": Dot(wrong)}
        ),
    ):
        with pytest.raises(ValueError, match="weights of LinearKernel holds 6 NaN of"):
            call()
    assert not list(tmp_path.iterdir())
    # The functional core lets NaN through, as any function of arrays.
    result = retrieve(Model(Dot(wrong), beta=1.0), memories, memories)
    assert np.isnan(result.state).all()
