"""Times blind calibration, up to 100,000 memories and queries.

    python benchmarks/blind.py [--out DIR]

Also prints the peak memory of the process. Memories are synthetic, queries noisy copies
of them in any order.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from large import Peak
from timing import main

import uhop_jax as uhop
from uhop_jax.transformations import Transformations, image_transformations

IMAGES = (28, 28, 1)
SIZES = (1_000, 10_000, 100_000)  # of memories, and of queries


def of_images(rounds: int, size: int = 500) -> list[dict[str, Any]]:
    """As many queries as memories, of the size of an MNIST image."""
    del rounds
    d = IMAGES[0] * IMAGES[1]
    rows = twice(f"M = Q = {size}, d = {d}", size, d)
    moves = image_transformations(IMAGES)
    title = f"M = Q = {size}, d = {d}, {moves.number} transformations"
    return rows + twice(title, size, d, moves)


def at_scale(rounds: int, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """As many queries as memories, of 64 components."""
    del rounds
    return [row for size in sizes for row in twice(f"M = Q = {size}, d = 64", size, 64)]


def twice(
    title: str, size: int, d: int, transformations: Transformations | None = None
) -> list[dict[str, Any]]:
    """Milliseconds of a first call, which compiles, and of a second call."""
    rng = np.random.default_rng(0)
    memories = jnp.asarray(rng.random((size, d), np.float32) ** 2)
    noise = jnp.asarray(rng.standard_normal((size, d), np.float32))
    order = rng.permutation(size)
    queries = jnp.clip(memories[order] + 0.2 * noise, 0, 1)
    rows = []
    print(f"\nblind calibration, {title}")
    jax.clear_caches()  # programs of other sizes take memory
    peak = Peak()
    for name in ("first call, compiling", "second call"):
        began = time.perf_counter()
        calibration = jax.block_until_ready(
            uhop.calibrate_blind(memories, queries, transformations=transformations)
        )
        spent = 1e3 * (time.perf_counter() - began)
        print(f"  {name:<34}{spent:>10.0f} ms")
        row = {"comparison": f"blind calibration, {title}", "name": name}
        rows.append(row | {"median_ms": spent, "ratio": "", "baseline": ""})
    peak.running = False
    print(f"  most memory of the process{peak.mebibytes:>18.0f} MiB")
    print(f"  {calibration.summary()}")
    return rows


if __name__ == "__main__":
    main(__doc__, "benchmarks_blind", [of_images, at_scale])
