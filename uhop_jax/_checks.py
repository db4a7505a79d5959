"""Clear errors for wrong input, raised before anything is traced or compiled.

Static facts (shapes, types, numbers of Python and NumPy) are always checked. Entries
of JAX arrays are checked where data enter (`check_finite`), not in every call: that
would wait for the device. A number out of range in a JAX array gives NaN: it is never
replaced by a valid number.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def is_traced(x: Any) -> bool:
    """Whether the value of `x` is unknown because it is being traced."""
    return isinstance(x, jax.core.Tracer)


def surely_less(n: Any, m: Any) -> bool:
    """Whether `n < m` for all numbers that symbolic sizes of `jax.export` stand for."""
    try:
        return bool(n < m)
    except Exception:  # InconclusiveDimensionOperation; JAX 0.7 does not export it
        return False


def check_on_host(function: str, *arguments: Any) -> None:
    """Refuses to trace a function that needs the values of its arguments."""
    traced = any(map(is_traced, jax.tree.leaves(arguments)))
    if traced or is_traced(jnp.zeros(())):  # an array made while tracing is traced
        raise ValueError(
            f"{function} runs on the host and cannot be traced: call it outside of "
            "jax.jit, jax.vmap and jax.grad"
        )


def as_floating(x: Any, name: str) -> Array:
    """Converts to a floating JAX array; integers and booleans become the default float.

    Raises:
      ValueError: if `x` is not numeric or is complex.
    """
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating):
        return x
    try:
        if isinstance(x, list | tuple) and not _holds_arrays(x):
            array = np.asarray(x)
            x = array if array.dtype.kind in "iu" else x
        x = jnp.asarray(holdable(x))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name} must be a numeric array of at most 64 bits, got {kind_of(x)}"
        ) from None
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError(f"{name} must be real, got dtype {x.dtype}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.result_type(float))
    return x


def native(x: Any) -> Any:
    """The array in the byte order of this machine, which JAX needs."""
    if isinstance(x, np.ndarray | np.generic) and not x.dtype.isnative:
        return x.astype(x.dtype.newbyteorder("="))
    return x


def holdable(x: Any) -> Any:
    """The number or array in native byte order, with wide integers as floats.

    Without x64, JAX would keep the lower 32 bits of an integer of NumPy's.
    """
    if isinstance(x, int):
        return float(x) if abs(x) >= 2**31 else x
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "iu":
        return x.astype(jnp.result_type(float)) if x.dtype.itemsize > 4 else native(x)
    return native(x)


def _holds_arrays(x: Any) -> bool:
    """Whether a list holds JAX arrays, which may be traced."""
    return any(isinstance(part, jax.Array) for part in jax.tree.leaves(x))


def kind_of(x: Any) -> str:
    """Words for an argument that is no array of numbers, for an error message."""
    try:
        dtype = np.asarray(x).dtype
    except ValueError:
        return f"a {type(x).__name__} with parts of unlike lengths"
    return repr(x) if dtype.kind == "O" and np.ndim(x) == 0 else f"dtype {dtype}"


def working_dtype(x: Any) -> Any:
    """The dtype of sums: float32 for half precision, else the dtype of `x`.

    `x` is an array or a dtype.
    """
    dtype = getattr(x, "dtype", x)
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def wider_dtype(*arrays: Array) -> Any:
    """The smallest floating dtype that holds all the arrays."""
    dtypes = {x.dtype for x in arrays}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    if all(dtype == widest or dtype.itemsize < widest.itemsize for dtype in dtypes):
        return widest
    return jnp.dtype(jnp.float32)  # bfloat16 with float16


def check_finite(name: str, x: Any, valid: Any = None) -> None:
    """Refuses NaN and infinity among the `valid` entries of a concrete array."""
    if is_traced(x) or is_traced(valid):
        return
    with jax.ensure_compile_time_eval():  # a constant of a function being traced
        finite = jnp.isfinite(x)
        if valid is not None:
            finite = finite | ~jnp.broadcast_to(valid, x.shape)
        bad = x.size - int(jnp.sum(finite))
    if bad:
        raise ValueError(
            f"{name} must be finite, got {bad} NaN or infinite of {x.size}"
        )


def as_numbers(name: str, value: Any) -> np.ndarray:
    """A concrete number, or an array of numbers, in float64."""
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "OSUc":
            return array.astype(np.float64)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name} must be a number, got {value!r}")


def check_positive(name: str, value: Any, dtype: Any = np.float64) -> None:
    """Refuses a number that is not both finite and positive in `dtype`.

    A JAX array is not read: it may lie on a device, or be traced.
    """
    if isinstance(value, jax.Array):
        return
    value = as_numbers(name, value)
    with np.errstate(over="ignore", under="ignore"):
        rounded = value.astype(dtype)
    bad = value[~(np.isfinite(rounded) & (rounded > 0))]
    if bad.size:
        only_rounded = np.isfinite(bad.flat[0]) and bad.flat[0] > 0
        where = f" in {jnp.dtype(dtype)}" if only_rounded else ""
        raise ValueError(
            f"{name} must be positive and finite{where}, got {bad.flat[0]}"
        )


def as_positive(name: str, value: Any, dtype: Any) -> Array:
    """Positive numbers in `dtype`; NaN where one in a JAX array is not positive."""
    check_positive(name, value, dtype)
    x = as_floating(value, name).astype(dtype)
    if not isinstance(value, jax.Array):
        return x
    return jnp.where((x > 0) & (x < jnp.inf), x, jnp.nan)


def as_scalar(name: str, value: Any, dtype: Any) -> Array:
    """One positive number in `dtype`, checked by `as_positive`."""
    check_scalar(name, value)
    return as_positive(name, value, dtype)


def check_scalar(name: str, value: Any) -> None:
    """Refuses an array that has axes."""
    if np.ndim(value):
        raise ValueError(f"{name} must be one number, got shape {np.shape(value)}")


def check_at_least(name: str, value: Any, least: float | int) -> None:
    """Refuses numbers that are not finite or below `least`; reads no JAX array."""
    if isinstance(value, jax.Array):
        return
    value = as_numbers(name, value)
    bad = value[~((value >= least) & (value < np.inf))]
    if bad.size:
        rule = "finite" if bad.flat[0] == np.inf else f"at least {least:g}"
        raise ValueError(f"{name} must be {rule}, got {bad.flat[0]}")


def as_at_least(name: str, value: Any, least: float | int, dtype: Any) -> Array:
    """Numbers in `dtype`; NaN where one in a JAX array is infinite or below `least`."""
    check_at_least(name, value, least)
    x = as_floating(value, name).astype(dtype)
    if not isinstance(value, jax.Array):
        return x
    return jnp.where((x >= least) & (x < jnp.inf), x, jnp.nan)


def check_probability(name: str, value: Any) -> None:
    """Refuses an array, and a concrete number that is not in `[0, 1]`."""
    check_scalar(name, value)
    if isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not is_traced(value) and not 0 <= as_numbers(name, value) <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def check_count(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuses anything but an integer in `[least, most]`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def check_seed(name: str, value: Any) -> None:
    """Refuses anything but an unsigned integer of 32 bits: JAX drops higher bits."""
    check_count(name, value, 0, 2**32 - 1)


def check_sizes(**sizes: Any) -> None:
    """Refuses anything but positive integers; None stands for a size not given."""
    for name, size in sizes.items():
        if size is not None:
            check_count(name, size, 1)


def check_floating(name: str, dtype: Any) -> None:
    """Refuses anything but a floating dtype."""
    try:
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return
    except TypeError:
        pass
    raise ValueError(f"{name} must be a floating dtype, got {dtype!r}")


def check_rngs(rngs: Any) -> None:
    """Refuses anything but random streams of Flax from which parameters are drawn."""
    if not callable(getattr(rngs, "params", None)):
        raise ValueError(
            "rngs must be nnx.Rngs with a stream for parameters, such as nnx.Rngs(0), "
            f"got {rngs!r}"
        )


def check_rate(name: str, value: Any) -> None:
    """Refuses anything but a number in `[0, 1)`."""
    if not isinstance(value, (int, float, np.number)) or not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def as_counts(name: str, values: Any, least: int, most: int) -> tuple[int, ...]:
    """Several integers in `[least, most]`."""
    try:
        counts = tuple(values)
    except TypeError:
        raise ValueError(
            f"{name} must be a sequence of integers, got {values!r}"
        ) from None
    for count in counts:
        check_count(name, count, least, most)
    return counts


def as_boolean(name: str, x: Any, meaning: str = "") -> Array:
    """A boolean array. Integers are refused: they may be weights or positions."""
    try:
        array = jnp.asarray(x)
        got = f"dtype {array.dtype}"
    except (TypeError, ValueError):
        array, got = None, repr(x)
    if array is None or array.dtype != jnp.bool_:
        meaning = f" ({meaning})" if meaning else ""
        raise ValueError(f"{name} must be boolean{meaning}, got {got}")
    return array


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Refuses a name that is not among the choices, and lists them."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(
            f"unknown {name} {value!r}; choose one of {', '.join(choices)}"
        )


def check_named(**lists: Any) -> None:
    """Refuses an empty list of things to run; its keyword is its name."""
    for name, items in lists.items():
        if not len(items):
            raise ValueError(f"{name} must name at least one, got {items}")


def check_distinct(name: str, items: Iterable[Any]) -> None:
    """Refuses a list with two equal items."""
    items = list(items)
    for index, item in enumerate(items):
        if item in items[:index]:
            raise ValueError(f"{name} must name each once, got {item!r} twice")


def broadcast_rows(name: str, x: Any, shape: tuple[int, ...]) -> Array:
    """Broadcasts `x` to `shape`.

    Raises:
      ValueError: if `x` does not broadcast to `shape`.
    """
    check_broadcast(name, x, shape)
    return jnp.broadcast_to(x, shape)


def check_broadcast(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Refuses an array, or a number, that does not broadcast to `shape`."""
    own = np.shape(x)
    fits = len(own) <= len(shape) and all(
        n in (1, m) for n, m in zip(own[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{name} has shape {own}, which does not broadcast to {shape}")


def check_key(key: Any) -> None:
    """Refuses anything but one random key, typed or of unsigned integers."""
    got = repr(key)
    if isinstance(key, (jax.Array, np.ndarray)):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if (typed and key.shape == ()) or (key.dtype == jnp.uint32 and key.ndim == 1):
            return
        got = f"shape {key.shape} and dtype {key.dtype}"
    raise ValueError(
        f"key must be a JAX random key such as jax.random.key(0), got {got}"
    )


def check_memory_set(memories: Any, *, distinct: bool = True) -> None:
    """Refuses fewer than two memories, NaN, infinity and, if `distinct`, duplicates."""
    if memories.ndim < 2 or memories.shape[-2] < 2:
        raise ValueError(
            "Stage I needs at least two memories of shape (M, d), got memories of "
            f"shape {memories.shape}"
        )
    if not memories.size:
        raise ValueError(
            f"memories must have components and sets, got shape {memories.shape}"
        )
    check_finite("memories", memories)
    # No host sees all rows of an array that is spread over several hosts.
    readable = not is_traced(memories) and memories.is_fully_addressable
    if distinct and readable:
        array = np.asarray(memories)
        for rows in array.reshape(-1, *array.shape[-2:]):
            for first, index in _repeated_rows(rows):
                raise ValueError(
                    f"memories {first} and {index} are equal: no kernel separates "
                    "duplicates, store each pattern once"
                )


def _repeated_rows(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Indices of a row and of a later row with the same bits."""
    bits = np.ascontiguousarray(rows).view(f"u{rows.itemsize}")
    factors = np.random.default_rng(0).integers(2**63, size=rows.shape[1], dtype="u8")
    # A sum of products modulo 2^64: equal rows have equal sums, others hardly ever.
    sums = np.einsum("md,d->m", bits, 2 * factors + 1, dtype="u8", casting="unsafe")
    _, first, which = np.unique(sums, return_index=True, return_inverse=True)
    for index in np.flatnonzero(first[which] != np.arange(len(rows))):
        if (bits[index] == bits[first[which[index]]]).all():
            yield int(first[which[index]]), int(index)
