"""How Blackwell's scan holds a tile of 128 tokens: its layouts in registers, and its columns by parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Bool, Float, Int

from fast_layers.ops.ssd.blackwell_config import BLACKWELL_ROWS

COLUMNS = 32
"""Of a tile that go through registers at a time."""

_STEP = 8
"""Columns after which a thread's places in the rows of `STAGED` come again."""

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


def ahead_of_columns(row: Int[jax.Array, " R"] | None = None) -> Int[jax.Array, "R 8"]:
    """By how much each row of `STAGED`, or what stands for it, is ahead of the first column, or the one before, that is
    even: for `where_ahead`. Of two columns side by side a thread keeps one number."""
    if row is None:
        row = plgpu.broadcasted_iota(jnp.int32, (BLACKWELL_ROWS,), 0, layout=STAGED.reduce(1))
    return plgpu.layout_cast(by_row(row, _STEP) - by_column(_first_columns() & ~1, BLACKWELL_ROWS), STAGED)


def where_ahead(
    condition: Callable[[jax.Array, jax.Array], jax.Array], ahead: Int[jax.Array, "R 8"], columns: Any
) -> Bool[jax.Array, "R C"]:
    """`condition(row, column)` of a slice of columns, from `ahead`: a thread compares few numbers with constants, where
    rows and columns of their own would be one for each row and each column."""
    odd = by_column(_first_columns() & 1, BLACKWELL_ROWS)
    starts = range(columns.start, columns.start + columns.size, _STEP)
    return jnp.concatenate([condition(ahead, odd + start) for start in starts], axis=1)


def _first_columns() -> Int[jax.Array, " 8"]:
    return plgpu.broadcasted_iota(jnp.int32, (_STEP,), 0, layout=STAGED.reduce(0))


def by_channel(by_head: list[jax.Array], head_dim: int, columns: int) -> Float[jax.Array, "R C"]:
    """Of each row's head, in a tile whose rows are the channels of a panel; the last one's for rows beyond."""
    row = plgpu.broadcasted_iota(jnp.int32, (BLACKWELL_ROWS, columns), 0, layout=STAGED)
    spread = jnp.broadcast_to(by_head[0], row.shape)
    for head, x in enumerate(by_head[1:], 1):
        spread = jnp.where(row >= head * head_dim, x, spread)
    return spread
