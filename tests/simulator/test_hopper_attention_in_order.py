"""Attention's backward on Hopper where blocks go through whole heads: right, dQ's sums in order, and faults found."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

from fast_layers.ops.attention import api, hopper_bwd, hopper_call, reference
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.problem import Residuals
from fast_layers.testing import simulate
from fast_layers.testing.parity import Case
from simulator.attention import StandIn, backward_tiles, changed, draw, found, judge, only, patched, square

pytestmark = pytest.mark.simulator

ALONE = HopperBackwardTiles(128, blocks=2, whole_heads=True)
TOGETHER = HopperBackwardTiles(128, blocks=4, whole_heads=True, cluster=2)

# Several heads for a block or a cluster, so that their sums follow one another in one place.
CASES = {
    "full": (Case(batch=1, q_len=256, kv_len=384, heads=3, kv_heads=3), ALONE),
    "full, grouped heads, odd lengths": (Case(batch=2, q_len=100, kv_len=300, heads=4, kv_heads=2), ALONE),
    "one tile": (square(90, heads=3, kv_heads=3), ALONE),
    "causal": (square(384, heads=3, kv_heads=3, is_causal=True, lse_gradient=True), ALONE),
    "causal, one tile": (square(128, heads=3, kv_heads=3, is_causal=True), ALONE),
    "causal, grouped heads, odd length": (square(300, heads=4, kv_heads=2, is_causal=True, softcap=3.0), ALONE),
    "cluster": (Case(batch=1, q_len=768, kv_len=256, heads=3, kv_heads=3), TOGETHER),
    "cluster, grouped heads, odd lengths": (Case(batch=3, q_len=300, kv_len=500, heads=2, kv_heads=1), TOGETHER),
    "cluster, fewer heads than clusters": (Case(batch=1, q_len=700, kv_len=250, heads=1, kv_heads=1), TOGETHER),
}


@pytest.mark.parametrize("name", some_each_run(CASES, {"causal", "cluster, grouped heads, odd lengths"}))
def test_whole_heads(name):
    case, tiles = CASES[name]
    with patched(backward_tiles(tiles)):
        judge(case, supports=only("backward"), sums_in_order=True).check()


def _prepared(**options: Any) -> tuple[Any, Any, Any, Any]:
    *operands, d_out = draw(batch=1, length=260, heads=2)
    inputs, aux, given, _ = api._prepare(*operands, **options)
    return inputs, aux, given.problem(inputs, aux), d_out


@pytest.mark.parametrize("broken", some_each_run(["query", "key", "value", "d_out"], {"value", "d_out"}))
def test_what_is_broken_reaches_who_sees_it_and_nobody_else(broken):
    """Of 260 rows under a causal mask, number 150."""
    inputs, aux, problem, d_out = _prepared(is_causal=True)
    if broken == "d_out":
        d_out = d_out.at[0, 150, 0, 3].set(jnp.nan)
    else:
        inputs = inputs._replace(**{broken: getattr(inputs, broken).at[0, 150, 0, 3].set(jnp.nan)})

    def gradients(inputs, aux, d_out):
        out, lse = reference.forward(problem, inputs, aux)
        return hopper_call.backward(problem, Residuals(inputs, aux, out, lse), d_out, jnp.zeros_like(lse))

    with patched(backward_tiles(ALONE)):
        got = simulate(gradients, inputs, aux, d_out, sums_in_order=True).check()
    by_row = {
        name: np.isnan(np.asarray(getattr(got, name), np.float32)).any(-1)[0] for name in ("query", "key", "value")
    }
    assert not any(rows[:, 1].any() for rows in by_row.values())  # the other head
    sees = {"key": slice(150, None), "value": slice(150, None)}.get(broken, slice(150, 151))
    d_query = np.zeros(260, bool)
    d_query[sees] = True
    np.testing.assert_array_equal(by_row["query"][:, 0], d_query)


def test_sums_are_as_many_as_run_at_a_time():
    """Not as many as there are heads."""
    inputs, aux, problem, d_out = _prepared()
    problem = dataclasses.replace(problem, batch=64)
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((64, *x.shape[1:]), x.dtype), (inputs, d_out))
    lse = jax.ShapeDtypeStruct((64, 2, 260), jnp.float32)

    def gradients(inputs, d_out, lse):
        return hopper_call.backward(problem, Residuals(inputs, aux, d_out, lse), d_out, lse)

    with patched(backward_tiles(dataclasses.replace(ALONE, blocks=20))):
        program = str(jax.make_jaxpr(gradients)(*many, lse))
    assert "f32[20,1,6,1,16,256]" in program
    assert "i32[64,2,6,1,16,256]" not in program


def _one(case: Case) -> tuple[Any, str, Any]:
    """One block, or one cluster of them."""
    tiles = TOGETHER if case is BOTH else ALONE
    return backward_tiles(dataclasses.replace(tiles, blocks=tiles.cluster))


FULL = Case(batch=1, q_len=256, kv_len=384, heads=2, kv_heads=2)
BOTH = Case(batch=1, q_len=768, kv_len=256, heads=2, kv_heads=2)
FAULTS = {
    "added before others are done": (FULL, StandIn("wait_smem_to_gmem"), "GMEM"),
    "sum not awaited": (FULL, StandIn("barrier_wait sum_ready"), "of SMEM"),
    # In the text, of the waits for a store's read: before a sum is fetched, dK and dV, the last ones.
    "sum fetched over what is added": (FULL, StandIn("read wait_smem_to_gmem #1"), "write of SMEM"),
    # In the text: dS, what is added, dQ, the last of both, dV, dK.
    "dQ's part not committed": (FULL, StandIn("commit_smem #2"), "write of SMEM"),
    "dQ not committed": (FULL, StandIn("commit_smem #3"), "write of SMEM"),
    "dK not committed": (FULL, StandIn("commit_smem #5"), "write of SMEM"),
    "the other block not awaited": (BOTH, StandIn("barrier_wait added"), "GMEM"),
}


@pytest.mark.parametrize("case", [FULL, pytest.param(BOTH, marks=pytest.mark.exhaustive)], ids=["alone", "together"])
def test_without_a_fault_nothing_is_found(case):
    stand_in = StandIn()
    with changed(hopper_bwd, stand_in, _one(case)):
        judge(case, supports=only("backward"), sums_in_order=True).check()
    assert stand_in.counts["wait_smem_to_gmem"] > 0
    assert stand_in.hits == 0


@pytest.mark.parametrize(
    "fault", some_each_run(FAULTS, {"added before others are done", "the other block not awaited"})
)
def test_planted_fault_is_found(fault):
    found(hopper_bwd, fault, FAULTS, _one(FAULTS[fault][0]), sums_in_order=True)
