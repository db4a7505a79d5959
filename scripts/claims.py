"""What the paper claims from experiments, judged by numbers in result files."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from theorems import FAILS, HOLDS, PARTLY, UNTESTED

from uhop_jax import paper, records

Rows = Sequence[Mapping[str, Any]]
Results = Mapping[str, Rows]
CELL = ("data", "memories", "corruption", "level")
BASELINES = ("MHM", "Sparse MHM", "DAM 10", "l2", "l1")  # of the paper
CONTROLS = ("MHM + untrained kernel", "MHM + kernel by task", "MHM, matched size")
LEAST = 0.01  # error below which methods are equal: nothing is left to gain


class Judged(NamedTuple):
    """Our numbers under the paper's protocol and under the fair one, and a verdict."""

    paper: str
    fair: str
    verdict: str


class Claim(NamedTuple):
    """A row of the report.

    Attributes:
      labels: of the paper.
      says: what it states.
      studies: whose result files the row is made from; the row is not tested without.
      judge: makes the row from them.
      rule: how the verdict follows from the numbers.
      missing: why it is not tested, and what that would cost.
    """

    labels: tuple[str, ...]
    says: str
    studies: tuple[str, ...]
    judge: Callable[[Results], Judged]
    rule: str
    missing: str = ""


def judged(claim: Claim, results: Results) -> Judged:
    """The row's numbers, or that it is not tested; holds if no study is missing."""
    there = {name: results[name] for name in claim.studies if results.get(name)}
    if not there:
        return Judged("-", "-", UNTESTED)
    found = claim.judge(there)
    if found.verdict == HOLDS and len(there) < len(claim.studies):
        return found._replace(verdict=PARTLY)
    return found


# -- Verdicts --------------------------------------------------------------------------


def of_shares(shares: Sequence[float]) -> str:
    """Holds if each is nine tenths or more, partly if one is a half or more."""
    if min(shares) >= 0.9:
        return HOLDS
    return PARTLY if max(shares) >= 0.5 else FAILS


def of_values(values: Sequence[float], full: float, some: float) -> str:
    """Holds if each is `full` or more, partly if one is `some` or more."""
    if min(values) >= full:
        return HOLDS
    return PARTLY if max(values) >= some else FAILS


def of_gain(gain: float, error: float, stated: float) -> str:
    """Holds if half of the gain stated is there, beyond two standard errors.

    Where there is one seed, and so no standard error, nothing is tested.
    """
    if error == float("inf"):
        return UNTESTED
    if gain > 2 * error and gain >= stated / 2:
        return HOLDS
    return PARTLY if gain > 2 * error else FAILS


# -- Numbers ---------------------------------------------------------------------------


def spread(sample: Sequence[float], unit: str = "") -> str:
    """Mean and standard deviation, with a unit."""
    return records.mean_and_spread(list(sample)) + unit


def errors(rows: Rows, value: str = "error") -> dict[tuple, dict[tuple, list[float]]]:
    """Samples over memory sets, by cell and then by method and setting."""
    found: dict[tuple, dict[tuple, list[float]]] = {}
    for row in rows:
        cell = found.setdefault(tuple(row[key] for key in CELL), {})
        cell.setdefault((row["method"], row["setting"]), []).append(row[value])
    return found


def best(cell: Mapping[tuple, list[float]], names: Sequence[str]) -> tuple | None:
    """The method and setting of the least mean error, among those methods."""
    ours = [key for key in cell if key[0] in names]
    return min(ours, key=lambda key: float(np.mean(cell[key]))) if ours else None


def uhops(cell: Mapping[tuple, list[float]]) -> list[str]:
    """The variants of U-Hop in a cell."""
    return sorted({name for name, _ in cell if name.startswith("U-Hop")})


def leads(rows: Rows, others: Sequence[str]) -> tuple[str, float]:
    """In what share of cells U-Hop, at its best, has the least error."""
    won, cells = 0, errors(rows)
    for cell in cells.values():
        a, b = best(cell, uhops(cell)), best(cell, others)
        mine, theirs = float(np.mean(cell[a])), float(np.mean(cell[b]))
        won += mine <= max(1.01 * theirs, LEAST)
    where, cell = list(cells.items())[-1]
    a, b = best(cell, uhops(cell)), best(cell, others)
    text = (
        f"{won} of {len(cells)} cells; last ({_place(where)}): U-Hop "
        f"{spread(cell[a])}, {b[0]} {spread(cell[b])}"
    )
    return text, won / len(cells)


def _place(where: tuple) -> str:
    data, memories, kind, level = where
    return f"{data}, M = {memories}, {kind} {level:g}"


