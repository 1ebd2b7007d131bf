"""The chunked form in plain XLA: matmuls within a chunk, the recurrence across chunks; O(L) memory.

Within a chunk of Q tokens, with s_ij = exp(sum of dt A over j < k <= i) where j <= i, else 0:

    y_i = sum_j s_ij (C_i . B_j) dt_j x_j  +  exp(sum over k <= i) S C_i
    S'  = exp(sum over all k) S + sum_j s_Qj dt_j x_j B_j^T

One chunk is in memory at a time. The backward computes the states anew, one for each chunk, and walks the chunks from
the last to the first; the gradient of dt A is a sum of terms over the pairs that a token lies between, never a
difference of two sums. Letters as in `problem`; `q` and `s` in einsums are a chunk's rows and columns, `r` the heads of
a group.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.manual_axes import vary_over, varying_axes
from fast_layers.ops.ssd.problem import Aux, Inputs, Problem, Residuals, Scanned, silu, step_sizes

_FORGETS_ALL = -1024.0
"""exp of this is 0 in every dtype, so dt A need not be below it."""
_UNITS = 32.0
"""Of the coarse part of dt A per 1: 2^9 tokens of down to -2^10 in steps of 2^-5 sum exactly in float32."""


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


def forward(problem: Problem, inputs: Inputs, aux: Aux) -> Scanned:
    return _on_platform(_forward, problem, inputs, aux)


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_final_state: Array) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    return _on_platform(_backward, problem, residuals, d_out, d_final_state)


def _on_platform(pass_, p: Problem, *operands):
    """With matmuls in x's dtype; but XLA's CPU has no 16-bit matmul for every layout, and none is faster."""
    wide = functools.partial(pass_, p, p.accumulator_dtype)
    if p.dtype == p.accumulator_dtype:
        return wide(*operands)
    return lax.platform_dependent(*operands, cpu=wide, default=functools.partial(pass_, p, p.dtype))


class _Chunked(NamedTuple):
    """Operands with heads in groups and the length padded to whole chunks, of tokens whose dt is 0."""

    x: Float[Array, "B L G R P"]
    dt: Float[Array, "B L G R"]  # as the recurrence takes it
    A: Float[Array, "G R"]
    B: Float[Array, "B L G N"]
    C: Float[Array, "B L G N"]
    D: Float[Array, "G R P|1"] | None
    z: Float[Array, "B L G R P"] | None
    document: Int[Array, "B L"] | None


class _Chunk(NamedTuple):
    """One chunk of the same; `before` is the document that the entering state belongs to."""

    x: Float[Array, "B Q G R P"]
    dt: Float[Array, "B G R Q"]
    B: Float[Array, "B Q G N"]
    C: Float[Array, "B Q G N"]
    z: Float[Array, "B Q G R P"] | None
    document: Int[Array, "B Q"] | None
    before: Int[Array, " B"] | None


class _Decays(NamedTuple):
    """Factors by which things have shrunk; 0 where a document's boundary lies between."""

    pairs: Float[Array, "B G R Q Q"]  # what entered at column s, by row q
    entering: Float[Array, "B G R Q"]  # the entering state, by row q
    leaving: Float[Array, "B G R Q"]  # what entered at each row, by the chunk's end

    @property
    def across(self) -> Float[Array, "B G R"]:
        """The entering state, by the chunk's end."""
        return self.entering[..., -1]


# Jitted, so that a model of many equal layers traces and lowers the loop once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(p: Problem, matmul_dtype: jnp.dtype, inputs: Inputs, aux: Aux) -> Scanned:
    chunked = _chunk_up(p, inputs, aux, _steps(p, inputs.dt, inputs.dt_bias))
    einsum = functools.partial(_einsum, matmul_dtype, p.accumulator_dtype)
    like = functools.partial(vary_over, axes=varying_axes(chunked.x))
    skip = _skip(p, chunked)

    def scan_chunk(c, carry):
        state, out_buffer = carry
        chunk = _slice_chunk(p, chunked, c)
        decays = _decays(p, chunked.A, chunk)
        out = _outputs(einsum, chunk, decays, _weights(einsum, chunk, decays), state)
        out = out + skip * chunk.x if skip is not None else out
        out = out * silu(chunk.z.astype(out.dtype)) if chunk.z is not None else out
        return _next_state(einsum, chunk, decays, state), _update(p, out_buffer, out, c)

    buffer = like(jnp.zeros(chunked.x.shape, p.dtype))
    final, out = lax.fori_loop(0, p.num_chunks, scan_chunk, (like(_initial_state(p, inputs)), buffer))
    return Scanned(_ungroup(p, out), final.reshape(p.batch, p.heads, p.head_dim, p.state_dim))


