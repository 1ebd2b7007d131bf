"""Attention's forward on Hopper: its kernel's forms, and every planted fault found."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax.experimental.pallas import mosaic_gpu as plgpu
from selection import some_each_run

from fast_layers.ops.attention import api, hopper_call, hopper_fwd, hopper_fwd_again, hopper_fwd_out, reference
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.testing import simulate
from fast_layers.testing.parity import Case
from simulator.attention import StandIn, draw, forward_tiles, found, judge, nothing_found, only, patched, square
from simulator.found import tells
from simulator.mlp import Slip
from simulator.rounded import assert_rounded

pytestmark = pytest.mark.simulator

BY_VALUES = {"takes_turns": False, "out_by_values": True}
SPARE = BY_VALUES | {"spare_values": True}
ONE_SLOT = BY_VALUES | {"kv_tile": 128, "blocks": 1}
# Three rounds of every ring, and more tiles of queries than blocks.
PERSISTENT = {
    "full, one slot for queries": (Case(batch=1, q_len=256, kv_len=400, heads=2, kv_heads=2), {"q_slots": 1}),
    "causal": (square(384, heads=2, kv_heads=2, is_causal=True), {"q_slots": 2}),
    "causal, the last keys first": (
        square(460, heads=2, kv_heads=2, is_causal=True),
        {"kv_tile": 128, "q_slots": 2, "last_keys_first": True},
    ),
    "causal, no turns": (square(384, heads=2, kv_heads=2, is_causal=True), {"takes_turns": False}),
    "documents, padding of NaN": (
        square(384, batch=2, heads=1, kv_heads=1, documents=(200, 100), poisoned_padding=True),
        {"q_slots": 2},
    ),
    "two depths": (square(256, heads=2, kv_heads=2, v_dim=128), {"q_slots": 1}),
    "queries in registers, two depths": (
        square(256, heads=2, kv_heads=2, qk_dim=192, v_dim=128),
        {"q_slots": 1, "blocks": 1, "held_columns": 64},
    ),
    "causal, queries in registers": (
        square(256, heads=2, kv_heads=2, qk_dim=192, v_dim=128, is_causal=True),
        {"blocks": 1, "held_columns": 128, "takes_turns": False, "own_spans": True, "last_keys_first": True},
    ),
    "out by values": (
        Case(batch=1, q_len=300, kv_len=200, heads=3, kv_heads=3, qk_dim=256, v_dim=256),
        BY_VALUES | {"keys_before_wait": 64},
    ),
    "out by values, a tile of keys": (Case(batch=1, q_len=256, kv_len=64, heads=3, kv_heads=3), BY_VALUES),
    "out by values, a block a piece": (square(200, heads=1, kv_heads=1), BY_VALUES | {"blocks": 9}),
    "out by values, queries in registers": (
        Case(batch=1, q_len=256, kv_len=256, heads=3, kv_heads=3, qk_dim=128, v_dim=128),
        BY_VALUES | {"held_columns": 64},
    ),
    "out by values, causal": (square(384, heads=2, kv_heads=2, is_causal=True), BY_VALUES | {"own_spans": True}),
    "out by values, padding of NaN": (
        square(384, batch=2, heads=1, kv_heads=1, documents=(200, 100), poisoned_padding=True),
        BY_VALUES,
    ),
    "values to spare": (
        Case(batch=1, q_len=300, kv_len=200, heads=3, kv_heads=3, qk_dim=256, v_dim=256),
        SPARE | {"keys_before_wait": 64},
    ),
    "values to spare, a tile of keys": (Case(batch=1, q_len=256, kv_len=64, heads=3, kv_heads=3), SPARE),
    "values to spare, two tiles of keys": (Case(batch=1, q_len=256, kv_len=128, heads=3, kv_heads=3), SPARE),
    "values to spare, causal": (square(384, heads=2, kv_heads=2, is_causal=True), SPARE | {"own_spans": True}),
    "values to spare, padding of NaN": (
        square(384, batch=2, heads=1, kv_heads=1, documents=(200, 100), poisoned_padding=True),
        SPARE,
    ),
    "out in one slot": (
        Case(batch=1, q_len=300, kv_len=400, heads=3, kv_heads=3, qk_dim=192, v_dim=128),
        ONE_SLOT | {"keys_before_wait": 32},
    ),
    "out in one slot, a tile of keys": (
        Case(batch=1, q_len=256, kv_len=128, heads=3, kv_heads=3, qk_dim=128),
        ONE_SLOT,
    ),
    "out in one slot, one depth": (Case(batch=1, q_len=256, kv_len=256, heads=3, kv_heads=3), ONE_SLOT),
    "out in one slot, causal": (
        square(384, heads=2, kv_heads=2, qk_dim=128, is_causal=True),
        ONE_SLOT | {"last_keys_first": True},
    ),
    "out in one slot, padding of NaN": (
        square(384, heads=2, kv_heads=2, qk_dim=128, documents=(200, 100), poisoned_padding=True),
        ONE_SLOT,
    ),
}


PERSISTENT_EACH_RUN = {
    "causal, the last keys first",
    "out by values, queries in registers",
    "out by values, padding of NaN",
    "values to spare, causal",
    "out in one slot, padding of NaN",
}


@pytest.mark.parametrize("name", some_each_run(PERSISTENT, PERSISTENT_EACH_RUN))
def test_blocks_that_take_several_tiles(name):
    case, options = PERSISTENT[name]
    tiles = HopperForwardTiles(**{"compute_wgs": 2, "kv_tile": 64, "blocks": 2} | options)
    with patched(forward_tiles(tiles)):
        judge(case, supports=only("forward")).check()


def test_three_compute_warpgroups():
    with patched(forward_tiles(HopperForwardTiles(3, 128, stages=3, q_slots=2, blocks=1))):
        judge(square(400, heads=2, kv_heads=2), supports=only("forward")).check()


OWN_SPANS = HopperForwardTiles(2, 64, blocks=1, takes_turns=False, own_spans=True)


SPANS = {
    "window": (
        square(330, heads=1, kv_heads=1, window=(90, 20)),
        dataclasses.replace(OWN_SPANS, compute_wgs=3, stages=3),
    ),
    "two depths": (square(260, heads=1, kv_heads=1, qk_dim=192, v_dim=128, is_causal=True), OWN_SPANS),
    "two depths, the last keys first": (
        square(260, heads=1, kv_heads=1, qk_dim=192, v_dim=128, is_causal=True),
        dataclasses.replace(OWN_SPANS, last_keys_first=True),
    ),
    "three warpgroups, depth 112, the last keys first": (
        square(460, heads=2, kv_heads=1, qk_dim=112, v_dim=112, is_causal=True),
        dataclasses.replace(OWN_SPANS, compute_wgs=3, stages=4, q_slots=2, last_keys_first=True),
    ),
    "three warpgroups, the last keys first": (
        square(460, heads=2, kv_heads=1, is_causal=True),
        dataclasses.replace(OWN_SPANS, compute_wgs=3, kv_tile=128, stages=3, q_slots=2, last_keys_first=True),
    ),
    "three warpgroups, causal documents": (
        square(460, heads=2, kv_heads=1, is_causal=True, documents=(70, 30, 220, 140)),
        dataclasses.replace(OWN_SPANS, compute_wgs=3, stages=3, q_slots=2),
    ),
    "three warpgroups, values of 64": (
        square(330, heads=2, kv_heads=2, qk_dim=128, is_causal=True),
        dataclasses.replace(OWN_SPANS, compute_wgs=3, stages=4, q_slots=2, last_keys_first=True),
    ),
    "three warpgroups, packed heads": (
        Case(batch=1, q_len=80, kv_len=300, heads=8, kv_heads=1, is_causal=True, q_offset=220),
        dataclasses.replace(OWN_SPANS, compute_wgs=3, stages=3, q_slots=2),
    ),
    "documents and rows that see nothing": (
        square(330, heads=2, kv_heads=1, documents=(100, 150), poisoned_padding=True),
        OWN_SPANS,
    ),
    "documents in a window": (
        square(330, heads=1, kv_heads=1, window=(90, 20), documents=(100, 230)),
        OWN_SPANS,
    ),
}


@pytest.mark.exhaustive  # a causal mask stands in test_a_hidden_value_that_is_broken
@pytest.mark.parametrize("name", SPANS)
def test_spans_of_their_own(name):
    case, tiles = SPANS[name]
    with patched(forward_tiles(tiles)):
        judge(case, supports=only("forward")).check()


@pytest.mark.parametrize("blocks", [2, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_cluster_loads_for_both_of_its_blocks(blocks):
    with patched(forward_tiles(HopperForwardTiles(2, 64, blocks=blocks, takes_turns=False, cluster=2))):
        judge(Case(batch=1, q_len=256, kv_len=300, heads=2, kv_heads=1), supports=only("forward")).check()


SEEN_TWICE = {
    "static band": {},
    "split keys": {"splits": 2},
    "persistent": {"blocks": 1},
    "spans of their own": {"own_spans": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_rate": 0.2},
    "values deeper than keys": {"depths": (64, 128)},
    "keys swizzled otherwise": {"depths": (96, 64)},
}
SEEN_TWICE_EACH_RUN = {"split keys", "spans of their own", "keys swizzled otherwise"}


@pytest.mark.parametrize("name", some_each_run(SEEN_TWICE, SEEN_TWICE_EACH_RUN))
def test_a_hidden_value_that_is_broken(name):
    """Under a causal mask, which no array tells: results are NaN, and blocks do their pieces again."""
    options = dict(SEEN_TWICE[name])
    changes = {name: options.pop(name) for name in ("splits", "blocks", "own_spans") if name in options}
    tiles = HopperForwardTiles(2 if "own_spans" in changes else 1, 64, takes_turns=False, **changes)
    if "sinks" in options:
        options["sinks"] = jnp.array([0.5], jnp.float32)
    if "dropout_rate" in options:
        options["dropout_rng"] = jax.random.key(0)
    qk_dim, v_dim = options.pop("depths", (64, 64))
    query, key, value, _ = draw(batch=1, length=100, heads=1, depth=max(qk_dim, v_dim))
    query, key, value = query[..., :qk_dim], key[..., :qk_dim], value[..., :v_dim]
    place = 80 if "own_spans" in changes else 60  # 80: in a tile that the second warpgroup alone visits
    value = value.at[0, place, 0, v_dim - 3].set(jnp.nan)

    def forward(backend, *operands):
        inputs, aux, given, _ = api._prepare(*operands, is_causal=True, **options)
        out, lse = backend.forward(given.problem(inputs, aux), inputs, aux)
        return out, lse[:, 0, :place]

    with patched(forward_tiles(tiles)):
        got = simulate(functools.partial(forward, hopper_call), query, key, value).check()
    assert np.isnan(got[0][0, place:, 0]).any(1).all()
    assert np.isfinite(got[0][0, :place]).all()
    assert_rounded(got, forward, query, key, value)


_PERSISTENT = HopperForwardTiles(2, 64, blocks=1)
_ALONE = dataclasses.replace(_PERSISTENT, takes_turns=False)
# What `shifted` draws, options, tiles.
RANGE = {
    "full": ({}, {}, _PERSISTENT),
    "causal": ({}, {"is_causal": True}, _PERSISTENT),
    "keys awaited early": ({}, {}, dataclasses.replace(_PERSISTENT, keys_before_wait=16)),
    "cluster": ({"length": 256, "heads": 2}, {}, dataclasses.replace(_ALONE, blocks=2, cluster=2)),
    "the last keys first": (
        {},
        {"is_causal": True},
        dataclasses.replace(_ALONE, own_spans=True, last_keys_first=True, keys_before_wait=64),
    ),
    "window": ({}, {"local_window_size": (90, 20)}, _PERSISTENT),
    "documents": ({}, {"segment_ids": np.repeat([3, 4, 5], [100, 120, 40])[None]}, _PERSISTENT),
    "documents, spans of their own": (
        {},
        {"segment_ids": np.repeat([3, 4, 5], [100, 120, 40])[None], "is_causal": True},
        dataclasses.replace(_ALONE, own_spans=True),
    ),
    "lengths": ({}, {"key_value_seq_lengths": np.array([200])}, _PERSISTENT),
    "queries in registers": ({"length": 256, "depth": 128}, {}, dataclasses.replace(_ALONE, held_columns=64)),
    "out by values": ({}, {"is_causal": True}, dataclasses.replace(_ALONE, own_spans=True, out_by_values=True)),
}
RANGE_EACH_RUN = {"cluster", "the last keys first", "documents, spans of their own"}


def shifted(shift: float, length: int = 260, heads: int = 1, depth: int = 64):
    """bfloat16 query, key and value; logits grow by `shift`: of keys in neither the first nor the last tile, or of all
    if it is negative."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, length, heads, depth)), jnp.bfloat16) for _ in range(3))
    grown = slice(130, 160) if shift > 0 else slice(None)
    return query.at[..., 0].set(16), key.at[..., 0].set(0).at[:, grown, :, 0].set(shift / 2), value


