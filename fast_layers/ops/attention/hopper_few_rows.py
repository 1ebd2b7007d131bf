"""Attention's forward of few rows for Hopper (sm_90a): a decoding step, whose time is that of loading the keys.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, C columns, H query/key depth, V value depth.

A row is a query's head, of those that share a key/value head (`packed_heads`). wgmma's own 64 rows are keys, and
values' columns: both products are computed turned, with our rows as their columns, in eights. Little is computed,
exponentiated, held or sent for rows that are not there, so that several blocks share an SM, of one warpgroup each, and
hide one another's latencies.

    Q, and all slots of K and V  -> q_ready, kv_ready
    step(j):  scores = K(j) Q^T                      needs kv_ready(j)
              P = a softmax step on scores           to shared memory
              out = out * rescale + V(j)^T P^T       frees consumed(j)
              K, V of the step `stages` later        into the slots that all have left, waits consumed(j)

wgmma has 64 rows at a time, so values of depths that are no multiples of it come to their product by way of registers,
where rows that are not there are others once more, and nobody stores them. So do keys of odd multiples of 16, to the
first product: these lie in plain rows.

A block takes the tiles of keys that the rows of one key/value head see, or with `splits` a part of them, from the last
on: where a mask hides keys, that is mostly in the last. Where one does, broken values are looked for, and mended,
before the tile is multiplied.

Parts are float32. Those `in_cluster` are put together where they are, in shared memory:

    each block:  out, lse of its part -> shared memory, then all meet
                 its rows of all blocks' parts, together -> out, lse     all meet before any ends

Others go to the GPU's memory, for a kernel of `split_kv`.

Sources: Dao et al., "Flash-Decoding" (2023); for turned products with few columns see `ops/mlp/hopper_few_rows.py`.
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

from fast_layers.kernel_parts.by_column import WARPS, max_by_column, sum_by_column
from fast_layers.kernel_parts.fragments import load_factor, load_turned_factor, store_turned
from fast_layers.kernel_parts.online_softmax import OnlineSoftmax
from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.kernel_parts.smem_tile import smem_tile, swizzled_columns
from fast_layers.kernel_parts.tma_columns import tma_columns
from fast_layers.ops.attention import hopper_few_rows_join, packed_heads, split_kv
from fast_layers.ops.attention.config import PART_COLUMNS
from fast_layers.ops.attention.forward_parts import (
    Operands,
    Piece,
    Work,
    join_sink,
    keys_and_values,
    mask_operand,
    see_nothing,
    sinks_by_row,
)
from fast_layers.ops.attention.hopper_few_rows_config import HopperFewRowsTiles, is_swizzled, whole_depth
from fast_layers.ops.attention.hopper_few_rows_join import Scratch
from fast_layers.ops.attention.hopper_fwd_scores import log2_logits
from fast_layers.ops.attention.kernel_operands import SHARED, pad_for_tma, round_up
from fast_layers.ops.attention.problem import Aux, Inputs, Problem
from fast_layers.ops.attention.tile_logits import LogitOperands, TileLogits
from fast_layers.ops.attention.tile_mask import WGMMA, TileMask, has_broken_rows, mend_broken_rows

_ROWS = 64
"""Of one wgmma."""
_BY_COLUMN = WGMMA.reduce(0)
_REDUCTION_BYTES = 128
"""For JAX's own reductions, of which there is but the one that looks for broken values."""


