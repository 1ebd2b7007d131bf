"""What Hopper's attention kernels take, and what of it no GPU has run yet.

Axis letters: B batch, T queries, N query heads, V value depth.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from fast_layers.arch import Arch
from fast_layers.kernel_parts import automatic_axes
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals

ROWS = 64
"""Rows of one warpgroup's wgmma."""
MAX_DEPTH = 256
MAX_BACKWARD_DEPTH = 256


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    p = problem
    if arch.capability is None or arch.platform != "cuda":
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), got {arch}"
    if arch.capability != (9, 0):
        return f"needs compute capability 9.0 (H100, H200), got {arch.capability[0]}.{arch.capability[1]}"
    if automatic_axes.may_be_partitioned():
        return f"{automatic_axes.WAY_OUT}, or shard batch and heads over explicit mesh axes"
    if p.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {p.dtype}; cast the inputs"
    sizes = (p.batch, p.q_len, p.kv_len, p.heads, p.kv_heads, p.qk_dim, p.v_dim)
    if not all(isinstance(size, int) for size in sizes):
        symbolic = ", ".join(str(size) for size in sizes if not isinstance(size, int))
        return f"needs sizes known when tracing, got symbolic {symbolic}"
    deepest = MAX_DEPTH if pass_ == "forward" else MAX_BACKWARD_DEPTH
    if max(p.qk_dim, p.v_dim) > deepest:
        return f"the {pass_} kernel takes depths up to {deepest}, got {p.qk_dim} and {p.v_dim}"
    if p.bias_dtype not in (None, jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes a bias in bfloat16, float16 and float32, got {p.bias_dtype}; cast it"
    if p.scale <= 0:
        return f"needs a scale > 0, got {p.scale:g}"
    return None


def by_name_only(problem: Problem, arch: Arch, pass_) -> str | None:
    """What no GPU has run yet."""
    p = problem
    has = (("bias", p.bias is not None), ("dense mask", p.mask.dense is not None), ("dropout", bool(p.dropout_rate)))
    untried = " and ".join(name for name, present in has if present)
    return f"no GPU has run this kernel with {untried} yet" if untried else None


def forward(problem: Problem, inputs: Inputs, aux: Aux):
    """(out [B, T, N, V], lse [B, N, T]). Pallas is imported here, when a kernel is chosen."""
    from fast_layers.ops.attention import hopper_fwd

    return hopper_fwd.attend(problem, inputs, aux)


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_lse: Array) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.attention import hopper_bwd

    return hopper_bwd.attend_grad(problem, residuals, d_out, d_lse)
