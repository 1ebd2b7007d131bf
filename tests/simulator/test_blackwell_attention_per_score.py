"""The Blackwell attention kernels with something for each score: biases, boolean arrays, dropout."""

from __future__ import annotations

import pytest

from fast_layers.ops.attention import blackwell_bias_grad
from fast_layers.testing.parity import Case
from simulator.attention import judge, only
from simulator.blackwell_attention import BLACKWELL, without
from simulator.found import tells
from simulator.test_hopper_attention_per_score import CASES, FAULTY, MORE

pytestmark = pytest.mark.simulator

LEAN = {
    "all three": Case(
        batch=1, q_len=70, kv_len=130, heads=1, kv_heads=1, softcap=10.0, dense_mask=True, bias=(1, 1, 70, 130),
        dropout_rate=0.1,
    ),
}  # fmt: skip
ALL = {**LEAN, **CASES, **MORE}


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in LEAN else pytest.mark.exhaustive) for x in ALL])
def test_case(name):
    case = ALL[name]
    judged = judge(case, backend=BLACKWELL)
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()
    assert not judged.table.refusals
    quantities = {row.quantity for row in judged.table.rows}
    assert quantities >= {"out", "lse", "dq", "dk", "dv"} | ({"dbias"} if case.bias else set())


# Eight rounds of both buffers for each tile of the bias.
FAULTS = {
    "tiles not awaited": (FAULTY, "barrier_wait ready", "read of SMEM"),
    "tiles overwritten": (FAULTY, "barrier_wait consumed", "write of SMEM"),
    "products read in flight": (FAULTY, "barrier_wait scores_ready", ""),
    "products overwritten": (FAULTY, "barrier_wait scores_consumed", "TMEM"),
    "products' load not awaited": (FAULTY, "wait_load_tmem #1", "TMEM"),
    "sums not committed": (FAULTY, "commit_tmem", "TMEM"),
    "gradient not committed": (FAULTY, "commit_smem", "SMEM"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(x, marks=() if x == "products overwritten" else pytest.mark.exhaustive) for x in FAULTS]
)
def test_planted_fault_of_the_bias_gradient_is_found(fault):
    case, event, text = FAULTS[fault]
    with without(blackwell_bias_grad, event) as stand_in:
        judged = judge(case, backend=BLACKWELL, supports=only("backward"), timeout=20.0)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    (sim,) = judged.simulations[-1:]
    assert sim.faulty
    assert tells(sim, text), sim.report()


@pytest.mark.exhaustive
def test_without_a_fault_nothing_is_found():
    with without(blackwell_bias_grad) as stand_in:
        judged = judge(FAULTY, backend=BLACKWELL, supports=only("backward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()
    assert stand_in.counts["barrier_wait"] > 0  # it was asked
