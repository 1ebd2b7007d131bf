"""Tile choices of the Blackwell matmul: what the hardware grants, what is refused, and what is chosen."""

from __future__ import annotations

import itertools

import pytest

from fast_layers.ops.mlp.blackwell_config import BLACKWELL_TMEM_COLUMNS, BlackwellMatmulTiles
from ops.mlp.test_hopper_tiles import NEEDS, REGISTERS, WARPGROUP


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"columns": 192}, "columns"),
        ({"stages": 1}, "stages"),
        ({"stages": 9}, "stages"),
        ({"epilogue_wgs": 3}, "epilogue_wgs"),
        ({"piece": 16}, "piece"),
        ({"pieces": 3}, "pieces"),
        ({"piece": 64}, "must be a multiple of"),
        ({"row_group": 0}, "row_group"),
    ],
)
def test_impossible_tiles_reject_themselves(fields, reason):
    with pytest.raises(ValueError, match=reason):
        BlackwellMatmulTiles(**{"columns": 128, **fields})


def test_what_does_not_go_together_is_told():
    plain, gated = NEEDS["plain"], NEEDS["activate, gated"]
    assert "512 columns of products exceed 256" in (BlackwellMatmulTiles(256).objection(gated) or "")
    assert "less than TMA's swizzle" in (BlackwellMatmulTiles(64, pieces=1).objection(plain) or "")
    assert BlackwellMatmulTiles(64, pieces=1).objection(gated) is None
    assert "shared memory exceed" in (BlackwellMatmulTiles(256, stages=7).objection(plain) or "")
    assert BlackwellMatmulTiles(256, stages=6).objection(plain) is None


@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize("epilogue_wgs", [1, 2])
def test_warpgroups_ask_for_no_more_registers_than_the_block_was_launched_with(epilogue_wgs, columns):
    """A warpgroup that asks for more than is left of the launch's registers waits for ever."""
    tiles = BlackwellMatmulTiles(columns, epilogue_wgs=epilogue_wgs, pieces=1)
    launched = REGISTERS // ((epilogue_wgs + 2) * WARPGROUP) // 8 * 8
    asked = epilogue_wgs * tiles.epilogue_registers + 2 * tiles.issue_registers
    assert asked <= (epilogue_wgs + 2) * launched
    assert tiles.epilogue_registers % 8 == tiles.issue_registers % 8 == 0
    assert tiles.issue_registers <= launched <= tiles.epilogue_registers


@pytest.mark.parametrize("name", NEEDS)
def test_every_choice_is_possible_and_fits_the_problem(name):
    needs = NEEDS[name]
    sizes = (1, 7, 64, 128, 130, 512, 4096, 16384)
    for rows, columns in itertools.product(sizes, (8, 64, 72, 200, 2048, 65536)):
        tiles = BlackwellMatmulTiles.of(rows, columns, needs)
        assert tiles.objection(needs) is None
        assert tiles.stages >= 3
        assert tiles.tmem_columns(needs.products) <= BLACKWELL_TMEM_COLUMNS


def test_the_choice_is_by_shape_and_epilogue():
    def chosen(rows, columns, name):
        tiles = BlackwellMatmulTiles.of(rows, columns, NEEDS[name])
        return tiles.columns, tiles.collective, tiles.stages, tiles.pieces

    assert chosen(8192, 8192, "plain") == (256, True, 6, 2)
    assert chosen(8192, 8192, "activate") == (256, True, 5, 2)
    assert chosen(8192, 8192, "activate, gated") == (128, True, 4, 2)
    assert chosen(8192, 8192, "differentiate, gated") == (256, True, 4, 1)
    assert chosen(8192, 2048, "plain") == (256, True, 6, 2)  # four rounds of 512 clocks, or seven of 384
    assert chosen(1, 8192, "activate") == (128, True, 6, 2)  # 64 pairs, in one round
    assert chosen(1, 65536, "plain") == (256, False, 4, 2)  # no second tile of rows


def test_clocks_are_the_slower_of_multiplying_and_of_shared_memory():
    pair, alone = BlackwellMatmulTiles(256, collective=True), BlackwellMatmulTiles(256, collective=False)
    assert pair.clocks(256, 256, products=1) == 512  # both: 2 x 256 x 256 x 64 operations, and 64 KiB
    assert alone.clocks(256, 256, products=1) == 768  # 96 KiB
    assert pair.clocks(256, 256 * 75, products=1) == 2 * 512  # one more than there are pairs


def test_8_bits_want_more_columns_in_a_slot():
    needs, narrow = NEEDS["plain"], BlackwellMatmulTiles(128)
    assert narrow.objection(needs) is None
    assert "64 bytes of columns in a slot" in (narrow.objection(needs, 1) or "")
    for rows, columns in itertools.product((1, 130, 4096), (64, 2048)):
        assert BlackwellMatmulTiles.of(rows, columns, needs, 1).objection(needs, 1) is None
