"""Attention's backward for Hopper (sm_90a) at depths over 128: all gradients in one pass over the scores.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block owns 64 keys of one key/value head: dK and dV of more would not fit in its registers. Of its three warpgroups
one keeps dV, one dK, and one sends dQ away; P and dS go from one to the next through shared memory:

    value warpgroup                      key warpgroup                        query warpgroup
    ---------------                      -------------                        ---------------
    scores = K Q^T, next step            dK += dS Q                           dQ = dS^T K, from scores_ready, by panels
    dV += P dO                           d_weights = V dO^T, next step        adds them to the sum in memory
    P = 2^(scores - lse), next step      dS = P * (d_weights - delta), next
    -> weights_ready                     step, from weights_ready
                                         -> scores_ready

The scores and their gradients are a step ahead of the other products, so that the tensor cores have work while
exponentials and dS are made. There is one P and one dS: weights_consumed and scores_consumed say that the next may be
written, at which the writer arrives too, since its own product reads what it wrote.

JAX would put two barriers around each store to shared memory and one before each copy into it; it is told not to, since
the query warpgroup waits for little else. What the warps of a warpgroup leave for one another, or for a copy, stands
before a commit or before a barrier at which all of them arrive.

The last step stands apart, since nothing is to be prepared in it. dK and dV leave by slots of queries and output
gradients, which nobody reads any more, while the last dQ is on its way.

There is no load warpgroup: with four, ptxas has 128 registers for a product of 256 columns and refuses. A slot is
refilled by whoever reads it last: queries by the key warpgroup after dK, output gradients by the value warpgroup after
dV, when P is taken too, which the key warpgroup does after its d_weights. Of delta and units, whose readers may be a
step behind and commit a step later, there are more slots.

Blocks add their dQ to one array by TMA, of integers or floats as in hopper_bwd, and for the same reasons. With
`d_query_apart` two other kernels take this one's place, and nothing is added.

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
from fast_layers.kernel_parts.tile_order import TileOrder
from fast_layers.ops.attention import hopper_bwd_deep_query, hopper_bwd_deep_scores
from fast_layers.ops.attention.config import HOPPER_SMS, sees_all
from fast_layers.ops.attention.hopper_bwd_config import HopperDeepBackwardTiles
from fast_layers.ops.attention.hopper_bwd_scores import gradients
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import (
    BY_QUERY,
    BY_ROW,
    Operands,
    as_summed,
    folds_lse,
    make_finite_in_chunks,
    summed_dtype,
)
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import WGMMA, TileMask

QUERY_WG, VALUE_WG, KEY_WG = range(3)
REGISTERS = {VALUE_WG: 208, KEY_WG: 200, QUERY_WG: 96}
"""Of each thread: together what three warpgroups are launched with, 168 each."""
_SHORT_TILES = 16
"""Of keys: up to here the heads of a group are those that fit in the cache together, if they occupy most of the SMs."""
_FEWEST_PIECES = 96
"""That is, under a mask, where the next group's longest pieces wait for this one's last."""
_SLOTS = 2
_LSE, _DELTA, _UNITS = range(2), range(2, 5), range(5, 8)
"""Slots in the array of row vectors, of 2 KiB in all."""


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def launch(tiles: HopperDeepBackwardTiles, p: Problem, operands: Operands):
    """(dQ, without the scale and as `as_summed` has it if made in the kernel, dK, dV), padded as the operands are."""
    if tiles.d_query_apart:
        return gradients(p, operands, hopper_bwd_deep_scores.leave, hopper_bwd_deep_query.d_query)
    _, q_rows, _, qk_dim = operands.query.shape
    _, kv_rows, _, v_dim = operands.value.shape
    q_tile, kv_tile, panel, columns = tiles.q_tile, tiles.kv_tile, tiles.depth_multiple, tiles.columns
    parts = qk_dim // columns
    # The key warpgroup gets more than the weights that meet dO, so these stay where they were made.
    holds_weights = p.softcap is not None or p.dropout_rate > 0
    bytes_per_head = p.group * p.q_len * (2 * p.dtype.itemsize * (qk_dim + v_dim) + 4 * qk_dim)
    q_tiles, kv_tiles = -(-p.q_len // q_tile), -(-p.kv_len // kv_tile)
    # What one copy adds lies together, which is faster without a mask. XLA puts it in order as it converts integers.
    by_parts = sees_all(p)
    pieces = (1 if by_parts else _FEWEST_PIECES) if kv_tiles <= _SHORT_TILES else HOPPER_SMS
    order = TileOrder.of(p.batch * p.kv_heads, kv_tiles, 1, bytes_per_head, pieces)
    zeros, operands = operands.zeros, operands._replace(zeros=None)
    tree = jax.tree.structure(operands)

    def attention_backward_deep(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        d_query_ref, d_key_ref, d_value_ref = refs[tree.num_leaves :]
        warpgroup = lax.axis_index("warpgroup")
        logits = TileLogits(p, inputs.logits)
        mask = TileMask(p, q_tile, kv_tile, inputs.mask, logits)
        s = _Scratch(**scratch)

        def find_block():
            """In each role, so that its numbers are no longer in registers than the role needs them."""
            head, kv_index = order.locate(lax.axis_index("block"))
            example, kv_head = lax.div(head, p.kv_heads), lax.rem(head, p.kv_heads)
            return _Block(p, example, kv_head, kv_index * kv_tile, *mask.query_span(example, kv_index, inputs.q_span))

        def store(gradient, slots, to, block):
            """Through the slot that is not the last step's, which another warp's product may read yet."""
            slot = slots.at[lax.rem(block.steps, _SLOTS)]
            slot[...] = gradient.astype(p.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot, to.at[block.example, pl.ds(block.k_start, kv_tile), block.kv_head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def queries():
            plgpu.set_max_registers(REGISTERS[QUERY_WG], action="decrease")
            block = find_block()
            load_first(inputs, s, block)
            add_d_query(d_query_ref, s, block)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def values():
            plgpu.set_max_registers(REGISTERS[VALUE_WG], action="increase")
            block = find_block()
            d_value = d_value_of(inputs, s, mask, logits, block)
            store(d_value * logits.survived if p.dropout_rate else d_value, s.d_out_slots, d_value_ref, block)

        def keys():
            plgpu.set_max_registers(REGISTERS[KEY_WG], action="increase")
            block = find_block()
            store(d_key_of(inputs, s, logits, block) * p.scale, s.q_slots, d_key_ref, block)

        # Not one branch after another: what one role has in registers would outlive it.
        lax.switch(warpgroup, (queries, values, keys))

    def load_query(inputs: Any, s: _Scratch, block: _Block, step):
        head, rows = block.place(step)
        slot, exists = lax.rem(step, _SLOTS), step < block.steps
        copy = functools.partial(plgpu.copy_gmem_to_smem, barrier=s.q_ready.at[slot], predicate=exists)
        copy(inputs.query.at[block.example, rows, head], s.q_slots.at[slot])
        copy(inputs.lse.at[block.example, head, rows], row_slot(s, _LSE, step))
        if inputs.units is not None:
            copy(inputs.units.at[block.example, head, rows], row_slot(s, _UNITS, step))

    def load_d_out(inputs: Any, s: _Scratch, block: _Block, step):
        head, rows = block.place(step)
        slot, exists = lax.rem(step, _SLOTS), step < block.steps
        copy = functools.partial(plgpu.copy_gmem_to_smem, barrier=s.d_out_ready.at[slot], predicate=exists)
        copy(inputs.d_out.at[block.example, rows, head], s.d_out_slots.at[slot])
        copy(inputs.delta.at[block.example, head, rows], row_slot(s, _DELTA, step))

    def row_slot(s: _Scratch, which: range, step):
        return s.row_slots.at[which.start + lax.rem(step, len(which))]

    def load_first(inputs: Any, s: _Scratch, block: _Block):
        keys = pl.ds(block.k_start, kv_tile)
        plgpu.copy_gmem_to_smem(inputs.key.at[block.example, keys, block.kv_head], s.k_slot.at[0], s.kv_ready)
        load_query(inputs, s, block, jnp.int32(0))
        plgpu.copy_gmem_to_smem(inputs.value.at[block.example, keys, block.kv_head], s.v_slot.at[0], s.kv_ready)
        load_d_out(inputs, s, block, jnp.int32(0))
        for step in range(1, _SLOTS):
            load_query(inputs, s, block, jnp.int32(step))
            load_d_out(inputs, s, block, jnp.int32(step))

    def wait_for(ready, step, exists):
        @pl.when(exists)
        def _wait():
            plgpu.barrier_wait(ready.at[lax.rem(step, _SLOTS)])

    def wait_for_keys(inputs: Any, s: _Scratch, block: _Block, tile):
        """And mends the tile: a weight of 0 times NaN is NaN. The others see it done when weights_ready says that the
        first P is there."""
        # Asked for before the wait, which hides how long memory takes to answer.
        broken = None if inputs.broken_keys is None else inputs.broken_keys[block.example, block.kv_head] != 0
        plgpu.barrier_wait(s.kv_ready)
        if broken is None:
            return

        @pl.when(broken)
        def _mend():
            make_finite_in_chunks(tile)
            plgpu.commit_smem()

    def d_value_of(inputs: Any, s: _Scratch, mask: TileMask, logits: TileLogits, block: _Block):
        """What the value warpgroup does."""
        wait_for_keys(inputs, s, block, s.k_slot.at[0])

        def score_product(acc, step, exists=True):
            wait_for(s.q_ready, step, exists)
            plgpu.wgmma(acc, s.k_slot.at[opaque_zero(step)], s.q_slots.at[lax.rem(step, _SLOTS)].T)

        def weights_of(scores, step):
            """(P, what the key warpgroup gets: P times the soft cap's derivative, negative where it is dropped)."""
            # A block that no query sees has no step: its first tile may not exist.
            head, rows = block.place(step)
            head, q_index = jnp.minimum(head, p.heads - 1), jnp.minimum(lax.div(rows.start, q_tile), last_tile)
            at = {"example": block.example, "head": head, "q_start": q_index * q_tile, "k_start": block.k_start}
            at["q_axis"] = 1
            lse = by_query(plgpu.load(row_slot(s, _LSE, step), layout=BY_QUERY))
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
                    return mask.hide(scores, mask.rows(block.example, q_index * q_tile, q_tile, 1), **at)

                ragged = mask.ragged_for_keys(block.example, q_index, block.k_start, kv_tile) & (block.steps > 0)
                scores = lax.cond(ragged, hide, lambda x: x, scores)
            weights = jnp.exp2(scores * to_log2)
            handed_over = weights if d_cap is None else weights * d_cap
            if p.dropout_rate:
                keep = logits.keep(shape=scores.shape, **at)
                handed_over = jnp.where(keep, handed_over, -handed_over)
                weights = jnp.where(keep, weights, 0.0)
            return weights.astype(p.dtype), handed_over.astype(p.dtype)

        def hand_over(weights):
            s.weights[...] = weights
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.weights_ready)

        def over_queries(d_value):
            def first_weights(acc):
                score_product(acc, jnp.int32(0), block.steps > 0)
                weights, handed_over = weights_of(plgpu.wgmma_accumulator_load(acc, wait_n=0), jnp.int32(0))
                hand_over(handed_over)
                return weights if holds_weights else None

            def add_product(i, weights):
                slot = s.d_out_slots.at[lax.rem(i, _SLOTS)]
                plgpu.wgmma(d_value, weights if holds_weights else s.weights, slot)

            def step(i, weights):
                wait_for(s.d_out_ready, i, True)

                def next_weights(acc):
                    score_product(acc, i + 1)
                    add_product(i, weights)
                    return weights_of(plgpu.wgmma_accumulator_load(acc, wait_n=1), i + 1)

                weights, handed_over = pl.run_scoped(next_weights, score_accumulator)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(s.weights_consumed)
                plgpu.barrier_wait(s.weights_consumed)
                load_d_out(inputs, s, block, i + _SLOTS)
                hand_over(handed_over)
                return weights if holds_weights else None

            def last(i, weights):
                wait_for(s.d_out_ready, i, True)
                add_product(i, weights)
                return weights

            weights = lax.fori_loop(0, last_step(block), step, pl.run_scoped(first_weights, score_accumulator))
            lax.fori_loop(last_step(block), block.steps, last, weights)
            plgpu.barrier_arrive(s.weights_consumed)  # with the key warpgroup's, which takes a P even without a step

            @pl.when(block.steps == 0)
            def _no_step():
                plgpu.barrier_wait(s.weights_consumed)  # until then it reads the slot that dV leaves by

            return d_value[...]

        return pl.run_scoped(over_queries, plgpu.WGMMAAccumulatorRef((ROWS, v_dim), jnp.float32))

    def d_key_of(inputs: Any, s: _Scratch, logits: TileLogits, block: _Block):
        """What the key warpgroup does."""
        wait_for_keys(inputs, s, block, s.v_slot.at[0])

        def d_weight_product(acc, step, delta):
            if not p.dropout_rate:
                acc[...] = delta
            plgpu.wgmma(acc, s.v_slot.at[opaque_zero(step)], s.d_out_slots.at[lax.rem(step, _SLOTS)].T)

        def delta_of(step, exists=True):
            wait_for(s.d_out_ready, step, exists)
            return by_query(plgpu.load(row_slot(s, _DELTA, step), layout=BY_QUERY))

        def d_scores_of(d_weights, delta):
            plgpu.barrier_wait(s.weights_ready)
            weights = plgpu.load(s.weights, layout=WGMMA)
            plgpu.barrier_arrive(s.weights_consumed)
            weights = weights.astype(jnp.float32)
            if p.dropout_rate:
                d_weights = jnp.where(weights > 0, d_weights * logits.survived, 0.0) + delta
                weights = jnp.abs(weights)
            return (weights * d_weights).astype(p.dtype)

        def hand_over(d_scores, exists=True):
            s.d_scores[...] = d_scores
            plgpu.commit_smem()

            @pl.when(exists)
            def _written():
                plgpu.barrier_arrive(s.scores_ready)

        def over_queries(d_key):
            def first_scores(acc):
                delta = delta_of(jnp.int32(0), block.steps > 0)
                d_weight_product(acc, jnp.int32(0), delta)
                return d_scores_of(plgpu.wgmma_accumulator_load(acc, wait_n=0), delta)

            def add_product(i):
                plgpu.wgmma(d_key, s.d_scores, s.q_slots.at[lax.rem(i, _SLOTS)])

            def step(i, _):
                delta = delta_of(i + 1)

                def next_d_weights(acc):
                    add_product(i)
                    d_weight_product(acc, i + 1, delta)
                    plgpu.wgmma_wait(1)
                    plgpu.commit_smem()  # for its barrier: each warp has waited for its own products only
                    load_query(inputs, s, block, i + _SLOTS)
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                d_scores = d_scores_of(pl.run_scoped(next_d_weights, score_accumulator), delta)
                plgpu.barrier_arrive(s.scores_consumed)
                plgpu.barrier_wait(s.scores_consumed)
                hand_over(d_scores)

            def last(i):
                add_product(i)
                plgpu.barrier_arrive(s.scores_consumed)  # with the query warpgroup's

            hand_over(pl.run_scoped(first_scores, score_accumulator), block.steps > 0)
            lax.fori_loop(0, last_step(block), step, None)
            pl.when(block.steps > 0)(lambda: last(block.steps - 1))
            return d_key[...]

        return pl.run_scoped(over_queries, plgpu.WGMMAAccumulatorRef((ROWS, qk_dim), jnp.float32))

    def add_d_query(d_query_ref, s: _Scratch, block: _Block):
        """What the query warpgroup does."""
        starts = range(0, qk_dim, panel)
        accumulator = plgpu.WGMMAAccumulatorRef((q_tile, panel), jnp.float32)

        def product(acc, step, start):
            plgpu.wgmma(acc, s.d_scores.T, s.k_slot.at[opaque_zero(step), :, start : start + panel])

        def step(i, _):
            head, rows = block.place(i)
            plgpu.barrier_wait(s.scores_ready)
            units = None
            if p.reproducible:
                units = plgpu.load(row_slot(s, _UNITS, i), layout=BY_ROW, optimized=False)

            def add(d_query, start):
                for within in range(0, panel, columns):
                    part, slots = (start + within) // columns, tiles.d_query_slots
                    slot = s.d_query_slots.at[part % slots if parts % slots == 0 else lax.rem(i * parts + part, slots)]
                    plgpu.wait_smem_to_gmem(tiles.d_query_slots - 1, wait_read_only=True)
                    slot[...] = as_summed(d_query[:, within : within + columns], units)
                    plgpu.commit_smem()
                    if by_parts:
                        tile = (block.example * p.heads + head) * q_tiles + lax.div(rows.start, q_tile)
                        to = d_query_ref.at[tile, part]
                    else:
                        to = d_query_ref.at[block.example, rows, head, pl.ds(start + within, columns)]
                    plgpu.copy_smem_to_gmem(slot, to, reduction_op="add")

            def first_panel(acc):
                product(acc, i, starts[0])
                return plgpu.wgmma_accumulator_load(acc, wait_n=0)

            d_query = pl.run_scoped(first_panel, accumulator)
            for start in starts[:-1]:

                def next_panel(acc, start=start, d_query=d_query):
                    product(acc, i, start + panel)
                    add(d_query, start)
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                d_query = pl.run_scoped(next_panel, accumulator)
            plgpu.barrier_arrive(s.scores_consumed)
            add(d_query, starts[-1])

        plgpu.barrier_wait(s.kv_ready)
        lax.fori_loop(0, block.steps, step, None)

    def opaque_zero(step):
        """0, which the compiler cannot tell: else it keeps every address of K in a register throughout the loop."""
        return (step * (step + 1)) & 1

    def by_query(x):
        return lax.broadcast_in_dim(x, (ROWS, q_tile), [1])

    def last_step(block: _Block):
        """Apart, as it has nothing to prepare; 0 if there is none."""
        return jnp.maximum(block.steps - 1, 0)

    last_tile = (p.q_len - 1) // q_tile
    score_accumulator = plgpu.WGMMAAccumulatorRef((ROWS, q_tile), jnp.float32)
    scratch = {
        "k_slot": smem_tile(1, kv_tile, qk_dim, dtype=p.dtype),
        "v_slot": smem_tile(1, kv_tile, v_dim, dtype=p.dtype),
        "q_slots": smem_tile(_SLOTS, q_tile, qk_dim, dtype=p.dtype),
        "d_out_slots": smem_tile(_SLOTS, q_tile, v_dim, dtype=p.dtype),
        "weights": smem_tile(kv_tile, q_tile, dtype=p.dtype),
        "d_scores": smem_tile(kv_tile, q_tile, dtype=p.dtype),
        "d_query_slots": smem_tile(tiles.d_query_slots, q_tile, columns, dtype=summed_dtype(p)),
        "row_slots": plgpu.SMEM((_UNITS.stop, q_tile), jnp.float32),
        "kv_ready": plgpu.Barrier(num_arrivals=2),
        "q_ready": plgpu.Barrier(num_arrivals=2 + p.reproducible, num_barriers=_SLOTS),
        "d_out_ready": plgpu.Barrier(num_arrivals=2, num_barriers=_SLOTS),
        "weights_ready": plgpu.Barrier(num_arrivals=1),
        "weights_consumed": plgpu.Barrier(num_arrivals=2),
        "scores_ready": plgpu.Barrier(num_arrivals=1),
        "scores_consumed": plgpu.Barrier(num_arrivals=2),
    }
    sums = p.batch, q_rows, p.heads, qk_dim
    if by_parts:
        sums = p.batch * p.heads * q_tiles, parts, q_tile, columns
    d_query = jax.new_ref(jnp.zeros(sums, summed_dtype(p)) if zeros is None else zeros.reshape(sums))
    d_key, d_value = plgpu.kernel(
        attention_backward_deep,
        out_type=tuple(jax.ShapeDtypeStruct((p.batch, kv_rows, p.kv_heads, dim), p.dtype) for dim in (qk_dim, v_dim)),
        grid=(order.total,),
        grid_names=("block",),
        num_threads=len(REGISTERS),
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*jax.tree.leaves(operands), d_query)
    if not by_parts:
        return d_query[...], d_key, d_value
    in_order = d_query[...].reshape(p.batch, p.heads, q_tiles, parts, q_tile, columns).transpose(0, 2, 4, 1, 3, 5)
    return in_order.reshape(p.batch, -1, p.heads, qk_dim), d_key, d_value


