"""The gated norm as the formula says, in float32: the oracle of every test. JAX differentiates it to any order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fast_layers.ops.gated_norm.problem import Inputs, Problem


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


def forward(problem: Problem, inputs: Inputs) -> Float[Array, "*rows F"]:
    y, z, weight = (x.astype(problem.accumulator_dtype) for x in inputs)

    def normalise(x):
        groups = x.reshape(*problem.rows, problem.features // problem.group_size, problem.group_size)
        mean_square = jnp.square(groups).mean(-1, keepdims=True)
        return (groups / jnp.sqrt(mean_square + problem.eps)).reshape(x.shape) * weight

    gate = jax.nn.silu(z)
    out = normalise(y) * gate if problem.norm_before_gate else normalise(y * gate)
    return out.astype(problem.dtype)


def backward(problem: Problem, inputs: Inputs, d_out: Float[Array, "*rows F"]) -> Inputs:
    """For another backend's forward: differentiates the formula anew."""
    _, pull = jax.vjp(lambda inputs: forward(problem, inputs), inputs)
    return pull(d_out)[0]
