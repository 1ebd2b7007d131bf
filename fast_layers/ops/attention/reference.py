"""Attention as the formula says, in float32 and with the whole score matrix: the oracle of every test.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.
Written in plain jnp, so JAX differentiates it any number of times, forward and reverse.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fast_layers.kernel_parts import dropout
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals, finite_or_zero, poison


class Attended(NamedTuple):
    out: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]
    weights: Float[Array, "B N T S"]


def attend(problem: Problem, inputs: Inputs, aux: Aux) -> Attended:
    """Output, lse and the softmax weights before dropout."""
    p = problem
    precision = lax.Precision.HIGHEST if p.precision is None else p.precision
    query, key, value = (x.astype(p.accumulator_dtype) for x in inputs[:3])
    key, value = (jnp.repeat(x, p.group, axis=2) for x in (key, value))

    scores = jnp.einsum("BTNH,BSNH->BNTS", finite_or_zero(query), finite_or_zero(key), precision=precision)
    scores = scores * p.scale
    if p.softcap is not None:
        scores = p.softcap * jnp.tanh(scores / p.softcap)
    if inputs.bias is not None:
        scores = scores + inputs.bias.astype(scores.dtype)
    scores += poison(query).swapaxes(1, 2)[..., None] + poison(key, value).swapaxes(1, 2)[..., None, :]
    visible = aux.mask.as_array(p.q_len, p.kv_len)
    scores = jnp.where(visible, scores, -jnp.inf)

    row_max = lax.stop_gradient(scores.max(-1))
    sees_none = (scores == -jnp.inf).all(-1)  # not by row_max: XLA's CPU maximum may pass over NaN
    row_max = jnp.where(sees_none, 0.0, row_max)
    if inputs.sinks is not None:
        row_max = jnp.maximum(row_max, lax.stop_gradient(inputs.sinks.astype(scores.dtype))[:, None])
    unnormalised = jnp.exp(scores - row_max[..., None])
    row_sum = unnormalised.sum(-1)
    if inputs.sinks is not None:
        row_sum += jnp.exp(inputs.sinks.astype(scores.dtype)[:, None] - row_max)
    row_sum = jnp.where(sees_none, 1.0, row_sum)
    # A row that has seen a broken key has a sum of NaN; the keys that it does not see still weigh nothing.
    weights = jnp.where(scores == -jnp.inf, 0.0, unnormalised / row_sum[..., None])
    lse = jnp.where(sees_none, -jnp.inf, row_max + jnp.log(row_sum))

    kept = weights
    if aux.dropout is not None:
        blocks = -(-p.kv_len // dropout.KEYS_PER_BLOCK)
        keep = dropout.keep_tile(aux.dropout, 0, 0, p.q_len, blocks * dropout.KEYS_PER_BLOCK, p.dropout_rate)[
            ..., : p.kv_len
        ]
        kept = jnp.where(keep, weights / (1.0 - p.dropout_rate), 0.0)
    out = jnp.einsum("BNTS,BSNV->BTNV", kept, finite_or_zero(value), precision=precision)
    # Not only the value is 0: a cotangent of NaN must not come through either.
    out = jnp.where(sees_none.swapaxes(1, 2)[..., None], 0.0, out)
    return Attended(out.astype(p.dtype), lse, weights.astype(p.dtype))


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


def forward(problem: Problem, inputs: Inputs, aux: Aux):
    return attend(problem, inputs, aux)[:2]


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_lse: Array) -> Inputs:
    """Gradients for another backend's residuals: differentiates the formula anew."""
    _, pull = jax.vjp(lambda inputs: forward(problem, inputs, residuals.aux), residuals.inputs)
    return pull((d_out, d_lse))[0]
