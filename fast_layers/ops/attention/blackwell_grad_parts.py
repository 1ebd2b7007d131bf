"""What Blackwell's backward kernels make of a tile's two products, part by part of its columns.

With weights P = 2^(log2 weights) and d_weights = V dO^T, or its transpose: dS = factor * (d_weights - delta).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.kernel_parts.smem_tile import swizzled_columns
from fast_layers.kernel_parts.tanh import tanh_by_division
from fast_layers.ops.attention.blackwell_tile import ROWS, STAGED, column_slices
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits

_DECIDED = 8
"""Columns whose keep decisions are made together where rows are keys. The rest of the tile comes in a loop: there each
score has a Philox call of its own, whose code would fill most of the kernel."""


def log2_weights(p: Problem, product: Any, bias: Any, lse_log2: Any) -> tuple[Any, Any]:
    """(log2 of the weights before any are hidden, the soft cap's derivative or None)."""
    to_log2, d_cap = p.scale * LOG2_E, None
    if p.softcap is not None:
        product = tanh_by_division(product * (p.scale / p.softcap))
        d_cap = (1.0 - product) * (1.0 + product)
        to_log2 = p.softcap * LOG2_E
    scores = product * to_log2
    if bias is not None:
        scores += bias * LOG2_E
    return scores - lse_log2, d_cap


def decide(logits: TileLogits, columns: int, *, q_start: Any, **at: Any) -> Any:
    """Keep decisions of [128 keys, `columns` queries] as bits of [128, 8] int32, those of the last columns lowest."""

    assert columns % _DECIDED == 0, columns
    assert columns // _DECIDED < 32, columns

    def decide_next(i, bits):
        keep = logits.keep(shape=(ROWS, _DECIDED), q_start=q_start + i * _DECIDED, **at)
        return 2 * bits + jnp.where(keep, 1, 0)

    none = plgpu.layout_cast(jnp.zeros((ROWS, _DECIDED), jnp.int32), logits.layout)
    return lax.fori_loop(0, columns // _DECIDED, decide_next, none)


def decided(bits: Any, columns: int, start: int, size: int) -> Any:
    """What `decide` found for `size` columns from `start` on."""
    places = [(columns - at) // _DECIDED - 1 for at in range(start, start + size, _DECIDED)]
    return jnp.concatenate([(bits & (1 << place)) != 0 for place in places], axis=1)


def weigh(score_log2: Any, d_cap: Any, keep: Any) -> tuple[Any, Any]:
    """(the weights that dV takes, dS' factor); the factor of a weight that is dropped has its sign changed."""
    weights = jnp.exp2(score_log2)
    factor = weights if d_cap is None else weights * d_cap
    if keep is None:
        return weights, factor
    return jnp.where(keep, weights, 0.0), jnp.where(keep, factor, -factor)


def d_scores(p: Problem, factor: Any, d_weights: Any, delta: Any) -> Any:
    if p.dropout_rate:
        d_weights = jnp.where(factor > 0, d_weights * (1.0 / (1.0 - p.dropout_rate)), 0.0)
        factor = jnp.abs(factor)
    return factor * (d_weights - delta)


def store_sums(sums: Any, has_sums: Any, factor: float, slot: Any, to: Any) -> None:
    """From tensor memory through `slot` to the GPU's memory; rows that nobody adds to have no sum."""
    for c in column_slices(slot.shape[1], swizzled_columns(slot.shape[1], slot.dtype)):
        part = plgpu.async_load_tmem(sums.at[:, c], layout=STAGED)
        part = jnp.where(jnp.broadcast_to(has_sums, part.shape), part * factor, jnp.zeros_like(part))
        slot[:, c] = part.astype(slot.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slot, to)
    plgpu.wait_smem_to_gmem(0)
