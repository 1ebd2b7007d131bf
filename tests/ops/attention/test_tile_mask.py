"""The kernels' tiles against masks written out: none too few, and none called plain that hides a score."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fast_layers.kernel_parts.kv_range import KvRange
from fast_layers.ops.attention import api, forward_parts, packed_heads
from fast_layers.ops.attention import masks as M
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.ops.attention.kernel_operands import RowMask
from fast_layers.ops.attention.tile_mask import TileMask

BATCH = 2
Q_TILE, KV_TILE = 4, 8


class _Ref:
    """An array that is indexed as a ref in the GPU's memory is."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    @property
    def at(self) -> _Ref:
        return self

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]


def _call(q_len: int, kv_len: int, **options: Any):
    """(problem, mask form, visible [B, T, S])."""
    q, kv = (np.zeros((BATCH, length, 1, 1), np.float32) for length in (q_len, kv_len))
    inputs, aux, given, _ = api._prepare(q, kv, kv, **options)
    visible = np.broadcast_to(aux.mask.as_array(q_len, kv_len)[:, 0], (BATCH, q_len, kv_len))
    return given.problem(inputs, aux), aux.mask, visible


LENGTHS = st.sampled_from([(5, 13), (12, 16), (16, 12), (1, 9)])


@st.composite
def bands(draw):
    sides = st.one_of(st.none(), st.integers(0, 18))
    options = {"is_causal": draw(st.booleans()), "q_offset": draw(st.integers(-9, 9))}
    if draw(st.booleans()):
        options["local_window_size"] = (draw(sides), draw(sides))
    return _call(*draw(LENGTHS), **options)


@st.composite
def arrays(draw, segments: bool | None = None):
    """Masks that are no static band."""
    q_len, kv_len = draw(LENGTHS)
    options: dict[str, Any] = {"is_causal": draw(st.booleans()), "q_offset": draw(st.integers(-4, 4))}

    def integers(low, high, length):
        return np.array(draw(st.lists(st.integers(low, high), min_size=length, max_size=length)), np.int32)

    segments = draw(st.booleans()) if segments is None else segments
    if segments:
        ids = [integers(-1, 2, q_len), integers(-1, 2, kv_len)]
        options["segment_ids"] = tuple(np.sort(x) if draw(st.booleans()) else x for x in ids)
    if not segments or draw(st.booleans()):
        options["key_value_seq_lengths"] = integers(0, kv_len, BATCH)
    if draw(st.booleans()):
        options["query_seq_lengths"] = integers(0, q_len, BATCH)
    if draw(st.booleans()):
        options["local_window_size"] = (draw(st.integers(0, 9)), None)
    return _call(q_len, kv_len, **options)


