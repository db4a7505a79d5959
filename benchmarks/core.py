"""Times the functional core against other libraries and plain matrix products.

    python benchmarks/core.py [--out DIR] [--rounds N]

A comparison times its members in turn, round after round. It reports the median time of
each member and the median of its ratios to the baseline in the same round, so that a
machine whose speed drifts has little effect. Writes `core.csv`, with the environment in
its last columns, and a figure. Peers are timed if they are installed (`pip install -e
'.[bench]'`).
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import compare, main, peer

import uhop_jax as uhop


def separations(
    rounds: int, shape: tuple[int, int] = (256, 10_000)
) -> list[dict[str, Any]]:
    """Every separation against softmax, and the sparse ones against their peers."""
    rng = np.random.default_rng(0)
    z, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    members = {
        "softmax": uhop.Softmax(),
        "sparsemax": uhop.Sparsemax(),
        "entmax 1.5": uhop.Entmax15(),
        "entmax 1.25": uhop.Entmax(1.25),
        "softmax1": uhop.Softmax1(),
        "polynomial 10": uhop.Polynomial(10),
        "top-32": uhop.TopK(32),
    }
    forward = jax.jit(lambda s, z: s(z))

    @jax.jit
    def both(s, z, g):
        p, pull_back = jax.vjp(s, z)
        return p, pull_back(g)[0]

    rows = compare(
        f"separations, forward, {shape} float32",
        "softmax",
        {name: lambda s=s: forward(s, z) for name, s in members.items()},
        rounds,
    )
    rows += compare(
        f"separations, value and gradient, {shape} float32",
        "softmax",
        {name: lambda s=s: both(s, z, g) for name, s in members.items()},
        rounds,
    )
    few = max(3, rounds // 2)
    for name in ("sparsemax", "entmax 1.5"):
        separation, peers = members[name], _separation_peers(name, z, g)
        for part, (title, call) in enumerate(
            [
                ("forward", lambda s=separation: forward(s, z)),
                ("value and gradient", lambda s=separation: both(s, z, g)),
            ]
        ):
            calls = {"uhop_jax": call}
            calls |= {label: pair[part] for label, pair in peers.items()}
            rows += compare(f"{name}, {title}, {shape} float32", "uhop_jax", calls, few)
    return rows


def _separation_peers(name: str, z: jax.Array, g: jax.Array) -> dict[str, Any]:
    """Two calls for each peer with this separation: value, and value with gradient.

    Both calls are None for a peer that is not installed.
    """
    peers: dict[str, Any] = {}

    def add(label: str, project: Any) -> None:
        if project is None:
            peers[label] = None, None
            return
        value = jax.jit(jax.vmap(project))

        @jax.jit
        def both(z, g):
            p, pull_back = jax.vjp(jax.vmap(project), z)
            return p, pull_back(g)[0]

        peers[label] = (lambda: value(z)), (lambda: both(z, g))

    if name == "sparsemax":
        add("Optax projection_simplex", optax.projections.projection_simplex)
        projection = peer("jaxopt.projection")
        add("JAXopt projection_simplex", projection and projection.projection_simplex)
    torch, entmax = peer("torch"), peer("entmax")
    if torch is None or entmax is None:
        return peers | {"PyTorch entmax": (None, None)}
    function = entmax.sparsemax if name == "sparsemax" else entmax.entmax15
    fixed, leaf = torch.tensor(np.asarray(z)), torch.tensor(np.asarray(z))
    slope = torch.tensor(np.asarray(g))
    leaf.requires_grad_()

    def both() -> Any:
        leaf.grad = None
        p = function(leaf, dim=-1)
        p.backward(slope)
        return p, leaf.grad

    return peers | {"PyTorch entmax": (lambda: function(fixed, dim=-1), both)}


def stage_one(
    rounds: int,
    sizes: tuple[tuple[int, int], ...] = ((100, 784), (500, 784), (100, 3072)),
    steps: int = 100,
) -> list[dict[str, Any]]:
    """Stage I on the Gram matrix against Optax and PyTorch on the weights `W`."""
    rng = np.random.default_rng(0)
    rows = []
    for count, d in sizes:
        memories = jnp.asarray(rng.uniform(size=(count, d)), jnp.float32)
        start = uhop.gaussian_start(jax.random.key(0), d)
        optimizer = optax.sgd(10.0)
        rows += compare(
            f"Stage I, {steps} steps, M = {count}, d = D = {d}, float32",
            "gram",
            {
                "gram": lambda m=memories, s=start, d=d: uhop.fit_sgd(
                    m, relative_rate=10.0 / d, steps=steps, start=s, path="gram"
                ),
                "Optax on W": lambda m=memories, s=start, o=optimizer: uhop.fit(
                    m, optimizer=o, steps=steps, start=s
                ),
                "PyTorch loop on W": _torch_stage_one(memories, start.weights, steps),
            },
            max(3, rounds // 5),
        )
    return rows


def _torch_stage_one(memories: jax.Array, weights: jax.Array, steps: int) -> Any:
    """Algorithm 1 as written, in PyTorch: SGD on the average loss of `W`.

    None if PyTorch is not installed.
    """
    torch = peer("torch")
    if torch is None:
        return None
    patterns = torch.tensor(np.asarray(memories))
    first = torch.tensor(np.asarray(weights))
    u, v = torch.triu_indices(len(memories), len(memories), 1)

    def run() -> Any:
        layer = first.clone().requires_grad_()
        optimizer = torch.optim.SGD([layer], lr=10.0)
        for _ in range(steps):
            features = torch.nn.functional.normalize(patterns @ layer.T, dim=-1)
            # The Gram matrix is faster here than torch.pdist.
            squares = 2 - 2 * (features @ features.T)[u, v]
            loss = squares.mul(-2).exp().mean().log()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return layer.detach()

    return run


def retrieval(
    rounds: int, counts: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
) -> list[dict[str, Any]]:
    """One update against its two matrix products alone, and against PyTorch."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(256, 256)), jnp.float32)
    products = jax.jit(lambda m, q: (q @ m.T) @ m)
    torch = peer("torch")

    retrieve = jax.jit(lambda model, m, q: uhop.retrieve(model, m, q).state)
    models = {
        "dot, softmax": uhop.Model(beta=1.0),
        "dot, sparsemax": uhop.Model(separation=uhop.Sparsemax(), beta=1.0),
        "dot, entmax 1.5": uhop.Model(separation=uhop.Entmax(1.5), beta=1.0),
        "cosine, softmax": uhop.Model(uhop.Cosine(), beta=1.0),
        "squared l2, softmax": uhop.Model(uhop.NegativeSquaredL2(), beta=1.0),
    }
    rows = []
    for count in counts:
        memories = jnp.asarray(rng.normal(size=(count, 256)), jnp.float32)
        calls: dict[str, Any] = {"two products": lambda m=memories: products(m, query)}
        for name, model in models.items():
            calls[name] = lambda model=model, m=memories: retrieve(model, m, query)
        calls["PyTorch, dot, softmax"] = None
        if torch is not None:
            m, q = (torch.tensor(np.asarray(x)) for x in (memories, query))
            calls["PyTorch, dot, softmax"] = lambda m=m, q=q: (
                torch.softmax(q @ m.T, -1) @ m
            )
        title = f"retrieval, M = {count}, d = 256, 256 queries, float32"
        few = rounds if count <= 10_000 else max(3, rounds // 5)
        rows += compare(title, "two products", calls, few)
    return rows


def calibration(rounds: int, count: int = 500) -> list[dict[str, Any]]:
    """Calibration on `count` digits, with compilation and without."""
    del rounds
    from uhop_jax import data

    memories = data.images("digits").patterns[:count]
    rows = []
    title = f"calibration, {count} digits, half of the pixels masked"
    print(f"\n{title}")
    for name in ("first call, compiling", "second call"):
        began = time.perf_counter()
        model = uhop.calibrate(jax.random.key(0), memories, uhop.Mask(0.5))
        spent = 1e3 * (time.perf_counter() - began)
        print(f"  {name:<34}{spent:>10.0f} ms")
        rows.append(
            {
                "comparison": title,
                "name": name,
                "median_ms": spent,
                "ratio": "",
                "baseline": "",
            }
        )
    print(f"  {model.summary()}")
    return rows


if __name__ == "__main__":
    main(__doc__, "core", [separations, stage_one, retrieval, calibration])
