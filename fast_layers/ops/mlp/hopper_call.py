"""The Hopper backend of the MLP: what it takes. Pallas is imported when a kernel is chosen.

No GPU has run these kernels yet, so the backend is taken only by name.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fast_layers.arch import Arch
from fast_layers.kernel_parts import automatic_axes
from fast_layers.ops.mlp.problem import Inputs, PreActivations, Problem, Residuals

ALIGNMENT = 8
"""Features: TMA wants rows that start at multiples of 16 bytes."""
_PLAIN = (None, lax.Precision.DEFAULT, "default", "fastest")
_PLAIN_PRECISIONS = (*_PLAIN, *((one, other) for one in _PLAIN for other in _PLAIN))


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    del pass_  # what one takes, so does the other
    p = problem
    if arch.capability is None or arch.platform != "cuda":
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), got {arch}"
    if arch.capability != (9, 0):
        return f"needs compute capability 9.0 (H100, H200), got {arch.capability[0]}.{arch.capability[1]}"
    if automatic_axes.may_be_partitioned():
        return automatic_axes.WAY_OUT
    if p.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {p.dtype}; cast the inputs"
    if p.precision not in _PLAIN_PRECISIONS:
        return f"sums 16-bit products in float32, and has no precision {p.precision}; leave it out"
    features = {"in": p.in_features, "hidden": p.hidden_features, "out": p.out_features or ALIGNMENT}
    sizes = (p.tokens, *features.values())
    if not all(isinstance(size, int) for size in sizes):
        symbolic = ", ".join(str(size) for size in sizes if not isinstance(size, int))
        return f"needs sizes known when tracing, got symbolic {symbolic}"
    if uneven := [f"{name}_features={size}" for name, size in features.items() if size % ALIGNMENT]:
        return f"takes features in multiples of {ALIGNMENT}, got {', '.join(uneven)}; pad the weights"
    return None


def forward(problem: Problem, inputs: Inputs) -> tuple[Float[Array, "M O"], PreActivations]:
    """(out [M, O], what is saved)."""
    from fast_layers.ops.mlp import hopper_mlp

    return hopper_mlp.forward(problem, inputs)


def backward(problem: Problem, residuals: Residuals, d_out: Float[Array, "M O"]) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    from fast_layers.ops.mlp import hopper_mlp

    return hopper_mlp.backward(problem, residuals, d_out)
