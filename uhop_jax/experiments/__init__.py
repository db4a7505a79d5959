"""Experiments of the paper, each a function of a config and a working directory."""

from pathlib import Path

from ml_collections import ConfigDict

from uhop_jax._checks import check_choice
from uhop_jax.command_line import check_config
from uhop_jax.experiments import figures, query, studies, sweep
from uhop_jax.experiments.sweep import ABOUT, SCORES, SEPARATION, Experiment

_SWEEP = Experiment(
    ABOUT | SCORES,
    sweep.retrieval_cell,
    sweep.sets_of_retrieval,
    figures.sweep,
    sweep.report,
)
_STEPS = _SWEEP._replace(
    columns=ABOUT | SCORES | SEPARATION, figure=studies.steps_figure
)

EXPERIMENTS = {
    "demo": _SWEEP,
    "capacity": _SWEEP,
    "noise": _SWEEP,
    "grid": _SWEEP._replace(report=sweep.grid_report),
    "stage_one": _STEPS,
    "losses": _STEPS,
    "scatter": Experiment(
        ABOUT | dict.fromkeys(("rate", "beta", "error", "loss", "delta_min"), float),
        studies.scatter_cell,
        sweep.sets_scored,
        studies.scatter_figure,
        studies.scatter_report,
        compare=False,
    ),
    "metastability": Experiment(
        ABOUT | dict.fromkeys(("alpha", "beta", "size", "error"), float),
        studies.metastability_cell,
        sweep.sets_scored,
        studies.metastability_figure,
        studies.metastability_report,
        compare=False,
    ),
    "temperature": Experiment(
        ABOUT | dict.fromkeys(("beta", "error"), float),
        studies.temperature_cell,
        sweep.sets_scored,
        studies.temperature_figure,
        studies.temperature_report,
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
