"""Picture files as arrays of one shape."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


def picture_files(folder: Path) -> list[Path]:
    """The pictures of a folder, in the order of their names."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in ENDINGS
        and not file.name.startswith(".")
        and file.is_file()
    )


def read_pictures(
    files: Sequence[Path],
) -> UInt8[np.ndarray, "n height width channels"]:
    """Reads pictures of one size, all grey or all colour; transparency is dropped.

    Raises:
      ValueError: if there are none, one cannot be read, or they differ in kind or size.
    """
    from PIL import Image

    if not files:
        raise ValueError(f"there are no pictures ({', '.join(ENDINGS)}) to read")
    arrays: list[np.ndarray] = []
    for file in files:
        try:
            with Image.open(file) as picture:
                mode = picture.mode
                grey = mode in ("1", "L", "LA")
                arrays.append(np.asarray(picture.convert("L" if grey else "RGB")))
        except Exception:  # damaged files make Pillow raise errors of many types
            raise ValueError(f"{file} is no image, or is truncated or huge") from None
        if mode[0] in "IF":  # Pillow would clip them
            raise ValueError(f"{file} has more than 8 bits a channel: save it with 8")
        first, last = arrays[0], arrays[-1]
        if first.ndim != last.ndim:
            kinds = ["grey" if x.ndim == 2 else "colour" for x in (first, last)]
            raise ValueError(
                f"images must be all grey or all colour: {files[0].name} is {kinds[0]},"
                f" {file.name} {kinds[1]}"
            )
        if first.shape != last.shape:
            sizes = [f"{x.shape[1]} x {x.shape[0]}" for x in (first, last)]
            raise ValueError(
                f"images must have one size: {files[0].name} is {sizes[0]}, "
                f"{file.name} {sizes[1]}"
            )
    stacked = np.stack(arrays)
    return stacked if stacked.ndim == 4 else stacked[..., None]
