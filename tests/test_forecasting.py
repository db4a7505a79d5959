"""`train.py` on series: files, interrupted studies, exports, and wrong input."""

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import config_module, config_of
from flax import nnx
from PIL import Image
from test_train_script import assert_same_run, records, script, state_of

from uhop_jax import data, paper, plotting
from uhop_jax.models import baselines
from uhop_jax.training import (
    ARMS,
    Trainer,
    best_state,
    forecast_report,
    train_and_evaluate,
)
from uhop_jax.training.forecasting import Forecasting

TINY = {
    "horizon": (4,),
    "window": (12,),
    "arms": ("MHM + U-Hop",),
    "model.segment": 4,
    "model.scales": 1,
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


def write(path, rows=100, change=lambda lines: None, step=np.timedelta64(1, "h")):
    """Two series, hourly: a wave around 50, and its shifted sum with a trend."""
    t = np.arange(rows)
    stamps = np.datetime64("2024-02-27T00:00") + t * step
    load, heat = 50 + 9 * np.sin(t / 4), 3 + np.cos(t / 4) + t / 100
    lines = ["date,load (MW),heat (C)"]
    for stamp, a, b in zip(stamps, load, heat, strict=True):
        lines.append(f"{str(stamp).replace('T', ' ')},{a:.4f},{b:.4f}")
    change(lines)
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny(path, **changes):
    config = config_of("time_series", "csv")
    config.update_from_flattened_dict(TINY | {"data.name": str(path)} | changes)
    return config


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "mine.csv")


