"""The units in which Hopper's backward sums dQ as integers, by what is seen; which of its pieces run together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.ops.attention import api, hopper_bwd_pieces, hopper_bwd_units
from fast_layers.ops.attention.config import HOPPER_SMS
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.hopper_bwd_rows import Operands, row_sums_by_xla
from fast_layers.ops.attention.tile_logits import LogitOperands, TileLogits
from fast_layers.ops.attention.tile_mask import TileMask

B, T, N, K, H = 2, 48, 4, 2, 16


def _operands(scale: float = 1.0):
    rng = np.random.default_rng(0)
    query, key, value, d_out = (
        (scale * rng.standard_normal((B, T, heads, H))).astype(jnp.bfloat16) for heads in (N, K, K, N)
    )
    return query, key, value, d_out


def _units(query, key, value, d_out, **options):
    inputs, aux, given, _ = api._prepare(query, key, value, **options)
    delta = jnp.zeros((B, N, T))
    rows = row_sums_by_xla(Operands(inputs.query, jnp.asarray(d_out), inputs.key, inputs.value))
    return hopper_bwd_units.row_units(given.problem(inputs, aux), aux.mask, rows, delta)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e12])
def test_no_partial_sum_reaches_the_last_bit(scale):
    query, key, value, d_out = _operands(scale)
    units, broken = _units(query, key, value, d_out)
    key, value, d_out = (np.asarray(x, np.float64) for x in (key, value, d_out))
    key, value = (np.repeat(x, N // K, axis=2) for x in (key, value))
    # All of the weight on the worst key.
    d_weight = np.abs(np.einsum("btnh,bsnh->bnts", d_out, value)).max(-1)
    worst = d_weight * np.abs(key).max((1, 3))[:, :, None]
    units = np.asarray(units, np.float64)
    assert np.all(np.log2(units) % 1 == 0)
    assert np.all(worst * units < 2.0**30)
    assert np.all(worst * units > 2.0**25)
    assert not np.any(broken)


def test_padding_does_not_count():
    query, key, value, d_out = _operands()
    lengths = np.array([T, 20], np.int32)
    options = {"key_value_seq_lengths": lengths}
    units, _ = _units(query, key, value, d_out, **options)
    for broken_number in (3e38, np.inf, np.nan):
        key[1, 30, 0], value[1, 25, 0, 3] = broken_number, broken_number
        same, broken = _units(query, key, value, d_out, **options)
        np.testing.assert_array_equal(same, units)
        assert broken[1, 0] or np.isfinite(broken_number)
        np.testing.assert_array_equal(np.asarray(broken)[[0, 0, 1], [0, 1, 1]], 0)


def test_none_where_the_bound_overflows():
    query, key, value, d_out = _operands()
    value[0, 5, 1] = 3e19
    units, _ = _units(query, key, value, d_out)
    overflows = np.zeros((B, N, T), bool)
    overflows[0, N // K :] = True
    np.testing.assert_array_equal(np.isnan(units), overflows)


@pytest.mark.parametrize(
    ("batch", "length", "causal", "fits"),
    [(32, 512, True, True), (2, 512, True, False), (1, 16384, True, False), (8, 2048, False, True)],
)
def test_groups_of_heads_fit_in_the_cache_where_rows_are_short_and_pieces_many_or_alike(batch, length, causal, fits):
    problems = []

    def call(x):
        inputs, aux, given, _ = api._prepare(x, x, x, is_causal=causal)
        problems.append(given.problem(inputs, aux))

    jax.eval_shape(call, jax.ShapeDtypeStruct((batch, length, 16, 128), jnp.bfloat16))
    (problem,), kv_tiles = problems, length // 128
    assert hopper_bwd_pieces.fits_first(problem, HopperBackwardTiles(64), kv_tiles) == fits
    assert hopper_bwd_pieces.fits_first(problem, HopperBackwardTiles(64, blocks=HOPPER_SMS), kv_tiles) == (not causal)
    group = hopper_bwd_pieces.piece_order(batch * 16, kv_tiles, length * 1536, fits).group
    assert (group * kv_tiles < 2 * HOPPER_SMS) == (fits or batch * 16 * kv_tiles < 2 * HOPPER_SMS)


@pytest.mark.parametrize("window", [None, (300, 0), (0, 200), (700, 100)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(700, 700), (130, 900), (900, 130)])
def test_pieces_are_dealt_out_by_the_steps_that_they_take(queries, keys, window):
    problems = []

    def call(query, key):
        options = {"is_causal": True} if window is None else {"local_window_size": window}
        inputs, aux, given, _ = api._prepare(query, key, key, q_offset=keys - queries, **options)
        problems.append(given.problem(inputs, aux))

    jax.eval_shape(call, *(jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16) for length in (queries, keys)))
    (problem,), kv_tiles = problems, -(-keys // 128)
    order = hopper_bwd_pieces.piece_order(2, kv_tiles, 1)
    mask = TileMask(problem, 128, 128, None, TileLogits(problem, LogitOperands(None, None, None)))
    for index, steps in enumerate(hopper_bwd_pieces.steps_of_each(problem, 128, order)):
        first, last = mask.query_span(0, order.locate(jnp.int32(index))[1], None)
        assert steps == last - first
