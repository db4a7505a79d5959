"""The studies that the reproduction report is made from: commands that users type."""

from typing import NamedTuple


class Study(NamedTuple):
    """A command whose results are kept.

    Attributes:
      command: as a user types it, without a directory.
      cost: on 2 CPU cores.
    """

    command: str
    cost: str


FAIR = (
    '--config.methods=\'("MHM","Sparse MHM","l2","l1","cosine","random W","U-Hop",'
    '"U-Hop sparse","limit")\' --config.images=0'
)
RETRIEVE = "retrieve.py --config=configs/retrieval.py"
SMALL = "--config.data.name=digits --config.images=0"
PAPER = "--config.protocol=paper --config.images=0"
CIFAR = "--config.data.name=cifar10"
NOISE = "--config.corruption.levels.noise='(0.1,0.5,1.0)' "
NOISE += "--config.corruption.levels.norm_noise='(0.1,0.5,1.0)'"
FIXED = (
    '--config.methods=\'("MHM","cosine","centred cosine","l2","squared l2","l1",'
    '"calibrated","limit")\''
)
DEPENDENT = (
    "--config.memories='(100,)' "
    '--config.corruption.kinds=\'("block","blur","shift")\''
)
LOSSES = (
    "--config.methods='(\"U-Hop\",\"U-Hop max\")' --config.memories='(10,50,100,200)' "
    "--config.stage_one.steps='(1,10,50,200)'"
)
REFERENCE = "--config.protocol=reference"

STUDIES = {
    "capacity_mnist_paper": Study(
        f"{RETRIEVE}:capacity {PAPER} --config.memories='(10,100,200)' --config.runs=5 "
        "--config.stage_one.steps='(1,10,100,200)'",
        "1 minute",
    ),
    "capacity_mnist_fair": Study(
        f"{RETRIEVE}:capacity {FAIR} --config.memories='(10,100)' --config.runs=5 "
        "--config.stage_one.steps='(1,10,30,100)' --config.every_setting=True",
        "1 minute",
    ),
    "capacity_cifar_paper": Study(
        f"{RETRIEVE}:capacity {PAPER} {CIFAR} --config.memories='(10,100)' "
        "--config.runs=3 --config.stage_one.steps='(1,10,100,500)'",
        "2 minutes",
    ),
    "capacity_cifar_fair": Study(
        f"{RETRIEVE}:capacity {FAIR} {CIFAR} --config.memories='(100,)' "
        "--config.runs=3 --config.stage_one.steps='(1,10,50,150)' "
        "--config.every_setting=True",
        "2 minutes",
    ),
    "capacity_mnist_full": Study(f"{RETRIEVE}:capacity", "5 minutes"),
    "capacity_cifar_full": Study(f"{RETRIEVE}:capacity {CIFAR}", "18 minutes"),
    "reference_mnist": Study(
        f"{RETRIEVE}:capacity {REFERENCE} --config.runs=10 "
        "--config.stage_one.steps='(1,10,100,200,500,1000)'",
        "3 minutes",
    ),
    "reference_cifar": Study(
        f"{RETRIEVE}:capacity {REFERENCE} {CIFAR} --config.runs=4 "
        "--config.stage_one.steps='(1,10,100,500,1000)'",
        "3 minutes",
    ),
    "reference_noise_mnist": Study(
        f"{RETRIEVE}:noise {REFERENCE} --config.runs=10", "3 minutes"
    ),
    "reference_noise_cifar": Study(
        f"{RETRIEVE}:noise {REFERENCE} {CIFAR} --config.runs=3", "3 minutes"
    ),
    "noise_mnist_fair": Study(
        f"{RETRIEVE}:noise {FAIR} {NOISE} --config.runs=5", "2 minutes"
    ),
    "grid_mnist": Study(f"{RETRIEVE}:grid {FIXED}", "5 minutes"),
    "grid_cifar": Study(f"{RETRIEVE}:grid {FIXED} {CIFAR}", "12 minutes"),
    "dependent_mnist": Study(f"{RETRIEVE}:grid {FIXED} {DEPENDENT}", "1 minute"),
    "dependent_cifar": Study(
        f"{RETRIEVE}:grid {FIXED} {CIFAR} {DEPENDENT}", "2 minutes"
    ),
    "stage_one_digits_paper": Study(
        f"{RETRIEVE}:stage_one {SMALL} --config.protocol=paper --config.runs=10",
        "15 seconds",
    ),
    "stage_one_digits_fair": Study(
        f"{RETRIEVE}:stage_one {SMALL} --config.protocol=fair --config.runs=10",
        "20 seconds",
    ),
    "losses_mnist_paper": Study(
        f"{RETRIEVE}:losses {PAPER} {LOSSES} --config.runs=5", "1 minute"
    ),
    "losses_cifar_paper": Study(
        f"{RETRIEVE}:losses {PAPER} {LOSSES} {CIFAR} --config.runs=3", "3 minutes"
    ),
    "scatter_digits_paper": Study(
        f"{RETRIEVE}:scatter {SMALL} --config.protocol=paper", "30 seconds"
    ),
    "scatter_digits_fair": Study(f"{RETRIEVE}:scatter {SMALL}", "30 seconds"),
    "metastability_digits": Study(
        f"{RETRIEVE}:metastability {SMALL} --config.alphas='(1.0,1.5,2.0)'",
        "30 seconds",
    ),
    "cifar_paper": Study(
        "train.py --config=configs/vision.py:cifar10 --config.seeds='(0,1,2)' "
        "--config.stage_one.epochs=50 "
        '--config.arms=\'("MHM","MHM + U-Hop")\'',
        "20 minutes",
    ),
    "cifar_controls": Study(
        "train.py --config=configs/vision.py:cifar10 --config.seeds='(0,1,2)' "
        "--config.stage_one.epochs=50 --config.arms="
        '\'("MHM + untrained kernel","MHM + kernel by task","MHM, matched size")\'',
        "30 minutes",
    ),
    "cifar100_paper": Study(
        "train.py --config=configs/vision.py:cifar100 --config.seeds='(0,1)' "
        '--config.arms=\'("MHM","MHM + U-Hop")\'',
        "15 minutes",
    ),
    "patches": Study(
        "train.py --config=configs/vision.py:patches --config.seeds='(0,1,2)' "
        "--config.sizes='(5000,)' --config.patches='(8,)' --config.train.epochs=10 "
        "--config.model.depth=2 "
        '--config.arms=\'("MHM","MHM + U-Hop","MHM + untrained kernel",'
        '"MHM + kernel by task","MHM, matched size","Sparse MHM","Sparse MHM + U-Hop",'
        '"entmax","entmax + U-Hop")\'',
        "30 minutes",
    ),
    "etth1": Study(
        "train.py --config=configs/time_series.py:etth1 --config.train.epochs=10 "
        '--config.train.patience=3 --config.arms=\'("GSH","GSH + U-Hop")\'',
        "40 minutes",
    ),
}
