r"""Ways in which a query differs from the pattern that it should retrieve.

A corruption is any function `corrupt(key, patterns)` that returns corrupted patterns of
the same shape, or a pair `(patterns, observed)`, where the boolean `observed` is true
at components *known* to be intact. The corruptions `Mask`, `Noise` and `NormNoise` are
frozen pytrees. `Mask` and `Noise` have a likelihood in closed form, from which
`posterior_mean` computes the estimate with the least expected error.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray

from uhop_jax._checks import (
    as_at_least,
    as_floating,
    check_at_least,
    check_key,
    check_probability,
    check_scalar,
    is_traced,
    working_dtype,
)
from uhop_jax._products import contract
from uhop_jax._pytree import Pytree
from uhop_jax.similarity import NegativeSquaredL2, check_observed, check_patterns

_ON_HOST = (  # errors of code that needs the value of a traced array
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Mask(Pytree):
    """Sets each component to zero with probability `fraction`, independently.

    At 0.5 it is the paper's corruption in the memory-capacity experiment.

    Attributes:
      fraction: probability that a component is masked, in `[0, 1]`.
      known: whether the mask is known to the model; `__call__` then returns
        `(patterns, observed)`.
    """

    fraction: ArrayLike = 0.5
    known: bool = dataclasses.field(default=False, metadata={"static": True})

    def check(self, **patterns: Array) -> None:
        """Refuses a fraction that is no probability; any patterns are accepted."""
        del patterns
        check_probability("fraction", self.fraction)

    def __call__(self, key: PRNGKeyArray, patterns: Float[Array, "*batch d"]):
        """Corrupted patterns, or with `known` the pair `(patterns, observed)`.

        Raises:
          ValueError: if the fraction is no probability, the key is no key, or patterns
            are not numeric.
        """
        self.check()
        check_key(key)
        patterns = as_floating(patterns, "patterns")
        kept = ~jax.random.bernoulli(key, self.fraction, patterns.shape)
        masked = jnp.where(kept, patterns, jnp.zeros((), patterns.dtype))
        return (masked, kept) if self.known else masked

    def log_likelihood(
        self,
        memories: Float[Array, "M d"],
        query: Float[Array, "*batch d"],
        *,
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch M"]:
        """`log p(query | memory)`, `-inf` where a kept component differs.

        Args:
          memories: stored patterns, one per row.
          query: corrupted patterns.
          observed: true for components that count; components where it is false may
            have any value. With `known` it is true for intact components, and is
            required. Without `known` a zero component that counts may be masked.

        Returns:
          The log-likelihoods, in at least float32.

        Raises:
          ValueError: if the fraction is no probability, shapes do not fit, or `known`
            queries come without `observed`.
        """
        self.check()
        memories, query, observed = aligned(memories, query, observed)
        if self.known and observed is None:
            raise ValueError(
                "observed must be given with the queries of a known mask, got None"
            )
        fraction = jnp.asarray(self.fraction, memories.dtype)
        counted = jnp.ones(query.shape, bool) if observed is None else observed
        kept = counted if self.known else counted & (query != 0)

        def agrees(row: tuple[Array, Array]) -> Array:  # all kept components agree
            query, kept = row
            return (~kept[None] | (query[None] == memories)).all(-1)

        # One query at a time: ten times faster than a sum over all pairs at once.
        flat = (x.reshape(-1, x.shape[-1]) for x in (query, kept))
        rows = jax.lax.map(agrees, tuple(flat))
        possible = rows.reshape(*query.shape[:-1], memories.shape[0])
        if self.known:
            hidden = (~kept).astype(memories.dtype).sum(-1, keepdims=True)
        else:  # components that are zero in the query, not in the memory
            zero = (counted & ~kept).astype(memories.dtype)
            hidden = contract(zero, (memories != 0).astype(memories.dtype))
        intact = kept.astype(memories.dtype).sum(-1, keepdims=True)
        log_p = _times_log(hidden, fraction) + _times_log(intact, 1 - fraction)
        return jnp.where(possible, log_p, -jnp.inf)


class AddedNoise(Pytree, abc.ABC):
    """Adds noise, then clamps to the range of the patterns.

    The default range is `[0, 1]`, the range of images. Patterns outside of the range
    are refused: clamping would change them without noise.

    Attributes:
      scale: size of the noise; each class says of what.
      low: lower end of the range; None does not clamp from below.
      high: upper end of the range; None does not clamp from above.
    """

    scale: ArrayLike = 0.5
    low: float | None = dataclasses.field(default=0.0, metadata={"static": True})
    high: float | None = dataclasses.field(default=1.0, metadata={"static": True})

    def check(self, **patterns: Array) -> None:
        """Refuses parameters that are invalid, and named patterns out of the range."""
        check_scalar("scale", self.scale)
        check_at_least("scale", self.scale, 0)
        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        if not low < high:
            raise ValueError(f"low must be below high, got low {low} and high {high}")
        if low == -np.inf and high == np.inf:
            return
        for name, x in patterns.items():
            if is_traced(x) or not x.size:
                continue
            with jax.ensure_compile_time_eval():  # a constant of a traced function
                least, most = x.min(), x.max()
                outside = bool((least < low) | (most > high))  # in the dtype of x
            if outside:
                raise ValueError(
                    f"{name} must be in the range [{low}, {high}] to which "
                    f"{type(self).__name__} clamps, got values from {least:.3g} to "
                    f"{most:.3g}: set low and high to their range, or to None for "
                    "noise that is not clamped"
                )

    def __call__(self, key: PRNGKeyArray, patterns: Float[Array, "*batch d"]):
        """Noisy patterns, in the floating dtype of `patterns`.

        Raises:
          ValueError: if a parameter is invalid, the key is no key, or patterns are out
            of the range.
        """
        patterns = as_floating(patterns, "patterns")
        self.check(patterns=patterns)
        check_key(key)
        noise = self._unit(jax.random.normal(key, patterns.shape, patterns.dtype))
        noisy = patterns + as_at_least("scale", self.scale, 0, patterns.dtype) * noise
        return jnp.clip(noisy, self.low, self.high)

    @abc.abstractmethod
    def _unit(self, noise: Array) -> Array:
        """The noise of scale one, from standard Gaussian numbers."""


class NormNoise(AddedNoise):
    """Adds a vector of norm `scale` in a random direction (the paper's appendix).

    The sum is clamped to the range `[low, high]`, as by `Noise`.
    """

    def _unit(self, noise):
        return noise / jnp.linalg.norm(noise, axis=-1, keepdims=True)


class Noise(AddedNoise):
    """Adds Gaussian noise of standard deviation `scale` to each component.

    The sum is clamped to the range `[low, high]`, by default `[0, 1]`.
    """

    def _unit(self, noise):
        return noise

    def log_likelihood(
        self,
        memories: Float[Array, "M d"],
        query: Float[Array, "*batch d"],
        *,
        observed: Bool[Array, "*batch d"] | None = None,
    ) -> Float[Array, "*batch M"]:
        """`log p(query | memory)` up to a constant of the query.

        Args:
          memories: stored patterns, one per row.
          query: corrupted patterns.
          observed: true for components that count; components where it is false may
            have any value.

        Returns:
          The log-likelihoods, in at least float32.

        Raises:
          ValueError: if a parameter is invalid, patterns are out of the range, or
            shapes do not fit.
        """
        memories, query, observed = aligned(memories, query, observed)
        if observed is not None:  # any value in the range will do where it is false
            query = jnp.where(observed, query, memories.min())
        self.check(memories=memories, query=query)
        scale = as_at_least("scale", self.scale, 0, memories.dtype)
        scale, exact = scale_of(scale, memories.dtype)
        inside = counted = jnp.ones(query.shape, bool) if observed is None else observed
        log_p = jnp.zeros((*query.shape[:-1], memories.shape[0]), memories.dtype)
        for bound, side in ((self.low, 1.0), (self.high, -1.0)):
            if bound is None:
                continue
            clamped: Bool[Array, "*batch d"] = counted & (query == bound)
            inside &= ~clamped
            beyond = jax.scipy.stats.norm.logcdf(side * (bound - memories) / scale)
            log_p += contract(clamped.astype(memories.dtype), beyond)
        # Without noise a query equals its memory in every component that counts.
        inside = jnp.where(exact, counted, inside)
        squared = -NegativeSquaredL2()(memories, query, observed=inside)
        same = jnp.where(squared == 0, 0.0, -jnp.inf).astype(log_p.dtype)
        return jnp.where(exact, same, log_p - squared / (2 * scale**2))


class Corruption(Pytree):
    """Any corruption as a pytree that always returns `(patterns, observed)`.

    Attributes:
      function: a corruption. A plain function is static; a corruption that is a pytree
        keeps its leaves.
    """

    function: Any

    @classmethod
    def of(
        cls, function: Callable[[PRNGKeyArray, Array], Any], **patterns: Array
    ) -> "Corruption":
        """Wraps a function or a corruption of this module.

        Args:
          function: the corruption.
          **patterns: patterns to corrupt, by the names to use in messages.

        Raises:
          ValueError: if `function` cannot be called, its parameters are invalid, or the
            patterns are out of its range.
        """
        if isinstance(function, cls):
            cls.of(function.function, **patterns)
            return function
        if isinstance(function, (Mask, AddedNoise)):
            function.check(**patterns)
        if not callable(function):
            raise ValueError(
                "corrupt must be a function of a key and patterns, such as Mask(0.5), "
                f"got {function!r}"
            )
        leaf = jax.tree_util.all_leaves([function])
        return cls(jax.tree_util.Partial(function) if leaf else function)

    def __call__(
        self, key: PRNGKeyArray, patterns: Float[Array, "*batch d"]
    ) -> tuple[Float[Array, "*batch d"], Bool[Array, "*batch d"] | None]:
        """Corrupted patterns in their own dtype, and `observed` or None.

        Raises:
          ValueError: if the corruption changes the shape, returns an `observed` that is
            not boolean or does not fit, or is traced and no function of JAX arrays.
        """
        try:
            result = self.function(key, patterns)
        except _ON_HOST as error:
            raise ValueError(
                "corrupt is compiled and must be a function of JAX arrays: use "
                "jax.numpy and jax.random in place of NumPy, and jnp.where in place of "
                "`if` and of assignment"
            ) from error
        pair = result if isinstance(result, tuple) else (result, None)
        if len(pair) != 2:
            raise ValueError(
                "corrupt must return patterns, or a pair of them and observed, it "
                f"returned {len(pair)} values"
            )
        query, observed = pair
        if np.shape(query) != patterns.shape:
            raise ValueError(
                f"corrupt must keep the shape {patterns.shape}, it returned "
                f"{np.shape(query)}"
            )
        observed = check_observed(observed, patterns)
        if observed is not None:
            observed = jnp.broadcast_to(observed, patterns.shape)
        return jnp.asarray(query).astype(patterns.dtype), observed

    def check_draws(
        self, key: PRNGKeyArray, patterns: Float[Array, "*sets M d"]
    ) -> None:
        """Refuses a function that draws without its key.

        The program of such a function differs each time the function is traced.

        Raises:
          ValueError: if two traces give different programs.
        """
        if isinstance(self.function, (Mask, AddedNoise)) or is_traced(jnp.zeros(())):
            return
        one_set = jax.ShapeDtypeStruct(patterns.shape[-2:], patterns.dtype)

        def program() -> str:
            function = jax.jit(lambda key, patterns: self(key, patterns))
            return function.lower(key, one_set).as_text()

        if program() != program():
            raise ValueError(
                "corrupt must draw from its key alone, with jax.random: other draws, "
                "as of numpy.random, are made once, when it is compiled, and never "
                "again"
            )


def scale_of(scale: ArrayLike, dtype: Any) -> tuple[Array, Array]:
    """The standard deviation of a noise, and whether it counts as zero.

    It counts as zero if its square is subnormal; the standard deviation returned is
    then 1.
    """
    scale = jnp.asarray(scale, dtype)
    negligible = scale * scale < float(jnp.finfo(dtype).tiny)
    return jnp.where(negligible, 1.0, scale), negligible


def aligned(
    memories: Array, query: Array, observed: Any
) -> tuple[Array, Array, Array | None]:
    """Memories and queries in working dtypes, `observed` in the shape of the query."""
    memories = as_floating(memories, "memories")
    query = as_floating(query, "query")
    check_patterns(memories, query, NegativeSquaredL2())
    observed = check_observed(observed, query)
    if observed is not None:
        observed = jnp.broadcast_to(observed, query.shape)
    memories = memories.astype(working_dtype(memories))
    return memories, query.astype(working_dtype(query)), observed


def _times_log(count: Array, p: Array) -> Array:
    """`count * log(p)`, zero where the count is zero."""
    return jnp.where(count == 0, 0.0, count * jnp.log(p))