def test_a_run_from_end_to_end(path, tmp_path, capsys, monkeypatch, untyped):
    run, titles = tmp_path / "run", []
    panels = plotting.panels

    def recorded(path, parts, *, title):
        titles.append(title)
        panels(path, parts, title=title)

    with monkeypatch.context() as patch:
        patch.setattr(plotting, "panels", recorded)
        train_and_evaluate(tiny(path), run)
    about = "mine.csv, horizon 4, window 12, MHM + U-Hop, seed 0"
    assert titles == [about]
    assert "paper's MSE" in capsys.readouterr().out
    names = {"checkpoints", "config.json", "curves.png", "metrics.csv", "results.csv"}
    names |= {"forecasts.png", "predictions.csv", "run.json", "test.csv", "tensorboard"}
    assert {p.name for p in run.glob("[!.]*")} == names
    with Image.open(run / "forecasts.png") as picture:
        assert min(picture.size) > 300
    *cheap, trained = records(run / "results.csv")
    rows = records(run / "metrics.csv")
    best = min(rows, key=lambda row: float(row["validation_loss"]))
    assert trained["validation_loss"] == best["validation_loss"]
    assert trained["best_epoch"] == best["epoch"]
    for name in ("separation", "separation_gap"):
        assert float(rows[-1][name]) < float(rows[0][name])
    assert float(rows[0]["separation"]) < 0 < float(rows[-1]["separation_gap"])

    # Baselines on the same windows.
    series = data.series(str(path))
    where = data.borders(str(path), 100)
    splits = data.splits(series.values, where, in_len=12, out_len=4)
    forecasts = baselines.baselines(splits.train, period=series.period)
    for row, scores in zip(
        cheap, baselines.evaluate(forecasts, splits.test), strict=True
    ):
        assert row["arm"] == scores["method"]
        assert float(row["test_mse"]) == pytest.approx(scores["mse"])
        assert 0 < float(row["validation_loss"]) != float(row["test_mae"])

    # The error of the best checkpoint, by hand: windows, scaling, exact mean (UC-34).
    study = Forecasting(tiny(path))
    (cell,) = study.cells()
    trainer = study.trainer(cell)
    _, state = best_state(trainer, study.goal(), run)
    test = splits.test
    batch = data.window_batch(jnp.asarray(test.rows), jnp.arange(test.size), 12, 4)
    last = splits.scaler.scaled(series.values[-12:])[None].astype(np.float32)
    inputs = jnp.concatenate([batch["inputs"], last])
    forecast = np.asarray(trainer.outputs(state, (inputs,)))
    error = forecast[:-1] - np.asarray(batch["targets"])
    np.testing.assert_allclose(float(trained["test_mse"]), (error**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(float(trained["test_mae"]), abs(error).mean(), rtol=1e-5)

    # The export: the forecast after the last window, in the units of the file.
    predictions = records(run / "predictions.csv")
    assert list(predictions[0]) == ["date", "load (MW)", "heat (C)"]
    dates = [row["date"] for row in predictions]
    assert dates[:2] == ["2024-03-02 04:00:00", "2024-03-02 05:00:00"]
    given = [[float(r["load (MW)"]), float(r["heat (C)"])] for r in predictions]
    expected = splits.scaler.unscaled(forecast[-1])
    np.testing.assert_allclose(given, expected, rtol=1e-5)
    assert 30 < given[0][0] < 70

    # The same as a function of windows, in the units of the file.
    train_and_evaluate(tiny(path, export=True), run)
    model = jax.export.deserialize(bytearray((run / "model.jax_export").read_bytes()))
    windows = np.stack([series.values[-12:], series.values[-24:-12]])
    forecasts = np.asarray(model.call(windows.astype(np.float32)))
    assert forecasts.shape == (2, 4, 2)
    np.testing.assert_allclose(forecasts[0], given, rtol=1e-4)
    assert abs(forecasts[1] - forecasts[0]).min() > 0

    # The scaler belongs to the training data: other data are refused.
    grown, given = tmp_path / "grown.csv", {"predict": str(path)}
    write(grown, rows=110)
    with pytest.raises(ValueError, match="config.cell.data=.*mine.csv, this one has"):
        train_and_evaluate(tiny(grown, **given), run)
    original = path.read_bytes()
    path.write_bytes(grown.read_bytes())
    for changes in (given, {"eval_only": True}, {}):
        with pytest.raises(ValueError, match=r"mine.csv: it had shape \(100, 2\) and"):
            train_and_evaluate(tiny(path, **changes), run)
    path.write_bytes(original)
    record = json.loads((run / "run.json").read_text())["read"][f"scaler of {path}"]
    np.testing.assert_array_equal(record["mean"], splits.scaler.mean)

    # The forecast after another file.
    other = write(tmp_path / "new.csv", rows=14)
    study.config.predict = str(other)
    message = study.predict(cell, trainer, state, run)
    assert message.startswith("4 rows after 2024-02-27 13:00:00 written to")
    assert records(run / "predictions.csv")[0]["date"] == "2024-02-27 14:00:00"
    study.config.predict = str(write(other, rows=11))
    with pytest.raises(ValueError, match="a window takes 12 rows, .* has 11"):
        study.predict(cell, trainer, state, run)
    for step, message in ((24, "1 day"), (0.25, "15 minutes")):  # C2-19
        minutes = np.timedelta64(int(60 * step), "m")
        study.config.predict = str(write(other, rows=20, step=minutes))
        with pytest.raises(ValueError, match=f"of 1 hour, .* have steps of {message}"):
            study.predict(cell, trainer, state, run)
    other.write_text(re.sub(r":00,", ":00+02:00,", write(other, rows=14).read_text()))
    study.predict(cell, trainer, state, run)
    row = records(run / "predictions.csv")[0]  # in the file's own time
    assert row["date"] == "2024-02-27 14:00:00+02:00"
    other.write_text(other.read_text().replace("load (MW)", "load"))
    with pytest.raises(ValueError, match="the model has the columns load .MW., heat"):
        study.predict(cell, trainer, state, run)


def test_a_forecast_continues_by_the_calendar_of_the_model(tmp_path):
    """Five weekdays look like days, but a model of weekdays continues with weekdays."""
    days = np.busday_offset("2024-01-01", np.arange(60))

    def read(dates):
        lines = ["date,a", *(f"{d},{i}" for i, d in enumerate(dates))]
        (tmp_path / "days.csv").write_text("\n".join(lines))
        return data.read_series(tmp_path / "days.csv")

    learned, week = read(days), read(days[:5])
    assert (learned.steps, week.steps) == ("weekdays", "1 day")
    assert week.goes_on_like(learned) and not learned.goes_on_like(week)
    months = read(np.arange("2020-01", "2022-01", dtype="datetime64[M]"))
    short = read(np.arange("2021-02", "2021-05", dtype="datetime64[M]"))
    assert months.steps == "months" and short.goes_on_like(months)
    assert not short.goes_on_like(learned)


@pytest.mark.slow  # two runs, and four compilations of evaluations
def test_external_memories(path, tmp_path, capsys):
    """Memories on the best checkpoint of a finished run; frozen parameters stay."""
    changes = {"train.epochs": 1, "bank": 5}
    run, tuned = tmp_path / "run", tmp_path / "run" / "tuned_memory"
    train_and_evaluate(tiny(path, external_memory="tune", **changes), run)
    assert "mine.csv, 4, MHM + U-Hop, tune memory" in capsys.readouterr().out
    *_, plain, tune = records(run / "results.csv")
    assert (tune["memory"], tune["bank"]) == ("tune", "5")
    assert tune["test_mse"] != plain["test_mse"]
    assert float(tune["separation"]) < 0 < float(tune["separation_gap"])
    (_, before), (_, after) = state_of(run), state_of(tuned)
    jax.tree.map(
        np.testing.assert_array_equal, before["rest"], after["rest"].pop("backbone")
    )
    frozen = after["kernels"].pop("backbone")
    jax.tree.map(np.testing.assert_array_equal, before["kernels"], frozen)
    assert float(after["rest"]["gate"][0]) != 0
    (phi,) = jax.tree.leaves(after["kernels"])
    assert phi.shape == (1, 12, 12) and (phi != np.eye(12)).any()
    stored = after["rest"]["windows"][0]
    splits = data.splits(
        data.series(str(path)).values, data.borders("", 100), in_len=12, out_len=4
    )
    np.testing.assert_array_equal(stored[:, 0], splits.train.rows[:12].T)
    np.testing.assert_array_equal(stored[:, -1], splits.train.rows[-16:-4].T)

    # Another memory on the finished run.
    times = [(d / "metrics.csv").stat().st_mtime_ns for d in (run, tuned)]
    train_and_evaluate(tiny(path, external_memory="plug", **changes), run)
    *_, plain, plug = records(run / "results.csv")
    names = ("validation_loss", "test_mse", "test_mae")
    assert all(float(plug[name]) != float(plain[name]) > 0 for name in names)
    assert [(d / "metrics.csv").stat().st_mtime_ns for d in (run, tuned)] == times
    for name in ("test.csv", "predictions.csv"):
        assert (run / name).read_text() != (run / f"plug_{name}").read_text()
    train_and_evaluate(tiny(path, external_memory="tune", **changes), run)
    assert records(run / "results.csv")[-1] == tune
    assert (tuned / "metrics.csv").stat().st_mtime_ns == times[1]
    with pytest.raises(ValueError, match="config.cell.bank=5, this one has 6"):
        train_and_evaluate(
            tiny(path, external_memory="tune", **changes | {"bank": 6}), run
        )


@pytest.mark.slow  # four runs; `test_train_script.py` interrupts the same loop
@pytest.mark.parametrize("arm", ["MHM", "GSH"])
def test_a_study_continues_cell_by_cell(path, tmp_path, monkeypatch, capsys, arm):
    """A study interrupted in its second horizon ends like an uninterrupted study."""
    changes = {"arms": (arm,), "train.checkpoint_seconds": 0.0}
    two = tiny(path, horizon=(4, 6), **changes)
    steps = []

    def interrupted(self):
        def step(*arguments):
            steps.append(self.task.train)
            if len([1 for x in steps if x is self.task.train]) == 3 and len(steps) > 6:
                raise KeyboardInterrupt
            return uninterrupted.fget(self)(*arguments)

        return step

    uninterrupted = Trainer.advance
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "advance", property(interrupted))
        train_and_evaluate(two, tmp_path / "study")
    inner = sorted(p for p in (tmp_path / "study").iterdir() if p.is_dir())
    for horizon, directory in zip((4, 6), inner, strict=True):
        assert f"horizon_{horizon}" in directory.name
    assert not (inner[1] / "test.csv").exists()
    times = (inner[0] / "metrics.csv").stat().st_mtime_ns
    train_and_evaluate(two, tmp_path / "study")
    assert (inner[0] / "metrics.csv").stat().st_mtime_ns == times
    train_and_evaluate(tiny(path, horizon=(6,), **changes), tmp_path / "alone")
    assert_same_run(inner[1], tmp_path / "alone")
    rows = records(tmp_path / "study" / "results.csv")
    assert [r["horizon"] for r in rows if r["epochs"]] == ["4", "6"]
    assert len(rows) == 2 + 2 * 3
    assert (tmp_path / "study" / "figure.png").exists()
    assert f"mine.csv, 6, {arm}" in capsys.readouterr().out


def test_seeds_share_the_programs_of_a_place(path):
    study = Forecasting(tiny(path, seeds=(0, 1), horizon=(4, 6)))
    one, two, longer, *_ = map(study.trainer, study.cells())
    assert one.programs is two.programs is not longer.programs
    assert (one.seeds, two.seeds) == ((0,), (1,))
    assert (one.keys != two.keys).all()


NAMES = [
    ("x/data.csv", "y/data.csv"),
    ("data-1.csv", "data_1.csv"),
    ("A.csv", "a.csv"),
    (f"{'x' * 300}.csv", f"{'x' * 299}y.csv"),
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0][:10])
def test_files_of_similar_names_have_separate_runs(tmp_path, names):
    study = Forecasting(tiny(",".join(names), seeds=(0, 1)), tmp_path)
    places = [str(study.directory(cell)).lower() for cell in study.cells()]
    assert len(set(places)) == len(places) == 4
    assert all(len(place.rpartition("/")[2]) < 150 for place in places)
    rows = [
        forecast_report.record(cell)
        | {"parameters": 9, "validation_loss": 1.0}
        | {"test_mse": 1.0, "test_mae": 1.0}
        for cell in study.cells()
    ]
    lines = study.report(rows).splitlines()[2:]
    assert len({line.split("  ")[0] for line in lines}) == 2
    with pytest.raises(ValueError, match="data.name must name each once, got"):
        Forecasting(tiny(f"{names[0]},{names[0]}")).cells()