def margins(rows: Rows, number: int) -> list[float]:
    """By what part U-Hop after N steps has less error than MHM, cell by cell."""
    found = []
    for cell in errors(rows).values():
        plain, mine = cell[("MHM", "")], cell.get(("U-Hop", f"N={number}"))
        if mine and np.mean(plain) > LEAST:
            found.append(1 - float(np.mean(mine)) / float(np.mean(plain)))
    return found


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation over cells, of parts."""
    return f"{spread([100 * v for v in values])} % over {len(values)} cells"


# -- Claims about retrieval ------------------------------------------------------------


def split(results: Results) -> tuple[list, list]:
    """Rows under the paper's protocol (or the released code's), and the fair ones."""
    rows = [row for found in results.values() for row in found]
    return (
        [row for row in rows if row["protocol"] != "fair"],
        [row for row in rows if row["protocol"] == "fair"],
    )


def two_sided(
    results: Results, measure: Callable[..., tuple[str, float]], verdict: Callable
) -> Judged:
    """Measures both protocols, where both exist."""
    texts, values = [], []
    for fair, rows in enumerate(split(results)):
        text, value = measure(rows, bool(fair)) if rows else ("-", None)
        texts.append(text)
        values += [] if value is None else [value]
    return Judged(*texts, verdict(values))


def least_error(results: Results) -> Judged:
    """In what share of cells U-Hop has the least error."""

    def measure(rows: Rows, fair: bool) -> tuple[str, float]:
        return leads(rows, (*BASELINES, "cosine", "random W") if fair else BASELINES)

    return two_sided(results, measure, of_shares)


def single_step(results: Results) -> Judged:
    """The margin over MHM after one step of Stage I."""

    def measure(rows: Rows, fair: bool) -> tuple[str, float]:
        found = margins(rows, 1)
        return percent(found), float(np.mean(found))

    full = paper.RETRIEVAL_MARGIN
    return two_sided(results, measure, lambda x: of_values(x, full, full))


def near_limit(results: Results) -> Judged:
    """In what share of cells U-Hop is near the posterior mean."""
    rows = split(results)[1]
    near, worst, cells = 0, "", errors(rows)
    for where, cell in cells.items():
        mine = cell[best(cell, uhops(cell))]
        least = float(np.mean(cell[("limit", "")]))
        near += float(np.mean(mine)) <= max(1.5 * least, 0.5)
        worst = f"{_place(where)}: {spread(mine)}, limit {least:.3g}"
    return Judged(
        "-",
        f"{near} of {len(cells)} cells within 1.5 times the limit or 0.5; last {worst}",
        of_shares([near / len(cells)]),
    )


def correlation(results: Results) -> Judged:
    """The rank correlation of separation loss and error."""
    from scipy.stats import spearmanr

    def measure(rows: Rows, fair: bool) -> tuple[str, float]:
        up = [row for row in rows if row["rate"] > 0]
        rho = {
            name: float(spearmanr(*zip(*pairs, strict=True)).statistic)
            for name, pairs in (
                ("all", [(r["loss"], r["error"]) for r in rows]),
                ("descending", [(r["loss"], r["error"]) for r in up]),
            )
        }
        text = f"{rho['all']:.2f} over {len(rows)} runs"
        if len(up) < len(rows):
            text += f", {rho['descending']:.2f} over the {len(up)} that descend"
        return text, rho["descending"]

    return two_sided(results, measure, lambda x: of_values(x, 0.7, 0.3))


def by_steps(rows: Rows, value: str = "error") -> dict[int, list[float]]:
    """Samples of U-Hop at M = 100 by N, over memory sets."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["method"] == "U-Hop" and row["memories"] == 100:
            found.setdefault(int(row["setting"][2:]), []).append(row[value])
    return dict(sorted(found.items()))


def decay(results: Results) -> Judged:
    """The error against the number of steps."""

    def measure(rows: Rows, fair: bool) -> tuple[str, float]:
        found = by_steps(rows)
        first, last = min(found), max(found)
        least = min(found, key=lambda n: float(np.mean(found[n])))
        texts = [f"N = {n}: {spread(found[n])}" for n in sorted({first, least, last})]
        change = 1 - float(np.mean(found[last])) / float(np.mean(found[first]))
        return "; ".join(texts), change

    return two_sided(results, measure, lambda x: of_values(x, 0.5, 0.25))


def wider(results: Results) -> Judged:
    """The smallest separation before and after Stage I."""

    def measure(rows: Rows, fair: bool) -> tuple[str, float]:
        found = by_steps(rows, "delta_min")
        first, last = found[min(found)], found[max(found)]
        up = np.mean([b > a for a, b in zip(first, last, strict=True)])
        return (
            f"smallest separation {spread(first)} at N = {min(found)}, {spread(last)} "
            f"at N = {max(found)}",
            float(up),
        )

    return two_sided(results, measure, of_shares)