class _Sums(NamedTuple):
    """What the backward carries from chunk to chunk, in the accumulator's dtype."""

    state: Float[Array, "B G R P N"]
    A: Float[Array, "G R"]
    D: Float[Array, "G R P|1"] | None


class _Buffers(NamedTuple):
    """Gradients of the operands that have a length."""

    x: Float[Array, "B L G R P"]
    dt: Float[Array, "B L G R"]
    B: Float[Array, "B L G N"]
    C: Float[Array, "B L G N"]
    z: Float[Array, "B L G R P"] | None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(p: Problem, matmul_dtype: jnp.dtype, residuals: Residuals, d_out: Array, d_final_state: Array) -> Inputs:
    inputs, aux = residuals
    steps, pull_steps = jax.vjp(functools.partial(_steps, p), inputs.dt, inputs.dt_bias)
    chunked = _chunk_up(p, inputs, aux, steps)
    einsum = functools.partial(_einsum, matmul_dtype, p.accumulator_dtype)
    like = functools.partial(vary_over, axes=varying_axes(chunked.x))
    skip = _skip(p, chunked)
    d_outs = _group(p, d_out)
    initial = like(_initial_state(p, inputs))

    def save_state(c, carry):
        state, states = carry
        states = lax.dynamic_update_index_in_dim(states, state, c, 0)
        chunk = _slice_chunk(p, chunked, c)
        return _next_state(einsum, chunk, _decays(p, chunked.A, chunk), state), states

    states = like(jnp.zeros((p.num_chunks, *initial.shape), initial.dtype))
    _, states = lax.fori_loop(0, p.num_chunks, save_state, (initial, states))

    def scan_chunk(i, carry):
        sums, buffers = carry
        c = p.num_chunks - 1 - i
        chunk = _slice_chunk(p, chunked, c)
        state = lax.dynamic_index_in_dim(states, c, 0, keepdims=False)
        d_y = _slice(p, d_outs, c).astype(p.accumulator_dtype)
        decays = _decays(p, chunked.A, chunk)
        weights = _weights(einsum, chunk, decays)
        d_z = None
        if chunk.z is not None:
            out = _outputs(einsum, chunk, decays, weights, state)
            out = out + skip * chunk.x if skip is not None else out
            gate, pull_gate = jax.vjp(silu, chunk.z.astype(out.dtype))
            (d_z,) = pull_gate(d_y * out)
            d_y = d_y * gate

        d_pairs = einsum("bqgrp,bsgrp->bgrqs", d_y, chunk.x) * decays.pairs
        d_scores = (d_pairs * chunk.dt[..., None, :]).sum(2)
        scores = einsum("bqgn,bsgn->bgqs", chunk.C, chunk.B)[:, :, None]
        d_entering = einsum("bgrpn,bqgn->bqgrp", sums.state, chunk.B)
        d_reading = _rows(decays.entering) * d_y
        entering = _rows(decays.leaving * chunk.dt)

        d_x = einsum("bgrqs,bqgrp->bsgrp", weights, d_y) + entering * d_entering
        d_x = d_x + skip * d_y if skip is not None else d_x
        d_B = einsum("bgqs,bqgn->bsgn", d_scores, chunk.C) + einsum("bqgrp,bgrpn->bqgn", entering * chunk.x, sums.state)
        d_C = einsum("bgqs,bsgn->bqgn", d_scores, chunk.B) + einsum("bqgrp,bgrpn->bqgn", d_reading, state)

        # Per unit of dt, and of the logarithm of the decay that each of the four terms holds.
        by_pair = d_pairs * scores
        by_leaving = decays.leaving * _heads_first((chunk.x * d_entering).sum(-1))
        d_dt = by_pair.sum(-2) + by_leaving
        by_reading = _heads_first((d_reading * einsum("bgrpn,bqgn->bqgrp", state, chunk.C)).sum(-1))
        across = decays.across * (sums.state * state).sum((-2, -1))
        d_log_decay = _d_log_decay(by_pair * chunk.dt[..., None, :], by_reading, by_leaving * chunk.dt, across)
        d_dt = d_dt + chunked.A[..., None] * d_log_decay

        d_state = decays.across[..., None, None] * sums.state + einsum("bqgrp,bqgn->bgrpn", d_reading, chunk.C)
        d_A = sums.A + (chunk.dt * d_log_decay).sum((0, -1))
        d_D = None
        if sums.D is not None:
            axes = (0, 1) if p.skip == "channel" else (0, 1, 4)
            d_D = sums.D + (d_y * chunk.x).sum(axes).reshape(sums.D.shape)
        tiles = _Buffers(d_x, d_dt.transpose(0, 3, 1, 2), d_B, d_C, d_z)
        buffers = jax.tree.map(lambda buffer, tile: _update(p, buffer, tile, c), buffers, tiles)
        return _Sums(d_state, d_A, d_D), buffers

    start = _Sums(
        d_final_state.astype(p.accumulator_dtype).reshape(initial.shape),
        like(jnp.zeros_like(chunked.A)),
        None if skip is None else like(jnp.zeros_like(skip)),
    )
    lengths = _Buffers(chunked.x, chunked.dt, chunked.B, chunked.C, chunked.z)
    sums, grads = lax.fori_loop(
        0, p.num_chunks, scan_chunk, (start, jax.tree.map(lambda x: like(jnp.zeros_like(x)), lengths))
    )
    d_dt, d_dt_bias = pull_steps(_ungroup(p, grads.dt))
    return Inputs(
        x=_ungroup(p, grads.x),
        dt=d_dt,
        A=sums.A.reshape(inputs.A.shape).astype(inputs.A.dtype),
        B=grads.B[:, : p.length],
        C=grads.C[:, : p.length],
        D=None if inputs.D is None else sums.D.reshape(inputs.D.shape).astype(inputs.D.dtype),
        z=None if grads.z is None else _ungroup(p, grads.z),
        dt_bias=d_dt_bias,
        initial_state=None
        if inputs.initial_state is None
        else sums.state.reshape(inputs.initial_state.shape).astype(inputs.initial_state.dtype),
    )


