"""Image classifiers in which Hopfield layers take the place of attention [app:cls].

Both cut an image into patches, embed them linearly, add learned positions and a class
token, and read the class from that token (Dosovitskiy et al. 2020).
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from uhop_jax._checks import check_count
from uhop_jax.layers import Hopfield, dropped


class Patches(nnx.Module):
    """Tokens of an image: one for each patch, and the class token apart from them.

    Args:
      image_shape: `(height, width, channels)`.
      patch: side of a patch in pixels; it must divide height and width.
      size: dimension of tokens.
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
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape
        check_count("patch", patch, 1)
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
        self.embed = nnx.Linear(
            patch * patch * channels,
            size,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        init = nnx.initializers.normal(0.02)
        self.token = nnx.Param(init(rngs.params(), (1, size), param_dtype))
        positions = (self.number + 1, size)
        self.positions = nnx.Param(init(rngs.params(), positions, param_dtype))

    def __call__(
        self, images: Float[Array, "*batch height width channels"]
    ) -> tuple[Float[Array, "1 size"], Float[Array, "*batch patches size"]]:
        """The class token, which is that of all images, and those of the patches.

        Positions are added.
        """
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
        positions = self.positions[...].astype(tokens.dtype)
        token = jnp.asarray(self.token[...]).astype(tokens.dtype) + positions[:1]
        return token, tokens + positions[1:]


class ViH(nnx.Module):
    """One Hopfield layer: the class token retrieves from the patches [app:cls].

    Args:
      image_shape: `(height, width, channels)`.
      classes: number of classes.
      patch: side of a patch in pixels.
      size: dimension of tokens.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: for the start values.
      **options: of `Hopfield`.

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
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.patches = Patches(image_shape, patch, size, rngs=rngs, **dtypes)
        self.association = Hopfield(size, rngs=rngs, **dtypes, **options)
        self.head = nnx.Linear(size, classes, rngs=rngs, **dtypes)

    def __call__(
        self,
        images: Float[Array, "*batch height width channels"],
        *,
        key: Array | None = None,
    ) -> Float[Array, "*batch classes"]:
        """Logits; no dropout without a key."""
        token, patches = self.patches(images)
        return self.head(self.association(token, patches, key=key).squeeze(-2))


class VisionHopfield(nnx.Module):
    """A pre-norm transformer of Hopfield layers [app:cls], three of them by default.

    Args:
      image_shape: `(height, width, channels)`.
      classes: number of classes.
      patch: side of a patch in pixels.
      size: dimension of tokens.
      depth: blocks.
      num_heads: heads of each.
      mlp_size: hidden width of the MLPs; `4 * size` by default.
      dropout: of weights and of what each branch adds.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: for the start values.
      **options: of `Hopfield`.

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
        dropout: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_count("depth", depth, 1)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.patches = Patches(image_shape, patch, size, rngs=rngs, **dtypes)
        width = 4 * size if mlp_size is None else mlp_size
        options |= {"num_heads": num_heads, "dropout": dropout}
        self.blocks = nnx.List(
            [Block(size, width, rngs=rngs, **dtypes, **options) for _ in range(depth)]
        )
        self.norm = nnx.LayerNorm(size, rngs=rngs, **dtypes)
        self.head = nnx.Linear(size, classes, rngs=rngs, **dtypes)

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
            within = None if key is None else jax.random.fold_in(key, number)
            tokens = block(tokens, key=within)
        return self.head(self.norm(tokens[..., 0, :]))


class Block(nnx.Module):
    """Association of tokens with one another, then an MLP, both residual."""

    def __init__(
        self,
        size: int,
        mlp_size: int,
        *,
        dropout: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.norm_association = nnx.LayerNorm(size, rngs=rngs, **dtypes)
        self.norm_mlp = nnx.LayerNorm(size, rngs=rngs, **dtypes)
        self.association = Hopfield(
            size, dropout=dropout, rngs=rngs, **dtypes, **options
        )
        self.up = nnx.Linear(size, mlp_size, rngs=rngs, **dtypes)
        self.down = nnx.Linear(mlp_size, size, rngs=rngs, **dtypes)
        self.dropout = dropout

    def __call__(
        self, tokens: Float[Array, "*batch L size"], *, key: Array | None = None
    ) -> Float[Array, "*batch L size"]:
        """Tokens after both branches."""
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        found = self.association(self.norm_association(tokens), key=keys[0])
        tokens = tokens + dropped(found, self.dropout, keys[1])
        found = self.down(jax.nn.gelu(self.up(self.norm_mlp(tokens))))
        return tokens + dropped(found, self.dropout, keys[2])
