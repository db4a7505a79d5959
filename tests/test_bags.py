"""`train.py` on bags: files, folds, the model, whole runs, and wrong input."""

import gzip
import json
import random
import signal
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SHARED, assert_close, config_module, config_of, run_script
from flax import nnx
from PIL import Image
from sklearn.metrics import roc_auc_score
from test_train_script import assert_same_run, records, script

from uhop_jax import data
from uhop_jax.data.images import Images
from uhop_jax.layers import Association
from uhop_jax.models import BagClassifier
from uhop_jax.training import ARMS, best_state, train_and_evaluate
from uhop_jax.training.bag_data import Needles, sampling, source_of
from uhop_jax.training.bags import BagClassification, explained, inputs

TINY = {
    "folds": 2,
    "model.dropout": (0.0,),
    "seeds": (0, 1),
    "arms": ("MHM + U-Hop",),
    "model.size": 4,
    "model.num_heads": 2,
    "train.epochs": 2,
    "train.batch_size": 4,
    "stage_one.batch_size": 4,
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax and Flax themselves mix dtypes under 64-bit."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def lines_of(bags=18, header=True):
    """Bags of 1 to 4 instances; an instance with a large `a` makes a bag positive."""
    draws = np.random.default_rng(0)
    lines = ["label,bag,a,b,c"] * header
    for bag in range(bags):
        label, size = bag % 2, 1 + bag % 4
        rows = draws.normal(size=(size, 3))
        rows[-1, 0] += 5 * label
        lines += [f"{label},m{bag}," + ",".join(f"{x:.5f}" for x in r) for r in rows]
    return lines


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(lines_of()))
    return path


def tiny(path, **changes):
    config = config_of("bags", "csv")
    config.update_from_flattened_dict(TINY | {"data.name": str(path)} | changes)
    return config


def assert_same_bags(one, two):
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


# -- Files -----------------------------------------------------------------------------


def test_bags_are_read_from_any_layout(path, tmp_path):
    lines = lines_of()
    bags = data.read_bags(path)
    assert bags.names[:3] == ("m0", "m1", "m2") and bags.features == ("a", "b", "c")
    assert bags.sizes.tolist()[:5] == [1, 2, 3, 4, 1]
    assert bags.labels.tolist() == [0, 1] * 9 and bags.labels.dtype == np.int32
    assert bags.instances[1].tolist() == [float(x) for x in lines[2].split(",")[2:]]
    plain = bags._replace(features=())
    other = tmp_path / "other.csv.gz"

    def read(lines):
        other.write_bytes(gzip.compress("\n".join(lines).encode()))
        return data.read_bags(other)

    assert_same_bags(read(lines[1:]), plain)
    assert_same_bags(read([line.replace(",", ";") for line in lines]), bags)
    signed = [("-1" if x[0] == "0" else "1") + x[1:] for x in lines[1:]]
    assert_same_bags(read(signed), plain)
    turned = [",".join([x.split(",")[i] for i in (2, 1, 3, 0, 4)]) for x in lines]
    assert_same_bags(read(turned), bags)  # a header names the columns, in any place
    # Rows of bags that do not follow one another: bags in order of appearance.
    mixed = read([lines[0], lines[2], lines[1], *lines[3:]])
    assert mixed.names[:2] == ("m1", "m0") and mixed.sizes.tolist()[:2] == [2, 1]
    np.testing.assert_array_equal(mixed.instances[:2], bags.instances[1:3])

    folder = tmp_path / "folder"
    folder.mkdir()
    text = [
        f"{label},{name}" for label, name in zip(bags.labels, bags.names, strict=True)
    ]
    (folder / "labels.csv").write_text("\n".join(text))
    for name in bags.names:
        own = [x.split(",", 2)[2] for x in lines if x.split(",")[1] in ("bag", name)]
        (folder / f"{name}.csv").write_text("\n".join(own))
    assert_same_bags(data.read_bags(folder), bags)
    (folder / "m3.csv").write_text("a,b,c\n1,2\n")
    with pytest.raises(
        ValueError, match="m3.csv, line 2: 2 cells, the first bag has 3"
    ):
        data.read_bags(folder)
    (folder / "m3.csv").unlink()
    with pytest.raises(ValueError, match="has no file m3.csv, which labels.csv names"):
        data.read_bags(folder)
    (folder / "m2.csv.gz").write_bytes(gzip.compress(b"a,b,c\n1,2,3\n"))
    with pytest.raises(ValueError, match="two files of bag m2, also m2.csv.gz"):
        data.read_bags(folder)
    (folder / "m2.csv.gz").unlink()
    (folder / "x.csv").write_text("1,2,3\n")
    with pytest.raises(ValueError, match="labels.csv has no label for x.csv"):
        data.read_bags(folder)
    (folder / "labels.csv").unlink()
    with pytest.raises(
        ValueError, match="folder must hold labels.csv with the columns"
    ):
        data.read_bags(folder)


