"""Checkpoints of a run: written in the background, sealed, and checked for damage.

A checkpoint that is whole on disk is sealed: a file within it holds the SHA-256 of its
other files. A checkpoint that differs from its seal is damaged. It is moved to
`damaged/` beside the directory, and the run goes back to the checkpoint before. Any
further error of reading stops the run, and leaves all checkpoints where they are.
"""

import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

from uhop_jax.storage import write_whole

KEPT = 2  # latest checkpoints; the second serves if the first is damaged
SEAL, DAMAGED = ".sha256", "damaged"


class Checkpoints:
    """The checkpoints of a directory.

    Args:
      directory: folder of the checkpoints.
      read_only: leaves the directory as it is, for a run that others may be writing.

    Raises:
      ValueError: if an entry is named like a checkpoint, and is none.
      OSError: if a checkpoint cannot be read.
    """

    def __init__(self, directory: Path, *, read_only: bool = False):
        self.directory, self._read_only = directory, read_only
        self._chosen = _Chosen()
        if not read_only:
            _set_damaged_aside(directory)
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._chosen,
                enable_async_checkpointing=True,
                create=not read_only,  # orbax's `read_only` warns of itself
            ),
        )

    def save(self, step: int, state: Any, keep: int | None) -> None:
        """Writes in the background; an older checkpoint of the step is left as it is.

        Beside the latest checkpoints, the checkpoint of the step `keep` is kept.

        Raises:
          OSError: if this checkpoint or the checkpoint before cannot be written.
        """
        self._chosen.step = keep
        if step in self._manager.all_steps():
            return
        self.wait()
        with _writing(self.directory):
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def latest(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step, with the structure, shapes and dtypes of `like`.

        Raises:
          ValueError: if there is no such checkpoint, it is of another model, is
            damaged, or cannot be read.
        """
        path = self.directory / str(step)
        if step not in self._manager.all_steps():
            raise ValueError(f"there is no checkpoint {path}; choose another --workdir")
        if _is_damaged(path):
            raise ValueError(
                f"checkpoint {path} is damaged: the command that has trained it goes "
                "back to the checkpoint before"
            )
        try:
            stored = self._manager.item_metadata(step)
            if stored is not None:
                _check_shapes(path, stored, like)
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except _OtherModel as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # raised by many libraries
            raise ValueError(
                f"checkpoint {path} cannot be read ({_reason(error)}): give it back "
                "what it lacks, or move it away to go on from the checkpoint before"
            ) from error

    def wait(self) -> None:
        """Waits until all checkpoints are on disk, and seals them.

        Raises:
          OSError: if a checkpoint cannot be written.
        """
        with _writing(self.directory):
            self._manager.wait_until_finished()
            if jax.process_index() == 0 and not self._read_only:
                for step in self._manager.all_steps():
                    _seal(self.directory / str(step))

    def close(self) -> None:
        """Waits and lets go of the directory.

        Raises:
          OSError: if the last checkpoint cannot be written.
        """
        try:
            self.wait()
        finally:
            with _writing(self.directory):
                self._manager.close()


class _Chosen(managers.PreservationPolicy):
    """Keeps the latest checkpoints, and the checkpoint of a chosen step."""

    step: int | None = None

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> list[bool]:
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        return [step in steps[-KEPT:] or step == self.step for step in steps]


def _seal(path: Path) -> None:
    """Seals a checkpoint, unless it is sealed already."""
    seal = path / SEAL
    if not seal.exists():
        write_whole(seal, lambda partial: partial.write_text(_digest(path), "utf-8"))


def _is_damaged(path: Path) -> bool:
    """Whether a checkpoint differs from its seal; never true without a seal."""
    seal = path / SEAL
    return seal.exists() and seal.read_text("utf-8", "replace") != _digest(path)


def _digest(path: Path) -> str:
    """SHA-256 of all files of a checkpoint, with their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != SEAL:
            digest.update(f"{file.relative_to(path)}\n{file.stat().st_size}\n".encode())
            with file.open("rb") as raw:
                digest.update(hashlib.file_digest(raw, "sha256").digest())
    return digest.hexdigest()


def _set_damaged_aside(directory: Path) -> None:
    """Moves damaged checkpoints where no run looks for them, with a warning."""
    if jax.process_index() == 0:
        for path in sorted(directory.glob("*")):
            if not path.name.isdecimal():
                continue
            if _is_damaged(path):
                place = directory.parent / DAMAGED / f"checkpoint_{path.name}"
                place.parent.mkdir(exist_ok=True)
                while place.exists():
                    place = place.with_name(f"{place.name}_again")
                os.rename(path, place)
                warnings.warn(
                    f"checkpoint {path.name} in {directory} is damaged, going back to "
                    f"the checkpoint before; it was moved to {place}",
                    stacklevel=3,
                )
            elif not (path / "_CHECKPOINT_METADATA").exists():
                raise ValueError(
                    f"{path} is no checkpoint that this run has written; move it, or "
                    "choose another --workdir"
                )
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"checkpoints {directory}")


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turns errors of writing, from any library, into one sentence."""
    try:
        yield
    except Exception as error:
        raise OSError(
            f"checkpoints in {directory} cannot be written ({_reason(error)}); "
            "earlier checkpoints are kept"
        ) from error


def _reason(error: Exception) -> str:
    """The message of the system for its errors, else the message of the error."""
    match = re.search(r"os_error_code='(\d+)'", str(error))
    if match:
        return os.strerror(int(match[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


class _OtherModel(Exception):
    """A checkpoint is of another model."""


def _check_shapes(path: Path, stored: Any, like: Any) -> None:
    """Refuses a checkpoint whose arrays have other names or shapes than `like`."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {_name(at): tuple(leaf.shape) for at, leaf in leaves}

    saved, expected = shapes(getattr(stored, "tree", stored)), shapes(like)
    for name in sorted(saved.keys() | expected.keys()):
        if saved.get(name) != expected.get(name):
            raise _OtherModel(
                f"checkpoint {path} is of another model: {name} has shape "
                f"{saved.get(name, 'none')} there and {expected.get(name, 'none')} here"
            )


def _name(path: tuple) -> str:
    """The name of a leaf, its keys joined by dots."""
    parts = (getattr(p, "key", getattr(p, "idx", getattr(p, "name", p))) for p in path)
    return ".".join(map(str, parts))
