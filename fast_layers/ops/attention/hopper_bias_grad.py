"""The bias' gradient for Hopper (sm_90a): dS, summed over whatever the bias was broadcast along, in a fixed order.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block owns a tile of the bias, 64 queries by 64 keys, and goes through all tiles of scores that it was added to
(`bias_tiles.py`). It makes the scores and their gradients anew (two products) and keeps the sum in registers. So no
array of the size of the scores is written, nothing is summed by atomics, and every run gives the same bits.

    load warpgroup                                     compute warpgroup
    --------------                                     -----------------
    Q, K, V, dO, lse, delta -> ready   waits consumed  scores = Q K^T, d_weights = dO V^T     needs ready
                                                       sum += P * (d_weights - delta)         frees consumed

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
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.kernel_parts.tanh import tanh
from fast_layers.ops.attention import bias_tiles
from fast_layers.ops.attention.bias_tiles import BiasTiles
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import BY_ROW, Operands, make_finite
from fast_layers.ops.attention.problem import Aux, Inputs, Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import WGMMA, TileMask

Q_TILE = KV_TILE = ROWS
COMPUTE_WG, LOAD_WG = range(2)
_RESERVED_BYTES = 18 << 10
"""Of shared memory: the tile that is stored, in float32, and the rows' vectors and barriers."""


def attend_grad(problem: Problem, inputs: Inputs, aux: Aux, operands: Operands) -> Array:
    """The gradient in bias' shape and dtype; `operands` are those of the backward."""
    return bias_tiles.attend_grad(BiasTiles(problem, Q_TILE, KV_TILE), inputs, aux, operands, _launch)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0,))
def _launch(p: Problem, operands: Operands) -> Float[Array, "B|1 N|1 I*64 J*64"]:
    qk_dim, v_dim = operands.query.shape[3], operands.value.shape[3]
    tiles = BiasTiles(p, Q_TILE, KV_TILE)
    stage_bytes = 2 * p.dtype.itemsize * ROWS * (qk_dim + v_dim)
    ring = 2 if 2 * stage_bytes + _RESERVED_BYTES <= HOPPER_SMEM_BYTES else 1
    tree = jax.tree.structure(operands)

    def attention_bias_gradient(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        (d_bias_ref,) = refs[tree.num_leaves :]
        warpgroup = lax.axis_index("warpgroup")
        logits = TileLogits(p, inputs.logits)
        mask = TileMask(p, Q_TILE, KV_TILE, inputs.mask, logits)
        s = _Scratch(**scratch)

        @pl.when(warpgroup == LOAD_WG)
        def _load():
            tiles.each(mask, functools.partial(load, inputs, s), None)

        @pl.when(warpgroup == COMPUTE_WG)
        def _compute():
            nothing = plgpu.layout_cast(jnp.zeros((Q_TILE, KV_TILE), jnp.float32), WGMMA)
            s.d_bias_slot[...] = tiles.each(mask, functools.partial(add_gradient, mask, logits, s), nothing)
            plgpu.commit_smem()
            example, head, queries, keys = tiles.out_index()
            to = d_bias_ref.at[example, head, pl.ds(queries * Q_TILE, Q_TILE), pl.ds(keys * KV_TILE, KV_TILE)]
            plgpu.copy_smem_to_gmem(s.d_bias_slot, to)
            plgpu.wait_smem_to_gmem(0)

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
            (inputs.lse.at[example, head, rows], s.lse_slots),
            (inputs.delta.at[example, head, rows], s.delta_slots),
        ):
            plgpu.copy_gmem_to_smem(source, slots.at[slot], s.ready.at[slot])

    def add_gradient(mask: TileMask, logits: TileLogits, s: _Scratch, step, example, head, q_index, k_index, summed):
        slot, k_start = lax.rem(step, ring), k_index * KV_TILE
        at = {"example": example, "head": head, "q_start": q_index * Q_TILE, "k_start": k_start, "q_axis": 0}
        shape = (Q_TILE, KV_TILE)
        key, value = s.k_slots.at[slot], s.v_slots.at[slot]
        plgpu.barrier_wait(s.ready.at[slot])
        ragged = mask.ragged_for_keys(example, q_index, k_start, KV_TILE)
        if mask.hides:

            @pl.when(ragged)
            def _mend():
                # A weight of 0 times NaN is NaN. Who sees a broken key has an lse of NaN.
                make_finite(key)
                make_finite(value)
                plgpu.commit_smem()

        def products(score_acc, d_weight_acc):
            plgpu.wgmma(score_acc, s.q_slots.at[slot], key.T)
            plgpu.wgmma(d_weight_acc, s.d_out_slots.at[slot], value.T)
            return score_acc[...], d_weight_acc[...]

        accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
        scores, d_weights = pl.run_scoped(products, accumulator, accumulator)
        lse, delta = (by_row(plgpu.load(x.at[slot], layout=BY_ROW)) for x in (s.lse_slots, s.delta_slots))
        plgpu.commit_smem()  # what was read here is refilled by TMA
        plgpu.barrier_arrive(s.consumed.at[slot])
        scores = scores * p.scale
        if p.softcap is not None:
            scores = p.softcap * tanh(scores * (1.0 / p.softcap))
        scores = scores + logits.bias(shape=shape, **at) + lse
        if mask.hides:

            def hide(scores):
                return mask.hide(scores, mask.rows(example, q_index * Q_TILE, Q_TILE, 0), **at)

            scores = lax.cond(ragged, hide, lambda x: x, scores)
        weights = jnp.exp2(scores * LOG2_E)
        if p.dropout_rate:
            d_weights = jnp.where(logits.keep(shape=shape, **at), d_weights * logits.survived, 0.0)
        return summed + weights * (d_weights + delta)

    def by_row(x):
        return lax.broadcast_in_dim(x, (Q_TILE, KV_TILE), [0])

    scratch = {
        "q_slots": smem_tile(ring, Q_TILE, qk_dim, dtype=p.dtype),
        "k_slots": smem_tile(ring, KV_TILE, qk_dim, dtype=p.dtype),
        "d_out_slots": smem_tile(ring, Q_TILE, v_dim, dtype=p.dtype),
        "v_slots": smem_tile(ring, KV_TILE, v_dim, dtype=p.dtype),
        "lse_slots": plgpu.SMEM((ring, Q_TILE), jnp.float32),
        "delta_slots": plgpu.SMEM((ring, Q_TILE), jnp.float32),
        "d_bias_slot": smem_tile(Q_TILE, KV_TILE, dtype=jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=6, num_barriers=ring),
        "consumed": plgpu.Barrier(num_barriers=ring),
    }
    return plgpu.kernel(
        attention_bias_gradient,
        out_type=tiles.out_type,
        grid=tiles.grid,
        grid_names=tiles.grid_names,
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands))


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    q_slots: Any
    k_slots: Any
    d_out_slots: Any
    v_slots: Any
    lse_slots: Any
    delta_slots: Any
    d_bias_slot: Any
    ready: Any
    consumed: Any
