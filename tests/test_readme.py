"""The code of the README and of the documentation runs as it is printed."""

import ast
import functools
import importlib
import json
import pkgutil
import re
import subprocess
from operator import getitem
from pathlib import Path

import jax
import pytest

import uhop_jax
from uhop_jax.command_line import check_config, load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAV = (ROOT / "mkdocs.yml").read_text()


def run_blocks(text):
    """Names that the Python blocks of a page leave, run one after another."""
    names: dict = {}
    standard = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with jax.enable_x64(False), standard[0], standard[1]:
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(block, "page", "exec"), names)
    return names


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys, untyped):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(README)
    assert names["retrieved"].shape == names["result"].state.shape == (100, 64)
    assert "expected error" in capsys.readouterr().out
    assert names["path"].exists()


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "```python" in page.read_text()],
    ids=lambda page: page.stem,
)
def test_python_blocks_of_the_documentation(page, untyped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_blocks(page.read_text())


# Python prints its arguments, and nothing else runs. `FIXED` is named on two pages.
SHELL = r"""
python() { printf '%s\0' "$@"; printf '\n'; }
pip() { :; }; pytest() { :; }; PATH=
"""
SHELL += re.search(r"^FIXED=.*$", README, re.MULTILINE)[0] + "\n"


def commands(page):
    """The arguments of each call of Python on a page, or in the head of a config."""
    text = page.read_text()
    if page.suffix == ".md":
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    else:  # indented; the next line is indented further
        indented = re.findall(r"^    python .*(?:\n        .*)*", text, re.MULTILINE)
        blocks = [" ".join(block.split()) for block in indented]
    for block in blocks:
        done = subprocess.run(
            ["/bin/bash", "-c", SHELL + block],
            capture_output=True,
            text=True,
            check=True,
        )
        for call in done.stdout.split("\0\n"):
            if call:
                yield call.split("\0")


COMMANDED = [ROOT / "README.md", *PAGES, *sorted((ROOT / "configs").glob("*.py"))]


@pytest.mark.parametrize("page", COMMANDED, ids=lambda page: page.name)
def test_commands_have_the_keys_and_types_of_the_shipped_configs(page):
    for script, *flags in commands(page):
        assert (ROOT / script).exists() or script == "-m", script
        if script not in ("train.py", "retrieve.py") or "--config.KEY=VALUE" in flags:
            continue
        config, changes = ["retrieval" if script == "retrieve.py" else "vision"], {}
        for flag in flags:
            name, value = re.fullmatch(r"--([\w.]+)=(.*)", flag, re.DOTALL).groups()
            if name == "config":
                config = value.removeprefix("configs/").replace(".py", "").split(":")
            elif name != "workdir":
                key = name.removeprefix("config.")
                shipped = functools.reduce(
                    getitem, key.split("."), load_config(*config)
                )
                if not isinstance(shipped, str):
                    value = ast.literal_eval(value)
                if isinstance(shipped, tuple) and not isinstance(value, tuple):
                    value = (value,)  # as the command line does
                changes[key] = value
        check_config(load_config(*config, changes=changes), config[0])


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda p: p.stem)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_parts_of_the_readme_on_the_site_have_no_links_to_files():
    """The site shows these parts in another directory; mkdocs does not check them."""
    parts = re.findall(
        r"--8<-- \[start:(\w+)\](.*?)--8<-- \[end:\1\]", README, re.DOTALL
    )
    assert {name for name, _ in parts} >= {"about", "start", "use", "results"}
    for name, text in parts:
        assert not re.findall(r"\]\(([^)#:]+)\)", text), name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks_lead_to_files(path):
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    for target in re.findall(r"\]\(([^)#:]+)\)", "\n".join(texts)):
        assert (path.parent / target).exists(), target


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": (\S+\.(?:md|ipynb))$", NAV, re.MULTILINE))
    pages = [*PAGES, *(ROOT / "docs" / "notebooks").glob("*.ipynb")]
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in pages}


def test_every_public_function_and_class_is_in_the_reference():
    text = "".join(page.read_text() for page in PAGES)
    documented = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    packages = ["uhop_jax"] + [
        f"uhop_jax.{info.name}"
        for info in pkgutil.iter_modules(uhop_jax.__path__)
        if info.ispkg
    ]
    for package in packages:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            home = getattr(getattr(module, name), "__module__", "")
            assert not home or home in documented, f"{package}.{name} of {home}"


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200
