"""Claims about learning: studies that decide, studies for comparison, curves."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import claims  # noqa: E402
import convergence_claims  # noqa: E402
import files  # noqa: E402
import learning_claims  # noqa: E402
import tables  # noqa: E402
from rows import CLAIMS  # noqa: E402
from studies import RELEASED  # noqa: E402
from verdicts import (  # noqa: E402
    FAILS,
    HOLDS,
    NOT_AS_STATED,
    PARTLY,
    UNDECIDED,
    UNTESTED,
)


def arms(**means):
    """Three seeds of each arm, a thousandth apart."""
    return [
        {"data": "cifar10", "size": 0, "arm": arm, "parameters": 10}
        | {"test_accuracy": mean + 0.001 * seed, "max_train_accuracy": 0.99}
        | {"train_accuracy": mean + 0.1 + 0.001 * seed}
        for arm, mean in means.items()
        for seed in (0, 1, 2)
    ]


@pytest.mark.parametrize(
    ("without", "verdict"),
    [(0.50, HOLDS), (0.53, PARTLY), (0.55, FAILS), (0.551, FAILS)],
)
def test_a_gain_comes_from_stage_one_if_it_is_lost_without_stage_one(without, verdict):
    names = {"MHM": 0.5, RELEASED: 0.55, f"{RELEASED}, no Stage I": without}
    judgement = learning_claims.work_of_stage_one({"cifar10_table": arms(**names)})
    assert judgement.verdict == verdict and "over MHM +5.00 ± " in judgement.reference
    del names[f"{RELEASED}, no Stage I"]
    rows = arms(**names)
    assert learning_claims.work_of_stage_one({"x": rows}).verdict == UNTESTED


def test_the_deep_loss_is_printed_for_comparison():
    names = {"MHM": 0.5, RELEASED: 0.55, f"{RELEASED}, no Stage I": 0.52}
    results = {"cifar10_table": arms(**names)}
    alone = learning_claims.work_of_stage_one(results)
    results["cifar10_deep"] = arms(**{RELEASED: 0.57})
    both = learning_claims.work_of_stage_one(results)
    assert both.verdict == alone.verdict == HOLDS and "deep" not in alone.reference
    assert "deep-learning loss, by Stage I +5.00 ± " in both.reference
    assert "that loss over the average loss +2.00 ± " in both.reference
    assert both.reference.startswith(alone.reference)


def test_the_image_table_is_judged_by_the_released_model():
    judge = learning_claims.accuracy("cifar10", "Sparse MHM", 1)
    table = arms(**{"MHM": 0.51, RELEASED: 0.545})
    bilevel = arms(**{"MHM + U-Hop": 0.56})
    judgement = judge({"cifar10_table": table, "cifar10_bilevel": bilevel})
    assert judgement.verdict == HOLDS and "gain +5.00" in judgement.paper
    assert judgement.paper.endswith(f"the logits by exactly 0: {NOT_AS_STATED}")
    assert judge({"cifar10_table": table}) == judgement._replace(paper="-")
    # Without the released model Algorithm 2 decides nothing where it cannot act.
    rows = {"cifar10_table": table[:3], "cifar10_bilevel": bilevel}
    assert judge(rows).verdict == UNTESTED and judge(rows).paper == judgement.paper
    tiny = learning_claims.accuracy("tiny_imagenet", "MHM", 1)
    assert tiny({"tiny20": table}).verdict == PARTLY  # 20 of its classes
    only = learning_claims.accuracy("cifar10", "MHM", 1)
    assert only({"cifar10_table": table[:3]}).verdict == UNTESTED


def test_the_maximal_training_accuracy_is_taken_from_the_last_epoch():
    rows = arms(**{"MHM": 0.46, RELEASED: 0.55})  # both have the maximum 0.99
    judge = learning_claims.accuracy("cifar10", "MHM", 0)
    assert "56.1 ± 0.1 %, with U-Hop 65.1" in judge({"cifar10_table": rows}).reference


def row_of(says):
    (claim,) = [claim for claim in CLAIMS if claim.says.startswith(says)]
    return claim


def test_a_study_for_comparison_caps_no_verdict():
    claim = row_of("CIFAR-10, MHM, test accuracy")
    results = {"cifar10_table": arms(**{"MHM": 0.51, RELEASED: 0.545})}
    assert claims.judged(claim, results).verdict == HOLDS
    capped = claim._replace(compared=())
    assert claims.judged(capped, results).verdict == PARTLY
    claim = row_of("what U-Hop gains in learning")
    names = {"MHM": 0.5, RELEASED: 0.55, f"{RELEASED}, no Stage I": 0.5}
    results = {name: arms(**names) for name in ("cifar10_table", "cifar100_table")}
    assert claims.judged(claim, results).verdict == HOLDS
    del results["cifar100_table"]
    assert claims.judged(claim, results).verdict == PARTLY
    for claim in CLAIMS:
        assert set(claim.compared) < set(claim.studies) or not claim.compared


@pytest.mark.parametrize(
    ("patches", "verdict"), [(0.56, PARTLY), (0.45, NOT_AS_STATED)]
)
def test_algorithm_two_needs_a_second_memory(patches, verdict):
    results = {
        "cifar10_table": arms(MHM=0.5),
        "cifar10_bilevel": arms(**{"MHM + U-Hop": 0.56}),
    }
    judgement = learning_claims.algorithm_two(results)
    assert (
        judgement.verdict == NOT_AS_STATED and "CIFAR +6.00 points" in judgement.paper
    )
    results["patches"] = arms(**{"MHM": 0.5, "MHM + U-Hop": patches})
    judgement = learning_claims.algorithm_two(results)
    assert judgement.verdict == verdict and "points" in judgement.fair
    assert learning_claims.algorithm_two({"cifar10_table": arms(MHM=0.5)}).verdict == (
        UNTESTED
    )


def test_gains_by_sample_size():
    def rows(*gains):
        for size, gain in zip((1000, 5000, 0), gains, strict=True):
            for row in arms(**{"MHM": 0.5, RELEASED: 0.5 + gain}):
                yield row | {"size": size}

    grown = learning_claims.grows({"x": list(rows(0.0, 0.02, 0.05))})
    assert grown.verdict == HOLDS and "all: +5.00" in grown.reference
    assert learning_claims.grows({"x": list(rows(0.05, 0.05, 0.05))}).verdict == PARTLY
    judge = learning_claims.by_size("test_accuracy")
    assert judge({"x": list(rows(0.0, 0.02, 0.05))}).verdict == HOLDS
    assert judge({"x": list(rows(-0.02, 0.02, 0.05))}).verdict == PARTLY
    assert judge({"x": list(rows(-0.02, -0.02, -0.05))}).verdict == FAILS


def epochs(arm, size, *accuracies):
    """Two seeds of a run, a hundredth apart, test 0.1 below training."""
    return [
        {"data": "cifar10", "arm": arm, "size": size, "seed": seed, "epoch": epoch}
        | {"train_accuracy": x + 0.01 * seed, "test_accuracy": x - 0.1 + 0.01 * seed}
        for seed in (0, 1)
        for epoch, x in enumerate(accuracies, 1)
    ]


def test_convergence_is_judged_by_the_curves():
    slow, fast = (0.2, 0.4, 0.5, 0.6), (0.4, 0.62, 0.7, 0.8)
    rows = epochs("MHM", 1000, *slow) + epochs(RELEASED, 1000, *fast)
    both = rows + epochs("MHM", 0, *slow) + epochs(RELEASED, 0, *slow)
    judgement = convergence_claims.faster({"a": rows})
    assert judgement.verdict == HOLDS
    assert "mean training accuracy, 1000: +20.50 ± 0.71" in judgement.reference
    assert judgement.reference.endswith("last training accuracy, 1000: 2.0 of 4")
    judgement = convergence_claims.faster({"a": both[:16], "b": both[16:]})
    assert judgement.verdict == PARTLY and "; all: never in all seeds of 4" in (
        judgement.reference
    )
    # Missing curves count as a missing study, even if the study has results.
    claim = row_of("faster convergence at every sample size of CIFAR-10,")
    first, second = claim.studies
    results = {first: rows, second: rows, f"{first}_curves": rows}
    assert claims.judged(claim, results).verdict == PARTLY
    assert claims.judged(claim, {first: rows}).verdict == UNTESTED
    results[f"{second}_curves"] = both[16:]
    assert claims.judged(claim, results).verdict == PARTLY
    worse = epochs("MHM", 0, *fast) + epochs(RELEASED, 0, *slow)
    assert convergence_claims.faster({"a": worse}).verdict == FAILS


def test_curves_are_kept_of_the_epochs_of_the_task(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RESULTS", tmp_path / "results")
    run = tmp_path / files.directory_name(files.ImageCell(RELEASED, 1000, 32))
    run.mkdir()
    (tmp_path / "config.json").write_text('{"data": {"dir": "/x"}}')
    (tmp_path / "results.csv").write_text(
        f'data,arm,size,patch,seed\ncifar10,"{RELEASED}",1000,32,1\n'
    )
    (tmp_path / "curves.png").write_bytes(b"png")
    numbers = "train_accuracy,test_accuracy,train_loss,test_loss"
    (run / "metrics.csv").write_text(
        f"phase,epoch,seed,{numbers}\nstage_one,1,1,,,,\n"
        "task,1,0,0.1,0.1,9,9\ntask,1,1,0.123456,0.2,2.345678,3\n"
    )
    files.keep("expressiveness_cifar10", tmp_path)
    kept = tmp_path / "results" / "expressiveness_cifar10_curves"
    assert kept.with_suffix(".csv").read_text().splitlines() == [
        f"data,arm,size,seed,epoch,{numbers}",
        f'cifar10,"{RELEASED}",1000,1,1,0.1235,0.2,2.346,3',
    ]
    assert kept.with_suffix(".png").exists()
    files.keep("cifar10_deep", tmp_path)
    assert not (tmp_path / "results" / "cifar10_deep_curves.csv").exists()


def test_accuracies_of_the_readme_follow_from_their_files(monkeypatch):
    def read(name):
        return arms(MHM=0.522, **{RELEASED: 0.5}) if name == "cifar10_table" else []

    monkeypatch.setattr(tables, "read", read)
    monkeypatch.setattr(
        tables, "all_results", lambda: {"cifar10_table": read("cifar10_table")}
    )
    lines = tables.images().splitlines()
    assert lines[2] == (
        "| MHM | 62.3 ± 0.06 (56.0) | 52.3 ± 0.06 (52.2) | - (32.3) | - (26.3) |"
    )
    assert lines[4] == "| the same layer without Stage I | - | - | - | - |"
    first, *_, last = tables.vision_reference().splitlines()[2:]
    assert first.startswith("| all images, MHM | 54.76 (1 seed) | 62.3 ± 0.1 | +")
    assert last.startswith("| 1,000 images, MHM + U-Hop as released | 87.2 ± 2.37 (5 ")
    assert "| - | - |" in last


def test_agreement_with_the_released_image_code():
    rows = arms(**{"MHM": 0.512}) + [{"data": "x", "arm": "MHM", "size": 0}]
    training, test = learning_claims.agreement({"cifar10_table": rows[:3]})
    assert test.official == "51.31 (1 seed)" and test.measured.startswith("51.3")
    assert abs(test.z) < 1 and training.where.endswith("MHM, training")


def test_forecasts_wait_for_their_file():
    judge = learning_claims.forecast("etth1", 96)
    row = {"data": "etth1", "horizon": 96, "window": 168, "validation_loss": 0.3}
    row["test_mae"] = 0.4
    rows = [
        row | {"arm": arm, "test_mse": 0.39 + 0.001 * seed - 0.02 * (arm != "GSH")}
        for arm in ("GSH", "GSH + U-Hop")
        for seed in (0, 1, 2)
    ]
    assert judge({"etth1": rows}).verdict == PARTLY  # MSE lower, MAE the same
    assert judge({"etth1": rows[::3]}).verdict == UNDECIDED  # one seed
    assert judge({"etth1": rows[:3]}).verdict == UNTESTED
    # Another window, not chosen by validation.
    longer = {"window": 336, "validation_loss": 0.31, "test_mse": 9.0}
    assert judge({"etth1": [r | longer for r in rows] + rows}) == judge({"etth1": rows})
