"""Reports and figures of studies, from records by hand: what is averaged with what."""

import itertools

import numpy as np
import pytest

from uhop_jax import plotting
from uhop_jax.command_line import load_config
from uhop_jax.experiments import blind, cells, compare, protocols, variants
from uhop_jax.experiments.reliability import Reliability
from uhop_jax.training import bag_report, study
from uhop_jax.training.cells import BagCell


def row(method="MHM", memories=10, **more):
    about = {"memories": memories, "corruption": "mask", "level": 0.5, "run": 0}
    return about | {"method": method, "setting": "", "error": 1.0} | more


def words(text):
    """The cells of each line of a table below its rule."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == {"-"})
    return [line.split() for line in lines[rule + 1 :]]


def test_foreign_queries_are_those_of_the_higher_score():
    queries = np.zeros((2, 3))
    held_out = blind.HeldOut(queries, queries, np.arange(2), queries + 1)
    scores = np.asarray([0.1, 0.3, 0.2, 0.4])  # own, own, foreign, foreign
    assert held_out.foreign_auroc(scores) == {"foreign_auroc": 0.75}
    assert held_out.both.shape == (4, 3) and held_out.both[2:].min() == 1


def test_the_best_beta_is_of_one_cell():
    """beta 1 is in every grid: its mean over cells stood beside betas of one cell."""
    lists = {10: {1.0: 0.5, 2.0: 0.1}, 500: {1.0: 40.0, 3.0: 10.0}}
    rows = [
        row(memories=M, beta=beta, error=error)
        for M, errors in lists.items()
        for beta, error in errors.items()
    ]
    report = variants.temperature_report(rows)
    assert words(report) == [
        ["M", "=", "10", "MHM", "2", "0.1"],
        ["M", "=", "500", "MHM", "3", "10"],
    ]
    first, second = variants.temperature_figure(rows)
    assert first.title.startswith("M = 10,") and second.title.startswith("M = 500,")
    assert first.series["MHM"].mean == [0.5, 0.1]
    assert second.series["MHM"].x == [1.0, 3.0]
    alone = variants.temperature_report(rows[:2])
    assert words(alone) == [["MHM", "2", "0.1"]]


def test_an_error_that_is_no_number_is_never_the_least():
    rows = [row(beta=0.1, error=float("nan")), row(beta=1.0, error=2.0)]
    assert words(variants.temperature_report(rows)) == [["MHM", "1", "2"]]


def test_correlations_and_mixtures_are_of_one_cell():
    rows = [
        row(memories=M, rate=1.0, loss=loss, error=sign * loss + shift)
        for M, sign, shift in ((10, 1.0, 0.0), (20, -1.0, 100.0))
        for loss in (1.0, 2.0, 3.0)
    ]
    rho = [line[-1] for line in words(variants.scatter_report(rows))]
    assert rho == ["1.000", "1.000", "-1.000", "-1.000"]
    rows = [
        row(memories=M, alpha=1.0, beta=beta, size=size)
        for M, sizes in ((10, (3.0, 1.0)), (20, (5.0, 4.0)))
        for beta, size in zip((1.0, 2.0), sizes, strict=True)
    ]
    sizes = [line[4:6] for line in words(variants.metastability_report(rows))]
    assert sizes == [["1", "2"], ["1", "-"]]
    assert [panel.title for panel in variants.metastability_figure(rows)] == [
        "MHM, M = 10",
        "MHM, M = 20",
    ]


def test_levels_are_not_averaged_against_steps():
    rows = [
        row("U-Hop", setting="N=5", level=level, error=error, loss=0.0, delta_min=0.0)
        for level, error in ((0.1, 1.0), (0.9, 9.0))
    ]
    panels = variants.steps_figure(rows)
    assert [p.series["U-Hop"].mean for p in panels] == [[1.0], [9.0]]
    assert [p.title for p in panels] == [
        "10 memories, mask 0.1",
        "10 memories, mask 0.9",
    ]


@pytest.mark.parametrize("order", [*itertools.permutations(("l2", "cosine", "MHM"))])
def test_of_equal_methods_the_first_is_best(order):
    """The order of a set of words differs from process to process."""
    rows = [row(name, error=0.0, top1=1.0) for name in order]
    last = compare.grid_report(rows).splitlines()[-1].split()
    assert last.count(order[0]) == 2


@pytest.mark.parametrize("kinds", [("mask", "noise"), ("noise",), ("mask",)])
def test_half_of_the_memories_are_learned_of_masked_cells_alone(monkeypatch, kinds):
    """A mask elsewhere in the grid once changed the cells of noise."""
    changes = {"protocol": "reference", "methods": (), "corruption.kinds": kinds}
    config = load_config(
        "retrieval", "demo", changes=changes | {"stage_one.steps": (5,)}
    )
    shares = {}
    patterns = cells.data.Patterns(
        cells.data.synthetic("gaussian", 8, 4).clip(0, 1), (4,), tuple("abcdefgh")
    )
    shared = cells.Study(config, patterns, protocols.protocol_of(config, 4))

    def fit(*arguments, share):
        shares[cell.kind] = share
        return dict.fromkeys(arguments[0], {})

    monkeypatch.setattr(cells, "fit_kernels", fit)
    for cell in cells.cells_of(config):
        shared.entries(cell, cells.SCORED, cells.Queries(None, None, None), range(1))
    expected = {"mask": 0.5, "noise": 1.0}
    assert shares == {kind: expected[kind] for kind in kinds}


@pytest.mark.parametrize(
    ("variant", "methods", "message"),
    [
        ("scatter", ("U-Hop", "l1"), "'l1'; choose one of U-Hop"),
        ("metastability", ("l2",), "'l2'; choose one of MHM, U-Hop"),
        ("temperature", ("MHM", "calibrated"), "temperature variant 'calibrated'"),
        ("stage_one", ("MHM",), "at least one of U-Hop, .*, got MHM"),
    ],
)
def test_methods_that_a_variant_does_not_study(variant, methods, message):
    """A run ended by an error of the figure, or had another method than asked for."""
    config = load_config("retrieval", variant, changes={"methods": methods})
    with pytest.raises(ValueError, match=message):
        protocols.check(config)
    protocols.check(load_config("retrieval", variant))


def test_curves_of_bags_are_of_the_chosen_model():
    """The models that validation rejects were part of the mean."""
    histories, scores = {}, []
    for dropout, loss in ((0.0, 1.0), (0.5, 3.0)):
        cell = BagCell("MHM", 0.0, dropout, 1)
        history = {"phase": "task", "epoch": 1, "seed": 0}
        history |= {"train_loss": loss, "validation_loss": loss}
        histories[cell] = [history]
        scores.append(
            cell._asdict() | {"seed": 0, "validation_loss": loss, "test_auc": 0.9}
        )
    train, validation, _ = bag_report.panels(histories, scores)
    assert train.series["MHM"].mean == validation.series["MHM"].mean == [1.0]
    assert train.series["MHM"].spread == [0.0]


def test_error_bars_over_folds_are_explained():
    """A study of one seed has them too: the title spoke of several seeds alone."""
    curve = plotting.Curve([1.0], [0.5], [0.0])
    panel = plotting.Panel("", {"MHM": curve}, "fold", "AUC")
    assert study.titled("musk1", [panel]) == "musk1"
    panel.series["MHM"] = curve._replace(spread=[0.1])
    assert study.titled("musk1", [panel]) == "musk1 (mean ± standard deviation)"


def test_blind_calibration_loses_to_the_best_fixed_similarity_of_a_cell():
    """One similarity is the best over all sets of a cell, not one for each set."""
    errors = {
        20: {"blind": (3.0, 1.0), "known corruption": (1.0, 1.0)},
        500: {"blind": (1.0, 1.2), "known corruption": (1.5, 1.5)},
    }
    fixed = {"cosine": (1.0, 2.0), "l1": (2.0, 0.6)}  # of l1 the mean is least, 1.3
    text = str(Reliability.of([0.75, 0.75], [True, False]))
    more = {"reliability": text, "foreign_auroc": 0.75}
    rows = [
        row(method, queries=Q, run=run, error=error, **more)
        for Q, by_method in errors.items()
        for method, runs in (by_method | fixed).items()
        for run, error in enumerate(runs)
    ]
    few, many = blind.besides(rows)
    assert (few.queries, few.similarity) == (20, "l1")
    assert few[2:5] == (1.3, 2.0, 1.0) and few.independent
    assert few.loses and few.far  # 2 is above 1.05 * 1.3 + 0.1 and above 1 + 0.5
    assert not many.loses and not many.far
    report = blind.blind_report(rows)
    assert words(report)[0][2:] == ["mask", "0.5", "1.3", "2", "1", "1.3", "1.1", "1.5"]
    assert "or 0.1 more: 1 of 2 cells\n  not 10 memories, mask 0.5, Q = 20" in report
    assert "or 0.5 more (Q = 500): 1 of 1 cells\n" in report
    assert blind.confidences(rows)[1][1:] == (0.25, 0.75, 0.75)
    assert "at most 0.03: 0 of 2 cells" in report and "difference 0.000" in report
