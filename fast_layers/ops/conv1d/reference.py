"""The convolution as the formula says, in float32 and with all windows written out: the oracle of every test.

Axis letters: B examples, L positions, C channels, W taps. Written in plain jnp, so JAX differentiates it any number
of times, forward and reverse.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fast_layers.ops.conv1d.activations import ACTIVATIONS
from fast_layers.ops.conv1d.history import final_state, with_history
from fast_layers.ops.conv1d.problem import Aux, Inputs, Outputs, Problem


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


def forward(problem: Problem, inputs: Inputs, aux: Aux) -> Outputs:
    p = problem
    row = with_history(p, inputs)
    positions = jnp.arange(p.length)[:, None] + jnp.arange(p.width)
    windows = row[:, positions].astype(p.accumulator_dtype)  # [B, L, W, C], oldest first
    if aux.reach is not None:
        visible = aux.reach[..., None] >= jnp.arange(p.history, -1, -1)
        windows = jnp.where(visible[..., None], windows, 0)
    w = inputs.w.astype(p.accumulator_dtype)
    y = jnp.einsum("blwc,wc->blc", windows, w, precision=lax.Precision.HIGHEST)
    if inputs.b is not None:
        y += inputs.b.astype(p.accumulator_dtype)
    activate, _ = ACTIVATIONS[p.activation]
    state = final_state(p, inputs, aux, row) if p.final_state else None
    return Outputs(activate(y).astype(p.dtype), state)


def backward(problem: Problem, inputs: Inputs, aux: Aux, gradients: Outputs) -> Inputs:
    """For another backend's forward: differentiates the formula anew."""
    _, pull = jax.vjp(lambda inputs: forward(problem, inputs, aux), inputs)
    return pull(gradients)[0]
