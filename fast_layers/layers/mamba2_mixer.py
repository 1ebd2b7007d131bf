"""What happens between a Mamba-2 mixer's two projections; shared by the NNX and the Linen layer.

Axis letters: B any number of batch dims, T positions, H heads, P channels of a head, G groups, N state size, W taps of
the convolution, C its channels: x, B and C of all heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fast_layers.layers.mamba2_options import Mamba2Options
from fast_layers.ops.conv1d import causal_conv1d, causal_conv1d_step
from fast_layers.ops.gated_norm import gated_rms_norm
from fast_layers.ops.operands import document_ids, to_array
from fast_layers.ops.ssd import ssd, ssd_step


class Mamba2State(NamedTuple):
    """All that later positions need to know of earlier ones; its size does not depend on how many there were.

    `conv` holds the convolution's last W-1 inputs, oldest first. mamba_ssm's cache [B, C, W] has one more in front.
    """

    conv: Float[Array, "*B C W-1"]
    ssm: Float[Array, "*B H P N"]

    @staticmethod
    def shapes(options: Mamba2Options, batch: tuple[int, ...]) -> Mamba2State:
        o = options
        conv, ssm = (*batch, o.conv_channels, o.d_conv - 1), (*batch, o.heads, o.headdim, o.d_state)
        return Mamba2State(conv, ssm)  # pyright: ignore[reportArgumentType]


class MixerWeights(NamedTuple):
    conv_kernel: Float[Array, "W 1 C"]
    conv_bias: Float[Array, " C"] | None
    dt_bias: Float[Array, " H"]
    A_log: Float[Array, " H"]
    D: Float[Array, " H"] | Float[Array, " HP"]
    norm_scale: Float[Array, " HP"] | None


def check_input(options: Mamba2Options, u: ArrayLike) -> Array:
    """As an array. Integers are taken: the projection promotes them."""
    u = to_array("u", u)
    if not any(jnp.issubdtype(u.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(f"u has dtype {u.dtype}: must be real; pass u.real, or both parts as features")
    if u.ndim < 2 or u.shape[-1] != options.d_model:
        raise ValueError(f"u must be [batch.., length, d_model] with d_model={options.d_model}, got {u.shape}")
    if isinstance(u.shape[-2], int) and u.shape[-2] == 0:  # others are symbols, of which none is 0
        raise ValueError(f"u has length 0, shape {u.shape}: there is nothing to mix; leave the call out")
    return u


def check_state(options: Mamba2Options, state: Mamba2State, batch: tuple[int, ...], origin: str) -> Mamba2State:
    """`state` as a Mamba2State. `origin` says where it comes from, for the message."""
    if not isinstance(state, tuple | list) or len(state) != 2:
        items = len(state) if isinstance(state, tuple | list) else None
        got = type(state).__name__ if items is None else f"{items} item{'' if items == 1 else 's'}"
        raise ValueError(f"{origin}: the state must be a pair (conv, ssm), as an earlier call returned; got {got}")
    conv, ssm = (to_array(f"{origin}: {name}", x) for name, x in zip(Mamba2State._fields, state, strict=True))
    wanted = Mamba2State.shapes(options, batch)
    if (conv.shape, ssm.shape) != tuple(wanted):
        hint = ""
        if conv.shape[-1:] == (options.d_conv,):
            hint = "; mamba_ssm's cache of the convolution has one input more: pass cache[..., 1:]"
        raise ValueError(
            f"{origin}: the state must have shapes {wanted.conv} and {wanted.ssm} for a batch of {batch}, "
            f"got {conv.shape} and {ssm.shape}{hint}"
        )
    return Mamba2State(conv, ssm)


def refuse_in_decode(*, segment_ids: ArrayLike | None, initial_state: Mamba2State | None) -> None:
    for name, given in (("segment_ids", segment_ids), ("initial_state", initial_state)):
        if given is not None:
            raise ValueError(
                f"{name} with decode=True: the cache holds one document per example, and is the state; decode "
                "documents as examples of their own, or take decode=False and return_final_state=True"
            )


def mix(
    options: Mamba2Options,
    weights: MixerWeights,
    projected: Float[Array, "*B T F"],
    segment_ids: ArrayLike | None,
    state: Mamba2State | None,
    *,
    return_state: bool,
) -> tuple[Float[Array, "*B T E"], Mamba2State | None]:
    """What `out_proj` takes, from what `in_proj` gave; and the state after it, in `state`'s dtypes if there is one."""
    o = options
    *batch, length, _ = projected.shape
    rows = math.prod(batch)
    projected = projected.reshape(rows, *projected.shape[-2:])
    if segment_ids is not None:
        segment_ids = document_ids(segment_ids)
        if segment_ids.ndim > 1:
            _check_ids(segment_ids, (*batch, length))
            segment_ids = segment_ids.reshape(rows, length)
    if state is not None:
        state = Mamba2State(*(x.reshape(rows, *x.shape[len(batch) :]) for x in state))

    borders = [sum(o.projections[: i + 1]) for i in range(len(o.projections) - 1)]
    mlp_gate, mlp_value, z, xbc, dt = jnp.split(projected, borders, axis=-1)
    y, new_state = _scan(o, weights, xbc, dt, None if o.rmsnorm else z, segment_ids, state, return_state)
    if weights.norm_scale is not None:
        y = gated_rms_norm(
            y,
            z,
            weights.norm_scale,
            group_size=o.scanned // o.ngroups,
            eps=o.norm_eps,
            norm_before_gate=o.norm_before_gate,
        )
    if o.d_mlp:
        y = jnp.concatenate([jax.nn.silu(mlp_gate) * mlp_value, y], axis=-1)

    y = y.reshape(*batch, length, o.d_inner)
    if new_state is not None:
        new_state = Mamba2State(*(x.reshape(*batch, *x.shape[1:]) for x in new_state))
    return y, new_state


