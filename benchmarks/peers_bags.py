"""Classifies bags beside `hopfield-layers`: same folds, starts, batches and optimiser.

    PYTHONPATH=DIR python benchmarks/peers_bags.py --data musk1.csv.gz [...] [--out DIR]

DIR holds the package `hflayers` of github.com/ml-jku/hopfield-layers, which is not on
PyPI. A file has a bag in each run of rows: label, number of the bag, features; the name
`mnist_bags` is 200 bags of some ten digits, positive with a 9 among them, of MNIST as
`train.py` prepares it (`--dir DIR`). Both libraries train `HopfieldPooling` and a
linear head with AdamW on each of ten folds, for each seed, from the weights that
PyTorch has drawn. `peers_bags.csv` has, for each fold, the area under the ROC curve of
both on the bags left out. Data sets that the csv has already are not trained again.

Where keys and values are equal, bit for bit, hopfield-layers projects the values from
the keys: in the first step the norm of values has no gradient, and the norm of memories
has the gradients of both. Losses of training are therefore compared from a start at
which the two norms differ by 1e-6: in the first fold of each seed, epoch by epoch.
"""

import argparse
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from flax import nnx
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from timing import compare, environment, peer

from uhop_jax import data
from uhop_jax.layers import Hopfield, HopfieldPooling, from_torch

HEADS, HEAD_SIZE = 8, 32
RATE, DECAY, BATCH = 1e-3, 1e-2, 16
FOLDS = 10
LIBRARIES = ("hopfield_layers", "uhop_jax")


class Bags(NamedTuple):
    """Bags of one length.

    Attributes:
      features: `(bags, instances, features)`, zero where a bag has no instance.
      mask: `(bags, instances)`, true for the instances of a bag.
      labels: `(bags,)`, 0 or 1.
    """

    features: np.ndarray
    mask: np.ndarray
    labels: np.ndarray


def read(path: Path, directory: Path | None) -> Bags:
    """The bags of a file, or bags of digits."""
    if str(path) == "mnist_bags":
        images = data.images("mnist", directory=directory)
        bags = data.image_bags(images, 200, mean=10.0, target=9, seed=0, name="")
        mask = np.arange(bags.sizes.max()) < bags.sizes[:, None]
        features = np.zeros((*mask.shape, bags.instances.shape[1]), np.float32)
        features[mask] = bags.instances
        return Bags(features, mask, bags.labels.astype(np.float32))
    table = pd.read_csv(path, header=None).to_numpy()
    numbers, first, counts = np.unique(
        table[:, 1], return_index=True, return_counts=True
    )
    features = np.zeros((len(numbers), counts.max(), table.shape[1] - 2), np.float32)
    mask = np.arange(counts.max()) < counts[:, None]
    for place, number in enumerate(numbers):
        features[place, : counts[place]] = table[table[:, 1] == number, 2:]
    return Bags(features, mask, (table[first, 0] > 0).astype(np.float32))


def standardised(bags: Bags, train: np.ndarray) -> Bags:
    """The bags, scaled by the instances of the bags that are trained on."""
    seen = bags.features[train][bags.mask[train]]
    spread = seen.std(0)
    scaled = (bags.features - seen.mean(0)) / np.where(spread > 0, spread, 1)
    return bags._replace(features=np.where(bags.mask[..., None], scaled, 0))


class Classifier(nnx.Module):
    """Pooling by one learned state, and a linear head."""

    def __init__(self, size: int, rngs: nnx.Rngs):
        layer = Hopfield(
            size,
            value_size=size,
            num_heads=HEADS,
            head_size=HEAD_SIZE,
            normalize=("state", "memory", "value"),
            rngs=rngs,
        )
        self.pooling = HopfieldPooling(layer, rngs=rngs)
        self.head = nnx.Linear(size, 1, rngs=rngs)

    def __call__(self, features: jax.Array, mask: jax.Array) -> jax.Array:
        """The logit of each bag."""
        return self.head(self.pooling(features, mask=mask)[:, 0])[:, 0]


def peer_classifier(torch: Any, size: int, seed: int, *, apart: bool = False) -> Any:
    """The same classifier by hopfield-layers, its norms `apart` or equal."""
    from hflayers import HopfieldPooling as Pooling

    torch.manual_seed(seed)
    pooling = Pooling(size, hidden_size=HEAD_SIZE, num_heads=HEADS)
    if apart:
        torch.nn.init.constant_(pooling.hopfield.norm_pattern_projection.bias, 1e-6)
    return torch.nn.ModuleDict({"pooling": pooling, "head": torch.nn.Linear(size, 1)})


def peer_logits(model: Any, features: Any, mask: Any) -> Any:
    """The logit of each bag, by the classifier of hopfield-layers."""
    pooled = model["pooling"](features, stored_pattern_padding_mask=~mask)
    return model["head"](pooled)[:, 0]