def _prepared(*operands, **options):
    inputs, aux, given, _ = api._prepare(*operands, scale=0.125, **options)
    return given.problem(inputs, aux), inputs, aux


def by_reference(*operands, **options):
    return reference.forward(*_prepared(*operands, **options))


def forward_with(tiles: HopperForwardTiles, *operands, patches=(), **options):
    """Simulated (out, lse)."""
    problem, inputs, aux = _prepared(*operands, **options)
    assert tiles.for_mask(problem) == tiles
    with patched(forward_tiles(tiles), *patches):
        return simulate(functools.partial(hopper_call.forward, problem), inputs, aux).check()


@pytest.mark.parametrize("shift", [200.0, -120.0])
@pytest.mark.parametrize("name", some_each_run(RANGE, RANGE_EACH_RUN))
def test_weights_beyond_the_range_of_floats(name, shift):
    """Relative to the first tile's maximum they are: blocks do their pieces again."""
    sizes, options, tiles = RANGE[name]
    operands = shifted(shift, **sizes)
    got, yardstick = forward_with(tiles, *operands, **options), by_reference(*operands, **options)
    with jax.enable_x64(True):
        oracle = by_reference(*(x.astype(jnp.float64) for x in operands), **options)
    for which, *arrays in zip(("out", "lse"), got, oracle, yardstick, strict=True):
        assert_close(*arrays, name=which)


