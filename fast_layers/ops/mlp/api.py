"""`mlp` and `linear`: validation, the static Problem, the choice of backend, and the gradient rule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Float

from fast_layers import dispatch
from fast_layers.ops.mlp import reference, sharding
from fast_layers.ops.mlp.activations import canonical_name
from fast_layers.ops.mlp.backends import BACKENDS
from fast_layers.ops.mlp.float8 import FORMATS, Float8
from fast_layers.ops.mlp.problem import SAVES, Inputs, Problem, Residuals, Save
from fast_layers.ops.operands import floating
from fast_layers.ops.static_options import hashable_precision, one_of

OP = "mlp"
RESIDUAL_NAMES = ("fast_layers_mlp_pre_activation", "fast_layers_mlp_pre_gate")
"""`checkpoint_name`s of what the forward saves, for `jax.checkpoint_policies.save_only_these_names`."""


def mlp(
    x: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    w_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    b_gate: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    activation: str | None = "gelu_tanh",
    save: Save = "pre_activation",
    precision: Any = None,
    float8: Float8 | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B O"]:
    r"""h w_down + b_down, where h = activation(x w_up + b_up), or activation(x w_gate + b_gate) * (x w_up + b_up).

    Axis letters: B any number of leading dims (also none), I input features, F hidden features, O output features.

    Args:
      x: [B.., I], bfloat16, float16, float32 or float64; all other operands have the same dtype.
      w_up: [I, F], as a Flax kernel.
      w_down: [F, O].
      w_gate: [I, F]; given, the MLP is gated: activation "silu" makes it SwiGLU, "gelu" or "gelu_tanh" GEGLU, "relu"
        ReGLU, "sigmoid" GLU, "identity" the bilinear one.
      b_up, b_gate: [F]. b_down: [O].
      activation: "identity" (or None), "relu", "relu_squared", "gelu" (by the error function), "gelu_tanh" (its tanh
        approximation), "silu" (also "swish") or "sigmoid"; computed in float32 (float64 for float64).
      save: what stays in memory for the backward besides the inputs. "pre_activation": x w_up + b_up, and
        x w_gate + b_gate, [B.., F] each, in x's dtype; "inputs": nothing, and the backward computes them again, one
        or two matmuls more.
      precision: of the matmuls, forward and backward, as in `jax.lax.dot_general`.
      float8: "e4m3" or "e5m2": the forward's matmuls take their operands (x, the weights, h) rounded to 8 bits, each
        divided before by a scale of its own, the least power of two with which its largest element fits; products are
        summed in float32. Biases, activation and what is saved stay as they are, and gradients are those of operands
        that were not rounded, in x's dtype. Not for float64.
      implementation: a backend by name, which raises if it refuses; None takes the best (see `fast_layers.explain`).

    Returns:
      [B.., O] in x's dtype; empty if a leading dim is.

    The default backends support reverse mode; `implementation="reference"` also supports forward mode and higher
    derivatives. What is saved carries `fast_layers.MLP_RESIDUAL_NAMES` for policies of `jax.checkpoint`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or a backend asked for by name that refuses.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    inputs = _check(x, w_up=w_up, w_gate=w_gate, w_down=w_down, b_up=b_up, b_gate=b_gate, b_down=b_down)
    return _call(inputs, activation, save, precision, float8, implementation)


