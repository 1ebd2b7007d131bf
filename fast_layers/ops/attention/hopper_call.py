"""What Hopper's attention kernels take.

Axis letters: B batch, T queries, N query heads, V value depth.
"""

from __future__ import annotations

from jaxtyping import Array

from fast_layers.arch import Arch
from fast_layers.kernel_parts import refusals
from fast_layers.ops.attention import kernel_call
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals

ROWS = 64
"""Rows of one warpgroup's wgmma."""


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    if reason := refusals.not_hopper(arch):
        return reason
    return kernel_call.refusal(problem, pass_)


def forward(problem: Problem, inputs: Inputs, aux: Aux):
    """(out [B, T, N, V], lse [B, N, T]). Pallas is imported here, when a kernel is chosen."""
    from fast_layers.ops.attention import hopper_few_rows, hopper_few_rows_config, hopper_fwd

    kernel = hopper_few_rows if hopper_few_rows_config.takes(problem) else hopper_fwd
    return kernel.attend(problem, inputs, aux)


def saves(problem: Problem) -> bool:
    """Whether the forward finds the sizes of `Residuals` where the backward would have to."""
    from fast_layers.ops.attention import hopper_bwd_call, hopper_fwd

    return hopper_fwd.measures(problem) and hopper_bwd_call.wants_sizes(problem)


def forward_saving(problem: Problem, inputs: Inputs, aux: Aux):
    """((out, lse), the sizes of `Residuals`): also of a part that by itself does not save, of a call that does."""
    from fast_layers.ops.attention import hopper_fwd, hopper_fwd_sizes

    if hopper_fwd.measures(problem):
        out, lse, sizes = hopper_fwd.attend_measuring(problem, inputs, aux)
        return (out, lse), sizes
    return forward(problem, inputs, aux), hopper_fwd_sizes.by_xla(inputs)


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_lse: Array) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.attention import hopper_bwd_call

    return hopper_bwd_call.attend_grad(problem, residuals, d_out, d_lse)