def _tiles(visible):
    """Tile (i, j) of one example's [T, S], with real rows and keys only."""
    q_len, kv_len = visible.shape
    for i in range(-(-q_len // Q_TILE)):
        for j in range(-(-kv_len // KV_TILE)):
            yield i, j, visible[i * Q_TILE : (i + 1) * Q_TILE, j * KV_TILE : (j + 1) * KV_TILE]


def _query_span(problem, mask: RowMask):
    """As the backward makes it: [B, J, 2]."""
    of_keys = KvRange.of(mask.start, mask.stop, Q_TILE).transpose(KV_TILE, -(-problem.kv_len // KV_TILE))
    return jnp.stack(of_keys, -1)


def _check_spans(problem, form, visible):
    arrays = RowMask.of(problem, form, Q_TILE, KV_TILE)
    refs = None if arrays is None else RowMask(*(None if x is None else _Ref(x) for x in arrays))
    spans = None if arrays is None else _Ref(_query_span(problem, arrays))
    mask = TileMask(problem, Q_TILE, KV_TILE, refs)
    q_tiles, kv_tiles = -(-problem.q_len // Q_TILE), -(-problem.kv_len // KV_TILE)
    if not mask.hides:
        assert visible.all()
        assert problem.kv_len % KV_TILE == 0
    if not mask.hides_real_keys:
        assert visible.all()
    for example in range(BATCH):
        by_query = [mask.key_span(example, jnp.int32(i)) for i in range(q_tiles)]
        by_key = [tuple(map(int, mask.query_span(example, jnp.int32(j), spans))) for j in range(kv_tiles)]
        for first, last, *_ in by_query:
            assert 0 <= first < last <= kv_tiles
        for first, last in by_key:
            assert 0 <= first <= last <= q_tiles
        for i, j, tile in _tiles(visible[example]):
            span = by_query[i]
            if tile.any():
                assert span.first <= j < span.last
                assert by_key[j][0] <= i < by_key[j][1]
            whole = tile.all() and tile.shape[1] == KV_TILE
            if span.first <= j < span.last and not span.ragged(j):
                assert whole
            # Both halves of the tile, as the two warpgroups of the backward ask.
            for k in range(0, KV_TILE, KV_TILE // 2):
                half = tile[:, k : k + KV_TILE // 2]
                half_of_keys = jnp.int32(j * KV_TILE + k), KV_TILE // 2
                ragged = bool(mask.ragged_for_keys(example, jnp.int32(i), *half_of_keys))
                if not ragged:
                    assert half.all()
                    assert half.shape[1] == KV_TILE // 2
                if mask.is_band and by_key[j][0] <= i < by_key[j][1]:
                    full = mask.full_queries(*half_of_keys)
                    assert (full[0] <= i < full[1]) != ragged


@hypothesis.settings(max_examples=60)
@hypothesis.given(bands())
def test_static_bands(call):
    assert RowMask.of(*call[:2], Q_TILE, KV_TILE) is None
    _check_spans(*call)


@hypothesis.given(arrays())
def test_masks_of_arrays(call):
    _check_spans(*call)


def test_plain_tiles_are_not_called_ragged():
    """Where it matters for speed: below the diagonal, inside a document, before a length."""
    for options, plain in (
        ({"is_causal": True}, {(2, 0), (3, 0)}),
        ({"segment_ids": np.repeat([0, 1], [8, 8])}, {(0, 0), (1, 0), (2, 1), (3, 1)}),
        ({"segment_ids": np.repeat([0, 1], [8, 8]), "is_causal": True}, set()),
        ({"key_value_seq_lengths": np.array([8, 8])}, {(i, 0) for i in range(4)}),
    ):
        problem, form, _ = _call(16, 16, **options)
        arrays = RowMask.of(problem, form, Q_TILE, KV_TILE)
        refs = None if arrays is None else RowMask(*(None if x is None else _Ref(x) for x in arrays))
        mask = TileMask(problem, Q_TILE, KV_TILE, refs)
        spans = [mask.key_span(0, jnp.int32(i)) for i in range(4)]
        found = {(i, j) for i, s in enumerate(spans) for j in range(int(s.first), int(s.last)) if not s.ragged(j)}
        assert found == plain, options


@hypothesis.given(arrays())
def test_row_mask_says_what_the_mask_says(call):
    problem, form, visible = call
    mask = RowMask.of(problem, form, Q_TILE, KV_TILE)
    assert mask is not None
    rows, keys = -(-problem.q_len // Q_TILE) * Q_TILE, -(-problem.kv_len // KV_TILE) * KV_TILE
    start, stop, tiles = (np.broadcast_to(x, (BATCH, *x.shape[1:])) for x in mask[:3])
    assert start.shape == stop.shape == (BATCH, rows)
    assert tiles.shape == (BATCH, rows // Q_TILE, 5)
    key = np.arange(keys)
    within = seen = (key >= start[..., None]) & (key < stop[..., None])
    if mask.query_segments is not None:
        query_ids, key_ids = (np.broadcast_to(x, (BATCH, x.shape[1])) for x in mask[3:])
        assert query_ids.shape == (BATCH, rows)
        assert key_ids.shape == (BATCH, keys)
        seen &= query_ids[:, :, None] == key_ids[:, None]
    # A pair of negative ids would meet here: no interval may reach it.
    np.testing.assert_array_equal(seen[:, : problem.q_len, : problem.kv_len], visible)
    assert not seen[:, problem.q_len :].any()
    assert not seen[:, :, problem.kv_len :].any()
    by_tile = (within == seen).reshape(BATCH, -1, Q_TILE * keys).all(-1)
    assert by_tile[tiles[..., 4] == 1].all()


def test_documents_in_one_piece_are_intervals():
    """So that the kernel compares no ids."""
    for ids, wanted in (
        (np.repeat([3, -1, 7, 0], [5, 2, 8, 1]), [1, 1, 1, 1]),
        (np.array([0, 0, 0, 0, 1, 2, 1, 2, 3, 3, 3, 3, 4, 5, 5, 4]), [1, 0, 1, 0]),
    ):
        for causal in (True, False):
            mask = RowMask.of(*_call(16, 16, segment_ids=ids, is_causal=causal)[:2], Q_TILE, KV_TILE)
            assert mask is not None
            np.testing.assert_array_equal(mask.tiles[..., 4], [wanted])


@st.composite
def numbers(draw):
    """Masks of a number or two of each example, or of all."""

    def of_examples(low, high):
        one = st.integers(low, high)
        return jnp.array(draw(st.one_of(one, st.lists(one, min_size=BATCH, max_size=BATCH))), jnp.int32)

    lengths = draw(st.booleans())
    options: dict[str, Any] = {"key_value_seq_lengths": of_examples(-1, 18)} if lengths else {}
    if not lengths or draw(st.booleans()):
        options |= {"is_causal": draw(st.booleans()), "q_offset": of_examples(-9, 18)}
        if not options["is_causal"] or draw(st.booleans()):
            options["local_window_size"] = draw(st.sampled_from([(2, 1), (None, 3), (0, None), (7, 9)]))
    return _call(*draw(LENGTHS), **options)


@hypothesis.given(numbers(), st.sampled_from([1, 2, 3]))
def test_numbers_of_each_example_say_what_the_mask_says(call, group):
    """Of each row, and of tiles of rows, `group` heads of each query."""
    problem, form, visible = call
    problem = dataclasses.replace(problem, heads=group)
    packed = packed_heads.pack_mask(problem, form)
    numbers, problem = packed.intervals_by_example, packed_heads.pack_problem(problem, packed)
    assert numbers is not None
    refs = jax.tree.map(_Ref, numbers)
    mask = TileMask(problem, Q_TILE, KV_TILE, refs)
    key, visible = np.arange(problem.kv_len), np.repeat(visible, group, axis=1)
    for example in range(BATCH):
        for i in range(-(-problem.q_len // Q_TILE)):
            rows = visible[example, i * Q_TILE : (i + 1) * Q_TILE]
            intervals = [mask._interval(example, jnp.int32(i * Q_TILE + r)) for r in range(len(rows))]
            np.testing.assert_array_equal([(key >= first) & (key < last) for first, last in intervals], rows)
            span = mask.key_span(example, jnp.int32(i))
            for j in range(-(-problem.kv_len // KV_TILE)):
                tile = rows[:, j * KV_TILE : (j + 1) * KV_TILE]
                visited = span.first <= j < span.last
                assert visited or not tile.any()
                assert not visited or span.ragged(j) or (tile.shape[1] == KV_TILE and tile.all())


def test_masks_that_take_arrays_of_rows():
    one, other = jnp.array([2, 3]), jnp.array([1, 4])
    moved = M.Offset(M.Causal(), one)
    for mask in (
        M.Prefix(one),
        M.QueryLengths(one),
        M.Segments(np.zeros(5, np.int32), np.zeros(13, np.int32)) & moved,
        moved & M.Offset(M.Causal(), other),
        moved & M.Causal(),
        moved & M.QueryLengths(other),
    ):
        problem, form, _ = _call(5, 13, mask=mask)
        assert form.intervals_by_example is None
        assert packed_heads.pack_mask(problem, form).by_example is None


@pytest.mark.parametrize("numbers", [jnp.int32(5), jnp.array([5, 9], jnp.int32)])
def test_few_rows_get_the_very_numbers(numbers):
    """XLA makes nothing of them, which would take a kernel; more rows than one tile have intervals of their own."""
    tiles = HopperForwardTiles(1, 64)
    for make in (M.KeyLengths, functools.partial(M.Offset, M.Causal() & M.LocalWindow(4))):

        def operand(numbers, q_len=5, make=make):
            q, kv = (np.zeros((BATCH, length, 1, 1), np.float32) for length in (q_len, 70))
            inputs, aux, given, _ = api._prepare(q, kv, kv, mask=make(numbers))
            return forward_parts.mask_operand(given.problem(inputs, aux), aux.mask, tiles)

        assert isinstance(operand(numbers, q_len=65), RowMask)
        assert isinstance(operand(numbers), M.ExampleBand)
        compiled = jax.jit(lambda numbers: jax.tree.leaves(operand(numbers))).lower(numbers).compile().as_text()
        made = re.findall(r"^  (?:ROOT )?%\S+ = \S+ ([\w-]+)\(", compiled, re.MULTILINE)
        assert made, compiled
        assert set(made) <= {"parameter", "bitcast", "copy", "tuple"}


@hypothesis.given(arrays(segments=False))
def test_full_is_what_all_rows_of_a_tile_see(call):
    """Exact where there are no segments."""
    problem, form, visible = call
    mask = RowMask.of(problem, form, Q_TILE, KV_TILE)
    tiles = np.broadcast_to(mask.tiles, (BATCH, *mask.tiles.shape[1:]))
    key = np.arange(problem.kv_len)
    for example in range(BATCH):
        for i, (_, _, full_first, full_last, _) in enumerate(tiles[example]):
            by_all = visible[example, i * Q_TILE : (i + 1) * Q_TILE].all(0)
            np.testing.assert_array_equal((key >= full_first) & (key < full_last), by_all)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_of_a_span_cover_it(parts):
    for first, last in ((0, 1), (3, 10), (2, 2 + parts)):
        problem, _, _ = _call(12, 16)
        span = TileMask(problem, Q_TILE, KV_TILE, None).key_span(0, jnp.int32(0))
        span = span._replace(first=jnp.int32(first), last=jnp.int32(last))
        shares = [span.part(jnp.int32(index), parts) for index in range(parts)]
        assert [int(tile) for share in shares for tile in range(share.first, share.last)] == list(range(first, last))
        sizes = [int(share.last - share.first) for share in shares]
        assert max(sizes) - min(sizes) <= 1
