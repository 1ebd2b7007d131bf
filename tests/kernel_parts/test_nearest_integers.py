"""Floats to integers on the multiply-add units."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts.nearest_integers import nearest_integers


@pytest.mark.parametrize("scale", [2.0**-60, 1.0, 2.0**29])
def test_nearest(scale):
    wanted = 2.0 ** np.linspace(-3, 29.99, 3000) * np.resize([1, -1], 3000)
    x = (wanted / scale).astype(np.float32)
    got = nearest_integers(jnp.asarray(x), jnp.full_like(x, scale))
    assert got.dtype == jnp.int32
    # Exact products round by a half at most.
    assert np.abs(np.asarray(got).astype(np.float64) - x.astype(np.float64) * scale).max() <= 0.5


def test_scale_of_which_a_part_is_no_normal_float():
    got = nearest_integers(jnp.float32([-3e37, 2e38]), jnp.float32([2.0**-120]))
    np.testing.assert_array_equal(got, [-23, 150])
