"""The Hopper attention kernels: right and free of races over masks, shapes and options; every planted fault found."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

import fast_layers
from fast_layers.kernel_parts.online_softmax import LOG2_E, OnlineSoftmax
from fast_layers.ops.attention import (
    api,
    config,
    hopper_bwd,
    hopper_bwd_apart,
    hopper_bwd_deep,
    hopper_bwd_deep_query,
    hopper_bwd_deep_scores,
    hopper_bwd_pieces,
    hopper_bwd_rows,
    hopper_bwd_scores,
    hopper_call,
    hopper_fwd,
    reference,
    tile_mask,
    xla,
)
from fast_layers.ops.attention.config import HopperBackwardTiles, HopperDeepBackwardTiles, HopperForwardTiles
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals, finite_or_zero
from fast_layers.testing import simulate
from fast_layers.testing.parity import Case
from simulator.attention import StandIn, backward_tiles, changed, forward_tiles, judge, only, patched
from simulator.mlp import Slip

pytestmark = pytest.mark.simulator


def _square(length: int, **options: Any) -> Case:
    return dataclasses.replace(Case(q_len=length, kv_len=length, batch=1), **options)


# About 2^15 numbers in the output, where one draw of the inputs is enough.
CASES = {
    "full": _square(256, heads=2, kv_heads=2, lse_gradient=True),
    "causal": _square(256, heads=2, kv_heads=2, is_causal=True, lse_gradient=True),
    "more keys": Case(batch=1, q_len=129, kv_len=300, is_causal=True, q_offset="bottom_right"),
    "fewer keys": Case(batch=1, q_len=300, kv_len=129, heads=2, kv_heads=2, is_causal=True, q_offset="bottom_right"),
    "7 queries, 33 keys": Case(q_len=7, kv_len=33, heads=40, kv_heads=4),
    "many keys": Case(batch=1, q_len=260, kv_len=1200, heads=2, kv_heads=1),
    "many queries": Case(batch=1, q_len=900, kv_len=70, heads=1, kv_heads=1),
    "window": _square(300, heads=2, kv_heads=2, window=(40, 10)),
    "causal, window": _square(520, heads=1, kv_heads=1, is_causal=True, window=(130, 0)),
    "documents": _square(400, heads=2, kv_heads=2, is_causal=True, documents=(100, 37, 200, 43)),
    "documents, padding": _square(400, heads=2, kv_heads=2, documents=(200, 3, 97)),
    "documents, scattered": _square(260, batch=2, heads=1, kv_heads=1, documents=(150, 3, 57), scattered=True),
    "lengths": _square(300, batch=3, heads=1, kv_heads=1, key_lengths=(300, 77, 0), query_lengths=(211, 300, 300)),
    "prefix": _square(200, batch=3, heads=1, kv_heads=1, prefix=(0, 150, 200)),
    "sinks": _square(200, heads=4, kv_heads=2, is_causal=True, sinks=True, lse_gradient=True),
    "softcap": _square(200, is_causal=True, softcap=5.0),
    "grouped heads": _square(130, heads=8, kv_heads=2, is_causal=True),
    "one key head": _square(130, heads=4, kv_heads=1),
    "depth 40, values 24": _square(130, heads=11, kv_heads=11, qk_dim=40, v_dim=24),
    "depth 80": _square(210, heads=2, kv_heads=2, qk_dim=80, v_dim=80, is_causal=True),
    "depth 128": _square(256, heads=1, kv_heads=1, qk_dim=128, v_dim=128, is_causal=True),
    "depth 128, documents": _square(300, heads=1, kv_heads=1, qk_dim=128, v_dim=128, documents=(170, 130)),
    "depths 64 and 128": _square(130, heads=2, kv_heads=1, v_dim=128),
    "depths 192 and 128": _square(260, heads=1, kv_heads=1, qk_dim=192, v_dim=128, is_causal=True),
    "depth 256": _square(200, heads=1, kv_heads=1, qk_dim=256, v_dim=256, is_causal=True),
    "depth 256, whole tiles": _square(192, heads=2, kv_heads=1, qk_dim=256, v_dim=256, is_causal=True),
    "padding of NaN": _square(
        300, batch=2, heads=1, kv_heads=1, key_lengths=(200, 77), query_lengths=(211, 130), poisoned_padding=True
    ),
    "documents, padding of NaN": _square(400, heads=2, kv_heads=2, documents=(250, 3), poisoned_padding=True),
    "queries without keys": _square(256, heads=2, kv_heads=2, is_causal=True, q_offset=-100),
    "everything": _square(
        300,
        batch=2,
        heads=2,
        kv_heads=1,
        is_causal=True,
        window=(120, None),
        documents=(100, 37, 150),
        key_lengths=(300, 200),
        softcap=10.0,
        sinks=True,
        lse_gradient=True,
    ),
}


# One for each form of the kernels' masks and of their tiles; the others differ from one of these in shapes, or in what
# comes together. Depths of 192 and 128 run with dropout in test_hopper_attention_per_score.py.
EACH_RUN = {
    "causal",
    "documents, padding of NaN",
    "depth 128, documents",
    "depth 256, whole tiles",
    "queries without keys",
    "everything",
}


@pytest.mark.parametrize("name", some_each_run(CASES, EACH_RUN))
def test_case(name):
    judged = judge(CASES[name])
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()
    assert not judged.table.refusals
    assert {row.quantity for row in judged.table.rows} >= {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.exhaustive  # what is below runs in float16
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_float16(name):
    judged = judge(CASES[name], jnp.float16)
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


# Three rounds of every ring, and more tiles of queries than blocks.
PERSISTENT = {
    "full, one slot for queries": (Case(batch=1, q_len=256, kv_len=400, heads=2, kv_heads=2), {"q_slots": 1}),
    "causal": (_square(384, heads=2, kv_heads=2, is_causal=True), {"q_slots": 2}),
    "causal, the last keys first": (
        _square(460, heads=2, kv_heads=2, is_causal=True),
        {"kv_tile": 128, "q_slots": 2, "last_keys_first": True},
    ),
    "causal, no turns": (_square(384, heads=2, kv_heads=2, is_causal=True), {"takes_turns": False}),
    "documents, padding of NaN": (
        _square(384, batch=2, heads=1, kv_heads=1, documents=(200, 100), poisoned_padding=True),
        {"q_slots": 2},
    ),
    "two depths": (_square(256, heads=2, kv_heads=2, v_dim=128), {"q_slots": 1}),
}


PERSISTENT_EACH_RUN = {"full, one slot for queries", "causal, the last keys first", "documents, padding of NaN"}


@pytest.mark.parametrize("name", some_each_run(PERSISTENT, PERSISTENT_EACH_RUN))
def test_blocks_that_take_several_tiles(name):
    case, options = PERSISTENT[name]
    tiles = HopperForwardTiles(**{"compute_wgs": 2, "kv_tile": 64, "blocks": 2} | options)
    with patched(forward_tiles(tiles)):
        judged = judge(case, supports=only("forward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


def test_three_compute_warpgroups():
    with patched(forward_tiles(HopperForwardTiles(3, 128, stages=3, q_slots=2, blocks=1))):
        judged = judge(_square(400, heads=2, kv_heads=2), supports=only("forward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


# More tiles of keys than blocks, two rounds of the slots for keys.
PERSISTENT_BACKWARD = {
    "full": (Case(batch=1, q_len=256, kv_len=260, heads=1, kv_heads=1), HopperBackwardTiles(128, blocks=1)),
    "causal, one step at the end": (
        _square(384, heads=1, kv_heads=1, qk_dim=128, v_dim=128, is_causal=True),
        HopperBackwardTiles(64, ragged_apart=True, blocks=2),
    ),
    "full, two panels": (
        Case(batch=1, q_len=130, kv_len=260, heads=2, kv_heads=1, qk_dim=128, v_dim=128),
        HopperBackwardTiles(64, blocks=1),
    ),
    "grouped heads": (_square(260, heads=4, kv_heads=2, is_causal=True), HopperBackwardTiles(128, blocks=2)),
    "keys that nobody sees": (CASES["more keys"], HopperBackwardTiles(128, blocks=1)),
}


# More tiles of queries than blocks make dQ of.
APART = {
    "causal, grouped heads": (_square(384, heads=2, kv_heads=1, is_causal=True), HopperBackwardTiles(128)),
    "causal, depth 128": (
        _square(384, heads=1, kv_heads=1, qk_dim=128, v_dim=128, is_causal=True, lse_gradient=True),
        HopperBackwardTiles(64, ragged_apart=True),
    ),
    "full, persistent": (
        Case(batch=1, q_len=128, kv_len=384, heads=2, kv_heads=1, qk_dim=128, v_dim=128),
        HopperBackwardTiles(64, blocks=1),
    ),
    "causal, persistent": (
        _square(256, heads=2, kv_heads=2, is_causal=True),
        HopperBackwardTiles(128, blocks=1),
    ),
    "window, tiles of 64 queries": (
        _square(640, heads=1, kv_heads=1, qk_dim=128, v_dim=128, window=(150, 0)),
        HopperBackwardTiles(64, ragged_apart=True, blocks=2),
    ),
    "window on both sides": (
        _square(512, heads=2, kv_heads=1, window=(40, 129)),
        HopperBackwardTiles(128, ragged_apart=True, blocks=1),
    ),
}


DEEP_APART = {
    "deep causal, grouped heads": _square(256, heads=2, kv_heads=1, qk_dim=192, v_dim=64, is_causal=True),
    "deep causal, three tiles": _square(384, heads=1, kv_heads=1, qk_dim=192, v_dim=192, is_causal=True),
    "deep causal, clusters": _square(512, heads=1, kv_heads=1, qk_dim=192, v_dim=64, is_causal=True, lse_gradient=True),
    "deep causal, half in registers": _square(256, heads=1, kv_heads=1, qk_dim=256, v_dim=256, is_causal=True),
    "deep causal, values deeper than keys": _square(256, heads=1, kv_heads=1, qk_dim=64, v_dim=192, is_causal=True),
    "deep full, grouped heads": Case(batch=1, q_len=256, kv_len=384, heads=2, kv_heads=1, qk_dim=192, v_dim=192),
}


def _apart(tiles: HopperBackwardTiles | HopperDeepBackwardTiles) -> tuple[tuple[Any, str, Any], ...]:
    tiles = dataclasses.replace(tiles, d_query_apart=True)
    return backward_tiles(tiles), (hopper_bwd_apart, "HOPPER_SMS", 1), (hopper_bwd_deep_query, "HOPPER_SMS", 2)


EACH_RUN_APART = {"causal, grouped heads", "full, persistent", "deep causal, grouped heads"}


@pytest.mark.parametrize("name", some_each_run(APART | DEEP_APART, EACH_RUN_APART))
def test_d_query_by_a_kernel_of_its_own(name):
    case, tiles = APART[name] if name in APART else (DEEP_APART[name], HopperDeepBackwardTiles())
    with patched(*_apart(tiles)):
        judged = judge(case, supports=only("backward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


# The last group of two pairs has one that was done before.
GROUPS = {
    "causal, one pair": (_square(256, batch=2, heads=2, kv_heads=1, is_causal=True), 1),
    "full, two of three pairs": (Case(batch=3, q_len=128, kv_len=256, heads=1, kv_heads=1), 2),
    "deep causal, two of three pairs": (
        _square(128, batch=3, heads=1, kv_heads=1, qk_dim=192, v_dim=64, is_causal=True),
        2,
    ),
}


@pytest.mark.parametrize("name", some_each_run(GROUPS, {"causal, one pair", "full, two of three pairs"}))
def test_groups_of_heads_leave_their_scores_in_one_array(name):
    case, pairs = GROUPS[name]
    tiles = HopperDeepBackwardTiles() if case.qk_dim > 128 else HopperBackwardTiles(128, blocks=1)
    with patched(*_apart(tiles), (hopper_bwd_scores, "scores_group", lambda _: pairs)):
        judged = judge(case, supports=only("backward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


# (depth, options, length, the queries that see the broken keys)
BROKEN_APART = {
    "window": (64, {"local_window_size": (30, 0)}, 384, slice(200, 251)),
    "deep": (192, {}, 256, slice(200, 256)),
}


@pytest.mark.parametrize("name", some_each_run(BROKEN_APART, {"window"}))
def test_a_hidden_key_that_is_broken_where_d_query_is_apart(name):
    """Those that do not see it get what they get without it, the others NaN."""
    depth, given, length, seeing = BROKEN_APART[name]
    query, key, value, d_out = _draw(batch=1, length=length, heads=1, depth=depth)
    key = key.at[0, 200, 0, 3].set(jnp.nan).at[0, 220, 0, 3].set(jnp.inf)
    inputs, aux, options, _ = api._prepare(query, key, value, is_causal=True, **given)
    problem = options.problem(inputs, aux)
    out, lse = reference.forward(problem, inputs, aux)
    whole = inputs._replace(key=finite_or_zero(key))
    want = reference.backward(problem, Residuals(whole, aux, out, lse), d_out, jnp.zeros_like(lse)).query
    with patched(*_apart(HopperBackwardTiles(128) if depth == 64 else HopperDeepBackwardTiles())):
        backward = functools.partial(hopper_call.backward, problem)
        got = simulate(backward, Residuals(inputs, aux, out, lse), d_out, jnp.zeros_like(lse)).check().query
    assert np.isnan(np.asarray(got[0, seeing], np.float32)).any(-1).all()
    got, want = (np.delete(np.asarray(x, np.float32)[0], seeing, axis=0) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", some_each_run(PERSISTENT_BACKWARD, {"full"}))
def test_blocks_that_take_several_tiles_of_keys(name):
    case, tiles = PERSISTENT_BACKWARD[name]
    with patched(backward_tiles(tiles)):
        judged = judge(case, supports=only("backward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["documents", "documents, scattered", "documents, padding of NaN"])
def test_pieces_of_documents_longest_first(name):
    with patched(backward_tiles(HopperBackwardTiles(128)), (hopper_bwd_pieces, "_MANY_TILES", 1)):
        judged = judge(CASES[name], supports=only("backward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


OWN_SPANS = HopperForwardTiles(2, 64, blocks=1, takes_turns=False, own_spans=True)
SPANS = {
    "window": (
        _square(330, heads=1, kv_heads=1, window=(90, 20)),
        dataclasses.replace(OWN_SPANS, compute_wgs=3, stages=3),
    ),
    "two depths": (_square(260, heads=1, kv_heads=1, qk_dim=192, v_dim=128, is_causal=True), OWN_SPANS),
    "two depths, the last keys first": (
        _square(260, heads=1, kv_heads=1, qk_dim=192, v_dim=128, is_causal=True),
        dataclasses.replace(OWN_SPANS, last_keys_first=True),
    ),
    "three warpgroups, the last keys first": (
        _square(460, heads=2, kv_heads=1, is_causal=True),
        dataclasses.replace(OWN_SPANS, compute_wgs=3, kv_tile=128, stages=3, q_slots=2, last_keys_first=True),
    ),
}


@pytest.mark.exhaustive  # a causal mask stands in test_a_hidden_value_that_is_broken
@pytest.mark.parametrize("name", SPANS)
def test_spans_of_their_own(name):
    case, tiles = SPANS[name]
    with patched(forward_tiles(tiles)):
        judged = judge(case, supports=only("forward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


@pytest.mark.parametrize("blocks", [2, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_cluster_loads_for_both_of_its_blocks(blocks):
    with patched(forward_tiles(HopperForwardTiles(2, 64, blocks=blocks, takes_turns=False, cluster=2))):
        judged = judge(Case(batch=1, q_len=256, kv_len=300, heads=2, kv_heads=1), supports=only("forward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


RAGGED = {
    "grouped heads": _square(200, heads=4, kv_heads=2, is_causal=True),
    "window": _square(400, heads=1, kv_heads=1, window=(150, 70)),
    "fewer keys": Case(batch=1, q_len=300, kv_len=129, heads=1, kv_heads=1, is_causal=True, q_offset="bottom_right"),
}


@pytest.mark.parametrize("name", some_each_run(RAGGED, set()))
def test_tiles_that_a_band_cuts_in_a_loop_of_their_own(name):
    with patched(backward_tiles(HopperBackwardTiles(64, ragged_apart=True))):
        judged = judge(RAGGED[name])
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


@functools.cache
def _draw(batch: int = 2, length: int = 100, heads: int = 2, depth: int = 64):
    """query, key, value, d_out."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(batch, length, heads, depth)), jnp.float16) for _ in range(4))


