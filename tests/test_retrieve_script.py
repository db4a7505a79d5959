"""`retrieve.py` and its parts: configs, records, the demo, the command line."""

import csv
import json
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from uhop_jax import data, experiments
from uhop_jax.experiments import demo, records

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Scripts run in float32 and with the default promotion."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


def get_config(**changes):
    config = runpy.run_path(str(ROOT / "configs" / "retrieval.py"))["get_config"]()
    config.memories, config.sets, config.tuning_sets, config.images = 12, 2, 1, 2
    config.update_from_flattened_dict(changes)
    return config.lock()


def test_digits_are_real_and_complete():
    images = data.images("digits")
    assert images.pixels.shape == (1797, 8, 8, 1)
    assert images.pixels.dtype == np.float32
    assert images.pixels.min() == 0 and images.pixels.max() == 1
    assert images.patterns.shape == (1797, 64)
    assert np.bincount(images.labels).tolist() == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    ]


def test_demo_writes_what_a_person_can_use(tmp_path, capsys):
    config = get_config()
    experiments.run(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["memories"] == 12
    with (tmp_path / "run" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    methods = [m.name for m in demo.METHODS] + [demo.CALIBRATED, demo.LIMIT]
    assert [row["method"] for row in rows] == [m for m in methods for _ in range(2)]
    errors = {m: [float(r["error"]) for r in rows if r["method"] == m] for m in methods}
    # With a start at sqrt(d) I the untrained kernel is the dot product.
    np.testing.assert_allclose(errors["U-Hop untrained"], errors["MHM"], rtol=0.01)
    for name, found in errors.items():
        assert np.mean(errors[demo.LIMIT]) <= np.mean(found) + 1e-6, name
    assert np.mean(errors[demo.CALIBRATED]) <= np.mean(errors["MHM"])
    assert (tmp_path / "run" / "retrieved.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert all(m in out for m in methods) and "calibrated, first set" in out

    first = (tmp_path / "run" / "results.csv").read_text()
    experiments.run(config, tmp_path / "run")
    assert (tmp_path / "run" / "results.csv").read_text() == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memories": 1}, "memories must be at least 2, got 1"),
        ({"memories": 5000}, "memories must be at most 898, got 5000"),
        ({"data": "nothing"}, "unknown data set 'nothing'; choose one of digits"),
        ({"corruption.kind": "blur"}, "choose one of mask, noise"),
        ({"corruption.fraction": 1.5}, "in \\[0, 1\\], got 1.5"),
        ({"stage_one.loss": "large"}, "choose one of average, maximum, deep"),
        ({"stage_one.t": -1.0}, "stage_one.t must be positive and finite, got -1.0"),
        ({"stage_one.rate": 0.0}, "stage_one.rate must be positive"),
        ({"stage_one.steps": (3, 0)}, "stage_one.steps must be at least 1, got 0"),
        ({"stage_one.start": "warm"}, "choose one of gaussian, identity"),
        ({"variant": "grid"}, "unknown variant 'grid'; choose one of demo"),
    ],
)
def test_bad_config_is_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        experiments.run(get_config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_workdir_of_another_config_is_left_alone(tmp_path):
    records.claim(get_config(), tmp_path)
    kept = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match="config.stage_one.t=2.0, this one has 3.0"):
        records.claim(get_config(**{"stage_one.t": 3.0}), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == kept
    records.claim(get_config(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable config"):
        records.claim(get_config(), tmp_path)


def test_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file, it must be a directory"):
        records.claim(get_config(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_interrupted_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "results.csv"
    records.write_csv(path, [{"a": 1}])

    def fail(temporary):
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records.write_whole(path, fail)
    assert path.read_text() == "a\n1\n"


def test_table_shows_means_and_deviations():
    rows = [
        {"name": "one", "x": 1.0, "y": ""},
        {"name": "one", "x": 3.0, "y": ""},
        {"name": "two", "x": 2.0, "y": 0.5},
    ]
    lines = records.table(rows, "name", {"x ±": "x", "y": "y"}).splitlines()
    assert lines[2].split() == ["one", "2", "±", "1.4", "-"]
    assert lines[3].split() == ["two", "2", "0.5"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--slott=3", "Unknown command line flag 'slott'"),
        ("--config.memorys=3", 'Did you mean "memories"'),
        ("--config=configs/retrieval.py:other", "choose one of demo"),
        ("--config=missing.py", "missing.py"),
        ("--config.seed=many", "many"),
        ("stray", "unexpected argument 'stray'"),
        ("--config.memories=1", "memories must be at least 2, got 1"),
    ],
)
def test_wrong_command_lines_exit_with_2_and_one_sentence(tmp_path, flag, message):
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "retrieve.py"),
            f"--workdir={tmp_path / 'r'}",
            flag,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "r").exists()
