"""The Hopper scan: right and free of races over shapes and options; every planted fault found."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close_over_draws, assert_trees_close, judge
from ops.ssd.cases import Case, build
from selection import some_each_run

import fast_layers
from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES, choose
from fast_layers.ops.ssd import hopper_call, hopper_fwd
from fast_layers.ops.ssd.backends import BACKENDS
from fast_layers.ops.ssd.config import HopperForwardTiles
from fast_layers.testing import simulate
from simulator.attention import StandIn
from simulator.ssd import changed, plain, problem_of, simulated

pytestmark = pytest.mark.simulator

H200 = Arch("cuda", "NVIDIA H200", (9, 0))


def _case(**options) -> Case:
    return Case(**{"batch": 1, "heads": 2, "head_dim": 64, "state_dim": 64, **options})


CASES = {
    "one token": _case(length=1),
    "one chunk": _case(length=64),
    "five chunks and a tail, a state of 128": _case(length=333, state_dim=128),
    "heads of 32, a state of 16": _case(length=130, heads=4, head_dim=32, state_dim=16, groups=2, initial_state=True),
    "heads of 128, a state of 256": _case(
        length=130, heads=1, head_dim=128, state_dim=256, D="head", z=True, segments="rows", initial_state=True
    ),
    "odd heads, a group for each": _case(length=130, heads=3, groups=3),
    "D, z, softplus": _case(length=130, D="channel", z=True, softplus=True, dt_bias=True, limit=(0.0, 0.1)),
    "documents": _case(length=333, batch=2, segments="rows", D="head", initial_state=True),
    "extreme steps": _case(length=130, dt="extreme", segments="rows", initial_state=True),
}


MORE_CASES = {
    "heads of 128, a state of 128": _case(length=200, heads=1, head_dim=128, state_dim=128, initial_state=True),
    "a state of 256, odd heads in groups": _case(length=333, batch=2, heads=6, groups=2, state_dim=256),
    "a state of 256, one token": _case(length=1, state_dim=256),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_CASES)])
def test_case(name):
    _check((CASES | MORE_CASES)[name], name)


def _check(case: Case, name: str = "", dtype=jnp.bfloat16, **tiles) -> None:
    def make(draw):
        built, simulation = simulated(case, dtype, draw=draw, **tiles)
        want = built.oracle()
        return tuple(simulation.check()), (want.out, want.final_state), plain(built)

    assert_close_over_draws(make, f"{name}: ", draws=1)


@pytest.mark.exhaustive
def test_float16_in_two_shares():
    _check(CASES["heads of 128, a state of 256"], dtype=jnp.float16)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (_case(length=180, D="head", z=True, segments="rows", initial_state=True), 3),
        (_case(length=300, batch=2, A="near 0"), 3),
        (_case(length=300, heads=3, state_dim=256, initial_state=True), 2),
    ],
    ids=["everything", "forgetting slowly", "a state of 256"],
)
def test_split_sequence(case, splits):
    _check(case, tiles=HopperForwardTiles(2, 2, splits=splits))


def test_splits_have_a_chunk_at_least():
    with pytest.raises(ValueError, match="splits=4 must be at most the number of chunks of 64 tokens, 3"):
        simulated(_case(length=190), tiles=HopperForwardTiles(2, splits=4))


def test_a_second_launch_changes_no_bit():
    case = _case(length=180, heads=4, D="head", z=True, segments="rows", initial_state=True)
    # Of two blocks of two panels, the second leaves two of its three chunks to the second launch.
    whole, two = (simulated(case, tiles=tiles)[1].check() for tiles in (None, HopperForwardTiles(2, 2, 1, 1, 2)))
    for got, want in zip(two, whole, strict=True):
        np.testing.assert_array_equal(got, want)


def test_float16():
    built, simulation = simulated(CASES["documents"], jnp.float16)
    want = built.oracle()
    for name, got, oracle, yardstick in zip(
        ("out", "state"), simulation.check(), (want.out, want.final_state), plain(built), strict=True
    ):
        assert (verdict := judge(got, oracle, yardstick, name=name)).ok, verdict.failure


def test_other_documents_change_no_bit():
    case = _case(length=150, segments=None)
    ids = np.repeat([0, 1, 2], [50, 40, 60])
    results = []
    for seed in (1, 2):
        built, other = build(case, jnp.bfloat16), build(case, jnp.bfloat16, draw=seed)
        operands = built.operands._replace(
            **{
                name: np.concatenate([getattr(o, name)[:, rows] for o, rows in _around(built, other)], axis=1)
                for name in ("x", "dt", "B", "C")
            }
        )
        problem, inputs, aux = problem_of(type(built)(case, operands, ids, built.d_out, built.d_final))
        got = simulate(lambda inputs, aux, p=problem: hopper_call.forward(p, inputs, aux), inputs, aux).check()
        results.append(np.asarray(got.out[:, 50:90]))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(("dtype", "bits"), [(jnp.bfloat16, 16), (jnp.float16, 21)])
def test_a_share_is_handed_over_as_two_numbers(dtype, bits):
    rng = np.random.default_rng(0)
    share = (rng.normal(size=(64, 64)) * 10.0 ** rng.uniform(0, 6, (64, 64))).astype(np.float32)
    value, rest = hopper_fwd.share_parts(jnp.asarray(share), dtype)
    assert value.dtype == rest.dtype == dtype
    got = np.asarray(hopper_fwd.share_of(value.astype(jnp.float32), rest.astype(jnp.float32)))
    assert np.all(np.abs(got - share) <= 2.0**-bits * np.abs(share) + jnp.finfo(dtype).smallest_subnormal)
    assert np.any(np.asarray(value, np.float32) / hopper_fwd.SHARE_SCALE != share)  # the value alone would not do


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_not_finite_is_handed_over_as_it_is(dtype):
    share = np.array([np.inf, -np.inf, np.nan, 0.0], np.float32)
    parts = hopper_fwd.share_parts(jnp.asarray(share), dtype)
    got = hopper_fwd.share_of(*(part.astype(jnp.float32) for part in parts))
    np.testing.assert_array_equal(got, share)


def _around(built, other):
    return (other.operands, np.s_[:50]), (built.operands, np.s_[50:90]), (other.operands, np.s_[90:])


def test_vmap():
    built = build(_case(length=70, batch=2, D="head", initial_state=True), jnp.bfloat16)
    problem, inputs, aux = problem_of(built)

    def run(x, dt, B, C, state):
        single = inputs._replace(x=x, dt=dt, B=B, C=C, initial_state=state)
        return hopper_call.forward(dataclasses.replace(problem, batch=1), single, aux)

    each = [v[:, None] for v in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.initial_state)]
    mapped = simulate(jax.vmap(run), *each).check()
    want = built.oracle()
    assert_trees_close(tuple(x[:, 0] for x in mapped), (want.out, want.final_state), plain(built))


# Event -> what it does. Each must be told by the simulator, as a race, a deadlock or broken rules.
FAULTS = {
    "chunks are not awaited": StandIn("barrier_wait ready"),
    "slots are refilled early": StandIn("barrier_wait consumed"),
    "slots are never freed": StandIn("barrier_arrive consumed"),
    "the state is not committed": StandIn("commit_smem #1"),
    "the output is not committed": StandIn("commit_smem #2"),
    "the output's slot is reused in flight": StandIn("read wait_smem_to_gmem"),
    "the last output is not awaited": StandIn("wait_smem_to_gmem"),
    "products are not awaited": StandIn("wgmma_accumulator_load"),
}


# In a state of 256.
SHARING_FAULTS = {
    "a share is not awaited": StandIn("barrier_wait share_ready"),
    "a share is overwritten early": StandIn("barrier_wait share_taken"),
    "a share is never handed over": StandIn("barrier_arrive share_ready"),
    "a share is never freed": StandIn("barrier_arrive share_taken"),
}
TELLING = ("a share is not awaited", "a share is overwritten early")


FAULTS_EACH_RUN = {"slots are refilled early", "the output is not committed", "products are not awaited"}


@pytest.mark.parametrize("name", some_each_run(FAULTS, FAULTS_EACH_RUN))
def test_a_planted_fault_is_found(name):
    _plant(FAULTS[name], _case(length=400))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in TELLING else pytest.mark.exhaustive) for name in SHARING_FAULTS],
)
def test_a_planted_fault_between_shares_is_found(name):
    _plant(SHARING_FAULTS[name], _case(length=190, heads=1, state_dim=256))


def _plant(fault: StandIn, case: Case) -> None:
    with changed(fault) as stand_in:
        built = build(case, jnp.bfloat16)
        problem, inputs, aux = problem_of(built)
        tiles = HopperForwardTiles(2, 2)
        simulation = simulate(
            lambda inputs, aux: hopper_fwd.scan(problem, inputs, aux, tiles), inputs, aux, timeout=12.0
        )
    assert stand_in.hits, "nothing was changed"
    assert simulation.faulty


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (_case(), np.float32, "takes bfloat16 and float16, got float32"),
        (_case(head_dim=48), jnp.bfloat16, "takes heads of 32, 64, 128 channels, got 48"),
        (_case(state_dim=48), jnp.bfloat16, "takes states of 16, 32, 64, 128, 256, got 48"),
        (_case(limit=(-1.0, 1.0)), jnp.bfloat16, "step sizes of 0 and more, got dt_limit=(-1.0, 1.0)"),
        (_case(length=100, chunk_size=32), jnp.bfloat16, "chunks of 64 tokens, got chunk_size=32"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_refusals(case, dtype, reason):
    built = build(case, dtype)
    (plan,) = fast_layers.explain(
        lambda o: fast_layers.ssd(*o[:5], dt_limit=case.limit, chunk_size=case.chunk_size), tuple(built.operands)
    ).plans
    for pass_ in PASSES:
        assert reason in hopper_call.supports(plan.problem, H200, pass_)


def test_taken_by_itself_where_it_was_timed_and_only_on_hopper():
    built = build(_case(), jnp.bfloat16)
    problem, _, _ = problem_of(built)
    assert hopper_call.supports(problem, H200, "forward") is None
    assert "compute capability 9.0" in hopper_call.supports(problem, Arch("cuda", "B200", (10, 0)), "forward")
    with pytest.raises(ValueError, match=r'needs an NVIDIA GPU .* implementation="xla"'):
        fast_layers.ssd(*built.operands[:5], implementation="hopper")
    problem = dataclasses.replace(problem, length=64, chunk=64)
    for pass_ in PASSES:
        small = dataclasses.replace(problem, batch=(2**17 - 1) // (problem.length * problem.heads * problem.head_dim))
        choice = choose(BACKENDS, small, H200, pass_)
        assert choice.backend.name == "xla"
        assert "was timed from 131072 numbers in x on" in dict(choice.refusals)["hopper"]
        short = dataclasses.replace(small, length=63, chunk=63, batch=2**17)
        assert "would pad 63 tokens" in dict(choose(BACKENDS, short, H200, pass_).refusals)["hopper"]
        large = dataclasses.replace(small, batch=small.batch + 1)
        for state_dim in (64, 256):
            assert (
                choose(BACKENDS, dataclasses.replace(large, state_dim=state_dim), H200, pass_).backend.name == "hopper"
            )
