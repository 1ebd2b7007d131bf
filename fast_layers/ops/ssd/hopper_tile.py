"""Tiles of 64 by 64 numbers in the registers of a Hopper warpgroup, as the scan's kernels use them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fast_layers.ops.ssd.config import ROWS

WGMMA = plgpu.Layout.WGMMA
BY_ROW = WGMMA.reduce(1)
BY_COLUMN = WGMMA.reduce(0)
TILE = (ROWS, ROWS)


def load_tile(ref: Any) -> Float[Array, "Q Q"]:
    return plgpu.load(ref, layout=WGMMA, optimized=False).astype(jnp.float32)


def float_tiles(*count: int) -> Any:
    """Scratch that each thread reads what it wrote from: by eights, one address and constants reach all of that."""
    tiling: Any = plgpu.TilingTransform  # abstract to type checkers only
    return plgpu.SMEM((*count, *TILE), jnp.float32, transforms=(tiling((8, 8)),))


def column_numbers(wgs: int) -> Any:
    """Scratch for `set_column_numbers`, of each warpgroup."""
    return plgpu.SMEM((wgs, ROWS), jnp.int32)


def set_column_numbers(ref: Any) -> None:
    ref[...] = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_COLUMN)
    plgpu.commit_smem()


def row_and_column(numbers: Any = None) -> tuple[Int[Array, "Q Q"], Int[Array, "Q Q"]]:
    """Numbers of both; of columns as `set_column_numbers` left them, or made of the thread's own number, which are then
    in 16 registers or more from the first chunk to the last."""
    row = plgpu.broadcasted_iota(jnp.int32, TILE, 0, layout=WGMMA)
    if numbers is None:
        return row, plgpu.broadcasted_iota(jnp.int32, TILE, 1, layout=WGMMA)
    return row, by_column(plgpu.load(numbers, layout=BY_COLUMN, optimized=False))


def by_row(x: Float[Array, " Q"]) -> Float[Array, "Q Q"]:
    return lax.broadcast_in_dim(x, TILE, [0])


def by_column(x: Float[Array, " Q"]) -> Float[Array, "Q Q"]:
    return lax.broadcast_in_dim(x, TILE, [1])
