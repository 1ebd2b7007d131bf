"""dQ of what the backward of Hopper attention sums up: right, free of races, and a planted fault is found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts.fragments import to_fragments
from fast_layers.ops.attention import api, hopper_bwd_sums
from fast_layers.testing import simulate
from simulator.attention import StandIn
from simulator.found import tells

pytestmark = pytest.mark.simulator


def _simulate(tiles, factors, q_len, monkeypatch, stand_in=None):
    """Of sums [B, N, I, panels, 64, columns]."""
    if stand_in is not None:
        monkeypatch.setattr(hopper_bwd_sums, "plgpu", stand_in)
    batch, heads, _, panels, _, columns = tiles.shape
    query = jnp.zeros((batch, q_len, heads, panels * columns), jnp.bfloat16)
    inputs, aux, given, _ = api._prepare(query, query, query)
    of_each = tiles.reshape(-1, *tiles.shape[-2:])
    sums = jnp.stack([to_fragments(tile) for tile in of_each]).reshape(*tiles.shape[:4], -1, 256)
    shape = hopper_bwd_sums.sums_shape(batch, heads, 64 * tiles.shape[2], panels, columns)
    assert sums.shape == shape
    kernel: Any = hopper_bwd_sums.d_query
    kernel = kernel.__wrapped__  # without its jit, which would give back what was traced before
    problem, operands = given.problem(inputs, aux), hopper_bwd_sums.Operands(sums, factors)
    return simulate(lambda operands: kernel(problem, operands), operands, timeout=60.0)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize(("panels", "columns", "q_len"), [(1, 64, 128), (2, 32, 100), (1, 48, 9)])
def test_rows_times_their_factors(panels, columns, q_len, dtype, monkeypatch):
    tiles = -(-q_len // 64)
    sums = jax.random.randint(jax.random.key(0), (2, 3, tiles, panels, 64, columns), -(2**30), 2**30).astype(dtype)
    factors = jax.random.normal(jax.random.key(1), (2, 3, 64 * tiles)).at[1, 2, 5].set(jnp.nan)
    got = _simulate(sums, factors, q_len, monkeypatch).check()
    want = sums.transpose(0, 2, 4, 1, 3, 5).reshape(2, 64 * tiles, 3, -1).astype(jnp.float32)
    want = (want * factors.swapaxes(1, 2)[..., None]).astype(jnp.bfloat16)
    assert np.isnan(np.asarray(want[1, 5, 2], np.float32)).all()
    np.testing.assert_array_equal(*(np.asarray(x[:, :q_len], np.float32) for x in (got, want)))


def test_planted_fault_is_found(monkeypatch):
    stand_in = StandIn("commit_smem")
    sim = _simulate(jnp.zeros((1, 1, 2, 1, 64, 64)), jnp.ones((1, 1, 128)), 128, monkeypatch, stand_in)
    assert stand_in.hits > 0
    assert tells(sim, "write of SMEM"), sim.report()
