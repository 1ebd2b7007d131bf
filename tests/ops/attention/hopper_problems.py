"""Problems that the choices of Hopper's kernels are asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fast_layers.ops.attention import api
from fast_layers.ops.attention.problem import Problem


def problem_of(length: int, batch: int, causal: bool, kv_heads: int = 16, heads: int = 16) -> Problem:
    """Of as many queries as keys, of depth 128."""

    def call(query, key, value):
        inputs, aux, given, _ = api._prepare(query, key, value, is_causal=causal)
        problems.append(given.problem(inputs, aux))

    problems: list[Problem] = []
    of_operands = heads, kv_heads, kv_heads
    jax.eval_shape(call, *(jax.ShapeDtypeStruct((batch, length, n, 128), jnp.bfloat16) for n in of_operands))
    return problems[0]
