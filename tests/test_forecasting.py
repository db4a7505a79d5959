"""`train.py` on series: files, studies that go on, exports, and wrong input."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import config_module, config_of
from flax import nnx
from PIL import Image
from test_train_script import assert_same_run, records, script

from uhop_jax import data, paper
from uhop_jax.models import baselines
from uhop_jax.training import ARMS, Trainer, best_state, train_and_evaluate
from uhop_jax.training.forecasting import Forecasting

TINY = {
    "horizon": (4,),
    "window": 12,
    "arms": ("GSH + U-Hop",),
    "model.segment": 4,
    "model.size": 8,
    "model.mlp_size": 8,
    "model.num_heads": 2,
    "model.pooled": 2,
    "train.epochs": 2,
    "train.batch_size": 8,
    "stage_one.batch_size": 8,
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax and Flax themselves mix dtypes under 64-bit."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def write(path, rows=100, change=lambda lines: None):
    """Two series, hourly: a wave around 50, and its shifted sum with a trend."""
    t = np.arange(rows)
    stamps = np.datetime64("2024-02-27T00", "h") + t
    load, heat = 50 + 9 * np.sin(t / 4), 3 + np.cos(t / 4) + t / 100
    lines = ["date,load (MW),heat (C)"]
    for stamp, a, b in zip(stamps, load, heat, strict=True):
        lines.append(f"{str(stamp).replace('T', ' ')}:00,{a:.4f},{b:.4f}")
    change(lines)
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny(path, **changes):
    config = config_of("time_series", "csv")
    config.update_from_flattened_dict(TINY | {"data.name": str(path)} | changes)
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is over."""
    directory = tmp_path_factory.mktemp("forecasting")
    path = write(directory / "mine.csv")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        train_and_evaluate(tiny(path), directory / "run")
    return path, directory / "run"


def test_a_run_writes_its_files(finished, capsys):
    path, run = finished
    names = {"checkpoints", "config.json", "curves.png", "metrics.csv", "results.csv"}
    names |= {"forecasts.png", "predictions.csv", "test.csv", "tensorboard"}
    assert {p.name for p in run.iterdir()} == names
    *cheap, ours = records(run / "results.csv")
    assert [r["arm"] for r in cheap] == ["last value", "window mean", "linear"]
    rows = records(run / "metrics.csv")
    best = min(rows, key=lambda row: float(row["validation_loss"]))
    assert ours["validation_loss"] == best["validation_loss"]
    assert ours["best_epoch"] == best["epoch"]
    assert float(rows[-1]["separation"]) < float(rows[0]["separation"]) < 0
    with Image.open(run / "forecasts.png") as picture:
        assert min(picture.size) > 300
    before = (run / "metrics.csv").read_bytes()
    train_and_evaluate(tiny(path), run)  # is over: only the table
    assert (run / "metrics.csv").read_bytes() == before
    assert "paper's MSE" in capsys.readouterr().out