def average_or_maximum(results: Results) -> Judged:
    """The average loss beside the maximum loss, at equal steps."""

    def measure(rows: Rows, fair: bool) -> tuple[str, float]:
        won = total = 0
        last = ""
        for where, cell in errors(rows).items():
            for name, setting in cell:
                if name == "U-Hop":
                    mine, theirs = cell[name, setting], cell["U-Hop max", setting]
                    won += float(np.mean(mine)) <= 1.01 * float(np.mean(theirs))
                    total += 1
                    last = f"M = {where[1]}, {setting}: {spread(mine)}, maximum "
                    last += spread(theirs)
        return f"{won} of {total} pairs (M, N); last {last}", won / total

    return two_sided(results, measure, of_shares)


def sparse_gain(results: Results) -> Judged:
    """U-Hop beside its base, both with sparsemax."""

    def measure(rows: Rows, fair: bool) -> tuple[str, float]:
        won = total = 0
        for cell in errors(rows).values():
            key = best(cell, ["U-Hop sparse"])
            mine, plain = np.mean(cell[key]), np.mean(cell[("Sparse MHM", "")])
            won += bool(mine < plain or plain < LEAST)
            total += 1
        return f"less error than Sparse MHM in {won} of {total} cells", won / total

    return two_sided(results, measure, of_shares)


def metastable(results: Results) -> Judged:
    """How many memories a state mixes, each model at its best beta."""
    sizes = {}
    for alpha in (1.0, 2.0):
        for name in ("MHM", "U-Hop"):
            rows = [
                r
                for r in results["metastability_digits"]
                if r["method"] == name and r["alpha"] == alpha
            ]
            groups = records.grouped(rows, ("beta",))
            least = min(
                groups, key=lambda b: float(np.mean([r["error"] for r in groups[b]]))
            )
            sizes[name, alpha] = [r["size"] for r in groups[least]]
    text = "; ".join(
        f"alpha {a:g}: MHM {spread(sizes['MHM', a])}, U-Hop {spread(sizes['U-Hop', a])}"
        for a in (1.0, 2.0)
    )
    drop = [
        1 - float(np.mean(sizes["U-Hop", a])) / float(np.mean(sizes["MHM", a]))
        for a in (1.0, 2.0)
    ]
    return Judged("-", f"memories mixed, {text}", of_values(drop, 0.1, 0.1))


# -- Claims about learning -------------------------------------------------------------


def gain(rows: Rows, value: str, arms: Sequence[str], scale: float = 1.0) -> tuple:
    """Both samples of a measure, their difference and its standard error."""
    plain, uhop = ([scale * r[value] for r in rows if r["arm"] == a] for a in arms)
    error = float("inf")
    if min(len(plain), len(uhop)) > 1:
        error = float(
            np.sqrt(
                np.var(plain, ddof=1) / len(plain) + np.var(uhop, ddof=1) / len(uhop)
            )
        )
    return plain, uhop, float(np.mean(uhop) - np.mean(plain)), error


def accuracy(data: str, model: str, column: int) -> Callable[[Results], Judged]:
    """Judges a pair of cells of the image table.

    In its CIFAR setting there is one memory, of weight 1 under any separation: the
    sparse model is the dense one, number for number, and is judged by its runs.
    """
    value = ("max_train_accuracy", "test_accuracy")[column]
    stated = paper.ACCURACIES[data, model]

    def judge(results: Results) -> Judged:
        ((_, rows),) = results.items()
        plain, uhop, change, error = gain(rows, value, ("MHM", "MHM + U-Hop"), 100)
        same = "" if model == "MHM" else " (one memory: the model is MHM)"
        return Judged(
            f"{spread(plain, ' %')}, with U-Hop {spread(uhop, ' %')}{same}",
            "-",
            of_gain(change, error, stated.uhop[column] - stated.plain[column]),
        )

    return judge


def learning_margin(results: Results) -> Judged:
    """The gain in test accuracy, as the paper trains and fairly."""
    texts, verdicts = ["-", "-"], []
    for place, name in enumerate(("cifar_paper", "patches")):
        if name in results:
            arms = ("MHM", "MHM + U-Hop")
            *_, change, error = gain(results[name], "test_accuracy", arms, 100)
            texts[place] = f"{change:+.2f} points, standard error {error:.2f} ({name})"
            verdicts.append(of_gain(change, error, 100 * paper.LEARNING_MARGIN))
    return Judged(*texts, worst(verdicts))


