"""`causal_conv1d` and its step: validation, the static Problem, the choice of backend, and the gradient rule."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
from jaxtyping import Array, ArrayLike, Float

from fast_layers import dispatch
from fast_layers.ops.conv1d import reference, sharding
from fast_layers.ops.conv1d.activations import ACTIVATIONS
from fast_layers.ops.conv1d.backends import BACKENDS
from fast_layers.ops.conv1d.history import reach_of
from fast_layers.ops.conv1d.problem import Aux, Inputs, Outputs, Problem
from fast_layers.ops.operands import document_ids, floating
from fast_layers.ops.static_options import flag

OP = "causal_conv1d"
Activation = Literal["silu", "swish"]


def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    b: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    return_final_state: bool = False,
    implementation: str | None = None,
) -> Any:
    r"""y[t] = activation(b + sum_i w[i] * x[t - (W-1) + i]), each channel by itself: the convolution of Mamba.

    Axis letters: B examples, L positions, C channels, W taps (1 or more).

    Args:
      x: [B, L, C], floating point.
      w: [W, C], the oldest tap first, so that w[W-1] multiplies x[t]: `kernel[:, 0]` of a depthwise `nnx.Conv`,
        `weight[:, 0].T` of torch's `Conv1d`. Any floating dtype.
      b: [C], any floating dtype.
      activation: None, or "silu" (also called "swish").
      initial_state: [B, C, W-1], the inputs before x, oldest first; None: zeros. It belongs to the first position's
        document. The layout is that of the causal_conv1d package. mamba_ssm's decoding cache [B, C, W] holds one
        input more, its oldest, which no later output needs: take `cache[..., 1:]`.
      segment_ids: packed documents: int [B, L], or [L] for all examples. A document begins wherever the id changes,
        and no output sees across: neither values (not even NaN) nor gradients. No id has a meaning of its own, so
        padding is one more document.
      return_final_state: also return what `initial_state` of the next piece should be: the last W-1 inputs, 0 where
        those are not of the last position's document.
      implementation: a backend by name, which raises if it refuses; None takes the best (see `fast_layers.explain`).

    Returns:
      y [B, L, C] in x's dtype, summed in float32 (float64 for float64). With `return_final_state` a pair (y, state
      [B, C, W-1]); the state has `initial_state`'s dtype if there is one, else x's.

    The backward pass keeps the inputs only. The default backends support reverse mode; `implementation="reference"`
    also supports forward mode and higher derivatives, with W times the memory.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or a backend asked for by name that refuses.

    Source: the depthwise convolution of Gu and Dao, "Mamba" (2023), as in github.com/Dao-AILab/causal-conv1d.
    """
    flag("return_final_state", return_final_state)
    inputs = Inputs(
        floating("x", x),
        floating("w", w),
        None if b is None else floating("b", b),
        None if initial_state is None else floating("initial_state", initial_state),
    )
    if inputs.x.ndim != 3:
        raise ValueError(f"x must be [batch, length, channels], got {inputs.x.shape}; reshape, or use jax.vmap")
    batch, length, channels = inputs.x.shape
    for name, size in (("length", length), ("channels", channels)):
        if isinstance(size, int) and size == 0:
            raise ValueError(f"{name} is 0: must be at least 1; leave the call out for empty inputs {inputs.x.shape}")
    sharding.refuse_split_length("x", inputs.x)
    width = _check_kernel(inputs.w, inputs.b, channels)
    if inputs.initial_state is not None:
        _check_state("initial_state", inputs.initial_state, batch, channels, width)
    name = _check_activation(activation)
    aux = Aux() if segment_ids is None else Aux(reach_of(_check_segments(segment_ids, inputs.x), width - 1))
    run = functools.partial(_choose_and_run, name, return_final_state, implementation)
    y, state = sharding.per_shard(run, inputs, aux)
    return (y, state) if return_final_state else y


def causal_conv1d_step(
    state: ArrayLike,
    x: ArrayLike,
    w: ArrayLike,
    b: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
) -> tuple[Float[Array, "B C"], Float[Array, "B C W-1"]]:
    """One position of `causal_conv1d`, for decoding.

    Args:
      state: [B, C, W-1], the inputs before x, oldest first: `causal_conv1d`'s final state, or zeros.
      x: [B, C], floating point.
      w, b, activation: as in `causal_conv1d`.

    Returns:
      (y [B, C] in x's dtype, the next state in `state`'s dtype).

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
    """
    x = floating("x", x)
    if x.ndim != 2:
        raise ValueError(f"x must be [batch, channels], got {x.shape}; for several positions use causal_conv1d")
    w, state = floating("w", w), floating("state", state)
    b = None if b is None else floating("b", b)
    batch, channels = x.shape
    _check_state("state", state, batch, channels, _check_kernel(w, b, channels))
    y, new_state = causal_conv1d(x[:, None], w, b, activation=activation, initial_state=state, return_final_state=True)
    return y[:, 0], new_state


def _choose_and_run(
    activation: str | None, final_state: bool, implementation: str | None, inputs: Inputs, aux: Aux
) -> Outputs:
    batch, length, channels = inputs.x.shape
    problem = Problem(
        batch=batch,
        length=length,
        channels=channels,
        width=inputs.w.shape[0],
        dtype=inputs.x.dtype,
        activation=activation,
        bias=inputs.b is not None,
        segments=aux.reach is not None,
        initial_state=inputs.initial_state is not None,
        final_state=final_state,
    )
    plan = dispatch.plan(OP, BACKENDS, problem, implementation)
    with jax.numpy_rank_promotion("allow"):
        both = [plan.sole_backend(pass_) for pass_ in dispatch.PASSES]
        if all(backend is not None and backend.fwd is reference.forward for backend in both):
            # Without a gradient rule of ours, JAX differentiates the formula itself, forward and reverse, to any order.
            return reference.forward(problem, inputs, aux)
        return _convolve(plan, inputs, aux)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(plan: dispatch.Plan, inputs: Inputs, aux: Aux) -> Outputs:
    return plan.run("forward", inputs, aux)


def _convolve_fwd(plan: dispatch.Plan, inputs: Inputs, aux: Aux):
    return plan.run("forward", inputs, aux), (inputs, aux)


def _convolve_bwd(plan: dispatch.Plan, residuals: tuple[Inputs, Aux], gradients: Outputs):
    with jax.numpy_rank_promotion("allow"):
        return plan.run("backward", *residuals, gradients), None


_convolve.defvjp(_convolve_fwd, _convolve_bwd)


def _check_kernel(w: Array, b: Array | None, channels: int) -> int:
    """The number of taps."""
    if w.ndim != 2 or w.shape[1] != channels or w.shape[0] == 0:
        raise ValueError(
            f"w must have shape (taps, channels) = (1 or more, {channels}), got {w.shape}; "
            "that is kernel[:, 0] of a depthwise nnx.Conv, or weight[:, 0].T of torch's Conv1d"
        )
    if b is not None and b.shape != (channels,):
        raise ValueError(f"b must have shape (channels,) = ({channels},), got {b.shape}")
    return w.shape[0]


def _check_state(name: str, state: Array, batch: int, channels: int, width: int) -> None:
    wanted = (batch, channels, width - 1)
    if state.shape != wanted:
        hint = "; mamba_ssm's cache has one input more: pass cache[..., 1:]" if state.shape[-1:] == (width,) else ""
        raise ValueError(f"{name} must have shape (batch, channels, taps - 1) = {wanted}, got {state.shape}{hint}")


def _check_activation(activation: Any) -> str | None:
    named = activation is None or isinstance(activation, str)
    name = "silu" if named and activation == "swish" else activation
    if not named or name not in ACTIVATIONS:
        raise ValueError(f'activation={activation!r}: must be None, "silu" or "swish"; apply others to the output')
    return name


def _check_segments(segment_ids: ArrayLike, x: Array) -> Array:
    """[B|1, L]."""
    ids = document_ids(segment_ids)
    if ids.shape not in (x.shape[:2], x.shape[1:2]):
        raise ValueError(
            f"segment_ids must have shape (batch, length) = {x.shape[:2]} or (length,) = {x.shape[1:2]}, "
            f"got {ids.shape}"
        )
    ids = ids.reshape(-1, x.shape[1]) if ids.ndim == 1 else ids
    sharding.refuse_split_length("segment_ids", ids)
    return ids
