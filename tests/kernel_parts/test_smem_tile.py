"""Which swizzle a row of a tile gets."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from fast_layers.kernel_parts.smem_tile import smem_tile, swizzled_columns


@pytest.mark.parametrize(
    ("columns", "dtype", "swizzled"),
    [
        (64, jnp.bfloat16, 64),
        (128, jnp.float16, 64),
        (192, jnp.bfloat16, 64),
        (96, jnp.bfloat16, 32),
        (32, jnp.bfloat16, 32),
        (80, jnp.bfloat16, 16),
        (16, jnp.bfloat16, 16),
        (64, jnp.float32, 32),
        (48, jnp.float32, 16),
        (8, jnp.float32, 8),
    ],
)
def test_the_most_columns_that_fill_a_row_exactly(columns, dtype, swizzled):
    assert swizzled_columns(columns, dtype) == swizzled
    itemsize = jnp.dtype(dtype).itemsize
    assert swizzled * itemsize in (128, 64, 32)
    assert columns % swizzled == 0
    tile = smem_tile(3, 64, columns, dtype=dtype)
    assert tile.shape == (3, 64, columns)
    tiling, swizzle = tile.transforms
    assert tiling.tiling == (8, swizzled)
    assert swizzle.swizzle == swizzled * itemsize


@pytest.mark.parametrize(("columns", "dtype"), [(40, jnp.bfloat16), (8, jnp.bfloat16), (4, jnp.float32)])
def test_a_row_that_no_swizzle_fills(columns, dtype):
    with pytest.raises(ValueError, match=rf"a row of {columns} x .* must be a multiple of 32 bytes"):
        swizzled_columns(columns, dtype)