def _simulated(problem: Problem, inputs: Inputs, aux: Aux, d_out):
    """out, lse and gradients, lse's gradient being 0."""

    def both(inputs, aux, d_out):
        out, lse = hopper_call.forward(problem, inputs, aux)
        return out, lse, hopper_call.backward(problem, Residuals(inputs, aux, out, lse), d_out, jnp.zeros_like(lse))

    return simulate(both, inputs, aux, d_out).check()


def test_a_broken_input_reaches_who_sees_it_and_nobody_else():
    """One example each, two heads on one: a query, a key, a value with NaN or inf, in the second of three documents."""
    query, key, value, d_out = _draw(batch=3)
    key, value = key[:, :, :1], value[:, :, :1]
    query = query.at[0, 55, 0, 3].set(jnp.nan)
    key = key.at[1, 60, 0, 63].set(jnp.nan)
    value = value.at[2, 51, 0, 0].set(jnp.inf)
    inputs, aux, options, _ = api._prepare(query, key, value, segment_ids=np.repeat([0, 1, 2], [50, 30, 20]))
    problem = options.problem(inputs, aux)
    out, lse, grads = _simulated(problem, inputs, aux, d_out)
    wanted, wanted_lse = reference.forward(problem, inputs, aux)
    residuals = Residuals(inputs, aux, wanted, wanted_lse)
    wanted_grads = reference.backward(problem, residuals, d_out, jnp.zeros_like(wanted_lse))
    everything = {"out": (out, wanted), "lse": (lse[..., None], wanted_lse[..., None])}
    everything |= {n: (getattr(grads, n), getattr(wanted_grads, n)) for n in ("query", "key", "value")}
    for name, (got, want) in everything.items():
        # What is broken is NaN or inf in some column; which one depends on the order of sums.
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        broken = ~np.isfinite(want).all(-1)
        assert broken.any(), name
        np.testing.assert_array_equal(~np.isfinite(got).all(-1), broken, err_msg=name)
        np.testing.assert_allclose(got[~broken], want[~broken], rtol=2e-2, atol=1e-2, err_msg=name)


