"""Times a training step of STanHop-Net against the same model in PyTorch.

    python benchmarks/stanhop.py [--out DIR] [--rounds N]

The setting is ETTh1 at horizon 96: seven series, 168 input steps, batches of 16,
absolute error, Adam, clipped gradients, dropout 0.1; every layer learns its alpha. The
rows are random. The PyTorch model (`pip install -e '.[bench]'`) takes entmax by
bisection from the package `entmax`, with 50 bisections, the package's default, and with
20, beyond which float32 does not improve. Writes `stanhop.csv` and a figure.
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from timing import compare, main, peer

from uhop_jax import data
from uhop_jax.models import STanHop
from uhop_jax.training import Split, StageOneOptions, Task, Trainer
from uhop_jax.training.application import parameters_of

SERIES, IN_LEN, OUT_LEN, SEGMENT, SIZE, MLP_SIZE, HEADS, POOLED = (
    *(7, 168, 96, 12),
    *(256, 512, 4, 10),
)
BATCH, DROPOUT, RATE, CLIP = 16, 0.1, 1e-4, 5.0
WINDOWS = 512


def windows() -> np.ndarray:
    """Random rows `(rows, series)`, from which `WINDOWS` windows are cut."""
    rng = np.random.default_rng(0)
    rows = WINDOWS + IN_LEN + OUT_LEN - 1
    return rng.normal(size=(rows, SERIES)).astype(np.float32)


def build(rngs: nnx.Rngs) -> nnx.Module:
    """The model at the sizes of the paper's table, which are the defaults."""
    return STanHop(SERIES, IN_LEN, OUT_LEN, dropout=DROPOUT, rngs=rngs)


def jax_step() -> Any:
    """A call that takes one training step, as `train.py` does."""

    def score(model: Any, batch: Any, key: Any) -> dict[str, jax.Array]:
        forecast = model(batch["inputs"], key=key)
        return {"loss": abs(forecast - batch["targets"]).mean((-2, -1))}

    def take(arrays: Any, index: jax.Array) -> Any:
        return data.window_batch(arrays["rows"], index, IN_LEN, OUT_LEN)

    split = Split({"rows": windows()}, WINDOWS, take, by_row=False)
    task = Task(build, score, lambda b: (b["inputs"],), split, split)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(RATE))
    trainer = Trainer(task, optimizer, StageOneOptions(), batch_size=BATCH, seeds=(0,))
    arrays, order = trainer.place(dict(split.arrays)), trainer.order(0)
    box = [trainer.init()]

    def step() -> Any:
        box[0] = trainer.advance(box[0], arrays, order, 0, 1, 0)
        return box[0].sums

    return step


def torch_step(bisections: int) -> Any:
    """The same step in PyTorch; None if PyTorch or `entmax` is not installed."""
    torch, entmax = peer("torch"), peer("entmax")
    if torch is None or entmax is None:
        return None
    torch.manual_seed(0)
    nn = torch.nn

    class Association(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (
                nn.Linear(SIZE, SIZE) for _ in range(4)
            )
            self.alpha = nn.Parameter(torch.randn(()))

        def forward(self, states: Any, memories: Any) -> Any:
            def heads(x: Any) -> Any:
                return x.unflatten(-1, (HEADS, -1)).transpose(-3, -2)

            keys = self.key(memories)
            q, k, v = map(heads, (self.query(states), keys, self.value(keys)))
            scores = (SIZE // HEADS) ** -0.5 * q @ k.transpose(-2, -1)
            alpha = 1 + torch.sigmoid(self.alpha)
            p = entmax.entmax_bisect(scores, alpha, dim=-1, n_iter=bisections)
            p = nn.functional.dropout(p, DROPOUT)
            return self.out((p @ v).transpose(-3, -2).flatten(-2))

    class Block(nn.Module):
        def __init__(self, segments: int) -> None:
            super().__init__()
            self.time, self.pool, self.across = (Association() for _ in range(3))
            self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(4))
            self.mlps = nn.ModuleList(mlp(MLP_SIZE) for _ in range(2))
            self.queries = nn.Parameter(torch.randn(segments, POOLED, SIZE))
            self.drop = nn.Dropout(DROPOUT)

        def forward(self, x: Any) -> Any:
            x = self.norms[0](x + self.drop(self.time(x, x)))
            x = self.norms[1](x + self.drop(self.mlps[0](x)))
            x = x.transpose(-3, -2)
            queries = self.queries.expand(len(x), -1, -1, -1)
            x = self.norms[2](x + self.drop(self.across(x, self.pool(queries, x))))
            x = self.norms[3](x + self.drop(self.mlps[1](x)))
            return x.transpose(-3, -2)

    class Decoder(nn.Module):
        def __init__(self, segments: int) -> None:
            super().__init__()
            self.block, self.cross = Block(segments), Association()
            self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))
            self.mlp, self.head = mlp(SIZE), nn.Linear(SIZE, SEGMENT)
            self.drop = nn.Dropout(DROPOUT)

        def forward(self, y: Any, encoded: Any) -> Any:
            y = self.block(y)
            y = self.norms[0](y + self.drop(self.cross(y, encoded)))
            y = self.norms[1](y + self.mlp(y))
            return y, self.head(y)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            before, ahead = IN_LEN // SEGMENT, OUT_LEN // SEGMENT
            self.embed, self.norm = nn.Linear(SEGMENT, SIZE), nn.LayerNorm(SIZE)
            self.positions = nn.Parameter(torch.randn(SERIES, before, SIZE))
            self.encoder = Block(before)
            self.start = nn.Parameter(torch.randn(SERIES, ahead, SIZE))
            self.decoder = nn.ModuleList(Decoder(ahead) for _ in range(2))

        def forward(self, inputs: Any) -> Any:
            cut = inputs.transpose(1, 2).unflatten(-1, (-1, SEGMENT))
            tokens = self.norm(self.embed(cut) + self.positions)
            y, total = self.start.expand(len(inputs), -1, -1, -1), 0
            for layer, encoded in zip(
                self.decoder, (tokens, self.encoder(tokens)), strict=True
            ):
                y, part = layer(y, encoded)
                total = total + part
            return total.flatten(-2).transpose(1, 2)

    def mlp(hidden: int) -> Any:
        return nn.Sequential(
            nn.Linear(SIZE, hidden), nn.GELU(), nn.Linear(hidden, SIZE)
        )

    model = Network()
    parameters = list(model.parameters())
    torch_size, jax_size = sum(p.numel() for p in parameters), parameters_of(build)
    if torch_size != jax_size:
        raise RuntimeError(f"{torch_size} parameters in PyTorch, {jax_size} in JAX")
    optimizer = torch.optim.Adam(parameters, RATE)
    rows = torch.tensor(windows())

    def step() -> float:
        first = torch.randint(0, WINDOWS, (BATCH,)).tolist()
        inputs = torch.stack([rows[i : i + IN_LEN] for i in first])
        targets = torch.stack([rows[i + IN_LEN : i + IN_LEN + OUT_LEN] for i in first])
        loss = (model(inputs) - targets).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.item()

    return step


def stanhop(rounds: int) -> list[dict[str, Any]]:
    """A step of uhop_jax against a step of PyTorch."""
    calls = {"uhop_jax": jax_step()}
    calls |= {f"PyTorch, {n} bisections": torch_step(n) for n in (50, 20)}
    title = f"STanHop-Net step, ETTh1, horizon {OUT_LEN}, batch {BATCH}, float32"
    return compare(title, "uhop_jax", calls, rounds)


if __name__ == "__main__":
    main(__doc__, "stanhop", [stanhop])
