"""What the benchmarks share: fair timing, absent peers, a table and a figure."""

import argparse
import contextlib
import importlib
import io
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

PAUSE = 0.25  # seconds, in which the threads of the call before go to sleep
BUSY = 0.05  # seconds that short calls are repeated for, once the threads are awake
Benchmark = Callable[[int], list[dict[str, Any]]]


def peer(name: str) -> Any:
    """A package of the extra `bench`, or None where it is not installed."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    if name == "torch":
        module.set_num_threads(os.cpu_count() or 1)
    return module


def compare(
    title: str,
    baseline: str,
    calls: Mapping[str, Callable[[], Any] | None],
    rounds: int,
) -> list[dict[str, Any]]:
    """Median milliseconds of each call, and its median ratio to the baseline.

    In a round each call has its turn: a pause, then the mean of as many in a row as
    make `BUSY` seconds. A call that is None belongs to a peer that is not installed:
    its row says so.
    """
    present = {name: call for name, call in calls.items() if call is not None}
    seconds: dict[str, list[float]] = {name: [] for name in present}
    repeats = {}
    for name, call in present.items():
        timed(call, 1)  # compiles
        repeats[name] = math.ceil(BUSY / timed(call, 1))
    for _ in range(rounds):
        for name, call in present.items():
            time.sleep(PAUSE)
            if repeats[name] > 1:
                timed(call, 1)
            seconds[name].append(timed(call, repeats[name]))
    rows = []
    print(f"\n{title}")
    for name in calls:
        row = {"comparison": title, "name": name, "median_ms": "", "ratio": ""}
        if name in seconds:
            ratios = np.divide(seconds[name], seconds[baseline])
            row["ratio"] = ratio = float(np.median(ratios))
            row["median_ms"] = median = 1e3 * float(np.median(seconds[name]))
            print(f"  {name:<34}{median:>10.2f} ms {ratio:>9.2f} x {baseline}")
        else:
            print(f"  {name:<34}  not measured: pip install -e '.[bench]'")
        rows.append(row | {"baseline": baseline})
    return rows


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call, the mean of several in a row."""
    began = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (time.perf_counter() - began) / repeats


def environment() -> dict[str, Any]:
    """What the times depend on."""
    torch = peer("torch")
    return {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "torch": "" if torch is None else torch.__version__,
        "python": platform.python_version(),
    }


class Both(io.TextIOBase):
    """Prints, and writes to a file what it prints."""

    def __init__(self, file: Any):
        self.places = sys.stdout, file

    def write(self, text: str) -> int:
        for place in self.places:
            place.write(text)
            place.flush()
        return len(text)


def main(doc: str, name: str, benchmarks: Sequence[Benchmark]) -> None:
    """Runs all comparisons; writes `NAME.csv`, what was printed, and a figure."""
    from uhop_jax import records

    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    about = environment()
    rows: list[dict[str, Any]] = []
    path, printed = options.out / f"{name}.csv", options.out / f"{name}.txt"
    with (
        printed.open("w", encoding="utf-8") as file,
        contextlib.redirect_stdout(Both(file)),
    ):
        print(", ".join(f"{key} {value}" for key, value in about.items()))
        for benchmark in benchmarks:
            rows += [row | about for row in benchmark(options.rounds)]
            records.write_csv(path, rows)  # whatever comes next
    figure = path.with_suffix(".png")
    draw(figure, rows, f"{about['device']}, {about['cores']} cores")
    print(f"\nwritten: {path}, {printed}, {figure}")


def draw(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draws ratios to the baseline as bars: a panel for comparisons that begin alike.

    What all comparisons of a panel are called is its title, the rest a heading in it.
    """
    from uhop_jax import plotting

    panels: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row["ratio"] != "":
            comparisons = panels.setdefault(row["comparison"].split(", ")[0], {})
            comparisons.setdefault(row["comparison"], []).append(row)
    parts = []
    for comparisons in panels.values():
        words = [name.split(", ") for name in comparisons]
        common = [word for word in words[0] if all(word in other for other in words)]
        groups = {
            ", ".join(word for word in other if word not in common): {
                row["name"]: (float(row["ratio"]), 0.0)
                for row in ours
                if row["name"] != row["baseline"]
            }
            for other, ours in zip(words, comparisons.values(), strict=True)
        }
        baselines = {row["baseline"] for ours in comparisons.values() for row in ours}
        xlabel = f"time relative to {', '.join(sorted(baselines))}"
        about = ", ".join(common)
        parts.append(plotting.Comparison(about, groups, xlabel, origin=1.0))
    if parts:
        plotting.comparisons(path, parts, title=title)
