"""Image classifiers in which Hopfield layers take the place of attention [app:cls].

Both models cut an image into patches, embed them linearly, add a class token, and read
the class from that token (Dosovitskiy et al. 2020). Details that the paper's text
leaves open follow the code that its authors released (github.com/MAGICS-LAB/UHop,
commit 31c5791, `models.py` and `layers.py`): a ReLU and a LayerNorm before the head, a
class token drawn from N(0, 1), no positions, dropout, biases, and PyTorch's start
values. With the ReLU, one layer over one patch is an MLP with one hidden layer, not a
linear classifier.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from uhop_jax._checks import (
    check_count,
    check_floating,
    check_rate,
    check_rngs,
    check_sizes,
)
from uhop_jax.layers import Association, Hopfield, dropped
from uhop_jax.layers.features import fan_in_bound, fan_in_uniform


def _association() -> Association:
    """The association of a layer, by default."""
    return Association(dropout=0.1)


class Patches(nnx.Module):
    """Tokens of an image: one for each patch, and a separate class token.

    Args:
      image_shape: `(height, width, channels)`.
      patch: side of a patch in pixels; it must divide height and width.
      size: dimension of tokens.
      positions: add a learned position to each token.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: for the start values.

    Raises:
      ValueError: if the patch does not divide the image.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        patch: int,
        size: int,
        *,
        positions: bool,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        if np.shape(image_shape) != (3,):
            raise ValueError(
                f"image_shape must be (height, width, channels), got {image_shape!r}"
            )
        for number in image_shape:
            check_count("image_shape", number, 1)
        height, width, channels = image_shape
        check_count("patch", patch, 1)
        check_count("size", size, 1)
        check_floating("param_dtype", param_dtype)
        check_rngs(rngs)
        if height % patch or width % patch:
            raise ValueError(
                f"patch must divide the image, got patch {patch} and images of "
                f"{height} x {width}"
            )
        self.image_shape, self.patch = tuple(image_shape), patch
        self.number = (height // patch) * (width // patch)
        if self.number == 1:
            warnings.warn(
                f"a patch of {patch} x {patch} is the whole image: with one memory "
                "every weight is 1, whatever the separation, the kernel and beta",
                stacklevel=3,
            )
        self.embed = _linear(
            patch * patch * channels,
            size,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        token = jax.random.normal(rngs.params(), (1, size), param_dtype)
        self.token = nnx.Param(token)
        self.positions = nnx.data(None)
        if positions:
            init = nnx.initializers.normal(0.02)
            shape = (self.number + 1, size)
            self.positions = nnx.Param(init(rngs.params(), shape, param_dtype))

    def __call__(
        self, images: Float[Array, "*batch height width channels"]
    ) -> tuple[Float[Array, "1 size"], Float[Array, "*batch patches size"]]:
        """The class token, which all images share, and the tokens of the patches."""
        if images.shape[-3:] != self.image_shape:
            raise ValueError(
                f"images must have shape (..., {', '.join(map(str, self.image_shape))})"
                f", got {images.shape}"
            )
        batch, p = images.shape[:-3], self.patch
        height, width, channels = self.image_shape
        cut = images.reshape(*batch, height // p, p, width // p, p, channels)
        cut = jnp.swapaxes(cut, -4, -3).reshape(*batch, self.number, p * p * channels)
        tokens = self.embed(cut)
        token = jnp.asarray(self.token[...]).astype(tokens.dtype)
        if self.positions is None:
            return token, tokens
        positions = self.positions[...].astype(tokens.dtype)
        return token + positions[:1], tokens + positions[1:]


class ViH(nnx.Module):
    """One Hopfield layer: the class token retrieves from the patches [app:cls].

    The retrieved pattern passes a ReLU, a LayerNorm and the linear head.

    Args:
      image_shape: `(height, width, channels)`.
      classes: number of classes.
      patch: side of a patch in pixels.
      size: dimension of tokens.
      positions: add a learned position to each token.
      association: makes the association of the layer; by default a tenth of the weights
        over the patches is dropped. If an image is one patch, a dropped weight removes
        the whole image.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: for the start values.
      **options: further options of `Hopfield`.

    Raises:
      ValueError: if sizes do not fit.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        classes: int,
        *,
        patch: int = 32,
        size: int = 512,
        positions: bool = False,
        association: Callable[[], Association] = _association,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_count("classes", classes, 1)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.patches = Patches(
            image_shape, patch, size, positions=positions, rngs=rngs, **dtypes
        )
        options = _starts(size) | dtypes | options
        self.association = Hopfield(size, association(), rngs=rngs, **options)
        self.norm = nnx.LayerNorm(size, epsilon=1e-5, rngs=rngs, **dtypes)
        self.head = _linear(size, classes, rngs=rngs, **dtypes)

    def __call__(
        self,
        images: Float[Array, "*batch height width channels"],
        *,
        key: Array | None = None,
    ) -> Float[Array, "*batch classes"]:
        """Logits; no dropout without a key."""
        token, patches = self.patches(images)
        retrieved = self.association(token, patches, key=key).squeeze(-2)
        return self.head(self.norm(jax.nn.relu(retrieved)))


class VisionHopfield(nnx.Module):
    """A pre-norm transformer of Hopfield layers [app:cls], three of them by default.

    All other arguments are those of `ViH`.

    Args:
      depth: number of blocks.
      num_heads: heads of each block.
      mlp_size: hidden width of the MLPs; `4 * size` by default.
      association: makes the association of each block; by default a tenth of the
        weights is dropped.
      mlp_dropout: rate of dropout on the hidden layer and the output of the MLPs.

    Raises:
      ValueError: if sizes do not fit.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        classes: int,
        *,
        patch: int = 8,
        size: int = 512,
        depth: int = 3,
        num_heads: int = 4,
        mlp_size: int | None = None,
        positions: bool = False,
        association: Callable[[], Association] = _association,
        mlp_dropout: float = 0.3,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_count("classes", classes, 1)
        check_count("depth", depth, 1)
        check_sizes(mlp_size=mlp_size)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        check_rate("mlp_dropout", mlp_dropout)
        self.patches = Patches(
            image_shape, patch, size, positions=positions, rngs=rngs, **dtypes
        )
        width = 4 * size if mlp_size is None else mlp_size
        options |= {"num_heads": num_heads, "mlp_dropout": mlp_dropout} | dtypes
        self.blocks = nnx.data(
            [
                VisionBlock(size, width, association(), rngs=rngs, **options)
                for _ in range(depth)
            ]
        )
        self.norm_tokens = nnx.LayerNorm(size, rngs=rngs, **dtypes)
        self.norm = nnx.LayerNorm(size, epsilon=1e-5, rngs=rngs, **dtypes)
        self.head = _linear(size, classes, rngs=rngs, **dtypes)

    def __call__(
        self,
        images: Float[Array, "*batch height width channels"],
        *,
        key: Array | None = None,
    ) -> Float[Array, "*batch classes"]:
        """Logits; no dropout without a key."""
        token, patches = self.patches(images)
        token = jnp.broadcast_to(token, (*patches.shape[:-2], *token.shape))
        tokens = jnp.concatenate([token, patches], axis=-2)
        for number, block in enumerate(self.blocks):
            block_key = None if key is None else jax.random.fold_in(key, number)
            tokens = block(tokens, key=block_key)
        token = self.norm_tokens(tokens[..., 0, :])
        return self.head(self.norm(jax.nn.relu(token)))


class VisionBlock(nnx.Module):
    """Self-association of the tokens, then an MLP, both as residual branches."""

    def __init__(
        self,
        size: int,
        mlp_size: int,
        association: Association,
        *,
        mlp_dropout: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.norm_association = nnx.LayerNorm(size, rngs=rngs, **dtypes)
        self.norm_mlp = nnx.LayerNorm(size, rngs=rngs, **dtypes)
        options = _starts(size) | dtypes | options
        self.association = Hopfield(size, association, rngs=rngs, **options)
        init = nnx.initializers
        dtypes |= {"kernel_init": init.xavier_uniform(), "bias_init": init.normal(1e-6)}
        self.up = nnx.Linear(size, mlp_size, rngs=rngs, **dtypes)
        self.down = nnx.Linear(mlp_size, size, rngs=rngs, **dtypes)
        self.mlp_dropout = mlp_dropout

    def __call__(
        self, tokens: Float[Array, "*batch L size"], *, key: Array | None = None
    ) -> Float[Array, "*batch L size"]:
        """Tokens after both branches."""
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        tokens = tokens + self.association(self.norm_association(tokens), key=keys[0])
        hidden = jax.nn.gelu(self.up(self.norm_mlp(tokens)), approximate=False)
        hidden = dropped(hidden, self.mlp_dropout, keys[1])
        return tokens + dropped(self.down(hidden), self.mlp_dropout, keys[2])


def _starts(size: int) -> dict[str, Any]:
    """Initializers of projections from `size` dimensions, as `Hopfield` options."""
    return {"weight_init": fan_in_uniform(), "bias_init": fan_in_bound(size)}


def _linear(size: int, out: int, **options: Any) -> nnx.Linear:
    """A linear map with PyTorch's start values."""
    options["kernel_init"], options["bias_init"] = fan_in_uniform(), fan_in_bound(size)
    return nnx.Linear(size, out, **options)
