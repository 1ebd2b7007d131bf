"""The tiles that a mask of arrays visits, as Hopper's backward is told of them, against a mask of single scores."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from selection import examples

from fast_layers import masks
from fast_layers.ops.attention import api
from fast_layers.ops.attention.hopper_bwd_visits import Visits
from fast_layers.ops.attention.hopper_grad_parts import KeyRows
from fast_layers.ops.attention.kernel_operands import RowMask

TILE = 128
LENGTH = 768
DOCUMENTS = np.repeat(np.arange(3), (150, 400, 218)).astype(np.int32)
APART = np.repeat([0, 1, 2], (64, 64, LENGTH - 128)), np.repeat([0, 3, 1, 4], (64, 448, 128, LENGTH - 640))
"""The first 64 queries see the first keys, the next 64 keys of the fifth tile: no one sees those between."""
AGAIN = np.repeat([0, 1, 0, -1], (150, 300, 218, 100)).astype(np.int32)
MASKS: dict[str, dict[str, Any]] = {
    "documents": {"segment_ids": DOCUMENTS},
    "causal documents": {"segment_ids": DOCUMENTS, "is_causal": True},
    "documents of each example": {"segment_ids": np.stack([DOCUMENTS, AGAIN])},
    "keys far apart": {"segment_ids": tuple(ids.astype(np.int32) for ids in APART)},
    "window": {"segment_ids": DOCUMENTS, "local_window_size": (200, 30)},
    "lengths": {"query_seq_lengths": np.array([300, 768]), "key_value_seq_lengths": np.array([0, 400])},
}


def _seen(mask: RowMask) -> np.ndarray:
    """[B, rows, keys]."""
    keys = np.arange(LENGTH)
    start, stop = (np.asarray(x)[..., None] for x in (mask.start, mask.stop))
    seen = (keys >= start) & (keys < stop)
    if mask.query_segments is None or mask.key_segments is None:
        return seen
    return seen & (np.asarray(mask.query_segments)[..., None] == np.asarray(mask.key_segments)[:, None])


@pytest.mark.parametrize("q_tile", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_visits_follow_from_what_rows_see(name, q_tile):
    query = jnp.zeros((2, LENGTH, 2, 64), jnp.bfloat16)
    inputs, aux, options, _ = api._prepare(query, query, query, **MASKS[name])
    problem = options.problem(inputs, aux)
    mask = RowMask.of(problem, aux.mask, q_tile, TILE)
    assert mask is not None
    visits = Visits.of(problem, mask, None)
    tiles, parts = LENGTH // TILE, TILE // q_tile
    for by_keys, by_queries, seen in zip(*(np.asarray(x) for x in visits[:2]), _seen(mask), strict=True):
        some, every = (
            join(seen.reshape(LENGTH // q_tile, q_tile, tiles, TILE), axis=(1, 3)) for join in (np.any, np.all)
        )
        written = set()
        for index, first, last, full_first, full_last in by_keys:
            assert set(np.flatnonzero(some[:, index]) // parts) <= set(range(first, last))
            assert every[full_first:full_last, index].all()
            assert not (name == "causal documents" and full_first == full_last and every[:, index].any())
            written |= {(q_index, index) for q_index in range(first, last)}
        if problem.mask.band is not None and problem.mask.band.low is None:  # dS has places for no others
            assert all(kv_index <= q_index for q_index, kv_index in written)
        read = set()
        for index, first, last, full_first, full_last in by_queries:
            of_tile = slice(index * parts, (index + 1) * parts)
            assert set(np.flatnonzero(some[of_tile].any(0))) <= set(range(first, last))
            assert every[of_tile, full_first:full_last].all()
            read |= {(index, kv_index) for kv_index in range(first, last)}
        assert read <= written
        for told in (by_keys, by_queries):
            assert sorted(told[:, 0]) == list(range(tiles))
            assert (np.diff(told[:, 2] - told[:, 1]) <= 0).all()


SAID = {
    "documents": [1],
    "causal documents": [1],
    "window": [1],
    "documents of each example": [1, 0],
    "keys far apart": [0],
    "ids that share a bucket": [0],
    "padding between and behind": [1],
    "documents and lengths": [1, 0],
    "one length for queries and keys": [1, 1],
}
"""Of masks with documents: whether the keys' intervals say it all, of each example."""
PADDED = np.repeat([0, -1, 1, -1], (150, 100, 400, LENGTH - 650)).astype(np.int32)
LENGTHS = np.array([300, 400])
MORE_MASKS = {
    "ids that share a bucket": {"segment_ids": np.where(AGAIN > 0, 1 << 16, 0).astype(np.int32)},
    "padding between and behind": {"segment_ids": PADDED, "is_causal": True},
    "documents and lengths": {
        "segment_ids": DOCUMENTS,
        "query_seq_lengths": np.array([550, LENGTH]),
        "key_value_seq_lengths": np.array([550, 400]),
    },
    "one length for queries and keys": {
        "segment_ids": DOCUMENTS,
        "query_seq_lengths": LENGTHS,
        "key_value_seq_lengths": LENGTHS,
    },
}