def _d_log_decay(pairs, reading, leaving, across) -> Float[Array, "B G R Q"]:
    """Gradient of each token's dt A: all that passed it, which is what entered before it and was read from it on.

    Sums of like terms; the usual difference of two cumulative sums cancels where decays are near 1.
    """
    tokens = jnp.arange(pairs.shape[-1])
    before = (tokens[:, None] < tokens).astype(pairs.dtype)  # [s, k]: entered before k
    from_on = (tokens[:, None] >= tokens).astype(pairs.dtype)  # [q, k]: read at k or later
    passed = jnp.einsum("bgrqs,sk->bgrqk", pairs, before, precision=lax.Precision.HIGHEST)
    passed = (passed * from_on).sum(-2)
    passed += jnp.einsum("bgrq,qk->bgrk", reading, from_on, precision=lax.Precision.HIGHEST)
    passed += jnp.einsum("bgrs,sk->bgrk", leaving, before, precision=lax.Precision.HIGHEST)
    return passed + across[..., None]


def _decays(p: Problem, A: Float[Array, "G R"], chunk: _Chunk) -> _Decays:
    tokens = jnp.arange(p.chunk)
    visible = tokens[:, None] >= tokens
    if chunk.document is not None:
        visible = visible & (chunk.document[:, :, None] == chunk.document[:, None, :])
    visible = visible.reshape(-1, 1, 1, p.chunk, p.chunk)
    log_decay = jnp.maximum(chunk.dt * A[..., None], _FORGETS_ALL)
    # In two parts, of which the first sums exactly: the difference of two sums is then as exact as one short sum, also
    # after tokens that forget nearly all. Each sum stays within a document, untouched by the others.
    coarse = jnp.round(log_decay * _UNITS) / _UNITS

    def cumulative(part):
        mask = jnp.broadcast_to(visible[:, 0, 0], (p.batch, p.chunk, p.chunk)).astype(part.dtype)
        return jnp.einsum("bqs,bgrs->bgrq", mask, part, precision=lax.Precision.HIGHEST)

    coarse, fine = cumulative(coarse), cumulative(log_decay - coarse)
    between = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
    # Masked before exp: above the diagonal it would overflow, and inf * 0 is NaN.
    pairs = jnp.exp(jnp.where(visible, between, -jnp.inf))
    # The last row once more, for the loop that needs no other.
    to_end = (coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)
    leaving = jnp.exp(jnp.where(visible[..., -1, :], to_end, -jnp.inf))
    entering = jnp.exp(coarse + fine)
    if chunk.document is not None and chunk.before is not None:
        entering = jnp.where((chunk.document == chunk.before[:, None])[:, None, None], entering, 0)
    return _Decays(pairs, entering, leaving)


def _weights(einsum, chunk: _Chunk, decays: _Decays) -> Float[Array, "B G R Q Q"]:
    """What row q takes of column s's x."""
    scores = einsum("bqgn,bsgn->bgqs", chunk.C, chunk.B)[:, :, None]
    return decays.pairs * scores * chunk.dt[..., None, :]