def test_a_header_that_counts_is_no_instance(tmp_path):
    """pandas writes one above an array."""
    (tmp_path / "labels.csv").write_text("1,p\n0,q\n")
    (tmp_path / "p.csv").write_text("0,1\n5,6\n")
    (tmp_path / "q.csv").write_text("0,1\n7,8\n9,9\n")
    with pytest.raises(ValueError, match="each csv of .* counts the columns; name"):
        data.read_bags(tmp_path)
    (tmp_path / "q.csv").write_text("7,8\n9,9\n")  # then p begins with an instance
    assert data.read_bags(tmp_path).sizes.tolist() == [2, 2]
    (tmp_path / "p.csv").write_text(",a,b\n0,5,6\n")
    with pytest.raises(ValueError, match="p.csv, line 1, column 1: .* has no name"):
        data.read_bags(tmp_path)


WRONG_FILES = {
    "empty": ("", "bad.csv is empty"),
    "header alone": ("label,bag,a", "bad.csv has a header and no rows"),
    "no features": ("1,m0\n0,m1", "line 1: 2 cells, the columns label, bag and feat"),
    "ragged": ("1,m0,3,4\n0,m1,3", "bad.csv, line 2: 3 cells, line 1 has 4"),
    "text": ("1,m0,3\n0,m1,x", "line 2, column 3: 'x' is no finite number"),
    "text, named": (
        "bag,label,a\nm0,1,3\nm1,0,x",
        r"line 3, column 3 \('a'\): 'x' is no finite number",
    ),
    "underscore": ("1,m0,3\n0,m1,1_0", "column 3: '1_0' is no finite number"),
    "nan": ("1,m0,3\n0,m1,nan", "line 2, column 3: 'nan' is no finite number"),
    "infinite": ("1,m0,3\n0,m1,inf", "line 2, column 3: 'inf' is no finite number"),
    "missing": ("1,m0,3,4\n0,m1,,4", "line 2, column 3: '' is missing"),
    "two labels": (
        "1,m0,3\n0,m1,4\n0,m0,5",
        "line 3: bag m0 has two labels, 1 and 0; all instances of a bag share its lab",
    ),
    "another label": ("1,m0,3\n2,m1,4", "line 2: a label must be 0 or 1 .*, got '2'"),
    "mixed labels": ("0,m0,3\n-1,m1,4", "must be 0 and 1, or -1 and 1, got -1 and 0"),
    "text label": ("1,m0,3\npos,m1,4", "line 2: a label must be 0 or 1 .*, got 'pos'"),
    "no header": (
        "pos,m0,3\n1,m1,4",
        "a header names one column 'label' and one 'bag'",
    ),
    "index": (
        ",label,bag,a\n0,1,m0,5\n1,0,m1,6",
        r"bad.csv, line 1, column 1: .* has no name, got ''; .*to_csv\(index=False\)",
    ),
    "index, read again": (
        "label,bag,a,Unnamed: 0\n1,m0,5,0\n0,m1,6,1",
        "line 1, column 4: a column has no name, got 'Unnamed: 0'",
    ),
    "one name": ("label,bag,a,a\n1,m0,5,6\n0,m1,6,7", "two columns are named 'a'"),
    "counts": ("0,1,2,3\n1,8,3,4\n0,9,5,6", "line 1: the first line counts the col"),
    "no bag": ("1,,3\n0,m1,4", "line 1: the name of the bag is missing"),
}


