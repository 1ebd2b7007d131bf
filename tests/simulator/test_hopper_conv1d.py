"""The Hopper convolution: right and free of races over shapes and options; faults in its bookkeeping change values."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fast_layers
from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES
from fast_layers.ops.conv1d import hopper_call, hopper_conv, xla
from fast_layers.ops.conv1d.config import HopperTiles
from fast_layers.ops.conv1d.problem import Aux, Outputs, Problem
from fast_layers.testing import simulate
from fast_layers.testing._parity_conv1d import _Draw
from simulator.elementwise import H200, ConvCase, parity

pytestmark = pytest.mark.simulator

OP = "causal_conv1d"
# Three segments, the last one ragged, each of two loads.
SHORT = HopperTiles(channels=128, rows=4, segment=8)


def _case(**options) -> ConvCase:
    return ConvCase(**{"batch": 1, "length": 19, "channels": 128, **options})


EVERYTHING = _case(batch=2, documents=(6, 1, 12), initial_state=True, final_state=True)
CASES = {
    "documents and states": EVERYTHING,
    "2 taps, no activation, two blocks across": _case(width=2, channels=256, activation=None, bias=False),
}
MORE = {
    "3 taps": _case(width=3, length=16, initial_state=True),
    "1 position": _case(length=1, initial_state=True, final_state=True),
    "2 positions": _case(length=2, batch=2, initial_state=True, final_state=True),
    "a last segment of 1": _case(length=17, final_state=True),
    "the last segment's end in its first load": _case(length=18, final_state=True),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_case(name):
    table = parity(OP, {**CASES, **MORE}[name], tiles=SHORT)
    assert table.ok, f"\n{table}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["float16", "float32"])
def test_other_dtypes(dtype):
    table = parity(OP, EVERYTHING, dtype, SHORT)
    assert table.ok, f"\n{table}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("channels", [384, 512])
def test_its_own_tiles(channels):
    table = parity(OP, _case(length=300, channels=channels))
    assert table.ok, f"\n{table}"


def test_nothing_is_written_into_what_the_kernel_returns():
    """XLA of JAX 0.11 fails on a GPU where an update in place follows a custom call."""
    draw = _Draw.of(EVERYTHING, jnp.bfloat16, 0)
    backward = functools.partial(hopper_conv.backward, draw.problem)
    traced = str(jax.make_jaxpr(backward)(draw.inputs, draw.aux, draw.d_outputs))
    assert "conv_backward" in traced
    assert "scatter" not in traced
    assert "dynamic_update_slice" not in traced


@pytest.mark.parametrize("poison", [np.nan, pytest.param(np.inf, marks=pytest.mark.exhaustive)])
def test_what_other_documents_hold_does_not_matter(poison):
    draw = _Draw.of(_case(documents=(6, 1, 12)), jnp.float32, 0)
    here = np.s_[:, 7:19]
    inputs, d_y = draw.inputs, draw.d_outputs

    def both(x, d_y):
        arguments = draw.problem, inputs._replace(x=x), draw.aux
        return hopper_conv.forward(*arguments, SHORT).y, hopper_conv.backward(*arguments, Outputs(d_y), SHORT).x

    spoiled = (jnp.full_like(a, poison).at[here].set(a[here]) for a in (inputs.x, d_y.y))
    want = (xla.forward(draw.problem, inputs, draw.aux).y, xla.backward(draw.problem, inputs, draw.aux, d_y).x)
    for got, clean in zip(simulate(both, *spoiled).check(), want, strict=True):
        np.testing.assert_allclose(got[here], clean[here], rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_vmap_over_everything():
    """Weights too, of which each example then has its own."""
    draws = [_Draw.of(_case(length=9, initial_state=True), jnp.float32, i) for i in range(2)]
    problem = draws[0].problem
    inputs, d_out = (
        jax.tree.map(lambda *x: jnp.stack(x), *each)
        for each in ([d.inputs for d in draws], [d.d_outputs for d in draws])
    )

    def both(inputs, d_out):
        y = hopper_conv.forward(problem, inputs, Aux(), SHORT)
        return y, hopper_conv.backward(problem, inputs, Aux(), d_out, SHORT)

    mapped = simulate(jax.vmap(both), inputs, d_out).check()
    for i, draw in enumerate(draws):
        want = simulate(both, draw.inputs, draw.d_outputs).check()
        for got, x in zip(jax.tree.leaves(mapped), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(got[i], x)


def _no_history(p, refs, block, load):
    return (jnp.zeros_like(block.w[0]),) * p.history


def _never_hidden(p, reach, window):
    return list(window)


def _whole_loads_only(tiles, p, count, first, rows, carry):
    def step(k, carry):
        return rows(tiles.rows, first + k * tiles.rows, carry)

    return jax.lax.fori_loop(0, count // tiles.rows, step, carry)


FAULTS = {
    "history": ("_history", _no_history, _case(length=12)),
    "documents": ("_seen", _never_hidden, EVERYTHING),
    "ragged end": ("_over_rows", _whole_loads_only, EVERYTHING),
}


@pytest.mark.parametrize(
    "fault", ["history", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FAULTS if name != "history")]
)
def test_a_planted_fault_is_found(fault, monkeypatch):
    name, wrong, case = FAULTS[fault]
    # Without their jit, which would give back what was traced before.
    for launch in ("_launch_forward", "_launch_backward"):
        monkeypatch.setattr(hopper_conv, launch, getattr(hopper_conv, launch).__wrapped__)
    monkeypatch.setattr(hopper_conv, name, wrong)
    table = parity(OP, case, tiles=SHORT)
    assert {"y", "dw"} <= {row.quantity for row in table.rows if row.failure}, f"\n{table}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": np.dtype(np.float64)}, "takes bfloat16, float16 and float32, got float64"),
        ({"channels": 200}, "takes channels in multiples of 128, one for each thread, got 200"),
        ({"width": 5}, "takes 2 to 4 taps, got 5"),
        ({"batch": 0}, "needs examples, got x [0, "),
        ({"batch": 2**12, "length": 2**12}, "takes up to 2147483647 numbers"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_refusals(options, reason):
    problem = Problem(1, 100, 128, 4, np.dtype(np.float32))
    for pass_ in PASSES:
        assert hopper_call.supports(problem, H200, pass_) is None
        assert reason in hopper_call.supports(dataclasses.replace(problem, **options), H200, pass_)


def test_only_on_hopper():
    x, w = np.zeros((1, 8, 128), np.float32), np.zeros((4, 128), np.float32)
    problem = Problem(1, 8, 128, 4, np.dtype(np.float32))
    assert "compute capability 9.0" in hopper_call.supports(problem, Arch("cuda", "B200", (10, 0)), "forward")
    with pytest.raises(ValueError, match=r'needs an NVIDIA GPU .* implementation="xla"'):
        fast_layers.causal_conv1d(x, w, implementation="hopper")


def test_tiles_refuse_themselves():
    with pytest.raises(ValueError, match="must be 128 or 256"):
        HopperTiles(channels=384, rows=4)
    with pytest.raises(ValueError, match="must be a multiple of"):
        HopperTiles(channels=128, rows=3, segment=8)
