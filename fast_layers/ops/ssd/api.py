"""`ssd`: validation, the static Problem, the choice of backend, and the gradient rule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import ArrayLike

from fast_layers import dispatch
from fast_layers.ops.ssd import check, reference, sharding
from fast_layers.ops.ssd.backends import BACKENDS
from fast_layers.ops.ssd.problem import DEFAULT_CHUNK, Aux, Inputs, Problem, Residuals, documents
from fast_layers.ops.static_options import flag

OP = "ssd"


def ssd(
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
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    chunk_size: int | None = None,
    return_final_state: bool = False,
    implementation: str | None = None,
) -> Any:
    r"""The scan of Mamba-2: h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = (h_t C_t + D x_t) silu(z_t).

    The counterpart of mamba_ssm's `mamba_chunk_scan_combined`. Axis letters: B batch (use `jax.vmap` for more dims),
    L tokens, H heads, P channels of a head, G groups of heads that share B and C (H a multiple of G), N state size.
    Each may be any number >= 1, B also 0.

    Args:
      x: [B, L, H, P], floating point; B, C and z have the same dtype, the other operands any floating one.
      dt: [B, L, H], the step sizes: dt_t above is clip(softplus(dt + dt_bias), *dt_limit), in float32.
      A: [H], negative: the rates at which heads forget.
      B: [B, L, G, N], how a token enters the state.
      C: [B, L, G, N], how it reads the state.
      D: [H] or [H, P], the share of x itself in the output.
      z: [B, L, H, P], the output's gate.
      dt_bias: [H].
      dt_softplus: whether dt goes through softplus, which is linear above 20.
      dt_limit: (low, high), numbers known when tracing.
      initial_state: [B, H, P, N], the state before the first token; zeros if None.
      segment_ids: packed documents: int [B, L], or [L] for all examples. The state is reset at each token whose id
        differs from its left neighbour's, so neither values nor gradients pass from one document to another. The
        initial state belongs to the first token's document, the final state to the last token's. Padding is a
        document like any other.
      chunk_size: tokens of a chunk; a matter of speed, the results differ by rounding only. None is a good default.
      return_final_state: also return the state after the last token, [B, H, P, N] in float32 (float64 for float64
        inputs). Differentiable.
      implementation: a backend by name, which raises if it refuses; None takes the best (see `fast_layers.explain`).

    Returns:
      y [B, L, H, P] in x's dtype; with `return_final_state` a pair with the final state.

    All that is given is differentiable, less segment_ids. Decays are exact to rounding for any dt A <= 0. NaN or inf
    in a token affects its whole chunk and what follows: write zeros into padding. The default backends support reverse
    mode, and save nothing but the operands; `implementation="reference"`, the recurrence itself, also forward mode and
    higher derivatives, with one saved state for each token.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or a backend asked for by name that refuses.

    Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
    Space Duality" (2024).
    """
    inputs = check.sequence(x, dt, A, B, C, D, z, dt_bias, initial_state)
    batch, length = inputs.x.shape[:2]
    flag("dt_softplus", dt_softplus)
    flag("return_final_state", return_final_state)
    options = _Options(check.chunk_size(chunk_size, DEFAULT_CHUNK, length), dt_softplus, check.dt_limit(dt_limit))
    ids = check.segment_ids(segment_ids, batch, length)
    aux = Aux(None if ids is None else documents(ids))
    out, final_state = sharding.per_shard(functools.partial(_choose_and_run, options, implementation), inputs, aux)
    return (out, final_state) if return_final_state else out


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a call that do not depend on shapes, so that a shard can make its own Problem."""

    chunk: int
    dt_softplus: bool
    dt_limit: tuple[float, float]

    def problem(self, inputs: Inputs, aux: Aux) -> Problem:
        batch, length, heads, head_dim = inputs.x.shape
        groups, state_dim = inputs.B.shape[2:]
        return Problem(
            batch=batch,
            length=length,
            heads=heads,
            head_dim=head_dim,
            groups=groups,
            state_dim=state_dim,
            dtype=inputs.x.dtype,
            skip=None if inputs.D is None else "head" if inputs.D.ndim == 1 else "channel",
            gated=inputs.z is not None,
            dt_bias=inputs.dt_bias is not None,
            initial_state=inputs.initial_state is not None,
            segments=aux.document is not None,
            **dataclasses.asdict(self),
        )


def _choose_and_run(options: _Options, implementation: str | None, inputs: Inputs, aux: Aux):
    # A user's ban on implicit rank promotion is about the user's own arrays.
    with jax.numpy_rank_promotion("allow"):
        plan = dispatch.plan(OP, BACKENDS, options.problem(inputs, aux), implementation)
        both = [plan.sole_backend(pass_) for pass_ in dispatch.PASSES]
        if all(backend is not None and backend.fwd is reference.forward for backend in both):
            # Without a gradient rule of ours, JAX differentiates the recurrence itself, to any order.
            return reference.forward(plan.problem, inputs, aux)
        return _scan(plan, inputs, aux)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(plan: dispatch.Plan, inputs: Inputs, aux: Aux):
    return plan.run("forward", inputs, aux)


def _scan_fwd(plan: dispatch.Plan, inputs: Inputs, aux: Aux):
    return plan.run("forward", inputs, aux), Residuals(inputs, aux)


def _scan_bwd(plan: dispatch.Plan, residuals: Residuals, gradients):
    with jax.numpy_rank_promotion("allow"):
        return plan.run("backward", residuals, *gradients), None


_scan.defvjp(_scan_fwd, _scan_bwd)
