"""What a run shows: TensorBoard events, and curves of its metrics."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uhop_jax import plotting, records
from uhop_jax.training.judging import Goal, columns
from uhop_jax.training.steps import Trainer
from uhop_jax.training.task import REACHED
from uhop_jax.workdir import write_file


class Board:
    """TensorBoard events of a run; the first makes the directory.

    Events are written at once and by no thread, so that errors reach the run.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._writer: Any = None

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the numbers of an epoch."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        if self._writer is None:
            self.directory.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(self.directory / "events"))
        for row in rows:
            for name, value in row.items():
                if isinstance(value, float) and math.isfinite(value):
                    summary = scalar(f"{name}/seed {row['seed']}", value)
                    now = time.time()
                    event = Event(wall_time=now, step=row["step"], summary=summary)
                    self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.close()


def draw_curves(
    path: Path,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    trainer: Trainer,
    goal: Goal,
) -> None:
    """Metrics against epochs, as in the paper's figures of convergence."""
    names = {
        "train": "while training",
        "validation": "validation",
        "test": "test",
        "fit": "train, no dropout",
    }
    parts: list[plotting.Panel] = []
    task = [row for row in rows if row["phase"] == "task"]
    lengths = Counter(row["seed"] for row in task)
    epoch = "epoch" if len({*lengths.values()}) < 2 else REACHED
    for metric in reversed(trainer.metrics):
        long = [
            {"epoch": row["epoch"], "value": row[f"{part}_{metric}"], "part": name}
            for part, name in names.items()
            if f"{part}_{metric}" in columns(trainer, goal)
            for row in task
        ]
        curves = records.curves(long, "epoch", "value", "part")
        if all(curves != panel.series for panel in parts):  # the loss may be a metric
            parts.append(plotting.Panel(metric, curves, epoch, metric))
    for phase, group in records.grouped(rows, ("phase",)).items():
        long = [dict(row, part="separation") for row in group]
        curves = records.curves(long, "epoch", "separation", "part")
        if curves:
            name = "separation loss" + (", Stage I" if phase[0] != "task" else "")
            parts.append(plotting.Panel(name, curves, epoch, "separation loss"))
    seeds = len({row["seed"] for row in rows})
    spread = f", {seeds} seeds (mean ± standard deviation)" * (seeds > 1)
    write_file(path, lambda file: plotting.panels(file, parts, title=title + spread))
