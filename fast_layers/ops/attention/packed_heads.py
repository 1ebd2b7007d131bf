"""Query heads that share a key/value head, as rows of one matrix: few queries then read each key once.

Axis letters: B batch, T queries, N query heads, K key/value heads, G query heads per key/value head, H depth, R = T * G
rows. Row r is query r // G of the group's head r % G.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from fast_layers.ops.attention.masks import MaskForm
from fast_layers.ops.attention.problem import MaskFacts, Problem


def pack_problem(problem: Problem, packed_mask: MaskForm) -> Problem:
    """The problem that a kernel sees: R queries of K heads."""
    p = problem
    return dataclasses.replace(p, q_len=p.q_len * p.group, heads=p.kv_heads, mask=MaskFacts.of(packed_mask))


def pack_mask(problem: Problem, form: MaskForm) -> MaskForm:
    """The mask by row. A static band becomes intervals: its diagonal now takes a step every G rows."""
    start, stop = form.intervals(problem.q_len, problem.kv_len)
    of_query = start, stop, form.query_segments, form.scattered
    by_row = (None if x is None else jnp.repeat(x, problem.group, axis=1) for x in of_query)
    start, stop, query_segments, scattered = by_row
    by_example = form.intervals_by_example
    if by_example is not None:
        by_example = dataclasses.replace(by_example, rows_per_query=problem.group)
    return MaskForm(
        start=start,
        stop=stop,
        query_segments=query_segments,
        key_segments=form.key_segments,
        scattered=scattered,
        lengths_only=form.lengths_only,
        by_example=by_example,
    )


def pack(x: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B R K H"]:
    batch, length, heads, depth = x.shape
    grouped = x.reshape(batch, length, kv_heads, heads // kv_heads, depth)
    return grouped.swapaxes(2, 3).reshape(batch, -1, kv_heads, depth)


def unpack(x: Float[Array, "B R K H"], group: int) -> Float[Array, "B T N H"]:
    batch, rows, kv_heads, depth = x.shape
    return (
        x.reshape(batch, rows // group, group, kv_heads, depth)
        .swapaxes(2, 3)
        .reshape(batch, -1, kv_heads * group, depth)
    )


def unpack_lse(lse: Float[Array, "B K R"], group: int) -> Float[Array, "B N T"]:
    batch, kv_heads, rows = lse.shape
    return lse.reshape(batch, kv_heads, rows // group, group).swapaxes(2, 3).reshape(batch, kv_heads * group, -1)
