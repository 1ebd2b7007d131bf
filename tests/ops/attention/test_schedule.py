"""Which pieces of work a persistent block of the forward takes, told before the kernel runs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts import tile_order
from fast_layers.ops.attention.config import HOPPER_SMS, HopperForwardTiles
from fast_layers.ops.attention.forward_parts import Work
from fast_layers.ops.attention.masks import Band
from fast_layers.ops.attention.problem import MaskFacts, Problem
from fast_layers.ops.attention.tile_mask import TileMask

BANDS = {
    "full": None,
    "causal": Band(None, 0),
    "causal, bottom right": Band(None, 300),
    "window": Band(-130, 70),
    "window beyond the keys": Band(500, None),
    "no key at first": Band(None, -200),
}


def _problem(batch, heads, q_len, kv_len, band):
    facts = {"batch": batch, "heads": heads, "kv_heads": heads, "q_len": q_len, "kv_len": kv_len, "scale": 0.1}
    return Problem(**facts, qk_dim=128, v_dim=128, dtype=jnp.dtype(jnp.bfloat16), mask=MaskFacts(band=band))


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("group", [4, 2], ids=["heads together", "heads in two groups"])
def test_it_knows_how_many_tiles_of_keys_each_piece_has(name, group, monkeypatch):
    monkeypatch.setattr(tile_order, "L2_BUDGET_BYTES", group * 900 * (128 + 128) * 2)
    problem = _problem(2, 2, 600, 900, BANDS[name])
    tiles = HopperForwardTiles(2, 64, q_slots=2, blocks=3)
    work = Work(problem, tiles, 64, 128, 128)
    spans = [work.piece(TileMask(problem, tiles.q_tile, tiles.kv_tile, None), jnp.int32(i)).span for i in range(20)]
    assert (work.order.total, work.order.group) == (len(spans), group)
    np.testing.assert_array_equal(work.key_tiles(), [int(span.tiles) for span in spans])
    schedule = work.schedule()
    shares = [row[1 : row[0] + 1] for row in schedule]
    assert sorted(np.concatenate(shares)) == list(range(len(spans)))
    busy = [work.key_tiles()[share].sum() for share in shares]
    assert max(busy) - min(busy) <= work.key_tiles().max() + 1


@pytest.mark.parametrize(("batch", "blocks"), [(32, HOPPER_SMS), (1 << 14, 0)])
def test_too_many_pieces_are_left_to_the_hardware(batch, blocks):
    problem = _problem(batch, 16, 512, 512, BANDS["causal"])
    assert HopperForwardTiles.of(problem).blocks == blocks
    assert HopperForwardTiles.of(problem, HopperForwardTiles(2, 128, blocks=5)).blocks == min(blocks, 5)
