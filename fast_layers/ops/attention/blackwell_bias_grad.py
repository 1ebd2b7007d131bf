"""The bias' gradient for Blackwell (sm_100a, sm_103a): dS, summed over whatever the bias was broadcast along, in order.

No GPU has run it: it is simulated, and compiled by the real assembler.

Axis letters: B batch, T queries, S keys, N query heads.

A block owns a tile of the bias, 128 queries by 64 keys, and goes through all tiles of scores that it was added to
(`bias_tiles.py`). It makes the scores and their gradients anew and keeps the sum in registers:

    load warpgroup                        matmul warpgroup                         compute warpgroup
    --------------                        ----------------                         -----------------
    Q, K, dO, V -> ready                  scores = Q K^T, d_weights = dO V^T       sum += P * (d_weights - delta)
                   waits consumed         needs ready, scores_consumed             needs scores_ready
                                          -> scores_ready, consumed                -> scores_consumed

Source: Dao, "FlashAttention-2" (2023), for dS.
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

from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.kernel_parts.smem_tile import smem_tile, swizzled_columns
from fast_layers.kernel_parts.tanh import tanh_by_division
from fast_layers.ops.attention import bias_tiles
from fast_layers.ops.attention.bias_tiles import BiasTiles
from fast_layers.ops.attention.blackwell_bwd import Operands
from fast_layers.ops.attention.blackwell_config import BLACKWELL_SMEM_BYTES
from fast_layers.ops.attention.blackwell_grad_parts import d_scores, weigh
from fast_layers.ops.attention.blackwell_tile import BY_ROW, NATIVE, ROWS, STAGED, NativeTileMask, column_slices
from fast_layers.ops.attention.problem import Aux, Inputs, Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import TileMask, by_row

Q_TILE, KV_TILE = ROWS, 64
COMPUTE_WG, LOAD_WG, MULTIPLY_WG = range(3)
BUFFERS = 2
"""Pairs of products in tensor memory."""
_REGISTERS = {COMPUTE_WG: 240, LOAD_WG: 128, MULTIPLY_WG: 128}
_RESERVED_BYTES = 3 << 10
"""Of shared memory: barriers."""


def attend_grad(problem: Problem, inputs: Inputs, aux: Aux, operands: Operands) -> Array:
    """The gradient in bias' shape and dtype; `operands` are those of the backward."""
    return bias_tiles.attend_grad(BiasTiles(problem, Q_TILE, KV_TILE), inputs, aux, operands, _launch)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0,))