def _nothing_but_nan(*arguments):
    state, sums = hopper_fwd_again.over_keys_again(*arguments)
    return state, sums * jnp.nan


@pytest.mark.parametrize("shift", [0.0, 200.0])
@pytest.mark.parametrize("name", some_each_run(RANGE, {"documents, spans of their own", "the last keys first"}))
def test_pieces_are_done_again_only_for_their_range(name, shift):
    sizes, options, tiles = RANGE[name]
    again = hopper_fwd, "over_keys_again", _nothing_but_nan
    out, _ = forward_with(tiles, *shifted(shift, **sizes), patches=[again], **options)
    assert np.isnan(out).any() == (shift > 0)


@pytest.mark.parametrize("name", some_each_run(RANGE, {"the last keys first"}))
def test_a_broken_value_changes_no_bit_of_rows_that_do_not_see_it(name):
    sizes, options, tiles = RANGE[name]
    query, key, value = shifted(0.0, **sizes)
    whole, whole_lse = forward_with(tiles, query, key, value, **options)
    broken = query, key, value.at[0, 130, 0, 3].set(jnp.nan)
    out, lse = forward_with(tiles, *broken, **options)
    reached = np.isnan(by_reference(*broken, **options)[0]).any(-1)
    np.testing.assert_array_equal(np.isnan(out).any(-1), reached)
    np.testing.assert_array_equal(out[~reached], whole[~reached])
    reached = reached.swapaxes(1, 2)
    np.testing.assert_array_equal(lse[~reached], whole_lse[~reached])


