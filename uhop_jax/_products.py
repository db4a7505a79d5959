"""Matrix products at full precision, summed in at least float32 on every device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from uhop_jax._checks import working_dtype


def product(equation: str, a: Array, b: Array) -> Array:
    """The product of arrays of one dtype, summed and returned in at least float32."""
    return jnp.einsum(
        equation,
        a,
        b,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=working_dtype(b),
    )


def contract(a: Float[Array, "*batch D"], b: Float[Array, "N D"]) -> Array:
    """`a @ b.T`, by `product`."""
    return product("...d,nd->...n", *_same_dtype(a, b))


def weigh(weights: Float[Array, "*batch N"], b: Float[Array, "N D"]) -> Array:
    """`weights @ b`, by `product` in the dtype of `b`."""
    return product("...n,nd->...d", weights.astype(b.dtype), b)


def _same_dtype(a: Array, b: Array) -> tuple[Array, Array]:
    """Both arrays in the lower precision: half-precision keys stay half precision."""
    dtype = a.dtype if a.dtype.itemsize < b.dtype.itemsize else b.dtype
    return a.astype(dtype), b.astype(dtype)


def shifted(x: Array, center: Array) -> Array:
    """`x - center` for `x (..., d)` and `center (d,)`, in the dtype of `x`."""
    return x - center.astype(x.dtype).reshape((1,) * (x.ndim - 1) + center.shape)


def gram_matrix(features: Array) -> Array:
    """Inner products `(..., M, M)` of rows `(..., M, D)`, in at least float32."""
    return product("...md,...nd->...mn", features, features)
