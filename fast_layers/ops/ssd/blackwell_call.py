"""What Blackwell's scan takes, and what its forward is given: operands with all that concerns decay computed by XLA.

No GPU has run the kernels yet, so the backend is taken only by name.

Axis letters as in `problem`; U panels of heads of one group, C chunks of Q = 128 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fast_layers.arch import Arch
from fast_layers.kernel_parts import automatic_axes, refusals
from fast_layers.ops.ssd.blackwell_config import BLACKWELL_ROWS, HEAD_DIMS, STATE_DIMS, BlackwellForwardTiles
from fast_layers.ops.ssd.hopper_call import decay_factors, for_tma
from fast_layers.ops.ssd.problem import DEFAULT_CHUNK, Aux, Inputs, Problem, Residuals, Scanned


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    p = problem
    if reason := refusals.not_blackwell(arch):
        return reason
    if reason := automatic_axes.refusal():
        return reason
    if p.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {p.dtype}; cast x, B, C and z"
    if reason := refusals.symbolic((p.batch, p.length)):
        return reason
    if p.batch == 0:
        return f"needs examples, got x {[p.batch, p.length, p.heads, p.head_dim]}"
    if p.head_dim not in HEAD_DIMS:
        return f"takes heads of {', '.join(map(str, HEAD_DIMS))} channels, got {p.head_dim}"
    if p.state_dim not in STATE_DIMS:
        too_large = ", for which shared memory has no room" if p.state_dim > STATE_DIMS[-1] else ""
        return f"takes states of {', '.join(map(str, STATE_DIMS))}, got {p.state_dim}{too_large}"
    if p.chunk not in {min(chunk, p.length) for chunk in (DEFAULT_CHUNK, BLACKWELL_ROWS)}:
        return f"works in chunks of {BLACKWELL_ROWS} tokens, got chunk_size={p.chunk}; leave it None"
    if p.dt_limit[0] < 0:
        return f"takes step sizes of 0 and more, got dt_limit={p.dt_limit}"
    return None


def forward(problem: Problem, inputs: Inputs, aux: Aux) -> Scanned:
    """Pallas is imported here, when a kernel is chosen."""
    from fast_layers.ops.ssd import blackwell_fwd

    return blackwell_fwd.scan(problem, inputs, aux)


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_final_state: Array) -> Inputs:
    from fast_layers.ops.ssd import blackwell_bwd

    return blackwell_bwd.scan_grad(problem, residuals, d_out, d_final_state)


class Operands(NamedTuple):
    """Arrays as the kernel takes them, of lengths that TMA takes."""

    x: Float[Array, "B L H P"]
    B: Float[Array, "B L G N"]
    C: Float[Array, "B L G N"]
    factors: Float[Array, "B C H 4 Q"]
    """Of each token, by the names of the constants in `hopper_call`."""
    first: Int[Array, "B C Q"] | None
    """The first token of the chunk that each token's document has in it; None without documents."""
    D: Float[Array, "B H P"] | None
    z: Float[Array, "B L H P"] | None
    initial_state: Float[Array, "B U 128 N"] | None


def operands_of(p: Problem, tiles: BlackwellForwardTiles, inputs: Inputs, aux: Aux) -> Operands:
    rows = BLACKWELL_ROWS
    factors, first = decay_factors(p, inputs, aux, rows)
    D = None
    if inputs.D is not None:
        D = jnp.broadcast_to(inputs.D.astype(jnp.float32).reshape(p.heads, -1), (p.batch, p.heads, p.head_dim))
    return Operands(
        x=for_tma(inputs.x, rows),
        B=for_tma(inputs.B, rows),
        C=for_tma(inputs.C, rows),
        factors=factors,
        first=first,
        D=D,
        z=None if inputs.z is None else for_tma(inputs.z, rows),
        initial_state=None if inputs.initial_state is None else state_as_panels(inputs.initial_state, tiles.panel),
    )


def state_as_panels(state: Float[Array, "B H P N"], panel: int) -> Float[Array, "B U 128 N"]:
    """Panels of `panel` channels; the rest of 128 rows are 0."""
    state = state.astype(jnp.float32).reshape(state.shape[0], -1, panel, state.shape[3])
    return jnp.pad(state, ((0, 0), (0, 0), (0, BLACKWELL_ROWS - panel), (0, 0)))
