"""The Hopper backend of the MLP: what it takes. Pallas is imported when a kernel is chosen.

No GPU has run these kernels yet, so the backend is taken only by name.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from fast_layers.arch import Arch
from fast_layers.ops.mlp import kernel_call
from fast_layers.ops.mlp.problem import Inputs, PreActivations, Problem, Residuals


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    del pass_  # what one takes, so does the other
    if arch.capability is None or arch.platform != "cuda":
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), got {arch}"
    if arch.capability != (9, 0):
        return f"needs compute capability 9.0 (H100, H200), got {arch.capability[0]}.{arch.capability[1]}"
    if problem.float8 is not None:
        return "takes no float8; leave it out"
    return kernel_call.objection(problem)


def forward(problem: Problem, inputs: Inputs) -> tuple[Float[Array, "M O"], PreActivations]:
    """(out [M, O], what is saved)."""
    from fast_layers.ops.mlp import hopper_matmul, passes

    return passes.forward(hopper_matmul.multiply, problem, inputs)


def backward(problem: Problem, residuals: Residuals, d_out: Float[Array, "M O"]) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.mlp import hopper_matmul, passes

    return passes.backward(hopper_matmul.multiply, problem, residuals, d_out)
