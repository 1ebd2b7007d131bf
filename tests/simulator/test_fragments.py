"""The stand-ins by which the simulator stores and loads tiles as threads hold them: right, and seen as accesses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts.fragments import to_fragments
from fast_layers.testing import simulate
from simulator import fragments
from simulator.found import tells

pytestmark = pytest.mark.simulator


def _tile(columns: int = 48, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (64, columns)).astype(dtype)


UNITS = 2.0 ** jnp.arange(64)[::-1]


def test_floats():
    tile = _tile()
    np.testing.assert_array_equal(simulate(fragments.stored, tile).check(), to_fragments(tile))


def test_integers_of_a_unit_for_each_row():
    tile = _tile() / UNITS[:, None] * 1000
    got = simulate(fragments.stored, tile, UNITS).check()
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, to_fragments(np.rint(tile * UNITS[:, None]).astype(np.int32)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_loaded(dtype):
    tile = jnp.arange(64 * 32, dtype=dtype).reshape(64, 32)
    np.testing.assert_array_equal(simulate(fragments.loaded, to_fragments(tile)).check(), tile)


def test_factor():
    tile = _tile(64, jnp.bfloat16)
    np.testing.assert_array_equal(simulate(fragments.factor, tile).check(), tile)


@pytest.mark.parametrize("beside", [0, 8])
def test_loaded_factor(beside):
    tile = jnp.tile(_tile(80 + beside, jnp.bfloat16), (2, 1))
    got = simulate(functools.partial(fragments.loaded_factor, beside=beside), tile).check()
    np.testing.assert_array_equal(got, tile[:, :80])


@pytest.mark.parametrize(
    ("columns", "start", "swizzled", "wanted"),
    [
        (80, 0, None, range(64)),
        (80, 64, None, [*range(64, 80)] * 4),
        (96, 64, 32, [*range(64, 96), *range(80, 96)]),
        (64, 0, 64, range(64)),
    ],
)
def test_loaded_turned_factor(columns, start, swizzled, wanted):
    tile = _tile(columns, jnp.bfloat16)
    got = simulate(functools.partial(fragments.loaded_factor, start=start, swizzled=swizzled), tile).check()
    np.testing.assert_array_equal(got[: len(wanted)], tile[:, np.array(wanted)].T)


def test_turned():
    tile = _tile(8, jnp.bfloat16)
    np.testing.assert_array_equal(simulate(fragments.turned, tile).check(), tile.T[:-1])


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        (fragments.stored, _tile()),
        (fragments.factor, _tile(64, jnp.bfloat16)),
        (fragments.turned, _tile(8)),
    ],
)
def test_what_is_not_committed_is_found(kernel, tile):
    sim = simulate(functools.partial(kernel, fault="not committed"), tile)
    assert sim.faulty
    assert tells(sim, "write of SMEM"), sim.report()
