"""Blocks that take pieces from a queue, on the GPU at hand, where who is free comes first."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from simulator import piece_queue

pytestmark = pytest.mark.usefixtures("warpgroups")


@pytest.mark.parametrize("ordered", [True, False], ids=["in an order", "by their numbers"])
@pytest.mark.parametrize(("pieces", "blocks"), [(1, 1), (50, 7), (60, 60), (60, 3)])
def test_each_piece_is_taken_once_by_all_warpgroups_of_a_block_and_again_if_marked(pieces, blocks, ordered):
    order = np.random.default_rng(pieces).permutation(pieces) if ordered else np.arange(pieces)
    run = jax.jit(functools.partial(piece_queue.taken, pieces, order if ordered else None, blocks=blocks))
    marked = piece_queue.is_marked(np.arange(pieces))
    for _ in range(20):
        who, counts = (np.asarray(x) for x in run())
        for of_all in (who, counts):
            np.testing.assert_array_equal(of_all, np.broadcast_to(of_all[:, :1], of_all.shape))
        first, again = who[:, 0]
        _check_taken(first, counts[0, 0], np.argsort(order), np.ones(pieces, bool), blocks)
        _check_taken(again, counts[1, 0], np.argsort(order), marked, blocks)
        np.testing.assert_array_equal(first[order[:blocks]], np.arange(1, blocks + 1))
        np.testing.assert_array_equal((first % 1000)[marked], (again % 1000)[marked])


def test_many_pieces_and_blocks():
    order = np.random.default_rng(0).permutation(5000)
    who, counts = (np.asarray(x) for x in jax.jit(functools.partial(piece_queue.taken, 5000, order, blocks=132))())
    _check_taken(who[0, 0], counts[0, 0], np.argsort(order), np.ones(5000, bool), 132)


def _check_taken(who, counts, place, wanted, blocks):
    """Those `wanted` are, once, and by each block in the order of their places."""
    block, turn = who % 1000, who // 1000
    np.testing.assert_array_equal(block > 0, wanted)
    np.testing.assert_array_equal(np.bincount(block, minlength=blocks + 1)[1:], counts)
    for b in range(1, blocks + 1):
        own = np.flatnonzero(block == b)
        own = own[np.argsort(place[own])]
        np.testing.assert_array_equal(turn[own], np.arange(len(own)))
