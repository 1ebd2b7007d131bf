"""Sums over the rows of a tile in shared memory, without the scratch that warps would share to exchange parts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float


def sum_over_rows(slot: Any) -> Float[Array, " C"]:
    """Of a tile of 64 or 128 rows, and 32 or 64 columns; rounded as it is there."""
    # The columns, not the rows, lie over the four warps, so that a sum over rows stays within a warp: of its 8 or 16
    # columns each thread has two, in every 8th or 4th pair of rows, in which the swizzle keeps banks apart.
    columns = slot.shape[1]
    own = columns // 4
    tiling = plgpu.Tiling(((64, columns), (64, own), (128 // own, own), (2, 2)))
    layout: Any = plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-4, -3), vector_dim=-1)
    return plgpu.load(slot, layout=layout).astype(jnp.float32).sum(0)