class _Block(NamedTuple):
    """The work on one tile of keys: its query tiles, for each query head of the group."""

    problem: Problem
    example: Any
    kv_head: Any
    k_start: Any
    first: Any
    last: Any

    @property
    def steps(self) -> Any:
        return (self.last - self.first) * self.problem.group

    def place(self, step: Any) -> tuple[Any, Any]:
        """(query head, rows) of a step."""
        per_head = self.last - self.first
        turn = lax.div(step, jnp.maximum(per_head, 1))
        tile = step - turn * per_head
        if self.problem.mask.band is None:
            # Blocks that are all at the same queries would add to the same rows of dQ at once. A causal mask or a
            # window keeps them apart.
            tile += lax.rem(lax.div(self.k_start, HopperDeepBackwardTiles.kv_tile), jnp.maximum(per_head, 1))
            tile = jnp.where(tile < per_head, tile, tile - per_head)
        q_tile = HopperDeepBackwardTiles.q_tile
        return self.kv_head * self.problem.group + turn, pl.ds((self.first + tile) * q_tile, q_tile)


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    k_slot: Any
    v_slot: Any
    q_slots: Any
    d_out_slots: Any
    weights: Any
    d_scores: Any
    d_query_slots: Any
    row_slots: Any
    kv_ready: Any
    q_ready: Any
    d_out_ready: Any
    weights_ready: Any
    weights_consumed: Any
    scores_ready: Any
    scores_consumed: Any
