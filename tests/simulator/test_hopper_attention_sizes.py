"""The sizes of keys and values that Hopper's forward finds for its backward: right, free of races, and of use."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

from fast_layers.kernel_parts.row_sizes import sizes_of
from fast_layers.ops.attention import api, hopper_bwd_rows, hopper_call, hopper_fwd, hopper_fwd_sizes
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.ops.attention.problem import Residuals
from fast_layers.testing import simulate
from simulator.attention import StandIn, backward_tiles, forward_tiles, patched
from simulator.found import tells

pytestmark = pytest.mark.simulator

_CAUSAL = HopperForwardTiles(
    3, 128, 3, 2, blocks=2, takes_turns=False, own_spans=True, last_keys_first=True, keys_before_wait=64
)
_FULL = HopperForwardTiles(3, 128, 3, 2, blocks=2, takes_turns=False, keys_before_wait=16)

# name: (batch, queries, keys, query heads, key heads, is_causal, dtype, tiles)
CASES: dict[str, tuple[Any, ...]] = {
    # Pieces of one to three tiles of keys, for slots for three: most are looked at when the piece after loads.
    "causal, grouped heads": (1, 384, 384, 2, 1, True, jnp.bfloat16, _CAUSAL),
    "causal, two examples": (2, 384, 384, 1, 1, True, jnp.float16, _CAUSAL),
    "causal, more queries than keys": (1, 640, 256, 1, 1, True, jnp.bfloat16, _CAUSAL),
    # More tiles of keys than of queries, and fewer.
    "full": (1, 384, 640, 1, 1, False, jnp.bfloat16, _FULL),
    "full, one tile of keys": (1, 576, 128, 2, 1, False, jnp.bfloat16, _FULL),
}


def _draw(name: str, broken: bool = False):
    """(inputs, aux, problem, tiles)."""
    batch, q_len, kv_len, heads, kv_heads, causal, dtype, tiles = CASES[name]
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)
    query, key, value = (
        np.array(jax.random.normal(k, (batch, *shape, 64), dtype)) for k, shape in zip(keys, shapes, strict=True)
    )
    key[0, 5, 0, 63], value[0, 77, 0, 0] = -9.0, 8.0  # of each row another chunk of columns has the largest
    if broken:
        key[0, 100, 0, 3], value[0, 3, 0, 40], value[0, 120, 0, 7] = np.inf, np.nan, -np.inf
    inputs, aux, options, _ = api._prepare(*map(jnp.asarray, (query, key, value)), is_causal=causal)
    return inputs, aux, options.problem(inputs, aux), tiles


def _forward(name: str, broken: bool = False):
    inputs, aux, problem, tiles = _draw(name, broken)
    with patched(forward_tiles(tiles)):
        assert hopper_fwd.measures(problem)
        measuring = functools.partial(hopper_fwd.attend_measuring, problem)
        return inputs, simulate(measuring, inputs, aux, timeout=120.0)


def _wanted(inputs):
    """By heads and tiles of keys."""
    both = [sizes_of(x).swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1, 128) for x in (inputs.key, inputs.value)]
    return np.asarray(jnp.stack(both, 3), np.float32)


@pytest.mark.parametrize("broken", [False, True], ids=["finite", "broken"])
@pytest.mark.parametrize("name", some_each_run(CASES, {"causal, grouped heads"}))
def test_sizes(name, broken):
    """All of them, of broken rows too, where roles do their pieces again; with the results that there are without."""
    inputs, simulation = _forward(name, broken)
    out, lse, sizes = simulation.check()
    wanted = _wanted(inputs)
    assert np.isinf(wanted).sum() == (3 if broken else 0)
    np.testing.assert_array_equal(np.asarray(sizes, np.float32), wanted)
    _, aux, problem, tiles = _draw(name, broken)
    with patched(forward_tiles(tiles)):
        alone = simulate(functools.partial(hopper_fwd.attend, problem), inputs, aux, timeout=120.0).check()
    for got, want in zip((out, lse), alone, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


FAULTS = {
    "a tile comes before all have read the last": ("commit_smem #1", "read of SMEM"),
    "the last keys are not awaited": ("barrier_wait #3", "read of SMEM"),
    "the last values are not awaited": ("barrier_wait #6", "read of SMEM"),
}


@pytest.mark.parametrize("fault", some_each_run(FAULTS, {"a tile comes before all have read the last"}))
def test_planted_fault_is_found(fault, monkeypatch):
    event, access = FAULTS[fault]
    stand_in = StandIn(event)
    monkeypatch.setattr(hopper_fwd_sizes, "plgpu", stand_in)
    _, simulation = _forward("causal, two examples")
    assert stand_in.hits == 1
    assert tells(simulation, access), simulation.report()


def test_a_tile_that_nobody_looks_at_shows(monkeypatch):
    """The simulator starts from NaN."""
    monkeypatch.setattr(hopper_fwd_sizes.Measure, "rest", lambda *_: None)
    inputs, simulation = _forward("causal, grouped heads")
    sizes = np.asarray(simulation.outputs[2], np.float32)
    assert (sizes != _wanted(inputs)).any()


BACKWARD = HopperBackwardTiles(128, blocks=2)


@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["finite", "broken"])
def test_the_backward_takes_them(broken):
    """dK and dV have the bits that they have without; dQ's units are other powers of two at most."""
    name = "causal, grouped heads"
    inputs, aux, problem, tiles = _draw(name, broken)
    d_out = jax.random.normal(jax.random.key(1), inputs.query.shape, problem.dtype)

    def gradients(inputs, aux, d_out, saves: bool):
        if saves:
            (out, lse), sizes = hopper_call.forward_saving(problem, inputs, aux)
            assert sizes is not None
        else:
            (out, lse), sizes = hopper_call.forward(problem, inputs, aux), None
        residuals = Residuals(inputs, aux, out, lse, sizes)
        return hopper_call.backward(problem, residuals, d_out, jnp.zeros_like(lse))[:3]

    with patched(forward_tiles(tiles), backward_tiles(BACKWARD), (hopper_bwd_rows, "HOPPER_SMS", 1)):
        with_sizes, without = (
            [
                np.asarray(x, np.float32)
                for x in simulate(functools.partial(gradients, saves=saves), inputs, aux, d_out, timeout=240.0).check()
            ]
            for saves in (True, False)
        )
    for got, want in zip(with_sizes[1:], without[1:], strict=True):
        np.testing.assert_array_equal(got, want)
    assert np.isnan(without[0]).any() == broken
    np.testing.assert_allclose(with_sizes[0], without[0], rtol=2**-7, atol=1e-5)


