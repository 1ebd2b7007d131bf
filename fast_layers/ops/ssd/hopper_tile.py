"""Tiles of 64 by 64 numbers in the registers of a Hopper warpgroup, as the scan's kernels use them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.ops.ssd.config import ROWS

WGMMA = plgpu.Layout.WGMMA
BY_ROW = WGMMA.reduce(1)
BY_COLUMN = WGMMA.reduce(0)
TILE = (ROWS, ROWS)


def load_tile(ref: Any) -> Float[Array, "Q Q"]:
    return plgpu.load(ref, layout=WGMMA, optimized=False).astype(jnp.float32)


def by_row(x: Float[Array, " Q"]) -> Float[Array, "Q Q"]:
    return lax.broadcast_in_dim(x, TILE, [0])


def by_column(x: Float[Array, " Q"]) -> Float[Array, "Q Q"]:
    return lax.broadcast_in_dim(x, TILE, [1])
