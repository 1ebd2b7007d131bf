"""The Hopper backend of the MLP: what it takes. Pallas is imported when a kernel is chosen."""

from __future__ import annotations

import jax.numpy as jnp
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


# Between what an H200 was timed at (bench/NOTES.md), less where XLA was as fast.
_FEWEST_TOKENS = 512
_NARROWEST, _WIDEST, _WIDEST_GATED = 2048, 4096, 2048
_FEW_TOKENS = 4096


def by_name_only(problem: Problem, arch: Arch, pass_) -> str | None:
    """Why XLA is the first choice where both take the call."""
    p = problem
    del arch
    if p.out_features is None:
        return "has not been timed without a product down, or is no faster than XLA's where it was"
    if p.dtype != jnp.bfloat16:
        return f"has not been timed in {p.dtype}"
    if p.tokens < _FEWEST_TOKENS:
        return f"has not been timed below {_FEWEST_TOKENS} tokens, got {p.tokens}"
    widest = _WIDEST_GATED if p.gated else _WIDEST
    if not all(_NARROWEST <= width <= widest for width in (p.in_features, p.out_features)):
        kind = "with a gate " if p.gated else ""
        wanted = f"{_NARROWEST} to {widest}" if widest > _NARROWEST else f"{_NARROWEST}"
        return f"has been timed {kind}at widths of {wanted}, got {p.in_features} in and {p.out_features} out"
    if p.hidden_features < 2 * p.in_features:
        return f"has been timed with hidden sizes from twice the width on, got {p.hidden_features} for {p.in_features}"
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

    return passes.backward(hopper_matmul.multiply, problem, residuals, d_out, hopper_matmul.multiply_together)
