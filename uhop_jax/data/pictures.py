"""Picture files as arrays of one shape."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from uhop_jax._files import check_fits, reading

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
NAMED = 6  # entries of a folder that a warning names


def entries_of(folder: Path) -> list[Path]:
    """Entries of a folder in the order of names; hidden names (`.x`) are left out.

    Raises:
      ValueError: if the folder cannot be read.
    """
    with reading(folder, "folder"):
        return sorted(x for x in folder.iterdir() if x.name[0] != ".")


def picture_files(folders: Sequence[Path]) -> list[list[Path]]:
    """The pictures of each folder, in the order of their names.

    One warning names all further entries of the folders, see `entries_of`.

    Raises:
      ValueError: if a folder cannot be read, or a link that is named like a picture
        leads to no file.
    """
    pictures: list[list[Path]] = []
    others: list[str] = []
    for folder in folders:
        entries = entries_of(folder)
        named = [entry for entry in entries if entry.suffix.lower() in ENDINGS]
        for entry in named:
            if not os.path.exists(entry) and entry.is_symlink():
                raise ValueError(f"{entry} is a link to {os.readlink(entry)}, no file")
        files = [entry for entry in named if os.path.isfile(entry)]
        pictures.append(files)
        within = f"{folder.name}/" if len(folders) > 1 else ""
        for entry in sorted(set(entries) - set(files)):
            others.append(f"{within}{entry.name}{'/' * os.path.isdir(entry)}")
    if others and all(pictures):
        place = folders[0] if len(folders) == 1 else folders[0].parent
        warn_not_read(f"{place}: {sum(map(len, pictures))} pictures", others)
    return pictures


def warn_not_read(read: str, others: Sequence[str]) -> None:
    """Warns in one line of entries that are not read, beside the pictures read."""
    rest = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
    warnings.warn(
        f"{read} ({', '.join(ENDINGS)}); not read: {', '.join(others[:NAMED])}{rest}",
        stacklevel=2,
    )


def read_pictures(
    files: Sequence[Path],
) -> UInt8[np.ndarray, "n height width channels"]:
    """Reads pictures of one size, all grey or all colour; transparency is dropped.

    A picture is turned upright where its EXIF data say how the camera was held.

    Raises:
      ValueError: if there are no files, a file cannot be read, or pictures differ in
        kind or size.
    """
    from PIL import Image, ImageOps

    if not files:
        raise ValueError(f"there are no pictures ({', '.join(ENDINGS)}) to read")
    largest = f"picture of at most {2 * (Image.MAX_IMAGE_PIXELS or 0)} pixels"
    arrays: list[np.ndarray] = []
    for file in files:
        # Given a path, Pillow (13.0) maps a turned TIFF into memory and mixes its rows.
        with reading(file, largest), file.open("rb") as raw, Image.open(raw) as picture:
            mode, frames = picture.mode, getattr(picture, "n_frames", 1)
            if picture.format == "MPO":  # of a camera: further frames are previews
                frames = 1
            grey = mode in ("1", "L", "LA")
            upright = ImageOps.exif_transpose(picture)
            arrays.append(np.asarray(upright.convert("L" if grey else "RGB")))
        check_fits(file.parent, len(files) * arrays[0].nbytes)
        if mode[0] in "IF":  # Pillow would clip the values
            raise ValueError(f"{file} has more than 8 bits a channel: save it with 8")
        if frames > 1:
            raise ValueError(
                f"{file} holds {frames} pictures: save each in a file of its own"
            )
        first, last = arrays[0], arrays[-1]
        several_folders = file.parent != files[0].parent  # then names may be equal
        names = [
            f"{f.parent.name}/" * several_folders + f.name for f in (files[0], file)
        ]
        if first.ndim != last.ndim:
            kinds = ["grey" if x.ndim == 2 else "colour" for x in (first, last)]
            raise ValueError(
                f"images must be all grey or all colour: {names[0]} is {kinds[0]}, "
                f"{names[1]} {kinds[1]}"
            )
        if first.shape != last.shape:
            sizes = [f"{x.shape[1]} x {x.shape[0]}" for x in (first, last)]
            raise ValueError(
                f"images must have one size: {names[0]} is {sizes[0]}, {names[1]} "
                f"{sizes[1]}"
            )
    stacked = np.stack(arrays)
    return stacked if stacked.ndim == 4 else stacked[..., None]
