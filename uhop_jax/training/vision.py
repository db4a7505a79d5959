"""Image classification as a task: data, model, loss and augmentation from a config."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, UInt8
from ml_collections import ConfigDict

from uhop_jax import data
from uhop_jax._checks import check_choice, check_count
from uhop_jax.data import Images
from uhop_jax.layers import LinearFeatures
from uhop_jax.models import ViH, VisionHopfield
from uhop_jax.separation import separation_from_name
from uhop_jax.training.arms import arm_of
from uhop_jax.training.steps import Batch, Split, Task

MODELS = ("vih", "transformer")
DTYPES = ("float32", "bfloat16", "float16")


class Cell(NamedTuple):
    """One model of a study.

    Attributes:
      arm: name in `ARMS`.
      size: training images; 0 is all.
      patch: side of a patch in pixels.
    """

    arm: str
    size: int
    patch: int

    @property
    def title(self) -> str:
        size = f", {self.size} images" if self.size else ""
        return f"{self.arm}{size}, patch {self.patch}"


def task_of(config: ConfigDict, cell: Cell, train: Images, test: Images) -> Task:
    """The task of a cell on images that are there already.

    Raises:
      ValueError: if a value is out of range, or images do not fit.
    """
    classes = len(train.classes) or int(max(train.labels.max(), test.labels.max())) + 1
    shape = train.raw.shape[1:]
    for name, images in (("train", train), ("test", test)):
        if images.labels.min() < 0 or images.labels.max() >= classes:
            raise ValueError(
                f"labels of the {name} split must be 0 to {classes - 1}, got "
                f"{images.labels.min()} to {images.labels.max()}"
            )
        if images.raw.shape[1:] != shape:
            raise ValueError(
                f"train images have shape {shape}, {name} images {images.raw.shape[1:]}"
            )
    smoothing = float(config.train.label_smoothing)
    if not 0 <= smoothing < 1:
        raise ValueError(f"train.label_smoothing must be in [0, 1), got {smoothing}")
    flip, crop = bool(config.augment.flip), config.augment.crop
    check_count("augment.crop", crop, 0)
    if cell.size:
        train = data.subset(train, cell.size)

    def inputs(batch: Batch) -> tuple:
        return (scaled(batch["images"], train.top),)

    def score(model: Any, batch: Batch, key: Array | None) -> dict[str, Array]:
        logits = model(*inputs(batch), key=key).astype(jnp.float32)
        target = jax.nn.one_hot(batch["labels"], classes, dtype=jnp.float32)
        if key is not None and smoothing:
            target = optax.smooth_labels(target, smoothing)
        right = logits.argmax(-1) == batch["labels"]
        loss = optax.softmax_cross_entropy(logits, target)
        return {"loss": loss, "accuracy": right.astype(jnp.float32)}

    def changed(batch: Batch, key: Array) -> Batch:
        return dict(batch, images=augmented(batch["images"], key, flip, crop))

    def split_of(images: Images) -> Split:
        arrays = {"images": images.raw, "labels": images.labels.astype(np.int32)}
        return Split(
            arrays, len(images.raw), lambda x, i: {name: a[i] for name, a in x.items()}
        )

    build = model_of(config, cell, shape, classes)
    return Task(build, score, inputs, changed, split_of(train), split_of(test))


def model_of(
    config: ConfigDict, cell: Cell, image_shape: Any, classes: int
) -> Callable[[nnx.Rngs], nnx.Module]:
    """What builds the model of a cell.

    Raises:
      ValueError: if a value is out of range.
    """
    arm, options = arm_of(cell.arm), dict(config.model)
    name = options.pop("name")
    check_choice("model.name", name, MODELS)
    check_choice("model.dtype", options["dtype"], DTYPES)
    dtype = jnp.dtype(options.pop("dtype"))
    alpha = options.pop("alpha")
    parameters = {"alpha": alpha} if arm.separation == "entmax" else {}
    options["separation"] = separation_from_name(arm.separation, **parameters)
    options["beta"] = options["beta"] or None
    start = options.pop("kernel_start")
    options |= {"values": "direct" if arm.reference else "keys", "patch": cell.patch}
    options["separate_states"] = arm.reference
    depth, mlp_size = options.pop("depth"), options.pop("mlp_size")
    if name == "transformer":
        options |= {"depth": depth, "mlp_size": mlp_size or None}
    kind = ViH if name == "vih" else VisionHopfield

    def with_size(size: int, kernel: bool, rngs: nnx.Rngs) -> nnx.Module:
        def features() -> nnx.Module:
            return LinearFeatures(
                size,
                start=arm.start or start,
                use_bias=arm.reference,
                dtype=dtype,
                rngs=rngs,
            )

        return kind(
            image_shape,
            classes,
            kernel=features if kernel else False,
            dtype=dtype,
            rngs=rngs,
            **options | {"size": size},
        )

    size = options["size"]
    if arm.matched:
        wanted = parameters_of(functools.partial(with_size, size, True))
        while parameters_of(functools.partial(with_size, size, False)) < wanted:
            size += options["num_heads"]
    build = functools.partial(with_size, size, arm.kernel)
    parameters_of(build)  # speaks up early where options do not fit
    return build


def parameters_of(build: Callable[[nnx.Rngs], nnx.Module]) -> int:
    """Number of parameters of a model, which is not built for it."""
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model)))


def scaled(
    images: UInt8[Array, "*batch height width channels"], top: int
) -> Float[Array, "*batch height width channels"]:
    """Pixels in `[-1, 1]`."""
    return images.astype(jnp.float32) * (2 / top) - 1


def augmented(
    images: UInt8[Array, "n height width channels"], key: Array, flip: bool, crop: int
) -> UInt8[Array, "n height width channels"]:
    """Each image flipped or not, and shifted by up to `crop` pixels over black."""
    flip_key, crop_key = jax.random.split(key)
    number = images.shape[0]
    if flip:
        flipped = jax.random.bernoulli(flip_key, shape=(number, 1, 1, 1))
        images = jnp.where(flipped, images[:, :, ::-1], images)
    if crop:
        padding = ((0, 0), (crop, crop), (crop, crop), (0, 0))
        padded = jnp.pad(images, padding)
        corners = jax.random.randint(crop_key, (number, 2), 0, 2 * crop + 1)
        shape = images.shape[1:]

        def cut(image: Array, corner: Array) -> Array:
            start = (corner[0], corner[1], jnp.zeros((), corner.dtype))
            return lax.dynamic_slice(image, start, shape)

        images = jax.vmap(cut)(padded, corners)
    return images
