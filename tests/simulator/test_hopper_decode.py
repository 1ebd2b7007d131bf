"""Few queries in the Hopper forward kernel: heads packed into rows, keys split over blocks; values and races."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

import fast_layers
from fast_layers import masks as M
from fast_layers.ops.attention import api, hopper_fwd, hopper_fwd_again, packed_heads, split_kv
from fast_layers.ops.attention.config import PART_COLUMNS, packs_heads
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.ops.attention.masks import MaskForm
from fast_layers.ops.attention.problem import Aux
from fast_layers.testing import simulate
from simulator.attention import StandIn, changed, patched
from simulator.found import tells
from simulator.rounded import assert_forward

pytestmark = pytest.mark.simulator


@dataclasses.dataclass(frozen=True)
class Case:
    q_len: int = 1
    kv_len: int = 1024
    batch: int = 1
    heads: int = 4
    kv_heads: int = 1
    depth: int = 64
    v_dim: int | None = None
    options: dict = dataclasses.field(default_factory=dict)

    def prepare(self):
        def numbers(seed, *shape):
            return jax.random.normal(jax.random.key(seed), (self.batch, *shape), jnp.bfloat16)

        query = numbers(0, self.q_len, self.heads, self.depth)
        key = numbers(1, self.kv_len, self.kv_heads, self.depth)
        value = numbers(2, self.kv_len, self.kv_heads, self.v_dim or self.depth)
        inputs, aux, options, _ = api._prepare(query, key, value, **self.options)
        return options.problem(inputs, aux), inputs, aux


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


CAUSAL = {"is_causal": True, "q_offset": "bottom_right"}
CASES = {
    "one query": Case(heads=8, kv_heads=2),
    "one key head": Case(),
    "group of 8": Case(kv_len=1000, heads=8),
    "no group": Case(kv_len=768, heads=2, kv_heads=2),
    "causal": Case(q_len=4, kv_len=520, heads=8, kv_heads=2, options=CAUSAL),
    "16 queries, no group": Case(q_len=16, kv_len=512, heads=2, kv_heads=2, options=CAUSAL),
    "chunked prefill": Case(q_len=16, kv_len=512, options={"is_causal": True, "q_offset": lengths(300)}),
    "packed into three tiles": Case(q_len=40, kv_len=512, options={"is_causal": True, "q_offset": lengths(300)}),
    "lengths": Case(kv_len=600, batch=4, kv_heads=2, options={"key_value_seq_lengths": lengths(0, 5, 130, 600)}),
    "window": Case(batch=2, options={"local_window_size": (200, 0), "q_offset": lengths(1000, 150)}),
    "softcap": Case(q_len=4, kv_len=512, options=dict(softcap=2.0, **CAUSAL)),
    "sinks": Case(
        q_len=4,
        kv_len=512,
        batch=2,
        kv_heads=2,
        options={"sinks": np.array([0, 1, -1, 3], np.float32), "key_value_seq_lengths": lengths(0, 300)},
    ),
    "sinks, no group": Case(kv_len=512, heads=2, kv_heads=2, options={"sinks": np.array([0, 3], np.float32)}),
    "segments": Case(
        q_len=16,
        kv_len=512,
        options={
            "mask": M.Segments(np.repeat(lengths(3, 5, -1, 0), 4), np.repeat(lengths(0, 3, 5, 7), 128)),
        },
    ),
    "segments in pieces": Case(
        q_len=16,
        kv_len=512,
        options={
            "mask": M.Segments(np.repeat(lengths(3, 5, -1, 0), 4), np.tile(lengths(3, 5, 3, 7), 128)),
        },
    ),
    "depths 192 and 128": Case(q_len=2, kv_len=512, depth=192, v_dim=128),
    "depths 40 and 24": Case(q_len=3, kv_len=300, depth=40, v_dim=24, options=CAUSAL),
    "depth 256": Case(kv_len=512, depth=256, kv_heads=2),
    "queries that end within a line": Case(q_len=3, kv_len=300, heads=7, depth=96),
    "two warpgroups": Case(q_len=200, kv_len=512, heads=1, options=CAUSAL),
}


def split_tiles(problem, aux, splits: int) -> HopperForwardTiles:
    if packs_heads(problem):
        problem = packed_heads.pack_problem(problem, packed_heads.pack_mask(problem, aux.mask))
    tiles = HopperForwardTiles.of(problem)
    if splits > 1:
        tiles = dataclasses.replace(tiles, compute_wgs=min(tiles.compute_wgs, 2), own_spans=False, blocks=0)
    return dataclasses.replace(tiles, splits=splits, stages=2)


# Split in two; not split, and into more parts than some rows have keys for, where lengths differ. The others differ
# from these in shapes, or in an option that the same lines of the kernel apply in longer calls.
EACH_RUN = {
    ("chunked prefill", 1),
    ("lengths", 5),
    ("segments", 2),
    ("depths 40 and 24", 2),
}


@pytest.mark.parametrize(("name", "splits"), some_each_run(itertools.product(CASES, (1, 2, 5)), EACH_RUN))
def test_as_the_reference(name, splits):
    problem, inputs, aux = CASES[name].prepare()
    tiles = split_tiles(problem, aux, splits)
    got = simulate(lambda inputs: hopper_fwd.attend(problem, inputs, aux, tiles), inputs).check()
    assert_forward(got, problem, inputs, aux)


@pytest.mark.exhaustive  # the next is under vmap, too
def test_under_vmap():
    case = Case(q_len=2, kv_len=512, batch=2)
    problem, inputs, aux = case.prepare()
    one = dataclasses.replace(problem, batch=1)
    tiles = split_tiles(one, aux, 2)

    def attend(query, key, value):
        given = inputs._replace(query=query[None], key=key[None], value=value[None])
        return hopper_fwd.attend(one, given, aux, tiles)

    out, lse = simulate(jax.vmap(attend), inputs.query, inputs.key, inputs.value).check()
    whole, whole_lse = simulate(lambda inputs: hopper_fwd.attend(problem, inputs, aux, tiles), inputs).check()
    np.testing.assert_array_equal(np.asarray(out[:, 0], np.float32), np.asarray(whole, np.float32))
    np.testing.assert_array_equal(lse[:, 0], whole_lse)


def test_offsets_under_vmap():
    """Of each call its own, or one for all."""
    problem, inputs, _ = Case(q_len=2, kv_len=256, batch=2).prepare()
    operands = inputs.query, inputs.key, inputs.value
    tiles = split_tiles(problem, Aux(MaskForm()), 2)

    def attend(q_offset, *operands):
        inputs, aux, options, _ = api._prepare(*(x[None] for x in operands), is_causal=True, q_offset=q_offset)
        return hopper_fwd.attend(options.problem(inputs, aux), inputs, aux, tiles)[0][0]

    for offsets, mapped in ((lengths(100, 7), 0), (jnp.int32(70), None)):
        out = simulate(jax.vmap(attend, in_axes=(mapped, 0, 0, 0)), offsets, *operands).check()
        exact = (x.astype(jnp.float32) for x in operands)
        options = {"is_causal": True, "q_offset": offsets, "implementation": "reference"}
        wanted = fast_layers.dot_product_attention(*exact, **options)
        np.testing.assert_allclose(np.asarray(out, np.float32), wanted, atol=2**-8 * float(jnp.abs(wanted).max()))


def test_what_a_broken_key_breaks():
    """A NaN in a value reaches the queries that see it, in whichever part of the keys it stands."""
    case = Case(q_len=2, kv_len=512, batch=1, options={"key_value_seq_lengths": lengths(400)})
    problem, inputs, aux = case.prepare()
    tiles = split_tiles(problem, aux, 2)
    for key, reaches in ((399, True), (401, False)):
        broken = inputs._replace(value=inputs.value.at[0, key, 0, 3].set(jnp.nan))
        out, _ = simulate(lambda inputs: hopper_fwd.attend(problem, inputs, aux, tiles), broken).check()
        assert bool(jnp.isnan(out).all()) is reaches
        assert bool(jnp.isnan(out).any()) is reaches


def test_rows_that_nobody_asks_for_break_nothing():
    """Of the slot's 64 rows queries fill a few; the others hold what was left there, here NaN. It must not cost the
    second pass, by which a batch of 128 had taken 2.4 times as long on an H200."""
    problem, inputs, aux = Case(q_len=2, kv_len=256, options={"key_value_seq_lengths": lengths(200)}).prepare()

    def to_zero(*args):
        state, out = hopper_fwd_again.over_keys_again(*args)
        return state, out * 0.0

    attend = functools.partial(hopper_fwd.attend, problem, tiles=split_tiles(problem, aux, 1))
    with patched((hopper_fwd, "over_keys_again", to_zero)):
        for hidden, is_taken in ((1.0, False), (jnp.nan, True)):
            given = inputs._replace(value=inputs.value.at[0, 210].set(hidden))
            out, _ = simulate(lambda inputs: attend(inputs, aux), given).check()
            assert bool((out == 0).all()) is is_taken


# What is left out, and of what the slot for queries as they lie in memory is then told.
LOOSE_QUERY_FAULTS = {
    "not awaited": ("barrier_wait q_ready", "read of SMEM"),
    "not committed": ("commit_smem #1", "SMEM"),
    "out not committed": ("commit_smem #2", "SMEM"),
}


@pytest.mark.parametrize("fault", some_each_run(LOOSE_QUERY_FAULTS, {"not committed"}))
def test_planted_fault_of_the_slot_for_loose_queries_is_found(fault):
    event, access = LOOSE_QUERY_FAULTS[fault]
    problem, inputs, aux = Case(q_len=2, kv_len=128).prepare()
    stand_in = StandIn(event)
    with changed(hopper_fwd, stand_in):
        tiles = HopperForwardTiles(1, 64, takes_turns=False)
        sim = simulate(lambda inputs: hopper_fwd.attend(problem, inputs, aux, tiles), inputs, timeout=20.0)
    assert "loose_query" in stand_in.scratch
    assert stand_in.hits > 0, "the kernel has no such event any more"
    assert tells(sim, access), sim.report()


@pytest.mark.parametrize("parts", [1, 3, 8, 19])
def test_combined_parts(parts):
    rng = np.random.default_rng(0)
    batch, rows, heads, v_dim, group = 2, 4, 2, 48, 2
    out = rng.normal(size=(batch, parts, rows + 4, heads, PART_COLUMNS)).astype(np.float32)
    lse = rng.normal(size=(batch, parts, heads, 64)).astype(np.float32)
    lse[0, -1], out[0, -1] = -np.inf, np.nan  # a part without keys writes lse alone
    lse[1, :, 1, 2] = -np.inf  # a row that sees nothing
    shares = np.exp(lse[..., :rows]) / np.maximum(np.exp(lse[..., :rows]).sum(1, keepdims=True), 1e-30)
    wanted = np.einsum("bpkr,bprkv->brkv", shares, np.nan_to_num(out[:, :, :rows, :, :v_dim]))
    wanted = packed_heads.unpack(jnp.asarray(wanted), group)
    got = simulate(
        lambda out, lse: split_kv.combine_out(out, lse, rows, v_dim, group, jnp.float32),
        jnp.asarray(out),
        jnp.asarray(lse),
    ).check()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
