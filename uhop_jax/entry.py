"""The commands `uhop-retrieve` (`retrieve.py`) and `uhop-train` (`train.py`).

This module imports no package of the extra `lab`, so that it can name a missing one.
"""

import importlib.util
import os
import sys
from pathlib import Path

import jaxlib

LAB = (  # what the extra `lab` brings, as Python imports it
    *("absl", "matplotlib", "ml_collections", "orbax.checkpoint", "pandas", "PIL"),
    *("scipy", "sklearn", "tensorboardX", "tqdm"),
)


def retrieve() -> None:
    """The command `uhop-retrieve`, and `retrieve.py`."""
    _require_lab()
    from uhop_jax import command_line, experiments

    _compile_quickly()
    command_line.run_script(experiments.run, config="retrieval")


def train() -> None:
    """The command `uhop-train`, and `train.py`."""
    _require_lab()
    from uhop_jax import command_line
    from uhop_jax.training import train_and_evaluate

    command_line.run_script(train_and_evaluate, config="vision")


def _require_lab() -> None:
    """Ends the script with one sentence and exit status 2 if a package is missing."""
    missing = []
    for name in LAB:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the package above it
            spec = None
        if spec is None:
            missing.append(name)
    if missing:
        print(
            f"{Path(sys.argv[0]).name}: this script needs {', '.join(missing)}; "
            "pip install 'uhop-jax[lab]' (in a checkout, pip install -e '.[lab]') "
            "installs what scripts need",
            file=sys.stderr,
        )
        sys.exit(2)


def _compile_quickly() -> None:
    """Settings for programs that take longer to compile than to run.

    The older emitters of XLA for CPUs compile a fusion in half of the time, and the
    programs run as fast here. XLA stops at a flag that it does not know, hence the
    version. Factorisations are small: several threads of LAPACK would mostly wait.
    """
    if jaxlib.__version__.startswith("0.10."):
        flags = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1"
        os.environ.setdefault("XLA_FLAGS", flags)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
