"""The MLP's two passes as launches of a matmul kernel, whichever GPU it is for.

Axis letters: M tokens, I input features, F hidden features, O output features.

    forward     h = act(x w_up + b_up), or act(x w_gate + b_gate) * (x w_up + b_up); stores what is saved too
                out = h w_down + b_down
    backward    d_out w_down^T -> h anew, d_up, d_gate, and parts of the sums d_b_up, d_b_gate
                d_x = d_up w_up^T + d_gate w_gate^T, one product of twice the depth
                d_w_up = x^T d_up, d_w_gate = x^T d_gate, d_w_down = h^T d_out

The last line's products share x's tokens as their depth, and are asked for together.
Only b_down's gradient, and for `linear` the activation's, are left to XLA: they have no product to go with.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap
from jaxtyping import Array, Float

from fast_layers.ops.mlp.epilogue import Activate, Differentiate, Epilogue, Plain
from fast_layers.ops.mlp.float8 import scaled
from fast_layers.ops.mlp.matmul import Matmul, Multiply, MultiplyTogether, Operands, Products, Results
from fast_layers.ops.mlp.problem import Inputs, PreActivations, Problem, Residuals


def forward(multiply: Multiply, problem: Problem, inputs: Inputs) -> tuple[Float[Array, "M O"], PreActivations]:
    """(out [M, O], what is saved). Under `jax.vmap` over x alone all examples' tokens go through together."""
    mapped = custom_vmap(functools.partial(_forward, multiply, problem))

    @mapped.def_vmap
    def _many(axis_size, in_batched, inputs):
        (batched,) = in_batched
        # With 8 bits each example has scales of its own.
        if problem.float8 is not None or jax.tree.leaves(batched._replace(x=False)).count(True):
            one_by_one = sequential_vmap(functools.partial(_forward, multiply, problem))
            axes: Any = [0 if b else None for b in batched]
            results = jax.vmap(one_by_one, in_axes=(Inputs(*axes),))(inputs)
        else:
            larger = dataclasses.replace(problem, tokens=axis_size * problem.tokens)
            folded = forward(multiply, larger, inputs._replace(x=inputs.x.reshape(larger.tokens, -1)))
            results = jax.tree.map(lambda a: a.reshape(axis_size, problem.tokens, -1), folded)
        return results, jax.tree.map(lambda _: True, results)

    return mapped(inputs)


