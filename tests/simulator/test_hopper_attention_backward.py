"""Attention's backward on Hopper at depths up to 128: its kernel's forms, and every planted fault found."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

import fast_layers
from fast_layers.ops.attention import api, hopper_bwd, hopper_bwd_pieces, hopper_call
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.problem import Residuals
from fast_layers.testing.parity import Case
from simulator.attention import (
    StandIn,
    backward_tiles,
    both_passes,
    draw,
    found,
    judge,
    nothing_found,
    only,
    patched,
    square,
)
from simulator.test_hopper_attention import CASES

pytestmark = pytest.mark.simulator

# More tiles of keys than blocks, two rounds of the slots for keys.
PERSISTENT_BACKWARD = {
    "full": (Case(batch=1, q_len=256, kv_len=260, heads=1, kv_heads=1), HopperBackwardTiles(128, blocks=1)),
    "causal, one step at the end": (
        square(384, heads=1, kv_heads=1, qk_dim=128, v_dim=128, is_causal=True),
        HopperBackwardTiles(64, ragged_apart=True, blocks=2),
    ),
    "full, two panels": (
        Case(batch=1, q_len=130, kv_len=260, heads=2, kv_heads=1, qk_dim=128, v_dim=128),
        HopperBackwardTiles(64, blocks=1),
    ),
    "grouped heads": (square(260, heads=4, kv_heads=2, is_causal=True), HopperBackwardTiles(128, blocks=2)),
    "keys that nobody sees": (CASES["more keys"], HopperBackwardTiles(128, blocks=1)),
}


@pytest.mark.parametrize("name", some_each_run(PERSISTENT_BACKWARD, {"full"}))
def test_blocks_that_take_several_tiles_of_keys(name):
    case, tiles = PERSISTENT_BACKWARD[name]
    with patched(backward_tiles(tiles)):
        judge(case, supports=only("backward")).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["documents", "documents, scattered", "documents, padding of NaN"])
def test_pieces_of_documents_longest_first(name):
    with patched(backward_tiles(HopperBackwardTiles(128)), (hopper_bwd_pieces, "_MANY_TILES", 1)):
        judge(CASES[name], supports=only("backward")).check()


RAGGED = {
    "grouped heads": square(200, heads=4, kv_heads=2, is_causal=True),
    "window": square(400, heads=1, kv_heads=1, window=(150, 70)),
    "fewer keys": Case(batch=1, q_len=300, kv_len=129, heads=1, kv_heads=1, is_causal=True, q_offset="bottom_right"),
}


@pytest.mark.parametrize("name", some_each_run(RAGGED, set()))
def test_tiles_that_a_band_cuts_in_a_loop_of_their_own(name):
    with patched(backward_tiles(HopperBackwardTiles(64, ragged_apart=True))):
        judge(RAGGED[name]).check()


@pytest.mark.parametrize("depth", [64, pytest.param(160, marks=pytest.mark.exhaustive)])
def test_sums_in_any_order(depth):
    """dQ as a sum of floats instead of integers: the same to rounding, and NaN stays where it was."""
    query, key, value, d_out = (jnp.tile(x, (1, 1, 1, 3))[..., :depth] for x in draw(batch=1, length=140, heads=1))
    value = value.at[0, 100, 0, 3].set(jnp.nan)
    got = {}
    for reproducible in (True, False):
        with fast_layers.use_backends(reproducible=reproducible):
            inputs, aux, options, _ = api._prepare(query, key, value, is_causal=True)
            problem = options.problem(inputs, aux)
            got[reproducible] = both_passes(problem, inputs, aux, d_out)
        residuals = Residuals(inputs, aux, *got[reproducible][:2])
        backward = functools.partial(hopper_call.backward, problem)
        program = jax.make_jaxpr(backward)(residuals, d_out, jnp.zeros_like(residuals.lse))
        sums = r"i32\[1,1,\d+,1,16,256\]" if depth <= 128 else r"i32\[1,\d+,1,\d+\]"
        assert (re.search(sums, str(program)) is not None) == reproducible
    for (path, exact), free in zip(jax.tree.leaves_with_path(got[True]), jax.tree.leaves(got[False]), strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (free, exact)), 2e-3, 2e-3, err_msg=jax.tree_util.keystr(path)
        )
    assert np.isnan(np.asarray(got[False][2].query, np.float32)).any()


BACKWARD_CASE = Case(batch=1, q_len=768, kv_len=256, heads=1, kv_heads=1)


MASKED_BACKWARD = dataclasses.replace(
    BACKWARD_CASE, q_len=256, key_lengths=(200,), query_lengths=(220,), poisoned_padding=True
)


COLUMNS = dataclasses.replace(BACKWARD_CASE, q_len=384, kv_len=128, qk_dim=128, v_dim=128)


BACKWARD_FAULTS = {
    "keys and values not awaited": (BACKWARD_CASE, StandIn("barrier_wait kv_ready"), "read of SMEM"),
    "queries not awaited": (BACKWARD_CASE, StandIn("barrier_wait q_ready"), "read of SMEM"),
    "d_out not awaited": (BACKWARD_CASE, StandIn("barrier_wait d_out_ready"), "read of SMEM"),
    "queries overwritten": (BACKWARD_CASE, StandIn("barrier_wait q_consumed"), "write of SMEM"),
    "d_out overwritten": (BACKWARD_CASE, StandIn("barrier_wait d_out_consumed"), ""),
    "dS overwritten": (BACKWARD_CASE, StandIn("barrier_wait scores_consumed"), "write of SMEM"),
    "dS not exchanged": (
        BACKWARD_CASE,
        StandIn("barrier_wait scores_ready", "barrier_arrive scores_ready"),
        "read of SMEM",
    ),
    # In the text: [finite keys, finite queries,] dS, dQ, the last dQ, dK and dV.
    "dS not committed": (BACKWARD_CASE, StandIn("commit_smem #1"), "write of SMEM"),
    "dQ not committed": (BACKWARD_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "last dQ not committed": (BACKWARD_CASE, StandIn("commit_smem #3"), "write of SMEM"),
    "dK and dV not committed": (BACKWARD_CASE, StandIn("commit_smem #4"), "write of SMEM"),
    # The second commits the first's stores too.
    "finite keys not committed": (MASKED_BACKWARD, StandIn("commit_smem #1", "commit_smem #2"), "write of SMEM"),
    "finite queries not committed": (MASKED_BACKWARD, StandIn("commit_smem #2"), "write of SMEM"),
    "finite queries not awaited": (MASKED_BACKWARD, StandIn("barrier_wait queries_mended"), "SMEM"),
    "dQ's slot overwritten": (BACKWARD_CASE, StandIn("read wait_smem_to_gmem"), "write of SMEM"),
    "scores read in flight": (BACKWARD_CASE, StandIn("wgmma_accumulator_load #1"), "accumulator"),
    "d_weights read in flight": (BACKWARD_CASE, StandIn("wgmma_accumulator_load #2"), "accumulator"),
    "dQ read in flight": (BACKWARD_CASE, StandIn("wgmma_accumulator_load #3"), "accumulator"),
    "queries freed in flight": (BACKWARD_CASE, StandIn("wgmma_wait"), "read of SMEM"),
    "dK and dV not awaited": (BACKWARD_CASE, StandIn("read wait_smem_to_gmem #3"), ""),
}


# One step for each of three tiles of keys.
ONE_STEP = Case(batch=1, q_len=128, kv_len=384, heads=1, kv_heads=1)


PERSISTENT_BACKWARD_FAULTS = {
    "keys and values overwritten": (ONE_STEP, StandIn("barrier_wait kv_consumed"), "write of SMEM"),
    # In the text, of the waits for a store's read: dQ, dK and dV, the last ones.
    "dQ overwritten by dV": (ONE_STEP, StandIn("read wait_smem_to_gmem #2"), "alias group"),
    "dK and dV overwritten": (ONE_STEP, StandIn("read wait_smem_to_gmem #1"), "alias group"),
    "dK and dV not committed": (ONE_STEP, StandIn("commit_smem #4"), "write of SMEM"),
}


BACKWARD_EACH_RUN = {
    "d_out not awaited",
    "queries overwritten",
    "finite keys not committed",
    "dQ read in flight",
    "dK and dV not awaited",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(BACKWARD_CASE, id="backward", marks=pytest.mark.exhaustive),
        pytest.param(MASKED_BACKWARD, id="backward masked"),
        pytest.param(COLUMNS, id="columns", marks=pytest.mark.exhaustive),
    ],
)
def test_without_a_fault_nothing_is_found(case):
    nothing_found(hopper_bwd, case)


@pytest.mark.parametrize("fault", some_each_run(BACKWARD_FAULTS, BACKWARD_EACH_RUN))
def test_planted_fault_of_the_backward_is_found(fault):
    found(hopper_bwd, fault, BACKWARD_FAULTS)


@pytest.mark.parametrize("fault", some_each_run(PERSISTENT_BACKWARD_FAULTS, {"keys and values overwritten"}))
def test_planted_fault_of_the_persistent_backward_is_found(fault):
    patch = backward_tiles(HopperBackwardTiles(128, blocks=1))
    found(hopper_bwd, fault, PERSISTENT_BACKWARD_FAULTS, patch)
