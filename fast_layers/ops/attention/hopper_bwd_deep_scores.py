"""Attention's backward for Hopper (sm_90a) at depths over 128, with dQ apart: dK, dV, and dS left in the GPU's memory.

Axis letters: L tiles of dS, of 128 keys and half as many queries.

A block owns 64 keys of one key/value head: dK and dV of more would not fit in its registers. One of its warpgroups
keeps dV, one dK, and one loads; P goes from one to the next through shared memory:

    load warpgroup                            value warpgroup               key warpgroup
    --------------                            ---------------               -------------
    K, V       -> k_ready, v_ready            scores = K Q^T, next step     d_weights = V dO^T, next step
    Q, lse     -> q_ready                     dV += P dO                    dK += dS Q
                  waits q_consumed            P = 2^(scores - lse), next    dS = P * (d_weights - delta), next
    dO, delta  -> d_out_ready                 step -> weights_ready         step, from weights_ready -> memory
                  waits d_out_consumed

The scores and their gradients are a step ahead of the other products, and exponentials and dS are made while those run.
Queries, output gradients, P and dS have two or three slots each. The P that was in a slot before was taken, else these
queries had no slot. dK and dV leave by K's and V's slots when both warpgroups' products are done.

Another kernel makes dQ of dS, for a group of heads at a time (`hopper_bwd_scores.py`, `hopper_bwd_deep_query.py`).

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
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.kernel_parts.tile_order import TileOrder
from fast_layers.ops.attention.config import HOPPER_SMS, sees_all
from fast_layers.ops.attention.hopper_bwd_config import HopperDeepBackwardTiles
from fast_layers.ops.attention.hopper_bwd_scores import TILE, LeftScores
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import BY_QUERY, Operands, load_row, make_finite_in_chunks
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import WGMMA, TileMask

VALUE_WG, KEY_WG, LOAD_WG = range(3)
REGISTERS = {VALUE_WG: 240, KEY_WG: 240, LOAD_WG: 24}
"""Of each thread: together what three warpgroups are launched with, 168 each."""
_LSE, _DELTA = range(2)


def leave(
    left: LeftScores,
    operands: Operands,
    turn: Int[Array, " 1"] | None,
    d_key_ref: Any,
    d_value_ref: Any,
) -> Float[Array, "L 128 64"]:
    """A group's dS; writes its dK and dV. `turn` as `LeftScores.in_groups` gives it."""
    p = left.problem
    qk_dim, v_dim = operands.query.shape[3], operands.value.shape[3]
    bytes_per_head = p.group * p.q_len * 2 * p.dtype.itemsize * (qk_dim + v_dim)
    order = TileOrder.of(left.pairs, p.kv_len // ROWS, 1, bytes_per_head, HOPPER_SMS)
    arrays, tree = jax.tree.flatten((operands, turn))
    hides = not sees_all(p)
    ring = HopperDeepBackwardTiles.ring_of(qk_dim, v_dim)
    # Columns of K and V that stay in registers, which spares a ninth of what a step moves through shared memory.
    held = 128 if qk_dim == v_dim == 256 else 0

    def attention_backward_deep(*refs, **scratch):
        inputs: Any
        inputs, turn_ref = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        d_key_ref, d_value_ref, d_scores_ref = refs[tree.num_leaves :]
        mask = TileMask(p, ROWS, ROWS, None, TileLogits(p, inputs.logits))
        s = _Scratch(**scratch)

        def find_block():
            """In each role, so that its numbers are no longer in registers than the role needs them."""
            pair, kv_index = order.locate(lax.axis_index("block"))
            first = kv_index if hides else jnp.int32(0)
            example, kv_head = (f(left.first_pair(turn_ref) + pair, p.kv_heads) for f in (lax.div, lax.rem))
            return _Block(p, pair, example, kv_head, kv_index, first)

        def store(gradient, slot, to, block):
            slot = slot.at[0]
            plgpu.barrier_arrive(s.products_done)
            plgpu.barrier_wait(s.products_done)
            slot[...] = gradient.astype(p.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot, to.at[block.example, pl.ds(block.k_start, ROWS), block.kv_head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def values():
            plgpu.set_max_registers(REGISTERS[VALUE_WG], action="increase")
            block = find_block()
            store(d_value_of(s, mask, block), s.v_slot, d_value_ref, block)

        def keys():
            plgpu.set_max_registers(REGISTERS[KEY_WG], action="increase")
            block = find_block()
            d_key = d_key_of(s, d_scores_ref, block) * p.scale
            store(d_key, s.k_slot, d_key_ref, block)

        def loads():
            plgpu.set_max_registers(REGISTERS[LOAD_WG], action="decrease")
            load(inputs, s, find_block())

        # Not one branch after another: what one role has in registers would outlive it.
        lax.switch(lax.axis_index("warpgroup"), (values, keys, loads))

    def load(inputs: Any, s: _Scratch, block: _Block):
        keys = pl.ds(block.k_start, ROWS)

        def load_keys():
            key, value = (x.at[block.example, keys, block.kv_head] for x in (inputs.key, inputs.value))
            plgpu.copy_gmem_to_smem(key, s.k_slot.at[0], s.k_ready)
            plgpu.copy_gmem_to_smem(value, s.v_slot.at[0], s.v_ready)

        def step(i, _):
            head, q_index = block.place(i)
            slot, rows = lax.rem(i, ring), pl.ds(q_index * ROWS, ROWS)
            pl.when(i == 0)(load_keys)

            def load_rows(x, row, slots, rows_of, ready, consumed):
                pl.when(i >= ring)(lambda: plgpu.barrier_wait(consumed.at[slot]))
                plgpu.copy_gmem_to_smem(x.at[block.example, rows, head], slots.at[slot], ready.at[slot])
                load_row(row.at[block.example, head, rows], row_slot(s, rows_of, i), ready.at[slot])

            load_rows(inputs.query, inputs.lse, s.q_slots, _LSE, s.q_ready, s.q_consumed)
            load_rows(inputs.d_out, inputs.delta, s.d_out_slots, _DELTA, s.d_out_ready, s.d_out_consumed)
            plgpu.commit_smem()  # for its barrier: no warp shall wait for a phase two behind

        lax.fori_loop(0, block.steps, step, None)

    def row_slot(s: _Scratch, which: int, step):
        return s.row_slots.at[which * ring + lax.rem(step, ring)]

    def free(consumed, step):
        plgpu.barrier_arrive(consumed.at[lax.rem(step, ring)])

    def wait_for_keys(ready, tile):
        """And mends the tile where some are hidden: a weight of 0 times NaN is NaN."""
        plgpu.barrier_wait(ready)
        if hides:
            make_finite_in_chunks(tile)
            plgpu.commit_smem()

    def held_columns(slot):
        return plgpu.load(slot.at[0, :, :held], layout=WGMMA, optimized=False) if held else None

    def add_transposed(acc, slot, in_registers, rows, step):
        """The product of K or V with rows of queries or output gradients."""
        plgpu.wgmma(acc, slot.at[opaque_zero(step), :, held:], rows.at[:, held:].T)
        if in_registers is not None:
            plgpu.wgmma(acc, in_registers, rows.at[:, :held].T)

    def d_value_of(s: _Scratch, mask: TileMask, block: _Block):
        """What the value warpgroup does."""
        wait_for_keys(s.k_ready, s.k_slot.at[0])
        in_registers = held_columns(s.k_slot)

        def score_product(acc, step):
            plgpu.barrier_wait(s.q_ready.at[lax.rem(step, ring)])
            add_transposed(acc, s.k_slot, in_registers, s.q_slots.at[lax.rem(step, ring)], step)

        def weights_of(scores, step, first=False):
            head, q_index = block.place(step)
            scores = scores + by_query(plgpu.load(row_slot(s, _LSE, step), layout=BY_QUERY))
            if hides:
                at = {"example": block.example, "head": head, "q_start": q_index * ROWS, "k_start": block.k_start}
                hidden = functools.partial(mask.hide, rows=None, q_axis=1, **at)
                if first:
                    scores = hidden(scores)
                elif p.group > 1:  # the first of another head
                    scores = lax.cond(q_index == block.kv_index, hidden, lambda x: x, scores)
            return jnp.exp2(scores * (p.scale * LOG2_E)).astype(p.dtype)

        def hand_over(weights, step):
            slot = lax.rem(step, ring)
            s.weights[slot] = weights
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.weights_ready.at[slot])

        def over_queries(d_value):
            def first_weights(acc):
                score_product(acc, jnp.int32(0))
                return weights_of(plgpu.wgmma_accumulator_load(acc, wait_n=0), jnp.int32(0), first=True)

            def add_product(i):
                slot = lax.rem(i, ring)
                plgpu.barrier_wait(s.d_out_ready.at[slot])
                plgpu.wgmma(d_value, s.weights.at[slot], s.d_out_slots.at[slot])

            def step(i, _):
                def next_weights(acc):
                    score_product(acc, i + 1)
                    add_product(i)
                    return weights_of(plgpu.wgmma_accumulator_load(acc, wait_n=1), i + 1)

                hand_over(pl.run_scoped(next_weights, score_accumulator), i + 1)
                plgpu.wgmma_wait(0)
                free(s.d_out_consumed, i)

            hand_over(pl.run_scoped(first_weights, score_accumulator), jnp.int32(0))
            lax.fori_loop(0, block.steps - 1, step, None)
            add_product(block.steps - 1)
            summed = d_value[...]
            free(s.d_out_consumed, block.steps - 1)
            return summed

        return pl.run_scoped(over_queries, plgpu.WGMMAAccumulatorRef((ROWS, v_dim), jnp.float32))

    def d_key_of(s: _Scratch, d_scores_ref, block: _Block):
        """What the key warpgroup does."""
        wait_for_keys(s.v_ready, s.v_slot.at[0])
        in_registers = held_columns(s.v_slot)

        def d_weight_product(acc, step):
            slot = lax.rem(step, ring)
            plgpu.barrier_wait(s.d_out_ready.at[slot])
            acc[...] = by_query(plgpu.load(row_slot(s, _DELTA, step), layout=BY_QUERY))
            add_transposed(acc, s.v_slot, in_registers, s.d_out_slots.at[slot], step)

        def send(d_weights, step):
            slot = lax.rem(step, ring)
            free(s.d_out_consumed, step)
            plgpu.barrier_wait(s.weights_ready.at[slot])
            weights = plgpu.load(s.weights.at[slot], layout=WGMMA)
            d_scores = (weights.astype(jnp.float32) * d_weights).astype(p.dtype)
            plgpu.wait_smem_to_gmem(ring - 1, wait_read_only=True)
            s.d_scores[slot] = d_scores
            plgpu.commit_smem()
            head, q_index = block.place(step)
            head += (block.pair - block.kv_head) * p.group  # within the group of pairs
            to = d_scores_ref.at[part_of_scores(left, head, q_index, block.kv_index)]
            plgpu.copy_smem_to_gmem(s.d_scores.at[slot], to)

        def over_queries(d_key):
            def first_d_weights(acc):
                d_weight_product(acc, jnp.int32(0))
                return plgpu.wgmma_accumulator_load(acc, wait_n=0)

            def add_product(i):
                plgpu.wgmma(d_key, s.d_scores.at[lax.rem(i, ring)], s.q_slots.at[lax.rem(i, ring)])

            def step(i, _):
                def next_d_weights(acc):
                    add_product(i)
                    d_weight_product(acc, i + 1)
                    plgpu.wgmma_wait(2 if held else 1)
                    free(s.q_consumed, i)
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                send(pl.run_scoped(next_d_weights, score_accumulator), i + 1)

            send(pl.run_scoped(first_d_weights, score_accumulator), jnp.int32(0))
            lax.fori_loop(0, block.steps - 1, step, None)
            add_product(block.steps - 1)
            summed = d_key[...]
            free(s.q_consumed, block.steps - 1)
            return summed

        return pl.run_scoped(over_queries, plgpu.WGMMAAccumulatorRef((ROWS, qk_dim), jnp.float32))

    def opaque_zero(step):
        """0, which the compiler cannot tell: else it keeps every address of K in a register throughout the loop."""
        return (step * (step + 1)) & 1

    def by_query(x):
        return lax.broadcast_in_dim(x, (ROWS, ROWS), [1])

    score_accumulator = plgpu.WGMMAAccumulatorRef((ROWS, ROWS), jnp.float32)
    slots: Any = {"num_barriers": ring}
    scratch = {
        "k_slot": smem_tile(1, ROWS, qk_dim, dtype=p.dtype),
        "v_slot": smem_tile(1, ROWS, v_dim, dtype=p.dtype),
        "q_slots": smem_tile(ring, ROWS, qk_dim, dtype=p.dtype),
        "d_out_slots": smem_tile(ring, ROWS, v_dim, dtype=p.dtype),
        "weights": smem_tile(ring, ROWS, ROWS, dtype=p.dtype),
        "d_scores": smem_tile(ring, ROWS, ROWS, dtype=p.dtype),
        "row_slots": plgpu.SMEM((2 * ring, ROWS), jnp.float32),
        "k_ready": plgpu.Barrier(),
        "v_ready": plgpu.Barrier(),
        "q_ready": plgpu.Barrier(num_arrivals=2, **slots),
        "d_out_ready": plgpu.Barrier(num_arrivals=2, **slots),
        "q_consumed": plgpu.Barrier(**slots),
        "d_out_consumed": plgpu.Barrier(num_arrivals=2, **slots),
        "weights_ready": plgpu.Barrier(**slots),
        "products_done": plgpu.Barrier(num_arrivals=2),
    }
    return plgpu.kernel(
        attention_backward_deep,
        out_type=jax.ShapeDtypeStruct(left.shape, p.dtype),
        grid=(order.total,),
        grid_names=("block",),
        num_threads=len(REGISTERS),
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*arrays, d_key_ref, d_value_ref)


def part_of_scores(left: LeftScores, head: Any, q_index: Any, kv_index: Any) -> tuple[Any, Any]:
    """Where 64 queries' and 64 keys' dS stands among the tiles of a group; `head`: of its query heads."""
    halves = TILE // ROWS
    place = halves * left.row(head, lax.div(kv_index, halves)) + q_index
    return place, pl.ds(lax.rem(kv_index, halves) * ROWS, ROWS)


class _Block(NamedTuple):
    """The work on one tile of keys: the query tiles from `first` on, for each query head of the group."""

    problem: Problem
    pair: Any
    """Of an example and a key/value head, within a group."""
    example: Any
    kv_head: Any
    kv_index: Any
    first: Any

    @property
    def k_start(self) -> Any:
        return self.kv_index * ROWS

    @property
    def per_head(self) -> Any:
        return self.problem.q_len // ROWS - self.first

    @property
    def steps(self) -> Any:
        return self.per_head * self.problem.group

    def place(self, step: Any) -> tuple[Any, Any]:
        """(query head, query tile) of a step."""
        if self.problem.group == 1:
            return self.kv_head, self.first + step
        turn = lax.div(step, self.per_head)
        return self.kv_head * self.problem.group + turn, self.first + step - turn * self.per_head


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    k_slot: Any
    v_slot: Any
    q_slots: Any
    d_out_slots: Any
    weights: Any
    d_scores: Any
    row_slots: Any
    k_ready: Any
    v_ready: Any
    q_ready: Any
    d_out_ready: Any
    q_consumed: Any
    d_out_consumed: Any
    weights_ready: Any
    products_done: Any