def _launch(p: Problem, operands: Operands) -> Float[Array, "B|1 N|1 I*128 J*64"]:
    qk_dim, v_dim = operands.query.shape[3], operands.value.shape[3]
    tiles = BiasTiles(p, Q_TILE, KV_TILE)
    stage_bytes = p.dtype.itemsize * (Q_TILE + KV_TILE) * (qk_dim + v_dim)
    ring = 2 if 2 * stage_bytes + 4 * Q_TILE * KV_TILE + _RESERVED_BYTES <= BLACKWELL_SMEM_BYTES else 1
    columns = column_slices(KV_TILE)
    tree = jax.tree.structure(operands)

    def attention_bias_gradient(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        (d_bias_ref,) = refs[tree.num_leaves :]
        logits = TileLogits(p, inputs.logits, NATIVE)
        mask = NativeTileMask(p, Q_TILE, KV_TILE, inputs.mask, logits)
        s = _Scratch(**scratch)

        def take_products():
            plgpu.set_max_registers(_REGISTERS[MULTIPLY_WG], action="decrease")
            tiles.each(mask, functools.partial(multiply, s), None)

        def take_loads():
            plgpu.set_max_registers(_REGISTERS[LOAD_WG], action="decrease")
            tiles.each(mask, functools.partial(load, inputs, s), None)

        def take_scores():
            plgpu.set_max_registers(_REGISTERS[COMPUTE_WG], action="increase")
            nothing = [plgpu.layout_cast(jnp.zeros((Q_TILE, c.size), jnp.float32), NATIVE) for c in columns]
            summed = tiles.each(mask, functools.partial(add_gradient, mask, logits, inputs, s), nothing)
            store(summed, s, d_bias_ref)

        # One choice, since who still asks for another role after its own keeps in registers what that role needs.
        roles = {COMPUTE_WG: take_scores, LOAD_WG: take_loads, MULTIPLY_WG: take_products}
        lax.switch(lax.axis_index("warpgroup"), [role for _, role in sorted(roles.items())])

    def load(inputs: Any, s: _Scratch, step, example, head, q_index, k_index, _):
        slot = lax.rem(step, ring)
        rows, keys = pl.ds(q_index * Q_TILE, Q_TILE), pl.ds(k_index * KV_TILE, KV_TILE)
        kv_head = lax.div(head, p.group)

        @pl.when(step >= ring)
        def _wait():
            plgpu.barrier_wait(s.consumed.at[slot])

        for source, slots in (
            (inputs.query.at[example, rows, head], s.q_slots),
            (inputs.key.at[example, keys, kv_head], s.k_slots),
            (inputs.d_out.at[example, rows, head], s.d_out_slots),
            (inputs.value.at[example, keys, kv_head], s.v_slots),
        ):
            plgpu.copy_gmem_to_smem(source, slots.at[slot], s.ready.at[slot])

    def multiply(s: _Scratch, step, *_):
        slot = lax.rem(step, ring)
        plgpu.barrier_wait(s.ready.at[slot])

        def multiply_into(buffer):
            @pl.when(step >= BUFFERS)
            def _wait():
                plgpu.barrier_wait(s.scores_consumed.at[buffer])

            plgpu.tcgen05_mma(s.scores[buffer], s.q_slots.at[slot], s.k_slots.at[slot].T, accumulate=False)
            plgpu.tcgen05_mma(s.d_weights[buffer], s.d_out_slots.at[slot], s.v_slots.at[slot].T, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.scores_ready.at[buffer])

        for buffer in range(BUFFERS):
            pl.when(lax.rem(step, BUFFERS) == buffer)(functools.partial(multiply_into, buffer))
        plgpu.tcgen05_commit_arrive(s.consumed.at[slot])

    def add_gradient(
        mask: TileMask, logits: TileLogits, inputs: Any, s: _Scratch, step, example, head, q_index, k_index, summed
    ):
        q_start = q_index * Q_TILE

        def place(c):
            k_start = k_index * KV_TILE + c.start
            return {"example": example, "head": head, "q_start": q_start, "k_start": k_start, "q_axis": 0}

        def of_buffer(take):
            even, odd = (functools.partial(take, buffer) for buffer in range(BUFFERS))
            return lax.cond(lax.rem(step, BUFFERS) == 0, even, odd)

        def load_scores(buffer):
            plgpu.barrier_wait(s.scores_ready.at[buffer])
            return [plgpu.async_load_tmem(s.scores[buffer].at[:, c], layout=NATIVE) for c in columns]

        def load_d_weights(buffer):
            d_weights = [plgpu.async_load_tmem(s.d_weights[buffer].at[:, c], layout=NATIVE) for c in columns]
            plgpu.wait_load_tmem()  # for the scores too
            plgpu.barrier_arrive(s.scores_consumed.at[buffer])
            return d_weights

        of_rows = [x.at[example, head, pl.ds(q_start, Q_TILE)] for x in (inputs.lse_log2, inputs.delta)]
        lse, delta = (plgpu.load(x, layout=BY_ROW, optimized=False) for x in of_rows)
        to_log2 = (p.scale if p.softcap is None else p.softcap) * LOG2_E
        ragged = mask.ragged_for_keys(example, q_index, k_index * KV_TILE, KV_TILE) if mask.hides else None
        rows = mask.rows(example, q_start, Q_TILE, 0)
        factors = []
        # Part by part, since all scores of a tile, hidden and not, would take too many registers.
        for x, c in zip(of_buffer(load_scores), columns, strict=True):
            at = place(c)
            if p.softcap is not None:
                x = tanh_by_division(x * (p.scale / p.softcap))
            # Before hiding: what is hidden from a row whose lse is NaN still weighs nothing.
            x = x * to_log2 + logits.bias(shape=x.shape, **at) * LOG2_E - by_row(lse, c.size)
            if ragged is not None:
                x = lax.cond(ragged, lambda x, at=at: mask.hide(x, rows, **at), lambda x: x, x)
            _, factor = weigh(x, None, logits.keep(shape=x.shape, **at) if p.dropout_rate else None)
            factors.append(factor)
        # After them, beside whose making there are few registers.
        d_weights = of_buffer(load_d_weights)
        return [
            so_far + d_scores(p, factor, d_weight, by_row(delta, c.size))
            for c, factor, d_weight, so_far in zip(columns, factors, d_weights, summed, strict=True)
        ]

    def store(summed, s: _Scratch, d_bias_ref):
        """Through tensor memory, to the layout in which shared memory is written without bank conflicts."""
        sums = s.scores[0]
        for c, x in zip(columns, summed, strict=True):
            plgpu.async_store_tmem(sums.at[:, c], x)
        plgpu.commit_tmem()
        for c in column_slices(KV_TILE, swizzled_columns(KV_TILE, jnp.float32)):
            s.d_bias_slot[:, c] = plgpu.async_load_tmem(sums.at[:, c], layout=STAGED)
        plgpu.wait_load_tmem()
        plgpu.commit_smem()
        example, head, queries, keys = tiles.out_index()
        to = d_bias_ref.at[example, head, pl.ds(queries * Q_TILE, Q_TILE), pl.ds(keys * KV_TILE, KV_TILE)]
        plgpu.copy_smem_to_gmem(s.d_bias_slot, to)
        plgpu.wait_smem_to_gmem(0)

    def products() -> list[Any]:
        return [plgpu.TMEM((Q_TILE, KV_TILE), jnp.float32) for _ in range(BUFFERS)]

    in_order: Any = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    scratch = {
        "q_slots": smem_tile(ring, Q_TILE, qk_dim, dtype=p.dtype),
        "k_slots": smem_tile(ring, KV_TILE, qk_dim, dtype=p.dtype),
        "d_out_slots": smem_tile(ring, Q_TILE, v_dim, dtype=p.dtype),
        "v_slots": smem_tile(ring, KV_TILE, v_dim, dtype=p.dtype),
        "d_bias_slot": smem_tile(Q_TILE, KV_TILE, dtype=jnp.float32),
        "scores": products(),
        "d_weights": products(),
        "ready": plgpu.Barrier(num_arrivals=4, num_barriers=ring),
        "consumed": in_order(num_barriers=ring),
        "scores_ready": in_order(num_barriers=BUFFERS),
        "scores_consumed": in_order(num_barriers=BUFFERS),
    }
    return plgpu.kernel(
        attention_bias_gradient,
        out_type=tiles.out_type,
        grid=tiles.grid,
        grid_names=tiles.grid_names,
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands))


class _Scratch(NamedTuple):
    """What a block holds in shared and in tensor memory, and the barriers named after the event that they wait for."""

    q_slots: Any
    k_slots: Any
    d_out_slots: Any
    v_slots: Any
    d_bias_slot: Any
    scores: Any
    d_weights: Any
    ready: Any
    consumed: Any
    scores_ready: Any
    scores_consumed: Any
