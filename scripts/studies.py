"""The studies that the reproduction report is made from: commands that users type."""

from typing import NamedTuple

from uhop_jax.command_line import config_module


class Kept(NamedTuple):
    """A command whose results are kept.

    Attributes:
      command: as a user types it, without a directory.
      minutes: run time on 2 CPU cores.
    """

    command: str
    minutes: float

    @property
    def cost(self) -> str:
        """The run time in words."""
        if self.minutes < 1:
            return f"{60 * self.minutes:.0f} seconds"
        return f"{self.minutes:g} minute{'s' * (self.minutes != 1)}"


RETRIEVE = "retrieve.py --config=configs/retrieval.py"
VISION = "train.py --config=configs/vision.py"
SERIES = "train.py --config=configs/time_series.py"
BAGS = "train.py --config=configs/bags.py"
CIFAR = "--config.data.name=cifar10"
PLAIN = "--config.images=0"
PAPER = f"--config.protocol=paper {PLAIN}"
REFERENCE = "--config.protocol=reference"
STEPS = "--config.stage_one.steps="


def _methods(*names: str) -> str:
    listed = ",".join(f'"{name}"' for name in names)
    return f"--config.methods='({listed},)'"


def _arms(*names: str) -> str:
    listed = ",".join(f'"{name}"' for name in names)
    return f"--config.arms='({listed},)'"


# Models of the paper, the fixed similarities that it leaves out, and the limit.
COMPARED = _methods(
    "MHM",
    "Sparse MHM",
    "DAM 10",
    "l2",
    "squared l2",
    "l1",
    "cosine",
    "centred cosine",
    "two-sided centred cosine",
    "random W",
    "U-Hop",
    "U-Hop sparse",
    "limit",
)
FIXED = _methods(
    "MHM",
    "cosine",
    "centred cosine",
    "two-sided centred cosine",
    "l2",
    "squared l2",
    "l1",
    "calibrated",
    "limit",
)
RIVALS = _methods(
    "LSR", "kernel regression", "A-Hop, self-made pairs", "A-Hop, labelled pairs"
)
PAIRS = _methods("MHM", "Sparse MHM", "U-Hop", "U-Hop sparse")
BOTH = _methods("U-Hop", "U-Hop max")
LOSSES = f"{BOTH} --config.memories='(10,50,100,200)'"
RATES = "--config.stage_one.rate_factors='(0.1,1.0,10.0,100.0)'"
DEPENDENT = (
    "--config.memories='(100,)' "
    '--config.corruption.kinds=\'("block","blur","shift")\''
)
LEVELS = "(0.1,0.3,0.5,0.7,1.0,2.0)"
NOISE = f"--config.corruption.levels.noise='{LEVELS}' "
NOISE += f"--config.corruption.levels.norm_noise='{LEVELS}'"
ALPHAS = "--config.alphas='(1.0,1.5,2.0)'"

