"""Compares a run of the reference protocol with numbers of the authors' own code.

python scripts/compare_reference.py docs/results/reference_mnist.csv

`tests/official_numbers.csv` holds means and standard deviations over memory sets,
measured with the code that the paper's authors released (MAGICS-LAB/UHop, cdac754), its
algorithm unchanged. The two codes draw different memory sets, so that means agree only
to within standard errors: `z` is the difference of two means over its standard error.
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

OFFICIAL = Path(__file__).parent.parent / "tests" / "official_numbers.csv"
FLOOR = 0.05  # smallest standard error, for rows without spread


def key(row: dict[str, str]) -> tuple:
    """Cell, method and setting of a row, equal in both files."""
    return (
        row["data"],
        row["corruption"],
        float(row["level"]),
        int(row["memories"]),
        row["method"],
        row["setting"] if row["setting"].startswith("N=") else "",
    )


def compare(results: Path) -> list[tuple[str, tuple, float, float, float]]:
    """Table, key, official mean, mean of this library and `z` of every common row."""
    errors = defaultdict(list)
    with results.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            errors[key(row)].append(float(row["error"]))
    rows = []
    with OFFICIAL.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sample = errors.get(key(row), [])
            if len(sample) > 1:
                mean, sd, n = (float(row[name]) for name in ("mean", "sd", "seeds"))
                pooled = max(sd, float(np.std(sample, ddof=1)))
                error = pooled * (1 / n + 1 / len(sample)) ** 0.5
                z = (np.mean(sample) - mean) / max(error, FLOOR)
                rows.append((row["table"], key(row), mean, float(np.mean(sample)), z))
    return rows


def main() -> None:
    """Prints every row, and the number of rows within two and three standard errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="results.csv of a run")
    rows = []
    for path in parser.parse_args().results:
        try:
            rows += compare(path)
        except (OSError, KeyError, ValueError) as error:
            parser.error(f"{path} is no results.csv of a retrieval run: {error!r}")
    if not rows:
        parser.error(f"the results have no cell in common with {OFFICIAL.name}")
    print(f"{'table':20} {'method':20} {'cell':46} {'official':>9} {'here':>9}")
    for table, about, official, mean, z in rows:
        name, *rest = about[4], *about[:4], about[5]
        print(
            f"{table:20} {name:20} {rest!s:46} {official:9.3g} {mean:9.3g} z {z:5.1f}"
        )
    z = np.abs([row[-1] for row in rows])
    print(
        f"{len(z)} rows, {(z <= 2).sum()} within 2 standard errors, {(z <= 3).sum()} "
        f"within 3, largest {z.max():.1f}"
    )


if __name__ == "__main__":
    main()
