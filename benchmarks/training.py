"""Times training steps of ViH against PyTorch and against its matrix products.

    python benchmarks/training.py [--out DIR] [--rounds N]

ViH is as in the paper's appendix (512 dimensions, batches of 128 images of CIFAR's
shape, Adam), with a patch of 32 pixels (one memory) or 8 pixels (16 memories). Members
are timed in turn, round after round. PyTorch takes part if it is installed (`pip
install -e '.[bench]'`), with as many threads as cores. Writes `training.csv` and a
figure.
"""

import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from timing import compare, main, peer

from uhop_jax.models import ViH
from uhop_jax.training import Data, Split, StageOneOptions, Task, Trainer
from uhop_jax.training.examples import Phase
from uhop_jax.training.vision import channel_statistics, standardised

BATCH, SIZE, CLASSES, IMAGES = 128, 512, 10, 5120
STEPS = 10  # steps in a call, since a run takes many steps in a call


def trainer_of(patch: int) -> Trainer:
    """Trains ViH on random images."""
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 255, (IMAGES, 32, 32, 3), dtype=np.uint8),
        "labels": rng.integers(0, CLASSES, IMAGES).astype(np.int32),
    }

    statistics = channel_statistics(arrays["images"])

    def build(rngs: nnx.Rngs) -> nnx.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning of a single memory
            return ViH((32, 32, 3), CLASSES, patch=patch, size=SIZE, rngs=rngs)

    def score(model: Any, batch: Any, key: Any) -> dict[str, jax.Array]:
        logits = model(standardised(batch["images"], statistics), key=key)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return {"loss": loss}

    split = Split(arrays, IMAGES, lambda x, i: {name: a[i] for name, a in x.items()})
    task = Task(build, score, lambda b: (), split, split)
    return Trainer(
        task, optax.adam(1e-3), StageOneOptions(), batch_size=BATCH, seeds=(0,)
    )


def products_of(patch: int) -> Any:
    """A call with the matrix products of `STEPS` steps alone, forward and backward."""
    memories = (32 // patch) ** 2
    shapes = [
        (BATCH * memories, 3 * patch * patch, SIZE),  # embedding
        (BATCH, SIZE, SIZE),  # queries
        (BATCH * memories, SIZE, SIZE),  # keys
        (BATCH * memories, SIZE, SIZE),  # values
        (BATCH, SIZE, SIZE),  # output
    ]
    rng = np.random.default_rng(0)
    operands = [
        (
            jnp.asarray(rng.normal(size=(n, k)), jnp.float32),
            jnp.asarray(rng.normal(size=(k, m)), jnp.float32),
            jnp.asarray(rng.normal(size=(n, m)), jnp.float32),
        )
        for n, k, m in shapes
    ]

    @jax.jit
    def run(operands: Any) -> Any:
        products = [(x @ w, x.T @ g) for x, w, g in operands]
        back = [g @ w.T for _, w, g in operands[1:]]  # images need no gradient
        return products, back

    return lambda: [jax.block_until_ready(run(operands)) for _ in range(STEPS)]


def torch_step(patch: int) -> Any:
    """The same step in plain PyTorch; None if PyTorch is not installed."""
    torch = peer("torch")
    if torch is None:
        return None
    torch.manual_seed(0)
    nn, functional = torch.nn, torch.nn.functional
    memories = (32 // patch) ** 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3 * patch * patch, SIZE)
            self.query, self.key, self.value, self.out = (
                nn.Linear(SIZE, SIZE) for _ in range(4)
            )
            self.norm = nn.LayerNorm(SIZE)
            self.head = nn.Linear(SIZE, CLASSES)
            self.token = nn.Parameter(torch.randn(1, SIZE))

        def forward(self, images: Any) -> Any:
            n, p = 32 // patch, patch
            cut = images.reshape(-1, n, p, n, p, 3).transpose(2, 3)
            tokens = self.embed(cut.reshape(-1, memories, 3 * p * p))
            token = self.token.expand(len(images), 1, SIZE)
            keys = self.key(tokens)
            read = functional.scaled_dot_product_attention(
                self.query(token), keys, self.value(keys), dropout_p=0.1
            )
            return self.head(self.norm(functional.relu(self.out(read).squeeze(1))))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data = torch.randint(0, 255, (IMAGES, 32, 32, 3), dtype=torch.uint8)
    mean = data.float().mean((0, 1, 2))
    deviation = data.float().std((0, 1, 2))
    labels = torch.randint(0, CLASSES, (IMAGES,))

    def step() -> float:
        index = torch.randint(0, IMAGES, (BATCH,))
        images = (data[index].float() - mean) / deviation
        loss = functional.cross_entropy(model(images), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def steps(rounds: int) -> list[dict[str, Any]]:
    """Training steps against PyTorch, and against their matrix products alone."""
    rows = []
    for patch in (32, 8):
        trainer = trainer_of(patch)
        arrays, order = trainer.place(dict(trainer.task.train.arrays)), trainer.order(0)
        box = [trainer.init()]

        def step(
            box: list = box, trainer: Trainer = trainer, rest: tuple = (arrays, order)
        ) -> Any:
            box[0] = trainer.advance(box[0], *rest, 0, STEPS, 0)
            return box[0].sums

        peer_step = torch_step(patch)
        calls = {
            "uhop_jax": step,
            "its products alone": products_of(patch),
            "PyTorch": peer_step and (lambda s=peer_step: [s() for _ in range(STEPS)]),
        }
        title = f"{STEPS} steps of ViH, patch {patch}, batch {BATCH}, float32"
        rows += compare(title, "uhop_jax", calls, rounds)
    return rows


def host(rounds: int) -> list[dict[str, Any]]:
    """An epoch of a run, with its work on the host, against its steps in one call."""
    rows = []
    for patch in (32, 8):
        trainer = trainer_of(patch)
        phase = Phase("task", 1, trainer.steps_per_epoch)
        data, box = Data(trainer), [trainer.init()]
        arrays, order = trainer.place(dict(trainer.task.train.arrays)), trainer.order(0)

        def epoch(box: list = box, data: Data = data, phase: Phase = phase) -> Any:
            *_, (_, box[0]) = data.run(box[0], phase, 0, 0)
            return box[0].sums

        def device(
            box: list = box,
            trainer: Trainer = trainer,
            rest: tuple = (arrays, order),
            last: int = phase.steps,
        ) -> Any:
            box[0] = trainer.advance(box[0], *rest, 0, last, 0)
            return box[0].sums

        calls = {"one call": device, "epoch of a run": epoch}
        title = f"ViH epoch, patch {patch}, {phase.steps} steps"
        rows += compare(title, "one call", calls, max(rounds // 5, 3))
    return rows


if __name__ == "__main__":
    began = time.perf_counter()
    main(__doc__, "training", [steps, host])
    print(f"{time.perf_counter() - began:.0f} s")