# Blocks of several pieces each, three rounds of the rings, and keys enough for the last product of a piece.
FORWARD_CASE = Case(batch=1, q_len=384, kv_len=384, heads=2, kv_heads=2)


MASKED = dataclasses.replace(FORWARD_CASE, heads=1, kv_heads=1, documents=(100, 200, 84))


POISONED = dataclasses.replace(MASKED, documents=(100, 200), poisoned_padding=True)


TWO_DEPTHS = dataclasses.replace(FORWARD_CASE, q_len=256, v_dim=128)


FORWARD_FAULTS = {
    "queries not awaited": (FORWARD_CASE, StandIn("barrier_wait q_ready"), "read of SMEM"),
    "keys not awaited": (FORWARD_CASE, StandIn("barrier_wait k_ready"), "read of SMEM"),
    "values not awaited": (FORWARD_CASE, StandIn("barrier_wait v_ready"), "read of SMEM"),
    "queries overwritten": (FORWARD_CASE, StandIn("barrier_wait q_consumed"), "write of SMEM"),
    "keys overwritten": (FORWARD_CASE, StandIn("barrier_wait k_consumed"), "write of SMEM"),
    "values overwritten": (FORWARD_CASE, StandIn("barrier_wait v_consumed"), "write of SMEM"),
    "keys freed in flight": (FORWARD_CASE, StandIn(early=("k_consumed", "k_slots")), "read of SMEM"),
    "values freed in flight": (FORWARD_CASE, StandIn("wgmma_wait"), "read of SMEM"),
    "scores read in flight": (FORWARD_CASE, StandIn("wgmma_accumulator_load #1"), "accumulator"),
    "out not committed": (FORWARD_CASE, StandIn("commit_smem"), "write of SMEM"),
    "out not committed, own slot": (TWO_DEPTHS, StandIn("commit_smem"), "write of SMEM"),
    "store's read not awaited": (FORWARD_CASE, StandIn("read wait_smem_to_gmem"), "read of SMEM"),
    "store's read not awaited, own slot": (TWO_DEPTHS, StandIn("read wait_smem_to_gmem"), "read of SMEM"),
    "mended before it arrives": (POISONED, StandIn("barrier_wait kv_arrived"), "read of SMEM"),
    "mending not committed": (POISONED, StandIn("commit_smem #1"), ""),
    "verdict not awaited": (MASKED, StandIn("barrier_wait judged"), "read of SMEM"),
    "rows not looked at": (MASKED, StandIn("barrier_wait looked"), "read of SMEM"),
    "again: keys not awaited": (POISONED, StandIn("barrier_wait again_ready"), "read of SMEM"),
    "again: keys overwritten": (POISONED, StandIn("barrier_wait again_freed"), "write of SMEM"),
}