SEEN_TWICE = {
    "static band": {},
    "split keys": {"splits": 2},
    "persistent": {"blocks": 1},
    "spans of their own": {"own_spans": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_rate": 0.2},
}


@pytest.mark.parametrize("name", some_each_run(SEEN_TWICE, {"split keys", "spans of their own"}))
def test_a_hidden_value_that_is_broken(name):
    """Under a causal mask, which no array tells: results are NaN, and blocks do their pieces again."""
    options = dict(SEEN_TWICE[name])
    changes = {name: options.pop(name) for name in ("splits", "blocks", "own_spans") if name in options}
    tiles = HopperForwardTiles(2 if "own_spans" in changes else 1, 64, takes_turns=False, **changes)
    if "sinks" in options:
        options["sinks"] = jnp.array([0.5], jnp.float32)
    if "dropout_rate" in options:
        options["dropout_rng"] = jax.random.key(0)
    query, key, value, _ = _draw(batch=1, length=100, heads=1)
    place = 80 if "own_spans" in changes else 60  # 80: in a tile that the second warpgroup alone visits
    value = value.at[0, place, 0, 3].set(jnp.nan)
    inputs, aux, given, _ = api._prepare(query, key, value, is_causal=True, **options)
    problem = given.problem(inputs, aux)
    with patched(forward_tiles(tiles)):
        out, lse = simulate(functools.partial(hopper_call.forward, problem), inputs, aux).check()
    want, want_lse = reference.forward(problem, inputs, aux)
    assert np.isnan(want[0, place:, 0]).any(1).all()
    assert np.isfinite(want[0, :place]).all()
    np.testing.assert_array_equal(np.isnan(out).any(-1), np.isnan(want).any(-1))
    reached = np.isnan(want).any(-1)
    np.testing.assert_allclose(*(np.asarray(x, np.float32)[~reached] for x in (out, want)), rtol=2e-2, atol=1e-2)
    reached = reached.swapaxes(1, 2)
    np.testing.assert_allclose(lse[~reached], want_lse[~reached], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("depth", [64, pytest.param(160, marks=pytest.mark.exhaustive)])
def test_sums_in_any_order(depth):
    """dQ as a sum of floats instead of integers: the same to rounding, and NaN stays where it was."""
    query, key, value, d_out = (jnp.tile(x, (1, 1, 1, 3))[..., :depth] for x in _draw(batch=1, length=140, heads=1))
    value = value.at[0, 100, 0, 3].set(jnp.nan)
    got = {}
    for reproducible in (True, False):
        with fast_layers.use_backends(reproducible=reproducible):
            inputs, aux, options, _ = api._prepare(query, key, value, is_causal=True)
            problem = options.problem(inputs, aux)
            got[reproducible] = _simulated(problem, inputs, aux, d_out)
        residuals = Residuals(inputs, aux, *got[reproducible][:2])
        backward = functools.partial(hopper_call.backward, problem)
        program = jax.make_jaxpr(backward)(residuals, d_out, jnp.zeros_like(residuals.lse))
        assert (re.search(r"i32\[1,\d+,1,\d+\]", str(program)) is not None) == reproducible
    for (path, exact), free in zip(jax.tree.leaves_with_path(got[True]), jax.tree.leaves(got[False]), strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (free, exact)), 2e-3, 2e-3, err_msg=jax.tree_util.keystr(path)
        )
    assert np.isnan(np.asarray(got[False][2].query, np.float32)).any()


class TestVmap:
    """As the xla backend under vmap; the wrong example's operands would be off by far more than rounding."""

    @staticmethod
    def _both(backend, options, query, key, value, d_out, sinks=None):
        inputs, aux, given, _ = api._prepare(query, key, value, sinks=sinks, is_causal=True, **options)
        problem = given.problem(inputs, aux)
        out, lse = backend.forward(problem, inputs, aux)
        residuals = Residuals(inputs, aux, out, lse)
        return out, lse, backend.backward(problem, residuals, d_out.reshape(out.shape), jnp.zeros_like(lse))

    def _check(self, in_axes, *args, **options):
        def mapped(backend):
            return jax.vmap(functools.partial(self._both, backend, options), in_axes)

        got, want = simulate(mapped(hopper_call), *args).check(), jax.jit(mapped(xla))(*args)
        for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            where = jax.tree_util.keystr(path)
            np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (x, y)), 2e-2, 1e-2, err_msg=where)

    @pytest.mark.exhaustive
    def test_over_examples(self):
        self._check((0, 0, 0, 0), *_draw())

    @pytest.mark.exhaustive
    def test_over_examples_of_a_batch(self):
        self._check((0, 0, 0, 0), *(x.reshape(2, 2, 50, 2, 64) for x in _draw()))

    @pytest.mark.exhaustive
    def test_keys_and_values_closed_over(self):
        query, key, value, d_out = _draw()
        self._check((0, None, None, 0), query, key[0], value[0], d_out)

    @pytest.mark.exhaustive
    def test_keys_and_values_of_a_batch_closed_over(self):
        query, key, value, d_out = _draw()
        queries = jnp.stack([query, 2 * query])
        self._check((0, None, None, None), queries, key, value, d_out)

    @pytest.mark.exhaustive
    def test_mask_arrays_closed_over(self):
        self._check((0, 0, 0, 0), *_draw(), segment_ids=np.repeat([0, 1], [30, 70]))

    @pytest.mark.exhaustive
    def test_sinks_closed_over(self):
        self._check((0, 0, 0, 0, None), *_draw(), jnp.array([0.5, 2.0], jnp.float32))

    @pytest.mark.exhaustive
    def test_over_sinks(self):
        self._check((0, 0, 0, 0, 0), *_draw(), jnp.array([[0.5, 2.0], [-1.0, 4.0]], jnp.float32))

    @pytest.mark.exhaustive
    def test_over_sinks_alone(self):
        query, key, value, d_out = (x[0] for x in _draw())
        sinks = jnp.array([[0.5, 2.0], [-1.0, 4.0]], jnp.float32)
        self._check((None, None, None, None, 0), query, key, value, d_out, sinks)


