"""Strict JAX for every test, and shared helpers and fixtures."""

import atexit
import gc
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Tests compile much and compute little: XLA optimises little, and compiled programs are
# shared among the workers and the scripts that they run. The old emitters compile
# fusions twice as fast. `XLA_FLAGS= pytest` tests with the flags of users.
FAST = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_use_fusion_emitters=false"
)
os.environ.setdefault("XLA_FLAGS", FAST)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads the HLO
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.mkdtemp(prefix="uhop_jax_")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

settings.register_profile("uhop", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("uhop")

ROOT = Path(__file__).parent.parent
SHARED = Path(os.environ.get("UHOP_SHARED_DATA", ROOT.parent / "shared" / "data"))
LIMIT = {"mnist": 4_000, "cifar10": 600}  # images of a split, for the tests

TOLERANCES = {
    jnp.dtype(jnp.float64): 1e-10,
    jnp.dtype(jnp.float32): 1e-5,
    jnp.dtype(jnp.float16): 2e-3,
    jnp.dtype(jnp.bfloat16): 1.6e-2,
}

every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def assert_close(actual, expected, *, floor=0.0, scale=1.0):
    """Asserts equality to `scale` tolerances of the dtype, or to `floor` if larger."""
    actual = np.asarray(actual)
    tolerance = max(scale * TOLERANCES[actual.dtype], floor)
    expected = np.asarray(expected, dtype=np.float64)
    np.testing.assert_allclose(
        actual.astype(np.float64), expected, rtol=tolerance, atol=tolerance
    )


def config_module(name):
    """The module of a file in `configs/`."""
    from uhop_jax import (
        command_line,
    )  # imported late, so that the type checks of tests apply

    return command_line.config_module(name)


def config_of(name, *variant):
    """A config from a file in `configs/`."""
    return config_module(name).get_config(*variant)


FORKS = """
import json, os, runpy, sys
from uhop_jax import experiments, training

script, *cases = json.loads(sys.argv[1])
results = []
for flags in cases:
    errors, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(end, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = [script, *flags]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            os._exit(error.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
    os.close(end)
    with open(errors) as lines:
        text = lines.read()
    results.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text))
print(json.dumps(results))
"""


def run_script(directory, script, *cases, **variables):
    """Exit code and standard error of a script for each list of flags.

    The processes are forks of one process that has imported everything.
    """
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps([str(ROOT / script), *cases])],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        cwd=directory,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


@pytest.fixture(scope="session")
def digits():
    """Sixty images of 8 x 8 pixels, `(60, 64)`, float32."""
    from uhop_jax import data

    return jnp.asarray(data.load("digits", limit=60).values, jnp.float32)


def queries_of(memories, corruption, number=120):
    """Corrupted copies, each memory in turn, and which memories they are."""
    target = jnp.arange(number) % len(memories)
    return corruption(jax.random.key(1), memories[target]), target


@pytest.fixture
def untyped():
    """Switches the type checks of tests off, so that checks of the library raise."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


COMPILED = []  # how long each program took to compile


def _listen(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.fixture
def compilations():
    """A list that grows by one with every program compiled during the test."""
    COMPILED.clear()
    return COMPILED


IN_TURN = """
import json, runpy, sys

script, *cases = json.loads(sys.argv[1])
for flags in cases:
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A directory into which TFDS's builders have written real MNIST and CIFAR-10."""
    if not (SHARED / "train-images-idx3-ubyte.gz").exists():
        pytest.skip(f"needs the raw MNIST and CIFAR-10 files in {SHARED}")
    pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # one directory for all workers
    directory, done = base / "prepared", base / "prepared.done"
    try:
        directory.mkdir()
    except FileExistsError:  # another worker prepares the data
        for _ in range(600):
            if done.exists():
                break
            time.sleep(0.5)
    else:
        flags = [
            [str(SHARED), str(directory), name, f"--limit={limit}"]
            for name, limit in LIMIT.items()
        ]
        script = str(ROOT / "scripts" / "prepare_data.py")
        command = [sys.executable, "-c", IN_TURN, json.dumps([script, *flags])]
        result = subprocess.run(command, capture_output=True, text=True)
        done.write_text(result.stderr if result.returncode else "")
    message = done.read_text()
    assert not message, message[-2000:]
    return directory


def slow_where(condition):
    """Marks cases of a test as slow, if its other cases cover their parts one by one.

    `condition` takes parameters of the test by name: whether a case is slow.
    """
    return pytest.mark.slow_where.with_args(condition)


def pytest_collection_finish():
    """Modules and traces stay for the whole session: garbage is sought less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def pytest_collection_modifyitems(config, items):
    choices = {}
    for item in items:
        for mark in item.iter_markers("slow_where"):
            (condition,) = mark.args
            names = inspect.signature(condition).parameters
            chosen = bool(condition(*(item.callspec.params[name] for name in names)))
            if chosen:
                item.add_marker(pytest.mark.slow)
            choices.setdefault((item.originalname, condition), set()).add(chosen)
    in_full = not any("[" in argument for argument in config.args)
    groups = {}
    for item in items:
        if mark := item.get_closest_marker("few"):
            place = item.path, item.originalname, *mark.args
            groups.setdefault(place, []).append(item)
    for (_, name, number), group in groups.items():
        if in_full and len(group) <= number:
            raise pytest.UsageError(f"few({number}) leaves out no case of {name}")
        spread = {round(i) for i in np.linspace(0, len(group) - 1, number)}
        for place, item in enumerate(group):
            if in_full and place not in spread:
                item.add_marker(pytest.mark.slow)
    for (name, _), chosen in choices.items():
        if in_full and len(chosen) == 1:
            which = "every case" if chosen == {True} else "no case"
            raise pytest.UsageError(f"slow_where chooses {which} of {name}")


def pytest_terminal_summary(terminalreporter, config):
    """Prints the number of stale result files, after the whole suite."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    sys.path.insert(0, str(ROOT / "scripts"))
    import files

    if stale := files.stale():
        terminalreporter.write_line(
            f"{len(stale)} result files are stale, made by other code or commands: "
            "python scripts/reproduction.py --stale"
        )
