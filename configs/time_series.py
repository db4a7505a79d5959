"""Forecasting with STanHop-Net, with and without U-Hop: section 4.2, appendix F.

    python train.py --config=configs/time_series.py:VARIANT --config.KEY=VALUE
        --workdir=DIR

For example, your own file, the next 24 steps from the last 96:

    python train.py --config=configs/time_series.py:csv --config.data.name=FILE.csv
        --config.horizon=24 --config.window=96 --workdir=results/forecast

| variant | question | cost on 2 cores |
|---|---|---|
| `demo` | does it run? a simulated house, U-Hop, no download | 2 minutes |
| `etth1`, `ettm1`, `wth` | one set, `--config.horizon=96`, 192, 336, 720 | hours |
| `windows` | which length of the input? ETTh1, 96, 168, 336, 720 | use an accelerator |
| `table` | the paper's table: sets, horizons, arms and seeds | use an accelerator |
| `csv` | your own file, `--config.data.name=FILE.csv` | as its size |

Arms are named in `uhop_jax/training/arms.py`: `GSH` is STanHop-Net as published, `GSH +
U-Hop` learns kernels in it; `MHM` and `Sparse MHM` are its dense and sparse ablations.
Several data sets (with commas between), horizons, windows, arms or seeds make a study:
one run in a directory each, one table beside the paper's numbers, one figure; finished
runs are kept. Every table has the forecasts that need no training. All windows are
tested on the same targets, and the table marks the window of the least validation loss.
An external memory is read without training ("plug"), or its layers are trained while
the model is frozen ("tune"); each is reported beside its model. The keys that people
set first are `data.name`, `data.columns`, `horizon`, `window`, `arms`, `seeds` and
`train.epochs`; `predict` continues another file by the model that a run has trained,
and `export` writes that model as a function.
"""

import ml_collections
from ml_collections.config_dict import placeholder

VARIANTS = ("demo", "etth1", "ettm1", "wth", "windows", "table", "csv")
ARMS = ("GSH", "GSH + U-Hop", "GSH + untrained kernel", "GSH + kernel by task")


def get_config(variant: str = "demo") -> ml_collections.ConfigDict:
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
    config.task = "forecasting"
    config.seeds = (0,)  # a run each
    config.arms = ARMS  # as in docs/forecasting.md
    config.horizon = (96,)  # steps of the forecast, one or several
    config.window = (168,)  # steps of the input, one or several to choose from

    config.external_memory = ""  # or "plug", "tune": a memory of past windows
    config.bank = 64  # training windows in the memory, evenly spaced in time

    config.data = ml_collections.ConfigDict()
    config.data.name = variant  # or FILE.csv, several with commas between
    config.data.dir = ""  # of the known sets; "" is the default of pooch
    config.data.split = ()  # fractions for training, validation, test; () is as usual
    config.data.columns = ()  # of a csv; () is all
    config.data.date_format = ""  # of a csv, as of strptime; "" tries common forms
    config.data.decimal = "auto"  # mark in numbers of a csv; or "point", "comma"
    config.data.missing_values = ()  # cells that mark a missing value, as (-9999,)
    config.data.missing = "error"  # or "interpolate"
    config.data.gaps = "error"  # or "fill"
    config.data.duplicates = "error"  # or "first", "mean"
    config.data.unsorted = "error"  # or "sort"
    config.data.constant = "error"  # or "keep", "drop"

    config.model = ml_collections.ConfigDict()
    config.model.segment = 12  # steps of a token
    config.model.scales = 0  # of the encoder; 0 is the paper's, 2 from horizon 336 on
    config.model.merge = 2  # segments that a further scale merges into one
    config.model.size = 256  # of tokens
    config.model.mlp_size = 512  # hidden units
    config.model.num_heads = 4  # of each layer
    config.model.pooled = 10  # patterns through which series see one another
    config.model.pool_queries = "position"  # or "shared"
    config.model.dropout = 0.1  # of weights and MLPs
    config.model.alpha = 1.5  # of the arms with entmax
    # GSH has alpha = 1 + sigmoid(raw).
    config.model.alpha_start = placeholder(float)  # raw; None draws it from N(0, 1)
    config.model.alpha_per_head = False  # an alpha for each head
    config.model.preset = "paper"  # or "released", with the release's oddities
    config.model.residual_mean = False  # add the mean of the window
    config.model.dtype = "float32"  # of the computation; parameters are float32
    config.model.kernel_start = "identity"  # or "random"

    config.train = ml_collections.ConfigDict()
    config.train.loss = "mae"  # or "mse"
    config.train.epochs = 50  # at most
    config.train.patience = 25  # epochs without a lower validation loss; 0 is no limit
    config.train.batch_size = 16  # windows of a step
    config.train.learning_rate = 1e-4  # of Adam
    config.train.schedule = "type1"  # or "type2", "constant"
    config.train.clip = 5.0  # of the global norm of the gradient
    config.train.checkpoint_seconds = 60.0  # between checkpoints

    config.stage_one = ml_collections.ConfigDict()
    config.stage_one.steps = 1  # N_i, before each step of the task
    config.stage_one.epochs = 1  # of the arms with warm-up
    config.stage_one.batch_size = 16  # B_1, windows of a Stage I step
    config.stage_one.learning_rate = 0.1  # of Stage I
    config.stage_one.loss = "average"  # or "maximum", "deep", "contrastive"
    config.stage_one.t = 2.0  # of the separation loss, exp(-t |u - v|^2)
    config.stage_one.masked = 0.5  # share that a view of "contrastive" masks

    config.eval_only = False  # judge the best checkpoint by validation
    config.predict = ""  # a csv, to be continued by the best checkpoint
    config.export = False  # write the best checkpoint for JAX alone, model.jax_export
    config.distributed = False  # several hosts, by jax.distributed

    match variant:
        case "demo":
            config.arms = ("GSH + U-Hop",)
            config.horizon = (24,)
            config.window = (96,)
            config.model.size = 64
            config.model.mlp_size = 128
            config.model.dropout = 0.0
            config.train.epochs = 3
            config.train.learning_rate = 1e-3
        case "windows":
            config.data.name = "etth1"
            config.seeds = (0, 1, 2)
            config.window = (96, 168, 336, 720)
        case "table":
            config.data.name = "etth1,ettm1,wth"
            config.seeds = (0, 1, 2)
            config.horizon = (96, 192, 336, 720)
        case "csv":
            config.data.name = ""
    return config