def test_lengths_of_values_are_bounded_by_their_sizes(monkeypatch):
    """What the backward knows of rows, with sizes and without: by a pass that does not read keys and values then."""
    inputs, _, problem, _ = _draw("causal, grouped heads", broken=True)
    d_out = jax.random.normal(jax.random.key(1), inputs.query.shape, problem.dtype)
    operands = hopper_bwd_rows.Operands(inputs.query, d_out, inputs.key, inputs.value)
    wanted = hopper_bwd_rows.row_sums_by_xla(operands)
    monkeypatch.setattr(hopper_bwd_rows, "HOPPER_SMS", 1)
    kernel: Any = hopper_bwd_rows.row_sums
    sizes = jnp.asarray(_wanted(inputs), problem.dtype)
    nothing = jnp.full_like(inputs.key, jnp.nan)
    given = operands._replace(key=nothing, value=nothing, sizes=sizes)
    got = simulate(lambda operands: kernel.__wrapped__(jnp.int32, problem, operands), given, timeout=60.0).check()
    for name in ("delta", "d_out_length", "key_size", "value_size"):
        np.testing.assert_allclose(getattr(got, name), getattr(wanted, name), 1e-5, 1e-5, err_msg=name)
    finite = np.isfinite(wanted.value_length)
    np.testing.assert_array_equal(np.isfinite(got.value_length), finite)
    ratio = np.asarray(got.value_length)[finite] / np.asarray(wanted.value_length)[finite]
    assert ratio.min() >= 1 - 1e-6
    assert ratio.max() <= 8
    np.testing.assert_array_equal(got.d_query, 0)
