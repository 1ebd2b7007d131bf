"""How Blackwell's attention kernels hold a tile of scores: its layouts, its columns by parts, and its mask."""

from __future__ import annotations

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.ops.attention.tile_mask import TileMask

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


def column_slices(columns: int, part: int = COLUMNS) -> list[Any]:
    """`columns` in parts, the last one maybe smaller."""
    return [pl.ds(start, min(part, columns - start)) for start in range(0, columns, part)]
