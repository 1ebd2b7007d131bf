"""`selective_scan`: validation, the static Problem, and the choice of backend."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import ArrayLike

from fast_layers import dispatch
from fast_layers.kernel_parts.manual_axes import explicit_axes, vary_alike
from fast_layers.ops.selective_scan import check
from fast_layers.ops.selective_scan.backends import BACKENDS
from fast_layers.ops.selective_scan.problem import Aux, Problem
from fast_layers.ops.ssd.check import chunk_size as check_chunk_size
from fast_layers.ops.ssd.check import segment_ids as check_segment_ids
from fast_layers.ops.ssd.problem import documents
from fast_layers.ops.static_options import flag

OP = "selective_scan"
DEFAULT_CHUNK = 64


def selective_scan(
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    *,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    chunk_size: int | None = None,
    return_final_state: bool = False,
    implementation: str | None = None,
) -> Any:
    r"""The scan of Mamba-1: h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = (h_t . C_t + D x_t) silu(z_t) per channel.

    The counterpart of mamba_ssm's `selective_scan_fn`, with the axes in this package's order, tokens before channels:
    [batch, length, channels], where mamba_ssm has [batch, channels, length]. Axis letters: B batch (use `jax.vmap` for
    more dims), L tokens, D channels, G groups of channels that share B and C (D a multiple of G), N state size.

    Args:
      x: [B, L, D], floating point (u in mamba_ssm); B, C and z have the same dtype, the others any floating one.
      dt: [B, L, D], the step sizes (delta): dt_t above is softplus(dt + dt_bias), in float32.
      A: [D, N], negative and real.
      B: [B, L, N] or [B, L, G, N], how a token enters the state.
      C: like B, how it reads the state.
      D: [D], the share of x itself in the output.
      z: [B, L, D], the output's gate.
      dt_bias: [D].
      dt_softplus: whether dt goes through softplus, which is linear above 20.
      initial_state: [B, D, N], the state before the first token; zeros if None.
      segment_ids: packed documents, as in `ssd`: int [B, L] or [L]; the state is reset at each change.
      chunk_size: tokens of a chunk, whose states are in memory together; the results differ by rounding only.
      return_final_state: also return the state after the last token, [B, D, N] in float32 (float64 for float64
        inputs). Differentiable.
      implementation: a backend by name, which raises if it refuses; None takes the best (see `fast_layers.explain`).

    Returns:
      y [B, L, D] in x's dtype; with `return_final_state` a pair with the final state.

    All that is given is differentiable, less segment_ids, forward and reverse; O(L) memory in reverse mode.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023).
    """
    flag("dt_softplus", dt_softplus)
    flag("return_final_state", return_final_state)
    inputs = check.operands(
        *(x, dt, A, B, C, D, z, dt_bias, initial_state), rows=("batch", "length"), state_name="initial_state"
    )
    batch, length, _ = inputs.x.shape
    ids = check_segment_ids(segment_ids, batch, length)
    inputs, aux = vary_alike((inputs, Aux(None if ids is None else documents(ids))))
    for name, operand in (*inputs._asdict().items(), ("segment_ids", aux.document)):
        if operand is not None and (axes := [axis for axes in explicit_axes(operand) for axis in axes]):
            raise ValueError(
                f"{name} is explicitly sharded over mesh axes {tuple(axes)}: call selective_scan inside "
                "jax.shard_map, with batch and channels as each device has them; both are independent"
            )
    problem = Problem.of(inputs, aux, check_chunk_size(chunk_size, DEFAULT_CHUNK, length), dt_softplus)
    # A user's ban on implicit rank promotion is about the user's own arrays.
    with jax.numpy_rank_promotion("allow"):
        # No gradient rule of ours: JAX differentiates what the forward's backend does.
        out, final_state = dispatch.plan(OP, BACKENDS, problem, implementation).run("forward", inputs, aux)
    return (out, final_state) if return_final_state else out