# Blocks of several pieces each, three rounds of the rings, and keys enough for the last product of a piece.
FORWARD_CASE = Case(batch=1, q_len=384, kv_len=384, heads=2, kv_heads=2)
FORWARD_TILES = forward_tiles(HopperForwardTiles(2, 64, blocks=1))
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
    "out's product not awaited": (FORWARD_CASE, StandIn("wgmma_wait"), "accumulator"),
    "scores read in flight": (FORWARD_CASE, StandIn("wgmma_accumulator_load #1"), "accumulator"),
    "out not committed": (FORWARD_CASE, StandIn("commit_smem"), "write of SMEM"),
    "out not committed, own slot": (TWO_DEPTHS, StandIn("commit_smem"), "write of SMEM"),
    "store's read not awaited": (FORWARD_CASE, StandIn("read wait_smem_to_gmem"), "read of SMEM"),
    "store's read not awaited, own slot": (TWO_DEPTHS, StandIn("read wait_smem_to_gmem"), "read of SMEM"),
    "mended before it arrives": (POISONED, StandIn("barrier_wait kv_arrived"), "read of SMEM"),
    "mending not committed": (POISONED, StandIn("commit_smem #1"), ""),
    "verdict not awaited": (MASKED, StandIn("barrier_wait judged"), "read of SMEM"),
}
BACKWARD_CASE = Case(batch=1, q_len=768, kv_len=256, heads=1, kv_heads=1)
MASKED_BACKWARD = dataclasses.replace(
    BACKWARD_CASE, q_len=256, key_lengths=(200,), query_lengths=(220,), poisoned_padding=True
)
COLUMNS = dataclasses.replace(BACKWARD_CASE, q_len=384, kv_len=128, qk_dim=128, v_dim=128)

