"""Attention's backward for Hopper (sm_90a) at depths over 128: all gradients in one pass over the scores.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block owns 64 keys of one key/value head: dK and dV of more would not fit in its registers. Each compute warpgroup
keeps one of the two, and makes the scores or their gradients, which it hands to the other through shared memory:

    load warpgroup                    value warpgroup                       key warpgroup
    --------------                    ---------------                       -------------
    K, V once -> kv_ready             dV += P dO, this step                 d_weights = V dO^T
    Q, lse    -> q_ready              scores = K Q^T, next step             P from weights_ready
    dO, delta, units -> d_out_ready   dQ += dS^T K, from scores_ready       dS = P * (d_weights - delta)
                                      P = 2^(scores - lse), next step       dK += dS Q; dQ += dS^T K, its panels

The value warpgroup is one step ahead with its scores, so that products are in flight while it waits for dS and while
it exponentiates. dQ is shared by column panels. P of the next step may be written once dS of this one is there, since
that was made from P; dS of the next step once scores_consumed says that the value warpgroup is through with it.

Blocks add their dQ to one array by TMA, of integers or floats as in hopper_bwd, and for the same reasons.

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

from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.kernel_parts.tanh import tanh
from fast_layers.ops.attention.config import HopperDeepBackwardTiles
from fast_layers.ops.attention.hopper_bwd import (
    BY_QUERY,
    BY_ROW,
    Operands,
    as_summed,
    folds_lse,
    make_finite,
    piece_order,
    summed_dtype,
)
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import WGMMA, TileMask

VALUE_WG, KEY_WG, LOAD_WG = range(3)
COMPUTE_WGS = 2


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def launch(tiles: HopperDeepBackwardTiles, p: Problem, operands: Operands):
    """(d_query without the scale, as `as_summed` has it, d_key, d_value), padded as the operands are."""
    _, q_rows, _, qk_dim = operands.query.shape
    _, kv_rows, _, v_dim = operands.value.shape
    q_tile, kv_tile, panel = tiles.q_tile, tiles.kv_tile, tiles.depth_multiple
    starts = range(0, qk_dim, panel)
    mine = -(-len(starts) // COMPUTE_WGS)
    # The key warpgroup also reads P and writes dS: it takes the smaller part.
    panels = {VALUE_WG: starts[:mine], KEY_WG: starts[mine:]}
    bytes_per_head = p.group * p.q_len * (2 * p.dtype.itemsize * (qk_dim + v_dim) + 4 * qk_dim)
    order = piece_order(p, -(-p.kv_len // kv_tile), bytes_per_head)
    tree = jax.tree.structure(operands)

    def attention_backward_deep(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        d_query_ref, d_key_ref, d_value_ref = refs[tree.num_leaves :]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        logits = TileLogits(p, inputs.logits)
        mask = TileMask(p, q_tile, kv_tile, inputs.mask, logits)
        s = _Scratch(**{"units_slots": None, **scratch})
        head, kv_index = order.locate(block)
        example, kv_head = lax.div(head, p.kv_heads), lax.rem(head, p.kv_heads)
        k_start = kv_index * kv_tile
        first, last = mask.query_span(example, kv_index, inputs.q_span)
        per_head = last - first
        steps = per_head * p.group

        def place(step):
            """(query head, query tile) of a step."""
            turn = lax.div(step, jnp.maximum(per_head, 1))
            return kv_head * p.group + turn, first + step - turn * per_head

        def load_units(slot):
            return plgpu.load(s.units_slots.at[slot], layout=BY_ROW, optimized=False) if p.reproducible else None

        def add_to_d_query(step, d_query, units, wg, index):
            """Adds the `index`-th of a warpgroup's panels of dQ, through shared memory."""
            own = panels[wg]
            slots = min(tiles.d_query_slots, len(own))
            slot = s.d_query_slots.at[wg, index % slots]
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            slot[...] = as_summed(d_query, units)
            plgpu.commit_smem()
            head, q_index = place(step)
            to = d_query_ref.at[example, pl.ds(q_index * q_tile, q_tile), head, pl.ds(own[index], panel)]
            plgpu.copy_smem_to_gmem(slot, to, reduction_op="add")

        def opaque_zero(step):
            """0, which the compiler cannot tell: else it keeps every address of K in a register throughout the loop."""
            return (step * (step + 1)) & 1

        def d_query_product(acc, step, wg, index):
            plgpu.wgmma(
                acc,
                s.d_scores.T,
                s.k_slot.at[opaque_zero(step), :, panels[wg][index] : panels[wg][index] + panel],
            )

        @pl.when(warpgroup == LOAD_WG)
        def _load():
            plgpu.set_max_registers(24, action="decrease")
            load(inputs, s, example, kv_head, k_start, steps, place)

        @pl.when(warpgroup == VALUE_WG)
        def _values():
            plgpu.set_max_registers(240, action="increase")
            d_value = d_value_of(
                s,
                mask,
                logits,
                example,
                k_start,
                steps,
                place,
                load_units,
                add_to_d_query,
                d_query_product,
                opaque_zero,
            )
            if p.dropout_rate:
                d_value = d_value * logits.survived
            # dS of the last step was there, so V's slot is no longer read.
            s.v_slot[...] = d_value.astype(p.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s.v_slot, d_value_ref.at[example, pl.ds(k_start, kv_tile), kv_head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == KEY_WG)
        def _keys():
            plgpu.set_max_registers(240, action="increase")
            d_key = d_key_of(s, mask, logits, steps, load_units, add_to_d_query, d_query_product, opaque_zero)
            plgpu.barrier_wait(s.scores_consumed)  # K's slot is free once both have used it for dQ
            s.k_slot[0] = (d_key * p.scale).astype(p.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s.k_slot.at[0], d_key_ref.at[example, pl.ds(k_start, kv_tile), kv_head])
            plgpu.wait_smem_to_gmem(0)

    def load(inputs: Any, s: _Scratch, example, kv_head, k_start, steps, place):
        keys = pl.ds(k_start, kv_tile)
        plgpu.copy_gmem_to_smem(inputs.key.at[example, keys, kv_head], s.k_slot.at[0], s.kv_ready)
        plgpu.copy_gmem_to_smem(inputs.value.at[example, keys, kv_head], s.v_slot, s.kv_ready)

        def load_queries(step, _):
            head, q_index = place(step)
            rows = pl.ds(q_index * q_tile, q_tile)
            by_row = [(inputs.lse, s.lse_slots)], [(inputs.delta, s.delta_slots)]
            if inputs.units is not None:
                by_row[1].append((inputs.units, s.units_slots))
            for source, slots, row_vectors, ready, consumed, ring in (
                (inputs.query, s.q_slots, by_row[0], s.q_ready, s.q_consumed, tiles.q_slots),
                (inputs.d_out, s.d_out_slots, by_row[1], s.d_out_ready, s.d_out_consumed, tiles.d_out_slots),
            ):
                slot = lax.rem(step, ring)

                @pl.when(step >= ring)
                def _wait(consumed=consumed, slot=slot):
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(source.at[example, rows, head], slots.at[slot], ready.at[slot])
                for row_source, row_slots in row_vectors:
                    plgpu.copy_gmem_to_smem(row_source.at[example, head, rows], row_slots.at[slot], ready.at[slot])

        lax.fori_loop(0, steps, load_queries, None)

    def d_value_of(
        s: _Scratch,
        mask: TileMask,
        logits: TileLogits,
        example,
        k_start,
        steps,
        place,
        load_units,
        add_to_d_query,
        d_query_product,
        opaque_zero,
    ):
        """What the value warpgroup does."""
        own = len(panels[VALUE_WG])
        plgpu.barrier_wait(s.kv_ready)
        if mask.hides:

            @pl.when(steps > 0)
            def _mend():
                # The key warpgroup sees it done when weights_ready says that the first P is there.
                make_finite(s.k_slot.at[0])
                plgpu.commit_smem()

        def score_product(acc, step):
            slot = lax.rem(step, tiles.q_slots)

            @pl.when(step < steps)
            def _wait_q():
                plgpu.barrier_wait(s.q_ready.at[slot])

            plgpu.wgmma(acc, s.k_slot.at[opaque_zero(step)], s.q_slots.at[slot].T)

        def weights_of(scores, step):
            """P as it is kept; for the key warpgroup P is written too, times the soft cap's derivative.

            What is written is negative where it is dropped.
            """
            # Past the last step, which a block that no query sees has none of, the tile may not exist.
            head, q_index = place(step)
            head, q_index = jnp.minimum(head, p.heads - 1), jnp.minimum(q_index, (p.q_len - 1) // q_tile)
            at = {"example": example, "head": head, "q_start": q_index * q_tile, "k_start": k_start, "q_axis": 1}
            lse = by_query(plgpu.load(s.lse_slots.at[lax.rem(step, tiles.q_slots)], layout=BY_QUERY))
            to_log2, d_cap = p.scale * LOG2_E, None
            if p.softcap is not None:
                squashed = tanh(scores * (p.scale / p.softcap))
                d_cap = (1.0 - squashed) * (1.0 + squashed)
                scores, to_log2 = p.softcap * squashed, LOG2_E
            elif not folds_lse(p):
                scores, to_log2 = p.scale * scores, LOG2_E
            if p.bias is not None:
                scores += logits.bias(shape=scores.shape, **at)
            scores = scores + lse  # before hiding: what is hidden from a row whose lse is NaN still weighs nothing
            if mask.hides:

                def hide(scores):
                    return mask.hide(scores, mask.rows(example, q_index * q_tile, q_tile, 1), **at)

                ragged = mask.ragged_for_keys(example, q_index, k_start, kv_tile) & (step < steps)
                scores = lax.cond(ragged, hide, lambda x: x, scores)
            weights = jnp.exp2(scores * to_log2)
            handed_over = weights if d_cap is None else weights * d_cap
            if p.dropout_rate:
                keep = logits.keep(shape=scores.shape, **at)
                handed_over = jnp.where(keep, handed_over, -handed_over)
                weights = jnp.where(keep, weights, 0.0)
            s.weights[...] = handed_over.astype(s.weights.dtype)
            plgpu.commit_smem()

            @pl.when(step < steps)
            def _written():
                plgpu.barrier_arrive(s.weights_ready)

            return weights.astype(p.dtype)

        def over_queries(d_value):
            def first_weights(acc):
                score_product(acc, 0)
                return weights_of(plgpu.wgmma_accumulator_load(acc, wait_n=0), 0)

            def step(i, weights):
                slot = lax.rem(i, tiles.d_out_slots)
                plgpu.barrier_wait(s.d_out_ready.at[slot])
                units = load_units(slot)
                plgpu.commit_smem()  # what was read here is refilled by TMA

                def value_and_next_scores(score_acc, d_query_acc):
                    plgpu.wgmma(d_value, weights, s.d_out_slots.at[slot])
                    score_product(score_acc, i + 1)  # after the last step, of an old query: nobody reads it
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(s.d_out_consumed.at[slot])
                    plgpu.barrier_wait(s.scores_ready)
                    d_query_product(d_query_acc, i, VALUE_WG, 0)
                    scores = plgpu.wgmma_accumulator_load(score_acc, wait_n=1)
                    next_weights = weights_of(scores, i + 1)
                    return next_weights, plgpu.wgmma_accumulator_load(d_query_acc, wait_n=0)

                next_weights, d_query = pl.run_scoped(value_and_next_scores, *_accumulators(q_tile, panel))
                for index in range(own):
                    if index + 1 < own:

                        def next_panel(acc, index=index, d_query=d_query):
                            d_query_product(acc, i, VALUE_WG, index + 1)
                            add_to_d_query(i, d_query, units, VALUE_WG, index)
                            return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                        d_query = pl.run_scoped(next_panel, plgpu.WGMMAAccumulatorRef((q_tile, panel), jnp.float32))
                    else:
                        plgpu.barrier_arrive(s.scores_consumed)
                        add_to_d_query(i, d_query, units, VALUE_WG, index)
                return next_weights

            weights = pl.run_scoped(first_weights, plgpu.WGMMAAccumulatorRef((ROWS, q_tile), jnp.float32))

            @pl.when(steps == 0)
            def _nothing_to_do():
                plgpu.barrier_arrive(s.scores_consumed)

            lax.fori_loop(0, steps, step, weights)
            return d_value[...]

        return pl.run_scoped(over_queries, plgpu.WGMMAAccumulatorRef((ROWS, v_dim), jnp.float32))

    def d_key_of(
        s: _Scratch,
        mask: TileMask,
        logits: TileLogits,
        steps,
        load_units,
        add_to_d_query,
        d_query_product,
        opaque_zero,
    ):
        """What the key warpgroup does."""
        own = len(panels[KEY_WG])
        plgpu.barrier_wait(s.kv_ready)
        if mask.hides:

            @pl.when(steps > 0)
            def _mend():
                make_finite(s.v_slot)
                plgpu.commit_smem()

        def over_queries(d_key):
            def step(i, _):
                q_slot, slot = lax.rem(i, tiles.q_slots), lax.rem(i, tiles.d_out_slots)
                plgpu.barrier_wait(s.d_out_ready.at[slot])
                units = load_units(slot)

                def d_weights_of(acc):
                    delta = by_query(plgpu.load(s.delta_slots.at[slot], layout=BY_QUERY))
                    if not p.dropout_rate:
                        acc[...] = delta
                    plgpu.commit_smem()  # what was read here is refilled by TMA
                    plgpu.wgmma(acc, s.v_slot, s.d_out_slots.at[slot].T)
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0), delta

                d_weights, delta = pl.run_scoped(d_weights_of, plgpu.WGMMAAccumulatorRef((ROWS, q_tile), jnp.float32))
                plgpu.barrier_arrive(s.d_out_consumed.at[slot])
                plgpu.barrier_wait(s.weights_ready)
                weights = plgpu.load(s.weights, layout=WGMMA).astype(jnp.float32)
                if p.dropout_rate:
                    d_weights = jnp.where(weights > 0, d_weights * logits.survived, 0.0) + delta
                    weights = jnp.abs(weights)
                d_scores = (weights * d_weights).astype(p.dtype)

                @pl.when(i > 0)
                def _wait_consumed():
                    plgpu.barrier_wait(s.scores_consumed)

                s.d_scores[...] = d_scores
                plgpu.commit_smem()
                plgpu.barrier_arrive(s.scores_ready)

                def products(*accs):
                    # The first panel of dQ is done before dK, and is staged while dK goes on.
                    if own:
                        d_query_product(accs[0], i, KEY_WG, 0)
                    plgpu.wgmma(d_key, d_scores, s.q_slots.at[q_slot])
                    for index in range(1, own):
                        d_query_product(accs[index], i, KEY_WG, index)
                    if own:
                        add_to_d_query(
                            i,
                            plgpu.wgmma_accumulator_load(accs[0], wait_n=own),
                            units,
                            KEY_WG,
                            0,
                        )
                    plgpu.wgmma_wait(max(own - 1, 0))
                    plgpu.barrier_arrive(s.q_consumed.at[q_slot])
                    for index in range(1, own):
                        d_query = plgpu.wgmma_accumulator_load(accs[index], wait_n=own - 1 - index)
                        add_to_d_query(i, d_query, units, KEY_WG, index)

                accs = [plgpu.WGMMAAccumulatorRef((q_tile, panel), jnp.float32)] * own
                if own:
                    pl.run_scoped(products, *accs)
                else:
                    products()

            lax.fori_loop(0, steps, step, None)
            return d_key[...]

        return pl.run_scoped(over_queries, plgpu.WGMMAAccumulatorRef((ROWS, qk_dim), jnp.float32))

    def by_query(x):
        return lax.broadcast_in_dim(x, (ROWS, q_tile), [1])

    scratch = {
        "k_slot": smem_tile(1, kv_tile, qk_dim, dtype=p.dtype),
        "v_slot": smem_tile(kv_tile, v_dim, dtype=p.dtype),
        "q_slots": smem_tile(tiles.q_slots, q_tile, qk_dim, dtype=p.dtype),
        "d_out_slots": smem_tile(tiles.d_out_slots, q_tile, v_dim, dtype=p.dtype),
        "weights": smem_tile(kv_tile, q_tile, dtype=tiles.weights_dtype(p)),
        "d_scores": smem_tile(kv_tile, q_tile, dtype=p.dtype),
        "d_query_slots": smem_tile(COMPUTE_WGS, tiles.d_query_slots, q_tile, panel, dtype=summed_dtype(p)),
        "lse_slots": plgpu.SMEM((tiles.q_slots, q_tile), jnp.float32),
        "delta_slots": plgpu.SMEM((tiles.d_out_slots, q_tile), jnp.float32),
        **({"units_slots": plgpu.SMEM((tiles.d_out_slots, q_tile), jnp.float32)} if p.reproducible else {}),
        "kv_ready": plgpu.Barrier(num_arrivals=2),
        "q_ready": plgpu.Barrier(num_arrivals=2, num_barriers=tiles.q_slots),
        "d_out_ready": plgpu.Barrier(num_arrivals=2 + p.reproducible, num_barriers=tiles.d_out_slots),
        # The key warpgroup's dK comes after the value warpgroup's scores, whose P it is made from.
        "q_consumed": plgpu.Barrier(num_arrivals=1, num_barriers=tiles.q_slots),
        "d_out_consumed": plgpu.Barrier(num_arrivals=COMPUTE_WGS, num_barriers=tiles.d_out_slots),
        "weights_ready": plgpu.Barrier(num_arrivals=1),
        "scores_ready": plgpu.Barrier(num_arrivals=1),
        "scores_consumed": plgpu.Barrier(num_arrivals=1),
    }
    d_query = jax.new_ref(jnp.zeros((p.batch, q_rows, p.heads, qk_dim), summed_dtype(p)))
    d_key, d_value = plgpu.kernel(
        attention_backward_deep,
        out_type=tuple(jax.ShapeDtypeStruct((p.batch, kv_rows, p.kv_heads, dim), p.dtype) for dim in (qk_dim, v_dim)),
        grid=(order.total,),
        grid_names=("block",),
        num_threads=COMPUTE_WGS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands), d_query)
    return d_query[...], d_key, d_value


def _accumulators(q_tile: int, panel: int) -> tuple[Any, Any]:
    """Of scores and of a panel of dQ."""
    return plgpu.WGMMAAccumulatorRef((ROWS, q_tile), jnp.float32), plgpu.WGMMAAccumulatorRef(
        (q_tile, panel), jnp.float32
    )


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    k_slot: Any
    v_slot: Any
    q_slots: Any
    d_out_slots: Any
    weights: Any
    d_scores: Any
    d_query_slots: Any
    lse_slots: Any
    delta_slots: Any
    units_slots: Any
    kv_ready: Any
    q_ready: Any
    d_out_ready: Any
    q_consumed: Any
    d_out_consumed: Any
    weights_ready: Any
    scores_ready: Any
    scores_consumed: Any
