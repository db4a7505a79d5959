"""Configs from files, default directories, and errors as sentences with status 2."""

import json
import re

import pytest
from conftest import ROOT, config_module, config_of, run_script

from uhop_jax.command_line import _place, check_config, cost
from uhop_jax.progress import Progress


def changed(name, key, value):
    config = config_of(name)
    *path, last = key.split(".")
    node = config
    for part in path:
        node = node[part]
    with config.ignore_type():  # as in a file that does not start from a shipped config
        node[last] = value
    return config


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("vision", "train.epochz", 3, "train.epochz; did you mean config.train.epochs"),
        ("vision", "qqq", 3, "unknown config key: config.qqq"),
        ("vision", "sizes", (10, 10), "sizes must name each once, got 10 twice"),
        ("vision", "sizes", (10.5,), "sizes must hold values of type int, got 10.5"),
        ("vision", "arms", "MHM", "arms must be a tuple such as .*, got 'MHM'"),
        ("vision", "arms", (3,), "arms must hold values of type str, got 3"),
        ("vision", "seeds", (True,), "seeds must hold values of type int, got True"),
        ("vision", "train.epochs", "3", "train.epochs must be of type int, got '3'"),
        ("vision", "train.cosine", 1, "train.cosine must be of type bool, got 1"),
        ("vision", "train", 3, "unknown config key: config.train"),
        ("time_series", "data.name", 3, "data.name must be of type str, got 3"),
        ("retrieval", "runs", 1.5, "runs must be of type int, got 1.5"),
        ("retrieval", "memories", (10, 10.0), "memories must hold values of type int"),
        ("retrieval", "data.limitt", 1, "did you mean config.data.limit"),
    ],
)
def test_keys_types_and_lists_must_be_as_in_the_shipped_config(
    name, key, value, message
):
    with pytest.raises(ValueError, match=message):
        check_config(changed(name, key, value), name)


def test_missing_keys_and_other_scripts_are_named():
    config = config_of("vision")
    del config.train["epochs"]
    with pytest.raises(ValueError, match="config.train.epochs is missing; .* has 30"):
        check_config(config, "vision", "time_series")
    for config, names in (
        (config_of("vision"), ["retrieval"]),
        (config_of("retrieval"), ["vision", "time_series"]),
    ):
        files = " or ".join(f"configs/{name}.py" for name in names)
        with pytest.raises(ValueError, match=re.escape(f"takes a config like {files}")):
            check_config(config, *names)


@pytest.mark.parametrize(
    "name", ["retrieval", "vision", "time_series", "bags", "recall"]
)
def test_every_shipped_variant_passes_the_check(name):
    for variant in config_module(name).VARIANTS:
        check_config(config_of(name, variant), name)
    if name == "time_series":  # equal fractions are no duplicates
        check_config(changed(name, "data.split", (0.4, 0.3, 0.3)), name)
        check_config(changed(name, "model.alpha_start", 0.5), name)


@pytest.mark.parametrize(
    "name", ["retrieval", "vision", "time_series", "bags", "recall"]
)
def test_every_variant_states_its_cost(name):
    for variant in config_module(name).VARIANTS:
        assert cost(name, variant), variant
    assert cost(name, "mine") == ""


def test_every_task_and_variant_has_a_directory_of_its_own():
    places = [
        _place(config_of(name, variant))
        for name, *variants in (
            ("retrieval", "demo", "query"),
            ("vision", "digits", "cifar10"),
            ("time_series", "demo", "csv"),
            ("bags", "musk1", "csv"),
        )
        for variant in variants
    ]
    assert len(set(places)) == len(places)
    assert str(places[0]) == "results/retrieval/demo"
    assert str(places[2]) == "results/vision/digits"
    assert str(places[4]) == "results/forecasting/demo"
    assert str(places[6]) == "results/bags/musk1"