def test_each_file_gets_its_own_score(tmp_path, monkeypatch):
    """Two files of one name: each is trained, and judged by its own run."""
    trained = []

    def train(trainer, goal, directory, *, options):
        trained.append(directory)
        return [{"rows": len(trainer.task.train.arrays["rows"])}]

    def summary(self, cell, trainer, history, directory):
        return [{"data": cell.data, **history[0]}]

    monkeypatch.setattr("uhop_jax.training.study.train", train)
    monkeypatch.setattr(Forecasting, "summary", summary)
    for name in ("figures", "report"):
        monkeypatch.setattr(Forecasting, name, lambda *_: {})
    monkeypatch.setattr(Forecasting, "untrained", lambda self: [])
    for name, rows in (("x", 100), ("y", 140)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "data.csv", rows=rows)
    names = [str(tmp_path / name / "data.csv") for name in "xy"]
    train_and_evaluate(tiny(",".join(names), arms=("MHM",)), tmp_path / "run")
    assert len(set(trained)) == 2
    scores = records(tmp_path / "run" / "results.csv")
    assert [(r["data"], r["rows"]) for r in scores] == list(
        zip(names, ["70", "98"], strict=True)
    )


def test_the_table_shows_the_numbers_of_the_paper():
    config = config_of("time_series", "table")
    study = Forecasting(config)
    assert len(study.cells()) == 3 * 4 * 4 * 3
    assert len({cell.title for cell in study.cells()}) == 144
    cell = study.cells()[0]._replace(data="wth", horizon=720)
    record = forecast_report.record(cell._replace(arm="GSH + U-Hop"))
    assert (record["paper_mse"], record["paper_mae"]) == (0.603, 0.589)
    assert forecast_report.record(cell._replace(arm="GSH"))["paper_mse"] == 0.601
    assert forecast_report.record(cell._replace(arm="linear"))["paper_mse"] == ""
    pairs = [(row.plain[0], row.uhop[0]) for row in paper.FORECASTS.values()]
    signs = [np.sign(plain - uhop) for plain, uhop in pairs]
    assert [signs.count(s) for s in (1, 0, -1)] == [7, 1, 4]  # wins, ties, losses


