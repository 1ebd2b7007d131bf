"""The tile choices of the Hopper scan: what fits, and how work is spread over the GPU."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from fast_layers.ops.ssd.config import (
    HEAD_DIMS,
    HOPPER_SMEM_BYTES,
    STATE_DIMS,
    HopperBackwardTiles,
    HopperForwardTiles,
    HopperStateTiles,
)
from fast_layers.ops.ssd.problem import Problem


def _problem(batch=8, length=4096, heads=80, head_dim=64, groups=1, state_dim=128, **options) -> Problem:
    return Problem(batch, length, heads, head_dim, groups, state_dim, jnp.dtype(jnp.bfloat16), 64, **options)


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
        ({"batch": 1, "length": 32_768}, 13, 1, 1),  # 520 blocks: four for each of 132 multiprocessors, 40 chunks each
        ({"batch": 4}, 4, 1, 2),  # 160 blocks would leave half of the GPU idle for half of the time
        ({"batch": 1, "heads": 8, "length": 8192}, 16, 16, 4),
        ({"batch": 1, "heads": 8, "length": 64 * 127}, 15, 15, 4),  # splits of eight and nine chunks
        ({"batch": 1, "heads": 8, "length": 1024}, 1, 1, 8),  # two splits of 8 chunks would gain nothing
        ({"batch": 1, "length": 1}, 1, 1, 80),
        ({"batch": 1, "length": 1024, "groups": 80}, 1, 1, 1),
        ({"batch": 1, "heads": 8, "length": 8192, "state_dim": 256}, 16, 16, 2),
    ],
)
def test_work_is_spread(options, forward, states, slices):
    problem = _problem(**options)
    found = HopperForwardTiles.of(problem).splits, HopperStateTiles.of(problem).splits
    assert found == (forward, states)
    assert HopperBackwardTiles.of(problem).slices == slices


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HopperForwardTiles(3), "compute_wgs"),
        (lambda: HopperForwardTiles(2, 1), "stages"),
        (lambda: HopperForwardTiles(1).panels(256), "compute_wgs=1 must be 2: a state of 256"),
        (lambda: HopperForwardTiles(2, splits=0), "splits"),
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
