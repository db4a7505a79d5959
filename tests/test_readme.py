"""The code of the README and of the documentation runs as it is printed."""

import importlib
import json
import pkgutil
import re
from pathlib import Path

import jax
import pytest

import uhop_jax

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
