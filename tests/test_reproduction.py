"""The reproduction report follows from its files, and its verdicts from its numbers."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import claims  # noqa: E402
import compare_reference  # noqa: E402
import files  # noqa: E402
import provenance  # noqa: E402
import reproduction  # noqa: E402
import theorems  # noqa: E402
from theorems import FAILS, HOLDS, PARTLY, UNTESTED  # noqa: E402

VERDICTS = (HOLDS, PARTLY, FAILS, UNTESTED)
# Theorems, lemmas, figures and tables of the paper, but for the notation.
LABELS = """
lemma:retrieval_dyn lemma:convergence lem:help-conv lem:converge-gd thm:exact
coro:exact_coro thm:perfect_kernel def:stored_and_retrieved def:max-loss
dfn:separation-loss eqn:error_bound_exp fig:mem-contribution fig:ret-error
fig:kernel-epoch fig:expresivenss fig:cifar100-main fig:ret-error-sep-loss
mnist-avg-max-epoch cifar-avg-max-epoch fig:mem-ret-big fig:cifar10-max fig:cifar100-max
fig:cifar10-nax fig:cifar10-1000 fig:cifar10-50000 fig:cifar100-1000 fig:cifar100-50000
fig:tiny-1000 fig:tiny-Full tab:img-cls table:time-series abstract sec:intro
""".split()


def rows_of(page):
    """Cells of every row of the tables whose verdict is in bold."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    return [line.strip("| ").split(" | ") for line in lines]


def test_the_page_is_what_the_files_say():
    assert reproduction.REPORT.read_text() == reproduction.report()


README = (ROOT / "README.md").read_text()
FIXED = ("MHM", "cosine", "centred cosine", "l2", "squared l2", "l1")


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("capacity, MNIST, 10 sets", "reference_mnist"),
        ("capacity, CIFAR-10, 4 sets", "reference_cifar"),
        ("noise, MNIST, 10 sets", "reference_noise_mnist"),
        ("noise, CIFAR-10, 3 sets", "reference_noise_cifar"),
    ],
)
def test_agreement_with_the_official_numbers_is_counted(title, name):
    found = compare_reference.compare(reproduction.RESULTS / f"{name}.csv")
    z = [abs(row[-1]) for row in found]
    counts = len(z), sum(x <= 2 for x in z), sum(x <= 3 for x in z)
    assert f"| {title} | {' | '.join(map(str, counts))} |" in README


@pytest.mark.parametrize(
    ("title", "kind", "level", "memories"),
    [
        ("mask 50 %", "mask", 0.5, 500),
        ("mask 80 %", "mask", 0.8, 500),
        ("mask 95 %", "mask", 0.95, 500),
        ("noise 0.5, clamped", "noise", 0.5, 500),
        ("noise 1, clamped", "noise", 1.0, 500),
        ("noise 0.5, folded", "folded_noise", 0.5, 500),
        ("noise 1, folded", "folded_noise", 1.0, 500),
        ("a quarter under one square", "block", 0.25, 100),
        ("blur, 2 pixels", "blur", 2.0, 100),
        ("shift, 2 pixels", "shift", 2.0, 100),
    ],
)
def test_tables_of_the_readme_are_of_the_files(title, kind, level, memories):
    cells = [title]
    study = "grid" if memories == 500 else "dependent"
    for data in ("mnist", "cifar"):
        where = {"corruption": kind, "level": level, "memories": memories}
        rows = files.rows_of(f"{study}_{data}")
        rows = [r for r in rows if all(r[k] == v for k, v in where.items())]
        means = {name: claims.means(rows, method=name) for name in FIXED}
        best = min(means, key=means.__getitem__)
        cells.append(f"{best} {means[best]:.3g}")
        cells.append(f"{claims.means(rows, method='calibrated'):.3g}")
        if study == "grid":
            cells.append(f"{claims.means(rows, method='limit'):.3g}")
    assert f"| {' | '.join(cells)} |" in README


def test_accuracies_of_the_readme_are_of_the_files():
    text = " ".join(README.split())

    def accuracies(study, *arms):
        rows = reproduction.read(study)
        for arm in arms:
            yield 100 * np.mean([r["test_accuracy"] for r in rows if r["arm"] == arm])

    plain, uhop = accuracies("cifar_paper", "MHM", "MHM + U-Hop")
    assert f"MHM {plain:.1f} ± 0.5 % and MHM + U-Hop {uhop:.1f} ± 1.0 %" in text
    controls = list(accuracies("cifar_controls", *claims.CONTROLS))
    assert "give {:.1f}, {:.1f} and {:.1f} %".format(*controls) in text
    plain, uhop = accuracies("patches", "MHM", "MHM + U-Hop")
    assert f"{plain:.1f} % without and {uhop:.1f} % with U-Hop" in text
    controls = list(accuracies("patches", *claims.CONTROLS))
    assert f"between {min(controls):.1f} and {max(controls):.1f}" in text