@pytest.mark.parametrize("text, message", WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_files_are_refused(tmp_path, text, message):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        data.read_bags(tmp_path / "bad.csv")


def test_published_sets_are_the_files_of_their_folder(tmp_path):
    with pytest.raises(
        ValueError, match="musk1 is not in data.dir '': it is published"
    ):
        data.bags("musk1")
    (tmp_path / "musk1.csv").write_text("\n".join(lines_of()))
    with pytest.raises(ValueError, match="is not the published musk1, of 92 bags"):
        data.bags("musk1", directory=tmp_path)
    with pytest.raises(ValueError, match="no such file: musk3"):
        data.bags("musk3")
    folder = SHARED / "mil"
    if not folder.exists():
        pytest.skip(f"needs the published sets of bags in {folder}")
    bags = data.bags("musk1", directory=folder)
    assert bags.labels.sum() == 47 and bags.sizes.tolist()[:3] == [4, 4, 2]


# -- Parts -----------------------------------------------------------------------------


def test_every_bag_is_tested_once_by_a_fold_that_has_not_seen_it():
    labels = np.asarray([1] * 7 + [0] * 16)
    parts = data.folds(labels, 5, held_out=0.2, seed=3)
    tested = np.concatenate([fold.test for fold in parts])
    assert sorted(tested) == list(range(23))
    for fold in parts:
        assert sorted(np.concatenate(fold)) == list(range(23))
        assert all({*labels[part]} == {0, 1} for part in fold)
    again = data.folds(labels, 5, held_out=0.2, seed=3)
    for one, two in zip(parts, again, strict=True):
        assert_same_bags(one, two)
    other = data.folds(labels, 5, held_out=0.2, seed=4)
    assert any(
        (a.test.tolist() != b.test.tolist()) for a, b in zip(parts, other, strict=True)
    )


def test_wrong_folds(untyped):
    labels = np.asarray([1, 1, 0, 0, 0])
    for number in (1, 3):
        with pytest.raises(ValueError, match="folds must be from 2 to 2, .* got"):
            data.folds(labels, number, held_out=0.2, seed=0)
    with pytest.raises(ValueError, match="folds must be an integer, got 2.0"):
        data.folds(labels, 2.0, held_out=0.2, seed=0)
    with pytest.raises(ValueError, match="got 3 of label 0 and 1 of label 1"):
        data.folds(np.asarray([0, 0, 0, 1]), 2, held_out=0.2, seed=0)
    with pytest.raises(ValueError, match="all 4 bags have the label 1: bags of both"):
        data.folds(np.ones(4, int), 2, held_out=0.2, seed=0)
    with pytest.raises(ValueError, match="at least 2 of label ., one to train on"):
        data.folds(labels, 2, held_out=0.2, seed=0)


def test_bags_of_images_are_positive_by_one_image():
    raw = np.arange(10, dtype=np.uint8)[:, None, None, None] * 20
    images = Images(raw, np.arange(10, dtype=np.int32))
    bags = data.image_bags(images, 400, mean=10.0, target=9, seed=0, name="train ")
    assert bags.sizes.mean() == pytest.approx(10, abs=0.3)
    assert bags.sizes.var() == pytest.approx(2, abs=0.5)  # Ilse et al. 2018
    digits = np.round(bags.instances[:, 0] * 255 / 20)
    np.testing.assert_array_equal(bags.marked, digits == 9)
    for bag in range(400):
        own = bags.rows(np.asarray([bag]))
        assert bags.labels[bag] == (digits[own] == 9).any()
    assert bags.labels.mean() == pytest.approx(1 - 0.9**10, abs=0.07)
    assert bags.names[0] == "train 1"


def test_needles_are_made_from_their_keys():
    config = config_of("bags", "needle")
    config.data.update({"instances": 50, "bags": 8, "test_bags": 4, "mark": 30.0})
    needles = source_of(config)
    assert isinstance(needles, Needles) and needles.read() == {}
    (fold,) = needles.folds
    assert [len(part) for part in fold] == [6, 2, 4]
    split = needles.split(fold.test, fold)
    batch = split.take(jax.tree.map(jnp.asarray, split.arrays), jnp.arange(4))
    again = split.take(jax.tree.map(jnp.asarray, split.arrays), jnp.asarray([2]))
    np.testing.assert_array_equal(batch["instances"][2], again["instances"][0])
    assert len(inputs(batch)) == 1  # no padding, no mask
    unit = needles.direction / np.linalg.norm(needles.direction)
    for n, bag in enumerate(fold.test):
        marked = needles.marked(int(bag))
        assert marked.sum() == needles.labels[bag]
        along = np.asarray(batch["instances"][n]) @ unit
        assert (along > 20).tolist() == marked.tolist()


# -- Model -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [6, pytest.param(0, marks=pytest.mark.slow)])
def test_padding_changes_nothing(size):
    options = {"association": lambda: Association(beta=2.0), "num_heads": 2}
    options |= {"head_size": 3, "size": size, "quantity": 3}
    model = BagClassifier(5, rngs=nnx.Rngs(0), **options)
    draws = np.random.default_rng(0)
    bags = [draws.normal(size=(n, 5)).astype(np.float32) for n in (4, 1, 7)]
    instances = np.full((3, 9, 5), np.nan, np.float32)
    mask = np.zeros((3, 9), bool)
    for n, bag in enumerate(bags):
        instances[n, : len(bag)], mask[n, : len(bag)] = bag, True
    explain = nnx.jit(lambda *arguments: model.explained(*arguments))
    logits, weights = explain(jnp.asarray(instances), jnp.asarray(mask))
    assert logits.shape == (3,) and weights.shape == (3, 9)
    for n, bag in enumerate(bags):
        alone, own = explain(jnp.asarray(bag))
        assert_close(logits[n], alone)
        assert_close(weights[n, : len(bag)], own)
        assert not np.asarray(weights[n, len(bag) :]).any()
    assert_close(weights.sum(-1), np.ones(3))
    plain = nnx.jit(lambda *arguments: model(*arguments))
    assert_close(plain(jnp.asarray(instances), jnp.asarray(mask)), logits)


# -- Runs ------------------------------------------------------------------------------


def test_a_study_from_end_to_end(path, tmp_path, capsys, untyped):
    run = tmp_path / "run"
    train_and_evaluate(tiny(path), run)
    printed = capsys.readouterr().out
    assert "AUC %" in printed and "half of the 95 % interval over folds" in printed
    names = {p.name for p in run.glob("[!.]*") if p.is_file()}
    tables = {"attention.csv", "bags.csv", "results.csv"}
    assert names == tables | {"attention.png", "figure.png", "config.json", "run.json"}
    for name in ("attention.png", "figure.png"):
        with Image.open(run / name) as picture:
            assert min(picture.size) > 300
    rows, judged = records(run / "results.csv"), records(run / "bags.csv")
    runs = [(fold, seed) for fold in "12" for seed in "01"]
    assert [(r["fold"], r["seed"]) for r in rows] == runs
    assert len(judged) == 18 * 2  # every bag once, by each seed
    bags = data.read_bags(path)
    weights = records(run / "attention.csv")
    for row in rows:
        own = [
            r for r in judged if (r["fold"], r["seed"]) == (row["fold"], row["seed"])
        ]
        labels = [int(r["label"]) for r in own]
        odds = [float(r["probability"]) for r in own]
        assert float(row["test_auc"]) == roc_auc_score(labels, odds)
        right = np.equal(np.asarray(odds) > 0.5, labels)
        assert float(row["test_accuracy"]) == pytest.approx(right.mean())
        assert float(row["separation"]) < 0
    for name, size, label in zip(bags.names, bags.sizes, bags.labels, strict=True):
        own = [r for r in weights if r["bag"] == name]
        assert [int(r["instance"]) for r in own] == list(range(1, size + 1))
        assert sum(float(r["weight"]) for r in own) == pytest.approx(1, abs=1e-5)
        assert {r["label"] for r in own} == {str(label)} and own[0]["marked"] == ""

    # The least validation loss chooses the epoch, and training bags alone the scale.
    study = BagClassification(tiny(path))
    cell = study.cells()[1]
    fold, directory = study.fold(cell), next(run.glob("mhm_with_u_hop_fold_2_*"))
    history = records(directory / "metrics.csv")
    means = [
        np.mean([float(r["validation_loss"]) for r in history if r["epoch"] == epoch])
        for epoch in ("1", "2")
    ]
    assert int(rows[2]["best_epoch"]) == 1 + int(np.argmin(means))
    seen = bags.instances[bags.rows(fold.train)]
    split = study.task(cell).test
    batch = split.take(
        jax.tree.map(jnp.asarray, split.arrays), jnp.arange(len(fold.test))
    )
    for n, bag in enumerate(fold.test):
        expected = (bags.instances[bags.rows(fold.test[n : n + 1])] - seen.mean(0)) / (
            seen.std(0)
        )
        assert batch["mask"][n].sum() == bags.sizes[bag] == len(expected)
        given = np.asarray(batch["instances"][n])[: len(expected)]
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5)

    # The table again from the checkpoint, bag by bag and without padding.
    trainer = study.trainer(cell)
    _, state = best_state(trainer, study.goal(), directory)
    again = explained(trainer, state, split)
    model = trainer.model(state, 1)
    for n in range(len(fold.test)):
        alone = jnp.asarray(batch["instances"][n][: int(batch["mask"][n].sum())])
        assert_close(np.float32(again.logits[1, n]), model(alone), scale=10)

    fewer = study.task(cell).train._replace(size=3)
    with pytest.raises(ValueError, match="of 7 examples to train on, got 3"):
        trainer.on(study.task(cell)._replace(train=fewer), trainer.seeds)

    # The same command repeats nothing; predictions; other data are refused.
    before = (directory / "metrics.csv").stat().st_mtime_ns
    results = (run / "results.csv").read_bytes()
    train_and_evaluate(tiny(path), run)
    assert (directory / "metrics.csv").stat().st_mtime_ns == before
    assert (run / "results.csv").read_bytes() == results
    one = tmp_path / "one.csv"  # one label is enough to judge
    one.write_text("\n".join(x for x in lines_of() if x.split(",")[1] in ("bag", "m3")))
    train_and_evaluate(tiny(path, predict=str(one), export=True), run)
    printed = capsys.readouterr().out
    assert "1 bags judged, written to" in printed
    assert "float32[instances,3]" in printed
    (row,) = records(directory / "predictions.csv")
    assert row["bag"] == "m3" and 0 < float(row["probability"]) < 1
    file = bytearray((directory / "model.jax_export").read_bytes())
    bag = jnp.asarray(bags.instances[bags.rows(np.asarray([3]))], jnp.float32)
    odds = jax.export.deserialize(file).call(bag)  # the mean over seeds, as above
    assert float(odds) == pytest.approx(float(row["probability"]), abs=1e-5)
    one.write_text("1,m3,2.0\n")
    with pytest.raises(ValueError, match="the model takes 3 features, .* has 1"):
        train_and_evaluate(tiny(path, predict=str(one)), run)
    one.write_text("label,bag,a,c,b\n1,m3,2.0,3.0,4.0\n")
    with pytest.raises(ValueError, match="has the feature 'b' where .* has 'c'"):
        train_and_evaluate(tiny(path, predict=str(one)), run)
    path.write_text("\n".join(lines_of()).replace("0.1", "0.2", 1))
    with pytest.raises(ValueError, match=r"holds a run on another .*mine.csv: it had"):
        train_and_evaluate(tiny(path), run)
    assert (run / "results.csv").read_bytes() == results


