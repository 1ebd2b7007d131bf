"""The tiles that a mask of arrays visits, as Hopper's backward is told of them, against a mask of single scores."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.ops.attention import api
from fast_layers.ops.attention.hopper_bwd_visits import Visits
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
