"""Multi-query associative recall: does a kernel help layers to remember?

    python train.py --config=configs/recall.py --config.KEY=VALUE --workdir=DIR

A sequence has pairs of a key and a value, a position for each, then all keys once more
in another order; the model says the value of each key (after Arora et al. 2023, where
each key and each value has a position). Each step draws new sequences.

| variant | question | cost on 2 cores |
|---|---|---|
| `recall` (default) | which arm recalls 96 pairs in 10 dimensions? | 25 minutes |

Arms are named in `uhop_jax/training/arms.py`. The keys that people set first are
`arms`, `seeds`, `pairs`, `train.sequences` and `model.size`.
"""

import ml_collections

VARIANTS = ("recall",)


def get_config(variant: str = "recall") -> ml_collections.ConfigDict:
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
    config.task = "recall"
    config.seeds = (0, 1, 2, 3, 4)  # runs that are trained side by side
    config.arms = (
        "MHM",
        "MHM + U-Hop",
        "MHM + U-Hop, deep loss",
        "MHM + untrained kernel",
        "MHM + kernel by task",
        "MHM, matched size",
        "MHM + contrastive",
        "MHM + contrastive, then task",
        "MHM + residual kernel by task",
        "MHM + residual contrastive, then task",
    )  # see docs/training.md
    config.pairs = (96,)  # of a sequence

    config.data = ml_collections.ConfigDict()
    config.data.vocabulary = 128  # number of keys, and of values
    config.data.test_sequences = 1000  # which no run trains on
    config.data.dir = ""  # nothing is read: sequences are generated

    config.model = ml_collections.ConfigDict()
    config.model.size = 10  # of tokens
    config.model.num_heads = 1  # of each layer
    config.model.depth = 1  # blocks
    config.model.steps = 1  # updates of a layer
    config.model.beta = 0.0  # 0 is 1 / sqrt(size of a head)
    config.model.alpha = 1.5  # of the arms with entmax
    config.model.dropout = 0.0  # of the weights over memories
    config.model.dtype = "float32"  # of the computation; parameters are float32
    config.model.kernel_start = "identity"  # or "random"

    config.train = ml_collections.ConfigDict()
    config.train.epochs = 10  # after each of which the model is judged
    config.train.sequences = 3200  # of an epoch
    config.train.batch_size = 32  # sequences of a step
    config.train.learning_rate = 1e-2  # of Adam; at 3e-3 some seeds never leave chance
    config.train.patience = 0  # epochs without a better loss; 0 is no limit
    config.train.checkpoint_seconds = 60.0  # between checkpoints

    config.stage_one = ml_collections.ConfigDict()
    config.stage_one.steps = 1  # N_i, before each step of the task
    config.stage_one.epochs = 1  # of the arms with warm-up
    config.stage_one.batch_size = 32  # B_1, sequences of a Stage I step
    config.stage_one.learning_rate = 0.1  # of Stage I
    config.stage_one.loss = "average"  # or "maximum", "deep", "contrastive"
    config.stage_one.t = 2.0  # of the separation loss, exp(-t |u - v|^2)
    config.stage_one.masked = 0.5  # share that a view of "contrastive" masks

    config.eval_only = False  # judge the last checkpoint
    config.predict = ""  # nothing: sequences are generated
    config.export = False  # write the last checkpoint for JAX alone, model.jax_export
    config.distributed = False  # several hosts, by jax.distributed
    return config