# One fault of each kind: a load that is not awaited, a slot freed too soon, an accumulator in flight, a missing commit,
# a store that is not awaited; of slots written too soon, FORM_FAULTS has one. A missing exchange shows by how threads
# happen to run.
FORWARD_EACH_RUN = {
    "keys not awaited",
    "keys freed in flight",
    "scores read in flight",
    "store's read not awaited",
    "mending not committed",
    "rows not looked at",
}


class HeldTooSoon(StandIn):
    """The queries that registers hold are read before their load is awaited, and the others after."""

    _awaited: Any = None

    def barrier_wait(self, barrier: Any) -> None:
        if self._name(barrier) == "q_ready":
            self._awaited = barrier
        else:
            super().barrier_wait(barrier)

    def load(self, ref: Any, **options: Any) -> Any:
        loaded = plgpu.load(ref, **options)
        if self._name(ref) == "q_slots":
            plgpu.barrier_wait(self._awaited)
            self.hits += 1
        return loaded


RESCALED = HopperForwardTiles(2, 64, blocks=1, first_maximum=False)
HELD_CASE = dataclasses.replace(FORWARD_CASE, q_len=256, kv_len=256, qk_dim=128)
HELD = HopperForwardTiles(2, 64, blocks=1, takes_turns=False, held_columns=64)


OUT_BY_VALUES = HopperForwardTiles(2, 64, blocks=1, takes_turns=False, out_by_values=True)
HELD_BY_VALUES = dataclasses.replace(OUT_BY_VALUES, held_columns=64)
WITH_SPARE = dataclasses.replace(OUT_BY_VALUES, spare_values=True)
IN_ONE_SLOT = dataclasses.replace(OUT_BY_VALUES, kv_tile=128)
LONG_CASE = dataclasses.replace(FORWARD_CASE, q_len=384, kv_len=256)


