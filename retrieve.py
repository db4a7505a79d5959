"""Stores patterns, learns the kernel, retrieves corrupted queries.

python retrieve.py --config=configs/retrieval.py:VARIANT --config.KEY=VALUE
--workdir=DIR
"""

from pathlib import Path

from uhop_jax import experiments
from uhop_jax.command_line import run_script

if __name__ == "__main__":
    run_script(
        experiments.run,
        config=str(Path(__file__).parent / "configs" / "retrieval.py"),
        workdir="results/retrieval",
    )
