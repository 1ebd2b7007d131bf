"""What the Hopper kernel takes, and what it is given: the operands with all that concerns decay computed by XLA.

Axis letters as in `problem`; U panels of 64 channels of the heads, in order; C chunks of Q = 64 tokens. N here is at
least 64, of which a smaller state leaves the rest 0.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fast_layers.arch import Arch
from fast_layers.dispatch import Pass
from fast_layers.kernel_parts import automatic_axes, refusals
from fast_layers.ops.ssd.config import (
    HEAD_DIMS,
    ROWS,
    STATE_DIMS,
    padded_state,
    panels,
)
from fast_layers.ops.ssd.problem import Aux, Inputs, Problem, Residuals, Scanned, step_sizes

LOG2_E = 1.4426950408889634
TMA_ROWS = 8
_FORGETS_ALL_LOG2 = -160.0
"""2 to this is 0 in float32, so log2 of a decay need not be below it."""


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    p = problem
    if reason := refusals.not_hopper(arch):
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
        return f"takes states of {', '.join(map(str, STATE_DIMS))}, got {p.state_dim}"
    if p.chunk != min(ROWS, p.length):
        return f"works in chunks of {ROWS} tokens, got chunk_size={p.chunk}; leave it None"
    if p.dt_limit[0] < 0:
        return f"takes step sizes of 0 and more, got dt_limit={p.dt_limit}"
    return None


_FEWEST_NUMBERS = 2**17
"""Of x, with which an H200 was timed: four times as fast as with XLA, and more so with more (bench/NOTES.md). That was
in bfloat16, P 64, N 128 and 256, without documents; all else is taken by analogy."""


def by_name_only(problem: Problem, arch: Arch, pass_: Pass) -> str | None:
    """Why XLA is the first choice where both take the call."""
    p = problem
    del arch, pass_
    if (numbers := p.batch * p.length * p.heads * p.head_dim) < _FEWEST_NUMBERS:
        return f"was timed from {_FEWEST_NUMBERS} numbers in x on, got {numbers}"
    if p.length < ROWS:
        return f"would pad {p.length} tokens to a chunk of {ROWS}, which was not timed"
    return None


def forward(problem: Problem, inputs: Inputs, aux: Aux) -> Scanned:
    """Pallas is imported here, when a kernel is chosen."""
    from fast_layers.ops.ssd import hopper_fwd

    return hopper_fwd.scan(problem, inputs, aux)


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_final_state: Array) -> Inputs:
    from fast_layers.ops.ssd import hopper_bwd

    return hopper_bwd.scan_grad(problem, residuals, d_out, d_final_state)


class Operands(NamedTuple):
    """Arrays as the kernel takes them: lengths that TMA takes, heads as panels of 64 channels."""

    x: Float[Array, "B L U 64"]
    B: Float[Array, "B L G N"]
    C: Float[Array, "B L G N"]
    factors: Float[Array, "B C H 4 Q"]
    """Of each token, by the names of the constants below."""
    first: Int[Array, "B C Q"] | None
    """The first token of the chunk that each token's document has in it; None without documents."""
    D: Float[Array, "B U 64"] | None
    z: Float[Array, "B L U 64"] | None
    initial_state: Float[Array, "B U 64 N"] | None


ROW, COLUMN, ENTERING, LEAVING = range(4)
"""In `Operands.factors`, with s the sum of log2 of the decays up to a token, in its document and chunk: s; s less log2
of dt, so that 2^(ROW_i - COLUMN_j) is the decay from j to i times dt_j; the share of the state entering the chunk that
is left at a token; what a token's x is multiplied by to be added to the state leaving the chunk."""


def operands_of(p: Problem, inputs: Inputs, aux: Aux) -> Operands:
    factors, first = decay_factors(p, inputs, aux, ROWS)
    D = None
    if inputs.D is not None:
        by_channel = jnp.broadcast_to(inputs.D.astype(jnp.float32).reshape(p.heads, -1), (p.heads, p.head_dim))
        D = jnp.broadcast_to(panels_of(by_channel), (p.batch, p.heads * panels(p.head_dim), ROWS))
    return Operands(
        x=for_tma(panels_of(inputs.x), ROWS),
        B=for_tma(_pad_state(inputs.B), ROWS),
        C=for_tma(_pad_state(inputs.C), ROWS),
        factors=factors,
        first=first,
        D=D,
        z=None if inputs.z is None else for_tma(panels_of(inputs.z), ROWS),
        initial_state=None if inputs.initial_state is None else state_as_panels(p, inputs.initial_state),
    )


