"""Attention on the GPU at hand: every backend against the reference, repeatability, and padding that is NaN.

python3 -m pytest tests/gpu -n0 -p no:cacheprovider
"""

from __future__ import annotations

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals

import fast_layers
from fast_layers.arch import lowering_targets
from fast_layers.dispatch import PASSES
from fast_layers.kernel_parts.row_sizes import sizes_of
from fast_layers.ops.attention import api, hopper_bwd_scores, hopper_call
from fast_layers.ops.attention.backends import BACKENDS
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.hopper_bwd_groups import Share, scores_by_queries
from fast_layers.ops.attention.hopper_bwd_sequence import Sequence
from fast_layers.testing import check_parity
from fast_layers.testing.closeness import assert_bitwise_equal, assert_close, judge
from fast_layers.testing.parity import CASES, Case

NAMES = [backend.name for backend in BACKENDS if backend.name != "reference"]
KERNELS = [name for name in NAMES if name != "xla"]
RUNS = 20
# cuDNN's backward adds up dQ in whatever order its blocks finish, unless XLA asks for another algorithm.
ALWAYS_SAME_ORDER = "--xla_gpu_deterministic_ops" in os.environ.get("XLA_FLAGS", "")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", NAMES)
def test_parity(backend, case):
    table = check_parity(backends=[backend], cases=[case])
    refusals.settle(backend, table)


@pytest.mark.parametrize(
    ("length", "kv_heads"),
    [(128, 2), (129, 2), (1000, 2), (2500, 2), (512, 40), (512, 64), (1024, 64), (2560, 8), (4096, 16)],
    ids=str,
)
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", KERNELS)
def test_twenty_runs_give_the_same_bits(backend, is_causal, depth, length, kv_heads):
    """A race between warpgroups shows as bits that change; so inputs stay the same, and other work runs in between."""
    rng = np.random.default_rng(0)
    query, d_out = (jnp.asarray(rng.normal(size=(2, length, max(kv_heads, 8), depth)), jnp.bfloat16) for _ in range(2))
    key, value = (jnp.asarray(rng.normal(size=(2, length, kv_heads, depth)), jnp.bfloat16) for _ in range(2))
    refused = _refused(backend, query, key, value, is_causal=is_causal)
    if backend == "cudnn" and not ALWAYS_SAME_ORDER:
        refused["backward"] = "cuDNN's backward repeats its bits only with XLA_FLAGS=--xla_gpu_deterministic_ops=true"

    @jax.jit
    def call(query, key, value, d_out):
        def op(*operands):
            return fast_layers.dot_product_attention(*operands, is_causal=is_causal, implementation=backend)

        if refused["backward"]:
            return op(query, key, value), ()
        out, pull = jax.vjp(op, query, key, value)
        return out, pull(d_out)

    first = jax.device_get(call(query, key, value, d_out))
    for run in range(1, RUNS):
        jnp.sort(jnp.asarray(rng.normal(size=1 << 16))).block_until_ready()
        assert_bitwise_equal(jax.device_get(call(query, key, value, d_out)), first, f"run {run}: ")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(first))


