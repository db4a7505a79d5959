"""What queries without labels teach: blind calibration beside what knows more."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from uhop_jax import records
from uhop_jax.blind import BlindCalibration, calibrate_blind, fixed_similarities
from uhop_jax.experiments import figures
from uhop_jax.experiments.cells import SCORED, TUNING, Cell, Study, base_row
from uhop_jax.experiments.methods import BLIND, LIMIT
from uhop_jax.experiments.reliability import Reliability
from uhop_jax.experiments.rivals import RIVALS, rival_scores
from uhop_jax.likelihood import fit_likelihood
from uhop_jax.model import Model
from uhop_jax.plotting import Panel
from uhop_jax.posterior import posterior_mean
from uhop_jax.retrieval import retrieve
from uhop_jax.similarity import Cosine, Dot, Similarity
from uhop_jax.transformations import image_transformations
from uhop_jax.trials import beta_grid, sweep_errors

KNOWN, BEST = "known corruption", "best fixed similarity"
NAMES = (BEST, BLIND, KNOWN)
RANK = 12  # of the table of the known corruption
HELD_OUT = 200  # queries of stored patterns, and as many of foreign ones
DEPENDENT = ("block", "blur", "shift", "shift_noise")
COLUMNS = {"queries": int, "error": float, "top1": float, "beta": float}
COLUMNS |= {"advantage": float, "standard_error": float, "expected_error": float}
COLUMNS |= {"calibration_error": float, "reliability": str, "foreign_auroc": float}


class HeldOut(NamedTuple):
    """Queries that no calibration has seen, corrupted as the others are.

    Attributes:
      memories: stored patterns.
      own: queries of stored patterns.
      target: the memory of each own query.
      foreign: queries of patterns that are not stored.
    """

    memories: Float[Array, "M d"]
    own: Float[Array, "H d"]
    target: Int[np.ndarray, " H"]
    foreign: Float[Array, "H d"]

    @classmethod
    def of(cls, study: Study, cell: Cell, run: int, memories: Array) -> "HeldOut":
        """The queries of a memory set; foreign patterns are of the other half."""
        corruption = study.corruption(cell)
        others = study.queries(cell, TUNING, range(run, run + 1)).memories[0]
        target = _targets(run, cell.memories, HELD_OUT)
        keys = jax.random.split(study.key(7, cell.memories, run))
        own, foreign = (
            corruption(key, patterns[target])[0]
            for key, patterns in zip(keys, (memories, others), strict=True)
        )
        return cls(memories, own, target, foreign)

    def reliability(self, model: Model) -> dict:
        """How far the confidence of a model can be trusted."""
        weights = retrieve(model, self.memories, self.own).weights
        right = np.asarray(weights.argmax(-1)) == self.target
        reliability = Reliability.of(weights.max(-1), right)
        error = reliability.error
        return {"calibration_error": error, "reliability": str(reliability)}

    @property
    def both(self) -> Float[Array, "2H d"]:
        """Own queries, then foreign ones."""
        return jnp.concatenate([self.own, self.foreign])

    def foreign_auroc(self, scores: Float[Array, "2H"]) -> dict:
        """How well scores of `both`, high for foreign queries, tell them apart."""
        from sklearn.metrics import roc_auc_score

        is_foreign = np.repeat([0, 1], [len(self.own), len(self.foreign)])
        return {"foreign_auroc": float(roc_auc_score(is_foreign, np.asarray(scores)))}


def blind_cell(study: Study, cell: Cell, timed: Any) -> list[dict]:
    """Records of every number of queries and every memory set of a cell.

    Where the config names rivals, the records are theirs, of the same queries.
    """
    rows = []
    rivals = tuple(study.config.methods)
    shape = study.patterns.shape
    moves = image_transformations(shape) if len(shape) == 3 else None
    corruption = study.corruption(cell)
    for run in range(study.config.runs):
        memories = study.queries(cell, SCORED, range(run, run + 1)).memories[0]
        known_key, query_key = jax.random.split(study.key(6, cell.memories, run))
        if not rivals:
            kernel = timed("known", fit_likelihood, known_key, memories, corruption)
            known = Model(Dot(kernel.cut(RANK)), beta=1.0)
            held_out = HeldOut.of(study, cell, run, memories)
            trusted = held_out.reliability(known)
            largest = Cosine()(memories, held_out.both).max(-1)
            farthest = held_out.foreign_auroc(-largest)
        for number in study.config.queries:
            key = jax.random.fold_in(query_key, number)
            target = _targets(run, cell.memories, number)
            query, _ = corruption(key, memories[target])
            about = study, cell, run, number
            if rivals:
                drawn = memories, query, target, corruption, timed
                for name, (setting, scores) in rival_scores(
                    rivals, known_key, *drawn
                ).items():
                    rows.append(_row(*about, name, scores, setting=setting))
                continue
            for name, similarity in fixed_similarities(memories, query).items():
                scores = timed("fixed", _best, memories, query, target, similarity)
                if name == "cosine":
                    scores |= farthest
                rows.append(_row(*about, name, scores))
            scores = _scores(known, memories, query, target) | trusted
            rows.append(_row(*about, KNOWN, scores))
            if hasattr(corruption.function, "log_likelihood"):
                law = corruption.function
                mean = timed("limit", posterior_mean, law, memories, query)
                rows.append(_row(*about, LIMIT, _error(mean, memories[target])))
            result = timed(
                "blind", calibrate_blind, memories, query, transformations=moves
            )
            told = {
                name: float(getattr(result, name))
                for name in ("advantage", "standard_error", "expected_error")
            }
            scores = _scores(result.model, memories, query, target) | told
            scores |= timed("held out", _held_out, held_out, result)
            rows.append(_row(*about, BLIND, scores, setting=result.name))
        timed.done(1)
    return rows


def _held_out(held_out: HeldOut, result: BlindCalibration) -> dict:
    """Scores of a calibration on queries that it has not seen."""
    foreign = result.foreign(held_out.memories, held_out.both)
    return held_out.reliability(result.model) | held_out.foreign_auroc(foreign)


def _row(
    study: Study,
    cell: Cell,
    run: int,
    queries: int,
    method: str,
    scores: dict,
    setting: str = "",
) -> dict:
    """The record of a method."""
    return base_row(study, cell, method, setting, run) | {"queries": queries} | scores


def _targets(run: int, memories: int, number: int) -> np.ndarray:
    """The memory of each query; none has two queries while another has none."""
    rng = np.random.default_rng([run, memories, number])
    order = rng.permutation(memories)
    return rng.permutation(np.resize(order, number))


def _best(
    memories: Array, query: Array, target: np.ndarray, similarity: Similarity
) -> dict:
    """Error and beta of a similarity at its best beta on these very queries."""
    errors, betas = _errors(memories, query, jnp.asarray(target), similarity)
    best = int(np.nanargmin(errors))
    return {"error": float(errors[best]), "beta": float(betas[best])}


@jax.jit
def _errors(
    memories: Array, query: Array, target: Array, similarity: Similarity
) -> tuple[Array, Array]:
    overlaps = similarity(memories, query)
    betas = beta_grid(overlaps)

    def weights(overlaps: Array, beta: Array) -> Array:
        return jax.nn.softmax(beta * overlaps, axis=-1)

    return sweep_errors(memories, overlaps, target, weights, betas), betas


def _scores(model: Model, memories: Array, query: Array, target: np.ndarray) -> dict:
    """Error and top-1 of a model, with its beta."""
    result = retrieve(model, memories, query)
    right = np.asarray(result.weights.argmax(-1)) == target
    scores = {"top1": float(right.mean()), "beta": float(np.asarray(model.beta))}
    return _error(result.state, memories[target]) | scores


def _error(state: Array, truth: Array) -> dict:
    """Mean over the queries of the sum of squared differences."""
    return {"error": float(((state - truth) ** 2).sum(-1).mean())}


class Beside(NamedTuple):
    """Mean errors in a cell, of blind calibration and of what knows more.

    Attributes:
      cell: memories and corruption.
      queries: number of queries without labels.
      best: error of the best fixed similarity.
      blind: error of blind calibration.
      known: error of the likelihood of the known corruption.
      similarity: name of the best fixed similarity.
      limit: error of the posterior mean, which knows the law of the corruption; None
        where the law has no closed form.
    """

    cell: Cell
    queries: int
    best: float
    blind: float
    known: float
    similarity: str
    limit: float | None

    @property
    def loses(self) -> bool:
        """Whether blind calibration is behind the best fixed similarity."""
        return self.blind > 1.05 * self.best + 0.1

    @property
    def far(self) -> bool:
        """Whether blind calibration is far from the known corruption."""
        return self.blind > max(1.25 * self.known, self.known + 0.5)

    @property
    def independent(self) -> bool:
        """Whether the corruption is one of independent components."""
        return self.cell.kind not in DEPENDENT

    def __str__(self) -> str:
        errors = f"{self.blind:.3g}, {self.best:.3g}, {self.known:.3g}"
        return f"{self.cell.title}, Q = {self.queries} ({errors})"


def besides(rows: Sequence[Mapping[str, Any]]) -> list[Beside]:
    """The comparison of every cell and number of queries."""
    listed = []
    for (*cell, Q), group in records.grouped(
        _compared(rows), (*records.CELL, "queries")
    ).items():
        by_name = records.grouped(group, ("method",))
        means = {
            name: float(np.mean([row["error"] for row in lot]))
            for (name,), lot in by_name.items()
        }
        best, blind, known = (means[name] for name in NAMES)
        about = by_name[(BEST,)][0]["setting"], means.get(LIMIT)
        listed.append(Beside(Cell(*cell), Q, best, blind, known, *about))
    return listed


class Confidence(NamedTuple):
    """What confidences are worth in a cell, of blind calibration; all sets together.

    Attributes:
      title: of the cell and the number of queries.
      error: expected calibration error, on queries that no calibration has seen.
      foreign: AUROC of the probability that a query is foreign.
      cosine: AUROC of the largest cosine.
    """

    title: str
    error: float
    foreign: float
    cosine: float


def confidences(rows: Sequence[Mapping[str, Any]]) -> list[Confidence]:
    """The worth of confidences in every cell and number of queries."""
    listed = []
    for (*cell, Q), group in records.grouped(rows, (*records.CELL, "queries")).items():
        by_name = records.grouped(group, ("method",))
        mine = by_name[(BLIND,)]
        first, *others = (Reliability.parsed(row["reliability"]) for row in mine)
        aurocs = (
            float(np.mean([row["foreign_auroc"] for row in lot]))
            for lot in (mine, by_name[("cosine",)])
        )
        title = f"{Cell(*cell).title}, Q = {Q}"
        listed.append(Confidence(title, sum(others, first).error, *aurocs))
    return listed


def _compared(rows: Sequence[Mapping[str, Any]]) -> list[dict]:
    """All records but those of fixed similarities: of each cell, the best is kept."""
    others = (BLIND, KNOWN, LIMIT, *RIVALS)
    kept = [dict(row) for row in rows if row["method"] in others]
    fixed = [row for row in rows if row["method"] not in others]
    for _, group in records.grouped(fixed, (*records.CELL, "queries")).items():
        best = records.of_least(group, ("method",), "error")
        kept += [dict(row, method=BEST, setting=row["method"]) for row in best]
    return kept


def blind_figure(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Error against the number of queries, for the largest memory sets."""
    most = max(row["memories"] for row in rows)
    shown = [row for row in _compared(rows) if row["memories"] == most]
    return [
        Panel(
            f"M = {most}, {corruption.replace('_', ' ')} {level:g}",
            records.curves(group, "queries", "error", "method", interval=True),
            "queries without labels",
            figures.ERROR,
            xscale="log",
            yscale="auto",
        )
        for (corruption, level), group in records.grouped(
            shown, ("corruption", "level")
        ).items()
    ]


