"""The Blackwell attention kernels: right and free of races over Hopper's table; every planted fault found."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from selection import some_each_run

import fast_layers
from fast_layers.ops.attention import (
    api,
    blackwell_bias_grad,
    blackwell_bwd,
    blackwell_bwd_fused,
    blackwell_call,
    blackwell_fwd,
    forward_parts,
)
from fast_layers.ops.attention.blackwell_config import BlackwellBackwardTiles, BlackwellForwardTiles
from fast_layers.testing import simulate
from fast_layers.testing.parity import Case
from simulator.attention import judge, only
from simulator.blackwell_attention import BLACKWELL, Without, forward_tiles, patched, without
from simulator.found import tells
from simulator.rounded import assert_rounded, check_broken_inputs, op_and_gradients
from simulator.test_hopper_attention import CASES
from simulator.test_hopper_attention_per_score import FAULTY

pytestmark = pytest.mark.simulator

# One of each kind: the glue is Hopper's, and the table's other cases differ in it only.
LEAN = {"everything"}


FUSED = CASES | {
    "grouped heads, window, documents": Case(
        batch=1, q_len=290, kv_len=290, heads=2, kv_heads=1, window=(150, 40), documents=(160, 130), softcap=10.0
    ),
    "depth 128, three rounds": Case(batch=1, q_len=700, kv_len=128, heads=1, kv_heads=1, qk_dim=128, v_dim=128),
    "values deeper than keys": Case(batch=1, q_len=290, kv_len=130, heads=1, kv_heads=1, qk_dim=64, v_dim=192),
    "keys deeper than values": Case(batch=1, q_len=290, kv_len=130, heads=1, kv_heads=1, qk_dim=160, v_dim=64),
    "bias, dense mask, dropout": Case(
        batch=1, q_len=70, kv_len=130, heads=1, kv_heads=1, softcap=10.0, dense_mask=True, bias=(1, 1, 70, 130),
        dropout_rate=0.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some_each_run(CASES, LEAN))
def test_case(name):
    judged = judge(CASES[name], backend=BLACKWELL)
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()
    assert not judged.table.refusals
    assert {row.quantity for row in judged.table.rows} >= {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("name", some_each_run(FUSED, {"grouped heads, window, documents"}))
def test_fused_backward(name):
    case = FUSED[name]
    with fast_layers.use_backends(reproducible=False), patched(), pytest.MonkeyPatch.context() as patch:
        launched = []
        launch = blackwell_bwd_fused._launch
        patch.setattr(blackwell_bwd_fused, "_launch", lambda *args: launched.append(args) or launch(*args))
        judged = judge(case, backend=BLACKWELL, supports=only("backward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()
    fits = max(case.qk_dim, 128) + case.qk_dim + case.v_dim <= 384
    assert bool(launched) == fits, "two kernels where one does not fit, and only there"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_float16(name):
    judged = judge(CASES[name], jnp.float16, backend=BLACKWELL)
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


# Three rounds of every ring, and more tiles of queries than blocks.
PERSISTENT = {
    "two tiles of queries": (Case(batch=1, q_len=384, kv_len=384, heads=2, kv_heads=2), {}),
    "causal": (Case(batch=1, q_len=300, kv_len=300, heads=2, kv_heads=2, is_causal=True), {}),
    "always rescaled": (Case(batch=1, q_len=300, kv_len=384, heads=1, kv_heads=1), {"rescale_log2": 0.0}),
    "two depths": (Case(batch=1, q_len=384, kv_len=256, heads=2, kv_heads=2, v_dim=128), {"q_tiles": 1}),
    "taken as they come": (
        Case(batch=1, q_len=300, kv_len=300, heads=2, kv_heads=2, is_causal=True),
        {"dynamic": True, "blocks": 0},
    ),
    "some exponentials as polynomials": (
        Case(batch=2, q_len=130, kv_len=300, heads=2, kv_heads=2, key_lengths=(300, 0), sinks=True),
        {"polynomial_columns": 16},
    ),
    "all exponentials as polynomials": (
        Case(batch=1, q_len=200, kv_len=200, heads=2, kv_heads=2, is_causal=True),
        {"polynomial_columns": 32},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "causal" else pytest.mark.exhaustive) for name in PERSISTENT]
)
def test_blocks_that_take_several_tiles(name):
    case, options = PERSISTENT[name]
    tiles = BlackwellForwardTiles(**({"q_tiles": 2, "kv_tile": 64, "blocks": 1} | options))
    with patched(forward_tiles(tiles)):
        judged = judge(case, backend=BLACKWELL, supports=only("forward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


class _OneBlockTakesAll(Without):
    """Cluster launch control that gives a block all pieces in turn, which the simulator itself never does.

    An offer is written and read as any shared memory, so that races over it are seen.
    """

    def __init__(self, pieces: int, *events: str):
        super().__init__(*events)
        self.pieces = pieces
        self.state: Any = None

    def while_loop(self, condition, body, start):
        def known_body(state):
            self.state = state
            return body(state)

        return lax.while_loop(condition, known_body, start)

    def try_cluster_cancel(self, offer, ready):
        offer[...] = jnp.full(offer.shape, self.state[0] + 1, offer.dtype)
        self.barrier_arrive(ready)

    def query_cluster_cancel(self, offer, grid_names):
        assert grid_names == ("block",)
        index = offer[...].max().astype(jnp.int32)
        return (index,), index < self.pieces


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("event", "text"),
    [
        pytest.param("", "", id="healthy"),
        pytest.param("barrier_wait offer_ready", "", id="offers not awaited"),
        pytest.param("barrier_wait offer_taken", "SMEM", id="offers overwritten"),
    ],
)
def test_offered_pieces(event, text):
    pieces = 4  # two rounds of the slots
    case = Case(batch=1, q_len=256, kv_len=64, heads=2, kv_heads=2)
    stand_in = _OneBlockTakesAll(pieces, event)
    tiles = forward_tiles(BlackwellForwardTiles(1, 64, dynamic=True))
    one_block = (forward_parts.Work, "blocks", 1)
    loops = (blackwell_fwd, "lax", _Instead(lax, while_loop=stand_in.while_loop))
    with without(blackwell_fwd, stand_in=stand_in, patches=(tiles, one_block, loops)):
        judged = judge(case, backend=BLACKWELL, supports=only("forward"), timeout=20.0)
    if event:
        assert stand_in.hits > 0
        (sim,) = judged.simulations[-1:]
        assert sim.faulty
        assert tells(sim, text), sim.report()
    else:
        assert not judged.faulty, judged.report()
        assert judged.table.ok, judged.report()


class _Instead:
    """A module, less what stands in for it."""

    def __init__(self, module, **instead):
        self.module = module
        self.__dict__.update(instead)

    def __getattr__(self, name):
        return getattr(self.module, name)


def _operands(heads: int = 1, length: int = 256):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(1, length, heads, 64)), jnp.bfloat16) for _ in range(4))


def test_maximum_that_grows_late_is_still_exact():
    """Below the threshold the maximum stays, above it out is rescaled; both leave the result as it is."""
    query, key, value, _ = _operands()
    growing = key.at[:, 64:].multiply(4).at[:, 128:].multiply(8)
    tiles = BlackwellForwardTiles(2, 64)
    kernel = types.SimpleNamespace(forward=functools.partial(blackwell_fwd.attend, tiles=tiles))

    def forward(backend, *operands):
        inputs, aux, options, _ = api._prepare(*operands)
        return backend.forward(options.problem(inputs, aux), inputs, aux)

    got = simulate(functools.partial(forward, kernel), query, growing, value).check()
    assert_rounded(got, forward, query, growing, value)


@pytest.mark.exhaustive
def test_a_broken_input_reaches_who_sees_it_and_nobody_else():
    check_broken_inputs(blackwell_call, kv_heads=2)


def test_vmap_with_shared_keys():
    """As the xla backend; the wrong example's operands would be off by far more than rounding."""
    query, key, value, d_out = _operands(length=100)

    def mapped(backend, *operands):
        both = functools.partial(op_and_gradients, backend, is_causal=True)
        return jax.vmap(both, (0, None, None, None))(*operands)

    operands = jnp.stack([query, 2 * query]), key, value, d_out
    assert_rounded(simulate(functools.partial(mapped, blackwell_call), *operands).check(), mapped, *operands)


