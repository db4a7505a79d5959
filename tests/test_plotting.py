"""Figures: looks of curves, legends beside the data, zero, error bars, forecasts."""

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from uhop_jax import data, plotting
from uhop_jax.experiments import figures
from uhop_jax.experiments.methods import FAIR, LIMIT, PAPER
from uhop_jax.experiments.protocols import REFERENCE
from uhop_jax.training import ARMS, forecast_report
from uhop_jax.training.arms import styles


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws with a function of `plotting`; returns the figure that it would save."""

    def draw(function, *arguments, **options):
        saved = []
        for module in ("plotting", "_comparison"):
            monkeypatch.setattr(
                f"uhop_jax.{module}.save",
                lambda figure, path: saved.append(figure) or path.touch(),
            )
        function(tmp_path / "figure.png", *arguments, **options)
        return saved[0]

    return draw


def panel(names, *, scale="auto", spread=0.0, least=0.0, title=""):
    x = [10, 100, 1000]
    series = {
        name: plotting.Curve(x, [least, 1.0 + i, 20.0 + i], [spread] * 3)
        for i, name in enumerate(names)
    }
    return plotting.Panel(title, series, "M", "error", "log", scale)


def box(artist):
    return artist.get_window_extent()


@pytest.mark.parametrize("same", [True, False])
def test_a_legend_leaves_the_axes_and_the_figure_whole(drawn, same):
    """With 25 curves the legend was taller than the figure, and covered curves."""
    names = [[f"U-Hop max sparse, N={i}" for i in range(25)]] * 3
    if not same:
        names[2] = ["MHM"] + [f"method {i}" for i in range(3)]
    figure = drawn(plotting.panels, [panel(x) for x in names])
    figure.draw_without_rendering()
    axes = [axis for axis in figure.axes if axis.axison]
    legends = figure.legends + [x for a in axes if (x := a.get_legend()) is not None]
    assert len(axes) == 3 and len(legends) == (1 if same else 3)
    for legend in legends:
        assert figure.bbox.padded(1).containsx(box(legend).x0)
        assert box(legend).y0 >= 0 and box(legend).y1 <= figure.bbox.y1
        assert not any(box(legend).overlaps(axis.bbox) for axis in axes)
        assert min(text.get_fontsize() for text in legend.get_texts()) >= 9
    assert min(axis.bbox.height for axis in axes) > 2 * figure.dpi


def looks(axis):
    handles, names = axis.get_legend_handles_labels()
    return {
        name: (*handle[0].get_color(), handle[0].get_marker())
        for name, handle in zip(names, handles, strict=True)
    }


def test_curves_differ_and_keep_their_look(drawn):
    names = [f"curve {i}" for i in range(30)]
    figure = drawn(plotting.panels, [panel(names), panel(names[7:9])])
    first, second = map(looks, figure.axes)
    assert len(set(first.values())) == 30
    assert second == {name: first[name] for name in names[7:9]}


def bars_of(axis):
    return [x.get_segments() for x in axis.collections if hasattr(x, "get_segments")]


@pytest.mark.parametrize("scale", ["auto", "log"])
def test_no_error_bar_to_zero_on_a_logarithmic_axis(drawn, scale):
    part = panel(["a"], scale=scale, spread=5.0, least=0.3)
    ((low, middle, high),) = bars_of(drawn(plotting.panels, [part]).axes[0])
    np.testing.assert_allclose(np.asarray(low)[:, 1], [0.3, 5.3])
    np.testing.assert_allclose(np.asarray(middle)[:, 1], [1.0, 6.0])
    np.testing.assert_allclose(np.asarray(high)[:, 1], [15.0, 25.0])


def test_zero_has_its_place(drawn):
    axis = drawn(plotting.panels, [panel(["a"], spread=9.0)]).axes[0]
    assert axis.get_yscale() == "symlog"
    names = [text.get_text() for text in axis.get_yticklabels()]
    assert names == ["0", "1", "2", "5", "10", "20"]
    (zone,) = axis.patches
    assert box(zone).y0 == pytest.approx(axis.transData.transform((10, 0))[1])
    assert box(zone).height < 0.2 * axis.bbox.height
    assert axis.get_ylim()[0] < 0 and axis.get_ylim()[1] > 29
    axis = drawn(plotting.panels, [panel(["a"], least=0.1)]).axes[0]
    assert axis.get_yscale() == "log" and axis.get_ylim()[0] == pytest.approx(0.1)
    axis = drawn(plotting.panels, [panel(["a"], least=9.0)]).axes[0]
    assert axis.get_yscale() == "linear" and axis.get_ylim()[0] == 0


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_curves_of_zeros_and_unknown_values(drawn, value):
    curve = plotting.Curve([1, 2], [value, value], [0.0, 0.0])
    part = panel(["a"])._replace(series={"a": curve})
    assert drawn(plotting.panels, [part]).axes[0].get_yscale() == "linear"


def test_a_comparison_has_names_down_the_side(drawn):
    groups = {
        "fixed": {"MHM": (3.0, 1.0), "l2": (0.5, 0.9)},
        "learned": {"U": (0.0, 0.0)},
    }
    part = plotting.Comparison("", groups, "error", line=("limit", 0.0))
    axis = drawn(plotting.comparisons, [part]).axes[0]
    names = [text.get_text() for text in axis.get_yticklabels()]
    assert names == ["fixed", "MHM", "l2", "learned", "U"]
    assert axis.get_ylim()[0] > axis.get_ylim()[1]  # the first on top
    texts = [text.get_text() for text in axis.texts]
    assert texts == ["3", "0.5", "0", "limit"]
    ends = [np.asarray(x).reshape(-1, 2)[:, 0] for x in bars_of(axis)]
    np.testing.assert_allclose(ends[0], [2, 4])
    np.testing.assert_allclose(ends[1], [0.5, 1.4])
    (zone,) = axis.patches
    assert box(zone).x0 - axis.bbox.x0 < 0.05 * axis.bbox.width
    groups = {"": {"MHM": (3.0, 1.0), "DAM": (np.inf, 0.0), "l2": (np.nan, 0.0)}}
    wild = plotting.Comparison("", groups, "error")
    texts = [
        text.get_text() for text in drawn(plotting.comparisons, [wild]).axes[0].texts
    ]
    assert texts == ["3", "inf", "nan"]
    many = [part._replace(title=str(i)) for i in range(5)]
    figure = drawn(plotting.comparisons, many)
    assert figure.get_figheight() < 0.7 * 5 * (1.1 + 5 * 0.2)  # two columns


# The figures of `retrieve.py`


def rows(methods, *, sizes=(100,), levels=(0.5,), settings=("",)):
    cells = itertools.product(sizes, levels, methods, settings, range(3))
    return [
        {"memories": M, "corruption": "mask", "level": level, "method": name}
        | {"setting": setting, "run": run, "error": 1.0 + run + M / 100}
        for M, level, name, setting, run in cells
    ]


def test_one_size_and_level_are_one_comparison():
    parts = figures.sweep(rows(["MHM", "U-Hop", "l2", LIMIT]))
    (part,) = parts
    assert list(part.groups) == ["models of the paper", "kernel"]
    assert part.groups["models of the paper"].keys() == {"MHM", "l2"}
    mean, half = part.groups["kernel"]["U-Hop"]
    assert mean == 3 and half == pytest.approx(4.302652730 / 3**0.5)
    assert part.line == (LIMIT, 3.0)
    assert len(figures.sweep(rows(["MHM"], levels=(0.1, 0.5)))) == 2


def test_curves_of_many_methods_by_family():
    names = [method.name for method in FAIR]
    parts = figures.sweep(rows([*names, LIMIT], sizes=(10, 20, 50)))
    assert [part.title for part in parts] == [
        "mask 0.5, models of the paper",
        "mask 0.5, other fixed similarities",
        "mask 0.5, kernel",
        "mask 0.5, angular kernel",
        "mask 0.5, calibration",
    ]
    assert all(LIMIT in part.series for part in parts)
    drawn = [name for part in parts for name in part.series if name != LIMIT]
    assert sorted(drawn) == sorted(names)
    assert max(len(part.series) for part in parts) <= figures.FEW + 1


def test_many_settings_are_split_by_method():
    settings = [f"N={i}" for i in range(6)]
    names = [m.name for m in REFERENCE if m.group == "kernel"]
    parts = figures.sweep(rows(names, sizes=(10, 20, 50), settings=settings))
    assert [part.title for part in parts] == [f"mask 0.5, {name}" for name in names]
    pairs = figures.sweep(rows(names, sizes=(10, 20, 50), settings=settings[:2]))
    assert [len(part.series) for part in pairs] == [8, 2 * len(names) - 8]
    assert [part.title[10:] for part in pairs] == ["kernel, 1 of 2", "kernel, 2 of 2"]
    assert figures.sweep(rows(["MHM", "l2"], sizes=(1, 2, 3)))[0].title == "mask 0.5"


def test_a_method_has_one_colour_everywhere():
    methods = [m.name for m in (*FAIR, *PAPER, *REFERENCE)]
    every = figures.styles([{"method": m, "label": m} for m in methods])
    looks = [(s.color % 10, s.mark % 11) for s in every.values()]
    assert len(set(looks)) == len(set(methods))
    labels = ["U-Hop, N=1", "U-Hop, N=9"]
    some = figures.styles([{"method": "U-Hop", "label": x} for x in labels])
    assert {style.color for style in some.values()} == {every["U-Hop"].color}
    assert some[labels[0]].shade < some[labels[1]].shade == 1
    assert some[labels[0]].mark != some[labels[1]].mark
    arms = styles([*ARMS, "linear", "GSH + U-Hop, plug memory"])
    assert arms["MHM + U-Hop"].color == arms["GSH + U-Hop"].color != arms["MHM"].color
    assert arms["GSH + U-Hop, plug memory"].shade < arms["GSH + U-Hop"].shade
    looks = [(s.color % 10, s.mark % 11, s.mark % 7) for s in arms.values()]
    assert len(set(looks)) == len(looks)


# Forecasts


@pytest.mark.parametrize(
    ("columns", "shown"), [(7, range(7)), (12, (*range(7), 11)), (1, (0,))]
)
def test_a_figure_of_forecasts_has_the_target(drawn, columns, shown):
    """The last column, the target of ETT, is drawn."""
    values = np.arange(60.0)[:, None] + 100 * np.arange(columns)
    dates = np.datetime64("2020-01-01", "s") + np.arange(60) * np.timedelta64(3600, "s")
    names = tuple(f"c{i} (kW)" for i in range(columns))
    series = data.Series(values, names, dates, pd.Timedelta(hours=1))
    ahead = [values[i : i + 4] + 0.5 for i in (20, 30, 40)]

    def draw(path):
        forecast_report.draw(path, "title", series, (20, 30, 40), ahead, 12)

    figure = drawn(draw)
    axes = np.reshape(figure.axes, (-1, 3))
    assert [axis.get_ylabel() for axis in axes[:, 0]] == [names[i] for i in shown]
    assert axes[0, 1].get_title() == "from 2020-01-02 06:00:00"
    assert axes[-1, 0].get_xlabel() == "steps of 1 hour"
    for axis, column in zip(axes[:, 2], shown, strict=True):
        truth, forecast = axis.get_lines()
        assert truth.get_xdata().tolist() == list(range(-8, 4))
        np.testing.assert_array_equal(truth.get_ydata(), values[32:44, column])
        assert forecast.get_xdata().tolist() == list(range(4))
        np.testing.assert_array_equal(forecast.get_ydata(), ahead[2][:, column])
        assert forecast.get_linestyle() == "--" != truth.get_linestyle()
    assert [x.get_text() for x in figure.legends[0].get_texts()] == [
        "measured",
        "forecast",
    ]


def with_words(words):
    """Parts of a figure of each kind, with `words` wherever a caller may write."""
    curves = {x: plotting.Curve([1, 2], [1.0, 2.0], [0, 0]) for x in (words, "other")}
    groups = {words: {words: (1.0, 0.1)}}
    plane = np.arange(3.0), np.arange(4.0), np.arange(12.0).reshape(4, 3)
    steps = np.arange(16.0).reshape(1, 8, 2)
    landscape = plotting.Landscape(words, *plane, steps[0, :1], steps[:, :3] / 8)
    names = {"names": [words, words], "titles": [words], "xlabel": words}
    return {
        "panels": ([plotting.Panel(words, curves, words, words, "log")], {}),
        "comparisons": (
            [plotting.Comparison(words, groups, words, None, (words, 0))],
            {},
        ),
        "landscapes": ([landscape], {}),
        "image_grid": ({words: np.zeros((1, 2, 2, 1))}, {"captions": {words: [words]}}),
        "forecasts": (steps, {"ahead": steps[:, :2], **names}),
    }


@pytest.mark.parametrize("words", ["_a_{b$c$.csv", "na\udcefve", "$x^2$ 日本\t"])
@pytest.mark.parametrize(
    ("kind", "places"),
    [("panels", 5), ("comparisons", 6), ("landscapes", 2), ("image_grid", 3)]
    + [("forecasts", 5)],
)
def test_words_are_drawn_as_they_are(kind, places, words, tmp_path, monkeypatch):
    """Mathematics in a file name raised, and names with `_` in front were left out."""
    drawn, draw = set(), Text.draw
    monkeypatch.setattr(Text, "draw", lambda text, x: drawn.add(text) or draw(text, x))
    parts, options = with_words(words)[kind]
    getattr(plotting, kind)(tmp_path / "a.png", parts, title=words, **options)
    shown = words.replace("\udcef", "\\udcef")
    visible = [text for text in drawn if text.get_visible()]
    exact = [text for text in visible if text.get_text().strip() == shown.strip()]
    assert len(exact) == places and not any(text.get_parse_math() for text in exact)


def test_powers_of_ten_at_ticks_are_mathematics(tmp_path, monkeypatch):
    drawn, draw = set(), Text.draw
    monkeypatch.setattr(Text, "draw", lambda text, x: drawn.add(text) or draw(text, x))
    curve = plotting.Curve(10.0 ** np.arange(20), np.arange(20.0), np.zeros(20))
    part = plotting.Panel("", {"a": curve}, "x", "y", "log")
    plotting.panels(tmp_path / "a.png", [part])
    powers = [text for text in drawn if "10^" in text.get_text()]
    assert powers and all(text.get_parse_math() for text in powers)


def test_a_png_is_small_and_keeps_its_colours(tmp_path):
    from PIL import Image

    path = tmp_path / "a.png"
    plotting.panels(path, [panel([f"curve {i}" for i in range(8)])])
    with Image.open(path) as image:
        colors = {color for _, color in image.convert("RGB").getcolors()}
    for name in ((0, 0, 0), (213, 94, 0), (0, 158, 115), (0, 114, 178)):
        assert (
            min(max(abs(a - b) for a, b in zip(name, c, strict=True)) for c in colors)
            < 8
        )
    assert path.stat().st_size < 60_000


def test_long_names_of_a_single_panel_stand_below_one_another(drawn):
    names = [f"a long name of a method, {number}" for number in range(9)]
    figure = drawn(plotting.panels, [panel(names)])
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert box(legend).x0 >= 0 and box(legend).x1 <= figure.bbox.x1
    assert box(legend).y0 >= 0 and box(legend).y1 <= figure.bbox.y1
