"""What XLA makes of the results of the backward's kernels: sums of a few numbers for each token and head.

Axis letters as in `problem`; C chunks of Q tokens, as many as the kernels take.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fast_layers.ops.ssd import xla
from fast_layers.ops.ssd.hopper_call import Decays
from fast_layers.ops.ssd.problem import Inputs, Problem, silu


class Sums(NamedTuple):
    """Of each token and head, in float32; T is d_weights * weights, from the token that wrote to the one that read."""

    wrote: Float[Array, "B C Q H"]
    """Of d_weights * scores * decay over the tokens that read, without the dt of the one that wrote."""
    left: Float[Array, "B C Q H"]
    """Of x G B over channels, with G the gradient of the state leaving the chunk."""
    read: Float[Array, "B C Q H"]
    """Of dy S C over channels, with S the state entering the chunk."""
    passed: Float[Array, "B C Q H"]
    """Of T over the pairs that pass the token."""
    kept: Float[Array, "B C H"]
    """Of S G over channels and states."""
    skipped: Float[Array, "B C Q H"] | None
    """Of x dy over channels; None where that is left to XLA."""


class KernelGrads(NamedTuple):
    """As long as the inputs are; `y` is what the scan gave, less D x, which only a gate asks for."""

    x: Float[Array, "B L H P"]
    B: Float[Array, "B L G N"]
    C: Float[Array, "B L G N"]
    initial_state: Float[Array, "B H P N"]
    y: Float[Array, "B L H P"] | None
    sums: Sums


def before_gate(inputs: Inputs, d_out: Array) -> Float[Array, "B L H P"]:
    d_out = d_out.astype(jnp.float32)
    return d_out if inputs.z is None else d_out * silu(inputs.z.astype(jnp.float32))


def assemble(p: Problem, inputs: Inputs, d_out: Array, decays: Decays, grads: KernelGrads) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    sums = grads.sums
    tokens = jnp.arange(decays.dt.shape[2])
    product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    from_on = (tokens[:, None] >= tokens).astype(sums.read.dtype)
    d_log_decay = sums.passed + product("bcqh,qk->bckh", decays.entering * sums.read, from_on)
    d_log_decay += product("bcsh,sk->bckh", decays.leaving * decays.dt * sums.left, 1.0 - from_on)
    d_log_decay += decays.entering[:, :, -1:] * sums.kept[:, :, None]
    rates = inputs.A.astype(decays.dt.dtype)
    d_steps = sums.wrote + decays.leaving * sums.left + rates * d_log_decay
    _, pull_steps = jax.vjp(functools.partial(xla._steps, p), inputs.dt, inputs.dt_bias)
    d_dt, d_dt_bias = pull_steps(d_steps.reshape(p.batch, -1, p.heads)[:, : p.length])
    return Inputs(
        x=grads.x,
        dt=d_dt,
        A=(decays.dt * d_log_decay).sum((0, 1, 2)).astype(inputs.A.dtype),
        B=grads.B.astype(p.dtype),
        C=grads.C.astype(p.dtype),
        D=None if inputs.D is None else _d_skip(p, inputs, d_out, sums.skipped).astype(inputs.D.dtype),
        z=None if inputs.z is None else _d_gate(p, inputs, d_out, grads.y),
        dt_bias=d_dt_bias,
        initial_state=None if inputs.initial_state is None else grads.initial_state.astype(inputs.initial_state.dtype),
    )


def _d_skip(p: Problem, inputs: Inputs, d_out: Array, skipped: Array | None) -> Float[Array, " *H"]:
    if skipped is not None:
        return skipped.sum((0, 1, 2))
    d_D = (inputs.x.astype(jnp.float32) * before_gate(inputs, d_out)).sum((0, 1))
    return d_D.sum(1) if p.skip == "head" else d_D


def _d_gate(p: Problem, inputs: Inputs, d_out: Array, y: Array | None) -> Float[Array, "B L H P"]:
    assert inputs.z is not None
    assert y is not None
    y = y.astype(jnp.float32)
    if inputs.D is not None:
        y += inputs.D.astype(jnp.float32).reshape(p.heads, -1) * inputs.x.astype(jnp.float32)
    _, pull_gate = jax.vjp(silu, inputs.z.astype(jnp.float32))
    return pull_gate(d_out.astype(jnp.float32) * y)[0].astype(p.dtype)
