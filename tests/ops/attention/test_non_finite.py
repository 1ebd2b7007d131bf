"""NaN and inf where nobody looks must not matter, where somebody looks they must show; rows that see no key give 0.

Padding is compared bit for bit with the same call on zeros in the poisoned places.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal

import fast_layers
from fast_layers import masks
from ops.attention.cases import TESTED

B, T, N, K, H = 2, 40, 4, 2, 8
KEYS_SEEN = np.array([33, 7])
IDS = np.array([[0] * 10 + [-1] * 5 + [1] * 20 + [-1] * 5, [2] * 30 + [-1] * 10])
_hidden_by_length = np.arange(T) >= KEYS_SEEN[:, None]

# name: (options, keys that no query sees [B, S], query rows that see nothing [B, T])
HIDDEN = {
    "key lengths": ({"key_value_seq_lengths": KEYS_SEEN}, _hidden_by_length, None),
    "both lengths": (
        {"key_value_seq_lengths": KEYS_SEEN, "query_seq_lengths": KEYS_SEEN},
        _hidden_by_length,
        _hidden_by_length,
    ),
    "segments": ({"segment_ids": IDS}, IDS < 0, IDS < 0),
    "dense": (
        {"mask": np.broadcast_to(~_hidden_by_length[:, None, None], (B, 1, T, T))},
        _hidden_by_length,
        None,
    ),
    "causal": (
        {"is_causal": True, "q_offset": -10},
        np.broadcast_to(np.arange(T) > T - 11, (B, T)),
        np.broadcast_to(np.arange(T) < 10, (B, T)),
    ),
    "window": (
        {"local_window_size": (4, 3), "q_offset": 12},
        np.broadcast_to(np.arange(T) < 8, (B, T)),
        np.broadcast_to(np.arange(T) > 31, (B, T)),
    ),
}
EXTRAS = {"plain": {}, "softcap, sinks": {"softcap": 2.0, "sinks": np.linspace(-1, 1, N).astype(np.float32)}}


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _operands():
    return _normal(B, T, N, H, seed=1), _normal(B, T, K, H, seed=2), _normal(B, T, K, H, seed=3)


def _all_results(implementation, options):
    """Compiled (operands, cotangents) -> (out, lse), gradients."""
    sinks = options.get("sinks")
    options = {name: x for name, x in options.items() if name != "sinks"}

    def call(operands, cotangents):
        def op(operands):
            query, key, value, bias, sinks = operands
            return fast_layers.dot_product_attention(
                query,
                key,
                value,
                bias,
                sinks=sinks,
                return_residual=True,
                implementation=implementation,
                **options,
            )

        results, pull = jax.vjp(op, operands)
        return results, pull(cotangents)[0]

    compiled = jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})

    def run(query, key, value, bias=None, d_out=None, d_lse=None):
        d_out = _normal(B, T, N, H, seed=4) if d_out is None else d_out
        d_lse = _normal(B, T, N, seed=5) if d_lse is None else d_lse
        return compiled((query, key, value, bias, sinks), (d_out, d_lse))

    return run


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_what_nobody_sees_does_not_matter(implementation, hidden, extra):
    options, keys, rows = hidden
    query, key, value = _operands()
    run = _all_results(implementation, {**options, **extra})
    zeros = np.where(keys[..., None, None], 0, key), np.where(keys[..., None, None], 0, value)
    clean_query = query if rows is None else np.where(rows[..., None, None], 0, query)
    clean = run(clean_query, *zeros)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean[1]))
    for strange in (np.nan, np.inf, -np.inf):
        bad_key, bad_value = (np.where(keys[..., None, None], np.float32(strange), x) for x in (key, value))
        bad_query = query if rows is None else np.where(rows[..., None, None], np.float32(strange), query)
        assert_bitwise_equal(run(bad_query, bad_key, bad_value), clean, f"{strange}: ")
    # One broken entry of a vector is as broken as all.
    bad_key, bad_value = zeros[0].copy(), zeros[1].copy()
    bad_key[..., 3][keys], bad_value[..., 5][keys] = np.nan, np.inf
    assert_bitwise_equal(run(clean_query, bad_key, bad_value), clean, "one entry: ")


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_bias_that_nobody_sees_does_not_matter(implementation):
    """Bias of masked places may be anything; its gradient there is 0."""
    visible = np.tril(np.ones((T, T), bool))
    run = _all_results(implementation, {"is_causal": True})
    bias = _normal(B, N, T, T, seed=6)
    clean = run(*_operands(), np.where(visible, bias, 0))
    for strange in (np.nan, np.inf, -np.inf):
        got = run(*_operands(), np.where(visible, bias, np.float32(strange)))
        assert_bitwise_equal(got, clean, f"{strange}: ")
    assert not clean[1][3][:, :, ~visible].any()


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize("operand", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_who_sees_it_shows_it_and_nobody_else(implementation, operand, strange):
    """Two packed documents; a broken number in the first one's row 12, head 1 of the keys (2 of the queries)."""
    ids = np.repeat([0, 1], T // 2)
    options = {"segment_ids": ids, "is_causal": True}
    operands = [x.copy() for x in _operands()]
    run = _all_results(implementation, options)
    clean_out, clean_lse = run(*operands)[0]
    head = 1 if operand else 2
    operands[operand][0, 12, head, 4] = strange
    (out, lse), _ = run(*operands)
    broken = np.zeros((B, T, N), bool)
    if operand:
        broken[0, 12 : T // 2, 2:] = True  # key head 1 serves query heads 2 and 3; later rows of its document
    else:
        broken[0, 12, 2] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), broken)
    np.testing.assert_array_equal(np.isnan(out).any(-1), broken)
    assert_bitwise_equal(np.asarray(out)[~broken], np.asarray(clean_out)[~broken])
    assert_bitwise_equal(np.asarray(lse)[~broken], np.asarray(clean_lse)[~broken])


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_broken_document_leaves_the_gradients_of_the_others_alone(implementation, with_bias, softcap):
    """A packed row with one diverged document: the others' gradients are as if it were zeros."""
    ids = np.repeat([0, 1], T // 2)
    run = _all_results(implementation, {"segment_ids": ids, "softcap": softcap})
    query, key, value = _operands()
    bias = _normal(1, N, T, T, seed=6) if with_bias else None
    first = (ids == 0)[None, :, None, None]
    _, clean = run(*(np.where(first, np.float32(0), x) for x in (query, key, value)), bias)
    # What a query of one document adds to a key of the other is 0, whatever has happened to either.
    of_others = (ids[:, None] == 1) | (ids == 1)
    for name, broken in (
        ("key", (query, np.where(first, np.nan, key), value)),
        ("value", (query, key, np.where(first, np.nan, value))),
        ("query", (np.where(first, np.nan, query), key, value)),
    ):
        _, grads = run(*broken, bias)
        for which in range(3):
            np.testing.assert_array_equal(
                grads[which][:, ids == 1],
                clean[which][:, ids == 1],
                err_msg=f"broken {name}, gradient {which}",
            )
        if with_bias:
            got, want = (np.asarray(x[3])[:, :, of_others] for x in (grads, clean))
            np.testing.assert_array_equal(got, want, err_msg=f"broken {name}, gradient of the bias")


NO_KEYS = {
    "key lengths": {"key_value_seq_lengths": np.array([T, 0])},
    "query lengths": {"query_seq_lengths": np.array([T, 0])},
    "segments": {"segment_ids": np.array([[3] * T, [-1] * T])},
    "dense": {"mask": np.broadcast_to(np.array([True, False])[:, None, None, None], (B, N, T, T))},
    "causal before the first key": {"is_causal": True, "q_offset": np.array([3, -T])},
    "window past the last key": {"local_window_size": (3, 3), "q_offset": np.array([0, 2 * T])},
    "two segments that never agree": {
        "mask": masks.Segments(np.array([[0] * T, [0] * T]), np.array([[0] * T, [1] * T])) & masks.Causal()
    },
}


ONE_WAY = NO_KEYS["key lengths"]
SINKS = np.linspace(-1, 1, N).astype(np.float32)
WITH_EXTRAS = {
    "with sinks": {**ONE_WAY, "sinks": SINKS},
    "with sinks of -inf": {**ONE_WAY, "sinks": np.full(N, -np.inf, np.float32)},
    "with softcap": {**ONE_WAY, "softcap": 1.0},
    "with dropout": {**ONE_WAY, "dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
}


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize("options", [*NO_KEYS.values(), *WITH_EXTRAS.values()], ids=[*NO_KEYS, *WITH_EXTRAS])
def test_rows_that_see_no_key(implementation, options):
    """Example 1 sees nothing: output 0, lse -inf, gradients 0; the cotangents of such rows do not matter."""
    run = _all_results(implementation, options)
    (out, lse), grads = run(*_operands())
    assert not np.asarray(out)[1].any()
    assert (np.asarray(lse)[1] == -np.inf).all()
    for grad in grads[:3]:
        assert not np.asarray(grad)[1].any()
        assert np.isfinite(grad).all()
        assert np.asarray(grad)[0].any()
    d_out, d_lse = _normal(B, T, N, H, seed=4), _normal(B, T, N, seed=5)
    d_out[1], d_lse[1] = 1e30, -1e30
    assert_bitwise_equal(run(*_operands(), d_out=d_out, d_lse=d_lse)[1], grads)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_strange_cotangents_of_rows_that_see_no_key(implementation, strange):
    """A loss whose own gradient is NaN on padding rows, e.g. a mean over zero labels."""
    run = _all_results(implementation, NO_KEYS["key lengths"])
    clean = run(*_operands())[1]
    d_out, d_lse = _normal(B, T, N, H, seed=4), _normal(B, T, N, seed=5)
    d_out[1], d_lse[1] = strange, strange
    assert_bitwise_equal(run(*_operands(), d_out=d_out, d_lse=d_lse)[1], clean)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_bias_of_minus_infinity_hides_keys(implementation, with_sinks):
    """As a mask does, bit for bit: half the keys of example 0, all keys of example 1."""
    sinks = {"sinks": SINKS} if with_sinks else {}
    bias = np.zeros((B, 1, 1, T), np.float32)
    bias[0, ..., T // 2 :] = bias[1] = -np.inf
    results, grads = _all_results(implementation, sinks)(*_operands(), bias)
    masked_results, masked_grads = _all_results(implementation, {"mask": bias > -1, **sinks})(*_operands())
    assert_bitwise_equal(results, masked_results)
    assert_bitwise_equal(grads[:3], masked_grads[:3])
    assert np.isfinite(grads[3]).all()


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_a_sink_of_minus_infinity_is_no_sink(implementation):
    plain, plain_grads = _all_results(implementation, {"is_causal": True})(*_operands())
    sinks = {"sinks": np.full(N, -np.inf, np.float32), "is_causal": True}
    results, grads = _all_results(implementation, sinks)(*_operands())
    for got, want in zip((*results, *grads[:3]), (*plain, *plain_grads[:3]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(grads[4], 0)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_large_scores_do_not_overflow(implementation):
    """Scores of +-1e4 and more: softmax of float32 stays exact about the largest."""
    query, key, value = _operands()
    (out, lse), grads = _all_results(implementation, {"scale": 1e5})(query, key, value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, lse, grads)))
    scores = jnp.einsum("btnh,bsnh->bnts", query, np.repeat(key, N // K, 2))
    first = np.take_along_axis(
        np.repeat(value, N // K, 2).transpose(0, 2, 1, 3), np.asarray(scores.argmax(-1))[..., None], 2
    )
    np.testing.assert_allclose(out, first.transpose(0, 2, 1, 3), atol=1e-5)
