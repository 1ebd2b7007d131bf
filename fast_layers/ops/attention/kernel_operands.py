"""Operands as attention's kernels get them: padded for TMA, and the mask as arrays.

Axis letters: B batch, T queries, S keys, N query heads, H query/key depth; I tiles of queries.

A mask reaches a kernel in one of two forms. A static band is arithmetic on row numbers. Everything else is a pair of
arrays, each row's key interval, and per tile of rows the keys that some row sees (`hull`) and those that all rows see
(`full`). A tile of keys outside `hull` is never loaded; one inside `full` needs no mask arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from fast_layers.kernel_parts.kv_range import INT_MAX, KvRange
from fast_layers.ops.attention.masks import MaskForm
from fast_layers.ops.attention.problem import Problem

SHARED = frozenset({"sinks", "mask", "q_span", "logits"})
"""Operands of which all examples of a batch may share one."""
DEPTH_MULTIPLE = 16
TMA_ROWS = 8


def padded_depth(depth: int, multiple: int = DEPTH_MULTIPLE) -> int:
    """The depth that a kernel runs on."""
    return round_up(depth, multiple)


def pad_axis(x: Array, size: int, axis: int, value: Any = 0) -> Array:
    """`x` with `axis` grown to `size`; itself if it has that size."""
    missing = size - x.shape[axis]
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=value)


def pad_for_tma(x: Array, tile: int, depth: int) -> Array:
    """[B, T, N, H] as TMA wants it: at least a tile long, a length that is a multiple of 8, and of this depth.

    Rows that are added here are masked or cut off; rows of a last tile beyond them read as 0 and are not written.
    """
    return pad_axis(pad_axis(x, depth, 3), round_up(max(x.shape[1], tile), TMA_ROWS), 1)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class RowMask(NamedTuple):
    """A mask that is no static band, as arrays. Rows and keys are padded to whole tiles."""

    start: Int[Array, "B|1 T"]
    stop: Int[Array, "B|1 T"]
    tiles: Int[Array, "B|1 I 5"]
    """hull's first and last key, then full's, both half-open; then whether each row sees all keys of its interval."""
    query_segments: Int[Array, "B|1 T"] | None
    key_segments: Int[Array, "B|1 S"] | None

    @classmethod
    def of(cls, problem: Problem, form: MaskForm, q_tile: int, kv_tile: int) -> RowMask | None:
        """None if a static band says it all."""
        if form.start is None and form.stop is None and form.query_segments is None:
            return None
        p = problem
        start, stop = form.intervals(p.q_len, p.kv_len)
        start = jnp.zeros((1, p.q_len), jnp.int32) if start is None else start
        stop = jnp.full((1, p.q_len), p.kv_len, jnp.int32) if stop is None else stop
        start, stop = jnp.broadcast_arrays(start, stop)
        sees_some = sees_all_within = start < stop
        if form.query_segments is not None and form.key_segments is not None:
            sees_all_within &= _one_segment(start, stop, form.query_segments, form.key_segments)
        rows = round_up(p.q_len, q_tile)
        # As 0 or 1: what is no interval.
        broken = pad_axis((sees_some & ~sees_all_within).astype(jnp.int32), rows, 1)
        full_start = pad_axis(jnp.where(sees_all_within, start, INT_MAX), rows, 1, 0)
        full_stop = pad_axis(jnp.where(sees_all_within, stop, 0), rows, 1, INT_MAX)
        start, stop = (pad_axis(x, rows, 1) for x in (start, stop))
        hull = KvRange.of(start, stop, q_tile)
        by_tile = (-1, rows // q_tile, q_tile)
        full_start, full_stop = full_start.reshape(by_tile).max(-1), full_stop.reshape(by_tile).min(-1)
        tiles = jnp.stack([*hull, full_start, full_stop, 1 - broken.reshape(by_tile).max(-1)], -1)
        keys = round_up(p.kv_len, kv_tile)
        return cls(
            start,
            stop,
            jnp.minimum(tiles, keys),
            None if form.query_segments is None else pad_axis(form.query_segments, rows, 1, -1),
            None if form.key_segments is None else pad_axis(form.key_segments, keys, 1, -1),
        )


def _one_segment(start, stop, query_ids, key_ids):
    """Whether all keys in a row's interval carry the row's id."""
    batch = max(x.shape[0] for x in (start, query_ids, key_ids))
    start, stop, query_ids, key_ids = (
        jnp.broadcast_to(x, (batch, x.shape[1])) for x in (start, stop, query_ids, key_ids)
    )
    run = jnp.cumsum(key_ids != jnp.roll(key_ids, 1, axis=1), axis=1, dtype=jnp.int32)

    def at(values, index):
        return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1)

    return (at(run, start) == at(run, stop - 1)) & (at(key_ids, start) == query_ids)
