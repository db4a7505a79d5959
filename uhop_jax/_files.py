"""Files that users name: their paths, and every error that reading them can raise."""

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


def user_path(path: str | Path) -> Path:
    """The path, its `~` replaced by the home directory, as a shell would do."""
    return Path(os.path.expanduser(path))


def shown_name(path: Path) -> str:
    r"""The name of a file as text; bytes that are not UTF-8 become `\x..`."""
    return os.fsencode(path.name).decode("utf-8", "backslashreplace")


@contextlib.contextmanager
def reading(file: object, expected: str) -> Iterator[None]:
    """Turns any error of reading a file into one sentence that names the file.

    A file that cannot be opened raises an `OSError` with a number. Damage has no
    exception type of its own: NumPy raises `ValueError`, `EOFError`, `SyntaxError`,
    `TypeError`, `OverflowError` and tokenize's `TokenError`; zipfile raises
    `BadZipFile`, `KeyError`, `NotImplementedError` (an unknown compression) and
    `RuntimeError` (an encrypted file); zlib and lzma raise their own errors; json
    raises `RecursionError`; text raises `UnicodeDecodeError`; Pillow raises any of
    these.

    Args:
      file: the path, or words with the path in them.
      expected: the expected kind of file; the message says "is no {expected}".

    Raises:
      ValueError: for every exception but an interrupt.
    """
    try:
        yield
    except MemoryError:
        raise ValueError(
            f"{file} is damaged, or needs more memory than there is"
        ) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from None
        raise ValueError(
            f"{file} is damaged or truncated, or is no {expected}"
        ) from None


def mapped_array(path: str | Path, argument: str = "") -> np.ndarray:
    """The array of a `.npy` file, mapped into memory: only the header is read at once.

    Messages begin with the name of the argument that gave the path.

    Raises:
      ValueError: if the file cannot be read, or is no `.npy` file without Python
        objects.
    """
    path = user_path(path)
    named = f"{argument}: {path}" if argument else str(path)
    with reading(named, ".npy file of numbers"):
        # `is_zipfile` looks at the end of the file only, which may be any numbers.
        with path.open("rb") as file:
            zip_header = file.read(4) == b"PK\3\4"
        if not (zip_header and zipfile.is_zipfile(path)):
            return np.lib.format.open_memmap(path, mode="r")
    raise ValueError(
        f"{named} is a .npz archive, expected a .npy file: save one array with "
        "numpy.save"
    )


def read_archive(
    path: str | Path, choose: Callable[[list[str]], Iterable[str]] = list
) -> dict[str, Any]:
    """The arrays of a `.npz` archive by name; a member that is no `.npy` file is bytes.

    `choose` takes all names and returns the names of the arrays to read.

    Raises:
      ValueError: if the file cannot be read, is no archive, or holds more than fits
        into memory.
    """
    path = user_path(path)
    with contextlib.ExitStack() as stack:
        with reading(path, ".npz archive"):
            raw = stack.enter_context(path.open("rb"))
            file: Any = stack.enter_context(np.load(raw, allow_pickle=False))
            sizes = {info.filename: info.file_size for info in file.zip.infolist()}
        names = choose(file.files)
        check_fits(path, sum(sizes.get(f"{x}.npy", sizes.get(x, 0)) for x in names))
        with reading(path, ".npz archive of numbers"):
            return {name: file[name] for name in names}


def check_fits(numbers: object, size: int) -> None:
    """Refuses data of more bytes than the memory of the machine has.

    `numbers` are words for the data, such as the path of their file.
    """
    memory = machine_memory()
    if size > memory:
        raise ValueError(
            f"{numbers}: {size / 2**30:.1f} GiB are more than the memory of this "
            f"machine, {memory / 2**30:.1f} GiB; take a part of them"
        )


def machine_memory() -> float:
    """Memory of the machine in bytes; infinite where the system does not tell it."""
    if not hasattr(os, "sysconf"):  # Windows
        return float("inf")
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
