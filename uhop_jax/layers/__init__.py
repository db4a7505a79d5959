r"""Hopfield layers for Flax NNX models: attention as retrieval, with or without U-Hop.

    U-Hop(Y, R) = sep(beta (W_Q Phi(R)) (W_K Phi(Y))^T) W_V W_K Y               [sec:DL]

`R` holds the states (queries), `Y` the stored patterns (memories). `Phi` is the kernel
with which Stage I separates the memories. Without a kernel the layer is the Hopfield
layer of Ramsauer et al. 2020. A layer has three parts:

- `Association` retrieves, head by head: separation, `beta`, updates, dropout. It calls
  `uhop_jax.retrieval` and has no update of its own. Alone it serves every attention of
  Flax as its `attention_fn`.
- `Projections` are the linear maps of `Hopfield`; `StaticHopfield` has none.
- A kernel maps states and memories to the features that are compared.

`HopfieldPooling` and `HopfieldLayer` put a layer around learned states or memories.

Modules own parameters and never random state: dropout takes `key=`, and no key means no
dropout. The parameters of a kernel are `KernelParam`s, so that

    graphdef, kernels, rest = nnx.split(model, KernelParam, ...)

splits off the parameters that Stage I trains.
"""

from uhop_jax.layers.association import Association
from uhop_jax.layers.derived import HopfieldLayer, HopfieldPooling
from uhop_jax.layers.dropout import dropped
from uhop_jax.layers.features import (
    KernelParam,
    LinearFeatures,
    ResidualFeatures,
    SeparationFeatures,
)
from uhop_jax.layers.hopfield import Hopfield
from uhop_jax.layers.inputs import IndexedMemories
from uhop_jax.layers.learned import BiasPattern, LearnedAlpha
from uhop_jax.layers.recall import Recall
from uhop_jax.layers.separated import SeparationLosses, separation_losses
from uhop_jax.layers.static import StaticHopfield
from uhop_jax.layers.torch_weights import from_torch

__all__ = [
    "Association",
    "BiasPattern",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "IndexedMemories",
    "KernelParam",
    "LearnedAlpha",
    "LinearFeatures",
    "Recall",
    "ResidualFeatures",
    "SeparationFeatures",
    "SeparationLosses",
    "StaticHopfield",
    "dropped",
    "from_torch",
    "separation_losses",
]