# Blocks of several pieces each, and three rounds of the rings.
FORWARD_CASE = Case(batch=1, q_len=128, kv_len=256, heads=2, kv_heads=2)
FORWARD_TILES = forward_tiles(BlackwellForwardTiles(1, 64, blocks=1, rescale_log2=0.0))
MASKED = dataclasses.replace(FORWARD_CASE, kv_len=128, q_len=128, heads=1, kv_heads=1, documents=(70, 58))

# (case, what is left out, what the report then says, if that does not depend on who comes first)
FORWARD_FAULTS = {
    "queries not awaited": (FORWARD_CASE, ("barrier_wait q_ready",), "read of SMEM"),
    "keys not awaited": (FORWARD_CASE, ("barrier_wait k_ready",), "read of SMEM"),
    "values not awaited": (FORWARD_CASE, ("barrier_wait v_ready",), "read of SMEM"),
    "queries overwritten": (FORWARD_CASE, ("barrier_wait q_consumed",), "write of SMEM"),
    "keys overwritten": (FORWARD_CASE, ("barrier_wait k_consumed",), "write of SMEM"),
    "values overwritten": (FORWARD_CASE, ("barrier_wait v_consumed",), "write of SMEM"),
    "scores read in flight": (FORWARD_CASE, ("barrier_wait scores_ready",), ""),
    "weights not awaited": (FORWARD_CASE, ("barrier_wait weights_ready",), ""),
    "weights overwritten in flight": (FORWARD_CASE, ("barrier_wait weights_consumed",), "alias group"),
    "out read in flight": (FORWARD_CASE, ("barrier_wait out_ready",), "TMEM"),
    "weights not committed": (FORWARD_CASE, ("commit_tmem",), "TMEM"),
    "scores' load not awaited": (FORWARD_CASE, ("wait_load_tmem #1",), "alias group"),
    "out's load not awaited": (FORWARD_CASE, ("wait_load_tmem #3",), "TMEM"),
    "out not committed": (FORWARD_CASE, ("commit_smem #3",), "SMEM"),
    "keys never freed": (FORWARD_CASE, ("tcgen05_commit_arrive k_consumed",), "not done"),
    "store's read not awaited": (FORWARD_CASE, ("wait_smem_to_gmem",), ""),
    "mended before it arrives": (MASKED, ("barrier_wait kv_arrived",), "read of SMEM"),
    "hidden scores not committed": (MASKED, ("commit_tmem #1",), "TMEM"),
    "scores hidden before they are loaded": (MASKED, ("wait_load_tmem #1",), "TMEM"),
}
BACKWARD_CASE = Case(batch=1, q_len=128, kv_len=384, heads=1, kv_heads=1)
KEYS = dataclasses.replace(BACKWARD_CASE, q_len=384, kv_len=128)
APART = dataclasses.replace(KEYS, qk_dim=144, v_dim=128)

