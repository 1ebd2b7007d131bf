"""The Hopper backend of the MLP: what it takes. Pallas is imported when a kernel is chosen."""

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


# Sizes at which an H200 was timed (bench/NOTES.md), and what it was not slower for than XLA.
_FEWEST_TOKENS = 512
_MEASURED_WIDTHS = (2048, 4096)
_FEW_TOKENS = 4096


def by_name_only(problem: Problem, arch: Arch, pass_) -> str | None:
    """Why XLA is the first choice where both take the call."""
    p = problem
    del arch
    if not p.gated and p.activation == "identity" and not p.has_down:
        return "a bare matmul is no faster than XLA's"
    if p.tokens < _FEWEST_TOKENS:
        return f"has not been timed below {_FEWEST_TOKENS} tokens, got {p.tokens}"
    low, high = _MEASURED_WIDTHS
    if not low <= p.in_features <= high or p.hidden_features < low:
        sizes = f"{p.in_features} and {p.hidden_features}"
        return f"has been timed at widths of {low} to {high} and hidden sizes from {low} on, got {sizes}"
    if p.gated and pass_ == "backward" and p.tokens > _FEW_TOKENS:
        return f"with a gate, XLA's backward is as fast beyond {_FEW_TOKENS} tokens"
    return None


def forward(problem: Problem, inputs: Inputs) -> tuple[Float[Array, "M O"], PreActivations]:
    """(out [M, O], what is saved)."""
    from fast_layers.ops.mlp import hopper_matmul, passes

    return passes.forward(hopper_matmul.multiply, problem, inputs)


def backward(problem: Problem, residuals: Residuals, d_out: Float[Array, "M O"]) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.mlp import hopper_matmul, passes

    return passes.backward(hopper_matmul.multiply, problem, residuals, d_out)
