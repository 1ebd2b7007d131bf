"""The convolution in plain XLA: a sum of W shifted products, which XLA fuses into one pass over x.

Axis letters: B examples, L positions, C channels, W taps.

XLA's own grouped convolution is no match: on CPU and GPU it is several times slower for one channel per group. The
backward computes the sum again, so that x is all that lives until then.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from fast_layers.ops.conv1d.activations import ACTIVATIONS
from fast_layers.ops.conv1d.history import final_state, hide_other_documents, with_history
from fast_layers.ops.conv1d.problem import Aux, Inputs, Outputs, Problem


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


def forward(problem: Problem, inputs: Inputs, aux: Aux) -> Outputs:
    row = with_history(problem, inputs)
    activate, _ = ACTIVATIONS[problem.activation]
    y = activate(_convolve(problem, inputs, aux, row)).astype(problem.dtype)
    return Outputs(y, final_state(problem, inputs, aux, row) if problem.final_state else None)


def backward(problem: Problem, inputs: Inputs, aux: Aux, gradients: Outputs) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    p = problem
    row = with_history(p, inputs)
    _, derivative = ACTIVATIONS[p.activation]
    d_sum = gradients.y.astype(p.accumulator_dtype) * derivative(_convolve(p, inputs, aux, row))

    d_row = jnp.zeros((p.batch, p.history + p.length, p.channels), p.accumulator_dtype)
    d_w = []
    for i in range(p.width):
        d_w.append((d_sum * _tap(p, aux, row, i)).sum((0, 1)))
        d_tap = _hide(p, aux, d_sum * inputs.w[i].astype(p.accumulator_dtype), i)
        d_row += jnp.pad(d_tap, ((0, 0), (i, p.history - i), (0, 0)))
    if gradients.final_state is not None:
        d_state = gradients.final_state.swapaxes(1, 2).astype(p.accumulator_dtype)
        d_row += jnp.pad(hide_other_documents(p, aux, d_state), ((0, 0), (p.length, 0), (0, 0)))

    b, state = inputs.b, inputs.initial_state
    return Inputs(
        x=d_row[:, p.history :].astype(p.dtype),
        w=jnp.stack(d_w).astype(inputs.w.dtype),
        b=None if b is None else d_sum.sum((0, 1)).astype(b.dtype),
        initial_state=None if state is None else d_row[:, : p.history].swapaxes(1, 2).astype(state.dtype),
    )


def _convolve(p: Problem, inputs: Inputs, aux: Aux, row: Float[Array, "B W-1+L C"]) -> Float[Array, "B L C"]:
    """The sum before the activation, in the accumulator's dtype."""
    taps = [_tap(p, aux, row, i) * inputs.w[i].astype(p.accumulator_dtype) for i in range(p.width)]
    total = functools.reduce(jnp.add, taps)
    return total if inputs.b is None else total + inputs.b.astype(p.accumulator_dtype)


def _tap(p: Problem, aux: Aux, row: Float[Array, "B W-1+L C"], i: int) -> Float[Array, "B L C"]:
    """What tap i, the oldest being 0, multiplies at each position."""
    return _hide(p, aux, row[:, i : i + p.length].astype(p.accumulator_dtype), i)


def _hide(p: Problem, aux: Aux, x: Float[Array, "B L C"], i: int) -> Float[Array, "B L C"]:
    """0 where tap i would look into another document; replaced, not multiplied, since that may hold NaN."""
    return x if aux.reach is None else jnp.where((aux.reach >= p.history - i)[..., None], x, 0)
