"""The scan on the GPU at hand: every backend against the recurrence in numpy, and repeatability.

python3 -m pytest tests/gpu/test_ssd.py -n16 --maxprocesses=16 -p no:cacheprovider -x

(-x, since a run that is cut off says nothing of what failed; with XLA_PYTHON_CLIENT_PREALLOCATE=false, since workers
share the GPU. Most of the time is the host's: compiling, and the oracle in numpy.)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
from ops.ssd.cases import Case, build, runner
from simulator.ssd import plain_grads, problem_of

import fast_layers
from fast_layers.arch import lowering_targets
from fast_layers.dispatch import PASSES
from fast_layers.ops.ssd import hopper_fwd
from fast_layers.ops.ssd.backends import BACKENDS
from fast_layers.ops.ssd.config import HopperForwardTiles
from fast_layers.testing.closeness import assert_bitwise_equal, assert_close_over_draws

NAMES = [backend.name for backend in BACKENDS if backend.name != "reference"]
RUNS = 20
ENOUGH_HEADS = 48
SHAPES = {
    "one token": Case(length=1, heads=2, head_dim=64, state_dim=64),
    "a tail": Case(length=1000, heads=4, groups=2, head_dim=64, state_dim=128),
    "everything": Case(
        length=333,
        heads=6,
        head_dim=64,
        state_dim=128,
        D="channel",
        z=True,
        softplus=True,
        dt_bias=True,
        initial_state=True,
        segments="rows",
    ),
    "heads of 128": Case(length=200, heads=3, head_dim=128, state_dim=64, initial_state=True),
    "heads of 32": Case(length=200, heads=4, groups=4, head_dim=32, state_dim=16),
    "a state of 256": Case(
        length=333,
        heads=6,
        groups=2,
        head_dim=64,
        state_dim=256,
        D="head",
        z=True,
        softplus=True,
        dt_bias=True,
        initial_state=True,
        segments="rows",
    ),
    "a state of 256, split": Case(batch=1, length=2048, heads=3, head_dim=64, state_dim=256, D="head"),
    "a state of 256, heads of 128": Case(length=333, heads=3, head_dim=128, state_dim=256, initial_state=True),
    "a split sequence": Case(batch=1, length=2048, heads=2, head_dim=64, state_dim=128, D="head", initial_state=True),
    # With small states, since the oracle in numpy goes through all of them token by token, and keeps each.
    "many panels a block": Case(batch=2, length=1000, heads=48, head_dim=32, state_dim=64, D="head"),
    "two launches": Case(
        batch=4, length=1088, heads=80, head_dim=32, state_dim=16, z=True, initial_state=True, segments="rows"
    ),
    "extreme steps": Case(length=300, heads=2, head_dim=64, state_dim=64, dt="extreme", segments="rows"),
}


def _skip_if_refused(name, case, dtype):
    built = build(case, dtype)
    (plan,) = fast_layers.explain(lambda *o: fast_layers.ssd(*o), *built.operands[:5]).plans
    (backend,) = (backend for backend in BACKENDS if backend.name == name)
    arch = lowering_targets()[0]
    reasons = [backend.supports(plan.problem, arch, pass_) for pass_ in PASSES]
    if any(reasons):
        refusals.skip(name, arch, reasons)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_parity(name, shape, dtype):
    """Kernels to the rounding of plain code with matmuls in the same dtype; the xla backend to a few percent."""
    case = SHAPES[shape]
    _skip_if_refused(name, case, dtype)
    run, run_plain = runner(name), runner("xla")

    def make(draw):
        built = build(case, dtype, draw)
        got, want, plain = run(built), built.oracle(), run_plain(built)
        return got, want, plain, plain._replace(grads=type(plain.grads)(*plain_grads(built)[1]))

    if name == "xla":
        built = build(case, dtype)
        got, want = run(built), built.oracle()
        for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            off, size = np.linalg.norm(np.asarray(x, np.float64) - y), np.linalg.norm(y)
            assert off <= 0.03 * size, f"{jax.tree_util.keystr(path)}: off by {off:.3g}, its norm is {size:.3g}"
    else:
        # A has one gradient for each head: of few heads, too few numbers for one draw.
        assert_close_over_draws(make, f"{name}, {shape}: ", draws=1 if case.heads >= ENOUGH_HEADS else 4)


def test_two_launches_give_the_bits_of_one():
    """With states of 128, for which the oracle in numpy would take minutes."""
    case = dataclasses.replace(SHAPES["two launches"], head_dim=64, state_dim=128)
    _skip_if_refused("hopper", case, jnp.bfloat16)
    problem, inputs, aux = problem_of(build(case, jnp.bfloat16))
    tiles = HopperForwardTiles.of(problem)
    assert tiles.late_blocks > 0
    in_one = dataclasses.replace(tiles, late_blocks=0, late_chunks=0)
    got, want = (
        jax.jit(lambda inputs, aux, tiles=tiles: hopper_fwd.scan(problem, inputs, aux, tiles))(inputs, aux)
        for tiles in (tiles, in_one)
    )
    assert_bitwise_equal(got, want)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(jax.device_get(got)))


@pytest.mark.parametrize(("state_dim", "batch"), [(128, 2), (256, 2), (128, 4)], ids=str)  # the last in two launches
@pytest.mark.parametrize("name", NAMES)
def test_twenty_runs_give_the_same_bits(name, state_dim, batch):
    """A race between warpgroups shows as bits that change; so inputs stay the same, and other work runs in between."""
    case = Case(batch=batch, length=1088, heads=80, head_dim=64, state_dim=state_dim, D="head", segments="rows")
    _skip_if_refused(name, case, jnp.bfloat16)
    built, run = build(case, jnp.bfloat16), runner(name)
    rng = np.random.default_rng(0)
    first = jax.device_get(run(built))
    for i in range(1, RUNS):
        jnp.sort(jnp.asarray(rng.normal(size=1 << 16))).block_until_ready()
        assert_bitwise_equal(jax.device_get(run(built)), first, f"run {i}: ")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(first))
