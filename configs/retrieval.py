"""Memory retrieval: the paper's section 4.1 and appendices F and G, and your own data.

    python retrieve.py --config=configs/retrieval.py:VARIANT --config.KEY=VALUE
        --workdir=DIR

For example, the paper's figure of capacity on CIFAR-10, with five memory sets:

    python retrieve.py --config=configs/retrieval.py:capacity
        --config.data.name=cifar10 --config.runs=5 --workdir=results/capacity

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
| `blind` | what do queries without labels teach? 13 corruptions | 60 minutes |
| `query` | store your patterns, retrieve your queries | seconds |

Every variant runs on any data set: `--config.data.name=mnist`, `cifar10`, `cifar100`,
`tiny_imagenet`, `synthetic:sphere`, or a path to `.npy`, `.npz` or a folder of images;
and, but for `query`, under each protocol: `--config.protocol=fair`, `paper` or
`reference` (see `uhop_jax/experiments/protocols.py`). `demo` and `losses` name methods
that `fair` alone has, where `--config.methods="()"` takes all of another protocol;
`grid` and `blind` have corruptions that `reference` lacks. The keys that people set
first are `data.name`, `protocol`, `methods`, `memories` and `runs`; of `query`,
`data.name`, `queries`, `memory` and `corruption`.
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
    "blind",
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
    "blind",
    "limit",
)
BLIND = (
    *("mask", "noise", "folded_noise", "salt_and_pepper", "inverted", "gamma"),
    *("block", "blur", "shift", "shift_noise"),
)
PICTURED = ("MHM", "Sparse MHM", "cosine", "U-Hop", "calibrated")
ALPHAS = (1.0, 1.25, 1.5, 1.75, 2.0)
RIDGES = (0.1, 1.0, 10.0, 100.0)
_DATA = {"demo": "digits", "query": "digits"}
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
    config.seed = 0  # of memory sets, corruptions and starts of kernels

    config.data = ml_collections.ConfigDict()
    config.data.name = _DATA.get(variant, "mnist")  # a name or a path, as above
    config.data.split = "test"  # or "train"
    config.data.dir = ""  # of prepared data sets; "" is the default of TFDS
    config.data.limit = 0  # patterns that are loaded; 0 is all
    if variant == "query":
        return _query(config)

    config.protocol = "fair"  # or "paper", "reference"
    config.methods = ()  # names of methods; () is all of the protocol
    config.beta = 1.0  # of all methods, in the paper and reference protocols
    config.memories = (100,)  # patterns in a memory set
    config.runs = 20  # memory sets that are scored
    config.tuning_queries = 200  # in 3 other sets or more, to choose beta and kernel
    config.calibration_queries = 1000  # copies that `calibrate` corrupts
    config.every_setting = False  # keep every N and ridge, not only the best
    config.images = 6  # rows of the image grid; 0 for none
    config.pictured = PICTURED  # methods in the image grid

    config.corruption = ml_collections.ConfigDict()
    config.corruption.kinds = ("mask",)  # one or several of the levels below
    config.corruption.levels = ml_collections.ConfigDict(
        {
            "mask": (0.5,),  # part of the pixels set to zero
            "known_mask": (0.5,),  # part set to zero, and the query says which
            "noise": (0.5,),  # standard deviation of each pixel, then clamped
            "folded_noise": (0.5,),  # of each pixel; negative values become positive
            "norm_noise": (0.5,),  # Euclidean norm of the noise, then clamped
            "block": (0.25,),  # part of the image under one square
            "blur": (2.0,),  # standard deviation in pixels
            "shift": (2.0,),  # pixels
            "salt_and_pepper": (0.8,),  # part of the pixels set to 0 or 1
            "inverted": (0.5,),  # noise after the contrast is inverted
            "gamma": (0.5,),  # noise after the image is darkened, 0.6 x^3
            "shift_noise": (0.5,),  # noise after a shift by two pixels
        }
    )

    config.stage_one = ml_collections.ConfigDict()
    config.stage_one.t = 2.0  # of the separation loss, exp(-t |u - v|^2)
    # Start and rate are for the fair protocol; each further protocol has its own.
    config.stage_one.start = "identity"  # or "gaussian", the paper's
    config.stage_one.relative_rate = 0.03  # in units of d: W moves by 0.03 * d
    config.stage_one.rate_factors = (1.0,)  # of the rate, or of the paper's 1
    config.stage_one.steps = ()  # N, a kernel each; () is the paper's N
    config.stage_one.ridges = RIDGES  # of the closed form

    levels = config.corruption.levels
    match variant:
        case "demo":
            config.runs = 10
            config.stage_one.steps = (1, 3, 10, 30, 100)
            config.methods = DEMO
            config.pictured = (*PICTURED, "blind")
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
            config.alphas = ALPHAS  # of entmax
        case "temperature":
            config.runs = 5
        case "grid":
            config.memories = (100, 500)
            config.runs = 10
            config.corruption.kinds = ("mask", "noise", "folded_noise")
            levels["mask"] = (0.5, 0.8, 0.95)
            levels["noise"] = levels["folded_noise"] = (0.5, 1.0)
        case "blind":
            config.memories = (100, 500)
            config.runs = 3
            config.queries = (20, 100, 500)  # without labels
            # `methods` names rivals, in place of blind calibration and what it chooses
            # from: "LSR", "kernel regression", "A-Hop, self-made pairs" or "A-Hop,
            # labelled pairs".
            config.corruption.kinds = BLIND
            levels["mask"] = (0.8, 0.95)
            levels["noise"] = levels["folded_noise"] = (0.5, 1.0)
    return config


def _query(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The config of the variant `query`."""
    config.memory = ""  # a memory saved by an earlier run, in place of data.name
    config.queries = ""  # .npy, .npz or a folder of images
    config.observed = ""  # .npy of booleans, true where a query's component is known
    # With `mapped`, the model is fitted to data.name, such as a sample of the file.
    config.mapped = ""  # .npy of floats, however large, to retrieve from instead
    config.block = 0  # memories that are held at a time; 0 is all, or by size if mapped
    config.shards = 0  # devices over which the memories are split; 0 is none
    config.corruption = ml_collections.ConfigDict()
    config.corruption.kind = ""  # of other variants; "" learns it, or `observed` tells
    config.corruption.level = 0.5  # in the units of the kind
    config.images = 6  # queries in the picture
    return config
