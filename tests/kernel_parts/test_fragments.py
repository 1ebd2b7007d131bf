"""In which order fragments are a tile."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts.fragments import ROWS, fragments_shape, from_fragments, to_fragments


@pytest.mark.parametrize("columns", [16, 48, 64, 128])
def test_a_thread_has_sixteen_bytes_of_a_row_at_a_time(columns):
    tile = jnp.arange(ROWS * columns).reshape(ROWS, columns)
    row, column = np.divmod(np.arange(ROWS * columns), columns)
    # wgmma's layout: PTX ISA, "Register fragments for wgmma.mma_async", matrix D.
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    half = row % 16 // 8
    place = (column // 16 * 2 + half) * 512 + thread * 4 + column // 8 % 2 * 2 + column % 2
    stored = to_fragments(tile)
    assert stored.shape == fragments_shape(columns)
    np.testing.assert_array_equal(stored.reshape(-1)[place], tile.reshape(-1))
    np.testing.assert_array_equal(from_fragments(stored), tile)


def test_columns_of_which_a_thread_has_less_in_a_row():
    with pytest.raises(ValueError, match="columns=40 must be a multiple of 16"):
        fragments_shape(40)
