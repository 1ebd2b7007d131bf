"""Temporary memory of a training step's attention, from the compiler's own account; nothing is run."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fast_layers
from ops.attention.cases import TESTED

N, H = 8, 64
LENGTHS = (4096, 8192, 16384)


def _temp_bytes(attend, length, *, segments=False):
    """Of forward and backward, gradients of all three operands."""
    x = jax.ShapeDtypeStruct((1, length, N, H), jnp.float32)
    ids = [jax.ShapeDtypeStruct((1, length), jnp.int32)] if segments else []

    def loss(query, key, value, *ids):
        return attend(query, key, value, *ids).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, *ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@functools.cache
def _flax_bytes(length):
    def attend(query, key, value):
        mask = nnx.make_causal_mask(jnp.ones((1, length)))
        return nnx.dot_product_attention(query, key, value, mask=mask)

    return _temp_bytes(attend, length)


CALLS = {
    "causal": lambda q, k, v, **options: fast_layers.dot_product_attention(q, k, v, is_causal=True, **options),
    "segments": lambda q, k, v, ids, **options: fast_layers.dot_product_attention(
        q, k, v, is_causal=True, segment_ids=ids, **options
    ),
    "window": lambda q, k, v, **options: fast_layers.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=(1024, 0), **options
    ),
    "dropout": lambda q, k, v, **options: fast_layers.dot_product_attention(
        q, k, v, dropout_rate=0.1, dropout_rng=jax.random.key(0), **options
    ),
    "softcap, sinks, row bias": lambda q, k, v, **options: fast_layers.dot_product_attention(
        q, k, v, q[0, :, 0, 0], softcap=20.0, sinks=v[0, 0, :, 0], **options
    ),
}


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize("name", CALLS)
def test_linear_and_a_twentieth_of_flax(implementation, name):
    attend = functools.partial(CALLS[name], implementation=implementation)
    used = [_temp_bytes(attend, length, segments=name == "segments") for length in LENGTHS]
    for shorter, longer in itertools.pairwise(used):
        assert longer < 2.2 * shorter, used
    assert used[-1] < _flax_bytes(LENGTHS[-1]) / 20


def test_the_measure_sees_a_score_matrix():
    """The reference holds one and must fail both limits, or they limit nothing."""
    attend = functools.partial(CALLS["causal"], implementation="reference")
    short, long = (_temp_bytes(attend, length) for length in LENGTHS[:2])
    assert long > 3.5 * short
    assert short > _flax_bytes(LENGTHS[0]) / 20
