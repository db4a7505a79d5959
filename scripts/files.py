"""Result files of studies: reading, making, and checking that they are current."""

import ast
import csv
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corrections
import provenance
import theorems
from ml_collections import ConfigDict
from studies import CURVES, STUDIES

from uhop_jax import plotting, records
from uhop_jax.command_line import load_config
from uhop_jax.experiments import EXPERIMENTS, figures, sweep
from uhop_jax.training.cells import ImageCell, directory_name
from uhop_jax.training.vision import Vision

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
WORK = ROOT / "results" / "reproduction"
THEOREMS, CORRECTED = "theorems", "corrected"  # computed here, not by a study
KNOWN = (*STUDIES, THEOREMS, CORRECTED)
CURVE = ("train_accuracy", "test_accuracy", "train_loss", "test_loss")
LARGEST = 400_000  # bytes of the largest figure that is kept
AFFORDABLE = 30  # minutes of the longest study that is run without being named


def read(name: str, part: str = "") -> list[dict[str, Any]]:
    """The rows of a result file, numbers as numbers.

    The list is empty if the file is missing, or if a command other than the study's
    made it. `part` is "" for the results, "_curves" for the rows of every epoch.
    """
    return [] if other_than_asked(name) else rows_of(name + part)


def all_results() -> dict[str, list[dict[str, Any]]]:
    """The rows of all studies, and of their curves as `NAME_curves`."""
    curves = {f"{name}_curves": read(name, "_curves") for name in CURVES}
    return {name: read(name) for name in STUDIES} | curves


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a result file, whichever command made it."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    return [{k: _value(v) for k, v in row.items()} for row in _rows(path)]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# -- Commands --------------------------------------------------------------------------


def asked(name: str) -> dict[str, Any]:
    """The config of a study's command, as JSON keeps it."""
    return json.loads(config_of(name).to_json_best_effort())


def config_of(name: str) -> ConfigDict:
    """The config of a study's command."""
    _, config, *flags = shlex.split(STUDIES[name].command)
    module, _, variant = Path(config.split("=")[1]).name.partition(".py")
    changes = {}
    for flag in flags:
        key, text = flag.removeprefix("--config.").split("=", 1)
        try:
            changes[key] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            changes[key] = text
    about = [module, *filter(None, [variant.removeprefix(":")])]
    return load_config(*about, changes=changes)


def other_than_asked(name: str) -> list[str]:
    """Keys whose values differ between a file's config and the study's command.

    Keys added since the file was made are not compared: it was made by their defaults.
    """
    path = RESULTS / f"{name}.json"
    if name not in STUDIES or not path.exists():
        return []
    kept, current = json.loads(path.read_text("utf-8")), asked(name)
    kept.pop("cell", None)  # a run adds it where it has one cell alone
    if not current.get("stage_one", {}).get("steps"):
        kept["stage_one"].pop(
            "steps"
        )  # the paper's numbers of steps, which the run filled in
    return list(_differing(kept, current))


def _differing(
    kept: dict[str, Any], current: dict[str, Any], above: str = ""
) -> Iterator[str]:
    """Keys of `kept` whose values differ in `current`, groups of keys included."""
    for key, value in kept.items():
        if isinstance(value, dict):
            yield from _differing(value, current.get(key, {}), f"{above}{key}.")
        elif value != current.get(key):
            yield f"{above}{key}"


# -- Provenance ------------------------------------------------------------------------


def kind(name: str) -> str:
    """The kind of a study, which decides on which modules its results depend."""
    return (
        provenance.kind_of(STUDIES[name].command) if name in STUDIES else "statements"
    )


def made_by(name: str) -> dict[str, Any]:
    """The record of the commit, command and modules that made a result file."""
    return provenance.read(RESULTS / f"{name}.made_by.json")


def stale() -> dict[str, list[str]]:
    """Result files that other code or another command has made, with the reasons."""
    stale_files = {}
    for name in KNOWN:
        if (RESULTS / f"{name}.csv").exists():
            reasons = [f"config.{key}" for key in other_than_asked(name)]
            reasons += provenance.why_stale(made_by(name), kind(name))
            if reasons:
                stale_files[name] = reasons
    return stale_files


def missing() -> list[str]:
    """Studies without a result file."""
    return [name for name in KNOWN if not (RESULTS / f"{name}.csv").exists()]


