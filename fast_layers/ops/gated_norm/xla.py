"""The gated norm in plain XLA, with a backward pass that computes everything again from the inputs.

Differentiated by JAX, the formula would keep the gate, the gated row and the normalised row, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fast_layers.ops.gated_norm.problem import Inputs, Problem


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


class _Parts(NamedTuple):
    gate: Float[Array, "*rows F"]
    normalised: Float[Array, "*rows F"]
    inverse_rms: Float[Array, "*rows groups 1"]


def forward(problem: Problem, inputs: Inputs, axes: tuple[str, ...] = ()) -> Float[Array, "*rows F"]:
    """With `axes` of a mesh, the features are a device's own of a group that is spread over these."""
    parts = _parts(problem, inputs, axes)
    out = parts.normalised * inputs.weight.astype(problem.accumulator_dtype)
    return (out * parts.gate if problem.norm_before_gate else out).astype(problem.dtype)


def backward(problem: Problem, inputs: Inputs, d_out: Float[Array, "*rows F"], axes: tuple[str, ...] = ()) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes; `axes` as in `forward`."""
    p = problem
    y, z, weight = (x.astype(p.accumulator_dtype) for x in inputs)
    gate, normalised, inverse_rms = _parts(p, inputs, axes)
    d_out = d_out.astype(p.accumulator_dtype)
    d_scaled = d_out * gate if p.norm_before_gate else d_out
    d_normalised = _groups(p, d_scaled * weight)
    groups = _groups(p, normalised)
    # The normalised row has length 1, so the gradient loses its part along the row.
    along = _mean(d_normalised * groups, axes)
    d_row = ((d_normalised - groups * along) * inverse_rms).reshape(y.shape)
    d_gate = d_out * normalised * weight if p.norm_before_gate else d_row * y
    squashed = jax.nn.sigmoid(z)
    return Inputs(
        y=(d_row if p.norm_before_gate else d_row * gate).astype(inputs.y.dtype),
        z=(d_gate * squashed * (1 + z * (1 - squashed))).astype(inputs.z.dtype),
        weight=(d_scaled * normalised).sum(range(y.ndim - 1)).astype(inputs.weight.dtype),
    )


def _parts(p: Problem, inputs: Inputs, axes: tuple[str, ...]) -> _Parts:
    y, z = (x.astype(p.accumulator_dtype) for x in inputs[:2])
    gate = jax.nn.silu(z)
    groups = _groups(p, y if p.norm_before_gate else y * gate)
    inverse_rms = lax.rsqrt(_mean(jnp.square(groups), axes) + p.eps)
    return _Parts(gate, (groups * inverse_rms).reshape(y.shape), inverse_rms)


def _mean(x: Float[Array, "*rows groups size"], axes: tuple[str, ...]) -> Float[Array, "*rows groups 1"]:
    mean = x.mean(-1, keepdims=True)
    return lax.pmean(mean, axes) if axes else mean


def _groups(p: Problem, x: Float[Array, "*rows F"]) -> Float[Array, "*rows groups size"]:
    return x.reshape(*x.shape[:-1], p.features // p.group_size, p.group_size)
