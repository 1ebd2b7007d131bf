"""Attention's backward for Hopper (sm_90a) at depths up to 128: all gradients in one pass, five products a tile.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block owns 128 keys of one key/value head at a time, 64 for each of its two compute warpgroups, and goes through the
query tiles that see them, for every query head of the group. Scores stand keys first, so that dK and dV stay in
registers:

    load warpgroup                              each compute warpgroup, on its own 64 keys
    --------------                              ------------------------------------------
    K, V        -> kv_ready                     scores = K Q^T, d_weights = V dO^T    needs q_ready, d_out_ready
    Q, lse      -> q_ready     waits q_consumed     dV += P dO                        P = 2^(scores - lse)
    dO, delta, units -> d_out_ready, likewise       dS = P * (d_weights - delta)      -> shared memory, scores_ready
                                                dQ += dS^T K, its half; dK += dS Q    frees scores_consumed

The blocks of a persistent grid take the tiles of keys that were dealt out to them when the call was traced. dQ lags a
step behind, also from one tile of keys to the next; so there are two slots for K. As soon as the last products of a
tile are done, kv_consumed lets the next K and V in, while dK and dV leave through dQ's slots.

Where a mask hides scores, a tile with NaN or inf in Q or dO is mended first, one operand by each warpgroup
(`queries_mended`).

Both warpgroups need all 128 keys' dS for dQ, so they exchange it through shared memory. Blocks add their dQ to one
array by TMA, in whatever order they come. So that array holds integers: sums of integers do not depend on the order,
and every run gives the same bits. Each row has its own unit, a power of two, from a bound on what the row can sum to.
Where the bits may change from run to run (`Problem.reproducible`), it holds floats, and rows have no units.

With `d_query_apart` dS goes to the GPU's memory instead, another kernel makes dQ of it, and there are no units. Of long
grouped heads it goes there in parts, which add to dK and dV.

What comes before and after is in hopper_bwd_call.py, the order of tiles in hopper_bwd_pieces.py.

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
from jaxtyping import Array, Int

from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.kernel_parts.tanh import tanh
from fast_layers.kernel_parts.tile_order import each_dealt
from fast_layers.ops.attention import hopper_bwd_apart, hopper_bwd_pieces
from fast_layers.ops.attention.config import HopperBackwardTiles, sees_all
from fast_layers.ops.attention.hopper_bwd_pieces import KV_TILE, Piece
from fast_layers.ops.attention.hopper_bwd_scores import TILE, LeftScores, gradients
from fast_layers.ops.attention.hopper_bwd_visits import Visits
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import (
    BY_QUERY,
    BY_ROW,
    Operands,
    as_summed,
    folds_lse,
    load_row,
    make_finite,
    make_finite_in_chunks,
    summed_dtype,
)
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import WGMMA, TileMask

WARPGROUPS = 2
LSE, DELTA, UNITS = range(3)
"""What a row of queries has, in one array: each array starts at a multiple of 1 KiB."""
_FEW_TILES = 4
_SUMMED_COLUMNS = 32
"""Of dK or dV in float32, that fit where a warpgroup's half of a step's dS does."""
_RESULT_PARTS = 2
"""Of dK and dV, by columns of 16 bits, that fit where as many columns of dQ do."""


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def launch(tiles: HopperBackwardTiles, p: Problem, operands: Operands):
    """(dQ, without the scale and as `as_summed` has it if made in the kernel, dK, dV), padded as the operands are."""
    query, key, value, zeros = operands.query, operands.key, operands.value, operands.zeros
    operands = operands._replace(zeros=None)
    if not tiles.d_query_apart:
        d_query = jax.new_ref(jnp.zeros(query.shape, summed_dtype(p)) if zeros is None else zeros)
        d_key, d_value = (jax.new_ref(lax.empty(x.shape, x.dtype)) for x in (key, value))
        _run(tiles, p, operands, d_key, d_value, d_query=d_query)
        return d_query[...], d_key[...], d_value[...]

    def leave(left, operands, turn, d_key_ref, d_value_ref):
        (d_scores,) = _run(tiles, p, operands, d_key_ref, d_value_ref, left=left, visits=visits, turn=turn)
        return d_scores

    visits = None if operands.mask is None else Visits.of(p, operands.mask, operands.broken_queries)
    d_query = functools.partial(hopper_bwd_apart.d_query, visits)
    return gradients(p, operands._replace(q_span=None), leave, d_query, may_sum=tiles.holds_keys)


def _run(
    tiles: HopperBackwardTiles,
    p: Problem,
    operands: Operands,
    d_key_ref: Any,
    d_value_ref: Any,
    *,
    d_query: Any = None,
    left: LeftScores | None = None,
    visits: Visits | None = None,
    turn: Int[Array, " 1"] | None = None,
):
    """Writes dK and dV, or adds to them for a part of the query heads; and adds to `d_query` or gives back dS."""
    qk_dim, v_dim = operands.query.shape[3], operands.value.shape[3]
    q_tile, ring, lags = tiles.q_tile, tiles.stages, left is None  # dQ, a step behind
    kv_tiles = -(-p.kv_len // KV_TILE)
    # The two warpgroups share dQ's tile: by rows where there are two times 64, else by columns.
    by_rows = q_tile == WARPGROUPS * ROWS
    panels, halves = 1 if by_rows else WARPGROUPS, q_tile // ROWS
    panel = qk_dim // panels
    heads = p.group if left is None else left.heads
    sums = heads < p.group
    bytes_per_head = heads * p.q_len * (2 * p.dtype.itemsize * (qk_dim + v_dim) + 4 * qk_dim)
    pairs = p.batch * p.kv_heads if left is None else left.pairs
    fits_first = hopper_bwd_pieces.fits_first(p, tiles, kv_tiles)
    order = hopper_bwd_pieces.piece_order(pairs, kv_tiles, bytes_per_head, fits_first)
    schedule = hopper_bwd_pieces.schedule(p, tiles, order) if qk_dim == v_dim else None
    persistent = schedule is not None
    keeps_barriers = not persistent or _keeps_barriers(p, kv_tiles)
    with_units = operands.units is not None
    # Which of the two takes fewer registers of the others was read off the assembly.
    copy_row: Any = load_row if lags else plgpu.copy_gmem_to_smem
    if operands.q_span is not None and hopper_bwd_pieces.ranks(order):
        schedule = hopper_bwd_pieces.longest_first(p, operands.q_span, order)
    given = operands, None if schedule is None else jnp.asarray(schedule), visits, turn
    written = d_key_ref, d_value_ref, *([d_query] if lags else [])
    arrays, tree = jax.tree.flatten(given)

    def attention_backward(*refs, **scratch):
        inputs: Any
        inputs, schedule_ref, visits_ref, turn_ref = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        # The last of the results is dQ, or dS for it.
        d_key_ref, d_value_ref, last_ref = refs[tree.num_leaves :]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        logits = TileLogits(p, inputs.logits)
        mask = TileMask(p, q_tile, KV_TILE, inputs.mask, logits)
        if persistent and lags:
            d_query_slots, results = scratch.pop("dQ or results")
            scratch |= {"d_query_slots": d_query_slots, "result_slots": results}
        if sums:
            d_scores, sum_slots = scratch.pop("dS or sums")
            scratch |= {"d_scores": d_scores, "sum_slots": sum_slots}
        s = _Scratch(**scratch)

        first_pair = jnp.int32(0) if left is None else left.first_pair(turn_ref)
        some_heads = heads, 0 if left is None else left.first_head(turn_ref)
        piece_of = functools.partial(Piece.of, p, tiles, order, mask, inputs, first_pair, some_heads)

        def each_piece(role, before):
            """The last `before = role(piece, turn, before)`, from what `before` makes; `turn` counts the pieces."""
            if not persistent:
                if visits_ref is not None:
                    piece = Piece.visited(p, tiles, mask, visits_ref, pairs, first_pair, block)
                else:
                    piece = piece_of(block if schedule_ref is None else schedule_ref[block])
                return role(piece, jnp.int32(0), before(piece))

            def take(_, index, state):
                turn, before = state
                return turn + 1, role(piece_of(index), turn, before)

            return each_dealt(schedule_ref, block, take, (jnp.int32(0), before(None)))[1]

        @pl.when(warpgroup == WARPGROUPS)
        def _load():
            plgpu.set_max_registers(24, action="decrease")
            each_piece(functools.partial(load, inputs, s), lambda _: jnp.int32(0))

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            own = pl.ds(warpgroup * ROWS, ROWS)

            def gradients(piece: Piece, turn, before: _Before):
                keys = pl.ds(piece.kv_index * KV_TILE + warpgroup * ROWS, ROWS)
                before, d_key, d_value = compute(
                    inputs, s, mask, logits, last_ref, visits_ref, piece, turn, before, keys.start, warpgroup
                )
                if lags and not persistent:
                    last_d_query(s, last_ref, before, warpgroup)
                if p.dropout_rate:
                    d_value = d_value * logits.survived
                d_key = d_key * p.scale
                if not sums:
                    d_key, d_value = d_key.astype(p.dtype), d_value.astype(p.dtype)
                if sums or (persistent and not lags):
                    send_through_scores(piece, keys, d_key, d_value, before.steps)
                else:
                    (send_through_sums if persistent else send_through_inputs)(piece, keys, d_key, d_value)
                return before

            def send_through_scores(piece: Piece, keys, d_key, d_value, steps):
                """By way of this warpgroup's halves of dS; or adds to the sums over all parts of the query heads."""
                if persistent:
                    plgpu.barrier_arrive(s.kv_consumed)
                # By those that were copied first, and that the next step does not write. Steps of 64 queries are even.
                first = lax.rem(steps + 1, 2) * halves if halves > 1 else 0
                slots = s.sum_slots if sums else s.d_scores
                columns, reduction = slots.shape[-1], "add" if sums else None
                both = ((d_value_ref, d_value), (d_key_ref, d_key))
                parts = [(to, x, at) for to, x in both for at in range(0, x.shape[1], columns)]
                for i, (to, x, at) in enumerate(parts):
                    slot = slots.at[(first + i % 2) * WARPGROUPS + warpgroup]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # for the copy before the last
                    slot[...] = x[:, at : at + columns]
                    plgpu.commit_smem()
                    to = to.at[piece.example, keys, piece.kv_head, pl.ds(at, columns)]
                    plgpu.copy_smem_to_gmem(slot, to, reduction_op=reduction)

            def send_through_inputs(piece: Piece, keys, d_key, d_value):
                if lags:
                    # Keys that both warpgroups have used for dQ.
                    plgpu.barrier_arrive(s.keys_left)
                    plgpu.barrier_wait(s.keys_left)
                s.v_slot[warpgroup] = d_value
                for i in range(panels):
                    s.k_slots[0, i, own] = d_key[:, i * panel : (i + 1) * panel]
                plgpu.commit_smem()
                for i in range(panels):
                    to = d_key_ref.at[piece.example, keys, piece.kv_head, pl.ds(i * panel, panel)]
                    plgpu.copy_smem_to_gmem(s.k_slots.at[0, i, own], to)
                plgpu.copy_smem_to_gmem(s.v_slot.at[warpgroup], d_value_ref.at[piece.example, keys, piece.kv_head])

            def send_through_sums(piece: Piece, keys, d_key, d_value):
                plgpu.barrier_arrive(s.kv_consumed)
                both = (d_value_ref, d_value), (d_key_ref, d_key)
                parts = [(to, i * panel, x[:, i * panel : (i + 1) * panel]) for to, x in both for i in range(panels)]
                slots = s.result_slots.at[warpgroup]
                for first in range(0, len(parts), _RESULT_PARTS):
                    some = parts[first : first + _RESULT_PARTS]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for i, (_, _, x) in enumerate(some):
                        slots[i] = x
                    plgpu.commit_smem()
                    for i, (to, start, _) in enumerate(some):
                        columns = to.at[piece.example, keys, piece.kv_head, pl.ds(start, panel)]
                        plgpu.copy_smem_to_gmem(slots.at[i], columns)

            any_units = plgpu.layout_cast(jnp.ones((ROWS,), jnp.float32), BY_ROW) if p.reproducible else None
            zero = jnp.int32(0)

            def nothing(piece):
                if not lags:
                    return _Before(zero)
                # With one piece its place is no part of what a step hands to the next.
                example, k_index = (zero, zero) if piece is None else (piece.example, None)
                return _Before(zero, example, zero, zero, k_index, any_units)

            before = each_piece(gradients, nothing)
            if lags and persistent:
                last_d_query(s, last_ref, before, warpgroup)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load(inputs: Any, s: _Scratch, piece: Piece, turn, steps):
        example, kv_head, k_start = piece.example, piece.kv_head, piece.kv_index * KV_TILE

        def load_keys():
            if persistent:
                pl.when(turn > 0)(lambda: plgpu.barrier_wait(s.kv_consumed))
            k_slot = s.k_slots.at[key_slot_of(turn)]
            for i in range(panels):
                key = inputs.key.at[example, pl.ds(k_start, KV_TILE), kv_head, pl.ds(i * panel, panel)]
                plgpu.copy_gmem_to_smem(key, k_slot.at[i], s.kv_ready)
            for i in range(WARPGROUPS):
                value = inputs.value.at[example, pl.ds(k_start + i * ROWS, ROWS), kv_head]
                plgpu.copy_gmem_to_smem(value, s.v_slot.at[i], s.kv_ready)

        def load_queries(head, q_index, step, _hides, _held):
            slot, rows = lax.rem(step, ring), pl.ds(q_index * q_tile, q_tile)

            @pl.when(step >= ring)
            def _wait_q():
                plgpu.barrier_wait(s.q_consumed.at[slot])

            plgpu.copy_gmem_to_smem(inputs.query.at[example, rows, head], s.q_slots.at[slot], s.q_ready.at[slot])
            copy_row(inputs.lse.at[example, head, rows], s.row_slots.at[LSE, slot], s.q_ready.at[slot])

            @pl.when(step >= ring)
            def _wait_d_out():
                plgpu.barrier_wait(s.d_out_consumed.at[slot])

            ready = s.d_out_ready.at[slot]
            plgpu.copy_gmem_to_smem(inputs.d_out.at[example, rows, head], s.d_out_slots.at[slot], ready)
            copy_row(inputs.delta.at[example, head, rows], s.row_slots.at[DELTA, slot], ready)
            if inputs.units is not None:
                copy_row(inputs.units.at[example, head, rows], s.row_slots.at[UNITS, slot], ready)
            # After the first queries, whose slots are free before those of keys and values.
            pl.when(step == steps)(load_keys)
            if not keeps_barriers:
                plgpu.commit_smem()  # for its barrier: no warp shall wait for a phase two behind
            return step + 1

        return piece.each_query_tile(load_queries, steps)

    def compute(
        inputs: Any,
        s: _Scratch,
        mask: TileMask,
        logits: TileLogits,
        last_ref,
        visits: Any,
        piece: Piece,
        turn,
        before: _Before,
        k_start,
        warpgroup,
    ):
        own = pl.ds(warpgroup * ROWS, ROWS)
        example = piece.example
        k_index = key_slot_of(turn)
        place = {"example": example, "k_index": k_index} if persistent else {}
        key = [s.k_slots.at[k_index, i, own] for i in range(panels)]
        value = s.v_slot.at[warpgroup]
        # Asked for before the wait, which hides how long memory takes to answer; so below.
        broken_keys = None if inputs.broken_keys is None else inputs.broken_keys[example, piece.kv_head] != 0
        pl.when(piece.steps > 0)(lambda: plgpu.barrier_wait(s.kv_ready))

        def mend_keys():
            # A weight of 0 times NaN is NaN, so what is hidden must be finite. Who sees a broken key has an lse of NaN.
            for tile in (*key, value):
                (make_finite_in_chunks if lags else make_finite)(tile)
            plgpu.commit_smem()

        if broken_keys is not None:
            pl.when(broken_keys & (piece.steps > 0))(mend_keys)
        if left is not None and not sees_all(p):
            mend_keys()  # here nobody has looked whether they are broken
        key_rows = None if inputs.key_rows is None else inputs.key_rows.load(example, k_start, ROWS)
        some_broken = None
        if visits is not None and visits.some_broken is not None:
            some_broken = visits.some_broken[example, piece.kv_head] != 0
        if lags:
            # The step before the first has no scores: its dQ, of whatever stands there, is added to nothing.
            nothing_before = (before.steps == 0) & (piece.steps > 0)
            pl.when(nothing_before)(lambda: plgpu.barrier_arrive(s.scores_ready.at[1]))

        def mend_queries(slot, broken):
            """One warpgroup mends the queries, the other the output gradients; both read both."""

            @pl.when(broken)
            def _mend():
                for mine, tile in enumerate((s.q_slots.at[slot], s.d_out_slots.at[slot])):

                    @pl.when(warpgroup == mine)
                    def _mine(tile=tile):
                        make_finite_in_chunks(tile)

                plgpu.commit_smem()
                plgpu.barrier_arrive(s.queries_mended)
                plgpu.barrier_wait(s.queries_mended)

        def weights_and_gradients(score_acc, d_weight_acc, slot, head, q_index, hides, held_key):
            """(weights, those that are kept, their gradients)."""
            at = {"example": example, "head": head, "q_start": q_index * q_tile, "k_start": k_start, "q_axis": 1}
            query, d_out = s.q_slots.at[slot], s.d_out_slots.at[slot]
            # Before the scores are there, since it takes many registers.
            keep = logits.keep(shape=(ROWS, q_tile), **at).astype(p.dtype) if p.dropout_rate else None
            broken = ragged = None
            if hides and inputs.broken_queries is not None and some_broken is None:
                broken = inputs.broken_queries[example, head, q_index] != 0
            if hides and not piece.ragged_apart:
                told = visits is not None
                ragged = piece.is_ragged(q_index) if told else mask.ragged_for_keys(example, q_index, k_start, ROWS)
            plgpu.barrier_wait(s.q_ready.at[slot])
            plgpu.barrier_wait(s.d_out_ready.at[slot])
            if broken is not None:
                mend_queries(slot, broken)
            if hides and some_broken is not None:
                pl.when(some_broken)(lambda: mend_queries(slot, inputs.broken_queries[example, head, q_index] != 0))

            def hide_by_rows(scores):
                return mask.hide(scores, mask.rows(example, q_index * q_tile, q_tile, 1), **at)

            lse = by_query(plgpu.load(s.row_slots.at[LSE, slot], layout=BY_QUERY))
            delta = by_query(plgpu.load(s.row_slots.at[DELTA, slot], layout=BY_QUERY))
            at_start = hides and piece.hides_at_start
            if at_start:
                score_acc[...] = lax.cond(ragged, hide_by_rows, lambda x: x, lse)
            elif folds_lse(p):
                score_acc[...] = lse
            if not p.dropout_rate:
                d_weight_acc[...] = delta
            for i, part in enumerate(key if held_key is None else [*key[:-1], held_key]):
                plgpu.wgmma(score_acc, part, query.at[:, i * panel : (i + 1) * panel].T)
            plgpu.wgmma(d_weight_acc, value, d_out.T)
            scores = plgpu.wgmma_accumulator_load(score_acc, wait_n=1)  # d_weights' product goes on
            to_log2, d_cap = p.scale * LOG2_E, None
            if p.softcap is not None:
                squashed = tanh(scores * (p.scale / p.softcap))
                d_cap = (1.0 - squashed) * (1.0 + squashed)
                scores, to_log2 = p.softcap * squashed + lse, LOG2_E
            elif p.bias is not None:
                scores, to_log2 = p.scale * scores + lse, LOG2_E
            if p.bias is not None:
                scores += logits.bias(shape=scores.shape, **at)
            if hides and not at_start:

                def hide(scores):
                    if key_rows is None:
                        return hide_by_rows(scores)
                    visible = functools.partial(key_rows.visible, q_index * q_tile, q_tile)
                    return lax.cond(key_rows.say_all, lambda x: jnp.where(visible(), x, -jnp.inf), hide_by_rows, scores)

                scores = hide(scores) if ragged is None else lax.cond(ragged, hide, lambda x: x, scores)
            weights = jnp.exp2(scores * to_log2)
            d_weights, kept = plgpu.wgmma_accumulator_load(d_weight_acc, wait_n=0), weights
            if keep is not None:
                keep = keep > 0
                kept = jnp.where(keep, weights, 0.0)
                d_weights = jnp.where(keep, d_weights * logits.survived, 0.0) + delta
            return weights, kept, d_weights if d_cap is None else d_weights * d_cap

        def over_queries(d_key, d_value):
            def step(head, q_index, before: _Before, hides, held_key):
                i = before.steps
                slot, buffer = lax.rem(i, ring), lax.rem(i, 2)
                query, d_out = s.q_slots.at[slot], s.d_out_slots.at[slot]
                first_row = warpgroup * ROWS if by_rows else 0
                place_of_tile = {"slot": slot, "head": head, "q_index": q_index}
                weights, kept, d_weights = pl.run_scoped(
                    functools.partial(weights_and_gradients, **place_of_tile, hides=hides, held_key=held_key),
                    plgpu.WGMMAAccumulatorRef((ROWS, q_tile), jnp.float32),
                    plgpu.WGMMAAccumulatorRef((ROWS, q_tile), jnp.float32),
                )
                units = None
                if inputs.units is not None:
                    of_tile = s.row_slots.at[UNITS, slot, pl.ds(first_row, ROWS)]
                    units = plgpu.load(of_tile, layout=BY_ROW, optimized=False)
                plgpu.wgmma(d_value, kept.astype(p.dtype), d_out)
                d_scores = (weights * d_weights).astype(p.dtype)
                if left is not None:
                    leave_d_scores(left, buffer, d_scores, head, q_index)
                    plgpu.wgmma(d_key, d_scores, query)
                    plgpu.wgmma_wait(1)  # dK's product goes on
                    plgpu.barrier_arrive(s.d_out_consumed.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(s.q_consumed.at[slot])
                    return before._replace(steps=i + 1)

                @pl.when(i > 0)
                def _wait_consumed():
                    plgpu.barrier_wait(s.scores_consumed.at[buffer])

                write_d_scores(buffer, d_scores)
                # dQ lags a step behind, so that neither warpgroup waits for the other's scores of this step.
                plgpu.barrier_wait(s.scores_ready.at[1 - buffer])

                def d_query_and_key(acc):
                    multiply_d_query(s, acc, before, warpgroup)
                    plgpu.wgmma(d_key, d_scores, query)
                    return plgpu.wgmma_accumulator_load(acc, wait_n=1)  # dK's product goes on

                d_query = pl.run_scoped(d_query_and_key, plgpu.WGMMAAccumulatorRef((ROWS, panel), jnp.float32))
                plgpu.barrier_arrive(s.d_out_consumed.at[slot])
                plgpu.barrier_arrive(s.scores_consumed.at[1 - buffer])
                add_d_query(s, last_ref, d_query, before, warpgroup)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(s.q_consumed.at[slot])
                return before._replace(steps=i + 1, head=head, q_index=q_index, units=units, **place)

            def own_scores(buffer, j):
                if lags:
                    return s.d_scores.at[buffer, j, own]
                return s.d_scores.at[(buffer * halves + j) * WARPGROUPS + warpgroup]

            def write_d_scores(buffer, d_scores):
                for j in range(halves):
                    own_scores(buffer, j)[...] = d_scores[:, j * ROWS : (j + 1) * ROWS]
                plgpu.commit_smem()
                if lags:
                    plgpu.barrier_arrive(s.scores_ready.at[buffer])

            def leave_d_scores(left: LeftScores, buffer, d_scores, head, q_index):
                plgpu.wait_smem_to_gmem(halves, wait_read_only=True)  # for those of the step before the last
                write_d_scores(buffer, d_scores)
                row = left.row(piece.pair * heads + head - piece.first_head, piece.kv_index)
                for j in range(halves):
                    to = last_ref.at[TILE // ROWS * row + q_index * halves + j, own]
                    plgpu.copy_smem_to_gmem(own_scores(buffer, j), to)

            def hold_key():
                # As products read it from shared memory, that would be busier than the tensor cores.
                return plgpu.load(key[-1], layout=WGMMA, optimized=False) if tiles.holds_keys else None

            after = piece.each_query_tile(step, before, hold_key)
            return after, d_key[...], d_value[...]

        return pl.run_scoped(
            over_queries,
            plgpu.WGMMAAccumulatorRef((ROWS, qk_dim), jnp.float32),
            plgpu.WGMMAAccumulatorRef((ROWS, v_dim), jnp.float32),
        )

    def key_slot_of(turn):
        return lax.rem(turn, 2) if lags and persistent else 0

    def multiply_d_query(s: _Scratch, acc, step: _Before, warpgroup):
        buffer = lax.rem(step.steps + 1, 2)
        mine, columns = (warpgroup, 0) if by_rows else (0, warpgroup)
        plgpu.wgmma(acc, s.d_scores.at[buffer, mine].T, s.k_slots.at[step.k_index if persistent else 0, columns])

    def add_d_query(s: _Scratch, d_query_ref, d_query, step: _Before, warpgroup):
        """Adds this warpgroup's half of a step's dQ to the sum in the GPU's memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slot = s.d_query_slots.at[warpgroup]
        slot[...] = as_summed(d_query, step.units)
        plgpu.commit_smem()
        # Of the 64 in a tile of queries whose dQ this warpgroup sums up.
        first_row = warpgroup * ROWS if by_rows else 0
        columns = pl.ds(0 if by_rows else warpgroup * panel, panel)
        to = d_query_ref.at[step.example, pl.ds(step.q_index * q_tile + first_row, ROWS), step.head, columns]
        plgpu.copy_smem_to_gmem(slot, to, step.steps > 0, reduction_op="add")

    def last_d_query(s: _Scratch, d_query_ref, before: _Before, warpgroup):
        @pl.when(before.steps > 0)
        def _last():
            plgpu.barrier_wait(s.scores_ready.at[lax.rem(before.steps + 1, 2)])

            def last(acc):
                multiply_d_query(s, acc, before, warpgroup)
                return acc[...]

            d_query = pl.run_scoped(last, plgpu.WGMMAAccumulatorRef((ROWS, panel), jnp.float32))
            add_d_query(s, d_query_ref, d_query, before, warpgroup)

    def by_query(x):
        return lax.broadcast_in_dim(x, (ROWS, q_tile), [1])

    scratch = {
        "k_slots": smem_tile(2 if lags and persistent else 1, panels, KV_TILE, panel, dtype=p.dtype),
        "v_slot": smem_tile(WARPGROUPS, ROWS, v_dim, dtype=p.dtype),
        "q_slots": smem_tile(ring, q_tile, qk_dim, dtype=p.dtype),
        "d_out_slots": smem_tile(ring, q_tile, v_dim, dtype=p.dtype),
        "d_scores": smem_tile(
            *((2, halves, KV_TILE) if lags else (2 * halves * WARPGROUPS, ROWS)), ROWS, dtype=p.dtype
        ),
        "row_slots": plgpu.SMEM((2 + with_units, ring, q_tile), jnp.float32),
        "kv_ready": plgpu.Barrier(num_arrivals=panels + WARPGROUPS),
        "q_ready": plgpu.Barrier(num_arrivals=2, num_barriers=ring),
        "d_out_ready": plgpu.Barrier(num_arrivals=2 + with_units, num_barriers=ring),
        "q_consumed": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=ring),
        "d_out_consumed": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=ring),
        "queries_mended": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    if persistent:
        scratch["kv_consumed"] = plgpu.Barrier(num_arrivals=WARPGROUPS)
    if lags:
        for name in ("scores_ready", "scores_consumed"):
            scratch[name] = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2)
        d_query_slots = smem_tile(WARPGROUPS, ROWS, panel, dtype=summed_dtype(p))
        if persistent:
            results = smem_tile(WARPGROUPS, _RESULT_PARTS, ROWS, panel, dtype=p.dtype)
            scratch["dQ or results"] = plgpu.RefUnion(d_query_slots, results)
        else:
            scratch |= {"d_query_slots": d_query_slots, "keys_left": plgpu.Barrier(num_arrivals=WARPGROUPS)}
    if sums:
        sum_slots = smem_tile(2 * WARPGROUPS, ROWS, _SUMMED_COLUMNS, dtype=jnp.float32)
        scratch["dS or sums"] = plgpu.RefUnion(scratch.pop("d_scores"), sum_slots)
    return plgpu.kernel(
        attention_backward,
        out_type=() if left is None else (jax.ShapeDtypeStruct(left.shape, p.dtype),),
        grid=(tiles.blocks if persistent else order.total,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not keeps_barriers),
    )(*arrays, *written)


def _keeps_barriers(p: Problem, kv_tiles: int) -> bool:
    """Whether a persistent grid was faster with the barriers that JAX puts around what goes to shared memory.

    They are not needed: what the warps of a warpgroup leave for one another, or for a copy, stands before a commit, and
    at the kernel's own barriers all of them arrive.
    """
    return sees_all(p) and max(p.qk_dim, p.v_dim) <= 64 and kv_tiles > _FEW_TILES


class _Before(NamedTuple):
    """The step before: how many there were up to it, its query head and tile, and the units of its rows."""

    steps: Any
    example: Any = None
    head: Any = None
    q_index: Any = None
    k_index: Any = None
    units: Any = None


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    k_slots: Any
    v_slot: Any
    q_slots: Any
    d_out_slots: Any
    d_scores: Any
    row_slots: Any
    kv_ready: Any
    q_ready: Any
    d_out_ready: Any
    q_consumed: Any
    d_out_consumed: Any
    queries_mended: Any
    scores_ready: Any = None
    scores_consumed: Any = None
    d_query_slots: Any = None
    result_slots: Any = None
    sum_slots: Any = None
    keys_left: Any = None
    kv_consumed: Any = None
