"""U-Hop in JAX: associative memories that learn their similarity before they retrieve.

The functional core of "Uniform Memory Retrieval with Larger Capacity for Modern Hopfield
Models" (Wu et al., ICML 2024): separations, similarities, energies and retrieval.
"""

from uhop_jax.retrieval import (
    Convergence,
    Retrieval,
    Trajectory,
    converge,
    energy,
    has_energy,
    retrieve,
    trajectory,
)
from uhop_jax.separation import (
    Entmax,
    Polynomial,
    Separation,
    Softmax,
    Softmax1,
    Sparsemax,
    TopK,
    bounded_alpha,
    separation_from_name,
)
from uhop_jax.similarity import (
    Centering,
    Cosine,
    Dot,
    Kernel,
    LikelihoodKernel,
    LinearKernel,
    NegativeL1,
    NegativeL2,
    NegativeSquaredL2,
    Similarity,
    similarity_from_name,
)

__all__ = [
    "Centering",
    "Convergence",
    "Cosine",
    "Dot",
    "Entmax",
    "Kernel",
    "LikelihoodKernel",
    "LinearKernel",
    "NegativeL1",
    "NegativeL2",
    "NegativeSquaredL2",
    "Polynomial",
    "Retrieval",
    "Separation",
    "Similarity",
    "Softmax",
    "Softmax1",
    "Sparsemax",
    "TopK",
    "Trajectory",
    "bounded_alpha",
    "converge",
    "energy",
    "has_energy",
    "retrieve",
    "separation_from_name",
    "similarity_from_name",
    "trajectory",
]
