"""Tables of the README and the docs, written between their marks from result files."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare_reference
import learning_claims as learning
import networks
import numpy as np
from files import RESULTS, all_results, read, rows_of
from studies import BAG_SETS, STUDIES

from uhop_jax import paper, records
from uhop_jax.experiments.blind import BEST, BLIND, KNOWN, besides, confidences
from uhop_jax.experiments.rivals import RIVALS
from uhop_jax.training import bag_report

ROOT = Path(__file__).parent.parent
NOT_FIXED = ("calibrated", "limit")  # all other methods are fixed similarities
GRID = (
    ("mask 50 %", "mask", 0.5),
    ("mask 80 %", "mask", 0.8),
    ("mask 95 %", "mask", 0.95),
    ("noise 0.5, clamped", "noise", 0.5),
    ("noise 1, clamped", "noise", 1.0),
    ("noise 0.5, folded", "folded_noise", 0.5),
    ("noise 1, folded", "folded_noise", 1.0),
)
DEPENDENT = (
    ("a quarter under one square", "block", 0.25),
    ("blur, 2 pixels", "blur", 2.0),
    ("shift, 2 pixels", "shift", 2.0),
)
AGREEMENT = (
    ("capacity, MNIST", "reference_mnist"),
    ("capacity, CIFAR-10", "reference_cifar"),
    ("noise, MNIST", "reference_noise_mnist"),
    ("noise, CIFAR-10", "reference_noise_cifar"),
)
ARMS = {
    "MHM": "MHM",
    "MHM + U-Hop as released": learning.RELEASED,
    "the same layer without Stage I": learning.WITHOUT,
    "MHM of matched size": "MHM, matched size",
}
# AUC of HopfieldPooling in per cent (Ramsauer et al. 2020), recalled, not looked up.
POOLING = {"elephant": 94.9, "ucsb": 89.5}
NAMES = {arm: title for title, arm in ARMS.items()}
_ROWS = "value and gradient, (256, 10000) float32"
_LAYER = "8 heads, 256 wide, float32"
SPEED: dict[str, tuple[str, str, dict[str, str]]] = {
    "sparsemax with gradient, 256 rows of 10,000": (
        f"sparsemax, {_ROWS}",
        "uhop_jax",
        {
            "Optax": "Optax projection_simplex",
            "JAXopt": "JAXopt projection_simplex",
            "PyTorch": "PyTorch entmax",
        },
    ),
    "entmax 1.5 with gradient, 256 rows of 10,000": (
        f"entmax 1.5, {_ROWS}",
        "uhop_jax",
        {"PyTorch": "PyTorch entmax"},
    ),
    "Stage I, 100 steps, 100 patterns of 784": (
        "Stage I, 100 steps, M = 100, d = D = 784, float32",
        "gram",
        {"Optax": "Optax on W", "PyTorch": "PyTorch loop on W"},
    ),
    "Stage I, 100 steps, 100 patterns of 3,072": (
        "Stage I, 100 steps, M = 100, d = D = 3072, float32",
        "gram",
        {"Optax": "Optax on W", "PyTorch": "PyTorch loop on W"},
    ),
    "retrieval, softmax, 256 queries, 10,000 memories of 256": (
        "retrieval, M = 10000, d = 256, 256 queries, float32",
        "dot, softmax",
        {"PyTorch": "PyTorch, dot, softmax"},
    ),
    "layer with gradient, softmax, 8 x 128 tokens": (
        f"layer step, 8 x 128 tokens, {_LAYER}",
        "Hopfield, softmax",
        {
            "Flax": "nnx.MultiHeadAttention",
            "PyTorch": "PyTorch scaled_dot_product_attention",
        },
    ),
    "layer with gradient, softmax, 4 x 512 tokens": (
        f"layer step, 4 x 512 tokens, {_LAYER}",
        "Hopfield, softmax",
        {
            "Flax": "nnx.MultiHeadAttention",
            "PyTorch": "PyTorch scaled_dot_product_attention",
        },
    ),
    "STanHop-Net, a step on ETTh1": (
        "STanHop-Net step, ETTh1, horizon 96, batch 16, float32",
        "uhop_jax",
        {"PyTorch": "PyTorch, 20 bisections"},
    ),
}


TINY = 1e-4  # errors below are shown as 0


def shown(error: float) -> str:
    """An error in three digits."""
    return f"{error:.3g}" if error > TINY else "0"


def with_error(sample: Sequence[float]) -> str:
    """Mean and its standard error."""
    mean = float(np.mean(sample))
    if mean <= TINY:
        return "0"
    return f"{mean:.3g} ± {np.std(sample, ddof=1) / len(sample) ** 0.5:.1g}"


def line(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def comparison(study: str, memories: int, cells: Sequence[tuple], limit: bool) -> str:
    """The best fixed similarity, the calibrated memory and the limit, by corruption.

    The head says what each method knows besides the memories. A fixed similarity knows
    nothing, but its beta was chosen under this corruption.
    """
    head = [f"M = {memories}"]
    for data in ("MNIST", "CIFAR-10"):
        head.append(f"{data}: best fixed similarity (its beta fits the corruption)")
        head.append("calibrated (corrupts copies itself)")
        if limit:
            head.append("limit (knows the law of the corruption)")
    text = [line(*head), "|" + "---|" * len(head)]
    rows = {data: rows_of(f"{study}_{data}") for data in ("mnist", "cifar")}
    for title, kind, level in cells:
        entries = [title]
        for data in rows:
            where = {"corruption": kind, "level": level, "memories": memories}
            samples = _samples(rows[data], where)
            fixed = {k: v for k, v in samples.items() if k not in NOT_FIXED}
            best = min(fixed, key=lambda name: float(np.mean(fixed[name])))
            entries.append(f"{best} {with_error(fixed[best])}")
            entries += [with_error(samples[name]) for name in NOT_FIXED[: 1 + limit]]
        text.append(line(*entries))
    return "\n".join(text)


def _samples(rows: Sequence[dict], where: dict[str, Any]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for row in rows:
        if all(row[key] == value for key, value in where.items()):
            samples.setdefault(row["method"], []).append(row["error"])
    return samples


def blind() -> str:
    """Errors of blind calibration beside those of methods that know more.

    The best fixed similarity of a cell has the least mean error in it. Sentences say in
    how many cells blind calibration loses, and name them.
    """
    text = []
    for name, title in (("blind_mnist", "MNIST"), ("blind_cifar", "CIFAR-10")):
        if not (rows := rows_of(name)):
            text += ["", f"{title}: not measured yet: `{STUDIES[name].command}`."]
            continue
        listed = besides(rows)
        numbers = sorted({beside.queries for beside in listed})
        sets = 1 + max(row["run"] for row in rows)
        head = [f"{title}, {sets} set{'s' * (sets > 1)} of 500"]
        for Q in numbers:
            head += [f"{Q} queries: best fixed similarity", "blind"]
        head += ["known corruption", "limit"]
        text += ["", line(*head), "|---" * len(head) + "|"]
        largest = [beside for beside in listed if beside.cell.memories == 500]
        for cell in dict.fromkeys(beside.cell for beside in largest):
            group = [beside for beside in largest if beside.cell == cell]
            entries = [f"{cell.kind.replace('_', ' ')} {cell.level:g}"]
            for beside in group:
                best = f"{beside.similarity} {shown(beside.best)}"
                entries += [best, shown(beside.blind)]
            limit = group[-1].limit
            entries += [shown(group[-1].known), "" if limit is None else shown(limit)]
            text.append(line(*entries))
        lost = [str(beside) for beside in listed if beside.loses]
        near = [x for x in listed if x.queries == numbers[-1] and x.independent]
        known = confidences(rows)
        ahead = float(np.median([x.foreign - x.cosine for x in known]))
        text += [
            "",
            f"{title}: in {len(listed) - len(lost)} of {len(listed)} cells (100 and "
            "500 memories) the error of blind calibration is at most 1.05 times that "
            f"of the best fixed similarity, or 0.1 more; with {numbers[-1]} queries, "
            f"in {sum(not x.far for x in near)} of {len(near)} cells of independent "
            "components at most 1.25 times that of the known corruption, or 0.5 more. "
            "On queries that no calibration has seen, the expected calibration error "
            f"is at most 0.03 in {sum(x.error <= 0.03 for x in known)} of {len(known)} "
            "cells, and the probability of a foreign query tells foreign queries from "
            f"own ones with an AUROC that is {ahead:.3f} above the AUROC of the "
            "largest cosine in the median over the cells.",
        ]
        if moved := [
            f"{x.blind:.2g} where the limit is {x.limit:.2g} ({x.cell.memories} "
            f"memories, {x.queries} queries)"
            for x in listed
            if x.cell.kind == "shift_noise" and x.limit is not None
        ]:
            text += ["", f"{title}, noise after a shift: {'; '.join(moved)}."]
        if lost:
            text += ["", f"{title}, cells that lose (blind, best fixed, known):", ""]
            text += [f"- {beside}" for beside in lost]
        if unsure := [x for x in known if x.error > 0.03]:
            text += ["", f"{title}, cells of a larger calibration error:", ""]
            text += [f"- {x.title} ({x.error:.3f})" for x in unsure]
    return "\n".join(text[1:])


# What each method of the table of rivals knows, besides settings that fit the queries.
KNOWS = {
    "best fixed similarity": "memories",
    "LSR": "memories",
    "kernel regression": "memories",
    "A-Hop, self-made pairs": "memories; assumes a mask of 50 %",
    "A-Hop, labelled pairs": "memories; the corruption, as labelled pairs",
    "known corruption": "memories; the corruption, as labelled pairs; no setting",
    "blind": "memories and queries; no setting",
}


def rivals() -> str:
    """Errors of published rivals and of blind calibration on the same queries.

    The least error of a row is in bold. The sentence below names the cells in which a
    published rival has it.
    """
    published = rows_of("rivals_mnist")
    if not published:
        return f"Not measured yet: `{STUDIES['rivals_mnist'].command}`."
    runs = {row["run"] for row in published}
    same = [row for row in rows_of("blind_mnist") if row["run"] in runs]
    listed = [beside for beside in besides(same) if beside.queries == 500]
    text, won = [], []
    for M in sorted({row["memories"] for row in published}):
        head = [f"M = {M}", *(f"{name} ({known})" for name, known in KNOWS.items())]
        text += ["", line(*head), "|---" * len(head) + "|"]
        for beside in listed:
            if beside.cell.memories != M:
                continue
            where = dict(zip(records.CELL, beside.cell, strict=True))
            samples = _samples(published, where)
            means = {name: float(np.mean(x)) for name, x in samples.items()}
            means |= {BEST: beside.best, BLIND: beside.blind, KNOWN: beside.known}
            errors = {name: max(means[name], TINY) for name in KNOWS}
            least = min(errors.values())
            entries = []
            for error in errors.values():
                entry = shown(error)
                entries.append(f"**{entry}**" if error == least else entry)
            kind = beside.cell.kind.replace("_", " ")
            title = f"{kind} {beside.cell.level:g}"
            text.append(line(title, *entries))
            best = min(errors, key=errors.__getitem__)
            if best in RIVALS:
                won.append(
                    f"{title} with {M} memories ({best} {errors[best]:.3g}, blind "
                    f"{errors['blind']:.3g})"
                )
    number = len(listed)
    sentence = f"A published rival has the least error in {len(won)} of {number} cells"
    return "\n".join([*text[1:], "", sentence + f": {', '.join(won)}." * bool(won)])


def agreement() -> str:
    """Counts of numbers on which the reference protocol and the released code agree."""
    text = [
        "| run | numbers | within 2 standard errors | within 3 |",
        "|---|---|---|---|",
    ]
    for title, name in AGREEMENT:
        z = [abs(row[-1]) for row in compare_reference.compare(RESULTS / f"{name}.csv")]
        sets = 1 + max(row["run"] for row in rows_of(name))
        counts = len(z), sum(x <= 2 for x in z), sum(x <= 3 for x in z)
        text.append(line(f"{title}, {sets} sets", *map(str, counts)))
    return "\n".join(text)


def images() -> str:
    """Accuracies of the arms of the image table, and the accuracies in the paper."""
    head = [
        f"{data}, {part}"
        for data in ("CIFAR-10", "CIFAR-100")
        for part in ("training", "test")
    ]
    text = [line("per cent", *head), "|---" * (1 + len(head)) + "|"]
    for title, arm in ARMS.items():
        cells = []
        for data in ("cifar10", "cifar100"):
            rows, stated = read(f"{data}_table"), paper.ACCURACIES[data, "MHM"]
            printed = {"MHM": stated.plain, learning.RELEASED: stated.uhop}.get(arm)
            for column, value in enumerate((learning.TRAINING, learning.TEST)):
                sample = [100 * x for x in learning.sample(rows, arm, value)]
                cell = with_error(sample) if len(sample) > 1 else "-"
                cells.append(cell + (f" ({printed[column]})" if printed else ""))
        text.append(line(title, *cells))
    return "\n".join(text)


def vision_reference() -> str:
    """Accuracies of the released image code and of this library."""
    agreements = {row[:4]: row for row in learning.agreement(all_results())}
    parts = ("training", "test")
    head = ["CIFAR-10, per cent"]
    for part in parts:
        head += [f"{part}: released code", "this library", "z"]
    text = [line(*head), "|---" * len(head) + "|"]
    for (data, size, arm), official in learning.official_runs().items():
        number = f"{size:,}" if size else "all"
        cells = [f"{number} images, {NAMES[arm]}"]
        for part in parts:
            row = agreements.get((data, size, arm, part))
            cells.append(learning.official_accuracy(official, part))
            cells += [row.measured, f"{row.z:+.1f}"] if row else ["-", "-"]
        text.append(line(*cells))
    return "\n".join(text)


def speed() -> str:
    """Times of this library, and times of each peer relative to them.

    Of two widths of vectors the slower time and the smaller ratio.
    """
    widths = []
    for name in ("benchmarks", "benchmarks_avx2"):
        with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
            rows = csv.DictReader(file)
            widths.append({(row["comparison"], row["name"]): row for row in rows})
    peers = ("Optax", "JAXopt", "Flax", "PyTorch")
    head = ["task", "this library", *(f"{peer} takes" for peer in peers)]
    text = [line(*head), "|---" * len(head) + "|"]
    for title, (comparison, name, others) in SPEED.items():
        own = [rows[comparison, name] for rows in widths]
        cells = [title, f"{max(float(row['median_ms']) for row in own):.3g} ms"]
        for peer in peers:
            their = [rows.get((comparison, others.get(peer, ""))) for rows in widths]
            ratios = [
                float(row["ratio"]) / float(mine["ratio"])
                for row, mine in zip(their, own, strict=True)
                if row is not None and row["ratio"]
            ]
            cells.append(f"{min(ratios):.3g} times" if ratios else "")
        text.append(line(*cells))
    return "\n".join(text)


def bags() -> str:
    """Scores on sets of bags, with 95 % intervals, beside published numbers."""
    head = [
        "set",
        "folds x seeds",
        "AUC, per cent",
        "accuracy, per cent",
        "published AUC",
    ]
    text = [line(*head), "|---" * len(head) + "|"]
    for name in BAG_SETS:
        if not (rows := read(name)):
            continue
        for (arm,), group in records.grouped(rows, ("arm",)).items():
            chosen = bag_report.of_chosen(group, group)
            seeds, tests = ({row[key] for row in chosen} for key in ("seed", "fold"))
            number = f"{len(tests)} x {len(seeds)}" if tests != {0} else f"{len(seeds)}"
            title = name.removeprefix("bags_").replace("_", " ")
            title += f", {arm}" * (arm != "MHM")
            scores = [bag_report.shown(chosen, score) for score in bag_report.SCORES]
            stated = POOLING.get(chosen[0]["data"], "")
            text.append(line(title, number, *scores, f"{stated}"))
    return "\n".join(text)


TABLES = {
    "README.md": {
        "grid": lambda: comparison("grid", 500, GRID, True),
        "networks": networks.verdict,
        "speed": speed,
    },
    "docs/experiments.md": {
        "agreement": agreement,
        "blind": blind,
        "rivals": rivals,
        "dependent": lambda: comparison("dependent", 100, DEPENDENT, False),
    },
    "docs/training.md": {
        "bags": bags,
        "images": images,
        "networks": lambda: f"{networks.table()}\n\n{networks.verdict()}",
        "vision_reference": vision_reference,
    },
}


def written(page: str, text: str) -> str:
    """The text of a page, with its tables made from the result files.

    Raises:
      ValueError: if a mark is missing.
    """
    for name, table in TABLES[page].items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{page} must have {begin} and {end} once each")
        block = f"{begin}\n{table()}\n{end}"
        text = re.sub(f"{begin}.*{end}", lambda _, b=block: b, text, flags=re.DOTALL)
    return text


def write() -> None:
    """Writes the tables of every page."""
    for page in TABLES:
        path = ROOT / page
        path.write_text(written(page, path.read_text("utf-8")), encoding="utf-8")