RETRIEVAL = {
    # The released code.
    "reference_mnist": Kept(
        f"{RETRIEVE}:capacity {REFERENCE} --config.runs=10 "
        f"{STEPS}'(1,10,100,200,500,1000)'",
        3,
    ),
    "reference_cifar": Kept(
        f"{RETRIEVE}:capacity {REFERENCE} {CIFAR} --config.runs=4 "
        f"{STEPS}'(1,10,100,500,1000)'",
        3,
    ),
    "reference_noise_mnist": Kept(
        f"{RETRIEVE}:noise {REFERENCE} --config.runs=10 {STEPS}'(100,800)'", 4
    ),
    "reference_noise_cifar": Kept(
        f"{RETRIEVE}:noise {REFERENCE} {CIFAR} --config.runs=5 {STEPS}'(200,800)'", 6
    ),
    # The paper's text.
    "capacity_mnist_paper": Kept(
        f"{RETRIEVE}:capacity {PAPER} --config.runs=5 "
        f"{STEPS}'(1,10,20,50,100,200,500,1000)'",
        4,
    ),
    "capacity_cifar_paper": Kept(
        f"{RETRIEVE}:capacity {PAPER} {CIFAR} --config.runs=4 "
        f"{STEPS}'(1,10,100,200,500,1000)'",
        7,
    ),
    "noise_mnist_paper": Kept(f"{RETRIEVE}:noise {PAPER} --config.runs=5", 1),
    "noise_cifar_paper": Kept(f"{RETRIEVE}:noise {PAPER} {CIFAR} --config.runs=5", 3),
    "stage_one_mnist_paper": Kept(f"{RETRIEVE}:stage_one {PAPER} --config.runs=10", 1),
    "stage_one_cifar_paper": Kept(
        f"{RETRIEVE}:stage_one {PAPER} {CIFAR} --config.runs=4", 2
    ),
    "losses_mnist_paper": Kept(
        f"{RETRIEVE}:losses {PAPER} {LOSSES} {STEPS}'(1,10,50,200)' --config.runs=6", 1
    ),
    "losses_cifar_paper": Kept(
        f"{RETRIEVE}:losses {PAPER} {LOSSES} {CIFAR} {STEPS}'(1,10,50,200)' "
        "--config.runs=4",
        3,
    ),
    "losses_mnist_rates": Kept(
        f"{RETRIEVE}:losses {PAPER} {LOSSES} {RATES} {STEPS}'(10,50,200)' "
        "--config.runs=10",
        1,
    ),
    "losses_cifar_rates": Kept(
        f"{RETRIEVE}:losses {PAPER} {LOSSES} {RATES} {CIFAR} {STEPS}'(10,200)' "
        "--config.runs=6",
        3,
    ),
    "scatter_mnist_paper": Kept(f"{RETRIEVE}:scatter {PAPER}", 1),
    "scatter_cifar_paper": Kept(f"{RETRIEVE}:scatter {PAPER} {CIFAR}", 4),
    "metastability_mnist_paper": Kept(
        f"{RETRIEVE}:metastability {PAPER} {ALPHAS} {STEPS}'(100,)'", 1
    ),
    # Every method at its own best beta.
    "capacity_mnist_full": Kept(f"{RETRIEVE}:capacity", 5),
    "capacity_cifar_full": Kept(f"{RETRIEVE}:capacity {CIFAR}", 18),
    "capacity_mnist_fair": Kept(
        f"{RETRIEVE}:capacity {PAIRS} {PLAIN} --config.runs=5 {STEPS}'(1,10,30,100)' "
        "--config.every_setting=True",
        1,
    ),
    "capacity_cifar_fair": Kept(
        f"{RETRIEVE}:capacity {PAIRS} {PLAIN} {CIFAR} --config.runs=3 "
        f"{STEPS}'(1,10,50,150)' --config.every_setting=True",
        2,
    ),
    "noise_mnist_fair": Kept(
        f"{RETRIEVE}:noise {COMPARED} {PLAIN} {NOISE} --config.runs=10", 2
    ),
    "noise_cifar_fair": Kept(
        f"{RETRIEVE}:noise {COMPARED} {PLAIN} {NOISE} {CIFAR} --config.runs=5", 9
    ),
    "stage_one_mnist_fair": Kept(f"{RETRIEVE}:stage_one {PLAIN} --config.runs=10", 1),
    "stage_one_cifar_fair": Kept(
        f"{RETRIEVE}:stage_one {PLAIN} {CIFAR} --config.runs=4", 2
    ),
    "scatter_mnist_fair": Kept(f"{RETRIEVE}:scatter {PLAIN}", 1),
    "scatter_cifar_fair": Kept(f"{RETRIEVE}:scatter {PLAIN} {CIFAR}", 4),
    "metastability_mnist": Kept(f"{RETRIEVE}:metastability {PLAIN} {ALPHAS}", 1),
    "metastability_cifar": Kept(
        f"{RETRIEVE}:metastability {PLAIN} {ALPHAS} {CIFAR}", 2
    ),
    # The tables of the README.
    "grid_mnist": Kept(f"{RETRIEVE}:grid {FIXED}", 5),
    "grid_cifar": Kept(f"{RETRIEVE}:grid {FIXED} {CIFAR}", 12),
    "dependent_mnist": Kept(f"{RETRIEVE}:grid {FIXED} {DEPENDENT}", 1),
    "dependent_cifar": Kept(f"{RETRIEVE}:grid {FIXED} {CIFAR} {DEPENDENT}", 2),
    "blind_mnist": Kept(f"{RETRIEVE}:blind --config.runs=6", 40),
    "blind_cifar": Kept(f"{RETRIEVE}:blind {CIFAR} --config.runs=3", 50),
    "rivals_mnist": Kept(
        f"{RETRIEVE}:blind --config.runs=2 --config.queries='(500,)' {RIVALS}", 20
    ),
}

CONTROLS = ("MHM + untrained kernel", "MHM + kernel by task", "MHM, matched size")
RELEASED = "MHM + U-Hop, reference"
BILEVEL = ("MHM", "MHM + U-Hop", "Sparse MHM", "Sparse MHM + U-Hop")
# What Stage I does in networks: the plain layer, Stage I by four losses, controls.
IN_NETWORKS = config_module("recall").get_config().arms
# The released layer with Stage I and without, and a plain model of equal size.
TABLE = _arms("MHM", RELEASED, f"{RELEASED}, no Stage I", "MHM, matched size")
SEEDS = "--config.seeds='(0,1,2)'"
PARTS = "--config.sizes='(1000,2000,5000,10000,20000)' --config.seeds='(0,1)'"


