"""The forward's second pass over a block's pieces, where the first left NaN or inf: slow, and little code.

    load warpgroup                                     each compute warpgroup, on its own 64 rows
    --------------                                     ------------------------------------------
    Q          -> q_ready                              scores(j) = Q K(j)^T            needs again_ready
    K(j), V(j) -> kv_arrived, mended -> again_ready    out = out * rescale + P(j) V(j)
                  waits again_freed                    frees again_freed

Pieces from a queue are done again one by one, as each needs it: which a block has may differ from run to run, and bits
must not. One tile of keys is on its way at a time, in the first slot. Broken values are mended. If weights left the
range of floats, maxima are those of all keys seen so far; else all is computed in the order of the first pass, and rows
that see nothing broken get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.lane_softmax import LaneSoftmax
from fast_layers.kernel_parts.online_softmax import OnlineSoftmax
from fast_layers.ops.attention.forward_parts import Piece, Work, keys_and_values, load_query
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_fwd_scores import dropped, log2_logits
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import Span, TileMask, by_row, mend_broken_rows


def load_again(work: Work, mask: TileMask, inputs: Any, s: Any, piece: Piece, turn: Any, steps: Any) -> None:
    """The load warpgroup's part; `turn` goes on from the first pass, `steps` begins anew."""
    load_query(work, inputs, s, piece, turn)
    k_slot, v_slot = s.k_slots.at[0], s.v_slots.at[0]

    def load_kv(i, _):
        j = work.tile_at(piece.span, i)
        k_ref, v_ref = keys_and_values(work, inputs, piece, j)
        pl.when(steps + i > 0)(lambda: plgpu.barrier_wait(s.again_freed))
        plgpu.copy_gmem_to_smem(k_ref, k_slot, s.kv_arrived)
        plgpu.copy_gmem_to_smem(v_ref, v_slot, s.kv_arrived)
        plgpu.barrier_wait(s.kv_arrived)
        if mask.hides_real_keys:
            few_registers = work.tiles.takes_64_keys
            pl.when(piece.span.ragged(j))(lambda: mend_broken_rows(k_slot, v_slot, few_registers))
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.again_ready)

    lax.fori_loop(0, piece.span.tiles, load_kv, None)


def over_keys_again(
    work: Work,
    mask: TileMask,
    logits: TileLogits,
    s: Any,
    is_lost: Callable[[Piece], Any],
    in_lanes: bool,
    piece: Piece,
    span: Span,
    begin: Any,
    end: Any,
    q_start: Any,
    query: Any,
    rows: Any,
    out: Any,
) -> tuple[OnlineSoftmax, Any]:
    """(state, sums [ROWS, V]) of a warpgroup's rows, which see `span`; `out` is their accumulator.

    `is_lost`: whether weights left the range of floats; `in_lanes`: whether the first pass kept rows' sums in lanes.
    """
    p, tiles, v_dim = work.problem, work.tiles, out.shape[1]
    kv_tile, held = tiles.kv_tile, tiles.held_columns

    def multiply_keys(acc):
        key = s.k_slots.at[0]
        if held:
            plgpu.wgmma(acc, query.at[:, held:], key.at[:, held:].T)
            plgpu.wgmma(acc, query.at[:, :held], key.at[:, :held].T)
        else:
            plgpu.wgmma(acc, query, key.T)
        return acc[...]

    def step(i, state):
        j = work.tile_at(piece.span, i)
        at = {"example": piece.example, "head": piece.head, "q_start": q_start, "k_start": j * kv_tile, "q_axis": 0}
        scores = pl.run_scoped(multiply_keys, plgpu.WGMMAAccumulatorRef((ROWS, kv_tile), jnp.float32))
        scores, to_log2 = log2_logits(p, logits, scores, at)
        if mask.hides:
            scores = lax.cond(span.ragged(j), lambda x: mask.hide(x, rows=rows, **at), lambda x: x, scores)
        if tiles.first_maximum:
            state, weights, rescale = state.step(scores, to_log2, keeps_maximum=(i > begin) & jnp.logical_not(lost))
        else:
            state, weights, rescale = state.step(scores, to_log2)
        out[...] = plgpu.wgmma_accumulator_load(out, wait_n=None) * by_row(rescale, v_dim)
        plgpu.wgmma(out, dropped(p, logits, weights, at).astype(p.dtype), s.v_slots.at[0])
        plgpu.wgmma_wait(0)
        return state

    def step_if_seen(i, state):
        plgpu.barrier_wait(s.again_ready)
        if tiles.own_spans:
            state = lax.cond((i >= begin) & (i < end), lambda x: step(i, x), lambda x: x, state)
        else:
            state = step(i, state)
        plgpu.barrier_arrive(s.again_freed)
        return state

    lost: Any = is_lost(piece) if tiles.first_maximum else None
    start = LaneSoftmax.start(ROWS) if in_lanes else OnlineSoftmax.start(ROWS, mask.layout.reduce(1))
    if tiles.first_maximum:
        start = lax.cond(lost, lambda x: x, lambda x: x._replace(row_max_log2=jnp.zeros_like(x.row_max_log2)), start)
    state = lax.fori_loop(0, piece.span.tiles, step_if_seen, start)
    return state.whole() if in_lanes else state, out[...]
