"""The reference protocol against numbers measured with the authors' own code."""

import csv
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from uhop_jax import experiments
from uhop_jax.experiments.protocols import falling_rates

ROOT = Path(__file__).parent.parent
COMPARE = runpy.run_path(str(ROOT / "scripts" / "compare_reference.py"))["compare"]

FEW = ("MHM", "DAM 10", "l2, released sign", "U-Hop", "U-Hop max")


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


def test_the_official_numbers_are_whole():
    with (ROOT / "tests" / "official_numbers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1560
    numbers = {(r["data"], r["memories"], r["method"], r["setting"]): r for r in rows}
    row = numbers["mnist", "100", "U-Hop, rate 1", "N=500"]
    assert (row["table"], float(row["mean"])) == ("constant rate 1", 0.0898)


def test_the_released_rates_add_up():
    rates = falling_rates(50)
    np.testing.assert_allclose(rates[:5], [1, 1, 2**-0.5, 6**-0.5, 24**-0.5])
    assert abs(rates.sum() - 3.469) < 1e-3


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("capacity", {"data.name": "mnist", "memories": (50,), "runs": 10}),
        pytest.param(
            "capacity",
            {"data.name": "cifar10", "memories": (20,), "runs": 3, "methods": FEW},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "noise",
            {
                "data.name": "mnist",
                "runs": 6,
                "methods": FEW,
                "corruption.levels.noise": (0.3,),
                "corruption.levels.norm_noise": (1.0,),
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["capacity-mnist", "capacity-cifar10", "noise-mnist"],
)
def test_every_row_is_within_its_spread(tmp_path, prepared, variant, changes):
    get_config = runpy.run_path(str(ROOT / "configs" / "retrieval.py"))["get_config"]
    config = get_config(variant)
    config.update_from_flattened_dict(changes)
    config.data.dir, config.images = str(prepared), 0
    config.protocol, config.stage_one.steps = "reference", (1, 10, 100)
    experiments.run(config.lock(), tmp_path)
    rows = COMPARE(tmp_path / "results.csv")
    methods = {about[4] for _, about, *_ in rows}
    assert set(FEW) <= methods
    for table, about, official, measured, z in rows:
        assert abs(z) < 4, (table, about, official, measured)
    assert np.mean([abs(row[-1]) < 2 for row in rows]) > 0.8