def attend(problem: Problem, inputs: Inputs, aux: Aux, tiles: HopperFewRowsTiles | None = None):
    """(out [B, T, N, V], lse [B, N, T]), for what `hopper_few_rows_config.takes`."""
    form = packed_heads.pack_mask(problem, aux.mask)
    p = packed_heads.pack_problem(problem, form)
    tiles = HopperFewRowsTiles.of(p) if tiles is None else tiles
    sinks = inputs.sinks
    operands = Operands(
        inputs.query,
        pad_for_tma(inputs.key, tiles.kv_tile, p.qk_dim),
        pad_for_tma(inputs.value, tiles.kv_tile, p.v_dim),
        None if sinks is None or tiles.leaves_parts else sinks_by_row(sinks, p, tiles.columns),
        mask_operand(p, form, tiles),
        LogitOperands(None, None, None),
    )
    out, lse = over_batch(functools.partial(_launch, tiles, problem.group), SHARED)(p, operands)
    if sinks is not None and tiles.leaves_parts:
        out, lse = split_kv.join_sinks(out, lse, sinks)
    return out.astype(problem.dtype), lse


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(tiles: HopperFewRowsTiles, group: int, p: Problem, operands: Operands):
    """(out [B, T, N, V], lse [B, N, T]); `p` has `group` heads of each query as rows."""
    qk_dim, v_dim, queries = p.qk_dim, p.v_dim, p.q_len // group
    columns, kv_tile, stages, splits = tiles.columns, tiles.kv_tile, tiles.stages, tiles.splits
    v_rows = whole_depth(v_dim)
    out_parts = [v_dim] if v_dim == v_rows else [_ROWS] * (v_rows // _ROWS)
    work = Work(p, tiles, columns, qk_dim, v_dim, backwards=True)
    tree = jax.tree.structure(operands)

    def attention_few_rows(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        out_ref, lse_ref = refs[tree.num_leaves :]
        s = Scratch(**scratch)
        logits = TileLogits(p, inputs.logits)
        mask = TileMask(p, columns, kv_tile, inputs.mask, logits)

        def without_keys(piece: Piece):
            see_nothing(s.lse_slot, lse_ref, piece, pl.ds(0, columns), _BY_COLUMN)

        take = functools.partial(compute, mask, logits, inputs, s, out_ref, lse_ref)
        if tiles.in_cluster:
            take(piece_of_rank(mask))
        else:
            work.each_piece(mask, take, without_keys)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def piece_of_rank(mask: TileMask) -> Piece:
        block = lax.axis_index("block")
        example, head = lax.div(block, p.heads), lax.rem(block, p.heads)
        span = mask.key_span(example, 0).part(lax.axis_index("rank"), splits)
        return Piece(example, head, 0, example, span, block)

    def compute(mask: TileMask, logits: TileLogits, inputs: Any, s: Scratch, out_ref, lse_ref, piece: Piece, *_):
        span, rows = piece.span, mask.rows(piece.example, 0, columns, 1)

        def load(i):
            slot = lax.rem(i, stages)
            key, value = keys_and_values(work, inputs, piece, work.tile_at(span, i))
            for rows, slots in (key, s.k_slots), (value, s.v_slots):
                plgpu.copy_gmem_to_smem(tma_columns(rows, 0, slots.shape[2]), slots.at[slot], s.kv_ready.at[slot])

        def step(i, carry):
            state, out = carry
            j, slot = work.tile_at(span, i), lax.rem(i, stages)
            key, value = s.k_slots.at[slot], s.v_slots.at[slot]
            plgpu.barrier_wait(s.kv_ready.at[slot])
            if mask.hides_real_keys:

                @pl.when(span.ragged(j))
                def _mend():
                    pl.when(has_broken_rows(value))(lambda: mend_broken_rows(key, value))
                    plgpu.commit_smem()

            def load_values():
                swizzled = swizzled_columns(v_dim, p.dtype) if is_swizzled(v_dim) else None
                return [load_turned_factor(value, at, v_dim, swizzled) for at in range(0, v_dim, _ROWS)]

            def multiply_keys(acc):
                factor = key if is_swizzled(qk_dim) else load_factor(key, qk_dim)
                plgpu.wgmma(acc, factor, s.q_slot.at[:, pl.ds(0, qk_dim)].T)
                # A block that is alone on its SM has nothing else to do meanwhile.
                loaded = load_values() if v_dim < v_rows and tiles.in_cluster else []
                return acc[...], loaded

            scores, loaded = pl.run_scoped(multiply_keys, plgpu.WGMMAAccumulatorRef((kv_tile, columns), jnp.float32))
            at = {"example": piece.example, "head": piece.head, "q_start": 0, "k_start": j * kv_tile, "q_axis": 1}
            scores, to_log2 = log2_logits(p, logits, scores, at)
            if mask.hides:
                scores = lax.cond(span.ragged(j), lambda x: mask.hide(x, rows=rows, **at), lambda x: x, scores)
            state, weights, rescale = state.step(scores, to_log2, s.exchange)
            s.weight_slot.T[...] = weights.astype(p.dtype)
            factors = [value.T] if v_dim == v_rows else loaded or load_values()
            plgpu.commit_smem()

            def multiply_values(*accs):
                for acc, factor in zip(accs, factors, strict=True):
                    plgpu.wgmma(acc, factor, s.weight_slot.T)
                return [acc[...] for acc in accs]

            products = pl.run_scoped(
                multiply_values, *(plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32) for rows in out_parts)
            )
            plgpu.barrier_arrive(s.consumed.at[slot])

            @pl.when(i + stages < span.tiles)
            def _next():
                plgpu.barrier_wait(s.consumed.at[slot])
                load(i + stages)

            return state, [x + product for x, product in zip(scaled(out, rescale), products, strict=True)]

        def scaled(out, factors):
            return [x * _by_column(factors, x.shape[0]) for x in out]

        heads = pl.ds(piece.head * group, group)
        for t in range(queries):
            rows_of_query = s.loose_query.at[pl.ds(t * group, group)]
            query, rows_of_query = _beside(inputs.query.at[piece.example, t, heads], rows_of_query)
            plgpu.copy_gmem_to_smem(query, rows_of_query, s.q_ready)
        for i in range(stages):
            pl.when(i < span.tiles)(lambda i=i: load(i))
        plgpu.barrier_wait(s.q_ready)
        # Its rows stand closer than a swizzled tile's, and nobody asks for columns that are not there.
        s.q_slot.T[...] = plgpu.load(s.loose_query.T, layout=WGMMA, optimized=False)
        plgpu.commit_smem()
        nothing = [plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), WGMMA) for rows in out_parts]
        state, out = lax.fori_loop(0, span.tiles, step, (_ColumnSoftmax.start(columns), nothing))
        state = state.whole(s.exchange)
        if inputs.sinks is not None and not tiles.in_cluster:
            state, rescale = join_sink(state, inputs.sinks, piece, pl.ds(0, columns), _BY_COLUMN)
            out = scaled(out, rescale)
        normaliser, lse = state.finish()
        for i, x in enumerate(scaled(out, normaliser)):
            store_turned(s.out_slot.at[:, pl.ds(i * _ROWS, x.shape[0])], x.astype(work.out_dtype))
        s.lse_slot[...] = lse
        plgpu.commit_smem()
        if tiles.in_cluster:
            hopper_few_rows_join.join(p, tiles, group, s, inputs.sinks, piece, out_ref, lse_ref)
            return
        plgpu.copy_smem_to_gmem(s.lse_slot, lse_ref.at[piece.out_index, piece.head])
        if splits > 1:
            to = out_ref.at[piece.out_index, pl.ds(0, p.q_len), piece.head, pl.ds(0, v_rows)]
            plgpu.copy_smem_to_gmem(s.out_slot.at[pl.ds(0, p.q_len)], to)
        else:
            for t in range(queries):
                to, rows_of_out = _beside(out_ref.at[piece.example, t, heads], s.out_slot.at[pl.ds(t * group, group)])
                plgpu.copy_smem_to_gmem(rows_of_out, to)

    out_shape, parts = (p.batch, queries, p.heads * group, v_dim), 1
    if tiles.leaves_parts:
        out_shape, parts = (p.batch * splits, p.q_len, p.heads, round_up(v_dim, PART_COLUMNS)), splits
    out, lse = plgpu.kernel(
        attention_few_rows,
        out_type=(
            jax.ShapeDtypeStruct(out_shape, work.out_dtype if parts > 1 else p.dtype),
            jax.ShapeDtypeStruct((p.batch * parts, p.heads, columns), jnp.float32),
        ),
        grid=(work.blocks // (splits // parts),),
        grid_names=("block",),
        **({"cluster": (splits,), "cluster_names": ("rank",)} if tiles.in_cluster else {}),
        scratch_types=_scratch_types(p, tiles, queries, work.out_dtype),
        # What warps store for one another, or for a copy, is committed before it is read; before they store it again,
        # all have met: in each step twice, for the maxima and for the weights.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=_REDUCTION_BYTES, unsafe_no_auto_barriers=True
        ),
    )(*jax.tree.leaves(operands))
    if parts > 1:
        out, lse = (x.reshape(p.batch, splits, *x.shape[1:]) for x in (out, lse))
        out = split_kv.combine_out(out, lse, p.q_len, v_dim, group, jnp.float32 if p.sinks else p.dtype)
        lse = split_kv.combine_lse(lse)
    return out, packed_heads.unpack_lse(lse[..., : p.q_len], group)


