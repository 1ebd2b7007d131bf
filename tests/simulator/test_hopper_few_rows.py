"""Few rows in the Hopper kernel that turns both products, as in decoding: values and races."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

from fast_layers import masks as M
from fast_layers.ops.attention import api, hopper_few_rows
from fast_layers.ops.attention.hopper_few_rows_config import HopperFewRowsTiles, takes
from fast_layers.ops.attention.kernel_operands import round_up
from fast_layers.testing import simulate
from simulator.attention import StandIn, changed
from simulator.found import tells
from simulator.rounded import assert_forward
from simulator.test_hopper_decode import CAUSAL, Case, lengths

pytestmark = pytest.mark.simulator

CASES = {
    "group of 4": Case(heads=8, kv_heads=2),
    "group of 8": Case(kv_len=1000, heads=8),
    "group of 12": Case(kv_len=300, heads=24, kv_heads=2),
    "no group": Case(kv_len=768, heads=2, kv_heads=2),
    "3 queries, group of 5": Case(q_len=3, kv_len=300, heads=5, options=CAUSAL),
    "3 queries, group of 7": Case(q_len=3, kv_len=300, heads=7, depth=128, options=CAUSAL),
    "16 queries, no group": Case(q_len=16, kv_len=512, heads=2, kv_heads=2, options=CAUSAL),
    "2 queries, offset": Case(q_len=2, kv_len=520, batch=2, options={"is_causal": True, "q_offset": lengths(400, 7)}),
    "4 queries, ids": Case(
        q_len=4,
        kv_len=512,
        options={"mask": M.Segments(lengths(3, 5, 5, 0), np.tile(lengths(3, 5, 3, 5), 128))},
    ),
    "offset": Case(kv_len=520, batch=2, options={"is_causal": True, "q_offset": lengths(400, 7)}),
    "static offset": Case(kv_len=520, options={"is_causal": True, "q_offset": 299}),
    "lengths": Case(kv_len=600, batch=4, kv_heads=2, options={"key_value_seq_lengths": lengths(0, 5, 130, 600)}),
    "window": Case(batch=2, options={"local_window_size": (200, 0), "q_offset": lengths(1000, 150)}),
    "segments": Case(
        kv_len=512,
        options={"mask": M.Segments(lengths(5), np.tile(lengths(3, 5, 3, 5), 128))},
    ),
    "softcap": Case(kv_len=512, options={"softcap": 2.0}),
    "2 queries, sinks": Case(
        q_len=2,
        kv_len=512,
        batch=2,
        kv_heads=2,
        options={"sinks": np.array([0, 1, -1, 3], np.float32), "key_value_seq_lengths": lengths(0, 300)},
    ),
    "depths 192 and 128": Case(kv_len=512, depth=192, v_dim=128),
    "depths 64 and 192": Case(kv_len=300, v_dim=192),
    "depth 256": Case(kv_len=512, depth=256, kv_heads=2),
    "depth 16": Case(kv_len=300, depth=16, heads=8, kv_heads=2),
    "depth 32, offset": Case(q_len=2, kv_len=520, batch=2, depth=32, options=CAUSAL | {"q_offset": lengths(400, 7)}),
    "depth 80, lengths": Case(
        kv_len=600, batch=4, kv_heads=2, depth=80, options={"key_value_seq_lengths": lengths(0, 5, 130, 600)}
    ),
    "depth 96, 2 queries, sinks": Case(
        q_len=2, kv_len=512, depth=96, kv_heads=2, options={"sinks": np.array([0, 1, -1, 3], np.float32)}
    ),
    "depths 112 and 48": Case(kv_len=512, depth=112, v_dim=48),
    "depths 64 and 208": Case(kv_len=300, v_dim=208),
}


# Steps of both sizes, slots that are used again and such that are more than the steps.
TILES = {
    "whole": (64, 2, 1, False),
    "2 parts": (128, 2, 2, False),
    "5 parts": (64, 3, 5, False),
    "2 in a cluster": (64, 2, 2, True),
    "8 in a cluster": (128, 3, 8, True),
    "rows apart": (64, 2, 1, False, True),
    "2 in a cluster, rows apart": (128, 2, 2, True, True),
}


def tiles_of(problem, name: str) -> HopperFewRowsTiles:
    return HopperFewRowsTiles(round_up(problem.q_len * problem.group, 8), *TILES[name])


EACH_RUN = {
    ("3 queries, group of 7", "whole"),
    ("2 queries, offset", "2 parts"),
    ("lengths", "5 parts"),
    ("2 queries, sinks", "whole"),
    ("2 queries, sinks", "2 in a cluster"),
    ("3 queries, group of 5", "8 in a cluster"),
    ("depths 64 and 192", "2 in a cluster"),
    ("depth 80, lengths", "5 parts"),
    ("depth 96, 2 queries, sinks", "8 in a cluster"),
    ("depth 80, lengths", "2 in a cluster, rows apart"),
    ("depths 112 and 48", "whole"),
    ("depths 112 and 48", "rows apart"),
}


@pytest.mark.parametrize(("name", "tiles_name"), some_each_run(itertools.product(CASES, TILES), EACH_RUN))
def test_as_the_reference(name, tiles_name):
    problem, inputs, aux = CASES[name].prepare()
    assert takes(dataclasses.replace(problem, batch=512))
    tiles = tiles_of(problem, tiles_name)
    got = simulate(lambda inputs: hopper_few_rows.attend(problem, inputs, aux, tiles), inputs).check()
    assert_forward(got, problem, inputs, aux)


@pytest.mark.parametrize(
    "tiles_name", ["whole", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("2 parts", "2 in a cluster"))]
)
def test_under_vmap(tiles_name):
    """Each call of its own keys and offset."""
    _, inputs, _ = Case(q_len=2, kv_len=256, batch=2).prepare()
    operands = inputs.query, inputs.key, inputs.value

    def attend(q_offset, *operands):
        inputs, aux, options, _ = api._prepare(*operands, is_causal=True, q_offset=q_offset)
        problem = options.problem(inputs, aux)
        return hopper_few_rows.attend(problem, inputs, aux, tiles_of(problem, tiles_name))

    offsets = lengths(100, 7)
    each = jax.vmap(lambda q_offset, *operands: attend(q_offset, *(x[None] for x in operands)))
    out, lse = simulate(each, offsets, *operands).check()
    whole, whole_lse = simulate(attend, offsets, *operands).check()
    np.testing.assert_array_equal(np.asarray(out[:, 0], np.float32), np.asarray(whole, np.float32))
    np.testing.assert_array_equal(lse[:, 0], whole_lse)


@pytest.mark.parametrize("depth", [64, 80, pytest.param(96, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("broken", [jnp.nan, pytest.param(jnp.inf, marks=pytest.mark.exhaustive)])
def test_what_a_broken_key_breaks(broken, depth):
    """A value that is no finite number reaches the queries that see it, and no others."""
    options = {"is_causal": True, "q_offset": lengths(399)}
    problem, inputs, aux = Case(q_len=2, kv_len=512, depth=depth, options=options).prepare()
    for key, reached in ((399, [0, 1]), (400, [1]), (401, [])):
        given = inputs._replace(value=inputs.value.at[0, key, 0, 3].set(broken))
        attend = simulate(
            lambda inputs: hopper_few_rows.attend(problem, inputs, aux, tiles_of(problem, "whole")), given
        )
        out, _ = attend.check()
        for query, of_query in enumerate(out[0]):
            assert not jnp.isfinite(of_query[:, 3]).any() if query in reached else jnp.isfinite(of_query).all()


# What is left out, and of what the simulator then tells.
FAULTS = {
    "queries not awaited": ("barrier_wait q_ready", "loose_query"),
    "keys and values not awaited": ("barrier_wait kv_ready", "k_slots"),
    "queries not committed": ("commit_smem #1", "q_slot"),
    "weights not committed": ("commit_smem #2", "weight_slot"),
    "slots not awaited": ("barrier_wait consumed", "k_slots"),
    "out not committed": ("commit_smem #3", "out_slot"),
    "parts not awaited": ("barrier_wait met", "out_slot"),
}


@pytest.mark.parametrize(
    "fault", some_each_run(FAULTS, {"slots not awaited", "weights not committed", "parts not awaited"})
)
def test_planted_fault_is_found(fault):
    event, slot = FAULTS[fault]
    problem, inputs, aux = Case(q_len=2, kv_len=512).prepare()
    stand_in = StandIn(event)
    with changed(hopper_few_rows, stand_in):
        joins = {"splits": 2, "in_cluster": True} if event.endswith("met") else {}
        tiles = HopperFewRowsTiles(8, **joins)
        sim = simulate(lambda inputs: hopper_few_rows.attend(problem, inputs, aux, tiles), inputs, timeout=20.0)
    assert slot in stand_in.scratch
    assert stand_in.hits > 0, "the kernel has no such event any more"
    assert tells(sim, "SMEM"), sim.report()
