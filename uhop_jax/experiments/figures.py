"""Which results become which panel."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from uhop_jax import plotting, records
from uhop_jax.experiments.methods import CALIBRATED, FAIR, LIMIT, PAPER
from uhop_jax.experiments.protocols import REFERENCE
from uhop_jax.workdir import write_file

ERROR = "error (sum of squared pixel differences)"
MOST_IMAGES = 100  # rows of an image grid; Matplotlib draws no more than 65,536 dots
FEW = 7  # methods that one panel can show
_GROUPS = {m.name: m.group for m in (*FAIR, *PAPER, *REFERENCE)}
_GROUPS |= {CALIBRATED: "calibration", LIMIT: "calibration"}


def grouped(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, list[Mapping[str, Any]]]:
    """Records by the group of their method."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(_GROUPS[row["method"]], []).append(row)
    return found


def sweep(rows: Sequence[Mapping[str, Any]]) -> list[plotting.Panel]:
    """Error against memory size, or against the level of each kind of corruption.

    Many methods are drawn group by group.
    """
    rows = records.labelled(rows)
    few = len({row["label"] for row in rows}) <= FEW
    by_size = len({row["memories"] for row in rows}) > 1
    panels = []
    keys = ("corruption", "level") if by_size else ("corruption",)
    for corruption, ours in records.grouped(rows, keys).items():
        groups = {"all methods": ours} if few else grouped(ours)
        for group, members in groups.items():
            panels.append(
                plotting.Panel(
                    f"{group}, {' '.join(map(str, corruption))}",
                    records.curves(
                        members, "memories" if by_size else "level", "error", "label"
                    ),
                    "stored memories M" if by_size else f"level of {corruption[0]}",
                    ERROR,
                    xscale="log" if by_size else "linear",
                    yscale="auto",
                )
            )
    return panels


def save(path: Path, parts: Sequence[plotting.Panel], title: str) -> None:
    """Writes the panels whole or not at all."""
    write_file(path, lambda file: plotting.panels(file, parts, title=title))


def images(
    path: Path,
    columns: Mapping[str, np.ndarray],
    title: str,
    captions: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Writes an image grid whole or not at all."""
    write_file(
        path,
        lambda file: plotting.image_grid(file, columns, captions=captions, title=title),
    )
