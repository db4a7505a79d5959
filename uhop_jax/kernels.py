"""Kernels: the feature maps in which states and memories are compared.

A kernel is a frozen pytree whose numbers are leaves, so that it passes through `jit`,
`vmap` and `grad`, and one compiled program serves every kernel of a shape.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import check_count, is_traced
from uhop_jax._products import contract, shifted
from uhop_jax._pytree import frozen_pytree


class Kernel(abc.ABC):
    """A feature map `Phi`; memories and queries may be mapped differently.

    Attributes:
      local: whether the features of the memories depend on which components of the
        query are observed.
      inner_product: whether its features mean something in an inner product alone.
    """

    local: ClassVar[bool] = True
    inner_product: ClassVar[bool] = False

    @property
    def has_energy(self) -> bool:
        """Whether memories and queries share one `Phi`: updates can be iterated."""
        return True

    @property
    @abc.abstractmethod
    def dimension(self) -> int:
        """Dimension `d` of the patterns it maps."""

    @property
    @abc.abstractmethod
    def set_axes(self) -> int:
        """Number of leading axes, one kernel for each memory set."""

    def check(self) -> None:
        """Raises `ValueError` if its numbers are no arrays or do not fit together."""
        return

    @abc.abstractmethod
    def memory_features(
        self,
        memories: Float[Array, "*batch M d"],
        observed: Bool[Array, " d"] | None = None,
    ) -> Float[Array, "*batch M D"]:
        """`Phi` of the stored patterns, over the observed components alone."""

    @abc.abstractmethod
    def query_features(
        self,
        query: Float[Array, "*batch d"],
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch D"]:
        """`Phi` of the query, over the observed components alone."""


@frozen_pytree
class LinearKernel(Kernel):
    r"""The linear feature map :math:`\Phi(u) = W (u - c)` [eqn:linear_kernel].

    Attributes:
      weights: `W (D, d)`, or `(sets, D, d)`, one for each memory set.
      center: `c (d,)`, or `(sets, d)`; None is the origin, the paper's choice.
    """

    weights: Float[Array, "*sets D d"]
    center: Float[Array, "*sets d"] | None = None

    def check(self):
        *sets, _, d = _shape_of(self, "weights", "D", "d")
        if self.center is not None:
            _check_shape(self, "center", (*sets, d))

    @property
    def dimension(self) -> int:
        return self.weights.shape[-1]

    @property
    def set_axes(self) -> int:
        return self.weights.ndim - 2

    def memory_features(self, memories, observed=None):
        return self.query_features(memories, observed)

    def query_features(self, query, observed=None):
        if self.center is not None:
            query = shifted(query, self.center)
        if observed is not None:
            query = jnp.where(observed, query, jnp.zeros((), query.dtype))
        return contract(query, self.weights)


@frozen_pytree
class LowRankKernel(Kernel):
    r"""The linear feature map :math:`\Phi(u) = s u + L R u`, never built as a matrix.

    What Stage I from `identity_start` and the closed form learn is such a correction of
    the identity: features cost `2 r d` multiplications instead of `d^2`, and the kernel
    as much memory.

    Attributes:
      scale: `s`, or `(sets,)`, one for each memory set.
      left: `L (d, r)`, or `(sets, d, r)`.
      right: `R (r, d)`, or `(sets, r, d)`.
    """

    scale: Float[Array, "*sets"]
    left: Float[Array, "*sets d r"]
    right: Float[Array, "*sets r d"]

    def check(self):
        *sets, r, d = _shape_of(self, "right", "r", "d")
        _check_shape(self, "left", (*sets, d, r))
        _check_shape(self, "scale", tuple(sets))

    @property
    def dimension(self) -> int:
        return self.right.shape[-1]

    @property
    def set_axes(self) -> int:
        return self.right.ndim - 2

    @property
    def weights(self) -> Float[Array, "*sets d d"]:
        """The matrix `W` of the map."""
        identity = jnp.eye(self.dimension, dtype=self.right.dtype)
        product = jnp.einsum(
            "...dr,...re->...de", self.left, self.right, precision="highest"
        )
        return jnp.einsum("...,de->...de", self.scale, identity) + product

    def memory_features(self, memories, observed=None):
        return self.query_features(memories, observed)

    def query_features(self, query, observed=None):
        if observed is not None:
            query = jnp.where(observed, query, jnp.zeros((), query.dtype))
        inner = contract(query, self.right)
        correction = contract(inner, self.left.astype(inner.dtype))
        scale = self.scale.astype(correction.dtype)
        return scale * query.astype(correction.dtype) + correction


@frozen_pytree
class Centering(Kernel):
    """The feature map `Phi(u) = u - c`, no more: for mean-centred comparisons.

    A corruption moves the mean, so that queries may have a centre of their own:
    two-sided centring. What is retrieved is then no longer around it, and the map is
    one-step by nature, without an energy.

    Attributes:
      center: `c (d,)`, or `(sets, d)`; usually the mean of the memories.
      query_center: what is subtracted from queries, of the same shape; usually the mean
        of corrupted patterns. None is `center`.
    """

    center: Float[Array, "*sets d"]
    query_center: Float[Array, "*sets d"] | None = None

    def check(self):
        shape = _shape_of(self, "center", "d")
        if self.query_center is not None:
            _check_shape(self, "query_center", shape)

    @property
    def has_energy(self) -> bool:
        return self.query_center is None

    @property
    def dimension(self) -> int:
        return self.center.shape[-1]

    @property
    def set_axes(self) -> int:
        return self.center.ndim - 1

    def memory_features(self, memories, observed=None):
        return self._centered(memories, self.center, observed)

    def query_features(self, query, observed=None):
        center = self.center if self.query_center is None else self.query_center
        return self._centered(query, center, observed)

    def _centered(self, x: Array, center: Array, observed: Array | None) -> Array:
        x = shifted(x, center)
        return x if observed is None else jnp.where(observed, x, jnp.zeros((), x.dtype))


@frozen_pytree
class LikelihoodKernel(Kernel):
    r"""A naive-Bayes log-likelihood as an inner product, learned by `fit_likelihood`.

    Component values fall into `K` bins, the same for memories and queries. With
    `L[a, c] = log p(c | a)`, the log-probability that a stored value of bin `a` becomes
    a query value of bin `c`, cut at rank `r`, `L = memory_table @ query_table.T`,
    memories and queries have the features
    :math:`\Phi_K(\xi)_{jk} = \mathrm{memory\_table}[\mathrm{bin}(\xi_j), k]` and
    :math:`\Phi_Q(x)_{jk} = \mathrm{query\_table}[\mathrm{bin}(x_j), k]`, whose inner
    product is the log-likelihood of the query up to a constant of the query:
    `beta = 1` is its natural temperature. One-step by nature: what it returns is no
    longer a corrupted pattern. It therefore has no energy.

    Attributes:
      memory_table: `(K, r)`, or `(sets, K, r)`.
      query_table: `(K, r)`, or `(sets, K, r)`.
      edges: `(K - 1,)` ascending, or `(sets, K - 1)`; a value is in bin `k` if exactly
        `k` edges are at most as large.
      pattern_dimension: `d`.
    """

    local: ClassVar[bool] = False
    inner_product: ClassVar[bool] = True

    memory_table: Float[Array, "*sets K r"]
    query_table: Float[Array, "*sets K r"]
    edges: Float[Array, "*sets K_minus_1"]
    pattern_dimension: int = dataclasses.field(metadata={"static": True})

    def check(self):
        *sets, bins, rank = _shape_of(self, "memory_table", "K", "r")
        _check_shape(self, "query_table", (*sets, bins, rank))
        _check_shape(self, "edges", (*sets, bins - 1))

    @property
    def has_energy(self) -> bool:
        return False

    @property
    def dimension(self) -> int:
        return self.pattern_dimension

    @property
    def set_axes(self) -> int:
        return self.edges.ndim - 1

    def cut(self, rank: int | None) -> "LikelihoodKernel":
        """The same kernel at a lower rank; None leaves it.

        Raises:
          ValueError: if the rank is not between 1 and its own.
        """
        if rank is None:
            return self
        check_count("rank", rank, 1, self.memory_table.shape[-1])
        memory_table = self.memory_table[..., :rank]
        query_table = self.query_table[..., :rank]
        return dataclasses.replace(
            self, memory_table=memory_table, query_table=query_table
        )

    def memory_features(self, memories, observed=None):
        del observed  # the query carries it
        features = self.memory_table[bins(memories, self.edges)]
        return features.reshape(*memories.shape[:-1], -1)

    def query_features(self, query, observed=None):
        features = self.query_table[bins(query, self.edges)]
        if observed is not None:
            features = jnp.where(observed[..., None], features, 0.0)
        return features.reshape(*query.shape[:-1], -1)


def check_numbers(kernel: Kernel | None) -> None:
    """Refuses a kernel that holds NaN, under which every overlap is NaN."""
    for (name, *_), x in jax.tree_util.tree_leaves_with_path(kernel):
        if not is_traced(x) and bool(jnp.isnan(x).any()):
            raise ValueError(
                f"{name.name} of {type(kernel).__name__} holds "
                f"{int(jnp.isnan(x).sum())} NaN of {jnp.size(x)}: fit the kernel "
                "again, at a lower rate if it was learned"
            )


def _shape_of(kernel: Kernel, name: str, *axes: str) -> tuple[int, ...]:
    """The shape of a field, a floating array with at least these axes."""
    x = getattr(kernel, name)
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        got = f"dtype {x.dtype}" if hasattr(x, "dtype") else repr(x)
        raise ValueError(
            f"{name} of {type(kernel).__name__} must be a floating array, got {got}"
        )
    if len(x.shape) < len(axes):
        raise ValueError(
            f"{name} of {type(kernel).__name__} must have shape "
            f"({', '.join(('...', *axes))}), got {x.shape}"
        )
    return x.shape


def _check_shape(kernel: Kernel, name: str, shape: tuple[int, ...]) -> None:
    if _shape_of(kernel, name) != shape:
        raise ValueError(
            f"{name} of {type(kernel).__name__} must have shape {shape}, got "
            f"{getattr(kernel, name).shape}"
        )


def bins(x: Float[Array, "*shape"], edges: Float[Array, " n"]) -> Int[Array, "*shape"]:
    """How many of the ascending `edges` are at most each value."""
    # Seven steps for 64 edges: comparing with each is 20 times slower on CPUs.
    x = x.astype(edges.dtype)
    return jnp.searchsorted(edges, x, side="right", method="scan_unrolled")
