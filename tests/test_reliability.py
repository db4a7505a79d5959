"""Reliability of confidences, and its diagram."""

import numpy as np
import pytest
from scipy.stats import binomtest

from uhop_jax import plotting
from uhop_jax.experiments.reliability import BINS, Reliability, reliability_panels


def test_the_error_is_its_definition():
    rng = np.random.default_rng(0)
    confidence = rng.random(500) ** 2
    right = rng.random(500) < 0.8 * confidence
    expected = 0.0
    for low in range(BINS):
        inside = np.floor(confidence * BINS) == low
        gap = confidence[inside].mean() - right[inside].mean()
        expected += inside.mean() * abs(gap)
    whole = Reliability.of(confidence, right)
    assert whole.error == pytest.approx(expected)
    parts = Reliability.of(confidence[:99], right[:99])
    parts += Reliability.of(confidence[99:], right[99:])
    np.testing.assert_allclose(parts.totals, whole.totals)
    again = Reliability.parsed(str(whole))
    np.testing.assert_allclose(again.totals, whole.totals, rtol=1e-5)
    curve = whole.curve
    assert len(curve.x) == BINS and max(curve.mean) <= 1


@pytest.mark.parametrize(
    "right, number", [(0, 1), (1, 1), (3, 4), (90, 100), (7, 7), (0, 3)]
)
def test_intervals_of_frequencies_are_frequencies(right, number):
    outcomes = np.arange(number) < right
    curve = Reliability.of(np.full(number, 0.95), outcomes).curve
    (mean,), ((below, above),) = curve.mean, curve.spread
    expected = binomtest(right, number).proportion_ci(method="wilson")
    assert mean - below == pytest.approx(expected.low, abs=1e-4)
    assert mean + above == pytest.approx(expected.high, abs=1e-4)
    assert below >= 0 and above >= 0
    assert -1e-12 <= mean - below and mean + above <= 1 + 1e-12


def test_calibrated_confidence_has_no_error_and_full_confidence_has_a_bin():
    rng = np.random.default_rng(1)
    confidence = rng.random(50_000)
    right = rng.random(50_000) < confidence
    assert Reliability.of(confidence, right).error < 0.01
    sure = Reliability.of([1.0, 1.0, 0.0], [True, False, False])
    assert sure.error == pytest.approx(1 / 3)
    assert sure.curve.x == [0.0, 1.0] and sure.curve.mean == [0.0, 0.5]


def test_a_diagram_of_each_corruption_adds_up_its_sets(tmp_path):
    text = str(Reliability.of([0.95, 0.55], [True, True]))
    rows = [
        {"corruption": kind, "method": method, "reliability": text}
        for kind in ("mask", "salt_and_pepper")
        for method in ("blind", "known corruption")
        for _ in range(2)
    ]
    rows.append({"corruption": "mask", "method": "cosine", "reliability": ""})
    panels = reliability_panels(rows)
    assert [panel.title for panel in panels] == ["mask", "salt and pepper"]
    assert list(panels[0].series) == [
        "blind, error 0.250",
        "known corruption, error 0.250",
        "frequency equal to confidence",
    ]
    looks = [panels[0].styles[name].options() for name in panels[0].series]
    dashes = [str(look["linestyle"]) for look in looks]
    assert len(set(dashes)) == 3  # told apart without colours
    plotting.panels(tmp_path / "figure.png", panels)
    assert (tmp_path / "figure.png").stat().st_size > 5_000
    assert reliability_panels(rows[-1:]) == []


def test_a_confidence_of_nan_is_refused():
    with pytest.raises(ValueError, match="confidence"):
        Reliability.of([0.5, np.nan], [True, False])