# In the text of a causal mask's compute warpgroups, the last wait for keys stands where tiles are passed over.
FORM_FAULTS = {
    "out's product not awaited": (FORWARD_CASE, StandIn("wgmma_wait"), RESCALED, "accumulator"),
    "queries held before they came": (HELD_CASE, HeldTooSoon(), HELD, "read of SMEM"),
    "held queries overwritten": (HELD_CASE, StandIn("barrier_wait q_consumed"), HELD, "write of SMEM"),
    "out sent before it is there": (FORWARD_CASE, StandIn("barrier_wait out_ready"), OUT_BY_VALUES, "read of SMEM"),
    "out over values in use": (FORWARD_CASE, StandIn("barrier_wait values_left"), OUT_BY_VALUES, "write of SMEM"),
    "values over out": (FORWARD_CASE, StandIn("read wait_smem_to_gmem"), OUT_BY_VALUES, "write of SMEM"),
    "out over values to spare in use": (FORWARD_CASE, StandIn("barrier_wait values_left"), WITH_SPARE, "write of SMEM"),
    "values to spare over out": (FORWARD_CASE, StandIn("read wait_smem_to_gmem"), WITH_SPARE, "write of SMEM"),
    "out over values in use, in one slot": (
        LONG_CASE,
        StandIn("barrier_wait values_left"),
        IN_ONE_SLOT,
        "write of SMEM",
    ),
    "values over out, in one slot": (LONG_CASE, StandIn("read wait_smem_to_gmem"), IN_ONE_SLOT, "write of SMEM"),
    "queries over those in use": (FORWARD_CASE, StandIn("barrier_wait q_consumed"), OUT_BY_VALUES, "write of SMEM"),
    "held queries' read not committed": (HELD_CASE, StandIn("commit_smem"), HELD_BY_VALUES, "write of SMEM"),
    "a cluster's blocks free their own slots only": (
        Case(batch=1, q_len=256, kv_len=400, heads=2, kv_heads=1),
        Slip(alone=True),
        HopperForwardTiles(2, 64, blocks=2, cluster=2),
        "write of SMEM",
    ),
    "keys passed over before they came": (
        dataclasses.replace(FORWARD_CASE, heads=1, kv_heads=1, is_causal=True),
        StandIn("barrier_wait #20"),
        OWN_SPANS,
        "",
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(FORWARD_CASE, id="forward"),
        # As in test_blocks_that_take_several_tiles.
        pytest.param(MASKED, id="masked", marks=pytest.mark.exhaustive),
        pytest.param(POISONED, id="poisoned", marks=pytest.mark.exhaustive),
        pytest.param(TWO_DEPTHS, id="two depths", marks=pytest.mark.exhaustive),
    ],
)
def test_without_a_fault_nothing_is_found(case):
    nothing_found(hopper_fwd, case)


@pytest.mark.parametrize("fault", some_each_run(FORWARD_FAULTS, FORWARD_EACH_RUN))
def test_planted_fault_of_the_forward_is_found(fault):
    found(hopper_fwd, fault, FORWARD_FAULTS)


FORM_EACH_RUN = {
    "a cluster's blocks free their own slots only",
    "queries held before they came",
    "out over values in use",
    "values over out",
}


@pytest.mark.parametrize("fault", some_each_run(FORM_FAULTS, FORM_EACH_RUN))
def test_planted_fault_of_a_form_of_the_forward_is_found(fault):
    case, stand_in, tiles, access = FORM_FAULTS[fault]
    found(hopper_fwd, fault, {fault: (case, stand_in, access)}, forward_tiles(tiles))


def test_first_values_over_the_out_of_the_piece_before_are_found():
    """With a single tile of keys, for which they wait."""
    at_once = hopper_fwd_out, "first_values_before_out", lambda work, count: count > 0
    with patched(forward_tiles(WITH_SPARE), at_once):
        case = Case(batch=1, q_len=256, kv_len=64, heads=3, kv_heads=3)
        (sim,) = judge(case, supports=only("forward"), timeout=20.0).simulations[-1:]
    assert tells(sim, "write of SMEM"), sim.report()
