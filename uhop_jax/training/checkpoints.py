"""Checkpoints of a run: asynchronous, the latest and the best kept, damage survived."""

import json
import logging
import math
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

KEPT = 2  # of the latest; the one before is there if the last is damaged


class Checkpoints:
    """The checkpoints of a directory.

    Args:
      directory: where they lie.
      metric: name of the metric that tells the best; None keeps the latest alone.
      least: whether the best is the least.
    """

    def __init__(
        self, directory: Path, *, metric: str | None = None, least: bool = False
    ):
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells every step
        policy: Any = managers.LatestN(KEPT)
        judged: dict[str, Any] = {}
        if metric is not None:
            worst = math.inf if least else -math.inf

            def value(metrics: Mapping[str, float]) -> float:
                found = metrics[metric]
                return found if math.isfinite(found) else worst

            best = managers.BestN(
                get_metric_fn=value,
                reverse=least,
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            policy = managers.AnyPreservationPolicy([policy, best])
            # Without these, metrics are not written, and the best is the latest.
            judged = {"best_fn": value, "best_mode": "min" if least else "max"}
        self.directory, self.metric, self.least = directory, metric, least
        _remove_unreadable(directory)
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy, enable_async_checkpointing=True, **judged
            ),
        )

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None) -> None:
        """Writes in the background; a checkpoint of that step is left as it is."""
        if step not in self._manager.all_steps():
            self._manager.save(
                step,
                args=ocp.args.StandardSave(state),
                metrics=dict(metrics) if metrics else None,
            )

    def latest(self, like: Any) -> tuple[int, Any] | None:
        """Step and state of the newest checkpoint that can be read; None if none can.

        A damaged one is removed, with a warning.

        Raises:
          ValueError: if the newest is of another model.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                return step, self._restore(step, like)
            except _OtherModel as error:
                raise ValueError(str(error)) from None
            except Exception as error:  # damage shows in many ways
                reason = str(error).strip().splitlines()
                warnings.warn(
                    f"checkpoint {step} in {self.directory} is damaged, going back to "
                    f"the one before: {reason[0][:200] if reason else error!r}",
                    stacklevel=2,
                )
                self._manager.delete(step)
        return None

    def best(self, like: Any) -> tuple[int, Any]:
        """Step and state of the best checkpoint, the latest if none has metrics.

        Raises:
          ValueError: if there is none, or it is of another model or damaged.
        """
        step = self._manager.best_step() if self.metric else None
        if step is None:
            step = self._manager.latest_step()
        if step is None:
            raise ValueError(f"there is no checkpoint in {self.directory}")
        try:
            return step, self._restore(step, like)
        except _OtherModel as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            raise ValueError(
                f"checkpoint {step} in {self.directory} cannot be read: {error}"
            ) from error

    def wait(self) -> None:
        """Until what was saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of the directory."""
        self._manager.close()

    def _restore(self, step: int, like: Any) -> Any:
        stored = self._manager.item_metadata(step)
        if stored is not None:
            _check_shapes(self.directory / str(step), stored, like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(like))


def _remove_unreadable(directory: Path) -> None:
    """Checkpoints whose metrics are damaged, at which a manager would stop."""
    for path in sorted(directory.glob("*/metrics/metrics")):
        try:
            json.loads(path.read_text("utf-8"))
        except ValueError:
            step = path.parent.parent
            warnings.warn(
                f"checkpoint {step.name} in {directory} is damaged, going back to the "
                "one before",
                stacklevel=3,
            )
            shutil.rmtree(step)


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
