"""Training steps: parameters that schedules move, and equality on any machine."""

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import FAST, ROOT, assert_close, config_of, slow_where
from flax import nnx

from uhop_jax import DeepLoss
from uhop_jax.contrastive import stage_one_loss
from uhop_jax.data import Images, labelled_images
from uhop_jax.layers import Association, KernelParam, separation_losses
from uhop_jax.models import ViH
from uhop_jax.training import (
    ARMS,
    Data,
    Goal,
    Options,
    Split,
    StageOneOptions,
    Task,
    Trainer,
    train,
)
from uhop_jax.training.cells import ImageCell
from uhop_jax.training.checkpoints import Checkpoints
from uhop_jax.training.examples import Phase
from uhop_jax.training.judging import best_epoch, judged_step
from uhop_jax.training.task import SEPARATIONS
from uhop_jax.training.vision import (
    augmented,
    channel_statistics,
    standardised,
    task_of,
)

N = 48


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax and Flax themselves mix dtypes under 64-bit."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def digits(number=N):
    images = labelled_images("digits", split="train")
    return images._replace(raw=images.raw[:number], labels=images.labels[:number])


def trainer_of(arm="MHM + U-Hop", *, images=None, seeds=(0,), batch=8, **options):
    config = config_of("vision")
    config.model.update(
        {"size": 8, "depth": 1, "num_heads": 2, "mlp_size": 8, "dropout": 0.1}
    )
    config.augment.crop = options.pop("crop", 0)
    images = digits() if images is None else images
    task = task_of(config, ImageCell(arm, 0, 4), images, images)
    row = ARMS[arm]
    stage = StageOneOptions(row.schedule, by_task=row.by_task, batch_size=batch)
    devices = options.pop("devices", jax.devices()[:1])
    return Trainer(
        task,
        optax.adam(1e-2),
        stage._replace(**options),
        batch_size=batch,
        seeds=seeds,
        devices=devices,
    )


def run(trainer, state, *, epoch=0, on_device=True, phase="task"):
    """Runs one epoch and returns its last state."""
    data = Data(trainer, on_device=on_device)
    part = Phase(phase, 1, trainer.steps_per_epoch)
    *_, (_, last) = data.run(state, part, epoch, 0)
    return last


