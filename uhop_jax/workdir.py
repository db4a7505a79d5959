"""The directory of a run: claimed by one config, locked, its tables checked by hash.

`config.json` holds the config of a run. `run.json` holds what the run has read (shape
and SHA-256 of the data), and the names of the files that it has written, with the
SHA-256 of each table. A file without a record is not of this run, and is left alone.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from uhop_jax import records
from uhop_jax.storage import write_whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CONFIG, RECORD, LOCK = "config.json", "run.json", ".lock"
AGAIN = "restore it, or choose another --workdir"


def fingerprint(*parts: np.ndarray | Sequence[str]) -> dict[str, Any]:
    """Shape of the first array, and SHA-256 of all arrays and names, for JSON."""
    digest, shape = hashlib.sha256(), None
    for part in parts:
        if isinstance(part, np.ndarray):
            shape = list(part.shape) if shape is None else shape
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        else:
            digest.update(json.dumps(list(part)).encode())
    return {"shape": shape, "sha256": digest.hexdigest()}


def check(workdir: Path, config: ConfigDict, read: Mapping[str, Any]) -> None:
    """Refuses a directory that is not free for a run, unless it holds this run.

    A directory in which nothing was finished, or that does not exist, is free. What the
    run reads comes by name, as `fingerprint` gives it.

    Raises:
      ValueError: if the directory is a file, holds files and no run, or holds a run of
        another config, of other data or of an earlier version.
    """
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"workdir {workdir} is a file, it must be a directory")
    held = sorted(_held(workdir)) if workdir.exists() else []
    if CONFIG not in held:
        # A run that is killed at its start may have written its record alone.
        if others := [name for name in held if name != RECORD]:
            raise ValueError(
                f"workdir {workdir} holds {others[0]} and no {CONFIG} of a run; choose "
                "a --workdir that is empty or new"
            )
        return
    saved = _json(workdir / CONFIG)
    if RECORD not in held:
        raise ValueError(
            f"workdir {workdir} holds a run of an earlier version, which kept no "
            f"{RECORD}; choose another --workdir"
        )
    record = _record(workdir)
    if not set(held) - {CONFIG, RECORD}:
        return
    stored, given = flattened(saved), flattened(_plain(config))
    for key in sorted(stored.keys() | given.keys()):
        old, new = stored.get(key, "missing"), given.get(key, "missing")
        if old != new:
            raise ValueError(
                f"workdir {workdir} holds a run with config.{key}={old}, this one has "
                f"{new}; give the flags of that run, or choose another --workdir"
            )
    for name, now in json.loads(json.dumps(read)).items():
        if (before := record["read"].get(name)) != now:
            raise ValueError(
                f"workdir {workdir} holds a run on another {name}: it had "
                f"{_in_words(before)}, now it has {_in_words(now)}; {AGAIN}"
            )


@contextmanager
def claimed(
    workdir: Path, config: ConfigDict, read: Mapping[str, Any]
) -> Iterator[None]:
    """Holds the directory of a run, so that no other run can use it meanwhile.

    The directory is made if it does not exist. Arguments are as in `check`.

    Raises:
      ValueError: see `check`; or if another run uses the directory.
    """
    check(workdir, config, read)
    if jax.process_count() > 1:  # all check before the first writes
        multihost_utils.sync_global_devices(f"claim {workdir}")
    if jax.process_index() != 0:
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / LOCK).open("a", encoding="utf-8") as lock:
        _hold(workdir, lock)
        check(workdir, config, read)
        if not set(_held(workdir)) - {CONFIG, RECORD}:
            _write_json(workdir / RECORD, {"read": dict(read), "written": {}})
            _write_json(workdir / CONFIG, _plain(config))
        yield


def write_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file of a run whole or not at all, see `write_whole`.

    Raises:
      ValueError: if the file exists, and the run has not written it.
    """
    _note(path, {})
    write_whole(path, write)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes records that share their keys as a csv that `read_table` accepts.

    Raises:
      ValueError: if the file exists, and the run has not written it.
    """
    text = records.csv_text(rows)
    _note(path, {"rows": len(rows), "sha256": hashlib.sha256(text).hexdigest()})
    write_whole(path, lambda partial: partial.write_bytes(text))


def read_table(path: Path, columns: Mapping[str, Callable[[str], Any]]) -> list[dict]:
    """Records that `write_table` wrote, or none if the file does not exist.

    Each column has a type; an empty cell stays "".

    Raises:
      ValueError: if the file is not, byte for byte, as the run has left it.
    """
    if not path.exists():
        return []
    text, known = path.read_bytes(), _record(path.parent)["written"].get(path.name, {})
    digest = hashlib.sha256(text).hexdigest()
    if digest not in (known.get("sha256"), known.get("before")):
        raise ValueError(
            f"{path} is not as the run has left it, with {known.get('rows', 0)} rows: "
            f"it is damaged or was changed; {AGAIN}"
        )
    header, *lines = records.csv_lines(text)
    if header != list(columns):
        raise ValueError(
            f"{path} has columns {', '.join(header)}, this run writes "
            f"{', '.join(columns)}; choose another --workdir"
        )
    return [
        {
            name: kind(cell) if cell else ""
            for (name, kind), cell in zip(columns.items(), line, strict=True)
        }
        for line in lines
    ]


def _note(path: Path, about: dict[str, Any]) -> None:
    """Records a file before it is written.

    A run that is killed in between still has the earlier file, whose SHA-256 is
    recorded under `before`.
    """
    record = _record(path.parent)
    known = record["written"].get(path.name)
    if known is None and path.exists():
        raise ValueError(
            f"{path} was not written by this run; move it, or choose another --workdir"
        )
    if known and "sha256" in about and path.exists():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest in (known.get("sha256"), known.get("before")):
            about = about | {"before": digest}
    if about != known:
        record["written"][path.name] = about
        _write_json(path.parent / RECORD, record)


def _record(workdir: Path) -> dict[str, dict[str, Any]]:
    """The record of a run, empty if the file does not exist."""
    path = workdir / RECORD
    record = _json(path) if path.exists() else {"read": {}, "written": {}}
    for key in ("read", "written"):
        if not isinstance(record.get(key), dict):
            raise ValueError(f"{path} is damaged: {key!r} must hold an object; {AGAIN}")
    for name, about in record["written"].items():
        if not isinstance(about, dict):
            raise ValueError(
                f"{path} is damaged: {name!r} must hold an object; {AGAIN}"
            )
    return record


def _held(workdir: Path) -> Iterator[str]:
    """Names of files, and of directories with files; hidden names are left out.

    Within directories, files that a run writes before its first result do not count.
    """
    for path in workdir.iterdir():
        if path.name.startswith("."):
            continue
        begun = (CONFIG, RECORD, LOCK)
        if not path.is_dir() or any(
            not file.is_dir() and file.name not in begun for file in path.rglob("*")
        ):
            yield path.name


def _hold(workdir: Path, lock: Any) -> None:
    """Locks a directory until the file is closed, or the process ends."""
    if fcntl is None:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"workdir {workdir} is in use by another run; wait until it has ended, or "
            "choose another --workdir"
        ) from None
    except OSError as error:
        warnings.warn(
            f"workdir {workdir} cannot be locked ({error.strerror}): let no other run "
            "use it",
            stacklevel=4,
        )


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        tree = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged, it is no JSON; {AGAIN}") from None
    if not isinstance(tree, dict):
        raise ValueError(
            f"{path} is damaged: it must hold an object, got {type(tree).__name__}; "
            f"{AGAIN}"
        )
    return tree


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    text = json.dumps(tree, indent=2).encode()
    write_whole(path, lambda partial: partial.write_bytes(text))


def _plain(config: ConfigDict) -> dict[str, Any]:
    """A config as JSON gives it back."""
    return json.loads(config.to_json_best_effort())


def _in_words(entry: Any) -> str:
    """An entry of `read` in words."""
    if isinstance(entry, dict) and entry.keys() == {"shape", "sha256"}:
        return f"shape {tuple(entry['shape'])} and SHA-256 {entry['sha256'][:12]}..."
    return str(entry)


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a tree by their full key, such as `data.name`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
