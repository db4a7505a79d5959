"""Shared parts of the benchmarks: timing in turn, optional peers, table and figure."""

import argparse
import contextlib
import importlib
import io
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

PAUSE = 0.25  # seconds in which the threads of the previous call go to sleep
HELD = "--xla_cpu_max_isa"  # option of XLA
BUSY = 0.05  # seconds for which a short call is repeated
Benchmark = Callable[[int], list[dict[str, Any]]]


def peer(name: str) -> Any:
    """A package of the extra `bench`, or None if it is not installed."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    if name == "torch":
        threads = os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1
        module.set_num_threads(int(threads))
    return module


def compare(
    title: str,
    baseline: str,
    calls: Mapping[str, Callable[[], Any] | None],
    rounds: int,
) -> list[dict[str, Any]]:
    """Median milliseconds of each call, and its median ratio to the baseline.

    In a round each call has its turn: a pause, then the mean time of repeated calls
    that take `BUSY` seconds together.

    Args:
      title: name of the comparison.
      baseline: name of the call to which ratios refer.
      calls: calls by name; None stands for a peer that is not installed.
      rounds: number of rounds.

    Returns:
      A row for each call: `comparison`, `name`, `median_ms`, `ratio` and `baseline`;
      time and ratio are empty strings for a peer that is not installed.
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
    """Mean seconds of a call over `repeats` calls in a row."""
    began = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (time.perf_counter() - began) / repeats


def processor() -> tuple[str, str]:
    """Name of the processor, and the widest vector extension that programs use.

    `XLA_FLAGS=--xla_cpu_max_isa=AVX2` and, for PyTorch, `ATEN_CPU_CAPABILITY=avx2` and
    `ONEDNN_MAX_CPU_ISA=AVX2` hold both libraries to a narrower one.
    """
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", fields.get("Features", "")).split()
    known = ("avx512f", "avx2", "avx", "sse4_2", "sve", "asimd")
    vectors = next((x for x in known if x in flags), "")
    held = re.search(rf"{HELD}=(\w+)", os.environ.get("XLA_FLAGS", ""))
    return name, held.group(1).lower() if held else vectors


def commit() -> str:
    """The commit of the code, with a + if files differ from it; "" without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=7"]
    try:
        where = Path(__file__).parent
        done = subprocess.run(command, cwd=where, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def environment() -> dict[str, Any]:
    """Code, device, cores and versions, on which the times depend."""
    torch = peer("torch")
    name, vectors = processor()
    return {
        "device": jax.devices()[0].device_kind,
        "processor": name,
        "vectors": vectors,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "torch": "" if torch is None else torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


class Both(io.TextIOBase):
    """A stream that writes to standard output and to a file."""

    def __init__(self, file: Any):
        self.streams = sys.stdout, file

    def write(self, text: str) -> int:
        for stream in self.streams:
            stream.write(text)
            stream.flush()
        return len(text)


def main(doc: str, name: str, benchmarks: Sequence[Benchmark]) -> None:
    """Runs all comparisons; writes `NAME.csv`, the printed output, and a figure.

    With the processor held to narrower vectors the name ends in theirs.
    """
    from uhop_jax import records

    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    about = environment()
    if HELD in os.environ.get("XLA_FLAGS", ""):
        name += f"_{about['vectors']}"
    rows: list[dict[str, Any]] = []
    path, printed = options.out / f"{name}.csv", options.out / f"{name}.txt"
    with (
        printed.open("w", encoding="utf-8") as file,
        contextlib.redirect_stdout(Both(file)),
    ):
        print(", ".join(f"{key} {value}" for key, value in about.items()))
        for benchmark in benchmarks:
            rows += [row | about for row in benchmark(options.rounds)]
            records.write_csv(path, rows)  # in case a later benchmark fails
    written = [path, printed]
    title = "{processor}, {vectors}, {cores} cores".format_map(about)
    if draw(path.with_suffix(".png"), rows, title):
        written.append(path.with_suffix(".png"))
    print(f"\nwritten: {', '.join(map(str, written))}")


def draw(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> bool:
    """Draws ratios to the baseline as bars, a panel for each kind of comparison.

    Returns whether there were any.

    Comparisons whose names begin with the same words, up to the first comma, share a
    panel. The words that all names of a panel have in common are its title; the rest of
    each name heads a group of bars.
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
        common = [word for word in words[0] if all(word in name for name in words)]
        groups = {
            ", ".join(word for word in name if word not in common): {
                row["name"]: (float(row["ratio"]), 0.0)
                for row in members
                if row["name"] != row["baseline"]
            }
            for name, members in zip(words, comparisons.values(), strict=True)
        }
        groups = {name: bars for name, bars in groups.items() if bars}
        if not groups:  # nothing was measured beside the baseline
            continue
        baselines = {row["baseline"] for rows in comparisons.values() for row in rows}
        xlabel = f"time relative to {', '.join(sorted(baselines))}"
        about = ", ".join(common)
        parts.append(plotting.Comparison(about, groups, xlabel, origin=1.0))
    if parts:
        plotting.comparisons(path, parts, title=title)
    return bool(parts)
