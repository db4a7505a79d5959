"""Times retrieval from a million memories in a file against its two matrix products.

    python benchmarks/large.py [--out DIR] [--rounds N]

The file is written once, to a temporary directory, and memory-mapped; all members of a
comparison read the same blocks. The number of memories is odd, so that the last block
is incomplete. Queries are noisy copies of memories; they retrieve one memory at beta 50
and mix hundreds at beta 2. Also prints the largest difference from direct retrieval,
and the peak memory of the process beyond the pages of the file.
"""

import functools
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from timing import compare, main

import uhop_jax as uhop

M, D, QUERIES = 1_000_003, 64, 256
BLOCK, TILE = 32768, 1024  # memories


def write(path: Path) -> np.ndarray:
    """Writes unit vectors piece by piece; returns the memory-mapped file."""
    rng = np.random.default_rng(0)
    file = np.lib.format.open_memmap(path, "w+", np.float32, (M, D))
    for start in range(0, M, 100_000):
        part = rng.standard_normal((min(100_000, M - start), D), np.float32)
        file[start : start + len(part)] = part / np.linalg.norm(
            part, axis=1, keepdims=True
        )
    file.flush()
    del file
    return np.load(path, mmap_mode="r")


@functools.partial(jax.jit, static_argnames="tile")
def two_products(query, out, block, tile: int):
    """The scores and the sum weighted by them, tile by tile, without a separation."""
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def body(i, out):
        part = lax.dynamic_slice_in_dim(block, i * tile, tile)
        return out + product(product(query, part.T), part)

    return lax.fori_loop(0, block.shape[0] // tile, body, out)


def products(query: jax.Array, memories: np.ndarray) -> jax.Array:
    """Both products with all blocks of the file, less the incomplete last tile."""
    out = jnp.zeros(query.shape)
    for start in range(0, M, BLOCK):
        part = memories[start : start + BLOCK]
        out = two_products(query, out, jax.device_put(np.asarray(part)), TILE)
    return out


class Peak(threading.Thread):
    """Samples the anonymous memory of this process; `mebibytes` is its peak in MiB."""

    def __init__(self):
        super().__init__(daemon=True)
        self.mebibytes, self.running = 0.0, True
        self.start()

    def run(self):
        while self.running:
            lines = Path("/proc/self/status").read_text("utf-8").splitlines()
            line = next(x for x in lines if x.startswith("RssAnon"))
            self.mebibytes = max(self.mebibytes, int(line.split()[1]) / 1024)
            time.sleep(0.05)


def large(rounds: int) -> list[dict[str, Any]]:
    """Streamed retrieval for each separation, at a small and a large beta."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "memories.npy"
        memories = write(path)
        rng = np.random.default_rng(1)
        noise = 0.05 * rng.standard_normal((QUERIES, D)).astype(np.float32)
        target = rng.choice(M, QUERIES, replace=False)
        query = jnp.asarray(memories[np.sort(target)] + noise)
        members = {
            "softmax": uhop.Softmax(),
            "sparsemax": uhop.Sparsemax(),
            "entmax 1.5": uhop.Entmax(1.5),
            "top-32": uhop.TopK(32),
        }
        for beta in (2.0, 50.0):
            calls: dict[str, Any] = {"two products": lambda: products(query, memories)}
            for name, separation in members.items():
                calls[name] = lambda separation=separation, beta=beta: (
                    uhop.retrieve_streamed(
                        uhop.Model(separation=separation, beta=beta),
                        path,
                        query,
                        block=BLOCK,
                    ).state
                )
            title = f"M = {M}, d = {D}, {QUERIES} queries, beta {beta:g}, streamed"
            peak = Peak()
            rows += compare(title, "two products", calls, rounds)
            peak.running = False
            print(f"  most memory beyond the file{peak.mebibytes:>17.0f} MiB")
        for name, separation in members.items():
            for beta in (2.0, 50.0):
                options: Any = dict(beta=beta, separation=separation)
                few = query[:16]
                streamed = uhop.retrieve_streamed(
                    uhop.Model(**options), path, few, block=BLOCK
                )
                direct = uhop.retrieve(
                    uhop.Model(**options), jnp.asarray(memories), few
                )
                error = float(jnp.abs(streamed.state - direct.state).max())
                print(f"  {name}, beta {beta:g}: {error:.1e} from direct retrieval")
    return rows


if __name__ == "__main__":
    main(__doc__, "large", [large])
