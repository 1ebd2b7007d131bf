"""Attention's forward for Blackwell (sm_100a, sm_103a): TMA loads, tcgen05 matmuls, scores and output in tensor memory.

No GPU has run it: it is simulated, and compiled by the real assembler.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block handles one or two tiles of 128 query rows of one head at a time, or with `splits` a part of the keys that they
see (out is float32 then, and `split_kv` puts the parts together). Each tile has a softmax warpgroup of its own; one
warpgroup loads for both, and one issues all matmuls:

    load warpgroup                         matmul warpgroup, for each tile in turn
    --------------                         ---------------------------------------
    Q    -> q_ready  waits q_consumed      out += P(j-1) V(j-1)    needs weights_ready, v_ready    -> weights_consumed
    K(j) -> k_ready  waits k_consumed      scores(j) = Q K(j)^T    needs k_ready, weights_consumed -> scores_ready
    V(j) -> v_ready  waits v_consumed      after the last P V                                      -> out_ready

    softmax warpgroup of a tile
    ---------------------------
    waits scores_ready, makes P(j), rescales out if it must -> weights_ready
    waits out_ready, divides out by the sums and stores it  -> q_consumed

While one tile's softmax runs, the tensor core multiplies for the other. P stands where its scores stood, so the next
scores wait until P V has read it. What follows the tile's last matmul may touch out: both are told by scores_ready.

Weights are powers of two relative to a maximum that lags behind: out in tensor memory is rescaled only once some row's
maximum has grown by more than `rescale_log2`, and the sums are divided by at the end, so nothing is lost but headroom.

Sources: Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024); FlashAttention-4 (Dao-AILab, 2025).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.exp2 import exp2_in_part
from fast_layers.kernel_parts.online_softmax import LOG2_E, OnlineSoftmax, zero_where_empty
from fast_layers.kernel_parts.smem_tile import smem_tile, swizzled_columns
from fast_layers.kernel_parts.tanh import tanh_by_division
from fast_layers.ops.attention import forward_parts
from fast_layers.ops.attention.blackwell_config import PANEL_COLUMNS, PANELS, BlackwellForwardTiles
from fast_layers.ops.attention.blackwell_tile import (
    BY_COLUMN,
    BY_ROW,
    NATIVE,
    ROWS,
    STAGED,
    NativeTileMask,
    column_slices,
)
from fast_layers.ops.attention.forward_parts import Operands, Piece, Work, join_sink, load, see_nothing
from fast_layers.ops.attention.problem import Aux, Inputs, Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import TileMask, by_row

OFFERS = 2
"""Slots for pieces that other blocks leave."""
LOWEST = float(jnp.finfo(jnp.float32).min)
"""Stands for a hidden score where a soft cap or a bias would make something else of -inf."""


def attend(problem: Problem, inputs: Inputs, aux: Aux, tiles: BlackwellForwardTiles | None = None):
    """(out [B, T, N, V], lse [B, N, T]); `tiles` for the queries as the kernel gets them, with heads packed or not."""

    def choose(p: Problem) -> BlackwellForwardTiles:
        return BlackwellForwardTiles.of(p) if tiles is None else tiles

    return forward_parts.attend(problem, inputs, aux, ROWS, choose, _launch)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(tiles: BlackwellForwardTiles, group: int, p: Problem, operands: Operands):
    """(out [B, T, N, V], lse [B, N, T]), where the kernel's rows are `group` heads of each query."""
    qk_dim, v_dim = operands.query.shape[3], operands.value.shape[3]
    ring, kv_tile = tiles.stages, tiles.kv_tile
    work = Work(p, tiles, ROWS, qk_dim, v_dim)
    tree = jax.tree.structure(operands)

    def attention_forward(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        out_ref, lse_ref = refs[tree.num_leaves :]
        warpgroup = lax.axis_index("warpgroup")
        logits = TileLogits(p, inputs.logits, NATIVE)
        mask = NativeTileMask(p, tiles.q_tile, kv_tile, inputs.mask, logits)
        s = _Scratch(**scratch)

        # By warpgroup, a softmax for each tile: which tile's tensor memory is meant must be known when compiling.
        softmaxes = [
            functools.partial(softmax, tile, mask, logits, inputs, s, out_ref, lse_ref) for tile in range(tiles.q_tiles)
        ]
        roles = [*softmaxes, functools.partial(load, work, mask, inputs, s, mends=True), functools.partial(multiply, s)]

        def play(own: int, role):
            registers = tiles.registers[own]
            plgpu.set_max_registers(registers, action="increase" if own < tiles.q_tiles else "decrease")
            if tiles.dynamic:
                each_offered_piece(mask, s, role, asks=own == tiles.q_tiles)
            else:
                work.each_piece(mask, role, functools.partial(leave_nothing, own, s, lse_ref))
            if own < tiles.q_tiles:
                plgpu.wait_smem_to_gmem(0)

        # Not one `when` after another: each role's phases of the barriers would live on through the others. Backwards,
        # since the first branch is lowered twice.
        branches = [functools.partial(play, own, role) for own, role in enumerate(roles)]
        lax.switch(len(roles) - 1 - warpgroup, branches[::-1])

    def each_offered_piece(mask: TileMask, s: _Scratch, role, asks: bool):
        """The block's own piece, then those of blocks that have not begun; one role asks for them, a piece ahead."""

        def take(state):
            index, turn, steps, _ = state
            slot = lax.rem(turn, OFFERS)
            if asks:

                @pl.when(turn >= OFFERS)
                def _wait():
                    plgpu.barrier_wait(s.offer_taken.at[slot])

                plgpu.try_cluster_cancel(s.offers.at[slot], s.offer_ready.at[slot])
            piece = work.piece(mask, index)
            role(piece, turn, steps)
            plgpu.barrier_wait(s.offer_ready.at[slot])
            (index,), more = plgpu.query_cluster_cancel(s.offers.at[slot], grid_names=("block",))
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.offer_taken.at[slot])
            return index, turn + 1, steps + piece.span.last - piece.span.first, more

        start = (lax.axis_index("block"), jnp.int32(0), jnp.int32(0), jnp.bool_(True))
        lax.while_loop(lambda state: state[-1], take, start)

    def multiply(s: _Scratch, piece: Piece, turn, steps):
        span = piece.span
        last_tile = tiles.q_tiles - 1

        def slot_of(j):
            return lax.rem(steps + j - span.first, ring)

        def multiply_scores(j, tile):
            slot = slot_of(j)
            scores, _ = s.scores_or_weights[tile]
            plgpu.tcgen05_mma(scores, s.q_slots.at[tile], s.k_slots.at[slot].T, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.scores_ready.at[tile])
            if tile == last_tile:
                plgpu.tcgen05_commit_arrive(s.k_consumed.at[slot])

        def multiply_values(j, tile):
            """Needs v_ready."""
            slot = slot_of(j)
            _, weights = s.scores_or_weights[tile]
            plgpu.barrier_wait(s.weights_ready.at[tile])
            plgpu.tcgen05_mma(s.out[tile], weights, s.v_slots.at[slot], accumulate=j > span.first)
            plgpu.tcgen05_commit_arrive(s.weights_consumed.at[tile])
            if tile == last_tile:
                plgpu.tcgen05_commit_arrive(s.v_consumed.at[slot])

        def wait_consumed(tile):
            # The tensor core would go through both matmuls in order, as far as is known; nothing written says so.
            plgpu.barrier_wait(s.weights_consumed.at[tile])

        plgpu.barrier_wait(s.k_ready.at[slot_of(span.first)])
        for tile in range(tiles.q_tiles):
            plgpu.barrier_wait(s.q_ready.at[tile])
            pl.when(turn > 0)(functools.partial(wait_consumed, tile))
            multiply_scores(span.first, tile)

        def step(j, _):
            plgpu.barrier_wait(s.k_ready.at[slot_of(j)])
            plgpu.barrier_wait(s.v_ready.at[slot_of(j - 1)])
            for tile in range(tiles.q_tiles):
                multiply_values(j - 1, tile)
                wait_consumed(tile)
                multiply_scores(j, tile)

        lax.fori_loop(span.first + 1, span.last, step, None)
        plgpu.barrier_wait(s.v_ready.at[slot_of(span.last - 1)])
        for tile in range(tiles.q_tiles):
            multiply_values(span.last - 1, tile)
            plgpu.tcgen05_commit_arrive(s.out_ready.at[tile])

    def softmax(
        tile: int,
        mask: TileMask,
        logits: TileLogits,
        inputs: Any,
        s: _Scratch,
        out_ref,
        lse_ref,
        piece: Piece,
        turn,
        steps,
    ):
        del turn, steps
        example, head, q_index, out_index, span, _ = piece
        q_start = q_index * tiles.q_tile + tile * ROWS
        rows = mask.rows(example, q_start, ROWS, 0)
        scores_ref, weights_ref = s.scores_or_weights[tile]
        out, row_slot = s.out[tile], s.row_slots.at[tile]

        columns = column_slices(kv_tile)

        def place(j, c):
            """Of a part of the scores."""
            return {"example": example, "head": head, "q_start": q_start, "k_start": j * kv_tile + c.start, "q_axis": 0}

        # What makes the exponent of two from what `logit` gives: a factor is left to it where that is all there is.
        to_log2 = LOG2_E * (1.0 if p.bias is not None else p.scale if p.softcap is None else p.softcap)
        hidden = -jnp.inf if p.softcap is None and p.bias is None else LOWEST

        def hide_in_place(j):
            for c in columns:
                part = plgpu.async_load_tmem(scores_ref.at[:, c], layout=NATIVE)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(scores_ref.at[:, c], mask.hide(part, rows, hidden=hidden, **place(j, c)))
            plgpu.commit_tmem()

        def logit(score, j, c):
            x = score
            if p.softcap is not None:
                x = tanh_by_division(x * (p.scale / p.softcap))
            if p.bias is not None:
                x = x * (p.scale if p.softcap is None else p.softcap) + logits.bias(shape=x.shape, **place(j, c))
            if mask.dense:
                return mask.hide(x, rows, **place(j, c))
            return jnp.where(score == hidden, -jnp.inf, x) if mask.hides and hidden == LOWEST else x

        def load_logits(j):
            plgpu.barrier_wait(s.scores_ready.at[tile])
            # Before they are in registers, so that none are moved in tiles without a mask. A dense mask is in all.
            if mask.hides and not mask.dense:
                pl.when(span.ragged(j))(functools.partial(hide_in_place, j))
            scores = [plgpu.async_load_tmem(scores_ref.at[:, c], layout=NATIVE) for c in columns]
            plgpu.wait_load_tmem()
            return [logit(x, j, c) for x, c in zip(scores, columns, strict=True)]

        def rescale_out(rescale):
            for c in column_slices(v_dim):
                part = plgpu.async_load_tmem(out.at[:, c], layout=NATIVE)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(out.at[:, c], part * by_row(rescale, part.shape[1]))

        def step(j, state: OnlineSoftmax):
            scores = load_logits(j)
            tile_max = functools.reduce(jnp.maximum, [x.max(axis=1) for x in scores]) * to_log2
            grows = tile_max > state.row_max_log2 + tiles.rescale_log2
            row_max = jnp.where(grows, tile_max, state.row_max_log2)
            base = zero_where_empty(row_max)
            rescale = jnp.where(grows, jnp.exp2(state.row_max_log2 - base), 1.0)
            row_sum = state.row_sum * rescale
            for x, c in zip(scores, columns, strict=True):
                weights = exp2_in_part(x * to_log2 - by_row(base, x.shape[1]), tiles.polynomial_columns)
                row_sum += weights.sum(axis=1)
                if p.dropout_rate:
                    weights = jnp.where(logits.keep(shape=x.shape, **place(j, c)), weights, 0.0)
                plgpu.async_store_tmem(weights_ref.at[:, c], weights.astype(p.dtype))
            # Through shared memory, so that each warp sees all rows: branches are taken by whole warpgroups.
            row_slot[...] = rescale
            plgpu.commit_smem()
            some_grow = plgpu.load(row_slot, layout=BY_COLUMN).min() < 1.0
            pl.when(some_grow & (j > span.first))(functools.partial(rescale_out, rescale))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(s.weights_ready.at[tile])
            return OnlineSoftmax(row_max, row_sum)

        state = lax.fori_loop(span.first, span.last, step, OnlineSoftmax.start(ROWS, BY_ROW))
        if inputs.sinks is not None:
            state, rescale = join_sink(state, inputs.sinks, piece, pl.ds(q_start, ROWS), BY_ROW)
            normaliser, lse = state.finish()
            normaliser *= rescale
        else:
            normaliser, lse = state.finish()
        if p.dropout_rate:
            normaliser *= logits.survived

        row_slot[...] = normaliser
        s.lse_slots.at[tile][...] = lse
        plgpu.commit_smem()
        normaliser = plgpu.load(row_slot, layout=STAGED.reduce(1))
        plgpu.barrier_wait(s.out_ready.at[tile])
        to = out_ref.at[out_index, pl.ds(q_start, work.stored_rows), head]
        stored = pl.ds(0, work.stored_rows)

        def out_part(c):
            part = plgpu.async_load_tmem(out.at[:, c], layout=STAGED)
            return (part * by_row(normaliser, part.shape[1])).astype(work.out_dtype)

        if tiles.splits == 1:
            out_slot = (s.q_slots if s.out_slots is None else s.out_slots).at[tile]
            for c in column_slices(v_dim, swizzled_columns(v_dim, p.dtype)):
                out_slot[:, c] = out_part(c)
            plgpu.wait_load_tmem()
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_slot.at[stored, pl.ds(0, v_dim)], to)
        else:
            plgpu.commit_smem()
            for i, c in enumerate(column_slices(v_dim, PANEL_COLUMNS)):
                panel = s.out_panels.at[tile, i % PANELS]
                if i >= PANELS:
                    plgpu.wait_smem_to_gmem(PANELS - 1, wait_read_only=True)
                panel[...] = out_part(c)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(panel.at[stored], to.at[:, c])
            plgpu.wait_load_tmem()
        plgpu.copy_smem_to_gmem(s.lse_slots.at[tile], lse_ref.at[out_index, head, pl.ds(q_start, ROWS)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(s.q_consumed.at[tile])

    def leave_nothing(warpgroup: int, s: _Scratch, lse_ref, piece: Piece):
        if warpgroup >= tiles.q_tiles:
            return
        rows = pl.ds(piece.q_index * tiles.q_tile + warpgroup * ROWS, ROWS)
        see_nothing(s.lse_slots.at[warpgroup], lse_ref, piece, rows, BY_ROW)

    def tensor_memory(columns: int, dtype: Any, **options) -> Any:
        return plgpu.TMEM((ROWS, columns), dtype, **options)

    q_tiles = tiles.q_tiles
    out_slots = {}
    if tiles.splits > 1:
        out_slots["out_panels"] = smem_tile(q_tiles, PANELS, ROWS, PANEL_COLUMNS, dtype=work.out_dtype)
    elif not tiles.out_in_q_slot(qk_dim, v_dim):
        out_slots["out_slots"] = smem_tile(q_tiles, ROWS, v_dim, dtype=p.dtype)
    in_order: Any = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    scratch = {
        "q_slots": smem_tile(q_tiles, ROWS, qk_dim, dtype=p.dtype),
        "k_slots": smem_tile(ring, kv_tile, qk_dim, dtype=p.dtype),
        "v_slots": smem_tile(ring, kv_tile, v_dim, dtype=p.dtype),
        **out_slots,
        "lse_slots": plgpu.SMEM((q_tiles, ROWS), jnp.float32),
        "row_slots": plgpu.SMEM((q_tiles, ROWS), jnp.float32),
        "scores_or_weights": [
            plgpu.RefUnion(tensor_memory(kv_tile, jnp.float32), tensor_memory(kv_tile, p.dtype, packed=True))
            for _ in range(q_tiles)
        ],
        "out": [tensor_memory(v_dim, jnp.float32) for _ in range(q_tiles)],
        "q_ready": plgpu.Barrier(num_barriers=q_tiles),
        "q_consumed": plgpu.Barrier(num_barriers=q_tiles),
        "k_ready": plgpu.Barrier(num_barriers=ring),
        "v_ready": plgpu.Barrier(num_barriers=ring),
        "k_consumed": in_order(num_barriers=ring),
        "v_consumed": in_order(num_barriers=ring),
        "kv_arrived": plgpu.Barrier(num_arrivals=2),
        "scores_ready": in_order(num_barriers=q_tiles),
        "weights_ready": in_order(num_barriers=q_tiles),
        "weights_consumed": in_order(num_barriers=q_tiles),
        "out_ready": in_order(num_barriers=q_tiles),
    }
    if tiles.dynamic:
        scratch["offers"] = plgpu.TryClusterCancelResult(OFFERS)
        scratch["offer_ready"] = plgpu.Barrier(num_barriers=OFFERS)
        scratch["offer_taken"] = plgpu.Barrier(num_arrivals=q_tiles + 2, num_barriers=OFFERS)
    out, lse = plgpu.kernel(
        attention_forward,
        out_type=work.out_type,
        grid=(work.blocks,),
        grid_names=("block",),
        num_threads=q_tiles + 2,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
    )(*jax.tree.leaves(operands))
    return work.combine(out, lse, group)


class _Scratch(NamedTuple):
    """What a block holds in shared and in tensor memory, and the barriers named after the event that they wait for."""

    q_slots: Any
    k_slots: Any
    v_slots: Any
    lse_slots: Any
    row_slots: Any
    scores_or_weights: Any
    out: Any
    q_ready: Any
    q_consumed: Any
    k_ready: Any
    v_ready: Any
    k_consumed: Any
    v_consumed: Any
    kv_arrived: Any
    scores_ready: Any
    weights_ready: Any
    weights_consumed: Any
    out_ready: Any
    out_slots: Any = None
    out_panels: Any = None
    offers: Any = None
    offer_ready: Any = None
    offer_taken: Any = None
