"""Memories sharded over devices and processes give the results of one device."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import FAST, ROOT

from uhop_jax import memory_mesh, shard_memories

# Runs in separate processes: one process of 8 devices, or two of 2 devices.
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
    shapes = re.findall(pattern, program.as_text())
    return [x for x in shapes if np.prod([int(n) for n in x.split(",")]) >= size]

def whole(x):
    return np.asarray(jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec()))(x).addressable_data(0))

split = uhop.shard_memories(memories, mesh)
assert split.memories.shape == (-(-123 // mesh.size) * mesh.size, 16)
separations = (uhop.Softmax(), uhop.Softmax1(), uhop.Sparsemax(), uhop.Entmax(1.5),
               uhop.Entmax(1.3), uhop.Polynomial(4), uhop.TopK(3))
if jax.process_count() == 2:  # these compile the programs of one process
    separations = (uhop.Sparsemax(), uhop.TopK(3))
similarities = (uhop.Dot(), uhop.Cosine(), uhop.NegativeSquaredL2())
for similarity in similarities[:1 if jax.process_count() == 2 else None]:
    for separation in separations:
        if similarity != uhop.Dot() and not isinstance(separation, uhop.Sparsemax):
            continue
        @jax.jit
        def run(memories, mask, query):
            model = uhop.Model(similarity, separation, beta=2.0)
            return uhop.retrieve(model, memories, query, mask=mask, steps=2).state
        program = run.lower(split.memories, split.mask, query).compile()
        assert not gathered(program, memories.size), (separation, similarity)
        alone = run(jnp.asarray(memories), None, jnp.asarray(query))
        np.testing.assert_allclose(
            whole(run(split.memories, split.mask, query)), alone, atol=1e-5)

stored = memories[:12]
split = uhop.shard_memories(stored, mesh, over="components").memories
sgd = optax.sgd(0.5)
fits = (functools.partial(uhop.fit, optimizer=sgd),
        functools.partial(uhop.fit_sgd, relative_rate=0.03, path="weights"),
        functools.partial(uhop.fit_sgd, relative_rate=0.03, path="gram"))
for fit in fits[-1 if jax.process_count() == 2 else 0:]:
    @jax.jit
    def run(memories):
        fitted = fit(memories, steps=20)
        return fitted.kernel, fitted.loss
    assert not gathered(run.lower(split).compile(), stored.size), fit
    (kernel, loss), alone = run(split), run(jnp.asarray(stored))
    weights = jax.jit(lambda kernel: kernel.weights)
    np.testing.assert_allclose(whole(loss), alone[1], atol=1e-5)
    np.testing.assert_allclose(whole(weights(kernel)), weights(alone[0]), atol=1e-5)
    fit(split, steps=2)  # not jitted: the checks of values hold on every process
print("equal")
"""


# The same functions of a batch and of its halves, one on each device.
HALVES = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P
import uhop_jax as uhop
from uhop_jax import layers
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)
memories, queries, bags = draw(7, 4), draw(4, 4), draw(4, 5, 8)
sparse, kernel = uhop.Sparsemax(), uhop.LinearKernel(draw(5, 4))
separations = [uhop.Softmax(), uhop.Softmax1(), sparse, uhop.Entmax(1.3),
               uhop.Polynomial(4), uhop.TopK(3)]
similarities = [uhop.Dot(kernel), uhop.Cosine(), uhop.NegativeSquaredL2(),
                uhop.NegativeL2(), uhop.NegativeL1()]
rngs = nnx.Rngs(0)
def layer(separation="softmax", kernel=False, **options):
    association = layers.Association(separation, **options)
    return layers.Hopfield(8, association, num_heads=2, kernel=kernel, rngs=rngs)
