"""Pieces of Hopper's attention backward that are cut by their queries: right, free of races, planted faults found."""

from __future__ import annotations

import dataclasses

import pytest
from selection import some_each_run

import fast_layers
from fast_layers.ops.attention import hopper_bwd_parts, hopper_bwd_pieces
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.testing.parity import Case
from simulator.attention import StandIn, backward_tiles, judge, only, patched
from simulator.found import tells

pytestmark = pytest.mark.simulator

# Three tiles of keys for two blocks: that which is left is cut in two.
FULL = Case(batch=1, q_len=512, kv_len=300, heads=1, kv_heads=1)
CASES = {
    "full": FULL,
    "grouped heads": dataclasses.replace(FULL, q_len=250, heads=2),
    "in any order": FULL,
    "soft cap": dataclasses.replace(FULL, q_len=256, softcap=5.0),
}
PATCHES = backward_tiles(HopperBackwardTiles(128, blocks=2)), (hopper_bwd_pieces, "_JOIN_COST", 0.0)


@pytest.mark.parametrize("name", some_each_run(CASES, {"full"}))
def test_parts_add_up(name, monkeypatch):
    cuts = []

    def join(form, *refs):
        cuts.append(form.cut)
        add_up(form, *refs)

    add_up = hopper_bwd_parts.join
    monkeypatch.setattr(hopper_bwd_parts, "join", join)
    with fast_layers.use_backends(reproducible=name != "in any order"), patched(*PATCHES):
        judge(CASES[name], supports=only("backward")).check()
    assert [(cut.whole, cut.pieces, cut.parts) for cut in cuts] == [(2, 1, 2)]


# In the text of hopper_bwd_parts.py: dK and dV of a part, then a sum.
FAULTS = {
    "part not committed": ("commit_smem #1", "write of SMEM"),
    "dQ overwritten": ("read wait_smem_to_gmem #1", "write of SMEM"),
    "slot overwritten": ("read wait_smem_to_gmem #2", "write of SMEM"),
    "sum not committed": ("commit_smem #3", "write of SMEM"),
}


@pytest.mark.parametrize("fault", some_each_run(FAULTS, {"slot overwritten"}))
def test_planted_fault_is_found(fault):
    event, access = FAULTS[fault]
    stand_in = StandIn(event)
    with patched((hopper_bwd_parts, "plgpu", stand_in), *PATCHES):
        judged = judge(FULL, supports=only("backward"), timeout=20.0)
    assert stand_in.hits == 1
    (sim,) = judged.simulations[-1:]
    assert tells(sim, access), sim.report()
