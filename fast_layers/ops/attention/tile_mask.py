"""A mask inside a kernel: which tiles to visit, and which of their scores to hide.

A tile of keys is skipped if no row of the query tile sees it, plain if every row sees all of it, and ragged otherwise.
`q_axis` is 0 where scores stand as [queries, keys] (forward) and 1 where they stand as [keys, queries] (backward).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from fast_layers.kernel_parts.smem_tile import each_chunk, swizzled_columns
from fast_layers.ops.attention.config import TMA_COLUMNS
from fast_layers.ops.attention.masks import ExampleBand
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits

WGMMA = plgpu.Layout.WGMMA
_COLUMNS = 8
"""From one of the pairs of scores that a thread holds of a row to the next."""
_ROWS = 64
"""Of a tile that a warpgroup looks at together."""
_MENDED_BY_ROWS = 128
"""The largest depth of keys and values that are mended so, where there are registers for it."""


class Span(NamedTuple):
    """Half-open ranges of tiles: those to visit, and among them those that need no mask."""

    first: Any
    last: Any
    full_first: Any
    full_last: Any

    @property
    def tiles(self) -> Any:
        return self.last - self.first

    def ragged(self, tile: Any) -> Any:
        return (tile < self.full_first) | (tile >= self.full_last)

    def within(self, other: Span) -> Span:
        """Of those to visit the ones that `other` visits, or the nearest one of these."""
        first = jnp.clip(self.first, other.first, other.last - 1)
        return self._replace(first=first, last=jnp.clip(self.last, first + 1, other.last))

    def part(self, index: Any, parts: int) -> Span:
        """The `index`-th of `parts` shares of the tiles to visit, which differ by one tile at most; maybe empty."""
        begin, end = (self.first + lax.div(self.tiles * i, parts) for i in (index, index + 1))
        return self._replace(first=begin, last=end)


class Rows(NamedTuple):
    """A tile of query rows of a `RowMask`, in registers."""

    start: Any
    stop: Any
    segments: Any
    are_intervals: Any = None
    """Whether the segments say no more than the intervals do, where that is known."""


class TileMask:
    """`refs` are arrays in the GPU's memory: a `RowMask`'s, or in a forward an `ExampleBand`'s; None for a static band.
    A dense mask comes with `logits`. A `RowMask` tells of `parts` of each tile of queries."""

    layout: Any = WGMMA
    """Of scores in registers."""

    def __init__(
        self,
        problem: Problem,
        q_tile: int,
        kv_tile: int,
        refs: Any,
        logits: TileLogits | None = None,
        parts: int = 1,
    ):
        self.problem, self.q_tile, self.kv_tile, self.refs = problem, q_tile, kv_tile, refs
        self.logits, self.parts = logits, parts
        self.dense = logits is not None and logits.refs.dense is not None
        band = problem.mask.band
        self.low, self.high = (None, None) if band is None else (band.low, band.high)
        self.cuts_keys = problem.kv_len % kv_tile != 0

    @property
    def hides(self) -> bool:
        """Whether any score may be hidden at all."""
        return self.hides_real_keys or self.cuts_keys

    @property
    def is_band(self) -> bool:
        """Whether a tile's raggedness follows from its place alone, and those that are not stand together."""
        return self.refs is None and not self.dense

    @property
    def hides_real_keys(self) -> bool:
        """Whether a key that exists may be hidden from a row of a tile that is visited."""
        return self.refs is not None or self.low is not None or self.high is not None or self.dense

    def key_span(self, example: Any, q_index: Any) -> Span:
        """The key tiles of a query tile; at least one, so that a loop over them has a first."""
        size, keys, tile = self.q_tile, self.problem.kv_len, self.kv_tile
        if isinstance(self.refs, ExampleBand):
            # No later row's interval begins or ends before an earlier one's.
            q_start = q_index * size
            first, full_last = self._interval(example, q_start)
            full_first, last = self._interval(example, jnp.minimum(q_start + size, self.problem.q_len) - 1)
        elif self.refs is not None:
            all_told, of_example = self.refs.tiles, self._shared(self.refs.tiles, example)
            told = [all_told.at[of_example, q_index * self.parts + part] for part in range(self.parts)]
            joins = jnp.minimum, jnp.maximum, jnp.maximum, jnp.minimum
            first, last, full_first, full_last = (
                functools.reduce(join, [part[i] for part in told]) for i, join in enumerate(joins)
            )
        else:
            q_start = q_index * size
            first = full_first = jnp.int32(0)
            last = full_last = jnp.int32(keys)
            if self.low is not None:
                first, full_first = (jnp.clip(q_start + self.low + d, 0, keys) for d in (0, size - 1))
            if self.high is not None:
                last, full_last = (jnp.clip(q_start + self.high + 1 + d, 0, keys) for d in (size - 1, 0))
        last_tile = lax.div(last + (tile - 1), tile)
        first_tile = jnp.minimum(lax.div(first, tile), (keys - 1) // tile)
        if self.dense:
            full_last = jnp.int32(0)  # any tile may be ragged
        return Span(
            first_tile,
            jnp.maximum(last_tile, first_tile + 1),
            lax.div(full_first + (tile - 1), tile),
            lax.div(full_last, tile),
        )

    def query_span(self, example: Any, kv_index: Any, spans: Any) -> tuple[Any, Any]:
        """The query tiles that may see a tile of keys, [first, last); `spans` says it where a `RowMask` is given."""
        size, queries = self.q_tile, self.problem.q_len
        if spans is not None:
            of_tile = spans.at[self._shared(spans, example), kv_index]
            return of_tile[0], of_tile[1]
        k_start = kv_index * self.kv_tile
        first, last = jnp.int32(0), jnp.int32(queries)
        if self.high is not None:
            first = jnp.clip(k_start - self.high, 0, queries)
        if self.low is not None:
            last = jnp.clip(k_start + self.kv_tile - self.low, 0, queries)
        first_tile = lax.div(first, size)
        return first_tile, jnp.maximum(lax.div(last + (size - 1), size), first_tile)

    def full_queries(self, k_start: Any, keys: int) -> tuple[Any, Any]:
        """Of a band: the query tiles all of whose rows see all of `keys` keys from `k_start` on, [first, last)."""
        first, last = jnp.int32(0), jnp.int32(self.problem.q_len // self.q_tile + 1)
        if self.high is not None:
            first = lax.div(jnp.maximum(k_start + (keys - 1) - self.high, 0) + (self.q_tile - 1), self.q_tile)
        if self.low is not None:
            last = lax.div(jnp.maximum(k_start - self.low + 1, 0), self.q_tile)
        if self.cuts_keys:
            last = jnp.where(k_start + keys > self.problem.kv_len, 0, last)
        return first, jnp.maximum(last, first)

    def ragged_for_keys(self, example: Any, q_index: Any, k_start: Any, keys: int) -> Any:
        """Whether some row of a query tile does not see some of `keys` keys from `k_start` on."""
        if self.dense:
            return k_start >= 0  # any tile may be ragged
        if self.refs is not None:
            tiles = self.refs.tiles.at[self._shared(self.refs.tiles, example), q_index]
            return (tiles[2] > k_start) | (tiles[3] < k_start + keys)
        ragged = k_start + keys > self.problem.kv_len
        q_start = q_index * self.q_tile
        if self.low is not None:
            ragged |= q_start + (self.q_tile - 1) + self.low > k_start
        if self.high is not None:
            ragged |= q_start + self.high < k_start + (keys - 1)
        return ragged

    def rows(self, example: Any, q_start: Any, size: int, q_axis: int) -> Rows | None:
        """Loads the rows' part of the mask, if it has one."""
        if self.refs is None:
            return None
        if isinstance(self.refs, ExampleBand):
            row = q_start + plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=self.layout.reduce(1 - q_axis))
            # None is negative, so this changes none; but of numbers alone JAX would look for layouts for minutes.
            start, stop = (jnp.maximum(x, -row) for x in self._interval(example, row))
            return Rows(start, stop, None)
        load = functools.partial(self._load, example=example, start=q_start, size=size, axis=q_axis)
        refs = self.refs
        if refs.query_segments is None:
            return Rows(load(refs.start), load(refs.stop), None)
        are_intervals = None
        if self.layout is WGMMA and q_axis == 0:
            tiles = refs.tiles.at[self._shared(refs.tiles, example), lax.div(q_start, self.q_tile // self.parts)]
            are_intervals = tiles[4] != 0
        return Rows(load(refs.start), load(refs.stop), load(refs.query_segments), are_intervals)

    def sees_keys(self, rows: Rows | None, q_start: Any, size: int) -> Any:
        """[size]: which rows there are and see a key, but for one that ids hide; None where all rows of any tile do."""
        if rows is not None:
            return rows.start < rows.stop
        low, high, p = self.low, self.high, self.problem
        if low is None and (high is None or high >= 0):
            return None
        query = q_start + plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=self.layout.reduce(1))
        sees = query < p.q_len
        if low is not None:
            sees &= query + low < p.kv_len
        return sees if high is None else sees & (query + high >= 0)

    def hide(
        self,
        scores: Any,
        rows: Rows | None,
        example: Any,
        q_start: Any,
        k_start: Any,
        q_axis: int,
        head: Any = None,
        hidden: float = -jnp.inf,
    ) -> Any:
        """`hidden` in place of the scores that the mask hides; `head` matters to a dense mask only."""
        shape, k_axis = scores.shape, 1 - q_axis

        def hide(scores, segments):
            conditions = self._in_range(rows, q_start, k_start, shape, q_axis)
            if segments is not None:
                assert self.refs is not None
                ids = self._load(self.refs.key_segments, example, k_start, shape[k_axis], k_axis)
                own = lax.broadcast_in_dim(segments, shape, [q_axis])
                conditions.append(own == lax.broadcast_in_dim(ids, shape, [k_axis]))
            if self.logits is not None and self.dense:
                conditions.append(self.logits.visible(example, head, q_start, k_start, shape, q_axis))
            return jnp.where(functools.reduce(jnp.logical_and, conditions), scores, hidden)

        segments = None if rows is None else rows.segments
        if rows is None or rows.are_intervals is None:
            return hide(scores, segments)
        return lax.cond(rows.are_intervals, lambda x: hide(x, None), lambda x: hide(x, segments), scores)

    def _in_range(self, rows: Rows | None, q_start: Any, k_start: Any, shape: Any, q_axis: int) -> list[Any]:
        """Conditions that a key must meet to be within what its query's band or row says."""
        if rows is None and self.layout is WGMMA:
            return self._in_band_by_parts(q_start, k_start, shape, q_axis)
        if rows is not None and self.layout is WGMMA and q_axis == 0:
            return self._in_intervals_by_parts(rows, k_start, shape)
        key, query = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.layout) for axis in (1 - q_axis, q_axis)
        )
        key += k_start
        if rows is not None:
            start, stop = (lax.broadcast_in_dim(x, shape, [q_axis]) for x in (rows.start, rows.stop))
            return [key >= start, key < stop]
        return self._in_band(key, query + q_start, self.problem.kv_len)

    def _in_band_by_parts(self, q_start: Any, k_start: Any, shape: Any, q_axis: int) -> list[Any]:
        """A thread compares few numbers, of the first part's columns, with constants of each part."""
        part = (shape[0], _COLUMNS)
        row, column = (plgpu.broadcasted_iota(jnp.int32, part, axis, layout=self.layout) for axis in (0, 1))
        key, query = (row, column) if q_axis == 1 else (column, row)
        ahead = key - query + (k_start - q_start)
        # From a part to the next, queries go on or keys do.
        key_step, query_step = (0, 1) if q_axis == 1 else (1, 0)
        step = query_step - key_step

        each = functools.partial(_each_part, shape[1])
        conditions = []
        if (low := self.low) is not None:
            conditions.append(each(lambda at: ahead >= low + step * at))
        if (high := self.high) is not None:
            conditions.append(each(lambda at: ahead <= high + step * at))
        if self.cuts_keys:
            key += k_start
            conditions.append(each(lambda at: key < self.problem.kv_len - key_step * at))
        return conditions

    def _in_intervals_by_parts(self, rows: Rows, k_start: Any, shape: Any) -> list[Any]:
        part = (shape[0], _COLUMNS)
        key = k_start + plgpu.broadcasted_iota(jnp.int32, part, 1, layout=self.layout)
        start, stop = (lax.broadcast_in_dim(x, part, [0]) for x in (rows.start, rows.stop))
        after, before = key - start, key - stop
        return [_each_part(shape[1], lambda at: after >= -at), _each_part(shape[1], lambda at: before < -at)]

    def _in_band(self, key: Any, query: Any, end: Any) -> list[Any]:
        """Counted from anywhere; the keys end before `end`."""
        conditions = []
        if self.low is not None:
            conditions.append(key >= query + self.low)
        if self.high is not None:
            conditions.append(key <= query + self.high)
        if self.cuts_keys:
            conditions.append(key < end)
        return conditions

    def _interval(self, example: Any, row: Any) -> tuple[Any, Any]:
        refs = self.refs
        numbers = (None if x is None else x[self._shared(x, example), 0] for x in (refs.offset, refs.lengths))
        return refs.interval(*numbers, row, self.problem.kv_len)

    def _load(self, ref: Any, example: Any, start: Any, size: int, axis: int) -> Any:
        rows = ref.at[self._shared(ref, example), pl.ds(start, size)]
        return plgpu.load(rows, layout=self.layout.reduce(1 - axis), optimized=False)

    @staticmethod
    def _shared(ref: Any, example: Any) -> Any:
        return example if ref.shape[0] > 1 else 0


