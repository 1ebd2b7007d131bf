"""Tiles of 16-bit and 32-bit matrices in shared memory, laid out as TMA writes and wgmma reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_SWIZZLE_BYTES = (128, 64, 32)
_CHUNK_ROWS = 32
"""Eight for each warp of a warpgroup."""


def swizzled_columns(columns: int, dtype: Any) -> int:
    """Columns of one swizzled tile: the most that fill a row of `columns` exactly."""
    itemsize = jnp.dtype(dtype).itemsize
    for size in _SWIZZLE_BYTES:
        if columns * itemsize % size == 0:
            return size // itemsize
    raise ValueError(f"a row of {columns} x {jnp.dtype(dtype)} must be a multiple of {_SWIZZLE_BYTES[-1]} bytes")


def smem_tile(*shape: int, dtype: Any, columns: int | None = None) -> Any:
    """Scratch of `shape`, its last two dimensions in swizzled tiles of eight rows, by `columns` if not by the most."""
    columns = swizzled_columns(shape[-1] if columns is None else columns, dtype)
    swizzle = columns * jnp.dtype(dtype).itemsize
    tiling: Any = plgpu.TilingTransform  # abstract to type checkers only
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, columns)), swizzling(swizzle)))


def each_chunk(tile: Any, role: Callable[..., None], *beside: Any) -> None:
    """`role(layout, chunk, *chunks of the tiles beside it)` for all chunks of a tile: little code, but slow.

    A chunk is 32 rows of one swizzled tile, of which a thread has 16 bytes in each of a few rows. The tiles beside have
    as many rows, and swizzled tiles as wide; where they have fewer of these, they take turns.
    """
    columns = swizzled_columns(tile.shape[1], tile.dtype)
    layout = plgpu.Layout.SMEM_GMEM_COPY((_CHUNK_ROWS, columns), tile.dtype, columns * tile.dtype.itemsize)
    parts = tile.shape[1] // columns

    def step(i, _):
        rows, part = pl.ds(lax.div(i, parts) * _CHUNK_ROWS, _CHUNK_ROWS), lax.rem(i, parts)

        def chunk_of(tile):
            return tile.at[rows, pl.ds(lax.rem(part, tile.shape[1] // columns) * columns, columns)]

        role(layout, chunk_of(tile), *map(chunk_of, beside))

    lax.fori_loop(0, tile.shape[0] // _CHUNK_ROWS * parts, step, None)
