"""Tiles stored and loaded as threads hold them, on the GPU at hand: as the simulator's stand-ins have it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import fragments

from fast_layers.kernel_parts.fragments import to_fragments

pytestmark = pytest.mark.usefixtures("warpgroups")


def _tile(columns: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (64, columns)).astype(dtype)


@pytest.mark.parametrize("columns", [16, 48, 64, 128])
def test_floats(columns):
    tile = _tile(columns)
    np.testing.assert_array_equal(jax.jit(fragments.stored)(tile), to_fragments(tile))


@pytest.mark.parametrize("columns", [16, 64])
def test_integers_of_a_unit_for_each_row(columns):
    units = 2.0 ** jnp.arange(64)[::-1]
    tile = jnp.round(_tile(columns) * 2**28) / units[:, None] / 4  # half of them between two integers
    got = jax.jit(fragments.stored)(tile, units)
    np.testing.assert_array_equal(got, to_fragments(np.rint(tile * units[:, None]).astype(np.int32)))


@pytest.mark.parametrize("columns", [16, 48, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_loaded(columns, dtype):
    tile = jnp.arange(64 * columns, dtype=dtype).reshape(64, columns)
    np.testing.assert_array_equal(jax.jit(fragments.loaded)(to_fragments(tile)), tile)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_factor(dtype):
    tile = _tile(64, dtype)
    np.testing.assert_array_equal(jax.jit(fragments.factor)(tile), tile)


@pytest.mark.parametrize("beside", [0, 8])
@pytest.mark.parametrize("columns", [16, 48, 80, 96, 112])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_loaded_factor(rows, columns, beside, dtype):
    tile = jnp.tile(_tile(columns + beside, dtype), (rows // 64, 1))
    got = jax.jit(functools.partial(fragments.loaded_factor, beside=beside))(tile)
    np.testing.assert_array_equal(got, tile[:, :columns])


@pytest.mark.parametrize(
    ("columns", "start", "beside", "swizzled"),
    [
        *((columns, start, 0, None) for columns, start in [(48, 0), (80, 0), (80, 64), (112, 64)]),
        *((columns, start, 8, None) for columns, start in [(32, 0), (80, 64), (96, 64), (112, 64)]),
        *((columns, start, 0, 32) for columns, start in [(32, 0), (96, 64), (160, 128)]),
        *((columns, start, 0, 64) for columns, start in [(64, 0), (128, 64)]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_loaded_turned_factor(columns, start, beside, swizzled, dtype):
    tile = _tile(columns + beside, dtype)
    kernel = functools.partial(fragments.loaded_factor, start=start, beside=beside, swizzled=swizzled)
    wanted = tile[:, start : min(start + 64, columns)].T
    np.testing.assert_array_equal(jax.jit(kernel)(tile)[: len(wanted)], wanted)


@pytest.mark.parametrize("rows", [64, 192])
@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_turned(rows, columns, dtype):
    tile = jnp.concatenate([_tile(columns, dtype) + at for at in range(0, rows, 64)])
    np.testing.assert_array_equal(jax.jit(fragments.turned)(tile), tile.T[:-1])
