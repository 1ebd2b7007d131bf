"""`float8`: the forward's operands rounded to 8 bits, each with a scale of its own; gradients as if they were not."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fast_layers
from fast_layers.dispatch import PASSES
from fast_layers.ops.mlp.activations import ACTIVATIONS
from fast_layers.ops.mlp.backends import BACKENDS
from fast_layers.ops.mlp.float8 import FORMATS, scaled
from fast_layers.testing.closeness import assert_trees_close
from ops.mlp.test_hopper_choice import H200, PROBLEM

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def _normal(*shape, seed=0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _rounded(x, float8):
    """By the definition, in numpy."""
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / float(ml_dtypes.finfo(DTYPES[float8]).max)))
    return (x / scale).astype(DTYPES[float8]).astype(np.float64) * scale


@pytest.mark.parametrize("float8", FORMATS)
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_scales_are_powers_of_two_that_just_suffice(float8, size):
    x = _normal(7, 33) * size
    values, scale = scaled(x, float8)
    np.testing.assert_array_equal(np.asarray(values, np.float64) * float(scale), _rounded(x, float8))
    largest = float(jnp.finfo(values.dtype).max)
    exact = scaled(jnp.asarray([largest * 4, -1.0], jnp.float32), float8)
    assert float(exact.scale) == 4.0
    assert float(exact.values[0]) == largest


@pytest.mark.parametrize("x", [0.0, np.inf, np.nan])
def test_0_inf_and_nan_stay_what_they_are(x):
    w = jnp.ones((8, 8), jnp.bfloat16)
    out = np.asarray(fast_layers.linear(jnp.full((2, 8), x, jnp.bfloat16), w, float8="e5m2"), np.float32)
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("float8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("broken", [np.inf, np.nan])
def test_a_broken_row_leaves_the_others_as_they_are(float8, broken):
    x, w = _normal(4, 16) * 1000, _normal(16, 8, seed=1)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        out, fine = (fast_layers.linear(x.at[3].set(filling), w, float8=float8) for filling in (broken, 0))
    assert np.isfinite(np.asarray(fine, np.float32)).all()
    np.testing.assert_array_equal(out[:3], fine[:3])
    assert not np.isfinite(np.asarray(out[3], np.float32)).any()


@pytest.mark.parametrize(("float8", "gated"), [("e4m3", False), ("e4m3", True), ("e5m2", True)])
def test_products_are_those_of_rounded_operands(float8, gated):
    x, w, b = _normal(5, 7, 48), _normal(48, 24, seed=1), _normal(24, seed=2)
    gate = _normal(48, 24, seed=3) if gated else None

    def formula(round_to, multiply, wide):
        up = multiply(_rounded(x, float8), _rounded(w, float8)) + np.asarray(b, wide)
        if gate is None:
            return up
        return round_to(multiply(_rounded(x, float8), _rounded(gate, float8))) * round_to(up)

    def narrow(a, b):
        return np.matmul(a.astype(np.float32), b.astype(np.float32))

    plain = formula(lambda x: x.astype(jnp.bfloat16), narrow, np.float32)
    oracle = formula(lambda x: x, np.matmul, np.float64)
    got = fast_layers.linear(x, w, b, gate=gate, float8=float8)
    assert got.dtype == jnp.bfloat16
    assert_trees_close(got, jnp.asarray(oracle, jnp.float32), jnp.asarray(plain, jnp.bfloat16))
    unrounded = fast_layers.linear(x, w, b, gate=gate)
    assert np.abs(np.asarray(got - unrounded, np.float32)).max() > 0.02


def test_h_is_rounded_too():
    x, up, down = _normal(9, 32, dtype=jnp.float32), _normal(32, 64, seed=1, dtype=jnp.float32), _normal(64, 16, seed=2)
    down = down.astype(jnp.float32)
    got = jax.jit(lambda *args: fast_layers.mlp(*args, activation="silu", float8="e4m3"))(x, up, down)
    h = jax.jit(lambda *args: fast_layers.linear(*args, activation="silu", float8="e4m3"))(x, up)
    np.testing.assert_allclose(got, fast_layers.linear(h, down, float8="e4m3"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save", ["pre_activation", "inputs"])
def test_gradients_are_those_of_operands_that_were_not_rounded(save):
    """But for the pre-activation, which is the forward's."""
    x, w, d_out = (_normal(*s, seed=i, dtype=jnp.float32) for i, s in enumerate([(9, 32), (32, 16), (9, 16)]))

    @jax.jit
    def call(x, w, d_out):
        _, pull = jax.vjp(lambda x, w: fast_layers.linear(x, w, activation="silu", save=save, float8="e4m3"), x, w)
        return pull(d_out)

    d_pre = ACTIVATIONS["silu"].derivative(fast_layers.linear(x, w, float8="e4m3")) * d_out
    wanted = d_pre @ w.T, x.T @ d_pre
    for got, want in zip(call(x, w, d_out), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_under_vmap_each_example_has_its_own_scale():
    x = jnp.stack([_normal(4, 16), 300 * _normal(4, 16, seed=1)])
    w = _normal(16, 8, seed=2)

    def call(x):
        return fast_layers.linear(x, w, float8="e4m3")

    np.testing.assert_array_equal(jax.vmap(call)(x), jnp.stack([call(x[0]), call(x[1])]))


def test_refusals():
    x = jnp.ones((8, 8), jnp.float32)
    with pytest.raises(ValueError, match="float8='e3m4': must be 'e4m3' or 'e5m2', or None"):
        fast_layers.linear(x, x, float8="e3m4")  # pyright: ignore[reportArgumentType]
    with jax.enable_x64(True), pytest.raises(ValueError, match="products are summed in float32, got float64"):
        fast_layers.linear(jnp.ones((8, 8), jnp.float64), jnp.ones((8, 8), jnp.float64), float8="e4m3")
    with pytest.raises(ValueError, match="rounds nothing to 8 bits; leave float8 out"):
        fast_layers.linear(x, x, float8="e4m3", implementation="reference")
    problem = dataclasses.replace(PROBLEM, float8="e4m3")
    (hopper,) = (backend for backend in BACKENDS if backend.name == "hopper")
    assert {hopper.supports(problem, H200, pass_) for pass_ in PASSES} == {"takes no float8; leave it out"}


def test_explain_says_so():
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    assert "e4m3 forward" in str(fast_layers.explain(lambda x: fast_layers.linear(x, x, float8="e4m3"), x))
