"""Few queries on Hopper: how keys are split and heads packed into rows, and the arithmetic that undoes it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers import masks as M
from fast_layers.ops.attention import packed_heads, split_kv
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES, HOPPER_SMS, num_splits, packs_heads
from fast_layers.ops.attention.hopper_few_rows_config import HopperFewRowsTiles, takes
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.ops.attention.problem import MaskFacts, Problem
from fast_layers.ops.attention.tile_mask import Span


def problem(**changes) -> Problem:
    facts = {"batch": 1, "q_len": 1, "kv_len": 16384, "heads": 32, "kv_heads": 8, "qk_dim": 128, "v_dim": 128}
    return Problem(**{**facts, **changes}, dtype=jnp.dtype(jnp.bfloat16), mask=MaskFacts(), scale=0.1)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("pieces", "key_tiles", "wanted"),
    [
        pytest.param(8, 256, 16, id="one example fills the SMs once"),
        pytest.param(128, 256, 1, id="nearly full already"),
        pytest.param(1024, 256, 1, id="many rounds"),
        pytest.param(8, 7, 1, id="too few keys"),
        pytest.param(8, 32, 8, id="at least four tiles each"),
        pytest.param(1, 2048, 128, id="one head"),
    ],
)
def test_keys_are_split_until_the_sms_are_busy(pieces, key_tiles, wanted):
    assert num_splits(pieces, key_tiles) == wanted


def test_a_bad_last_round_is_split_away():
    splits = num_splits(HOPPER_SMS + 8, 256)
    rounds = -(-(HOPPER_SMS + 8) * splits // HOPPER_SMS)
    assert rounds / splits < 1.2


@pytest.mark.parametrize("depths", [(64, 64), (128, 128), (192, 128), (256, 256), (80, 48), (200, 200)])
@pytest.mark.parametrize("batch", [1, 16, 128])
@pytest.mark.parametrize("q_len", [1, 64, 100, 300])
def test_chosen_tiles_fit_in_shared_memory(depths, batch, q_len):
    tiles = HopperForwardTiles.of(problem(batch=batch, q_len=q_len, qk_dim=depths[0], v_dim=depths[1]))
    assert tiles.smem_bytes(*depths) <= HOPPER_SMEM_BYTES
    if q_len <= 64:
        assert tiles.compute_wgs == 1


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        pytest.param({}, True, id="a step of decoding"),
        pytest.param({"kv_heads": 32}, True, id="no group"),
        pytest.param({"kv_heads": 2}, True, id="16 heads of a key head"),
        pytest.param({"kv_heads": 1}, True, id="32 heads of a key head"),
        pytest.param({"qk_dim": 192}, True, id="depths that differ"),
        pytest.param({"qk_dim": 96, "v_dim": 32}, True, id="depths that are multiples of 32"),
        pytest.param({"qk_dim": 72}, False, id="a query depth that is no multiple of 16"),
        pytest.param({"v_dim": 72}, False, id="a value depth that is no multiple of 16"),
        pytest.param({"qk_dim": 80, "v_dim": 80}, True, id="few blocks for many keys in plain rows"),
        pytest.param({"qk_dim": 112, "v_dim": 112}, False, id="few blocks for many deeper keys in plain rows"),
        pytest.param({"qk_dim": 112, "v_dim": 112, "kv_len": 4096}, True, id="fewer keys"),
        pytest.param({"qk_dim": 112, "v_dim": 112, "batch": 16}, True, id="more blocks"),
        pytest.param({"qk_dim": 48, "v_dim": 48}, True, id="keys that are not deep"),
        pytest.param({"q_len": 4}, True, id="16 rows: four queries of four heads"),
        pytest.param({"q_len": 16, "kv_heads": 32}, True, id="16 queries, no group"),
        pytest.param({"q_len": 8}, True, id="32 rows"),
        pytest.param({"q_len": 9}, False, id="36 rows"),
        pytest.param({"q_len": 4, "v_dim": 192}, True, id="16 deeper rows"),
        pytest.param({"q_len": 5, "v_dim": 192}, False, id="20 deeper rows"),
        pytest.param({"dropout_rate": 0.1}, False, id="dropout"),
        pytest.param({"bias": (1, 32, 1, 16384)}, False, id="a bias"),
    ],
)
def test_what_the_kernel_of_few_rows_takes(changes, taken):
    assert takes(problem(**changes)) is taken


CLUSTER, APART = True, True


# Heads of each problem are those of keys, its queries the rows of each. Of those measured on an H200 the fastest, or
# nearly.
@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        pytest.param({}, (128, 3, 8, CLUSTER), id="one example: half of the SMs, as large steps as fit"),
        pytest.param({"kv_len": 512}, (64, 3, 8, CLUSTER), id="few keys: a step each"),
        pytest.param({"kv_len": 256}, (64, 3, 4, CLUSTER), id="fewer keys: a smaller cluster"),
        pytest.param({"kv_len": 128}, (64, 3, 1), id="too few keys"),
        pytest.param({"batch": 2, "kv_len": 2048}, (128, 3, 4, CLUSTER), id="two examples"),
        pytest.param({"batch": 3, "kv_len": 2048}, (64, 3, 4, CLUSTER), id="three examples: two blocks on an SM"),
        pytest.param({"batch": 4, "kv_len": 8192}, (64, 3, 4), id="four examples"),
        pytest.param({"batch": 5, "kv_len": 8192}, (64, 3, 3), id="five examples"),
        pytest.param({"batch": 6, "kv_len": 2048}, (64, 3, 2, CLUSTER), id="six examples"),
        pytest.param({"batch": 8, "kv_len": 4096}, (64, 3, 2, CLUSTER), id="eight examples: pairs fill the SMs"),
        pytest.param({"batch": 9, "kv_len": 4096}, (64, 3, 3), id="more than half of the SMs: two on each"),
        pytest.param({"batch": 11, "kv_len": 1024}, (64, 3, 1), id="not for few keys"),
        pytest.param({"batch": 16, "kv_len": 2048}, (64, 3, 1), id="nearly full"),
        pytest.param({"batch": 20, "kv_len": 1024}, (64, 3, 1), id="a bad last round of few keys"),
        pytest.param({"batch": 22, "kv_len": 4096}, (64, 3, 2), id="a bad last round"),
        pytest.param({"batch": 64, "kv_len": 1024}, (64, 3, 1), id="four rounds"),
        pytest.param({"batch": 128, "kv_len": 2048}, (64, 2, 1), id="three blocks on an SM"),
        pytest.param({"batch": 128}, (128, 2, 1), id="one of more keys"),
        pytest.param({"batch": 128, "qk_dim": 64, "v_dim": 64}, (128, 3, 1), id="depth 64: two of more keys"),
        pytest.param({"batch": 128, "q_len": 16}, (64, 2, 1), id="16 columns: two blocks in any case"),
        pytest.param({"heads": 4, "kv_len": 2048}, (128, 3, 8, CLUSTER), id="four heads"),
        pytest.param({"heads": 4, "kv_len": 4096}, (64, 3, 32), id="four heads of more keys than a cluster is for"),
        pytest.param({"heads": 1, "kv_len": 65536}, (64, 3, 64), id="one head"),
        pytest.param({"q_len": 16}, (128, 3, 8, CLUSTER), id="16 columns"),
        pytest.param({"q_len": 16, "kv_len": 65536}, (128, 3, 8, CLUSTER), id="16 columns, more keys"),
        pytest.param({"q_len": 16, "batch": 2}, (128, 3, 4, CLUSTER), id="16 columns, two examples"),
        pytest.param({"q_len": 16, "batch": 4, "kv_len": 2048}, (64, 3, 4), id="16 columns, one block on an SM"),
        pytest.param({"q_len": 32, "kv_len": 512}, (64, 3, 8, CLUSTER), id="32 columns, few keys"),
        pytest.param({"q_len": 32}, (64, 3, 16), id="32 columns"),
        pytest.param({"q_len": 32, "batch": 8, "kv_len": 1024}, (64, 3, 2, CLUSTER), id="32 columns in pairs"),
        pytest.param({"q_len": 32, "batch": 16, "kv_len": 2048}, (64, 3, 1), id="32 columns, a block on an SM"),
        pytest.param({"batch": 64, "q_len": 24}, (64, 2, 1), id="24 columns of many blocks"),
        pytest.param(
            {"batch": 64, "q_len": 32, "qk_dim": 64, "v_dim": 64}, (64, 2, 1), id="depth 64, 32 columns: short steps"
        ),
        pytest.param({"qk_dim": 64, "v_dim": 64}, (128, 3, 16), id="depth 64: steps of as many bytes"),
        pytest.param({"qk_dim": 64, "v_dim": 64, "kv_len": 2048}, (128, 3, 8, CLUSTER), id="depth 64, fewer keys"),
        pytest.param({"qk_dim": 80, "v_dim": 80}, (128, 3, 8, CLUSTER, APART), id="plain rows"),
        pytest.param({"qk_dim": 96, "v_dim": 48}, (128, 3, 8, CLUSTER, APART), id="plain rows of values"),
        pytest.param({"qk_dim": 96, "v_dim": 96}, (128, 3, 8, CLUSTER), id="depth 96"),
        pytest.param({"qk_dim": 80, "v_dim": 80, "batch": 64}, (64, 3, 1, not CLUSTER, APART), id="few rounds"),
        pytest.param({"qk_dim": 80, "v_dim": 80, "batch": 256, "kv_len": 2048}, (64, 2, 1), id="many: rows together"),
        pytest.param({"qk_dim": 256, "v_dim": 256, "heads": 4}, (64, 2, 32), id="depth 256"),
        pytest.param(
            {"qk_dim": 256, "v_dim": 256, "heads": 4, "q_len": 16, "batch": 2, "kv_len": 32768},
            (64, 2, 16),
            id="depth 256, 16 columns: no room for three slots",
        ),
        pytest.param(
            {"qk_dim": 256, "v_dim": 256, "heads": 4, "batch": 4, "kv_len": 4096},
            (64, 3, 4, CLUSTER),
            id="depth 256, four examples",
        ),
    ],
)
def test_tiles_of_few_rows(changes, wanted):
    tiles = HopperFewRowsTiles.of(problem(**{"heads": 8, "q_len": 8, **changes}))
    assert tiles == HopperFewRowsTiles(tiles.columns, *wanted)


@pytest.mark.parametrize(
    "depths", [(16, 16), (64, 64), (64, 256), (80, 80), (96, 112), (192, 128), (240, 208), (256, 256)]
)
@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("batch", [1, 128])
def test_tiles_of_few_rows_fit_in_shared_memory(depths, columns, batch):
    tiles = HopperFewRowsTiles.of(problem(batch=batch, q_len=columns, qk_dim=depths[0], v_dim=depths[1]))
    assert tiles.smem_bytes(*depths) <= HOPPER_SMEM_BYTES


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"columns": 12}, "columns"),
        ({"columns": 40}, "columns"),
        ({"kv_tile": 96}, "kv_tile"),
        ({"stages": 0}, "stages"),
        ({"splits": 0}, "splits"),
        ({"in_cluster": True}, "splits"),
        ({"in_cluster": True, "splits": 16}, "splits"),
    ],
)
def test_impossible_tiles_of_few_rows(changes, named):
    with pytest.raises(ValueError, match=named):
        HopperFewRowsTiles(**{"columns": 8, **changes})


@pytest.mark.parametrize(("depth", "stages"), [(16, 8), (64, 3), (128, 3)])
@pytest.mark.parametrize("batch", [1, 16])
def test_few_rows_have_few_keys_on_their_way(depth, stages, batch):
    assert HopperForwardTiles.of(problem(batch=batch, qk_dim=depth, v_dim=depth)).stages == stages


def test_a_persistent_grid_takes_no_split_keys():
    with pytest.raises(ValueError, match=r"self\.splits=2 must be at least 1, and 1 in a persistent grid"):
        HopperForwardTiles(1, 64, blocks=132, splits=2)


@pytest.mark.parametrize(
    ("q_len", "heads", "packs"),
    [(1, 32, True), (16, 32, True), (40, 32, True), (64, 32, False), (1000, 32, False), (1, 8, False), (65, 64, True)],
)
def test_heads_are_packed_where_it_saves_tiles(q_len, heads, packs):
    assert packs_heads(problem(q_len=q_len, heads=heads)) is packs


@pytest.mark.parametrize("tiles", range(9))
@pytest.mark.parametrize("parts", [1, 2, 5, 7])
def test_parts_share_the_key_tiles_evenly(tiles, parts):
    span = Span(*(jnp.int32(x) for x in (3, 3 + tiles, 0, 9)))
    shares = [span.part(jnp.int32(i), parts) for i in range(parts)]
    edges = [int(share.first) for share in shares] + [int(shares[-1].last)]
    assert edges[1:] == [int(share.last) for share in shares]
    assert (edges[0], edges[-1]) == (3, 3 + tiles)
    sizes = np.diff(edges)
    assert sizes.max() - sizes.min() <= 1


def test_lse_of_parts():
    logits = numbers(2, 3, 4, 5, 7)
    logits[0, 1] = logits[1, :, 2] = -np.inf
    lse = split_kv.combine_lse(jax.nn.logsumexp(jnp.asarray(logits), axis=-1))
    whole = jax.nn.logsumexp(jnp.asarray(logits).swapaxes(1, 3).reshape(2, 5, 4, 21), axis=-1).swapaxes(1, 2)
    np.testing.assert_allclose(lse, whole, rtol=1e-6)


def test_joining_a_sink_is_one_more_key_of_value_zero():
    logits, value, sinks = numbers(2, 4, 3, 9), numbers(2, 9, 4, 8, seed=1), numbers(4, seed=2)
    logits[1, 2] = -np.inf
    weights = np.nan_to_num(jax.nn.softmax(logits))
    out, lse = split_kv.join_sinks(
        jnp.einsum("bnts,bsnv->btnv", weights, value),
        jax.nn.logsumexp(jnp.asarray(logits), axis=-1),
        jnp.asarray(sinks),
    )
    with_sink = np.concatenate([logits, np.broadcast_to(sinks[None, :, None, None], (2, 4, 3, 1))], -1)
    wanted = jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(with_sink)[..., :-1], value)
    wanted_lse = jax.nn.logsumexp(jnp.asarray(with_sink), axis=-1).at[1, 2].set(-jnp.inf)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5)


def test_packed_rows_stand_with_their_key_value_head():
    query = numbers(2, 3, 6, 4)
    packed = packed_heads.pack(jnp.asarray(query), kv_heads=2)
    assert packed.shape == (2, 9, 2, 4)
    for row in range(9):
        for kv_head in range(2):
            np.testing.assert_array_equal(packed[:, row, kv_head], query[:, row // 3, kv_head * 3 + row % 3])
    np.testing.assert_array_equal(packed_heads.unpack(packed, 3), query)
    np.testing.assert_array_equal(
        packed_heads.unpack_lse(packed[..., 0].swapaxes(1, 2), 3), query[..., 0].swapaxes(1, 2)
    )


@pytest.mark.parametrize(
    "mask",
    [
        M.Causal(),
        M.LocalWindow(2, 1),
        M.KeyLengths(np.array([3, 0], np.int32)),
        M.Causal() & M.Segments(np.array([0, 0, 1], np.int32), np.array([0, 1, 1, 0, 1], np.int32)),
    ],
)
def test_a_packed_mask_repeats_the_rows(mask):
    form = mask.lower((2,), 3, 5, 1)
    small = problem(batch=2, q_len=3, kv_len=5, heads=8, kv_heads=2)
    small = dataclasses.replace(small, mask=MaskFacts.of(form))
    packed = packed_heads.pack_mask(small, form)
    assert packed_heads.pack_problem(small, packed).mask.band is None
    visible = jnp.broadcast_to(form.as_array(3, 5), (2, 1, 3, 5))
    np.testing.assert_array_equal(
        jnp.broadcast_to(packed.as_array(12, 5), (2, 1, 12, 5)), jnp.repeat(visible, 4, axis=2)
    )
