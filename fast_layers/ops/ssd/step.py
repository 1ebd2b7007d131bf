"""`ssd_step`: one token of the recurrence, for decoding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fast_layers.ops.ssd import check
from fast_layers.ops.ssd.problem import Inputs, silu, step_sizes
from fast_layers.ops.static_options import flag


class Token(NamedTuple):
    """One token's operands, in the accumulator's dtype; `dt` as the recurrence takes it."""

    x: Float[Array, "B H P"]
    dt: Float[Array, "B H"]
    B: Float[Array, "B G N"]
    C: Float[Array, "B G N"]


def advance(state: Float[Array, "B H P N"], decay: Float[Array, "B H"], token: Token) -> Float[Array, "B H P N"]:
    """decay * state + dt x B^T."""
    per_group = state.shape[1] // token.B.shape[1]
    entering = (token.dt[..., None] * token.x)[..., None] * jnp.repeat(token.B, per_group, axis=1)[:, :, None, :]
    return decay[..., None, None] * state + entering


def read(state: Float[Array, "B H P N"], token: Token) -> Float[Array, "B H P"]:
    """The state's product with C."""
    per_group = state.shape[1] // token.C.shape[1]
    return (state * jnp.repeat(token.C, per_group, axis=1)[:, :, None, :]).sum(-1)


def ssd_step(
    state: ArrayLike,
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
) -> tuple[Float[Array, "B H P"], Float[Array, "B H P N"]]:
    """One token of `ssd`: what the whole sequence gives at this position, from the state before it.

    Args:
      state: [B, H, P, N], floating point: the state before this token; zeros, or `ssd`'s final state. float32 keeps
        long decodes exact.
      x: [B, H, P], floating point; B, C and z have the same dtype.
      dt: [B, H].
      A: [H], negative.
      B, C: [B, G, N], H a multiple of G.
      D, z, dt_bias, dt_softplus, dt_limit: as in `ssd`, z [B, H, P].

    Returns:
      (y [B, H, P] in x's dtype, the new state in state's dtype). Differentiable by JAX, forward and reverse.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.

    Source: Dao and Gu, "Transformers are SSMs" (2024).
    """
    given = check.step(state, x, dt, A, B, C, D, z, dt_bias)
    limit = check.dt_limit(dt_limit)
    flag("dt_softplus", dt_softplus)
    # A user's ban on implicit rank promotion is about the user's own arrays.
    with jax.numpy_rank_promotion("allow"):
        return _step(given, dt_softplus, limit)


def _step(
    given: Inputs, dt_softplus: bool, limit: tuple[float, float]
) -> tuple[Float[Array, "B H P"], Float[Array, "B H P N"]]:
    old = given.initial_state
    assert old is not None
    dtype = jnp.dtype(jnp.float64 if given.x.dtype == jnp.float64 else jnp.float32)
    steps = step_sizes(given.dt, given.dt_bias, softplus=dt_softplus, limit=limit, dtype=dtype)
    token = Token(given.x.astype(dtype), steps, given.B.astype(dtype), given.C.astype(dtype))
    new = advance(old.astype(dtype), jnp.exp(steps * given.A.astype(dtype)), token)
    out = read(new, token)
    if given.D is not None:
        skip = given.D.astype(dtype)
        out = out + (skip[:, None] if skip.ndim == 1 else skip) * token.x
    if given.z is not None:
        out = out * silu(given.z.astype(dtype))
    return out.astype(given.x.dtype), new.astype(old.dtype)