def _learning(name: str, title: str) -> dict[str, Kept]:
    """The studies of one of the CIFAR sets."""
    model = f"{VISION}:{name}"
    curves = f"{VISION}:expressiveness --config.data.name={name} {PARTS}"
    return {
        f"{title}_table": Kept(f"{model} {SEEDS} {TABLE}", 30),
        f"{title}_bilevel": Kept(f"{model} {SEEDS} {_arms('MHM + U-Hop')}", 12),
        f"{title}_deep": Kept(
            f"{model} {SEEDS} {_arms(RELEASED)} --config.stage_one.loss=deep", 12
        ),
        f"expressiveness_{title}": Kept(f"{curves} {_arms('MHM', RELEASED)}", 15),
    }


LEARNING = {
    "vision_reference": Kept(
        f"{VISION}:reference --config.sizes='(1000,5000)' "
        + _arms("MHM", RELEASED, f"{RELEASED}, no Stage I"),
        8,
    ),
    **_learning("cifar10", "cifar10"),
    **_learning("cifar100", "cifar100"),
    "tiny20": Kept(
        f"{VISION}:tiny_imagenet --config.seeds='(0,1,2)' {_arms(*BILEVEL, RELEASED)}",
        60,
    ),
    "patches": Kept(
        f"{VISION}:patches --config.seeds='(0,1,2)' --config.sizes='(5000,)' "
        "--config.patches='(8,)' --config.train.epochs=10 --config.model.depth=2 "
        + _arms(*IN_NETWORKS, *BILEVEL[2:], "entmax", "entmax + U-Hop"),
        45,
    ),
    **{
        f"etth1_{horizon}": Kept(
            f"{SERIES}:etth1 --config.seeds='(0,1)' --config.horizon='({horizon},)' "
            "--config.train.epochs=10 --config.train.patience=3 "
            + _arms("GSH", "GSH + U-Hop"),
            minutes,
        )
        for horizon, minutes in ((96, 40), (192, 60), (336, 140), (720, 200))
    },
}

# Sets of bags as their variants are; ten folds or test bags, five seeds.
BAG_SETS = {
    "bags_musk1": Kept(f"{BAGS}:musk1", 2),
    "bags_musk2": Kept(f"{BAGS}:musk2", 10),
    "bags_elephant": Kept(f"{BAGS}:elephant", 4),
    "bags_ucsb": Kept(f"{BAGS}:ucsb", 3),
    "bags_mnist": Kept(f"{BAGS}:mnist_bags", 2),
    "bags_mnist_1000": Kept(f"{BAGS}:mnist_bags --config.data.bags=1000", 3),
    "bags_needle": Kept(f"{BAGS}:needle", 3),
    "bags_needle_small_beta": Kept(f"{BAGS}:needle --config.model.beta='(0.25,)'", 3),
    "bags_needle_one_state": Kept(f"{BAGS}:needle --config.model.quantity=1", 3),
}

ONE = "--config.model.beta='(0.0,)' --config.model.dropout='(0.0,)'"
NETWORKS = {
    "networks_recall": Kept("train.py --config=configs/recall.py", 25),
    "networks_musk1": Kept(f"{BAGS}:musk1 {ONE} {_arms(*IN_NETWORKS)}", 10),
    "networks_musk2": Kept(f"{BAGS}:musk2 {ONE} {_arms(*IN_NETWORKS)}", 100),
    "networks_elephant": Kept(f"{BAGS}:elephant {ONE} {_arms(*IN_NETWORKS)}", 15),
    "networks_ucsb": Kept(f"{BAGS}:ucsb {ONE} {_arms(*IN_NETWORKS)}", 15),
    # A forecaster with a fifteenth of the parameters.
    "networks_etth1": Kept(
        f"{SERIES}:etth1 --config.seeds='(0,1,2)' --config.model.size=64 "
        "--config.model.mlp_size=128 --config.train.learning_rate=3e-4 "
        "--config.train.epochs=4 "
        + _arms(*(arm.replace("MHM", "GSH") for arm in IN_NETWORKS)),
        75,
    ),
}

STUDIES = RETRIEVAL | LEARNING | BAG_SETS | NETWORKS
# Studies whose accuracies and losses after every epoch are kept.
CURVES = tuple(
    name for name in LEARNING if name.startswith("express") or name.endswith("_table")
)