def _scratch_types(p: Problem, tiles: HopperFewRowsTiles, queries: int, out_dtype: Any) -> dict[str, Any]:
    """Of `Scratch`."""
    columns, kv_tile, stages = tiles.columns, tiles.kv_tile, tiles.stages

    def slots(depth: int) -> Any:
        shape = stages, kv_tile, tiles.slot_columns(depth)
        return smem_tile(*shape, dtype=p.dtype) if is_swizzled(depth) else plgpu.SMEM(shape, p.dtype)

    q_columns = whole_depth(p.qk_dim)
    types = {
        "loose_query": plgpu.SMEM((columns, q_columns), p.dtype),
        "q_slot": smem_tile(columns, q_columns, dtype=p.dtype, columns=swizzled_columns(p.qk_dim, p.dtype)),
        "k_slots": slots(p.qk_dim),
        "v_slots": slots(p.v_dim),
        "weight_slot": smem_tile(columns, kv_tile, dtype=p.dtype),
        "out_slot": plgpu.SMEM((columns, tiles.out_columns(p.v_dim)), out_dtype),
        "by_column": plgpu.SMEM((WARPS + 1, columns), jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=queries),
        "kv_ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "consumed": plgpu.Barrier(num_barriers=stages),
    }
    if tiles.in_cluster:
        types["met"] = plgpu.ClusterBarrier(collective_axes=("rank",))
        if (out_columns := tiles.out_columns(p.v_dim)) > p.v_dim:
            types["row_slots"] = plgpu.SMEM((tiles.rows_joined(p.q_len), out_columns), p.dtype)
    return types


