"""Rotary embedding against Flax's, and Llama 3's scaling against its definition."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fast_layers import FlashMHA, Llama3Scaling, Rope


def rotate(x, positions, frequencies):
    """x [T, N, H] in float64: complex numbers made of features f and f + H / 2, turned by position * frequency."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.multiply.outer(positions, frequencies))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def llama3_frequencies(depth, theta, scaling):
    found = []
    for f in range(depth // 2):
        frequency = theta ** (-2 * f / depth)
        wavelength = 2 * math.pi / frequency
        longest_kept = scaling.original_max_position / scaling.high_freq_factor
        shortest_stretched = scaling.original_max_position / scaling.low_freq_factor
        if wavelength < longest_kept:
            found.append(frequency)
        elif wavelength > shortest_stretched:
            found.append(frequency / scaling.factor)
        else:
            smooth = scaling.original_max_position / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            found.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return np.array(found)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("scaling", [None, Llama3Scaling(), Llama3Scaling(32.0, 1.0, 4.0, 64)], ids=str)
def test_against_the_definition(theta, scaling):
    x = np.random.default_rng(0).standard_normal((2, 12, 3, 64))
    positions = np.array([0, 1, 2, 3, 50, 51, 1000, 4095, 8191, 8192, 20_000, 100_000])
    plain = theta ** (-np.arange(0, 64, 2) / 64)
    frequencies = plain if scaling is None else llama3_frequencies(64, theta, scaling)
    want = np.stack([rotate(row, positions, frequencies) for row in x])
    got = Rope(theta, scaling).apply(jnp.asarray(x, jnp.float32), positions)
    # An angle of 1e5 radians has steps of 0.004 in float32.
    np.testing.assert_allclose(got, want, atol=0.02)
    np.testing.assert_allclose(got[:, :4], want[:, :4], atol=2e-6)
    with jax.enable_x64(True):
        np.testing.assert_allclose(Rope(theta, scaling).apply(jnp.asarray(x), positions), want, atol=1e-9)


def test_equals_flax():
    x = jax.random.normal(jax.random.key(0), (2, 10, 3, 16))
    want = jax.vmap(nnx.RoPE(theta=500.0), in_axes=-2, out_axes=-2)(x)
    np.testing.assert_allclose(Rope(500.0).apply(x, jnp.arange(10)), want, rtol=1e-5, atol=1e-6)


def test_layer_equals_flax_layer_with_rope():
    import functools

    x = jax.random.normal(jax.random.key(0), (2, 10, 16))
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    theirs = nnx.MultiHeadAttention(2, 16, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
    ours = FlashMHA(2, 16, rope=Rope(), decode=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(ours(x, is_causal=True), theirs(x, is_causal=True), rtol=1e-5, atol=1e-6)
    # Flax's function as attention_fn of our layer is called as Flax calls it.
    adopted = FlashMHA(2, 16, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(adopted(x, is_causal=True), theirs(x, is_causal=True))


def test_positions():
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    layer = FlashMHA(2, 16, rope=Rope(), decode=False, rngs=nnx.Rngs(0))
    plain = layer(x)
    # Only differences of positions count.
    np.testing.assert_allclose(layer(x, input_positions=jnp.arange(6) + 100), plain, atol=1e-4)
    np.testing.assert_allclose(layer(x, input_positions=jnp.tile(jnp.arange(6), (2, 1))), plain, atol=1e-6)
    packed = jnp.array([[0, 1, 2, 0, 1, 2]] * 2)
    segments = jnp.array([[0, 0, 0, 1, 1, 1]] * 2)
    both = layer(x, input_positions=packed, segment_ids=segments)
    np.testing.assert_allclose(both[:, 3:], layer(x[:, 3:]), atol=1e-6)
    # Cross attention: keys count from 0 too, or are told.
    keys = jax.random.normal(jax.random.key(1), (2, 9, 16))
    cross = layer(x, keys)
    np.testing.assert_allclose(layer(x, keys, input_positions=(jnp.arange(6), jnp.arange(9))), cross, atol=1e-6)
    with pytest.raises(ValueError, match="must be a pair"):
        layer(x, keys, input_positions=jnp.arange(6))
    with pytest.raises(ValueError, match=r"positions must have shape \(2, 6\) or \(6,\), got \(1, 6\)"):
        layer(x, input_positions=jnp.arange(6)[None])
    with pytest.raises(ValueError, match="set rope="):
        FlashMHA(2, 16, decode=False, rngs=nnx.Rngs(0))(x, input_positions=jnp.arange(6))


def test_keeps_the_dtype():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert Rope().apply(jnp.ones((5, 1, 4), dtype), jnp.arange(5)).dtype == dtype


def test_numbers_of_numpy():
    for theta in (np.float32(10_000), np.int64(10_000)):
        np.testing.assert_array_equal(Rope(theta=theta).frequencies(8), Rope(theta=10_000.0).frequencies(8))
    assert Llama3Scaling(original_max_position=np.int64(8192)) == Llama3Scaling(original_max_position=8192)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Rope(theta=True), "theta=True: must be a finite number > 0"),
        (lambda: Rope(theta=-1.0), "theta=-1.0: must be a finite number > 0"),
        (lambda: Rope(scaling="llama3"), "must be None or a fast_layers.Llama3Scaling"),
        (lambda: Llama3Scaling(factor=0), "factor=0: must be a finite number > 0"),
        (lambda: Llama3Scaling(low_freq_factor=4.0), "must be less than"),
        (lambda: FlashMHA(2, 6, rope=Rope(), rngs=nnx.Rngs(0)), "head depth 3: must be even"),
        (lambda: FlashMHA(2, 8, rope=10_000.0, rngs=nnx.Rngs(0)), "must be None or a fast_layers.Rope"),
    ],
)
def test_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()
