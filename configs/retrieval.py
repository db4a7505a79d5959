"""Memory retrieval: the paper's section 4.1 and appendices F and G, and your own data.

    python retrieve.py --config=configs/retrieval.py:VARIANT --config.KEY=VALUE
        --workdir=DIR

| variant | question | cost on 2 cores, MNIST |
|---|---|---|
| `demo` (default) | what does it do? 100 digits, half masked, no download | 1 minute |
| `capacity` | error against memory size (figure of the main text) | 5 minutes |
| `noise` | error against noise, for each pixel and by norm | 10 minutes |
| `stage_one` | error, loss and `Delta_min` against Stage I steps N | 2 minutes |
| `losses` | average against maximum loss and U-Hop+, over M and N | 10 minutes |
| `scatter` | does a lower separation loss mean a lower error? 200 runs | 1 minute |
| `metastability` | how many memories does a state mix, by beta and alpha? | 1 minute |
| `temperature` | error against beta, for every model and kernel | 2 minutes |
| `grid` | the fair comparison: corruption by memory size | 10 minutes |
| `query` | store your patterns, retrieve your queries | seconds |

Every variant runs on any data set: `--config.data.name=mnist`, `cifar10`, `cifar100`,
`tiny_imagenet`, `synthetic:sphere`, or a path to `.npy`, `.npz` or a folder of images;
and, but for `query`, under each protocol: `--config.protocol=fair`, `paper` or
`reference` (see `uhop_jax/experiments/protocols.py`).
"""

import ml_collections

VARIANTS = (
    "demo",
    "capacity",
    "noise",
    "stage_one",
    "losses",
    "scatter",
    "metastability",
    "temperature",
    "grid",
    "query",
)
DEMO = (
    "MHM",
    "Sparse MHM",
    "squared l2",
    "cosine",
    "nearest (cosine)",
    "random W",
    "U-Hop",
    "U-Hop sparse",
    "U-Hop, angular",
    "calibrated",
    "limit",
)
SIZES = (10, 20, 30, 50, 100, 200, 500)  # of memory sets, as in the paper
STEPS = (1, 10, 20, 50, 100, 200, 500, 1000)  # of Stage I, as in the paper
NOISE = (0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 1.0, 1.2, 1.4, 2.0)  # as in the paper


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
    config.seed = 0

    config.data = ml_collections.ConfigDict()
    config.data.name = "digits" if variant in ("demo", "query") else "mnist"
    config.data.split = "test"
    config.data.dir = ""  # of prepared data sets; "" is TFDS's own place
    config.data.limit = 0  # patterns that are loaded; 0 is all
    if variant == "query":
        return _query(config)

    config.protocol = "fair"  # or "paper", "reference"
    config.methods = ()  # names of those to run; none is all of the protocol
    config.beta = 1.0  # of all methods, in the paper and reference protocols
    config.memories = (100,)  # patterns in a memory set
    config.runs = 20  # memory sets that are scored
    config.tuning_queries = (
        200  # on which beta and kernel are chosen, in 3 sets or more
    )
    config.calibration_queries = 1000
    config.every_setting = False  # keep every N and ridge, not the best alone
    config.images = 6  # rows of the image grid; 0 for none
    config.pictured = ("MHM", "Sparse MHM", "cosine", "U-Hop", "calibrated")

    config.corruption = ml_collections.ConfigDict()
    config.corruption.kinds = ("mask",)
    config.corruption.levels = ml_collections.ConfigDict(
        {
            "mask": (0.5,),  # part of the pixels set to zero
            "known_mask": (0.5,),  # likewise, and the query says which
            "noise": (0.5,),  # standard deviation of each pixel, then clamped
            "folded_noise": (0.5,),  # likewise, but negative values come back positive
            "norm_noise": (0.5,),  # Euclidean norm of the noise, then clamped
            "block": (0.25,),  # part of the image under one square
            "blur": (2.0,),  # standard deviation in pixels
            "shift": (2.0,),  # pixels
        }
    )

    config.stage_one = ml_collections.ConfigDict()
    config.stage_one.t = 2.0
    # The start and the rate are those of the fair protocol; the others have their own.
    config.stage_one.start = "identity"  # or "gaussian", the paper's
    config.stage_one.rate = 0.03  # in units of the dimension: W moves by rate * d
    config.stage_one.rates = (1.0,)  # one kernel for each: times the rate above, or in
    # the paper protocol times the paper's, which is 1
    config.stage_one.steps = ()  # one kernel for each; none: the paper's, see `resolve`
    config.stage_one.ridges = (0.1, 1.0, 10.0, 100.0)  # of the closed form, likewise

    levels = config.corruption.levels
    match variant:
        case "demo":
            config.runs = 10
            config.stage_one.steps = (1, 3, 10, 30, 100)
            config.methods = DEMO
        case "capacity":
            config.memories = SIZES
        case "noise":
            config.corruption.kinds = ("noise", "norm_noise")
            levels["noise"] = levels["norm_noise"] = NOISE
        case "stage_one":
            config.methods = ("MHM", "U-Hop", "U-Hop max")
            config.stage_one.steps = (0, *STEPS)
            config.every_setting = True
        case "losses":
            config.methods = ("MHM", "U-Hop", "U-Hop max", "U-Hop+")
            config.memories = SIZES
            config.stage_one.steps = STEPS[:-1]
            config.every_setting = True
        case "scatter":
            config.runs = 200
            config.stage_one.steps = (200,)  # at most; N is drawn for each run
        case "metastability":
            config.runs = 5
            config.alphas = (1.0, 1.25, 1.5, 1.75, 2.0)
        case "temperature":
            config.runs = 5
        case "grid":
            config.memories = (100, 500)
            config.runs = 10
            config.corruption.kinds = ("mask", "noise", "folded_noise")
            levels["mask"] = (0.5, 0.8, 0.95)
            levels["noise"] = levels["folded_noise"] = (0.5, 1.0)
    return config


def _query(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    config.memory = ""  # a memory saved by an earlier run, in place of data.name
    config.queries = ""  # .npy, .npz or a folder of images
    config.observed = ""  # .npy of booleans, true where a query's component is known
    config.mapped = ""  # .npy of floats, however large, to retrieve from instead: the
    # model is then that of the patterns stored, a sample of the file for example
    config.block = 0  # memories that are held at a time; 0 is all, or by size if mapped
    config.shards = 0  # devices over which the memories are split; 0 is one, unsplit
    config.corruption = ml_collections.ConfigDict()
    config.corruption.kind = "mask"  # what your queries will look like: see KINDS in
    config.corruption.level = 0.5  # uhop_jax/experiments/corruptions.py
    config.images = 6  # queries in the picture
    return config
