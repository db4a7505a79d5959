"""STanHop-Net, a forecaster of sparse Hopfield layers [app:ts].

Wu et al. 2024 (ICLR). Tokens are segments of one series; a block associates each
series with itself over time, then the series with one another through a few pooled
patterns. The preset `paper` is the model as the paper describes it. The preset
`released` reproduces the oddities of the code that the authors released, for
comparison.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from uhop_jax._checks import check_choice, check_count, check_rngs, is_traced
from uhop_jax.layers.features import modules_of
from uhop_jax.models.stanhop_parts import (
    Block,
    Builder,
    DecoderLayer,
    Merge,
    normal,
    split_key,
)
from uhop_jax.separation import Separation

PRESETS = ("paper", "released")
POOL_QUERIES = ("position", "shared")


class STanHop(nnx.Module):
    """Forecasts the `out_len` steps that follow `in_len` steps of several series.

    Args:
      series: number of series, `D`.
      in_len: steps of the input, `L`.
      out_len: steps of the forecast, `H`.
      segment: steps of a segment, `P`.
      scales: number of encoder scales, `N`; each scale after the first merges segments.
      merge: number of segments that a scale merges into one, `w`.
      size: dimension of tokens, `d`.
      mlp_size: hidden width of a block's MLPs, `f`.
      num_heads: heads of every layer.
      pooled: number of patterns through which the series see one another, `c`.
      pool_queries: `position` learns separate pooling queries for each segment,
        `shared` learns one set for all.
      dropout: rate of dropout, on weights and on the output of each residual branch.
      separation: separation of every layer; None is entmax with an `alpha` that each
        layer learns.
      alpha_start: start of `raw`, where a learned `alpha` is `1 + sigmoid(raw)`; None
        draws it from `N(0, 1)`.
      alpha_per_head: learn an `alpha` for each head.
      kernel: True for linear features, or a function that makes the kernel of a layer;
        each layer has its own.
      preset: `paper` or `released`.
      residual_mean: add the mean of the window to the forecast.
      dtype: of the computation; None follows inputs and parameters.
      param_dtype: of the parameters.
      rngs: for the start values.

    Raises:
      ValueError: if a number is out of range or a name unknown.
    """

    def __init__(
        self,
        series: int,
        in_len: int,
        out_len: int,
        *,
        segment: int = 12,
        scales: int = 1,
        merge: int = 2,
        size: int = 256,
        mlp_size: int = 512,
        num_heads: int = 4,
        pooled: int = 10,
        pool_queries: str = "position",
        dropout: float = 0.1,
        separation: Separation | str | None = None,
        alpha_start: float | None = None,
        alpha_per_head: bool = False,
        kernel: bool | Callable[[], nnx.Module] = False,
        preset: str = "paper",
        residual_mean: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        counts = dict(series=series, in_len=in_len, out_len=out_len, segment=segment)
        counts |= dict(scales=scales, merge=merge, mlp_size=mlp_size, pooled=pooled)
        for name, count in counts.items():
            check_count(name, count, 1)
        check_choice("preset", preset, PRESETS)
        check_rngs(rngs)
        check_choice("pool_queries", pool_queries, POOL_QUERIES)
        self.sizes = (series, in_len, out_len)
        self.segment, self.residual_mean = segment, residual_mean
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        layers = Builder(
            size=size,
            options={
                "num_heads": num_heads,
                "kernel": kernel,
                "weight_init": nnx.initializers.zeros,  # `start_linear_maps` draws them
                "out_size": 0 if preset == "released" else None,
                **dtypes,
            },
            dropout=dropout,
            separation=separation,
            alpha_start=alpha_start,
            alpha_per_head=alpha_per_head,
            released=preset == "released",
            rngs=rngs,
        )
        per_position = pool_queries == "position" and preset == "paper"

        def block(segments: int) -> Block:
            sets = (segments,) if per_position else ()
            return Block(layers, mlp_size, pooled, sets, dropout)

        segments = -(-in_len // segment)
        self.embed = layers.linear(segment, size)
        self.positions = normal((series, segments, size), param_dtype, rngs)
        self.norm = layers.norm()
        lengths = [segments]
        merges = []
        for _ in range(scales - 1):
            merges.append(Merge(layers, merge))
            lengths.append(-(-lengths[-1] // merge))
        self.encoder = nnx.data([block(length) for length in lengths])
        self.merges = nnx.data(merges)
        ahead = -(-out_len // segment)
        self.start = normal((series, ahead, size), param_dtype, rngs)
        self.decoder = nnx.data(
            [
                DecoderLayer(layers, block(ahead), segment, dropout)
                for _ in range(scales + 1)
            ]
        )
        start_linear_maps(self, rngs)

    def __call__(
        self,
        inputs: Float[Array, "*batch in_len series"],
        *,
        bank: Float[Array, "K in_len series"] | None = None,
        bank_weight: float = 1.0,
        hint: Float[Array, "*batch series segments size"] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "*batch out_len series"]:
        """The forecast; no dropout without a key.

        Args:
          inputs: windows.
          bank: past windows from which the first block retrieves too (the plug-and-play
            memory), with the parameters of that block and without training.
          bank_weight: weight of the patterns retrieved from the bank; at 0 the bank is
            left out.
          hint: tokens that are added to the decoder's input.
          key: key of `jax.random` for dropout.

        Returns:
          The forecast of every window.

        Raises:
          ValueError: if the inputs or the bank do not have the model's shape.
        """
        series, in_len, out_len = self.sizes
        for name, given in (("inputs", inputs), ("bank", bank)):
            if given is not None and given.shape[-2:] != (in_len, series):
                raise ValueError(
                    f"{name} must have shape (..., {in_len}, {series}), got "
                    f"{given.shape}"
                )
        keys = iter(split_key(key, len(self.encoder) + len(self.decoder)))
        tokens = self.embedded(inputs)
        bank_tokens = None
        if bank is not None and bank.shape[0] and bank_weight:
            stored = self.encoder[0].over_time(self.embedded(bank), None)
            bank_tokens = jnp.moveaxis(stored, 0, 1).reshape(
                series, -1, tokens.shape[-1]
            )
        scales = [tokens]
        for number, block in enumerate(self.encoder):
            if number:
                tokens = self.merges[number - 1](tokens)
            tokens = block(
                tokens,
                bank=bank_tokens if number == 0 else None,
                bank_weight=bank_weight,
                key=next(keys),
            )
            scales.append(tokens)
        start = self.start[...].astype(tokens.dtype)
        ahead = jnp.broadcast_to(start, (*inputs.shape[:-2], *start.shape))
        if hint is not None:
            ahead = ahead + hint.astype(ahead.dtype)
        total: Any = 0.0
        for layer, encoded in zip(self.decoder, scales, strict=True):
            ahead, part = layer(ahead, encoded, key=next(keys))
            total = total + part
        flat = total.reshape(*total.shape[:-2], -1)[..., :out_len]
        forecast = jnp.swapaxes(flat, -1, -2)
        if self.residual_mean:
            forecast = forecast + inputs.mean(-2, keepdims=True).astype(forecast.dtype)
        return forecast

    def embedded(
        self, inputs: Float[Array, "*batch in_len series"]
    ) -> Float[Array, "*batch series segments size"]:
        """Tokens of the segments, with their positions, after a LayerNorm."""
        tokens = self.embed(segments_of(inputs, self.segment))
        return self.norm(tokens + self.positions[...].astype(tokens.dtype))


def segments_of(
    inputs: Float[Array, "*batch in_len series"], segment: int
) -> Float[Array, "*batch series segments segment"]:
    """Cuts each series into segments; copies of the first step fill the first one."""
    missing = -inputs.shape[-2] % segment
    if missing:
        first = jnp.repeat(inputs[..., :1, :], missing, axis=-2)
        inputs = jnp.concatenate([first, inputs], axis=-2)
    columns = jnp.swapaxes(inputs, -1, -2)
    count = columns.shape[-1] // segment
    return columns.reshape(*columns.shape[:-1], count, segment)


def start_linear_maps(module: nnx.Module, rngs: nnx.Rngs) -> None:
    """Draws weights and biases from `U(-1, 1) / sqrt(inputs)`, as PyTorch does.

    One draw serves all linear maps of the module, and is compiled once.
    """
    places = []  # modules, names of variables, variables and bounds
    for node in modules_of(module):
        if isinstance(node, (nnx.Linear, nnx.LinearGeneral)):
            inputs = node.in_features
            number = inputs if isinstance(inputs, int) else math.prod(inputs)
            for name in ("kernel", "bias"):
                if (variable := getattr(node, name)) is not None:
                    places.append((node, name, variable, number**-0.5))
    ends = np.cumsum([variable.size for _, _, variable, _ in places])
    draw: Any = jax.random.uniform(rngs.params(), (int(ends[-1]),), minval=-1.0)
    split: Any = jnp.split
    if not is_traced(draw):  # in JAX, each part would compile a program
        draw, split = np.asarray(draw), np.split
    for place, part in zip(places, split(draw, ends[:-1]), strict=True):
        node, name, variable, bound = place
        value = jnp.asarray((bound * part).reshape(variable.shape), variable.dtype)
        # A variable that is set while it is traced searches the whole program.
        new = type(variable).from_metadata(value, variable.get_metadata())
        setattr(node, name, new)
