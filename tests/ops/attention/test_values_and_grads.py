"""Values and all gradients of every backend, over every combination of arguments."""

from __future__ import annotations

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal, assert_close_over_draws
from selection import examples

import fast_layers
from fast_layers import masks
from fast_layers.ops.attention.xla_config import XlaTiles
from ops.attention import oracle
from ops.attention.cases import TESTED, Case, build, cases, runner, yardsticks
from ops.attention.tracing import equations


def _check(case: Case, implementation: str, *, dtype=np.float32, wide=np.float64, optimise=True, draws=6):
    """The reference against numpy in the same type, another backend against the reference and numpy."""
    refusal = build(case, dtype).refusal(implementation) if implementation != "reference" else None
    if refusal:
        hypothesis.reject() if hypothesis.currently_in_test_context() else pytest.skip(refusal)
    run = runner(implementation, optimise=optimise)
    plain = [runner("reference", optimise=optimise)] if implementation != "reference" else []

    def make(draw):
        built = build(case, dtype, draw)
        return run(built), built.oracle(wide), *(f(built) for f in plain), *yardsticks(built, dtype)

    assert_close_over_draws(make, f"{implementation} on {case!r}: ", draws)


@pytest.mark.parametrize("implementation", TESTED)
@examples(8)
@hypothesis.given(case=cases())
def test_any_arguments_float32(implementation, case):
    _check(case, implementation, optimise=False)


@examples(8)
@hypothesis.given(case=cases(lengths=(1, 5, 33, 64)))
def test_any_arguments_reference_float32(case):
    _check(case, "reference", optimise=False)


@pytest.mark.parametrize("implementation", TESTED)
@examples(4)
@hypothesis.given(case=cases(lengths=(1, 5, 33), scores=1 << 13))
def test_any_arguments_float64(implementation, case):
    with jax.enable_x64(True):
        _check(case, implementation, dtype=np.float64, wide=np.longdouble, optimise=False, draws=3)


LENGTHS = [(1, 1), (1, 1000), (1000, 1), (129, 1000)]
MORE_LENGTHS = [(7, 129), (129, 7), (129, 129), (1000, 1000)]


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [*LENGTHS, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in MORE_LENGTHS)]
)
def test_odd_lengths(implementation, q_len, kv_len):
    """With several tiles, grouped heads, another value depth, and a band that skips tiles."""
    case = Case(
        batch=(1,),
        q_len=q_len,
        kv_len=kv_len,
        heads=4,
        kv_heads=2,
        qk_dim=16,
        v_dim=24,
        is_causal=True,
        q_offset="bottom_right",
        window=(300, None),
        segments="pair",
        sinks=True,
        bias_broadcast=(False, False, True, False),
    )
    _check(case, implementation, draws=1 if q_len * kv_len > 10**5 else 6)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize(
    "case",
    [
        Case(heads=8, kv_heads=8),
        Case(heads=8, kv_heads=2),
        Case(heads=8, kv_heads=1),
        Case(heads=6, kv_heads=3, qk_dim=32, v_dim=5),
        Case(qk_dim=1, v_dim=1),
        Case(batch=(), q_len=7, kv_len=9, is_causal=True),
        Case(batch=(2, 1, 2), lengths=(True, True)),
        Case(q_len=33, kv_len=33, window=0),
        Case(q_len=33, kv_len=33, window=(None, 3)),
        Case(q_len=33, kv_len=33, window=(3, None), is_causal=True),
        Case(q_len=33, kv_len=65, is_causal=True, q_offset="array"),
        Case(q_len=33, kv_len=65, is_causal=True, q_offset=-5),
        Case(q_len=33, kv_len=33, mask="dense", mask_broadcast=(True, False, False, False)),
        Case(q_len=33, kv_len=33, softcap=0.7, sinks=True, bias_broadcast=(False, False, False, False)),
        Case(q_len=33, kv_len=33, dropout_rate=0.25, segments="self", is_causal=True),
        Case(q_len=33, kv_len=33, scale=0.0),
    ],
    ids=str,
)
def test_fixed_cases(implementation, case):
    """One feature at a time: when these fail too, they say which."""
    _check(case, implementation, optimise=False)


