"""The contents of a wheel, and its commands outside of the repository."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from uhop_jax import command_line, entry
from uhop_jax.command_line import config_module, configs, load_config

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_in_the_wheel():
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "uhop_jax").glob("**/__init__.py")
    }
    tool = PROJECT["tool"]["setuptools"]
    assert set(tool["packages"]) == packages | {"uhop_jax.configs"}
    assert tool["package-dir"] == {"uhop_jax.configs": "configs"}
    assert (ROOT / "uhop_jax" / tool["package-data"]["uhop_jax"][0]).exists()


def test_text_is_utf8_in_every_place():
    """Each file opened as text names its encoding, so that no locale matters."""
    texts = ("open", "fdopen", "read_text", "write_text", "NamedTemporaryFile")
    binary, wrong = {"'rb'", "'wb'", "'ab'", "'xb'", "'r+b'"}, []
    for folder in ("uhop_jax", "scripts", "benchmarks", "configs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                call = getattr(node, "func", None)
                words = ast.unparse(call).split(".") if call else [""]
                if words[-1] not in texts or words[0] == "Image":
                    continue
                given = {ast.unparse(x) for x in (*node.args, *node.keywords)}
                named = given & {"'utf-8'", "encoding='utf-8'"}
                if not (named or given & binary):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def imported(statement):
    """Top-level packages that a statement imports in a fresh process."""
    code = f"import sys; {statement}; print(*{{x.split('.')[0] for x in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_library_imports_its_own_dependencies_alone():
    own = {"uhop_jax", *sys.stdlib_module_names}
    needed = imported("import jax, jaxtyping, numpy, optax")
    assert imported("import uhop_jax") - needed <= own
    lab = {name.split(".")[0] for name in entry.LAB} - {"absl"}  # Optax imports it
    assert not imported("import uhop_jax, uhop_jax.theory") & (lab | {"flax"})
    of_flax = imported("import jax, jaxtyping, numpy, optax; from flax import nnx")
    layers = imported("import uhop_jax.layers, uhop_jax.models") - of_flax
    assert layers <= own


def test_the_extra_lab_is_what_scripts_need():
    extra = PROJECT["project"]["optional-dependencies"]["lab"]
    homes = {"PIL": "pillow", "sklearn": "scikit-learn", "orbax.checkpoint": None}
    names = {homes.get(name, name) or name.replace(".", "-") for name in entry.LAB}
    assert {re.match(r"[\w-]+", line)[0].removesuffix("-py") for line in extra} == names


@pytest.mark.few(2)
@pytest.mark.parametrize("script", ["retrieve.py", "train.py"])
@pytest.mark.parametrize("missing", ["pandas", "ml_collections"])
def test_a_script_names_a_missing_package(tmp_path, script, missing):
    code = (
        f"import runpy, sys; sys.argv = [{script!r}]; sys.modules[{missing!r}] = None"
    )
    run = f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {run}"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    (sentence,) = done.stderr.splitlines()
    assert done.returncode == 2 and "pip install 'uhop-jax[lab]'" in sentence
    assert sentence.startswith(f"{script}: this script needs {missing}")
    assert not list(tmp_path.iterdir())


def test_every_config_is_found_with_its_variants():
    assert set(configs()) == {path.stem for path in (ROOT / "configs").glob("*.py")}
    for name in configs():
        for variant in config_module(name).VARIANTS:
            assert load_config(name, variant).variant == variant


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("retrieval", "other"), {}, "unknown variant 'other'; choose one of demo"),
        (
            ("retrievals",),
            {},
            "unknown config 'retrievals'; choose one of bags, recall",
        ),
        (("vision",), {"train.epoch": 2}, 'config vision: .*Did you mean "epochs"'),
        (("vision",), {"train.epochs": "many"}, "config vision: .*many"),
    ],
)
def test_wrong_configs_are_refused(arguments, changes, message):
    with pytest.raises(ValueError, match=message):
        load_config(*arguments, changes=changes)


def test_changes_reach_a_config():
    config = load_config("retrieval", "capacity", changes={"data.name": "digits"})
    assert config.data.name == "digits" and config.is_locked


@pytest.mark.few(1)
@pytest.mark.parametrize("script", PROJECT["project"]["scripts"].values())
def test_commands_find_their_configs_from_anywhere(tmp_path, script):
    module, name = script.split(":")
    config = {"retrieve": "retrieval", "train": "vision"}[name]

    def call(flag):
        return subprocess.run(
            [sys.executable, "-c", f"from {module} import {name}; {name}()", flag],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    wrong = call(f"--config=configs/{config}.py:other")
    assert wrong.returncode == 2 and "unknown variant 'other'" in wrong.stderr
    asked = call("--help")
    printed = asked.stdout
    assert asked.returncode == 0
    for variant in config_module(config).VARIANTS:
        assert f"`{variant}`" in printed
    assert f"the variant {config_module(config).get_config().variant}:" in printed


@pytest.mark.parametrize("name", ["retrieval", "vision", "time_series", "bags"])
def test_help_explains_every_key_of_every_variant(name, monkeypatch):
    path = configs()[name]
    for variant in config_module(name).VARIANTS:
        monkeypatch.setattr(sys, "argv", ["x", f"--config={path}:{variant}", "--help"])
        printed = command_line._help(configs(), "vision")
        assert printed.startswith(config_module(name).__doc__.rstrip())
        keys = re.findall(r"^  --config\.(\S+?)=(.*)$", printed, re.MULTILINE)
        assert len(keys) > 10
        for key, rest in keys:
            levels = key.startswith("corruption.levels.")
            assert levels or re.search(r"  \S", rest), (
                f"{variant}: {key} needs a comment"
            )


def test_help_has_the_comments_of_its_own_variant(monkeypatch):
    path, printed = configs()["retrieval"], {}
    for variant in ("capacity", "blind", "query", "scatter"):
        monkeypatch.setattr(sys, "argv", ["x", f"--config={path}:{variant}", "--help"])
        printed[variant] = command_line._help(configs(), "retrieval")
    drawn = "N is drawn for each run"
    assert [drawn in text for text in printed.values()] == [False, False, False, True]
    assert "queries in the picture" in printed["query"]
    assert "queries in the picture" not in printed["capacity"]
    assert re.search(r"config.queries=.*without labels", printed["blind"])
    assert re.search(r"config.queries=.*folder of images", printed["query"])