@pytest.mark.parametrize("length", [129, 2500])
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [2, 8], ids=["grouped", "apart"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", KERNELS)
def test_sums_in_any_order(backend, is_causal, kv_heads, depth, length):
    with fast_layers.use_backends(reproducible=False):
        case = Case(
            batch=2, q_len=length, kv_len=length, heads=8, kv_heads=kv_heads, qk_dim=depth, v_dim=depth,
            is_causal=is_causal,
        )  # fmt: skip
        table = check_parity(backends=[backend], cases={"any order": case}, dtypes=[jnp.bfloat16])
    refusals.settle(backend, table)


@pytest.mark.parametrize(("length", "kv_heads"), [(4096, 16), (2048, 4)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", KERNELS)
def test_heads_in_groups(backend, is_causal, length, kv_heads):
    """As Hopper's backward takes them at depth 128, but for the shorter rows under a causal mask."""
    case = Case(
        batch=8192 // length, q_len=length, kv_len=length, heads=16, kv_heads=kv_heads, qk_dim=128, v_dim=128,
        is_causal=is_causal,
    )  # fmt: skip
    table = check_parity(backends=[backend], cases={"groups": case}, dtypes=[jnp.bfloat16])
    refusals.settle(backend, table)


# Enough heads of depth 64 that a block of Hopper's backward takes all keys of one, or two blocks of a cluster do.
MANY_HEADS = Case(batch=8, q_len=512, kv_len=512, heads=16, kv_heads=16)
WHOLE_HEADS = {
    "full": MANY_HEADS,
    "full, odd lengths": dataclasses.replace(MANY_HEADS, q_len=300, kv_len=700),
    "full, one tile": dataclasses.replace(MANY_HEADS, q_len=100, kv_len=100),
    "full, two heads for a block": dataclasses.replace(MANY_HEADS, batch=16, q_len=256, kv_len=256),
    "full, clusters": dataclasses.replace(MANY_HEADS, q_len=1024, kv_len=1024),
    "full, clusters, grouped heads": dataclasses.replace(MANY_HEADS, heads=32, kv_len=256),
    "full, clusters, odd lengths": dataclasses.replace(MANY_HEADS, q_len=900, kv_len=490),
    "causal": dataclasses.replace(MANY_HEADS, is_causal=True, lse_gradient=True),
    "causal, long, odd": dataclasses.replace(MANY_HEADS, q_len=1000, kv_len=1000, is_causal=True),
    "causal, grouped heads": dataclasses.replace(MANY_HEADS, heads=32, is_causal=True),
    "causal, two heads for a block": dataclasses.replace(MANY_HEADS, batch=16, q_len=384, kv_len=384, is_causal=True),
}


@pytest.mark.parametrize("name", WHOLE_HEADS)
@pytest.mark.parametrize("backend", KERNELS)
def test_whole_heads(backend, name):
    table = check_parity(backends=[backend], cases={name: WHOLE_HEADS[name]}, dtypes=[jnp.bfloat16])
    refusals.settle(backend, table)


# One tile of keys more than an H100's or H200's 132 SMs, or three: Hopper's backward cuts it by its queries.
LEFT = Case(batch=1, q_len=1024, kv_len=896, heads=19, kv_heads=19)
CUT = {
    "one": LEFT,
    "one, odd lengths": dataclasses.replace(LEFT, q_len=2000, kv_len=800),
    "three, grouped heads": dataclasses.replace(LEFT, heads=54, kv_heads=27, kv_len=640, lse_gradient=True),
    "one, soft cap": dataclasses.replace(LEFT, softcap=5.0),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("backend", KERNELS)
def test_pieces_that_are_cut(backend, name, dtype):
    table = check_parity(backends=[backend], cases={name: CUT[name]}, dtypes=[dtype])
    refusals.settle(backend, table)


# Depth 64, at lengths at which Hopper's forward finds for its backward how large each key and value is.
MEASURED = {
    "causal": (2048, 12, 12, True),
    "causal, grouped heads": (2304, 12, 4, True),
    "full": (2048, 12, 12, False),
    "full, grouped heads": (1280, 54, 27, False),
}


def _measured(name, dtype, broken=None):
    """(query, key, value, d_out); with one broken number in a key and in a value of each example."""
    length, heads, kv_heads, _ = MEASURED[name]
    rng = np.random.default_rng(0)
    query, key, value, d_out = (
        rng.normal(size=(2, length, n, 64)).astype(np.float32) for n in (heads, kv_heads, kv_heads, heads)
    )
    if broken is not None:
        key[0, length - 300, 1, 63], value[1, length - 300, 0, 17] = broken, broken
    return tuple(jnp.asarray(x, dtype) for x in (query, key, value, d_out))


@pytest.mark.parametrize("broken", [None, np.nan, -np.inf], ids=["finite", "NaN", "inf"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, jnp.bfloat16) for name in MEASURED] + [(name, jnp.float16) for name in MEASURED if "causal" in name],
)
def test_sizes_that_hoppers_forward_finds(name, dtype, broken):
    query, key, value, _ = _measured(name, dtype, broken)
    _refused("hopper", query, key, value)
    inputs, aux, options, _ = api._prepare(query, key, value, is_causal=MEASURED[name][3])
    problem = options.problem(inputs, aux)
    (out, lse), sizes = jax.jit(functools.partial(hopper_call.forward_saving, problem))(inputs, aux)
    wanted = jnp.stack([sizes_of(x).swapaxes(1, 2) for x in (key, value)], 2)
    assert np.isinf(wanted).sum() == (0 if broken is None else 2)
    np.testing.assert_array_equal(sizes.swapaxes(2, 3).reshape(wanted.shape), wanted)
    if MEASURED[name][3]:  # without a mask the last bits differ, since a tile is weighed in other parts
        alone = jax.jit(functools.partial(hopper_call.forward, problem))(inputs, aux)
        for got, want in zip((out, lse), alone, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def _measured_gradients(implementation, name, query, key, value, d_out):
    op = functools.partial(
        fast_layers.dot_product_attention, is_causal=MEASURED[name][3], implementation=implementation
    )
    return jax.device_get(jax.jit(lambda *x: jax.vjp(op, *x[:3])[1](x[3]))(query, key, value, d_out))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", MEASURED)
def test_gradients_by_sizes_that_the_forward_found(name, dtype):
    operands = _measured(name, dtype)
    _refused("hopper", *operands[:3])
    got, yardstick = (_measured_gradients(x, name, *operands) for x in ("hopper", "reference"))
    with jax.enable_x64(True):
        oracle = _measured_gradients("reference", name, *(x.astype(jnp.float64) for x in operands))
    for of, *each in zip(("query", "key", "value"), got, oracle, yardstick, strict=True):
        assert_close(*each, name=of)


@pytest.mark.parametrize("broken", [np.nan, -np.inf], ids=["NaN", "inf"])
@pytest.mark.parametrize("name", [name for name in MEASURED if name.startswith("causal")])
def test_a_broken_key_that_the_forward_found_spoils_nobody_before_it(name, broken):
    whole, operands = _measured(name, jnp.bfloat16), _measured(name, jnp.bfloat16, broken)
    _refused("hopper", *operands[:3])
    got, yardstick = (
        _measured_gradients("hopper", name, *operands)[0],
        _measured_gradients("reference", name, *whole)[0],
    )
    with jax.enable_x64(True):
        oracle = _measured_gradients("reference", name, *(x.astype(jnp.float64) for x in whole))[0]
    first = MEASURED[name][0] - 300
    assert not np.isfinite(got[:, first:].astype(np.float32)).all((1, 2, 3)).any()
    assert_close(got[:, :first], oracle[:, :first], yardstick[:, :first], name="query")


# (batch, length, heads, key heads, depth, causal), where Hopper's backward makes dQ by blocks among those that leave
# dS.
BESIDE = {
    "causal": (2, 4096, 16, 16, 128, True),
    "causal, long": (1, 8192, 16, 16, 128, True),
    "causal, grouped heads": (1, 16_384, 32, 8, 128, True),
    "causal, depth 80": (2, 4096, 16, 16, 80, True),
    "full": (8, 2048, 12, 12, 128, False),
    "full, depth 96": (8, 2048, 12, 12, 96, False),
    "full, depth 112": (8, 2048, 12, 12, 112, False),
}


@pytest.mark.parametrize("broken", [False, True], ids=["finite", "NaN"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", BESIDE)
def test_d_query_by_blocks_of_the_same_launch(name, dtype, broken, monkeypatch):
    """In each of many runs they give the bits of a kernel of its own."""
    batch, length, heads, kv_heads, depth, is_causal = BESIDE[name]
    rng, all_heads = np.random.default_rng(0), (heads, kv_heads, kv_heads, heads)
    operands = [rng.normal(size=(batch, length, n, depth)).astype(np.float32) for n in all_heads]
    if broken:
        operands[1][0, length - 300, 1, 63] = np.nan
    query, key, value, d_out = (jnp.asarray(x, dtype) for x in operands)
    _refused("hopper", query, key, value)
    problems = []

    def gradients(query, key, value, d_out):
        inputs, aux, options, _ = api._prepare(query, key, value, is_causal=is_causal)
        problems.append(options.problem(inputs, aux))
        op = functools.partial(fast_layers.dot_product_attention, is_causal=is_causal, implementation="hopper")
        return jax.vjp(op, query, key, value)[1](d_out)

    beside = jax.jit(gradients).lower(query, key, value, d_out).compile()
    assert HopperBackwardTiles.of(problems[0]).sequence(problems[0]) is not None
    monkeypatch.setattr(Sequence, "of", lambda *_: None)
    jax.clear_caches()
    apart = jax.jit(gradients).lower(query, key, value, d_out).compile()
    jax.clear_caches()
    want = apart(query, key, value, d_out)
    if not broken:
        assert all(jnp.isfinite(x).all() for x in want)
    elif is_causal:
        assert jnp.isfinite(want[0][:, : length - 300]).all()
    for _ in range(RUNS):
        got = beside(query, key, value, d_out)
        assert all(jnp.array_equal(x, wanted, equal_nan=True) for x, wanted in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", KERNELS)
def test_window_on_whole_tiles(backend):
    """Within which Hopper's backward leaves dS at depth 128."""
    case = Case(
        batch=2, q_len=2048, kv_len=2048, heads=4, kv_heads=2, qk_dim=128, v_dim=128, is_causal=True, window=(1023, 0)
    )
    table = check_parity(backends=[backend], cases={"window": case}, dtypes=[jnp.bfloat16])
    refusals.settle(backend, table)


# Of depths at which Hopper's backward has tiles of its own, or lets TMA fill up those of 64.
_BETWEEN = Case(batch=2, q_len=1024, kv_len=1024, heads=8, kv_heads=8)
BETWEEN = {
    "80": (80, dataclasses.replace(_BETWEEN, kv_len=512, kv_heads=2)),
    "80, causal": (80, dataclasses.replace(_BETWEEN, is_causal=True, lse_gradient=True)),
    "80, causal documents, padding of NaN": (
        80,
        dataclasses.replace(_BETWEEN, documents=(500, 3, 400), poisoned_padding=True, is_causal=True),
    ),
    "80, odd lengths": (80, dataclasses.replace(_BETWEEN, q_len=1000, kv_len=900)),
    "96, causal, long, grouped heads": (
        96,
        dataclasses.replace(_BETWEEN, batch=1, q_len=8192, kv_len=8192, kv_heads=2, is_causal=True),
    ),
    "96, window": (96, dataclasses.replace(_BETWEEN, q_len=2048, kv_len=2048, is_causal=True, window=(1023, 0))),
    "96, soft cap": (96, dataclasses.replace(_BETWEEN, softcap=5.0, is_causal=True)),
    "96, lengths": (96, dataclasses.replace(_BETWEEN, key_lengths=(1000, 77), query_lengths=(999, 300))),
    "100, causal": (100, dataclasses.replace(_BETWEEN, is_causal=True)),
    "112": (112, _BETWEEN),
    "112, causal": (112, dataclasses.replace(_BETWEEN, kv_heads=4, is_causal=True)),
    "48, causal": (48, dataclasses.replace(_BETWEEN, kv_heads=4, is_causal=True, lse_gradient=True)),
    "48, odd lengths": (48, dataclasses.replace(_BETWEEN, q_len=1000, kv_len=900)),
    "32": (32, _BETWEEN),
    "32, causal documents, padding of NaN": (
        32,
        dataclasses.replace(_BETWEEN, documents=(500, 3, 400), poisoned_padding=True, is_causal=True),
    ),
    "16, window": (16, dataclasses.replace(_BETWEEN, is_causal=True, window=(300, 0))),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("backend", KERNELS)
def test_depths_that_are_no_multiples_of_64(backend, name, dtype):
    depth, case = BETWEEN[name]
    case = dataclasses.replace(case, qk_dim=depth, v_dim=depth)
    table = check_parity(backends=[backend], cases={name: case}, dtypes=[dtype])
    refusals.settle(backend, table)


# Of as many tiles of 192 queries that three warpgroups of Hopper's forward share 64 keys; within a window of fewer.
_MANY = Case(batch=8, q_len=900, kv_len=900, heads=32, kv_heads=8)
SHARED = {
    "128, causal": (128, dataclasses.replace(_MANY, is_causal=True, lse_gradient=True)),
    "128, causal, soft cap and sinks": (128, dataclasses.replace(_MANY, is_causal=True, softcap=5.0, sinks=True)),
    "128, causal, more keys": (128, dataclasses.replace(_MANY, kv_len=1000, is_causal=True, q_offset=37)),
    "128, window": (128, dataclasses.replace(_MANY, batch=2, is_causal=True, window=(300, 0))),
    "128, window on both sides": (128, dataclasses.replace(_MANY, batch=2, window=(100, 70))),
    "128, causal documents": (128, dataclasses.replace(_MANY, documents=(500, 3, 397), is_causal=True)),
    "128, documents, padding of NaN": (
        128,
        dataclasses.replace(_MANY, documents=(300, 100, 3, 397), poisoned_padding=True),
    ),
    "128, causal, scattered documents": (
        128,
        dataclasses.replace(_MANY, documents=(500, 3, 397), scattered=True, is_causal=True),
    ),
    "128, lengths": (
        128,
        dataclasses.replace(_MANY, key_lengths=(900, 77) * 4, query_lengths=(899, 300) * 4, poisoned_padding=True),
    ),
    "64, documents": (64, dataclasses.replace(_MANY, documents=(500, 3, 397))),
    "64, causal documents, padding of NaN": (
        64,
        dataclasses.replace(_MANY, documents=(300, 100, 3, 397), poisoned_padding=True, is_causal=True),
    ),
    "64, window": (64, dataclasses.replace(_MANY, batch=2, is_causal=True, window=(300, 0))),
    "96": (96, dataclasses.replace(_MANY, batch=1, q_len=4100, kv_len=4100)),
    "80, causal documents": (80, dataclasses.replace(_MANY, documents=(500, 3, 397), is_causal=True)),
    "112, window": (112, dataclasses.replace(_MANY, batch=2, is_causal=True, window=(300, 0))),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("backend", KERNELS)
def test_many_rows_that_three_warpgroups_share(backend, name):
    depth, case = SHARED[name]
    case = dataclasses.replace(case, qk_dim=depth, v_dim=depth)
    table = check_parity(backends=[backend], cases={name: case}, dtypes=[jnp.bfloat16])
    refusals.settle(backend, table)


# More pieces than blocks, whose out Hopper's forward sends by the slots of values, with and without one to spare.
_DEEP = Case(batch=2, q_len=1152, kv_len=1152, heads=8, kv_heads=8, qk_dim=192, v_dim=192)
_DEEPEST = dataclasses.replace(_DEEP, qk_dim=256, v_dim=256)
_TWO_DEPTHS = dataclasses.replace(_DEEP, v_dim=128)
DEEP = {
    "256": dataclasses.replace(_DEEPEST, kv_len=1024, kv_heads=4),
    "256, causal, 2,304 rows": dataclasses.replace(_DEEPEST, q_len=2304, kv_len=2304, is_causal=True),
    "256, causal documents": dataclasses.replace(_DEEPEST, documents=(500, 3, 600), is_causal=True),
    "192": _DEEP,
    "192, causal": dataclasses.replace(_DEEP, is_causal=True),
    "192, documents, padding of NaN": dataclasses.replace(_DEEP, documents=(500, 3, 600), poisoned_padding=True),
    "192, a single tile of keys": dataclasses.replace(_DEEP, kv_len=64),
    "160, causal": dataclasses.replace(_DEEP, qk_dim=160, v_dim=160, is_causal=True),
    "192 and 128": dataclasses.replace(_TWO_DEPTHS, q_len=1200, kv_heads=4),
    "192 and 128, causal": dataclasses.replace(_TWO_DEPTHS, is_causal=True),
    "192 and 128, causal documents": dataclasses.replace(_TWO_DEPTHS, documents=(500, 3, 600), is_causal=True),
    "192 and 128, documents, padding of NaN": dataclasses.replace(
        _TWO_DEPTHS, documents=(500, 3, 600), poisoned_padding=True
    ),
    "192 and 128, a single tile of keys": dataclasses.replace(_TWO_DEPTHS, kv_len=100),
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("backend", KERNELS)
def test_many_pieces_of_depths_over_128(backend, name):
    table = check_parity(backends=[backend], cases={name: DEEP[name]}, dtypes=[jnp.bfloat16])
    refusals.settle(backend, table)


@pytest.mark.parametrize("share", [Share(2, 1, 65), Share(1, 2, 65), Share(2, 4, 10)], ids=str)
def test_long_rows_that_leave_scores_of_some_queries_at_a_time(share, monkeypatch):
    """The first as Hopper's backward chooses it."""
    case = Case(batch=2, q_len=16_640, kv_len=8448, heads=4, kv_heads=1, qk_dim=128, v_dim=128)
    chosen = []

    def by_queries(problem):
        chosen.append(scores_by_queries(problem))
        return share

    monkeypatch.setattr(hopper_bwd_scores, "scores_by_queries", by_queries)
    jax.clear_caches()
    table = check_parity(backends=["hopper"], cases={str(share): case}, dtypes=[jnp.bfloat16])
    jax.clear_caches()
    refusals.settle("hopper", table)
    assert set(chosen) == {Share(2, 1, 65)}


# Hopper's backward leaves dS of their tiles at depth 128: of all heads at once, or of two groups of them.
DOCUMENTS = {
    "causal, grouped heads": Case(batch=2, q_len=2048, kv_len=2048, heads=16, kv_heads=4, documents=(700, 37, 1311)),
    "causal, two groups": Case(batch=1, q_len=8192, kv_len=8192, heads=16, kv_heads=16, documents=(5000, 3192)),
    "causal, scattered": Case(
        batch=2, q_len=1024, kv_len=1024, heads=8, kv_heads=8, documents=(500, 3, 400), scattered=True
    ),
    "causal, padding of NaN": Case(
        batch=2, q_len=1024, kv_len=1024, heads=8, kv_heads=8, documents=(500, 3, 400), poisoned_padding=True
    ),
    "lengths": Case(
        batch=2, q_len=2048, kv_len=2048, heads=16, kv_heads=16, key_lengths=(2000, 77), query_lengths=(1999, 300)
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("backend", KERNELS)
def test_documents_on_whole_tiles(backend, name):
    case = dataclasses.replace(DOCUMENTS[name], qk_dim=128, v_dim=128, is_causal=name.startswith("causal"))
    table = check_parity(backends=[backend], cases={name: case}, dtypes=[jnp.bfloat16])
    refusals.settle(backend, table)


PER_SCORE = {
    "bias": {"bias": (2, 8)},
    "shared bias": {"bias": (1, 8)},
    "mask": {"mask": True},
    "dropout": {"dropout_rate": 0.2},
    "all": {"bias": (1, 1), "mask": True, "dropout_rate": 0.2, "is_causal": True},
}


@pytest.mark.parametrize("length", [129, 1024])
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("options", PER_SCORE.values(), ids=PER_SCORE)
@pytest.mark.parametrize("backend", [name for name in KERNELS if name != "cudnn"])
def test_twenty_runs_with_something_for_each_score_give_the_same_bits(backend, options, depth, length):
    """By name, all gradients: the bias' too."""
    rng = np.random.default_rng(0)
    query, key, value, d_out = (jnp.asarray(rng.normal(size=(2, length, 8, depth)), jnp.bfloat16) for _ in range(4))
    given = dict(options)
    bias = given.pop("bias", None)
    if bias is not None:
        bias = jnp.asarray(rng.normal(size=(*bias, length, length)), jnp.bfloat16)
    if given.pop("mask", False):
        given["mask"] = jnp.asarray(rng.random((2, 1, length, length)) < 0.7)
    if "dropout_rate" in given:
        given["dropout_rng"] = jax.random.key(0)
    refused = _refused(backend, query, key, value, **given)
    if refused["backward"]:
        refusals.skip(backend, lowering_targets()[0], [refused["backward"]])

    @jax.jit
    def call(query, key, value, bias, d_out):
        def op(query, key, value, bias):
            return fast_layers.dot_product_attention(query, key, value, bias, implementation=backend, **given)

        out, pull = jax.vjp(op, query, key, value, bias)
        return out, pull(d_out)

    first = jax.device_get(call(query, key, value, bias, d_out))
    for run in range(1, RUNS):
        jnp.sort(jnp.asarray(rng.normal(size=1 << 16))).block_until_ready()
        assert_bitwise_equal(jax.device_get(call(query, key, value, bias, d_out)), first, f"run {run}: ")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(first))


def _refused(name, query, key, value, **options):
    """By pass. Skips if the forward is refused."""
    explained = fast_layers.explain(
        lambda *x: fast_layers.dot_product_attention(*x, implementation="reference", **options), query, key, value
    )
    (backend,) = (backend for backend in BACKENDS if backend.name == name)
    problem, arch = explained.plans[0].problem, lowering_targets()[0]
    refused = {pass_: backend.supports(problem, arch, pass_) for pass_ in PASSES}
    refusals.check(name, arch, refused.values())
    if refused["forward"]:
        refusals.skip(name, arch, [refused["forward"]])
    return refused


# 48 heads and more are more tiles of queries than there are blocks in a persistent grid; few queries have their keys
# split.
BROKEN = {
    "causal": ({"is_causal": True}, 300, 48),
    "window": ({"local_window_size": (80, 0)}, 300, 48),
    "causal, few queries": ({"is_causal": True, "q_offset": 1000}, 60, 2),
    "causal, one query": ({"is_causal": True, "q_offset": 1000}, 1, 2),
    "causal, 16 queries": ({"is_causal": True, "q_offset": 1000}, 16, 2),
    "sinks": ({"is_causal": True, "sinks": np.linspace(-2, 2, 48, dtype=np.float32)}, 300, 48),
    "dropout": ({"is_causal": True, "dropout_rate": 0.2, "dropout_rng": 0}, 300, 48),
    # Of which three warpgroups share 64 keys at depth 128.
    "window, many rows": ({"local_window_size": (80, 0)}, 900, 48),
    "causal, many rows": ({"is_causal": True}, 900, 108),
    "documents, many rows": ({"is_causal": True, "segment_ids": np.repeat([3, 4, 5], [400, 300, 200])}, 900, 108),
}


@pytest.mark.parametrize("broken", [np.nan, np.inf], ids=["NaN", "inf"])
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("backend", [name for name in NAMES if name != "cudnn"])
def test_a_broken_value_reaches_who_sees_it_and_nobody_else(backend, name, depth, broken):
    options, q_len, heads = BROKEN[name]
    options = dict(options)
    if "dropout_rng" in options:
        options["dropout_rng"] = jax.random.key(options["dropout_rng"])
    rng = np.random.default_rng(0)
    kv_len = q_len + options.get("q_offset", 0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(2, length, heads, depth)), jnp.bfloat16) for length in (q_len, kv_len, kv_len)
    )
    _refused(backend, query, key, value, **options)
    place = kv_len - q_len // 2 - 1

    def call(value, implementation):
        out = jax.jit(lambda *x: fast_layers.dot_product_attention(*x, implementation=implementation, **options))
        return np.asarray(out(query, key, value), np.float32)

    whole, got, want = (
        call(value, backend),
        call(value.at[1, place, 1, 3].set(broken), backend),
        call(value.at[1, place, 1, 3].set(broken), "reference"),
    )
    reached = ~np.isfinite(want).all(-1)
    assert reached.any()
    np.testing.assert_array_equal(~np.isfinite(got).all(-1), reached)
    np.testing.assert_array_equal(got[~reached], whole[~reached])


def _compared(backend, operands, options):
    """The results of the backend, of the oracle and of plain code."""

    def call(implementation, *operands):
        op = functools.partial(fast_layers.dot_product_attention, implementation=implementation, **options)
        return jax.device_get(jax.jit(op)(*operands))

    got, yardstick = (call(name, *operands) for name in (backend, "reference"))
    with jax.enable_x64(True):
        oracle = call("reference", *(x.astype(jnp.float64) for x in operands))
    return got, oracle, yardstick


GROWING = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (300, 40)},
    "documents": {"segment_ids": np.repeat([3, 4, 5], [700, 500, 336])[None]},
    "lengths": {"key_value_seq_lengths": np.array([1200], np.int32)},
}


@pytest.mark.parametrize("shift", [200.0, -120.0])
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("backend", NAMES)
def test_logits_that_grow_by_more_than_a_float_holds(backend, name, depth, shift):
    """Some keys' logits, which a row's first tile of keys has not, or of all keys if negative."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 1536, 32, depth)), jnp.bfloat16) for _ in range(3))
    grown = slice(500, 900, 3) if shift > 0 else slice(None)
    query, key = query.at[..., 0].set(16), key.at[..., 0].set(0).at[:, grown, :, 0].set(shift / 2)
    options = GROWING[name] | {"scale": 0.125, "return_residual": True}
    _refused(backend, query, key, value, **options)
    for which, *arrays in zip(("out", "lse"), *_compared(backend, [query, key, value], options), strict=True):
        assert_close(*arrays, name=which)


FILLED = np.array([350, 1, 0, 512, 130, 64], np.int32)
DECODING = {
    "lengths": {"key_value_seq_lengths": FILLED},
    "offsets": {"is_causal": True, "q_offset": FILLED - 1},
    "one offset": {"is_causal": True, "q_offset": jnp.int32(255)},
    "window": {"is_causal": True, "q_offset": FILLED, "local_window_size": (99, 0)},
    "window, lengths": {"q_offset": FILLED, "local_window_size": (200, 3), "key_value_seq_lengths": FILLED + 3},
    "known before": {"is_causal": True, "q_offset": "bottom_right"},
    "sinks": {"key_value_seq_lengths": FILLED, "sinks": np.linspace(-2, 2, 28, dtype=np.float32)},
}


# Of 6 examples the keys are split over blocks; of 48 each row's stay together.
@pytest.mark.parametrize(
    ("batch", "depth", "dtype"),
    [
        (6, 80, jnp.bfloat16),
        (6, 128, jnp.bfloat16),
        (6, 192, jnp.float16),
        (48, 32, jnp.bfloat16),
        (48, 64, jnp.float16),
        (48, 96, jnp.float16),
        (48, 128, jnp.bfloat16),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
@pytest.mark.parametrize(
    ("queries", "kv_heads"), [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (16, 4), (1, 28), (16, 28), (24, 28)]
)
@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("backend", [name for name in KERNELS if name != "cudnn"])
def test_decoding_from_a_cache(backend, name, queries, kv_heads, depth, batch, dtype):
    """How far it is filled is known in the call alone; NaN stands behind."""
    rng = np.random.default_rng(0)
    shapes = (batch, queries, 28, depth), (batch, 512, kv_heads, depth), (batch, 512, kv_heads, depth)
    query, key, value = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    options = {of: np.tile(x, batch // 6) if np.shape(x) == (6,) else x for of, x in DECODING[name].items()}
    offset, length = options.get("q_offset", 512), options.get("key_value_seq_lengths", 512)
    if not isinstance(offset, str):
        last = np.broadcast_to(np.minimum(offset + queries + 3, length), batch)
        behind = (np.arange(512) >= last[:, None])[..., None, None]
        key, value = (jnp.where(behind, jnp.asarray(np.nan, x.dtype), x) for x in (key, value))
    options["return_residual"] = True
    _refused(backend, query, key, value, **options)
    for which, *arrays in zip(("out", "lse"), *_compared(backend, [query, key, value], options), strict=True):
        assert_close(*arrays, name=which)


@pytest.mark.parametrize("softcap", [20.0, 50.0])
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("backend", [name for name in KERNELS if name != "cudnn"])
def test_a_wide_soft_cap_is_as_exact_as_the_docs_say(backend, depth, softcap):
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=(2, 500, 8, depth)), jnp.bfloat16) for _ in range(3)]
    options = {"is_causal": True, "softcap": softcap, "return_residual": True}
    _refused(backend, *operands, **options)
    out, lse = zip(*_compared(backend, operands, options), strict=True)
    assert_close(*out, name="out")
    verdict = judge(*lse, name="lse")
    assert verdict.error is not None, verdict.failure
    # A sum of exponentials is off by no more than its worst logit, besides what the rule allows.
    assert verdict.error <= verdict.limit + 3e-7 * softcap


@pytest.mark.parametrize("backend", [name for name in KERNELS if name != "cudnn"])
def test_a_persistent_grid_inside_shard_map(backend):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 300, 48, 64)), jnp.bfloat16) for _ in range(3))
    _refused(backend, query, key, value, is_causal=True)

    def call(*operands):
        return fast_layers.dot_product_attention(*operands, is_causal=True, implementation=backend)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
    assert_bitwise_equal(*(jax.device_get(jax.jit(f)(query, key, value)) for f in (sharded, call)))


LENGTHS = np.array([200, 77], np.int32)
PADDED = {
    "key lengths": {"key_value_seq_lengths": LENGTHS},
    "both lengths": {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": LENGTHS},
    "causal, key lengths": {"key_value_seq_lengths": LENGTHS, "is_causal": True},
    "segments": {"segment_ids": np.where(np.arange(300) < LENGTHS[:, None], 0, -1)},
    "dense": {"mask": np.broadcast_to((np.arange(300) < LENGTHS[:, None])[:, None, None], (2, 1, 300, 300))},
}


@pytest.mark.parametrize("poison", [np.nan, np.inf, 60000.0], ids=["NaN", "inf", "large"])
@pytest.mark.parametrize("options", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("backend", NAMES)
def test_what_stands_in_the_padding_does_not_matter(backend, options, poison):
    """Bit for bit the same as with zeros there, in values and gradients (all but the padded queries' own inputs)."""
    rng = np.random.default_rng(0)
    query, key, value, d_out = (jnp.asarray(rng.normal(size=(2, 300, 4, 64)), jnp.float16) for _ in range(4))
    refused = _refused(backend, query, key, value, **options)
    backward = None if refused["backward"] or (backend == "cudnn" and not ALWAYS_SAME_ORDER) else backend

    @jax.jit
    def call(query, key, value):
        def op(*operands):
            return fast_layers.dot_product_attention(*operands, implementation=backend, **options)

        if backward is None:
            return op(query, key, value), ()
        out, pull = jax.vjp(op, query, key, value)
        return out, pull(d_out)

    hidden = jnp.asarray(np.arange(300) >= LENGTHS[:, None])[..., None, None]
    results = []
    for filling in (0.0, poison):
        filled = (jnp.where(hidden, jnp.asarray(filling, x.dtype), x) for x in (key, value))
        results.append(jax.device_get(call(query, *filled)))
    assert_bitwise_equal(results[1], results[0], f"{backend}: ")
    for x in jax.tree.leaves(results[0]):
        assert np.isfinite(x.astype(np.float32)).all()
