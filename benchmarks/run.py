"""Times all comparisons of this folder in one run.

    python benchmarks/run.py [--out DIR] [--rounds N]

Writes `benchmarks.csv`, with the environment in its last columns, `benchmarks.txt` with
the printed output, and a figure.
"""

import bag
import core
import fast
import large
import layers
import peers_bags
import stanhop
import training
from timing import main

BENCHMARKS = [
    large.large,  # first, so that its peak memory is its own
    core.separations,
    core.stage_one,
    core.retrieval,
    core.calibration,
    fast.fast,
    layers.layers,
    peers_bags.pooling,
    bag.bag,
    bag.ragged,
    training.steps,
    training.host,
    stanhop.stanhop,
]

if __name__ == "__main__":
    main(__doc__, "benchmarks", BENCHMARKS)
