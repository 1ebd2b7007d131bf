"""What the backward of Hopper attention knows of each row: right, free of races, and planted faults are found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

from fast_layers.ops.attention import api, hopper_bwd_rows
from fast_layers.testing import simulate
from simulator.attention import StandIn
from simulator.found import tells

pytestmark = pytest.mark.simulator


def _operands(depth: int, length: int = 320, kv_length: int = 256):
    """Two heads; more tiles than three warpgroups have slots."""
    draw = jax.random.split(jax.random.key(0), 4)
    lengths = length, length, kv_length, kv_length
    out, d_out, key, value = (
        np.array(jax.random.normal(k, (1, n, 2, depth), jnp.bfloat16)) for k, n in zip(draw, lengths, strict=True)
    )
    d_out[0, 11, 1, 3], d_out[0, 90, 0, 4] = np.inf, np.nan
    key[0, 7, 1, 5], key[0, 19, 0, 1] = np.nan, -np.inf
    value[0, 3, 1, 5], value[0, 9, 0, 1], value[0, 10, 0, 1] = np.nan, np.inf, 3e38
    return hopper_bwd_rows.Operands(*map(jnp.asarray, (out, d_out, key, value)))


def _simulate(operands, monkeypatch, stand_in=None):
    monkeypatch.setattr(hopper_bwd_rows, "HOPPER_SMS", 1)
    if stand_in is not None:
        monkeypatch.setattr(hopper_bwd_rows, "plgpu", stand_in)
    inputs, aux, given, _ = api._prepare(operands.out, operands.key, operands.value)
    problem = given.problem(inputs, aux)
    assert hopper_bwd_rows.takes(problem, 64, problem.qk_dim)
    kernel: Any = hopper_bwd_rows.row_sums
    kernel = kernel.__wrapped__  # without its jit, which would give back what was traced before
    return simulate(lambda operands: kernel(jnp.int32, problem, operands), operands, timeout=60.0)


@pytest.mark.parametrize("depth", [64, *(pytest.param(depth, marks=pytest.mark.exhaustive) for depth in (128, 256))])
def test_as_by_xla(depth, monkeypatch):
    operands = _operands(depth)
    got, want = _simulate(operands, monkeypatch).check(), hopper_bwd_rows.row_sums_by_xla(operands)
    for name in got._fields[:-1]:
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), 1e-5, 1e-5, err_msg=name)
    assert np.isinf(got.key_size).sum() == 2
    assert np.isinf(got.value_size).sum() == 2
    assert got.d_query.shape == operands.out.shape
    np.testing.assert_array_equal(got.d_query, 0)


FAULTS = {
    "tiles not awaited": ("barrier_wait #2", "read of SMEM"),
    "tiles overwritten": ("commit_smem #2", "read of SMEM"),
    "rows not committed": ("commit_smem #3", "write of SMEM"),
    "rows overwritten": ("read wait_smem_to_gmem #1", "read of SMEM"),
    "zeros not awaited": ("barrier_wait #1", "write of SMEM"),
}


@pytest.mark.parametrize("fault", some_each_run(FAULTS, {"tiles overwritten"}))
def test_planted_fault_is_found(fault, monkeypatch):
    event, access = FAULTS[fault]
    stand_in = StandIn(event)
    sim = _simulate(_operands(64), monkeypatch, stand_in)
    assert stand_in.hits == 1
    assert tells(sim, access), sim.report()
