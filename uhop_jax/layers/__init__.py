r"""Hopfield layers for Flax NNX models: attention as retrieval, with or without U-Hop.

    U-Hop(Y, R) = sep(beta (W_Q Phi(R)) (W_K Phi(Y))^T) W_V W_K Y               [sec:DL]

`R` holds the states (queries), `Y` the stored patterns (memories). `Phi` is the kernel
with which Stage I separates the memories. Without a kernel the layer is the Hopfield
layer of Ramsauer et al. 2020. Every layer calls `uhop_jax.retrieval`; none has an
update of its own.

Modules own parameters and never random state: dropout takes `key=`, and no key means no
dropout. The parameters of a kernel are `KernelParam`s, so that

    graphdef, kernels, rest = nnx.split(model, KernelParam, ...)

splits off the parameters that Stage I trains.
"""

from uhop_jax.layers.association import Association
from uhop_jax.layers.derived import HopfieldAttention, HopfieldLayer, HopfieldPooling
from uhop_jax.layers.dropout import dropped
from uhop_jax.layers.features import (
    KernelParam,
    LinearFeatures,
    SeparationLosses,
    separation_losses,
)
from uhop_jax.layers.hopfield import Hopfield

__all__ = [
    "Association",
    "Hopfield",
    "HopfieldAttention",
    "HopfieldLayer",
    "HopfieldPooling",
    "KernelParam",
    "LinearFeatures",
    "SeparationLosses",
    "dropped",
    "separation_losses",
]
