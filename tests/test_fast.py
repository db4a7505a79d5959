"""The fast ways give what JAX's own ways give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uhop_jax import _fast


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 3, 40])
def test_kth_largest(dtype, k):
    z = np.random.default_rng(0).normal(size=(4, 900)).astype(dtype)
    z[0, :7], z[1], z[2, 5:], z[3, :30] = 2.0, 0.5, -np.inf, np.finfo(dtype).max
    z = jnp.asarray(z)
    plain = jax.lax.top_k(z, k)[0][..., -1:]
    np.testing.assert_array_equal(_fast.kth_largest(z, k), plain)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_falling_order(dtype):
    x = np.random.default_rng(0).normal(size=(3, 50)).astype(dtype)
    x[0, :9], x[1, 5:], x[2, 3] = 2.0, -np.inf, np.nan
    x = jnp.asarray(x)
    plain = _fast.plain_descending(x[:2])
    np.testing.assert_array_equal(_fast.descending(x[:2]), plain)
    assert jnp.isnan(_fast.descending(x[2]).sum())
    weights = jnp.asarray(np.random.default_rng(1).normal(size=41).astype(dtype))
    for order in (_fast.descending, _fast.plain_descending):
        slope = jax.grad(lambda x, f=order: (f(x) * weights).sum())(x[0, 9:])
        ranks = jnp.argsort(jnp.argsort(-x[0, 9:]))
        np.testing.assert_array_equal(slope, weights[ranks])


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.7])
def test_masks_of_dropout(rate):
    """Shares, and correlations of neighbours, keys and axes, are those of chance."""
    shape, keys = (50, 40, 30), jax.random.split(jax.random.key(0), 2)
    one, other = (np.asarray(_fast.kept(key, shape, rate), float) for key in keys)
    spread = (rate * (1 - rate) / one.size) ** 0.5
    for mask in (one, other):
        assert abs(mask.mean() - (1 - rate)) <= 4 * spread
    if rate == 0:
        return
    one, other = one - one.mean(), other - other.mean()
    variance = rate * (1 - rate)
    pairs = [(one, other)]
    pairs += [(one, np.roll(one, 1, axis)) for axis in range(3)]
    for a, b in pairs:
        assert abs((a * b).mean() / variance) <= 4 / one.size**0.5


@pytest.mark.parametrize("e", [0.0, 1e-6, 0.3, 0.99])
def test_logarithm_of_entmax(e):
    x = -(10.0 ** np.linspace(-8, 0, 2001))
    x = jnp.asarray(np.concatenate([x, -x[::-1], [0.0]]), jnp.float32)
    x = x[x * e > -0.9]
    exact = _fast.plain_log_exp(x.astype(jnp.float64), jnp.asarray(e))
    for function in (_fast.log_exp, _fast.plain_log_exp):
        result = function(x, jnp.asarray(e, jnp.float32))
        np.testing.assert_allclose(result, exact, rtol=1e-6)


@pytest.mark.parametrize("number, size", [(32, 2**20), (30, 2**19), (7, 2**24)])
def test_entries_at_once_divide_the_number(monkeypatch, number, size):
    monkeypatch.setattr(_fast.os, "cpu_count", lambda: 2)
    few = _fast.entries_at_once(number, size)
    assert 1 <= few < number and number % few == 0
    assert few == 1 or few * size <= 2 * _fast.CACHE
    assert _fast.entries_at_once(number, 1) == number