def _key_rows(query_length: int = LENGTH, **given: Any) -> tuple[KeyRows | None, np.ndarray]:
    """And who sees what, [B, rows, keys]."""
    query, key = (jnp.zeros((2, length, 2, 64), jnp.bfloat16) for length in (query_length, LENGTH))
    inputs, aux, options, _ = api._prepare(query, key, key, **given)
    seen = np.asarray(aux.mask.as_array(query_length, LENGTH))[:, 0]
    return KeyRows.of(options.problem(inputs, aux), aux.mask, 128), seen


def _told(rows: KeyRows, length: int = LENGTH) -> np.ndarray:
    """[B, rows, keys]; none sees a key of the last tile that is none."""
    start, stop = (np.asarray(x)[:, None] for x in (rows.start, rows.stop))
    index = np.arange(start.shape[-1])[:, None]
    told = (index >= start) & (index < stop)
    assert not told[..., length:].any()
    return told[:, :length, :length]


@pytest.mark.parametrize("name", SAID)
def test_queries_that_see_a_key(name):
    rows, seen = _key_rows(**(MASKS | MORE_MASKS)[name])
    assert rows is not None
    np.testing.assert_array_equal(rows.say_all, SAID[name])
    for told, by_keys, by_rows in zip(rows.say_all, _told(rows), seen, strict=True):
        assert not told or (by_keys == by_rows).all()


@pytest.mark.parametrize(
    "given",
    [MASKS["lengths"], {"is_causal": True}, {"query_length": 512, "segment_ids": (DOCUMENTS[:512], DOCUMENTS)}],
    ids=["lengths", "causal", "fewer queries"],
)
def test_keys_that_have_no_intervals(given):
    assert _key_rows(**given)[0] is None


FEW, FEW_AT_ONCE, WHOLE = 9, 4, 12
ids = st.lists(st.integers(-1, 3), min_size=FEW, max_size=FEW).map(lambda x: np.array(x, np.int32))
lengths = st.none() | st.integers(0, FEW)
reach = st.none() | st.integers(0, FEW)


@examples(30)
@hypothesis.given(
    query_ids=ids | ids.map(np.sort),
    key_ids=st.none() | ids,
    lengths=st.tuples(lengths, lengths),
    left=reach,
    right=reach,
)
def test_what_keys_say_is_what_rows_see(query_ids, key_ids, lengths, left, right):
    parts = [masks.Segments(query_ids, key_ids), masks.LocalWindow(left, right)]
    parts += [kind(n) for kind, n in zip((masks.QueryLengths, masks.KeyLengths), lengths, strict=True) if n is not None]
    query = jnp.zeros((1, FEW, 1, 64), jnp.bfloat16)
    inputs, aux, options, _ = api._prepare(query, query, query, mask=masks.And(tuple(parts)))
    rows = KeyRows.of(options.problem(inputs, aux), aux.mask, FEW_AT_ONCE)
    seen = np.asarray(aux.mask.as_array(FEW, FEW))
    assert rows is not None
    assert rows.start.shape[1] == rows.stop.shape[1] == WHOLE
    if rows.say_all[0]:
        np.testing.assert_array_equal(_told(rows, FEW), seen[0])
    runs = np.flatnonzero(np.diff(query_ids)).size + 1
    if key_ids is None and lengths == (None, None) and runs == np.unique(query_ids).size:
        assert rows.say_all[0]
