"""The Hopper gated norm: right and free of races over shapes and options; faults in its bookkeeping change values."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fast_layers
from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES
from fast_layers.ops.gated_norm import config, hopper_call, hopper_norm
from fast_layers.ops.gated_norm.config import HopperTiles
from fast_layers.ops.gated_norm.problem import Problem
from fast_layers.testing import simulate
from fast_layers.testing._parity_gated_norm import _Draw
from simulator.elementwise import H200, NormCase, parity

pytestmark = pytest.mark.simulator

OP = "gated_rms_norm"
CASES = {
    "a warp for each row, groups, an odd number of rows": NormCase(rows=(3, 9), features=128, group_size=64),
    "rows over the warpgroup": NormCase(rows=(7,), features=1280),
}
MORE = {
    "a warp for each row, norm before gate": NormCase(rows=(30,), features=256, norm_before_gate=True),
    "rows over the warpgroup, norm before gate": NormCase(
        rows=(7,), features=2560, group_size=1280, norm_before_gate=True
    ),
    "one row": NormCase(rows=(), features=256),
    "three rows of four": NormCase(rows=(3,), features=128),
}


@pytest.fixture
def few_blocks(monkeypatch):
    """Of several tiles each."""
    monkeypatch.setattr(config, "_BLOCKS", 4)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_case(name, few_blocks):
    table = parity(OP, {**CASES, **MORE}[name])
    assert table.ok, f"\n{table}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["float16", "float32"])
def test_other_dtypes(dtype, few_blocks):
    table = parity(OP, CASES["a warp for each row, groups, an odd number of rows"], dtype)
    assert table.ok, f"\n{table}"


@pytest.mark.exhaustive
def test_vmap_over_everything(few_blocks):
    """Weights too, of which each example then has its own."""
    draws = [_Draw.of(NormCase(rows=(9,), features=128), jnp.float32, i) for i in range(2)]
    problem = draws[0].problem
    inputs = jax.tree.map(lambda *x: jnp.stack(x), *(d.inputs for d in draws))
    d_out = jnp.stack([d.d_out for d in draws])

    def both(inputs, d_out):
        return hopper_norm.forward(problem, inputs), hopper_norm.backward(problem, inputs, d_out)

    mapped = simulate(jax.vmap(both), inputs, d_out).check()
    for i, draw in enumerate(draws):
        want = simulate(both, draw.inputs, draw.d_out).check()
        for got, x in zip(jax.tree.leaves(mapped), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got[i], x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["rows twice", pytest.param("no mean", marks=pytest.mark.exhaustive)])
def test_a_planted_fault_is_found(fault, monkeypatch, few_blocks):
    # Without their jit, which would give back what was traced before.
    for launch in ("_launch_forward", "_launch_backward"):
        monkeypatch.setattr(hopper_norm, launch, getattr(hopper_norm, launch).__wrapped__)
    if fault == "rows twice":
        monkeypatch.setattr(hopper_norm._Block, "once", lambda self, tile, x: x)
        wanted = {"dweight"}
    else:
        monkeypatch.setattr(hopper_norm._Block, "mean", lambda self, pieces: sum(pieces).sum(1))
        wanted = {"out", "dy", "dz", "dweight"}
    table = parity(OP, CASES["a warp for each row, groups, an odd number of rows"])
    assert {row.quantity for row in table.rows if row.failure} == wanted, f"\n{table}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": np.dtype(np.float64)}, "takes bfloat16, float16 and float32, got float64"),
        ({"group_size": 32}, "takes groups of multiples of 64 up to 1024, and of 256 up to 8192, features, got 32"),
        ({"features": 1152, "group_size": 1152}, "features, got 1152"),
        ({"features": 8448, "group_size": 8448}, "features, got 8448"),
        ({"rows": (0, 3)}, "needs rows, got y [0, 3, 1024]"),
        ({"rows": (2**22,)}, "takes up to 2147483647 numbers"),
        ({"split_groups": True}, "needs the features of a group on one device"),
    ],
    ids=lambda x: x[-20:] if isinstance(x, str) else "",
)
def test_refusals(options, reason):
    problem = Problem((5,), 1024, np.dtype(np.float32), 1024, 1e-5, False)
    for pass_ in PASSES:
        assert hopper_call.supports(problem, H200, pass_) is None
        assert reason in hopper_call.supports(dataclasses.replace(problem, **options), H200, pass_)


def test_every_documented_group_has_tiles_and_no_other():
    documented = {*range(64, 1025, 64), *range(1280, 8193, 256)}
    assert documented == {size for size in range(1, 9000) if HopperTiles.of(size) is not None}


def test_blocks_share_the_rows_whole():
    """Each block has two tiles of rows at least, since the last one may reach back into the one before."""
    tiles = HopperTiles(4, 128, 4)
    for rows in (1, 4, 9, 31, 32, 5000, 100_000):
        for others in (1, 8, 5000):
            blocks, count = tiles.blocks(rows, others), -(-rows // 4)
            borders = [i * count // blocks for i in range(blocks + 1)]
            assert borders[-1] == count
            assert blocks == 1 or min(b - a for a, b in itertools.pairwise(borders)) >= 2


def test_only_on_hopper():
    y, w = np.zeros((4, 256), np.float32), np.zeros(256, np.float32)
    problem = Problem((4,), 256, np.dtype(np.float32), 256, 1e-5, False)
    assert "compute capability 9.0" in hopper_call.supports(problem, Arch("cuda", "B200", (10, 0)), "forward")
    with pytest.raises(ValueError, match=r'needs an NVIDIA GPU .* implementation="xla"'):
        fast_layers.gated_rms_norm(y, y, w, implementation="hopper")


def test_tiles_refuse_themselves():
    with pytest.raises(ValueError, match="a row for the warpgroup, or 4"):
        HopperTiles(2, 128, 4)
    with pytest.raises(ValueError, match="must be a multiple of 128 for each"):
        HopperTiles(4, 192, 4)
    with pytest.raises(ValueError, match="would hold 72 of a row"):
        HopperTiles(1, 9216, 4)
