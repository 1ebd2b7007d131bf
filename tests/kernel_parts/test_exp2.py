"""Powers of two by polynomial: as exact as float32 asks for, and right where softmax leans on it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts.exp2 import exp2_by_polynomial, exp2_in_part


def test_as_exact_as_the_units_own():
    """Whose error is two units in the last place."""
    x = np.linspace(-126.4, 9, 200_001, dtype=np.float32)
    got = exp2_by_polynomial(x)
    normal = x > -125.4
    relative = np.abs(np.asarray(got, np.float64) / np.exp2(x.astype(np.float64)) - 1)
    assert relative[normal].max() < 2 * np.finfo(np.float32).eps
    assert relative[~normal].max() <= 1  # may be flushed to 0


def test_nothing_and_nan():
    got = exp2_by_polynomial(jnp.array([-jnp.inf, -1e30, -127.0, 0.0, 8.0, jnp.nan]))
    np.testing.assert_allclose(got, [0, 0, 0, 1, 256, np.nan], rtol=2.5e-7)
    assert (np.asarray(got)[:3] == 0).all()


@pytest.mark.parametrize("columns", [0, 8, 32])
def test_part(columns):
    x = jnp.linspace(-20, 0, 4 * 32).reshape(4, 32)
    got = exp2_in_part(x, columns)
    np.testing.assert_allclose(got, jnp.exp2(x), rtol=1e-6)
    np.testing.assert_array_equal(got[:, columns:], jnp.exp2(x[:, columns:]))
    np.testing.assert_array_equal(got[:, :columns], exp2_by_polynomial(x[:, :columns]))
