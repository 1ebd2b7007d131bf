"""The MLP as the formula says, in float32 (float64 for float64 inputs): the oracle of every test.

Axis letters: M tokens, I input features, F hidden features, O output features. Written in plain jnp, so JAX
differentiates it any number of times, forward and reverse.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fast_layers.ops.mlp.activations import ACTIVATIONS
from fast_layers.ops.mlp.problem import Inputs, PreActivations, Problem, Residuals


def supports(problem: Problem, arch, pass_) -> str | None:
    return None if problem.float8 is None else "rounds nothing to 8 bits; leave float8 out"


def forward(problem: Problem, inputs: Inputs) -> tuple[Float[Array, "M O"], PreActivations]:
    """(out, what is saved). Only what leaves is rounded to the inputs' dtype."""
    p = problem
    precision = lax.Precision.HIGHEST if p.precision is None else p.precision
    wide = jax.tree.map(lambda a: a.astype(p.accumulator_dtype), inputs)

    def affine(x, w, b):
        product = jnp.matmul(x, w, precision=precision)
        return product if b is None else product + b[None]

    # With the rule for its derivative here: JAX's own overflows far out, and kernels take no function that has a rule.
    function, derivative = ACTIVATIONS[p.activation]
    activate = jax.custom_jvp(function)
    activate.defjvps(lambda d_x, _, x: d_x * derivative(x))
    up = affine(wide.x, wide.w_up, wide.b_up)
    gate = None if wide.w_gate is None else affine(wide.x, wide.w_gate, wide.b_gate)
    out = activate(up) if gate is None else activate(gate) * up
    if wide.w_down is not None:
        out = affine(out, wide.w_down, wide.b_down)
    saved = (up if p.saves_up else None, gate if p.saves_gate else None)
    return jax.tree.map(lambda a: a.astype(p.dtype), (out, saved))


def backward(problem: Problem, residuals: Residuals, d_out: Float[Array, "M O"]) -> Inputs:
    """Gradients for another backend's residuals: differentiates the formula anew."""
    _, pull = jax.vjp(lambda inputs: forward(problem, inputs)[0], residuals.inputs)
    return pull(d_out)[0]
