"""The Blackwell scan: right and free of races over shapes and options; every planted fault found."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close_over_draws, assert_trees_close, judge
from jax.experimental.pallas import mosaic_gpu as plgpu
from ops.ssd.cases import Case, build

import fast_layers
from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES
from fast_layers.ops.ssd import blackwell_call, blackwell_fwd
from fast_layers.ops.ssd.blackwell_config import (
    BLACKWELL_SMEM_BYTES,
    BLACKWELL_TMEM_COLUMNS,
    HEAD_DIMS,
    STATE_DIMS,
    BlackwellForwardTiles,
)
from fast_layers.testing import simulate
from simulator import test_hopper_ssd
from simulator.blackwell_attention import Without
from simulator.found import tells
from simulator.ssd import plain, problem_of

pytestmark = pytest.mark.simulator

B200 = Arch("cuda", "NVIDIA B200", (10, 0))


def _case(**options) -> Case:
    return Case(**{"batch": 1, "heads": 2, "head_dim": 64, "state_dim": 64, **options})


CASES = {
    "one token": _case(length=1),
    "one chunk": _case(length=128),
    "three chunks and a tail": _case(length=390, batch=2),
    "four heads of 32, a state of 16": _case(
        length=300, heads=8, head_dim=32, state_dim=16, groups=2, initial_state=True
    ),
    "heads of 128, a state of 128": _case(length=200, heads=1, head_dim=128, state_dim=128, initial_state=True),
    "one head of 64 a block": _case(length=200, groups=2, initial_state=True),
    "one head of 32 a block, a state of 96": _case(length=260, heads=3, head_dim=32, state_dim=96),
    "D, z, softplus": _case(length=260, D="channel", z=True, softplus=True, dt_bias=True, limit=(0.0, 0.1)),
    "documents": _case(length=390, batch=2, segments="rows", D="head", initial_state=True),
    "extreme steps": _case(length=260, dt="extreme", segments="rows", initial_state=True),
    "everything": _case(
        length=260,
        heads=4,
        head_dim=32,
        D="channel",
        z=True,
        softplus=True,
        dt_bias=True,
        segments="rows",
        initial_state=True,
    ),
}
CASES |= {
    f"Hopper's: {name}": case
    for name, case in (test_hopper_ssd.CASES | test_hopper_ssd.MORE_CASES).items()
    if case.state_dim in STATE_DIMS and case not in CASES.values()
}
# All roles, slots and options once; the others differ in shapes.
LEAN = {"everything"}


def _some(names, each_run):
    return [pytest.param(name, marks=() if name in each_run else pytest.mark.exhaustive) for name in names]


def _simulated(case, dtype=jnp.bfloat16, draw=0, tiles=None, **options):
    built = build(case, dtype, draw)
    problem, inputs, aux = problem_of(built)
    return built, simulate(lambda i, a: blackwell_fwd.scan(problem, i, a, tiles), inputs, aux, **options)


@pytest.mark.parametrize("name", _some(CASES, LEAN))
def test_case(name):
    def make(draw):
        built, simulation = _simulated(CASES[name], draw=draw)
        want = built.oracle()
        return tuple(simulation.check()), (want.out, want.final_state), plain(built)

    assert_close_over_draws(make, f"{name}: ", draws=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_slots(stages):
    case = _case(length=640, state_dim=16, z=True)
    built, simulation = _simulated(case, tiles=BlackwellForwardTiles(2, 64, *stages))
    want = built.oracle()
    for name, *values in zip(
        ("out", "state"), simulation.check(), (want.out, want.final_state), plain(built), strict=True
    ):
        assert (verdict := judge(*values, name=name)).ok, verdict.failure


@pytest.mark.exhaustive
def test_float16():
    built, simulation = _simulated(CASES["documents"], jnp.float16)
    want = built.oracle()
    for name, *values in zip(
        ("out", "state"), simulation.check(), (want.out, want.final_state), plain(built), strict=True
    ):
        assert (verdict := judge(*values, name=name)).ok, verdict.failure


@pytest.mark.exhaustive
def test_other_documents_change_no_bit():
    case = _case(length=300)
    ids = np.repeat([0, 1, 2], [100, 80, 120])
    results = []
    for seed in (1, 2):
        built, other = build(case, jnp.bfloat16), build(case, jnp.bfloat16, draw=seed)
        around = (other.operands, np.s_[:100]), (built.operands, np.s_[100:180]), (other.operands, np.s_[180:])
        operands = built.operands._replace(
            **{
                name: np.concatenate([getattr(o, name)[:, rows] for o, rows in around], axis=1)
                for name in ("x", "dt", "B", "C")
            }
        )
        problem, inputs, aux = problem_of(dataclasses.replace(built, operands=operands, segment_ids=ids))
        got = simulate(lambda i, a, p=problem: blackwell_call.forward(p, i, a), inputs, aux).check()
        results.append(np.asarray(got.out[:, 100:180]))
    np.testing.assert_array_equal(*results)


@pytest.mark.exhaustive
def test_vmap():
    built = build(_case(length=140, batch=2, D="head", initial_state=True), jnp.bfloat16)
    problem, inputs, aux = problem_of(built)

    def run(x, dt, B, C, state):
        single = inputs._replace(x=x, dt=dt, B=B, C=C, initial_state=state)
        return blackwell_call.forward(dataclasses.replace(problem, batch=1), single, aux)

    each = [v[:, None] for v in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.initial_state)]
    mapped = simulate(jax.vmap(run), *each).check()
    want = built.oracle()
    assert_trees_close(tuple(x[:, 0] for x in mapped), (want.out, want.final_state), plain(built))


# Three rounds of each slot.
TWO_HEADS = _case(length=384, state_dim=16), BlackwellForwardTiles(2, 64)
FOUR_HEADS = _case(length=256, heads=4, head_dim=32, state_dim=16), BlackwellForwardTiles(4, 32)

# (case and tiles, what is left out, what the report then says, if that does not depend on who comes first)
FAULTS = {
    "B and C not awaited": (TWO_HEADS, ("barrier_wait bc_ready",), "read of SMEM"),
    "B and C overwritten": (TWO_HEADS, ("barrier_wait bc_consumed",), "write of SMEM"),
    "x not awaited": (TWO_HEADS, ("barrier_wait x_ready",), "read of SMEM"),
    "x overwritten": (TWO_HEADS, ("barrier_wait x_consumed",), "SMEM"),
    "scores read in flight": (TWO_HEADS, ("barrier_wait scores_ready",), "TMEM"),
    "scores overwritten": (TWO_HEADS, ("barrier_wait scores_consumed",), ""),
    "the state not awaited": (TWO_HEADS, ("barrier_wait state_ready",), ""),
    "the state read in flight": (TWO_HEADS, ("barrier_wait state_done",), ""),
    "what enters not awaited": (TWO_HEADS, ("barrier_wait entering_ready",), ""),
    "out scaled in flight": (TWO_HEADS, ("barrier_wait inter_ready",), "TMEM"),
    "weights not awaited": (TWO_HEADS, ("barrier_wait weights_ready",), "TMEM"),
    "weights overwritten": (FOUR_HEADS, ("barrier_wait weights_consumed",), "TMEM"),
    "out read in flight": (TWO_HEADS, ("barrier_wait out_ready",), ""),
    "out overwritten": (TWO_HEADS, ("barrier_wait out_consumed",), ""),
    "the state not committed": (TWO_HEADS, ("commit_smem #3",), "SMEM"),
    "what enters not committed": (TWO_HEADS, ("commit_smem #4",), "SMEM"),
    "out not committed": (TWO_HEADS, ("commit_smem #1",), "SMEM"),
    "weights not committed": (TWO_HEADS, ("commit_tmem",), "TMEM"),
    "scores' load not awaited": (TWO_HEADS, ("wait_load_tmem",), "TMEM"),
    "B and C never freed": (TWO_HEADS, ("tcgen05_commit_arrive bc_consumed",), "not done"),
    "out's slot reused in flight": (TWO_HEADS, ("wait_smem_to_gmem",), ""),
}


@contextlib.contextmanager
def _without(*events: str) -> Iterator[Without]:
    stand_in = Without(*events)
    with pytest.MonkeyPatch.context() as patch:
        # Without its jit, which would give back what was traced before.
        patch.setattr(blackwell_fwd, "_launch", blackwell_fwd._launch.__wrapped__)
        patch.setattr(blackwell_fwd, "plgpu", stand_in)
        patch.setattr(blackwell_fwd, "_Scratch", stand_in.recording(blackwell_fwd._Scratch))
        yield stand_in


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "tiles"), [TWO_HEADS, FOUR_HEADS], ids=["two heads", "four heads"])
def test_without_a_fault_nothing_is_found(case, tiles):
    with _without() as stand_in:
        _, simulation = _simulated(case, tiles=tiles)
    assert not simulation.faulty, simulation.report()
    assert stand_in.counts["barrier_wait"] > 0  # it was asked
    assert stand_in.hits == 0


@pytest.mark.parametrize("name", _some(FAULTS, {"weights overwritten", "the state not committed"}))
def test_a_planted_fault_is_found(name):
    (case, tiles), events, text = FAULTS[name]
    with _without(*events) as stand_in:
        _, simulation = _simulated(case, tiles=tiles, timeout=20.0)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    assert simulation.faulty
    assert tells(simulation, text), simulation.report()


@pytest.mark.exhaustive
def test_a_wrong_slot_is_found():
    """The loader puts every chunk's B into the second of two slots."""

    def copy_elsewhere(source, slot, barrier):
        if whole(slot) is whole(stand_in.scratch["b_slots"]):
            stand_in.hits += 1
            slot = stand_in.scratch["b_slots"].at[1]
        return plgpu.copy_gmem_to_smem(source, slot, barrier)

    def whole(ref):
        return whole(ref.ref) if hasattr(ref, "ref") else ref

    with _without() as stand_in:
        stand_in.copy_gmem_to_smem = copy_elsewhere
        built, simulation = _simulated(TWO_HEADS[0], tiles=BlackwellForwardTiles(2, 64, 2), timeout=20.0)
    assert stand_in.hits > 0
    assert simulation.faulty or not judge(simulation.outputs[0], built.oracle().out, plain(built)[0], name="out").ok


