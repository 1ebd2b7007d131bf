"""The tile choices of the Blackwell scan: what fits."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from fast_layers.arch import Arch
from fast_layers.ops.ssd import blackwell_call
from fast_layers.ops.ssd.blackwell_config import (
    BLACKWELL_SMEM_BYTES,
    BLACKWELL_TMEM_COLUMNS,
    COMPUTE_WGS,
    HEAD_DIMS,
    STATE_DIMS,
    BlackwellBackwardTiles,
    BlackwellForwardTiles,
    BlackwellStateTiles,
)
from fast_layers.ops.ssd.problem import Problem


def _problem(batch=8, heads=80, head_dim=64, state_dim=128, **options) -> Problem:
    return Problem(batch, 4096, heads, head_dim, 1, state_dim, jnp.dtype(jnp.bfloat16), 64, **options)


def test_no_examples_are_refused():
    b200 = Arch("cuda", "B200", (10, 0))
    assert blackwell_call.supports(_problem(), b200, "forward") is None
    assert blackwell_call.supports(_problem(batch=0), b200, "forward") == "needs examples, got x [0, 4096, 80, 64]"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("state_dim", STATE_DIMS)
def test_choices_fit(state_dim, head_dim, gated):
    for heads in (1, 3, 80):
        problem = _problem(heads=heads, head_dim=head_dim, state_dim=state_dim, gated=gated)
        forward, backward = BlackwellForwardTiles.of(problem), BlackwellBackwardTiles.of(problem)
        assert forward.smem_bytes(state_dim, gated) <= BLACKWELL_SMEM_BYTES
        assert backward.smem_bytes(head_dim, state_dim) <= BLACKWELL_SMEM_BYTES
        assert BlackwellStateTiles.of(problem).smem_bytes(state_dim) <= BLACKWELL_SMEM_BYTES
        assert forward.tmem_columns(state_dim) <= BLACKWELL_TMEM_COLUMNS
        assert backward.tmem_columns(head_dim, state_dim) <= BLACKWELL_TMEM_COLUMNS


def test_warpgroups_ask_for_no_more_registers_than_the_block_was_launched_with():
    """A warpgroup that asks for more than is left of the launch's registers waits for ever."""
    problem = _problem()
    forward, states, backward = (
        tiles.of(problem) for tiles in (BlackwellForwardTiles, BlackwellStateTiles, BlackwellBackwardTiles)
    )
    asked = {
        "forward": [forward.compute_registers] * COMPUTE_WGS
        + [forward.state_registers]
        + [forward.issue_registers] * 2,
        "states": [states.compute_registers] * 2 + [states.issue_registers] * 2,
        "backward": [backward.pair_registers] * COMPUTE_WGS + [backward.channel_registers, backward.multiply_registers],
    }
    for name, registers in asked.items():
        launched = 65536 // (128 * len(registers)) // 8 * 8
        assert sum(registers) == launched * len(registers), f"{name}: of what a block has, some is given to nobody"
        assert all(count % 8 == 0 for count in registers), name
