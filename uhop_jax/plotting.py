"""Figures of results; nothing is computed here."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

# Distinct in colour, and by dashes and markers also in black and white.
_COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
CAPTION = 22  # letters under an image
_LEGEND_WITHIN = 8  # curves whose names fit into the axes
_MARKERS = ("o", "s", "^", "D", "v", "x", "P", "*", "<", ">")


class Series(NamedTuple):
    """A curve with its spread.

    Attributes:
      x: places.
      mean: values.
      spread: half-lengths of the error bars.
    """

    x: Sequence[float]
    mean: Sequence[float]
    spread: Sequence[float]


class Panel(NamedTuple):
    """One pair of axes.

    Attributes:
      title: above the axes.
      series: curves, or clouds of points, by name.
      xlabel: quantity and unit.
      ylabel: quantity and unit.
      xscale: `linear`, `log` or `symlog`.
      yscale: likewise, or `auto` for what is never negative: from zero on, linear where
        the values are of one order, else logarithmic above 0.01.
      points: draw points without lines.
    """

    title: str
    series: Mapping[str, Series]
    xlabel: str
    ylabel: str
    xscale: str = "linear"
    yscale: str = "linear"
    points: bool = False


class Landscape(NamedTuple):
    """Energy over a plane, and where states move in it.

    Attributes:
      title: above the axes.
      x: places of the columns of `energy`.
      y: places of its rows.
      energy: at those places.
      memories: stored patterns, drawn as crosses.
      paths: states of each retrieval, drawn as lines that end in a circle.
    """

    title: str
    x: Float[np.ndarray, " columns"]
    y: Float[np.ndarray, " rows"]
    energy: Float[np.ndarray, "rows columns"]
    memories: Float[np.ndarray, "M 2"]
    paths: Float[np.ndarray, "paths states 2"]


def panels(
    path: Path, parts: Sequence[Panel], *, title: str = "", columns: int = 3
) -> None:
    """Saves panels side by side; equal labels share their range.

    Args:
      path: file to write; its ending gives the format.
      parts: the panels.
      title: line above them.
      columns: panels in a row, at most.
    """
    figure_class, canvas = _matplotlib()
    columns = min(len(parts), columns)
    rows = -(-len(parts) // columns)
    figure = figure_class(
        figsize=(4.6 * columns, 3.9 * rows + 0.3), layout="constrained"
    )
    canvas(figure)
    share = len({part.ylabel for part in parts}) == 1
    axes = figure.subplots(rows, columns, squeeze=False, sharey=share).ravel()
    for axis, part in zip(axes, parts, strict=False):
        for number, (name, series) in enumerate(part.series.items()):
            axis.errorbar(
                series.x,
                series.mean,
                yerr=_bars(series, part.yscale) if np.any(series.spread) else None,
                label=name,
                color=_COLORS[number % len(_COLORS)],
                linestyle="none" if part.points else _DASHES[number % len(_DASHES)],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=4,
                linewidth=1.2,
                capsize=2,
                markevery=1 if part.points else max(1, len(series.x) // 12),
                fillstyle="none" if number % 2 else "full",
            )
        axis.set(title=part.title, xlabel=part.xlabel, ylabel=part.ylabel)
        axis.set_xscale(part.xscale)
        places = np.unique(np.concatenate([s.x for s in part.series.values()]))
        if part.xscale == "log" and len(places) <= 10:  # few enough to name each
            axis.set_xticks(places, [f"{x:g}" for x in places], fontsize=8)
            axis.minorticks_off()
        if part.xscale == "linear" and len(places) == 1:
            axis.set_xticks(places)
        elif part.xscale == "linear" and (places % 1 == 0).all():
            axis.locator_params(axis="x", integer=True)
        axis.grid(alpha=0.3, linewidth=0.5)
        beside = len(part.series) > _LEGEND_WITHIN  # it would hide the curves
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)} if beside else {}
        axis.legend(fontsize=7, **place)
    # Last, when all data is there: a limit set earlier would hold for later panels.
    for axis, part in zip(axes, parts, strict=False):
        _scale(axis, part, parts if share else [part])
    for axis in axes[len(parts) :]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def dots(
    path: Path,
    groups: Mapping[str, Mapping[str, float]],
    *,
    xlabel: str,
    title: str = "",
) -> None:
    """Saves dots on logarithmic axes: a panel for each group, two to a row.

    Args:
      path: file to write; its ending gives the format.
      groups: positive values by name, by title of their panel.
      xlabel: quantity and unit.
      title: line above the panels.
    """
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure_class, canvas = _matplotlib()
    columns = min(len(groups), 2)
    rows = -(-len(groups) // columns)
    parts = list(groups.items())
    heights = [
        1.2 + max(len(group) for _, group in parts[i : i + columns]) * 0.3
        for i in range(0, len(parts), columns)
    ]
    figure = figure_class(figsize=(7.2 * columns, sum(heights)), layout="constrained")
    canvas(figure)
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    for axis, (name, group) in zip(axes, parts, strict=False):
        names, values = list(group), np.asarray(list(group.values()))
        axis.plot(values, names, "o", color=_COLORS[1], markersize=5)
        for place, value in enumerate(values):
            axis.annotate(
                f"{value:.3g}" if value < 1000 else f"{value:.0f}",
                (value, place),
                xytext=(6, -3),
                textcoords="offset points",
                fontsize=7,
            )
        axis.set_xscale("log")
        axis.set_xlim(values.min() / 1.5, values.max() * 2)
        many = values.max() > 100 * values.min()
        axis.xaxis.set_major_locator(LogLocator(subs=(1,) if many else (1, 2, 5)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(axis="y", alpha=0.4, linewidth=0.6)
        axis.set_title(name, fontsize=8)
        axis.set_xlabel(xlabel, fontsize=8)
        axis.tick_params(labelsize=7)
    for axis in axes[len(groups) :]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _scale(axis: Any, part: Panel, sharing: Sequence[Panel]) -> None:
    """Scale of the y axis, common to the panels that share it."""
    if part.yscale != "auto":
        axis.set_yscale(part.yscale)
        return
    values = np.concatenate(
        [np.asarray(s.mean, float) for p in sharing for s in p.series.values()]
    )
    if values.min(initial=np.inf) * 30 >= values.max(initial=0.0):
        axis.set_ylim(bottom=0)
    else:
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ylim(bottom=-0.001)


def _bars(series: Series, scale: str) -> np.ndarray:
    """Half-lengths below and above; what is never negative has no bar below zero."""
    mean, spread = np.asarray(series.mean, float), np.asarray(series.spread, float)
    below = np.minimum(spread, mean) if scale == "auto" else spread
    if scale == "log":
        below = np.minimum(spread, 0.9 * mean)
    return np.stack([np.maximum(below, 0.0), spread])


def image_grid(
    path: Path,
    columns: Mapping[str, Float[np.ndarray, "n height width channels"]],
    *,
    captions: Mapping[str, Sequence[str]] | None = None,
    title: str = "",
) -> None:
    """Saves images side by side: a row for each pattern, a column for each method.

    Args:
      path: file to write; its ending gives the format.
      columns: title and images of each column, in `[0, 1]`.
      captions: words under the images of a column.
      title: line above the grid.
    """
    figure_class, canvas = _matplotlib()
    rows = max(len(x) for x in columns.values())
    figure = figure_class(
        figsize=(1.15 * len(columns), 1.2 * rows + 0.8), layout="constrained"
    )
    canvas(figure)
    axes = figure.subplots(rows, len(columns), squeeze=False)
    for j, (name, pictures) in enumerate(columns.items()):
        for i, axis in enumerate(axes[:, j]):
            axis.set(xticks=[], yticks=[])
            picture = np.clip(np.asarray(pictures[i]), 0, 1)
            axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            if i == 0:
                axis.set_title(name, fontsize=8)
            if captions and name in captions:
                words = _shortened(str(captions[name][i]))
                axis.set_xlabel(words, fontsize=6, labelpad=2, parse_math=False)
    figure.suptitle(title, fontsize=9)
    with warnings.catch_warnings():  # of letters that the font does not have
        warnings.filterwarnings("ignore", "Glyph ")
        figure.savefig(path, dpi=160)


def _shortened(words: str) -> str:
    """At most as much as fits under an image, whose end tells names of files apart."""
    if len(words) <= CAPTION:
        return words
    return f"{words[: CAPTION - 10]}…{words[-9:]}"


def landscapes(path: Path, parts: Sequence[Landscape], *, title: str = "") -> None:
    """Saves energy landscapes side by side: darker is lower, on a scale of each.

    Args:
      path: file to write; its ending gives the format.
      parts: the landscapes.
      title: line above them.
    """
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap

    figure_class, canvas = _matplotlib()
    greys = LinearSegmentedColormap.from_list("greys", ["0.3", "1.0"])
    figure = figure_class(figsize=(4.6 * len(parts), 4.4), layout="constrained")
    canvas(figure)
    axes = figure.subplots(1, len(parts), squeeze=False)[0]
    for axis, part in zip(axes, parts, strict=True):
        # Levels that cut the plane into parts of one size show valleys of any depth.
        levels = np.unique(np.quantile(part.energy, np.linspace(0, 1, 21)))
        norm = BoundaryNorm(levels, greys.N)
        plane = part.x, part.y, part.energy
        filled = axis.contourf(*plane, levels, cmap=greys, norm=norm)
        for states in part.paths:
            axis.plot(*states.T, color="#d55e00", linewidth=1.2)
        axis.plot(
            *part.paths[:, -1].T,
            color="#d55e00",
            marker="o",
            markersize=9,
            fillstyle="none",
            markeredgewidth=1.6,
            linestyle="none",
            label="where retrieval ends",
        )
        axis.plot(
            *part.memories.T,
            color="#ffffff",
            marker="X",
            markeredgecolor="#000000",
            markersize=8,
            linestyle="none",
            label="memory",
        )
        axis.set(title=part.title, xlabel="component 1", ylabel="component 2")
        axis.set_aspect("equal")
        figure.colorbar(
            filled,
            ax=axis,
            label="energy",
            location="bottom",
            format="%.3f",
            ticks=levels[::5],
        )
    axes[0].legend(fontsize=7, loc="lower left")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _matplotlib() -> tuple[Any, Any]:
    """Figure and canvas classes that need no display and leave pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    return Figure, FigureCanvasAgg
