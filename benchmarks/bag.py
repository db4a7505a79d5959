"""Times a bag of a million instances, value and gradient, against its products.

    python benchmarks/bag.py [--out DIR] [--rounds N]

`HopfieldPooling` with 4 heads and `block=4096` pools instances of width 64; gradients
are in all parameters, and also in the instances where the title says so. The baseline
computes keys and values of all instances, scores, and sums weighted by them, with the
same gradients. Also prints the temporary memory of each compiled program, the time of a
batch of bags of 10 to 100,000 instances without padding, and the largest difference
from the layer that holds all scores.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from timing import compare, main

from uhop_jax.layers import Association, Hopfield, HopfieldPooling

N, WIDTH, HEADS, BLOCK = 1_000_000, 64, 4, 4096
LENGTHS = (10, 100, 1_000, 10_000, 100_000, 40, 400, 4_000, 40_000)
SEPARATIONS = ("softmax", "sparsemax", "entmax")
PRODUCTS = "products alone"


def instances(number: int, width: int = WIDTH) -> jax.Array:
    """Standard normal instances."""
    return jax.random.normal(jax.random.key(0), (number, width))


def pooling(separation: str, block: int | None, width: int = WIDTH) -> HopfieldPooling:
    """Pooling by one learned state."""
    association = Association(separation, block=block)
    layer = Hopfield(
        width, association, num_heads=HEADS, value_size=width, rngs=nnx.Rngs(0)
    )
    return HopfieldPooling(layer, rngs=nnx.Rngs(1))


def step(pool: HopfieldPooling, argnums: Any, **options: Any) -> Any:
    """Value and gradient of a sum of squares, a jitted function, and its parameters."""
    graphdef, parameters = nnx.split(pool)

    def loss(parameters, bag):
        return (nnx.merge(graphdef, parameters)(bag, **options) ** 2).sum()

    run = jax.jit(jax.value_and_grad(loss, argnums=argnums))
    return run, nnx.to_pure_dict(parameters)


def products(argnums: Any, width: int = WIDTH) -> Any:
    """The products of the layer, without a separation."""
    shape = HEADS, width // HEADS

    def loss(weights, bag):
        keys, values = (
            (bag @ weights[name]).reshape(-1, *shape) for name in ("key", "value")
        )
        scores = jnp.einsum("hd,thd->ht", weights["state"], keys)
        return (jnp.einsum("ht,thd->hd", scores, values) ** 2).sum()

    weights = {name: jnp.full((width, width), 1e-3) for name in ("key", "value")}
    weights["state"] = jnp.full(shape, 1e-3)
    return jax.jit(jax.value_and_grad(loss, argnums=argnums)), weights


def bag(rounds: int, number: int = N, width: int = WIDTH) -> list[dict[str, Any]]:
    """A bag of `number` instances, without and with gradients in the instances."""
    rows: list[dict[str, Any]] = []
    data = instances(number, width)
    for title, argnums in (("parameters", 0), ("parameters and instances", (0, 1))):
        runs = {PRODUCTS: products(argnums, width)}
        for separation in SEPARATIONS:
            runs[separation] = step(pooling(separation, BLOCK, width), argnums)
        calls: dict[str, Any] = {}
        temporary = {}
        for name, (run, parameters) in runs.items():
            program = run.lower(parameters, data).compile()
            temporary[name] = program.memory_analysis().temp_size_in_bytes / 2**20
            calls[name] = lambda program=program, p=parameters: program(p, data)
        heading = f"bag of {number} instances, gradients in {title}"
        rows += compare(heading, PRODUCTS, calls, rounds)
        for name, size in temporary.items():
            print(f"  temporary memory of {name:<20}{size:>10.0f} MiB")
    return rows


def ragged(rounds: int, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """Bags of different lengths, against one bag of all their instances."""
    data, counts = instances(sum(lengths)), jnp.asarray(lengths)
    calls = {}
    for name, options in (("one bag", {}), ("bags of any length", {"lengths": counts})):
        run, parameters = step(pooling("softmax", 1024), 0, **options)
        calls[name] = lambda run=run, p=parameters: run(p, data)
    title = f"{len(lengths)} bags of {min(lengths)} to {max(lengths)} instances"
    return compare(title, "one bag", calls, rounds)


def equal(rounds: int, number: int = 20_000) -> list[dict[str, Any]]:
    """Prints the largest relative difference from the layer that holds all scores."""
    del rounds
    data = instances(number)
    for separation in SEPARATIONS:
        results = []
        for block in (None, BLOCK):
            run, parameters = step(pooling(separation, block), (0, 1))
            results.append(jax.tree.leaves(run(parameters, data)))
        scale = max(float(jnp.abs(x).max()) for x in results[0])
        error = max(float(np.abs(x - y).max()) for x, y in zip(*results, strict=True))
        print(f"  {separation}, {number} instances: difference {error / scale:.1e}")
    return []


if __name__ == "__main__":
    main(__doc__, "bag", [bag, ragged, equal])
