"""The Hopper backend of the gated norm: what it takes. Pallas is imported when a kernel is chosen."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from fast_layers.arch import Arch
from fast_layers.dispatch import Pass
from fast_layers.kernel_parts import automatic_axes, refusals
from fast_layers.ops.gated_norm.config import LEGAL_GROUPS, HopperTiles
from fast_layers.ops.gated_norm.problem import Inputs, Problem


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    del pass_  # what one takes, so does the other
    p = problem
    if reason := refusals.not_hopper(arch):
        return reason
    if reason := automatic_axes.refusal():
        return reason
    if p.split_groups:
        return "needs the features of a group on one device; shard rows, or whole groups"
    if p.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes bfloat16, float16 and float32, got {p.dtype}; cast y and z"
    if reason := refusals.symbolic(p.rows):
        return reason
    if 0 in p.rows:
        return f"needs rows, got y {[*p.rows, p.features]}"
    if HopperTiles.of(p.group_size) is None:
        return f"takes groups of {LEGAL_GROUPS} features, got {p.group_size}"
    if refusals.too_many(math.prod(p.rows) * p.features):
        return f"takes up to {refusals.MOST_NUMBERS} numbers, got y {[*p.rows, p.features]}; split the rows"
    return None


# An H200 and an H100 were timed (bench/NOTES.md) with rows of 1024 to 8192 in one group, and groups of 256 to 2560.
# The forward was no faster than XLA's with 2^18.6 numbers, and 1.1 times as fast with 2^20.6.
_FEWEST_NUMBERS = 2**21
_SHORTEST_ROW, _SHORTEST_GROUP = 1024, 256


def by_name_only(problem: Problem, arch: Arch, pass_: Pass) -> str | None:
    """Why XLA is the first choice where both take the call."""
    p = problem
    del arch
    if p.dtype == jnp.float32 and pass_ == "forward":
        return "is slower than XLA's forward in float32"
    if p.group_size < (shortest := _SHORTEST_ROW if p.group_size == p.features else _SHORTEST_GROUP):
        rows = "rows" if p.group_size == p.features else "groups"
        return f"has been timed with {rows} of {shortest} features and more, got {p.group_size}"
    if (numbers := math.prod(p.rows) * p.features) < _FEWEST_NUMBERS:
        return f"pays from {_FEWEST_NUMBERS} numbers on, got {numbers}"
    return None


def forward(problem: Problem, inputs: Inputs) -> Float[Array, "*rows F"]:
    from fast_layers.ops.gated_norm import hopper_norm

    return hopper_norm.forward(problem, inputs)


def backward(problem: Problem, inputs: Inputs, d_out: Float[Array, "*rows F"]) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.gated_norm import hopper_norm

    return hopper_norm.backward(problem, inputs, d_out)
