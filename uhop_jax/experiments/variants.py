"""Studies of a cell: error against beta, loss against error, metastable states.

Records of several cells are never averaged: each cell has its own panels and lines.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from uhop_jax import records
from uhop_jax.experiments import evaluation, figures
from uhop_jax.experiments.cells import SCORED, TUNING, Cell, Study, base_row
from uhop_jax.experiments.evaluation import Entry, Queries
from uhop_jax.experiments.methods import Method, seen_by_stage_one
from uhop_jax.losses import AverageLoss
from uhop_jax.model import Model
from uhop_jax.plotting import Curve, Panel
from uhop_jax.separation import Entmax, Softmax
from uhop_jax.similarity import Dot
from uhop_jax.stage_one import Fitted, fit_sgd, gaussian_start, identity_start
from uhop_jax.theory import effective_memories

Rows = Sequence[Mapping[str, Any]]


def _cells(rows: Rows) -> list[tuple[str, Rows]]:
    """Title and records of each cell; the title is the size, if all else is one."""
    groups = records.grouped(rows, records.CELL)
    alike = len({(kind, level) for _, kind, level in groups}) == 1
    return [
        (f"M = {cell[0]}" if alike else Cell(*cell).title, members)
        for cell, members in groups.items()
    ]


def _lines(rows: Rows, header: list[str], lines_of: Callable[[Rows], Any]) -> str:
    """A table of the lines of each cell, which names the cells if they are several."""
    cells = _cells(rows)
    several = len(cells) > 1
    lines = [["cell"] * several + header]
    for title, members in cells:
        lines += [[title] * several + line for line in lines_of(members)]
    return records.aligned(lines)


# Error against the number of Stage I steps (stage_one, losses)


def steps_figure(rows: Rows) -> list[Panel]:
    """Error, loss and `Delta_min` against N for each cell, as in the paper.

    Each of several rates has curves of its own.
    """
    labelled = []
    for row in rows:
        if row["setting"].startswith("N="):
            steps, _, rate = row["setting"][2:].partition(", ")
            label = _label(row["method"], rate)
            labelled.append(dict(row, steps=int(steps), label=label))
        else:
            labelled.append(dict(row, steps=None, label=row["method"]))
    looks = figures.styles(labelled)
    parts, cells = [], _cells(labelled)
    for title, members in cells:
        group = [row for row in members if row["steps"] is not None]
        places = dict.fromkeys(row["steps"] for row in group)
        plain = [row for row in members if row["steps"] is None]
        level = [dict(row, steps=N) for row in plain for N in places]
        for key, name, shown, scale in (
            ("error", figures.ERROR, [*group, *level], "auto"),
            ("loss", "separation loss", group, "linear"),
            ("delta_min", "Delta_min", group, "linear"),
        ):
            if group and (key == "error" or len(cells) == 1):
                curves = records.curves(shown, "steps", key, "label", interval=True)
                about = (title, curves, "Stage I steps N", name, "symlog", scale)
                parts.append(Panel(*about, styles=looks))
    return parts


# Error against beta


def temperature_cell(study: Study, cell: Cell, timed: Any) -> list[dict]:
    """The error of every model at every beta of its grid."""
    rows = []
    queries = study.queries(cell, SCORED, range(study.config.runs))
    runs = range(study.config.runs)
    entries = timed("Stage I", study.entries, cell, SCORED, queries, runs)
    overlaps = timed("retrieval", evaluation.overlaps, entries, queries)
    errors, betas = timed(
        "retrieval", evaluation.errors_by_beta, entries, overlaps, queries.memories
    )
    for i, entry in enumerate(entries):
        for run in runs:
            base = base_row(study, cell, entry.method.name, entry.setting, run)
            for b in np.argsort(betas[i]):
                beta, error = float(betas[i, b]), float(errors[run, i, b])
                rows.append(base | {"beta": beta, "error": error})
    timed.done(len(runs))
    return rows


def temperature_figure(rows: Rows) -> list[Panel]:
    """Error against beta of each method with its best kernel, on its own grid."""
    parts, cells = [], _cells(rows)
    for title, members in cells:
        best = {(method, setting) for method, setting, *_ in _best_betas(members)}
        chosen = [
            dict(r, label=_label(r["method"], r["setting"]))
            for r in members
            if (r["method"], r["setting"]) in best
        ]
        for group, lot in figures.grouped(chosen).items():
            parts.append(
                Panel(
                    f"{title}, {group}" if len(cells) > 1 else group,
                    records.curves(lot, "beta", "error", "label", interval=True),
                    "inverse temperature beta",
                    figures.ERROR,
                    xscale="log",
                    yscale="auto",
                    styles=figures.styles(chosen),
                )
            )
    return parts


def _label(method: str, setting: str) -> str:
    """A method with its setting, as figures and tables name it."""
    return f"{method}, {setting}" if setting else method


def _best_betas(
    rows: Rows,
) -> list[tuple[str, str, float, float]]:
    """Method, setting, beta and error, at the least mean error of each method."""
    least: dict[str, tuple[str, str, float, float]] = {}
    keys = ("method", "setting", "beta")
    for (method, setting, beta), group in records.grouped(rows, keys).items():
        error = float(np.mean([r["error"] for r in group]))
        known = least.get(method)
        if known is None or records.ranked(error) < records.ranked(known[-1]):
            least[method] = (method, setting, beta, error)
    return list(least.values())


def temperature_report(rows: Rows) -> str:
    """The least error of each model, and its beta, in each cell."""

    def lines_of(members: Rows) -> list[list[str]]:
        return [
            [_label(method, setting), f"{beta:.3g}", f"{error:.3g}"]
            for method, setting, beta, error in _best_betas(members)
        ]

    return _lines(rows, ["method", "best beta", "error"], lines_of)


# Loss against error


def scatter_cell(study: Study, cell: Cell, timed: Any) -> list[dict]:
    """One record for each run of U-Hop, with a random rate and number of steps.

    In the paper and reference protocols the rate is `N(0, 1)`, as in the paper: half of
    the runs climb the loss. In the fair protocol it is log-uniform from 0.1 to 100
    times the rate of the config, and beta is chosen on another memory set, with a
    kernel of the same rate and number of steps.
    """
    config, settings = study.config, study.protocol.settings
    fair = config.protocol == "fair"
    most = max(1, *settings.steps["average"])
    rng = np.random.default_rng((config.seed, 1))

    def fitted(queries: Queries, run: int, rate: float, number: int) -> Entry:
        """U-Hop with a kernel of the one memory set of the queries."""
        memories = seen_by_stage_one(queries.memories[0], study.share(cell))
        start: Fitted = identity_start(memories.shape[-1])
        if settings.start == "gaussian":
            start = gaussian_start(study.key(5, run), memories.shape[-1])
        kernels: Any = fit_sgd(
            memories,
            relative_rate=jnp.full(most, rate),
            steps=most,
            start=start,
            loss=AverageLoss(settings.t),
            snapshots=(number,),
            normalize_rows=settings.normalize_rows,
            path="gram",
        ).snapshots
        method = Method("U-Hop", Dot, Softmax(), "average")
        return Entry(method, f"N={number}", Model(Dot(kernels), beta=1.0))

    def best_beta(queries: Queries, entry: Entry) -> float:
        overlaps = evaluation.overlaps([entry], queries)
        swept = evaluation.errors_by_beta([entry], overlaps, queries.memories)
        [(_, beta)] = evaluation.best_entries([entry], *swept)
        return beta

    rows = []
    for run in range(config.runs):
        one = range(run, run + 1)
        queries = study.queries(cell, SCORED, one)
        d = queries.memories.shape[-1]
        number = int(rng.integers(1, most + 1))
        normal, uniform = rng.normal(), rng.uniform(-1, 2)
        rate = config.stage_one.relative_rate * 10**uniform if fair else normal / d
        entry = timed("Stage I", fitted, queries, run, rate, number)
        beta = config.beta
        if fair:
            tuning = study.queries(cell, TUNING, one)
            of_tuning = timed("Stage I", fitted, tuning, run, rate, number)
            beta = timed("choice", best_beta, tuning, of_tuning)
        overlaps = evaluation.overlaps([entry], queries)
        scores = timed(
            "retrieval", evaluation.score, [entry], overlaps, [beta], queries.memories
        )
        loss, delta = evaluation.separations([entry], queries.memories, settings.t)
        rows.append(
            base_row(study, cell, "U-Hop", f"N={number}", run)
            | {"rate": rate * d, "beta": beta, "error": float(scores.error[0, 0])}
            | {"loss": float(loss[0, 0]), "delta_min": float(delta[0, 0])}
        )
        timed.done(1)
    return rows


def scatter_figure(rows: Rows) -> list[Panel]:
    """Error against separation loss, one point for each run."""
    parts = []
    for title, group in _cells(rows):
        up = [r for r in group if r["rate"] <= 0]
        down = [r for r in group if r["rate"] > 0]
        series = {
            name: Curve([r["loss"] for r in x], [r["error"] for r in x], [0] * len(x))
            for name, x in (("descent", down), ("ascent (negative rate)", up))
            if x
        }
        parts.append(
            Panel(
                title,
                series,
                "separation loss",
                figures.ERROR,
                yscale="auto",
                points=True,
            )
        )
    return parts


def scatter_report(rows: Rows) -> str:
    """Rank correlation of loss and error, over all runs and with positive rates."""
    from scipy.stats import spearmanr

    def lines_of(members: Rows) -> list[list[str]]:
        lines = []
        for name, group in (
            ("all", members),
            ("positive rate", [r for r in members if r["rate"] > 0]),
        ):
            if len(group) > 2:
                pairs = [(r["loss"], r["error"]) for r in group]
                rho = spearmanr(*zip(*pairs, strict=True)).statistic
                lines.append([name, str(len(group)), f"{rho:.3f}"])
        return lines

    table = _lines(rows, ["runs", "number", "Spearman correlation"], lines_of)
    return "separation loss against error\n" + table


# Metastable states


def metastability_cell(study: Study, cell: Cell, timed: Any) -> list[dict]:
    """Number of memories that an update mixes, by alpha and beta, and the error."""
    config = study.config
    runs = range(config.runs)
    queries = study.queries(cell, SCORED, runs)
    names = ("MHM", "U-Hop")
    entries = timed("Stage I", study.entries, cell, SCORED, queries, runs)
    last = {e.method.name: e for e in entries if e.method.name in names}
    overlaps = evaluation.overlaps(list(last.values()), queries)
    betas = evaluation.grids(overlaps)
    alphas = jnp.asarray(config.alphas)
    rows = []
    for i, entry in enumerate(last.values()):
        sizes, errors = timed(
            "retrieval", _sizes, queries.memories, overlaps[:, i], alphas, betas[i]
        )
        for a, alpha in enumerate(config.alphas):
            for b in np.argsort(betas[i]):
                for run in runs:
                    rows.append(
                        base_row(study, cell, entry.method.name, entry.setting, run)
                        | {"alpha": float(alpha), "beta": float(betas[i, b])}
                        | {"size": float(sizes[run, a, b])}
                        | {"error": float(errors[run, a, b])}
                    )
    timed.done(len(runs))
    return rows


@jax.jit
def _sizes(memories: Array, overlaps: Array, alphas: Array, betas: Array) -> tuple:
    """Mean effective number of memories, and mean error, `(sets, alphas, betas)`."""

    def one(row: tuple[Array, Array]) -> tuple[Array, Array]:
        memories, overlaps = row

        def at(alpha: Array, beta: Array) -> tuple[Array, Array]:
            weights = Entmax(alpha)(beta * overlaps)
            error = evaluation.mean_error(weights, memories)
            return effective_memories(weights).mean(), error

        return lax.map(lambda a: lax.map(lambda b: at(a, b), betas), alphas)

    return lax.map(one, (memories, overlaps))


def metastability_figure(rows: Rows) -> list[Panel]:
    """Effective number of memories against beta, one curve for each alpha."""
    return [
        Panel(
            f"{method}, {title}",
            records.curves(
                [dict(r, name=f"alpha = {r['alpha']:g}") for r in group],
                "beta",
                "size",
                "name",
                interval=True,
            ),
            "inverse temperature beta",
            "memories mixed (participation ratio)",
            xscale="log",
            yscale="log",
        )
        for title, members in _cells(rows)
        for (method,), group in records.grouped(members, ("method",)).items()
    ]


def metastability_report(rows: Rows) -> str:
    """The least beta at which fewer than two memories are mixed, for each alpha."""

    def lines_of(members: Rows) -> list[list[str]]:
        lines = []
        keys = ("method", "alpha")
        for (method, alpha), group in records.grouped(members, keys).items():
            line = [method, f"{alpha:g}", "-", "-"]
            for (beta,), x in sorted(records.grouped(group, ("beta",)).items()):
                if np.mean([r["size"] for r in x]) < 2:
                    error = np.mean([r["error"] for r in x])
                    line[2:] = [f"{beta:.3g}", f"{error:.3g}"]
                    break
            lines.append(line)
        return lines

    least = "least beta with fewer than 2 memories"
    return _lines(rows, ["method", "alpha", least, "error there"], lines_of)
