"""What the MLP's matmul kernels take, on whichever GPU they run."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from fast_layers.kernel_parts import automatic_axes, refusals
from fast_layers.ops.mlp.problem import Problem

ALIGNMENT_BYTES = 16
"""Of rows, for TMA."""
_PLAIN = (None, lax.Precision.DEFAULT, "default", "fastest")
_PLAIN_PRECISIONS = (*_PLAIN, *((one, other) for one in _PLAIN for other in _PLAIN))


def objection(p: Problem) -> str | None:
    """Why they do not take the call, whichever pass."""
    if automatic_axes.may_be_partitioned():
        return automatic_axes.WAY_OUT
    if p.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {p.dtype}; cast the inputs"
    if p.precision not in _PLAIN_PRECISIONS:
        return f"sums 16-bit products in float32, and has no precision {p.precision}; leave it out"
    alignment = ALIGNMENT_BYTES // (2 if p.float8 is None else 1)
    features = {"in": p.in_features, "hidden": p.hidden_features, "out": p.out_features or alignment}
    sizes = (p.tokens, *features.values())
    if reason := refusals.symbolic(sizes):
        return reason
    if uneven := [f"{name}_features={size}" for name, size in features.items() if size % alignment]:
        return f"takes features in multiples of {alignment}, got {', '.join(uneven)}; pad the weights"
    return None
