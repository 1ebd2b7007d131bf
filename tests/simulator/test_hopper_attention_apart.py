"""Attention's backward on Hopper where dS is left in memory and another kernel makes dQ of it, at all depths."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

from fast_layers.ops.attention import (
    api,
    hopper_bwd,
    hopper_bwd_apart,
    hopper_bwd_deep_query,
    hopper_bwd_deep_scores,
    hopper_bwd_scores,
    hopper_call,
    reference,
)
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles, HopperDeepBackwardTiles
from fast_layers.ops.attention.hopper_bwd_groups import Share
from fast_layers.ops.attention.problem import Residuals, finite_or_zero
from fast_layers.testing import simulate
from fast_layers.testing.parity import Case
from simulator.attention import StandIn, backward_tiles, draw, found, judge, only, patched, square
from simulator.rounded import assert_rounded

pytestmark = pytest.mark.simulator

# More tiles of queries than blocks make dQ of.
APART = {
    "causal, grouped heads": (square(384, heads=2, kv_heads=1, is_causal=True), HopperBackwardTiles(128)),
    "causal, depth 128": (
        square(384, heads=1, kv_heads=1, qk_dim=128, v_dim=128, is_causal=True, lse_gradient=True),
        HopperBackwardTiles(64, ragged_apart=True, d_query_apart=True, holds_keys=True),
    ),
    "causal, depth 80": (
        square(256, heads=2, kv_heads=1, qk_dim=80, v_dim=80, is_causal=True, lse_gradient=True),
        HopperBackwardTiles(64, ragged_apart=True, d_query_apart=True, holds_keys=True),
    ),
    "window, depth 96": (
        square(512, heads=1, kv_heads=1, qk_dim=96, v_dim=96, window=(150, 0)),
        HopperBackwardTiles(64, ragged_apart=True),
    ),
    "full, depth 112": (
        Case(batch=1, q_len=128, kv_len=384, heads=2, kv_heads=1, qk_dim=112, v_dim=112),
        HopperBackwardTiles(64, holds_keys=True, d_query_apart=True),
    ),
    "full, persistent": (
        Case(batch=1, q_len=128, kv_len=384, heads=2, kv_heads=1, qk_dim=128, v_dim=128),
        HopperBackwardTiles(64, blocks=1),
    ),
    "causal, persistent": (
        square(256, heads=2, kv_heads=2, is_causal=True),
        HopperBackwardTiles(128, blocks=1),
    ),
    "window, tiles of 64 queries": (
        square(640, heads=1, kv_heads=1, qk_dim=128, v_dim=128, window=(150, 0)),
        HopperBackwardTiles(64, ragged_apart=True, blocks=2),
    ),
    "window on both sides": (
        square(512, heads=2, kv_heads=1, window=(40, 129)),
        HopperBackwardTiles(128, ragged_apart=True, blocks=1),
    ),
}


DEEP_APART = {
    "deep causal, grouped heads": square(256, heads=2, kv_heads=1, qk_dim=192, v_dim=64, is_causal=True),
    "deep causal, three tiles": square(384, heads=1, kv_heads=1, qk_dim=192, v_dim=192, is_causal=True),
    "deep causal, clusters": square(512, heads=1, kv_heads=1, qk_dim=192, v_dim=64, is_causal=True, lse_gradient=True),
    "deep causal, half in registers": square(256, heads=1, kv_heads=1, qk_dim=256, v_dim=256, is_causal=True),
    "deep causal, values deeper than keys": square(256, heads=1, kv_heads=1, qk_dim=64, v_dim=192, is_causal=True),
    "deep full, grouped heads": Case(batch=1, q_len=256, kv_len=384, heads=2, kv_heads=1, qk_dim=192, v_dim=192),
}


def _apart(tiles: HopperBackwardTiles | HopperDeepBackwardTiles) -> tuple[tuple[Any, str, Any], ...]:
    tiles = dataclasses.replace(tiles, d_query_apart=True)
    return backward_tiles(tiles), (hopper_bwd_apart, "HOPPER_SMS", 1), (hopper_bwd_deep_query, "HOPPER_SMS", 2)


EACH_RUN_APART = {"causal, depth 128", "full, persistent", "deep causal, grouped heads"}


@pytest.mark.parametrize("name", some_each_run(APART | DEEP_APART, EACH_RUN_APART))
def test_d_query_by_a_kernel_of_its_own(name):
    case, tiles = APART[name] if name in APART else (DEEP_APART[name], HopperDeepBackwardTiles())
    with patched(*_apart(tiles)):
        judge(case, supports=only("backward")).check()


# The last group of two pairs has one that was done before.
GROUPS = {
    "causal, one pair": (square(256, batch=2, heads=2, kv_heads=1, is_causal=True), 1),
    "full, two of three pairs": (Case(batch=3, q_len=128, kv_len=256, heads=1, kv_heads=1), 2),
    "deep causal, two of three pairs": (
        square(128, batch=3, heads=1, kv_heads=1, qk_dim=192, v_dim=64, is_causal=True),
        2,
    ),
}


@pytest.mark.parametrize("name", some_each_run(GROUPS, {"full, two of three pairs"}))
def test_groups_of_heads_leave_their_scores_in_one_array(name):
    case, pairs = GROUPS[name]
    tiles = HopperDeepBackwardTiles() if case.qk_dim > 128 else HopperBackwardTiles(128, blocks=1)
    with patched(*_apart(tiles), (hopper_bwd_scores, "scores_group", lambda _: pairs)):
        judge(case, supports=only("backward")).check()


# Of how many pairs, and how many query heads of each, dS is there at a time.
_HELD = HopperBackwardTiles(64, ragged_apart=True, holds_keys=True, d_query_apart=True)
PARTS = {
    "causal, one head of two pairs": (
        square(256, heads=4, kv_heads=2, qk_dim=128, v_dim=128, is_causal=True, lse_gradient=True),
        (2, 1),
    ),
    "full, two heads of one pair": (
        Case(batch=2, q_len=128, kv_len=256, heads=4, kv_heads=1, qk_dim=128, v_dim=128),
        (1, 2),
    ),
}


def _in_parts(share: tuple[int, int]) -> tuple[tuple[Any, str, Any], ...]:
    given = (hopper_bwd_scores, "scores_group", lambda _: 0), (hopper_bwd_scores, "scores_in_parts", lambda _: share)
    return *_apart(_HELD), *given


@pytest.mark.parametrize("name", some_each_run(PARTS, {"causal, one head of two pairs"}))
def test_parts_of_grouped_heads_add_to_the_gradients_of_keys(name):
    case, share = PARTS[name]
    with patched(*_in_parts(share)):
        judge(case, supports=only("backward")).check()


# Of how many pairs, how many query heads of each and how many tiles of their queries dS is there at a time.
BY_QUERIES = {
    "one head of two pairs": (
        Case(batch=2, q_len=384, kv_len=256, heads=2, kv_heads=1, qk_dim=128, v_dim=128),
        Share(2, 1, 1),
    ),
    "two heads, two tiles": (
        Case(batch=1, q_len=512, kv_len=256, heads=2, kv_heads=1, qk_dim=128, v_dim=128, lse_gradient=True),
        Share(1, 2, 2),
    ),
}


@pytest.mark.parametrize("name", some_each_run(BY_QUERIES, {"one head of two pairs"}))
def test_parts_of_the_queries_add_to_the_gradients_of_keys(name):
    case, share = BY_QUERIES[name]
    with patched(*_apart(_HELD), (hopper_bwd_scores, "scores_by_queries", lambda _: share)):
        judge(case, supports=only("backward")).check()


# (depth, options, length, the queries that see the broken keys)
BROKEN_APART = {
    "window": (64, {"local_window_size": (30, 0)}, 384, slice(200, 251)),
    "deep": (192, {}, 256, slice(200, 256)),
}


@pytest.mark.parametrize("name", some_each_run(BROKEN_APART, {"window"}))
def test_a_hidden_key_that_is_broken_where_d_query_is_apart(name):
    """Those that do not see it get what they get without it, the others NaN."""
    depth, given, length, seeing = BROKEN_APART[name]
    query, key, value, d_out = draw(batch=1, length=length, heads=1, depth=depth)
    key = key.at[0, 200, 0, 3].set(jnp.nan).at[0, 220, 0, 3].set(jnp.inf)

    def d_query(backend, *operands):
        *operands, d_out = operands
        inputs, aux, options, _ = api._prepare(*operands, is_causal=True, **given)
        problem = options.problem(inputs, aux)
        out, lse = reference.forward(problem, inputs, aux)
        return backend.backward(problem, Residuals(inputs, aux, out, lse), d_out, jnp.zeros_like(lse)).query

    with patched(*_apart(HopperBackwardTiles(128) if depth == 64 else HopperDeepBackwardTiles())):
        got = simulate(functools.partial(d_query, hopper_call), query, key, value, d_out).check()
    assert np.isnan(np.asarray(got[0, seeing], np.float32)).any(-1).all()
    unseeing = np.s_[:, np.delete(np.arange(length), seeing)]
    assert_rounded(got, d_query, query, finite_or_zero(key), value, d_out, rows=unseeing)


# Four steps of three slots, and three tiles of queries for one block.
APART_CASE = square(384, heads=1, kv_heads=1, is_causal=True)


APART_FAULTS = {
    "dS not awaited": (APART_CASE, StandIn("barrier_wait ready"), "read of SMEM"),
    "dS overwritten": (APART_CASE, StandIn("barrier_wait consumed"), "write of SMEM"),
    "dS overwritten in flight": (APART_CASE, StandIn("wgmma_wait"), "SMEM"),
    "finite keys not awaited": (APART_CASE, StandIn("barrier_wait keys_mended"), "SMEM"),
    # In the text: finite keys, dQ.
    "dQ not committed": (APART_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "dQ's slot overwritten": (APART_CASE, StandIn("read wait_smem_to_gmem #1"), "write of SMEM"),
}


LEFT_FAULTS = {
    # In the text: finite keys, dS, dK and dV.
    "dS not committed": (APART_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "dS's slot overwritten": (APART_CASE, StandIn("read wait_smem_to_gmem #1"), "write of SMEM"),
}


# In the text: finite keys, dS, parts of dV and of dK; the waits are dS's and theirs.
PARTS_FAULTS = {
    "a sum's slot overwritten": (PARTS["full, two heads of one pair"][0], StandIn("read wait_smem_to_gmem #4"), "SMEM"),
    "dS overwritten by a sum": (
        PARTS["full, two heads of one pair"][0],
        StandIn("read wait_smem_to_gmem #2"),
        "alias group",
    ),
    "a sum not committed": (PARTS["full, two heads of one pair"][0], StandIn("commit_smem #3"), "write of SMEM"),
}


# Six steps of three slots in the main kernel.
DEEP_LEFT_CASE = Case(batch=1, q_len=384, kv_len=128, heads=1, kv_heads=1, qk_dim=192, v_dim=64)


DEEP_MENDED = square(128, heads=1, kv_heads=1, qk_dim=192, v_dim=64, is_causal=True)


# Four steps of three slots for dQ, of two heads' queries.
DEEP_TWO = square(128, heads=2, kv_heads=2, qk_dim=192, v_dim=64)


DEEP_LEFT_FAULTS = {
    "keys not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait k_ready"), "read of SMEM"),
    "values not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait v_ready"), "read of SMEM"),
    "queries not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait q_ready"), "read of SMEM"),
    "d_out not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait d_out_ready"), "read of SMEM"),
    "queries overwritten": (DEEP_LEFT_CASE, StandIn("barrier_wait q_consumed"), "write of SMEM"),
    "d_out overwritten": (DEEP_LEFT_CASE, StandIn("barrier_wait d_out_consumed"), "write of SMEM"),
    "dV stored over values in use": (DEEP_LEFT_CASE, StandIn("barrier_wait products_done"), "of SMEM"),
    "P not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait weights_ready"), "SMEM"),
    # In the text: [finite keys,] P, the next P, dV; [finite values,] dS, the next dS, dK.
    "first P not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #1"), "write of SMEM"),
    "P not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "dV not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #3"), "write of SMEM"),
    "first dS not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #4"), "write of SMEM"),
    "dS not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #5"), "write of SMEM"),
    "dK not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #6"), "write of SMEM"),
    "finite keys not committed": (DEEP_MENDED, StandIn("commit_smem #1"), "write of SMEM"),
    # Of the waits for a store's read: dV, dS, the next dS, dK.
    "dS's slot overwritten": (DEEP_LEFT_CASE, StandIn("read wait_smem_to_gmem #3"), "write of SMEM"),
    "scores read in flight": (DEEP_LEFT_CASE, StandIn("wgmma_accumulator_load #2"), "accumulator"),
    "d_weights read in flight": (DEEP_LEFT_CASE, StandIn("wgmma_accumulator_load #4"), "accumulator"),
    "d_out freed in flight": (DEEP_LEFT_CASE, StandIn("wgmma_wait #1"), "SMEM"),
    "queries freed in flight": (DEEP_LEFT_CASE, StandIn("wgmma_wait #2"), "SMEM"),
}


DEEP_QUERY_FAULTS = {
    "dS not awaited": (DEEP_TWO, StandIn("barrier_wait ready"), "read of SMEM"),
    "dS overwritten": (DEEP_TWO, StandIn("barrier_wait consumed"), "write of SMEM"),
    "dS freed in flight": (DEEP_TWO, StandIn("wgmma_wait #1"), "SMEM"),
    "finite keys not awaited": (DEEP_MENDED, StandIn("barrier_wait keys_mended"), "SMEM"),
    "dQ not committed": (DEEP_TWO, StandIn("commit_smem"), "write of SMEM"),
    "dQ's slot overwritten": (DEEP_TWO, StandIn("read wait_smem_to_gmem #1"), "write of SMEM"),
}


@pytest.mark.parametrize("fault", some_each_run(APART_FAULTS, {"dS overwritten"}))
def test_planted_fault_of_d_query_apart_is_found(fault):
    found(hopper_bwd_apart, fault, APART_FAULTS, *_apart(HopperBackwardTiles(128)))


@pytest.mark.parametrize("fault", some_each_run(LEFT_FAULTS, set()))
def test_planted_fault_of_what_is_left_for_d_query_is_found(fault):
    found(hopper_bwd, fault, LEFT_FAULTS, *_apart(HopperBackwardTiles(128)))


@pytest.mark.parametrize("fault", some_each_run(PARTS_FAULTS, {"a sum's slot overwritten"}))
def test_planted_fault_of_sums_over_parts_is_found(fault):
    found(hopper_bwd, fault, PARTS_FAULTS, *_in_parts((1, 2)))


@pytest.mark.parametrize("fault", some_each_run(DEEP_QUERY_FAULTS, {"finite keys not awaited"}))
def test_planted_fault_of_the_deep_d_query_apart_is_found(fault):
    one_block = hopper_bwd_deep_query, "HOPPER_SMS", 1
    found(hopper_bwd_deep_query, fault, DEEP_QUERY_FAULTS, *_apart(HopperDeepBackwardTiles()), one_block)


@pytest.mark.parametrize("fault", some_each_run(DEEP_LEFT_FAULTS, set()))
def test_planted_fault_of_what_is_left_for_the_deep_d_query_is_found(fault):
    found(hopper_bwd_deep_scores, fault, DEEP_LEFT_FAULTS, *_apart(HopperDeepBackwardTiles()))
