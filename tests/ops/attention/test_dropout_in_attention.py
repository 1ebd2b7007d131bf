"""Dropout as the op applies it: the documented decisions, the same on all backends, tiles and transforms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal

import fast_layers
from fast_layers.ops.attention.xla_config import XlaTiles
from ops.attention import oracle
from ops.attention.cases import TESTED

B, T, S, N, K = 2, 9, 70, 4, 2
RATE = 0.3
RNG = jax.random.key(5)
ALL = ["reference", *TESTED]
FAST = {"compiler_options": {"xla_backend_optimization_level": 0}}


def _one_hot_value():
    """Value such that the output is the row of kept weights itself."""
    return np.broadcast_to(np.eye(S, dtype=np.float32)[None, :, None], (B, S, K, S))


def _weights(implementation, rng=RNG, rate=RATE, **options):
    """[B, T, N, S]: the softmax weights after dropout."""
    draw = np.random.default_rng(0)
    query = draw.normal(size=(B, T, N, 4)).astype(np.float32)
    key = draw.normal(size=(B, S, K, 4)).astype(np.float32)
    call = functools.partial(
        fast_layers.dot_product_attention, dropout_rate=rate, implementation=implementation, **options
    )
    compiled = jax.jit(lambda *qkv, rng: call(*qkv, dropout_rng=rng), **FAST)
    return np.asarray(compiled(query, key, _one_hot_value(), rng=rng))


def _documented(rate=RATE, rng=RNG, broadcast=False):
    words = np.asarray(jax.random.bits(rng, (2,), jnp.uint32))
    return oracle.keep(words, B, N, T, S, rate, broadcast=broadcast).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("broadcast", [False, True])
def test_decisions_are_the_documented_ones(implementation, broadcast):
    kept = _weights(implementation, broadcast_dropout=broadcast)
    decisions = _documented(broadcast=broadcast)
    np.testing.assert_array_equal(kept > 0, decisions)
    whole = _weights(implementation, rate=0.0, rng=None)
    np.testing.assert_allclose(kept, np.where(decisions, whole / (1 - RATE), 0), rtol=1e-5)
    if broadcast:
        assert (decisions == decisions[:1, :, :1]).all()


@pytest.mark.parametrize("implementation", ALL)
def test_rate_zero_needs_no_key_and_ignores_one(implementation):
    assert_bitwise_equal(_weights(implementation, rate=0.0), _weights(implementation, rate=0.0, rng=None))


@pytest.mark.parametrize("implementation", ALL)
def test_expectation_is_the_output_without_dropout(implementation):
    """Mean over 400 keys within five standard errors, at each place."""
    keys = jax.random.split(jax.random.key(1), 400)
    value = np.random.default_rng(1).normal(size=(1, 12, 2, 3)).astype(np.float32)
    query = np.random.default_rng(2).normal(size=(1, 4, 2, 3)).astype(np.float32)

    def call(rng, rate):
        return fast_layers.dot_product_attention(
            query, value, value, dropout_rate=rate, dropout_rng=rng, implementation=implementation
        )

    outs = np.asarray(jax.jit(jax.vmap(lambda rng: call(rng, 0.4)), **FAST)(keys))
    error = np.abs(outs.mean(0) - call(None, 0.0)) / (outs.std(0) / np.sqrt(len(keys)))
    assert error.max() < 5


@pytest.mark.parametrize("implementation", TESTED)
def test_backends_agree(implementation):
    """The same places are 0: so a forward of one backend may meet the backward of another."""
    np.testing.assert_array_equal(_weights(implementation) == 0, _weights("reference") == 0)


def test_tiles_do_not_change_decisions(monkeypatch):
    """Values to rounding, zeros exactly, in the forward and in the backward."""
    results = []
    for q_tile, kv_tile in ((256, 256), (3, 32), (8, 64)):
        monkeypatch.setattr(XlaTiles, "of", lambda *_, tiles=XlaTiles(q_tile, kv_tile): tiles)
        value = jnp.asarray(_one_hot_value())
        query = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, N, 4)), jnp.float32)

        def call(query, value):
            return fast_layers.dot_product_attention(
                query, value[..., :4], value, dropout_rate=RATE, dropout_rng=RNG, implementation="xla"
            )

        def results_of(query, value, call=call):
            out, pull = jax.vjp(call, query, value)
            return out, *pull(jnp.cos(out * 50))

        results.append(jax.jit(results_of, **FAST)(query, value))
    for other in results[1:]:
        np.testing.assert_array_equal(other[0] == 0, results[0][0] == 0)
        for got, want in zip(other, results[0], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ALL)
def test_gradient_is_that_of_a_fixed_mask(implementation):
    """Finite differences of the op itself: with one key the decisions do not move."""
    draw = np.random.default_rng(3)
    operands = [jnp.asarray(draw.normal(size=s)) for s in ((1, 3, 2, 4), (1, 5, 1, 4), (1, 5, 1, 4))]
    with jax.enable_x64(True):
        operands = [jnp.asarray(np.asarray(x), jnp.float64) for x in operands]

        def loss(operands):
            out = fast_layers.dot_product_attention(
                *operands, dropout_rate=0.4, dropout_rng=RNG, implementation=implementation
            )
            return (out * jnp.arange(out.size).reshape(out.shape)).sum()

        value_of = jax.jit(loss, **FAST)
        directions = [jnp.asarray(draw.normal(size=x.shape)) for x in operands]
        shifted = [
            value_of([x + sign * 1e-5 * d for x, d in zip(operands, directions, strict=True)]) for sign in (1, -1)
        ]
        slope = sum((g * d).sum() for g, d in zip(jax.jit(jax.grad(loss), **FAST)(operands), directions, strict=True))
        np.testing.assert_allclose(slope, (shifted[0] - shifted[1]) / 2e-5, rtol=1e-6)


@pytest.mark.parametrize("implementation", ALL)
def test_vmap_with_one_key_is_a_loop_with_one_key(implementation):
    draw = np.random.default_rng(4)
    stacked = draw.normal(size=(3, B, T, N, 4)).astype(np.float32)

    def call(x, rng):
        return fast_layers.dot_product_attention(
            x, x, x, dropout_rate=RATE, dropout_rng=rng, implementation=implementation
        )

    single = jax.jit(call, **FAST)
    mapped = jax.jit(jax.vmap(call, in_axes=(0, None)), **FAST)(stacked, RNG)
    for i in range(3):
        np.testing.assert_allclose(mapped[i], single(stacked[i], RNG), rtol=1e-5, atol=1e-6)
    keys = jax.random.split(RNG, 3)
    mapped = jax.jit(jax.vmap(call), **FAST)(stacked, keys)
    for i in range(3):
        np.testing.assert_allclose(mapped[i], single(stacked[i], keys[i]), rtol=1e-5, atol=1e-6)


def test_batch_dims_number_the_examples_in_order():
    """An example's decisions do not depend on how the batch dims are arranged."""
    x = np.random.default_rng(6).normal(size=(6, T, N, 4)).astype(np.float32)
    options = {"dropout_rate": RATE, "dropout_rng": RNG}
    flat = fast_layers.dot_product_attention(x, x, x, **options)
    nested = fast_layers.dot_product_attention(*[x.reshape(2, 3, T, N, 4)] * 3, **options)
    assert_bitwise_equal(nested.reshape(flat.shape), flat)


def test_nothing_random_without_a_new_key():
    first, second = _weights(None), _weights(None)
    assert_bitwise_equal(first, second)
    assert (_weights(None, rng=jax.random.key(6)) != first).any()
