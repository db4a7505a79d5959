"""Trains models with Hopfield layers, with or without U-Hop.

python train.py --config=configs/vision.py:VARIANT --config.KEY=VALUE --workdir=DIR
"""

from uhop_jax.entry import train

if __name__ == "__main__":
    train()
