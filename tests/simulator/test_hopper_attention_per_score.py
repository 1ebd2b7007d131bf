"""The Hopper attention kernels with something for each score: biases, boolean arrays, dropout."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.ops.attention import hopper_bias_grad, hopper_call
from fast_layers.testing import simulate
from fast_layers.testing.parity import Case
from simulator.attention import StandIn, changed, judge, only
from simulator.found import tells
from simulator.rounded import assert_rounded, op_and_gradients

pytestmark = pytest.mark.simulator

CASES = {
    "everything": Case(
        batch=2, q_len=150, kv_len=150, heads=2, kv_heads=1, is_causal=True, key_lengths=(150, 97), softcap=10.0,
        sinks=True, lse_gradient=True, dense_mask=True, bias=(1, 2, 150, 150), dropout_rate=0.1,
    ),
}  # fmt: skip
MORE = {
    "dropout, depth 192": Case(batch=1, q_len=150, kv_len=150, heads=2, kv_heads=2, qk_dim=192, v_dim=128,
                               dense_mask=True, dropout_rate=0.2),
    "bias shared by examples, causal": Case(
        batch=2, q_len=150, kv_len=150, heads=2, kv_heads=1, is_causal=True, bias=(1, 2, 150, 150), lse_gradient=True
    ),
    "bias of all scores": Case(batch=2, q_len=130, kv_len=150, heads=2, kv_heads=1, bias=(2, 2, 130, 150)),
    "bias per key": Case(batch=2, q_len=100, kv_len=130, heads=2, kv_heads=2, bias=(2, 1, 1, 130)),
    "bias per query, soft cap": Case(
        batch=2, q_len=130, kv_len=100, heads=2, kv_heads=2, bias=(1, 2, 130, 1), softcap=5.0, sinks=True
    ),
    "dense mask": Case(batch=2, q_len=200, kv_len=150, heads=2, kv_heads=2, dense_mask=True),
    "dense mask, packed documents": Case(
        batch=1, q_len=200, kv_len=200, heads=2, kv_heads=2, dense_mask=True, documents=(70, 100)
    ),
    "dropout": Case(batch=2, q_len=200, kv_len=150, heads=2, kv_heads=1, dropout_rate=0.2),
    "dropout, causal, depth 128": Case(
        batch=1, q_len=200, kv_len=200, heads=2, kv_heads=2, qk_dim=128, v_dim=128, is_causal=True, dropout_rate=0.4
    ),
    "few queries, many keys": Case(
        batch=1, q_len=64, kv_len=1100, heads=8, kv_heads=4, bias=(1, 8, 1, 1100), dropout_rate=0.1
    ),
    "everything, depth 192": Case(
        batch=1, q_len=150, kv_len=150, heads=2, kv_heads=2, qk_dim=192, v_dim=128, softcap=10.0, dense_mask=True,
        bias=(1, 1, 150, 150), dropout_rate=0.1,
    ),
}  # fmt: skip


def _check(case):
    judged = judge(case)
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()
    assert not judged.table.refusals
    quantities = {row.quantity for row in judged.table.rows}
    assert quantities >= {"out", "lse", "dq", "dk", "dv"} | ({"dbias"} if case.bias else set())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case):
    _check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE.values(), ids=MORE)
def test_more_cases(case):
    _check(case)


@pytest.mark.exhaustive
def test_vmap_over_examples_with_a_bias_closed_over():
    """Its gradient is each example's own."""
    rng = np.random.default_rng(0)
    query, key, value, d_out = (jnp.asarray(rng.normal(size=(2, 1, 70, 2, 64)), jnp.float16) for _ in range(4))
    bias = jnp.asarray(rng.normal(size=(2, 70, 70)), jnp.float16)

    def gradients(backend, bias, *operands):
        def of_one(query, key, value, d_out):
            return op_and_gradients(backend, query, key, value, d_out, bias)

        return jax.vmap(of_one)(*operands)

    operands = (bias, query, key, value, d_out)
    assert_rounded(simulate(functools.partial(gradients, hopper_call), *operands).check(), gradients, *operands)


# Four rounds of the ring of two slots for each tile of the bias.
FAULTY = Case(batch=4, q_len=64, kv_len=64, heads=2, kv_heads=2, bias=(1, 1, 64, 64))
FAULTS = {
    "tiles not awaited": (StandIn("barrier_wait ready"), "read of SMEM"),
    "tiles overwritten": (StandIn("barrier_wait consumed"), "write of SMEM"),
    "rows' vectors not committed": (StandIn("commit_smem #1"), ""),
    "gradient not committed": (StandIn("commit_smem #2"), "write of SMEM"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_of_the_bias_gradient_is_found(fault):
    stand_in, access = FAULTS[fault]
    with changed(hopper_bias_grad, stand_in):
        judged = judge(FAULTY, supports=only("backward"), timeout=20.0)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    (sim,) = judged.simulations[-1:]
    assert sim.faulty
    assert tells(sim, access), sim.report()
