"""A step of decoding in the Hopper kernel that turns both products: values and races."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

from fast_layers import masks as M
from fast_layers.ops.attention import api, hopper_one_query
from fast_layers.ops.attention.hopper_one_query_config import HopperOneQueryTiles, columns_of, takes
from fast_layers.testing import simulate
from simulator.attention import StandIn, changed
from simulator.found import tells
from simulator.rounded import assert_forward
from simulator.test_hopper_decode import Case, lengths

pytestmark = pytest.mark.simulator

CASES = {
    "group of 4": Case(heads=8, kv_heads=2),
    "group of 8": Case(kv_len=1000, heads=8),
    "group of 12": Case(kv_len=300, heads=24, kv_heads=2),
    "no group": Case(kv_len=768, heads=2, kv_heads=2),
    "offset": Case(kv_len=520, batch=2, options={"is_causal": True, "q_offset": lengths(400, 7)}),
    "static offset": Case(kv_len=520, options={"is_causal": True, "q_offset": 299}),
    "lengths": Case(kv_len=600, batch=4, kv_heads=2, options={"key_value_seq_lengths": lengths(0, 5, 130, 600)}),
    "window": Case(batch=2, options={"local_window_size": (200, 0), "q_offset": lengths(1000, 150)}),
    "segments": Case(
        kv_len=512,
        options={"mask": M.Segments(lengths(5), np.tile(lengths(3, 5, 3, 5), 128))},
    ),
    "softcap": Case(kv_len=512, options={"softcap": 2.0}),
    "sinks": Case(
        kv_len=512,
        batch=2,
        kv_heads=2,
        options={"sinks": np.array([0, 1, -1, 3], np.float32), "key_value_seq_lengths": lengths(0, 300)},
    ),
    "depths 192 and 128": Case(kv_len=512, depth=192, v_dim=128),
    "depths 64 and 192": Case(kv_len=300, v_dim=192),
    "depth 256": Case(kv_len=512, depth=256, kv_heads=2),
}


def tiles_of(problem, splits: int) -> HopperOneQueryTiles:
    """Steps of both sizes, slots that are used again and such that are more than the steps."""
    kv_tile, stages = {1: (64, 2), 2: (128, 2), 5: (64, 3)}[splits]
    return HopperOneQueryTiles(columns_of(problem), kv_tile, stages, splits)


EACH_RUN = {("group of 12", 1), ("offset", 2), ("lengths", 5), ("sinks", 1)}


@pytest.mark.parametrize(("name", "splits"), some_each_run(itertools.product(CASES, (1, 2, 5)), EACH_RUN))
def test_as_the_reference(name, splits):
    problem, inputs, aux = CASES[name].prepare()
    assert takes(problem)
    tiles = tiles_of(problem, splits)
    got = simulate(lambda inputs: hopper_one_query.attend(problem, inputs, aux, tiles), inputs).check()
    assert_forward(got, problem, inputs, aux)


@pytest.mark.parametrize("splits", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_under_vmap(splits):
    """Each call of its own keys and offset."""
    _, inputs, _ = Case(kv_len=256, batch=2).prepare()
    operands = inputs.query, inputs.key, inputs.value

    def attend(q_offset, *operands):
        inputs, aux, options, _ = api._prepare(*operands, is_causal=True, q_offset=q_offset)
        problem = options.problem(inputs, aux)
        return hopper_one_query.attend(problem, inputs, aux, tiles_of(problem, splits))

    offsets = lengths(100, 7)
    each = jax.vmap(lambda q_offset, *operands: attend(q_offset, *(x[None] for x in operands)))
    out, lse = simulate(each, offsets, *operands).check()
    whole, whole_lse = simulate(attend, offsets, *operands).check()
    np.testing.assert_array_equal(np.asarray(out[:, 0], np.float32), np.asarray(whole, np.float32))
    np.testing.assert_array_equal(lse[:, 0], whole_lse)


@pytest.mark.parametrize("broken", [jnp.nan, pytest.param(jnp.inf, marks=pytest.mark.exhaustive)])
def test_what_a_broken_key_breaks(broken):
    """A value that is no finite number reaches the queries that see it, and no others."""
    problem, inputs, aux = Case(kv_len=512, options={"key_value_seq_lengths": lengths(400)}).prepare()
    for key, reaches in ((399, True), (401, False)):
        given = inputs._replace(value=inputs.value.at[0, key, 0, 3].set(broken))
        attend = simulate(lambda inputs: hopper_one_query.attend(problem, inputs, aux, tiles_of(problem, 1)), given)
        out, _ = attend.check()
        assert bool(jnp.isfinite(out[..., 3]).any()) is not reaches
        if not reaches:
            assert bool(jnp.isfinite(out).all())


# What is left out, and of what the simulator then tells.
FAULTS = {
    "queries not awaited": ("barrier_wait q_ready", "loose_query"),
    "keys not awaited": ("barrier_wait k_ready", "k_slots"),
    "values not awaited": ("barrier_wait v_ready", "v_slots"),
    "slots not awaited": ("barrier_wait consumed", "k_slots"),
    "queries not committed": ("commit_smem #1", "q_slot"),
    "weights not committed": ("commit_smem #2", "weight_slot"),
    "out not committed": ("commit_smem #3", "out_slot"),
}


@pytest.mark.parametrize("fault", some_each_run(FAULTS, {"slots not awaited", "weights not committed"}))
def test_planted_fault_is_found(fault):
    event, slot = FAULTS[fault]
    problem, inputs, aux = Case(kv_len=512).prepare()
    stand_in = StandIn(event)
    with changed(hopper_one_query, stand_in):
        tiles = HopperOneQueryTiles(columns_of(problem))
        sim = simulate(lambda inputs: hopper_one_query.attend(problem, inputs, aux, tiles), inputs, timeout=20.0)
    assert slot in stand_in.scratch
    assert stand_in.hits > 0, "the kernel has no such event any more"
    assert tells(sim, "SMEM"), sim.report()
