"""The Hopper attention kernels together: right and free of races over masks, shapes and options.

Each pass by itself is in the files beside this one, by its kernels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

from fast_layers.kernel_parts.online_softmax import LOG2_E, OnlineSoftmax
from fast_layers.ops.attention import hopper_bwd, hopper_call, tile_mask
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.testing import simulate
from fast_layers.testing.parity import Case
from simulator.attention import draw, forward_tiles, judge, patched, square
from simulator.rounded import assert_rounded, check_broken_inputs, op_and_gradients

pytestmark = pytest.mark.simulator

# About 2^15 numbers in the output, where one draw of the inputs is enough.
CASES = {
    "full": square(256, heads=2, kv_heads=2, lse_gradient=True),
    "causal": square(256, heads=2, kv_heads=2, is_causal=True, lse_gradient=True),
    "more keys": Case(batch=1, q_len=129, kv_len=300, is_causal=True, q_offset="bottom_right"),
    "fewer keys": Case(batch=1, q_len=300, kv_len=129, heads=2, kv_heads=2, is_causal=True, q_offset="bottom_right"),
    "7 queries, 33 keys": Case(q_len=7, kv_len=33, heads=40, kv_heads=4),
    "many keys": Case(batch=1, q_len=260, kv_len=1200, heads=2, kv_heads=1),
    "many queries": Case(batch=1, q_len=900, kv_len=70, heads=1, kv_heads=1),
    "window": square(300, heads=2, kv_heads=2, window=(40, 10)),
    "causal, window": square(520, heads=1, kv_heads=1, is_causal=True, window=(130, 0)),
    "documents": square(400, heads=2, kv_heads=2, is_causal=True, documents=(100, 37, 200, 43)),
    "documents, padding": square(400, heads=2, kv_heads=2, documents=(200, 3, 97)),
    "documents, scattered": square(260, batch=2, heads=1, kv_heads=1, documents=(150, 3, 57), scattered=True),
    "lengths": square(300, batch=3, heads=1, kv_heads=1, key_lengths=(300, 77, 0), query_lengths=(211, 300, 300)),
    "prefix": square(200, batch=3, heads=1, kv_heads=1, prefix=(0, 150, 200)),
    "sinks": square(200, heads=4, kv_heads=2, is_causal=True, sinks=True, lse_gradient=True),
    "softcap": square(200, is_causal=True, softcap=5.0),
    "grouped heads": square(130, heads=8, kv_heads=2, is_causal=True),
    "one key head": square(130, heads=4, kv_heads=1),
    "depth 40, values 24": square(130, heads=11, kv_heads=11, qk_dim=40, v_dim=24),
    "depth 32, one tile": square(64, heads=16, kv_heads=8, qk_dim=32, v_dim=32, is_causal=True),
    "depth 80": square(210, heads=2, kv_heads=2, qk_dim=80, v_dim=80, is_causal=True),
    "depth 128": square(256, heads=1, kv_heads=1, qk_dim=128, v_dim=128, is_causal=True),
    "depth 128, documents": square(300, heads=1, kv_heads=1, qk_dim=128, v_dim=128, documents=(170, 130)),
    "depth 144, one tile": square(64, heads=4, kv_heads=2, qk_dim=144, v_dim=144),
    "depths 256 and 80": square(130, heads=3, kv_heads=1, qk_dim=256, v_dim=80),
    "depths 64 and 128": square(130, heads=2, kv_heads=1, v_dim=128),
    "depths 192 and 128": square(260, heads=1, kv_heads=1, qk_dim=192, v_dim=128, is_causal=True),
    "depth 256": square(200, heads=1, kv_heads=1, qk_dim=256, v_dim=256, is_causal=True),
    "depth 256, whole tiles": square(192, heads=2, kv_heads=1, qk_dim=256, v_dim=256, is_causal=True),
    "padding of NaN": square(
        300, batch=2, heads=1, kv_heads=1, key_lengths=(200, 77), query_lengths=(211, 130), poisoned_padding=True
    ),
    "documents, padding of NaN": square(400, heads=2, kv_heads=2, documents=(250, 3), poisoned_padding=True),
    "queries without keys": square(256, heads=2, kv_heads=2, is_causal=True, q_offset=-100),
    "everything": square(
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
    "documents, padding of NaN",
    "depth 256, whole tiles",
    "queries without keys",
    "everything",
}


@pytest.mark.parametrize("name", some_each_run(CASES, EACH_RUN))
def test_case(name):
    judged = judge(CASES[name])
    judged.check()
    assert not judged.table.refusals
    assert {row.quantity for row in judged.table.rows} >= {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.exhaustive  # what is below runs in float16
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_float16(name):
    judge(CASES[name], jnp.float16).check()


def test_a_broken_input_reaches_who_sees_it_and_nobody_else():
    check_broken_inputs(hopper_call, kv_heads=1)


class TestVmap:
    """As the xla backend under vmap; the wrong example's operands would be off by far more than rounding."""

    def _check(self, in_axes, *args, **options):
        def mapped(backend, *args):
            def both(query, key, value, d_out, sinks=None):
                return op_and_gradients(backend, query, key, value, d_out, sinks=sinks, is_causal=True, **options)

            return jax.vmap(both, in_axes)(*args)

        assert_rounded(simulate(functools.partial(mapped, hopper_call), *args).check(), mapped, *args)

    @pytest.mark.exhaustive
    def test_over_examples(self):
        self._check((0, 0, 0, 0), *draw())

    @pytest.mark.exhaustive
    def test_over_examples_of_a_batch(self):
        self._check((0, 0, 0, 0), *(x.reshape(2, 2, 50, 2, 64) for x in draw()))

    @pytest.mark.exhaustive
    def test_keys_and_values_closed_over(self):
        query, key, value, d_out = draw()
        self._check((0, None, None, 0), query, key[0], value[0], d_out)

    @pytest.mark.exhaustive
    def test_keys_and_values_of_a_batch_closed_over(self):
        query, key, value, d_out = draw()
        queries = jnp.stack([query, 2 * query])
        self._check((0, None, None, None), queries, key, value, d_out)

    @pytest.mark.exhaustive
    def test_mask_arrays_closed_over(self):
        self._check((0, 0, 0, 0), *draw(), segment_ids=np.repeat([0, 1], [30, 70]))

    @pytest.mark.exhaustive
    def test_sinks_closed_over(self):
        self._check((0, 0, 0, 0, None), *draw(), jnp.array([0.5, 2.0], jnp.float32))

    @pytest.mark.exhaustive
    def test_over_sinks(self):
        self._check((0, 0, 0, 0, 0), *draw(), jnp.array([[0.5, 2.0], [-1.0, 4.0]], jnp.float32))

    @pytest.mark.exhaustive
    def test_over_sinks_alone(self):
        query, key, value, d_out = (x[0] for x in draw())
        sinks = jnp.array([[0.5, 2.0], [-1.0, 4.0]], jnp.float32)
        self._check((None, None, None, None, 0), query, key, value, d_out, sinks)


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