BACKWARD_FAULTS = {
    "own rows not awaited": (BACKWARD_CASE, ("barrier_wait own_ready",), "read of SMEM"),
    "columns not awaited": (BACKWARD_CASE, ("barrier_wait qk_ready",), "read of SMEM"),
    "columns overwritten": (BACKWARD_CASE, ("barrier_wait qk_consumed",), "write of SMEM"),
    "products read in flight": (BACKWARD_CASE, ("barrier_wait scores_ready",), ""),
    "weights not awaited": (BACKWARD_CASE, ("barrier_wait weights_ready",), ""),
    "weights overwritten in flight": (KEYS, ("barrier_wait weights_consumed",), "alias group"),
    "sums read in flight": (BACKWARD_CASE, ("barrier_wait sums_ready",), "TMEM"),
    "weights not committed": (KEYS, ("commit_tmem",), "TMEM"),
    "products' load not awaited": (KEYS, ("wait_load_tmem",), "alias group"),
    "lse overwritten while read": (KEYS, ("commit_smem #1",), "SMEM"),
    "values not awaited": (BACKWARD_CASE, ("barrier_wait v_ready",), "read of SMEM"),
    "values overwritten": (KEYS, ("barrier_wait v_consumed",), ""),
    "values apart not awaited": (APART, ("barrier_wait v_ready",), "read of SMEM"),
    "values apart overwritten": (APART, ("barrier_wait v_consumed",), ""),
    "columns apart overwritten": (APART, ("barrier_wait qk_consumed",), ""),
    "columns never freed": (BACKWARD_CASE, ("tcgen05_commit_arrive qk_consumed",), "not done"),
    "stores not awaited": (BACKWARD_CASE, ("wait_smem_to_gmem",), ""),
}


