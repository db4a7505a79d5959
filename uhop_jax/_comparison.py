"""Figures with names down the side and one value for each: points or bars."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from uhop_jax._axes import FONT, Style, bars, encodable, from_zero, new_figure, save


class Comparison(NamedTuple):
    """Names down the side, one value for each along the axis.

    Attributes:
      title: above the axes.
      groups: by heading and name, the value and the half-length of its error bar.
      xlabel: quantity and unit.
      origin: where bars begin, on a logarithmic axis; None draws points on an axis that
        begins at zero, as for `yscale="auto"` of a `Panel`.
      line: name and place of a line across all names.
      styles: of points, by name.
    """

    title: str
    groups: Mapping[str, Mapping[str, tuple[float, float]]]
    xlabel: str
    origin: float | None = None
    line: tuple[str, float] | None = None
    styles: Mapping[str, Style] = {}


def comparisons(
    path: Path, parts: Sequence[Comparison], *, title: str = "", columns: int = 2
) -> None:
    """Saves comparisons, at most in this number of columns of about one height."""
    columns = min(len(parts), columns)
    heights = [
        1.1 + 0.2 * sum(len(x) + bool(name) for name, x in part.groups.items())
        for part in parts
    ]
    middles = np.cumsum(heights) - np.asarray(heights) / 2
    where = (middles * columns / sum(heights)).astype(int)
    stacks = [np.flatnonzero(where == column).tolist() for column in np.unique(where)]
    tallest = max(sum(heights[i] for i in stack) for stack in stacks)
    figure = new_figure(5.6 * len(stacks), tallest + 0.4)
    figures = figure.subfigures(1, len(stacks), squeeze=False)[0]
    for column, stack in zip(figures, stacks, strict=True):
        tall = [heights[i] for i in stack]
        rest = tallest - sum(tall)
        axes = column.subplots(
            len(stack) + (rest > 0.5),
            1,
            squeeze=False,
            height_ratios=tall + [rest] * (rest > 0.5),
        ).ravel()
        for axis, i in zip(axes, stack, strict=False):
            _compare(axis, parts[i], parts)
        for axis in axes[len(stack) :]:
            axis.set_axis_off()
    figure.suptitle(title, fontsize=FONT + 1)
    save(figure, path)


def _compare(axis: Any, part: Comparison, parts: Sequence[Comparison]) -> None:
    """Draws a comparison; panels of points with one quantity share their range."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    labels: list[tuple[str, bool]] = []
    alike = [part]
    if part.origin is None:
        alike = [other for other in parts if other.xlabel == part.xlabel]
    pairs = [x for p in alike for group in p.groups.values() for x in group.values()]
    values, halves = map(np.asarray, zip(*pairs, strict=True))
    # Below it, a value is rounding of zero.
    rounding = 1e-12 * values.max(initial=0.0, where=np.isfinite(values))
    for heading, group in part.groups.items():
        if heading:
            labels.append((heading, True))
        for name, (value, half) in group.items():
            place = len(labels)
            labels.append((name, False))
            if part.origin is None:
                style = part.styles.get(name) or Style(0, 0)
                axis.errorbar(
                    [value],
                    [place],
                    xerr=bars([value], [half], True),
                    capsize=3,
                    clip_on=False,
                    **style.options() | {"linestyle": "none"},
                )
            else:
                slower = value >= part.origin
                axis.barh(
                    place,
                    value - part.origin,
                    left=part.origin,
                    height=0.7,
                    color="0.75" if slower else "white",
                    edgecolor="black",
                    hatch="" if slower else "////",
                    linewidth=0.7,
                )
            value = 0.0 if value <= rounding else value
            axis.text(
                1.02,
                place,
                f"{value:.0f}" if value >= 1000 else f"{value:.3g}",
                transform=axis.get_yaxis_transform(),
                fontsize=FONT,
                va="center",
            )
    if part.origin is None:
        lines = [p.line[1] for p in alike if p.line]
        from_zero(axis, "x", np.asarray([*values, *lines]), values + halves)
    else:
        axis.set_xscale("log")
        low, high = min(*values, part.origin), max(*values, 2 * part.origin)
        axis.set_xlim(low / 1.15, high * 1.15)
        axis.xaxis.set_major_locator(
            LogLocator(subs=(1,) if high > 50 * low else (1, 2, 5))
        )
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.axvline(part.origin, color="black", linewidth=0.8)
    if part.line:
        name, value = part.line
        axis.axvline(value, **Style(0, 0, plain=True).options())
        axis.annotate(
            name,
            (value, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            fontsize=FONT,
            ha="center",
        )
    names = [encodable(name) for name, _ in labels]
    axis.set_yticks(range(len(labels)), names, fontsize=FONT, parse_math=False)
    for text, (_, bold) in zip(axis.get_yticklabels(), labels, strict=True):
        text.set_fontweight("bold" if bold else "normal")
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.4, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(labelsize=FONT)
    axis.set_title(
        "\n".join(textwrap.wrap(part.title, 40)),
        fontsize=FONT + 1,
        pad=14 if part.line else None,
    )
    axis.set_xlabel(part.xlabel, fontsize=FONT)
