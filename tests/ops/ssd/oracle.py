"""The scan and all its gradients in numpy, token by token: shares nothing with the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Operands(NamedTuple):
    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any = None
    z: Any = None
    dt_bias: Any = None
    initial_state: Any = None


class Answer(NamedTuple):
    out: Any
    final_state: Any
    grads: Operands


def scan(
    operands: Operands,
    d_out: np.ndarray,
    d_final: np.ndarray,
    *,
    softplus: bool = False,
    limit: tuple[float, float] = (0.0, np.inf),
    starts: np.ndarray | None = None,
    dtype: Any = np.float64,
    in_order: bool = False,
) -> Answer:
    """`starts` [B, L] is True at each document's first token. `in_order`: sums term by term, as plain loops do; numpy
    adds in pairs, which is more exact than most.
    """
    x, raw_dt, A, B, C, D, z, bias, initial = (None if v is None else np.asarray(v).astype(dtype) for v in operands)
    d_out, d_final = d_out.astype(dtype), d_final.astype(dtype)
    batch, length, heads, head_dim = x.shape
    groups, state_dim = B.shape[2:]
    per_group = heads // groups
    B, C = (np.repeat(v, per_group, axis=2) for v in (B, C))
    one = dtype(1)

    def add(x, *axes):
        if not in_order:
            return x.sum(axes)
        x = np.moveaxis(x, axes, range(-len(axes), 0))
        return np.cumsum(x.reshape(*x.shape[: -len(axes)], -1), -1)[..., -1]

    def by_group(x):
        return add(x.reshape(batch, groups, per_group, head_dim, state_dim), 2, 3)

    biased = raw_dt if bias is None else raw_dt + bias
    smooth, d_smooth = biased, np.ones_like(biased)
    if softplus:
        low = np.minimum(biased, dtype(20))
        smooth = np.where(biased > 20, biased, np.log1p(np.exp(low)))
        d_smooth = np.where(biased > 20, one, one / (one + np.exp(-low)))
    dt = np.clip(smooth, *map(dtype, limit))
    d_clip = ((smooth >= limit[0]) & (smooth <= limit[1])).astype(dtype)

    start = state = np.zeros((batch, heads, head_dim, state_dim), dtype) if initial is None else initial
    keeps = np.ones((batch, length), dtype) if starts is None else 1 - starts.astype(dtype)
    decays = np.exp(dt * A)
    after, read = [], []

    def entering(t):
        return (after[t - 1] if t else start) * keeps[:, t, None, None, None]

    for t in range(length):
        token = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        state = decays[:, t, :, None, None] * entering(t) + token
        after.append(state)
        read.append(add(after[t] * C[:, t, :, None], -1))
    final = state
    read = np.stack(read, 1)
    skip = None if D is None else D.reshape(heads, -1)
    total = read if skip is None else read + skip * x
    sigmoid = None if z is None else one / (one + np.exp(-z))
    out = total if z is None else total * z * sigmoid

    d_total = d_out if z is None else d_out * z * sigmoid
    d_z = None if z is None else d_out * total * sigmoid * (one + z * (one - sigmoid))
    d_x = np.zeros_like(x) if skip is None else d_total * skip
    d_D = None if D is None else add(d_total * x, *((0, 1) if D.ndim == 2 else (0, 1, 3)))
    d_B, d_C = (np.zeros((batch, length, groups, state_dim), dtype) for _ in range(2))
    d_dt, d_log = np.zeros_like(dt), np.zeros_like(dt)
    d_state = d_final
    for t in reversed(range(length)):
        d_C[:, t] = by_group(after[t] * d_total[:, t, :, :, None])
        d_state = d_state + d_total[:, t, :, :, None] * C[:, t, :, None]
        by_B = add(d_state * B[:, t, :, None], -1)
        d_x[:, t] += dt[:, t, :, None] * by_B
        d_dt[:, t] = add(by_B * x[:, t], -1)
        d_B[:, t] = by_group(d_state * (dt[:, t, :, None] * x[:, t])[..., None])
        d_log[:, t] = decays[:, t] * add(d_state * entering(t), -2, -1)
        d_state = d_state * (decays[:, t] * keeps[:, t, None])[..., None, None]
    d_dt = (d_dt + d_log * A) * d_clip * d_smooth
    grads = Operands(
        d_x,
        d_dt,
        add(d_log * dt, 0, 1),
        d_B,
        d_C,
        d_D,
        d_z,
        None if bias is None else add(d_dt, 0, 1),
        None if initial is None else d_state,
    )
    return Answer(out, final, grads)
