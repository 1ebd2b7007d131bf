"""The Hopper matmul of the MLP: right and free of races in every form; every planted fault found."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ops.mlp import cases
from selection import some_each_run

from fast_layers.ops.mlp import hopper_call, hopper_matmul, reference, xla
from fast_layers.ops.mlp.config import HopperFewRowsTiles, HopperMatmulTiles
from fast_layers.ops.mlp.epilogue import Activate, Differentiate, Plain
from fast_layers.ops.mlp.problem import Inputs, Problem
from fast_layers.testing import simulate
from fast_layers.testing.closeness import assert_trees_close
from simulator.attention import StandIn
from simulator.found import tells
from simulator.mlp import Launch, Slip, changed, check, check_op, check_together, run, run_together

pytestmark = pytest.mark.simulator

TOGETHER = HopperMatmulTiles(64, 64, stages=2, pieces=1)
IN_TURNS = dataclasses.replace(TOGETHER, ping_pong=True)
PAIR = dataclasses.replace(TOGETHER, cluster=2)
GATED = (True, False)

# Sizes with tails in every dimension, and more steps than three rounds of the ring.
CASES = {
    "plain": Launch(200, 72, 456, TOGETHER, Plain((True,))),
    "A turned": Launch(72, 136, 450, IN_TURNS, a_turned=True),
    "B turned": Launch(130, 72, 456, IN_TURNS, b_turned=True),
    "both turned": Launch(200, 72, 130, TOGETHER, a_turned=True, b_turned=True),
    "two products": Launch(70, 72, 136, TOGETHER, Plain((True, False))),
    "two terms": Launch(70, 72, 200, IN_TURNS, b_turned=True, terms=2),
    "one row": Launch(1, 72, 456, IN_TURNS, Activate("relu", (True,))),
    "one row, nothing saved": Launch(1, 136, 72, TOGETHER, Activate("silu", (False, True), saves=False)),
    "gated": Launch(130, 72, 136, IN_TURNS, Activate("gelu_tanh", GATED)),
    "backward": Launch(130, 72, 136, IN_TURNS, Differentiate("gelu_tanh", (True,)), b_turned=True),
    "backward, several pieces": Launch(
        140, 136, 72, HopperMatmulTiles(128, 128, 2, ping_pong=True, pieces=2), Differentiate("silu", (True,))
    ),
    "backward, gated": Launch(70, 72, 136, TOGETHER, Differentiate("gelu", (True, True)), b_turned=True),
    "a pair": Launch(330, 72, 200, PAIR, Activate("relu_squared", (True,)), b_turned=True),
    "a pair in turns": Launch(
        200, 136, 136, dataclasses.replace(PAIR, ping_pong=True), Differentiate("sigmoid", (False, True))
    ),
    "split depth": Launch(70, 72, 400, dataclasses.replace(PAIR, splits=4), Activate("silu", GATED)),
    "split depth of two terms": Launch(
        1, 72, 136, dataclasses.replace(IN_TURNS, splits=4), Differentiate("silu", (True,)), terms=2, b_turned=True
    ),
    "float16": Launch(70, 72, 136, TOGETHER, Activate("gelu_tanh", GATED), dtype=jnp.float16),
    "one token": Launch(1, 200, 456, HopperFewRowsTiles(8, 3), Activate("relu", (True,))),
    "tokens, gated, split depth": Launch(19, 136, 456, HopperFewRowsTiles(32, 2, 3), Activate("silu", GATED)),
}
WIDE = {
    "gelu, several pieces": Launch(130, 136, 72, HopperMatmulTiles(128, 128, 2, ping_pong=True), Activate("gelu")),
    "plain, as chosen": Launch(300, 328, 136, HopperMatmulTiles(64, 256, 4, cluster=2)),
    "A turned, 128 rows": Launch(264, 136, 136, HopperMatmulTiles(128, 128, 4), a_turned=True),
    "both turned, 128 rows": Launch(
        264, 136, 136, HopperMatmulTiles(128, 128, 5, ping_pong=True), a_turned=True, b_turned=True
    ),
    "gated, as chosen": Launch(
        300, 136, 136, HopperMatmulTiles(64, 128, 4, ping_pong=True, cluster=2, pieces=1), Activate("silu", GATED)
    ),
    "backward, gated, as chosen": Launch(
        300,
        136,
        136,
        HopperMatmulTiles(128, 128, 4, ping_pong=True, cluster=2, pieces=1),
        Differentiate("silu", (True, True)),
        b_turned=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    check(CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WIDE)
def test_case_of_wide_tiles(name):
    check(WIDE[name])


# One block, or one pair of blocks, that takes all tiles: the ring goes on from tile to tile.
ONE_BLOCK = ("HOPPER_SMS", 1)
ONE_PAIR = ("HOPPER_SMS", 2)
FORWARD = Launch(200, 136, 200, IN_TURNS, Activate("relu", (True,)))
BACKWARD = Launch(200, 72, 200, IN_TURNS, Differentiate("relu", (True,)), b_turned=True)
TWO_PIECES = dataclasses.replace(
    BACKWARD,
    tiles=HopperMatmulTiles(128, 64, stages=2, ping_pong=True, pieces=1),
    epilogue=Differentiate("relu", (True, True)),
)
NO_SUMS = dataclasses.replace(BACKWARD, epilogue=Differentiate("relu"))
ALONE = Launch(130, 136, 330, TOGETHER)
FEW = Launch(12, 200, 330, HopperFewRowsTiles(16, 2))
PAIRED = Launch(330, 136, 330, PAIR)


@pytest.mark.parametrize(
    ("launch", "blocks"),
    [(FORWARD, ONE_BLOCK), (BACKWARD, ONE_BLOCK), (ALONE, ONE_BLOCK), (PAIRED, ONE_PAIR), (FEW, ONE_BLOCK)],
    ids=["forward", "backward", "alone", "paired", "few rows"],
)
def test_blocks_that_take_several_tiles(launch, blocks):
    stand_in = StandIn()
    with changed(launch.kernel, stand_in, blocks):
        check(launch)
    assert stand_in.counts["barrier_wait"] > 0  # it was asked
    assert stand_in.hits == 0


def _weights(tiles: HopperMatmulTiles) -> list[Launch]:
    """Gradients of three weights: of other numbers of tiles, tails, and more than one lap of the ring each."""
    return [Launch(*sizes, 136, tiles, a_turned=True) for sizes in ((130, 72), (64, 136), (72, 64))]


def test_products_that_share_a_launch():
    with changed(hopper_matmul, StandIn(), ONE_BLOCK):
        check_together(_weights(IN_TURNS))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tiles", "blocks"), [(TOGETHER, ONE_BLOCK), (PAIR, ONE_PAIR), (IN_TURNS, ("HOPPER_SMS", 5))])
def test_products_that_share_a_launch_in_other_tiles(tiles, blocks):
    with changed(hopper_matmul, StandIn(), blocks):
        check_together(_weights(tiles))


def _first_always(number: Any, doings: Any) -> None:
    del number
    doings[0]()


SHARED_FAULTS = {
    "slots of the product before overwritten": (StandIn("barrier_wait consumed"), (), "write of SMEM"),
    "all taken for the first": (StandIn(), (("do_one_of", _first_always),), "write of GMEM"),
}


@pytest.mark.parametrize("fault", SHARED_FAULTS)
def test_planted_fault_among_shared_launches_is_found(fault):
    stand_in, patches, access = SHARED_FAULTS[fault]
    with changed(hopper_matmul, stand_in, ONE_BLOCK, *patches):
        sim = run_together(_weights(TOGETHER)[1:], timeout=20.0)
    assert tells(sim, access), sim.report()


FAULTS = {
    "operands not awaited": (ALONE, StandIn("barrier_wait ready"), "read of SMEM"),
    "operands overwritten": (ALONE, StandIn("barrier_wait consumed"), "write of SMEM"),
    "operands overwritten, in turns": (FORWARD, StandIn("barrier_wait consumed"), "write of SMEM"),
    "operands freed in flight": (ALONE, StandIn(early=("consumed", "b_slots")), "read of SMEM"),
    "the step before not awaited": (ALONE, StandIn("wgmma_wait #1"), "read of SMEM"),
    "products read in flight": (ALONE, StandIn("wgmma_wait #2"), "accumulator"),
    "the wrong slot filled": (ALONE, Slip(one_slot="a_slots"), "write of SMEM"),
    "the neighbour's slot overwritten": (PAIRED, Slip(alone=True), "write of SMEM"),
    "results not committed": (ALONE, StandIn("commit_smem"), "write of SMEM"),
    "results overwritten": (ALONE, StandIn("read wait_smem_to_gmem"), "write of SMEM"),
    "stores not awaited": (ALONE, StandIn("wait_smem_to_gmem", "read wait_smem_to_gmem"), ""),
    "what is read not awaited": (BACKWARD, StandIn("barrier_wait read_ready"), "read of SMEM"),
    "what is read overwritten": (NO_SUMS, StandIn("commit_smem"), "read of SMEM"),
    "sums not committed": (BACKWARD, StandIn("commit_smem #2"), "write of SMEM"),
    "sums overwritten by what is read next": (TWO_PIECES, StandIn("commit_smem #2"), "read of SMEM"),
    "few rows' operands overwritten": (FEW, StandIn("barrier_wait consumed"), "write of SMEM"),
    "few rows' products read in flight": (FEW, StandIn("wgmma_wait #2"), "accumulator"),
    "few rows' results overwritten": (FEW, StandIn("read wait_smem_to_gmem"), "write of SMEM"),
}
MORE_FAULTS = {
    "few rows' operands not awaited": (FEW, StandIn("barrier_wait ready"), "read of SMEM"),
    "few rows' operands freed in flight": (FEW, StandIn(early=("consumed", "x_slots")), "read of SMEM"),
    "few rows' step before not awaited": (FEW, StandIn("wgmma_wait #1"), "read of SMEM"),
    "few rows' wrong slot filled": (FEW, Slip(one_slot="x_slots"), "write of SMEM"),
    "few rows' results not committed": (FEW, StandIn("commit_smem"), "write of SMEM"),
    "few rows' stores not awaited": (FEW, StandIn("wait_smem_to_gmem", "read wait_smem_to_gmem"), ""),
}


# One of each kind: a load, a slot, an accumulator in flight, a commit, a store, and what blocks of a pair share.
FAULTS_EACH_RUN = {
    "operands not awaited",
    "operands overwritten, in turns",
    "products read in flight",
    "the neighbour's slot overwritten",
    "stores not awaited",
    "what is read overwritten",
    "sums overwritten by what is read next",
    "few rows' operands overwritten",
    "few rows' results overwritten",
}


@pytest.mark.parametrize("fault", some_each_run(FAULTS, FAULTS_EACH_RUN))
def test_planted_fault_is_found(fault):
    _assert_found(*FAULTS[fault])


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", MORE_FAULTS)
def test_planted_fault_is_found_more(fault):
    _assert_found(*MORE_FAULTS[fault])


def _assert_found(launch: Launch, stand_in: StandIn, access: str) -> None:
    with changed(launch.kernel, stand_in, ONE_PAIR if launch is PAIRED else ONE_BLOCK):
        sim = run(launch, timeout=20.0)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    assert sim.faulty
    assert tells(sim, access), sim.report()


OPS = {
    "gated": cases.Case((130,), 72, 64, 40, "silu", True, (True, True, True)),
    "linear": cases.Case((7,), 72, 64, None, "relu_squared", False, (True, False, False), "inputs"),
}
MORE_OPS = {
    "plain": cases.Case((130,), 72, 136, 80, "gelu_tanh", False, (True, False, True)),
    "no bias, saves inputs": cases.Case((7,), 64, 128, 64, "gelu", True, save="inputs"),
    "one bias of two": cases.Case((33,), 64, 64, 64, "relu", True, (False, True, False)),
    "bare matmul": cases.Case((33,), 128, 64, None, "identity", False, (True, False, False)),
    "gated linear": cases.Case((1,), 64, 128, None, "sigmoid", True, (True, True, False)),
}


@pytest.mark.parametrize("name", OPS)
def test_both_passes(name):
    check_op(hopper_call, OPS[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE_OPS)
def test_both_passes_more(name):
    check_op(hopper_call, MORE_OPS[name])


@pytest.mark.parametrize("over_weights", [False, True], ids=["over x", "over x and a weight"])
def test_vmap(over_weights):
    problem = Problem(5, 64, 64, None, jnp.dtype(jnp.bfloat16), "relu", save="inputs")
    x, w_up = (
        jax.random.normal(jax.random.key(i), (2, *shape), jnp.bfloat16) for i, shape in enumerate([(5, 64), (64, 64)])
    )
    w_up /= 8
    over: Any = (0, 0 if over_weights else None)
    axes = Inputs(*over)
    inputs = Inputs(x, w_up if over_weights else w_up[0])

    def mapped(backend):
        return lambda inputs: jax.vmap(lambda i: backend.forward(problem, i)[0], in_axes=(axes,))(inputs)

    got = simulate(mapped(hopper_call), inputs).check()
    wide = dataclasses.replace(problem, dtype=jnp.dtype(jnp.float32))
    oracle = jax.vmap(lambda i: reference.forward(wide, i)[0], in_axes=(axes,))(
        jax.tree.map(lambda a: a.astype(jnp.float32), inputs)
    )
    assert_trees_close(got, oracle, mapped(xla)(inputs))
