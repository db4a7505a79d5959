"""Small layers and inputs that the tests of layers share."""

import inspect

import jax
import jax.numpy as jnp
from flax import nnx

from uhop_jax.layers import (
    Association,
    Hopfield,
    StaticHopfield,
)

B, L, S, D, H = 3, 5, 7, 16, 4


def patterns(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


STATE, MEMORIES = patterns(B, L, D), patterns(B, S, D, seed=1)


# Options of the association of a layer; all others are of the layer.
OF_ASSOCIATION = set(inspect.signature(Association.__init__).parameters) - {
    "self",
    "param_dtype",
}


def layer(size=D, seed=0, kind=Hopfield, **options):
    parts = {name: options.pop(name) for name in OF_ASSOCIATION & set(options)}
    return kind(size, Association(**parts), rngs=nnx.Rngs(seed), **options)


def static(**options):
    return layer(kind=StaticHopfield, **options)


UNTIL_CONVERGED = {"steps": 64, "until_converged": True}


def number_of_parameters(model):
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))
