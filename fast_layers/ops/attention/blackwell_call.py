"""What Blackwell's attention kernels take, and why they are taken by name only."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from fast_layers.arch import Arch
from fast_layers.kernel_parts import automatic_axes
from fast_layers.ops.attention.blackwell_config import BlackwellForwardTiles
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals

CAPABILITIES = ((10, 0), (10, 3))
MAX_DEPTH = 256


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    p = problem
    if arch.platform != "cuda" or arch.capability not in CAPABILITIES:
        return f"needs an NVIDIA GPU of compute capability 10.0 (B200) or 10.3 (B300), got {arch}"
    if automatic_axes.may_be_partitioned():
        return f"{automatic_axes.WAY_OUT}, or shard batch and heads over explicit mesh axes"
    if p.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {p.dtype}; cast the inputs"
    sizes = (p.batch, p.q_len, p.kv_len, p.heads, p.kv_heads, p.qk_dim, p.v_dim)
    if not all(isinstance(size, int) for size in sizes):
        symbolic = ", ".join(str(size) for size in sizes if not isinstance(size, int))
        return f"needs sizes known when tracing, got symbolic {symbolic}"
    if max(p.qk_dim, p.v_dim) > MAX_DEPTH:
        return f"takes depths up to {MAX_DEPTH}, got {p.qk_dim} and {p.v_dim}"
    if pass_ == "forward" and not BlackwellForwardTiles.fitting(p):
        return f"depths {p.qk_dim} and {p.v_dim} do not fit in shared memory together; pad the smaller to the larger"
    if p.bias is not None:
        return "takes no bias"
    if p.mask.dense is not None:
        return "takes no dense mask; express it as a structured one (fast_layers.masks)"
    if p.dropout_rate:
        return "has no dropout"
    if p.scale <= 0:
        return f"needs a scale > 0, got {p.scale:g}"
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
