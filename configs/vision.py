"""Image classification with Hopfield layers: section 4.2 and appendices F and G.

    python train.py --config=configs/vision.py:VARIANT --config.KEY=VALUE --workdir=DIR

For example, the released U-Hop beside the plain layer on CIFAR-10, three seeds:

    python train.py --config=configs/vision.py:cifar10 --config.seeds='(0,1,2)'
        --config.arms='("MHM","MHM + U-Hop, reference")' --workdir=results/cifar10

| variant | question | cost on 2 cores; long: use an accelerator |
|---|---|---|
| `digits` (default) | does it run? 8 x 8 digits, U-Hop, no download | 1 minute |
| `cifar10`, `cifar100` | the paper's table, nine arms | 3 minutes an arm and seed |
| `reference` | the released code's runs: 1,000, 5,000 and all images | 30 minutes |
| `tiny_imagenet` | the paper's table with three layers | long |
| `expressiveness` | maximum training accuracy against sample size | long |
| `convergence` | the same runs: curves for each sample size | long |
| `patches` | patches of 4 and 8, so that there is something to attend to | long |

Each variant trains the arms of `--config.arms` (names in `uhop_jax/training/arms.py`)
for all `--config.seeds`, on any data set: `--config.data.name=digits`, `mnist`,
`cifar10`, `cifar100`, `tiny_imagenet`, or a folder with `train/CLASS/` and
`test/CLASS/`. Several arms, sizes or patches make a study: one run in a directory each,
one table, one figure.
The keys that people set first are `data.name`, `arms`, `seeds`, `sizes`, `train.epochs`
and `train.batch_size`; `eval_only`, `predict` and `export` use the model of a run.
Series are forecast by `--config=configs/time_series.py:VARIANT`.
"""

import ml_collections

VARIANTS = (
    "digits",
    "cifar10",
    "cifar100",
    "reference",
    "tiny_imagenet",
    "expressiveness",
    "convergence",
    "patches",
)
PAIRS = ("MHM", "MHM + U-Hop", "Sparse MHM", "Sparse MHM + U-Hop")
# The layer of the authors' code under U-Hop, with its Stage I and without.
RELEASED = ("MHM + U-Hop, reference", "MHM + U-Hop, reference, no Stage I")
CONTROLS = ("MHM + untrained kernel", "MHM + kernel by task", "MHM, matched size")


def get_config(variant: str = "digits") -> ml_collections.ConfigDict:
    """The config of a variant.

    Raises:
      ValueError: if the variant is unknown.
    """
    if variant not in VARIANTS:
        raise ValueError(
            f"unknown variant {variant!r}; choose one of {', '.join(VARIANTS)}"
        )
    config = ml_collections.ConfigDict()
    config.variant = variant
    config.task = "vision"
    config.seeds = (0,)  # runs that are trained side by side
    config.arms = (*PAIRS, *RELEASED, *CONTROLS)  # see docs/training.md
    config.sizes = (0,)  # training images; 0 is all
    config.patches = (32,)  # sides of a patch, in pixels

    config.data = ml_collections.ConfigDict()
    config.data.name = "cifar10"  # or a folder with train/CLASS/ and test/CLASS/
    config.data.dir = ""  # of prepared data sets; "" is the default of TFDS
    config.data.test_limit = 0  # test images; 0 is all
    config.data.held_out = 0  # training images that judge in place of test images
    config.data.on_device = True  # False: batches are streamed from the host

    config.model = ml_collections.ConfigDict()
    config.model.name = "vih"  # of one layer; or "transformer"
    config.model.size = 512  # of tokens
    config.model.num_heads = 1  # of each layer
    config.model.depth = 3  # blocks of the transformer
    config.model.mlp_size = 0  # of the transformer; 0 is four times the size
    config.model.mlp_dropout = 0.3  # of the transformer, in its MLPs
    config.model.positions = False  # learned positions, added to the tokens
    config.model.steps = 1  # updates of a layer
    config.model.beta = 0.0  # 0 is 1 / sqrt(size of a head)
    config.model.alpha = 1.5  # of the arms with entmax
    config.model.dropout = 0.1  # of the weights over memories
    config.model.dtype = "float32"  # of the computation; parameters are float32
    config.model.kernel_start = "identity"  # or "random"

    config.train = ml_collections.ConfigDict()
    config.train.epochs = 25  # passes over the training images
    config.train.batch_size = 128  # images of a step
    config.train.learning_rate = 1e-3  # of Adam
    config.train.cosine = True  # to zero over the epochs
    config.train.weight_decay = 0.0  # of AdamW
    config.train.label_smoothing = 0.0  # share of the uniform distribution
    config.train.patience = 0  # epochs without a better test accuracy; 0 is no limit
    config.train.test_train = False  # also judge the training images without dropout
    config.train.checkpoint_seconds = 60.0  # between checkpoints

    config.augment = ml_collections.ConfigDict()
    config.augment.flip = False  # left to right, half of the images
    config.augment.crop = 0  # largest shift, in pixels

    config.stage_one = ml_collections.ConfigDict()
    config.stage_one.steps = 1  # N_i, before each step of the task
    config.stage_one.epochs = 50  # of the arms with warm-up, and of the reference
    config.stage_one.batch_size = 200  # B_1, images of a Stage I step
    config.stage_one.learning_rate = 0.1  # of Stage I
    config.stage_one.loss = "average"  # or "maximum", "deep", "contrastive"
    config.stage_one.t = 2.0  # of the separation loss, exp(-t |u - v|^2)
    config.stage_one.masked = 0.5  # share that a view of "contrastive" masks

    config.eval_only = False  # judge the last checkpoint, as the table does
    config.predict = ""  # an image or a folder of them, for the last checkpoint
    config.export = False  # write the last checkpoint for JAX alone, model.jax_export
    config.distributed = False  # several processes: uhop_jax.command_line

    match variant:
        case "digits":
            config.arms = ("MHM + U-Hop",)
            config.data.name = "digits"
            config.patches = (2,)
            config.model.name = "transformer"
            config.model.size = 64
            config.model.num_heads = 4
            config.model.depth = 2
            config.model.mlp_dropout = 0.1
            config.model.positions = True
            config.train.epochs = 30
            config.train.batch_size = 32
            config.train.learning_rate = 3e-3
            config.train.label_smoothing = 0.1
            config.stage_one.batch_size = 32
        case "cifar100":
            config.data.name = "cifar100"
        case "reference":
            config.arms = ("MHM", *RELEASED)
            config.sizes = (1000, 5000, 0)
            config.seeds = (0, 1, 2, 3, 4)
        case "tiny_imagenet":
            config.data.name = "tiny_imagenet"
            config.patches = (64,)
            config.model.name = "transformer"
            config.model.num_heads = 4
            config.train.learning_rate = 1e-4
        case "expressiveness" | "convergence":  # two figures of the same runs
            config.arms = ("MHM", RELEASED[0])
            config.sizes = (1000, 2000, 5000, 10_000, 20_000, 0)
        case "patches":
            config.patches = (8, 4)
            config.model.name = "transformer"
            config.model.size = 128
            config.model.num_heads = 4
            config.model.mlp_dropout = 0.1
            config.model.positions = True
            config.train.epochs = 10
            config.train.weight_decay = 0.05
            config.augment.flip = True
            config.augment.crop = 4
    return config
