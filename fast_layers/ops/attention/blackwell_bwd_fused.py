"""Attention's backward for Blackwell (sm_100a, sm_103a) in one kernel: five products a tile, dQ summed in any order.

No GPU has run it: it is simulated, and compiled by the real assembler.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block owns 128 keys of one key/value head and goes through the tiles of 128 queries that see them, for every query
head of the group. Scores stand keys first, so that dK and dV stay in tensor memory. Four warpgroups:

    multiply, step by step            needs                                  -> announces
    dV += P dO                        weights_ready                          weights_consumed, d_out_consumed
    S = K Q^T       of the next step  q_ready, weights_consumed              scores_ready
    dQ = dS^T K                       d_scores_ready                         d_query_ready
    dK += dS Q                                                               q_consumed
    dP = V dO^T     of the next step  d_out_ready, d_query_read              d_weights_ready

    compute (two; half of a tile's queries each)
    P = 2^(S - lse)                   q_ready, scores_ready, scores_read     weights_ready
    dS = P * (dP - delta)             d_weights_ready                        d_scores_ready

    carry
    loads Q, lse, delta; dO           q_consumed; d_out_consumed             q_ready; d_out_ready
    adds dQ to the sum in memory      d_query_ready                          d_query_read

So exponentials run beside dQ, dK and dP, and dS is made beside dV and the next S.

P stands where S stood, so neither compute warpgroup writes before both have read; dQ stands where dP stood, or apart
where depths leave room. dS goes through shared memory, since dQ needs it transposed. That it may be overwritten there
follows from d_weights_ready: a commit stands for all products issued before.

Source: FlashAttention-4 (Dao-AILab, 2025), whose order of products and use of tensor memory this is.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.smem_tile import smem_tile, swizzled_columns
from fast_layers.kernel_parts.tile_order import TileOrder
from fast_layers.ops.attention.blackwell_bwd import Operands
from fast_layers.ops.attention.blackwell_config import DQ_SLOTS, BlackwellBackwardTiles
from fast_layers.ops.attention.blackwell_grad_parts import d_scores, decide, decided, log2_weights, store_sums, weigh
from fast_layers.ops.attention.blackwell_tile import BY_COLUMN, ROWS, STAGED, column_slices
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import Rows, TileMask

COMPUTE_WGS = 2
SHARE = ROWS // COMPUTE_WGS
"""Of a tile's queries, for each compute warpgroup."""


