"""Cells of a study: one model each, a named tuple with an `arm` and a `title`.

The fields of a cell identify it, and are columns of the results. An arm is a name in
`ARMS`.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

AnyCell = Any  # of one kind of task


class ImageCell(NamedTuple):
    """One model of a study of images."""

    arm: str
    size: int  # training images; 0 is all
    patch: int  # side of a patch in pixels

    @property
    def title(self) -> str:
        size = f", {self.size} images" if self.size else ""
        return f"{self.arm}{size}, patch {self.patch}"


class ForecastCell(NamedTuple):
    """One model of a study of forecasts."""

    data: str  # name or path of the series
    horizon: int  # steps of the forecast
    window: int  # steps of the input
    arm: str
    seed: int  # of start values, order and dropout
    memory: str = ""  # the external memory that a trained model has, of `MEMORIES`
    bank: int = 0  # windows in the memory

    @property
    def label(self) -> str:
        """The arm, with its memory."""
        return f"{self.arm}, {self.memory} memory" if self.memory else self.arm

    @property
    def backbone(self) -> "ForecastCell":
        """The cell without an external memory."""
        return self._replace(memory="", bank=0)

    @property
    def title(self) -> str:
        name = f"{Path(self.data).name}, horizon {self.horizon}, window {self.window}"
        return f"{name}, {self.label}, seed {self.seed}"


class BagCell(NamedTuple):
    """One model of a study of bags."""

    arm: str
    beta: float  # inverse temperature; 0 is the default of the layer
    dropout: float  # of the weights over instances
    fold: int  # number of the fold that tests, from 1; 0 if the set has test bags

    @property
    def title(self) -> str:
        title = f"{self.arm}, beta {self.beta:g}" if self.beta else self.arm
        title += f", dropout {self.dropout:g}" if self.dropout else ""
        return f"{title}, fold {self.fold}" if self.fold else title


class RecallCell(NamedTuple):
    """One model of a study of recall."""

    arm: str
    pairs: int  # of a key and a value in a sequence

    @property
    def title(self) -> str:
        return f"{self.arm}, {self.pairs} pairs"


def directory_name(cell: AnyCell) -> str:
    """A name for the directory of a cell, which no other cell has.

    The name begins with the title, for people, and ends with a hash of the fields.
    """
    text = json.dumps(cell._asdict(), sort_keys=True)
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    title = re.sub(r"[^a-z0-9]+", "_", cell.title.lower().replace("+", "with"))
    return f"{title.strip('_')[:100]}_{mark}"