def _beside(rows: Any, slot: Any) -> tuple[Any, Any]:
    """In a kernel: rows in the GPU's memory and a slot for them that may be wider, so that a copy takes both. What lies
    in the slot beside the rows is nothing, and is not written."""
    width = slot.shape[1]
    if rows.shape[1] == width:
        return rows, slot
    if rows.shape[0] == 1:
        # A row by itself would be copied without a tensor map, which is what knows where rows end.
        return rows, slot.at[:, pl.ds(0, rows.shape[1])]
    return tma_columns(rows, 0, width), slot


class _ColumnSoftmax(NamedTuple):
    """As `kernel_parts.lane_softmax` of scores that stand as [keys, columns]: a thread sums what it has of a column."""

    max_log2: Float[Array, " C"]
    sums: Float[Array, "64 C"]

    @classmethod
    def start(cls, columns: int) -> _ColumnSoftmax:
        least = jnp.full((columns,), jnp.finfo(jnp.float32).min)
        sums = plgpu.layout_cast(jnp.zeros((_ROWS, columns), jnp.float32), WGMMA)
        return cls(plgpu.layout_cast(least, _BY_COLUMN), sums)

    def step(self, scores: Float[Array, "S C"], to_log2: float, exchange: Any):
        """(state, weights [S, C], rescale [C]); `exchange` as `max_by_column` has it."""
        most = jnp.maximum(self.max_log2, max_by_column(scores, exchange) * to_log2)
        weights = jnp.exp2(scores * to_log2 - _by_column(most, scores.shape[0]))
        rescale = jnp.exp2(self.max_log2 - most)
        sums = self.sums * _by_column(rescale, _ROWS)
        for row in range(0, scores.shape[0], _ROWS):
            sums += weights[row : row + _ROWS]
        return _ColumnSoftmax(most, sums), weights, rescale

    def whole(self, exchange: Any) -> OnlineSoftmax:
        return OnlineSoftmax(self.max_log2, sum_by_column(self.sums, exchange))


def _by_column(x: Float[Array, " C"], rows: int) -> Float[Array, "R C"]:
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])