class StagedTileMask(TileMask):
    layout = STAGED

    def _in_range(self, rows: Rows | None, q_start: Any, k_start: Any, shape: Any, q_axis: int) -> list[Any]:
        if rows is None and q_axis == 1:
            return self._in_band_by_parts(q_start, k_start, shape, q_axis)
        return super()._in_range(rows, q_start, k_start, shape, q_axis)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(tiles: BlackwellBackwardTiles, p: Problem, operands: Operands):
    """(dQ / scale in float32, dK, dV)."""
    _, q_rows, _, qk_dim = operands.query.shape
    _, kv_rows, _, v_dim = operands.value.shape
    ring, v_ring = tiles.stages, tiles.v_stages
    kv_tiles = -(-p.kv_len // ROWS)
    bytes_per_head = p.group * p.q_len * (p.dtype.itemsize * (qk_dim + v_dim) + 4 * qk_dim)
    order = TileOrder.of(p.batch * p.kv_heads, kv_tiles, 1, bytes_per_head)
    apart = tiles.d_query_apart(qk_dim, v_dim)
    panel = swizzled_columns(qk_dim, jnp.float32)
    panels = qk_dim // panel
    arrays, tree = jax.tree.flatten(operands)

    def attention_backward(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        d_query_ref, *out_refs = refs[tree.num_leaves :]
        s = _Scratch(**scratch)
        logits = TileLogits(p, inputs.logits, STAGED)
        mask = StagedTileMask(p, ROWS, ROWS, inputs.mask, logits)

        def take_products():
            plgpu.set_max_registers(tiles.multiply_registers, action="decrease")
            multiply(s, place(mask, inputs).steps)

        def take_copies():
            plgpu.set_max_registers(tiles.load_registers, action="decrease")
            carry(inputs, s, d_query_ref, place(mask, inputs))

        def take_scores(share: int):
            plgpu.set_max_registers(tiles.compute_registers, action="increase")
            piece = place(mask, inputs)
            compute(share, mask, logits, s, piece)
            of_qk, of_v = (s.d_key, s.own_k, p.scale), (s.d_value, s.own_v, 1.0 / (1.0 - p.dropout_rate))
            sums, slot, factor = (of_qk, of_v)[share]
            plgpu.barrier_wait(s.sums_ready)
            to = out_refs[share].at[piece.example, pl.ds(piece.index * ROWS, ROWS), piece.kv_head]
            store_sums(sums, piece.steps > 0, factor, slot, to)

        # A role each: which columns of tensor memory are meant must be known when compiling.
        computes = [functools.partial(take_scores, share) for share in reversed(range(COMPUTE_WGS))]
        # One choice, since who still asks for another role after its own keeps in registers what that role needs.
        lax.switch(COMPUTE_WGS + 1 - lax.axis_index("warpgroup"), [take_products, take_copies, *computes])

    def place(mask: StagedTileMask, inputs: Any) -> _Piece:
        """Each role asks anew, since what is known before the roles part is kept in registers for all of them."""
        head, index = order.locate(lax.axis_index("block"))
        example, kv_head = lax.div(head, p.kv_heads), lax.rem(head, p.kv_heads)
        first, last = mask.query_span(example, index, inputs.q_span)
        return _Piece(example, kv_head, index, first, last - first, p.group)

    def carry(inputs: Any, s: _Scratch, d_query_ref, piece: _Piece):
        example, steps = piece.example, piece.steps
        own = pl.ds(piece.index * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(inputs.key.at[example, own, piece.kv_head], s.own_k, s.own_ready)
        plgpu.copy_gmem_to_smem(inputs.value.at[example, own, piece.kv_head], s.own_v, s.own_ready)

        def load_query(step):
            head, tile = piece.place(step)
            slot, rows = lax.rem(step, ring), pl.ds(tile * ROWS, ROWS)
            ready = s.q_ready.at[slot]
            plgpu.copy_gmem_to_smem(inputs.query.at[example, rows, head], s.q_slots.at[slot], ready)
            plgpu.copy_gmem_to_smem(inputs.lse_log2.at[example, head, rows], s.lse_slots.at[slot], ready)
            plgpu.copy_gmem_to_smem(inputs.delta.at[example, head, rows], s.delta_slots.at[slot], ready)

        def load_d_out(step):
            head, tile = piece.place(step)
            slot, rows = lax.rem(step, v_ring), pl.ds(tile * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                inputs.d_out.at[example, rows, head], s.d_out_slots.at[slot], s.d_out_ready.at[slot]
            )

        def add_d_query(step):
            head, tile = piece.place(step)
            plgpu.barrier_wait(s.d_query_ready)
            for i in range(panels):
                columns = pl.ds(i * panel, panel)
                slot = s.d_query_slots.at[lax.rem(step * panels + i, DQ_SLOTS)]
                part = plgpu.async_load_tmem(s.d_query.at[:, columns], layout=STAGED)
                if i == panels - 1:
                    plgpu.wait_load_tmem()
                    plgpu.barrier_arrive(s.d_query_read)
                plgpu.wait_smem_to_gmem(DQ_SLOTS - 1, wait_read_only=True)
                slot[...] = part
                plgpu.commit_smem()
                to = d_query_ref.at[example, pl.ds(tile * ROWS, ROWS), head, columns]
                plgpu.copy_smem_to_gmem(slot, to, reduction_op="add")

        for slots, load in ((ring, load_query), (v_ring, load_d_out)):
            lax.fori_loop(0, jnp.minimum(slots, steps), lambda step, _, load=load: load(step), None)

        def each_step(step, _):
            # In the order in which a step's products end.
            @pl.when(step + v_ring < steps)
            def _d_out():
                plgpu.barrier_wait(s.d_out_consumed.at[lax.rem(step, v_ring)])
                load_d_out(step + v_ring)

            add_d_query(step)

            @pl.when(step + ring < steps)
            def _query():
                plgpu.barrier_wait(s.q_consumed.at[lax.rem(step, ring)])
                load_query(step + ring)

        lax.fori_loop(0, steps, each_step, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def multiply(s: _Scratch, steps):
        plgpu.barrier_wait(s.own_ready)

        def multiply_scores(step):
            slot = lax.rem(step, ring)
            plgpu.barrier_wait(s.q_ready.at[slot])

            @pl.when(step > 0)
            def _wait():
                plgpu.barrier_wait(s.weights_consumed)

            plgpu.tcgen05_mma(s.scores, s.own_k, s.q_slots.at[slot].T, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.scores_ready)

        def wait_for_d_query_of_step_before(step):
            @pl.when(step > 0)
            def _wait():
                plgpu.barrier_wait(s.d_query_read)

        def multiply_d_weights(step):
            slot = lax.rem(step, v_ring)
            plgpu.barrier_wait(s.d_out_ready.at[slot])
            if not apart:
                wait_for_d_query_of_step_before(step)
            plgpu.tcgen05_mma(s.d_weights, s.own_v, s.d_out_slots.at[slot].T, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.d_weights_ready)

        def multiply_d_value(step):
            slot = lax.rem(step, v_ring)
            plgpu.barrier_wait(s.weights_ready)
            plgpu.tcgen05_mma(s.d_value, s.weights, s.d_out_slots.at[slot], accumulate=step > 0)
            plgpu.tcgen05_commit_arrive(s.weights_consumed)
            plgpu.tcgen05_commit_arrive(s.d_out_consumed.at[slot])

        def multiply_d_query_and_key(step):
            slot = lax.rem(step, ring)
            plgpu.barrier_wait(s.d_scores_ready)
            if apart:
                wait_for_d_query_of_step_before(step)
            plgpu.tcgen05_mma(s.d_query, s.d_scores.T, s.own_k, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.d_query_ready)
            plgpu.tcgen05_mma(s.d_key, s.d_scores, s.q_slots.at[slot], accumulate=step > 0)
            plgpu.tcgen05_commit_arrive(s.q_consumed.at[slot])  # with it go lse and delta, which were read

        def each_step(step, _):
            multiply_d_value(step)
            pl.when(step + 1 < steps)(lambda: multiply_scores(step + 1))
            multiply_d_query_and_key(step)
            pl.when(step + 1 < steps)(lambda: multiply_d_weights(step + 1))

        @pl.when(steps > 0)
        def _first():
            multiply_scores(jnp.int32(0))
            multiply_d_weights(jnp.int32(0))

        lax.fori_loop(0, steps, each_step, None)
        plgpu.tcgen05_commit_arrive(s.sums_ready)

    def compute(share: int, mask: StagedTileMask, logits: TileLogits, s: _Scratch, piece: _Piece):
        example, k_start = piece.example, piece.index * ROWS
        own = [pl.ds(share * SHARE + c.start, c.size) for c in column_slices(SHARE)]

        def compute_step(step, _):
            slot = lax.rem(step, ring)
            head, tile = piece.place(step)

            def place(c):
                q_start = tile * ROWS + c.start
                return {"example": example, "head": head, "q_start": q_start, "k_start": k_start, "q_axis": 1}

            def of_queries(slots, c):
                """lse or delta of the queries, spread over a part of the tile."""
                x = plgpu.load(slots.at[slot, c], layout=BY_COLUMN, optimized=False)
                return lax.broadcast_in_dim(x, (ROWS, c.size), [1])

            # Before there are scores, beside which there are few registers, and while the tensor core makes them.
            decisions = decide(logits, SHARE, **place(own[0])) if p.dropout_rate else None
            plgpu.barrier_wait(s.q_ready.at[slot])
            plgpu.barrier_wait(s.scores_ready)
            scores = [plgpu.async_load_tmem(s.scores.at[:, c], layout=STAGED) for c in own]
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(s.scores_read)
            ragged = mask.ragged_for_keys(example, tile, k_start, ROWS) if mask.hides else None
            factors = []
            for part, (x, c) in enumerate(zip(scores, own, strict=True)):
                at = place(c)
                bias = None if p.bias is None else logits.bias(shape=x.shape, **at)
                x, d_cap = log2_weights(p, x, bias, of_queries(s.lse_slots, c))
                if ragged is not None:

                    def hide(x, at=at):
                        return mask.hide(x, mask.rows(example, at["q_start"], x.shape[1], 1), **at)

                    # Part by part, since all scores of a tile, hidden and not, would take too many registers.
                    x = lax.cond(ragged, hide, lambda x: x, x)
                keep = decided(decisions, SHARE, c.start - own[0].start, c.size) if p.dropout_rate else None
                kept, factor = weigh(x, d_cap, keep)
                if part == 0:
                    plgpu.barrier_wait(s.scores_read)  # the weights of one take columns of the other's scores
                plgpu.async_store_tmem(s.weights.at[:, c], kept.astype(p.dtype))
                factors.append(factor)
            plgpu.commit_tmem()
            plgpu.barrier_arrive(s.weights_ready)
            plgpu.barrier_wait(s.d_weights_ready)
            made = []
            for factor, c in zip(factors, own, strict=True):
                d_weights = plgpu.async_load_tmem(s.d_weights.at[:, c], layout=STAGED)
                made.append(d_scores(p, factor, d_weights, of_queries(s.delta_slots, c)).astype(p.dtype))
            plgpu.wait_load_tmem()
            s.d_scores[:, share * SHARE : (share + 1) * SHARE] = jnp.concatenate(made, axis=1)
            plgpu.commit_smem()  # before their slots are refilled, lse and delta have been read too
            plgpu.barrier_arrive(s.d_scores_ready)

        lax.fori_loop(0, piece.steps, compute_step, None)

    def product(columns: int) -> Any:
        return plgpu.TMEM((ROWS, columns), jnp.float32)

    in_order: Any = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    d_weights, d_query = product(ROWS), product(qk_dim)
    scratch = {
        "own_k": smem_tile(ROWS, qk_dim, dtype=p.dtype),
        "own_v": smem_tile(ROWS, v_dim, dtype=p.dtype),
        "q_slots": smem_tile(ring, ROWS, qk_dim, dtype=p.dtype),
        "d_out_slots": smem_tile(v_ring, ROWS, v_dim, dtype=p.dtype),
        "lse_slots": plgpu.SMEM((ring, ROWS), jnp.float32),
        "delta_slots": plgpu.SMEM((ring, ROWS), jnp.float32),
        "d_scores": smem_tile(ROWS, ROWS, dtype=p.dtype),
        "d_query_slots": smem_tile(DQ_SLOTS, ROWS, panel, dtype=jnp.float32),
        "scores_or_weights": plgpu.RefUnion(product(ROWS), plgpu.TMEM((ROWS, ROWS), p.dtype, packed=True)),
        "d_weights_and_query": [d_weights, d_query] if apart else plgpu.RefUnion(d_weights, d_query),
        "d_key": product(qk_dim),
        "d_value": product(v_dim),
        "own_ready": plgpu.Barrier(num_arrivals=2),
        "q_ready": plgpu.Barrier(num_arrivals=3, num_barriers=ring),
        "d_out_ready": plgpu.Barrier(num_barriers=v_ring),
        "q_consumed": in_order(num_barriers=ring),
        "d_out_consumed": in_order(num_barriers=v_ring),
        "scores_ready": in_order(),
        "scores_read": in_order(num_arrivals=COMPUTE_WGS),
        "weights_ready": in_order(num_arrivals=COMPUTE_WGS),
        "weights_consumed": in_order(),
        "d_weights_ready": in_order(),
        "d_scores_ready": in_order(num_arrivals=COMPUTE_WGS),
        "d_query_ready": in_order(),
        "d_query_read": in_order(),
        "sums_ready": in_order(),
    }
    d_query_sums = jax.new_ref(jnp.zeros((p.batch, q_rows, p.heads, qk_dim), jnp.float32))
    d_key, d_value = plgpu.kernel(
        attention_backward,
        out_type=tuple(jax.ShapeDtypeStruct((p.batch, kv_rows, p.kv_heads, dim), p.dtype) for dim in (qk_dim, v_dim)),
        grid=(order.total,),
        grid_names=("block",),
        num_threads=COMPUTE_WGS + 2,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays, d_query_sums)
    return d_query_sums[...], d_key, d_value


class _Piece(NamedTuple):
    """The work on one tile of keys: its query tiles, for each query head of the group."""

    example: Any
    kv_head: Any
    index: Any
    first: Any
    tiles: Any
    group: int

    @property
    def steps(self) -> Any:
        return self.tiles * self.group

    def place(self, step: Any) -> tuple[Any, Any]:
        """(query head, query tile) of a step."""
        if self.group == 1:
            return self.kv_head, self.first + step
        turn = lax.div(step, jnp.maximum(self.tiles, 1))
        return self.kv_head * self.group + turn, self.first + step - turn * self.tiles


class _Scratch(NamedTuple):
    """What a block holds in shared and in tensor memory, and the barriers named after the event that they wait for."""

    own_k: Any
    own_v: Any
    q_slots: Any
    d_out_slots: Any
    lse_slots: Any
    delta_slots: Any
    d_scores: Any
    d_query_slots: Any
    scores_or_weights: Any
    d_weights_and_query: Any
    d_key: Any
    d_value: Any
    own_ready: Any
    q_ready: Any
    d_out_ready: Any
    q_consumed: Any
    d_out_consumed: Any
    scores_ready: Any
    scores_read: Any
    weights_ready: Any
    weights_consumed: Any
    d_weights_ready: Any
    d_scores_ready: Any
    d_query_ready: Any
    d_query_read: Any
    sums_ready: Any

    @property
    def scores(self) -> Any:
        return self.scores_or_weights[0]

    @property
    def weights(self) -> Any:
        return self.scores_or_weights[1]

    @property
    def d_weights(self) -> Any:
        return self.d_weights_and_query[0]

    @property
    def d_query(self) -> Any:
        return self.d_weights_and_query[1]
