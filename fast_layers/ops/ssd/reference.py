"""The recurrence, token by token in float32: the oracle of every test.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        y_t = (h_t C_t + D x_t) silu(z_t)

Written in plain jnp, so JAX differentiates it any number of times, forward and reverse. Axis letters as in `problem`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fast_layers.kernel_parts.manual_axes import vary_over, varying_axes
from fast_layers.ops.ssd.problem import Aux, Inputs, Problem, Residuals, Scanned, silu, step_sizes
from fast_layers.ops.ssd.step import Token, advance, read


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


def forward(problem: Problem, inputs: Inputs, aux: Aux) -> Scanned:
    p, dtype = problem, problem.accumulator_dtype
    x, B, C = (v.astype(dtype) for v in (inputs.x, inputs.B, inputs.C))
    dt = step_sizes(inputs.dt, inputs.dt_bias, softplus=p.dt_softplus, limit=p.dt_limit, dtype=dtype)
    if inputs.initial_state is None:
        state = jnp.zeros((p.batch, p.heads, p.head_dim, p.state_dim), dtype)
    else:
        state = inputs.initial_state.astype(dtype)
    state = vary_over(state, varying_axes(x))
    starts = None
    if aux.document is not None:
        starts = jnp.pad(aux.document[:, 1:] != aux.document[:, :-1], ((0, 0), (1, 0))).swapaxes(0, 1)

    def step(state, operands):
        token, start = operands
        entering = state if start is None else jnp.where(start[:, None, None, None], 0, state)
        state = advance(entering, jnp.exp(token.dt * inputs.A.astype(dtype)), token)
        return state, read(state, token)

    tokens = Token(*(v.swapaxes(0, 1) for v in (x, dt, B, C)))
    final, out = lax.scan(step, state, (tokens, starts))
    out = out.swapaxes(0, 1)
    if inputs.D is not None:
        skip = inputs.D.astype(dtype)
        out = out + (skip[:, None] if skip.ndim == 1 else skip) * x
    if inputs.z is not None:
        out = out * silu(inputs.z.astype(dtype))
    return Scanned(out.astype(p.dtype), final)


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_final_state: Array) -> Inputs:
    """Gradients for another backend's residuals: differentiates the recurrence anew."""
    _, pull = jax.vjp(lambda inputs: forward(problem, inputs, residuals.aux), residuals.inputs)
    return pull(Scanned(d_out, d_final_state))[0]
