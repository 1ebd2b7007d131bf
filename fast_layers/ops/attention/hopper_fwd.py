"""Attention's forward for Hopper (sm_90a): TMA loads, asynchronous wgmma, online softmax in registers.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block handles `compute_wgs` x 64 query rows of one head at a time. Its roles:

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
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.kernel_parts.tile_order import TileOrder, snake, turns
from fast_layers.ops.attention.config import HopperForwardTiles
from fast_layers.ops.attention.hopper_call import ROWS, RowMask, over_batch, pad_for_tma, padded_depth, round_up
from fast_layers.ops.attention.hopper_mask import WGMMA, TileMask, mend_broken_rows, tanh
from fast_layers.ops.attention.problem import Aux, Inputs, Problem

BY_ROW = WGMMA.reduce(1)


class _Operands(NamedTuple):
    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    sinks: Float[Array, "1 N"] | None
    mask: RowMask | None


def attend(problem: Problem, inputs: Inputs, aux: Aux):
    """(out [B, T, N, V], lse [B, N, T])."""
    p = problem
    tiles = HopperForwardTiles.of(p)
    qk_dim, v_dim = padded_depth(p.qk_dim), padded_depth(p.v_dim)
    operands = _Operands(
        pad_for_tma(inputs.query, ROWS, qk_dim),
        pad_for_tma(inputs.key, tiles.kv_tile, qk_dim),
        pad_for_tma(inputs.value, tiles.kv_tile, v_dim),
        None if inputs.sinks is None else inputs.sinks.astype(jnp.float32)[None],
        RowMask.of(p, aux.mask, tiles.q_tile, tiles.kv_tile),
    )
    out, lse = over_batch(functools.partial(_launch, tiles))(p, operands)
    return out[:, : p.q_len, :, : p.v_dim], lse[..., : p.q_len]


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(tiles: HopperForwardTiles, p: Problem, operands: _Operands):
    _, q_rows, _, qk_dim = operands.query.shape
    v_dim = operands.value.shape[3]
    wgs, ring, kv_tile = tiles.compute_wgs, tiles.stages, tiles.kv_tile
    q_tiles = -(-p.q_len // tiles.q_tile)
    order = TileOrder.of(p.batch * p.heads, q_tiles, p.group, p.kv_len * (qk_dim + v_dim) * p.dtype.itemsize)
    blocks = min(tiles.blocks or order.total, order.total)
    # Scores of a causal mask grow with the row, so the last rows come first.
    longest_last = p.mask.band is not None and p.mask.band.high is not None
    tree = jax.tree.structure(operands)

    def attention_forward(*refs, **scratch):
        inputs = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        out_ref, lse_ref = refs[tree.num_leaves :]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        mask = TileMask(p, tiles.q_tile, kv_tile, inputs.mask)
        s = _Scratch(**{"out_slots": None, **scratch})

        def piece(turn):
            head, q_index = order.locate(snake(turn, block, blocks))
            q_index = q_tiles - 1 - q_index if longest_last else q_index
            return lax.div(head, p.heads), lax.rem(head, p.heads), q_index

        def each_piece(role):
            """`role(turn, steps)` for all of the block's pieces; it returns how many key tiles it went through."""
            if blocks == order.total:
                role(jnp.int32(0), jnp.int32(0))
            else:
                lax.fori_loop(0, turns(order.total, block, blocks), lambda i, n: n + role(i, n), jnp.int32(0))

        @pl.when(warpgroup == wgs)
        def _load():
            plgpu.set_max_registers(tiles.load_registers, action="decrease")
            each_piece(functools.partial(load, piece, mask, inputs, s))

        @pl.when(warpgroup < wgs)
        def _compute():
            plgpu.set_max_registers(tiles.compute_registers, action="increase")

            @pl.when(warpgroup == 0)
            def _first_turn():
                plgpu.barrier_arrive(s.turn.at[0])

            each_piece(functools.partial(compute, piece, mask, inputs, s, out_ref, lse_ref, warpgroup))

            @pl.when(warpgroup == 0)
            def _last_turn():
                plgpu.barrier_wait(s.turn.at[0])

            plgpu.wait_smem_to_gmem(0)

    def load(piece, mask: TileMask, inputs: _Operands, s: _Scratch, turn, steps):
        example, head, q_index = piece(turn)
        kv_head = lax.div(head, p.group)
        span = mask.key_span(example, q_index)

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
                    plgpu.copy_gmem_to_smem(ref, slot_ref, ready, predicate=~mends)
                    plgpu.copy_gmem_to_smem(ref, slot_ref, s.kv_arrived, predicate=mends)

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
        return span.last - span.first

    def compute(piece, mask: TileMask, inputs: _Operands, s: _Scratch, out_ref, lse_ref, warpgroup, turn, steps):
        example, head, q_index = piece(turn)
        span = mask.key_span(example, q_index)
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
            if mask.hides:
                # One branch, not two loops: between loops ptxas moves the registers that a wgmma in flight still reads.
                hide = functools.partial(mask.hide, rows=rows, example=example, q_start=q_start, q_axis=0)
                scores = lax.cond(span.ragged(j), lambda x: hide(x, k_start=j * kv_tile), lambda x: x, scores)
            state, weights, rescale = state.step(scores, to_log2)
            return state, weights.astype(p.dtype), rescale

        def over_keys(out):
            slot = slot_of(span.first)
            plgpu.barrier_wait(s.k_ready.at[slot])
            wait_turn()

            def first_scores(acc):
                plgpu.wgmma(acc, query, s.k_slots.at[slot].T)
                pass_turn()
                return acc[...]

            scores = pl.run_scoped(first_scores, plgpu.ACC((ROWS, kv_tile), jnp.float32))
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
                    return plgpu.wgmma_accumulator_load(acc, wait_n=1)  # out's product goes on

                scores = pl.run_scoped(both_products, plgpu.ACC((ROWS, kv_tile), jnp.float32))
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

        state, out = pl.run_scoped(over_keys, plgpu.ACC((ROWS, v_dim), jnp.float32))
        if inputs.sinks is not None:
            state, rescale = state.join(inputs.sinks[0, head] * LOG2_E)
            out = out * by_row(rescale, v_dim)
        normaliser, lse = state.finish()
        out_slot = query if s.out_slots is None else s.out_slots.at[warpgroup]
        lse_slot = s.lse_slots.at[warpgroup]
        out_slot[...] = (out * by_row(normaliser, v_dim)).astype(p.dtype)
        lse_slot[...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_slot, out_ref.at[example, pl.ds(q_start, ROWS), head])
        plgpu.copy_smem_to_gmem(lse_slot, lse_ref.at[example, head, pl.ds(q_start, ROWS)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(s.q_consumed.at[q_slot])
        return span.last - span.first

    shares_slot = qk_dim == v_dim  # out leaves through Q's slot
    scratch = {
        "q_slots": smem_tile(tiles.q_slots * wgs, ROWS, qk_dim, dtype=p.dtype),
        "k_slots": smem_tile(ring, kv_tile, qk_dim, dtype=p.dtype),
        "v_slots": smem_tile(ring, kv_tile, v_dim, dtype=p.dtype),
        **({} if shares_slot else {"out_slots": smem_tile(wgs, ROWS, v_dim, dtype=p.dtype)}),
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
    return plgpu.kernel(
        attention_forward,
        out_type=(
            jax.ShapeDtypeStruct((p.batch, q_rows, p.heads, v_dim), p.dtype),
            jax.ShapeDtypeStruct((p.batch, p.heads, round_up(p.q_len, tiles.q_tile)), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=wgs + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands))


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
