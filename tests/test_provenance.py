"""Result files have records of their code, and files of other code are stale."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import files  # noqa: E402
import provenance  # noqa: E402
import reproduction  # noqa: E402
import tables  # noqa: E402

QUOTED = [n for n in files.KNOWN if (files.RESULTS / f"{n}.csv").exists()]


@pytest.mark.parametrize("name", QUOTED)
def test_a_result_file_has_a_record_of_its_code(name):
    record = files.made_by(name)
    assert record, f"{name}.made_by.json is missing"
    commit = record["commit"] or record["published"]
    if not provenance.has_history():
        pytest.skip("no whole checkout of the repository: no history to look in")
    assert provenance.is_ancestor(commit), f"HEAD does not have {commit}"
    if record["commit"]:
        assert record["command"] and set(record["modules"]) >= {"uhop_jax.separation"}


def test_a_version_ignores_docstrings_and_comments(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    (tmp_path / "uhop_jax").mkdir()
    versions = []
    for text in (
        '"""Doc."""\n\n\ndef f(x):\n    """Says."""\n    return x + 1  # so\n',
        "def f(x):\n    return (x + 1)\n",
        "def f(x):\n    return x + 2\n",
    ):
        (tmp_path / "uhop_jax" / "one.py").write_text(text)
        provenance.tree_of.cache_clear()
        provenance.version.cache_clear()
        versions.append(provenance.version("uhop_jax.one"))
    provenance.tree_of.cache_clear()
    provenance.version.cache_clear()
    assert versions[0] == versions[1] != versions[2]


def test_files_depend_on_the_imports_of_their_command():
    vision, series = map(provenance.modules_of, ("vision", "forecasting"))
    assert "uhop_jax.models.vision" in vision and "uhop_jax.models.vision" not in series
    assert "uhop_jax.models.stanhop" in series
    assert "uhop_jax.models.stanhop" not in vision
    fair, one = map(provenance.modules_of, ("retrieval", "retrieval, one beta"))
    assert "uhop_jax.calibration" in fair and "uhop_jax.calibration" not in one
    assert {"uhop_jax.stage_one", "uhop_jax.experiments"} <= set(one)
    for module in provenance.INERT | provenance.FAIR_ALONE:
        assert provenance.path_of(module), f"{module} is no longer there"


def test_studies_of_softmax_alone_do_not_depend_on_entmax():
    kinds = {name: files.kind(name) for name in files.STUDIES}
    alone = {name for name, kind in kinds.items() if kind == "vision, softmax"}
    assert {"cifar10_table", "cifar100_bilevel", "expressiveness_cifar10"} <= alone
    assert kinds["tiny20"] == kinds["patches"] == "vision"  # sparse and entmax arms
    # Without arms the default arms of the config are trained, some of them sparse.
    command = "train.py --config=configs/vision.py:cifar10"
    assert provenance.kind_of(command) == "vision"
    arms = """--config.arms='("MHM",)'"""
    assert provenance.kind_of(f"{command} {arms}") == "vision, softmax"
    softmax, every = map(provenance.modules_of, ("vision, softmax", "vision"))
    assert set(every) - set(softmax) == set(provenance.ENTMAX_ALONE)


def test_a_changed_module_makes_a_file_stale():
    versions = provenance.versions("vision")
    assert not provenance.why_stale({"modules": versions}, "vision")
    other = versions | {"uhop_jax.losses": "0" * 12}
    assert provenance.why_stale({"modules": other}, "vision") == ["uhop_jax.losses"]
    assert provenance.why_stale({"commit": None}, "vision") == ["not recorded"]


def test_studies_run_from_committed_code_alone(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(files, "run", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(provenance, "uncommitted", lambda: ["uhop_jax/losses.py"])
    monkeypatch.setattr(sys, "argv", ["reproduction.py", "--run", "grid_mnist"])
    with pytest.raises(SystemExit, match="commit first: uhop_jax/losses.py"):
        reproduction.main()
    assert not ran


def test_missing_and_stale_studies_are_run_if_affordable(monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(files, "run", lambda name, data: ran.append(name))
    monkeypatch.setattr(files, "missing", lambda: ["grid_mnist", "tiny20"])
    monkeypatch.setattr(files, "stale", lambda: {"theorems": ["not recorded"]})
    monkeypatch.setattr(provenance, "uncommitted", lambda: [])
    monkeypatch.setattr(reproduction, "REPORT", tmp_path / "page.md")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for page in tables.TABLES:
        (tmp_path / page).write_text((ROOT / page).read_text())
    monkeypatch.setattr(sys, "argv", ["reproduction.py", "--run"])
    reproduction.main()
    assert ran == ["grid_mnist", "theorems"]
    assert "since they are long: tiny20" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["reproduction.py", "--stale"])
    reproduction.main()
    assert capsys.readouterr().out == "theorems: not recorded\n"


def test_a_study_begun_by_other_code_starts_anew(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(files, "WORK", tmp_path / "work")
    monkeypatch.setattr(files, "RESULTS", tmp_path / "results")
    workdir = tmp_path / "work" / "grid_mnist"
    versions, commits = {"uhop_jax.losses": "1"}, iter("abc")
    monkeypatch.setattr(
        provenance,
        "made_now",
        lambda kind, command: {
            "commit": next(commits),
            "command": command,
            "modules": dict(versions),
        },
    )

    def study(command, cwd, check):
        assert f"--workdir={workdir}" in command and "--config.data.dir=d" in command
        (workdir / "results.csv").write_text("a,b\n1,2\n")
        (workdir / "config.json").write_text('{"data": {"dir": "d", "name": "x"}}')

    monkeypatch.setattr(files.subprocess, "run", study)
    files.run("grid_mnist", "d")
    assert files.made_by("grid_mnist")["modules"] == versions
    half = workdir / "half_done"
    half.touch()
    files.run("grid_mnist", "d")
    assert half.exists()  # the same code continues, under the commit that began the run
    assert files.made_by("grid_mnist")["commit"] == "a"
    versions["uhop_jax.losses"] = "2"
    capsys.readouterr()
    files.run("grid_mnist", "d")
    assert not half.exists() and "begins anew" in capsys.readouterr().out
    assert files.made_by("grid_mnist")["commit"] == "c"
    assert json.loads((tmp_path / "results" / "grid_mnist.json").read_text()) == {
        "data": {"name": "x"}
    }