def test_a_row_by_hand():
    """Two keys with scores 0 and log 3, so weights 1/4 and 3/4: no formula of ours in between."""
    query, key = np.full((1, 1, 1), 2.0, np.float32), np.array([[[0.0]], [[np.log(3) / 2]]], np.float32)
    value = np.array([[[8.0, 0.0]], [[0.0, 4.0]]], np.float32)
    for implementation in ("reference", *TESTED):
        out, lse = fast_layers.dot_product_attention(
            query, key, value, return_residual=True, implementation=implementation
        )
        np.testing.assert_allclose(out, [[[2.0, 3.0]]], rtol=1e-6)
        np.testing.assert_allclose(lse, [[np.log(4)]], rtol=1e-6)
        sinks = np.array([np.log(4)], np.float32)
        out = fast_layers.dot_product_attention(query, key, value, sinks=sinks, implementation=implementation)
        np.testing.assert_allclose(out, [[[1.0, 1.5]]], rtol=1e-6)


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(q_len=129, kv_len=129, heads=4, kv_heads=2, qk_dim=32, v_dim=16, is_causal=True),
        Case(q_len=33, kv_len=300, window=(40, 20), q_offset=100, softcap=5.0, sinks=True),
        Case(q_len=64, kv_len=64, segments="self", bias_broadcast=(True, False, False, False)),
        Case(q_len=64, kv_len=64, dropout_rate=0.3, lengths=(True, True)),
    ],
    ids=str,
)
def test_low_precision(implementation, dtype, case):
    if refusal := build(case, dtype).refusal(implementation):
        pytest.skip(refusal)
    run = runner(implementation)

    def make(draw):
        built = build(case, dtype, draw)
        got = run(built)
        assert got.out.dtype == dtype
        assert got.lse.dtype == np.float32
        assert all(x.dtype == dtype for x in jax.tree.leaves(got.grads))
        return got, built.oracle(), _plain(built)

    assert_close_over_draws(make, f"{implementation}: ", draws=2)


def _plain(built) -> oracle.Attended:
    """What a framework's own attention does: matmuls in the inputs' dtype, softmax in float32, autodiff."""
    case = built.case
    visible = jnp.asarray(built.visible)

    def attend(operands):
        query, key, value, bias, sinks = operands
        key, value = (jnp.repeat(x, case.heads // case.kv_heads, axis=2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * built.scale
        if case.softcap is not None:
            scores = case.softcap * jnp.tanh(scores / case.softcap)
        if bias is not None:
            scores += bias.astype(jnp.float32)
        scores = jnp.where(visible, scores, -1e30)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, sink], -1)
        some = visible.any(-1, keepdims=True)
        lse = jnp.where(some, jax.nn.logsumexp(scores, -1, keepdims=True), -jnp.inf)
        weights = jnp.where(visible, jax.nn.softmax(scores, -1)[..., : case.kv_len], 0)
        if built.keep is not None:
            weights = jnp.where(built.keep, weights / (1 - case.dropout_rate), 0)
        out = jnp.einsum("bnts,bsnv->btnv", weights.astype(value.dtype), value)
        return out, lse[..., 0].swapaxes(1, 2)

    (out, lse), pull = jax.vjp(attend, jax.tree.map(jnp.asarray, built.operands))
    return oracle.Attended(out, lse, *pull((jnp.asarray(built.d_out), jnp.asarray(built.d_lse))))


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_bias_that_broadcasts_along_one_of_two_batch_dims(implementation):
    """Each batch dim broadcasts by itself; and missing leading dims are dims of 1."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 3, 7, 2, 4)).astype(np.float32) for _ in range(3))

    def loss(bias):
        out = fast_layers.dot_product_attention(query, key, value, bias, implementation=implementation)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

    for shape in ((1, 3, 2, 7, 7), (2, 1, 1, 1, 7), (2, 7, 7), (7, 1), (7,), ()):
        bias = np.asarray(rng.normal(size=shape), np.float32)
        d_bias = jax.grad(loss)(bias)
        full = np.broadcast_to(bias, (2, 3, 2, 7, 7))
        d_full = np.asarray(jax.grad(loss)(full))
        aligned = (1,) * (5 - len(shape)) + shape
        summed = d_full.sum(tuple(a for a in range(5) if aligned[a] == 1), keepdims=True).reshape(shape)
        np.testing.assert_allclose(loss(bias), loss(full), rtol=1e-5)
        np.testing.assert_allclose(d_bias, summed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_gradients_have_the_dtypes_of_their_operands(implementation):
    """bfloat16 inputs with a float32 bias and float16 sinks, as mixed-precision models have."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(1, 5, 2, 4)), jnp.bfloat16)
    bias, sinks = jnp.asarray(rng.normal(size=(2, 5, 5)), jnp.float32), jnp.zeros(2, jnp.float16)

    def loss(query, bias, sinks):
        out, lse = fast_layers.dot_product_attention(
            query, query, query, bias, sinks=sinks, implementation=implementation, return_residual=True
        )
        assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
        return out.astype(jnp.float32).sum() + lse.sum()

    grads = jax.grad(loss, argnums=(0, 1, 2))(query, bias, sinks)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32, jnp.float16]


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_without_residual_the_output_is_the_same(implementation):
    built = build(Case(q_len=33, kv_len=33, is_causal=True))
    call = jax.jit(
        lambda *qkv, residual: fast_layers.dot_product_attention(
            *qkv, is_causal=True, implementation=implementation, return_residual=residual
        ),
        static_argnames="residual",
    )
    out, lse = call(*built.operands[:3], residual=True)
    assert lse.shape == (2, 33, 2)
    assert_bitwise_equal(call(*built.operands[:3], residual=False), out)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_arguments_and_masks_are_combined_by_and(implementation):
    """The same mask, by arguments, by objects, by an array, and by halves of each."""
    built = build(Case(q_len=9, kv_len=9))
    qkv = built.operands[:3]
    lengths, ids = np.array([9, 4]), np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
    structured = masks.Causal() & masks.Segments(ids) & masks.KeyLengths(lengths) & masks.LocalWindow(2, None)
    array = structured.as_array(9, 9, batch=(2,))
    by_arguments = {
        "is_causal": True,
        "segment_ids": ids,
        "key_value_seq_lengths": lengths,
        "local_window_size": (2, None),
    }
    forms = [
        by_arguments,
        {"mask": structured},
        {"mask": array},
        {"mask": masks.Dense(array)},
        {"mask": array, **by_arguments},
        {
            "mask": masks.Causal() & masks.Segments(ids),
            "key_value_seq_lengths": lengths,
            "local_window_size": (2, 5),
        },
    ]
    first, *others = (fast_layers.dot_product_attention(*qkv, implementation=implementation, **f) for f in forms)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-6, atol=1e-7)


