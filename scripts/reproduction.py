"""The reproduction report: every claim of the paper beside our numbers.

python scripts/reproduction.py                 # docs/reproduction.md from docs/results
python scripts/reproduction.py --stale         # result files that other code has made
python scripts/reproduction.py --run           # first runs what is missing or stale,
                                               # but for studies of more than half an
                                               # hour, which it names
python scripts/reproduction.py --run NAME ...  # those alone; --data=DIR: prepared data

A study is a command that a user would type, run from committed code. Stopped, it goes
on when asked for again, unless the code has changed; its `results.csv` and
`config.json` are kept as `docs/results/NAME.csv` and `NAME.json`, and what made them as
`NAME.made_by.json`.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import claims
import files
import provenance
import theorems
from claims import Claim, Judged
from files import CORRECTED, RESULTS, THEOREMS, read
from studies import STUDIES
from theorems import Finding

from uhop_jax import paper

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "docs" / "reproduction.md"


LONG = "hours on 2 cores for each data set; made for an accelerator"
CURVES = ("cifar10", "cifar100", "tiny")
SIZES = {
    "cifar10": (1000, 2000, 5000, 10000, 20000, 50000),
    "cifar100": (1000, 2000, 5000, 10000, 20000, 50000),
    "tiny": (1000, 5000, 10000, 20000, 40000, 60000, 80000, "Full"),
}
SHARES = "holds: in nine tenths under both protocols; partly: in half under one"
CAPACITY = (
    "capacity_mnist_paper",
    "capacity_cifar_paper",
    "capacity_mnist_fair",
    "capacity_cifar_fair",
)
GAIN = "holds: half of the paper's gain, beyond 2 standard errors; partly: any beyond 2"


def _untested(results: claims.Results) -> Judged:
    return Judged("-", "-", theorems.UNTESTED)


def _claims() -> list[Claim]:
    found = [
        Claim(
            ("abstract", "sec:intro"),
            "U-Hop outperforms all Hopfield models and similarity measures (capacity "
            "and noise together)",
            (*CAPACITY, "reference_noise_mnist", "reference_noise_cifar")
            + ("noise_mnist_fair",),
            claims.least_error,
            f"least error, {SHARES}",
        ),
        Claim(
            ("sec:intro", "sec:conclusion"),
            f"{paper.RETRIEVAL_MARGIN:.0%} less error on average after one step of "
            "Stage I",
            CAPACITY,
            claims.single_step,
            "mean margin over MHM at N = 1; holds: as stated, under both; partly: one",
        ),
        Claim(
            ("sec:intro", "sec:conclusion"),
            f"{paper.LEARNING_MARGIN:.0%} better on average in learning tasks",
            ("cifar_paper", "patches"),
            claims.learning_margin,
            GAIN,
        ),
        Claim(
            ("sec:exp_sl",),
            "what U-Hop gains in learning is the work of Stage I",
            ("cifar_paper", "cifar_controls", "patches"),
            claims.beyond_controls,
            "points of test accuracy and standard error, to an untrained kernel, to a "
            "kernel trained by the task and to a model of equal size; holds: above "
            "each beyond 2 standard errors; partly: above one",
        ),
        Claim(
            ("abstract",),
            "Stage I reduces metastable states",
            ("metastability_digits",),
            claims.metastable,
            "a tenth fewer memories mixed, each model at its best beta; partly: for "
            "one alpha",
        ),
        Claim(
            ("fig:ret-error", "fig:mem-ret-big"),
            "least error at every memory size, MNIST",
            ("capacity_mnist_paper", "capacity_mnist_full"),
            claims.least_error,
            SHARES,
        ),
        Claim(
            ("fig:ret-error", "fig:mem-ret-big"),
            "least error at every memory size, CIFAR-10",
            ("capacity_cifar_paper", "capacity_cifar_full"),
            claims.least_error,
            SHARES,
        ),
        Claim(
            ("fig:ret-error",),
            "least error at every noise level, MNIST",
            ("reference_noise_mnist", "noise_mnist_fair"),
            claims.least_error,
            SHARES,
        ),
        Claim(
            ("fig:ret-error",),
            "least error at every noise level, CIFAR-10",
            ("reference_noise_cifar",),
            claims.least_error,
            SHARES,
        ),
        Claim(
            ("seec:exp_memory",),
            "U-Hop is near optimal across all memory set sizes",
            ("capacity_mnist_full", "capacity_cifar_full"),
            claims.near_limit,
            "the limit is the posterior mean under the known corruption; " + SHARES,
        ),
        Claim(
            ("fig:mem-contribution", "fig:ret-error-sep-loss"),
            "a low separation loss goes with a low error (200 runs)",
            ("scatter_digits_paper", "scatter_digits_fair"),
            claims.correlation,
            "Spearman correlation of the runs that descend (half climb in the paper's "
            "design); holds: 0.7; partly: 0.3",
        ),
        Claim(
            ("fig:kernel-epoch",),
            "the error decays fast in N (MNIST, M = 100)",
            ("capacity_mnist_paper", "capacity_mnist_fair"),
            claims.decay,
            "holds: halved at the last N, under both; partly: a quarter less under one",
        ),
        Claim(
            ("fig:kernel-epoch",),
            "likewise on digits, up to the paper's N = 1000",
            ("stage_one_digits_paper", "stage_one_digits_fair"),
            claims.decay,
            "holds: halved at the last N, under both; partly: a quarter less under one",
        ),
        Claim(
            ("sec:UHop_alg",),
            "Stage I gives larger separations Delta",
            ("stage_one_digits_paper", "stage_one_digits_fair"),
            claims.wider,
            "share of memory sets in which the smallest, 1 - max cos, grows; " + SHARES,
        ),
        Claim(
            ("sec:max-vs-avg", "mnist-avg-max-epoch"),
            "the average loss gives a lower error than the maximum loss",
            ("losses_mnist_paper",),
            claims.average_or_maximum,
            SHARES,
        ),
        Claim(
            ("cifar-avg-max-epoch",),
            "likewise on CIFAR-10",
            ("losses_cifar_paper",),
            claims.average_or_maximum,
            SHARES,
        ),
        Claim(
            ("sec:exact_retrieval",),
            "sparse models retrieve better under U-Hop",
            CAPACITY,
            claims.sparse_gain,
            SHARES,
        ),
    ]
    for (data, model), stated in paper.ACCURACIES.items():
        for column, name in enumerate(("maximal training", "test")):
            says = f"{data}, {model}, {name} accuracy {stated.plain[column]} %, with "
            study = {"cifar10": "cifar_paper", "cifar100": "cifar100_paper"}.get(data)
            found.append(
                Claim(
                    ("tab:img-cls",),
                    f"{says}U-Hop {stated.uhop[column]} %",
                    (study,) if study else (),
                    claims.accuracy(data, model, column),
                    GAIN,
                    "" if study else _cost_of(data, model),
                )
            )
    found += [
        Claim(
            ("fig:expresivenss",),
            "U-Hop does not increase model complexity",
            ("cifar_paper",),
            claims.size_of_model,
            "no more parameters",
        ),
        Claim(
            ("fig:cifar10-max", "fig:expresivenss"),
            "a higher maximal training accuracy on all of CIFAR-10",
            ("cifar_paper",),
            claims.accuracy("cifar10", "MHM", 0),
            GAIN,
        ),
        Claim(
            ("fig:cifar100-max", "fig:cifar10-nax"),
            "likewise on CIFAR-100 and Tiny ImageNet, at every sample size",
            (),
            _untested,
            GAIN,
            f"{LONG}: train.py --config=configs/vision.py:expressiveness",
        ),
        Claim(
            ("fig:cifar100-main",)
            + tuple(f"fig:{name}-{n}" for name in CURVES for n in SIZES[name]),
            "faster convergence and better generalisation at every sample size",
            (),
            _untested,
            GAIN,
            f"{LONG}: train.py --config=configs/vision.py:convergence",
        ),
    ]
    for (data, horizon), row in paper.FORECASTS.items():
        tested = (data, horizon) == ("etth1", 96)
        found.append(
            Claim(
                ("table:time-series",),
                f"{data}, horizon {horizon}: MSE {row.plain[0]}, MAE {row.plain[1]}, "
                f"with U-Hop {row.uhop[0]}, {row.uhop[1]}",
                ("etth1",) if tested else (),
                claims.forecast(data, horizon),
                GAIN + "; MSE and MAE, partly if they differ",
                ("one seed has no spread; three of them: " if tested else "")
                + f"{LONG}: train.py --config=configs/time_series.py:{data} "
                f"--config.horizon='({horizon},)'",
            )
        )
    return found


def _cost_of(data: str, model: str) -> str:
    arms = f'\'("{model}","{model} + U-Hop")\''
    return (
        f"long on 2 cores: train.py --config=configs/vision.py:{data} "
        f"--config.arms={arms}"
    )


CLAIMS = _claims()
SETTINGS = [
    Claim(
        ("seec:exp_memory",),
        "the released distance baselines retrieve the nearest memory",
        ("reference_cifar",),
        claims.sign_of_distances,
        "turning the sign changes no error by a tenth",
    ),
    Claim(
        ("algorithm1",),
        "the released average-loss trainer learns for N steps",
        ("reference_cifar",),
        claims.rates_of_release,
        "N = 1 and N = 1000 differ by more than 1 %",
    ),
    Claim(
        ("seec:exp_memory",),
        "it does not matter how noisy pixels come back into [0, 1]",
        ("grid_mnist", "grid_cifar"),
        claims.folded_noise,
        "errors within a tenth",
    ),
]

# -- Report ----------------------------------------------------------------------------


def report() -> str:
    """The page, from the files."""
    results = {name: read(name) for name in STUDIES}
    rows = [(claim, claims.judged(claim, results)) for claim in CLAIMS]
    settings = [(claim, claims.judged(claim, results)) for claim in SETTINGS]
    statements = [Finding(**row) for row in read(THEOREMS)]
    corrected = [Finding(**row) for row in read(CORRECTED)]
    counts = Counter(found.verdict for _, found in rows)
    counts += Counter(finding.verdict for finding in statements)
    text = [
        "# Reproduction",
        "",
        "Every claim of the paper (U-Hop, ICML 2024) beside our numbers. This page is "
        "written by `python scripts/reproduction.py` from `docs/results`; nothing on "
        "it is typed by hand, and each verdict follows from its numbers by the rule of "
        "its row. Errors are sums of squared pixel differences, mean ± standard "
        "deviation over memory sets or seeds. *Paper's*: as the paper states it, or, "
        "in the rows of `reference` studies, as the released code runs, but with "
        "distances that retrieve the nearest. *Fair*: every method at its own best "
        "$\\beta$, chosen on other memories, and cosine and an untrained kernel among "
        "the baselines. In both U-Hop takes the best of its variants and numbers of "
        "steps "
        "N on the scored sets, a choice in its favour. A row "
        "with a study missing holds partly at most. Where a study is on digits (8 x 8) "
        "instead of the paper's data, its name says so.",
        "",
        "Verdicts: "
        + ", ".join(
            f"{counts[v]} {v}"
            for v in (
                theorems.HOLDS,
                theorems.PARTLY,
                theorems.FAILS,
                theorems.UNTESTED,
            )
        )
        + ".",
        "",
        "## Experiments",
        "",
        *_claim_table(rows),
        "",
        "## Statements",
        "",
        "Computed with `uhop_jax.theory` (`python scripts/reproduction.py --run "
        f"{THEOREMS}`).",
        "",
        *_finding_table(statements),
        "",
        "## What the paper has wrong",
        "",
        "What the paper or its released code states, the evidence against it, and what "
        "this library does instead is in the docstrings and on the page of "
        f"[concepts](concepts.md) (`--run {CORRECTED}`).",
        "",
        *_finding_table(corrected),
        "",
        "In the settings of its experiments:",
        "",
        *_claim_table(settings),
        "",
        "## Studies",
        "",
        "Each is kept with its config in `docs/results`.",
        "",
        "*Made by*: the commit whose code made the file (`--stale` lists files whose "
        "code has changed since; a file of another command than the study's is not "
        "read).",
        "",
        "| study | result file | made by | command | cost on 2 cores |",
        "|---|---|---|---|---|",
    ]
    for name, study in STUDIES.items():
        there = f"[csv](results/{name}.csv)" if results[name] else "-"
        made = provenance.label(files.made_by(name)) if results[name] else "-"
        command = study.command.replace("|", "\\|")
        text.append(
            f"| {name} | {there} | {made} | `python {command}` | {study.cost} |"
        )
    figures = [
        name for name in STUDIES if results[name] and (RESULTS / f"{name}.png").exists()
    ]
    if figures:
        text += ["", "## Figures"]
        for name in figures:
            text += ["", f"**{name}**", "", f"![{name}](results/{name}.png)"]
    return "\n".join(text) + "\n"


def _claim_table(rows: list[tuple[Claim, Judged]]) -> list[str]:
    text = [
        "| label | the paper says | studies | paper's | fair | verdict | rule |",
        "|---|---|---|---|---|---|---|",
    ]
    for claim, found in rows:
        labels = " ".join(f"`{label}`" for label in claim.labels)
        untested = found.verdict == theorems.UNTESTED
        rule = claim.missing if untested and claim.missing else claim.rule
        studies = ", ".join(claim.studies) or "-"
        cells = (labels, claim.says, studies, found.paper, found.fair)
        text.append(_line(*cells, f"**{found.verdict}**", rule))
    return text


def _finding_table(findings: list[Finding]) -> list[str]:
    text = [
        "| label | the paper says | our numbers | verdict | rule |",
        "|---|---|---|---|---|",
    ]
    for f in findings:
        text.append(_line(f"`{f.label}`", f.says, f.found, f"**{f.verdict}**", f.rule))
    return text


def _line(*cells: str) -> str:
    def safe(cell: str) -> str:
        return (
            cell.replace("||", "\\|\\|").replace("*", "\\*")
            if "**" not in cell
            else cell
        )

    return "| " + " | ".join(map(safe, cells)) + " |"


def main() -> None:
    """Does what is asked for, then writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--run", nargs="*", metavar="NAME", help="none: what is missing or stale"
    )
    parser.add_argument("--stale", action="store_true", help="list stale files and why")
    parser.add_argument("--data", default="", help="directory of prepared data sets")
    arguments = parser.parse_args()
    for name in arguments.run or ():
        if name not in files.KNOWN:
            known = ", ".join(files.KNOWN)
            parser.error(f"unknown study {name!r}; choose from {known}")
    if arguments.stale:
        for name, reasons in files.stale().items():
            print(f"{name}: {', '.join(reasons)}")
        return
    names = arguments.run or []
    if arguments.run == []:
        wanted = [*files.missing(), *files.stale()]
        names = [name for name in wanted if files.affordable(name)]
        if rest := [name for name in wanted if name not in names]:
            print(f"not run unless named, since they are long: {', '.join(rest)}")
    if names and (changed := provenance.uncommitted()):
        listed = ", ".join(changed[:3]) + " ..." * (len(changed) > 3)
        sys.exit(f"studies run from committed code alone; commit first: {listed}")
    for name in names:
        files.run(name, arguments.data)
    REPORT.write_text(report())


if __name__ == "__main__":
    main()
