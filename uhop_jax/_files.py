"""Files that users name: their paths, and everything that reading them can raise."""

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


def user_path(path: str | Path) -> Path:
    """The path, with the home directory in place of `~`, which no shell expands."""
    return Path(os.path.expanduser(path))


def shown_name(path: Path) -> str:
    r"""The name of a file as text: bytes that are no UTF-8 as `\x..`."""
    return os.fsencode(path.name).decode("utf-8", "backslashreplace")


@contextlib.contextmanager
def reading(file: object, expected: str) -> Iterator[None]:
    """Turns whatever reading a file raises into one sentence that names the file.

    A file that cannot be opened raises an `OSError` with a number. Damage has no type
    of its own: NumPy lets `ValueError`, `EOFError`, `SyntaxError`, `TypeError`,
    `OverflowError` and tokenize's `TokenError` through; zipfile `BadZipFile`,
    `KeyError`, `NotImplementedError` (a compression that it does not know) and
    `RuntimeError` (an encrypted file); zlib and lzma errors of their own; json
    `RecursionError`; text `UnicodeDecodeError`; Pillow all of these.

    Args:
      file: its path, or words that hold it.
      expected: what it should be, to go after "is no".

    Raises:
      ValueError: if anything was raised but an interrupt.
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
    """The array of a `.npy` file, of which nothing but the header is read yet.

    Args:
      path: the file.
      argument: its name begins the messages.

    Raises:
      ValueError: if the file cannot be read, or is no `.npy` file without Python
        objects.
    """
    path = user_path(path)
    named = f"{argument}: {path}" if argument else str(path)
    with reading(named, ".npy file of numbers"):
        with path.open("rb") as file:  # data may hold what else makes an archive
            begins = file.read(4) == b"PK\3\4"
        if not (begins and zipfile.is_zipfile(path)):
            return np.lib.format.open_memmap(path, mode="r")
    raise ValueError(
        f"{named} is a .npz archive, expected a .npy file: save one array with "
        "numpy.save"
    )


def read_archive(
    path: str | Path, choose: Callable[[list[str]], Iterable[str]] = list
) -> dict[str, Any]:
    """Arrays of a `.npz` archive; bytes for a member that is no `.npy` file.

    Args:
      path: the file.
      choose: given all names, those of the arrays to read.

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
    """Refuses numbers of so many bytes if the machine does not have as much memory.

    Args:
      numbers: words for them, such as the path of their file.
      size: in bytes.

    Raises:
      ValueError: if it has not.
    """
    memory = machine_memory()
    if size > memory:
        raise ValueError(
            f"{numbers}: {size / 2**30:.1f} GiB are more than the memory of this "
            f"machine, {memory / 2**30:.1f} GiB; take a part of them"
        )


def machine_memory() -> float:
    """Bytes of memory of the machine; infinite where the system does not say."""
    if not hasattr(os, "sysconf"):  # Windows
        return float("inf")
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
