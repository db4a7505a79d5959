"""The benchmarks run: tiny sizes, one round, with the installed peers."""

import re
import sys

import jax
import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import bag
import blind
import core
import layers
import peers_bags
import timing

SMALL = {
    "separations": (core.separations, {"shape": (4, 50)}),
    "stage one": (core.stage_one, {"sizes": ((4, 6),), "steps": 2}),
    "retrieval": (core.retrieval, {"counts": (20,)}),
    "layers": (layers.layers, {"sizes": ((2, 3, 2, 4),)}),
    "pooling": (peers_bags.pooling, {"sizes": ((2, 3, 4),)}),
    "bag": (bag.bag, {"number": 30, "width": 8}),
}


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        with jax.numpy_rank_promotion("allow"):
            yield


@pytest.mark.few(3)
@pytest.mark.parametrize(("benchmark", "sizes"), SMALL.values(), ids=SMALL)
def test_every_comparison_measures_its_members(benchmark, sizes, monkeypatch, capsys):
    monkeypatch.setattr(timing, "peer", lambda name: None)
    monkeypatch.setattr(timing, "PAUSE", 0.0)
    monkeypatch.setattr(timing, "BUSY", 1e-9)  # one call
    for module in (core, layers, peers_bags):
        monkeypatch.setattr(module, "peer", timing.peer)
    rows = benchmark(1, **sizes)
    printed = capsys.readouterr().out
    for row in rows:
        absent = row["median_ms"] == ""
        assert absent == any(word in row["name"] for word in ("PyTorch", "JAXopt"))
        assert absent or (row["median_ms"] > 0 and row["ratio"] > 0)
        assert row["ratio"] == 1 or row["name"] != row["baseline"]
    if any(row["median_ms"] == "" for row in rows):
        assert "not measured: pip install" in printed


def test_blind_calibration_is_timed_with_its_peak_memory(capsys):
    first, second = blind.at_scale(1, sizes=(40,))
    assert first["median_ms"] > second["median_ms"] > 0  # the first call compiles
    assert first["comparison"] == "blind calibration, M = Q = 40, d = 64"
    peak = re.search(r"most memory of the process +(\d+) MiB", capsys.readouterr().out)
    assert int(peak[1]) > 50


def test_a_script_writes_its_table_and_figure(tmp_path, monkeypatch):
    rows = iter([3.0, 6.0])
    monkeypatch.setattr(sys, "argv", ["x", f"--out={tmp_path}", "--rounds=1"])
    table = [
        {"comparison": "c", "name": n, "median_ms": next(rows), "ratio": r}
        for n, r in (("a", 1.0), ("b", 2.0))
    ]
    table.append({"comparison": "c", "name": "absent", "median_ms": "", "ratio": ""})
    table = [row | {"baseline": "a"} for row in table]
    timing.main("Doc.", "some", [lambda rounds: table])
    lines = (tmp_path / "some.csv").read_text().splitlines()
    assert lines[0].startswith("comparison,name,median_ms,ratio,baseline,device,")
    assert [line.split(",")[2] for line in lines[1:]] == ["3.0", "6.0", ""]
    assert (tmp_path / "some.png").stat().st_size > 3_000
    assert (tmp_path / "some.txt").read_text().startswith("device ")
    commit = timing.commit()
    assert commit == "" or re.fullmatch(r"[0-9a-f]{7,}\+?", commit)
    assert {line.split(",")[-1] for line in lines[1:]} == {commit}
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    timing.main("Doc.", "some", [lambda rounds: table])
    assert ",avx2," in (tmp_path / "some_avx2.csv").read_text().splitlines()[1]


def test_a_figure_has_a_panel_for_comparisons_that_begin_alike(tmp_path, monkeypatch):
    table = [
        {"comparison": f"retrieval, M = {M}, float32", "name": name, "ratio": ratio}
        for M in (10, 100)
        for name, ratio in (("products", 1.0), ("softmax", 0.5), ("PyTorch", ""))
    ]
    table.append({"comparison": "layer, float32", "name": "U-Hop", "ratio": "2.0"})
    panels = []
    monkeypatch.setattr(
        "uhop_jax.plotting.comparisons",
        lambda path, parts, title: panels.extend(parts),
    )
    rows = [row | {"baseline": "products"} for row in table]
    timing.draw(tmp_path / "x.png", rows, "cpu")
    assert [part.title for part in panels] == ["retrieval, float32", "layer, float32"]
    groups = {"M = 10": {"softmax": (0.5, 0.0)}, "M = 100": {"softmax": (0.5, 0.0)}}
    assert panels[0].groups == groups and panels[0].origin == 1
    assert panels[1].groups == {"": {"U-Hop": (2.0, 0.0)}}
    assert panels[0].xlabel == "time relative to products"


def test_a_figure_leaves_out_what_only_its_baseline_has(tmp_path, monkeypatch):
    """A peer that is not installed left a panel without bars, which failed."""
    rows = [
        {"comparison": name, "name": name, "ratio": ratio, "baseline": "a"}
        for name, ratio in (("a", 1.0), ("b", 2.0))
    ]
    panels = []
    monkeypatch.setattr(
        "uhop_jax.plotting.comparisons",
        lambda path, parts, title: panels.extend(parts),
    )
    timing.draw(tmp_path / "x.png", rows, "cpu")
    assert [part.title for part in panels] == ["b"]