def test_every_row_has_a_verdict_and_every_label_a_row():
    rows = rows_of(reproduction.report())
    for row in rows:
        assert row[-2].strip("*") in VERDICTS, row
        if row[-2] == f"**{UNTESTED}**":
            assert row[-1].strip("- ") or row[2] != "-", row
    labels = {label.strip("`") for row in rows for label in row[0].split()}
    assert set(LABELS) <= labels
    assert all(claim.studies or claim.missing for claim in reproduction.CLAIMS)


def test_a_number_of_the_page_is_that_of_its_file():
    rows = reproduction.read("cifar_paper")
    accuracies = [r["test_accuracy"] for r in rows if r["arm"] == "MHM"]
    mean = 100 * sum(accuracies) / len(accuracies)
    (row,) = [r for r in rows_of(reproduction.report()) if "52.2 %" in r[1]]
    assert float(row[3].split()[0]) == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize("name", files.STUDIES)
def test_a_result_file_is_of_the_command_that_is_printed(name):
    asked = files.asked(name)  # a command that its config takes
    script = shlex.split(files.STUDIES[name].command)[0]
    assert (ROOT / script).exists() and asked
    path = files.RESULTS / f"{name}.json"
    if path.exists():
        text = path.read_text()
        assert "/tmp" not in text and "dir" not in json.loads(text)["data"]
    if files.other_than_asked(name):
        assert not files.read(name) and f"{name}.csv" not in files_of_the_page()


def files_of_the_page():
    return set(re.findall(r"results/(\w+\.csv)", reproduction.REPORT.read_text()))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (claims.of_shares([1.0, 0.9]), HOLDS),
        (claims.of_shares([1.0, 0.2]), PARTLY),
        (claims.of_shares([0.4]), FAILS),
        (claims.of_values([0.8, 0.2], 0.7, 0.3), PARTLY),
        (claims.of_values([0.1, -0.2], 0.7, 0.3), FAILS),
        (claims.of_gain(3.0, 0.5, 3.0), HOLDS),
        (claims.of_gain(1.2, 0.5, 3.0), PARTLY),
        (claims.of_gain(3.0, 0.5, 7.0), PARTLY),
        (claims.of_gain(-3.0, 0.5, 3.0), FAILS),
        (claims.of_gain(3.0, float("inf"), 3.0), UNTESTED),
        (claims.worst([HOLDS, FAILS]), PARTLY),
        (theorems.of_counts(3, 3), HOLDS),
        (theorems.of_counts(0, 3), FAILS),
    ],
)
def test_verdicts_follow_from_numbers(found, verdict):
    assert found == verdict


def synthetic(uhop):
    """Two memory sets of one cell."""
    cell = {"data": "x", "protocol": "paper", "memories": 100, "corruption": "mask"}
    cell |= {"level": 0.5}
    named = [("MHM", "", 1.0), ("l1", "", 0.8), ("U-Hop", "N=1", uhop)]
    return [
        cell | {"method": name, "setting": setting, "error": error + 0.01 * run}
        for name, setting, error in named
        for run in (0, 1)
    ]


@pytest.mark.parametrize(("uhop", "verdict"), [(0.5, HOLDS), (0.9, FAILS)])
def test_claims_on_synthetic_numbers(uhop, verdict):
    rows = synthetic(uhop)
    assert claims.single_step({"a": rows}).verdict == verdict
    claim = claims.Claim(("x",), "", ("a", "b"), claims.least_error, "")
    found = claims.judged(claim, {"a": rows, "b": rows})
    assert found.verdict == verdict and f"U-Hop {uhop + 0.005:.3g}" in found.paper
    capped = claims.judged(claim, {"a": rows, "b": []})  # a study is missing
    assert capped.verdict == (PARTLY if verdict == HOLDS else FAILS)
    assert claims.judged(claim, {"a": [], "b": []}).verdict == UNTESTED


