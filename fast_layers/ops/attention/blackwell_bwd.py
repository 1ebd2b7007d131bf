"""Attention's backward for Blackwell (sm_100a, sm_103a): one kernel for dQ, one for dK and dV, all deterministic.

No GPU has run them: they are simulated, and compiled by the real assembler.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth; R rows of
a block's own, C columns of a step.

All kernels are one body. A block owns 128 rows, queries or keys, and goes through the tiles of 64 of the other kind
that they meet. So a tile of scores stands as [queries, keys] in the first kernel and as [keys, queries] in the second:

    own                queries          keys
    scores             Q K^T            K Q^T        needs qk_ready
    d_weights          dO V^T           V dO^T       needs v_ready        -> scores_ready
    sums of gradients  dQ += dS K       dK += dS Q   needs weights_ready
                                        dV += P dO   -> weights_consumed, qk_consumed, v_consumed

Where the sums of both dK and dV do not fit in tensor memory beside the scores, each has a kernel of its own.

One warpgroup loads, one issues all matmuls, and two compute: the first the even steps, the second the odd ones, so that
the tensor core multiplies for one while the other makes P = 2^(scores - lse) and dS = P * (d_weights - delta). P and dS
stand in tensor memory where the products stood that they come from.

Sources: Dao, "FlashAttention-2" (2023); FlashAttention-4 (Dao-AILab, 2025).
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.kv_range import KvRange
from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.kernel_parts.tile_order import TileOrder
from fast_layers.ops.attention.blackwell_config import BlackwellBackwardTiles
from fast_layers.ops.attention.blackwell_grad_parts import d_scores, decide, decided, log2_weights, store_sums, weigh
from fast_layers.ops.attention.blackwell_tile import (
    BY_ROW,
    NATIVE,
    ROWS,
    NativeTileMask,
    column_slices,
)
from fast_layers.ops.attention.kernel_operands import SHARED, RowMask, pad_axis, pad_for_tma, padded_depth, round_up
from fast_layers.ops.attention.problem import Aux, Inputs, MaskFacts, Problem, Residuals, finite_or_zero
from fast_layers.ops.attention.tile_logits import LogitOperands, TileLogits
from fast_layers.ops.attention.tile_mask import TileMask, by_row
from fast_layers.ops.attention.xla import sink_gradient

BUFFERS = 2
"""Tiles of scores in tensor memory, each with a compute warpgroup of its own."""

Gradients = Literal["queries", "keys_and_values", "keys", "values"]
"""What a kernel sums: the rows that a block owns are queries in the first, else keys."""


class Operands(NamedTuple):
    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    d_out: Float[Array, "B T N V"]
    lse_log2: Float[Array, "B N T"]
    """+inf for a row that sees nothing or does not exist: its weights are 2^-inf = 0. NaN for a broken one."""
    delta: Float[Array, "B N T"]
    mask: RowMask | None
    q_span: Int[Array, "B|1 J 2"] | None
    logits: LogitOperands


def attend_grad(
    problem: Problem, residuals: Residuals, d_out: Array, d_lse: Array, tiles: BlackwellBackwardTiles | None = None
) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    p = problem
    tiles = BlackwellBackwardTiles.of(p) if tiles is None else tiles
    if reason := tiles.misfit(p):
        raise ValueError(f"{tiles}: {reason}; leave the choice to BlackwellBackwardTiles.of")
    inputs, aux, out, lse, _ = residuals
    query, key, value = inputs.query, inputs.key, inputs.value
    sees_none = lse == -jnp.inf
    if p.mask != MaskFacts():
        # A hidden weight is 0, but 0 times NaN is NaN: so all that is multiplied is finite. A row that was not, and a
        # row that sees a broken key, has an lse of NaN, which reaches the keys that it sees and no others.
        broken = ~(jnp.isfinite(query).all(-1) & jnp.isfinite(d_out).all(-1)).swapaxes(1, 2)
        query, key, value = (finite_or_zero(x) for x in (query, key, value))
        d_out = jnp.where(sees_none.swapaxes(1, 2)[..., None], 0, finite_or_zero(d_out))
        lse = jnp.where(broken & ~sees_none, jnp.nan, lse)
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    delta = delta - jnp.where(sees_none, 0.0, d_lse)
    lse_log2 = jnp.where(sees_none, jnp.inf, jnp.where(jnp.isfinite(delta), lse * LOG2_E, jnp.nan))
    rows, qk_dim, v_dim = round_up(p.q_len, ROWS), padded_depth(p.qk_dim), padded_depth(p.v_dim)
    operands = Operands(
        pad_for_tma(query, ROWS, qk_dim),
        pad_for_tma(key, ROWS, qk_dim),
        pad_for_tma(value, ROWS, v_dim),
        pad_for_tma(d_out, ROWS, v_dim),
        pad_axis(lse_log2, rows, 2, jnp.inf),
        pad_axis(finite_or_zero(delta), rows, 2),
        RowMask.of(p, aux.mask, ROWS, tiles.step_tile),
        None,
        LogitOperands.of(inputs, aux, ROWS, tiles.step_tile),
    )

    def launch(gradients: Gradients, operands: Operands):
        return over_batch(functools.partial(_launch, gradients, tiles), SHARED)(p, operands)

    d_bias = None if inputs.bias is None else _bias_gradient(p, inputs, aux, operands)
    d_query = None if tiles.fused else launch("queries", operands)[0]
    mask = RowMask.of(p, aux.mask, tiles.step_tile, ROWS)
    operands = operands._replace(
        mask=mask,
        q_span=None if mask is None else _query_span(p, mask, tiles),
        logits=LogitOperands.of(inputs, aux, tiles.step_tile, ROWS, keys_first=True),
    )
    if d_query is None:
        d_query, d_key, d_value = _launch_fused(tiles, p, operands)
    elif tiles.apart:
        (d_key,), (d_value,) = launch("keys", operands), launch("values", operands)
    else:
        d_key, d_value = launch("keys_and_values", operands)
    return Inputs(
        query=d_query[:, : p.q_len, :, : p.qk_dim],
        key=d_key[:, : p.kv_len, :, : p.qk_dim],
        value=d_value[:, : p.kv_len, :, : p.v_dim],
        bias=d_bias,
        sinks=None if inputs.sinks is None else sink_gradient(inputs.sinks, lse, delta),
    )


def _launch_fused(tiles: BlackwellBackwardTiles, p: Problem, operands: Operands) -> tuple[Array, Array, Array]:
    from fast_layers.ops.attention import blackwell_bwd_fused

    sums, d_key, d_value = over_batch(functools.partial(blackwell_bwd_fused._launch, tiles), SHARED)(p, operands)
    return (sums * p.scale).astype(p.dtype), d_key, d_value


def _bias_gradient(p: Problem, inputs: Inputs, aux: Aux, operands: Operands) -> Array:
    from fast_layers.ops.attention import blackwell_bias_grad

    return blackwell_bias_grad.attend_grad(p, inputs, aux, operands)


def _query_span(p: Problem, mask: RowMask, tiles: BlackwellBackwardTiles) -> Int[Array, "B|1 J 2"]:
    """The query tiles that each tile of keys visits."""
    visits = KvRange.of(mask.start, mask.stop, tiles.step_tile).transpose(ROWS, -(-p.kv_len // ROWS))
    return jnp.stack(visits, -1)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(gradients: Gradients, tiles: BlackwellBackwardTiles, p: Problem, operands: Operands):
    """(dQ,), (dK, dV), (dK,) or (dV,)."""
    owns_keys, sums_v = gradients != "queries", gradients in ("keys_and_values", "values")
    sums_qk = gradients != "values"
    qk_dim, v_dim = operands.query.shape[3], operands.value.shape[3]
    step_tile, ring, v_ring = tiles.step_tile, tiles.stages, tiles.v_stages
    own_heads = p.kv_heads if owns_keys else p.heads
    own_tiles = -(-(p.kv_len if owns_keys else p.q_len) // ROWS)
    bytes_per_head = (p.group * p.q_len if owns_keys else p.kv_len) * p.dtype.itemsize * (qk_dim + v_dim)
    order = TileOrder.of(p.batch * own_heads, own_tiles, 1 if owns_keys else p.group, bytes_per_head)
    # Of a causal mask, the last queries see the most keys, and the first keys are seen by the most queries.
    longest_last = not owns_keys and p.mask.band is not None and p.mask.band.high is not None
    tree = jax.tree.structure(operands)

    def attention_backward(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        out_refs = refs[tree.num_leaves :]
        s = _Scratch(**scratch)
        logits = TileLogits(p, inputs.logits, NATIVE)
        q_tile, kv_tile = (step_tile, ROWS) if owns_keys else (ROWS, step_tile)
        mask = NativeTileMask(p, q_tile, kv_tile, inputs.mask, logits)

        def take_products():
            plgpu.set_max_registers(tiles.multiply_registers, action="decrease")
            multiply(s, place(mask, inputs).steps)

        def take_loads():
            plgpu.set_max_registers(tiles.load_registers, action="decrease")
            load(inputs, s, place(mask, inputs))

        def take_scores(buffer: int):
            plgpu.set_max_registers(tiles.compute_registers, action="increase")
            block = place(mask, inputs)
            compute(buffer, mask, logits, inputs, s, block)
            if buffer < len(out_refs):
                store(buffer, s, out_refs[buffer], block)

        # A role each: which buffer in tensor memory is meant must be known when compiling.
        computes = [functools.partial(take_scores, buffer) for buffer in reversed(range(BUFFERS))]
        # One choice, since who still asks for another role after its own keeps in registers what that role needs.
        lax.switch(BUFFERS + 1 - lax.axis_index("warpgroup"), [take_products, take_loads, *computes])

    def place(mask: TileMask, inputs: Any) -> _Block:
        """Each role asks anew, since what is known before the roles part is kept in registers for all of them."""
        head, index = order.locate(lax.axis_index("block"))
        index = own_tiles - 1 - index if longest_last else index
        example, head = lax.div(head, own_heads), lax.rem(head, own_heads)
        if owns_keys:
            span = None
            first, last = mask.query_span(example, index, inputs.q_span)
            steps = (last - first) * p.group
        else:
            span = mask.key_span(example, index)
            first, last = span.first, span.last
            steps = last - first

        def columns(step):
            """(head, tile) of a step's columns."""
            if not owns_keys:
                return lax.div(head, p.group), first + step
            tiles_of_head = jnp.maximum(last - first, 1)
            return head * p.group + lax.div(step, tiles_of_head), first + lax.rem(step, tiles_of_head)

        return _Block(example, head, index, steps, columns, span)

    def load(inputs: Any, s: _Scratch, block: _Block):
        queries, keys = (inputs.query, inputs.d_out), (inputs.key, inputs.value)
        own_refs, ring_refs = (keys, queries) if owns_keys else (queries, keys)
        rows = pl.ds(block.index * ROWS, ROWS)
        for ref, slot in zip(own_refs, (s.own_qk, s.own_v) if sums_qk else (s.own_qk,), strict=sums_qk):
            plgpu.copy_gmem_to_smem(ref.at[block.example, rows, block.head], slot, s.own_ready)

        def load_columns(step, _):
            head, tile = block.columns(step)
            slot, v_slot, columns = lax.rem(step, ring), lax.rem(step, v_ring), pl.ds(tile * step_tile, step_tile)
            of_qk, of_v = (ref.at[block.example, columns, head] for ref in ring_refs)

            @pl.when(step >= ring)
            def _wait_qk():
                plgpu.barrier_wait(s.qk_consumed.at[slot])

            plgpu.copy_gmem_to_smem(of_qk, s.ring_qk.at[slot], s.qk_ready.at[slot])
            for ref, slots in ((inputs.lse_log2, s.lse_slots), (inputs.delta, s.delta_slots)):
                if slots is not None:
                    of_row = ref.at[block.example, head, columns]
                    plgpu.copy_gmem_to_smem(of_row, slots.at[slot], s.qk_ready.at[slot])

            @pl.when(step >= v_ring)
            def _wait_v():
                plgpu.barrier_wait(s.v_consumed.at[v_slot])

            plgpu.copy_gmem_to_smem(of_v, s.ring_v.at[v_slot], s.v_ready.at[v_slot])

        lax.fori_loop(0, block.steps, load_columns, None)

    def multiply(s: _Scratch, steps):
        plgpu.barrier_wait(s.own_ready)

        def multiply_scores(step, buffer):
            slot, v_slot = lax.rem(step, ring), lax.rem(step, v_ring)
            plgpu.barrier_wait(s.qk_ready.at[slot])

            @pl.when(step >= BUFFERS)
            def _wait():
                plgpu.barrier_wait(s.weights_consumed.at[buffer])

            scores, _ = s.scores_or_weights[buffer]
            plgpu.tcgen05_mma(scores, s.own_qk, s.ring_qk.at[slot].T, accumulate=False)
            if sums_qk:
                d_weights, _ = s.d_weights_or_scores[buffer]
                plgpu.barrier_wait(s.v_ready.at[v_slot])
                plgpu.tcgen05_mma(d_weights, s.own_v, s.ring_v.at[v_slot].T, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.scores_ready.at[buffer])
            if not sums_v:
                plgpu.tcgen05_commit_arrive(s.v_consumed.at[v_slot])

        def multiply_gradients(step, buffer):
            slot, v_slot = lax.rem(step, ring), lax.rem(step, v_ring)
            plgpu.barrier_wait(s.weights_ready.at[buffer])
            if sums_v:
                _, weights = s.scores_or_weights[buffer]
                if not sums_qk:
                    plgpu.barrier_wait(s.v_ready.at[v_slot])
                plgpu.tcgen05_mma(s.d_value, weights, s.ring_v.at[v_slot], accumulate=step > 0)
            if sums_qk:
                _, d_scores = s.d_weights_or_scores[buffer]
                plgpu.tcgen05_mma(s.d_own, d_scores, s.ring_qk.at[slot], accumulate=step > 0)
            plgpu.tcgen05_commit_arrive(s.weights_consumed.at[buffer])
            if sums_v:
                plgpu.tcgen05_commit_arrive(s.v_consumed.at[v_slot])
            plgpu.tcgen05_commit_arrive(s.qk_consumed.at[slot])  # with it go lse and delta, which were read

        pl.when(steps > 0)(lambda: multiply_scores(jnp.int32(0), 0))

        def pair(i, _):
            for buffer in range(BUFFERS):
                step = i * BUFFERS + buffer
                pl.when(step + 1 < steps)(functools.partial(multiply_scores, step + 1, 1 - buffer))
                pl.when(step < steps)(functools.partial(multiply_gradients, step, buffer))

        lax.fori_loop(0, lax.div(steps + (BUFFERS - 1), BUFFERS), pair, None)
        plgpu.tcgen05_commit_arrive(s.sums_ready)

    def compute(buffer: int, mask: TileMask, logits: TileLogits, inputs: Any, s: _Scratch, block: _Block):
        example = block.example
        own_start = block.index * ROWS

        def refs(unions: Any) -> Any:
            """A product, and what is made of it, where the kernel has them."""
            return (None, None) if unions is None else unions[buffer]

        scores_ref, weights_ref = refs(s.scores_or_weights)
        d_weights_ref, d_scores_ref = refs(s.d_weights_or_scores)
        columns = column_slices(step_tile)
        own_rows, lse, delta = None, None, None
        if not owns_keys:
            own_rows = mask.rows(example, own_start, ROWS, 0)
            lse, delta = (
                plgpu.load(x.at[example, block.head, pl.ds(own_start, ROWS)], layout=BY_ROW, optimized=False)
                for x in (inputs.lse_log2, inputs.delta)
            )

        def hide(x, at):
            rows = mask.rows(example, at["q_start"], x.shape[1], 1) if owns_keys else own_rows
            return mask.hide(x, rows, **at)

        def compute_step(i, _):
            step = i * BUFFERS + buffer
            slot = lax.rem(step, ring)
            head, tile = block.columns(step)

            def place(c):
                """Of a part of the scores."""
                start = tile * step_tile + c.start
                q_start, k_start = (start, own_start) if owns_keys else (own_start, start)
                at = {"example": example, "head": head if owns_keys else block.head}
                return at | {"q_start": q_start, "k_start": k_start, "q_axis": int(owns_keys)}

            def of_queries(by_own, slots, c):
                """lse or delta of the queries, spread over a part of the tile."""
                if not owns_keys:
                    return by_row(by_own, c.size)
                x = plgpu.load(slots.at[slot, c], layout=NATIVE.reduce(0), optimized=False)
                return lax.broadcast_in_dim(x, (ROWS, c.size), [1])

            def keep(c, at):
                if not p.dropout_rate:
                    return None
                if not owns_keys:
                    return logits.keep(shape=(ROWS, c.size), **at)
                return decided(decisions, step_tile, c.start, c.size)

            decisions = None
            if owns_keys and p.dropout_rate:
                # Before there are scores, beside which there are few registers, and while the tensor core makes them.
                decisions = decide(logits, step_tile, **place(pl.ds(0, step_tile)))
            if owns_keys:
                plgpu.barrier_wait(s.qk_ready.at[slot])
            plgpu.barrier_wait(s.scores_ready.at[buffer])
            scores = [plgpu.async_load_tmem(scores_ref.at[:, c], layout=NATIVE) for c in columns]
            plgpu.wait_load_tmem()
            ragged = None
            if mask.hides:
                ragged = mask.ragged_for_keys(example, tile, own_start, ROWS) if owns_keys else block.span.ragged(tile)
            factors = []
            for x, c in zip(scores, columns, strict=True):
                at = place(c)
                bias = None if p.bias is None else logits.bias(shape=x.shape, **at)
                x, d_cap = log2_weights(p, x, bias, of_queries(lse, s.lse_slots, c))
                if ragged is not None:
                    # Part by part, since all scores of a tile, hidden and not, would take too many registers.
                    x = lax.cond(ragged, functools.partial(hide, at=at), lambda x: x, x)
                kept, factor = weigh(x, d_cap, keep(c, at))
                if sums_v:
                    plgpu.async_store_tmem(weights_ref.at[:, c], kept.astype(p.dtype))
                factors.append(factor)
            if sums_qk:
                d_weights = [plgpu.async_load_tmem(d_weights_ref.at[:, c], layout=NATIVE) for c in columns]
                plgpu.wait_load_tmem()
                for factor, d_weight, c in zip(factors, d_weights, columns, strict=True):
                    made = d_scores(p, factor, d_weight, of_queries(delta, s.delta_slots, c))
                    plgpu.async_store_tmem(d_scores_ref.at[:, c], made.astype(p.dtype))
            plgpu.commit_tmem()
            if owns_keys:
                plgpu.commit_smem()  # lse and delta are read before their slots are refilled
            plgpu.barrier_arrive(s.weights_ready.at[buffer])

        lax.fori_loop(0, lax.div(block.steps + (BUFFERS - 1 - buffer), BUFFERS), compute_step, None)

    def store(index: int, s: _Scratch, out_ref, block: _Block):
        """The kernel's `index`-th result, through the slot of the operand of its shape."""
        of_qk, of_v = (s.d_own, s.own_qk, p.scale), (s.d_value, s.own_v, 1.0 / (1.0 - p.dropout_rate))
        sums, slot, factor = (of_qk, of_v)[index] if sums_qk else of_v
        plgpu.barrier_wait(s.sums_ready)
        to = out_ref.at[block.example, pl.ds(block.index * ROWS, ROWS), block.head]
        store_sums(sums, block.steps > 0, factor, slot, to)

    def union():
        """A product in float32, and what is made of it."""
        product: Any = plgpu.TMEM((ROWS, step_tile), jnp.float32)
        return plgpu.RefUnion(product, plgpu.TMEM((ROWS, step_tile), p.dtype, packed=True))

    in_order: Any = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    scratch = {
        "own_qk": smem_tile(ROWS, qk_dim, dtype=p.dtype),
        "own_v": smem_tile(ROWS, v_dim, dtype=p.dtype),
        "ring_qk": smem_tile(ring, step_tile, qk_dim, dtype=p.dtype),
        "ring_v": smem_tile(v_ring, step_tile, v_dim, dtype=p.dtype),
        "scores_or_weights": [union() for _ in range(BUFFERS)],
        "own_ready": plgpu.Barrier(num_arrivals=1 + sums_qk),
        "qk_ready": plgpu.Barrier(num_arrivals=1 + owns_keys + (owns_keys and sums_qk), num_barriers=ring),
        "v_ready": plgpu.Barrier(num_barriers=v_ring),
        "qk_consumed": in_order(num_barriers=ring),
        "v_consumed": in_order(num_barriers=v_ring),
        "scores_ready": in_order(num_barriers=BUFFERS),
        "weights_ready": in_order(num_barriers=BUFFERS),
        "weights_consumed": in_order(num_barriers=BUFFERS),
        "sums_ready": in_order(),
    }
    if owns_keys:
        scratch["lse_slots"] = plgpu.SMEM((ring, step_tile), jnp.float32)
    if owns_keys and sums_qk:
        scratch["delta_slots"] = plgpu.SMEM((ring, step_tile), jnp.float32)
    if sums_qk:
        scratch["d_weights_or_scores"] = [union() for _ in range(BUFFERS)]
        scratch["d_own"] = plgpu.TMEM((ROWS, qk_dim), jnp.float32)
    if sums_v:
        scratch["d_value"] = plgpu.TMEM((ROWS, v_dim), jnp.float32)
    attention_backward.__name__ = f"attention_backward_of_{gradients}"  # by which profilers tell the kernels apart
    of_qk, of_v = (operands.key if owns_keys else operands.query,), (operands.value,)
    shapes = (of_qk if sums_qk else ()) + (of_v if sums_v else ())
    return plgpu.kernel(
        attention_backward,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, p.dtype) for x in shapes),
        grid=(order.total,),
        grid_names=("block",),
        num_threads=BUFFERS + 2,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands))


class _Block(NamedTuple):
    """What a block owns, and the tiles that it goes through."""

    example: Any
    head: Any
    index: Any
    steps: Any
    columns: Any
    span: Any


class _Scratch(NamedTuple):
    """What a block holds in shared and in tensor memory, and the barriers named after the event that they wait for."""

    own_qk: Any
    own_v: Any
    ring_qk: Any
    ring_v: Any
    scores_or_weights: Any
    own_ready: Any
    qk_ready: Any
    v_ready: Any
    qk_consumed: Any
    v_consumed: Any
    scores_ready: Any
    weights_ready: Any
    weights_consumed: Any
    sums_ready: Any
    lse_slots: Any = None
    delta_slots: Any = None
    d_weights_or_scores: Any = None
    d_own: Any = None
    d_value: Any = None