def with_weights(classifier: Classifier, model: Any) -> Classifier:
    """The classifier with the weights of the classifier of hopfield-layers."""
    classifier = nnx.clone(classifier)
    state = {name: x.numpy() for name, x in model["pooling"].state_dict().items()}
    classifier.pooling = from_torch(classifier.pooling, state)
    head = model["head"]
    classifier.head.kernel[...] = jnp.array(head.weight.detach().numpy().T)
    classifier.head.bias[...] = jnp.array(head.bias.detach().numpy())
    return classifier


def orders(train: np.ndarray, epochs: int, seed: int) -> np.ndarray:
    """Bags of each step of each epoch `(epochs, steps, BATCH)`; -1 is no bag."""
    generator, steps = np.random.default_rng(seed), -(-len(train) // BATCH)
    whole = np.full((epochs, steps * BATCH), -1)
    for row in whole:
        row[: len(train)] = generator.permutation(train)
    return whole.reshape(epochs, steps, BATCH)


def optimizer() -> optax.GradientTransformation:
    """AdamW."""
    return optax.adamw(RATE, weight_decay=DECAY)


def trainer() -> Any:
    """A compiled function: losses of the epochs, and logits of all bags at the end."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(
        graphdef: Any, state: Any, bags: Bags, order: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def loss(state: Any, rows: jax.Array) -> jax.Array:
            features, mask, labels = (x[rows] for x in bags)
            logits = nnx.merge(graphdef, state)(features, mask)
            losses = optax.sigmoid_binary_cross_entropy(logits, labels)
            return losses.mean(where=rows >= 0)

        def step(carry: Any, rows: jax.Array) -> Any:
            state, moments = carry
            value, slope = jax.value_and_grad(loss)(state, rows)
            updates, moments = optimizer().update(slope, moments, state)
            return (optax.apply_updates(state, updates), moments), value

        def epoch(carry: Any, rows: jax.Array) -> Any:
            carry, values = jax.lax.scan(step, carry, rows)
            return carry, values.mean()

        (state, _), losses = jax.lax.scan(
            epoch, (state, optimizer().init(state)), order
        )
        return losses, nnx.merge(graphdef, state)(bags.features, bags.mask)

    return run


def peer_run(
    torch: Any, model: Any, bags: Bags, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As the function of `trainer`, by hopfield-layers."""
    given = [torch.tensor(x) for x in bags]
    descent = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    entropy = torch.nn.functional.binary_cross_entropy_with_logits
    losses = []
    for epoch in order:
        total = 0.0
        for rows in epoch:
            features, mask, labels = (x[rows[rows >= 0]] for x in given)
            value = entropy(peer_logits(model, features, mask), labels)
            descent.zero_grad()
            value.backward()
            descent.step()
            total += float(value.detach())
        losses.append(total / len(epoch))
    with torch.no_grad():
        logits = peer_logits(model, given[0], given[1])
    return np.asarray(losses), logits.numpy()


def study(
    torch: Any, name: str, bags: Bags, seeds: int, epochs: int
) -> list[dict[str, Any]]:
    """A record for each seed and fold of a data set."""
    size, rows = bags.features.shape[-1], []
    run, start = trainer(), Classifier(size, nnx.Rngs(0))  # one start: one program
    for seed in range(seeds):
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
        seconds = np.zeros(2)
        for fold, (train, test) in enumerate(folds.split(bags.labels, bags.labels)):
            scaled = standardised(bags, train)
            order = orders(train, epochs, FOLDS * seed + fold)

            def both(
                apart: bool, seed: int = FOLDS * seed + fold, scaled=scaled, order=order
            ) -> Any:
                """Losses and logits of both libraries, and their seconds."""
                model = peer_classifier(torch, size, seed, apart=apart)
                classifier = with_weights(start, model)
                graphdef, parameters = nnx.split(classifier)
                state = nnx.to_pure_dict(parameters)
                times = [time.perf_counter()]
                there = peer_run(torch, model, scaled, order)
                times.append(time.perf_counter())
                here = jax.device_get(run(graphdef, state, scaled, order))
                times.append(time.perf_counter())
                return there, here, np.diff(times)

            row = {"data": name, "seed": seed, "fold": fold, "bags": len(bags.labels)}
            there, here, spent = both(apart=False)
            seconds += spent
            for library, (_, logits) in zip(LIBRARIES, (there, here), strict=True):
                score = roc_auc_score(bags.labels[test], logits[test])
                row[f"auc_{library}"] = score
            row |= {"loss": here[0][-1], "first_apart": "", "last_apart": ""}
            if fold == 0:
                there, here, _ = both(apart=True)
                distance = abs(there[0] - here[0])
                row |= {"first_apart": distance[0], "last_apart": distance[-1]}
            rows.append(row)
        print(
            f"{name}, seed {seed}: hopfield-layers {seconds[0]:.0f} s, "
            f"uhop_jax {seconds[1]:.0f} s",
            flush=True,
        )
    return rows


def pooling(
    rounds: int,
    sizes: tuple[tuple[int, int, int], ...] = ((16, 50, 166), (16, 500, 166)),
) -> list[dict[str, Any]]:
    """A training step of both; `sizes` are bags, instances of the largest, features."""
    torch, rows = peer("torch"), []
    if peer("hflayers") is None:
        torch = None
    for number, longest, size in sizes:
        generator = np.random.default_rng(0)
        counts = generator.integers(1, longest + 1, number)
        counts[0] = longest
        bags = Bags(
            generator.normal(size=(number, longest, size)).astype(np.float32),
            np.arange(longest) < counts[:, None],
            np.arange(number, dtype=np.float32) % 2,
        )
        calls = {"hopfield-layers, PyTorch": None, "HopfieldPooling": _step(bags)}
        baseline = "HopfieldPooling"
        if torch is not None:
            baseline = "hopfield-layers, PyTorch"
            calls[baseline] = _peer_step(torch, bags)
        title = f"pooling step, {number} bags of up to {longest} x {size}"
        title += f", {HEADS} heads of {HEAD_SIZE}, float32"
        rows += compare(title, baseline, calls, rounds)
    return rows


def _step(bags: Bags) -> Any:
    """Loss, gradients and update of the classifier, as one compiled call."""
    graphdef, state = nnx.split(Classifier(bags.features.shape[-1], nnx.Rngs(0)))
    state, given = nnx.to_pure_dict(state), jax.device_put(bags)
    moments = optimizer().init(state)

    @jax.jit
    def run(state: Any, moments: Any, bags: Bags) -> Any:
        def loss(state: Any) -> jax.Array:
            logits = nnx.merge(graphdef, state)(bags.features, bags.mask)
            return optax.sigmoid_binary_cross_entropy(logits, bags.labels).mean()

        updates, moments = optimizer().update(jax.grad(loss)(state), moments, state)
        return optax.apply_updates(state, updates), moments

    return lambda: run(state, moments, given)


def _peer_step(torch: Any, bags: Bags) -> Any:
    """Loss, gradients and update of the classifier of hopfield-layers."""
    model = peer_classifier(torch, bags.features.shape[-1], 0, apart=True)
    features, mask, labels = (torch.tensor(x) for x in bags)
    descent = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    entropy = torch.nn.functional.binary_cross_entropy_with_logits

    def run() -> None:
        descent.zero_grad()
        entropy(peer_logits(model, features, mask), labels).backward()
        descent.step()

    return run


def summary(table: pd.DataFrame) -> str:
    """Mean AUC of both by data set, its standard error over seeds, and the losses."""
    lines = ["data: AUC of hopfield-layers, of uhop_jax, of their difference"]
    table = table.assign(apart=table.auc_uhop_jax - table.auc_hopfield_layers)
    for name, part in table.groupby("data", sort=False):
        seeds = part.groupby("seed")[["auc_hopfield_layers", "auc_uhop_jax", "apart"]]
        means = seeds.mean()
        error = means.std(ddof=1) / np.sqrt(len(means))
        text = ", ".join(
            f"{means[key].mean():.4f} ± {error[key]:.4f}" for key in means.columns
        )
        lines.append(
            f"{name}: {text}; losses apart by at most {part.first_apart.max():.1e} in "
            f"the first epoch, {part.last_apart.max():.1e} in the last, which is at "
            f"{part.loss.mean():.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Times a step, trains what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="*", default=[])
    parser.add_argument("--dir", type=Path, help="of prepared data, for mnist_bags")
    parser.add_argument("--out", type=Path, default=Path("results/peers_bags"))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch = peer("torch")
    if torch is None or peer("hflayers") is None:
        sys.exit(
            "peers_bags.py needs PyTorch and the package hflayers of "
            "github.com/ml-jku/hopfield-layers on PYTHONPATH"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    about = environment()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if options.rounds:
        rows = [row | about for row in pooling(options.rounds)]
        pd.DataFrame(rows).to_csv(options.out / "peers_bags_steps.csv", index=False)
    path = options.out / "peers_bags.csv"
    tables = [pd.read_csv(path)] if path.exists() else []
    for file in options.data:
        name = file.name.split(".")[0]
        if not any(name in set(table.data) for table in tables):
            bags = read(file, options.dir)
            rows = study(torch, name, bags, options.seeds, options.epochs)
            tables.append(pd.DataFrame([row | about for row in rows]))
            partial = path.with_suffix(".partial")
            pd.concat(tables).to_csv(partial, index=False)
            os.replace(partial, path)
    if tables:
        print(f"\n{summary(pd.read_csv(path))}")


if __name__ == "__main__":
    main()