def _scan(
    o: Mamba2Options,
    weights: MixerWeights,
    xbc: Float[Array, "B T C"],
    dt: Float[Array, "B T H"],
    gate: Float[Array, "B T HP"] | None,
    segment_ids: Array | None,
    state: Mamba2State | None,
    return_state: bool,
) -> tuple[Float[Array, "B T HP"], Mamba2State | None]:
    kernel, bias = weights.conv_kernel[:, 0], weights.conv_bias
    A = -jnp.exp(weights.A_log.astype(jnp.promote_types(weights.A_log.dtype, jnp.float32)))
    arguments = {
        "D": weights.D.reshape(o.heads, o.headdim) if o.D_has_hdim else weights.D,
        "dt_bias": weights.dt_bias,
        "dt_softplus": True,
        "dt_limit": o.dt_limit,
    }
    if state is not None and return_state and segment_ids is None and xbc.shape[1] == 1:
        activated, conv = causal_conv1d_step(state.conv, xbc[:, 0], kernel, bias, activation="silu")
        x, B, C = _split(o, activated)
        z = None if gate is None else gate[:, 0].reshape(x.shape)
        y, ssm = ssd_step(state.ssm, x, dt[:, 0], A, B, C, z=z, **arguments)
        return y.reshape(y.shape[0], 1, o.scanned), Mamba2State(conv, ssm)

    def with_state(result) -> tuple[Array, Array | None]:
        return result if return_state else (result, None)

    activated, conv = with_state(
        causal_conv1d(
            xbc,
            kernel,
            bias,
            activation="silu",
            initial_state=None if state is None else state.conv,
            segment_ids=segment_ids,
            return_final_state=return_state,
        )
    )
    x, B, C = _split(o, activated)
    y, ssm = with_state(
        ssd(
            x,
            dt,
            A,
            B,
            C,
            z=None if gate is None else gate.reshape(x.shape),
            initial_state=None if state is None else state.ssm,
            segment_ids=segment_ids,
            chunk_size=o.chunk_size,
            return_final_state=return_state,
            implementation=o.implementation,
            **arguments,
        )
    )
    y = y.reshape(*y.shape[:2], o.scanned)
    if conv is None or ssm is None:
        return y, None
    return y, Mamba2State(conv, ssm if state is None else ssm.astype(state.ssm.dtype))


def _split(o: Mamba2Options, xbc: Float[Array, "*B C"]) -> tuple[Array, Array, Array]:
    """x [.., H, P], B [.., G, N], C [.., G, N]."""
    x, B, C = jnp.split(xbc, [o.scanned, o.scanned + o.ngroups * o.d_state], axis=-1)
    *leading, _ = xbc.shape
    groups = (*leading, o.ngroups, o.d_state)
    return x.reshape(*leading, o.heads, o.headdim), B.reshape(groups), C.reshape(groups)


def _check_ids(ids: Array, wanted: tuple[int, ...]) -> None:
    if ids.shape != wanted:
        raise ValueError(f"segment_ids must have shape {wanted} or {wanted[-1:]}, got {ids.shape}")
