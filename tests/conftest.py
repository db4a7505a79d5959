"""Strict JAX for every test, and what all tests share."""

import os

# Tests compile much and compute little: let XLA spend its time accordingly.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

settings.register_profile("uhop", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("uhop")

TOLERANCES = {
    jnp.dtype(jnp.float64): 1e-10,
    jnp.dtype(jnp.float32): 1e-5,
    jnp.dtype(jnp.float16): 2e-3,
    jnp.dtype(jnp.bfloat16): 1.6e-2,
}

every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def assert_close(actual, expected, *, floor=0.0, scale=1.0):
    """Equal to `scale` times the tolerance of the dtype, and no closer than `floor`."""
    actual = np.asarray(actual)
    tolerance = max(scale * TOLERANCES[actual.dtype], floor)
    expected = np.asarray(expected, dtype=np.float64)
    np.testing.assert_allclose(
        actual.astype(np.float64), expected, rtol=tolerance, atol=tolerance
    )


@pytest.fixture
def untyped():
    """Switches the type checks of the test run off, so that the library's speak."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def compilations():
    """A list that grows by one with every program compiled during the test."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)
