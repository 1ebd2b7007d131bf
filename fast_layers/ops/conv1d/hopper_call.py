"""The Hopper backend of the convolution: what it takes. Pallas is imported when a kernel is chosen.

No GPU has run these kernels yet, so the backend is taken only by name.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from fast_layers.arch import Arch
from fast_layers.kernel_parts import automatic_axes
from fast_layers.ops.conv1d.config import THREADS, WIDTHS
from fast_layers.ops.conv1d.problem import Aux, Inputs, Outputs, Problem

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
        return f"takes bfloat16, float16 and float32, got {p.dtype}; cast x"
    sizes = (p.batch, p.length, p.channels)
    if not all(isinstance(size, int) for size in sizes):
        symbolic = ", ".join(str(size) for size in sizes if not isinstance(size, int))
        return f"needs sizes known when tracing, got symbolic {symbolic}"
    if p.width not in WIDTHS:
        return f"takes {WIDTHS[0]} to {WIDTHS[-1]} taps, got {p.width}"
    if p.channels % THREADS:
        return f"takes channels in multiples of {THREADS}, one for each thread, got {p.channels}"
    if math.prod(sizes) > MOST_NUMBERS:
        return f"takes up to {MOST_NUMBERS} numbers, got x {list(sizes)}; split the batch"
    return None


def forward(problem: Problem, inputs: Inputs, aux: Aux) -> Outputs:
    from fast_layers.ops.conv1d import hopper_conv

    return hopper_conv.forward(problem, inputs, aux)


def backward(problem: Problem, inputs: Inputs, aux: Aux, gradients: Outputs) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.conv1d import hopper_conv

    return hopper_conv.backward(problem, inputs, aux, gradients)
