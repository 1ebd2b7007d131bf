"""How Blackwell's attention kernels hold a tile of scores: its layouts, its columns by parts, and its mask."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.ops.attention.tile_mask import Rows, TileMask, by_row

ROWS = 128
"""Of one tcgen05 matmul: the lanes of tensor memory."""
COLUMNS = 32
"""Of a tile that go through registers at a time."""

NATIVE: Any = plgpu.Layout.TCGEN05_TMEM_NATIVE
"""A row for each thread, as tensor memory has it: a row's maximum and sum need no other thread."""
STAGED: Any = plgpu.Layout.TCGEN05
"""Four threads share a row: what goes to shared memory without bank conflicts."""
BY_ROW = NATIVE.reduce(1)
BY_COLUMN = STAGED.reduce(0)
"""All of it in each warp."""


class NativeTileMask(TileMask):
    layout = NATIVE

    def _in_range(self, rows: Rows | None, q_start: Any, k_start: Any, shape: Any, q_axis: int) -> list[Any]:
        """Counted from the first column on: a thread then compares one number of its row's with constants."""
        row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=NATIVE) for axis in (0, 1))
        if q_axis:
            if rows is not None:
                return super()._in_range(rows, q_start, k_start, shape, q_axis)
            return self._in_band(row + (k_start - q_start), column, self.problem.kv_len - q_start)
        if rows is not None:
            start, stop = (by_row(x - k_start, shape[1]) for x in (rows.start, rows.stop))
            return [column >= start, column < stop]
        return self._in_band(column, row + (q_start - k_start), self.problem.kv_len - k_start)


def column_slices(columns: int, part: int = COLUMNS) -> list[Any]:
    """`columns` in parts, the last one maybe smaller."""
    return [pl.ds(start, min(part, columns - start)) for start in range(0, columns, part)]
