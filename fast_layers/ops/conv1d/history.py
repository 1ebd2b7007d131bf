"""The row with what came before it, and what of that each position may see.

Axis letters: B examples, L positions, C channels, W taps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fast_layers.ops.conv1d.problem import Aux, Inputs, Problem


def reach_of(segment_ids: Int[Array, "B|1 L"], history: int) -> Int[Array, "B|1 L"]:
    """How many positions before its own each position sees without meeting a document boundary.

    What stands before the row, the initial state, belongs to the first document.
    """
    length = segment_ids.shape[1]
    joined = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (history + 1, 0)), constant_values=True)
    reach = jnp.zeros(segment_ids.shape, jnp.int32)
    unbroken = jnp.ones(segment_ids.shape, bool)
    for k in range(history):
        unbroken &= joined[:, history - k : history - k + length]
        reach += unbroken.astype(jnp.int32)
    return reach


def with_history(problem: Problem, inputs: Inputs) -> Float[Array, "B W-1+L C"]:
    """x behind the initial state, or behind zeros."""
    if inputs.initial_state is None:
        return jnp.pad(inputs.x, ((0, 0), (problem.history, 0), (0, 0)))
    # A state may be wider than x, or narrower: neither must lose digits to the other. A user's ban on implicit
    # promotion is about the user's own arrays.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(inputs.x.dtype, inputs.initial_state.dtype)
    return jnp.concatenate([inputs.initial_state.swapaxes(1, 2).astype(dtype), inputs.x.astype(dtype)], axis=1)


def final_state(problem: Problem, inputs: Inputs, aux: Aux, row: Float[Array, "B W-1+L C"]) -> Float[Array, "B C W-1"]:
    """The last W-1 entries of `row`; 0 for what is not of the last document."""
    dtype = inputs.x.dtype if inputs.initial_state is None else inputs.initial_state.dtype
    state = hide_other_documents(problem, aux, row[:, problem.length :])
    return state.swapaxes(1, 2).astype(dtype)


def hide_other_documents(problem: Problem, aux: Aux, state: Float[Array, "B W-1 C"]) -> Float[Array, "B W-1 C"]:
    """`state`, or its gradient, with 0 where it is not of the last document."""
    if aux.reach is None:
        return state
    distance = jnp.arange(problem.history - 1, -1, -1)
    return jnp.where((distance <= aux.reach[:, -1:])[..., None], state, 0)
