"""Derivatives of gradients: kernels have none, and say so; of plain code there are those that JAX finds."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close_over_draws

import fast_layers
from fast_layers import dispatch
from ops.kernel_calls import KERNELS, operands_of


def _curvature(loss):
    """Of a Hessian, the product with a direction."""
    return lambda x, direction: jax.jvp(jax.grad(loss), (x,), (direction,))[1]


def _slope_of_gradient(loss):
    return lambda x: jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x)


@pytest.mark.parametrize("name", KERNELS)
def test_those_of_kernels_are_refused(name, monkeypatch):
    call, arch, shapes = KERNELS[name]
    monkeypatch.setattr(dispatch, "lowering_targets", lambda: (arch,))
    x, *weights = operands_of(shapes)

    def loss(x, *weights):
        return call(x, *weights).astype(jnp.float32).sum()

    assert jax.eval_shape(jax.grad(loss), x, *weights).shape == x.shape
    again = r"(hopper|blackwell) is differentiated once, in reverse mode; .* Take implementation=\"reference\""
    with pytest.raises(ValueError, match=again):
        jax.eval_shape(_slope_of_gradient(lambda x: loss(x, *map(jnp.zeros_like, weights))), x)
    with pytest.raises(ValueError, match=again):
        jax.eval_shape(_curvature(lambda x: loss(x, *map(jnp.zeros_like, weights))), x, x)


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit, jax.checkpoint, jax.vmap])
def test_reverse_mode_of_the_gradient_of_attention_by_xla_is_refused(transform):
    def slope(x):
        gradient = jax.grad(lambda x: (_attention(x, implementation="xla") ** 2).sum())
        return (transform(gradient)(x[None] if transform is jax.vmap else x) ** 2).sum()

    x = np.ones((2, 24, 16), np.float32)
    again = r"attention: xla is differentiated once in reverse mode; .* Take implementation=\"reference\" for any order"
    with pytest.raises(ValueError, match=again):
        jax.grad(slope)(x)


def test_hessian_of_attention_by_xla():
    """In directions, which `vmap` takes all at once."""

    @functools.partial(jax.jit, static_argnums=0)
    def hessian(implementation, x):
        def loss(x):
            return (
                fast_layers.dot_product_attention(x, x, x, is_causal=True, implementation=implementation) ** 2
            ).sum()

        return jax.hessian(loss)(x)

    def make(draw):
        x = np.random.default_rng(draw).normal(size=(6, 2, 4)).astype(np.float32)
        with jax.enable_x64(True):
            wide = jax.device_get(hessian("reference", x.astype(np.float64)))
        return hessian("xla", x), wide, hessian("reference", x)

    assert_close_over_draws(make)


@pytest.mark.parametrize("op", ["attention", "mlp", "ssd", "conv1d", "gated_norm"])
def test_all_but_plain_code_is_said_to_be_a_kernel(op):
    backends = importlib.import_module(f"fast_layers.ops.{op}.backends").BACKENDS
    assert all(backend.is_kernel == (backend.name not in ("xla", "reference")) for backend in backends)


def _attention(x, **name):
    heads = x.reshape(2, 24, 2, 8)
    return fast_layers.dot_product_attention(heads, heads, heads, is_causal=True, **name)


def _gated_mlp(x, w_up, w_down, w_gate, **name):
    return fast_layers.mlp(x, w_up, w_down, w_gate=8 * w_gate, activation="silu", **name)


def _ssd(x, rates, **name):
    heads = x.reshape(2, 24, 2, 8)
    steps = jax.nn.softplus(heads[..., 0])
    return fast_layers.ssd(heads, steps, -jnp.exp(rates), heads[:, :, :1], heads[:, :, 1:], **name)


# Of x [2, 24, 16] and weights of these shapes, so large that activations saturate.
PLAIN = {
    "attention": (_attention, ()),
    "mlp": (lambda x, w_up, w_down, **name: fast_layers.mlp(x, 8 * w_up, w_down, **name), ((16, 32), (32, 16))),
    "gated mlp": (_gated_mlp, ((16, 32), (32, 16), (16, 32))),
    "linear": (lambda x, w, **name: fast_layers.linear(x, 8 * w, activation="sigmoid", **name), ((16, 32),)),
    "ssd": (_ssd, ((2,),)),
    "conv": (lambda x, w, **name: fast_layers.causal_conv1d(x, 8 * w, activation="silu", **name), ((4, 16),)),
    "norm": (lambda x, w, **name: fast_layers.gated_rms_norm(x, 8 * x, w, **name), ((16,),)),
}


@pytest.mark.parametrize("op", PLAIN)
def test_those_of_plain_code(op):
    """A Hessian times a direction, and, but for the loops of attention, times the gradient, in reverse mode."""
    call, shapes = PLAIN[op]

    @functools.partial(jax.jit, static_argnums=0)
    def of(implementation, x, direction, *weights):
        def loss(x):
            return (call(x, *weights, implementation=implementation) ** 2).sum()

        return _curvature(loss)(x, direction), None if op == "attention" else _slope_of_gradient(loss)(x)

    def make(draw):
        rng = np.random.default_rng(draw)
        operands = [rng.normal(size=shape).astype(np.float32) for shape in ((2, 24, 16), (2, 24, 16), *shapes)]
        with jax.enable_x64(True):
            wide = jax.device_get(of("reference", *(x.astype(np.float64) for x in operands)))
        return of("xla", *operands), wide, of("reference", *operands)

    assert_close_over_draws(make)
