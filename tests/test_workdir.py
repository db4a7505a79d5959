"""The directory of a run: its config, its data, and damaged or changed files."""

import json
import re

import ml_collections
import numpy as np
import pytest

from uhop_jax import workdir
from uhop_jax.workdir import claimed, fingerprint, read_table, write_file, write_table

ROWS = [{"step": n, "loss": 1 / (n + 1), "name": "é"} for n in range(9)]
COLUMNS = {"step": int, "loss": float, "name": str}
READ = {"x.npy": fingerprint(np.arange(6.0).reshape(3, 2))}


def config_of(**changes):
    return ml_collections.ConfigDict({"seed": 0, "train": {"rate": 0.1}} | changes)


def begun(path, **changes):
    """A run that has written a table."""
    with claimed(path, config_of(**changes), READ):
        write_table(path / "metrics.csv", ROWS)
    return path


def refused(message, path, config=None, read=READ):
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=message):
        with claimed(path, config or config_of(), read):
            raise AssertionError
    after = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    assert after == before


def test_a_directory_is_bound_to_config_and_data(tmp_path):
    run = begun(tmp_path / "run")
    with claimed(run, config_of(), READ):
        assert read_table(run / "metrics.csv", COLUMNS) == ROWS
    refused("config.seed=0, this one has 1; give the flags", run, config_of(seed=1))
    refused("config.more=missing, this one has 3", run, config_of(more=3))
    grown = {"x.npy": fingerprint(np.arange(8.0).reshape(4, 2))}
    message = (
        r"another x.npy: it had shape \(3, 2\) and SHA-256 .*, now .* \(4, 2\) and"
    )
    refused(message, run, read=grown)
    swapped = {"x.npy": fingerprint(np.arange(6.0).reshape(3, 2)[::-1])}
    refused("restore it, or choose another --workdir", run, read=swapped)


def test_names_and_kinds_are_part_of_a_fingerprint():
    x = np.arange(4)
    parts = [(x,), (x[::-1],), (x.astype(float),), (x.reshape(2, 2),), (x, ("a",))]
    parts += [(x, ("b",)), (x.astype("M8[s]"),), (x, ("caf\udce9",))]
    assert len({fingerprint(*part)["sha256"] for part in parts}) == len(parts)
    assert fingerprint(x.reshape(2, 2).T) == fingerprint(x.reshape(2, 2).T.copy())


def test_files_of_others_are_left_alone(tmp_path):
    mine = tmp_path / "checkpoints" / "500" / "model.pt"
    mine.parent.mkdir(parents=True)
    mine.write_text("weights")
    refused("holds checkpoints and no config.json of a run", tmp_path)
    run = begun(tmp_path / "run")
    (run / "answers.csv").write_text("mine")
    with pytest.raises(ValueError, match="answers.csv was not written by this run"):
        write_file(run / "answers.csv", lambda path: path.write_text("ours"))
    assert (run / "answers.csv").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file, it must be a directory"):
        workdir.check(tmp_path / "file", config_of(), {})


def test_a_run_without_results_does_not_bind_its_directory(tmp_path):
    with pytest.raises(RuntimeError), claimed(tmp_path, config_of(), READ):
        (tmp_path / "checkpoints").mkdir()
        with claimed(tmp_path / "cell", config_of(), READ):  # as in a study
            raise RuntimeError
    begun(tmp_path, seed=1)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1
    refused("config.seed=1, this one has 0", tmp_path)


def test_a_run_killed_between_its_first_two_files_begins_again(tmp_path, monkeypatch):
    write_json = workdir._write_json

    def killed(path, tree):
        if path.name == "config.json":
            raise KeyboardInterrupt
        write_json(path, tree)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(workdir, "_write_json", killed)
        begun(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("*.json")] == ["run.json"]
    begun(tmp_path / "run")


def test_a_run_of_an_earlier_version_is_refused(tmp_path):
    run = begun(tmp_path / "run")
    (run / "run.json").unlink()
    refused("run of an earlier version, which kept no run.json", run)


@pytest.mark.parametrize("name", ["config.json", "run.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged, it is no JSON"),
        ("[" * 100_000, "is damaged, it is no JSON"),
        ("[1]", "must hold an object, got list"),
        ("null", "must hold an object, got NoneType"),
    ],
    ids=["cut", "deep", "list", "null"],
)
def test_damaged_records_are_named(tmp_path, name, text, message):
    run = begun(tmp_path / "run")
    (run / name).write_text(text)
    refused(f"{name} {message}".replace("json must", "json is damaged: it must"), run)


@pytest.mark.parametrize(
    ("text", "key"),
    [('{"written": {}}', "read"), ('{"read": {}, "written": {"a": 3}}', "a")],
)
def test_keys_of_a_damaged_record_are_named(tmp_path, text, key):
    run = begun(tmp_path / "run")
    (run / "run.json").write_text(text)
    refused(f"run.json is damaged: '{key}' must hold an object", run)


def test_two_runs_never_share_a_directory(tmp_path):
    with claimed(tmp_path, config_of(), READ):
        with pytest.raises(ValueError, match="is in use by another run; wait until"):
            with claimed(tmp_path, config_of(), READ):
                raise AssertionError
    with claimed(tmp_path, config_of(), READ):  # the lock has ended with its run
        pass


DAMAGE = {
    "no last line": lambda text: text[: text.rstrip().rfind(b"\n") + 1],
    "half a line": lambda text: text[:-9],
    "a digit less": lambda text: text.replace(b"0.3333333333333333", b"0.333333333"),
    "another value": lambda text: text.replace(b"0.5", b"0.4"),
    "two lines in one": lambda text: text.replace(b"\r\n", b"", 1),
    "nothing": lambda text: b"",
    "bytes": lambda text: text[:40] + b"\xff\x00" + text[42:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_changed_table_is_refused(tmp_path, damage):
    path = begun(tmp_path / "run") / "metrics.csv"
    text = damage(path.read_bytes())
    assert text != path.read_bytes()
    path.write_bytes(text)
    message = re.escape(str(path)) + " is not as the run has left it, with 9 rows"
    with pytest.raises(ValueError, match=message):
        read_table(path, COLUMNS)
    assert path.read_bytes() == text


def test_a_run_killed_while_writing_has_the_table_before(tmp_path, monkeypatch):
    """Killed between record and table, and again when the run continues."""
    path = begun(tmp_path / "run") / "metrics.csv"

    def killed(path, write):
        if path.suffix == ".csv":
            raise KeyboardInterrupt
        whole(path, write)

    whole = workdir.write_whole
    for more in (1, 2, 3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(workdir, "write_whole", killed)
            write_table(path, ROWS * (more + 1))
        assert read_table(path, COLUMNS) == ROWS
    write_table(path, ROWS * 2)
    assert read_table(path, COLUMNS) == ROWS * 2


def test_columns_of_another_version_are_named(tmp_path):
    path = begun(tmp_path / "run") / "metrics.csv"
    with pytest.raises(ValueError, match="has columns step, loss, name, this run wri"):
        read_table(path, {"step": int})
    assert read_table(path.with_name("none.csv"), COLUMNS) == []