def beyond_controls(results: Results) -> Judged:
    """The gain in test accuracy over each control: what Stage I adds to the kernel."""
    texts, verdicts = ["-", "-"], []
    for place, names in enumerate((("cifar_paper", "cifar_controls"), ("patches",))):
        rows = [row for name in names for row in results.get(name, ())]
        parts = []
        for control in CONTROLS:
            if not {control, "MHM + U-Hop"} <= {row["arm"] for row in rows}:
                continue
            arms = (control, "MHM + U-Hop")
            *_, change, error = gain(rows, "test_accuracy", arms, 100)
            parts.append(f"to {control} {change:+.2f} ± {error:.2f}")
            verdicts.append(HOLDS if change > 2 * error else FAILS)
        texts[place] = "; ".join(parts) or "-"
    return Judged(*texts, worst(verdicts) if verdicts else UNTESTED)


def worst(verdicts: Sequence[str]) -> str:
    """One verdict of several: partly if they differ."""
    return verdicts[0] if len(set(verdicts)) == 1 else PARTLY


def size_of_model(results: Results) -> Judged:
    """Parameters with and without U-Hop."""
    (rows,) = results.values()
    counts = [
        next(int(r["parameters"]) for r in rows if r["arm"] == arm)
        for arm in ("MHM", "MHM + U-Hop")
    ]
    return Judged(
        f"{counts[0]:,} parameters without, {counts[1]:,} with",
        "-",
        HOLDS if counts[1] <= counts[0] else FAILS,
    )


def forecast(data: str, horizon: int) -> Callable[[Results], Judged]:
    """Judges a row of the forecasting table."""
    stated = paper.FORECASTS[data, horizon]

    def judge(results: Results) -> Judged:
        (rows,) = results.values()
        arms = ("GSH", "GSH + U-Hop")
        place = data, horizon
        rows = [r for r in rows if (r["data"], int(r["horizon"])) == place]
        rows = [
            row
            for arm in arms
            if (ours := [r for r in rows if r["arm"] == arm])
            for row in records.of_least(ours, "window", "validation_loss")
        ]
        if not {r["arm"] for r in rows} >= set(arms):
            return Judged("-", "-", UNTESTED)
        texts, verdicts = [], []
        for i, metric in enumerate(("mse", "mae")):
            plain, uhop, change, error = gain(rows, f"test_{metric}", arms)
            texts.append(f"{metric.upper()} {spread(plain)}, {spread(uhop)}")
            drop = stated.plain[i] - stated.uhop[i]
            verdicts.append(of_gain(-change, error, drop))
        return Judged("; ".join(texts), "-", worst(verdicts))

    return judge


# -- What the experiments' own settings do ---------------------------------------------


def means(rows: Rows, **where: Any) -> float:
    """Mean error of the rows that agree with all values."""
    return float(
        np.mean([r["error"] for r in rows if all(r[k] == v for k, v in where.items())])
    )


def sign_of_distances(results: Results) -> Judged:
    """Distances as released, and with the sign that seeks the nearest."""
    (rows,) = results.values()
    texts, parts = [], []
    for name in ("l2", "l1"):
        ours, released = (
            means(rows, memories=100, method=m)
            for m in (name, f"{name}, released sign")
        )
        texts.append(f"{name}: {released:.3g} as released, {ours:.3g} nearest first")
        parts.append(ours / released)
    return Judged("; ".join(texts), "-", FAILS if min(parts) < 0.9 else HOLDS)


def rates_of_release(results: Results) -> Judged:
    """What more steps change under the released rates."""
    (rows,) = results.values()
    first, last = (
        means(rows, memories=100, method="U-Hop", setting=f"N={n}") for n in (1, 1000)
    )
    constant = means(rows, memories=100, method="U-Hop, rate 10", setting="N=1000")
    return Judged(
        f"N = 1: {first:.4g}, N = 1000: {last:.4g}; at the constant rate 10, N = 1000: "
        f"{constant:.3g}",
        "-",
        FAILS if abs(last / first - 1) < 0.01 else HOLDS,
    )


def folded_noise(results: Results) -> Judged:
    """The same noise clamped and folded."""
    texts, parts = [], []
    for rows in results.values():
        clamped, folded = (
            means(rows, memories=500, method="cosine", corruption=kind, level=0.5)
            for kind in ("noise", "folded_noise")
        )
        texts.append(f"{rows[0]['data']}: {clamped:.3g} clamped, {folded:.3g} folded")
        parts.append(folded / clamped)
    same = all(0.9 < p < 1.1 for p in parts)
    return Judged("-", "cosine, " + "; ".join(texts), HOLDS if same else FAILS)