def has_broken_rows(value: Any) -> Any:
    """Whether a value (a row of a tile in shared memory) has a NaN or inf."""
    count = _parts(value)
    whole = plgpu.layout_cast(jnp.zeros((_ROWS, value.shape[1] // count), value.dtype), WGMMA)
    whole = lax.fori_loop(0, value.shape[0] // _ROWS, lambda block, x: x + _nothing_or_nan(value, block), whole)
    return whole.astype(jnp.float32).sum(axis=1).sum() != 0  # NaN differs from everything


def mend_broken_rows(key: Any, value: Any, few_registers: bool = False) -> None:
    """Where a value has a NaN or inf: there 0, and in its key NaN.

    Whoever sees such a key then gets a score of NaN. Who does not would else get 0 * NaN from the hidden value.
    """
    # The less code the sooner it is compiled, which counts at large depths; at 128 a causal forward of 2,048 tokens was
    # 4 % slower with it on an H100, though it did not run.
    alike = _part_columns(key) == _part_columns(value) < value.shape[1]  # which plain rows have as one part
    if not alike or (max(key.shape[1], value.shape[1]) <= _MENDED_BY_ROWS and not few_registers):
        _mend_by_rows(key, value)
        return

    def mend(layout, value, key):
        # Number by number: one NaN in a key is enough.
        x = plgpu.load(value, layout=layout)
        finite = jnp.abs(x) < jnp.inf
        value[...] = jnp.where(finite, x, jnp.zeros_like(x))
        key[...] = jnp.where(finite, plgpu.load(key, layout=layout), jnp.full_like(x, jnp.nan))

    each_chunk(value, mend, key)


def _mend_by_rows(key: Any, value: Any) -> None:
    """`mend_broken_rows` of any two, by more code."""

    def mend(block, _):
        broken = _nothing_or_nan(value, block).astype(jnp.float32).sum(axis=1) != 0
        for tile, what in ((value, 0), (key, jnp.nan)):

            def mend_part(i, _, tile=tile, what=what):
                part = _part(tile, block, i)
                x = plgpu.load(part, layout=WGMMA, optimized=False)
                spread = lax.broadcast_in_dim(broken, x.shape, [0])
                part[...] = jnp.where(spread, jnp.full_like(x, what), x)

            lax.fori_loop(0, _parts(tile), mend_part, None)  # few tiles need it: little code is worth more than time

    lax.fori_loop(0, value.shape[0] // _ROWS, mend, None)


def _nothing_or_nan(value: Any, block: Any) -> Any:
    """[rows, columns]: 0, or NaN where a value of this row is broken; in 16 bits, which come two an instruction."""
    parts = (_part(value, block, i) for i in range(_parts(value)))
    loaded = (plgpu.load(part, layout=WGMMA, optimized=False) for part in parts)
    return functools.reduce(jnp.add, (x * jnp.zeros_like(x) for x in loaded))


def _part_columns(tile: Any) -> int:
    """Of a swizzled tile; or all, of plain rows whose length is no multiple of any's."""
    columns = tile.shape[1]
    return columns if columns % TMA_COLUMNS else swizzled_columns(columns, tile.dtype)


def _parts(tile: Any) -> int:
    """How many stand beside each other."""
    return tile.shape[1] // _part_columns(tile)


def _part(tile: Any, block: Any, i: Any) -> Any:
    columns = _part_columns(tile)
    return tile.at[pl.ds(block * _ROWS, _ROWS), pl.ds(i * columns, columns)]


def _each_part(columns: int, condition: Callable[[int], Any]) -> Any:
    """`condition(first column)` of all parts, beside each other."""
    return jnp.concatenate([condition(at) for at in range(0, columns, _COLUMNS)], axis=1)


def by_row(x: Float[jax.Array, " R"], columns: int) -> Float[jax.Array, "R C"]:
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])
