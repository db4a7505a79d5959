"""Training as pure functions: compiled once, whole epochs on the device.

Everything here has a leading axis of seeds: runs that differ in their seed alone are
one program. Random numbers come from the seed and the number of the step, never from a
state, so that a run continued from any step is the run that was never interrupted.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from uhop_jax._checks import check_count
from uhop_jax.layers import KernelParam
from uhop_jax.training.programs import jitted
from uhop_jax.training.separating import separation_step
from uhop_jax.training.task import (
    SEPARATIONS,
    Batch,
    StageOneOptions,
    Take,
    Task,
    TrainState,
    check_memory,
    keys_of,
    number_of_parameters,
)

# Streams of random numbers of a seed.
INIT, ORDER, STAGE_ONE, TASK, DRAW, VIEWS = range(6)


class Trainer:
    """The compiled functions of a run.

    Args:
      task: model, loss and examples.
      optimizer: of the task.
      stage_one: settings of Stage I.
      batch_size: examples in a step of the task, `B_2`.
      seeds: runs that are trained side by side.
      devices: over which each batch is spread.

    Attributes:
      parameters: number of scalars that the model learns.

    Raises:
      ValueError: if a number is out of range, or batches do not fit the devices.
    """

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        stage_one: StageOneOptions,
        *,
        batch_size: int,
        seeds: Sequence[int],
        devices: Sequence[Any] | None = None,
    ):
        stage_one.check()
        check_count("batch_size", batch_size, 1)
        if not seeds:
            raise ValueError("seeds must name at least one seed")
        devices = jax.devices() if devices is None else devices
        self.task, self.optimizer, self.stage_one = task, optimizer, stage_one
        self.batch_size = min(batch_size, task.train.size)
        self.stage_batch = min(stage_one.batch_size, task.train.size)
        for name, size in (
            ("batch_size", self.batch_size),
            ("stage_one.batch_size", self.stage_batch),
        ):
            if size % len(devices):
                raise ValueError(
                    f"{name} must be a multiple of the {len(devices)} devices, got "
                    f"{size}"
                )
        self.mesh = jax.make_mesh(
            (len(devices),), ("batch",), axis_types=(AxisType.Auto,), devices=devices
        )
        self.seeds, self.keys = tuple(seeds), keys_of(seeds)
        self.programs: dict[str, Any] = {}
        self.steps_per_epoch = -(-task.train.size // self.batch_size)
        model = nnx.eval_shape(lambda: task.build(nnx.Rngs(0)))
        parts: Any = nnx.split(model, KernelParam, ...)
        self.graphdef, kernels, rest = parts
        self.shapes = kernels, rest
        self.has_kernels = bool(jax.tree.leaves(kernels))
        self.parameters = number_of_parameters(model)
        check_memory(self.parameters, len(self.seeds), self.mesh.local_devices[0])
        if stage_one.schedule != "none" and not self.has_kernels:
            raise ValueError(
                f"stage_one.schedule {stage_one.schedule!r} needs a model with kernels"
            )

    def on(self, task: Task, seeds: Sequence[int]) -> "Trainer":
        """The trainer of as many other examples and seeds, with the same programs."""
        if len(seeds) != len(self.seeds):
            raise ValueError(f"programs are of {len(self.seeds)} seeds, got {seeds}")
        if task.train.size != self.task.train.size:
            raise ValueError(
                f"programs are of {self.task.train.size} examples to train on, got "
                f"{task.train.size}"
            )
        other = copy.copy(self)
        other.task, other.seeds, other.keys = task, tuple(seeds), keys_of(seeds)
        return other

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of states and resident examples: a copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def place(self, tree: Any) -> Any:
        """Copies to every device."""
        return jax.device_put(tree, self.replicated)

    def _take(self, take: Take, arrays: Any, index: Array) -> Batch:
        """A batch, spread over the devices."""
        spread = NamedSharding(self.mesh, PartitionSpec("batch"))
        index = lax.with_sharding_constraint(index, spread)
        return lax.with_sharding_constraint(dict(take(arrays, index)), spread)

    # Functions of a run

    def init(self) -> TrainState:
        """The state before the first step."""

        def build(key: Array) -> TrainState:
            model = self.task.build(nnx.Rngs(jax.random.fold_in(key, INIT)))
            _, kernels, rest = nnx.split(model, KernelParam, ...)  # type: ignore[misc]
            kernels, rest = nnx.to_pure_dict(kernels), nnx.to_pure_dict(rest)
            learned = (kernels, rest) if self._task_moves_kernels else rest
            return TrainState(kernels, rest, self.optimizer.init(learned), {})

        # Not under `jax.jit`, where each draw of a start value would be compiled anew.
        states = [build(self.keys[i]) for i in range(len(self.seeds))]
        state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        return self.place(state._replace(sums=self.no_sums()))

    def no_sums(self) -> dict[str, Array]:
        """Sums before the first step of an epoch: zeros."""
        names = (*self.metrics, *SEPARATIONS, "examples")
        # Arrays of their own: a state is donated to the step that follows it.
        return {name: jnp.zeros(len(self.keys), jnp.float32) for name in names}

    @functools.cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of the task."""

        def score(kernels: Any, rest: Any, arrays: Any) -> dict[str, Array]:
            model = nnx.merge(self.graphdef, kernels, rest)
            batch = self.task.train.take(arrays, jnp.zeros(1, jnp.int32))
            return self.task.score(model, batch, None)

        return tuple(jax.eval_shape(score, *self.shapes, dict(self.task.train.arrays)))

    @jitted()
    def order(self, keys: Array, epoch: Array) -> dict[str, Array]:
        """Indices of the examples of each step of an epoch, `(seeds, steps, size)`.

        The task sees each example once. A last batch that is not full is filled with
        examples that do not count. Stage I draws its batches anew at every step.
        """
        size, steps = self.task.train.size, self.steps_per_epoch
        draws = self.stage_one.steps if self.stage_one.schedule == "bilevel" else 0

        def of_seed(seed_key: Array) -> dict[str, Array]:
            key = jax.random.fold_in(jax.random.fold_in(seed_key, ORDER), epoch)
            task_key, stage_key = jax.random.split(key)
            order = jax.random.permutation(task_key, size)
            order = jnp.pad(order, (0, steps * self.batch_size - size))
            shape = (steps, draws * self.stage_batch)
            stage = jax.random.randint(stage_key, shape, 0, size)
            orders = {"task": order.reshape(steps, -1), "stage": stage}
            return {name: self._drawn(seed_key, x) for name, x in orders.items()}

        return jax.vmap(of_seed)(keys)

    @jitted()
    def stage_order(self, keys: Array, epoch: Array) -> Array:
        """Indices of the examples of each step of Stage I, `(seeds, steps, size)`.

        Examples that do not fill a batch are left out, in every epoch different ones.
        """
        size = self.task.train.size
        steps = size // self.stage_batch

        def of_seed(seed_key: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(seed_key, STAGE_ONE), epoch)
            order = jax.random.permutation(key, size)[: steps * self.stage_batch]
            return self._drawn(seed_key, order.reshape(steps, -1))

        return jax.vmap(of_seed)(keys)

    def _drawn(self, key: Array, index: Array) -> Array:
        """Rows of examples, by their numbers among the examples that a seed sees."""
        split = self.task.train
        if split.drawn_from is None:
            return index
        key = jax.random.fold_in(key, DRAW)
        return jax.random.permutation(key, split.drawn_from)[: split.size][index]

    @jitted(donate_argnums=1)
    def advance(
        self,
        keys: Array,
        state: TrainState,
        arrays: Any,
        order: dict[str, Array],
        first: Array,
        last: Array,
        offset: Array,
    ) -> TrainState:
        """Steps `first` to `last` of an order, whose first step is number `offset`.

        An order without the task has steps of Stage I alone.
        """
        one = self._step if "task" in order else self._step_of_stage_one

        def body(i: Array, state: TrainState) -> TrainState:
            rows = jax.tree.map(lambda x: x[:, i], order)
            step = self._over_seeds(one, (0, None, 0, 0, None))
            return step(state, arrays, rows, keys, offset + i)

        return lax.fori_loop(first, last, body, state)

    @jitted(static_argnums=4, static_argnames="drawn")
    def evaluate(
        self,
        keys: Array,
        state: TrainState,
        arrays: Any,
        number: Array,
        take: Take,
        last: Array | float = 1.0,
        *,
        drawn: bool = False,
    ) -> dict[str, Array]:
        """Sums of the metrics over the first `number` examples that `take` gives.

        Examples of a last batch that is not full count `last` times. If examples are
        `drawn`, each seed is judged on the examples that it is trained on.
        """
        size = self.batch_size

        def one(kernels: Any, rest: Any, key: Array) -> dict[str, Array]:
            model = nnx.merge(self.graphdef, kernels, rest)

            def body(i: Array, sums: dict[str, Array]) -> dict[str, Array]:
                index = i * size + jnp.arange(size)
                weight = jnp.where((i + 1) * size > number, last, 1.0)
                weight = jnp.where(index < number, weight, 0.0).astype(jnp.float32)
                index = jnp.minimum(index, number - 1)
                index = self._drawn(key, index) if drawn else index
                batch = self._take(take, arrays, index)
                metrics = self.task.score(model, batch, None)
                return {
                    name: total + (weight * metrics[name]).sum(dtype=jnp.float32)
                    for name, total in sums.items()
                }

            zeros = {name: jnp.zeros((), jnp.float32) for name in self.metrics}
            return lax.fori_loop(0, (number + size - 1) // size, body, zeros)

        parts = state.kernels, state.rest, keys
        return self._over_seeds(one, (0, 0, 0))(*parts)

    @jitted(static_argnums=3)
    def outputs(
        self,
        keys: Array,
        state: TrainState,
        inputs: tuple,
        seed: int = 0,
        **options: Any,
    ) -> Array:
        """Outputs of the model of one seed for some inputs."""
        del keys
        return self.model(state, seed)(*inputs, **options)

    def model(self, state: TrainState, seed: int = 0) -> Any:
        """The model of one seed."""
        pick = lambda tree: jax.tree.map(lambda x: x[seed], tree)  # noqa: E731
        return nnx.merge(self.graphdef, pick(state.kernels), pick(state.rest))

    def model_on_host(self, state: TrainState, seed: int = 0) -> Any:
        """The model of one seed with arrays that a program may hold as constants."""
        return self.model(jax.tree.map(jnp.asarray, jax.device_get(state)), seed)

    def _over_seeds(
        self, function: Callable[..., Any], axes: Sequence[int | None]
    ) -> Callable[..., Any]:
        """`jax.vmap` over seeds; without the axis, and faster, for a single seed."""
        if len(self.keys) > 1:
            return jax.vmap(function, axes)

        def single(*arguments: Any) -> Any:
            alone = [
                x if at is None else jax.tree.map(lambda leaf: leaf[0], x)
                for x, at in zip(arguments, axes, strict=True)
            ]
            return jax.tree.map(lambda leaf: leaf[None], function(*alone))

        return single

    @property
    def _task_moves_kernels(self) -> bool:
        """Whether the gradient of the task changes kernels too."""
        return self.stage_one.by_task or self.stage_one.schedule == "reference"

    def _step(
        self,
        state: TrainState,
        arrays: Any,
        rows: dict[str, Array],
        key: Array,
        number: Array,
    ) -> TrainState:
        """Algorithm 2 [algo:bi-level]: Stage I on the kernels, then the task."""
        if self.stage_one.schedule == "bilevel":
            batches = rows["stage"].reshape(self.stage_one.steps, self.stage_batch)
            views = jax.random.fold_in(jax.random.fold_in(key, VIEWS), number)
            keys = jax.random.split(views, self.stage_one.steps)
            state, _ = lax.scan(
                lambda state, x: (
                    self._separation_step(state, arrays, x[0], False, x[1]),
                    None,
                ),
                state,
                (batches, keys),
            )
        key = jax.random.fold_in(jax.random.fold_in(key, TASK), number)
        keys = jax.random.split(key)
        batch = self._take(self.task.train.take, arrays, rows["task"])
        batch = self.task.augment(batch, keys[0])
        counts = self._counts(number)
        examples = counts.sum()

        def parts(learned: Any) -> tuple[Any, Any]:
            """Kernels and all further parameters, from those that the task moves."""
            return learned if self._task_moves_kernels else (state.kernels, learned)

        def loss(learned: Any) -> tuple[Array, dict[str, Array]]:
            kernels, rest = parts(learned)
            model = nnx.merge(self.graphdef, kernels, rest)
            metrics = self.task.score(model, batch, keys[1])
            return (counts * metrics["loss"]).sum() / examples, metrics

        learned = (
            (state.kernels, state.rest) if self._task_moves_kernels else state.rest
        )
        gradients, metrics = jax.grad(loss, has_aux=True)(learned)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, learned)
        learned = optax.apply_updates(learned, updates)
        kernels, rest = parts(learned)
        sums = dict(state.sums)
        for name in self.metrics:
            sums[name] += (counts * metrics[name]).sum(dtype=jnp.float32)
        sums["examples"] += examples
        return TrainState(kernels, rest, optimizer, sums)

    def _step_of_stage_one(
        self,
        state: TrainState,
        arrays: Any,
        rows: dict[str, Array],
        key: Array,
        number: Array,
    ) -> TrainState:
        """A step of Stage I alone."""
        through = self.stage_one.schedule == "reference"
        key = jax.random.fold_in(jax.random.fold_in(key, VIEWS), number)
        return self._separation_step(state, arrays, rows["stage"], through, key)

    def _counts(self, number: Array) -> Array:
        """Weights of the examples of a step: 1, or 0 for examples that fill it up."""
        first = number % self.steps_per_epoch * self.batch_size
        place = first + jnp.arange(self.batch_size)
        return (place < self.task.train.size).astype(jnp.float32)

    def _separation_step(
        self, state: TrainState, arrays: Any, index: Array, through: bool, key: Array
    ) -> TrainState:
        """One step of Stage I on some examples."""
        keys = jax.random.split(key)
        batch = self._take(self.task.train.take, arrays, index)
        inputs = self.task.inputs(self.task.sample(batch, keys[0]))
        states = self.task.separate_states
        return separation_step(
            self.graphdef, self.stage_one, state, inputs, states, through, keys[1]
        )