def test_the_test_error_is_that_of_the_best_checkpoint(finished, capsys):
    """Recomputed by hand: windows, scaling, the exact mean (UC-34)."""
    path, run = finished
    study = Forecasting(tiny(path))
    (cell,) = study.cells()
    trainer = study.trainer(cell)
    _, state = best_state(trainer, study.goal(), run)
    series = data.series(str(path))
    where = data.borders(str(path), 100)
    splits = data.splits(series.values, where, in_len=12, out_len=4)
    test = splits.test
    batch = data.window_batch(jnp.asarray(test.rows), jnp.arange(test.size), 12, 4)
    error = np.asarray(trainer.outputs(state, (batch["inputs"],)) - batch["targets"])
    *_, ours = records(run / "results.csv")
    np.testing.assert_allclose(float(ours["test_mse"]), (error**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(float(ours["test_mae"]), abs(error).mean(), rtol=1e-5)
    train_and_evaluate(tiny(path, eval_only=True), run)
    assert f"mse {(error**2).mean():.3g}" in capsys.readouterr().out

    # The export: what follows the last window, in its units, under the next dates.
    found = records(run / "predictions.csv")
    assert list(found[0]) == ["date", "load (MW)", "heat (C)"]
    assert [r["date"] for r in found][:2] == [
        "2024-03-02 04:00:00",
        "2024-03-02 05:00:00",
    ]
    last = splits.scaler.scaled(series.values[-12:])[None]
    ahead = trainer.outputs(state, (jnp.asarray(last, jnp.float32),))[0]
    wanted = splits.scaler.unscaled(np.asarray(ahead))
    given = [[float(r["load (MW)"]), float(r["heat (C)"])] for r in found]
    np.testing.assert_allclose(given, wanted, rtol=1e-5)
    assert 30 < given[0][0] < 70


def test_predicts_what_follows_another_file(finished, tmp_path, capsys):
    path, run = finished
    kept = (run / "predictions.csv").read_bytes()
    other = write(tmp_path / "new.csv", rows=14)
    train_and_evaluate(tiny(path, predict=str(other)), run)
    assert "4 rows after 2024-02-27 13:00:00" in capsys.readouterr().out
    assert records(run / "predictions.csv")[0]["date"] == "2024-02-27 14:00:00"
    (run / "predictions.csv").write_bytes(kept)
    with pytest.raises(ValueError, match="a window takes 12 rows, .* has 11"):
        short = write(tmp_path / "short.csv", rows=11)
        train_and_evaluate(tiny(path, predict=str(short)), run)
    with pytest.raises(ValueError, match="the model has the columns load .MW., heat"):
        named = write(
            tmp_path / "named.csv", change=lambda x: x.__setitem__(0, "d,a,b")
        )
        train_and_evaluate(tiny(path, predict=str(named)), run)


def test_a_study_goes_on_cell_by_cell(finished, tmp_path, monkeypatch, capsys):
    """Interrupted within its second horizon, it ends as the one that was not."""
    path, whole_run = finished
    changes = {"horizon": (4, 6), "train.checkpoint_seconds": 0.0}
    advance, calls = Trainer.advance, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) > 10:  # 2 epochs in 1, 2, ... steps each for the first horizon
            raise KeyboardInterrupt
        return advance(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "advance", interrupted)
        train_and_evaluate(tiny(path, **changes), tmp_path / "study")
    inner = sorted(p.name for p in (tmp_path / "study").iterdir() if p.is_dir())
    assert inner == [f"mine_csv_horizon_{h}_gsh_with_u_hop_seed_0" for h in (4, 6)]
    first = tmp_path / "study" / inner[0]
    assert_same_run(first, whole_run)
    times = (first / "metrics.csv").stat().st_mtime_ns
    train_and_evaluate(tiny(path, **changes), tmp_path / "study")
    assert (first / "metrics.csv").stat().st_mtime_ns == times
    alone = tiny(path, horizon=(6,))
    train_and_evaluate(alone, tmp_path / "alone")
    assert_same_run(tmp_path / "study" / inner[1], tmp_path / "alone")
    rows = records(tmp_path / "study" / "results.csv")
    trained = [r for r in rows if r["epochs"]]
    assert [r["horizon"] for r in trained] == ["4", "6"]
    assert len(rows) == 2 + 2 * 3
    assert (tmp_path / "study" / "figure.png").exists()
    assert "mine.csv, 6, GSH + U-Hop" in capsys.readouterr().out


def test_numbers_of_the_paper_are_beside_ours():
    config = config_of("time_series", "table")
    study = Forecasting(config)
    assert len(study.cells()) == 3 * 4 * 4 * 3
    assert len({cell.title for cell in study.cells()}) == 144
    cell = study.cells()[0]._replace(data="wth", horizon=720)
    record = study._record(cell._replace(arm="GSH + U-Hop"))
    assert (record["paper_mse"], record["paper_mae"]) == (0.603, 0.589)
    assert study._record(cell._replace(arm="GSH"))["paper_mse"] == 0.601
    assert study._record(cell._replace(arm="linear"))["paper_mse"] == ""
    pairs = [(row.plain[0], row.uhop[0]) for row in paper.FORECASTS.values()]
    signs = [np.sign(plain - uhop) for plain, uhop in pairs]
    assert [signs.count(s) for s in (1, 0, -1)] == [7, 1, 4]  # wins, ties, losses


ARMS_TO_BUILD = ("MHM", "Sparse MHM + U-Hop", "entmax", "GSH, matched size")


@pytest.mark.parametrize("arm", ARMS_TO_BUILD)
def test_arms(finished, arm):
    path, _ = finished
    study = Forecasting(tiny(path, arms=(arm,)))
    (cell,) = study.cells()
    trainer = study.trainer(cell)
    assert trainer.has_kernels == ("U-Hop" in arm)
    layer = trainer.task.build(nnx.Rngs(0)).encoder[0].time
    assert (
        type(layer.separation)
        .__name__.lower()
        .startswith(
            {"MHM": "softmax", "Sparse MHM + U-Hop": "sparsemax"}.get(arm, "entmax")
        )
    )


@pytest.mark.parametrize("variant", config_module("time_series").VARIANTS)
def test_every_variant_has_known_arms(variant):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert set(config_of("time_series", variant).arms) <= set(ARMS)


def test_learning_rate_is_halved_after_the_epochs_of_the_schedule(finished):
    study = Forecasting(tiny(finished[0]))
    optimizer = study.optimizer(10)
    state = optimizer.init(jnp.ones(1))
    rates = []
    for _ in range(45):
        moves, state = optimizer.update(jnp.full(1, 1e3), state)
        rates.append(float(-moves[0]))
    np.testing.assert_allclose(
        [rates[i] / rates[0] for i in (19, 21, 39, 41)], [1, 0.5, 0.5, 0.25], rtol=1e-4
    )


def test_baselines_see_the_same_windows(finished):
    path, run = finished
    series = data.series(str(path))
    where = data.borders(str(path), 100)
    splits = data.splits(series.values, where, in_len=12, out_len=4)
    wanted = baselines.evaluate(
        baselines.baselines(splits.train, period=series.period), splits.test
    )
    for row, expected in zip(records(run / "results.csv"), wanted, strict=False):
        assert (row["arm"], float(row["test_mse"])) == (
            expected["method"],
            pytest.approx(expected["mse"]),
        )


WRONG = [
    ({"data.name": ""}, "data.name, horizon and arms must each name at least one"),
    ({"data.name": "etth2"}, "etth2"),
    ({"window": 80}, "a window takes 84 rows"),
    ({"horizon": (0,)}, "horizon must be at least 1, got 0"),
    ({"arms": ("MHM + U-Hop, reference",)}, "is of the authors' image code"),
    ({"train.loss": "rmse"}, "unknown train.loss 'rmse'; choose one of mae, mse"),
    ({"train.schedule": "cosine"}, "unknown train.schedule 'cosine'"),
    ({"train.clip": 0.0}, "train.clip must be positive"),
    ({"model.preset": "mine"}, "unknown preset 'mine'"),
    ({"data.split": (0.5, 0.5)}, "a split is three fractions"),
    ({"eval_only": True}, "there is no checkpoint in .*; train first"),
]


@pytest.mark.parametrize("changes, message", WRONG)
def test_wrong_configs_say_why_and_write_nothing(finished, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(tiny(finished[0], **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_bad_file_ends_with_2_and_one_sentence(tmp_path):
    """UC-35 at the command line; `test_series.py` has every kind of bad file."""

    def spoil(lines):
        lines[7] = lines[7].rsplit(",", 1)[0] + ","

    path = write(tmp_path / "bad.csv", change=spoil)
    flags = ["--config=configs/time_series.py:csv", f"--config.data.name={path}"]
    code, _, err = script(*flags, f"--workdir={tmp_path / 'run'}")
    assert code == 2 and len(err.strip().splitlines()) == 1
    assert "line 8" in err and "heat (C)" in err
    assert not (tmp_path / "run").exists()
