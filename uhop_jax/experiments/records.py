"""The files of a run: its config, its results as a tidy table, a summary to read."""

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict


def claim(config: ConfigDict, workdir: Path) -> None:
    """Makes `workdir` the directory of this config, and writes it to `config.json`.

    Raises:
      ValueError: if the directory holds the run of another config, which is left alone.
    """
    path = workdir / "config.json"
    ours = json.loads(config.to_json_best_effort())
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"workdir {workdir} is a file, it must be a directory")
    if path.exists():
        try:
            theirs = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            raise ValueError(
                f"{path} is not a readable config; choose another --workdir"
            ) from None
        ours_flat, theirs_flat = _flat(ours), _flat(theirs)
        for key in sorted(ours_flat.keys() | theirs_flat.keys()):
            mine, other = ours_flat.get(key), theirs_flat.get(key)
            if mine != other:
                raise ValueError(
                    f"workdir {workdir} holds a run with config.{key}={other}, this "
                    f"one has {mine}; choose another --workdir"
                )
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(
        path, lambda temporary: temporary.write_text(json.dumps(ours, indent=2))
    )


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Calls `write` with a temporary path and moves the result to `path` at once."""
    temporary = path.with_name(f".{path.stem}.partial{path.suffix}")
    write(temporary)
    os.replace(temporary, path)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes records that share their keys as a csv with a header."""

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    write_whole(path, write)


def table(
    rows: Sequence[Mapping[str, Any]], by: str, columns: Mapping[str, str]
) -> str:
    """Text table of means, one line for each value of `by`, in order of appearance.

    Args:
      rows: records.
      by: the key that names a line.
      columns: title of each column and the key it averages; a title that ends in `±`
        also shows the standard deviation over the records.

    Returns:
      Lines of equal length, joined.
    """
    lines = [[by, *columns]]
    for name in dict.fromkeys(row[by] for row in rows):
        members = [row for row in rows if row[by] == name]
        line = [str(name)]
        for title, key in columns.items():
            found = [float(row[key]) for row in members if row[key] != ""]
            if not found:
                line.append("-")
            elif title.endswith("±") and len(found) > 1:
                line.append(f"{np.mean(found):.3g} ± {np.std(found, ddof=1):.2g}")
            else:
                line.append(f"{np.mean(found):.3g}")
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join(cells))
    rule = "-" * len(text[0])
    return "\n".join([text[0], rule, *text[1:]])


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
