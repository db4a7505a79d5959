"""Stratified parts of labelled examples: folds, and validation within them."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from uhop_jax._checks import check_count


class Fold(NamedTuple):
    """Numbers of the bags of each part."""

    train: Int[np.ndarray, " train"]
    validation: Int[np.ndarray, " validation"]
    test: Int[np.ndarray, " test"]


def folds(
    labels: Int[np.ndarray, " bags"], number: int, *, held_out: float, seed: int
) -> list[Fold]:
    """Stratified folds: each bag is tested once, by a model that has not seen it.

    Args:
      labels: 0 or 1 for each bag.
      number: of folds.
      held_out: share of the training bags of a fold that validate, of each label.
      seed: of the draws.

    Raises:
      ValueError: if there is one label, or a fold or its validation would lack a label.
    """
    from sklearn.model_selection import StratifiedKFold

    counts = label_counts(labels)
    check_count("folds", number, 0)
    if min(counts) < 2:
        raise ValueError(
            f"folds need at least 2 bags of each label, got {counts[0]} of label 0 and "
            f"{counts[1]} of label 1"
        )
    if number < 2 or number > min(counts):
        raise ValueError(
            f"folds must be from 2 to {min(counts)}, the number of bags of the rarer "
            f"label, so that every fold has both labels, got {number}"
        )
    splits = StratifiedKFold(number, shuffle=True, random_state=seed)
    parts = splits.split(labels, labels)
    return [
        Fold(*validated(train, labels, held_out, seed + n), test)
        for n, (train, test) in enumerate(parts)
    ]


def label_counts(labels: Int[np.ndarray, " bags"]) -> tuple[int, int]:
    """Number of bags of each label.

    Raises:
      ValueError: if a label has no bag.
    """
    positive = int(labels.sum())
    counts = len(labels) - positive, positive
    if 0 in counts:
        raise ValueError(
            f"all {len(labels)} bags have the label {int(counts[0] == 0)}: bags of "
            "both labels are needed"
        )
    return counts


def validated(
    bags: Int[np.ndarray, " bags"],
    labels: Int[np.ndarray, " all_bags"],
    held_out: float,
    seed: int,
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " validation"]]:
    """Parts some bags into bags to train on and bags to validate by.

    The labels are those of all bags. The share held out of the bags of each label
    validates, at least one bag.

    Raises:
      ValueError: if the share is not within (0, 1), or a label has fewer than 2 bags.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"the share held out must be within (0, 1), got {held_out}")
    draws, chosen = np.random.default_rng(seed), []
    for label in (0, 1):
        own = bags[labels[bags] == label]
        if len(own) < 2:
            raise ValueError(
                f"training bags must hold at least 2 of label {label}, one to train on "
                f"and one to validate by, got {len(own)}"
            )
        number = min(max(1, round(held_out * len(own))), len(own) - 1)
        chosen.append(draws.permutation(own)[:number])
    validation = np.sort(np.concatenate(chosen))
    return np.setdiff1d(bags, validation), validation