def _outputs(einsum, chunk: _Chunk, decays: _Decays, weights, state) -> Float[Array, "B Q G R P"]:
    """Before skip and gate."""
    return einsum("bgrqs,bsgrp->bqgrp", weights, chunk.x) + _rows(decays.entering) * einsum(
        "bqgn,bgrpn->bqgrp", chunk.C, state
    )


def _next_state(einsum, chunk: _Chunk, decays: _Decays, state) -> Float[Array, "B G R P N"]:
    entering = chunk.x * _rows(decays.leaving * chunk.dt)
    return decays.across[..., None, None] * state + einsum("bqgrp,bqgn->bgrpn", entering, chunk.B)


def _initial_state(p: Problem, inputs: Inputs) -> Float[Array, "B G R P N"]:
    shape = (p.batch, p.groups, p.heads_per_group, p.head_dim, p.state_dim)
    if inputs.initial_state is None:
        return jnp.zeros(shape, p.accumulator_dtype)
    return inputs.initial_state.astype(p.accumulator_dtype).reshape(shape)


def _steps(p: Problem, dt, dt_bias):
    return step_sizes(dt, dt_bias, softplus=p.dt_softplus, limit=p.dt_limit, dtype=p.accumulator_dtype)


def _chunk_up(p: Problem, inputs: Inputs, aux: Aux, steps: Float[Array, "B L H"]) -> _Chunked:
    per_group = (p.groups, p.heads_per_group)
    document = aux.document
    return _Chunked(
        x=_group(p, inputs.x),
        dt=_pad(p, steps.reshape(p.batch, p.length, *per_group)),
        A=inputs.A.astype(p.accumulator_dtype).reshape(per_group),
        B=_pad(p, inputs.B),
        C=_pad(p, inputs.C),
        D=None if inputs.D is None else inputs.D.reshape(*per_group, -1),
        z=None if inputs.z is None else _group(p, inputs.z),
        document=None if document is None else _pad(p, document, mode="edge"),
    )


def _slice_chunk(p: Problem, chunked: _Chunked, c) -> _Chunk:
    before = None
    if chunked.document is not None:
        last = jnp.maximum(c * p.chunk - 1, 0)
        before = lax.dynamic_index_in_dim(chunked.document, last, 1, keepdims=False)
    return _Chunk(
        x=_slice(p, chunked.x, c).astype(p.accumulator_dtype),
        dt=_heads_first(_slice(p, chunked.dt, c)),
        B=_slice(p, chunked.B, c),
        C=_slice(p, chunked.C, c),
        z=None if chunked.z is None else _slice(p, chunked.z, c),
        document=None if chunked.document is None else _slice(p, chunked.document, c),
        before=before,
    )


def _skip(p: Problem, chunked: _Chunked) -> Float[Array, "G R P|1"] | None:
    return None if chunked.D is None else chunked.D.astype(p.accumulator_dtype)


def _einsum(matmul_dtype, accumulator_dtype, subscripts: str, *operands: Array) -> Array:
    rounded = (x.astype(matmul_dtype) for x in operands)
    return jnp.einsum(subscripts, *rounded, preferred_element_type=accumulator_dtype)


def _rows(x: Float[Array, "B G R Q"]) -> Float[Array, "B Q G R 1"]:
    return x.transpose(0, 3, 1, 2)[..., None]


def _heads_first(x: Float[Array, "B Q G R"]) -> Float[Array, "B G R Q"]:
    return x.transpose(0, 2, 3, 1)


def _slice(p: Problem, x: Array, c) -> Array:
    return lax.dynamic_slice_in_dim(x, c * p.chunk, p.chunk, 1)


def _update(p: Problem, buffer: Array, tile: Array, c) -> Array:
    return lax.dynamic_update_slice_in_dim(buffer, tile.astype(buffer.dtype), c * p.chunk, 1)


def _pad(p: Problem, x: Array, mode: str = "constant") -> Array:
    missing = p.num_chunks * p.chunk - p.length
    if isinstance(missing, int) and missing == 0:
        return x
    return jnp.pad(x, [(0, missing if axis == 1 else 0) for axis in range(x.ndim)], mode=mode)


def _group(p: Problem, x: Float[Array, "B L H P"]) -> Float[Array, "B L G R P"]:
    return _pad(p, x.reshape(p.batch, p.length, p.groups, p.heads_per_group, p.head_dim))


def _ungroup(p: Problem, x: Float[Array, "B L G R *P"]) -> Float[Array, "B L H *P"]:
    return x[:, : p.length].reshape(p.batch, p.length, p.heads, *x.shape[4:])
