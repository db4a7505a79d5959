"""The code that made a result file, and whether it has changed since.

A result depends on the modules that its command imports, except modules that change no
number (`INERT`). Imports are read from the source; no code is run. The version of a
module is a hash of its syntax tree without docstrings and comments, so that prose and
layout do not change it. `docs/results/NAME.made_by.json` holds commit, date and
versions. A file is current if these modules still have their recorded versions.
"""

import ast
import functools
import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CODE = ("uhop_jax", "configs", "scripts", "retrieve.py", "train.py")
PACKAGE = "uhop_jax"

# Where the imports of a kind of study begin.
ENTRIES = {
    "retrieval": ("uhop_jax.experiments",),
    "retrieval, one beta": ("uhop_jax.experiments",),
    "vision": ("uhop_jax.training.vision", "uhop_jax.training.run"),
    "vision, softmax": ("uhop_jax.training.vision", "uhop_jax.training.run"),
    "forecasting": ("uhop_jax.training.forecasting", "uhop_jax.training.run"),
    "bags": ("uhop_jax.training.bags", "uhop_jax.training.run"),
    "recall": ("uhop_jax.training.recall", "uhop_jax.training.run"),
    "statements": ("scripts.theorems", "scripts.corrections"),
}
# Modules that change no number, and why.
INERT = {
    "uhop_jax._checks": "refuses wrong input, and names the dtype of sums",
    "uhop_jax.command_line": "parses flags",
    "uhop_jax.experiments.figures": "draws",
    "uhop_jax.experiments.query": "a command for patterns of one's own: no study",
    "uhop_jax.paper": "numbers of the paper, printed for comparison",
    "uhop_jax.plotting": "draws",
    "uhop_jax.progress": "says how far a run is",
    "uhop_jax.records": "writes files and summaries",
    "uhop_jax.training.bag_report": "draws, and writes tables",
    "uhop_jax.training.display": "draws",
    "uhop_jax.training.checkpoints": "saves and restores a state bit for bit",
    "uhop_jax.workdir": "claims and checks the directory of a run",
}
# Modules of methods that protocols with one beta do not run.
FAIR_ALONE = {
    "uhop_jax.calibration": "calibrated memory",
    "uhop_jax.candidates": "candidates of the calibrated memory",
    "uhop_jax.closed_form": "kernel in closed form",
    "uhop_jax.likelihood": "likelihood kernel",
    "uhop_jax.uhop_plus": "annealed kernel",
}


# Modules of separations that a study of softmax alone does not call.
ENTMAX_ALONE = {
    "uhop_jax.separation._entmax": "entmax and sparsemax",
    "uhop_jax.separation._root": "entmax and sparsemax",
    "uhop_jax.separation._steep": "entmax of a large alpha",
    "uhop_jax.separation.entmax": "entmax and sparsemax",
    "uhop_jax.separation.polynomial": "dense associative memory",
    "uhop_jax.separation.top_k": "nearest memories",
}
LEFT_OUT = {"retrieval, one beta": FAIR_ALONE, "vision, softmax": ENTMAX_ALONE}


def kind_of(command: str) -> str:
    """The kind of a study, by its command."""
    if command.startswith("retrieve.py"):
        one = any(f"protocol={p}" in command for p in ("paper", "reference"))
        return "retrieval, one beta" if one else "retrieval"
    for name in ("bags", "recall"):
        if f"configs/{name}.py" in command:
            return name
    if "configs/vision.py" not in command:
        return "forecasting"
    others = any(name in command for name in ("Sparse MHM", "entmax", "GSH"))
    return "vision" if others or "arms=" not in command else "vision, softmax"


# -- Imports ---------------------------------------------------------------------------


def path_of(module: str) -> Path | None:
    """The file of a module of this repository."""
    stem = ROOT.joinpath(*module.split("."))
    files = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((file for file in files if file.exists()), None)


