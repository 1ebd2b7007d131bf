"""Attention's forward for Hopper (sm_90a): TMA loads, asynchronous wgmma, online softmax in registers.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block handles `compute_wgs` x 64 query rows of one head at a time, or with `splits` a part of the keys that they
see (out is float32 then, and `split_kv` puts the parts together). Its roles:

    load warpgroup                         each compute warpgroup, on its own 64 rows
    --------------                         ------------------------------------------
    Q    -> q_ready  waits q_consumed      scores(j) = Q K(j)^T        needs k_ready(j), frees k_consumed(j)
    K(j) -> k_ready  waits k_consumed      out += P(j-1) V(j-1)        needs v_ready(j-1), frees v_consumed(j-1)
    V(j) -> v_ready  waits v_consumed      P(j) = a softmax step on scores(j)

Both products of a step are in flight together, and the softmax of scores(j) runs while out's product still does. The
compute warpgroups take turns at issuing, so that one multiplies while another exponentiates.

Sources: Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.online_softmax import LOG2_E, OnlineSoftmax
from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.kernel_parts.tile_order import TileOrder, snake, turns
from fast_layers.ops.attention import packed_heads, split_kv, tuned
from fast_layers.ops.attention.config import HopperForwardTiles, packs_heads
from fast_layers.ops.attention.hopper_call import (
    ROWS,
    SHARED,
    TMA_ROWS,
    RowMask,
    pad_axis,
    pad_for_tma,
    padded_depth,
    round_up,
)
from fast_layers.ops.attention.hopper_logits import LogitOperands, TileLogits
from fast_layers.ops.attention.hopper_mask import WGMMA, Span, TileMask, mend_broken_rows, tanh
from fast_layers.ops.attention.problem import Aux, Inputs, Problem

BY_ROW = WGMMA.reduce(1)


class _Operands(NamedTuple):
    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    sinks: Float[Array, "B|1 N T|1"] | None
    mask: RowMask | None
    logits: LogitOperands


def attend(problem: Problem, inputs: Inputs, aux: Aux, tiles: HopperForwardTiles | None = None):
    """(out [B, T, N, V], lse [B, N, T]); `tiles` for the queries as the kernel gets them, with heads packed or not."""
    p, query, form, sinks = problem, inputs.query, aux.mask, inputs.sinks
    packs = packs_heads(p)
    if packs:
        form = packed_heads.pack_mask(p, form)
        p = packed_heads.pack_problem(p, form)
        query = packed_heads.pack(query, p.kv_heads)
    tiles = HopperForwardTiles.of(p, tuned.find(p, "forward")) if tiles is None else tiles
    qk_dim, v_dim = padded_depth(p.qk_dim), padded_depth(p.v_dim)
    operands = _Operands(
        pad_for_tma(query, ROWS, qk_dim),
        pad_for_tma(inputs.key, tiles.kv_tile, qk_dim),
        pad_for_tma(inputs.value, tiles.kv_tile, v_dim),
        None if sinks is None or tiles.splits > 1 else _by_row(sinks, p, tiles.q_tile),
        RowMask.of(p, form, tiles.q_tile, tiles.kv_tile),
        LogitOperands.of(inputs, aux, tiles.q_tile, tiles.kv_tile),
    )
    group = problem.group if packs else 1
    out, lse = over_batch(functools.partial(_launch, tiles, group), SHARED)(p, operands)
    out = out[..., : problem.v_dim]
    if sinks is not None and tiles.splits > 1:
        out, lse = split_kv.join_sinks(out, lse, sinks)
    return out.astype(problem.dtype), lse


def _by_row(sinks: Float[Array, " N"], p: Problem, q_tile: int) -> Float[Array, "1 N T|1"]:
    """One per head, or where heads are packed one per row."""
    sinks = sinks.astype(jnp.float32).reshape(1, p.heads, -1)
    group = sinks.shape[2]
    return sinks if group == 1 else pad_axis(jnp.tile(sinks, (1, 1, p.q_len // group)), round_up(p.q_len, q_tile), 2)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(tiles: HopperForwardTiles, group: int, p: Problem, operands: _Operands):
    """(out [B, T, N, V], lse [B, N, T]), where the kernel's rows are `group` heads of each query."""
    qk_dim, v_dim = operands.query.shape[3], operands.value.shape[3]
    wgs, ring, kv_tile = tiles.compute_wgs, tiles.stages, tiles.kv_tile
    q_tiles, splits = -(-p.q_len // tiles.q_tile), tiles.splits
    out_rows = round_up(p.q_len, TMA_ROWS)
    stored_rows = min(ROWS, out_rows)  # of a warpgroup's; TMA cuts off those beyond the last
    out_dtype, out_columns = p.dtype, v_dim
    if splits > 1:
        out_dtype, out_columns = jnp.dtype(jnp.float32), round_up(v_dim, split_kv.COLUMNS)
    order = TileOrder.of(p.batch * p.heads, q_tiles * splits, p.group, p.kv_len * (qk_dim + v_dim) * p.dtype.itemsize)
    blocks = min(tiles.blocks or order.total, order.total)
    # Scores of a causal mask grow with the row, so the last rows come first.
    longest_last = p.mask.band is not None and p.mask.band.high is not None
    tree = jax.tree.structure(operands)

    def attention_forward(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        out_ref, lse_ref = refs[tree.num_leaves :]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        logits = TileLogits(p, inputs.logits)
        mask = TileMask(p, tiles.q_tile, kv_tile, inputs.mask, logits)
        s = _Scratch(**{"out_slots": None, **scratch})

        def piece(turn) -> _Piece:
            head, tile = order.locate(snake(turn, block, blocks))
            split, q_index = (0, tile) if splits == 1 else (lax.div(tile, q_tiles), lax.rem(tile, q_tiles))
            q_index = q_tiles - 1 - q_index if longest_last else q_index
            example, head = lax.div(head, p.heads), lax.rem(head, p.heads)
            span = mask.key_span(example, q_index)
            if splits == 1:
                return _Piece(example, head, q_index, example, span)
            return _Piece(example, head, q_index, example * splits + split, span.part(split, splits))

        def each_piece(role, without_keys=lambda _: None):
            """`role(piece, turn, steps)` for all of the block's pieces; `steps` counts the key tiles before them."""

            def take(turn, steps):
                taken = piece(turn)
                role(taken, turn, steps)
                return steps + taken.span.last - taken.span.first

            if blocks < order.total:
                lax.fori_loop(0, turns(order.total, block, blocks), take, jnp.int32(0))
            elif splits == 1:
                take(jnp.int32(0), jnp.int32(0))
            else:
                taken = piece(jnp.int32(0))
                has_keys = taken.span.first < taken.span.last
                pl.when(has_keys)(lambda: role(taken, jnp.int32(0), jnp.int32(0)))
                pl.when(~has_keys)(lambda: without_keys(taken))

        @pl.when(warpgroup == wgs)
        def _load():
            plgpu.set_max_registers(tiles.load_registers, action="decrease")
            each_piece(functools.partial(load, mask, inputs, s))

        @pl.when(warpgroup < wgs)
        def _compute():
            plgpu.set_max_registers(tiles.compute_registers, action="increase")

            @pl.when(warpgroup == 0)
            def _first_turn():
                plgpu.barrier_arrive(s.turn.at[0])

            each_piece(
                functools.partial(compute, mask, logits, inputs, s, out_ref, lse_ref, warpgroup),
                without_keys=functools.partial(see_nothing, s, lse_ref, warpgroup),
            )

            @pl.when(warpgroup == 0)
            def _last_turn():
                plgpu.barrier_wait(s.turn.at[0])

            plgpu.wait_smem_to_gmem(0)

    def load(mask: TileMask, inputs: Any, s: _Scratch, piece: _Piece, turn, steps):
        example, head, q_index, _, span = piece
        kv_head = lax.div(head, p.group)

        def load_q():
            for wg in range(wgs):
                slot = lax.rem(turn, tiles.q_slots) * wgs + wg

                @pl.when(turn >= tiles.q_slots)
                def _wait(slot=slot):
                    plgpu.barrier_wait(s.q_consumed.at[slot])

                rows = pl.ds(q_index * tiles.q_tile + wg * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(inputs.query.at[example, rows, head], s.q_slots.at[slot], s.q_ready.at[slot])

        def load_kv(j, first=False):
            step = steps + j - span.first
            slot = lax.rem(step, ring)
            keys = pl.ds(j * kv_tile, kv_tile)
            k_ref, v_ref = inputs.key.at[example, keys, kv_head], inputs.value.at[example, keys, kv_head]
            k_slot, v_slot = s.k_slots.at[slot], s.v_slots.at[slot]
            mends = span.ragged(j) if mask.hides_real_keys else None

            def copy(ref, slot_ref, ready):
                if mends is None:
                    plgpu.copy_gmem_to_smem(ref, slot_ref, ready)
                else:
                    # A copy's own predicate would leave its barrier's arrival in place.
                    pl.when(mends)(lambda: plgpu.copy_gmem_to_smem(ref, slot_ref, s.kv_arrived))
                    pl.when(~mends)(lambda: plgpu.copy_gmem_to_smem(ref, slot_ref, ready))

            @pl.when(step >= ring)
            def _wait_k():
                plgpu.barrier_wait(s.k_consumed.at[slot])

            copy(k_ref, k_slot, s.k_ready.at[slot])
            if first:
                load_q()  # between K and V, in the order in which they are needed

            @pl.when(step >= ring)
            def _wait_v():
                plgpu.barrier_wait(s.v_consumed.at[slot])

            copy(v_ref, v_slot, s.v_ready.at[slot])
            if mends is not None:

                @pl.when(mends)
                def _mend():
                    plgpu.barrier_wait(s.kv_arrived)
                    mend_broken_rows(k_slot, v_slot)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(s.k_ready.at[slot])
                    plgpu.barrier_arrive(s.v_ready.at[slot])

        load_kv(span.first, first=True)
        lax.fori_loop(span.first + 1, span.last, lambda j, _: load_kv(j), None)

    def compute(
        mask: TileMask,
        logits: TileLogits,
        inputs: Any,
        s: _Scratch,
        out_ref,
        lse_ref,
        warpgroup,
        piece: _Piece,
        turn,
        steps,
    ):
        example, head, q_index, out_index, span = piece
        q_slot = lax.rem(turn, tiles.q_slots) * wgs + warpgroup
        q_start = q_index * tiles.q_tile + warpgroup * ROWS
        query = s.q_slots.at[q_slot]
        rows = mask.rows(example, q_start, ROWS, 0)
        plgpu.barrier_wait(s.q_ready.at[q_slot])

        def slot_of(j):
            return lax.rem(steps + j - span.first, ring)

        def wait_turn():
            if tiles.takes_turns:
                plgpu.barrier_wait(s.turn.at[warpgroup])

        def pass_turn():
            if tiles.takes_turns:
                plgpu.barrier_arrive(s.turn.at[lax.rem(warpgroup + 1, wgs)])

        def softmax_step(state: OnlineSoftmax, scores, j):
            to_log2 = p.scale * LOG2_E
            if p.softcap is not None:
                scores, to_log2 = tanh(scores * (p.scale / p.softcap)), p.softcap * LOG2_E
            at = {"example": example, "head": head, "q_start": q_start, "k_start": j * kv_tile, "q_axis": 0}
            if p.bias is not None:
                scores = scores * (to_log2 / LOG2_E) + logits.bias(shape=scores.shape, **at)
                to_log2 = LOG2_E
            if mask.hides:
                # One branch, not two loops: between loops ptxas moves the registers that a wgmma in flight still reads.
                scores = lax.cond(span.ragged(j), lambda x: mask.hide(x, rows=rows, **at), lambda x: x, scores)
            state, weights, rescale = state.step(scores, to_log2)
            if p.dropout_rate:
                weights = jnp.where(logits.keep(shape=scores.shape, **at), weights, 0.0)
            return state, weights.astype(p.dtype), rescale

        def over_keys(out):
            slot = slot_of(span.first)
            plgpu.barrier_wait(s.k_ready.at[slot])
            wait_turn()

            def first_scores(acc):
                plgpu.wgmma(acc, query, s.k_slots.at[slot].T)
                pass_turn()
                return acc[...]

            scores = pl.run_scoped(first_scores, plgpu.WGMMAAccumulatorRef((ROWS, kv_tile), jnp.float32))
            plgpu.barrier_arrive(s.k_consumed.at[slot])
            state, weights, _ = softmax_step(OnlineSoftmax.start(ROWS, BY_ROW), scores, span.first)

            def step(j, carry):
                state, weights = carry
                k_slot, v_slot = slot_of(j), slot_of(j - 1)
                plgpu.barrier_wait(s.k_ready.at[k_slot])
                plgpu.barrier_wait(s.v_ready.at[v_slot])
                wait_turn()

                def both_products(acc):
                    plgpu.wgmma(acc, query, s.k_slots.at[k_slot].T)
                    plgpu.wgmma(out, weights, s.v_slots.at[v_slot])
                    pass_turn()
                    # out's product goes on; but with dropout ptxas gives the next weights the registers that it reads.
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0 if p.dropout_rate else 1)

                scores = pl.run_scoped(both_products, plgpu.WGMMAAccumulatorRef((ROWS, kv_tile), jnp.float32))
                plgpu.barrier_arrive(s.k_consumed.at[k_slot])
                state, next_weights, rescale = softmax_step(state, scores, j)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(s.v_consumed.at[v_slot])
                out[...] = plgpu.wgmma_accumulator_load(out, wait_n=None) * by_row(rescale, v_dim)
                return state, next_weights

            state, weights = lax.fori_loop(span.first + 1, span.last, step, (state, weights))
            slot = slot_of(span.last - 1)
            plgpu.barrier_wait(s.v_ready.at[slot])
            wait_turn()
            plgpu.wgmma(out, weights, s.v_slots.at[slot])
            pass_turn()
            summed = out[...]
            plgpu.barrier_arrive(s.v_consumed.at[slot])
            return state, summed

        state, out = pl.run_scoped(over_keys, plgpu.WGMMAAccumulatorRef((ROWS, v_dim), jnp.float32))
        if inputs.sinks is not None:
            sinks = inputs.sinks.at[example if inputs.sinks.shape[0] > 1 else 0, head]
            if sinks.shape[0] == 1:
                sink = sinks[0]
            else:
                sink = plgpu.load(sinks.at[pl.ds(q_start, ROWS)], layout=BY_ROW, optimized=False)
            state, rescale = state.join(sink * LOG2_E)
            out = out * by_row(rescale, v_dim)
        normaliser, lse = state.finish()
        if p.dropout_rate:
            normaliser = normaliser * logits.survived
        out_slot = query if s.out_slots is None else s.out_slots.at[warpgroup]
        lse_slot = s.lse_slots.at[warpgroup]
        out_slot[...] = (out * by_row(normaliser, v_dim)).astype(out_dtype)
        lse_slot[...] = lse
        plgpu.commit_smem()
        stored = out_slot.at[pl.ds(0, stored_rows)] if stored_rows < ROWS else out_slot
        plgpu.copy_smem_to_gmem(stored, out_ref.at[out_index, pl.ds(q_start, stored_rows), head, pl.ds(0, v_dim)])
        plgpu.copy_smem_to_gmem(lse_slot, lse_ref.at[out_index, head, pl.ds(q_start, ROWS)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(s.q_consumed.at[q_slot])

    def see_nothing(s: _Scratch, lse_ref, warpgroup, piece: _Piece):
        """What a part of the keys without a tile leaves: lse -inf, by which its out counts for nothing."""
        lse_slot = s.lse_slots.at[warpgroup]
        lse_slot[...] = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), BY_ROW)
        plgpu.commit_smem()
        q_start = piece.q_index * tiles.q_tile + warpgroup * ROWS
        plgpu.copy_smem_to_gmem(lse_slot, lse_ref.at[piece.out_index, piece.head, pl.ds(q_start, ROWS)])

    shares_slot = qk_dim == v_dim and out_dtype == p.dtype  # out leaves through Q's slot
    scratch = {
        "q_slots": smem_tile(tiles.q_slots * wgs, ROWS, qk_dim, dtype=p.dtype),
        "k_slots": smem_tile(ring, kv_tile, qk_dim, dtype=p.dtype),
        "v_slots": smem_tile(ring, kv_tile, v_dim, dtype=p.dtype),
        **({} if shares_slot else {"out_slots": smem_tile(wgs, ROWS, v_dim, dtype=out_dtype)}),
        "lse_slots": plgpu.SMEM((wgs, ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=tiles.q_slots * wgs),
        "q_consumed": plgpu.Barrier(num_barriers=tiles.q_slots * wgs),
        "k_ready": plgpu.Barrier(num_barriers=ring),
        "v_ready": plgpu.Barrier(num_barriers=ring),
        "k_consumed": plgpu.Barrier(num_arrivals=wgs, num_barriers=ring),
        "v_consumed": plgpu.Barrier(num_arrivals=wgs, num_barriers=ring),
        "kv_arrived": plgpu.Barrier(num_arrivals=2),
        "turn": plgpu.Barrier(num_barriers=wgs),
    }
    out, lse = plgpu.kernel(
        attention_forward,
        out_type=(
            jax.ShapeDtypeStruct((p.batch * splits, out_rows, p.heads, out_columns), out_dtype),
            jax.ShapeDtypeStruct((p.batch * splits, p.heads, q_tiles * tiles.q_tile), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=wgs + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
    )(*jax.tree.leaves(operands))
    if splits == 1:
        out, lse = packed_heads.unpack(out[:, : p.q_len], group), lse[..., : p.q_len]
    else:
        out, lse = (x.reshape(p.batch, splits, *x.shape[1:]) for x in (out, lse))
        wanted = jnp.float32 if p.sinks else p.dtype
        out = split_kv.combine_out(out, lse, p.q_len, v_dim, group, wanted)
        lse = split_kv.combine_lse(lse[..., : p.q_len])
    return out, packed_heads.unpack_lse(lse, group)


class _Piece(NamedTuple):
    """What a block does at a time: these key tiles for this tile of queries, with results at `out_index`."""

    example: Any
    head: Any
    q_index: Any
    out_index: Any
    span: Span


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    q_slots: Any
    k_slots: Any
    v_slots: Any
    out_slots: Any
    lse_slots: Any
    q_ready: Any
    q_consumed: Any
    k_ready: Any
    v_ready: Any
    k_consumed: Any
    v_consumed: Any
    kv_arrived: Any
    turn: Any


def by_row(x: Float[Array, " R"], columns: int) -> Float[Array, "R C"]:
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])