@examples(5)
@hypothesis.given(
    case=cases(lengths=(5, 33, 64, 129)),
    q_tile=hypothesis.strategies.sampled_from([1, 8, 40, 64]),
    kv_tile=hypothesis.strategies.sampled_from([32, 64, 96]),
)
def test_any_tiles_xla(case, q_tile, kv_tile):
    """Small tiles, so that small cases have many of them to skip, to mask and to pad."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(XlaTiles, "of", lambda *_: XlaTiles(q_tile, kv_tile))
        _check(case, "xla", optimise=False)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_precision_reaches_every_matmul(implementation):
    """Also those of the gradients."""
    built = build(Case(q_len=7, kv_len=7))

    def loss(operands, precision):
        return fast_layers.dot_product_attention(
            *operands[:3], precision=precision, implementation=implementation
        ).sum()

    for precision in (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH):
        jaxpr = jax.make_jaxpr(jax.grad(loss), static_argnums=1)(built.operands, precision)
        found = [eqn.params["precision"] for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
        assert len(found) >= 5
        assert all(p == (precision, precision) for p in found), found


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_strict_dtype_promotion(implementation):
    case = Case(
        q_len=33,
        kv_len=33,
        is_causal=True,
        window=9,
        lengths=(True, True),
        segments="self",
        q_offset="array",
        mask="prefix",
        bias_broadcast=(True, False, False, False),
        softcap=3.0,
        sinks=True,
        dropout_rate=0.2,
    )
    for dtype in (np.float32, jnp.bfloat16):
        with jax.numpy_dtype_promotion("strict"):
            runner(implementation, optimise=False)(build(case, dtype))


class TestAttentionWeights:
    """`attention_weights`: what Flax sows."""

    case = dataclasses.replace(Case(q_len=9, kv_len=7, is_causal=True, lengths=(True, True)), dropout_rate=0.5)

    def test_rows_sum_to_one_or_zero_and_dropout_is_not_in_them(self):
        built = build(self.case)
        out, weights = fast_layers.attention_weights(*built.operands[:3], **_weights_options(built))
        assert weights.shape == (2, 2, 9, 7)
        seen = np.broadcast_to(built.visible, weights.shape)
        np.testing.assert_array_equal(np.asarray(weights) > 0, seen)
        np.testing.assert_allclose(weights.sum(-1), seen.any(-1), rtol=1e-6)
        kept = np.where(built.keep, np.asarray(weights) / 0.5, 0)
        np.testing.assert_allclose(out, np.einsum("bnts,bsnv->btnv", kept, built.operands.value), atol=1e-6)

    def test_batch_dims_and_low_precision(self):
        built = build(dataclasses.replace(self.case, batch=(2, 1)), jnp.bfloat16)
        out, weights = fast_layers.attention_weights(*built.operands[:3], **_weights_options(built))
        assert (out.shape, weights.shape) == ((2, 1, 9, 2, 8), (2, 1, 2, 9, 7))
        assert out.dtype == weights.dtype == jnp.bfloat16


def _weights_options(built):
    return {**built.static_options, **built.options}
