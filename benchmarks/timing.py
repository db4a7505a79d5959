"""What the benchmarks share: fair timing and one table of results."""

import argparse
import csv
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np


def compare(
    title: str, baseline: str, calls: dict[str, Callable[[], Any]], rounds: int
) -> list[dict[str, Any]]:
    """Median milliseconds of each call, and its median ratio to the baseline."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - began)
    rows = []
    print(f"\n{title}")
    for name, times in seconds.items():
        ratio = float(np.median(np.divide(times, seconds[baseline])))
        median = 1e3 * float(np.median(times))
        print(f"  {name:<34}{median:>10.2f} ms {ratio:>9.2f} x {baseline}")
        rows.append(
            {
                "comparison": title,
                "name": name,
                "median_ms": median,
                "ratio": ratio,
                "baseline": baseline,
            }
        )
    return rows


def main(
    doc: str, name: str, benchmarks: Sequence[Callable[[int], list[dict[str, Any]]]]
) -> None:
    """Runs all comparisons of a script and writes `NAME.csv`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    environment = {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    rows = []
    for benchmark in benchmarks:
        rows += [row | environment for row in benchmark(options.rounds)]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"\nwritten: {path}")
