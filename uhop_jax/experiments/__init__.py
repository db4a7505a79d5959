"""Experiments of the paper, each a function of a config and a working directory."""

from pathlib import Path

from ml_collections import ConfigDict

from uhop_jax._checks import check_choice
from uhop_jax.experiments import demo

EXPERIMENTS = {"demo": demo.run}


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the experiment that `config.variant` names; results go to `workdir`.

    Raises:
      ValueError: if the variant is unknown, the config cannot be run, or the directory
        holds the run of another config.
    """
    check_choice("variant", config.variant, EXPERIMENTS)
    EXPERIMENTS[config.variant](config, workdir)