@pytest.mark.slow  # three processes; `test_train_script.py` interrupts the same loop
def test_a_killed_and_continued_study_equals_an_uninterrupted_one(path, tmp_path):
    """SIGKILL after the first fold, the same command again, bit for bit."""
    flags = ["--config=configs/bags.py:csv", "--config.train.epochs=6"]
    changes = TINY | {"data.name": path, "model.dropout": "(0.2,)", "train.epochs": 6}
    flags += [f"--config.{name}={value}" for name, value in changes.items()]
    code, _, err = script(*flags, f"--workdir={tmp_path / 'whole'}")
    assert code == 0, err[-2000:]
    cut = tmp_path / "cut"
    flags.append("--config.train.checkpoint_seconds=0.0")
    process = script(*flags, f"--workdir={cut}", wait=False)
    while not any(cut.glob("*fold_2_*/checkpoints/[0-9]*")):
        assert process.poll() is None
        time.sleep(0.01)
    random.seed(1)
    time.sleep(random.random() / 4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (cut / "figure.png").exists()
    code, _, err = script(*flags, f"--workdir={cut}")
    assert code == 0, err[-2000:]
    for name in ("results.csv", "bags.csv", "attention.csv"):
        assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    for directory in cut.glob("mhm_*"):
        assert_same_run(directory, tmp_path / "whole" / directory.name)


@pytest.mark.slow  # a run each
@pytest.mark.parametrize("variant", ["mnist_bags", "needle"])
def test_sets_with_test_bags_of_their_own(variant, tmp_path, request):
    config = config_of("bags", variant)
    config.update_from_flattened_dict(
        {"data.bags": 16, "data.test_bags": 12, "train.epochs": 2, "seeds": (0,)}
    )
    if variant == "needle":
        config.data.instances = 300
    else:
        config.data.dir = str(request.getfixturevalue("prepared"))
    train_and_evaluate(config, tmp_path)
    (row,) = records(tmp_path / "results.csv")
    assert row["fold"] == "0" and 0 <= float(row["test_auc"]) <= 1
    assert 0 <= float(row["marked_first"]) <= 1
    weights = records(tmp_path / "attention.csv")
    assert {r["marked"] for r in weights} == {"0", "1"}
    assert all(r["label"] == "1" for r in weights if r["marked"] == "1")
    if variant == "needle":
        assert len(weights) == 12 * 100  # the largest weights of a bag
    assert (tmp_path / "attention.png").exists()
    with pytest.raises(ValueError, match="predict: .* is simulated"):
        config.predict = str(tmp_path / "results.csv")
        train_and_evaluate(config, tmp_path)


WRONG = [
    ({"data.name": ""}, "data.name must name a data set, a csv or a folder"),
    ({"data.name": "musk1"}, "musk1 is not in data.dir '': it is published as musk1"),
    ({"folds": 10}, "folds must be from 2 to 9, .* so that every fold has both labels"),
    ({"folds": -1}, "folds must be at least 0, got -1"),
    ({"data.name": "needle"}, "folds must be 0 for needle, which has test bags"),
    ({"arms": ("MHM + U-Hop, reference",)}, "is of the authors' image code"),
    ({"arms": ("MHM, matched size",), "model.size": 0}, "needs one, got model.size 0"),
    ({"train.validation": 0.0}, r"train.validation must be within \(0, 1\), got 0.0"),
    ({"train.weight_decay": -1.0}, "train.weight_decay must be at least 0, got -1.0"),
    ({"model.num_heads": 3}, "num_heads 3 must divide state_size 4"),
    ({"model.normalize": ("keys",)}, "unknown normalize 'keys'; choose one of state"),
    ({"predict": "nothing.csv"}, "predict: no such file or folder: nothing.csv"),
]


@pytest.mark.parametrize("changes, message", WRONG)
def test_wrong_configs_are_refused_and_write_nothing(path, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(tiny(path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_bad_file_ends_with_2_and_one_sentence(tmp_path):
    cases = {name: text for name, (text, _) in WRONG_FILES.items()}
    cases["one label"] = "1,m0,3\n1,m1,4\n1,m2,4"
    chosen, flags = ("two labels", "nan", "text", "empty", "one label"), []
    for name in chosen:
        path = tmp_path / f"{name}.csv"
        path.write_text(cases[name])
        flags.append(["--config=configs/bags.py:csv", f"--config.data.name={path}"])
    for name, (code, text) in zip(
        chosen, run_script(tmp_path, "train.py", *flags), strict=True
    ):
        assert code == 2 and len(text.strip().splitlines()) == 1, (name, text)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("variant", config_module("bags").VARIANTS)
def test_every_variant_has_known_arms(variant):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert set(config_of("bags", variant).arms) <= set(ARMS)


def test_the_config_of_a_fold_is_kept(path, tmp_path, monkeypatch):
    """Each fold is bound to its arm and number, so that no fold takes another's run."""
    study = BagClassification(tiny(path, arms=("MHM", "Sparse MHM")), tmp_path)
    cells = study.cells()
    assert [(c.arm, c.fold) for c in cells[1:3]] == [("MHM", 2), ("Sparse MHM", 1)]
    assert len({study.directory(cell) for cell in cells}) == 4
    assert json.loads(json.dumps(study.read(cells[0])))[str(path)]["shape"] == [43, 3]


@pytest.mark.parametrize("masked", [True, False])
def test_stage_one_sees_some_instances_of_long_bags(masked):
    sizes = np.array([3, 8, 9, 40, 41]) if masked else np.full(5, 41)
    place = np.broadcast_to(np.arange(41.0)[None, :, None], (5, 41, 1))
    batch = {"instances": jnp.asarray(place), "labels": jnp.zeros(5)}
    if masked:
        batch["mask"] = jnp.arange(41) < sizes[:, None]
    seen = [set() for _ in sizes]
    for seed in range(60):
        drawn = sampling(8)(batch, jax.random.key(seed))
        assert drawn["instances"].shape == (5, 8, 1)
        for bag, size in enumerate(sizes):
            rows = np.asarray(drawn["instances"][bag, :, 0])[drawn["mask"][bag]]
            assert len(rows) == len(set(rows)) == min(size, 8)
            seen[bag] |= set(rows.astype(int))
    assert seen == [set(range(size)) for size in sizes]
    assert sampling(41)(batch, jax.random.key(0)) is batch
    many = jnp.arange(1e6).reshape(1, -1, 1)
    big = sampling(5000)({"instances": many, "labels": jnp.zeros(1)}, jax.random.key(0))
    parts = np.asarray(big["instances"]).reshape(-1) // 200  # 5000 * 10**6 overflows
    np.testing.assert_array_equal(parts, np.arange(5000))
