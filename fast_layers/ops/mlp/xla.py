"""The MLP in plain XLA: any device, shape and dtype, with the least activation memory that avoids recomputation.

Axis letters: M tokens, I input features, F hidden features, O output features.

The forward keeps the pre-activations only. JAX's own rule for the plain formula keeps, besides them, the activation,
its inner values and the product with the gate, all of them [M, F]; here the backward makes them anew from the
pre-activations, elementwise and in one fusion, next to matmuls that take far longer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fast_layers.ops.mlp.activations import ACTIVATIONS
from fast_layers.ops.mlp.float8 import scaled
from fast_layers.ops.mlp.problem import Inputs, PreActivations, Problem, Residuals


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


def forward(problem: Problem, inputs: Inputs) -> tuple[Float[Array, "M O"], PreActivations]:
    """(out [M, O], what is saved)."""
    p = problem
    up, gate = _pre_activations(p, inputs)
    out = _hidden(p, up, gate)
    if inputs.w_down is not None:
        out = _affine(p, out, inputs.w_down, inputs.b_down)
    return out, (up if p.saves_up else None, gate if p.saves_gate else None)


def backward(problem: Problem, residuals: Residuals, d_out: Float[Array, "M O"]) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    p, inputs = problem, residuals.inputs
    # Without the barriers XLA sees that the forward computed the same in the same program, and keeps that instead.
    if p.save == "inputs":
        inputs, d_out = lax.optimization_barrier((inputs, d_out))
        up, gate = _pre_activations(p, inputs)
    else:
        up, gate, d_out = lax.optimization_barrier((residuals.pre_up, residuals.pre_gate, d_out))
    d_w_down = d_b_down = None
    d_h = d_out
    if inputs.w_down is not None:
        d_h = _matmul(p, d_out, inputs.w_down, contract=(1, 1))
        d_w_down = _matmul(p, _hidden(p, up, gate), d_out, contract=(0, 0))
        d_b_down = None if inputs.b_down is None else _sum_over_tokens(p, d_out)
    d_up, d_gate = _d_pre_activations(p, up, gate, d_h)
    if (p.up_bias or p.gate_bias) and p.dtype != p.accumulator_dtype:
        # Without the barrier XLA sums the biases' gradients from float32, which it writes to memory for that.
        d_up, d_gate = lax.optimization_barrier((d_up, d_gate))
    d_x = _matmul(p, d_up, inputs.w_up, contract=(1, 1))
    d_w_gate = d_b_gate = None
    if inputs.w_gate is not None:
        assert d_gate is not None
        d_x += _matmul(p, d_gate, inputs.w_gate, contract=(1, 1))
        d_w_gate = _matmul(p, inputs.x, d_gate, contract=(0, 0))
        d_b_gate = None if inputs.b_gate is None else _sum_over_tokens(p, d_gate)
    gradients = Inputs(
        x=d_x,
        w_up=_matmul(p, inputs.x, d_up, contract=(0, 0)),
        w_gate=d_w_gate,
        w_down=d_w_down,
        b_up=None if inputs.b_up is None else _sum_over_tokens(p, d_up),
        b_gate=d_b_gate,
        b_down=d_b_down,
    )
    # XLA's GPU scheduler puts the weights' gradients off to the end of the step, and each layer's activations live
    # until then; so they leave together with x's, which the layer before waits for. Over several devices their sums
    # are to overlap with that layer's work instead.
    return lax.optimization_barrier(gradients) if _on_one_device() else gradients


def _on_one_device() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return len(jax.devices()) == 1 if mesh.empty else mesh.size == 1


def _pre_activations(p: Problem, inputs: Inputs):
    """(up, gate or None), rounded to the inputs' dtype."""
    up = _affine(p, inputs.x, inputs.w_up, inputs.b_up)
    gate = None if inputs.w_gate is None else _affine(p, inputs.x, inputs.w_gate, inputs.b_gate)
    if p.dtype == p.accumulator_dtype:
        return up, gate
    # Without the barrier XLA drops a rounding that is undone at once, and writes the products in float32: slower, and
    # not what is saved.
    return lax.optimization_barrier((up, gate))


def _hidden(p: Problem, up: Array | None, gate: Array | None) -> Float[Array, "M F"]:
    assert up is not None
    if p.activation == "identity" and gate is None:
        return up
    function = ACTIVATIONS[p.activation].function
    wide_up = up.astype(p.accumulator_dtype)
    return (function(wide_up) if gate is None else function(gate.astype(wide_up.dtype)) * wide_up).astype(p.dtype)


def _d_pre_activations(p: Problem, up: Array | None, gate: Array | None, d_h: Array) -> tuple[Array, Array | None]:
    if p.activation == "identity" and gate is None:
        return d_h, None  # before the rest, since a bare `linear` has saved no `up`
    assert up is not None
    function, derivative = ACTIVATIONS[p.activation]
    wide_up, wide_d = up.astype(p.accumulator_dtype), d_h.astype(p.accumulator_dtype)
    if gate is None:
        return (derivative(wide_up) * wide_d).astype(p.dtype), None
    wide_gate = gate.astype(p.accumulator_dtype)
    d_up, d_gate = function(wide_gate) * wide_d, derivative(wide_gate) * wide_up * wide_d
    return d_up.astype(p.dtype), d_gate.astype(p.dtype)


def _affine(p: Problem, x: Array, w: Array, b: Array | None) -> Array:
    product = _matmul(p, x, w, contract=(1, 0)) if p.float8 is None else _float8_matmul(p, x, w)
    return product if b is None else product + b[None]


def _matmul(p: Problem, a: Array, b: Array, *, contract: tuple[int, int]) -> Array:
    """In the inputs' dtype, as Flax's layers do it; the device sums 16-bit products in float32 by itself."""
    first, second = contract
    return lax.dot_general(a, b, (((first,), (second,)), ((), ())), precision=p.precision)


def _float8_matmul(p: Problem, a: Array, b: Array) -> Array:
    assert p.float8 is not None
    a8, b8 = scaled(a, p.float8), scaled(b, p.float8)
    product = lax.dot_general(a8.values, b8.values, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return (product * (a8.scale * b8.scale)).astype(p.dtype)


def _sum_over_tokens(p: Problem, x: Float[Array, "M F"]) -> Float[Array, " F"]:
    return x.sum(0, dtype=p.accumulator_dtype).astype(p.dtype)
