"""Times everything: the core, layers and training, each against its peers.

    python benchmarks/run.py [--out DIR] [--rounds N]

Writes `benchmarks.csv`, with the environment in its last columns, and a figure.
"""

import core
import layers
import training
from timing import main

BENCHMARKS = [
    core.separations,
    core.stage_one,
    core.retrieval,
    core.calibration,
    layers.layers,
    training.steps,
    training.host,
]

if __name__ == "__main__":
    main(__doc__, "benchmarks", BENCHMARKS)
