"""The Hopper scan without a GPU: what fits, how work is spread, and the sums that XLA makes for it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.arch import Arch
from fast_layers.kernel_parts.tile_order import deal
from fast_layers.ops.ssd import config, hopper_call
from fast_layers.ops.ssd.config import (
    HEAD_DIMS,
    HOPPER_SMEM_BYTES,
    MULTIPROCESSORS,
    STATE_DIMS,
    HopperBackwardTiles,
    HopperForwardTiles,
    HopperStateTiles,
)
from fast_layers.ops.ssd.problem import Problem


def _problem(batch=8, length=4096, heads=80, head_dim=64, groups=1, state_dim=128, **options) -> Problem:
    return Problem(batch, length, heads, head_dim, groups, state_dim, jnp.dtype(jnp.bfloat16), 64, **options)


def test_no_examples_are_refused():
    h200 = Arch("cuda", "H200", (9, 0))
    assert hopper_call.supports(_problem(), h200, "forward") is None
    assert hopper_call.supports(_problem(batch=0), h200, "forward") == "needs examples, got x [0, 4096, 80, 64]"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("state_dim", STATE_DIMS)
def test_choices_fit(state_dim, head_dim, gated):
    for heads in (1, 3, 80):
        problem = _problem(heads=heads, head_dim=head_dim, state_dim=state_dim, gated=gated)
        for tiles in (HopperForwardTiles.of(problem), HopperBackwardTiles.of(problem)):
            assert tiles.smem_bytes(state_dim, gated) <= HOPPER_SMEM_BYTES
        assert HopperStateTiles.of(problem).smem_bytes(state_dim) <= HOPPER_SMEM_BYTES


@pytest.mark.parametrize(
    ("options", "forward", "states", "slices"),
    [
        ({}, 1, 1, 1),  # 320 blocks in the forward
        ({"batch": 1, "length": 32_768}, 3, 1, 1),  # 120 blocks for 132 multiprocessors
        ({"batch": 4}, 1, 1, 2),  # of 160 blocks one would have to wait for another: in two launches, below
        ({"batch": 1, "heads": 8, "length": 8192}, 15, 13, 4),
        ({"batch": 1, "heads": 8, "length": 64 * 127}, 13, 12, 4),  # a prime number of chunks
        ({"batch": 1, "heads": 8, "length": 1024}, 1, 1, 8),  # two splits of 8 chunks would gain nothing
        ({"batch": 1, "length": 1}, 1, 1, 80),
        ({"batch": 1, "length": 1024, "groups": 80}, 1, 1, 1),
        ({"batch": 1, "heads": 8, "length": 8192, "state_dim": 256}, 15, 13, 2),
    ],
)
def test_work_is_spread(options, forward, states, slices):
    problem = _problem(**options)
    found = HopperForwardTiles.of(problem).splits, HopperStateTiles.of(problem).splits
    assert found == (forward, states)
    assert HopperBackwardTiles.of(problem).slices == slices


@pytest.mark.parametrize(
    ("options", "late_chunks"),
    [
        ({}, 33),  # 320 blocks: 188 whole, then 31 chunks of the others, two of which a multiprocessor has time for
        ({"batch": 4}, 33),
        ({"heads": 64}, 0),  # 256 blocks fill two turns of 132
        ({"batch": 64}, 0),  # of twenty turns, a part of one is not worth a launch
        ({"length": 512}, 0),
        ({"batch": 1}, 0),
    ],
)
def test_ends_are_left_to_a_second_launch(options, late_chunks):
    tiles = HopperForwardTiles.of(_problem(**options))
    assert (tiles.late_blocks, tiles.late_chunks) == (MULTIPROCESSORS if late_chunks else 0, late_chunks)


@pytest.mark.parametrize("blocks", [132, 160, 320, 500])
def test_late_ends_are_chosen_as_the_scheduler_would_have_it(blocks):
    """Against the scheduler itself, over all choices of one late end for each multiprocessor."""
    chunks, start = 64, config._BLOCK_COSTS

    def ends_after(late):
        whole = [chunks + start] * (blocks - MULTIPROCESSORS)
        first = [*whole, *[chunks - late + start] * MULTIPROCESSORS]
        taken = deal(first, MULTIPROCESSORS)
        ends = max(sum(first[piece] for piece in row[1 : 1 + row[0]]) for row in taken)
        return ends + late + start + config._LAUNCH_COSTS

    found, time = config._late_chunks(chunks, blocks)
    choices = range(config._FEWEST_CHUNKS, chunks - config._FEWEST_CHUNKS + 1)
    assert time == ends_after(found) == min(map(ends_after, choices))


@pytest.mark.parametrize("rows", [64, 128])
def test_running_sums(rows):
    x = np.random.default_rng(0).normal(size=(2, 3, rows, 5)).astype(np.float32)
    want = np.cumsum(x.astype(np.float64), axis=2)
    np.testing.assert_allclose(hopper_call.running_sums(jnp.asarray(x)), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HopperForwardTiles(3), "compute_wgs"),
        (lambda: HopperForwardTiles(2, 1), "stages"),
        (lambda: HopperForwardTiles(1).panels(256), "compute_wgs=1 must be 2: a state of 256"),
        (lambda: HopperForwardTiles(2, splits=0), "splits"),
        (lambda: HopperForwardTiles(2, late_blocks=3), "late_chunks"),
        (lambda: HopperForwardTiles(2, splits=2, late_blocks=3, late_chunks=1), "late_blocks=3 must be 0 with"),
        (lambda: HopperStateTiles(0), "compute_wgs"),
        (lambda: HopperStateTiles(2, 1), "stages"),
        (lambda: HopperStateTiles(2, splits=0), "splits"),
        (lambda: HopperBackwardTiles(1), "stages"),
        (lambda: HopperBackwardTiles(2, slices=0), "slices"),
    ],
)
def test_impossible_tiles_reject_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()
