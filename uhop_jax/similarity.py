r"""Similarities: how a state is compared with the memories.

A similarity is a comparison (dot product, cosine, a distance) in a space of features:
the features `Phi` of a kernel, which are by default the raw patterns: :math:`K(u, v) =
\langle \Phi(u), \Phi(v) \rangle`. Larger is closer: a distance becomes a similarity by
a minus sign. `Dot(W)` is the paper's kernel [eqn:linear_kernel], `Cosine(W)` its
angular form.

The retrieval dynamics run on the state `y = Phi(x)`, on which every linear kernel gives
the paper's update. Each similarity therefore defines how memories become `keys`, how a
query becomes a `state`, how states compare with keys, and which state follows from
weights over the keys.

Similarities are frozen pytrees; their only leaves are the leaves of their kernels.
"""

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from uhop_jax._checks import (
    as_boolean,
    as_floating,
    check_broadcast,
    check_choice,
    wider_dtype,
    working_dtype,
)
from uhop_jax._distances import absolute, squared_distance, sum_over_components
from uhop_jax._products import contract, weigh
from uhop_jax._pytree import Pytree, varying_alike
from uhop_jax.kernels import Identity, Kernel


class Similarity(Pytree, abc.ABC):
    """A comparison of states with keys, in the features of `kernel`.

    Subclasses implement `_compare`; `keys`, `combine` and `self_energy` have defaults.

    Attributes:
      kernel: the feature map; `Identity()` compares the raw patterns.
      comparison_has_energy: whether an energy is known that an update never raises.
      needs_normalized: whether weights must sum to one for this energy.
    """

    comparison_has_energy: ClassVar[bool] = False
    needs_normalized: ClassVar[bool] = False

    kernel: Kernel = Identity()

    def __call__(
        self,
        memories: Float[Array, "M d"],
        query: Float[Array, "*batch d"],
        *,
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch M"]:
        """Overlaps of each query with each memory; larger is closer.

        Args:
          memories: stored patterns, one per row.
          query: states to compare.
          observed: true for the known components of the query; overlaps and norms are
            restricted to them, and unknown components may have any value.

        Returns:
          Overlaps, in float32 for half-precision patterns, else in their dtype.

        Raises:
          ValueError: if shapes or dtypes do not fit.
        """
        memories = as_floating(memories, "memories")
        query = as_floating(query, "query")
        check_patterns(memories, query, self)
        check_sets(self.kernel)
        observed = check_observed(observed, query)
        if observed is None or not self.kernel.local:
            keys = self.keys(memories)
            return self.compare(keys, self.state(query, observed), observed)

        def row(pair):
            query, observed = pair
            keys = self.keys(memories, observed)
            return self.compare(keys, self.state(query, observed), observed)

        flat = query.reshape(-1, query.shape[-1])
        flat_observed = jnp.broadcast_to(observed, query.shape).reshape(flat.shape)
        rows = jax.lax.map(row, (flat, flat_observed), batch_size=8)
        return rows.reshape(*query.shape[:-1], memories.shape[0])

    def gram(self, memories: Float[Array, "M d"]) -> Float[Array, "M M"]:
        """Overlaps of the memories with one another, `K(xi_mu, xi_nu)`."""
        return self(memories, memories)

    def keys(
        self, memories: Float[Array, "M d"], observed: Bool[Array, " d"] | None = None
    ) -> Float[Array, "M D"]:
        """Features of the memories, with which states are compared."""
        return self.kernel.memory_features(memories, observed)

    def state(
        self,
        query: Float[Array, "*batch d"],
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch D"]:
        """The first state: the features of the query."""
        return self.kernel.query_features(query, observed)

    def compare(
        self,
        keys: Float[Array, "M D"],
        state: Float[Array, "*batch D"],
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch M"]:
        """Overlaps of states with keys."""
        return self._compare(keys, state, self._restriction(observed))

    def combine(
        self,
        keys: Float[Array, "M D"],
        weights: Float[Array, "*batch M"],
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch D"]:
        """The state that follows from weights over the keys: one update."""
        return self._combine(keys, weights, self._restriction(observed))

    def self_energy(self, state: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
        """The term of the energy beside the conjugate of the overlaps."""
        return jnp.zeros(state.shape[:-1], working_dtype(state))

    def has_energy(self) -> bool:
        """Whether the comparison and the kernel both have an energy."""
        return self.comparison_has_energy and self.kernel.has_energy

    @abc.abstractmethod
    def _compare(self, keys: Array, state: Array, restrict: Any) -> Array:
        """`compare` over the components where `restrict` is true; None is all."""

    def _combine(self, keys: Array, weights: Array, restrict: Any) -> Array:
        """`combine` over the components where `restrict` is true; None is all."""
        state = weigh(weights, keys)
        return state if restrict is None else jnp.where(restrict, state, 0.0)

    def _restriction(self, observed: Any) -> Any:
        """`observed`, or None for a kernel whose features already use it."""
        return observed if self.kernel.componentwise else None


class Dot(Similarity):
    r"""The dot product, or with a kernel the paper's `K(u, v)` [eqn:linear_kernel].

    Energy :math:`E(x) = K(x, x)/2 - \Psi^\star(\beta, K(\Xi, x))` [eqn:eng-fn].
    """

    comparison_has_energy: ClassVar[bool] = True

    def _compare(self, keys, state, restrict):
        del restrict  # the state is already zero off the observed components
        return contract(state, keys)

    def self_energy(self, state):
        state = state.astype(working_dtype(state))
        return 0.5 * (state * state).sum(-1)


class Cosine(Similarity):
    r"""The cosine, or with a kernel the angular kernel.

    :math:`\bar K(u, v) = \langle \Phi(u), \Phi(v) \rangle / (\|\Phi(u)\| \|\Phi(v)\|)`.
    The states are unit vectors: the next state is the normalised weighted mean of the
    normalised keys. It never raises :math:`E(y) = -\Psi^\star(\beta, \langle
    \bar\Phi(\xi), y \rangle)`. A zero vector has cosine zero with every vector.
    """

    comparison_has_energy: ClassVar[bool] = True

    def keys(self, memories, observed=None):
        return _normalize(super().keys(memories, observed)).astype(memories.dtype)

    def state(self, query, observed=None):
        return _normalize(super().state(query, observed))

    def _compare(self, keys, state, restrict):
        overlaps = contract(state, keys)
        if restrict is None:
            return overlaps
        return overlaps * _restricted_inverse_norm(keys, restrict)

    def _combine(self, keys, weights, restrict):
        if restrict is None:
            return _normalize(weigh(weights, keys))
        mean = weigh(weights * _restricted_inverse_norm(keys, restrict), keys)
        return _normalize(jnp.where(restrict, mean, 0.0))


class NegativeSquaredL2(Similarity):
    r"""Minus the squared Euclidean distance, summed over squared differences.

    Energy :math:`E(x) = -\Psi^\star(\beta, -\|\Xi - x\|^2)`, never raised by a
    separation whose weights sum to one.
    """

    comparison_has_energy: ClassVar[bool] = True
    needs_normalized: ClassVar[bool] = True

    def _compare(self, keys, state, restrict):
        return -squared_distance(*_restricted(keys, state, restrict))


class NegativeL2(Similarity):
    """Minus the Euclidean distance (Millidge et al. 2022).

    No energy is known that an update never raises.
    """

    def _compare(self, keys, state, restrict):
        squared = squared_distance(*_restricted(keys, state, restrict))
        zero = squared == 0
        return -jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, squared)))


class NegativeL1(Similarity):
    """Minus the Manhattan distance (Millidge et al. 2022).

    No energy is known that an update never raises.
    """

    def _compare(self, keys, state, restrict):
        return -sum_over_components(absolute, *_restricted(keys, state, restrict))


def _normalize(x: Array) -> Array:
    """Unit vectors in at least float32; zero stays zero, with a finite gradient."""
    x = x.astype(working_dtype(x))
    # Scaling by the largest component keeps squares of tiny or huge vectors in range.
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    x = x / jnp.where(scale == 0, 1.0, scale)
    squared = (x * x).sum(-1, keepdims=True)
    return x / jnp.sqrt(jnp.where(squared == 0, 1.0, squared))


def _restricted_inverse_norm(keys: Array, restrict: Array) -> Array:
    """`1 / ||keys||` over the observed components, zero for a zero norm."""
    squared = contract(restrict.astype(keys.dtype), keys * keys)
    # An observed part below the rounding of the unit key counts as zero.
    zero = squared <= float(jnp.finfo(keys.dtype).eps) ** 2
    return jnp.where(zero, 0.0, 1 / jnp.sqrt(jnp.where(zero, 1.0, squared)))


def _restricted(keys: Array, state: Array, restrict: Any) -> tuple[Array, Array, Any]:
    """Keys, states and 0/1 weights of components (or None), in one working dtype."""
    dtype = wider_dtype(keys, state, jnp.zeros((), jnp.float32))
    keys, state = keys.astype(dtype), state.astype(dtype)
    if restrict is not None:
        restrict = jnp.broadcast_to(restrict, state.shape).astype(dtype)
    return varying_alike((keys, state, restrict))


def check_similarity(similarity: Any) -> None:
    """Refuses anything but a similarity with a kernel."""
    if not isinstance(similarity, Similarity):
        raise ValueError(
            f"similarity must be one of {', '.join(c.__name__ for c in _CLASSES)}, "
            f"got {similarity!r}"
        )
    if not isinstance(similarity.kernel, Kernel):
        raise ValueError(
            "kernel must be a Kernel such as LinearKernel(weights), got "
            f"{type(similarity.kernel).__name__}"
        )


def check_patterns(memories: Any, query: Any, similarity: Any) -> None:
    """Refuses memories, queries and similarities that do not fit one another."""
    check_similarity(similarity)
    if memories.ndim < 2 or 0 in memories.shape[-2:]:
        raise ValueError(
            "memories must have shape (M, d), one pattern per row and at least one, "
            f"got {memories.shape}"
        )
    if query.ndim < 1:
        raise ValueError("query must have shape (..., d), got a scalar")
    if query.shape[-1] != memories.shape[-1]:
        raise ValueError(
            f"memories have dimension {memories.shape[-1]}, queries {query.shape[-1]}"
        )
    kernel = similarity.kernel
    kernel.check()
    if kernel.dimension not in (None, memories.shape[-1]):
        raise ValueError(
            f"kernel maps dimension {kernel.dimension}, memories have dimension "
            f"{memories.shape[-1]}"
        )
    if kernel.inner_product and not isinstance(similarity, Dot):
        raise ValueError(
            f"{type(kernel).__name__} compares by Dot alone, got "
            f"{type(similarity).__name__}"
        )


def check_sets(kernel: Kernel, sets: tuple[int, ...] = ()) -> None:
    """Refuses a batch of kernels that does not match the memory sets."""
    if not kernel.set_axes:
        return
    if kernel.set_axes != len(sets):
        raise ValueError(
            f"kernel has {kernel.set_axes} axes of memory sets, memories have "
            f"{len(sets)}"
        )
    for leaf in jax.tree.leaves(kernel):
        if leaf.shape[: len(sets)] != sets:
            raise ValueError(
                f"kernel is for {leaf.shape[: len(sets)]} memory sets, memories are "
                f"{sets}"
            )


def check_observed(observed: Any, query: Array) -> Array | None:
    """Refuses an `observed` that is not boolean or does not broadcast to the query."""
    if observed is None:
        return None
    observed = as_boolean("observed", observed, "true where the query is known")
    check_broadcast("observed", observed, query.shape)
    return observed


SIMILARITIES: dict[str, type[Similarity]] = {
    "dot": Dot,
    "cosine": Cosine,
    "squared_l2": NegativeSquaredL2,
    "l2": NegativeL2,
    "l1": NegativeL1,
}
_CLASSES = tuple(SIMILARITIES.values())


def similarity_from_name(name: str, kernel: Kernel = Identity()) -> Similarity:
    """The similarity with the name that configs and command lines use.

    Args:
      name: `dot`, `cosine`, `squared_l2`, `l2` or `l1`.
      kernel: the feature map, by default of the raw patterns.

    Raises:
      ValueError: if the name is unknown; the message lists the choices.
    """
    check_choice("similarity", name, SIMILARITIES)
    return SIMILARITIES[name](kernel)  # type: ignore[call-arg]