class Decays(NamedTuple):
    """Of each token, in float32."""

    dt: Float[Array, "B C Q H"]
    """As the recurrence takes it."""
    sums: Float[Array, "B C Q H"]
    """Of log2 of the decays up to the token, in its document and chunk."""
    entering: Float[Array, "B C Q H"]
    """The share of the state entering the chunk that is left at the token."""
    leaving: Float[Array, "B C Q H"]
    """The share of what enters the state at the token that leaves the chunk."""
    first: Int[Array, "B C Q"] | None
    """As in `Operands`."""


def decay_factors(p: Problem, inputs: Inputs, aux: Aux, rows: int):
    """`factors` and `first` of chunks of `rows` tokens, as `Operands` describes them."""
    dt, sums, entering, leaving, first = decays_of(p, inputs, aux, rows)
    return by_head(sums, sums - jnp.log2(dt), entering, leaving * dt), first


def by_head(*by_token: Float[Array, "B C Q H"]) -> Float[Array, "B C H F Q"]:
    return jnp.stack(by_token, 2).transpose(0, 1, 4, 2, 3)


def decays_of(p: Problem, inputs: Inputs, aux: Aux, rows: int) -> Decays:
    """With documents, a chunk's sums are kept within each by the matrix that makes them."""
    dt = step_sizes(inputs.dt, inputs.dt_bias, softplus=p.dt_softplus, limit=p.dt_limit, dtype=p.accumulator_dtype)
    dt = _chunk_up(dt, rows)
    document = None if aux.document is None else _chunk_up(aux.document, rows, "edge")
    log2_decay = jnp.maximum(dt * (inputs.A.astype(dt.dtype) * LOG2_E), _FORGETS_ALL_LOG2)
    first = None
    reaches_entry, reaches_exit = jnp.ones((), bool), jnp.ones((), bool)
    if document is None:
        sums = running_sums(log2_decay)
    else:
        tokens = jnp.arange(rows)
        visible = (tokens[:, None] >= tokens) & (document[..., :, None] == document[..., None, :])
        first = jnp.argmax(visible, axis=-1).astype(jnp.int32)
        # The entering state is that of the token before the chunk; before the first chunk, that of its first token.
        before = jnp.concatenate([document[:, :1, 0], document[:, :-1, -1]], axis=1)
        reaches_entry = (document == before[..., None])[..., None]
        reaches_exit = (document == document[..., -1:])[..., None]
        sums = jnp.einsum("bcqs,bcsh->bcqh", visible.astype(dt.dtype), log2_decay, precision=lax.Precision.HIGHEST)
    leaving = jnp.exp2(jnp.minimum(sums[:, :, -1:] - sums, 0.0))
    return Decays(dt, sums, jnp.where(reaches_entry, jnp.exp2(sums), 0.0), jnp.where(reaches_exit, leaving, 0.0), first)


def running_sums(x: Float[Array, "B C Q H"]) -> Float[Array, "B C Q H"]:
    """Over the tokens of a chunk: eight by eight, then over the eights, of which XLA makes two small fusions."""
    batch, chunks, rows, heads = x.shape
    eights = x.reshape(batch, chunks, rows // 8, 8, heads)
    within = list(itertools.accumulate(eights[:, :, :, i] for i in range(8)))
    whole = within[-1]
    before = itertools.accumulate(
        (whole[:, :, i] for i in range(rows // 8 - 1)), initial=jnp.zeros_like(whole[:, :, 0])
    )
    return (jnp.stack(within, 3) + jnp.stack(list(before), 2)[:, :, :, None]).reshape(x.shape)


def panels_of(x: Float[Array, "*L H P"]) -> Float[Array, "*L U 64"]:
    """The heads' channels as panels; those of 32 are padded."""
    return _pad(x, -x.shape[-1] % ROWS, x.ndim - 1).reshape(*x.shape[:-2], -1, ROWS)


def state_as_panels(p: Problem, state: Float[Array, "B H P N"]) -> Float[Array, "B U 64 N"]:
    state = _pad_state(_pad(state.astype(jnp.float32), -p.head_dim % ROWS, 2))
    return state.reshape(p.batch, -1, ROWS, padded_state(p.state_dim))


def _pad_state(x: Float[Array, "... N"]) -> Float[Array, "... N"]:
    return _pad(x, padded_state(x.shape[-1]) - x.shape[-1], x.ndim - 1)


def for_tma(x: Array, rows: int) -> Array:
    """At least a chunk of `rows` long, and a multiple of 8. Tokens added here have no effect: their dt is 0."""
    return _pad(x, -(-max(x.shape[1], rows) // TMA_ROWS) * TMA_ROWS - x.shape[1], 1)


def _chunk_up(x: Array, rows: int, mode: str = "constant") -> Array:
    return _pad(x, -x.shape[1] % rows, 1, mode).reshape(x.shape[0], -1, rows, *x.shape[2:])


def _pad(x: Array, missing: int, axis: int, mode: str = "constant") -> Array:
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], mode=mode) if missing else x
