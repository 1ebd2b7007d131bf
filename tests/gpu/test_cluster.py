"""What blocks of a cluster read of each other, and reductions by columns, on the GPU at hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import cluster

pytestmark = pytest.mark.usefixtures("warpgroups")


def test_other_blocks_shared_memory():
    rows = jax.random.normal(jax.random.key(0), (200, cluster.BLOCKS, cluster.COLUMNS))
    wanted = (np.asarray(rows) * np.asarray(rows)[..., :1]).sum(1, keepdims=True)
    got = np.asarray(jax.jit(cluster.added)(rows))
    np.testing.assert_allclose(got, np.broadcast_to(wanted, got.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [8, 24])
def test_columns(columns):
    tile = jax.random.normal(jax.random.key(1), (128, columns)).at[3, 2].set(jnp.nan)
    most, total = np.asarray(jax.jit(cluster.reduced)(tile))
    np.testing.assert_array_equal(most, np.asarray(tile).max(0))
    np.testing.assert_allclose(total, np.asarray(tile).sum(0), rtol=1e-5, atol=1e-5)
