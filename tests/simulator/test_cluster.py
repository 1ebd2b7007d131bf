"""What blocks of a cluster read of each other, and reductions by columns, as the simulator has them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.testing import simulate
from simulator import cluster
from simulator.found import tells

pytestmark = pytest.mark.simulator

ROWS = jax.random.normal(jax.random.key(0), (2, cluster.BLOCKS, cluster.COLUMNS))


def test_other_blocks_shared_memory():
    wanted = (np.asarray(ROWS) * np.asarray(ROWS)[..., :1]).sum(1, keepdims=True)
    got = simulate(cluster.added, ROWS).check()
    np.testing.assert_allclose(got, np.broadcast_to(wanted, got.shape), rtol=1e-5, atol=1e-5)


def test_reading_before_all_have_stored_is_a_race():
    sim = simulate(functools.partial(cluster.added, fault="not awaited"), ROWS, timeout=20.0)
    assert tells(sim, "SMEM"), sim.report()


@pytest.mark.parametrize("shape", [(64, 8), (128, 24)])
def test_columns(shape):
    tile = jax.random.normal(jax.random.key(1), shape).at[3, 2].set(jnp.nan)
    most, total = simulate(cluster.reduced, tile).check()
    np.testing.assert_array_equal(most, np.asarray(tile).max(0))
    np.testing.assert_allclose(total, np.asarray(tile).sum(0), rtol=1e-5, atol=1e-5)
