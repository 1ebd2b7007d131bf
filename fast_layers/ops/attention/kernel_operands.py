"""Operands as attention's kernels get them: padded for TMA, and the mask as arrays.

Axis letters: B batch, T queries, S keys, N query heads, H query/key depth; I tiles of queries.

A mask reaches a kernel in one of three forms. A static band is arithmetic on row numbers. So is a band that begins or
ends at a number of each example (`masks.ExampleBand`), which forwards of a single tile of rows take. Everything else is
a pair of arrays, each row's key interval, and per tile of rows the keys that some row sees (`hull`) and those that all
rows see (`full`). A tile of keys outside `hull` is never loaded; one inside `full` needs no mask arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from fast_layers.kernel_parts.kv_range import INT_MAX
from fast_layers.ops.attention.config import SWIZZLED_COLUMNS
from fast_layers.ops.attention.masks import MaskForm
from fast_layers.ops.attention.problem import Problem

SHARED = frozenset({"sinks", "mask", "q_span", "logits", "key_rows"})
"""Operands of which all examples of a batch may share one."""
DEPTH_MULTIPLE = 16
TMA_ROWS = 8
SMEM_LINE = 128
"""Bytes, at multiples of which a bulk copy with a tensor map may begin in shared memory."""


def padded_depth(depth: int, multiple: int = DEPTH_MULTIPLE) -> int:
    """The depth that a kernel runs on."""
    return round_up(depth, multiple)


def array_columns(depth: int, columns: int) -> int:
    """Of an array for tiles of so many columns: with `tma_columns` it need not fill a single swizzled one."""
    return padded_depth(depth) if columns == SWIZZLED_COLUMNS else columns


def has_narrow_tiles(problem: Problem) -> bool:
    """Whether depths are equal, between one and two swizzled tiles of the most columns: so they have tiles of fewer."""
    p = problem
    return p.qk_dim == p.v_dim and SWIZZLED_COLUMNS < padded_depth(p.qk_dim) < 2 * SWIZZLED_COLUMNS


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
    return pad_axis(pad_axis(x, depth, 3), for_tma(x.shape[1], tile), 1)


def for_tma(rows: int, tile: int) -> int:
    """How many there must be of an array of so many."""
    return round_up(max(rows, tile), TMA_ROWS)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class RowMask(NamedTuple):
    """A mask that is no static band, as arrays. Rows and keys are padded to whole tiles."""

    start: Int[Array, "B|1 T"]
    stop: Int[Array, "B|1 T"]
    tiles: Int[Array, "B|1 I 5"]
    """Of a tile of queries, or a part of one: hull's first and last key, then full's, both half-open; then whether each
    row sees all keys of its interval."""
    query_segments: Int[Array, "B|1 T"] | None
    key_segments: Int[Array, "B|1 S"] | None

    @classmethod
    def of(cls, problem: Problem, form: MaskForm, q_tile: int, kv_tile: int, parts: int = 1) -> RowMask | None:
        """None if a static band says it all. `parts` of each tile of queries are told apart."""
        if form.start is None and form.stop is None and form.query_segments is None:
            return None
        p = problem
        start, stop = form.intervals(p.q_len, p.kv_len)
        start = jnp.zeros((1, p.q_len), jnp.int32) if start is None else start
        stop = jnp.full((1, p.q_len), p.kv_len, jnp.int32) if stop is None else stop
        scattered = jnp.zeros((1, 1), bool) if form.scattered is None else form.scattered
        rows, keys = round_up(p.q_len, q_tile), round_up(p.kv_len, kv_tile)
        start, stop, scattered = (pad_axis(x, rows, 1) for x in jnp.broadcast_arrays(start, stop, scattered))
        return cls(
            start,
            stop,
            jnp.minimum(_tiles(start, stop, scattered, p.q_len, q_tile // parts), keys),
            None if form.query_segments is None else pad_axis(form.query_segments, rows, 1, -1),
            None if form.key_segments is None else pad_axis(form.key_segments, keys, 1, -1),
        )


def _tiles(start, stop, scattered, q_len, q_tile):
    """`RowMask.tiles`, by one reduction, which XLA makes one kernel."""
    sees_some, exists = start < stop, jnp.arange(start.shape[1]) < q_len
    sees_all_within = sees_some & ~scattered
    of_row = (
        jnp.where(sees_some, start, INT_MAX),
        jnp.where(sees_some, stop, 0),
        jnp.where(sees_all_within, start, jnp.where(exists, INT_MAX, 0)),
        jnp.where(sees_all_within, stop, jnp.where(exists, 0, INT_MAX)),
        (~(sees_some & scattered)).astype(jnp.int32),
    )
    picks, neutral = (lax.min, lax.max, lax.max, lax.min, lax.min), (INT_MAX, 0, 0, INT_MAX, 1)

    def pick(a, b):
        return tuple(extreme(x, y) for extreme, x, y in zip(picks, a, b, strict=True))

    by_tile = tuple(x.reshape(x.shape[0], -1, q_tile) for x in of_row)
    return jnp.stack(lax.reduce(by_tile, tuple(map(jnp.int32, neutral)), pick, (2,)), -1)
