"""Figures of the experiments: records become panels."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from uhop_jax import plotting, records
from uhop_jax.experiments.methods import BLIND, CALIBRATED, FAIR, LIMIT, PAPER
from uhop_jax.experiments.protocols import REFERENCE
from uhop_jax.plotting import Comparison, Panel, Style
from uhop_jax.workdir import write_file

ERROR = "error (sum of squared pixel differences)"
SPREAD = "mean and its 95 % interval, without a lower half where it would reach zero"
MOST_IMAGES = 100  # rows of an image grid; Matplotlib draws no more than 65,536 dots
FEW = 8  # most curves of one panel
FEWEST = 3  # fewest points of a curve; below it, methods stand side by side
_GROUPS = {m.name: m.group for m in (*FAIR, *PAPER, *REFERENCE)}
_GROUPS |= dict.fromkeys((CALIBRATED, BLIND, LIMIT), "calibration")
# Methods of one family have consecutive numbers.
_FAMILIES = list(dict.fromkeys(_GROUPS.values()))
_NUMBERS = {
    name: number
    for number, name in enumerate(
        sorted(_GROUPS, key=lambda name: _FAMILIES.index(_GROUPS[name]))
    )
}

Rows = Sequence[Mapping[str, Any]]


def grouped(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Records by the group of their method."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_GROUPS[row["method"]], []).append(row)
    return groups


def styles(rows: Rows) -> dict[str, Style]:
    """A style for each `label`: a method has the same colour in every figure.

    Each of several settings has a marker of its own; the earlier ones are lighter.
    """
    looks: dict[str, Style] = {}
    for (method,), members in records.grouped(rows, ("method",)).items():
        labels = list(dict.fromkeys(row["label"] for row in members))
        for place, label in enumerate(labels):
            shade = 1 - 0.7 * (len(labels) - 1 - place) / len(labels)
            number = _NUMBERS[method]
            looks[label] = Style(number, number + place, shade, plain=method == LIMIT)
    return looks


def sweep(rows: Rows) -> list[Panel] | list[Comparison]:
    """Error against memory size, or against the level of each kind of corruption.

    With fewer than `FEWEST` sizes or levels, the methods are compared side by side.
    """
    rows = records.labelled(rows)
    by_size = len({row["memories"] for row in rows}) > 1
    x = "memories" if by_size else "level"
    keys = ("corruption", "level") if by_size else ("corruption",)
    cells = records.grouped(rows, keys)
    if all(len({row[x] for row in group}) < FEWEST for group in cells.values()):
        return [
            _comparison(group, f"M = {M}, {corruption} {level:g}")
            for (M, corruption, level), group in records.grouped(
                rows, records.CELL
            ).items()
        ]
    return [
        Panel(
            ", ".join([" ".join(map(str, corruption)), *([name] if name else [])]),
            records.curves(members, x, "error", "label", interval=True),
            "stored memories M" if by_size else f"level of {corruption[0]}",
            ERROR,
            xscale="log" if by_size else "linear",
            yscale="auto",
            styles=styles(rows),
        )
        for corruption, group in cells.items()
        for name, members in _families(group)
    ]


def _families(rows: Rows) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Name and records of each panel; every panel shows the limit.

    One panel shows all methods if they are few. Otherwise each group has panels of its
    own, and each panel as many methods of the group as it has room for.
    """
    bound = [row for row in rows if row["method"] == LIMIT]
    others = [row for row in rows if row["method"] != LIMIT]
    if len({row["label"] for row in others}) <= FEW:
        return [("", [*others, *bound])]
    parts = []
    for group, members in grouped(others).items():
        panels: list[list[list[Mapping[str, Any]]]] = []
        room = 0
        for lot in records.grouped(members, ("method",)).values():
            curves = len({row["label"] for row in lot})
            if curves > room:
                panels.append([])
                room = FEW
            panels[-1].append(lot)
            room -= curves
        shared = [lots for lots in panels if len(lots) > 1]
        for lots in panels:
            name = group
            if len(lots) == 1 < len(panels):
                name = lots[0][0]["method"]
            elif len(shared) > 1:
                name = f"{group}, {shared.index(lots) + 1} of {len(shared)}"
            parts.append((name, [*itertools.chain(*lots), *bound]))
    return parts


def _comparison(rows: Rows, title: str) -> Comparison:
    """The error of each method in one cell, and the limit as a line."""
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    line = None
    for group, members in grouped(rows).items():
        for (label,), lot in records.grouped(members, ("label",)).items():
            errors = [row["error"] for row in lot]
            half = records.half_width(errors)
            mean = float(np.mean(errors))
            if lot[0]["method"] == LIMIT:
                line = (LIMIT, mean)
            else:
                groups.setdefault(group, {})[label] = (mean, half)
    return Comparison(title, groups, ERROR, line=line, styles=styles(rows))


def draw(path: Path, parts: list[Panel] | list[Comparison], title: str) -> None:
    """Draws a figure; the title says what the error bars are."""
    compared = [part for part in parts if isinstance(part, Comparison)]
    curves = [part for part in parts if isinstance(part, Panel)]
    if compared or not curves[0].points:
        title = f"{title}\n{SPREAD}"

    if compared:
        columns = 1 if len(compared) < 4 else 2 if len(compared) < 9 else 4
        plotting.comparisons(path, compared, title=title, columns=columns)
    else:
        plotting.panels(path, curves, title=title)


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
