r"""The memory model: a similarity, a separation and an inverse temperature.

One update of the model is :math:`T(x) = \mathrm{sep}(\beta K(\Xi, x))\, \Xi`
[lemma:retrieval_dyn]. `uhop_jax.retrieve` and its relatives apply it.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from uhop_jax._checks import check_positive, holdable
from uhop_jax._pytree import Pytree
from uhop_jax.kernels import Identity
from uhop_jax.separation import Separation, Softmax, check_separation
from uhop_jax.similarity import Dot, Similarity, check_similarity


class Model(Pytree):
    r"""A memory model, which memories and queries share.

    The methods are the parts of one update in the space of features, in which the
    similarity compares: keys `(M, D)` are the features of memories
    (`similarity.keys`), states `(..., D)` the features of queries (`similarity.state`).

    Attributes:
      similarity: overlap of states with memories; larger is closer.
      separation: maps scaled overlaps to weights over the memories.
      beta: inverse temperature, positive; it multiplies the overlaps, inside the
        separation. A number, or an array that broadcasts against the leading axes of
        the query.

    Raises:
      ValueError: if a field has a wrong type, or a number is out of range. The entries
        of JAX arrays are not read: an entry out of range gives NaN.
    """

    similarity: Similarity = Dot()
    separation: Separation = Softmax()
    beta: ArrayLike = dataclasses.field(kw_only=True)

    def __post_init__(self):
        check_similarity(self.similarity)
        check_separation(self.separation)
        check_positive("beta", self.beta)
        super().__post_init__()
        object.__setattr__(self, "beta", holdable(self.beta))

    @property
    def has_energy(self) -> bool:
        """Whether an energy is known that an update never raises."""
        return (
            self.separation.has_conjugate
            and self.similarity.has_energy()
            and (self.separation.normalized or not self.similarity.needs_normalized)
        )

    @property
    def name(self) -> str:
        """The types of similarity, kernel and separation, for messages."""
        kernel = self.similarity.kernel
        inner = "" if isinstance(kernel, Identity) else f"({type(kernel).__name__})"
        return (
            f"{type(self.similarity).__name__}{inner} with "
            f"{type(self.separation).__name__}"
        )

    @property
    def setting(self) -> str:
        """Separation and `beta` in words, for tables."""
        beta = float(np.asarray(self.beta))
        return f"{type(self.separation).__name__.lower()} at beta {beta:.3g}"

    def overlaps(
        self,
        keys: Float[Array, "M D"],
        state: Float[Array, "*batch D"],
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch M"]:
        """Overlaps of states with keys, over the observed components."""
        return self.similarity.compare(keys, state, observed)

    def weights(
        self,
        overlaps: Float[Array, "*batch M"],
        where: Bool[Array, "*#batch M"] | None = None,
    ) -> Float[Array, "*batch M"]:
        """Weights over the memories where `where` is true, zero elsewhere."""
        return self.separation.tempered(overlaps, self.beta, where=where)

    def update(
        self,
        keys: Float[Array, "M D"],
        weights: Float[Array, "*batch M"],
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch D"]:
        """The states that follow from weights over the keys."""
        return self.similarity.combine(keys, weights, observed)

    def energy(
        self,
        overlaps: Float[Array, "*batch M"],
        state: Float[Array, "*batch D"],
        where: Bool[Array, "*#batch M"] | None = None,
    ) -> Float[Array, "*batch"]:
        """The energy of states with these overlaps, see `uhop_jax.energy`."""
        value = self.separation.tempered_conjugate(overlaps, self.beta, where=where)
        return self.similarity.self_energy(state).astype(value.dtype) - value


def check_model(model: Any) -> None:
    """Refuses anything but a model with parameters in range."""
    if not isinstance(model, Model):
        raise ValueError(
            "model must be a Model such as Model(Dot(), Softmax(), beta=1.0), got "
            f"{model!r}"
        )
    model.separation.check()
