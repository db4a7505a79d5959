"""Kernels: the feature maps in which states and memories are compared.

A kernel is a frozen pytree whose arrays are leaves. It passes through `jit`, `vmap` and
`grad`, and one compiled program serves all kernels of the same shapes.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from uhop_jax._checks import check_count, is_traced
from uhop_jax._products import contract, shifted
from uhop_jax._pytree import Pytree


class Kernel(Pytree, abc.ABC):
    """A feature map `Phi`; memories and queries may be mapped differently.

    Attributes:
      local: whether the features of the memories depend on which components of the
        query are observed.
      componentwise: whether each feature is a component of the pattern, so that a
        similarity itself leaves out the components that are not observed.
      inner_product: whether the features have a meaning only in inner products, so
        that `Dot` is the only similarity.
    """

    local: ClassVar[bool] = True
    componentwise: ClassVar[bool] = False
    inner_product: ClassVar[bool] = False

    @property
    def has_energy(self) -> bool:
        """Whether memories and queries share one `Phi`, so that updates can repeat."""
        return True

    @property
    def dimension(self) -> int | None:
        """Dimension `d` of the patterns; None if patterns may have any dimension."""
        return None

    @property
    def set_axes(self) -> int:
        """Number of leading axes of memory sets, each with a kernel of its own."""
        return 0

    def check(self) -> None:
        """Raises `ValueError` if fields are not floating arrays of matching shapes."""
        return

    def memory_features(
        self,
        memories: Float[Array, "*batch M d"],
        observed: Bool[Array, " d"] | None = None,
    ) -> Float[Array, "*batch M D"]:
        """`Phi` of the stored patterns, restricted to observed components."""
        return self.query_features(memories, observed)

    @abc.abstractmethod
    def query_features(
        self,
        query: Float[Array, "*batch d"],
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch D"]:
        """`Phi` of the query, restricted to observed components."""


class Identity(Kernel):
    """The identity map: patterns of any dimension are compared as they are."""

    local: ClassVar[bool] = False
    componentwise: ClassVar[bool] = True

    def memory_features(self, memories, observed=None):
        del observed  # the similarity leaves out what is not observed
        return memories

    def query_features(self, query, observed=None):
        return with_zeros(query, observed)


class LinearKernel(Kernel):
    r"""The linear feature map :math:`\Phi(u) = W (u - c)` [eqn:linear_kernel].

    Attributes:
      weights: `W (D, d)`, or `(sets, D, d)` with one matrix for each memory set.
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

    def query_features(self, query, observed=None):
        if self.center is not None:
            query = shifted(query, self.center)
        return contract(with_zeros(query, observed), self.weights)


class LowRankKernel(Kernel):
    r"""The linear feature map :math:`\Phi(u) = s u + L R u`, never built as a matrix.

    Stage I from `identity_start` and the closed form learn such a correction of the
    identity. Features cost `2 r d` multiplications instead of `d^2`, and the kernel has
    `2 r d` numbers instead of `d^2`.

    Attributes:
      scale: `s`, or `(sets,)` with one number for each memory set.
      left: `L (d, r)`, or `(sets, d, r)`.
      right: `R (r, d)`, or `(sets, r, d)`.
    """

    center: ClassVar[None] = None  # the map has the origin as its centre

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
        scaled = jnp.einsum("...,de->...de", self.scale, identity, precision="highest")
        return scaled + product

    def query_features(self, query, observed=None):
        query = with_zeros(query, observed)
        inner = contract(query, self.right)
        correction = contract(inner, self.left.astype(inner.dtype))
        scale = self.scale.astype(correction.dtype)
        return scale * query.astype(correction.dtype) + correction


class Centering(Kernel):
    """The feature map `Phi(u) = u - c`, for mean-centred comparisons.

    A corruption moves the mean of patterns, so that queries may have a centre of their
    own (two-sided centring). Retrieved patterns are not corrupted and do not fit that
    centre: two-sided centring therefore allows one update only and has no energy.

    Attributes:
      center: `c (d,)`, or `(sets, d)`; usually the mean of the memories.
      query_center: the centre of queries, in the shape of `center`; usually the mean of
        corrupted patterns. None is `center`.
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
        return with_zeros(shifted(memories, self.center), observed)

    def query_features(self, query, observed=None):
        center = self.center if self.query_center is None else self.query_center
        return with_zeros(shifted(query, center), observed)


class LikelihoodKernel(Kernel):
    r"""A naive-Bayes log-likelihood as an inner product, learned by `fit_likelihood`.

    Component values fall into `K` bins, the same for memories and queries. The table
    `L[a, c] = log p(c | a)` has the log-probability that a stored value of bin `a`
    becomes a query value of bin `c`. At rank `r` it is approximately
    `memory_table @ query_table.T`. The features of memories and queries are
    :math:`\Phi_K(\xi)_{jk} = \mathrm{memory\_table}[\mathrm{bin}(\xi_j), k]` and
    :math:`\Phi_Q(x)_{jk} = \mathrm{query\_table}[\mathrm{bin}(x_j), k]`. Their inner
    product is the log-likelihood of the query up to a constant of the query, so that
    `beta = 1` is the natural inverse temperature. A retrieved pattern is no corrupted
    pattern: the kernel therefore allows one update only and has no energy.

    Attributes:
      memory_table: `(K, r)`, or `(sets, K, r)`.
      query_table: `(K, r)`, or `(sets, K, r)`.
      edges: `(K - 1,)` ascending, or `(sets, K - 1)`; a value is in bin `k` if exactly
        `k` edges are at most as large as the value.
      pattern_dimension: `d`, the dimension of the patterns.
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
        """The kernel with tables of a lower rank; None keeps the rank.

        Raises:
          ValueError: if the rank is not between 1 and the rank `r` of the tables.
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
        del observed  # unobserved components are zero in the features of the query
        features = self._entries(self.memory_table, memories)
        return features.reshape(*memories.shape[:-1], -1)

    def query_features(self, query, observed=None):
        features = self._entries(self.query_table, query)
        if observed is not None:
            features = jnp.where(observed[..., None], features, 0.0)
        return features.reshape(*query.shape[:-1], -1)

    def _entries(self, table: Array, x: Array) -> Array:
        """The rows `(..., d, r)` of the table by the bins of `x`; NaN for NaN."""
        return jnp.where(jnp.isnan(x)[..., None], jnp.nan, table[bins(x, self.edges)])


def with_zeros(x: Array, observed: Array | None) -> Array:
    """`x`, with zeros in place of components that are not observed."""
    return x if observed is None else jnp.where(observed, x, jnp.zeros((), x.dtype))


def check_numbers(kernel: Any) -> None:
    """Refuses a kernel with NaN, under which every overlap would be NaN."""
    for (name, *_), x in jax.tree_util.tree_leaves_with_path(kernel):
        if not is_traced(x) and bool(jnp.isnan(x).any()):
            raise ValueError(
                f"{name.name} of {type(kernel).__name__} holds "
                f"{int(jnp.isnan(x).sum())} NaN of {jnp.size(x)}: fit the kernel "
                "again, at a lower rate if it was learned"
            )


def _shape_of(kernel: Kernel, name: str, *axes: str) -> tuple[int, ...]:
    """The shape of a field; refuses all but a floating array with at least `axes`."""
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
    """The bin of each value: the number of ascending `edges` at most as large.

    NaN has the last bin.
    """
    # Bisection takes seven steps for 64 edges; comparing with all of them is 20 times
    # slower on CPUs.
    x = x.astype(edges.dtype)
    return jnp.searchsorted(edges, x, side="right", method="scan_unrolled")
