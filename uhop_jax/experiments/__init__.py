"""Experiments of the paper, each a function of a config and a working directory."""

from pathlib import Path

from ml_collections import ConfigDict

from uhop_jax._checks import check_choice
from uhop_jax.command_line import check_config
from uhop_jax.experiments import (
    blind,
    cells,
    compare,
    figures,
    query,
    reliability,
    sweep,
    variants,
)
from uhop_jax.experiments.sweep import ABOUT, SCORES, SEPARATION, Experiment

_SWEEP = Experiment(
    ABOUT | SCORES,
    compare.retrieval_cell,
    compare.sets_of_retrieval,
    figures.sweep,
    compare.report,
)
_STEPS = _SWEEP._replace(
    columns=ABOUT | SCORES | SEPARATION, figure=variants.steps_figure
)

EXPERIMENTS = {
    "demo": _SWEEP,
    "capacity": _SWEEP,
    "noise": _SWEEP,
    "grid": _SWEEP._replace(report=compare.grid_report),
    "blind": Experiment(
        ABOUT | blind.COLUMNS,
        blind.blind_cell,
        cells.sets_scored,
        blind.blind_figure,
        blind.blind_report,
        compare=False,
        reliability=reliability.reliability_panels,
    ),
    "stage_one": _STEPS,
    "losses": _STEPS,
    "scatter": Experiment(
        ABOUT | dict.fromkeys(("rate", "beta", "error", "loss", "delta_min"), float),
        variants.scatter_cell,
        cells.sets_scored,
        variants.scatter_figure,
        variants.scatter_report,
        compare=False,
    ),
    "metastability": Experiment(
        ABOUT | dict.fromkeys(("alpha", "beta", "size", "error"), float),
        variants.metastability_cell,
        cells.sets_scored,
        variants.metastability_figure,
        variants.metastability_report,
        compare=False,
    ),
    "temperature": Experiment(
        ABOUT | dict.fromkeys(("beta", "error"), float),
        variants.temperature_cell,
        cells.sets_scored,
        variants.temperature_figure,
        variants.temperature_report,
        compare=False,
    ),
}


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the experiment that `config.variant` names; results go to `workdir`.

    Raises:
      ValueError: if the variant is unknown, the config cannot be run, or the directory
        holds the run of another config.
    """
    check_config(config, "retrieval")
    check_choice("variant", config.variant, (*EXPERIMENTS, "query"))
    if config.variant == "query":
        query.run(config, workdir)
        return
    sweep.run(EXPERIMENTS[config.variant], config, workdir)
