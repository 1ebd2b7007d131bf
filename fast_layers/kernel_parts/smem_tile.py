"""Tiles of 16-bit and 32-bit matrices in shared memory, laid out as TMA writes and wgmma reads them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

_SWIZZLE_BYTES = (128, 64, 32)


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
