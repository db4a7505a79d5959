"""`train.py` from end to end: files, interruption, damage, and wrong input."""

import csv
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
import weakref

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import FAST, ROOT, config_module, config_of, run_script, slow_where
from PIL import Image

from uhop_jax.data import labelled_images
from uhop_jax.training import Trainer, study, train_and_evaluate

TINY = {
    "sizes": (40,),
    "patches": (4,),
    "data.name": "digits",
    "data.test_limit": 20,
    "model.size": 8,
    "model.depth": 1,
    "model.num_heads": 2,
    "model.mlp_size": 8,
    "train.epochs": 2,
    "train.batch_size": 10,
    "stage_one.batch_size": 10,
}
FLAGS = [f"--config.{name}={value}" for name, value in TINY.items()]


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax and Flax themselves mix dtypes under 64-bit."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def tiny(variant="digits", **changes):
    config = config_of("vision", variant)
    config.update_from_flattened_dict(TINY | changes)
    return config


def records(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def script(*flags, devices=1, wait=True, **variables):
    environment = os.environ | variables
    environment["XLA_FLAGS"] = (
        f"{FAST} --xla_force_host_platform_device_count={devices}"
    )
    command = [sys.executable, str(ROOT / "train.py"), *map(str, flags)]
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if not wait:
        return process
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run."""
    workdir = tmp_path_factory.mktemp("finished")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        train_and_evaluate(tiny(seeds=(0, 1)), workdir)
    return workdir


def test_a_run_writes_its_files(finished):
    names = {path.name for path in finished.glob("[!.]*")}
    assert names == {
        "checkpoints",
        "config.json",
        "curves.png",
        "metrics.csv",
        "results.csv",
        "run.json",
        "tensorboard",
    }
    rows = records(finished / "metrics.csv")
    assert [(r["epoch"], r["seed"]) for r in rows] == [
        ("1", "0"),
        ("1", "1"),
        ("2", "0"),
        ("2", "1"),
    ]
    assert [r["step"] for r in rows] == ["4", "4", "8", "8"]
    for row in rows:  # the bound of the loss, for four patches and the class token
        loss, gap = float(row["separation"]), float(row["separation_gap"])
        assert loss < 0 < gap and gap - loss == pytest.approx(4 * 5 / 4)
    results = records(finished / "results.csv")
    assert [r["arm"] for r in results] == ["MHM + U-Hop"] * 2
    assert results[0]["test_accuracy"] == rows[2]["test_accuracy"]
    config = json.loads((finished / "config.json").read_text())
    assert config["cell"] == {"arm": "MHM + U-Hop", "size": 40, "patch": 4}
    assert {p.name for p in (finished / "checkpoints").iterdir()} >= {"4", "8"}
    (events,) = (finished / "tensorboard").iterdir()
    assert events.read_bytes().count(b"test_accuracy/seed_1") == 2
    record = json.loads((finished / "run.json").read_text())
    assert record["read"]["digits, train split"]["shape"] == [1437, 8, 8, 1]
    with Image.open(finished / "curves.png") as picture:
        assert min(picture.size) > 300


def test_a_finished_run_is_not_repeated(finished, capsys):
    before = (finished / "metrics.csv").read_bytes()
    steps = sorted(p.name for p in (finished / "checkpoints").iterdir())
    train_and_evaluate(tiny(seeds=(0, 1)), finished)
    assert (finished / "metrics.csv").read_bytes() == before
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == steps
    assert "MHM + U-Hop" in capsys.readouterr().out


def test_the_last_checkpoint_is_judged_and_predicts(finished, tmp_path, capsys):
    """The test split chooses no checkpoint: the table has the printed accuracy."""
    train_and_evaluate(tiny(seeds=(0, 1), eval_only=True), finished)
    printed = capsys.readouterr().out
    rows = records(finished / "results.csv")
    mean = np.mean([float(row["test_accuracy"]) for row in rows])
    assert f"accuracy {mean:.3g}" in printed and "20 test examples" in printed
    assert "step 8 (last epoch)" in printed

    images = labelled_images("digits", split="test")
    for number in range(3):
        pixels = (images.raw[number, ..., 0] * (255 // 16)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    train_and_evaluate(tiny(seeds=(0, 1), predict=str(tmp_path)), finished)
    predictions = records(finished / "predictions.csv")
    assert [row["image"] for row in predictions] == ["0.png", "1.png", "2.png"]
    assert all(row["class"] in map(str, range(10)) for row in predictions)
    assert all(0.1 <= float(row["probability"]) <= 1 for row in predictions)
    (finished / "predictions.csv").unlink()
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match="takes images of 8 x 8 with 1 channels"):
        train_and_evaluate(
            tiny(seeds=(0, 1), predict=str(tmp_path / "0.png")), finished
        )


RUN_EXPORT = """
import pathlib, sys
import jax, numpy as np

model = jax.export.deserialize(bytearray(pathlib.Path("model.jax_export").read_bytes()))
np.save("outputs.npy", model.call(np.load("inputs.npy")))
assert not {"uhop_jax", "flax"} & set(sys.modules)
"""


def run_export(directory, inputs):
    """Outputs of `model.jax_export` in a process without this library."""
    np.save(directory / "inputs.npy", inputs)
    subprocess.run([sys.executable, "-c", RUN_EXPORT], cwd=directory, check=True)
    outputs = np.load(directory / "outputs.npy")
    for name in ("inputs.npy", "outputs.npy"):
        (directory / name).unlink()
    return outputs


def test_an_exported_classifier_needs_jax_alone(finished, tmp_path, capsys, untyped):
    """The probabilities of another process are the probabilities of `predict`."""
    images = labelled_images("digits", split="test")
    pixels = (images.raw[:3] * (255 // 16)).astype(np.uint8)
    for number, picture in enumerate(pixels):
        Image.fromarray(picture[..., 0]).save(tmp_path / f"{number}.png")
    changes = {"seeds": (0, 1), "predict": str(tmp_path)}
    train_and_evaluate(tiny(**changes, export=True), finished)
    printed = capsys.readouterr().out
    assert "a function of uint8[batch,8,8,1] that returns float32[batch,10]" in printed
    odds = run_export(finished, pixels)
    assert odds.shape == (3, 10)
    for row, chances in zip(records(finished / "predictions.csv"), odds, strict=True):
        assert row["class"] == str(chances.argmax())
        assert float(row["probability"]) == pytest.approx(chances.max(), rel=1e-5)
    (finished / "predictions.csv").unlink()
    (finished / "model.jax_export").unlink()


@pytest.fixture
def made(monkeypatch):
    """References to the trainers that are made."""
    trainers = []

    class Watched(Trainer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            trainers.append(weakref.ref(self))

    monkeypatch.setattr("uhop_jax.training.application.Trainer", Watched)
    return trainers


@pytest.mark.slow
def test_a_study_has_a_run_for_each_arm_size_and_patch(tmp_path, capsys, made):
    arms = ("Sparse MHM + U-Hop, warm-up", "MHM, matched size")
    changes = {"arms": arms[:1], "train.epochs": 1, "sizes": (20, 40)}
    changes |= {"stage_one.epochs": 1}
    train_and_evaluate(tiny(**changes), tmp_path)
    rows = records(tmp_path / "results.csv")
    assert [(r["arm"], r["size"]) for r in rows] == [(arms[0], "20"), (arms[0], "40")]
    for name in ("figure.png", "curves.png"):  # against size, and against epochs
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 300
    (inner,) = tmp_path.glob("sparse_mhm_with_u_hop_warm_up_20_images_patch_4_*")
    phases = [row["phase"] for row in records(inner / "metrics.csv")]
    assert phases == ["stage_one", "task"]
    assert "max train acc. %" in capsys.readouterr().out
    # A run with another arm keeps the finished arms.
    before = (inner / "metrics.csv").stat().st_mtime_ns
    changes |= {"arms": arms, "sizes": (20,)}
    train_and_evaluate(tiny(**changes), tmp_path)
    assert (inner / "metrics.csv").stat().st_mtime_ns == before
    kernel, matched = records(tmp_path / "results.csv")
    assert int(kernel["parameters"]) <= int(matched["parameters"])
    # The trainers of a study, with their data, go when the study ends.
    before = len(made)
    train_and_evaluate(tiny(**changes, eval_only=True), tmp_path)
    gc.collect()
    assert 0 < before < len(made) and all(trainer() is None for trainer in made)


VARIANTS = config_module("vision").VARIANTS


@slow_where(lambda variant: variant != "cifar10")  # programs are few
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "digits"])
def test_every_variant_runs_small(variant, tmp_path):
    changes = {"train.epochs": 1, "arms": ("MHM + U-Hop",), "seeds": (0,)}
    train_and_evaluate(tiny(variant, **changes), tmp_path)
    assert len(records(tmp_path / "results.csv")) == 1


def test_images_of_the_user(tmp_path, capsys):
    """Class folders; grey and colour, sizes, empty classes are refused."""
    root = tmp_path / "mine"
    pixels = np.random.default_rng(0).integers(0, 255, (2, 2, 6, 8, 8), dtype=np.uint8)
    for s, split in enumerate(("train", "test")):
        for c, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for n in range(6):
                picture = Image.fromarray(pixels[s, c, n])
                picture.save(root / split / name / f"{n}.png")
    changes = {"data.name": str(root), "data.test_limit": 0, "sizes": (0,)}
    changes |= {"train.epochs": 1, "train.batch_size": 4}
    images = labelled_images(str(root), split="test")
    np.testing.assert_array_equal(images.raw[7, ..., 0], pixels[1, 1, 1])
    assert images.classes == ("cat", "dog") and list(images.labels) == [0] * 6 + [1] * 6
    train_and_evaluate(tiny(**changes), tmp_path / "run")
    changes["predict"] = str(root / "test" / "dog")
    train_and_evaluate(tiny(**changes), tmp_path / "run")
    assert "cat (" in (text := capsys.readouterr().out) or "dog (" in text

    def refused(message):
        with pytest.raises(ValueError, match=message):
            train_and_evaluate(tiny(**changes), tmp_path / "other")

    changes["predict"] = ""
    spoilt = root / "train" / "dog" / "0.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(spoilt)
    refused("all grey or all colour")
    Image.fromarray(np.zeros((8, 9), np.uint8)).save(spoilt)
    refused("must have one size: cat/0.png is 8 x 8, dog/0.png 9 x 8")
    spoilt.write_bytes(b"no image")
    refused("dog/0.png is damaged or truncated, or is no picture")
    shutil.rmtree(root / "test" / "dog")
    refused("train and test must hold the same classes, dog is in one alone")
    (root / "test" / "dog").mkdir()
    shutil.rmtree(root / "train" / "dog")
    (root / "train" / "dog").mkdir()
    refused("class dog is empty")
    shutil.rmtree(root / "train" / "dog")
    refused("a folder for each class, at least two, got 1")
    shutil.rmtree(root / "test")
    refused("must hold the folders train and test, test is missing")


WRONG = [
    ({"arms": ("MHN",)}, "unknown arm 'MHN'; choose one of MHM"),
    ({"arms": ()}, "arms must name at least one"),
    ({"patches": (3,)}, "patch must divide the image, got patch 3 and images of 8 x 8"),
    ({"sizes": (5000,)}, "number of images must be at most 1437, got 5000"),
    ({"data.name": "mnits"}, "unknown data 'mnits'"),
    ({"model.name": "vit"}, "unknown model.name 'vit'; choose one of vih, transformer"),
    ({"model.dtype": "int8"}, "unknown model.dtype 'int8'"),
    ({"model.num_heads": 3}, "num_heads 3 must divide state_size 8"),
    ({"model.dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ({"train.epochs": 0}, "train.epochs must be at least 1, got 0"),
    ({"train.batch_size": 0}, "train.batch_size must be at least 1, got 0"),
    ({"train.learning_rate": -1.0}, "train.learning_rate must be positive"),
    ({"train.label_smoothing": 1.0}, "train.label_smoothing must be in"),
    ({"augment.crop": -1}, "augment.crop must be at least 0, got -1"),
    ({"stage_one.learning_rate": -0.1}, "stage_one.learning_rate must be positive"),
    ({"stage_one.loss": "mean"}, "unknown separation loss 'mean'; choose one of av"),
    ({"seeds": ()}, "seeds must name at least one seed"),
    ({"eval_only": True}, "there is no checkpoint in .*; train first"),
    ({"predict": "nothing.png"}, "predict: no such file or folder: nothing.png"),
]


@pytest.mark.parametrize("changes, message", WRONG)
def test_wrong_configs_are_refused_and_write_nothing(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(tiny(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_config_is_refused_by_name(finished):
    with pytest.raises(ValueError, match="config.train.epochs=2, this one has 3"):
        train_and_evaluate(tiny(seeds=(0, 1), **{"train.epochs": 3}), finished)
    with pytest.raises(ValueError, match="config.cell.arm=MHM . U-Hop, this one has"):
        train_and_evaluate(tiny(seeds=(0, 1), arms=("MHM",)), finished)


def test_a_checkpoint_of_another_model_is_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["model"]["size"] = 16
    path.write_text(json.dumps(config))
    changes = {"seeds": (0, 1), "model.size": 16}
    with pytest.raises(ValueError, match="is of another model: .* has shape"):
        train_and_evaluate(tiny(**changes), tmp_path / "run")


def test_other_data_are_refused(finished, monkeypatch):
    """Two swapped images are refused in training, scores and predictions."""

    def swapped(source, *, split, directory):
        images = labelled_images(source, split=split, directory=directory)
        if split == "train":
            images.raw[[0, 1]] = images.raw[[1, 0]]
        return images

    monkeypatch.setattr("uhop_jax.data.labelled_images", swapped)
    for changes in ({}, {"eval_only": True}, {"predict": str(finished)}):
        message = "holds a run on another digits, train split: it had shape"
        with pytest.raises(ValueError, match=message):
            train_and_evaluate(tiny(seeds=(0, 1), **changes), finished)


def files_of(workdir):
    names = [p for p in workdir.rglob("*") if p.is_file() and p.name != ".lock"]
    return {p.relative_to(workdir): p.read_bytes() for p in names}


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda text: text[: text.rstrip().rfind(b"\n") + 1], "is not as the run has"),
        (lambda text: text[:-4] + text[-2:], "is not as the run has"),
        (None, "lacks epoch 1 of phase task, seed 0, which checkpoint 8 has behind"),
    ],
    ids=["no last line", "a shorter number", "no file"],
)
def test_damaged_metrics_are_refused(finished, tmp_path, cut, message):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "metrics.csv"
    text = path.read_bytes()
    path.unlink() if cut is None else path.write_bytes(cut(text))
    before = files_of(run)
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(tiny(seeds=(0, 1)), run)
    assert files_of(run) == before


def state_of(workdir):
    path = workdir.absolute() / "checkpoints"
    step = max(int(p.name) for p in path.iterdir() if p.name.isdecimal())
    reader = ocp.PyTreeCheckpointer()
    shapes = reader.metadata(path / str(step) / "default").item_metadata.tree
    kind = ocp.RestoreArgs(restore_type=np.ndarray)  # for any devices
    arguments = jax.tree.map(lambda _: kind, shapes)
    tree = reader.restore(path / str(step) / "default", restore_args=arguments)
    return step, tree


def assert_same_run(one, two):
    assert (one / "metrics.csv").read_bytes() == (two / "metrics.csv").read_bytes()
    (step, state), (other, other_state) = state_of(one), state_of(two)
    assert step == other
    jax.tree.map(np.testing.assert_array_equal, state, other_state)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for path in (run / "checkpoints" / "8").rglob("*"):
        if path.is_file():  # half of each file is gone
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    damaged = files_of(run / "checkpoints" / "8")
    with pytest.raises(ValueError, match="checkpoint .*8 is damaged: the command that"):
        train_and_evaluate(tiny(seeds=(0, 1), eval_only=True), run)
    # A foreign file is no checkpoint, and stays.
    mine = run / "checkpoints" / "best_model" / "metrics" / "metrics"
    mine.parent.mkdir(parents=True)
    mine.write_text("no JSON")
    with pytest.warns(UserWarning, match="checkpoint 8 .* is damaged, going back"):
        train_and_evaluate(tiny(seeds=(0, 1)), run)
    assert_same_run(run, finished)
    assert files_of(run / "damaged" / "checkpoint_8") == damaged  # moved, not deleted
    assert mine.read_text() == "no JSON"


@pytest.mark.slow  # three runs, each to its first write error
def test_a_full_disk_is_one_sentence(tmp_path):
    """A limit on file sizes stops tables, checkpoints and pictures."""
    program = f"""
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
    (tmp_path / "limited.py").write_text(program)
    limits = (600, 3000, 20_000)
    flags = [*FLAGS, "--config.train.epochs=1", "--config.arms=('MHM',)"]
    cases = [[str(x), *flags, f"--workdir=run_{x}"] for x in limits]
    # The cache of compiled programs would be cut too.
    variables = {"JAX_COMPILATION_CACHE_DIR": ""}
    results = run_script(tmp_path, tmp_path / "limited.py", *cases, **variables)
    for limit, (code, text) in zip(limits, results, strict=True):
        lines = [x for x in text.splitlines() if " examples, " not in x]  # progress
        assert code == 2 and len(lines) == 1, text
        assert "File too large" in lines[0]
        if limit == 3000:
            message = "run_3000/checkpoints cannot be written (File too large)"
            assert message in lines[0]


def test_unreadable_checkpoints_are_not_called_damaged(finished, tmp_path, monkeypatch):
    """Too many open files, a missing permission: the run stops, checkpoints stay."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = files_of(run)

    def fails(*args, **options):
        raise OSError(24, "Too many open files")

    for place, name in ((ocp.CheckpointManager, "restore"), (hashlib, "file_digest")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            with pytest.raises((ValueError, OSError), match="Too many open files"):
                train_and_evaluate(tiny(seeds=(0, 1)), run)
        assert files_of(run) == before
    mine = run / "checkpoints" / "500" / "model.pt"
    mine.parent.mkdir()
    mine.write_text("weights")
    with pytest.raises(ValueError, match="500 is no checkpoint that this run has wri"):
        train_and_evaluate(tiny(seeds=(0, 1)), run)
    assert files_of(run) == before | {mine.relative_to(run): b"weights"}


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_and_continued_run_equals_an_uninterrupted_one(tmp_path, devices):
    """SIGKILL at a random moment, the same command again, bit for bit."""
    flags = [*FLAGS, "--config.train.epochs=4", "--config.model.dropout=0.2"]
    flags += ["--config.train.batch_size=8", "--config.stage_one.batch_size=8"]
    code, _, err = script(*flags, f"--workdir={tmp_path / 'whole'}", devices=devices)
    assert code == 0, err[-2000:]
    random.seed(devices)
    cut = tmp_path / "cut"
    flags.append("--config.train.checkpoint_seconds=0.0")
    process = script(*flags, f"--workdir={cut}", devices=devices, wait=False)
    while not any(p.name.isdecimal() for p in (cut / "checkpoints").glob("*")):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(random.random())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, _, err = script(*flags, f"--workdir={cut}", devices=devices)
    assert code == 0, err[-2000:]
    assert_same_run(tmp_path / "whole", cut)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    flags = [*FLAGS, "--config.train.batch_size=8", "--config.stage_one.batch_size=8"]
    code, _, err = script(*flags, f"--workdir={tmp_path / 'one'}", devices=4)
    assert code == 0, err[-2000:]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        cluster = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free.getsockname()[1]}"}
    flags += ["--config.distributed=True", f"--workdir={tmp_path / 'two'}"]
    cluster["JAX_NUM_PROCESSES"] = "2"
    processes = [
        script(*flags, devices=2, wait=False, JAX_PROCESS_ID=str(index), **cluster)
        for index in range(2)
    ]
    try:
        for process in processes:
            _, err = process.communicate(timeout=300)
            assert process.returncode == 0, err[-2000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    one, two = (records(tmp_path / name / "metrics.csv") for name in ("one", "two"))
    assert len(one) == len(two) == 2
    for first, second in zip(one, two, strict=True):
        assert first.pop("phase") == second.pop("phase")
        for name, value in first.items():
            assert float(second[name]) == pytest.approx(float(value), abs=1e-5), name


def test_a_signal_saves_the_step_at_hand(tmp_path):
    flags = [*FLAGS, "--config.train.epochs=4000", f"--workdir={tmp_path}"]
    process = script(*flags, wait=False)
    while not (tmp_path / "metrics.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; what is finished is kept" in err
    last = max(
        int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()
    )
    assert last >= int(records(tmp_path / "metrics.csv")[-1]["step"])


def test_wrong_command_lines_exit_with_2(tmp_path):
    cases = ["--config.train.epoch=3"], [*FLAGS, "--config.patches=(3,)"]
    (one, misspelt), (two, unfit) = run_script(tmp_path, "train.py", *cases)
    assert one == two == 2 and 'Did you mean "epochs"' in misspelt
    assert "patch must divide" in unfit and len(unfit.strip().splitlines()) == 1


def test_the_table_of_arms_is_whole():
    from uhop_jax.training import ARMS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for variant in VARIANTS:
            assert set(config_of("vision", variant).arms) <= set(ARMS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a patch of")
def test_the_reference_runs_the_released_model(tmp_path):
    """The released layer with Stage I and without; each seed draws its own images."""
    changes = {"train.epochs": 1, "stage_one.epochs": 1, "patches": (8,)}
    changes |= {"model.num_heads": 1, "seeds": (0, 1), "data.held_out": 100}
    config = tiny("reference", **changes)
    train_and_evaluate(config, tmp_path)
    rows = records(tmp_path / "results.csv")
    arms = ("MHM", "MHM + U-Hop, reference", "MHM + U-Hop, reference, no Stage I")
    assert [row["arm"] for row in rows] == [arm for arm in arms for _ in (0, 1)]
    plain, *released = (int(row["parameters"]) for row in rows[::2])
    assert plain < released[0] == released[1]
    (inner,) = tmp_path.glob("mhm_with_u_hop_reference_40_images_patch_8_*")
    phases = [row["phase"] for row in records(inner / "metrics.csv")]
    assert phases == ["stage_one"] * 2 + ["task"] * 2
    with pytest.raises(ValueError, match="data.held_out must be at most 1436, got"):
        train_and_evaluate(tiny(**{"data.held_out": 1437}), tmp_path / "other")


@pytest.mark.parametrize("runs", [2, 5])
def test_many_runs_are_counted_not_named(tmp_path, runs):
    (tmp_path / "results.csv").touch()
    (tmp_path / ".lock").touch()
    for number in range(runs):
        (tmp_path / f"fold_{number}").mkdir()
    expected = {2: "results.csv, fold_0/, fold_1/", 5: "results.csv, 5 runs"}
    assert study._files(tmp_path) == expected[runs]
