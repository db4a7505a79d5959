"""Times everything, each against its peers, in one run.

    python benchmarks/run.py [--out DIR] [--rounds N]

Writes `benchmarks.csv`, with the environment in its last columns, `benchmarks.txt`,
which is what it printed, and a figure.
"""

import core
import large
import layers
import stanhop
import training
from timing import main

BENCHMARKS = [
    large.large,  # first, for the memory that it reports to be its own
    core.separations,
    core.stage_one,
    core.retrieval,
    core.calibration,
    layers.layers,
    training.steps,
    training.host,
    stanhop.stanhop,
]

if __name__ == "__main__":
    main(__doc__, "benchmarks", BENCHMARKS)
