"""The forward's second pass over a block's pieces, where the first left NaN or inf: slow, and little code.

    load warpgroup                                     each compute warpgroup, on its own 64 rows
    --------------                                     ------------------------------------------
    Q          -> q_ready                              scores(j) = Q K(j)^T            needs again_ready
    K(j), V(j) -> kv_arrived, mended -> again_ready    out = out * rescale + P(j) V(j)
                  waits again_freed                    frees again_freed

One tile of keys is on its way at a time, in the first slot. Broken values are mended, and maxima are those of all keys seen
so far, whatever the first pass took.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.online_softmax import OnlineSoftmax
from fast_layers.ops.attention.forward_parts import Piece, Work, keys_and_values, load_query
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_fwd_scores import dropped, log2_logits
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import TileMask, by_row, mend_broken_rows


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
            pl.when(piece.span.ragged(j))(lambda: mend_broken_rows(k_slot, v_slot))
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.again_ready)

    lax.fori_loop(0, piece.span.tiles, load_kv, None)


def over_keys_again(
    work: Work, mask: TileMask, logits: TileLogits, s: Any, piece: Piece, q_start: Any, query: Any, rows: Any, out: Any
) -> tuple[OnlineSoftmax, Any]:
    """(state, sums [ROWS, V]) of a warpgroup's rows; `out` is their accumulator."""
    p, kv_tile, v_dim = work.problem, work.tiles.kv_tile, out.shape[1]

    def step(i, state):
        j = work.tile_at(piece.span, i)
        at = {"example": piece.example, "head": piece.head, "q_start": q_start, "k_start": j * kv_tile, "q_axis": 0}
        plgpu.barrier_wait(s.again_ready)

        def product(acc):
            plgpu.wgmma(acc, query, s.k_slots.at[0].T)
            return acc[...]

        scores = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, kv_tile), jnp.float32))
        scores, to_log2 = log2_logits(p, logits, scores, at)
        if mask.hides:
            scores = lax.cond(piece.span.ragged(j), lambda x: mask.hide(x, rows=rows, **at), lambda x: x, scores)
        state, weights, rescale = state.step(scores, to_log2)
        out[...] = plgpu.wgmma_accumulator_load(out, wait_n=None) * by_row(rescale, v_dim)
        plgpu.wgmma(out, dropped(p, logits, weights, at).astype(p.dtype), s.v_slots.at[0])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.again_freed)
        return state

    state = lax.fori_loop(0, piece.span.tiles, step, OnlineSoftmax.start(ROWS, mask.layout.reduce(1)))
    return state, out[...]
