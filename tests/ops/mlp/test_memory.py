"""What a training step keeps of an MLP between forward and backward; nothing is run."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fast_layers
from ops.mlp.cases import TESTED

TOKENS, WIDTH, HIDDEN = 16_384, 4096, 11_008  # SwiGLU of 8/3 the width, rounded to 128


class HandWritten(nnx.Module):
    """SwiGLU as Flax users write it."""

    def __init__(self, dtype, rngs):
        self.gate, self.up = (nnx.Linear(WIDTH, HIDDEN, use_bias=False, dtype=dtype, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def _ours(dtype, rngs, **options):
    options = {"activation": "silu", "gated": True, "use_bias": False, "dtype": dtype, "rngs": rngs, **options}
    return fast_layers.FusedMLP(WIDTH, HIDDEN, **options)


def _abstract(make, dtype):
    model = nnx.eval_shape(lambda: make(dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    return graph, state, jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype)


def _kept_bytes(make, dtype=jnp.bfloat16) -> int:
    """Of all residuals of `jax.vjp` that belong to tokens: parameters stay anyway, in whatever dtype."""
    graph, state, x = _abstract(make, dtype)
    pull = jax.eval_shape(lambda state, x: jax.vjp(lambda *a: nnx.merge(graph, a[0])(a[1]), state, x)[1], state, x)
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(pull) if a.shape[:1] == (TOKENS,))


def _compiled_bytes(make) -> int:
    """Activations that the compiled forward hands to the backward, by the compiler's account, after XLA's cleverness.

    In float32: for the CPU, XLA widens 16-bit matmuls and would count that too.
    """
    graph, state, x = _abstract(make, jnp.float32)

    def forward(state, x):
        out, pull = jax.vjp(lambda *a: nnx.merge(graph, a[0])(a[1]), state, x)
        return out, [a for a in jax.tree.leaves(pull) if a.shape[:1] == (TOKENS,)]

    analysis = jax.jit(forward).lower(state, x).compile().memory_analysis()
    return analysis.output_size_in_bytes - analysis.alias_size_in_bytes - TOKENS * WIDTH * 4


@pytest.mark.parametrize("implementation", TESTED)
def test_two_thirds_of_flax_at_most(implementation):
    def make(dtype, rngs):
        return _ours(dtype, rngs, implementation=implementation)

    theirs, ours = _kept_bytes(HandWritten), _kept_bytes(make)
    assert ours <= 2 / 3 * theirs, (ours, theirs)
    assert ours == TOKENS * (WIDTH + 2 * HIDDEN) * 2
    theirs, ours = _compiled_bytes(HandWritten), _compiled_bytes(make)
    assert ours <= 2 / 3 * theirs, (ours, theirs)


@pytest.mark.parametrize("implementation", TESTED)
def test_a_whole_step_keeps_less_too(implementation):
    """Of four layers one after the other. XLA by itself makes the plain code's activation anew, but keeps its product
    with the gate: three arrays [M, F] per layer.
    """
    tokens, width, hidden = 1024, 64, 512

    def plain(x, w_gate, w_up, w_down):
        return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down

    def ours(x, w_gate, w_up, w_down):
        options = {"activation": "silu", "implementation": implementation}
        return fast_layers.mlp(x, w_up, w_down, w_gate=w_gate, **options)

    def temp_bytes(mlp):
        def loss(x, layers):
            for layer in layers:
                x = x + mlp(x, *layer)
            return (x**2).sum()

        x, up, down = (
            jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, width), (width, hidden), (hidden, width))
        )
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, [(up, up, down)] * 4).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(ours) < 0.85 * temp_bytes(plain)


@pytest.mark.parametrize("implementation", TESTED)
def test_saving_inputs_only(implementation):
    def make(dtype, rngs):
        return _ours(dtype, rngs, implementation=implementation, save="inputs")

    assert _kept_bytes(make) == TOKENS * WIDTH * 2


def test_a_bare_linear_keeps_its_input_only():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((TOKENS, WIDTH), (WIDTH, HIDDEN)))
    pull = jax.eval_shape(lambda x, w: jax.vjp(fast_layers.linear, x, w)[1], x, w)
    assert sum(math.prod(a.shape) for a in jax.tree.leaves(pull)) == TOKENS * WIDTH + WIDTH * HIDDEN


@pytest.mark.parametrize("implementation", TESTED)
def test_recomputing_is_not_optimised_away(implementation):
    """XLA must not notice that the backward's pre-activations are the forward's, and keep those: a whole step."""

    def matmuls(save):
        def loss(x, *weights):
            out = fast_layers.mlp(x, *weights, activation="silu", save=save, implementation=implementation)
            return (out**2).sum()

        shapes = ((64, 32), (32, 96), (96, 32))
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile().as_text()
        return sum("op_name=" in line and "dot_general" in line and " dot(" in line for line in text.splitlines())

    assert matmuls("inputs") == matmuls("pre_activation") + 1 == 7