def test_progress_in_a_log_is_one_line_at_intervals(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    progress = Progress("demo", 100, "memory sets", done=20)
    for _ in range(80):
        clock[0] += 1
        progress.advance(1)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "demo: 25 of 100 memory sets, 5 s, about 75 s left"
    assert [line.split(",")[1] for line in lines] == [" 5 s", " 15 s", " 35 s", " 75 s"]
    assert Progress("x", 9, "steps").line(4.0) == "x: 0 of 9 steps, 4 s"
    early = Progress("x", 101, "steps")  # most of the time was compilation so far
    early.advance(1)
    assert early.line(6.0) == "x: 1 of 101 steps, 6 s"
    long = Progress("x", 100, "steps")
    long.advance(1)
    assert long.line(120.0) == "x: 1 of 100 steps, 2 min, about 3.3 h left"
    hidden = Progress("x", 9, "steps", show=False)
    clock[0] += 99
    hidden.advance(1)
    assert capsys.readouterr().err == ""


OWN = """
from uhop_jax.command_line import config_module

def get_config():
    config = config_module("{name}").get_config({variant!r})
    {change}
    return config
"""


def test_retrieve_names_the_error_and_writes_nothing(tmp_path):
    (tmp_path / "own.py").write_text(
        OWN.format(name="retrieval", variant="demo", change="config.runz = 3")
    )
    huge = "--config.data.name=synthetic:sphere:999999999"
    wrong = {
        "--config=own.py": "unknown config key: config.runz; did you mean config.runs",
        "--config=configs/vision.py": "takes a config like configs/retrieval.py",
        huge: "GiB are more than the mem",
        "--config.memories=(10,10)": "memories must name each once, got 10 twice",
        "--config.seed=-1": "seed must be at least 0, got -1",
    }
    cases = [[flag] for flag in wrong]
    outcomes = run_script(tmp_path, "retrieve.py", *cases)
    for (code, err), message in zip(outcomes, wrong.values(), strict=True):
        assert code == 2 and message in err, err
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "results").exists()


def test_train_names_the_error(tmp_path):
    """Divergence, sizes beyond memory, another script's config, damaged records."""
    (tmp_path / "own.py").write_text(
        OWN.format(name="vision", variant="digits", change="config.train.epochz = 3")
    )
    for name, text in (("list", "[]"), ("deep", "[" * 100_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
        (tmp_path / name / "run.json").write_text("{}")
    tiny = ["--config.sizes=(20,)", "--config.model.size=8", "--config.model.depth=1"]
    tiny += ["--config.train.batch_size=4", "--config.train.epochs=1"]
    wrong = {
        "--config.train.learning_rate=1e30": "the loss is no longer finite in epoch",
        "--config.model.size=1000000000": "not enough memory for sizes of this config",
        "--config=configs/retrieval.py": "takes a config like configs/vision.py or",
        "--config=own.py": "config.train.epochz; did you mean config.train.epochs",
        "--workdir=list": "list/config.json is damaged: it must hold an object, got l",
        "--workdir=deep": "deep/config.json is damaged, it is no JSON",
    }
    cases = [[flag] if "--config=" in flag else [*tiny, flag] for flag in wrong]
    outcomes = run_script(tmp_path, "train.py", *cases)
    for (code, err), message in zip(outcomes, wrong.values(), strict=True):
        *progress, sentence = err.strip().splitlines()
        assert code == 2 and message in sentence, err
        assert all(" examples, " in line for line in progress), err
    # Failed runs do not bind the default directory.
    record = json.loads((tmp_path / "results/vision/digits/run.json").read_text())
    assert record["written"] == {}
    assert str(ROOT) not in json.dumps(record)


def test_the_command_line_wins_over_the_file_and_is_kept(tmp_path):  # UC-36
    path = tmp_path / "mine.py"
    path.write_text(
        "from uhop_jax.command_line import config_module\n\n\n"
        "def get_config():\n"
        "    config = config_module('retrieval').get_config('capacity')\n"
        "    config.data.name, config.methods = 'digits', ('MHM',)\n"
        "    config.memories, config.runs, config.every_setting = (5,), 9, True\n"
        "    return config\n"
    )
    flags = [f"--config={path}", "--config.runs=1", "--config.tuning_queries=5"]
    flags += ["--config.every_setting=False", "--config.images=0"]
    kept = tmp_path / "kept"
    apart = ["--config.every_setting", "False"]  # refused: nobody may take it for True
    (code, text), *refused = run_script(
        tmp_path, "retrieve.py", [*flags, f"--workdir={kept}"], ["--slott", "3"], apart
    )
    assert code == 0, text
    config = json.loads((kept / "config.json").read_text())
    assert (config["runs"], config["every_setting"]) == (1, False)
    assert config["data"]["name"] == "digits"
    for (code, text), name in zip(refused, ("slott", "False"), strict=True):
        assert code == 2 and name in text
