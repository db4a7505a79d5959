"""The static layer: an association without projections."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from uhop_jax._checks import check_count, check_sizes
from uhop_jax.layers.association import Association
from uhop_jax.layers.base import Kernel, Layer
from uhop_jax.layers.features import applied, feature_size
from uhop_jax.layers.inputs import Sizes
from uhop_jax.layers.recall import map_head_axis


class StaticHopfield(Layer):
    """One head without projections: the functional core as a layer.

    All other arguments are those of `Hopfield`.

    Args:
      size: dimension of states and memories.
      value_size: dimension of separate values; `size` by default.
      normalize: which LayerNorms there are: of `state`, `memory` and `value`, as they
        come in; and of `pattern`, states and memories after the kernel.

    Raises:
      ValueError: as `Hopfield`.
    """

    def __init__(
        self,
        size: int,
        association: Association | None = None,
        *,
        value_size: int | None = None,
        normalize: Sequence[str] = (),
        kernel: Kernel = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_count("size", size, 1)
        check_sizes(value_size=value_size)
        sizes = Sizes(size, size, size if value_size is None else value_size, 1)
        super().__init__(
            sizes, association, normalize, kernel, dtype, param_dtype, rngs
        )
        self.norm_query: Any = nnx.data(None)
        self.norm_key: Any = nnx.data(None)
        if self.kernel is not None:
            size = feature_size(self.kernel, size, param_dtype)
        if "pattern" in normalize:
            options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
            self.norm_query = nnx.LayerNorm(size, **options)
            self.norm_key = nnx.LayerNorm(size, **options)

    @property
    def _default_size(self) -> int:  # type: ignore[override]
        return self.sizes.state

    def _recalled(self, state, mapped, memories, read, inputs, key, energies):
        keys, read = self._stored(mapped, memories, read)
        recall = self.association.associate(
            self._queries(state, inputs.batch),
            keys,
            read,
            where=inputs.where,
            key=key,
            size=self.sizes.state,
            energies=energies,
        )
        return map_head_axis(recall, jnp.squeeze)

    def _queries(self, state, batch):
        query = applied(self.norm_query, state[..., None, :])
        return jnp.broadcast_to(query, (*batch, *query.shape[-3:]))

    def _stored(self, mapped, memories, read):
        del memories
        return applied(self.norm_key, mapped[..., None, :]), read[..., None, :]

    def _outputs(self, heads):
        return heads.squeeze(-2)
