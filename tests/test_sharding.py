import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from conftest import FAST, ROOT

from uhop_jax import memory_mesh, shard_memories

# Runs in processes of its own, as 8 devices of one or 2 of two.
WORK = """
import functools, os, re, sys
import jax
jax.config.update("jax_enable_x64", True)
if "JAX_COORDINATOR_ADDRESS" in os.environ:
    from uhop_jax.command_line import start_distributed
    start_distributed()
    assert jax.process_count() == 2
import jax.numpy as jnp
import numpy as np
import optax
import uhop_jax as uhop
mesh = uhop.memory_mesh()
assert mesh.size == int(sys.argv[1])
rng = np.random.default_rng(0)
memories, query = rng.normal(size=(123, 16)), rng.normal(size=(5, 16))

def gathered(program, size):
    "Sizes of what is gathered that are those of the memories or larger."
    pattern = r"= [a-z0-9]+\\[([0-9,]+)\\][^ ]* all-(?:gather|to-all)(?:-start)?[(]"
    found = re.findall(pattern, program.as_text())
    return [x for x in found if np.prod([int(n) for n in x.split(",")]) >= size]

def whole(x):
    return np.asarray(jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec()))(x).addressable_data(0))

split = uhop.shard_memories(memories, mesh)
assert split.memories.shape == (-(-123 // mesh.size) * mesh.size, 16)
for similarity in (uhop.Dot(), uhop.Cosine(), uhop.NegativeSquaredL2()):
    for separation in (uhop.Softmax(), uhop.Softmax1(), uhop.Sparsemax(),
                       uhop.Entmax(1.5), uhop.Entmax(1.3), uhop.Polynomial(4),
                       uhop.TopK(3)):
        if similarity != uhop.Dot() and not isinstance(separation, uhop.Sparsemax):
            continue
        @jax.jit
        def run(memories, mask, query):
            return uhop.retrieve(memories, query, beta=2.0, separation=separation,
                                 similarity=similarity, mask=mask, steps=2).state
        program = run.lower(split.memories, split.mask, query).compile()
        assert not gathered(program, memories.size), (separation, similarity)
        alone = run(jnp.asarray(memories), None, jnp.asarray(query))
        np.testing.assert_allclose(
            whole(run(split.memories, split.mask, query)), alone, atol=1e-5)

stored = memories[:12]
split = uhop.shard_memories(stored, mesh, over="components").memories
sgd = optax.sgd(0.5)
for fit in (functools.partial(uhop.fit, optimizer=sgd),
            functools.partial(uhop.fit_sgd, rate=0.03, path="weights"),
            functools.partial(uhop.fit_sgd, rate=0.03, path="gram")):
    @jax.jit
    def run(memories):
        found = fit(memories, steps=20)
        return found.kernel, found.loss
    assert not gathered(run.lower(split).compile(), stored.size), fit
    (kernel, loss), alone = run(split), run(jnp.asarray(stored))
    weights = jax.jit(lambda kernel: kernel.weights)
    np.testing.assert_allclose(whole(loss), alone[1], atol=1e-5)
    np.testing.assert_allclose(whole(weights(kernel)), weights(alone[0]), atol=1e-5)
    fit(split, steps=2)  # not jitted: the checks of values hold on every process
print("equal")
"""


def start(devices, total, **variables):
    variables |= {
        "XLA_FLAGS": f"{FAST} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, "-c", WORK, str(total)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_eight_devices_equal_one_and_gather_no_memories():
    process = start(8, 8)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "equal" in output, output[-3000:]


def test_two_processes_equal_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        start(
            2,
            4,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(i),
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0 and "equal" in output, output[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_what_cannot_be_split_is_refused(untyped):
    mesh = memory_mesh(1)
    with pytest.raises(ValueError, match=r"memories must have shape \(M, d\)"):
        shard_memories(np.zeros(3), mesh)
    with pytest.raises(ValueError, match="unknown over 'rows'; choose one of memories"):
        shard_memories(np.zeros((3, 2)), mesh, over="rows")
    with pytest.raises(ValueError, match="shards is 99, but there are"):
        memory_mesh(99)
