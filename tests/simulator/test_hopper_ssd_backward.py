"""The backward of the Hopper scan: right and free of races over shapes and options; every planted fault found."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, assert_close_over_draws
from ops.ssd.cases import Case, build

from fast_layers.ops.ssd import hopper_bwd, hopper_states
from fast_layers.ops.ssd.config import HopperBackwardTiles, HopperStateTiles
from fast_layers.ops.ssd.problem import Residuals
from fast_layers.testing import simulate
from simulator.attention import StandIn
from simulator.ssd import changed, plain_grads, problem_of, simulated_grad

pytestmark = pytest.mark.simulator


def _case(**options) -> Case:
    return Case(**{"batch": 1, "heads": 2, "head_dim": 64, "state_dim": 64, **options})


EVERYTHING = _case(
    length=190, D="head", z=True, softplus=True, dt_bias=True, limit=(0.0, 0.1), segments="rows", initial_state=True
)
MORE_CASES = {
    "a tail": _case(length=150),
    "one token": _case(length=1),
    "one chunk, three panels": _case(length=64, heads=3),
    "heads of 32, a state of 16": _case(length=130, heads=4, head_dim=32, state_dim=16, groups=2, D="channel"),
    "heads of 128, a state of 128": _case(length=200, heads=1, head_dim=128, state_dim=128, initial_state=True),
    "odd heads, a group for each": _case(length=130, heads=3, groups=3, batch=2),
    "gate, D for each channel": _case(length=130, D="channel", z=True),
    "D for each head": _case(length=130, D="head"),
    "extreme steps": _case(length=130, dt="extreme", segments="rows", initial_state=True),
    "forgetting slowly": _case(length=130, A="near 0", initial_state=True),
    "a group in slices": _case(length=70, heads=8),
    "a state of 256, everything": dataclasses.replace(EVERYTHING, length=130, state_dim=256),
    "a state of 256, odd heads of 32": _case(length=130, batch=2, heads=3, head_dim=32, state_dim=256, D="channel"),
    "a state of 256, heads of 128": _case(length=70, heads=2, head_dim=128, state_dim=256, groups=2),
}


def _check(case: Case, dtype, **tiles) -> None:
    def make(draw):
        built, simulation = simulated_grad(case, dtype, draw, **tiles)
        got = simulation.check()
        given = [name for name, x in got._asdict().items() if x is not None]
        assert given == [name for name, x in built.operands._asdict().items() if x is not None]
        grads = built.oracle().grads
        return tuple({name: getattr(x, name) for name in given} for x in (got, grads, *plain_grads(built)))

    assert_close_over_draws(make, draws=1)


def test_everything_in_a_split_sequence():
    """Of two splits of one chunk and one of two."""
    longer = dataclasses.replace(EVERYTHING, length=EVERYTHING.length + 64)
    _check(longer, jnp.bfloat16, state_tiles=HopperStateTiles(2, 2, splits=3))


@pytest.mark.exhaustive
def test_a_state_of_256():
    """Over two chunks and two heads, with D, gate and a first state: all that adds up shares of sums."""
    _check(_case(length=70, heads=2, state_dim=256, D="head", z=True, initial_state=True), jnp.bfloat16)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE_CASES)
def test_more_cases(name):
    _check(MORE_CASES[name], jnp.bfloat16)


@pytest.mark.exhaustive
@pytest.mark.parametrize("state_dim", [64, 256])
def test_float16(state_dim):
    _check(dataclasses.replace(EVERYTHING, state_dim=state_dim), jnp.float16)


@pytest.mark.exhaustive
def test_other_documents_change_no_bit():
    """Boundaries inside a chunk, at the edge of one, and a document over several."""
    case = _case(length=330, heads=1)
    ids = np.repeat([0, 1, 2, 3], [50, 14, 156, 110])
    grads = []
    for seed in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("simulator.ssd.build", lambda *args, seed=seed: _with_middle(case, ids, seed))
            _, simulation = simulated_grad(case)
        grads.append(simulation.check())
    for name in ("x", "dt", "B", "C"):
        np.testing.assert_array_equal(*(np.asarray(getattr(g, name)[:, 64:220]) for g in grads), err_msg=name)


def _with_middle(case: Case, ids: np.ndarray, seed: int):
    """The third document is always the same."""
    built, other = build(case, jnp.bfloat16), build(case, jnp.bfloat16, draw=seed)

    def mix(a, b):
        return np.concatenate([b[:, :64], a[:, 64:220], b[:, 220:]], axis=1)

    names = ("x", "dt", "B", "C")
    mixed = {name: mix(getattr(built.operands, name), getattr(other.operands, name)) for name in names}
    return dataclasses.replace(
        built,
        operands=built.operands._replace(**mixed),
        segment_ids=ids,
        d_out=mix(built.d_out, other.d_out),
        d_final=other.d_final,
    )


@pytest.mark.exhaustive
def test_vmap():
    built = build(_case(length=70, batch=2, heads=1, D="head", initial_state=True), jnp.bfloat16)
    problem, inputs, aux = problem_of(built)
    rest = (built.d_out, built.d_final)

    def run(x, dt, B, C, state, d_out, d_final):
        single = inputs._replace(x=x, dt=dt, B=B, C=C, initial_state=state)
        return _grad(dataclasses.replace(problem, batch=1), single, aux, d_out, d_final)

    each = [np.asarray(v)[:, None] for v in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.initial_state, *rest)]
    mapped = simulate(jax.vmap(run), *each).check()
    for name in ("x", "dt", "B", "C", "initial_state"):
        got, *others = (getattr(g, name) for g in (mapped, built.oracle().grads, *plain_grads(built)))
        assert_close(got[:, 0], *others, name=name)


def _grad(problem, inputs, aux, d_out, d_final):
    return hopper_bwd.scan_grad(problem, Residuals(inputs, aux), d_out, d_final)


# Event -> what it does, by kernel. Each must be told by the simulator, as a race, a deadlock or broken rules.
FAULTS = {
    "states": {
        "chunks are not awaited": StandIn("barrier_wait ready"),
        "slots are refilled early": StandIn("barrier_wait consumed"),
        "slots are never freed": StandIn("barrier_arrive consumed"),
        "what is stored is not committed": StandIn("commit_smem #1"),
        "a state's slot is reused in flight": StandIn("read wait_smem_to_gmem"),
        "the last state is not awaited": StandIn("wait_smem_to_gmem"),
        "products are not awaited": StandIn("wgmma_accumulator_load"),
    },
    "gradients": {
        "B and C are not awaited": StandIn("barrier_wait bc_ready"),
        "panels are not awaited": StandIn("barrier_wait ready"),
        "slots are refilled early": StandIn("barrier_wait consumed"),
        "slots are never freed": StandIn("barrier_arrive consumed"),
        "the gradient of scores is not awaited": StandIn("barrier_wait scores_ready"),
        "the gradient of x is not committed": StandIn("commit_smem #1"),
        "the gradient of scores is not committed": StandIn("commit_smem #2"),
        "what passes is not committed": StandIn("commit_smem #3"),
        "the sums are not committed": StandIn("commit_smem #4"),
        "a result's slot is reused in flight": StandIn("read wait_smem_to_gmem"),
        "the last results are not awaited": StandIn("wait_smem_to_gmem"),
        "products are not awaited": StandIn("wgmma_accumulator_load"),
    },
}
TELLING = {("states", "what is stored is not committed"), ("gradients", "the gradient of scores is not awaited")}


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, name, marks=() if (kernel, name) in TELLING else pytest.mark.exhaustive)
        for kernel, faults in FAULTS.items()
        for name in faults
    ],
)
def test_a_planted_fault_is_found(kernel, name):
    module = {"states": hopper_states, "gradients": hopper_bwd}[kernel]
    with changed(FAULTS[kernel][name], kernel=module) as stand_in:
        simulation = _states_alone(timeout=12.0) if kernel == "states" else _gradients_alone(timeout=12.0)
    assert stand_in.hits, "nothing was changed"
    assert simulation.faulty


def test_alone_they_have_no_fault():
    """So that it is the planted fault that is found."""
    for simulation in (_states_alone(), _gradients_alone()):
        simulation.check()


def _states_alone(timeout: float = 120.0):
    """Five chunks through a ring of two."""
    problem, rows, by_group, factors, start = _operands(length=300, heads=1)
    sweep = hopper_states.Sweep(rows, by_group)
    operands = hopper_states.StateOperands((sweep, sweep), factors, jnp.stack([start, start], 1))
    tiles = HopperStateTiles(1, 2)
    return simulate(lambda operands: hopper_states._launch(tiles, problem, True, operands), operands, timeout=timeout)


def _gradients_alone(timeout: float = 120.0):
    """Five panels through a ring of two."""
    problem, rows, by_group, factors, start = _operands(length=64, heads=5)
    between = jnp.broadcast_to(start.astype(problem.dtype)[:, None, None], (1, 1, 2, *start.shape[1:]))
    operands = hopper_bwd.BackwardOperands(rows, rows, by_group, by_group, factors, None, None, between)
    tiles = HopperBackwardTiles(2)
    return simulate(lambda operands: hopper_bwd._launch(tiles, problem, operands), operands, timeout=timeout)


def _operands(length: int, heads: int):
    """(problem, rows of x's shape, of B's, factors, a state)"""
    problem, inputs, _ = problem_of(build(_case(length=length, heads=heads), jnp.bfloat16))
    rng = np.random.default_rng(0)
    factors = jnp.asarray(rng.uniform(size=(1, -(-length // 64), heads, 6, 64)), jnp.float32)
    padded = ((0, 0), (0, -length % 8), (0, 0), (0, 0))
    rows, by_group = (jnp.pad(jnp.asarray(x), padded) for x in (inputs.x, inputs.B))
    return problem, rows, by_group, factors, jnp.asarray(rng.normal(size=(1, heads, 64, 64)), jnp.float32)
