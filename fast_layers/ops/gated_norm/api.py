"""`gated_rms_norm`: validation, the static Problem, the choice of backend, and the gradient rule."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jaxtyping import Array, ArrayLike, Float

from fast_layers import dispatch
from fast_layers.ops.gated_norm import reference, sharding
from fast_layers.ops.gated_norm.backends import BACKENDS
from fast_layers.ops.gated_norm.problem import Inputs, Problem
from fast_layers.ops.operands import floating, is_integer, is_real
from fast_layers.ops.static_options import flag

OP = "gated_rms_norm"


def gated_rms_norm(
    y: ArrayLike,
    z: ArrayLike,
    weight: ArrayLike,
    *,
    group_size: int | None = None,
    eps: float = 1e-5,
    norm_before_gate: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*rows F"]:
    """RMSNorm(y * silu(z)) * weight, as Mamba-2 ends its scan.

    Args:
      y: [..., F], floating point.
      z: [..., F], the gate's logits, of y's dtype.
      weight: [F], any floating dtype.
      group_size: features that are normalised together, a divisor of F; None: all F. Mamba-2 takes d_ssm / ngroups.
      eps: added to the mean square.
      norm_before_gate: RMSNorm(y) * weight * silu(z) instead.
      implementation: a backend by name, which raises if it refuses; None takes the best (see `fast_layers.explain`).

    Returns:
      [..., F] in y's dtype, computed in float32 (float64 for float64).

    The backward pass keeps the inputs only. The default backends support reverse mode; `implementation="reference"`
    also supports forward mode and higher derivatives.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or a backend asked for by name that refuses.

    Source: `RMSNorm` of mamba_ssm (github.com/state-spaces/mamba), used in Dao and Gu, "Transformers are SSMs" (2024).
    """
    inputs = Inputs(floating("y", y), floating("z", z), floating("weight", weight))
    problem = _problem(inputs, group_size, eps, norm_before_gate)
    return sharding.per_shard(functools.partial(_choose_and_run, implementation), problem, inputs)


def _choose_and_run(implementation: str | None, problem: Problem, inputs: Inputs) -> Float[Array, "*rows F"]:
    plan = dispatch.plan(OP, BACKENDS, problem, implementation)
    with jax.numpy_rank_promotion("allow"):
        both = [plan.sole_backend(pass_) for pass_ in dispatch.PASSES]
        if all(backend is not None and backend.fwd is reference.forward for backend in both):
            # Without a gradient rule of ours, JAX differentiates the formula itself, forward and reverse, to any order.
            return reference.forward(problem, inputs)
        return _normalise(plan, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(plan: dispatch.Plan, inputs: Inputs):
    return plan.run("forward", inputs)


def _normalise_fwd(plan: dispatch.Plan, inputs: Inputs):
    return plan.run("forward", inputs), inputs


def _normalise_bwd(plan: dispatch.Plan, inputs: Inputs, d_out: Array):
    with jax.numpy_rank_promotion("allow"):
        return (plan.run("backward", inputs, d_out),)


_normalise.defvjp(_normalise_fwd, _normalise_bwd)


def _problem(inputs: Inputs, group_size: Any, eps: Any, norm_before_gate: bool) -> Problem:
    y, z, weight = inputs
    if y.ndim == 0 or y.shape[-1] == 0:
        raise ValueError(f"y must be [..., features] with at least one feature, got {y.shape}")
    if z.shape != y.shape:
        raise ValueError(f"y and z must have the same shape, got {y.shape} and {z.shape}")
    if z.dtype != y.dtype:
        raise ValueError(f"y and z must have the same dtype, got {y.dtype} and {z.dtype}; cast one of them")
    *rows, features = y.shape
    if weight.shape != (features,):
        raise ValueError(f"weight must have shape (features,) = ({features},), got {weight.shape}")
    group_size = features if group_size is None else group_size
    if not is_integer(group_size) or group_size < 1 or features % group_size:
        raise ValueError(f"{group_size=}: must be a divisor of the {features} features, or None for all of them")
    if not is_real(eps) or not 0 <= eps < math.inf:
        raise ValueError(f"{eps=}: must be a number, 0 or more")
    flag("norm_before_gate", norm_before_gate)
    return Problem(tuple(rows), features, y.dtype, int(group_size), float(eps), norm_before_gate)
