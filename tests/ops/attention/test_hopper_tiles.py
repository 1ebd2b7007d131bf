"""Tile choices of the Hopper kernels: what the hardware grants, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts.smem_tile import swizzled_columns
from fast_layers.ops.attention import (
    api,
    hopper_bwd_deep,
    hopper_bwd_pieces,
    hopper_call,
    hopper_fwd_sizes,
    tuned,
)
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES, HOPPER_SMS
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles, HopperDeepBackwardTiles
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.ops.attention.kernel_operands import round_up
from fast_layers.ops.attention.masks import Band
from fast_layers.ops.attention.problem import MaskFacts, Problem
from ops.attention.hopper_problems import problem_of

REGISTERS = 1 << 16
WARPGROUP = 128
CAUSAL = {"is_causal": True}


@pytest.mark.parametrize(
    ("compute_wgs", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"blocks": 132, "takes_turns": False, "own_spans": True, "last_keys_first": True}),
        (2, {"held_columns": 64}),
        (2, {"blocks": 132, "takes_turns": False, "out_by_values": True}),
        (2, {"held_columns": 128, "blocks": 132, "takes_turns": False, "own_spans": True, "last_keys_first": True}),
        (3, {}),
        (3, {"kv_tile": 64}),
    ],
    ids=str,
)
def test_warpgroups_ask_for_no_more_registers_than_the_block_was_launched_with(compute_wgs, options):
    """A warpgroup that asks for more than is left of the launch's registers waits for ever."""
    tiles = HopperForwardTiles(**{"compute_wgs": compute_wgs, "kv_tile": 128} | options)
    threads = (compute_wgs + 1) * WARPGROUP
    launched = min(REGISTERS // threads, 255) // 8 * 8
    wanted = compute_wgs * tiles.compute_registers + tiles.load_registers
    assert wanted <= (compute_wgs + 1) * launched
    assert tiles.compute_registers % 8 == 0
    assert tiles.load_registers % 8 == 0


def test_warpgroups_of_the_deep_backward_ask_for_no_more_either():
    wanted = hopper_bwd_deep.REGISTERS.values()
    assert sum(wanted) <= len(wanted) * min(REGISTERS // (len(wanted) * WARPGROUP), 255) // 8 * 8
    assert all(count % 8 == 0 for count in wanted)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: HopperForwardTiles(4, 128), "compute_wgs"),
        (lambda: HopperForwardTiles(2, 96), "kv_tile"),
        (lambda: HopperForwardTiles(2, 128, stages=1), "stages"),
        (lambda: HopperForwardTiles(2, 128, q_slots=0), "q_slots"),
        (lambda: HopperForwardTiles(2, 128, splits=2, blocks=132), "splits"),
        (lambda: HopperForwardTiles(2, 128, own_spans=True), "own_spans"),
        (lambda: HopperForwardTiles(2, 128, splits=2, takes_turns=False, own_spans=True), "own_spans"),
        (lambda: HopperForwardTiles(2, 128, cluster=3), "cluster"),
        (lambda: HopperForwardTiles(2, 128, cluster=2, blocks=131), "cluster"),
        (lambda: HopperForwardTiles(2, 128, cluster=2, splits=2), "cluster"),
        (lambda: HopperForwardTiles(2, 128, held_columns=32), "held_columns"),
        (lambda: HopperForwardTiles(2, 128, held_columns=192), "held_columns"),
        (lambda: HopperForwardTiles(3, 128, held_columns=64), "held_columns"),
        (lambda: HopperForwardTiles(2, 128, keys_before_wait=12), "keys_before_wait"),
        (lambda: HopperForwardTiles(2, 128, keys_before_wait=16, first_maximum=False), "first_maximum"),
        (lambda: HopperForwardTiles(2, 64, keys_before_wait=128), "keys_before_wait"),
        (lambda: HopperForwardTiles(2, 64, out_by_values=True), "out_by_values"),
        (lambda: HopperForwardTiles(2, 64, q_slots=2, blocks=132, out_by_values=True), "out_by_values"),
        (lambda: HopperForwardTiles(2, 64, blocks=132, cluster=2, out_by_values=True), "out_by_values"),
        (lambda: HopperForwardTiles(3, 64, blocks=132, out_by_values=True), "out_by_values"),
        (lambda: HopperForwardTiles(2, 64, blocks=132, spare_values=True), "spare_values"),
        (lambda: HopperBackwardTiles(96), "q_tile"),
        (lambda: HopperBackwardTiles(64, stages=0), "stages"),
        (lambda: HopperBackwardTiles(64, blocks=-1), "blocks"),
        (lambda: HopperBackwardTiles(64, holds_keys=True), "holds_keys"),
        (lambda: HopperBackwardTiles(128, d_query_apart=True, holds_keys=True), "holds_keys"),
        (lambda: HopperBackwardTiles(128, whole_heads=True), "whole_heads"),
        (lambda: HopperBackwardTiles(64, blocks=132, whole_heads=True), "whole_heads"),
        (lambda: HopperBackwardTiles(128, blocks=132, d_query_apart=True, whole_heads=True), "whole_heads"),
        (lambda: HopperBackwardTiles(128, blocks=132, cluster=2), "cluster"),
        (lambda: HopperBackwardTiles(128, blocks=131, whole_heads=True, cluster=2), "cluster"),
        (lambda: HopperBackwardTiles(128, blocks=132, whole_heads=True, cluster=4), "cluster"),
        (lambda: HopperDeepBackwardTiles(0), "d_query_slots"),
        (lambda: HopperDeepBackwardTiles(columns=48), "columns"),
    ],
)
def test_impossible_tiles_reject_themselves(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


DEPTHS = [1, 7, 40, 72, 100, 136, 200, 255, *range(16, 257, 16)]


def _problems(depths):
    bands = None, Band(None, 0), Band(-300, 0)
    for (batch, length), band in itertools.product([(1, 100), (8, 256), (8, 2048)], bands):
        facts = {"batch": batch, "q_len": length, "kv_len": length, "heads": 16, "kv_heads": 16}
        yield Problem(
            **facts, qk_dim=depths[0], v_dim=depths[1], dtype=jnp.dtype(jnp.bfloat16), mask=MaskFacts(band), scale=0.1
        )


@pytest.mark.parametrize("qk_dim", DEPTHS)
def test_tiles_for_all_depths_fit_in_shared_memory(qk_dim):
    for problem in (each for v_dim in DEPTHS for each in _problems((qk_dim, v_dim))):
        backward = tuned.tiles_class("backward", qk_dim, problem.v_dim).of(problem)
        for tiles in (HopperForwardTiles.of(problem), backward.for_call(problem)):
            assert tiles.smem_bytes(qk_dim, problem.v_dim) <= HOPPER_SMEM_BYTES, (tiles, problem)


@pytest.mark.parametrize("qk_dim", DEPTHS)
def test_what_products_read_together_is_swizzled_alike(qk_dim):
    """Both operands from shared memory: K and Q, V and dO; dS and K of dQ in each backward, but where dS is left at
    other depths; weights and dO of dV in the deep one."""

    def columns(depth):
        return swizzled_columns(depth, jnp.bfloat16)

    for problem in (each for v_dim in DEPTHS for each in _problems((qk_dim, v_dim))):
        tiles = tuned.tiles_class("backward", qk_dim, problem.v_dim).of(problem).for_call(problem)
        key, value = tiles.tile_columns(qk_dim, problem.v_dim)
        assert key >= qk_dim
        assert value >= problem.v_dim
        if isinstance(tiles, HopperDeepBackwardTiles):
            assert columns(key) == columns(value) == columns(tiles.q_tile) == columns(tiles.kv_tile), (tiles, problem)
        elif tiles.d_query_apart:
            assert key == value == round_up(qk_dim, 16)
        else:
            assert columns(key if tiles.q_tile == 128 else key // 2) == columns(64), (tiles, problem)
            assert value % 16 == 0


def test_long_rows_of_unequal_deep_depths_have_one_warpgroup():
    """Else there is no room for the output beside queries, keys and values."""
    *_, problem = _problems((256, 240))
    assert HopperForwardTiles.of(problem) == HopperForwardTiles(1, 64, takes_turns=False)
    few = dataclasses.replace(problem, batch=1, q_len=300, kv_len=8192, mask=MaskFacts())
    split = HopperForwardTiles.of(few)
    assert (split.compute_wgs, split.takes_turns) == (1, False)
    assert split.splits > 1
    *_, problem = _problems((240, 240))
    assert HopperForwardTiles.of(problem).compute_wgs == 2


@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads", "depth", "options", "cluster"),
    [
        (512, 512, 32, 32, 64, {}, 1),
        (1024, 1024, 32, 32, 64, {}, 2),
        (1024, 1024, 32, 32, 64, CAUSAL, 1),
        (90, 1024, 32, 32, 64, {}, None),  # back to the same queries at once
        (90, 120, 32, 32, 64, {}, 1),
        (200, 1000, 32, 32, 64, {}, 1),
        (1000, 640, 32, 32, 64, {}, None),  # five tiles of keys
        (512, 512, 32, 16, 64, {}, 2),
        (512, 512, 32, 16, 64, CAUSAL, 1),
        (512, 512, 64, 16, 64, CAUSAL, None),  # too many sums
        (2048, 2048, 32, 32, 64, {}, None),
        (512, 512, 10, 10, 64, {}, None),  # heads for 80 of 132 SMs
        (512, 512, 18, 18, 64, {}, None),  # 144
        (512, 512, 32, 32, 128, {}, None),
        (512, 512, 32, 32, 48, {}, None),
        (512, 500, 32, 32, 64, CAUSAL, None),
        (512, 512, 32, 32, 64, {"local_window_size": (100, 0)}, None),
        (512, 512, 32, 32, 64, {"key_value_seq_lengths": np.full(8, 100)}, None),
        (512, 512, 32, 32, 64, {"bias": np.zeros((1, 1, 512, 512), np.float32)}, None),
        (512, 512, 32, 32, 64, {"softcap": 30.0}, None),  # not timed
    ],
    ids=str,
)
def test_blocks_go_through_whole_heads(q_len, kv_len, heads, kv_heads, depth, options, cluster):
    def choose(query, key):
        inputs, aux, given, _ = api._prepare(query, key, key, **options)
        chosen.append(HopperBackwardTiles.of(given.problem(inputs, aux)))

    chosen: list[HopperBackwardTiles] = []
    shapes = (8, q_len, heads, depth), (8, kv_len, kv_heads, depth)
    jax.eval_shape(choose, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    (tiles,) = chosen
    assert (tiles.cluster if tiles.whole_heads else None) == cluster
    assert tiles.smem_bytes(depth, depth) <= HOPPER_SMEM_BYTES


@pytest.mark.parametrize("cluster", [1, 2])
def test_whole_heads_of_a_table_are_for_what_takes_them_alone(cluster):
    tiles = HopperBackwardTiles(128, blocks=HOPPER_SMS, whole_heads=True, cluster=cluster)
    full, causal = (dataclasses.replace(problem_of(512, 8, c), qk_dim=64, v_dim=64) for c in (False, True))
    assert tiles.for_call(dataclasses.replace(full, q_len=1024)) == tiles
    assert tiles.for_call(causal).whole_heads == (cluster == 1)
    for other in ({"q_len": 100}, {"q_len": 2049}, {"kv_len": 16384}, {"batch": 2}):
        left = tiles.for_call(dataclasses.replace(full, **other))
        assert (left.whole_heads, left.cluster, left.blocks) == (False, 1, HOPPER_SMS), other
        assert left.sums_d_query


@pytest.mark.parametrize(("cluster", "causal"), [(1, False), (1, True), (2, False)])
def test_each_tile_of_keys_of_a_head_has_one_block_and_its_turn(cluster, causal):
    problem = dataclasses.replace(problem_of(512, 2, causal), qk_dim=64, v_dim=64)
    tiles = HopperBackwardTiles(128, blocks=6, whole_heads=True, cluster=cluster)
    order, schedule = hopper_bwd_pieces.by_head(problem, tiles)
    taken = [[tuple(map(int, order.locate(piece))) for piece in row[1 : row[0] + 1]] for row in schedule]
    assert sorted(itertools.chain(*taken)) == [(head, tile) for head in range(32) for tile in range(4)]
    for first in range(0, len(taken), cluster):
        together = [piece for turn in zip(*taken[first : first + cluster], strict=True) for piece in turn]
        heads = [head for head, _ in together]
        assert heads == sorted(heads)
        assert [tile for _, tile in together] == ([3, 2, 1, 0] if causal else [0, 1, 2, 3]) * (len(together) // 4)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "options", "cut"),
    [
        (2048, 2048, 32, {}, (4, 16, 1)),
        (4096, 2048, 32, {}, (4, 16, 2)),
        (2048, 2048, 16, {}, None),  # 68: whatever their parts, these take a round
        (2048, 2048, 28, {}, (20, 4, 4)),
        (2048, 1600, 33, {}, None),  # as many for each block
        (2000, 2048, 32, {}, (4, 16, 1)),
        (90, 2048, 32, {}, None),  # one tile of queries
        (1024, 2048, 33, {"is_causal": True}, None),
        (2048, 2048, 32, {"key_value_seq_lengths": np.full(8, 100)}, None),
    ],
    ids=str,
)
def test_pieces_that_are_left_are_cut(q_len, kv_len, heads, options, cut):
    """Each part of each of them has its turn, and blocks end together."""

    def choose(query, key):
        inputs, aux, given, _ = api._prepare(query, key, key, **options)
        chosen.append(given.problem(inputs, aux))

    chosen: list[Problem] = []
    shapes = (8, q_len, heads, 64), (8, kv_len, heads, 64)
    jax.eval_shape(choose, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    (problem,) = chosen
    tiles = HopperBackwardTiles(128, blocks=HOPPER_SMS)
    order = hopper_bwd_pieces.TileOrder(8 * heads, -(-kv_len // 128), 8)
    found = hopper_bwd_pieces.Cut.of(problem, tiles, order)
    assert (found and found[1:]) == cut
    schedule = hopper_bwd_pieces.schedule(problem, tiles, order, found)
    if found is None:
        return
    assert schedule is not None
    assert found.whole + found.pieces == order.total
    assert found.parts * found.steps * tiles.q_tile >= q_len
    taken = [row[1 : row[0] + 1] for row in schedule]
    assert sorted(itertools.chain(*taken)) == list(range(found.whole + found.pieces * found.parts))
    steps = [sum(-(-q_len // 128) if piece < found.whole else found.steps for piece in pieces) for pieces in taken]
    whole = order.total // HOPPER_SMS * -(-q_len // 128)
    assert min(steps) >= whole
    assert max(steps) <= whole + 3 * found.steps
    assert max(steps) < whole + -(-q_len // 128)


@pytest.mark.parametrize(
    ("heads", "kv_len", "depth", "blocks"),
    [
        (32, 8192, 64, HOPPER_SMS),
        (32, 16384, 64, HOPPER_SMS),  # four are left
        (16, 16384, 64, 0),  # 68
        (33, 16384, 64, 0),  # none
        (32, 16384, 32, 0),
        (16, 32768, 64, 0),
    ],
)
def test_long_rows_without_a_mask_have_persistent_blocks_where_few_pieces_are_left(heads, kv_len, depth, blocks):
    of_heads = {"heads": heads, "kv_heads": heads, "qk_dim": depth, "v_dim": depth}
    problem = dataclasses.replace(problem_of(2048, 1, False), kv_len=kv_len, **of_heads)
    assert HopperBackwardTiles.of(problem).blocks == blocks


def _backward_tiles(q_len, kv_len, depth, options) -> HopperBackwardTiles:
    def choose(query, key, value):
        inputs, aux, given, _ = api._prepare(query, key, value, **options)
        chosen.append(HopperBackwardTiles.of(given.problem(inputs, aux)))

    chosen: list[HopperBackwardTiles] = []
    lengths = q_len, kv_len, kv_len
    jax.eval_shape(choose, *(jax.ShapeDtypeStruct((8, length, 16, depth), jnp.bfloat16) for length in lengths))
    return chosen[0]


@pytest.mark.parametrize(
    ("q_len", "kv_len", "depth", "options", "apart"),
    [
        (512, 512, 128, {}, True),
        (512, 512, 64, {"is_causal": True}, False),  # whole heads
        (512, 512, 64, {"softcap": 30.0}, True),
        (1024, 1024, 64, {"softcap": 30.0}, False),
        (1024, 512, 128, {}, True),
        (1024, 512, 128, {"is_causal": True}, False),
        (2048, 2048, 128, {}, True),
        (2048, 2048, 64, {}, False),
        (128, 8192, 128, {}, False),  # too few queries for their dS
        (448, 448, 128, {}, False),
        (512, 512, 96, {}, True),
        (512, 512, 72, {"is_causal": True}, True),
        (2048, 2048, 80, {"local_window_size": (1024, 0)}, True),
        (448, 448, 80, {}, False),
        (512, 512, 48, {}, False),
        (512, 512, 80, {"segment_ids": np.zeros(512, int), "is_causal": True}, True),
        (512, 512, 128, {"local_window_size": (100, 0)}, True),
        (2048, 2048, 128, {"local_window_size": (896, 128)}, True),
        (2048, 2048, 128, {"local_window_size": (1025, 0)}, False),
        (4096, 4096, 128, {"local_window_size": (1024, 0)}, False),  # more than 1 GiB
        (512, 512, 128, {"local_window_size": (100, 0), "q_offset": 200}, False),
        (512, 512, 128, {"key_value_seq_lengths": np.full(8, 100)}, True),
        (512, 512, 64, {"key_value_seq_lengths": np.full(8, 100)}, False),
        (2048, 2048, 128, {"segment_ids": np.zeros(2048, int), "is_causal": True}, True),
        (4096, 4096, 128, {"segment_ids": np.zeros(4096, int), "is_causal": True}, True),  # in two groups
        (4096, 4096, 128, {"segment_ids": np.zeros(4096, int)}, False),  # not in groups
        (16384, 16384, 128, {"segment_ids": np.zeros(16384, int)}, False),  # two heads have too few tiles of keys
    ],
)
def test_rows_of_whole_tiles_have_a_kernel_for_d_query(q_len, kv_len, depth, options, apart):
    assert _backward_tiles(q_len, kv_len, depth, options).d_query_apart == apart


@pytest.mark.parametrize(
    ("q_len", "kv_len", "options", "holds"),
    [
        (1024, 1024, {}, False),
        (2048, 2048, {}, True),
        (1024, 4096, {}, False),
        (2048, 2048, {"is_causal": True}, False),
        (4096, 4096, {"is_causal": True}, True),
        (4096, 4096, {"softcap": 30.0}, False),
        (4096, 4096, {"local_window_size": (256, 0)}, False),
    ],
)
def test_long_rows_hold_keys_in_registers(q_len, kv_len, options, holds):
    tiles = _backward_tiles(q_len, kv_len, 128, options)
    assert tiles.d_query_apart
    assert (tiles.holds_keys, tiles.blocks) == ((True, 0) if holds else (False, HOPPER_SMS))


@pytest.mark.parametrize("depth", [72, 80, 96, 112])
@pytest.mark.parametrize(
    ("length", "options", "holds"),
    [(512, {}, True), (1024, CAUSAL, True), (1024, {"softcap": 30.0}, False), (1024, {"local_window_size": 99}, False)],
)
def test_other_depths_have_a_block_for_each_tile_of_keys(depth, length, options, holds):
    tiles = _backward_tiles(length, length, depth, options)
    assert tiles.d_query_apart
    assert (tiles.holds_keys, tiles.blocks) == (holds, 0)


def test_what_a_table_says_of_persistent_blocks_is_left_out_at_other_depths():
    (problem,) = (each for each in _problems((80, 80)) if each.q_len == 2048 and each.mask.band is None)
    tiles = HopperBackwardTiles(64, blocks=132, d_query_apart=True)
    assert tiles.for_call(problem) == HopperBackwardTiles(64, d_query_apart=True)
    assert tiles.for_call(dataclasses.replace(problem, qk_dim=128, v_dim=128)) == tiles


@pytest.mark.parametrize(
    ("depths", "kv_tile"), [((160, 128), 128), ((192, 128), 128), ((256, 128), 64), ((256, 256), 64)], ids=str
)
def test_deep_causal_tiles_of_64_keys_have_spans_of_their_own(depths, kv_tile):
    def choose(query, key, value):
        inputs, aux, given, _ = api._prepare(query, key, value, is_causal=True)
        chosen.append(HopperForwardTiles.of(given.problem(inputs, aux)))

    chosen: list[HopperForwardTiles] = []
    jax.eval_shape(choose, *(jax.ShapeDtypeStruct((8, 2048, 16, depths[i]), jnp.bfloat16) for i in (0, 0, 1)))
    (tiles,) = chosen
    assert (tiles.kv_tile, tiles.own_spans) == (kv_tile, kv_tile == 64)
    assert tiles.smem_bytes(*depths) <= HOPPER_SMEM_BYTES


@pytest.mark.parametrize(
    ("q_len", "kv_len", "depths", "options", "held"),
    [
        (1024, 1024, (256, 256), {}, 0),  # out leaves by the slots of values
        (2048, 2048, (256, 256), CAUSAL, 0),
        (2048, 2048, (256, 256), {"softcap": 30.0}, 0),
        (2048, 2048, (240, 240), {}, 0),
        (2048, 2048, (128, 128), {}, 0),
        (2048, 2048, (192, 128), {}, 0),
        (2048, 2048, (192, 128), CAUSAL, 0),
        (2048, 2048, (256, 128), {}, 128),
        (1024, 1024, (256, 128), {}, 128),
        (2048, 2000, (256, 128), {}, 0),  # keys are hidden in the last tile
        (2000, 2048, (256, 128), {}, 128),
        (512, 1024, (256, 128), {}, 128),
        (1023, 1023, (256, 128), {}, 0),
        (
            1024,
            1024,
            (256, 128),
            CAUSAL,
            0,
        ),  # each step asks whether scores are hidden
        (2048, 2048, (256, 128), CAUSAL | {"q_offset": 100}, 0),
        (2048, 2048, (256, 128), CAUSAL | {"q_offset": 128}, 128),
        (2048, 2048, (256, 128), CAUSAL | {"local_window_size": (512, 0)}, 0),
        (2048, 2048, (256, 128), CAUSAL | {"segment_ids": np.zeros((8, 2048), np.int32)}, 0),
        (2048, 2048, (256, 128), CAUSAL | {"softcap": 30.0}, 0),
        (2048, 2048, (256, 128), CAUSAL, 128),
        (2048, 2048, (192, 192), {}, 0),
        (2048, 2048, (192, 192), CAUSAL, 0),
    ],
    ids=str,
)
def test_long_rows_deeper_than_128_hold_queries_in_registers(q_len, kv_len, depths, options, held):
    chosen = _forward_tiles(q_len, kv_len, depths, jnp.bfloat16, options)
    assert [tiles.held_columns for tiles in chosen] == [held, held]


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=str)
def test_float16_rows_of_two_depths_hold_queries_in_registers(options):
    chosen = _forward_tiles(2048, 2048, (192, 128), jnp.float16, options)
    assert [tiles.held_columns for tiles in chosen] == [128, 128]


def _forward_tiles(q_len, kv_len, depths, dtype, options, batch=8):
    """By the table, and by the rule."""

    def choose(query, key, value):
        inputs, aux, given, _ = api._prepare(query, key, value, **options)
        problem = given.problem(inputs, aux)
        chosen.append(HopperForwardTiles.of(problem, tuned.find(problem, "forward")))
        chosen.append(HopperForwardTiles.of(problem))

    chosen: list[HopperForwardTiles] = []
    shapes = (q_len, depths[0]), (kv_len, depths[0]), (kv_len, depths[1])
    jax.eval_shape(choose, *(jax.ShapeDtypeStruct((batch, length, 16, depth), dtype) for length, depth in shapes))
    return chosen


IDS = np.repeat(np.arange(8), 256)[None].repeat(8, 0).astype(np.int32)


@pytest.mark.parametrize(
    ("length", "depths", "dtype", "options", "by_values"),
    [
        (512, (256, 256), jnp.bfloat16, {}, True),
        (2047, (256, 256), jnp.bfloat16, {}, True),
        (2048, (192, 192), jnp.bfloat16, {}, True),
        (2048, (250, 250), jnp.bfloat16, {}, True),
        (2048, (256, 256), jnp.float16, {}, False),  # whose steps find maxima
        (2048, (256, 256), jnp.bfloat16, {"softcap": 30.0}, False),
        (2048, (256, 128), jnp.bfloat16, {}, False),
        (2048, (192, 128), jnp.bfloat16, {}, True),
        (2048, (192, 128), jnp.bfloat16, CAUSAL, True),
        (2048, (192, 128), jnp.bfloat16, CAUSAL | {"segment_ids": IDS}, True),
        (2048, (192, 128), jnp.bfloat16, CAUSAL | {"local_window_size": (512, 0)}, False),
        (2048, (192, 128), jnp.float16, {}, False),
        (2048, (128, 128), jnp.bfloat16, {}, False),
        (512, (256, 256), jnp.bfloat16, CAUSAL, True),
        (1024, (256, 256), jnp.bfloat16, CAUSAL, True),
        (2048, (256, 256), jnp.bfloat16, CAUSAL | {"q_offset": 100}, True),
        (2048, (192, 192), jnp.bfloat16, CAUSAL, True),
        (2048, (256, 256), jnp.bfloat16, CAUSAL | {"local_window_size": (512, 0)}, False),
        (2048, (256, 256), jnp.bfloat16, {"key_value_seq_lengths": np.full(8, 2000, np.int32)}, False),
        (2048, (256, 256), jnp.bfloat16, {"segment_ids": IDS}, True),
        (2048, (256, 256), jnp.bfloat16, CAUSAL | {"segment_ids": IDS}, True),
        (2048, (192, 192), jnp.bfloat16, {"segment_ids": IDS}, True),
        (2048, (256, 256), jnp.bfloat16, {"bias": np.zeros((1, 1, 2048, 2048), np.float32)}, False),
    ],
    ids=str,
)
def test_out_leaves_by_the_slots_of_values_where_that_is_faster(length, depths, dtype, options, by_values):
    chosen = _forward_tiles(length, length, depths, dtype, options)
    assert [tiles.out_by_values for tiles in chosen] == [by_values, by_values]


@pytest.mark.parametrize(
    ("depths", "options", "in_one_slot", "keys_before_wait"),
    [
        ((192, 128), {}, True, 0),
        ((192, 128), CAUSAL, True, 32),
        ((160, 160), CAUSAL, True, 32),
        ((160, 160), {}, True, 0),
        ((176, 176), {}, False, 0),
        ((192, 128), CAUSAL | {"segment_ids": IDS}, True, 32),
        ((192, 128), {"segment_ids": IDS}, True, 0),
        ((192, 192), {}, False, 0),
    ],
    ids=str,
)
def test_out_leaves_by_one_slot_of_values_where_128_keys_fit(depths, options, in_one_slot, keys_before_wait):
    chosen = _forward_tiles(2048, 2048, depths, jnp.bfloat16, options)
    found = [(t.out_by_values, t.out_in_one_slot, t.last_keys_first, t.keys_before_wait) for t in chosen]
    last_keys_first = in_one_slot and options == CAUSAL
    assert found == [(True, in_one_slot, last_keys_first, keys_before_wait)] * 2


@pytest.mark.parametrize(
    ("causal", "kv_heads", "dropout_rate", "by_values"),
    [(False, 4, 0.0, True), (True, 16, 0.0, True), (True, 4, 0.0, False), (False, 16, 0.1, False)],
)
def test_causal_grouped_heads_and_dropout_have_64_keys(causal, kv_heads, dropout_rate, by_values):
    """Of depths 192 and 128."""
    problem = problem_of(2048, 8, causal, kv_heads)
    tiles = HopperForwardTiles.of(dataclasses.replace(problem, qk_dim=192, v_dim=128, dropout_rate=dropout_rate))
    assert (tiles.out_by_values, tiles.kv_tile) == (by_values, 128 if by_values else 64)


@pytest.mark.parametrize(
    ("length", "depth", "options", "spare"),
    [
        (512, 256, {}, True),
        (2048, 192, {}, True),
        (4096, 192, {}, False),
        (2048, 256, CAUSAL, True),
        (4096, 256, CAUSAL, False),
        (2048, 256, {"segment_ids": IDS}, False),
        (2048, 192, CAUSAL | {"segment_ids": IDS}, True),
        (2048, 192, CAUSAL | {"local_window_size": (512, 0)}, False),
    ],
    ids=str,
)
def test_values_have_a_slot_to_spare_where_that_is_faster(length, depth, options, spare):
    chosen = _forward_tiles(length, length, (depth, depth), jnp.bfloat16, options)
    assert [(tiles.spare_values, tiles.value_stages) for tiles in chosen] == [(spare, 2 + spare)] * 2


WINDOW = CAUSAL | {"local_window_size": (512, 0)}
DOCUMENTS = {"segment_ids": np.zeros(4096, np.int32)}


@pytest.mark.parametrize(
    ("batch", "depths", "dtype", "options", "three"),
    [
        *((8, (depth, depth), jnp.bfloat16, CAUSAL, True) for depth in (72, 80, 96, 112, 128)),
        *((8, (depth, depth), jnp.bfloat16, WINDOW | DOCUMENTS, True) for depth in (32, 64, 80, 128)),
        (8, (128, 128), jnp.bfloat16, CAUSAL | {"softcap": 30.0}, True),
        (8, (128, 128), jnp.bfloat16, CAUSAL | {"q_offset": 1}, True),
        (8, (128, 64), jnp.bfloat16, CAUSAL, True),
        (8, (112, 128), jnp.bfloat16, CAUSAL, False),  # out would have no room
        (8, (128, 128), jnp.float16, CAUSAL, False),
        (8, (96, 96), jnp.float16, CAUSAL, True),
        (8, (128, 128), jnp.bfloat16, {}, False),
        (8, (96, 96), jnp.bfloat16, {}, True),
        (8, (64, 64), jnp.bfloat16, WINDOW, True),
        (8, (64, 64), jnp.bfloat16, CAUSAL | {"local_window_size": (2048, 0)}, False),
        (8, (64, 64), jnp.bfloat16, CAUSAL, False),
        (8, (64, 64), jnp.float16, DOCUMENTS, False),
        (8, (128, 128), jnp.bfloat16, CAUSAL | {"bias": np.zeros((1, 1), np.float32)}, False),
        (2, (128, 128), jnp.bfloat16, CAUSAL, False),  # few rounds of the blocks
        (2, (96, 96), jnp.bfloat16, CAUSAL, True),
        (2, (128, 128), jnp.bfloat16, WINDOW, True),
        (2, (128, 128), jnp.bfloat16, DOCUMENTS, False),
        (1, (128, 128), jnp.bfloat16, WINDOW, True),
    ],
    ids=str,
)
def test_three_warpgroups_share_tiles_of_64_keys(batch, depths, dtype, options, three):
    for tiles in _forward_tiles(4096, 4096, depths, dtype, options, batch):
        assert tiles.takes_64_keys is three
        if three:
            assert tiles.own_spans is bool(options)
        assert tiles.smem_bytes(*depths) <= HOPPER_SMEM_BYTES


def test_long_rows_are_shared_in_fewer_rounds():
    for length, batch in ((8192, 1), (2048, 4)):
        for tiles in _forward_tiles(length, length, (128, 128), jnp.bfloat16, CAUSAL, batch):
            assert tiles.takes_64_keys is (length == 8192)


@pytest.mark.parametrize(
    ("length", "dtype", "options", "first_maximum"),
    [
        (2048, jnp.bfloat16, {}, True),
        (2048, jnp.bfloat16, CAUSAL, True),
        (2048, jnp.bfloat16, {"segment_ids": np.zeros((8, 2048), np.int32)}, True),
        (2048, jnp.bfloat16, {"softcap": 30.0, "local_window_size": (512, 0)}, True),
        (2048, jnp.float16, {}, False),  # its weights may not exceed 65,504
        (2048, jnp.bfloat16, {"bias": np.zeros((1, 1, 2048, 2048), np.float32)}, False),
        (2048, jnp.bfloat16, {"mask": np.ones((1, 1, 2048, 2048), bool)}, False),
        (64, jnp.bfloat16, {}, False),
    ],
    ids=str,
)
def test_weights_are_relative_to_a_first_maximum(length, dtype, options, first_maximum):
    def choose(query, key, value):
        inputs, aux, given, _ = api._prepare(query, key, value, **options)
        problem = given.problem(inputs, aux)
        tiles = HopperForwardTiles.of(problem, tuned.find(problem, "forward")).for_mask(problem)
        chosen.append((tiles.first_maximum, bool(tiles.keys_before_wait) and not tiles.first_maximum))

    chosen: list[tuple[bool, bool]] = []
    jax.eval_shape(choose, *3 * [jax.ShapeDtypeStruct((8, length, 16, 128), dtype)])
    assert chosen == [(first_maximum, False)]


MEASURED = {
    "causal": (2048, 2048, 64, jnp.bfloat16, CAUSAL, True),
    "causal, float16": (4096, 4096, 64, jnp.float16, CAUSAL, True),
    "causal, more queries": (2176, 2048, 64, jnp.bfloat16, CAUSAL, True),
    "full": (2048, 2048, 64, jnp.bfloat16, {}, True),
    "full, float16": (2048, 2048, 64, jnp.float16, {}, False),
    "full, longer": (4096, 4096, 64, jnp.bfloat16, {}, False),
    "short, whole heads": (1024, 1024, 64, jnp.bfloat16, CAUSAL, False),
    "depth 128": (2048, 2048, 128, jnp.bfloat16, CAUSAL, False),
    "keys that nobody sees": (2048, 2304, 64, jnp.bfloat16, CAUSAL, False),
    "a part of a tile": (2048, 2000, 64, jnp.bfloat16, {}, False),
    "window": (2048, 2048, 64, jnp.bfloat16, CAUSAL | {"local_window_size": (512, 0)}, False),
    "documents": (2048, 2048, 64, jnp.bfloat16, CAUSAL | {"segment_ids": np.zeros((8, 2048), np.int32)}, False),
    "lengths": (2048, 2048, 64, jnp.bfloat16, {"key_value_seq_lengths": np.full(8, 2000, np.int32)}, False),
    "bias": (2048, 2048, 64, jnp.bfloat16, {"bias": np.zeros((1, 1, 2048, 2048), np.float32)}, False),
    "few queries": (8, 16384, 64, jnp.bfloat16, {}, False),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_forward_finds_sizes_where_all_keys_are_seen_and_the_backward_wants_them(name):
    q_len, kv_len, depth, dtype, options, wanted = MEASURED[name]
    found = []

    def call(query, key, value):
        inputs, aux, given, _ = api._prepare(query, key, value, **options)
        problem = given.problem(inputs, aux)
        if not hopper_call.saves(problem):
            return hopper_call.forward(problem, inputs, aux)
        results, sizes = hopper_call.forward_saving(problem, inputs, aux)
        found.append(sizes.shape)
        return results

    query, key = (jax.ShapeDtypeStruct((8, length, 16, depth), dtype) for length in (q_len, kv_len))
    jax.eval_shape(call, query, key, key)
    assert found == [(8, 16, kv_len // 128, 2, 128)] * wanted


@pytest.mark.parametrize("by_values", [False, True])
def test_a_load_warpgroup_that_sends_out_finds_no_sizes(by_values):
    """As a table of a user's may have it at depth 64."""
    orders = {"takes_turns": False, "own_spans": True, "last_keys_first": True, "out_by_values": by_values}
    tiles = HopperForwardTiles(3, 128, stages=3, blocks=HOPPER_SMS, **orders)
    facts = {"batch": 8, "q_len": 2048, "kv_len": 2048, "heads": 16, "kv_heads": 16, "qk_dim": 64, "v_dim": 64}
    problem = Problem(**facts, dtype=jnp.dtype(jnp.bfloat16), mask=MaskFacts(Band(None, 0)), scale=0.1)
    assert hopper_fwd_sizes.takes(problem, tiles) != by_values
