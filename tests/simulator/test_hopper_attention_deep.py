"""Attention's backward on Hopper at depths over 128, with dQ in its kernel: every planted fault found."""

from __future__ import annotations

import dataclasses

import pytest
from selection import some_each_run

from fast_layers.ops.attention import hopper_bwd_deep
from fast_layers.testing.parity import Case
from simulator.attention import StandIn, found, nothing_found

pytestmark = pytest.mark.simulator

# Six steps: two rounds of every ring.
DEEP_CASE = Case(batch=1, q_len=384, kv_len=64, heads=1, kv_heads=1, qk_dim=192, v_dim=64)


MASKED_DEEP = dataclasses.replace(
    DEEP_CASE, q_len=256, kv_len=128, key_lengths=(100,), query_lengths=(220,), poisoned_padding=True
)


# The second tile of keys has no step.
UNSEEN_DEEP = dataclasses.replace(DEEP_CASE, q_len=64, kv_len=128, is_causal=True)


DEEP_FAULTS = {
    "keys and values not awaited": (DEEP_CASE, StandIn("barrier_wait kv_ready"), "read of SMEM"),
    "queries not awaited": (DEEP_CASE, StandIn("barrier_wait q_ready"), "read of SMEM"),
    "d_out not awaited": (DEEP_CASE, StandIn("barrier_wait d_out_ready"), "read of SMEM"),
    "P not awaited": (DEEP_CASE, StandIn("barrier_wait weights_ready"), "SMEM"),
    "P overwritten": (DEEP_CASE, StandIn("barrier_wait weights_consumed"), "write of SMEM"),
    "dS not awaited": (DEEP_CASE, StandIn("barrier_wait scores_ready"), "SMEM"),
    "dS overwritten": (DEEP_CASE, StandIn("barrier_wait scores_consumed"), "write of SMEM"),
    # The value warpgroup's, whose last step stands apart.
    "last d_out not awaited": (DEEP_CASE, StandIn("barrier_wait #8"), "read of SMEM"),
    "dV stored over d_out in use": (UNSEEN_DEEP, StandIn("barrier_wait #9"), "of SMEM"),
    # In the text: each panel of dQ; [finite keys,] P, the next P, dV; [finite values,] dS, Q read, the next dS, dK.
    "dQ not committed": (DEEP_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "P not committed": (DEEP_CASE, StandIn("commit_smem #5"), "write of SMEM"),
    "dV not committed": (DEEP_CASE, StandIn("commit_smem #6"), "write of SMEM"),
    "first dS not committed": (DEEP_CASE, StandIn("commit_smem #7"), "write of SMEM"),
    "dS not committed": (DEEP_CASE, StandIn("commit_smem #9"), "write of SMEM"),
    "dK not committed": (DEEP_CASE, StandIn("commit_smem #10"), "write of SMEM"),
    "finite keys not committed": (MASKED_DEEP, StandIn("commit_smem #4"), "write of SMEM"),
    "dQ's slot overwritten": (DEEP_CASE, StandIn("read wait_smem_to_gmem"), "write of SMEM"),
    "dQ read in flight": (DEEP_CASE, StandIn("wgmma_accumulator_load #3"), "accumulator"),
    "scores read in flight": (DEEP_CASE, StandIn("wgmma_accumulator_load #5"), "accumulator"),
    "d_weights read in flight": (DEEP_CASE, StandIn("wgmma_accumulator_load #7"), "accumulator"),
    "d_out overwritten in flight": (DEEP_CASE, StandIn("wgmma_wait #1"), "SMEM"),
    "queries overwritten in flight": (DEEP_CASE, StandIn("wgmma_wait #2"), "SMEM"),
}


DEEP_EACH_RUN = {"dS not awaited", "P overwritten"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(DEEP_CASE, id="deep"),
        pytest.param(MASKED_DEEP, id="deep masked"),
        pytest.param(UNSEEN_DEEP, id="deep unseen"),
    ],
)
def test_without_a_fault_nothing_is_found(case):
    nothing_found(hopper_bwd_deep, case)


@pytest.mark.parametrize("fault", some_each_run(DEEP_FAULTS, DEEP_EACH_RUN))
def test_planted_fault_of_the_deep_backward_is_found(fault):
    found(hopper_bwd_deep, fault, DEEP_FAULTS)