modules = [
    layer(kernel=True), layer(sparse, steps=2), layer(steps=64, until_converged=True),
    layer(layers.LearnedAlpha(), learn_beta=True),
    layer(uhop.TopK(2), bias=layers.BiasPattern(2, 4, rngs=rngs), zero_memory=True),
    layers.HopfieldPooling(layer(sparse), 2, rngs=rngs),
    layers.HopfieldLayer(layer(sparse), 6, rngs=rngs),
    nnx.MultiHeadAttention(
        2, 8, attention_fn=layers.Association(sparse), decode=False, rngs=rngs),
]
graphs, parameters = zip(*map(nnx.split, modules), strict=True)

def results(memories, parameters, queries, bags):
    for s in separations:
        yield s(queries)
        yield uhop.retrieve_streamed(
            uhop.Model(separation=s, beta=2.0), memories, queries, block=3,
            query_block=1, top=2)[0]
    for s in similarities:
        model = uhop.Model(s, beta=0.5)
        yield uhop.converge(model, memories, queries).pattern
        yield uhop.retrieve_streamed(model, memories, queries, block=3).state
    yield uhop.trajectory(uhop.Model(s, sparse, beta=0.5), memories, queries).patterns
    seen = queries > -0.5
    yield uhop.retrieve(model, memories, queries, observed=seen).state
    for module in map(nnx.merge, graphs, parameters):
        yield module(bags)

def few(memories, parameters, queries, bags):
    model = uhop.Model(uhop.NegativeL1(), sparse, beta=2.0)
    yield uhop.converge(model, memories, queries).pattern
    model = uhop.Model(uhop.NegativeL1(), uhop.Entmax(1.3), beta=2.0)
    yield uhop.retrieve_streamed(model, memories, queries, block=3).state
    yield uhop.TopK(2)(queries)
    yield nnx.merge(graphs[3], parameters[3])(bags)

def fits(sets):
    options = dict(relative_rate=0.1, steps=2, snapshots=(1,))
    fitted = [uhop.fit_sgd(sets, path=path, **options).loss
              for path in ("weights", "gram")]
    annealed = uhop.fit_annealed(jax.random.key(0), sets, steps=2, restarts=2)
    return *fitted, annealed.loss, uhop.AverageLoss(normalize=False)(sets)

def slopes_of(results):
    def losses(memories, parameters, queries, bags):
        outputs = list(results(memories, parameters, queries, bags))
        return sum((x**2).mean() for x in outputs), outputs
    return jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)

def halves_of(results):
    def averaged(memories, parameters, *batch):
        zero = 0 * batch[0].sum()  # which varies over the mesh
        replicated = jax.tree.map(lambda x: x + zero, (memories, parameters))
        (loss, outputs), slope = slopes_of(results)(*replicated, *batch)
        return jax.lax.pmean((loss, slope), "data"), outputs
    return jax.shard_map(
        averaged, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")),
        out_specs=((P(), P()), P("data")))

arguments = memories, parameters, queries, bags
jax.eval_shape(halves_of(results), *arguments)  # errors of tracing show here
split = dict(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
jax.eval_shape(jax.shard_map(fits, **split), bags)
(loss, outputs), slope = jax.jit(slopes_of(few))(*arguments)
whole = (loss, slope), outputs
parts = jax.jit(halves_of(few))(*arguments)
for part, whole in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
    np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-5)
print("equal")
"""


def start(devices, total, work=WORK, **variables):
    variables |= {
        "XLA_FLAGS": f"{FAST} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, "-c", work, str(total)],
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


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 8),
    reason="lax.custom_root of jax 0.7 refuses values that vary over a mesh",
)
def test_inside_of_shard_map_halves_equal_the_whole():
    process = start(2, 2, HALVES)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "equal" in output, output[-3000:]


def test_wrong_shards_are_refused(untyped):
    mesh = memory_mesh(1)
    with pytest.raises(ValueError, match=r"memories must have shape \(M, d\)"):
        shard_memories(np.zeros(3), mesh)
    with pytest.raises(ValueError, match="unknown over 'rows'; choose one of memories"):
        shard_memories(np.zeros((3, 2)), mesh, over="rows")
    with pytest.raises(ValueError, match="shards is 99, but there are"):
        memory_mesh(99)