def test_several_windows(path):
    """Each window is a run; the table marks the choice of validation."""
    study = Forecasting(tiny(path, window=(8, 12), horizon=(4, 6), seeds=(0, 1)))
    cells = study.cells()
    assert len({cell.title for cell in cells}) == 8
    assert all(study._loaded(*c[:3])[1].test.in_len == c.window for c in cells)
    sizes = {(c.horizon, study._loaded(*c[:3])[1].test.size) for c in cells}
    assert len(sizes) == 2  # the number of targets depends on the horizon alone
    rows = []
    for cell in cells:  # validation chooses the window with the higher test error
        chosen = cell.window == (8 if cell.horizon == 4 else 12)
        row = forecast_report.record(cell) | {"parameters": 9, "test_mae": 1.0}
        row |= {
            "validation_loss": 1 - 0.1 * chosen + cell.seed,
            "test_mse": 2.0 + chosen,
        }
        rows.append(row)
    head, _, *lines, note = study.report(rows).splitlines()
    assert head.startswith("data, horizon, window, arm")
    assert [line.split("  ")[0] for line in lines] == [
        "mine.csv, 4, 8, MHM + U-Hop *",
        "mine.csv, 4, 12, MHM + U-Hop",
        "mine.csv, 6, 8, MHM + U-Hop",
        "mine.csv, 6, 12, MHM + U-Hop *",
    ]
    assert note == "* the window of least validation loss"
    panels = study.figures({}, rows)["figure.png"]
    assert [p.title for p in panels[::2]] == [
        "mine.csv, horizon 4",
        "mine.csv, horizon 6",
    ]
    assert panels[0].series["MHM + U-Hop"].x == [8, 12]
    assert panels[0].series["MHM + U-Hop"].mean == [3, 2]


