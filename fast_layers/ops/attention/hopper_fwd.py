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
compute warpgroups take turns at issuing, so that one multiplies while another exponentiates; or with `own_spans` they
take none, and each passes over the tiles of keys that only others' rows see. The blocks of a cluster take neighbouring
tiles of queries, and load one half of each tile of keys and values, for both.

With `last_keys_first` j counts from the last tile of keys that a block sees: only that one has hidden scores.

For a backward that needs them, the load warpgroup also finds the sizes of keys and values (`hopper_fwd_sizes.py`).

`held_columns` of Q are read once, into registers, so that scores(j) reads fewer bytes of shared memory.

With `out_by_values` out leaves by the slots of values, and the next Q comes under a piece's last product
(`hopper_fwd_out.py`).

With `first_maximum` a row's weights are relative to the maximum of its first tile of keys; no later one is asked for.

Where keys may be hidden, and with `first_maximum`, all roles end with a verdict (`judged`): if results are no finite
numbers, a hidden value may be none, or weights were too large. Then they do the block's pieces again
(`hopper_fwd_again.py`).

Sources: Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024); Hong et al., "FlashDecoding++" (2023).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts import piece_queue
from fast_layers.kernel_parts.first_maximum_softmax import FirstMaximumSoftmax, failed
from fast_layers.kernel_parts.lane_softmax import LaneSoftmax
from fast_layers.kernel_parts.online_softmax import OnlineSoftmax
from fast_layers.kernel_parts.piece_queue import PieceQueue
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.attention import forward_parts, hopper_fwd_out, hopper_fwd_sizes, tuned
from fast_layers.ops.attention.config import dealt_in_the_call, packs_heads, sees_all
from fast_layers.ops.attention.forward_parts import Operands, Piece, Work, join_sink, load, see_nothing
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_fwd_again import load_again, over_keys_again
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles, gains_by_a_queue
from fast_layers.ops.attention.hopper_fwd_scores import dropped, log2_logits
from fast_layers.ops.attention.hopper_fwd_sizes import Measure
from fast_layers.ops.attention.kernel_operands import RowMask
from fast_layers.ops.attention.problem import Aux, Inputs, Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import WGMMA, Span, TileMask, by_row

BY_ROW = WGMMA.reduce(1)
_BROKEN, _LOST = 1.0, 2.0
"""What a row of results is found to be: no finite numbers; such or others for weights beyond the range of floats."""
_KEYS_BEFORE_WAIT = 48
"""Of a tile, without a mask, where sizes are measured, which changes what ptxas makes of the rest: bench/NOTES.md."""
_LEAST_ROUNDS = 6
"""Of pieces for all blocks, in a group of heads whose mask is told by arrays: fewer do not come out even."""


def attend(problem: Problem, inputs: Inputs, aux: Aux, tiles: HopperForwardTiles | None = None):
    """(out [B, T, N, V], lse [B, N, T]); `tiles` for the queries as the kernel gets them, with heads packed or not."""
    return _attend(problem, inputs, aux, functools.partial(_tiles, tiles), _launch)


def attend_measuring(problem: Problem, inputs: Inputs, aux: Aux, tiles: HopperForwardTiles | None = None):
    """(out, lse, the sizes of `Residuals`), for what `measures` says yes to."""

    def choose(p: Problem) -> HopperForwardTiles:
        chosen = _tiles(tiles, p)
        retuned = sees_all(p) and chosen.keys_before_wait
        return dataclasses.replace(chosen, keys_before_wait=_KEYS_BEFORE_WAIT) if retuned else chosen

    return _attend(problem, inputs, aux, choose, functools.partial(_launch, measures=True))


def measures(problem: Problem) -> bool:
    """Whether the forward of a call can find the sizes of its keys and values."""
    return not packs_heads(problem, ROWS) and hopper_fwd_sizes.takes(problem, _tiles(None, problem))


def _attend(problem: Problem, inputs: Inputs, aux: Aux, choose: Any, launch: Any):
    return forward_parts.attend(problem, inputs, aux, ROWS, choose, launch, HopperForwardTiles.takes_loose_queries)


def _tiles(tiles: HopperForwardTiles | None, p: Problem) -> HopperForwardTiles:
    return (HopperForwardTiles.of(p, tuned.find(p, "forward")) if tiles is None else tiles).for_mask(p)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="measures")
