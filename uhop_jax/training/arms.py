"""The arms of a study: a separation, with or without U-Hop, and the controls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx

from uhop_jax import records
from uhop_jax._checks import check_choice
from uhop_jax.layers import Association, LearnedAlpha, LinearFeatures, ResidualFeatures
from uhop_jax.plotting import Panel, Style
from uhop_jax.separation import Entmax, Separation, separation_from_name

RETRIEVAL = ("beta", "steps", "dropout")  # keys of the association in configs


class Arm(NamedTuple):
    """One arm of a study.

    Attributes:
      separation: of every Hopfield layer; `learned` is entmax with an alpha that each
        layer learns.
      kernel: whether layers have a kernel.
      schedule: of Stage I.
      by_task: whether the task moves kernels.
      start: of the kernel; "" is the start that the config names.
      reference: layers as the authors' code has them under U-Hop: direct values, a
        kernel with a bias and a random start, a class token among the separated states.
      matched: no kernel, but tokens large enough for at least as many parameters as
        the U-Hop arm has.
      loss: of Stage I; "" is the loss that the config names.
      residual: whether the kernel is a residual MLP in place of a linear map.
    """

    separation: str
    kernel: bool = False
    schedule: str = "none"
    by_task: bool = False
    start: str = ""
    reference: bool = False
    matched: bool = False
    loss: str = ""
    residual: bool = False


def _arms() -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    bases = {"MHM": "softmax", "Sparse MHM": "sparsemax", "entmax": "entmax"}
    bases["GSH"] = "learned"  # generalised sparse Hopfield, of STanHop-Net
    same: dict[str, Any] = {"kernel": True, "by_task": True, "start": "uniform"}
    same["reference"] = True
    for name, separation in bases.items():
        arms |= {
            name: Arm(separation),
            f"{name} + U-Hop": Arm(separation, True, "bilevel"),
            f"{name} + U-Hop, warm-up": Arm(separation, True, "warmup"),
            f"{name} + U-Hop, then task": Arm(separation, True, "bilevel", True),
            f"{name} + U-Hop, reference": Arm(separation, schedule="reference", **same),
            f"{name} + U-Hop, reference, no Stage I": Arm(separation, **same),
            f"{name} + untrained kernel": Arm(separation, True, start="random"),
            f"{name} + kernel by task": Arm(separation, True, by_task=True),
            f"{name}, matched size": Arm(separation, matched=True),
            f"{name} + U-Hop, deep loss": Arm(separation, True, "bilevel", loss="deep"),
            f"{name} + contrastive": Arm(
                separation, True, "bilevel", loss="contrastive"
            ),
            f"{name} + contrastive, then task": Arm(
                separation, True, "bilevel", True, loss="contrastive"
            ),
            f"{name} + residual kernel by task": Arm(
                separation, True, by_task=True, residual=True
            ),
            f"{name} + residual contrastive, then task": Arm(
                separation, True, "bilevel", True, loss="contrastive", residual=True
            ),
        }
    return arms


ARMS: Mapping[str, Arm] = _arms()


def check_own_arms(names: Iterable[str], what: str = "this task") -> None:
    """Refuses arms of the authors' image code, for `what` is no task of images."""
    for name in names:
        if arm_of(name).reference:
            raise ValueError(
                f"arm {name!r} is of the authors' image code; they have released none "
                f"for {what}"
            )


def arm_of(name: str) -> Arm:
    """The arm of that name.

    Raises:
      ValueError: if no arm has the name; the message lists the names.
    """
    check_choice("arm", name, ARMS)
    return ARMS[name]


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Styles of curves: an arm looks alike in all figures; with a memory it is lighter.

    A variant has the same colour under every separation. A label of no arm is grey.
    """
    # Colors of the variants, in the order of `_arms`.
    colors = (0, 6, 7, 8, 3, 9, 4, 2, 1, 6, 8, 3, 4, 9)
    looks = {}
    for place, label in enumerate(labels):
        arm = label if label in ARMS else label.rpartition(", ")[0]
        if arm not in ARMS:
            looks[label] = Style(5, place)
            continue
        number = list(ARMS).index(arm)
        shade, more = (1.0, 0) if label == arm else (0.6, 5)
        looks[label] = Style(colors[number % len(colors)], number + more, shade)
    return looks


def of_task(
    histories: Iterable[tuple[str, Sequence[Mapping[str, Any]]]],
) -> list[dict[str, Any]]:
    """Records of the task among the records of several runs, each with its `arm`."""
    return [
        dict(row, arm=arm)
        for arm, history in histories
        for row in history
        if row["phase"] == "task"
    ]


def panel(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    xlabel: str,
    ylabel: str,
    **options: Any,
) -> Panel:
    """A panel of `y` against `x`, with a curve for each arm; see `plotting.Panel`."""
    curves = records.curves(rows, x, y, "arm")
    return Panel(title, curves, xlabel, ylabel, styles=styles(curves), **options)


def features_of(arm: Arm, size: int, **options: Any) -> nnx.Module:
    """The kernel of an arm, with the options of `LinearFeatures`."""
    if arm.residual:
        options.pop("start")
        return ResidualFeatures(size, **options)
    return LinearFeatures(size, **options, use_bias=arm.reference)


def separation_of(arm: Arm, alpha: float) -> Separation:
    """The separation of an arm, at the start if it is learned."""
    if arm.separation == "learned":
        return Entmax(alpha)
    parameters = {"alpha": alpha} if arm.separation == "entmax" else {}
    return separation_from_name(arm.separation, **parameters)


def association_of(
    arm: Arm, alpha: float, *, beta: float, **options: Any
) -> Callable[[], Association]:
    """A function that makes the association of each layer of an arm.

    `alpha` is the start if it is learned; a `beta` of 0 is the default of the layer.
    """
    separation = separation_of(arm, alpha)

    def association() -> Association:
        learned = arm.separation == "learned"
        part = LearnedAlpha(separation) if learned else separation
        return Association(part, beta=beta or None, **options)

    return association
