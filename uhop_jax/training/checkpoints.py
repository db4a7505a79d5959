"""Checkpoints of a run: asynchronous, the latest and a chosen one kept, damage proven.

A checkpoint that is whole on disk is sealed: a file within it holds the SHA-256 of its
other files. One that is not as it was sealed is damaged. It is moved to `damaged/`
beside the others, and the run goes back to the one before. Every other error of reading
stops the run, and leaves all checkpoints where they are.
"""

import hashlib
import logging
import os
import re
import sys
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

KEPT = 2  # of the latest; the one before is there if the last is damaged
SEAL, DAMAGED = ".sha256", "damaged"


class Checkpoints:
    """The checkpoints of a directory.

    Args:
      directory: where they lie.
      read_only: leaves the directory as it is, for a run that others may be writing.

    Raises:
      ValueError: if the directory holds something else under the name of a checkpoint.
      OSError: if a checkpoint cannot be read.
    """

    def __init__(self, directory: Path, *, read_only: bool = False):
        # Orbax tells every step, and of errors more than is raised here.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.directory, self._read_only = directory, read_only
        self._told = sys.unraisablehook
        if not read_only:
            sys.unraisablehook = self._tell
        self._chosen = _Chosen()
        if not read_only:
            _set_damaged_aside(directory)
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._chosen,
                enable_async_checkpointing=True,
                read_only=read_only,
            ),
        )

    def save(self, step: int, state: Any, keep: int | None) -> None:
        """Writes in the background; a checkpoint of that step is left as it is.

        Args:
          step: number of the step.
          state: what is saved.
          keep: step of the checkpoint that is kept beside the latest.

        Raises:
          OSError: if this checkpoint or the one before cannot be written.
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
        """The state of a step.

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
                "back to the one before"
            )
        try:
            stored = self._manager.item_metadata(step)
            if stored is not None:
                _check_shapes(path, stored, like)
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except _OtherModel as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # of many libraries
            raise ValueError(
                f"checkpoint {path} cannot be read ({_reason(error)}): give it back "
                "what it lacks, or move it away to go on from the one before"
            ) from error

    def wait(self) -> None:
        """Until what was saved is on disk, and sealed.

        Raises:
          OSError: if it cannot be written.
        """
        with _writing(self.directory):
            self._manager.wait_until_finished()
            if jax.process_index() == 0 and not self._read_only:
                for step in self._manager.all_steps():
                    _seal(self.directory / str(step))

    def close(self) -> None:
        """Waits and lets go of the directory.

        Raises:
          OSError: if what was saved last cannot be written.
        """
        try:
            self.wait()
            if sys.unraisablehook == self._tell:
                sys.unraisablehook = self._told
        finally:
            with _writing(self.directory):
                self._manager.close()

    def _tell(self, unraisable: Any) -> None:
        """Leaves out what TensorStore's threads say after a write that has failed.

        The failure itself is raised; they go on to report to a loop that has ended.
        """
        if str(unraisable.exc_value) != "Event loop is closed":
            self._told(unraisable)


class _Chosen(managers.PreservationPolicy):
    """Keeps the latest, and a chosen step."""

    step: int | None = None

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> list[bool]:
        del context
        late = {one.step for one in checkpoints[-KEPT:]}
        return [one.step in late or one.step == self.step for one in checkpoints]


def _seal(path: Path) -> None:
    seal = path / SEAL
    if not seal.exists():
        write_whole(seal, lambda partial: partial.write_text(_digest(path), "utf-8"))


def _is_damaged(path: Path) -> bool:
    """Whether a checkpoint is not as it was sealed; one without a seal is not."""
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
                    f"the one before; it was moved to {place}",
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
    """Turns errors of writing, of whatever library, into one sentence."""
    try:
        yield
    except Exception as error:
        raise OSError(
            f"checkpoints in {directory} cannot be written ({_reason(error)}); those "
            "before are kept"
        ) from error


def _reason(error: Exception) -> str:
    """What the system says, if an error is of the system."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if found:
        return os.strerror(int(found[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


class _OtherModel(Exception):
    pass


def _check_shapes(path: Path, stored: Any, like: Any) -> None:
    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {_name(at): tuple(leaf.shape) for at, leaf in leaves}

    theirs, ours = shapes(getattr(stored, "tree", stored)), shapes(like)
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise _OtherModel(
                f"checkpoint {path} is of another model: {name} has shape "
                f"{theirs.get(name, 'none')} there and {ours.get(name, 'none')} here"
            )


def _name(path: tuple) -> str:
    parts = (getattr(p, "key", getattr(p, "idx", getattr(p, "name", p))) for p in path)
    return ".".join(map(str, parts))
