"""Figures of results; nothing is computed here.

Each function writes a file, whose ending gives the format; `title` is a line on top.
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from uhop_jax._axes import (
    FONT,
    Style,
    bars,
    from_zero,
    halves,
    legend,
    new_figure,
    save,
    write,
)
from uhop_jax._comparison import Comparison, comparisons

__all__ = [
    "Comparison",
    "Curve",
    "Landscape",
    "Panel",
    "Style",
    "comparisons",
    "forecasts",
    "image_grid",
    "landscapes",
    "panels",
    "reliability_panel",
]

CAPTION = 22  # letters under an image
LETTERS = 64  # of a legend below a panel


class Curve(NamedTuple):
    """A curve with its spread.

    Attributes:
      x: values on the horizontal axis.
      mean: values on the vertical axis.
      spread: half-lengths of the error bars, or pairs of the halves below and above.
    """

    x: Sequence[float]
    mean: Sequence[float]
    spread: Sequence[float] | Sequence[Sequence[float]]


class Panel(NamedTuple):
    """One pair of axes.

    Attributes:
      title: above the axes.
      series: curves, or clouds of points, by name.
      xlabel: quantity and unit.
      ylabel: quantity and unit.
      xscale: `linear`, `log` or `symlog`.
      yscale: `linear`, `log`, `symlog`, or `auto` for values that are never negative.
        An `auto` axis begins at zero: it is linear if all values are of one order of
        magnitude, else logarithmic with a grey zone next to zero.
      points: whether points are drawn without lines.
      styles: of curves, by name; curves without one are numbered in order.
    """

    title: str
    series: Mapping[str, Curve]
    xlabel: str
    ylabel: str
    xscale: str = "linear"
    yscale: str = "linear"
    points: bool = False
    styles: Mapping[str, Style] = {}


def reliability_panel(title: str, curves: Mapping[str, Curve]) -> Panel:
    """A reliability diagram: how often answers are right, against their confidence.

    A grey line shows where both are equal. Curves differ in dashes and markers.

    Args:
      title: above the axes.
      curves: frequency against confidence, by name.
    """
    equal = Curve([0.0, 1.0], [0.0, 1.0], [0.0, 0.0])
    looks = {name: Style(number, number) for number, name in enumerate(curves)}
    return Panel(
        title,
        {**curves, "frequency equal to confidence": equal},
        "confidence: largest weight",
        "frequency of right answers",
        styles=looks | {"frequency equal to confidence": Style(0, 0, plain=True)},
    )


class Landscape(NamedTuple):
    """Energy over a plane, with memories and paths of states.

    Attributes:
      title: above the axes.
      x: coordinates of the columns of `energy`.
      y: coordinates of the rows of `energy`.
      energy: at the points of the grid.
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
    path: Path, parts: Sequence[Panel], *, title: str = "", columns: int = 2
) -> None:
    """Saves panels side by side; equal labels share their range.

    The names of curves stand below the axes, once if all panels have the same names.

    Args:
      path: file to write; its ending gives the format.
      parts: the panels.
      title: line above them.
      columns: panels in a row, at most.
    """
    columns = min(len(parts), columns)
    rows = -(-len(parts) // columns)
    names = list(dict.fromkeys(name for part in parts for name in part.series))
    common = all(set(part.series) == set(names) for part in parts)
    if common:
        lines = -(-len(names) // _side_by_side(names, columns))
    else:
        own = [part.series for part in parts]
        lines = rows * max(-(-len(names) // _side_by_side(names)) for names in own)
    height = 3.3 * rows + 0.19 * lines + 0.4
    figure = new_figure(4.7 * columns, height)
    share = len({part.ylabel for part in parts}) == 1
    axes = figure.subplots(rows, columns, squeeze=False, sharey=share).ravel()
    first: dict[str, Any] = {}  # curves of the first panel, by name
    for place, (axis, part) in enumerate(zip(axes, parts, strict=False)):
        handles = {}
        for name, series in part.series.items():
            number = names.index(name)
            style = part.styles.get(name) or Style(number, number)
            options = style.options()
            if part.points:
                options["linestyle"] = "none"
            handles[name] = axis.errorbar(
                series.x,
                series.mean,
                yerr=bars(series.mean, series.spread, part.yscale in ("auto", "log")),
                label=name,
                capsize=2,
                elinewidth=0.8,
                markevery=1 if part.points else max(1, len(series.x) // 12),
                **options,
            )
        axis.set_title(part.title, fontsize=FONT + 1)
        axis.set_xlabel(part.xlabel)
        if not share or place % columns == 0:
            axis.set_ylabel(part.ylabel)
        axis.set_xscale(part.xscale)
        places = np.unique(np.concatenate([s.x for s in part.series.values()]))
        if part.xscale != "linear" and len(places) <= 12:  # few enough to name each
            shown = set(places[:: 1 + (len(places) > 8)])  # the names of all overlap
            axis.set_xticks(places, [f"{x:g}" if x in shown else "" for x in places])
            axis.minorticks_off()
        if part.xscale == "linear" and len(places) == 1:
            axis.set_xticks(places)
        elif part.xscale == "linear" and (places % 1 == 0).all():
            axis.locator_params(axis="x", integer=True)
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.tick_params(labelsize=FONT)
        if len(part.series) > 1 and not common:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
            legend(axis, handles, ncols=_side_by_side(handles), **below)
        first = first or handles
    if common and len(names) > 1:
        ncols = _side_by_side(names, columns)
        legend(figure, first, ncols=ncols, loc="outside lower center")
    # After all data is drawn: a limit set earlier would hold for later panels.
    for axis, part in zip(axes, parts, strict=False):
        if part.yscale == "auto":
            sharing = parts if share else [part]
            curves = [s for p in sharing for s in p.series.values()]
            means = np.concatenate([np.asarray(s.mean, float) for s in curves])
            above = np.concatenate([halves(s.spread)[1] for s in curves])
            from_zero(axis, "y", means, means + above)
        else:
            axis.set_yscale(part.yscale)
    for axis in axes[len(parts) :]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=FONT + 1)
    save(figure, path)


def _side_by_side(names: Collection[str], columns: int = 1) -> int:
    """How many names of a legend stand beside one another below some panels."""
    room = LETTERS * columns // (max(map(len, names)) + 8)
    lines = -(-len(names) // max(min(2 * columns, room), 1))
    return -(-len(names) // lines)


def forecasts(
    path: Path,
    truth: Float[np.ndarray, "windows steps D"],
    ahead: Float[np.ndarray, "windows horizon D"],
    *,
    names: Sequence[str],
    titles: Sequence[str],
    xlabel: str,
    title: str = "",
) -> None:
    """Saves forecasts with the truth: a row for each series, a column for each window.

    Args:
      path: file to write; its ending gives the format.
      truth: true values of the steps before and during each forecast.
      ahead: the forecasts, of the last steps of `truth`.
      names: of the series, with their units.
      titles: of the windows.
      xlabel: steps and their unit.
      title: line above the panels.
    """
    columns, steps, rows = truth.shape
    horizon = ahead.shape[1]
    figure = new_figure(3.3 * columns + 0.4, 1.25 * rows + 1.3)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="row")
    for row, column in np.ndindex(rows, columns):
        axis = axes[row, column]
        axis.axvspan(0, horizon - 1, color="0.93", linewidth=0)
        axis.plot(
            np.arange(steps) - (steps - horizon),
            truth[column, :, row],
            color="black",
            linewidth=1.0,
            label="measured",
        )
        axis.plot(
            ahead[column, :, row],
            color="#d55e00",
            linewidth=1.9,
            linestyle="--",
            label="forecast",
        )
        axis.margins(x=0.01)
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.tick_params(labelsize=FONT)
        if row == 0:
            axis.set_title(titles[column], fontsize=FONT)
        if row == rows - 1:
            axis.set_xlabel(xlabel, fontsize=FONT)
    for axis, name in zip(axes[:, 0], names, strict=True):
        wrapped = "\n".join(textwrap.wrap(name, 16)[:3])
        axis.set_ylabel(wrapped, fontsize=FONT)
    figure.align_ylabels()
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, fontsize=FONT, ncols=2, loc="outside lower center")
    figure.suptitle(title, fontsize=FONT + 1)
    save(figure, path)


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
    rows = max(len(x) for x in columns.values())
    figure = new_figure(1.15 * len(columns), 1.2 * rows + 0.8)
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
                axis.set_xlabel(words, fontsize=6, labelpad=2)
    figure.suptitle(title, fontsize=9)
    write(figure, path, dpi=160)


def _shortened(words: str) -> str:
    """Words cut to fit under an image; the end is kept, where file names differ."""
    if len(words) <= CAPTION:
        return words
    return f"{words[: CAPTION - 10]}…{words[-9:]}"


def landscapes(path: Path, parts: Sequence[Landscape], *, title: str = "") -> None:
    """Saves energy landscapes side by side: darker is lower, each on its own scale.

    Args:
      path: file to write; its ending gives the format.
      parts: the landscapes.
      title: line above them.
    """
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap

    greys = LinearSegmentedColormap.from_list("greys", ["0.3", "1.0"])
    figure = new_figure(4.6 * len(parts), 4.4)
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
    write(figure, path)
