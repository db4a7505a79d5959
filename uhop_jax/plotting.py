"""Figures of results; nothing is computed here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float


def image_grid(
    path: Path,
    columns: Mapping[str, Float[np.ndarray, "n height width channels"]],
    *,
    captions: Mapping[str, Sequence[str]] | None = None,
    title: str = "",
) -> None:
    """Saves images side by side: a row for each pattern, a column for each method.

    Args:
      path: file to write; its ending gives the format.
      columns: title and images of each column, in `[0, 1]`.
      captions: words under the images of a column.
      title: line above the grid.
    """
    figure_class, canvas = _matplotlib()
    rows = max(len(x) for x in columns.values())
    figure = figure_class(
        figsize=(1.15 * len(columns), 1.3 * rows + 0.75), layout="constrained"
    )
    canvas(figure)
    axes = figure.subplots(rows, len(columns), squeeze=False)
    for j, (name, pictures) in enumerate(columns.items()):
        for i, axis in enumerate(axes[:, j]):
            axis.set(xticks=[], yticks=[])
            picture = np.clip(np.asarray(pictures[i]), 0, 1)
            axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            if i == 0:
                axis.set_title(name, fontsize=8)
            if captions and name in captions:
                axis.set_xlabel(captions[name][i], fontsize=7, labelpad=2)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=160)


def _matplotlib() -> tuple[Any, Any]:
    """Figure and canvas classes that need no display and leave pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    return Figure, FigureCanvasAgg
