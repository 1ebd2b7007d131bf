"""What Blackwell's attention kernels take, and why they are taken by name only."""

from __future__ import annotations

from jaxtyping import Array

from fast_layers.arch import Arch
from fast_layers.kernel_parts import refusals
from fast_layers.ops.attention import kernel_call
from fast_layers.ops.attention.blackwell_config import BlackwellForwardTiles
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    if reason := refusals.not_blackwell(arch):
        return reason
    if reason := kernel_call.refusal(problem, pass_):
        return reason
    if pass_ == "forward" and not BlackwellForwardTiles.fitting(problem):
        depths = f"{problem.qk_dim} and {problem.v_dim}"
        return f"depths {depths} do not fit in shared memory together; pad the smaller to the larger"
    return None


def by_name_only(problem: Problem, arch: Arch, pass_) -> str:
    del problem, arch, pass_
    return "simulated and compiled, never run on hardware"


def forward(problem: Problem, inputs: Inputs, aux: Aux):
    """(out [B, T, N, V], lse [B, N, T]). Pallas is imported here, when a kernel is chosen."""
    from fast_layers.ops.attention import blackwell_fwd

    return blackwell_fwd.attend(problem, inputs, aux)


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_lse: Array) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.attention import blackwell_bwd

    return blackwell_bwd.attend_grad(problem, residuals, d_out, d_lse)
