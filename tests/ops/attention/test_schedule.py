"""Which pieces of work a block takes, told before the kernel runs."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts import tile_order
from fast_layers.kernel_parts.tile_order import TileOrder
from fast_layers.ops.attention import api, hopper_bwd_pieces
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES, HOPPER_SMS
from fast_layers.ops.attention.forward_parts import Work
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.ops.attention.kernel_operands import RowMask
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


ROW_MASKS = {
    "documents": {"segment_ids": np.repeat([0, 1, 2], (150, 400, 218))},
    "documents, causal": {"segment_ids": np.repeat([0, 1, 2], (150, 400, 218)), "is_causal": True},
    "lengths": {"key_value_seq_lengths": np.array([700, 100])},
    "queries without keys": {"query_seq_lengths": np.array([100, 768]), "is_causal": True},
}


@pytest.mark.parametrize("name", ROW_MASKS)
@pytest.mark.parametrize("group", [6, 2], ids=["heads together", "heads in groups"])
def test_a_mask_of_arrays_has_pieces_queued_from_most_keys_on(name, group, monkeypatch):
    monkeypatch.setattr(tile_order, "L2_BUDGET_BYTES", group * 768 * (128 + 128) * 2)
    query = jnp.zeros((2, 768, 3, 128), jnp.bfloat16)
    inputs, aux, options, _ = api._prepare(query, query, query, **ROW_MASKS[name])
    problem = options.problem(inputs, aux)
    tiles = HopperForwardTiles(2, 64, q_slots=2, blocks=4)
    row_mask = RowMask.of(problem, aux.mask, tiles.q_tile, tiles.kv_tile)
    assert row_mask is not None
    in_memory = types.SimpleNamespace(tiles=types.SimpleNamespace(at=row_mask.tiles, shape=row_mask.tiles.shape))
    work, mask = Work(problem, tiles, 64, 128, 128), TileMask(problem, tiles.q_tile, tiles.kv_tile, in_memory)
    pieces = [work.piece(mask, jnp.int32(i)) for i in range(36)]
    key_tiles, example = (np.array(x) for x in ([p.span.tiles for p in pieces], [p.example for p in pieces]))
    assert (work.order.total, work.order.group) == (len(key_tiles), group)
    taken = np.asarray(work.queued(row_mask))
    assert sorted(taken) == list(range(len(pieces)))
    for start in range(0, len(pieces), 6 * group):
        of_group = taken[start : start + 6 * group]
        assert set(of_group // (6 * group)) == {start // (6 * group)}
        for of in set(example[of_group]):
            assert (np.diff(key_tiles[of_group][example[of_group] == of]) <= 0).all()


@pytest.mark.parametrize("name", ROW_MASKS)
def test_a_part_of_a_tile_of_queries_has_keys_of_its_own_among_those_of_the_tile(name):
    query = jnp.zeros((2, 768, 3, 128), jnp.bfloat16)
    inputs, aux, options, _ = api._prepare(query, query, query, **ROW_MASKS[name])
    problem = options.problem(inputs, aux)
    tiles = HopperForwardTiles(3, 64, takes_turns=False, own_spans=True)

    def told(parts):
        row_mask = RowMask.of(problem, aux.mask, tiles.q_tile, tiles.kv_tile, parts)
        assert row_mask is not None
        return row_mask, types.SimpleNamespace(
            tiles=types.SimpleNamespace(at=row_mask.tiles, shape=row_mask.tiles.shape)
        )

    _, of_tile = told(1)
    row_mask, of_parts = told(tiles.mask_parts)
    whole, by_parts = (
        TileMask(problem, tiles.q_tile, tiles.kv_tile, refs, parts=parts)
        for refs, parts in ((of_tile, 1), (of_parts, 3))
    )
    own = TileMask(problem, 64, tiles.kv_tile, of_parts)
    for example in range(row_mask.start.shape[0]):
        for q_index in range(768 // tiles.q_tile):
            block = by_parts.key_span(example, q_index)
            assert [int(x) for x in block] == [int(x) for x in whole.key_span(example, q_index)]
            for part in range(3 * q_index, 3 * q_index + 3):
                span = own.key_span(example, part).within(block)
                rows = slice(64 * part, 64 * part + 64)
                start, stop = (np.asarray(x[example, rows]) for x in (row_mask.start, row_mask.stop))
                assert block.first <= span.first < span.last <= block.last
                sees = start < stop
                assert (start[sees] >= 64 * span.first).all()
                assert (stop[sees] <= 64 * span.last).all()


@pytest.mark.parametrize("kv_len", [768, 900])
@pytest.mark.parametrize(
    ("tiles", "bands"),
    [
        (HopperForwardTiles(2, 128), ("causal", "causal, bottom right")),
        (HopperForwardTiles(2, 64), ()),
        (HopperForwardTiles(2, 64, takes_turns=False, own_spans=True), ("causal", "causal, bottom right")),
        (HopperForwardTiles(3, 128, takes_turns=False, own_spans=True), ("causal", "causal, bottom right")),
        (HopperForwardTiles(3, 128), ()),
    ],
    ids=str,
)
def test_only_the_last_tile_is_ragged_where_it_is_said(tiles, bands, kv_len):
    """Else scores stay that are hidden."""
    for name, band in (BANDS | {"causal, bottom right": Band(None, 256)}).items():
        problem = _problem(1, 2, 700, kv_len, band)
        assert tiles.one_ragged_tile(problem) == (name in bands), name
        rows = 64 if tiles.own_spans else tiles.q_tile
        mask = TileMask(problem, rows, tiles.kv_tile, None)
        spans = [mask.key_span(0, i) for i in range(-(-700 // rows))]
        first = all(not any(span.ragged(j) for j in range(int(span.first), int(span.last) - 1)) for span in spans)
        assert first or name not in bands, name


@pytest.mark.parametrize(("batch", "blocks"), [(32, HOPPER_SMS), (1 << 14, 0)])
def test_too_many_pieces_are_left_to_the_hardware(batch, blocks):
    problem = _problem(batch, 16, 512, 512, BANDS["causal"])
    assert HopperForwardTiles.of(problem).blocks == blocks
    assert HopperForwardTiles.of(problem, HopperForwardTiles(2, 128, blocks=5)).blocks == min(blocks, 5)
    deep = dataclasses.replace(problem, qk_dim=256, v_dim=256, mask=MaskFacts(None))
    tiles = HopperForwardTiles.of(deep)
    assert (tiles.blocks, tiles.out_by_values, tiles.spare_values) == (blocks, blocks > 0, blocks > 0)


@pytest.mark.parametrize(("batch", "length", "splits"), [(1, 4096, 2), (1 << 16, 512, 1)])
@pytest.mark.parametrize("band", ["causal", "full"])
def test_out_that_has_rows_of_its_own_leaves_room_for_64_keys(batch, length, splits, band):
    """Of few pieces, whose keys are split, and of too many for a schedule."""
    problem = dataclasses.replace(_problem(batch, 2, length, length, BANDS[band]), qk_dim=192, v_dim=128)
    tiles = HopperForwardTiles.of(problem)
    assert (tiles.kv_tile, tiles.blocks, tiles.out_by_values, tiles.splits) == (64, 0, False, splits)
    assert tiles.smem_bytes(192, 128) <= HOPPER_SMEM_BYTES


@pytest.mark.parametrize("examples", [1, 3])
def test_pieces_of_a_group_are_taken_longest_first(examples):
    """Of a mask whose spans are known in the call only: each piece once, and neighbours first where they are alike."""
    order = TileOrder(heads=6, tiles=5, group=3)
    first = np.random.default_rng(0).integers(0, 4, (examples, 5))
    spans = np.stack([first, first + [[3, 1, 3, 7, 2]] + np.arange(examples)[:, None] % 2], -1)
    p = types.SimpleNamespace(kv_heads=2)
    got = np.asarray(hopper_bwd_pieces.longest_first(cast(Any, p), jnp.asarray(spans), order))

    def length(piece):
        head, kv_index = order.locate(int(piece))
        return int(np.diff(spans[int(head) // 2 if examples > 1 else 0, int(kv_index)])[0])

    want = [sorted(range(first, first + 15), key=lambda piece: -length(piece)) for first in (0, 15)]
    assert got.tolist() == want[0] + want[1]
