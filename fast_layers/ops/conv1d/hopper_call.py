"""The Hopper backend of the convolution: what it takes. Pallas is imported when a kernel is chosen."""

from __future__ import annotations

import math

import jax.numpy as jnp

from fast_layers.arch import Arch
from fast_layers.dispatch import Pass
from fast_layers.kernel_parts import automatic_axes, refusals
from fast_layers.ops.conv1d.config import THREADS, WIDTHS
from fast_layers.ops.conv1d.problem import Aux, Inputs, Outputs, Problem


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    del pass_  # what one takes, so does the other
    p = problem
    if reason := refusals.not_hopper(arch):
        return reason
    if reason := automatic_axes.refusal():
        return reason
    if p.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes bfloat16, float16 and float32, got {p.dtype}; cast x"
    sizes = (p.batch, p.length, p.channels)
    if reason := refusals.symbolic(sizes):
        return reason
    if p.batch == 0:
        return f"needs examples, got x {list(sizes)}"
    if p.width not in WIDTHS:
        return f"takes {WIDTHS[0]} to {WIDTHS[-1]} taps, got {p.width}"
    if p.channels % THREADS:
        return f"takes channels in multiples of {THREADS}, one for each thread, got {p.channels}"
    if refusals.too_many(math.prod(sizes)):
        return f"takes up to {refusals.MOST_NUMBERS} numbers, got x {list(sizes)}; split the batch"
    return None


# On an H200 and an H100 (bench/NOTES.md) the forward was slower than XLA's with 2^22.8 numbers and faster with 2^23.5,
# the backward at least twice as fast with 2^19.8: with documents and without, and with more numbers in all dtypes.
_FEWEST_NUMBERS = {"forward": 2**24, "backward": 2**20}


def by_name_only(problem: Problem, arch: Arch, pass_: Pass) -> str | None:
    """Why XLA is the first choice where both take the call."""
    p = problem
    del arch
    if (numbers := p.batch * p.length * p.channels) < (fewest := _FEWEST_NUMBERS[pass_]):
        return f"pays from {fewest} numbers on, got {numbers}"
    return None


def forward(problem: Problem, inputs: Inputs, aux: Aux) -> Outputs:
    from fast_layers.ops.conv1d import hopper_conv

    return hopper_conv.forward(problem, inputs, aux)


def backward(problem: Problem, inputs: Inputs, aux: Aux, gradients: Outputs) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.conv1d import hopper_conv

    return hopper_conv.backward(problem, inputs, aux, gradients)
