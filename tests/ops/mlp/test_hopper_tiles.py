"""Tile choices of the Hopper matmul: what the hardware grants, what is refused, and what is chosen."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.ops.mlp import config, hopper_matmul
from fast_layers.ops.mlp.config import EpilogueNeeds, HopperFewRowsTiles, HopperMatmulTiles
from fast_layers.ops.mlp.epilogue import Activate, Plain
from fast_layers.ops.mlp.matmul import Matmul, Operands, finish

REGISTERS = 1 << 16
WARPGROUP = 128
NEEDS = {
    "plain": EpilogueNeeds(),
    "activate": EpilogueNeeds(writes=2, arithmetic=True),
    "activate, nothing saved": EpilogueNeeds(arithmetic=True),
    "activate, gated": EpilogueNeeds(products=2, writes=3, arithmetic=True),
    "differentiate": EpilogueNeeds(reads=1, writes=2, sums=1, arithmetic=True),
    "differentiate, gated": EpilogueNeeds(reads=2, writes=3, sums=2, arithmetic=True),
    "two plain": EpilogueNeeds(products=2, writes=2),
}


def test_warpgroups_ask_for_no_more_registers_than_the_block_was_launched_with():
    """A warpgroup that asks for more than is left of the launch's registers waits for ever."""
    warpgroups = config.COMPUTE_WGS + 1
    launched = min(REGISTERS // (warpgroups * WARPGROUP), 255) // 8 * 8
    assert warpgroups * launched >= config.COMPUTE_WGS * config.COMPUTE_REGISTERS + config.LOAD_REGISTERS
    assert config.COMPUTE_REGISTERS % 8 == 0
    assert config.LOAD_REGISTERS % 8 == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rows": 192}, "rows"),
        ({"columns": 192}, "columns"),
        ({"stages": 1}, "stages"),
        ({"stages": 9}, "stages"),
        ({"cluster": 4}, "cluster"),
        ({"pieces": 3}, "pieces"),
        ({"columns": 64, "pieces": 2}, "must divide the 1 pieces"),
        ({"row_group": 0}, "row_group"),
    ],
)
def test_impossible_tiles_reject_themselves(fields, reason):
    with pytest.raises(ValueError, match=reason):
        HopperMatmulTiles(**{"rows": 64, "columns": 128, **fields})


def test_what_does_not_go_together_is_told():
    assert "registers exceed 128" in (HopperMatmulTiles(128, 256).objection(NEEDS["plain"]) or "")
    assert "registers exceed 128" in (HopperMatmulTiles(64, 256).objection(NEEDS["activate, gated"]) or "")
    assert "shared memory exceed" in (HopperMatmulTiles(64, 256, stages=5).objection(NEEDS["plain"]) or "")
    assert HopperMatmulTiles(64, 256, stages=4).objection(NEEDS["plain"]) is None


@pytest.mark.parametrize("name", NEEDS)
def test_every_choice_is_possible_and_fits_the_problem(name):
    needs = NEEDS[name]
    sizes = (1, 7, 64, 65, 130, 512, 4096, 16384)
    for rows, columns, depth in itertools.product(sizes, (8, 64, 72, 200, 2048, 65536), (8, 2048, 16384)):
        tiles = HopperMatmulTiles.of(rows, columns, depth, needs)
        assert tiles.objection(needs) is None
        assert tiles.stages >= 3
        assert tiles.columns < 2 * max(columns, 64)  # not mostly padding
        assert tiles.block_rows * tiles.cluster < 2 * max(rows, 64)


def test_the_choice_is_by_shape_and_epilogue():
    def chosen(rows, columns, depth, name, terms=1):
        tiles = HopperMatmulTiles.of(rows, columns, depth, NEEDS[name], terms)
        return tiles.rows, tiles.columns, tiles.ping_pong, tiles.cluster, tiles.splits

    assert chosen(8192, 2048, 8192, "plain") == (64, 256, False, 2, 1)
    assert chosen(8192, 8192, 2048, "activate") == (128, 128, True, 1, 1)
    assert chosen(8192, 8192, 2048, "activate, gated") == (128, 64, True, 2, 1)
    assert chosen(8192, 8192, 2048, "differentiate, gated") == (128, 128, True, 1, 1)
    assert chosen(8192, 32768, 8192, "activate") == (64, 256, False, 2, 1)  # the epilogue is a small part of it
    assert chosen(200, 8192, 2048, "plain") == (64, 128, False, 1, 1)  # 64 blocks instead of 32
    assert chosen(512, 4096, 16384, "plain") == (64, 128, False, 1, 1)  # 128 instead of 64
    assert chosen(512, 2560, 16384, "plain") == (64, 256, False, 1, 3)  # 120 as three parts, 80 of half the columns
    assert chosen(1, 8192, 2048, "activate") == (64, 64, True, 1, 1)
    assert chosen(1, 2048, 8192, "plain") == (64, 64, True, 1, 4)
    assert chosen(512, 2048, 5504, "plain", terms=2) == (64, 128, False, 1, 2)
    assert chosen(8, 8, 512, "plain") == (64, 64, True, 1, 1)  # too short to be split
    assert chosen(512, 2048, 5504, "plain") == (64, 128, False, 1, 2)
    assert chosen(384, 2048, 5504, "plain") == (64, 128, False, 1, 2)  # not of 256 in five
    assert chosen(40, 2048, 5504, "plain") == (64, 64, True, 1, 4)  # 86 steps in four, the last shorter
    assert chosen(200, 64, 64 * 10, "plain") == (64, 64, False, 1, 1)
    assert chosen(2048, 8192, 512, "plain") == (128, 128, True, 1, 1)  # storing is a sizeable part of it
    assert chosen(512, 5504, 2048, "differentiate, gated") == (64, 128, True, 1, 1)  # 2.6 rounds, not 1.3
    assert chosen(512, 8192, 2048, "differentiate, gated") == (128, 128, True, 1, 1)  # 1.9