def blind_report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Errors by cell, and the cells in which blind calibration loses."""
    if all(row["method"] in RIVALS for row in rows):
        labelled = [dict(r, setting=f"Q = {r['queries']}") for r in rows]
        return "error\n" + records.pivot(labelled, "error")
    listed = besides(rows)
    numbers = sorted({beside.queries for beside in listed})
    lines = [["cell", *(f"{name}, Q = {Q}" for Q in numbers for name in NAMES)]]
    by_cell: dict[Cell, dict[int, Beside]] = {}
    for beside in listed:
        by_cell.setdefault(beside.cell, {})[beside.queries] = beside
    for cell, group in by_cell.items():
        errors = [x for Q in numbers for x in group[Q][2:5]]
        lines.append([cell.title, *(f"{error:.3g}" for error in errors)])
    near = [x for x in listed if x.queries == numbers[-1] and x.independent]
    text = records.aligned(lines)
    for rule, cells, failed in (
        (f"1.05 times {BEST}, or 0.1 more", listed, [x for x in listed if x.loses]),
        (
            f"1.25 times {KNOWN}, or 0.5 more (Q = {numbers[-1]})",
            near,
            [x for x in near if x.far],
        ),
    ):
        number = f"{len(cells) - len(failed)} of {len(cells)} cells"
        text += f"\n\nblind at most {rule}: {number}"
        text += "".join(f"\n  not {beside}" for beside in failed)
    known = confidences(rows)
    small = sum(x.error <= 0.03 for x in known)
    text += (
        f"\n\nexpected calibration error at most 0.03: {small} of {len(known)} cells"
    )
    text += (
        "\nAUROC of foreign queries, median over the cells: "
        f"{np.median([x.foreign for x in known]):.3f}, of the largest cosine "
        f"{np.median([x.cosine for x in known]):.3f}; difference "
        f"{np.median([x.foreign - x.cosine for x in known]):.3f}"
    )
    return text
