"""Classification of bags: data, model, loss and files of a config."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from uhop_jax import data, plotting
from uhop_jax._checks import check_at_least, check_count, check_named, check_seed
from uhop_jax.training import bag_report
from uhop_jax.training.application import Application, Rows
from uhop_jax.training.arms import check_own_arms
from uhop_jax.training.bag_data import (
    Source,
    Stored,
    padded,
    padding,
    sampling,
    source_of,
)
from uhop_jax.training.bag_model import bag_model
from uhop_jax.training.cells import BagCell
from uhop_jax.training.exporting import FILE, write_export
from uhop_jax.training.judging import best_epoch
from uhop_jax.training.run import best_state
from uhop_jax.training.steps import Trainer
from uhop_jax.training.task import SEPARATIONS, Batch, Split, Take, Task, TrainState
from uhop_jax.workdir import write_file, write_table


class BagClassification(Application):
    """Studies of `configs/bags.py`: arms, candidates and folds.

    Each fold of a model is a run, whose best epoch is chosen by a part of the training
    bags of that fold. The same part chooses between several values of beta and dropout,
    in each fold anew.
    """

    free = (*Application.free, "model.beta", "model.dropout")

    def __init__(self, config: ConfigDict, workdir: Path = Path()):
        super().__init__(config, workdir)
        check_count("folds", config.folds, 0)
        check_seed("data.draw", config.data.draw)
        check_at_least("train.weight_decay", config.train.weight_decay, 0)
        check_count("stage_one.instances", config.stage_one.instances, 2)
        check_own_arms(config.arms)
        self._scores: Rows = []
        self._bags: Rows = []
        self._weights: Rows = []
        self._trainers: dict[BagCell, Trainer] = {}

    @functools.cached_property
    def source(self) -> Source:
        """The bags, with the parts of each fold."""
        return source_of(self.config)

    @functools.cached_property
    def read_by_all(self) -> dict[str, Any]:
        return self.source.read()

    @property
    def title(self) -> str:
        name = Path(self.config.data.name).name
        folds = f"{self.config.folds} folds" if self.config.folds else "test bags"
        number = len(self.config.seeds)
        return f"{name}, {folds}, {number} seed{'s' * (number > 1)}"

    def curves_title(self, cell: Any) -> str:
        return f"{Path(self.config.data.name).name}, {cell.title}"

    def cells(self) -> list[BagCell]:
        config, model = self.config, self.config.model
        check_named(arms=config.arms, beta=model.beta, dropout=model.dropout)
        folds = range(1, config.folds + 1) if config.folds else [0]
        betas, rates = map(float, model.beta), map(float, model.dropout)
        return [
            BagCell(*x) for x in itertools.product(config.arms, betas, rates, folds)
        ]

    def check(self) -> None:
        """Loads the bags, and builds each model for the first fold."""
        cells = self.cells()
        for cell in cells:
            if cell.fold == cells[0].fold:
                self.trainer(cell)

    def trainer(self, cell: Any) -> Trainer:
        """The trainer of a cell; folds of equal sizes share the compiled programs."""
        model = cell._replace(fold=0)
        number = len(self.fold(cell).train)
        if (like := self._trainers.get(model)) and like.task.train.size == number:
            return like.on(self.task(cell), like.seeds)
        self._trainers[model] = super().trainer(cell)
        return self._trainers[model]

    def fold(self, cell: BagCell) -> data.Fold:
        """The bags of each part."""
        return self.source.folds[max(cell.fold - 1, 0)]

    def task(self, cell: Any) -> Task:
        fold = self.fold(cell)
        train, validation, test = (self.source.split(part, fold) for part in fold)

        def score(model: Any, batch: Batch, key: Array | None) -> dict[str, Array]:
            logits = model(*inputs(batch), key=key).astype(jnp.float32)
            positive = batch["labels"] == 1
            loss = optax.sigmoid_binary_cross_entropy(
                logits, positive.astype(jnp.float32)
            )
            return {
                "loss": loss,
                "accuracy": ((logits > 0) == positive).astype(jnp.float32),
            }

        build = bag_model(self.config, cell, self.source.features)
        sample = sampling(self.config.stage_one.instances)
        return Task(build, score, inputs, train, test, validation, sample=sample)

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        del steps
        options = self.config.train
        return optax.adamw(options.learning_rate, weight_decay=options.weight_decay)

    def summary(
        self, cell: Any, trainer: Trainer, history: Rows, directory: Path
    ) -> Rows:
        """Scores of each seed; writes which instances carried the decisions."""
        from sklearn.metrics import accuracy_score, roc_auc_score

        epochs = [row for row in history if row["phase"] == "task"]
        best = best_epoch(epochs, "validation_loss", True)
        _, state = best_state(trainer, self.goal(), directory)
        tested = self.fold(cell).test
        judged = explained(trainer, state, trainer.task.test)
        labels, rows = self.source.labels[tested], []
        for seed, logits in zip(trainer.seeds, judged.logits, strict=True):
            own = [row for row in epochs if row["seed"] == seed]
            row = {
                "data": self.config.data.name,
                **cell._asdict(),
                "seed": seed,
                "parameters": trainer.parameters,
                "epochs": len(own),
                "best_epoch": best,
                "validation_loss": own[best - 1]["validation_loss"],
                "test_auc": float(roc_auc_score(labels, logits)),
                "test_accuracy": float(accuracy_score(labels, logits > 0)),
                "marked_first": self._marked_first(tested, judged),
            }
            rows.append(row | {name: own[-1][name] for name in SEPARATIONS})
        self._scores += rows
        self._note(cell, tested, judged)
        return rows

    def _marked_first(
        self, tested: Int[np.ndarray, " n"], judged: "Judged"
    ) -> float | str:
        """Share of positive bags whose largest weight is on a marked instance."""
        first = []
        for n, bag in enumerate(tested):
            marked = self.source.marked(int(bag))
            if marked is not None and self.source.labels[bag]:
                first.append(marked[judged.places[n, 0]])
        return float(np.mean(first)) if first else ""

    def _note(
        self, cell: BagCell, tested: Int[np.ndarray, " n"], judged: "Judged"
    ) -> None:
        """Adds the judged bags of a run to the tables of the study, and writes them."""
        source, fold = self.source, cell._asdict()
        odds = judged.probabilities
        for n, bag in enumerate(tested):
            about = fold | {"bag": source.names[bag], "label": int(source.labels[bag])}
            self._bags += [
                about | {"seed": seed, "probability": float(x[n])}
                for seed, x in zip(self.config.seeds, odds, strict=True)
            ]
            self._weights += bag_report.weight_rows(
                about | {"probability": float(odds[:, n].mean())},
                *judged.largest(n),
                source.marked(int(bag)),
            )
        if jax.process_index() == 0:
            write_table(self.workdir / "bags.csv", self._bags)
            write_table(self.workdir / "attention.csv", self._weights)
            if cell == self.cells()[-1]:
                chosen = bag_report.of_chosen(self._weights, self._scores)
                first = [row for row in chosen if row["arm"] == self.config.arms[0]]
                parts = bag_report.weight_panels(first)
                title = f"{self.title}: weights of test bags, means over seeds"
                write_file(
                    self.workdir / "attention.png",
                    lambda file: plotting.panels(file, parts, title=title, columns=3),
                )

    def report(self, rows: Rows) -> str:
        return bag_report.table(rows)

    def figures(
        self, histories: Mapping[Any, Rows], rows: Rows
    ) -> Mapping[str, Sequence[plotting.Panel]]:
        """Losses by epoch, and the AUC of each fold."""
        return {"figure.png": bag_report.panels(histories, rows)}

    def predict(
        self, cell: Any, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        """Writes `predictions.csv`: the probability of each bag of a csv."""
        source = self.source
        if not isinstance(source, Stored) or source.bags.alike:
            raise ValueError(
                f"predict: {self.config.data.name} is simulated; a model of bags of "
                "numbers is needed, as of --config=configs/bags.py:csv"
            )
        given = data.read_bags(self.config.predict)
        features = source.bags.features
        if given.instances.shape[1] != source.features:
            raise ValueError(
                f"predict: the model takes {source.features} features, "
                f"{self.config.predict} has {given.instances.shape[1]}"
            )
        if features and given.features and features != given.features:
            odd = next(
                x for x in zip(features, given.features, strict=True) if x[0] != x[1]
            )
            raise ValueError(
                f"predict: the model has the feature {odd[0]!r} where "
                f"{self.config.predict} has {odd[1]!r}"
            )
        every = np.arange(len(given.sizes))
        scaled = source.scaled(given, self.fold(cell))
        split = padded(given, every, scaled, padding(int(given.sizes.max())))
        judged = explained(trainer, state, split)
        odds = judged.probabilities.mean(0)
        path = directory / "predictions.csv"
        rows = [
            {"bag": name, "probability": float(x)}
            for name, x in zip(given.names, odds, strict=True)
        ]
        write_table(path, rows)
        return f"{len(rows)} bags judged, written to {path}"

    def export(
        self, cell: Any, trainer: Trainer, state: TrainState, directory: Path
    ) -> str:
        """Writes a function from the instances of one bag to its probability.

        The probability is the mean over the models of all seeds, as in `predict`.
        """
        source = self.source
        if not isinstance(source, Stored):
            raise ValueError(
                f"export: {self.config.data.name} is simulated; a model of bags that "
                "are stored is needed, as of --config=configs/bags.py:csv"
            )
        mean, deviation = (x.astype(np.float32) for x in source.scaler(self.fold(cell)))
        seeds = range(len(trainer.seeds))
        models = [trainer.model_on_host(state, seed) for seed in seeds]

        def probability(instances: Array) -> Array:
            bag = ((instances - mean) / deviation)[None]
            return jax.nn.sigmoid(jnp.stack([model(bag)[0] for model in models])).mean()

        path, shape = directory / FILE, (source.features,)
        text = write_export(path, probability, shape, jnp.float32, axis="instances")
        return text + f"; the mean over {len(models)} seeds" * (len(models) > 1)


def inputs(batch: Batch) -> tuple:
    """The arguments of the model: instances, and their mask if there is padding."""
    return tuple(batch[name] for name in ("instances", "mask") if name in batch)


class Judged(NamedTuple):
    """Bags judged by the models of all seeds.

    Attributes:
      logits: of each seed and bag.
      weights: the largest weights of each bag, means over seeds.
      places: of these weights among the instances of the bag.
    """

    logits: Float[np.ndarray, "seeds n"]
    weights: Float[np.ndarray, "n k"]
    places: Int[np.ndarray, "n k"]

    @property
    def probabilities(self) -> Float[np.ndarray, "seeds n"]:
        """The probability of a positive label, of each seed and bag."""
        from scipy.special import expit

        return expit(self.logits)

    def largest(self, bag: int) -> tuple[list[int], list[float]]:
        """Places and weights of a bag; padding has none."""
        valid = self.places[bag] >= 0
        return self.places[bag][valid].tolist(), self.weights[bag][valid].tolist()


def explained(trainer: Trainer, state: TrainState, split: Split) -> Judged:
    """Judges all bags of a split, with the weights over their instances."""
    arrays, size = trainer.place(dict(split.arrays)), trainer.batch_size
    parts = []
    for first in range(0, split.size, size):
        index = jnp.minimum(first + jnp.arange(size), split.size - 1)
        logits, *rest = _judge(trainer.graphdef, split.take, state, arrays, index)
        parts.append([np.asarray(logits).T, *map(np.asarray, rest)])
    logits, weights, places = (
        np.concatenate(x)[: split.size] for x in zip(*parts, strict=True)
    )
    return Judged(logits.T.astype(np.float64), weights, places)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _judge(
    graphdef: Any, take: Take, state: TrainState, arrays: Any, index: Array
) -> tuple[Array, Array, Array]:
    """Logits of each seed for some bags; the largest weights, and their places."""
    batch = take(arrays, index)

    def one(kernels: Any, rest: Any) -> tuple[Array, Array]:
        return nnx.merge(graphdef, kernels, rest).explained(*inputs(batch))

    logits, weights = jax.vmap(one)(state.kernels, state.rest)
    weights = weights.mean(0)
    if "mask" in batch:
        weights = jnp.where(batch["mask"], weights, jnp.asarray(-1.0, weights.dtype))
    largest = min(bag_report.INSTANCES, weights.shape[-1])
    values, places = lax.top_k(weights, largest)
    return logits, values, jnp.where(values < 0, -1, places)
