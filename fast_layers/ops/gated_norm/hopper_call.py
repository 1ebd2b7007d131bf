"""The Hopper backend of the gated norm: what it takes. Pallas is imported when a kernel is chosen.

No GPU has run these kernels yet, so the backend is taken only by name.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from fast_layers.arch import Arch
from fast_layers.kernel_parts import automatic_axes
from fast_layers.ops.gated_norm.config import LEGAL_GROUPS, HopperTiles
from fast_layers.ops.gated_norm.problem import Inputs, Problem

MOST_NUMBERS = 2**31 - 1
"""In one array: the kernels' offsets have 32 bits."""


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    del pass_  # what one takes, so does the other
    p = problem
    if arch.capability is None or arch.platform != "cuda":
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), got {arch}"
    if arch.capability != (9, 0):
        return f"needs compute capability 9.0 (H100, H200), got {arch.capability[0]}.{arch.capability[1]}"
    if automatic_axes.may_be_partitioned():
        return automatic_axes.WAY_OUT
    if automatic_axes.explicit_in_sight():
        return "has no rule for explicit mesh axes: call inside jax.shard_map"
    if p.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes bfloat16, float16 and float32, got {p.dtype}; cast y and z"
    if not all(isinstance(size, int) for size in p.rows):
        symbolic = ", ".join(str(size) for size in p.rows if not isinstance(size, int))
        return f"needs sizes known when tracing, got symbolic {symbolic}"
    if 0 in p.rows:
        return f"needs rows, got y {[*p.rows, p.features]}"
    if HopperTiles.of(p.group_size) is None:
        return f"takes groups of {LEGAL_GROUPS} features, got {p.group_size}"
    if math.prod(p.rows) * p.features > MOST_NUMBERS:
        return f"takes up to {MOST_NUMBERS} numbers, got y {[*p.rows, p.features]}; split the rows"
    return None


def forward(problem: Problem, inputs: Inputs) -> Float[Array, "*rows F"]:
    from fast_layers.ops.gated_norm import hopper_norm

    return hopper_norm.forward(problem, inputs)


def backward(problem: Problem, inputs: Inputs, d_out: Float[Array, "*rows F"]) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.gated_norm import hopper_norm

    return hopper_norm.backward(problem, inputs, d_out)
