"""Every notebook runs from a clean kernel, and is stored without outputs."""

import ast
import os
import re
import tomllib
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = {
    "tour": 4,
    "unknown_scanner": 1,
    "your_own_data": 1,
    "layers": 1,
    "bags": 1,
    "figure_1_loss_and_error": 2,
    "figure_3_retrieval_error": 2,
    "figure_5_stage_one": 1,
    "figures_4_and_6_learning": 2,
}

FIRST = ("tour",)  # what users open first; others are slow


def read(path):
    return nbformat.read(path, as_version=4)


def test_every_notebook_is_listed():
    assert {path.stem for path in NOTEBOOKS} == FIGURES.keys()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs_and_definitions(path):
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "find_spec" in code[0].source  # Colab installs; elsewhere nothing happens
    assert "assert " in code[-1].source
    for cell in code:
        assert not cell.outputs and cell.execution_count is None and not cell.metadata
        nodes = ast.walk(ast.parse(cell.source.replace("%pip", "# %pip\n    pass #")))
        kinds = (ast.FunctionDef, ast.ClassDef)
        assert not any(isinstance(node, kinds) for node in nodes), cell.source
    for cell in notebook.cells:
        for place in ("/tmp", "/home", "/root", "/work"):
            assert place not in cell.source


def test_colab_keeps_its_own_jax():
    """Only small packages are installed by name, the project from its own file."""
    first = {read(path).cells[1].source for path in NOTEBOOKS}
    assert len(first) == 1
    *_, by_name, comment, own = first.pop().splitlines()
    assert own.strip() == "%pip install -q --no-index --find-links . 'uhop-jax[lab]'"
    assert comment.strip().startswith("#")
    named = by_name.split()[3:]
    assert by_name.split()[:3] == ["%pip", "install", "-q"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["lab"]
    bounds = {re.match(r"[\w-]+", line)[0]: line for line in needed}
    assert set(named) < bounds.keys()
    for name in ("jax", "jaxlib", "flax"):  # a resolver may keep the installed version
        assert name not in named and re.search(r">=[\d.]+,<[\d.]+$", bounds[name])


@pytest.fixture(scope="module")
def kernel():
    """One kernel for all notebooks: its start and its imports take most of the time."""
    manager = KernelManager(kernel_name="python3")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    manager.start_kernel(env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.slow_where(lambda path: path.stem not in FIRST)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_with_clean_names(path, tmp_path, kernel):
    notebook = read(path)
    clean = f"%reset -f\n%cd -q {tmp_path}"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(clean))
    runner = nbclient.NotebookClient(notebook, km=kernel, timeout=300)
    try:
        runner.execute()
    finally:
        runner.kc.stop_channels()
    outputs = [x for cell in notebook.cells for x in cell.get("outputs", [])]
    errors = "".join(x.text for x in outputs if x.get("name") == "stderr")
    progress = r"\w+: [\d,]+ of [\d,]+ (memory sets|examples), .*"  # if it is slow
    assert not [x for x in errors.splitlines() if not re.fullmatch(progress, x)]
    figures = [x for x in outputs if "image/png" in x.get("data", {})]
    assert len(figures) == FIGURES[path.stem]
    assert not list(tmp_path.iterdir())  # the notebook writes elsewhere
