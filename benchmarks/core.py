"""Times the functional core, as ratios within one run.

    python benchmarks/core.py [--out DIR] [--rounds N]

Each comparison times its members in turn, round after round, and reports the median
time of each and the median of the ratios round by round, so that a machine whose speed
drifts does not decide it. Writes `core.csv` with the environment in its last columns.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import compare, main

import uhop_jax as uhop


def separations(rounds: int) -> list[dict[str, Any]]:
    """Forward and gradient of every separation against softmax; Optax's projection."""
    rng = np.random.default_rng(0)
    z, g = (jnp.asarray(rng.normal(size=(256, 10_000)), jnp.float32) for _ in range(2))
    members = {
        "softmax": uhop.Softmax(),
        "sparsemax": uhop.Sparsemax(),
        "entmax 1.5": uhop.Entmax(1.5),
        "entmax 1.25": uhop.Entmax(1.25),
        "softmax1": uhop.Softmax1(),
        "polynomial 10": uhop.Polynomial(10),
        "top-32": uhop.TopK(32),
    }
    forward = jax.jit(lambda s, z: s(z))
    backward = jax.jit(lambda s, z, g: jax.vjp(s, z)[1](g)[0])
    rows = compare(
        "separations, forward, (256, 10000) float32",
        "softmax",
        {name: lambda s=s: forward(s, z) for name, s in members.items()},
        rounds,
    )
    rows += compare(
        "separations, value and gradient, (256, 10000) float32",
        "softmax",
        {name: lambda s=s: backward(s, z, g) for name, s in members.items()},
        rounds,
    )
    project = jax.jit(jax.vmap(optax.projections.projection_simplex))
    return rows + compare(
        "sparsemax, (256, 10000) float32",
        "uhop_jax",
        {
            "uhop_jax": lambda: forward(uhop.Sparsemax(), z),
            "optax projection_simplex, vmap": lambda: project(z),
        },
        max(3, rounds // 5),
    )


def stage_one(rounds: int) -> list[dict[str, Any]]:
    """The Gram path of Stage I against Optax on the weights, 100 steps."""
    rng = np.random.default_rng(0)
    rows = []
    for count, d in ((100, 784), (500, 784), (100, 3072)):
        memories = jnp.asarray(rng.uniform(size=(count, d)), jnp.float32)
        start = uhop.gaussian_start(jax.random.key(0), d)
        optimizer = optax.sgd(10.0)
        rows += compare(
            f"Stage I, 100 steps, M = {count}, d = D = {d}, float32",
            "gram",
            {
                "gram": lambda m=memories, s=start, d=d: uhop.fit_sgd(
                    m, rate=10.0 / d, steps=100, start=s, path="gram"
                ),
                "Optax on W": lambda m=memories, s=start, o=optimizer: uhop.fit(
                    m, optimizer=o, steps=100, start=s
                ),
            },
            max(3, rounds // 5),
        )
    return rows


def retrieval(rounds: int) -> list[dict[str, Any]]:
    """One update against its two matrix products."""
    rng = np.random.default_rng(0)
    memories = jnp.asarray(rng.normal(size=(10_000, 256)), jnp.float32)
    query = jnp.asarray(rng.normal(size=(256, 256)), jnp.float32)
    products = jax.jit(lambda m, q: (q @ m.T) @ m)

    @jax.jit
    def retrieve(m, q, separation, similarity):
        return uhop.retrieve(
            m, q, beta=1.0, separation=separation, similarity=similarity
        ).state

    models = {
        "dot, softmax": (uhop.Softmax(), uhop.Dot()),
        "dot, sparsemax": (uhop.Sparsemax(), uhop.Dot()),
        "cosine, softmax": (uhop.Softmax(), uhop.Cosine()),
        "squared l2, softmax": (uhop.Softmax(), uhop.NegativeSquaredL2()),
    }
    calls: dict[str, Callable[[], Any]] = {
        "two products": lambda: products(memories, query)
    }
    for name, model in models.items():
        calls[name] = lambda model=model: retrieve(memories, query, *model)
    title = "retrieval, M = 10000, d = 256, 256 queries, float32"
    return compare(title, "two products", calls, rounds)


def calibration(rounds: int) -> list[dict[str, Any]]:
    """Calibration on 500 digits, with compilation and without."""
    del rounds
    from uhop_jax import data

    memories = data.images("digits").patterns[:500]
    rows = []
    print("\ncalibration, 500 digits, half of the pixels masked")
    for name in ("first call, compiling", "second call"):
        began = time.perf_counter()
        model = uhop.calibrate(jax.random.key(0), memories, uhop.Mask(0.5))
        spent = 1e3 * (time.perf_counter() - began)
        print(f"  {name:<34}{spent:>10.0f} ms")
        rows.append(
            {
                "comparison": "calibration, 500 digits",
                "name": name,
                "median_ms": spent,
                "ratio": "",
                "baseline": "",
            }
        )
    print(f"  {model.summary()}")
    return rows


if __name__ == "__main__":
    main(__doc__, "core", [separations, stage_one, retrieval, calibration])
