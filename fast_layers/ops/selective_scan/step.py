"""`selective_scan_step`: one token of the recurrence, for decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fast_layers.ops.selective_scan import check
from fast_layers.ops.selective_scan.problem import Inputs
from fast_layers.ops.selective_scan.recurrence import UNLIMITED
from fast_layers.ops.ssd.problem import silu, step_sizes
from fast_layers.ops.static_options import flag


def selective_scan_step(
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
) -> tuple[Float[Array, "B D"], Float[Array, "B D N"]]:
    """One token of `selective_scan`: what the whole sequence gives at this position, from the state before it.

    Args:
      state: [B, D, N], floating point: the state before this token; zeros, or `selective_scan`'s final state.
      x, dt: [B, D]; B and C: [B, N] or [B, G, N].
      A, D, z, dt_bias, dt_softplus: as in `selective_scan`, z [B, D].

    Returns:
      (y [B, D] in x's dtype, the new state in state's dtype). Differentiable by JAX, forward and reverse.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023).
    """
    flag("dt_softplus", dt_softplus)
    given = check.operands(x, dt, A, B, C, D, z, dt_bias, state, rows=("batch",), state_name="state")
    # A user's ban on implicit rank promotion is about the user's own arrays.
    with jax.numpy_rank_promotion("allow"):
        return _step(given, dt_softplus)


def _step(given: Inputs, dt_softplus: bool) -> tuple[Float[Array, "B D"], Float[Array, "B D N"]]:
    old = given.initial_state
    assert old is not None
    dtype = jnp.dtype(jnp.float64 if given.x.dtype == jnp.float64 else jnp.float32)
    steps = step_sizes(given.dt, given.dt_bias, softplus=dt_softplus, limit=UNLIMITED, dtype=dtype)
    tokens = given.x.astype(dtype)
    per_group = given.A.shape[0] // given.B.shape[1]
    entering, read = (jnp.repeat(v.astype(dtype), per_group, axis=1) for v in (given.B, given.C))
    decay = jnp.exp(steps[..., None] * given.A.astype(dtype))
    new = decay * old.astype(dtype) + (steps * tokens)[..., None] * entering
    out = (new * read).sum(-1)
    if given.D is not None:
        out = out + given.D.astype(dtype) * tokens
    if given.z is not None:
        out = out * silu(given.z.astype(dtype))
    return out.astype(given.x.dtype), new.astype(old.dtype)
