"""Attention's backward on Hopper where some blocks leave dS in memory, and others of the same launch make dQ of it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

import fast_layers
from fast_layers.ops.attention import api, hopper_bwd_beside, hopper_bwd_sequence, hopper_call, reference
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.problem import Residuals, finite_or_zero
from fast_layers.testing import simulate
from fast_layers.testing.closeness import assert_close
from fast_layers.testing.parity import Case
from simulator.attention import StandIn, backward_tiles, draw, found, judge, only, patched, square

pytestmark = pytest.mark.simulator

HELD = HopperBackwardTiles(64, ragged_apart=True, d_query_apart=True, holds_keys=True)


def _beside(places: int) -> tuple[tuple[Any, str, Any], ...]:
    """Patches: a head after the other, dQ of one made soon after its dS, for so many of which there is place."""
    small = {"HOPPER_SMS": 1, "_AHEAD": 2, "_SLACK": 2, "_MOST_LEAD": 1.0, "_FEWEST_SHARED_TILES": 1}
    in_place = property(lambda self: min(places, self.pieces.heads))
    of_sequence = hopper_bwd_sequence.Sequence, "places", in_place
    return backward_tiles(HELD), of_sequence, *((hopper_bwd_sequence, name, x) for name, x in small.items())


BESIDE = {
    "causal, places taken": (
        square(512, batch=2, heads=2, kv_heads=2, qk_dim=128, v_dim=128, is_causal=True, lse_gradient=True),
        3,
    ),
    "causal, a place for each": (square(256, batch=3, heads=1, kv_heads=1, qk_dim=128, v_dim=128, is_causal=True), 3),
    "causal, grouped heads": (
        square(512, batch=2, heads=4, kv_heads=2, qk_dim=128, v_dim=128, is_causal=True, lse_gradient=True),
        3,
    ),
    "causal, depth 80": (square(512, batch=2, heads=2, kv_heads=2, qk_dim=80, v_dim=80, is_causal=True), 3),
    "causal, depth 96, grouped heads": (
        square(512, heads=4, kv_heads=2, qk_dim=96, v_dim=96, is_causal=True, lse_gradient=True),
        3,
    ),
    "full, places taken": (Case(batch=5, q_len=256, kv_len=384, heads=1, kv_heads=1, qk_dim=128, v_dim=128), 3),
}


@pytest.fixture
def made(monkeypatch):
    """What has been asked for: that a call took this form."""
    asked, of = [], hopper_bwd_beside.Maker.of
    monkeypatch.setattr(hopper_bwd_beside.Maker, "of", lambda *args: asked.append(args) or of(*args))
    return asked


EACH_RUN = {"causal, places taken", "full, places taken"}


@pytest.mark.parametrize("name", some_each_run(BESIDE, EACH_RUN))
def test_d_query_by_blocks_of_the_same_launch(name, made):
    case, places = BESIDE[name]
    with patched(*_beside(places)):
        judge(case, supports=only("backward"), sums_in_order=True).check()
    assert made


def test_a_hidden_key_that_is_broken(made):
    """Those that do not see it get what they get without it, the others NaN."""
    query, key, value, d_out = draw(batch=1, length=256, heads=1, depth=128)
    key = key.at[0, 100, 0, 3].set(jnp.nan).at[0, 240, 0, 3].set(jnp.inf)
    inputs, aux, options, _ = api._prepare(query, key, value, is_causal=True)
    problem = options.problem(inputs, aux)
    out, lse = reference.forward(problem, inputs, aux)
    op = functools.partial(fast_layers.dot_product_attention, is_causal=True, implementation="reference")
    whole = query, finite_or_zero(key), value, d_out
    oracle, yardstick = (
        jax.vjp(op, *operands[:3])[1](operands[3])[0]
        for operands in (tuple(x.astype(jnp.float32) for x in whole), whole)
    )
    with patched(*_beside(1)):
        backward = functools.partial(hopper_call.backward, problem)
        got = simulate(backward, Residuals(inputs, aux, out, lse), d_out, jnp.zeros_like(lse)).check().query
    assert made
    assert np.isnan(got[0, 100:]).any(-1).all()
    assert_close(got[:, :100], oracle[:, :100], yardstick[:, :100], name="query")


# Five heads for three places; of the waits, in the text, that for a place comes first.
CASE = square(512, batch=5, heads=1, kv_heads=1, qk_dim=128, v_dim=128, is_causal=True)


GROUPED = square(256, batch=1, heads=2, kv_heads=1, qk_dim=128, v_dim=128, is_causal=True)


FAULTS = {
    # As traced: [a head's place,] all dS of a head, [the sums of the heads before].
    "dS of others not awaited": (CASE, StandIn("semaphore_wait #2"), "read of GMEM"),
    "a place taken that is in use": (CASE, StandIn("semaphore_wait #1"), "write of GMEM"),
    "sums of the head before not awaited": (GROUPED, StandIn("semaphore_wait #2"), "write of GMEM"),
    "sums told of in flight": (GROUPED, StandIn("wait_smem_to_gmem #1"), "write of GMEM"),
    "dS told of in flight": (CASE, StandIn("wait_smem_to_gmem #1"), "of GMEM"),
    "dS not awaited": (CASE, StandIn("barrier_wait ready"), "read of SMEM"),
    "dS overwritten": (CASE, StandIn("barrier_wait consumed"), "write of SMEM"),
    "dS overwritten in flight": (CASE, StandIn("wgmma_wait"), "SMEM"),
    "finite keys not awaited": (CASE, StandIn("barrier_wait keys_mended"), "SMEM"),
    # In the text: finite keys twice, then dQ of either tile.
    "dQ not committed": (CASE, StandIn("commit_smem #3"), "write of SMEM"),
    "dQ's slot overwritten": (CASE, StandIn("read wait_smem_to_gmem #2"), "write of SMEM"),
}


@pytest.mark.parametrize("fault", some_each_run(FAULTS, {"sums of the head before not awaited"}))
def test_planted_fault_is_found(fault):
    found(hopper_bwd_beside, fault, FAULTS, *_beside(3), sums_in_order=True)