@pytest.mark.parametrize(
    "arm, separation, kernel",
    [
        ("Sparse MHM + U-Hop", "Sparsemax", True),
        pytest.param("MHM", "Softmax", False, marks=pytest.mark.slow),
        pytest.param(
            "GSH, matched size", "LearnedAlpha", False, marks=pytest.mark.slow
        ),
    ],
)
def test_arms(path, arm, separation, kernel):
    study = Forecasting(tiny(path, arms=(arm,)))
    (cell,) = study.cells()
    task = study.task(cell)
    layer = task.build(nnx.Rngs(0)).encoder[0].time
    assert type(layer.association.separation).__name__ == separation
    assert (layer.kernel is not None) == kernel
    assert not task.validation.by_batch


def test_the_release_judges_an_epoch_by_its_batches(path):
    study = Forecasting(tiny(path, **{"model.preset": "released"}))
    task = study.task(study.cells()[0])
    assert task.validation.by_batch and not task.test.by_batch


@pytest.mark.parametrize("variant", config_module("time_series").VARIANTS)
def test_every_variant_has_known_arms(variant):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert set(config_of("time_series", variant).arms) <= set(ARMS)


def test_learning_rate_is_halved_after_the_epochs_of_the_schedule(path):
    study = Forecasting(tiny(path))
    optimizer = study.optimizer(10)
    state = optimizer.init(jnp.ones(1))
    rates = []
    for _ in range(45):
        moves, state = optimizer.update(jnp.full(1, 1e3), state)
        rates.append(float(-moves[0]))
    np.testing.assert_allclose(
        [rates[i] / rates[0] for i in (19, 21, 39, 41)], [1, 0.5, 0.5, 0.25], rtol=1e-4
    )


WRONG = [
    ({"data.name": ""}, "data.name must name a data set or a csv file, .* got ''"),
    ({"horizon": ()}, r"horizon must name at least one, got \(\)"),
    ({"data.name": "etth2"}, "etth2"),
    ({"window": (12, 80)}, "a window takes 84 rows"),
    ({"horizon": (0,)}, "horizon must be at least 1, got 0"),
    ({"window": ("x",)}, "window must hold values of type int, got 'x'"),
    ({"window": (12, 12)}, "window must name each once, got 12 twice"),
    ({"seeds": (0, 0)}, "seeds must name each once, got 0 twice"),
    ({"seeds": (2**32,)}, "seeds must be at most 4294967295, got 4294967296"),
    ({"arms": ("MHM + U-Hop, reference",)}, "is of the authors' image code"),
    ({"external_memory": "own"}, "unknown external_memory 'own'; choose one of plug"),
    ({"external_memory": "plug", "bank": 99}, "bank must be at most 55, got 99"),
    ({"external_memory": "tune", "bank": 0}, "bank must be at least 1, got 0"),
    ({"train.loss": "rmse"}, "unknown train.loss 'rmse'; choose one of mae, mse"),
    ({"train.schedule": "cosine"}, "unknown train.schedule 'cosine'"),
    ({"train.clip": 0.0}, "train.clip must be positive"),
    ({"model.preset": "mine"}, "unknown preset 'mine'"),
    ({"data.split": (0.5, 0.5)}, "a split is three fractions"),
    ({"data.split": ("a", "b", "c")}, "a split is three fractions"),
    ({"model.dtype": "foo"}, "unknown model.dtype 'foo'; choose one of float32"),
]


@pytest.mark.parametrize("changes, message", WRONG)
def test_wrong_configs_are_refused_and_write_nothing(path, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(tiny(path, **changes), tmp_path / "run")
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
