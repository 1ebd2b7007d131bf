"""The Blackwell backend of the MLP: what it takes. Pallas is imported when a kernel is chosen.

No GPU has run these kernels yet, so the backend is taken only by name.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from fast_layers.arch import Arch
from fast_layers.kernel_parts import refusals
from fast_layers.ops.mlp import kernel_call
from fast_layers.ops.mlp.problem import Inputs, PreActivations, Problem, Residuals


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    del pass_  # what one takes, so does the other
    if reason := refusals.not_blackwell(arch):
        return reason
    return kernel_call.objection(problem)


def forward(problem: Problem, inputs: Inputs) -> tuple[Float[Array, "M O"], PreActivations]:
    """(out [M, O], what is saved)."""
    from fast_layers.ops.mlp import blackwell_matmul, passes

    return passes.forward(blackwell_matmul.multiply, problem, inputs)


def backward(problem: Problem, residuals: Residuals, d_out: Float[Array, "M O"]) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.mlp import blackwell_matmul, passes

    return passes.backward(blackwell_matmul.multiply, problem, residuals, d_out)
