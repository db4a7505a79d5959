"""Associative recall as a task of train.py, and the table of networks."""

import csv
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, config_of

from uhop_jax.training.recall import sequence
from uhop_jax.training.study import train_and_evaluate

sys.path.append(str(ROOT / "scripts"))
import networks


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        with jax.numpy_rank_promotion("allow"):
            yield


def small(**changes):
    config = config_of("recall", "recall")
    config.update(
        {"arms": ("MHM", "MHM + contrastive"), "pairs": (3,), "seeds": (0, 1)}
    )
    config.data.update({"vocabulary": 5, "test_sequences": 20})
    config.train.update({"epochs": 2, "sequences": 64, "batch_size": 16})
    config.stage_one.batch_size = 8
    config.update(changes)
    return config


def test_a_sequence_asks_what_it_has_said():
    """Each key once with a value, then each key once more, in another order."""
    orders = set()
    for number in range(4):
        made = sequence(jax.numpy.int32(number), 6, 9)
        tokens, values = np.asarray(made["tokens"]), np.asarray(made["values"])
        said = dict(tokens[:6].tolist())
        assert len(said) == 6 and set(said) <= set(range(9))
        assert set(said.values()) <= set(range(9, 18))
        assert tokens[6:, 1].tolist() == [18] * 6
        assert [said[key] for key in tokens[6:, 0].tolist()] == values.tolist()
        orders.add(tuple(np.argsort(tokens[6:, 0])))
    assert len(orders) > 1


def test_a_study_of_recall(tmp_path, capsys, untyped):
    """A run of each arm, one table, one figure, and the model as a function."""
    train_and_evaluate(small(), tmp_path)
    text = (tmp_path / "results.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert [(row["arm"], row["seed"]) for row in rows] == [
        (arm, seed) for arm in ("MHM", "MHM + contrastive") for seed in "01"
    ]
    assert all(0 < float(row["test_accuracy"]) < 1 for row in rows)
    assert [bool(row["separation"]) for row in rows] == [False, False, True, True]
    assert (tmp_path / "figure.png").stat().st_size > 3_000
    assert "accuracy %" in capsys.readouterr().out
    train_and_evaluate(small(export=True), tmp_path)
    assert len(list(tmp_path.glob("*/model.jax_export"))) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pairs": (6,)}, "pairs must be .* 5, got 6"),
        ({"arms": ("MHM + U-Hop, reference",)}, "is of the authors' image code"),
        ({"pairs": (2, 2)}, "pairs"),
    ],
)
def test_wrong_studies_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(small(**changes), tmp_path)
    assert not list(tmp_path.iterdir())


def test_gains_are_paired(monkeypatch):
    """A gain counts at one point and above, with its interval above zero."""
    plain = [{"arm": "MHM", "seed": s, "test_accuracy": 0.1 * s} for s in range(4)]
    rows = plain + [
        dict(
            row,
            arm=arm,
            test_accuracy=row["test_accuracy"] + gain + 0.001 * row["seed"],
        )
        for arm, gain in (("MHM + contrastive", 0.02), ("MHM + U-Hop", -0.05))
        for row in plain
    ]
    forecasts = [{"arm": "last value", "seed": "", "test_mse": 1.3}] + [
        {"arm": arm, "seed": seed, "test_mse": 0.4 + 0.01 * (arm == "GSH")}
        for arm in ("GSH", "GSH + contrastive")
        for seed in range(3)
    ]
    monkeypatch.setattr(
        networks, "read", lambda name: forecasts if name == "networks_etth1" else []
    )
    (gains,) = networks.gains().values()  # of the variance explained
    assert gains["MHM"] == pytest.approx(59.0)
    assert gains["MHM + contrastive"].mean == pytest.approx(1.0)
    studies = {"networks_recall": rows, "networks_musk1": []}
    monkeypatch.setattr(networks, "read", lambda name: studies.get(name, []))
    (gains,) = networks.gains().values()
    assert gains["MHM"] == pytest.approx(15.0)
    gain = gains["MHM + contrastive"]
    assert gain.mean == pytest.approx(2.15) and 0 < gain.half < 0.3 and gain.counts
    assert not gains["MHM + U-Hop"].counts
    assert "| MHM + contrastive | +2.2 ± 0.2 |" in networks.table()
    assert "undecided: not measured on musk1, musk2, " in networks.verdict()
    second = [
        dict(row, test_auc=row["test_accuracy"], fold=row["seed"] + 1) for row in rows
    ]
    studies["networks_musk1"] = second
    assert "on two tasks or more: MHM + contrastive (" in networks.verdict()
    for row in second:
        row["test_auc"] = 0.1 * row["seed"]  # no arm differs
    for study, (_, score) in networks.SCORES.items():
        if study not in studies:
            studies[study] = [dict(row, **{score: 0.5}) for row in rows]
    verdict = networks.verdict()
    assert verdict.startswith("Stage I is for retrieval, not for layers")
    assert "MHM + contrastive on associative recall" in verdict
    assert "intervals" not in verdict
    for study, scale in (("patches", 1.0), ("networks_ucsb", -1.0)):
        score = networks.SCORES[study][1]
        for row in studies[study]:  # no gain on average, and a wide interval
            if row["arm"] == "MHM + contrastive":
                row[score] = 0.5 + scale * 0.02 * (-1) ** row["seed"]
    left_open = "For 1 of 5 arms the intervals do not rule it out."
    assert networks.verdict().endswith(left_open)
