"""The bias' gradient for Hopper (sm_90a): dS, summed over whatever the bias was broadcast along, in a fixed order.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block owns a tile of the bias, 64 queries by 64 keys, and goes through all tiles of scores that it was added to: those
of other examples and heads if it serves them all, and those of all queries, or all keys, if it is the same for them.
It makes the scores and their gradients anew (two products) and keeps the sum in registers. So no array of the size of
the scores is written, nothing is summed by atomics, and every run gives the same bits.

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
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES
from fast_layers.ops.attention.hopper_bwd import BY_ROW, Operands, make_finite
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.kernel_operands import RowMask
from fast_layers.ops.attention.problem import Aux, Inputs, Problem
from fast_layers.ops.attention.tile_logits import LogitOperands, TileLogits
from fast_layers.ops.attention.tile_mask import WGMMA, TileMask, tanh

Q_TILE = KV_TILE = ROWS
COMPUTE_WG, LOAD_WG = range(2)
_RESERVED_BYTES = 18 << 10
"""Of shared memory: the tile that is stored, in float32, and the rows' vectors and barriers."""


def attend_grad(problem: Problem, inputs: Inputs, aux: Aux, operands: Operands) -> Array:
    """The gradient in bias' shape and dtype; `operands` are those of the backward."""
    bias: Any = inputs.bias
    launch = sequential_vmap(functools.partial(_launch, problem))
    mask = RowMask.of(problem, aux.mask, Q_TILE, KV_TILE)
    d_bias = launch(operands._replace(mask=mask, q_span=None, logits=LogitOperands.of(inputs, aux, Q_TILE, KV_TILE)))
    for axis in (2, 3):
        if bias.shape[axis] == 1:
            d_bias = d_bias.sum(axis, keepdims=True)
    return d_bias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0,))
def _launch(p: Problem, operands: Operands) -> Float[Array, "B|1 N|1 I*64 J*64"]:
    """Along queries or keys that share a bias one tile is left, to be summed."""
    assert p.bias is not None
    qk_dim, v_dim = operands.query.shape[3], operands.value.shape[3]
    q_tiles, kv_tiles = -(-p.q_len // Q_TILE), -(-p.kv_len // KV_TILE)
    bias_batch, bias_heads, bias_queries, bias_keys = p.bias
    own_queries = q_tiles if bias_queries > 1 else 1
    own_keys = kv_tiles if bias_keys > 1 else 1
    stage_bytes = 2 * p.dtype.itemsize * ROWS * (qk_dim + v_dim)
    ring = 2 if 2 * stage_bytes + _RESERVED_BYTES <= HOPPER_SMEM_BYTES else 1
    tree = jax.tree.structure(operands)

    def attention_bias_gradient(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        (d_bias_ref,) = refs[tree.num_leaves :]
        warpgroup = lax.axis_index("warpgroup")
        own = {name: lax.axis_index(name) for name in ("example", "head", "queries", "keys")}
        logits = TileLogits(p, inputs.logits)
        mask = TileMask(p, Q_TILE, KV_TILE, inputs.mask, logits)
        s = _Scratch(**scratch)

        def span(name, of_bias, of_scores):
            """[first, last) of what the block goes through along one axis."""
            return (0, of_scores) if of_bias == 1 else (own[name], own[name] + 1)

        def each_tile(role, carry):
            """`role(step, example, head, q_index, k_index, carry)` for all tiles of scores; returns the last carry."""

            def of_head(example, head, state):
                def of_queries(q_index, state):
                    visited = mask.key_span(example, q_index)
                    first, last = visited.first, visited.last
                    if bias_keys > 1:
                        first, last = jnp.maximum(first, own["keys"]), jnp.minimum(last, own["keys"] + 1)

                    def of_keys(k_index, state):
                        step, carry = state
                        return step + 1, role(step, example, head, q_index, k_index, carry)

                    return lax.fori_loop(first, last, of_keys, state)

                return lax.fori_loop(*span("queries", bias_queries, q_tiles), of_queries, state)

            def of_example(example, state):
                return lax.fori_loop(
                    *span("head", bias_heads, p.heads), lambda head, state: of_head(example, head, state), state
                )

            start = (jnp.int32(0), carry)
            return lax.fori_loop(*span("example", bias_batch, p.batch), of_example, start)[1]

        @pl.when(warpgroup == LOAD_WG)
        def _load():
            each_tile(functools.partial(load, inputs, s), None)

        @pl.when(warpgroup == COMPUTE_WG)
        def _compute():
            nothing = plgpu.layout_cast(jnp.zeros((Q_TILE, KV_TILE), jnp.float32), WGMMA)
            s.d_bias_slot[...] = each_tile(functools.partial(add_gradient, mask, logits, s), nothing)
            plgpu.commit_smem()
            rows, columns = (pl.ds(own[name] * ROWS, ROWS) for name in ("queries", "keys"))
            plgpu.copy_smem_to_gmem(s.d_bias_slot, d_bias_ref.at[own["example"], own["head"], rows, columns])
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
    shape = (bias_batch, bias_heads, own_queries * Q_TILE, own_keys * KV_TILE)
    return plgpu.kernel(
        attention_bias_gradient,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(own_keys, own_queries, bias_heads, bias_batch),
        grid_names=("keys", "queries", "head", "example"),
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
