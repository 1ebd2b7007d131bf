"""How Blackwell's scan holds a tile of 128 tokens: its layouts in registers, and its columns by parts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from fast_layers.ops.ssd.blackwell_config import BLACKWELL_ROWS

COLUMNS = 32
"""Of a tile that go through registers at a time."""

NATIVE: Any = plgpu.Layout.TCGEN05_TMEM_NATIVE
"""A row for each thread, as tensor memory has it."""
STAGED: Any = plgpu.Layout.TCGEN05
"""Four threads share a row: what goes to and comes from shared memory without bank conflicts."""


def column_slices(start: int, columns: int, part: int = COLUMNS) -> list[Any]:
    """`columns` from `start` on in parts, the last one maybe smaller."""
    return [pl.ds(start + c, min(part, columns - c)) for c in range(0, columns, part)]


def by_row(x: Float[jax.Array, " R"], columns: int) -> Float[jax.Array, "R C"]:
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def by_column(x: Float[jax.Array, " C"], rows: int) -> Float[jax.Array, "R C"]:
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def positions(columns: Any, layout: Any) -> tuple[Int[jax.Array, "R C"], Int[jax.Array, "R C"]]:
    """Row and column in the tile of each element of a slice of its columns: from one index for each row and each
    column, where Mosaic would find two for each element."""
    row = plgpu.broadcasted_iota(jnp.int32, (BLACKWELL_ROWS,), 0, layout=layout.reduce(1))
    column = plgpu.broadcasted_iota(jnp.int32, (columns.size,), 0, layout=layout.reduce(0))
    return by_row(row, columns.size), by_column(column + columns.start, BLACKWELL_ROWS)


def by_channel(by_head: list[jax.Array], head_dim: int, columns: int) -> Float[jax.Array, "R C"]:
    """Of each row's head, in a tile whose rows are the channels of a panel; the last one's for rows beyond."""
    row = plgpu.broadcasted_iota(jnp.int32, (BLACKWELL_ROWS, columns), 0, layout=STAGED)
    spread = jnp.broadcast_to(by_head[0], row.shape)
    for head, x in enumerate(by_head[1:], 1):
        spread = jnp.where(row >= head * head_dim, x, spread)
    return spread