BACKWARD_FAULTS = {
    "keys and values not awaited": (BACKWARD_CASE, StandIn("barrier_wait kv_ready"), "read of SMEM"),
    "queries not awaited": (BACKWARD_CASE, StandIn("barrier_wait q_ready"), "read of SMEM"),
    "d_out not awaited": (BACKWARD_CASE, StandIn("barrier_wait d_out_ready"), "read of SMEM"),
    "queries overwritten": (BACKWARD_CASE, StandIn("barrier_wait q_consumed"), "write of SMEM"),
    "d_out overwritten": (BACKWARD_CASE, StandIn("barrier_wait d_out_consumed"), ""),
    "dS overwritten": (BACKWARD_CASE, StandIn("barrier_wait scores_consumed"), "write of SMEM"),
    "dS not exchanged": (
        BACKWARD_CASE,
        StandIn("barrier_wait scores_ready", "barrier_arrive scores_ready"),
        "read of SMEM",
    ),
    # In the text: [finite keys, finite queries,] dS, dQ, the last dQ, dK and dV.
    "dS not committed": (BACKWARD_CASE, StandIn("commit_smem #1"), "write of SMEM"),
    "dQ not committed": (BACKWARD_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "last dQ not committed": (BACKWARD_CASE, StandIn("commit_smem #3"), "write of SMEM"),
    "dK and dV not committed": (BACKWARD_CASE, StandIn("commit_smem #4"), "write of SMEM"),
    # The second commits the first's stores too.
    "finite keys not committed": (MASKED_BACKWARD, StandIn("commit_smem #1", "commit_smem #2"), "write of SMEM"),
    "finite queries not committed": (MASKED_BACKWARD, StandIn("commit_smem #2"), "write of SMEM"),
    "finite queries not awaited": (MASKED_BACKWARD, StandIn("barrier_wait queries_mended"), "SMEM"),
    "dQ's slot overwritten": (BACKWARD_CASE, StandIn("read wait_smem_to_gmem"), "write of SMEM"),
    "scores read in flight": (BACKWARD_CASE, StandIn("wgmma_accumulator_load #1"), "accumulator"),
    "d_weights read in flight": (BACKWARD_CASE, StandIn("wgmma_accumulator_load #2"), "accumulator"),
    "dQ read in flight": (BACKWARD_CASE, StandIn("wgmma_accumulator_load #3"), "accumulator"),
    "queries freed in flight": (BACKWARD_CASE, StandIn("wgmma_wait"), "read of SMEM"),
    "dK and dV not awaited": (BACKWARD_CASE, StandIn("read wait_smem_to_gmem #3"), ""),
}

# One step for each of three tiles of keys.
ONE_STEP = Case(batch=1, q_len=128, kv_len=384, heads=1, kv_heads=1)
PERSISTENT_BACKWARD_FAULTS = {
    "keys and values overwritten": (ONE_STEP, StandIn("barrier_wait kv_consumed"), "write of SMEM"),
    # In the text, of the waits for a store's read: dQ, dK and dV, the last ones.
    "dQ overwritten by dV": (ONE_STEP, StandIn("read wait_smem_to_gmem #2"), "alias group"),
    "dK and dV overwritten": (ONE_STEP, StandIn("read wait_smem_to_gmem #1"), "alias group"),
    "dK and dV not committed": (ONE_STEP, StandIn("commit_smem #4"), "write of SMEM"),
}

# Four steps of three slots, and three tiles of queries for one block.
APART_CASE = _square(384, heads=1, kv_heads=1, is_causal=True)
APART_FAULTS = {
    "dS not awaited": (APART_CASE, StandIn("barrier_wait ready"), "read of SMEM"),
    "dS overwritten": (APART_CASE, StandIn("barrier_wait consumed"), "write of SMEM"),
    "dS overwritten in flight": (APART_CASE, StandIn("wgmma_wait"), "SMEM"),
    "finite keys not awaited": (APART_CASE, StandIn("barrier_wait keys_mended"), "SMEM"),
    # In the text: finite keys, dQ.
    "dQ not committed": (APART_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "dQ's slot overwritten": (APART_CASE, StandIn("read wait_smem_to_gmem #1"), "write of SMEM"),
}
LEFT_FAULTS = {
    # In the text: finite keys, dS, dK and dV.
    "dS not committed": (APART_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "dS's slot overwritten": (APART_CASE, StandIn("read wait_smem_to_gmem #1"), "write of SMEM"),
}

# Six steps of three slots in the main kernel.
DEEP_LEFT_CASE = Case(batch=1, q_len=384, kv_len=128, heads=1, kv_heads=1, qk_dim=192, v_dim=64)
DEEP_MENDED = _square(128, heads=1, kv_heads=1, qk_dim=192, v_dim=64, is_causal=True)
# Four steps of three slots for dQ, of two heads' queries.
DEEP_TWO = _square(128, heads=2, kv_heads=2, qk_dim=192, v_dim=64)
DEEP_LEFT_FAULTS = {
    "keys not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait k_ready"), "read of SMEM"),
    "values not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait v_ready"), "read of SMEM"),
    "queries not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait q_ready"), "read of SMEM"),
    "d_out not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait d_out_ready"), "read of SMEM"),
    "queries overwritten": (DEEP_LEFT_CASE, StandIn("barrier_wait q_consumed"), "write of SMEM"),
    "d_out overwritten": (DEEP_LEFT_CASE, StandIn("barrier_wait d_out_consumed"), "write of SMEM"),
    "dV stored over values in use": (DEEP_LEFT_CASE, StandIn("barrier_wait products_done"), "of SMEM"),
    "P not awaited": (DEEP_LEFT_CASE, StandIn("barrier_wait weights_ready"), "SMEM"),
    # In the text: [finite keys,] P, the next P, dV; [finite values,] dS, the next dS, dK.
    "first P not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #1"), "write of SMEM"),
    "P not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "dV not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #3"), "write of SMEM"),
    "first dS not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #4"), "write of SMEM"),
    "dS not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #5"), "write of SMEM"),
    "dK not committed": (DEEP_LEFT_CASE, StandIn("commit_smem #6"), "write of SMEM"),
    "finite keys not committed": (DEEP_MENDED, StandIn("commit_smem #1"), "write of SMEM"),
    # Of the waits for a store's read: dV, dS, the next dS, dK.
    "dS's slot overwritten": (DEEP_LEFT_CASE, StandIn("read wait_smem_to_gmem #3"), "write of SMEM"),
    "scores read in flight": (DEEP_LEFT_CASE, StandIn("wgmma_accumulator_load #2"), "accumulator"),
    "d_weights read in flight": (DEEP_LEFT_CASE, StandIn("wgmma_accumulator_load #4"), "accumulator"),
    "d_out freed in flight": (DEEP_LEFT_CASE, StandIn("wgmma_wait #1"), "SMEM"),
    "queries freed in flight": (DEEP_LEFT_CASE, StandIn("wgmma_wait #2"), "SMEM"),
}
DEEP_QUERY_FAULTS = {
    "dS not awaited": (DEEP_TWO, StandIn("barrier_wait ready"), "read of SMEM"),
    "dS overwritten": (DEEP_TWO, StandIn("barrier_wait consumed"), "write of SMEM"),
    "dS freed in flight": (DEEP_TWO, StandIn("wgmma_wait #1"), "SMEM"),
    "finite keys not awaited": (DEEP_MENDED, StandIn("barrier_wait keys_mended"), "SMEM"),
    "dQ not committed": (DEEP_TWO, StandIn("commit_smem"), "write of SMEM"),
    "dQ's slot overwritten": (DEEP_TWO, StandIn("read wait_smem_to_gmem #1"), "write of SMEM"),
}

