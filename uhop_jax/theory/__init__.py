r"""Theory, executable: the statements of the paper as functions, corrected.

The *ball* of a memory holds the states whose features lie within `distance` of its own;
the paper's :math:`S_{\Phi,\mu}` is that of `distance` :math:`R_\Phi` (`radius`).
Features are those the similarity compares: :math:`\Phi(u)`, on the unit sphere for
`Cosine`. One quantity decides most of what follows, the smallest lead of a memory over
the others anywhere in its ball, `pattern_separation`.

`memories` is `(M, d)` with `M` at least 2. Duplicates have `radius` zero and a
separation of at most zero; no bound excludes them, and none of them counts as stored.
"""

from uhop_jax.theory.bounds import (
    ExactDistance,
    Representation,
    error_bound,
    exact_retrieval_distance,
    exact_retrieval_slack,
    gradient_descent_bound,
    log_rbf,
    pattern_separation,
    radius,
    representation,
    weight_error_bound,
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
