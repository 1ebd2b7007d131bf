"""Which blocks of attention's backward on Hopper leave dS, and which make dQ of it, in one launch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.ops.attention import api
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.hopper_bwd_groups import MOST_D_SCORES_BYTES, most_scores_heads, scores_tiles
from fast_layers.ops.attention.hopper_bwd_sequence import TILES, Sequence
from fast_layers.ops.attention.problem import Problem


def _problem(length: int, batch: int, causal: bool, kv_heads: int = 16, heads: int = 16, **options) -> Problem:
    problems = []

    def call(query, key):
        inputs, aux, given, _ = api._prepare(query, key, key, is_causal=causal, **options)
        problems.append(given.problem(inputs, aux))

    shapes = ((batch, length, n, 128) for n in (heads, kv_heads))
    jax.eval_shape(call, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    return problems[0]


def _sequence(problem: Problem) -> Sequence | None:
    return HopperBackwardTiles.of(problem).for_call(problem).sequence(problem)


TAKEN = {
    "causal, 4,096": (4096, 4, True),
    "causal, 4,096, half as many heads": (4096, 2, True),
    "causal, 8,192": (8192, 2, True),
    "causal, 16,384": (16384, 1, True),
    "causal, 16,384, heads for which groups would lose too much": (16384, 1, True, 25, 25),
    "causal, an odd number of examples": (4352, 7, True),
    "causal, 8,192, grouped heads": (8192, 2, True, 8, 64),
    "causal, 16,384, grouped heads": (16384, 1, True, 8, 32),
    "full, 2,048": (2048, 8, False),
    "full, 4,096": (4096, 4, False),
}


@pytest.mark.parametrize("name", TAKEN)
def test_blocks_wait_for_lower_numbers_alone(name):
    """Those of the tiles of keys that dQ is made of, and those that make dQ of the head whose place is taken."""
    problem = _problem(*TAKEN[name])
    sequence = _sequence(problem)
    assert sequence is not None
    before = np.asarray(sequence.pieces_before(jnp.arange(sequence.total + 1)))
    leaves = np.diff(before)
    assert set(leaves) == {0, 1}
    piece_blocks, query_blocks = np.flatnonzero(leaves == 1), np.flatnonzero(leaves == 0)
    piece_heads, kv_tiles = map(np.asarray, sequence.pieces.locate(jnp.arange(len(piece_blocks))))
    query_heads, q_tiles = map(np.asarray, sequence.locate_query(jnp.arange(len(query_blocks))))
    heads = problem.batch * problem.heads
    each_piece = {(head, tile) for head in range(heads) for tile in range(problem.kv_len // 128)}
    each_query = {(head, tile) for head in range(heads) for tile in range(problem.q_len // (128 * TILES))}
    assert set(zip(piece_heads, kv_tiles, strict=True)) == each_piece
    assert set(zip(query_heads, q_tiles, strict=True)) == each_query
    assert sequence.total == len(each_piece) + len(each_query)
    # Each query head comes once, and adds to the sums of its pair after those before it.
    pairs, which = np.broadcast_arrays(*map(np.asarray, sequence.pair(jnp.arange(heads))))
    assert sorted(zip(pairs, which, strict=True)) == [divmod(head, problem.group) for head in range(heads)]
    begins = np.zeros((problem.batch * problem.kv_heads, problem.group, problem.kv_len // 128), int)
    begins[pairs[piece_heads], which[piece_heads], kv_tiles] = piece_blocks
    assert (np.diff(begins, axis=1) > 0).all()
    for head in range(heads):
        mine = piece_blocks[piece_heads == head]
        assert mine.max() < query_blocks[query_heads == head].min()
        if head >= sequence.places:
            assert query_blocks[query_heads == head - sequence.places].max() < mine.min()


@pytest.mark.parametrize("name", TAKEN)
def test_no_more_memory_than_where_dq_has_a_kernel_of_its_own(name):
    problem = _problem(*TAKEN[name])
    sequence = _sequence(problem)
    assert sequence is not None
    assert sequence.places <= most_scores_heads(problem)
    assert 2 * 128 * 128 * scores_tiles(problem) * sequence.places <= MOST_D_SCORES_BYTES


OTHERS = {
    "too few tiles of keys": {"batch": 1},
    "grouped heads of short rows": {"kv_heads": 4},
    "grouped heads without a mask": {"length": 8192, "kv_heads": 8, "heads": 64, "batch": 2, "causal": False},
    "too much memory for four of 16 grouped heads' dS": {"length": 16_384, "kv_heads": 4, "batch": 1},
    "grouped heads of 20,480 tokens": {"length": 20_480, "kv_heads": 8, "heads": 32, "batch": 1},
    "persistent blocks": {"length": 2048, "batch": 8},
    "an odd number of tiles of queries": {"length": 4224},
    "too much memory for eight heads' dS": {"length": 8192, "batch": 2, "causal": False},
    "keys not held": {"softcap": 5.0},
    "a window": {"local_window_size": (1000, 0)},
    "documents": {"segment_ids": np.zeros(4096, np.int32)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_a_kernel_for_d_query(name):
    assert _sequence(_problem(**{"length": 4096, "batch": 4, "causal": True} | OTHERS[name])) is None


def test_tiles_of_a_table_that_do_not_hold_keys():
    problem = _problem(*TAKEN["causal, 4,096"])
    tiles = HopperBackwardTiles.of(problem).for_call(problem)
    assert dataclasses.replace(tiles, holds_keys=False).sequence(problem) is None
