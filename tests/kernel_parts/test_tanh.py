"""tanh for kernels: as exact as softmax's logits need, of the right sign everywhere, and NaN stays NaN."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts.tanh import tanh, tanh_by_division


@pytest.mark.parametrize("tanh", [tanh, tanh_by_division])
def test_as_exact_as_it_says(tanh):
    x = np.concatenate([np.linspace(-12, 12, 200_001), np.linspace(-0.1, 0.1, 20_001)]).astype(np.float32)
    error = np.abs(np.asarray(tanh(jnp.asarray(x)), np.float64) - np.tanh(x.astype(np.float64)))
    assert error.max() < 2.9e-7
    assert error[np.abs(x) < 0.1].max() < 1.6e-7


def test_ends():
    big = np.float32(3e38)
    got = np.asarray(tanh(jnp.array([-jnp.inf, -big, 0.0, 1e-30, big, jnp.inf, jnp.nan], jnp.float32)))
    np.testing.assert_allclose(got, [-1, -1, 0, 0, 1, 1, np.nan], atol=2.4e-7)
    x = np.linspace(1e-3, 20, 999, dtype=np.float32)
    np.testing.assert_array_equal(tanh(jnp.asarray(-x)), -np.asarray(tanh(jnp.asarray(x))))
