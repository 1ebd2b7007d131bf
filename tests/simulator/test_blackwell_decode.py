"""Few queries in the Blackwell forward kernel: heads packed into rows, keys split over blocks; values and races."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

from fast_layers.ops.attention import blackwell_fwd, packed_heads
from fast_layers.ops.attention.blackwell_config import BlackwellForwardTiles
from fast_layers.ops.attention.blackwell_tile import ROWS
from fast_layers.ops.attention.config import packs_heads
from fast_layers.testing import simulate
from simulator.blackwell_attention import without
from simulator.found import tells
from simulator.rounded import assert_forward
from simulator.test_hopper_decode import CASES, Case, lengths

pytestmark = pytest.mark.simulator


def split_tiles(problem, aux, splits: int) -> BlackwellForwardTiles:
    if packs_heads(problem, ROWS):
        problem = packed_heads.pack_problem(problem, packed_heads.pack_mask(problem, aux.mask))
    tiles = BlackwellForwardTiles.fitting(problem, splits)[0]
    return dataclasses.replace(tiles, kv_tile=64, stages=2, blocks=0)


EACH_RUN = {("lengths", 5)}  # more parts than some rows have keys for


@pytest.mark.parametrize(("name", "splits"), some_each_run(itertools.product(CASES, (2, 5)), EACH_RUN))
def test_as_the_reference(name, splits):
    problem, inputs, aux = CASES[name].prepare()
    tiles = split_tiles(problem, aux, splits)
    got = simulate(lambda inputs: blackwell_fwd.attend(problem, inputs, aux, tiles), inputs).check()
    assert_forward(got, problem, inputs, aux)


@pytest.mark.exhaustive
def test_under_vmap():
    case = Case(q_len=2, kv_len=512, batch=2)
    problem, inputs, aux = case.prepare()
    one = dataclasses.replace(problem, batch=1)
    tiles = split_tiles(one, aux, 2)

    def attend(query, key, value):
        given = inputs._replace(query=query[None], key=key[None], value=value[None])
        return blackwell_fwd.attend(one, given, aux, tiles)

    out, lse = simulate(jax.vmap(attend), inputs.query, inputs.key, inputs.value).check()
    whole, whole_lse = simulate(lambda inputs: blackwell_fwd.attend(problem, inputs, aux, tiles), inputs).check()
    np.testing.assert_array_equal(np.asarray(out[:, 0], np.float32), np.asarray(whole, np.float32))
    np.testing.assert_array_equal(lse[:, 0], whole_lse)


@pytest.mark.exhaustive
def test_what_a_broken_key_breaks():
    """A NaN in a value reaches the queries that see it, in whichever part of the keys it stands."""
    case = Case(q_len=2, kv_len=512, batch=1, options={"key_value_seq_lengths": lengths(400)})
    problem, inputs, aux = case.prepare()
    tiles = split_tiles(problem, aux, 2)
    for key, reaches in ((399, True), (401, False)):
        broken = inputs._replace(value=inputs.value.at[0, key, 0, 3].set(jnp.nan))
        out, _ = simulate(lambda inputs: blackwell_fwd.attend(problem, inputs, aux, tiles), broken).check()
        assert bool(jnp.isnan(out).all()) is reaches
        assert bool(jnp.isnan(out).any()) is reaches


FAULTS = {
    "panels overwritten": ("wait_smem_to_gmem #1", "SMEM"),
    "panels not committed": ("commit_smem #4", "SMEM"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(x, marks=() if x == "panels overwritten" else pytest.mark.exhaustive) for x in FAULTS]
)
def test_planted_fault_is_found(fault):
    event, text = FAULTS[fault]
    problem, inputs, aux = Case(kv_len=256, depth=128, heads=1).prepare()
    tiles = split_tiles(problem, aux, 2)
    with without(blackwell_fwd, event) as stand_in:
        sim = simulate(lambda inputs: blackwell_fwd.attend(problem, inputs, aux, tiles), inputs, timeout=20.0)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    assert sim.faulty
    assert tells(sim, text), sim.report()