def test_all_that_is_taken_fits():
    for head_dim in HEAD_DIMS:
        for state_dim in STATE_DIMS:
            for heads in (1, 2, 4):
                built = build(
                    _case(length=1, heads=heads, head_dim=head_dim, state_dim=state_dim, z=True), jnp.bfloat16
                )
                problem, _, _ = problem_of(built)
                assert blackwell_call.supports(problem, B200, "forward") is None
                tiles = BlackwellForwardTiles.of(problem)
                assert tiles.heads == min(heads, 128 // head_dim)
                assert tiles.tmem_columns(state_dim) <= BLACKWELL_TMEM_COLUMNS
                assert tiles.smem_bytes(state_dim, gated=True) <= BLACKWELL_SMEM_BYTES


def test_tiles_reject_themselves():
    for arguments, reason in {
        (2, 128): "at most 128 channels",
        (3, 32): "must be 1, 2 or 4",
        (1, 48): "must be one of (32, 64, 128)",
        (1, 64, 0): "must be at least 1",
    }.items():
        with pytest.raises(ValueError, match=reason.replace("(", r"\(").replace(")", r"\)")):
            BlackwellForwardTiles(*arguments)


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (_case(), np.float32, "takes bfloat16 and float16, got float32"),
        (_case(head_dim=48), jnp.bfloat16, "takes heads of 32, 64, 128 channels, got 48"),
        (_case(state_dim=24), jnp.bfloat16, "takes states of 16, 32, 64, 96, 128, got 24"),
        (_case(state_dim=256), jnp.bfloat16, "got 256, for which shared memory has no room"),
        (_case(limit=(-1.0, 1.0)), jnp.bfloat16, "step sizes of 0 and more, got dt_limit=(-1.0, 1.0)"),
        (_case(length=300, chunk_size=32), jnp.bfloat16, "chunks of 128 tokens, got chunk_size=32"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_refusals(case, dtype, reason):
    built = build(case, dtype)
    (plan,) = fast_layers.explain(
        lambda o: fast_layers.ssd(*o[:5], dt_limit=case.limit, chunk_size=case.chunk_size), tuple(built.operands)
    ).plans
    for pass_ in PASSES:
        assert reason in blackwell_call.supports(plan.problem, B200, pass_)


def test_taken_only_by_name_and_only_on_blackwell():
    built = build(_case(), jnp.bfloat16)
    problem, _, _ = problem_of(built)
    assert blackwell_call.supports(problem, Arch("cuda", "B300", (10, 3)), "forward") is None
    assert "compute capability 10.0" in blackwell_call.supports(problem, Arch("cuda", "H200", (9, 0)), "forward")
    with pytest.raises(ValueError, match=r'needs an NVIDIA GPU .* implementation="xla"'):
        fast_layers.ssd(*built.operands[:5], implementation="blackwell")
    (plan,) = fast_layers.explain(lambda *o: fast_layers.ssd(*o), *built.operands[:5]).plans
    assert plan.sole_backend("forward").name == "xla"
    assert ("blackwell", 'taken only by name: implementation="blackwell"') in plan.forward[0].refusals
