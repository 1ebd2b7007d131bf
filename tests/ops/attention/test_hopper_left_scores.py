"""How much of dS Hopper's backward leaves in memory at a time, of whom, and where it lies."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.ops.attention import (
    api,
    hopper_bwd_call,
    hopper_bwd_groups,
    hopper_bwd_scores,
)
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES, HOPPER_SMS
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.problem import Residuals
from ops.attention.hopper_problems import problem_of


@pytest.mark.parametrize(
    ("length", "batch", "causal"),
    [
        *((16384 // batch, batch, causal) for batch in (8, 4, 2, 1) for causal in (False, True)),
        *((512, 256, causal) for causal in (False, True)),
        (4096, 1, True),
    ],
)
def test_groups_of_heads_fit_and_fill_the_gpu(length, batch, causal):
    left = hopper_bwd_scores.LeftScores(problem_of(length, batch, causal))
    integers = 4 * batch * length * 16 * 128
    assert 2 * np.prod(left.shape) <= min(hopper_bwd_groups.MOST_D_SCORES_BYTES, (9 if causal else 17 / 4) * integers)
    assert 0 <= left.pairs * left.groups - batch * 16 < left.groups
    # The work of all SMs against the longest tile of keys, and where they are alike, as many turns as it takes.
    work, turns = left.pairs * left.tiles / HOPPER_SMS, -(-left.pairs * length // 128 // HOPPER_SMS)
    alike = 0 if causal else turns * left.tiles / (length // 128)
    assert work / max(length // 128, alike) >= (0.98 if causal else 0.93)


@pytest.mark.parametrize(
    ("length", "batch", "causal", "heads"),
    [(16384, 1, True, 32), (16384, 1, True, 64), (16384, 1, False, 32), (16384, 1, False, 64), (8192, 2, True, 64)],
)
def test_long_grouped_heads_come_in_parts(length, batch, causal, heads):
    """One pair's dS does not fit, or leaves SMs idle; dK and dV are sums over parts, so that none may be done twice."""
    problem = problem_of(length, batch, causal, kv_heads=8, heads=heads)
    tiles = HopperBackwardTiles.of(problem)
    assert tiles.d_query_apart
    assert tiles.holds_keys
    left = hopper_bwd_scores.LeftScores(problem, may_sum=True)
    assert 1 < left.parts == problem.group // left.heads
    assert left.pairs * left.groups == batch * 8
    assert 2 * np.prod(left.shape) <= hopper_bwd_groups.MOST_D_SCORES_BYTES
    work, turns = left.pairs * left.tiles / HOPPER_SMS, -(-left.pairs * length // 128 // HOPPER_SMS)
    assert work / max(length // 128, turns * left.tiles / (length // 128)) >= 0.93
    # Each query head comes once.
    heads_of_turns = [
        int(left.query_heads(jnp.array([turn]))(head))
        for turn in range(left.groups * left.parts)
        for head in range(left.pairs * left.heads)
    ]
    assert sorted(heads_of_turns) == list(range(batch * heads))


@pytest.mark.parametrize(
    ("length", "batch", "causal", "heads", "parts"),
    [
        (16384, 1, True, 32, (4, 1)),
        (16384, 1, True, 64, (4, 1)),
        (16384, 1, False, 32, (2, 1)),
        (8192, 2, True, 64, (8, 2)),
        (8192, 2, False, 64, (4, 2)),
        (8192, 1, True, 64, (8, 2)),
        (8192, 1, True, 32, (4, 2)),
        (4096, 1, True, 32, (8, 2)),
    ],
)
def test_parts_are_the_fastest_that_were_measured(length, batch, causal, heads, parts):
    """Or within 1 % of these: bench/NOTES.md. Each part adds to dK and dV in memory; few pairs leave SMs idle."""
    assert hopper_bwd_groups.scores_in_parts(problem_of(length, batch, causal, 8, heads)) == parts


@pytest.mark.parametrize(
    ("length", "batch", "causal", "kv_heads", "heads", "share"),
    [
        (32768, 1, True, 16, 16, (1, 1, 256)),
        (32768, 1, True, 8, 32, (1, 1, 256)),
        (32768, 1, False, 8, 32, (1, 1, 128)),
        (20480, 1, True, 16, 16, (2, 1, 160)),
        (20480, 3, False, 8, 32, (4, 1, 32)),
        (16384, 1, False, 8, 32, (2, 1, 128)),
    ],
)
def test_what_long_rows_leave_at_a_time(length, batch, causal, kv_heads, heads, share):
    """Without a mask a part of the queries, if heads share keys."""
    problem = problem_of(length, batch, causal, kv_heads, heads)
    tiles = HopperBackwardTiles.of(problem)
    assert (tiles.d_query_apart, tiles.holds_keys) == (True, True)
    left = hopper_bwd_scores.LeftScores(problem, may_sum=True)
    assert (left.pairs, left.heads, left.q_tiles) == share
    assert 2 * np.prod(left.shape) <= hopper_bwd_groups.MOST_D_SCORES_BYTES


@pytest.mark.parametrize(
    ("length", "causal", "kv_heads", "heads"),
    [
        (32768, False, 16, 16),  # no faster so, and the sums take memory
        (65536, True, 16, 16),  # one head's dS takes 4 GiB
        (65536, False, 8, 32),  # too few tiles of queries at a time for all SMs
        (24576, True, 16, 16),  # the longest tile of one head's keys ends after all others
        (128 * 251, False, 8, 32),  # a prime number of tiles
    ],
)
def test_long_rows_whose_d_query_stays_in_the_kernel(length, causal, kv_heads, heads):
    assert not HopperBackwardTiles.of(problem_of(length, 1, causal, kv_heads, heads)).d_query_apart


@pytest.mark.parametrize(("length", "batch", "heads"), [(32768, 1, 32), (20480, 3, 64)])
def test_each_tile_of_a_part_of_the_queries_has_a_place(length, batch, heads):
    left = hopper_bwd_scores.LeftScores(problem_of(length, batch, False, kv_heads=8, heads=heads), may_sum=True)
    assert left.parts == heads // 8 // left.heads * left.q_parts
    assert left.pairs * left.groups == batch * 8
    taken = []
    for turn in range(left.groups * left.parts):
        told = jnp.array([turn])
        first_tile = int(left.first_tile(told))
        taken += [(int(left.query_heads(told)(head)), first_tile) for head in range(left.pairs * left.heads)]
        head, keys, queries = np.ix_(range(2), range(length // 128), range(first_tile, first_tile + left.q_tiles))
        places = np.asarray(left.row(head, keys, first_tile)) + queries
        assert np.array_equal(np.sort(places, axis=None), np.arange(2 * left.tiles))
    of_queries = range(0, length // 128, left.q_tiles)
    assert sorted(taken) == sorted(itertools.product(range(batch * heads), of_queries))


def test_pairs_that_fit_whole_do_not_come_in_parts():
    assert hopper_bwd_groups.scores_in_parts(problem_of(8192, 2, True, kv_heads=8, heads=32)) is None
    assert hopper_bwd_scores.LeftScores(problem_of(8192, 2, True, kv_heads=8, heads=32), may_sum=True).parts == 1


@pytest.mark.parametrize(("length", "causal"), [(16384, True), (18432, False), (20480, False), (32768, False)])
def test_calls_in_parts_that_vmap_joins(length, causal):
    """As each alone."""
    problem = problem_of(length, 1, causal, kv_heads=8, heads=32)
    assert HopperBackwardTiles.of(problem).d_query_apart
    for calls in range(2, 40):
        left = hopper_bwd_scores.LeftScores(dataclasses.replace(problem, batch=calls), may_sum=True)
        assert 8 * calls % left.pairs == 0 or left.parts == 1
        assert 2 * np.prod(left.shape) <= hopper_bwd_groups.MOST_D_SCORES_BYTES


def test_a_tuned_slot_more_is_dropped_where_d_query_stays_in_the_kernel():
    tiles = HopperBackwardTiles(64, stages=3, blocks=HOPPER_SMS, d_query_apart=True)
    left = tiles.for_call(problem_of(2048, 8, True))
    assert left.d_query_apart
    assert left.stages == 3
    inside = tiles.for_call(problem_of(2047, 8, True))
    assert not inside.d_query_apart
    assert inside.smem_bytes(128, 128) <= HOPPER_SMEM_BYTES


@pytest.mark.parametrize(
    ("calls", "batch", "options"),
    [(16, 4, {"segment_ids": True}), (64, 1, {"is_causal": True, "local_window_size": (1023, 0)})],
    ids=["documents", "window"],
)
def test_calls_that_vmap_joins_leave_d_scores_in_groups(calls, batch, options):
    """Each alone leaves all of dS at once, which all of them have no room for."""
    left = []

    def one(query, lse, ids):
        given = options | ({"segment_ids": ids} if "segment_ids" in options else {})
        inputs, aux, call, _ = api._prepare(query, query, query, **given)
        problem = call.problem(inputs, aux)
        assert HopperBackwardTiles.of(problem).d_query_apart
        joined = dataclasses.replace(problem, batch=calls * batch)
        assert hopper_bwd_groups.scores_group(problem)
        assert not hopper_bwd_groups.scores_group(joined)
        left.append(hopper_bwd_scores.LeftScores(joined))
        return hopper_bwd_call.attend_grad(problem, Residuals(inputs, aux, query, lse), query, lse).query

    shape = calls, batch, 2048, 16, 128
    query, lse = jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((*shape[:2], 16, 2048), jnp.float32)
    d_query = jax.eval_shape(jax.vmap(one), query, lse, jax.ShapeDtypeStruct(shape[:3], jnp.int32))
    assert d_query.shape == shape
    assert 2 * np.prod(left[0].shape) <= hopper_bwd_groups.MOST_D_SCORES_BYTES
    assert left[0].groups > 1


def test_no_groups_that_leave_the_gpu_idle():
    """Four of sixteen heads fit, 128 tiles of keys for 132 SMs; four groups have more to start and end than one."""
    assert hopper_bwd_groups.scores_group(problem_of(4096, 1, False)) == 0


def test_a_window_leaves_all_heads_scores_or_none():
    def pairs(batch):
        problem = problem_of(4096, batch, True)
        band = dataclasses.replace(problem.mask.band, low=-1023)
        return hopper_bwd_groups.scores_group(
            dataclasses.replace(problem, mask=dataclasses.replace(problem.mask, band=band))
        )

    assert pairs(6) == 6 * 16
    assert pairs(8) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_no_two_tiles_of_scores_lie_in_one_place(causal):
    left = hopper_bwd_scores.LeftScores(problem_of(512, 1, causal, kv_heads=8))
    places = [
        int(left.row(head, kv_index)) + q_index
        for head in range(left.pairs * 2)
        for kv_index in range(4)
        for q_index in range(kv_index if causal else 0, 4)
    ]
    assert sorted(places) == list(range(left.shape[0] // 2))


# (queries, keys, depth, dtype, options, whether)
