"""Tiles to visit: never too few, exact for monotone intervals, empty ones skipped, both directions in agreement."""

from __future__ import annotations

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fast_layers.kernel_parts.kv_range import KvRange


def _visible(start, stop, kv_len):
    keys = np.arange(kv_len)
    return (keys >= start[..., None]) & (keys < stop[..., None])


def _tiles_with_a_visible_key(visible, q_tile, kv_tile):
    """[B, I, J] from [B, T, S]."""
    batch, rows, keys = visible.shape
    padded = np.zeros((batch, rows, -(-keys // kv_tile) * kv_tile), bool)
    padded[..., :keys] = visible
    return padded.reshape(batch, rows // q_tile, q_tile, -1, kv_tile).any((2, 4))


def _visited(first, last, count):
    """[..., count] booleans from half-open ranges."""
    first, last = np.asarray(first)[..., None], np.asarray(last)[..., None]
    assert (first <= last).all(), "a range ends before it starts"
    assert ((first >= 0) & (last <= count)).all(), "a range leaves the array"
    return (np.arange(count) >= first) & (np.arange(count) < last)


def _both_directions(start, stop, q_tile, kv_tile, kv_len):
    """Which tiles the loops over keys visit, and which those over queries: [B, I, J] each."""
    hull = KvRange.of(jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32), q_tile)
    num_q, num_kv = start.shape[1] // q_tile, -(-kv_len // kv_tile)
    by_query = _visited(*hull.key_tiles(kv_tile), num_kv)
    by_key = _visited(*hull.transpose(kv_tile, num_kv), num_q)
    return by_query, by_key.swapaxes(1, 2)


@st.composite
def intervals(draw, monotone: bool):
    q_tile, kv_tile = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3, 4]))
    rows, kv_len = q_tile * draw(st.integers(1, 5)), draw(st.integers(1, 20))
    bounds = st.lists(st.integers(0, kv_len), min_size=rows, max_size=rows)
    batch = draw(st.integers(1, 2))
    pair = [np.array([draw(bounds) for _ in range(batch)]) for _ in range(2)]
    if monotone:
        pair = [np.sort(bound, axis=1) for bound in pair]
    return *pair, q_tile, kv_tile, kv_len


@hypothesis.settings(max_examples=40)
@hypothesis.given(intervals(monotone=False))
def test_a_skipped_tile_never_holds_a_visible_key(drawn):
    start, stop, q_tile, kv_tile, kv_len = drawn
    needed = _tiles_with_a_visible_key(_visible(start, stop, kv_len), q_tile, kv_tile)
    by_query, by_key = _both_directions(*drawn)
    assert not (needed & ~by_query).any()
    assert not (needed & ~by_key).any()


@hypothesis.settings(max_examples=40)
@hypothesis.given(intervals(monotone=False))
def test_key_ranges_are_the_hull_of_the_rows(drawn):
    """Exact also for intervals in any order: from the first to the last tile that some row needs."""
    start, stop, q_tile, kv_tile, kv_len = drawn
    needed = _tiles_with_a_visible_key(_visible(start, stop, kv_len), q_tile, kv_tile)
    by_query, _ = _both_directions(*drawn)
    before = np.logical_or.accumulate(needed, axis=2)
    after = np.logical_or.accumulate(needed[..., ::-1], axis=2)[..., ::-1]
    np.testing.assert_array_equal(by_query, before & after)


@hypothesis.settings(max_examples=40)
@hypothesis.given(intervals(monotone=True))
def test_monotone_intervals_visit_the_same_tiles_both_ways(drawn):
    """Query ranges: the hull of the query tiles whose hull of keys meets the key tile."""
    by_query, by_key = _both_directions(*drawn)
    before = np.logical_or.accumulate(by_query, axis=1)
    after = np.logical_or.accumulate(by_query[:, ::-1], axis=1)[:, ::-1]
    # Rows that see nothing in between are inside the hull of the others.
    np.testing.assert_array_equal(by_key, before & after)


def test_rows_that_see_nothing_visit_nothing():
    start, stop = np.full((1, 8), 5), np.full((1, 8), 5)
    for visited in _both_directions(start, stop, 2, 4, 16):
        assert not visited.any()


def test_padding_rows_do_not_widen_a_tile():
    """Half a tile of padding rows (stop 0) next to rows that see the last keys only."""
    start, stop = np.array([[12, 12, 0, 0]]), np.array([[16, 16, 0, 0]])
    by_query, by_key = _both_directions(start, stop, 4, 4, 16)
    np.testing.assert_array_equal(by_query, [[[False, False, False, True]]])
    np.testing.assert_array_equal(by_key, by_query)


@pytest.mark.parametrize("tiles", [8, 32])
def test_causal_visits_half_and_a_window_a_band(tiles):
    tile, rows = 4, np.arange(4 * tiles)[None]
    for visited in _both_directions(np.zeros_like(rows), rows + 1, tile, tile, 4 * tiles):
        assert visited.sum() == tiles * (tiles + 1) // 2
    windowed = _both_directions(np.maximum(rows - 5, 0), rows + 1, tile, tile, 4 * tiles)
    for visited in windowed:
        # 5 keys back from the first row of a tile reach two tiles back.
        assert visited.sum() == 3 * tiles - 3


def test_packed_documents_visit_their_own_tiles():
    """Four documents of two tiles: a quarter of the square."""
    ids = np.repeat(np.arange(4), 8)
    start, stop = (ids * 8)[None], ((ids + 1) * 8)[None]
    for visited in _both_directions(start, stop, 4, 4, 32):
        np.testing.assert_array_equal(visited[0], np.kron(np.eye(4), np.ones((2, 2))))


def test_over_batch_is_the_hull_of_the_examples():
    hull = KvRange(jnp.array([[4, 9], [2, np.iinfo(np.int32).max]]), jnp.array([[8, 12], [6, 0]])).over_batch()
    np.testing.assert_array_equal(hull.first_key, [[2, 9]])
    np.testing.assert_array_equal(hull.last_key, [[8, 12]])
