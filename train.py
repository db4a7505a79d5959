"""Trains models with Hopfield layers, with or without U-Hop.

python train.py --config=configs/vision.py:VARIANT --config.KEY=VALUE --workdir=DIR
"""

from pathlib import Path

from uhop_jax.command_line import run_script
from uhop_jax.training import train_and_evaluate

if __name__ == "__main__":
    run_script(
        train_and_evaluate,
        config=str(Path(__file__).parent / "configs" / "vision.py"),
        workdir="results/vision",
    )
