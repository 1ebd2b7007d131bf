"""The two backends, which differ in how a piece of the sequence is scanned; and what they share.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = (h_t . C_t + D x_t) silu(z_t)

`reference` goes token by token. `xla` goes chunk by chunk: an associative scan within the chunk, and only the state
between chunks kept for the backward, which computes the chunk anew; so memory is O(L). JAX differentiates both.
Axis letters as in `problem`, C chunks, Q tokens of a chunk.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from fast_layers.kernel_parts.manual_axes import vary_over, varying_axes
from fast_layers.ops.selective_scan.problem import Aux, Inputs, Problem, Residuals, Scanned
from fast_layers.ops.ssd.problem import silu, step_sizes

UNLIMITED = (-float("inf"), float("inf"))


class Tokens(NamedTuple):
    """Operands with a length, that comes first; in the accumulator's dtype. Groups keep their channels apart."""

    x: Float[Array, "L B G R"]
    dt: Float[Array, "L B G R"]
    B: Float[Array, "L B G N"]
    C: Float[Array, "L B G N"]
    start: Bool[Array, "L B"] | None  # a document's first token, which the state before it does not reach


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


def reference(problem: Problem, inputs: Inputs, aux: Aux) -> Scanned:
    """Token by token."""
    tokens, A, state = _prepare(problem, inputs, aux)

    def step(state, token: Tokens):
        decay, entering = _map(A, token)
        state = decay * state + entering
        return state, _read(state, token)

    final, out = lax.scan(step, state, tokens)
    return _finish(problem, inputs, out, final)


# Jitted, so that a model of many equal layers traces and lowers the loop once.
@functools.partial(jax.jit, static_argnums=0)
def chunked(problem: Problem, inputs: Inputs, aux: Aux) -> Scanned:
    """Chunk by chunk."""
    p = problem
    tokens, A, state = _prepare(p, inputs, aux)
    count = -(-p.length // p.chunk)

    def cut(operand):
        # A token whose dt is 0 leaves the state as it is.
        padded = jnp.pad(operand, [(0, count * p.chunk - p.length), *[(0, 0)] * (operand.ndim - 1)])
        return padded.reshape(count, p.chunk, *operand.shape[1:])

    @jax.checkpoint
    def scan_chunk(state, chunk: Tokens):
        decays, entering = lax.associative_scan(_compose, _map(A, chunk))
        states = decays * state + entering
        return states[-1], _read(states, chunk)

    final, out = lax.scan(scan_chunk, state, jax.tree.map(cut, tokens))
    return _finish(p, inputs, lax.collapse(out, 0, 2)[: p.length], final)


def backward_of(forward):
    """The backward rule of a forward that JAX can differentiate."""

    def backward(problem: Problem, residuals: Residuals, d_out: Array, d_final_state: Array) -> Inputs:
        _, pull = jax.vjp(lambda inputs: forward(problem, inputs, residuals.aux), residuals.inputs)
        return pull(Scanned(d_out, d_final_state))[0]

    return backward


def _map(A: Float[Array, "G R N"], token: Tokens):
    """(decay, what enters): the token's map of the state; of one token, or with a leading dimension of many."""
    decay = jnp.exp(token.dt[..., None] * A)
    if token.start is not None:
        decay = jnp.where(token.start[..., None, None, None], 0, decay)
    return decay, (token.dt * token.x)[..., None] * token.B[..., None, :]


def _compose(earlier, later):
    """The map that first does `earlier`, then `later`."""
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]


def _read(state: Float[Array, "... G R N"], token: Tokens) -> Float[Array, "... G R"]:
    return (state * token.C[..., None, :]).sum(-1)


def _prepare(p: Problem, inputs: Inputs, aux: Aux) -> tuple[Tokens, Float[Array, "G R N"], Float[Array, "B G R N"]]:
    dtype = p.accumulator_dtype
    dt = step_sizes(inputs.dt, inputs.dt_bias, softplus=p.dt_softplus, limit=UNLIMITED, dtype=dtype)

    def grouped(operand):
        own = math.prod(operand.shape[2:]) // p.groups
        return operand.astype(dtype).reshape(p.batch, p.length, p.groups, own).swapaxes(0, 1)

    start = None
    if aux.document is not None:
        start = jnp.pad(aux.document[:, 1:] != aux.document[:, :-1], ((0, 0), (1, 0))).swapaxes(0, 1)
    tokens = Tokens(grouped(inputs.x), grouped(dt), grouped(inputs.B), grouped(inputs.C), start)
    A = inputs.A.astype(dtype).reshape(p.groups, -1, p.state_dim)
    if inputs.initial_state is None:
        state = jnp.zeros((p.batch, *A.shape), dtype)
    else:
        state = inputs.initial_state.astype(dtype).reshape(p.batch, *A.shape)
    return tokens, A, vary_over(state, varying_axes(tokens.x))


def _finish(p: Problem, inputs: Inputs, out: Float[Array, "L B G R"], final: Float[Array, "B G R N"]) -> Scanned:
    dtype = p.accumulator_dtype
    out = out.swapaxes(0, 1).reshape(inputs.x.shape)
    if inputs.D is not None:
        out = out + inputs.D.astype(dtype) * inputs.x.astype(dtype)
    if inputs.z is not None:
        out = out * silu(inputs.z.astype(dtype))
    return Scanned(out.astype(p.dtype), final.reshape(p.batch, p.channels, p.state_dim))
