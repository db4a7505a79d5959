"""Associative recall: sequences, model, loss and files of a config."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int
from ml_collections import ConfigDict

from uhop_jax import plotting, records
from uhop_jax._checks import check_count, check_named
from uhop_jax.models import SequenceModel
from uhop_jax.training.application import Application, Rows, model_of
from uhop_jax.training.arms import (
    RETRIEVAL,
    arm_of,
    association_of,
    check_own_arms,
    of_task,
    panel,
)
from uhop_jax.training.cells import RecallCell
from uhop_jax.training.exporting import FILE, write_export
from uhop_jax.training.steps import Trainer
from uhop_jax.training.task import SEPARATIONS, Batch, Split, Task, TrainState

SCORES = ("test_accuracy", "test_loss")
DRAW = 20_231  # seed of all sequences


class Recall(Application):
    """Studies of `configs/recall.py`: arms and numbers of pairs."""

    free = (*Application.free, "pairs")

    def __init__(self, config: ConfigDict, workdir: Path = Path()):
        super().__init__(config, workdir)
        check_count("data.vocabulary", config.data.vocabulary, 1)
        check_count("data.test_sequences", config.data.test_sequences, 1)
        check_count("train.sequences", config.train.sequences, 1)
        for pairs in config.pairs:
            check_count("pairs", pairs, 1, config.data.vocabulary)
        check_own_arms(config.arms)

    @property
    def title(self) -> str:
        number = len(self.config.seeds)
        return f"associative recall, {number} seed{'s' * (number > 1)}"

    def cells(self) -> list[RecallCell]:
        check_named(arms=self.config.arms, pairs=self.config.pairs)
        both = itertools.product(self.config.arms, map(int, self.config.pairs))
        return [RecallCell(*x) for x in both]

    def task(self, cell: Any) -> Task:
        keys, pairs = int(self.config.data.vocabulary), cell.pairs

        def take(arrays: Mapping[str, Any], index: Array) -> Batch:
            return jax.vmap(lambda n: sequence(n, pairs, keys))(arrays["number"][index])

        def split(first: int, size: int) -> Split:
            number = np.arange(first, first + size, dtype=np.int32)
            return Split({"number": number}, size, take)

        def score(model: Any, batch: Batch, key: Array | None) -> dict[str, Array]:
            asked = model(batch["tokens"], key=key)[..., pairs:, :]
            logits = asked.astype(jnp.float32)
            values = batch["values"]
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, values)
            hits = (logits.argmax(-1) == values).astype(jnp.float32)
            return {"loss": loss.mean(-1), "accuracy": hits.mean(-1)}

        def fresh(batch: Batch, key: Array) -> Batch:
            """Sequences drawn anew; few of 2^30 numbers come twice."""
            number = jax.random.randint(key, batch["values"].shape[:1], 0, 2**30)
            return jax.vmap(lambda n: sequence(n, pairs, keys))(-1 - number)

        return Task(
            sequence_model(self.config, cell),
            score,
            lambda batch: (batch["tokens"],),
            split(0, int(self.config.train.sequences)),
            split(2**30, int(self.config.data.test_sequences)),
            augment=fresh,
        )

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        options = self.config.train
        rate = optax.cosine_decay_schedule(
            options.learning_rate, steps * options.epochs
        )
        return optax.adam(rate)

    def summary(
        self, cell: Any, trainer: Trainer, history: Rows, directory: Path
    ) -> Rows:
        del directory
        epochs = [row for row in history if row["phase"] == "task"]
        rows = []
        for seed in trainer.seeds:
            last = [row for row in epochs if row["seed"] == seed][-1]
            row = {"data": "recall", **cell._asdict(), "seed": seed}
            row |= {"parameters": trainer.parameters}
            rows.append(row | {name: last[name] for name in (*SCORES, *SEPARATIONS)})
        return rows

    def report(self, rows: Rows) -> str:
        lines = [["pairs", "arm", "parameters", "seeds", "accuracy %"]]
        for (pairs, arm), group in records.grouped(rows, ("pairs", "arm")).items():
            score = records.mean_and_interval(
                [100 * row["test_accuracy"] for row in group]
            )
            about = [str(pairs), arm, f"{group[0]['parameters']:,}", str(len(group))]
            lines.append([*about, score])
        return f"{records.aligned(lines)}\n± half of the 95 % interval over seeds"

    def figures(
        self, histories: Mapping[Any, Rows], rows: Rows
    ) -> Mapping[str, Sequence[plotting.Panel]]:
        """Accuracy by epoch, for each number of pairs."""
        del rows
        parts = []
        for pairs in self.config.pairs:
            epochs = of_task(
                (cell.arm, history)
                for cell, history in histories.items()
                if cell.pairs == pairs
            )
            about = (f"{pairs} pairs", epochs, "epoch", "test_accuracy")
            parts.append(panel(*about, "epoch", "test accuracy"))
        return {"figure.png": parts}

    def predict(
        self, cell: Any, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        raise ValueError("predict: sequences of recall are generated, no file is read")

    def export(
        self, cell: Any, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        """Writes a function from sequences of tokens to logits."""
        model = trainer.model_on_host(state)
        shape = (2 * cell.pairs, 2)
        return write_export(directory / FILE, model, shape, jnp.int32)


def sequence(
    number: Int[Array, ""], pairs: int, keys: int
) -> dict[str, Int[Array, "..."]]:
    """The positions `(2 pairs, 2)` of a sequence, and the `values (pairs,)` asked.

    A position has two tokens: a key, from 0 on, and a value, from `keys` on. Where the
    value is asked the second token is `2 keys`.
    """
    key = jax.random.fold_in(jax.random.key(DRAW), number)
    of_keys, of_values, of_order = jax.random.split(key, 3)
    own = jax.random.permutation(of_keys, keys)[:pairs].astype(jnp.int32)
    values = keys + jax.random.randint(of_values, (pairs,), 0, keys, jnp.int32)
    order = jax.random.permutation(of_order, pairs)
    stored = jnp.stack([own, values], axis=-1)
    asked = jnp.stack([own[order], jnp.full_like(own, 2 * keys)], axis=-1)
    return {"tokens": jnp.concatenate([stored, asked]), "values": values[order]}


def sequence_model(
    config: ConfigDict, cell: RecallCell
) -> Callable[[nnx.Rngs], nnx.Module]:
    """A function that builds the model of a cell.

    Raises:
      ValueError: if a value is out of range.
    """
    arm, options = arm_of(cell.arm), dict(config.model)
    dtype = options["dtype"] = jnp.dtype(options["dtype"])
    retrieval = {name: options.pop(name) for name in ("alpha", *RETRIEVAL)}
    association = association_of(arm, **retrieval)
    start, size = options.pop("kernel_start"), options.pop("size")
    tokens, positions = 2 * int(config.data.vocabulary) + 1, 2 * cell.pairs
    build = functools.partial(
        SequenceModel, tokens, positions, association=association, **options
    )
    return model_of(arm, build, size, options["num_heads"], start=start, dtype=dtype)
