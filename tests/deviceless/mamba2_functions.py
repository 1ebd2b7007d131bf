"""Functions around the state-space scan that the process which compiles imports."""

from __future__ import annotations

import jax

import fast_layers


def conv(operands: tuple, d_out, segment_ids=None):
    """Values and all gradients."""

    def op(operands):
        x, w, b, state = operands
        return fast_layers.causal_conv1d(
            *(x, w, b),
            activation="silu",
            initial_state=state,
            segment_ids=segment_ids,
            return_final_state=state is not None,
            implementation="hopper",
        )

    out, pull = jax.vjp(op, operands)
    return out, pull(d_out)


def norm(operands: tuple, d_out, *, group_size: int, norm_before_gate: bool):
    """Values and all gradients."""

    def op(operands):
        options = {"group_size": group_size, "norm_before_gate": norm_before_gate, "implementation": "hopper"}
        return fast_layers.gated_rms_norm(*operands, **options)

    out, pull = jax.vjp(op, operands)
    return out, pull(d_out)
