"""Arrays with fewer columns than the tiles in shared memory that TMA copies them to and from.

Axis letters: R rows, C columns.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl


def tma_columns(rows: Any, start: int, columns: int, axis: str = "block") -> Any:
    """In a kernel with this grid axis: so many columns from `start` on of rows in the GPU's memory, [R, C]; those that
    are not there read as 0 and are not written.

    To plain rows, or one swizzled tile of columns: of several JAX takes only arrays that fill all. Of more than one
    row: one by itself would be copied without a tensor map, which is what knows where rows end.
    """
    if start + columns <= rows.shape[1]:
        return rows.at[:, pl.ds(start, columns)]
    # JAX refuses a slice of which it knows that it ends outside.
    return rows.at[:, pl.ds(lax.axis_index(axis) * 0 + start, columns)]
