"""The Blackwell matmul of the MLP: right and free of races alone and in pairs; every planted fault found."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from ops.mlp import cases

from fast_layers.ops.mlp import blackwell_call
from fast_layers.ops.mlp.blackwell_config import BlackwellMatmulTiles
from fast_layers.ops.mlp.epilogue import Activate, Differentiate, Plain
from fast_layers.ops.mlp.float8 import Float8
from simulator.found import tells
from simulator.mlp import BlackwellSlip, Launch, changed, check, check_op, run

pytestmark = pytest.mark.simulator

ALONE = BlackwellMatmulTiles(64, stages=2, collective=False, pieces=1)
ONE_WG = dataclasses.replace(ALONE, epilogue_wgs=1, pieces=2, row_group=1)
PAIR = BlackwellMatmulTiles(128, stages=2)
PAIR_OF_TWO = BlackwellMatmulTiles(64, stages=2, pieces=1, row_group=1)
GATED = (True, False)

# Sizes with tails in every dimension, and more steps than three rounds of the ring.
CASES = {
    "backward, gated": Launch(130, 72, 136, ONE_WG, Differentiate("gelu", (True, True)), b_turned=True),
    "a pair, both turned": Launch(264, 136, 264, PAIR, a_turned=True, b_turned=True),
}
MORE = {
    "a pair, gated": Launch(130, 72, 136, PAIR_OF_TWO, Activate("gelu_tanh", GATED)),
    "plain": Launch(200, 72, 456, ALONE, Plain((True,))),
    "A turned": Launch(72, 136, 450, ONE_WG, a_turned=True),
    "B turned": Launch(130, 72, 456, ALONE, b_turned=True),
    "both turned": Launch(200, 72, 130, ALONE, a_turned=True, b_turned=True),
    "two products": Launch(70, 72, 136, ALONE, Plain(GATED)),
    "two terms": Launch(70, 72, 200, ONE_WG, b_turned=True, terms=2),
    "one row": Launch(1, 72, 456, ALONE, Activate("relu", (True,))),
    "one row, nothing saved": Launch(1, 136, 72, ALONE, Activate("silu", (False, True), saves=False)),
    "gated": Launch(130, 72, 136, ALONE, Activate("gelu_tanh", GATED)),
    "backward": Launch(130, 72, 136, ALONE, Differentiate("gelu_tanh", (True,)), b_turned=True),
    "a pair": Launch(330, 136, 456, PAIR, Plain((True,))),
    "a pair, A turned": Launch(130, 264, 200, PAIR, a_turned=True),
    "a pair, B turned": Launch(330, 72, 200, PAIR, Activate("relu_squared", (True,)), b_turned=True),
    "a pair, two products, B turned": Launch(130, 136, 200, PAIR_OF_TWO, Plain(GATED), b_turned=True),
    "a pair, two terms": Launch(130, 72, 200, PAIR, b_turned=True, terms=2),
    "a pair, backward, gated": Launch(300, 136, 136, PAIR, Differentiate("silu", (False, True)), b_turned=True),
    "float16": Launch(70, 72, 136, ALONE, Activate("gelu_tanh", GATED), dtype=jnp.float16),
    "wide": Launch(200, 264, 136, BlackwellMatmulTiles(256, 3, collective=False, piece=64)),
    "a wide pair": Launch(264, 264, 136, BlackwellMatmulTiles(256, 5), Activate("gelu", (True,))),
    "a wide pair, gated": Launch(264, 136, 136, BlackwellMatmulTiles(128), Activate("silu", GATED)),
    "a wide pair, backward": Launch(264, 264, 136, BlackwellMatmulTiles(256, 3), Differentiate("silu", (True,))),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    check(CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE)
def test_more_cases(name):
    check(MORE[name])


# One block, or one pair of blocks, that takes all tiles: rings and buffers go on from tile to tile.
FORWARD = Launch(200, 136, 330, ALONE, Activate("relu", (True,)))
BACKWARD = Launch(300, 136, 200, ONE_WG, Differentiate("relu", (True,)), b_turned=True)
PAIRED = Launch(330, 392, 200, PAIR)
PAIRED_GATED = Launch(330, 136, 136, PAIR_OF_TWO, Activate("relu", GATED))
SEVERAL_TILES = {"forward": FORWARD, "backward": BACKWARD, "a pair": PAIRED, "a gated pair": PAIRED_GATED}


def _one_block(launch):
    return "BLACKWELL_SMS", launch.tiles.ranks


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("forward", "a gated pair") else pytest.mark.exhaustive)
        for name in SEVERAL_TILES
    ],
)
def test_blocks_that_take_several_tiles(name):
    launch, stand_in = SEVERAL_TILES[name], BlackwellSlip()
    with changed(launch.kernel, stand_in, _one_block(launch)):
        check(launch)
    assert stand_in.counts["tcgen05_commit_arrive"] > 0  # it was asked
    assert stand_in.hits == 0


# (launch, what is changed, what the report then says, if that does not depend on who comes first)
FAULTS = {
    "operands not awaited": (FORWARD, BlackwellSlip("barrier_wait ready"), ""),
    "operands overwritten": (FORWARD, BlackwellSlip("barrier_wait consumed"), "write of SMEM"),
    "operands freed in flight": (FORWARD, BlackwellSlip(freed_early="consumed"), "SMEM"),
    "operands never freed": (FORWARD, BlackwellSlip("tcgen05_commit_arrive consumed"), ""),
    "the wrong slot filled": (FORWARD, BlackwellSlip(one_slot="a_slots"), "write of SMEM"),
    "products read in flight": (FORWARD, BlackwellSlip("barrier_wait products_ready"), "TMEM"),
    "products told to be ready too early": (FORWARD, BlackwellSlip(freed_early="products_ready"), "TMEM"),
    "products overwritten": (FORWARD, BlackwellSlip("barrier_wait products_read"), "TMEM"),
    "products freed while they are loaded": (FORWARD, BlackwellSlip("wait_load_tmem"), "TMEM"),
    "results not committed": (FORWARD, BlackwellSlip("commit_smem"), "write of SMEM"),
    "results overwritten": (FORWARD, BlackwellSlip("read wait_smem_to_gmem"), "write of SMEM"),
    "stores not awaited": (FORWARD, BlackwellSlip("wait_smem_to_gmem", "read wait_smem_to_gmem"), ""),
    "what is read not awaited": (BACKWARD, BlackwellSlip("barrier_wait read_ready"), "read of SMEM"),
    "what is read overwritten": (BACKWARD, BlackwellSlip("commit_smem #1", "commit_smem #2"), "SMEM"),
    "what is read into the wrong slot": (BACKWARD, BlackwellSlip(one_slot="read_slots"), ""),
    "sums not committed": (BACKWARD, BlackwellSlip("commit_smem #2"), "write of SMEM"),
    "a pair's operands overwritten": (PAIRED, BlackwellSlip("barrier_wait consumed"), "write of SMEM"),
    "the neighbour's products read in flight": (PAIRED, BlackwellSlip("barrier_wait products_ready"), "TMEM"),
    "the neighbour's products overwritten": (PAIRED, BlackwellSlip(alone=True), "TMEM"),
}
# The rest need the same machinery to be found.
LEAN_FAULTS = {"products overwritten", "the neighbour's products overwritten"}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in LEAN_FAULTS else pytest.mark.exhaustive) for name in FAULTS]
)
def test_planted_fault_is_found(fault):
    launch, stand_in, access = FAULTS[fault]
    with changed(launch.kernel, stand_in, _one_block(launch)):
        sim = run(launch, timeout=20.0)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    assert sim.faulty
    assert tells(sim, access), sim.report()


OPS = {
    "gated": cases.Case((130,), 72, 64, 40, "silu", True, (True, True, True)),
    "linear": cases.Case((7,), 72, 64, None, "relu_squared", False, (True, False, False), "inputs"),
    "plain": cases.Case((300,), 72, 264, 136, "gelu_tanh", False, (True, False, True)),
    "no bias, saves inputs": cases.Case((7,), 64, 128, 64, "gelu", True, save="inputs"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gated" else pytest.mark.exhaustive) for name in OPS]
)
def test_both_passes(name):
    check_op(blackwell_call, OPS[name])


FLOAT8: dict[str, tuple[Float8, cases.Case]] = {
    "e4m3, gated": ("e4m3", cases.Case((130,), 144, 80, 48, "silu", True, (True, False, True))),
    "e5m2, saves inputs": ("e5m2", cases.Case((300,), 144, 272, None, "gelu", False, (True, False, False), "inputs")),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FLOAT8)
def test_both_passes_with_a_forward_of_8_bits(name):
    float8, case = FLOAT8[name]
    check_op(blackwell_call, case, float8)


def test_8_bits():
    """Two tiles deep, and products that are scaled."""
    check(Launch(130, 136, 200, BlackwellMatmulTiles(128, stages=2), Activate("relu", GATED), float8="e4m3"))
