"""How well posteriors predict at each inverse temperature, and what they claim."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from uhop_jax._expectation import Folded, Leading, Tabulate, counted, predictive

CLAIMED = 0.5  # share of what a posterior claims that it must predict


def chosen_beta(scores: np.ndarray, doubt: np.ndarray) -> int:
    """The beta of least doubt whose score is within a standard error of the best score.

    Scores are `(Q, betas)`, doubts `(betas,)`; the rule is of Breiman et al. 1984.
    """
    means = scores.mean(0)
    best = int(means.argmax())
    if means[best] == -np.inf:
        return best
    with np.errstate(invalid="ignore"):
        behind = scores[:, [best]] - scores
        error = behind.std(0) / len(scores) ** 0.5
        near = behind.mean(0) <= error
    return int(np.where(near, doubt, np.inf).argmin())


@jax.jit
def narrowed(
    leading: Leading, betas: Float[Array, " B"], log_prior: Float[Array, " N"]
) -> Float[Array, "Q B"]:
    """By how many nats posteriors narrow the memories down, a mean over the folds.

    It is the divergence from the prior. Memories that are not among the leading ones
    share what is left.
    """
    prior = jax.nn.log_softmax(log_prior)[leading.places]
    tiny = float(jnp.finfo(prior.dtype).tiny)
    others = jnp.maximum(1 - jnp.exp(prior).sum(-1), tiny)

    def at(row: tuple[Array, Array]) -> Array:
        beta, total = row
        log_p = beta * leading.logits - total[..., None]
        p = jnp.exp(log_p)
        told = jnp.where(p > 0, p * (log_p - prior), 0.0).sum(-1)
        rest = jnp.maximum(1 - p.sum(-1), 0.0)
        return (told + rest * jnp.log(jnp.maximum(rest, tiny) / others)).mean(0)

    return lax.map(at, (betas, jnp.moveaxis(leading.total, -1, 0))).T


@jax.jit
def supported(
    scores: Float[Array, "Q B"], narrowing: Float[Array, "Q B"]
) -> Float[Array, "Q B"]:
    """Scores, `-inf` at betas whose posterior claims more than it predicts.

    If components are independent given their memory, what three quarters of them tell
    about the fourth is of the size of what they tell about the memory, unless that is
    next to nothing. A posterior that narrows the memories down by some nats and
    predicts less than half of them, by two standard errors, is sure for no reason: if a
    table says nothing, hardly any beta is worse than another. Where no beta is left,
    the flattest is.
    """
    error = scores.std(0) / math.sqrt(len(scores))
    kept = scores.mean(0) + 2 * error >= CLAIMED * narrowing.mean(0)
    first = ~kept.any() & (jnp.arange(kept.size) == 0)
    return jnp.where((kept | first)[None], scores, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("tabulate", "rounds"))
def judged(
    data: Folded,
    leading: Leading,
    betas: Float[Array, " B"],
    common: Float[Array, "P K1"],
    narrowing: Float[Array, "Q B"],
    *,
    tabulate: Tabulate,
    rounds: int = 3,
) -> tuple[Float[Array, "Q B"], Float[Array, "K K"]]:
    """The predictive likelihood of posteriors at each beta, under their best tables.

    Each part of the queries is judged by the table of the other parts. Tables and beta
    are improved in turn, among the betas that `supported` leaves. The counts of the
    table of all parts are returned too.
    """

    def others(counts: Array) -> Array:
        return jax.vmap(tabulate)(counts.sum(0)[None] - counts)

    def improve(counts: Array, _: None) -> tuple[Array, None]:
        tables = others(counts)
        best = jnp.argmax(judge(tables).mean(0))
        total = leading.total[..., best]
        return counted(data, leading, betas[best], total, common, tables)[0], None

    def judge(tables: Array) -> Array:
        scores = predictive(data, leading, betas, common, tables)
        return supported(scores, narrowing)

    middle = betas.size // 2
    total = leading.total[..., middle]
    first, _ = counted(data, leading, betas[middle], total, common)
    last: Array = lax.scan(improve, first, None, length=rounds)[0]
    return judge(others(last)), last.sum(0)