@pytest.mark.parametrize(
    ("by_task", "verdict"), [(0.5, HOLDS), (0.56, PARTLY), (None, HOLDS)]
)
def test_a_gain_is_judged_against_each_control(by_task, verdict):
    means = {"MHM + U-Hop": 0.55, "MHM, matched size": 0.5}
    means |= {"MHM + kernel by task": by_task} if by_task else {}
    rows = [
        {"arm": arm, "test_accuracy": mean + 0.001 * seed}
        for arm, mean in means.items()
        for seed in (0, 1, 2)
    ]
    found = claims.beyond_controls({"cifar_paper": rows[:3], "cifar_controls": rows})
    assert found.verdict == verdict and "to MHM, matched size +5.00 ± " in found.paper
    assert claims.beyond_controls({"patches": rows[:3]}).verdict == UNTESTED


def test_forecasts_wait_for_their_file():
    judge = claims.forecast("etth1", 96)
    row = {"data": "etth1", "horizon": 96, "window": 168, "validation_loss": 0.3}
    row["test_mae"] = 0.4
    rows = [
        row | {"arm": arm, "test_mse": 0.39 + 0.001 * seed - 0.02 * (arm != "GSH")}
        for arm in ("GSH", "GSH + U-Hop")
        for seed in (0, 1, 2)
    ]
    assert judge({"etth1": rows}).verdict == PARTLY  # MSE lower, MAE the same
    assert judge({"etth1": rows[:3]}).verdict == UNTESTED
    # Another window, which validation does not choose.
    longer = {"window": 336, "validation_loss": 0.31, "test_mse": 9.0}
    assert judge({"etth1": [r | longer for r in rows] + rows}) == judge({"etth1": rows})


@pytest.mark.parametrize(
    "check", [theorems.rates, theorems.folded, theorems.on_the_sphere]
)
def test_exact_cases_are_those_of_the_file(check):
    names = (reproduction.THEOREMS, reproduction.CORRECTED)
    kept = [
        theorems.Finding(**row) for name in names for row in reproduction.read(name)
    ]
    assert check() in kept


# -- Provenance ------------------------------------------------------------------------

QUOTED = [n for n in files.KNOWN if (files.RESULTS / f"{n}.csv").exists()]


@pytest.mark.parametrize("name", QUOTED)
def test_a_result_file_says_what_made_it(name):
    record = files.made_by(name)
    assert record, f"{name}.made_by.json is missing"
    commit = record["commit"] or record["published"]
    if not provenance.has_history():
        pytest.skip("not a checkout of the repository: it has no history to look in")
    assert provenance.is_ancestor(commit), f"HEAD does not have {commit}"
    if record["commit"]:
        assert record["command"] and set(record["modules"]) >= {"uhop_jax.separation"}


def test_a_version_is_of_what_code_does(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    (tmp_path / "uhop_jax").mkdir()
    found = []
    for text in (
        '"""Doc."""\n\n\ndef f(x):\n    """Says."""\n    return x + 1  # so\n',
        "def f(x):\n    return (x + 1)\n",
        "def f(x):\n    return x + 2\n",
    ):
        (tmp_path / "uhop_jax" / "one.py").write_text(text)
        provenance.tree_of.cache_clear()
        provenance.version.cache_clear()
        found.append(provenance.version("uhop_jax.one"))
    provenance.tree_of.cache_clear()
    provenance.version.cache_clear()
    assert found[0] == found[1] != found[2]


def test_files_depend_on_what_their_command_imports():
    vision, series = map(provenance.modules_of, ("vision", "forecasting"))
    assert "uhop_jax.models.vision" in vision and "uhop_jax.models.vision" not in series
    assert "uhop_jax.models.stanhop" in series
    assert "uhop_jax.models.stanhop" not in vision
    fair, one = map(provenance.modules_of, ("retrieval", "retrieval, one beta"))
    assert "uhop_jax.calibration" in fair and "uhop_jax.calibration" not in one
    assert {"uhop_jax.stage_one", "uhop_jax.experiments"} <= set(one)
    for module in provenance.INERT | provenance.FAIR_ALONE:
        assert provenance.path_of(module), f"{module} is no longer there"


def test_a_changed_module_makes_a_file_stale():
    versions = provenance.versions("vision")
    assert not provenance.why_stale({"modules": versions}, "vision")
    other = versions | {"uhop_jax.losses": "0" * 12}
    assert provenance.why_stale({"modules": other}, "vision") == ["uhop_jax.losses"]
    assert provenance.why_stale({"commit": None}, "vision") == ["not recorded"]
