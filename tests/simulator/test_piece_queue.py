"""Blocks that take pieces from a queue, in the simulator, where they take turns."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from fast_layers.kernel_parts import piece_queue as in_kernels
from fast_layers.testing import simulate
from simulator import piece_queue
from simulator.attention import StandIn
from simulator.found import tells

pytestmark = pytest.mark.simulator

ORDER = np.array([4, 0, 6, 2, 1, 5, 3])


@pytest.mark.parametrize("order", [ORDER, None], ids=["in an order", "by their numbers"])
@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_all_warpgroups_of_a_block_take_the_same_pieces_and_again_those_that_are_marked(blocks, order):
    who, counts = simulate(functools.partial(piece_queue.taken, 7, order, blocks=blocks)).check()
    place = np.arange(7) if order is None else np.argsort(order)
    block, turn, marked = place % blocks, place // blocks, piece_queue.is_marked(np.arange(7))
    turn_again = np.array([sum(marked[(block == block[i]) & (turn < turn[i])]) for i in range(7)])
    wanted = 1 + block + 1000 * turn, np.where(marked, 1 + block + 1000 * turn_again, 0)
    for i, of_pass in enumerate(wanted):
        np.testing.assert_array_equal(who[i], np.broadcast_to(of_pass, who[i].shape))
    for i, of_pass in enumerate((block, block[marked])):
        np.testing.assert_array_equal(
            counts[i], np.broadcast_to(np.bincount(of_pass, minlength=blocks), counts[i].shape)
        )


@pytest.mark.parametrize("fault", ["barrier_wait piece_told", "barrier_wait piece_heard"])
def test_a_barrier_that_nobody_waits_for_is_a_race(fault, monkeypatch):
    stand_in = StandIn(fault)
    monkeypatch.setattr(in_kernels, "plgpu", stand_in)
    run = functools.partial(piece_queue.taken, 7, ORDER, blocks=1, scratch=stand_in.scratch)
    sim = simulate(run, timeout=20.0)
    assert stand_in.hits > 0
    assert tells(sim, "SMEM"), sim.report()
