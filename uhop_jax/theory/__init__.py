r"""The statements of the paper as functions, with corrections.

The *ball* of a memory contains the states whose features lie within `distance` of the
memory's features. The paper's :math:`S_{\Phi,\mu}` is the ball of `distance`
:math:`R_\Phi` (`radius`). Features are the vectors that the similarity compares,
:math:`\Phi(u)`; for `Cosine` they lie on the unit sphere. The *lead* of a memory over
another, at a state, is the difference of their overlaps. Most statements depend on the
smallest lead of a memory over all others in its ball, `pattern_separation`.

`memories` is `(M, d)` with `M` at least 2. For duplicates `radius` is zero, and their
separation is at most zero. The bounds hold for duplicates too, and no duplicate counts
as stored.
"""

from uhop_jax.theory.bounds import (
    Representation,
    error_bound,
    gradient_descent_bound,
    log_rbf,
    pattern_separation,
    radius,
    representation,
    weight_error_bound,
)
from uhop_jax.theory.exactness import (
    ExactDistance,
    exact_retrieval_distance,
    exact_retrieval_slack,
    well_separated,
)
from uhop_jax.theory.storing import (
    Capacity,
    Stored,
    capacity,
    effective_memories,
    metastable_size,
    spherical_code_bounds,
    stored,
)

__all__ = [
    "Capacity",
    "ExactDistance",
    "Representation",
    "Stored",
    "capacity",
    "effective_memories",
    "error_bound",
    "exact_retrieval_distance",
    "exact_retrieval_slack",
    "gradient_descent_bound",
    "log_rbf",
    "metastable_size",
    "pattern_separation",
    "radius",
    "representation",
    "spherical_code_bounds",
    "stored",
    "weight_error_bound",
    "well_separated",
]
