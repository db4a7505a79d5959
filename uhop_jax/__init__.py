"""U-Hop in JAX: associative memories that learn a similarity before they retrieve.

The functional core of "Uniform Memory Retrieval with Larger Capacity for Modern
Hopfield Models" (Wu et al., ICML 2024): separations, similarities and kernels,
retrieval dynamics and energies, Stage I, calibration.
"""

from uhop_jax._pytree import Pytree
from uhop_jax.blind import BlindCalibration, calibrate_blind
from uhop_jax.calibration import Calibration, calibrate
from uhop_jax.closed_form import fit_closed_form, fit_values
from uhop_jax.contrastive import ContrastiveLoss
from uhop_jax.corruption import Mask, Noise, NormNoise
from uhop_jax.footprint import Footprint, fit_footprint
from uhop_jax.kernels import (
    Centering,
    Identity,
    Kernel,
    LikelihoodKernel,
    LinearKernel,
    LowRankKernel,
)
from uhop_jax.likelihood import fit_likelihood
from uhop_jax.losses import (
    AverageLoss,
    DeepLoss,
    MaximumLoss,
    SeparationLoss,
    loss_from_name,
    smallest_separation,
)
from uhop_jax.memory import Memory
from uhop_jax.model import Model
from uhop_jax.posterior import posterior_mean
from uhop_jax.retrieval import (
    Convergence,
    Retrieval,
    Trajectory,
    check,
    converge,
    energy,
    retrieve,
    trajectory,
)
from uhop_jax.separation import (
    Entmax,
    Entmax15,
    Epanechnikov,
    Exponentials,
    Polynomial,
    Separation,
    Softmax,
    Softmax1,
    Sparsemax,
    TopK,
    bounded_alpha,
    separation_from_name,
)
from uhop_jax.sharding import Sharded, memory_mesh, shard_memories
from uhop_jax.similarity import (
    Cosine,
    Dot,
    NegativeL1,
    NegativeL2,
    NegativeSquaredL2,
    Similarity,
    similarity_from_name,
)
from uhop_jax.stage_one import StageOne, fit, fit_sgd, gaussian_start, identity_start
from uhop_jax.storage import load, save
from uhop_jax.streaming import Streamed, retrieve_streamed
from uhop_jax.uhop_plus import fit_annealed

__all__ = [
    "AverageLoss",
    "BlindCalibration",
    "Calibration",
    "Centering",
    "Convergence",
    "ContrastiveLoss",
    "Cosine",
    "DeepLoss",
    "Dot",
    "Entmax",
    "Entmax15",
    "Epanechnikov",
    "Exponentials",
    "Footprint",
    "Identity",
    "Kernel",
    "LikelihoodKernel",
    "LinearKernel",
    "LowRankKernel",
    "Mask",
    "MaximumLoss",
    "Memory",
    "Model",
    "NegativeL1",
    "NegativeL2",
    "NegativeSquaredL2",
    "Noise",
    "NormNoise",
    "Polynomial",
    "Pytree",
    "Retrieval",
    "Separation",
    "SeparationLoss",
    "Sharded",
    "Similarity",
    "Softmax",
    "Softmax1",
    "Sparsemax",
    "StageOne",
    "Streamed",
    "TopK",
    "Trajectory",
    "bounded_alpha",
    "calibrate",
    "calibrate_blind",
    "check",
    "converge",
    "energy",
    "fit",
    "fit_annealed",
    "fit_closed_form",
    "fit_footprint",
    "fit_likelihood",
    "fit_sgd",
    "fit_values",
    "gaussian_start",
    "identity_start",
    "load",
    "loss_from_name",
    "memory_mesh",
    "posterior_mean",
    "retrieve",
    "retrieve_streamed",
    "save",
    "separation_from_name",
    "shard_memories",
    "similarity_from_name",
    "smallest_separation",
    "trajectory",
]