def _launch(tiles: HopperForwardTiles, group: int, p: Problem, operands: Operands, measures: bool = False):
    """(out [B, T, N, V], lse [B, N, T]), where the kernel's rows are `group` heads of each query.

    If it `measures`, the sizes of keys and values, too.
    """
    qk_dim, v_dim = operands.query.shape[3], operands.value.shape[3]
    wgs, ring, v_ring, kv_tile = tiles.compute_wgs, tiles.stages, tiles.value_stages, tiles.kv_tile
    rounds = _LEAST_ROUNDS if dealt_in_the_call(p) and not p.mask.lengths_only else 0
    backwards, held, split = tiles.last_keys_first, tiles.held_columns, tiles.keys_before_wait
    by_values = tiles.out_by_values
    # Queries that are no tile are as the call has them.
    loose_group = group if operands.query.shape[1] < ROWS else 0
    work = Work(p, tiles, ROWS, qk_dim, v_dim, tiles.cluster, rounds, backwards, loose_group)
    # Who between them visit all tiles of keys that a block loads, or all of its rows.
    lookers = wgs if tiles.own_spans or tiles.first_maximum else 1
    # Measured: with a mask, or at depths over 128, ptxas makes less of the rest; see bench/NOTES.md.
    sums_in_lanes = max(qk_dim, v_dim) <= (64 if backwards else 128 if sees_all(p) else 0)
    row_mask = operands.mask if isinstance(operands.mask, RowMask) and dealt_in_the_call(p) else None
    takes_pieces = work.is_persistent and (row_mask is not None or gains_by_a_queue(p))
    marks = lookers * (2 if tiles.first_maximum else 1)
    tree = jax.tree.structure(operands)

    def attention_forward(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        *schedule_ref, out_ref, lse_ref, sizes_ref = (*refs[tree.num_leaves :], *([] if measures else [None]))
        warpgroup = lax.axis_index("warpgroup")
        logits = TileLogits(p, inputs.logits)
        mask = TileMask(p, tiles.q_tile, kv_tile, inputs.mask, logits, tiles.mask_parts)
        own_mask = TileMask(p, ROWS, kv_tile, inputs.mask, logits) if tiles.own_spans else None
        s = _Scratch(**{"out_slots": None, "loose_query": None, "piece_told": None, "piece_heard": None, **scratch})
        schedule, queue = schedule_ref[0] if schedule_ref else None, None
        if takes_pieces:
            state, order = (*schedule_ref, None) if row_mask is None else schedule_ref
            sizes = work.order.total, work.blocks, marks
            queue = PieceQueue(state, order, *sizes, s.row_slots.at[wgs + lookers], s.piece_told, s.piece_heard)

        def each_piece(role, way, **options):
            """`way`: by which of a queue's methods, if there is one."""
            walk = None if queue is None else functools.partial(way, queue)
            return work.each_piece(mask, role, schedule=schedule, walk=walk, **options)

        def if_broken(role):
            """`role(0, lost)` where some row is `_BROKEN` or `_LOST`, after `judge`. All roles ask."""
            plgpu.barrier_wait(s.judged)
            verdict = s.row_slots[wgs, 0]

            @pl.when(verdict > 0)
            def _again():
                # A 0 that compilers cannot know: what both passes need is not kept in registers from one to the other.
                role(jnp.where(verdict < 0, -1, 0), verdict == _LOST)

        @pl.when(warpgroup == wgs)
        def _load():
            plgpu.set_max_registers(tiles.load_registers, action="decrease")
            measure = Measure(work, mask, sizes_ref) if measures else None
            role, state = functools.partial(load, work, mask, inputs, s, measure=measure), ()
            if by_values:
                role, state = functools.partial(hopper_fwd_out.load, work, inputs, s, out_ref), hopper_fwd_out.nothing()
            elif measure is not None:
                state = measure.nothing
            turn, steps, *state = each_piece(role, PieceQueue.take, state=state)
            if by_values:
                hopper_fwd_out.send(work, s, out_ref, steps, *state)
            elif measure is not None:
                measure.rest(s, steps, tuple(state))
            if judges(mask):

                def load_all_again(zero, _):
                    if by_values:
                        plgpu.wait_smem_to_gmem(0)  # before the second pass stores out anew
                    role = functools.partial(load_again, work, mask, inputs, s)
                    each_piece(role, PieceQueue.again, turn=turn, steps=zero)

                if_broken(load_all_again)
            if tiles.cluster > 1:
                drain(s, steps)
            if by_values:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup < wgs)
        def _compute():
            plgpu.set_max_registers(tiles.compute_registers, action="increase")

            pl.when(warpgroup == 0)(lambda: plgpu.barrier_arrive(s.turn.at[0]))
            if judges(mask):

                @pl.when(warpgroup < lookers)
                def _nothing_seen():
                    s.row_slots[wgs + warpgroup] = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW)

            def compute_all(again, turn, zero):
                own = warpgroup + jnp.minimum(zero, 0)
                role = functools.partial(
                    compute, mask, own_mask, logits, inputs, s, out_ref, lse_ref, queue, own, again
                )
                without_keys = functools.partial(leave_nothing, s, lse_ref, warpgroup)
                way = PieceQueue.follow if again is None else PieceQueue.again
                return each_piece(role, way, without_keys=without_keys, turn=turn, steps=zero)

            turn, _ = compute_all(again=None, turn=0, zero=0)
            if judges(mask):

                def compute_again(zero, lost):
                    # The first pass may still be storing what the second stores anew.
                    plgpu.wait_smem_to_gmem(0)
                    in_lanes = tiles.first_maximum or sums_in_lanes

                    def is_lost(piece):
                        return lost if queue is None else queue.is_marked(piece.index, range(lookers, marks))

                    again = functools.partial(over_keys_again, work, mask, logits, s, is_lost, in_lanes)
                    compute_all(again, turn=turn, zero=zero)

                plgpu.barrier_arrive(s.looked)
                pl.when(warpgroup == 0)(lambda: judge(s))
                if_broken(compute_again)

            @pl.when(warpgroup == 0)
            def _last_turn():
                plgpu.barrier_wait(s.turn.at[0])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def judges(mask: TileMask) -> bool:
        return mask.hides_real_keys or tiles.first_maximum

    def judge(s: _Scratch):
        """By one warpgroup."""
        plgpu.barrier_wait(s.looked)
        # As if they were columns, so that each warp has all of them: what warps have together takes a scratch.
        found = (plgpu.load(s.row_slots.at[wgs + looker], layout=WGMMA.reduce(0)) for looker in range(lookers))
        worst = functools.reduce(jnp.maximum, found).max()
        s.row_slots[wgs] = plgpu.layout_cast(jnp.broadcast_to(worst, (ROWS,)), BY_ROW)
        plgpu.barrier_arrive(s.judged)

    def drain(s: _Scratch, steps):
        """Blocks of a cluster free each other's slots, and must not end before that."""

        def wait(step, _):
            plgpu.barrier_wait(s.k_consumed.at[lax.rem(step, ring)])
            plgpu.barrier_wait(s.v_consumed.at[lax.rem(step, ring)])

        lax.fori_loop(jnp.maximum(steps - ring, 0), steps, wait, None)

    def compute(
        mask: TileMask,
        own_mask: TileMask | None,
        logits: TileLogits,
        inputs: Any,
        s: _Scratch,
        out_ref,
        lse_ref,
        queue: PieceQueue | None,
        warpgroup,
        again,
        piece: Piece,
        turn,
        steps,
    ):
        """`again`: what the second pass does instead of `over_keys_once`, None in the first."""
        example, head, q_index, out_index, block_span, _ = piece
        q_slot = lax.rem(turn, tiles.q_slots) * wgs + warpgroup
        q_start = q_index * tiles.q_tile + warpgroup * ROWS
        query = s.q_slots.at[q_slot]
        rows = mask.rows(example, q_start, ROWS, 0)
        plgpu.barrier_wait(s.q_ready.at[q_slot])
        if s.loose_query is not None:  # its rows stand closer than a swizzled tile's, and nobody asks for the others
            query[...] = plgpu.load(s.loose_query, layout=WGMMA, optimized=False)
            plgpu.commit_smem()

        span = block_span
        if own_mask is not None:
            span = own_mask.key_span(example, lax.div(q_start, ROWS)).within(block_span)
            span = span._replace(last=jnp.where(q_start < p.q_len, span.last, span.first + 1))
        # The block's tiles of keys are numbered as they are loaded; this warpgroup takes those in [begin, end).
        if backwards:
            begin, end = block_span.last - span.last, block_span.last - span.first
        else:
            begin, end = span.first - block_span.first, span.last - block_span.first

        def pass_over(first, last):
            def free(i, _):
                for ready, consumed, slots in ((s.k_ready, s.k_consumed, ring), (s.v_ready, s.v_consumed, v_ring)):
                    slot = lax.rem(steps + i, slots)
                    plgpu.barrier_wait(ready.at[slot])
                    plgpu.barrier_arrive(consumed.at[slot])

            if own_mask is not None and again is None:
                lax.fori_loop(first, last, free, None)

        over_keys = again or functools.partial(over_keys_once, mask, logits, s, warpgroup, steps)
        over_keys = functools.partial(over_keys, piece, span, begin, end, q_start, query, rows)
        pass_over(0, begin)
        state, out = pl.run_scoped(over_keys, plgpu.WGMMAAccumulatorRef((ROWS, v_dim), jnp.float32))
        row_sum = state.row_sum
        if inputs.sinks is not None:
            state, rescale = join_sink(state, inputs.sinks, piece, pl.ds(q_start, ROWS), BY_ROW)
            out = out * by_row(rescale, v_dim)
        normaliser, lse = state.finish()
        if p.dropout_rate:
            normaliser = normaliser * logits.survived
        sends = not by_values or again is not None  # by itself, and not the load warpgroup
        if sends:
            if work.out_is_loose:
                out_slot: Any = s.loose_query
            elif shares_slot:
                out_slot = query
            elif by_values:
                out_slot = hopper_fwd_out.own_slot_again(work, s, warpgroup)
            else:
                out_slot = s.out_slots.at[warpgroup]
        else:
            pass_over(end, block_span.tiles)
            out_slot = hopper_fwd_out.own_slot(work, s, warpgroup, steps + block_span.tiles)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # for the lse of the piece before
        lse_slot = s.row_slots.at[warpgroup]
        out_slot[...] = (out * by_row(normaliser, v_dim)).astype(work.out_dtype)
        lse_slot[...] = lse
        plgpu.commit_smem()
        if sends and work.out_is_loose:
            for to, stored in work.each_loose(out_ref, out_slot, piece):
                plgpu.copy_smem_to_gmem(stored, to)
        elif sends:
            stored = out_slot.at[pl.ds(0, work.stored_rows)] if work.stored_rows < ROWS else out_slot
            to = out_ref.at[out_index, pl.ds(q_start, work.stored_rows), head, pl.ds(0, v_dim)]
            plgpu.copy_smem_to_gmem(stored, to)
        else:
            plgpu.barrier_arrive(s.out_ready)
        plgpu.copy_smem_to_gmem(lse_slot, lse_ref.at[out_index, head, pl.ds(q_start, ROWS)])
        if again is None and judges(mask):

            @pl.when(warpgroup < lookers)
            def _look():
                """While the stores are on their way, for `judge`."""
                unfinished = (out * 0.0).sum(axis=1)
                broken = unfinished != 0  # NaN differs from everything
                if s.loose_query is not None:  # in rows that nobody asks for stands what was left in shared memory
                    broken &= plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW) < p.q_len
                found = jnp.where(broken, _BROKEN, 0.0)
                if tiles.first_maximum:
                    lost = failed(row_sum, unfinished, mask.sees_keys(rows, q_start, ROWS))
                    found = jnp.where(lost, _LOST, found)
                if queue is not None:
                    queue.mark(turn, warpgroup, found)
                    if tiles.first_maximum:
                        queue.mark(turn, lookers + warpgroup, found - _BROKEN)
                slot = s.row_slots.at[wgs + warpgroup]
                slot[...] = jnp.maximum(plgpu.load(slot, layout=BY_ROW), found)

        if sends:
            pass_over(end, block_span.tiles)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(s.q_consumed.at[q_slot])

    def over_keys_once(
        mask: TileMask,
        logits: TileLogits,
        s: _Scratch,
        warpgroup,
        steps,
        piece: Piece,
        span: Span,
        begin,
        end,
        q_start,
        query,
        rows,
        out,
    ):
        """(state, sums [ROWS, V]) of a warpgroup's rows, which see `span`; `out` is their accumulator."""

        def slot_of(i):
            return lax.rem(steps + i, ring)

        def value_slot_of(i):
            return lax.rem(steps + i, v_ring)

        def wait_turn():
            if tiles.takes_turns:
                plgpu.barrier_wait(s.turn.at[warpgroup])

        def pass_turn():
            if tiles.takes_turns:
                plgpu.barrier_arrive(s.turn.at[lax.rem(warpgroup + 1, wgs)])

        def softmax_step(state: FirstMaximumSoftmax | LaneSoftmax | OnlineSoftmax, scores, i, first=False):
            j = work.tile_at(piece.span, i)
            at = {"example": piece.example, "head": piece.head, "q_start": q_start, "k_start": j * kv_tile, "q_axis": 0}
            scores, to_log2 = log2_logits(p, logits, scores, at)
            if backwards:
                scores = mask.hide(scores, rows=rows, **at) if first else scores
            elif mask.hides:
                # One branch, not two loops: between loops ptxas moves the registers that a wgmma in flight still reads.
                scores = lax.cond(span.ragged(j), lambda x: mask.hide(x, rows=rows, **at), lambda x: x, scores)
            if not split or first:
                state, weights, rescale = state.step(scores, to_log2)
                return state, dropped(p, logits, weights, at).astype(p.dtype), rescale
            state, weights, _ = state.step(scores[:, :split], to_log2)
            # Behind this ptxas moves nothing of what comes before, where out's product is not yet awaited.
            await_keys(i + 1)
            if split == kv_tile:
                return state, weights.astype(p.dtype), None
            state, others, _ = state.step(scores[:, split:], to_log2)
            return state, jnp.concatenate([weights.astype(p.dtype), others.astype(p.dtype)], axis=1), None

        def await_keys(i):
            pl.when(i < end)(lambda: plgpu.barrier_wait(s.k_ready.at[slot_of(i)]))

        held_query = plgpu.load(query.at[:, :held], layout=WGMMA, optimized=False) if held else None
        if held and by_values:
            plgpu.commit_smem()  # read, before the next queries come

        def multiply_keys(acc, slot):
            key = s.k_slots.at[slot]
            if held_query is None:
                plgpu.wgmma(acc, query, key.T)
            else:
                plgpu.wgmma(acc, query.at[:, held:], key.at[:, held:].T)
                plgpu.wgmma(acc, held_query, key.at[:, :held].T)

        def free_keys(i, slot):
            plgpu.barrier_arrive(s.k_consumed.at[slot])
            if by_values:
                pl.when(i == end - 1)(lambda: plgpu.barrier_arrive(s.q_consumed.at[warpgroup]))

        slot = slot_of(begin)
        plgpu.barrier_wait(s.k_ready.at[slot])
        wait_turn()

        def first_scores(acc):
            multiply_keys(acc, slot)
            pass_turn()
            return acc[...]

        scores = pl.run_scoped(first_scores, plgpu.WGMMAAccumulatorRef((ROWS, kv_tile), jnp.float32))
        free_keys(begin, slot)
        if tiles.first_maximum:
            start = FirstMaximumSoftmax()
        else:
            start = LaneSoftmax.start(ROWS) if sums_in_lanes else OnlineSoftmax.start(ROWS, BY_ROW)
        state, weights, _ = softmax_step(start, scores, begin, first=True)

        if split:
            await_keys(begin + 1)

        def step(i, carry):
            state, weights = carry
            k_slot, v_slot = slot_of(i), value_slot_of(i - 1)
            if not split:
                plgpu.barrier_wait(s.k_ready.at[k_slot])
            plgpu.barrier_wait(s.v_ready.at[v_slot])
            wait_turn()

            def both_products(acc):
                multiply_keys(acc, k_slot)
                plgpu.wgmma(out, weights, s.v_slots.at[v_slot])
                pass_turn()
                # out's product goes on; but with dropout ptxas gives the next weights the registers that it reads.
                return plgpu.wgmma_accumulator_load(acc, wait_n=0 if p.dropout_rate else 1)

            scores = pl.run_scoped(both_products, plgpu.WGMMAAccumulatorRef((ROWS, kv_tile), jnp.float32))
            free_keys(i, k_slot)
            state, next_weights, rescale = softmax_step(state, scores, i)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s.v_consumed.at[v_slot])
            if rescale is not None:
                out[...] = plgpu.wgmma_accumulator_load(out, wait_n=None) * by_row(rescale, v_dim)
            return state, next_weights

        state, weights = lax.fori_loop(begin + 1, end, step, (state, weights))
        slot = value_slot_of(end - 1)
        plgpu.barrier_wait(s.v_ready.at[slot])
        wait_turn()
        plgpu.wgmma(out, weights, s.v_slots.at[slot])
        pass_turn()
        summed = out[...]
        plgpu.barrier_arrive(s.v_consumed.at[slot])
        return state if isinstance(state, OnlineSoftmax) else state.whole(), summed

    def leave_nothing(s: _Scratch, lse_ref, warpgroup, piece: Piece):
        rows = pl.ds(piece.q_index * tiles.q_tile + warpgroup * ROWS, ROWS)
        see_nothing(s.row_slots.at[warpgroup], lse_ref, piece, rows, BY_ROW)

    q_copies = operands.query.shape[1] if loose_group else 1
    shares_slot = qk_dim == v_dim and work.out_dtype == p.dtype  # out leaves through Q's slot
    consumed: Any = functools.partial(plgpu.Barrier, num_arrivals=wgs)
    cluster_options: dict[str, Any] = {}
    if tiles.cluster > 1:
        consumed = functools.partial(plgpu.ClusterBarrier, collective_axes=("rank",), num_arrivals=wgs)
        cluster_options = {"cluster": (tiles.cluster,), "cluster_names": ("rank",)}
    scratch = {
        "q_slots": smem_tile(tiles.q_slots * wgs, ROWS, qk_dim, dtype=p.dtype),
        "k_slots": smem_tile(ring, kv_tile, qk_dim, dtype=p.dtype),
        "v_slots": smem_tile(v_ring, kv_tile, v_dim, dtype=p.dtype),
        **({} if shares_slot or by_values else {"out_slots": smem_tile(wgs, ROWS, v_dim, dtype=work.out_dtype)}),
        **({"loose_query": plgpu.SMEM((ROWS, qk_dim), p.dtype)} if loose_group else {}),
        "row_slots": plgpu.SMEM((wgs + lookers + takes_pieces, ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=q_copies, num_barriers=tiles.q_slots * wgs),
        "q_consumed": plgpu.Barrier(num_barriers=tiles.q_slots * wgs),
        "k_ready": plgpu.Barrier(num_barriers=ring),
        "v_ready": plgpu.Barrier(num_barriers=v_ring),
        "k_consumed": consumed(num_barriers=ring),
        "v_consumed": consumed(num_barriers=v_ring),
        "kv_arrived": plgpu.Barrier(num_arrivals=2),
        "again_ready": plgpu.Barrier(),
        "again_freed": plgpu.Barrier(num_arrivals=wgs),
        "looked": plgpu.Barrier(num_arrivals=wgs),
        "judged": plgpu.Barrier(),
        "turn": plgpu.Barrier(num_barriers=wgs),
        **(piece_queue.barriers(wgs) if takes_pieces else {}),
        "values_left": plgpu.Barrier(num_arrivals=wgs),
        "out_ready": plgpu.Barrier(num_arrivals=wgs),
    }
    schedule = []
    if takes_pieces:
        order = [] if row_mask is None else [work.queued(row_mask)]
        schedule = [jax.new_ref(piece_queue.new(work.order.total, marks)), *order]
    elif work.is_persistent:
        schedule = [jnp.asarray(work.schedule())]
    sizes_type = [jax.ShapeDtypeStruct(hopper_fwd_sizes.shape(p), p.dtype)] if measures else []
    out, lse, *sizes = plgpu.kernel(
        attention_forward,
        out_type=(*work.out_type, *sizes_type),
        grid=(work.blocks,),
        grid_names=("block",),
        **cluster_options,
        num_threads=wgs + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*jax.tree.leaves(operands), *schedule)
    return *work.combine(out, lse, group), *(hopper_fwd_sizes.by_head(p, x) for x in sizes)


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    q_slots: Any
    k_slots: Any
    v_slots: Any
    out_slots: Any
    loose_query: Any
    row_slots: Any
    """A row of lse for each compute warpgroup; then, for each that looks, which rows are `_BROKEN` or `_LOST`; then
    the numbers of pieces taken from a queue."""
    q_ready: Any
    q_consumed: Any
    k_ready: Any
    v_ready: Any
    k_consumed: Any
    v_consumed: Any
    kv_arrived: Any
    again_ready: Any
    again_freed: Any
    looked: Any
    judged: Any
    turn: Any
    piece_told: Any
    piece_heard: Any
    values_left: Any
    out_ready: Any