def test_no_split_is_empty():
    for rows, steps in itertools.product((1, 64, 200, 512), range(1, 300)):
        splits = HopperMatmulTiles.of(rows, 64, steps * config.DEPTH_TILE, NEEDS["plain"]).splits
        assert (splits - 1) * -(-steps // splits) < steps
        assert splits <= max(steps // 8, 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"rows": 24}, "rows"), ({"rows": 40}, "rows"), ({"stages": 1}, "stages"), ({"splits": 0}, "splits")],
)
def test_impossible_tiles_of_few_rows_reject_themselves(fields, reason):
    with pytest.raises(ValueError, match=reason):
        HopperFewRowsTiles(**{"rows": 8, "stages": 2, **fields})


def test_few_rows_keep_all_sms_loading():
    def chosen(rows, columns, depth, name):
        tiles = HopperFewRowsTiles.of(rows, columns, depth, NEEDS[name])
        assert tiles.smem_bytes(NEEDS[name]) <= config.HOPPER_SMEM_BYTES
        return tiles.rows, tiles.stages, tiles.splits

    assert chosen(1, 16_384, 4096, "activate") == (8, 12, 1)  # 128 tiles
    assert chosen(16, 10_880, 4096, "activate, gated") == (16, 6, 1)  # 85
    assert chosen(17, 4096, 4096, "activate")[0] == 32
    assert chosen(30, 4096, 16_384, "plain") == (32, 10, 3)  # 32, so 96 parts
    assert chosen(9, 8192, 512, "plain")[2] == 1  # too short to be split
    for name, columns, steps in itertools.product(("plain", "two plain"), (8, 64, 72, 5504, 65_536), (1, 7, 64, 300)):
        *_, splits = chosen(32, columns, steps * config.DEPTH_TILE, name)
        assert (splits - 1) * -(-steps // splits) < steps


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_what_xla_finishes_is_rounded_as_a_conversion_rounds(dtype):
    x = jnp.asarray([1.001, -2e-5, 7e-8], jnp.float32)
    m = Matmul(1, x.size, 1, jnp.dtype(dtype), Activate("identity", (False,)))
    written, _ = jax.jit(lambda x: finish(m, Operands((), (), (None,)), [x[None]]))(x)
    np.testing.assert_array_equal(written[0][0], x.astype(dtype))


def test_products_that_share_a_launch_share_its_last_round():
    weights = [(2048, 5504), (2048, 5504), (5504, 2048)]
    tiles = HopperMatmulTiles.of_several(weights, 8192, NEEDS["plain"])
    assert (tiles.rows, tiles.columns, tiles.cluster) == (64, 256, 2)
    assert [tiles.rounds(each) for each in weights] == [3, 3, 3]
    assert tiles.rounds(*weights) == 8
    assert HopperMatmulTiles.of_several(weights, 512, NEEDS["plain"]).ping_pong


@pytest.mark.parametrize(("width", "launches"), [(2048, [3]), (512, [1, 1, 1])])
def test_small_products_have_their_depth_split_rather_than_share_a_launch(width, launches, monkeypatch):
    launch, seen = hopper_matmul._launch, []

    def counted(tiles, ms, operands):
        seen.append(len(ms))
        return launch(tiles, ms, operands)

    monkeypatch.setattr(hopper_matmul, "_launch", counted)
    tokens = 8192
    m = Matmul(width, width, tokens, jnp.dtype(jnp.bfloat16), Plain(), a_turned=True)
    x: Any = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    operands = Operands((x,), (x,), (None,))
    results = jax.eval_shape(lambda o: hopper_matmul.multiply_together([(m, each) for each in o]), [operands] * 3)
    assert [written.shape for (written,), _ in results] == [(width, width)] * 3
    assert seen == launches
