"""What all attention kernels of ours refuse."""

from __future__ import annotations

import jax.numpy as jnp

from fast_layers.kernel_parts import automatic_axes, refusals
from fast_layers.ops.attention.problem import Problem

MAX_DEPTH = 256


def refusal(problem: Problem, pass_) -> str | None:
    p = problem
    if automatic_axes.may_be_partitioned() and not automatic_axes.xla_splits():
        return (
            f"{automatic_axes.WAY_OUT}, or shard batch and heads over mesh axes that are all explicit or all automatic"
        )
    if p.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {p.dtype}; cast the inputs"
    sizes = (p.batch, p.q_len, p.kv_len, p.heads, p.kv_heads, p.qk_dim, p.v_dim)
    if reason := refusals.symbolic(sizes):
        return reason
    if p.batch == 0:
        return "takes one example or more, got an empty batch"
    if max(p.qk_dim, p.v_dim) > MAX_DEPTH:
        return f"the {pass_} kernel takes depths up to {MAX_DEPTH}, got {p.qk_dim} and {p.v_dim}"
    if p.bias_dtype not in (None, jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes a bias in bfloat16, float16 and float32, got {p.bias_dtype}; cast it"
    if p.scale <= 0:
        return f"needs a scale > 0, got {p.scale:g}"
    return None