def fused_tiles(stages, v_stages):
    tiles = BlackwellBackwardTiles(stages, v_stages, fused=True)
    return blackwell_bwd.BlackwellBackwardTiles, "of", classmethod(lambda cls, problem: tiles)


# Two rounds of the queries' slots and four of the output gradients'; dQ stands apart, or where dP stood.
FUSED_TILES = fused_tiles(2, 1)
FUSED_CASE = dataclasses.replace(KEYS, q_len=512)
ALIASED = dataclasses.replace(KEYS, qk_dim=128, v_dim=128)

FUSED_FAULTS = {
    "own rows not awaited": (FUSED_CASE, ("barrier_wait own_ready",), "read of SMEM"),
    "queries not awaited": (FUSED_CASE, ("barrier_wait q_ready",), "read of SMEM"),
    "queries overwritten": (FUSED_CASE, ("barrier_wait q_consumed",), ""),
    "output gradients not awaited": (FUSED_CASE, ("barrier_wait d_out_ready",), "read of SMEM"),
    "output gradients overwritten": (FUSED_CASE, ("barrier_wait d_out_consumed",), ""),
    "scores read in flight": (FUSED_CASE, ("barrier_wait scores_ready",), ""),
    "scores overwritten by the other's weights": (FUSED_CASE, ("barrier_wait scores_read",), "alias group"),
    "scores' load not awaited": (FUSED_CASE, ("wait_load_tmem #2",), "alias group"),
    "weights not awaited": (FUSED_CASE, ("barrier_wait weights_ready",), ""),
    "weights not committed": (FUSED_CASE, ("commit_tmem",), "TMEM"),
    "weights overwritten in flight": (FUSED_CASE, ("barrier_wait weights_consumed",), "alias group"),
    "d_weights read in flight": (FUSED_CASE, ("barrier_wait d_weights_ready",), ""),
    "d_weights' load not awaited": (ALIASED, ("wait_load_tmem #3", "wait_load_tmem #5"), "alias group"),
    "dS not awaited": (FUSED_CASE, ("barrier_wait d_scores_ready",), ""),
    "dS not committed": (FUSED_CASE, ("commit_smem #3",), "SMEM"),
    "dQ read in flight": (FUSED_CASE, ("barrier_wait d_query_ready",), "TMEM"),
    "dQ overwritten while read": (FUSED_CASE, ("barrier_wait d_query_read",), ""),
    "dQ overwritten by d_weights": (ALIASED, ("barrier_wait d_query_read",), "alias group"),
    "dQ's load not awaited": (FUSED_CASE, ("wait_load_tmem #1",), "TMEM"),
    "dQ's part not committed": (FUSED_CASE, ("commit_smem #1",), "SMEM"),
    "dQ's slot overwritten": (FUSED_CASE, ("wait_smem_to_gmem #1",), "write of SMEM"),
    "sums read in flight": (FUSED_CASE, ("barrier_wait sums_ready",), "TMEM"),
    "queries never freed": (FUSED_CASE, ("tcgen05_commit_arrive q_consumed",), "not done"),
    "last stores not awaited": (FUSED_CASE, ("wait_smem_to_gmem #3",), ""),
}
# The rest need the same machinery to be found.
LEAN_FAULTS = {
    blackwell_fwd: {"keys not awaited", "weights not committed", "weights overwritten in flight"},
    blackwell_bwd: {"weights overwritten in flight"},
    blackwell_bwd_fused: {"dQ's slot overwritten"},
}