# Six steps: two rounds of every ring.
DEEP_CASE = Case(batch=1, q_len=384, kv_len=64, heads=1, kv_heads=1, qk_dim=192, v_dim=64)
MASKED_DEEP = dataclasses.replace(
    DEEP_CASE, q_len=256, kv_len=128, key_lengths=(100,), query_lengths=(220,), poisoned_padding=True
)
# The second tile of keys has no step.
UNSEEN_DEEP = dataclasses.replace(DEEP_CASE, q_len=64, kv_len=128, is_causal=True)

DEEP_FAULTS = {
    "keys and values not awaited": (DEEP_CASE, StandIn("barrier_wait kv_ready"), "read of SMEM"),
    "queries not awaited": (DEEP_CASE, StandIn("barrier_wait q_ready"), "read of SMEM"),
    "d_out not awaited": (DEEP_CASE, StandIn("barrier_wait d_out_ready"), "read of SMEM"),
    "P not awaited": (DEEP_CASE, StandIn("barrier_wait weights_ready"), "SMEM"),
    "P overwritten": (DEEP_CASE, StandIn("barrier_wait weights_consumed"), "write of SMEM"),
    "dS not awaited": (DEEP_CASE, StandIn("barrier_wait scores_ready"), "SMEM"),
    "dS overwritten": (DEEP_CASE, StandIn("barrier_wait scores_consumed"), "write of SMEM"),
    # The value warpgroup's, whose last step stands apart.
    "last d_out not awaited": (DEEP_CASE, StandIn("barrier_wait #8"), "read of SMEM"),
    "dV stored over d_out in use": (UNSEEN_DEEP, StandIn("barrier_wait #9"), "of SMEM"),
    # In the text: each panel of dQ; [finite keys,] P, the next P, dV; [finite values,] dS, Q read, the next dS, dK.
    "dQ not committed": (DEEP_CASE, StandIn("commit_smem #2"), "write of SMEM"),
    "P not committed": (DEEP_CASE, StandIn("commit_smem #5"), "write of SMEM"),
    "dV not committed": (DEEP_CASE, StandIn("commit_smem #6"), "write of SMEM"),
    "first dS not committed": (DEEP_CASE, StandIn("commit_smem #7"), "write of SMEM"),
    "dS not committed": (DEEP_CASE, StandIn("commit_smem #9"), "write of SMEM"),
    "dK not committed": (DEEP_CASE, StandIn("commit_smem #10"), "write of SMEM"),
    "finite keys not committed": (MASKED_DEEP, StandIn("commit_smem #4"), "write of SMEM"),
    "dQ's slot overwritten": (DEEP_CASE, StandIn("read wait_smem_to_gmem"), "write of SMEM"),
    "dQ read in flight": (DEEP_CASE, StandIn("wgmma_accumulator_load #3"), "accumulator"),
    "scores read in flight": (DEEP_CASE, StandIn("wgmma_accumulator_load #5"), "accumulator"),
    "d_weights read in flight": (DEEP_CASE, StandIn("wgmma_accumulator_load #7"), "accumulator"),
    "d_out overwritten in flight": (DEEP_CASE, StandIn("wgmma_wait #1"), "SMEM"),
    "queries overwritten in flight": (DEEP_CASE, StandIn("wgmma_wait #2"), "SMEM"),
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
}
BACKWARD_EACH_RUN = {
    "d_out not awaited",
    "queries overwritten",
    "dS not committed",
    "finite keys not committed",
    "dQ read in flight",
    "queries freed in flight",
    "dK and dV not awaited",
}
DEEP_EACH_RUN = {"dS not awaited", "P overwritten"}