def affordable(name: str) -> bool:
    """Whether a study is run without being named."""
    return name not in STUDIES or STUDIES[name].minutes <= AFFORDABLE


# -- Runs ------------------------------------------------------------------------------


def run(name: str, data: str) -> None:
    """Runs a study, or goes on with it, and keeps its results.

    A run that other code or another command began starts anew. A run that the same code
    began continues, and keeps the commit that began it.
    """
    here = f"scripts/reproduction.py --run {name}"
    command = STUDIES[name].command if name in STUDIES else here
    record = provenance.made_now(kind(name), command)
    if name in STUDIES:
        workdir, record_path = WORK / name, WORK / f"{name}.made_by.json"
        begun = provenance.read(record_path)
        same = [begun.get(k) == record[k] for k in ("modules", "command")]
        if all(same):
            record = begun
        elif workdir.exists():
            print(f"{name}: begun by other code or another command, begins anew")
            shutil.rmtree(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        provenance.write(record_path, record)
        flags = [f"--workdir={workdir}"] + [f"--config.data.dir={data}"] * bool(data)
        arguments = [sys.executable, *shlex.split(command), *flags]
        subprocess.run(arguments, cwd=ROOT, check=True)
        keep(name, workdir)
    else:
        findings = (theorems if name == THEOREMS else corrections).findings()
        records.write_csv(RESULTS / f"{name}.csv", [f._asdict() for f in findings])
    provenance.write(RESULTS / f"{name}.made_by.json", record)


def keep(name: str, workdir: Path) -> None:
    """Copies a study's results, config and figures, without paths of this machine."""
    RESULTS.mkdir(exist_ok=True)
    shutil.copy(workdir / "results.csv", RESULTS / f"{name}.csv")
    config = json.loads((workdir / "config.json").read_text("utf-8"))
    config["data"].pop("dir", None)
    config.pop("cell", None)  # of a study of one run
    (RESULTS / f"{name}.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    names = {"figure.png": f"{name}.png", "attention.png": f"{name}_attention.png"}
    if name in CURVES:
        names["curves.png"] = f"{name}_curves.png"
        records.write_csv(RESULTS / f"{name}_curves.csv", curves(workdir))
    for figure, kept in names.items():
        path = workdir / figure
        if path.exists() and path.stat().st_size < LARGEST:
            shutil.copy(path, RESULTS / kept)


def draw(name: str) -> None:
    """Draws the figures of a study anew, from its result files.

    A forecast gets no figure: its result file does not hold the curves.
    """
    config, rows = config_of(name), rows_of(name)
    path = RESULTS / f"{name}.png"
    if "task" not in config:
        rows = [row | {"setting": str(row["setting"])} for row in rows]
        parts = EXPERIMENTS[config.variant].figure(rows)
        figures.draw(path, parts, sweep.title_of(config))
    elif config.task == "vision":
        study, histories = Vision(config), {}
        for row in rows:
            cell = ImageCell(row["arm"], int(row["size"]), int(row["patch"]))
            histories[cell] = [
                dict(epoch, phase="task")
                for epoch in (rows_of(f"{name}_curves") if name in CURVES else [])
                if (epoch["arm"], epoch["size"]) == (cell.arm, cell.size)
            ]
        title = study.title + " (mean ± standard deviation)"
        for figure, parts in study.figures(histories, rows).items():
            if figure == "figure.png":
                plotting.panels(path, parts, title=title)
            elif name in CURVES:
                path = RESULTS / f"{name}_curves.png"
                plotting.panels(path, parts, title=title)


def curves(workdir: Path) -> list[dict[str, Any]]:
    """Accuracies and losses after every epoch of a study's runs, four digits of each.

    Epochs of Stage I have no accuracies, and are left out.
    """
    kept = []
    for row in _rows(workdir / "results.csv"):
        cell = ImageCell(row["arm"], int(row["size"]), int(row["patch"]))
        about = {"data": row["data"], "arm": cell.arm, "size": cell.size}
        run = workdir / directory_name(cell)
        for epoch in _rows((run if run.is_dir() else workdir) / "metrics.csv"):
            if (epoch["phase"], epoch["seed"]) == ("task", row["seed"]):
                numbers = {key: f"{float(epoch[key]):.4g}" for key in CURVE}
                where = {"seed": row["seed"], "epoch": epoch["epoch"]}
                kept.append(about | where | numbers)
    return kept