def assert_equal(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def changed(before, after):
    return [
        bool((np.asarray(a) != np.asarray(b)).any())
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ]


def host(tree):
    return jax.tree.map(lambda x: np.array(x), tree)


def test_pieces_streams_and_seeds_equal_one_run():
    trainer = trainer_of(crop=1)
    arrays, order = trainer.place(dict(trainer.task.train.arrays)), trainer.order(0)
    whole = host(trainer.advance(trainer.init(), arrays, order, 0, 6, 0))
    state = trainer.advance(trainer.init(), arrays, order, 0, 1, 0)
    state = trainer.advance(state, arrays, order, 1, 6, 0)
    assert_equal(whole, state)
    assert_equal(whole, run(trainer, trainer.init(), on_device=False))
    assert all(changed(whole.rest, run(trainer, trainer.init(), epoch=1).rest))

    together = trainer_of(crop=1, seeds=(3, 0))
    trained = host(run(together, together.init()))
    later = jax.tree.map(lambda x: x[1:], (trained.kernels, trained.rest, trained.sums))
    alone = (whole.kernels, whole.rest, whole.sums)
    for a, b in zip(jax.tree.leaves(later), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert any((x[0] != x[1]).any() for x in jax.tree.leaves(trained.rest))


def test_other_seeds_have_the_same_programs(compilations):
    trainer = trainer_of()
    run(trainer, trainer.init())
    other = trainer.on(trainer.task, (3,))
    start, number = other.init(), len(compilations)
    last = host(run(other, start))
    assert len(compilations) == number
    fresh = trainer_of(seeds=(3,))
    assert_equal(last, run(fresh, fresh.init()))
    assert trainer.seeds == (0,)
    with pytest.raises(ValueError, match=r"programs are of 1 seeds, got \(1, 2\)"):
        trainer.on(trainer.task, (1, 2))


def test_an_epoch_sees_every_example_once():
    trainer = trainer_of(seeds=(0, 1))
    order = trainer.order(0)
    for rows in np.asarray(order["task"]):
        assert sorted(rows.ravel()) == list(range(N))
    assert order["stage"].shape == (2, 6, 8)
    assert any(changed(order["task"], trainer.order(1)["task"]))


SCHEDULES = {  # which of kernels and other parameters move
    "MHM + U-Hop": (True, True),
    "MHM + U-Hop, then task": (True, True),
    "MHM + untrained kernel": (False, True),
    "MHM + kernel by task": (True, True),
}


@slow_where(lambda arm: arm.endswith(("then task", "by task")))
@pytest.mark.parametrize("arm", SCHEDULES)
def test_what_an_epoch_moves(arm):
    trainer = trainer_of(arm)
    before = host(trainer.init())
    after = run(trainer, trainer.init())
    kernels, rest = SCHEDULES[arm]
    assert all(x == kernels for x in changed(before.kernels, after.kernels))
    assert all(x == rest for x in changed(before.rest, after.rest))
    if arm == "MHM + U-Hop":  # the kernels as Stage I alone leaves them, step by step
        loss, gap = (float(after.sums[n][0]) / 6 for n in SEPARATIONS)
        # One memory is separated already: its loss and its bound are zero.
        assert loss < -1 and 0 < gap < loss + 4 * 4 / 3


@pytest.mark.parametrize("arm", ["MHM + U-Hop, warm-up", "MHM + U-Hop, reference"])
def test_stage_one_before_the_task(arm):
    trainer = trainer_of(arm)
    before = host(trainer.init())
    after = run(trainer, trainer.init(), phase="stage_one")
    # The bias that the authors' kernels have moves none of the distances.
    assert any(changed(before.kernels, after.kernels))
    embedding = changed(before.rest["patches"]["embed"], after.rest["patches"]["embed"])
    assert all(embedding) == (arm == "MHM + U-Hop, reference")
    assert_equal(before.rest["head"], after.rest["head"])


def test_stage_one_steps_are_sgd_on_the_separation_loss():
    """Algorithm 2 written out: N_i steps on kernels, then one on the task."""
    trainer = trainer_of(steps=3, learning_rate=0.05, loss=DeepLoss(t=2.0))
    order = trainer.order(0)
    first = host(trainer.init())
    kernels, rest = jax.tree.map(lambda x: x[0], (first.kernels, first.rest))
    images = trainer.task.train.arrays["images"]
    pixels = standardised(jnp.asarray(images), channel_statistics(digits().raw))

    @jax.jit
    @jax.grad
    def slope_of(kernels, index):
        model = nnx.merge(trainer.graphdef, kernels, rest)
        return separation_losses(model, pixels[index], loss=DeepLoss()).loss.mean()

    for index in np.asarray(order["stage"][0, 0]).reshape(3, 8):
        slope = slope_of(kernels, index)
        kernels = jax.tree.map(lambda w, g: w - 0.05 * g, kernels, slope)
    arrays = trainer.place(dict(trainer.task.train.arrays))
    after = trainer.advance(trainer.init(), arrays, order, 0, 1, 0)
    for a, b in zip(
        jax.tree.leaves(kernels), jax.tree.leaves(after.kernels), strict=True
    ):
        assert_close(b[0], a, scale=10)


def squared_errors(errors, batch):
    """A task whose example `i` has the error `errors[i]` under every model."""

    def build(rngs):
        return nnx.Linear(1, 1, rngs=rngs)

    def score(model, batch, key):
        del model, key
        return {
            "loss": batch["error"] ** 2,
            "right": (batch["error"] == 1).astype(float),
        }

    def take(arrays, index):
        return {name: x[index] for name, x in arrays.items()}

    split = Split({"error": np.asarray(errors, np.float32)}, len(errors), take)
    task = Task(build, score, lambda b: (b["error"],), split, split)
    return Trainer(
        task,
        optax.sgd(0.1),
        StageOneOptions(),
        batch_size=batch,
        seeds=(0,),
        devices=jax.devices()[:1],
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("batch", [1, 2, 3, 10])
@pytest.mark.parametrize("on_device", [True, False])
def test_the_test_split_is_whole_for_every_batch_size(batch, on_device):  # UC-34
    trainer = squared_errors([1, 1, 1, 1, 5], batch)
    scores = Data(trainer, on_device=on_device).evaluate(trainer.init(), "test")
    assert_close(scores["loss"], [5.8], floor=1e-6)
    np.testing.assert_allclose(np.sqrt(scores["loss"]), [2.40831892], rtol=1e-7)
    assert_close(scores["right"], [0.8], floor=1e-6)
    # The mean over batches, in which a partial last batch counts as a full batch.
    split = trainer.task.test._replace(by_batch=True)
    trainer.task = trainer.task._replace(test=split)
    scores = Data(trainer, on_device=on_device).evaluate(trainer.init(), "test")
    expected = {1: 5.8, 2: (1 + 1 + 25) / 3, 3: (1 + (1 + 25) / 2) / 2, 10: 5.8}
    assert_close(scores["loss"], [expected[batch]], floor=1e-6)


DEVICES = """
import jax, numpy as np
from test_training import trainer_of, run, host
from uhop_jax.training import Data
jax.config.update("jax_numpy_rank_promotion", "allow")
jax.config.update("jax_numpy_dtype_promotion", "standard")
assert len(jax.devices()) == 8
results = []
for devices in (jax.devices()[:1], jax.devices()):
    trainer = trainer_of(devices=devices)
    state = run(trainer, trainer.init())
    test = Data(trainer).evaluate(state, "test")
    results.append(host((state, test)))
for a, b in zip(*(jax.tree.leaves(x) for x in results), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
np.testing.assert_array_equal(results[0][1]["accuracy"], results[1][1]["accuracy"])
"""


def test_eight_devices_equal_one():
    environment = os.environ | {
        "XLA_FLAGS": f"{FAST} --xla_force_host_platform_device_count=8",
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
    }
    result = subprocess.run(
        [sys.executable, "-c", DEVICES], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_run_with_infinite_loss_stops_and_keeps_its_checkpoints(tmp_path):
    trainer = trainer_of()
    goal, options = Goal(1, "accuracy"), Options(progress=False)
    train(trainer, goal, tmp_path, options=options)
    wild = Trainer(
        trainer.task,
        optax.adam(1e30),
        trainer.stage_one,
        batch_size=8,
        seeds=(0,),
        devices=jax.devices()[:1],
    )
    with pytest.raises(FloatingPointError, match="loss is no longer finite in epoch"):
        train(wild, Goal(3, "accuracy"), tmp_path, options=options)
    assert (tmp_path / "checkpoints" / "6").is_dir()
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2


def test_patience_ends_a_run(tmp_path):
    trainer = squared_errors([1, 1, 1, 1, 5], 5)
    goal = Goal(10, "loss", least=True, patience=2)
    rows = train(trainer, goal, tmp_path, options=Options(progress=False))
    assert [row["epoch"] for row in rows] == [1, 2, 3]


def test_the_judged_checkpoint_is_kept_and_never_a_nan(tmp_path):
    losses = [3.0, 1.0, np.nan, 1.0, 5.0, 2.0]
    rows = [
        {"phase": "task", "epoch": n, "step": n, "validation_loss": x}
        for n, x in enumerate(losses, start=1)
    ]
    trainer, goal = squared_errors([1, 2], 2), Goal(6, "loss", least=True)
    trainer.task = trainer.task._replace(validation=trainer.task.test)
    for restarted in (False, True):  # in one run, and restarted before each step
        directory = tmp_path / str(restarted)
        for step in range(1, 7):
            if step == 1 or restarted:
                checkpoints = Checkpoints(directory)
            keep = judged_step(trainer, goal, rows[:step])
            checkpoints.save(step, {"x": jnp.full(2, step)}, keep)
            if step == 6 or restarted:
                checkpoints.close()
        assert keep == 2  # the first of equal epochs
        assert sorted(int(p.name) for p in directory.iterdir()) == [2, 5, 6]
        checkpoints = Checkpoints(directory, read_only=True)
        state = checkpoints.restore(2, {"x": jnp.zeros(2, jnp.int64)})
        with pytest.raises(ValueError, match="there is no checkpoint .*3; choose"):
            checkpoints.restore(3, {"x": jnp.zeros(2, jnp.int64)})
        checkpoints.close()
        assert int(state["x"][0]) == 2
    nothing = [dict(row, validation_loss=np.nan) for row in rows]
    assert judged_step(trainer, goal, nothing) == 1
    assert judged_step(trainer, goal, []) is None
    trainer.task = trainer.task._replace(validation=None)
    assert judged_step(trainer, goal, rows) == 6  # nothing is chosen by the test split
    assert best_epoch(rows, "validation_loss", True) == 2
    assert best_epoch(rows, "validation_loss", False) == 5


def test_augmentation():
    images = jnp.arange(2 * 4 * 4, dtype=jnp.uint8).reshape(2, 4, 4, 1)
    keys = jax.random.split(jax.random.key(0), 40)
    np.testing.assert_array_equal(augmented(images, keys[0], False, 0), images)
    flips = {bool((augmented(images, k, True, 0)[0] == images[0]).all()) for k in keys}
    assert flips == {True, False}
    corners = set()
    for key in keys:
        moved = np.asarray(augmented(images, key, False, 1)[1, ..., 0])
        padded = np.pad(np.asarray(images[1, ..., 0]), 1)
        corners |= {
            (i, j)
            for i in range(3)
            for j in range(3)
            if (padded[i : i + 4, j : j + 4] == moved).all()
        }
    assert len(corners) == 9


WRONG = [
    ({"learning_rate": 0.0}, "stage_one.learning_rate must be positive"),
    ({"steps": 0}, "stage_one.steps must be at least 1, got 0"),
    ({"loss": "mean"}, "loss must be a separation loss .*, got 'mean'"),
    ({"loss": DeepLoss(t=0.0)}, "stage_one.t must be positive"),
    (
        {"loss": stage_one_loss("contrastive", masked=2.0)},
        r"stage_one.masked must be in \[0, 1\], got 2.0",
    ),
    ({"seeds": ()}, "seeds must name at least one seed"),
    ({"batch": 0}, "batch_size must be at least 1, got 0"),
    ({"arm": "MHM", "schedule": "bilevel"}, "'bilevel' needs a model with kernels"),
]


@pytest.mark.parametrize("options, message", WRONG)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(**options)


def test_wrong_images():
    good = digits()
    labels = good.labels.copy()
    labels[3] = -1
    with pytest.raises(ValueError, match="labels of the train split must be 0 to 9"):
        trainer_of(images=good._replace(labels=labels))
    other = Images(np.zeros((4, 6, 8, 1), np.uint8), np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="patch must divide the image, got patch 4"):
        trainer_of(images=other)
    config = config_of("vision")
    with pytest.raises(ValueError, match=r"train images have shape \(8, 8, 1\), test"):
        task_of(config, ImageCell("MHM", 0, 2), good, other)


def test_one_patch_is_warned_about():
    with pytest.warns(UserWarning, match="every weight is 1"):
        config = config_of("vision")
        config.model.size = 8
        task = task_of(config, ImageCell("MHM", 0, 8), digits(), digits())
        task.build(nnx.Rngs(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_of()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a patch of")
def test_with_one_memory_sparse_and_dense_are_one_model():
    """The paper's CIFAR setting, with the kernel too."""
    images = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4, 1)))

    def logits_and_slopes(separation="softmax", **options):
        options["association"] = lambda: Association(separation)
        model = ViH((4, 4, 1), 5, patch=4, size=8, rngs=nnx.Rngs(0), **options)
        graphdef, state = nnx.split(model)
        logits, pull = jax.vjp(lambda s: nnx.merge(graphdef, s)(images), state)
        slope = pull(jnp.sin(logits))[0]
        return logits, jax.tree.leaves(nnx.filter_state(slope, nnx.Not(KernelParam)))

    dense = logits_and_slopes()
    for options in ({"separation": "sparsemax"}, {"kernel": True}):
        for a, b in zip(
            jax.tree.leaves(dense),
            jax.tree.leaves(logits_and_slopes(**options)),
            strict=True,
        ):
            assert_close(a, b)


def test_kernels_are_the_parameters_of_stage_one():
    trainer = trainer_of()
    model = trainer.task.build(nnx.Rngs(0))
    _, kernels, _ = nnx.split(model, KernelParam, ...)
    assert jax.tree.leaves(kernels)[0].shape == (8, 8)


def test_each_seed_draws_its_own_examples_once_for_all_epochs():
    task = trainer_of().task
    train = task.train._replace(size=10, drawn_from=N)
    seen = []
    for seeds in ((0, 1), (1,)):
        trainer = Trainer(
            task._replace(train=train),
            optax.adam(1e-2),
            StageOneOptions(schedule="warmup", batch_size=5),
            batch_size=4,
            seeds=seeds,
            devices=jax.devices()[:1],
        )
        orders = [np.asarray(trainer.order(epoch)["task"]) for epoch in (0, 1)]
        stage = np.asarray(trainer.stage_order(0))
        for rows in orders:
            assert rows.shape == (
                len(seeds),
                3,
                4,
            )  # the last batch has two examples for padding
        each = [{*r.ravel()[:10]} for r in orders[0]]
        for number, examples in enumerate(each):
            assert len(examples) == 10
            assert {*orders[1][number].ravel()[:10]} == examples
            assert {*stage[number].ravel()} == examples
        seen.append(each)
    assert seen[0][1] == seen[1][0] and seen[0][0] != seen[0][1]
    # Evaluated without dropout, a seed sees its own training examples.
    arrays = trainer.place(dict(train.arrays))
    state = trainer.init()
    scores = trainer.evaluate(state, arrays, 10, train.take, drawn=True)
    rows = np.asarray(sorted(seen[1][0]))
    part = {name: jnp.asarray(x[rows]) for name, x in train.arrays.items()}
    expected = trainer.evaluate(state, part, 10, train.take)
    assert_close(scores["loss"], expected["loss"], scale=10)


def test_a_partial_last_batch_counts_only_its_examples():
    """An epoch of two steps by hand: 5 examples, then 2 examples and 3 for padding."""
    trainer = trainer_of("MHM")
    train, score = trainer.task.train._replace(size=7), trainer.task.score
    trainer = Trainer(
        trainer.task._replace(
            train=train, score=lambda model, batch, key: score(model, batch, None)
        ),
        optax.sgd(0.1),
        StageOneOptions(),
        batch_size=5,
        seeds=(0,),
        devices=jax.devices()[:1],
    )
    assert trainer.steps_per_epoch == 2
    state = host(trainer.init())
    order = np.asarray(trainer.order(0)["task"])[0]
    rest = jax.tree.map(lambda x: x[0], state.rest)
    batches = order[0], order[1][:2]

    def loss(rest, rows):
        model = nnx.merge(trainer.graphdef, state.kernels, rest)
        batch = train.take({k: jnp.asarray(v) for k, v in train.arrays.items()}, rows)
        return trainer.task.score(model, batch, None)["loss"].mean()

    total = 0.0
    for rows in batches:
        value, slope = jax.jit(jax.value_and_grad(loss))(rest, jnp.asarray(rows))
        total += len(rows) * float(value)
        rest = jax.tree.map(lambda w, g: w - 0.1 * g, rest, slope)
    after = run(trainer, trainer.init())
    for a, b in zip(jax.tree.leaves(rest), jax.tree.leaves(after.rest), strict=True):
        assert_close(b[0], a, scale=30)
    assert float(after.sums["examples"][0]) == 7
    assert float(after.sums["loss"][0]) == pytest.approx(total, rel=1e-4)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:a patch of")
@pytest.mark.parametrize("reference", [False, True])
def test_one_patch_is_an_mlp_with_one_hidden_layer(reference):
    """The released classifier in matrices: W_V W_K y, or W_V y, ReLU, LayerNorm."""
    options = {"value_size": 8 if reference else None, "kernel": reference}
    model = ViH((4, 4, 3), 5, patch=4, size=8, rngs=nnx.Rngs(0), **options)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4, 4, 3)))

    def apply(layer, x):
        w, b = (np.asarray(p[...], np.float64) for p in (layer.kernel, layer.bias))
        return x @ w.reshape(x.shape[-1], -1) + b.ravel()

    layer = model.association.projections
    y = apply(model.patches.embed, np.asarray(images, np.float64).reshape(6, -1))
    y = apply(layer.value, y if reference else apply(layer.key, y))
    h = np.maximum(apply(layer.out, y), 0)
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
    assert_close(model(images), apply(model.head, h))
    # A dropped weight removes the image: all such draws have one answer.
    drawn = np.asarray(
        model(jnp.tile(images[:1], (400, 1, 1, 1)), key=jax.random.key(0))
    )
    answers, counts = np.unique(drawn.round(3), axis=0, return_counts=True)
    assert len(answers) == 2 and 20 <= counts.min() <= 60  # of 400, one in ten


def test_start_values_equal_the_start_values_of_the_release():
    """Uniform within 1 / sqrt(fan in) of zero; a class token from N(0, 1)."""
    model = ViH((8, 8, 1), 5, patch=4, size=64, rngs=nnx.Rngs(0))
    for layer, fan_in in (
        (model.patches.embed, 16),
        (model.association.projections.query, 64),
        (model.association.projections.out, 64),
        (model.head, 64),
    ):
        for parameter in (layer.kernel, layer.bias):
            values = np.abs(np.asarray(parameter[...]))
            assert values.max() <= fan_in**-0.5
            if values.size > 1000:
                assert values.max() > 0.99 * fan_in**-0.5
                assert values.mean() == pytest.approx(fan_in**-0.5 / 2, rel=0.1)
    assert np.asarray(model.patches.token[...]).std() == pytest.approx(1, rel=0.3)


def test_images_are_standardised_by_their_train_split():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 200, (30, 5, 4, 3)).astype(np.uint8)
    images[..., 2] = 7  # without spread
    pixels = np.asarray(standardised(jnp.asarray(images), channel_statistics(images)))
    flat = pixels.reshape(-1, 3)
    np.testing.assert_allclose(flat.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(flat.std(0), [1, 1, 0], atol=1e-5)
