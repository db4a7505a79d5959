"""Parts of all figures of numbers: styles of curves, axes from zero, small files."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

# Distinct in colour, and by dashes and markers also in black and white.
_COLORS = (
    *("#000000", "#d55e00", "#009e73", "#5b3fa0", "#cc79a7", "#7f7f7f", "#0072b2"),
    *("#e69f00", "#8c510a", "#56b4e9"),
)
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "X", "P", "*", "<", ">", "p")
FONT = 9  # points, of the smallest letters


class Style(NamedTuple):
    """Look of a curve or a mark."""

    color: int  # number of the colour
    mark: int  # number of marker and dashes
    shade: float = 1.0  # below 1, the colour is mixed with white
    plain: bool = False  # a grey line without markers, as for a bound

    def options(self) -> dict[str, Any]:
        """Options of Matplotlib's lines."""
        if self.plain:
            look = {"color": "0.45", "linestyle": (0, (6, 2)), "linewidth": 2.0}
            return look | {"zorder": 1}
        code = _COLORS[self.color % len(_COLORS)]
        parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return {
            "color": tuple(1 - self.shade * (1 - x) for x in parts),
            "linestyle": _DASHES[self.mark % len(_DASHES)],
            "linewidth": 1.3,
            "marker": _MARKERS[self.mark % len(_MARKERS)],
            "markersize": 5,
            "fillstyle": "none" if self.mark % 2 else "full",
        }


def from_zero(
    axis: Any,
    which: str,
    values: Float[np.ndarray, " n"],
    ends: Float[np.ndarray, " m"],
) -> None:
    """Scales an axis for values that are never negative: from zero to the ends of bars.

    Values of several orders of magnitude get a logarithmic axis, with a grey zone at
    the lower end for values at or near zero.
    """
    values, ends = values[np.isfinite(values)], ends[np.isfinite(ends)]
    most = values.max(initial=0.0)
    highest = 1.3 * ends.max(initial=most)
    if values.min(initial=np.inf) * 30 >= most:
        axis.set(**{f"{which}lim": (0, 0.85 * highest or 1)})
        return
    decades = 10.0 ** np.arange(-5, 1) * 10 ** np.ceil(np.log10(most))
    least = values[values >= decades[0]].min()
    steps = (1, 2, 5) if least * 100 > most else (1,)
    ticks = np.outer(decades, steps).ravel()
    narrow = ticks[ticks <= least * (1 + 1e-9)].max(initial=decades[0])
    ticks = ticks[(ticks >= narrow) & (ticks <= highest)]
    low = narrow
    scale = axis.set_yscale if which == "y" else axis.set_xscale
    if values.min() < narrow:
        span = axis.axhspan if which == "y" else axis.axvspan
        span(0, narrow, color="0.9", linewidth=0, zorder=0)
        width = 0.12 * np.log10(highest / narrow)  # in decades: some 15 % of the axis
        scale("symlog", linthresh=narrow, linscale=width)
        ticks, low = np.concatenate([[0], ticks]), -0.1 * narrow
    else:
        scale("log")
    labels = [f"{x:g}" for x in ticks]
    axis.set(**{f"{which}ticks": ticks, f"{which}ticklabels": labels})
    axis.set(**{f"{which}lim": (low, highest)})
    getattr(axis, f"{which}axis").set_tick_params(which="minor", length=0)


def halves(spread: ArrayLike) -> np.ndarray:
    """Half-lengths `(2, n)` of bars below and above, from `(n,)` or pairs `(n, 2)`."""
    spread = np.asarray(spread, float)
    return spread.T if spread.ndim == 2 else np.stack([spread, spread])


def bars(mean: ArrayLike, spread: ArrayLike, positive: bool) -> np.ndarray | None:
    """The `halves` of error bars.

    On an axis of positive values, a bar that would reach zero has no lower half.
    """
    if not np.any(spread):
        return None
    below, above = halves(spread)
    if positive:
        below = np.where(below < np.asarray(mean, float), below, 0.0)
    return np.stack([below, above])


def legend(owner: Any, handles: Mapping[str, Any], **options: Any) -> None:
    """A legend of handles by name; Matplotlib leaves out names that begin with `_`."""
    blank = [" "] * len(handles)
    drawn = owner.legend([*handles.values()], blank, fontsize=FONT, **options)
    for text, name in zip(drawn.get_texts(), handles, strict=True):
        text.set_text(name)


def encodable(words: str) -> str:
    """Words in which bytes of a file name that are no UTF-8 are written as escapes."""
    return words.encode("utf-8", "backslashreplace").decode("utf-8")


def write(figure: Any, path: Path, *, dpi: int = 150) -> None:
    """Writes a figure whose words show as they are, whatever their letters.

    A name may hold dollars, which Matplotlib reads as mathematics, bytes that are no
    UTF-8, which it refuses, or letters that its font lacks, of which it warns. The
    numbers at the ticks are left to Matplotlib.
    """
    from matplotlib.axis import Axis
    from matplotlib.text import Text

    numbers = {
        label
        for axis in figure.findobj(Axis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
        if label.get_parse_math()
    }
    for text in set(figure.findobj(Text)) - numbers:
        text.set_parse_math(False)
        text.set_text(encodable(text.get_text()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ")
        figure.savefig(path, dpi=dpi)


def save(figure: Any, path: Path) -> None:
    """Writes a figure of lines and letters; a png of 256 colours, a third as large."""
    from PIL import Image

    write(figure, path)
    if path.suffix == ".png":
        with Image.open(path) as image:
            few = image.convert("RGB").quantize(
                256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
            )
        few.save(path, optimize=True)


def new_figure(width: float, height: float) -> Any:
    """A figure, its sizes in inches, that needs no display and leaves pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
