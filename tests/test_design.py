"""The page on design names every module, and the rows in which they may import."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "uhop_jax"


def imports(path):
    """Modules of the package that a file imports, by their first name."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            first, *rest = node.module.split(".")
            if first == PACKAGE.name:
                yield from rest[:1] or [alias.name for alias in node.names]


def test_modules_import_from_their_row_and_from_rows_above():
    table = (ROOT / "docs/design.md").read_text("utf-8").split("| row | modules |")[1]
    rows = re.findall(r"^\| \w+ \| (.*) \|$", table, re.MULTILINE)
    row_of = {
        name: number
        for number, row in enumerate(rows)
        for name in re.findall(r"`(\w+)`", row)
    }
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "configs"]
    present = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files}
    assert set(row_of) == present - {"__init__"}
    for path in files:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for other in imports(path):
            assert row_of[other] <= row_of[own], f"{own} imports {other}"