@functools.cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module."""
    path = path_of(module)
    assert path is not None, module
    return ast.parse(path.read_text("utf-8"))


def origin(package: str, name: str) -> str:
    """The module that defines what `from package import name` gives."""
    module = f"{package}.{name}"
    if path_of(module):
        return module
    if is_package(package):
        for source, original, alias in _from_imports(tree_of(package)):
            if alias == name and source.startswith(PACKAGE):
                return origin(source, original)
    return package


def imports_of(module: str) -> set[str]:
    """Modules of this repository whose names a module uses.

    In place of a package that only re-exports names, the modules that define them.
    """
    tree, taken, packages = tree_of(module), set(), {}
    for source, name, alias in _from_imports(tree):
        if source.startswith(PACKAGE):
            taken.add(origin(source, name))
            packages[alias] = origin(source, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith(PACKAGE):
                    packages[name.asname or name.name] = name.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            package = packages.get(node.value.id, "")
            if package and is_package(package):
                taken.add(origin(package, node.attr))
    return {m for m in taken if has_code(m)} - {module}


def _from_imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.module, alias.name, alias.asname or alias.name


@functools.cache
def modules_of(kind: str) -> tuple[str, ...]:
    """The modules that results of a kind depend on."""
    left_out = INERT | LEFT_OUT.get(kind, {})
    modules: set[str] = set()
    ahead = list(ENTRIES[kind])
    while ahead:
        module = ahead.pop()
        if module not in modules and module not in left_out:
            modules.add(module)
            ahead += imports_of(module)
    return tuple(sorted(modules))


def is_package(module: str) -> bool:
    """Whether a module is a directory with modules."""
    path = path_of(module)
    return path is not None and path.name == "__init__.py"


def has_code(module: str) -> bool:
    """Whether a module does more than import names."""
    rest = (ast.Import, ast.ImportFrom, ast.Expr)
    body = [node for node in tree_of(module).body if not isinstance(node, rest)]
    return any(
        not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
        for node in body
    )


# -- Versions --------------------------------------------------------------------------


@functools.cache
def version(module: str) -> str:
    """A hash of the code of a module, without its prose."""
    text = repr(_shape(tree_of(module)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _shape(node: Any) -> Any:
    """A syntax tree as tuples, without docstrings, line numbers and empty fields.

    Empty fields are left out, since Python versions differ in their fields.
    """
    if isinstance(node, list):
        return tuple(map(_shape, node))
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    body = fields.get("body")
    if isinstance(body, list) and body and _is_text(body[0]):
        fields["body"] = body[1:]
    parts = [(k, _shape(v)) for k, v in fields.items() if v is not None and v != []]
    return (type(node).__name__, *parts)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def versions(kind: str) -> dict[str, str]:
    """The version of every module that results of a kind depend on."""
    return {module: version(module) for module in modules_of(kind)}


def differing(recorded: Mapping[str, str], kind: str) -> list[str]:
    """Modules whose versions differ from the recorded versions."""
    now = versions(kind)
    return sorted(m for m in now.keys() | recorded if now.get(m) != recorded.get(m))


# -- Commits ---------------------------------------------------------------------------


def git(*arguments: str) -> str:
    """The output of a git command in this repository."""
    process = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return process.stdout.strip()


def uncommitted() -> list[str]:
    """Files of code with uncommitted changes."""
    changed = git("status", "--porcelain", "--", *CODE)
    return [line[3:] for line in changed.splitlines()]


def made_now(kind: str, command: str) -> dict[str, Any]:
    """The record of a result that the present code makes with a command."""
    commit, date = git("log", "-1", "--format=%H %cs").split()
    record = {"commit": commit, "date": date, "command": command}
    return record | {"modules": versions(kind)}


def has_history() -> bool:
    """Whether this is a full clone, not an archive or a shallow clone."""
    if not (ROOT / ".git").exists():
        return False
    return git("rev-parse", "--is-shallow-repository") == "false"


def is_ancestor(commit: str) -> bool:
    """Whether HEAD has a commit in its history."""
    command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


# -- Result files ----------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The record of a result file, empty if there is none."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Writes the record of a result file."""
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def label(record: Mapping[str, Any]) -> str:
    """Commit and date of a record, in short."""
    if record.get("commit"):
        return f"{record['commit'][:7]}, {record['date']}"
    published = record.get("published", "")
    return f"not recorded, published in {published[:7]}" if published else "-"


def why_stale(record: Mapping[str, Any], kind: str) -> list[str]:
    """Reasons why a file is stale: changed modules, or no record; empty if current."""
    if not record.get("modules"):
        return ["not recorded"]
    return differing(record["modules"], kind)