def _run(module, case, *events):
    pass_ = "forward" if module is blackwell_fwd else "backward"
    patches = (FORWARD_TILES, *((FUSED_TILES,) if module is blackwell_bwd_fused else ()))
    with without(module, *events, patches=patches) as stand_in:
        return stand_in, judge(case, backend=BLACKWELL, supports=only(pass_), timeout=20.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("module", "case"),
    [
        pytest.param(blackwell_fwd, FORWARD_CASE, id="forward"),
        pytest.param(blackwell_fwd, MASKED, id="masked"),
        pytest.param(blackwell_bwd, BACKWARD_CASE, id="backward"),
        pytest.param(blackwell_bwd, KEYS, id="keys"),
        pytest.param(blackwell_bwd_fused, FUSED_CASE, id="fused"),
        pytest.param(blackwell_bwd_fused, ALIASED, id="fused, aliased"),
    ],
)
def test_without_a_fault_nothing_is_found(module, case):
    stand_in, judged = _run(module, case)
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()
    assert stand_in.counts["barrier_wait"] > 0  # it was asked
    assert stand_in.hits == 0


def _found(module, case, events, text):
    stand_in, judged = _run(module, case, *events)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    (sim,) = judged.simulations[-1:]
    assert sim.faulty
    assert tells(sim, text), sim.report()


@pytest.mark.parametrize("fault", some_each_run(FORWARD_FAULTS, LEAN_FAULTS[blackwell_fwd]))
def test_planted_fault_of_the_forward_is_found(fault):
    _found(blackwell_fwd, *FORWARD_FAULTS[fault])


@pytest.mark.parametrize("fault", some_each_run(BACKWARD_FAULTS, LEAN_FAULTS[blackwell_bwd]))
def test_planted_fault_of_the_backward_is_found(fault):
    _found(blackwell_bwd, *BACKWARD_FAULTS[fault])


@pytest.mark.parametrize("fault", some_each_run(FUSED_FAULTS, LEAN_FAULTS[blackwell_bwd_fused]))
def test_planted_fault_of_the_fused_backward_is_found(fault):
    _found(blackwell_bwd_fused, *FUSED_FAULTS[fault])


@pytest.mark.parametrize(
    ("module", "quantity"),
    [
        pytest.param(blackwell_fwd, "out", id="forward"),
        pytest.param(blackwell_bwd, "dq", id="backward", marks=pytest.mark.exhaustive),
        pytest.param(blackwell_bwd_fused, "dk", id="fused", marks=pytest.mark.exhaustive),
        pytest.param(blackwell_bias_grad, "dbias", id="bias gradient", marks=pytest.mark.exhaustive),
    ],
)
def test_wrong_slot_is_found(module, quantity):
    """The loader counts its slots from one further than the matmuls do."""
    rings = {"k_slots", "ring_qk", "d_out_slots"}

    def shifted(copy):
        def copy_elsewhere(source, slot, barrier, **options):
            name = next((n for n, x in stand_in.scratch.items() if n in rings and _whole(x) is _whole(slot)), "")
            stand_in.hits += bool(name)
            return copy(source, _next(stand_in.scratch[name]) if name else slot, barrier, **options)

        return copy_elsewhere

    case = dataclasses.replace(FORWARD_CASE, heads=1, kv_heads=1)
    patches = (forward_tiles(BlackwellForwardTiles(1, 64)),)
    if module is blackwell_bwd_fused:
        case, patches = KEYS, (fused_tiles(2, 2),)
    if module is blackwell_bias_grad:
        case = FAULTY
    with without(module, patches=patches) as stand_in:
        stand_in.copy_gmem_to_smem = shifted(blackwell_fwd.plgpu.copy_gmem_to_smem)
        judged = judge(case, backend=BLACKWELL, supports=only("forward" if quantity == "out" else "backward"))
    assert stand_in.hits > 0
    assert judged.faulty or quantity in {row.quantity for row in judged.table.failures}, judged.report()


def _whole(ref):
    while hasattr(ref, "ref"):
        ref = ref.ref
    return ref


def _next(ring):
    return ring.at[1]
