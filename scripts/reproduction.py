"""The reproduction report: every claim of the paper, with measured numbers.

python scripts/reproduction.py                 # docs/reproduction.md and the tables of
                                               # README.md, from docs/results
python scripts/reproduction.py --stale         # lists result files of other code
python scripts/reproduction.py --draw          # draws the figures of docs/results anew
python scripts/reproduction.py --run           # first runs missing and stale studies of
                                               # at most half an hour, and names the
                                               # longer ones
python scripts/reproduction.py --run NAME ...  # runs these; --data=DIR: prepared data

A study is a command that a user would type, run from committed code. A study that was
interrupted continues when it is run again, unless the code has changed. Its
`results.csv` and `config.json` are kept as `docs/results/NAME.csv` and `NAME.json`, and
the record of the code that made them as `NAME.made_by.json`.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import claims
import files
import learning_claims
import networks
import provenance
import tables
from claims import Claim, Judged
from files import CORRECTED, RESULTS, THEOREMS, read
from rows import CLAIMS, OF_CELLS, OF_READINGS, SETTINGS
from studies import STUDIES
from theorems import Finding
from verdicts import UNTESTED, VERDICTS

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "docs" / "reproduction.md"

# -- Report ----------------------------------------------------------------------------


def report() -> str:
    """The text of the report, from the result files."""
    results = files.all_results()
    rows = [(claim, claims.judged(claim, results)) for claim in CLAIMS]
    settings = [(claim, claims.judged(claim, results)) for claim in SETTINGS]
    statements = [Finding(**row) for row in read(THEOREMS)]
    corrected = [Finding(**row) for row in read(CORRECTED)]
    text = [
        "# Reproduction",
        "",
        "Every claim of the paper (U-Hop, ICML 2024), with our numbers. This page is "
        "written by `python scripts/reproduction.py` from `docs/results`; nothing on "
        "it is typed by hand, and each verdict follows from its numbers by the rule of "
        "its row.",
        "",
        "Errors are sums of squared pixel differences. A claim has three readings, and "
        "a verdict against it needs all of them:",
        "",
        "- *Reference*: the authors' code. U-Hop is the model of the released "
        "scripts: maximum loss at the rate 10, with N = 100 on MNIST, 500 on CIFAR-10 "
        "and 800 under noise (the better of two released scripts). It is compared with "
        "the baselines as released, whose distances seek the farthest memory and whose "
        "powers are not normalised, and with the same baselines repaired.",
        "- *Paper*: the text: average loss, rate 1, beta 1, rows of the kernel "
        "normalised; N = 100 on MNIST and 500 on CIFAR-10, under noise 100 and 200.",
        "- *Fair*: every method at its own beta, and U-Hop at its own N, chosen on "
        "other memories.",
        "",
        "In every reading U-Hop is the paper's model, a learned kernel under the dot "
        "product with softmax; the angular variants of this library count nowhere. "
        "No N is chosen on the sets that are scored. Comparisons are paired: all "
        "methods see the same memory sets. The number after ± is half of the 95 % "
        "interval of a difference, the standard error of a gain in learning, and "
        "elsewhere the standard deviation over sets or seeds. Similarities that the "
        "paper leaves out (cosines, squared l2, an untrained kernel) are printed for "
        "comparison, and decide no verdict. A claim neither holds nor fails while a "
        "study that its rule needs is missing. The training accuracy of an image "
        "classifier is measured during the last epoch, as in the released code, whose "
        "plots label epoch 25 as the maximal one.",
        "",
        f"*Cells*: {OF_CELLS}. *Readings*: {OF_READINGS}.",
        "",
        f"Experiments: {_counts([judgement.verdict for _, judgement in rows])}. "
        "Statements: "
        f"{_counts([finding.verdict for finding in statements])}.",
        "",
        "## Experiments",
        "",
        *_summary(
            "Claim", [(claim.says, judgement.verdict) for claim, judgement in rows]
        ),
        *_evidence("Claim", [_of_claim(*row) for row in rows]),
        "## Stage I in networks",
        "",
        "The score of the plain layer, and paired differences from it in points, with "
        "half of their 95 % intervals: means over the folds of sets of bags, or over "
        "seeds ([training](training.md#does-stage-i-help-in-a-network)).",
        "",
        networks.table(),
        "",
        networks.verdict(),
        "",
        "## Statements",
        "",
        "Computed with `uhop_jax.theory` (`python scripts/reproduction.py --run "
        f"{THEOREMS}`).",
        "",
        *_summary("Statement", [(f.says, f.verdict) for f in statements]),
        *_evidence("Statement", map(_of_finding, statements)),
        *_agreement_table(results),
        "## What the paper has wrong",
        "",
        "What the paper or its released code states, and the evidence against it "
        f"(`--run {CORRECTED}`). What this library does instead is in the docstrings "
        "and on the page of [concepts](concepts.md). The last corrections concern "
        "settings of the experiments.",
        "",
        *_summary(
            "Correction",
            [(f.says, f.verdict) for f in corrected]
            + [(claim.says, judgement.verdict) for claim, judgement in settings],
        ),
        *_evidence(
            "Correction",
            [*map(_of_finding, corrected), *(_of_claim(*row) for row in settings)],
        ),
        "## Studies",
        "",
        "The results of a study are kept with its config in `docs/results`.",
        "",
        "*Made by*: the commit whose code made the file (`--stale` lists files whose "
        "code has changed since; a file that another command has made is not read).",
        "",
        "| study | result file | made by | command | cost on 2 cores |",
        "|---|---|---|---|---|",
    ]
    for name, study in STUDIES.items():
        links = f"[csv](results/{name}.csv)" if results[name] else "-"
        if results.get(f"{name}_curves"):
            links += f", [every epoch](results/{name}_curves.csv)"
        commit = provenance.label(files.made_by(name)) if results[name] else "-"
        command = study.command.replace("|", "\\|")
        text.append(
            f"| {name} | {links} | {commit} | `python {command}` | {study.cost} |"
        )
    figures = [
        name + part
        for name in STUDIES
        for part in ("", "_curves", "_attention")
        if results[name] and (RESULTS / f"{name}{part}.png").exists()
    ]
    if figures:
        text += ["", "## Figures"]
        for name in figures:
            text += ["", f"**{name}**", "", f"![{name}](results/{name}.png)"]
    return "\n".join(text) + "\n"


def _counts(verdicts: list[str]) -> str:
    counts = Counter(verdicts)
    return ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])


def _agreement_table(results: claims.Results) -> list[str]:
    """Accuracies of the released image code and of this library, if any."""
    rows = learning_claims.agreement(results)
    if not rows:
        return []
    near = sum(abs(row.z) <= 2 for row in rows)
    return [
        "## Image classification compared with the released code",
        "",
        f"{near} of {len(rows)} accuracies are within 2 standard errors of the "
        "released code's accuracies (`tests/official_vision.csv`; where it ran with "
        "one seed, our standard deviation stands for both).",
        "",
        "| accuracy, per cent | released code | this library | difference in standard "
        "errors |",
        "|---|---|---|---|",
        *(_line(r.where, r.official, r.measured, f"{r.z:+.1f}") for r in rows),
        "",
    ]


class Entry(NamedTuple):
    """An entry of the page on a claim; `evidence` by reading, dashes left out."""

    says: str
    labels: Sequence[str]
    verdict: str
    evidence: dict[str, str]


def _of_claim(claim: Claim, judgement: Judged) -> Entry:
    evidence = dict(zip(("Reference", "Paper", "Fair"), judgement[:3], strict=True))
    evidence["Rule"] = claim.rule
    if judgement.verdict == UNTESTED:
        run = f"python scripts/reproduction.py --run {' '.join(claim.studies)}"
        evidence["To test it"] = claim.missing or run
    evidence["Studies"] = ", ".join(claim.studies)
    return Entry(claim.says, claim.labels, judgement.verdict, evidence)


def _of_finding(finding: Finding) -> Entry:
    evidence = {"Numbers": finding.numbers, "Rule": finding.rule}
    return Entry(finding.says, [finding.label], finding.verdict, evidence)


def _summary(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """A table of verdicts, each row with a link to its evidence."""
    text = ["| | the paper says | verdict |", "|---|---|---|"]
    for n, (says, verdict) in enumerate(rows, 1):
        link = f"[{n}](#{title.lower()}-{n})"
        text.append(_line(link, says, f"**{verdict}**"))
    return [*text, ""]


def _evidence(title: str, entries: Iterable[Entry]) -> list[str]:
    """The evidence of every row, under headings that the summary links to."""
    text = []
    for n, entry in enumerate(entries, 1):
        labels = " ".join(f"`{label}`" for label in entry.labels)
        text += [f"#### {title} {n}", ""]
        text += [f"{_safe(entry.says)} ({labels}): **{entry.verdict}**", ""]
        for name, value in entry.evidence.items():
            if value and value != "-":
                text.append(f"- *{name}*: {_safe(value)}")
        text.append("")
    return text


def _line(*cells: str) -> str:
    return "| " + " | ".join(_safe(c).replace("|", "\\|") for c in cells) + " |"


def _safe(text: str) -> str:
    """The text with its Markdown escaped, except code and bold verdicts."""
    code = "`" in text or text.startswith("**")
    return text if code else text.replace("*", "\\*").replace("<", "&lt;")


def main() -> None:
    """Runs studies on request, then writes the report and the tables of other pages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--run",
        nargs="*",
        metavar="NAME",
        help="studies to run; without names, missing and stale ones",
    )
    parser.add_argument("--stale", action="store_true", help="list stale files and why")
    parser.add_argument("--draw", action="store_true", help="draw the figures anew")
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
    if arguments.draw:
        for name in STUDIES:
            if (RESULTS / f"{name}.png").exists():
                files.draw(name)
        return
    names = arguments.run or []
    if arguments.run == []:
        outdated = [*files.missing(), *files.stale()]
        names = [name for name in outdated if files.affordable(name)]
        if rest := [name for name in outdated if name not in names]:
            print(f"not run unless named, since they are long: {', '.join(rest)}")
    if names and (changed := provenance.uncommitted()):
        listed = ", ".join(changed[:3]) + " ..." * (len(changed) > 3)
        sys.exit(f"studies run from committed code alone; commit first: {listed}")
    for name in names:
        files.run(name, arguments.data)
    REPORT.write_text(report(), "utf-8")
    tables.write()


if __name__ == "__main__":
    main()