def linear(
    x: ArrayLike,
    w: ArrayLike,
    b: ArrayLike | None = None,
    *,
    activation: str | None = None,
    gate: ArrayLike | None = None,
    b_gate: ArrayLike | None = None,
    save: Save = "pre_activation",
    precision: Any = None,
    float8: Float8 | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B F"]:
    """activation(x w + b), or activation(x gate + b_gate) * (x w + b): `mlp` without its down-projection.

    Axis letters: B any number of leading dims (also none), I input features, F output features.

    Args:
      x: [B.., I], bfloat16, float16, float32 or float64; all other operands have the same dtype.
      w, gate: [I, F], as Flax kernels.
      b, b_gate: [F].
      activation, save, precision, float8, implementation: as in `mlp`. Without activation and gate nothing is saved but
        x.

    Returns:
      [B.., F] in x's dtype.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or a backend asked for by name that refuses.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    # The operands' names in messages are those of this function.
    names = {"w_up": "w", "b_up": "b", "w_gate": "gate"}
    inputs = _check(x, w_up=w, b_up=b, w_gate=gate, b_gate=b_gate, names=names)
    return _call(inputs, activation, save, precision, float8, implementation)


def problem_of(
    inputs: Inputs,
    *,
    activation: str,
    save: Save = "pre_activation",
    precision: Any = None,
    float8: Float8 | None = None,
) -> Problem:
    """The static facts of a call with these arrays, or shapes; x is [M, I]."""
    tokens, in_features = inputs.x.shape
    return Problem(
        tokens=tokens,
        in_features=in_features,
        hidden_features=inputs.w_up.shape[1],
        out_features=None if inputs.w_down is None else inputs.w_down.shape[1],
        dtype=jnp.dtype(inputs.x.dtype),
        activation=activation,
        gated=inputs.w_gate is not None,
        up_bias=inputs.b_up is not None,
        gate_bias=inputs.b_gate is not None,
        down_bias=inputs.b_down is not None,
        save=save,
        precision=precision,
        float8=float8,
    )


def _call(inputs: Inputs, activation, save, precision, float8, implementation) -> Array:
    one_of("save", save, SAVES)
    if float8 is not None and (not isinstance(float8, str) or float8 not in FORMATS):
        raise ValueError(f"{float8=}: must be {' or '.join(map(repr, FORMATS))}, or None")
    if float8 is not None and inputs.x.dtype == jnp.float64:
        raise ValueError(f"{float8=}: products are summed in float32, got float64; cast the operands, or leave it out")
    options = {
        "activation": canonical_name(activation),
        "save": save,
        "precision": hashable_precision(precision),
        "float8": float8,
    }
    if _is_empty(inputs.x.shape):
        last = inputs.w_up if inputs.w_down is None else inputs.w_down
        return jnp.zeros((*inputs.x.shape[:-1], last.shape[1]), inputs.x.dtype)
    return sharding.per_shard(functools.partial(_choose_and_run, options, implementation), inputs)


def _choose_and_run(options: dict[str, Any], implementation: str | None, inputs: Inputs) -> Array:
    leading = inputs.x.shape[:-1]
    inputs = inputs._replace(x=inputs.x.reshape(-1 if leading else 1, inputs.x.shape[-1]))
    problem = problem_of(inputs, **options)
    plan = dispatch.plan(OP if problem.has_down else "linear", BACKENDS, problem, implementation)
    both = [plan.sole_backend(pass_) for pass_ in dispatch.PASSES]
    if all(backend is not None and backend.fwd is reference.forward for backend in both):
        # Without a gradient rule of ours, JAX differentiates the formula itself, forward and reverse, to any order.
        out, _ = reference.forward(problem, inputs)
    else:
        out = _apply(plan, inputs)
    return out.reshape(*leading, out.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(plan: dispatch.Plan, inputs: Inputs) -> Array:
    # Nothing is saved where nobody differentiates; a kernel writes what it is told to save, used or not.
    without_gradient = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, save="inputs"))
    out, _ = without_gradient.run("forward", inputs)
    return out


def _apply_fwd(plan: dispatch.Plan, inputs: Inputs):
    out, saved = plan.run("forward", inputs)
    named = (None if x is None else checkpoint_name(x, name) for x, name in zip(saved, RESIDUAL_NAMES, strict=True))
    return out, Residuals(inputs, *named)


def _apply_bwd(plan: dispatch.Plan, residuals: Residuals, d_out: Array):
    return (plan.run("backward", residuals, d_out),)


_apply.defvjp(_apply_fwd, _apply_bwd)


def _check(x: ArrayLike, *, names: dict[str, str] | None = None, **weights: ArrayLike | None) -> Inputs:
    """Validate. `names` are the caller's for operands that he calls otherwise."""
    named = {name: (names or {}).get(name, name) for name in Inputs._fields}
    required = ("w_up", "w_down")
    given = {"x": x, **{name: w for name, w in weights.items() if w is not None or name in required}}
    arrays = {name: floating(named[name], operand) for name, operand in given.items()}
    shapes = ", ".join(f"{named[name]} {a.shape}" for name, a in arrays.items())
    dtypes = {named[name]: str(a.dtype) for name, a in arrays.items()}
    if len(set(dtypes.values())) > 1:
        each = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"all operands must have the same dtype, got {each}; cast them to one (FusedMLP does)")
    if arrays["x"].ndim < 1:
        raise ValueError(f"x must be [leading dims.., in_features], got shape () ({shapes})")
    for name in required:
        if name in arrays and arrays[name].ndim != 2:
            raise ValueError(f"{named[name]} must be a matrix, got shape {arrays[name].shape} ({shapes})")
    if "b_gate" in arrays and "w_gate" not in arrays:
        raise ValueError(f"b_gate is given without {named['w_gate']}: give both, or none for an MLP without gate")
    in_features, (w_in, hidden) = arrays["x"].shape[-1], arrays["w_up"].shape
    if in_features != w_in:
        raise ValueError(f"x has {in_features} features, {named['w_up']} takes {w_in} ({shapes})")
    out_features = arrays["w_down"].shape[1] if "w_down" in arrays else None
    wanted = {
        "w_gate": (w_in, hidden),
        "w_down": (hidden, out_features),
        "b_up": (hidden,),
        "b_gate": (hidden,),
        "b_down": (out_features,),
    }
    for name, shape in wanted.items():
        if name in arrays and arrays[name].shape != shape:
            raise ValueError(f"{named[name]} must have shape {shape}, got {arrays[name].shape} ({shapes})")
    for name, array in arrays.items():
        if _is_empty(array.shape[-1:] if name == "x" else array.shape):
            raise ValueError(f"{named[name]} has shape {array.shape}: features must be at least 1 ({shapes})")
    return Inputs(**arrays)


def _is_empty(shape: tuple[Any, ...]) -> bool:
    return any(isinstance(size, int) and size == 0 for size in shape)  # others are symbols, of which none is 0
