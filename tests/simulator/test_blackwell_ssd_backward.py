"""The backward of the Blackwell scan: right and free of races over shapes and options; every planted fault found."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, assert_close_over_draws
from jax.experimental.pallas import mosaic_gpu as plgpu
from ops.ssd.cases import Case, build

from fast_layers.ops.ssd import blackwell_bwd, blackwell_call, blackwell_states
from fast_layers.ops.ssd.blackwell_config import (
    BLACKWELL_SMEM_BYTES,
    BLACKWELL_TMEM_COLUMNS,
    HEAD_DIMS,
    STATE_DIMS,
    BlackwellBackwardTiles,
    BlackwellStateTiles,
)
from fast_layers.ops.ssd.problem import Problem, Residuals
from fast_layers.testing import Simulation, simulate
from simulator import test_hopper_ssd_backward
from simulator.blackwell_attention import Without
from simulator.ssd import plain_grads, problem_of

pytestmark = pytest.mark.simulator


def _case(**options) -> Case:
    return Case(**{"batch": 1, "heads": 2, "head_dim": 32, "state_dim": 16, **options})


EVERYTHING = _case(
    length=150, D="channel", z=True, softplus=True, dt_bias=True, limit=(0.0, 0.1), segments="rows", initial_state=True
)
CASES = {
    "two chunks": _case(length=150, D="head", initial_state=True),
    "everything": EVERYTHING,
    "one token": _case(length=1),
    "one chunk": _case(length=128, state_dim=64),
    "three chunks and a tail": _case(length=390, batch=2, head_dim=64),
    "D for each head, two groups": _case(length=130, heads=8, groups=2, D="head", initial_state=True),
    "heads of 128, a state of 128": _case(length=200, heads=1, head_dim=128, state_dim=128, initial_state=True),
    "a group for each head": _case(length=140, heads=3, groups=3, head_dim=64, state_dim=32),
    "one head of 32 a block, a state of 96": _case(length=140, heads=3, state_dim=96),
    "heads of 32, a state of 128": _case(length=140, state_dim=128, initial_state=True),
    "gate, D for each head": _case(length=140, heads=5, D="head", z=True),
    "extreme steps": _case(length=260, dt="extreme", segments="rows", initial_state=True),
    "forgetting slowly": _case(length=260, A="near 0", initial_state=True),
}
CASES |= {
    f"Hopper's: {name}": case
    for name, case in test_hopper_ssd_backward.MORE_CASES.items()
    if case.state_dim in STATE_DIMS and case not in CASES.values()
}


def _simulated(case: Case, dtype: Any = jnp.bfloat16, draw: int = 0, **tiles: Any):
    built = build(case, dtype, draw)
    problem, inputs, aux = problem_of(built)

    def grad(inputs, aux, *cotangents):
        return blackwell_bwd.scan_grad(problem, Residuals(inputs, aux), *cotangents, **tiles)

    return built, simulate(grad, inputs, aux, built.d_out, built.d_final)


def _check(case: Case, dtype: Any = jnp.bfloat16, **tiles) -> None:
    def make(draw):
        built, simulation = _simulated(case, dtype, draw, **tiles)
        got = simulation.check()
        given = [name for name, x in got._asdict().items() if x is not None]
        assert given == [name for name, x in built.operands._asdict().items() if x is not None]
        grads = built.oracle().grads
        return tuple({name: getattr(x, name) for name in given} for x in (got, grads, *plain_grads(built)))

    assert_close_over_draws(make, draws=1)


EACH_RUN = ("two chunks",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EACH_RUN else pytest.mark.exhaustive) for n in CASES]
)
def test_case(name):
    _check(CASES[name])


@pytest.mark.exhaustive
def test_slots_and_slices():
    """Three and six units a block through rings of two and three."""
    case = _case(length=140, heads=6, D="head")
    _check(case, tiles=BlackwellBackwardTiles(2), state_tiles=BlackwellStateTiles(2, 32, 1))
    _check(case, tiles=BlackwellBackwardTiles(3, slices=2), state_tiles=BlackwellStateTiles(1, 32, 2))


@pytest.mark.exhaustive
def test_float16():
    _check(EVERYTHING, jnp.float16)


@pytest.mark.exhaustive
def test_other_documents_change_no_bit():
    """Boundaries inside a chunk, at the edge of one, and a document over several."""
    case = _case(length=330, heads=1)
    ids = np.repeat([0, 1, 2, 3], [100, 28, 156, 46])
    grads = []
    for seed in (1, 2):
        built, other = build(case, jnp.bfloat16), build(case, jnp.bfloat16, draw=seed)

        def mix(a, b):
            return np.concatenate([b[:, :128], a[:, 128:284], b[:, 284:]], axis=1)

        names = ("x", "dt", "B", "C")
        mixed = {name: mix(getattr(built.operands, name), getattr(other.operands, name)) for name in names}
        operands = built.operands._replace(**mixed)
        problem, inputs, aux = problem_of(dataclasses.replace(built, operands=operands, segment_ids=ids))
        cotangents = mix(built.d_out, other.d_out), other.d_final
        simulation = simulate(
            lambda i, a, *c, p=problem: blackwell_call.backward(p, Residuals(i, a), *c), inputs, aux, *cotangents
        )
        grads.append(simulation.check())
    for name in ("x", "dt", "B", "C"):
        np.testing.assert_array_equal(*(np.asarray(getattr(g, name)[:, 128:284]) for g in grads), err_msg=name)


@pytest.mark.exhaustive
def test_vmap():
    built = build(_case(length=140, batch=2, heads=1, D="head", initial_state=True), jnp.bfloat16)
    problem, inputs, aux = problem_of(built)
    rest = (built.d_out, built.d_final)

    def grad(problem, inputs, *rest):
        return blackwell_call.backward(problem, Residuals(inputs, aux), *rest)

    def run(x, dt, B, C, state, d_out, d_final):
        single = inputs._replace(x=x, dt=dt, B=B, C=C, initial_state=state)
        return grad(dataclasses.replace(problem, batch=1), single, d_out, d_final)

    each = [np.asarray(v)[:, None] for v in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.initial_state, *rest)]
    mapped = simulate(jax.vmap(run), *each).check()
    for name in ("x", "dt", "B", "C", "initial_state"):
        got, *others = (getattr(g, name) for g in (mapped, built.oracle().grads, *plain_grads(built)))
        assert_close(got[:, 0], *others, name=name)


# Event left out -> what it does, by kernel. Each must be told by the simulator, as a race, a deadlock or broken rules.
FAULTS = {
    "states": {
        "chunks are not awaited": "barrier_wait ready",
        "slots are refilled early": "barrier_wait consumed",
        "the state is not awaited": "barrier_wait state_ready",
        "what is scaled is not awaited": "barrier_wait scaled_ready",
        "the state is read in flight": "barrier_wait state_done",
        "what is scaled is not committed": "commit_smem #1",
        "the state is not committed": "commit_smem #2",
        "the scaled state is not committed": "commit_tmem #2",
        "the state's slot is reused in flight": "wait_smem_to_gmem #1",
        "the last state is not awaited": "wait_smem_to_gmem #2",
    },
    "columns": {
        "B and C are not awaited": "barrier_wait projections_ready",
        "units are not awaited": "barrier_wait ready",
        "slots are refilled early": "barrier_wait consumed",
        "pairs are read in flight": "barrier_wait pairs_ready",
        "pairs are overwritten": "barrier_wait pairs_consumed",
        "inter is read in flight": "barrier_wait inter_ready",
        "inter is overwritten": "barrier_wait inter_consumed",
        "what is scaled is not awaited": "barrier_wait scaled_ready",
        "weights are not awaited": "barrier_wait weights_ready",
        "out is read in flight": "barrier_wait unit_done",
        "the gradient of scores is not awaited": "barrier_wait d_scores_ready",
        "sums are read in flight": "barrier_wait sums_ready",
        "what is scaled is not committed": "commit_smem #5",
        "out is not committed": "commit_smem #6",
        "the gradient of scores is not committed": "commit_smem #2",
        "inter is not committed": "commit_tmem #3",
        "weights are not committed": "commit_tmem #1",
        "loads from tensor memory are not awaited": "wait_load_tmem",
        "the end of products is not told": "tcgen05_commit_arrive unit_done",
        "out's slot is refilled in flight": "wait_smem_to_gmem #1",
    },
    "rows": {
        "slots are refilled early": "barrier_wait consumed",
        "scores are overwritten": "barrier_wait pairs_consumed",
        "inter is overwritten": "barrier_wait inter_consumed",
        "what passes is not awaited": "barrier_wait passing_ready",
        "what passed is read in flight": "barrier_wait passed_ready",
        "what passed is overwritten": "barrier_wait passed_consumed",
        "what is scaled is overwritten": "barrier_wait unit_done",
        "the triangle is not committed": "commit_tmem #1",
        "reads of a slot are not committed": "commit_smem #4",
        "what passes is not committed": "commit_smem #1",
    },
    "columns of documents": {
        "documents are not awaited": "barrier_wait projections_ready",
        "scores are hidden in flight": "barrier_wait scores_ready",
        "hidden scores are not committed": "commit_tmem #1",
        "scores are hidden before they are loaded": "wait_load_tmem #1",
    },
    "gated rows": {
        "weights overwrite what passed": "barrier_wait passed_consumed",
        "what passed overwrites weights": "barrier_wait unit_done",
        "weights are not committed": "commit_tmem #1",
    },
}
TELLING = {("columns", "out's slot is refilled in flight"), ("rows", "what passed is overwritten")}


def _alone(kernel: str, timeout: float = 120.0) -> Simulation:
    """Five units, or chunks, through a ring of two."""
    way = kernel.removeprefix("gated ").removesuffix(" of documents")
    chunks, heads = (5, 1) if way == "states" else (1, 5)
    built = build(_case(length=128 * chunks, heads=heads, z=kernel.startswith("gated ")), jnp.bfloat16)
    problem, inputs, _ = problem_of(built)
    rng = np.random.default_rng(0)

    def drawn(*shape: int, dtype: Any = jnp.float32):
        return jnp.asarray(rng.uniform(size=shape), dtype)

    factors = drawn(1, chunks, heads, 6, 128)
    if way == "states":
        sweep = blackwell_states.Sweep(inputs.x, inputs.B)
        operands: Any = blackwell_states.StateOperands((sweep, sweep), factors, drawn(1, 2, 1, 128, 16))
        launch = _bound(blackwell_states._launch, BlackwellStateTiles(1, 32, 2), problem)
    else:
        between = drawn(1, 1, 2, heads, 32, 16, dtype=jnp.bfloat16)
        x, B = (jnp.asarray(v) for v in (inputs.x, inputs.B))
        first = jnp.zeros((1, 1, 128), jnp.int32) if kernel.endswith(" of documents") else None
        operands = blackwell_bwd.BackwardOperands(x, x, B, B, between, factors, first, None)
        launch = _bound(blackwell_bwd._launch, way, BlackwellBackwardTiles(2), problem)
    return simulate(launch, operands, timeout=timeout)


def _bound(launch: Any, *static: Any):
    return lambda operands: launch(*static, operands)


@contextlib.contextmanager
def _without(kernel: str, *events: str) -> Iterator[Without]:
    stand_in, module = Without(*events), blackwell_states if kernel == "states" else blackwell_bwd
    with pytest.MonkeyPatch.context() as patch:
        # Without its jit, which would give back what was traced before.
        patch.setattr(module, "_launch", module._launch.__wrapped__)
        patch.setattr(module, "plgpu", stand_in)
        patch.setattr(module, "_Scratch", _recording(stand_in, module._Scratch))
        yield stand_in


def _recording(stand_in: Without, scratch: Any) -> Any:
    make = stand_in.recording(scratch)
    make._fields = scratch._fields
    return make


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", FAULTS)
def test_alone_they_have_no_fault(kernel):
    """So that it is the planted fault that is found."""
    with _without(kernel) as stand_in:
        _alone(kernel).check()
    assert stand_in.counts["barrier_wait"] > 0  # it was asked


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, name, marks=() if (kernel, name) in TELLING else pytest.mark.exhaustive)
        for kernel, faults in FAULTS.items()
        for name in faults
    ],
)
def test_a_planted_fault_is_found(kernel, name):
    with _without(kernel, FAULTS[kernel][name]) as stand_in:
        simulation = _alone(kernel, timeout=20.0)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    assert simulation.faulty


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kernel", "slots"), [("states", "value_slots"), ("columns", "state_slots")])
def test_a_wrong_slot_is_found(kernel, slots):
    """The loader always fills the second of two."""

    def copy_elsewhere(source, slot, barrier):
        if whole(slot) is whole(stand_in.scratch[slots]):
            stand_in.hits += 1
            slot = stand_in.scratch[slots].at[1, 0] if kernel == "states" else stand_in.scratch[slots].at[1]
        return plgpu.copy_gmem_to_smem(source, slot, barrier)

    def whole(ref):
        return whole(ref.ref) if hasattr(ref, "ref") else ref

    with _without(kernel) as stand_in:
        stand_in.copy_gmem_to_smem = copy_elsewhere
        simulation = _alone(kernel, timeout=20.0)
    assert stand_in.hits > 0
    assert simulation.faulty


def test_all_that_is_taken_fits():
    for head_dim in HEAD_DIMS:
        for state_dim in STATE_DIMS:
            for heads in (1, 2, 4):
                problem = Problem(1, 300, heads, head_dim, 1, state_dim, jnp.dtype(jnp.bfloat16), 128)
                tiles, state_tiles = BlackwellBackwardTiles.of(problem), BlackwellStateTiles.of(problem)
                assert tiles.smem_bytes(head_dim, state_dim) <= BLACKWELL_SMEM_BYTES
                assert tiles.tmem_columns(head_dim, state_dim) <= BLACKWELL_TMEM_COLUMNS
                assert state_tiles.smem_bytes(state_dim) <= BLACKWELL_SMEM_BYTES
                assert state_tiles.panel <= 128
                # Too few for a GPU: each unit has a block of its own.
                assert tiles.slices == heads * max(1, head_dim // 64)


def test_tiles_reject_themselves():
    for stages, slices, reason in ((1, 1, "at least 2"), (2, 0, "at least 1")):
        with pytest.raises(ValueError, match=reason):
            BlackwellBackwardTiles(stages, slices)
    with pytest.raises(ValueError, match="at most 128 channels"):
        BlackwellStateTiles(2, 128)
