"""The Hopper backend of the MLP: what it takes. Pallas is imported when a kernel is chosen."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from fast_layers.arch import Arch
from fast_layers.dispatch import Pass
from fast_layers.kernel_parts import refusals
from fast_layers.ops.mlp import kernel_call
from fast_layers.ops.mlp.config import FEW_ROWS
from fast_layers.ops.mlp.problem import Inputs, PreActivations, Problem, Residuals


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    del pass_  # what one takes, so does the other
    if reason := refusals.not_hopper(arch):
        return reason
    if problem.float8 is not None:
        return "takes no float8; leave it out"
    return kernel_call.objection(problem)


_NARROWEST, _WIDE = 2048, 4096
# Where an H200 was timed and no slower than XLA or Flax (bench/NOTES.md), by gate and pass: the fewest tokens, by the
# width up to which that holds.
_FEWEST_TOKENS: dict[tuple[bool, Pass], dict[int, int]] = {
    (False, "forward"): {2048: 512, 4096: 8192},
    (False, "backward"): {2048: 512, 4096: 8192},
    (True, "forward"): {2048: 512, 4096: 8192},
    (True, "backward"): {2048: 512, 4096: 8192},
}
# The same of one width, in and out alone.
_FEWEST_TOKENS_AT: dict[tuple[bool, Pass], dict[int, int]] = {(True, "forward"): {8192: 8192}}
# Fewer that were timed at width 4096 without a gate; between them the last round of tiles is mostly empty.
_FEWER_TOKENS = (512, 1024, 2048)
# The same of decoding steps, at width 4096, by gate.
_FEW_TOKENS = {False: range(FEW_ROWS, FEW_ROWS + 1), True: range(1, FEW_ROWS + 1)}
_BARE_SIZES = range(4096, 8192)
"""Of a bare matmul's forward; at 8,192 it is as fast as XLA's."""


def by_name_only(problem: Problem, arch: Arch, pass_: Pass) -> str | None:
    """Why XLA is the first choice where both take the call."""
    p = problem
    del arch
    if p.dtype != jnp.bfloat16:
        return f"has not been timed in {p.dtype}"
    if p.out_features is None:
        bare = p.activation == "identity" and not (p.gated or p.up_bias) and pass_ == "forward"
        if bare and all(size in _BARE_SIZES for size in (p.tokens, p.in_features, p.hidden_features)):
            return None
        return "has not been timed without a product down, or is no faster than XLA's where it was"
    widths = (p.in_features, p.out_features)
    fewest_by_width, fewest_at = _FEWEST_TOKENS[p.gated, pass_], _FEWEST_TOKENS_AT.get((p.gated, pass_), {})
    call = f"{pass_} {'with' if p.gated else 'without'} a gate"
    fewest = next((tokens for width, tokens in fewest_by_width.items() if max(widths) <= width), None)
    if fewest is None and widths[0] == widths[1]:
        fewest = fewest_at.get(widths[0])
    if fewest is None or min(widths) < _NARROWEST:
        wanted = " and ".join([f"{_NARROWEST} to {max(fewest_by_width)}", *map(str, fewest_at)])
        return (
            f"is no faster than XLA's {call} but at widths of {wanted}, or was not timed there, got {p.in_features} in "
            f"and {p.out_features} out"
        )
    if p.hidden_features < 2 * p.in_features:
        return f"has been timed with hidden sizes from twice the width on, got {p.hidden_features} for {p.in_features}"
    if pass_ == "forward" and widths == (_WIDE, _WIDE) and p.tokens in _FEW_TOKENS[p.gated]:
        return None
    if widths == (_WIDE, _WIDE) and not p.gated and p.tokens in _FEWER_TOKENS:
        return None
    if p.tokens < fewest:
        at = f"at widths of {p.in_features} and {p.out_features} below {fewest} tokens"
        return f"is no faster than XLA's {call} {at}, or was not timed there, got {p.tokens}"
    return None


def forward(problem: Problem, inputs: Inputs) -> tuple[Float[Array, "M O"], PreActivations]:
    """(out [M, O], what is saved)."""
    from fast_layers.ops.mlp import hopper_matmul, passes

    return passes.forward(hopper_matmul.multiply, problem, inputs)


def backward(problem: Problem, residuals: Residuals, d_out: Float[Array, "M O"]) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.mlp import hopper_matmul, passes

    return passes.backward(hopper_matmul.multiply, problem, residuals, d_out, hopper_matmul.multiply_together)