def backward(
    multiply: Multiply,
    problem: Problem,
    residuals: Residuals,
    d_out: Float[Array, "M O"],
    together: MultiplyTogether | None = None,
) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes. Under `jax.vmap` one example at a time.

    `together` multiplies several of one depth; without it they are multiplied one by one.
    """
    together = functools.partial(_one_by_one, multiply) if together is None else together
    return sequential_vmap(functools.partial(_backward, multiply, together, problem))(residuals, d_out)


def _one_by_one(multiply: Multiply, products: Products) -> list[Results]:
    return [multiply(*product) for product in products]


def _forward(multiply: Multiply, p: Problem, inputs: Inputs) -> tuple[Float[Array, "M O"], PreActivations]:
    biases, weights = _up_and_gate(inputs)
    epilogue = Activate(p.activation, tuple(b is not None for b in biases), p.saves_up)
    (out, *pre), _ = _forward_product(multiply, p, inputs.x, weights, epilogue, biases)
    if inputs.w_down is not None:
        bias = inputs.b_down
        (out,), _ = _forward_product(multiply, p, out, (inputs.w_down,), Plain((bias is not None,)), (bias,))
    up, gate = (*pre, None, None)[:2]
    return out, (up, gate)


def _backward(
    multiply: Multiply, together: MultiplyTogether, p: Problem, residuals: Residuals, d_out: Float[Array, "M O"]
) -> Inputs:
    inputs, *saved = residuals
    if p.save == "inputs":
        # Without the barrier XLA sees the forward's own launch in the same program and keeps its results instead.
        inputs, d_out = lax.optimization_barrier((inputs, d_out))
    pre = tuple(x for x in saved if x is not None)
    biases, weights = _up_and_gate(inputs)
    biased = tuple(b is not None for b in biases)
    if not pre and not _is_bare(p):
        pre, _ = _forward_product(multiply, p, inputs.x, weights, Plain(biased), biases)
    h = None
    if inputs.w_down is not None:
        epilogue = Differentiate(p.activation, biased)
        (h, *d_pre), sums = _product(multiply, (d_out,), (inputs.w_down,), epilogue, b_turned=True, read=tuple(pre))
    else:
        d_pre = [d_out]
        if not _is_bare(p):
            _, *d_pre = Differentiate(p.activation, biased)(p.dtype, (d_out.astype(jnp.float32),), (), pre)
        sums = [_sum_over_tokens(d) for d, wanted in zip(d_pre, biased, strict=True) if wanted]
    (d_x,), _ = _product(multiply, tuple(d_pre), weights, Plain(), b_turned=True)
    pairs = [*((inputs.x, d) for d in d_pre), *([] if h is None else [(h, d_out)])]
    multiplied = together([_as_product((x,), (d,), Plain(), a_turned=True) for x, d in pairs])
    d_weights, d_biases = iter([written for (written,), _ in multiplied]), iter(sums)
    gradients = Inputs(
        x=d_x,
        w_up=next(d_weights),
        w_gate=None if inputs.w_gate is None else next(d_weights),
        w_down=None if inputs.w_down is None else next(d_weights),
        b_up=None if inputs.b_up is None else next(d_biases).astype(p.dtype),
        b_gate=None if inputs.b_gate is None else next(d_biases).astype(p.dtype),
        b_down=None if inputs.b_down is None else _sum_over_tokens(d_out).astype(p.dtype),
    )
    # XLA's GPU scheduler would put the weights' gradients off to the end of the step, and keep each layer's activations
    # until then; so they leave together with x's, which the layer before waits for.
    return lax.optimization_barrier(gradients)


def _is_bare(p: Problem) -> bool:
    """A matmul and no more: its gradients need no pre-activation."""
    return p.activation == "identity" and not p.gated and not p.has_down


def _up_and_gate(inputs: Inputs) -> tuple[tuple[Array | None, ...], tuple[Array, ...]]:
    """(biases, weights)"""
    if inputs.w_gate is None:
        return (inputs.b_up,), (inputs.w_up,)
    return (inputs.b_up, inputs.b_gate), (inputs.w_up, inputs.w_gate)


def _forward_product(
    multiply: Multiply,
    p: Problem,
    a: Array,
    b: tuple[Array, ...],
    epilogue: Epilogue,
    biases: tuple[Array | None, ...],
) -> Results:
    """Of operands rounded to 8 bits, if that is asked for."""
    if p.float8 is None:
        return _product(multiply, (a,), b, epilogue, biases=biases)
    left, *right = (scaled(x, p.float8) for x in (a, *b))
    m = Matmul(a.shape[0], b[0].shape[1], a.shape[1], p.dtype, epilogue, float8=left.values.dtype)
    scales = jnp.stack([left.scale * x.scale for x in right])
    return multiply(m, Operands((left.values,), tuple(x.values for x in right), biases, scales=scales))


def _product(
    multiply: Multiply, a: tuple[Array, ...], b: tuple[Array, ...], epilogue: Epilogue, **options: Any
) -> Results:
    return multiply(*_as_product(a, b, epilogue, **options))


def _as_product(
    a: tuple[Array, ...],
    b: tuple[Array, ...],
    epilogue: Epilogue,
    *,
    a_turned: bool = False,
    b_turned: bool = False,
    biases: tuple[Array | None, ...] = (None,),
    read: tuple[Array, ...] = (),
) -> tuple[Matmul, Operands]:
    """What `multiply` takes, with sizes and dtype taken from the operands."""
    rows, depth = a[0].shape[::-1] if a_turned else a[0].shape
    columns = b[0].shape[0 if b_turned else 1]
    m = Matmul(rows, columns, depth, jnp.dtype(a[0].dtype), epilogue, len(a), a_turned, b_turned)
    return m, Operands(a, b, biases, read)


def _sum_over_tokens(x: Float[Array, "M F"]) -> Float[Array, " F"]:
    return x.sum(0, dtype=jnp.float32)