# In the text of a causal mask's compute warpgroups, the last wait for keys stands where tiles are passed over.
FORM_FAULTS = {
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


def _run(module, case, stand_in, *patches):
    pass_ = "forward" if module is hopper_fwd else "backward"
    rows_by_xla = (hopper_bwd_rows, "takes", lambda *_: False)  # test_hopper_attention_rows.py has their kernel
    together = (config, "LONGEST_D_QUERY_APART", {})
    with changed(module, stand_in, FORWARD_TILES, rows_by_xla, together, *patches):
        return judge(case, supports=only(pass_), timeout=20.0)


@pytest.mark.parametrize(
    ("module", "case"),
    [
        pytest.param(hopper_fwd, FORWARD_CASE, id="forward"),
        # As in test_blocks_that_take_several_tiles.
        pytest.param(hopper_fwd, MASKED, id="masked", marks=pytest.mark.exhaustive),
        pytest.param(hopper_fwd, POISONED, id="poisoned", marks=pytest.mark.exhaustive),
        pytest.param(hopper_fwd, TWO_DEPTHS, id="two depths", marks=pytest.mark.exhaustive),
        pytest.param(hopper_bwd, BACKWARD_CASE, id="backward"),
        pytest.param(hopper_bwd, MASKED_BACKWARD, id="backward masked"),
        pytest.param(hopper_bwd, COLUMNS, id="columns", marks=pytest.mark.exhaustive),
        pytest.param(hopper_bwd_deep, DEEP_CASE, id="deep", marks=pytest.mark.exhaustive),
        pytest.param(hopper_bwd_deep, MASKED_DEEP, id="deep masked", marks=pytest.mark.exhaustive),
        pytest.param(hopper_bwd_deep, UNSEEN_DEEP, id="deep unseen", marks=pytest.mark.exhaustive),
    ],
)
def test_without_a_fault_nothing_is_found(module, case):
    stand_in = StandIn()
    judged = _run(module, case, stand_in)
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()
    assert stand_in.counts["barrier_wait"] > 0  # it was asked
    assert stand_in.hits == 0


def _found(module, fault, faults, *patches):
    case, stand_in, access = faults[fault]
    judged = _run(module, case, stand_in, *patches)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    (sim,) = judged.simulations[-1:]
    assert sim.faulty
    if access:
        assert any(access in race for race in sim.races), sim.report()


@pytest.mark.parametrize("fault", some_each_run(FORWARD_FAULTS, FORWARD_EACH_RUN))
def test_planted_fault_of_the_forward_is_found(fault):
    _found(hopper_fwd, fault, FORWARD_FAULTS)


@pytest.mark.parametrize("fault", some_each_run(FORM_FAULTS, {"a cluster's blocks free their own slots only"}))
def test_planted_fault_of_a_form_of_the_forward_is_found(fault):
    case, stand_in, tiles, access = FORM_FAULTS[fault]
    _found(hopper_fwd, fault, {fault: (case, stand_in, access)}, forward_tiles(tiles))


@pytest.mark.parametrize("fault", some_each_run(BACKWARD_FAULTS, BACKWARD_EACH_RUN))
def test_planted_fault_of_the_backward_is_found(fault):
    _found(hopper_bwd, fault, BACKWARD_FAULTS)


@pytest.mark.parametrize("fault", some_each_run(PERSISTENT_BACKWARD_FAULTS, {"keys and values overwritten"}))
def test_planted_fault_of_the_persistent_backward_is_found(fault):
    patch = backward_tiles(HopperBackwardTiles(128, blocks=1))
    _found(hopper_bwd, fault, PERSISTENT_BACKWARD_FAULTS, patch)


@pytest.mark.parametrize("fault", some_each_run(APART_FAULTS, {"dS overwritten"}))
def test_planted_fault_of_d_query_apart_is_found(fault):
    _found(hopper_bwd_apart, fault, APART_FAULTS, *_apart(HopperBackwardTiles(128)))


@pytest.mark.parametrize("fault", some_each_run(LEFT_FAULTS, set()))
def test_planted_fault_of_what_is_left_for_d_query_is_found(fault):
    _found(hopper_bwd, fault, LEFT_FAULTS, *_apart(HopperBackwardTiles(128)))


@pytest.mark.parametrize("fault", some_each_run(DEEP_QUERY_FAULTS, set()))
def test_planted_fault_of_the_deep_d_query_apart_is_found(fault):
    one_block = hopper_bwd_deep_query, "HOPPER_SMS", 1
    _found(hopper_bwd_deep_query, fault, DEEP_QUERY_FAULTS, *_apart(HopperDeepBackwardTiles()), one_block)


@pytest.mark.parametrize("fault", some_each_run(DEEP_LEFT_FAULTS, {"P not awaited"}))
def test_planted_fault_of_what_is_left_for_the_deep_d_query_is_found(fault):
    _found(hopper_bwd_deep_scores, fault, DEEP_LEFT_FAULTS, *_apart(HopperDeepBackwardTiles()))


@pytest.mark.parametrize("fault", some_each_run(DEEP_FAULTS, DEEP_EACH_RUN))
def test_planted_fault_of_the_deep_backward_is_found(fault):
    _found(hopper_bwd_deep, fault, DEEP_FAULTS)


def _off_by_one(init):
    def make(mask, *args):
        init(mask, *args)
        if mask.high is not None:
            mask.high += 1

    return make


def _one_tile_less(key_span):
    def span(mask, example, q_index):
        exact = key_span(mask, example, q_index)
        return exact._replace(last=jnp.maximum(exact.last - 1, exact.first + 1))

    return span


def _plain_one_tile_more(key_span):
    def span(mask, example, q_index):
        exact = key_span(mask, example, q_index)
        return exact._replace(full_last=exact.full_last + 1)

    return span


def _in_base_2(finish):
    def finished(state):
        normaliser, lse = finish(state)
        return normaliser, lse * LOG2_E

    return finished


def _unscaled(launch):
    def launched(tiles, problem, operands):
        d_query, *others = launch(tiles, problem, operands)
        return d_query / problem.scale, *others

    return launched


VALUE_FAULTS = {
    "causal off by one": ((tile_mask.TileMask, "__init__", _off_by_one), {"out", "dq", "dk"}),
    "one tile of keys less": ((tile_mask.TileMask, "key_span", _one_tile_less), {"out", "lse"}),
    "a ragged tile taken as plain": ((tile_mask.TileMask, "key_span", _plain_one_tile_more), {"out"}),
    "lse in base 2": ((OnlineSoftmax, "finish", _in_base_2), {"lse"}),
    "dq without scale": ((hopper_bwd, "launch", _unscaled), {"dq"}),
}


@pytest.mark.parametrize("fault", some_each_run(VALUE_FAULTS, {"a ragged tile taken as plain", "dq without scale"}))
def test_planted_fault_in_values_is_found(fault):
    (owner, name, change), quantities = VALUE_FAULTS[fault]
    # Not the last keys first, as then no tile is asked whether it is ragged.
    tiles = HopperForwardTiles(2, 128, stages=2)
    with patched(forward_tiles(tiles)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, change(getattr(owner, name)))
        judged = judge(CASES["causal"], timeout=20.0)
    # A mask that shows more tiles than dS has room for also writes them where others stand.
    assert not judged.faulty or fault == "causal off by one", judged.report()
    assert quantities <= {row.quantity for row in judged.table.failures}, judged.report()
