"""The scan's forward for Hopper (sm_90a): TMA loads, asynchronous wgmma, the state in registers from the first chunk to
the last.

A block goes through the chunks of one example, or of one split of it, for one or two panels of 64 channels, of heads of
one group. Its roles:

    load warpgroup                            each compute warpgroup, on its own panel
    --------------                            ----------------------------------------
    B, C, x, (z), factors of a chunk          scores = C B^T,  out = C S^T          S as rounded to 16 bits
      -> ready   waits consumed               S = decay S + (x * leaving)^T B       while the scores are weighed
                                              out = entering * out + (scores * decays * dt) x
                                              (out + D x) silu(z), to memory        frees consumed

S is the panel's state, transposed: 64 channels by N. Decays between two tokens are powers of two of differences of
sums that XLA has computed (`hopper_call.Operands`); all masks but the triangle come down to each row's first column.

A state of 256 takes the registers of two warpgroups, which then share one panel: each has 128 columns of B, C and S, so
that its scores and its output are shares of those above, of which all but D, z and the rounding is linear. The second
hands its share of the output to the first, which finishes it.

Source: Dao and Gu, "Transformers are SSMs" (2024).
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

from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.ssd import hopper_states
from fast_layers.ops.ssd.config import ROWS, HopperForwardTiles, HopperStateTiles, panels, spans
from fast_layers.ops.ssd.hopper_call import COLUMN, ENTERING, LEAVING, LOG2_E, ROW, Operands, operands_of
from fast_layers.ops.ssd.hopper_tile import (
    BY_COLUMN,
    BY_ROW,
    TILE,
    WGMMA,
    by_column,
    by_row,
    column_numbers,
    load_tile,
    row_and_column,
    set_column_numbers,
)
from fast_layers.ops.ssd.problem import Aux, Inputs, Problem, Scanned

SHARE_COLUMNS = (slice(0, ROWS), slice(ROWS, 2 * ROWS))
"""Where a share of the output is handed over, as its value in 16 bits and the rest: over the rounded state, which has
been read by then."""
SHARE_LOG2_SCALE = -8
SHARE_SCALE = 2.0**SHARE_LOG2_SCALE
"""Of the value, so that float16 has numbers for shares that are larger than their sum."""


def scan(problem: Problem, inputs: Inputs, aux: Aux, tiles: HopperForwardTiles | None = None) -> Scanned:
    p = problem
    launch: Any = over_batch(functools.partial(_scan_splits, tiles))  # of any problem with a batch
    out, state = launch(p, operands_of(p, inputs, aux))
    out = out[:, : p.length].reshape(p.batch, p.length, p.heads, -1)[..., : p.head_dim]
    state = state.reshape(p.batch, p.heads, -1, state.shape[-1])[:, :, : p.head_dim, : p.state_dim]
    return Scanned(out, state)


def _scan_splits(tiles: HopperForwardTiles | None, p: Problem, operands: Operands):
    """As `_launch`. Where there are too few blocks, splits of the sequence are scanned side by side, each from the
    state that it starts from (`hopper_states.starts`)."""
    tiles = HopperForwardTiles.of(p) if tiles is None else tiles
    if tiles.splits > 1:
        start = operands.initial_state
        if start is None:
            start = jnp.zeros((p.batch, operands.x.shape[2], ROWS, operands.B.shape[3]), jnp.float32)
        sweeps = (hopper_states.Sweep(operands.x, operands.B),)
        found = hopper_states.starts(
            HopperStateTiles.fitting(tiles.panels(p.state_dim), p.state_dim, tiles.splits),
            p,
            hopper_states.StateOperands(sweeps, operands.factors, start[:, None]),
        )
        operands = operands._replace(initial_state=found.reshape(-1, *start.shape[1:]))
    return _launch(tiles, p, operands)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(tiles: HopperForwardTiles, p: Problem, operands: Operands):
    """(out [B, L, U, 64], final state [B, U, 64, N]). Each split has an initial state of its own, [B*S, U, 64, N]."""
    wgs, ring, state_dim = tiles.compute_wgs, tiles.stages, operands.B.shape[3]
    state_spans, block_units = spans(state_dim), tiles.panels(state_dim)
    span_dim = state_dim // state_spans
    _, length, units, _ = operands.x.shape
    chunks, splits = operands.factors.shape[1], tiles.splits
    group_units = units // p.groups
    packs, rest = divmod(group_units, block_units)
    assert not rest, f"a block's {block_units} panels must divide the {group_units} of a group"
    tree = jax.tree.structure(operands)

    blocks = p.batch * splits * p.groups * packs
    assert tiles.late_blocks <= blocks, f"{tiles.late_blocks=} must be at most all {blocks} blocks"
    assert tiles.late_chunks < chunks, f"{tiles.late_chunks=} must be less than all {chunks} chunks"

    def roles(late: bool, *refs: Any, **scratch: Any):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        out_ref, final_ref = refs[tree.num_leaves :]
        absent = dict.fromkeys(("z_slots", "first_slots", "column_numbers", "share_ready", "share_taken"))
        s = _Scratch(**{**absent, **scratch})
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == wgs)
        def _load():
            plgpu.set_max_registers(tiles.load_registers, action="decrease")
            block = part(late)
            lax.fori_loop(block.first_chunk, block.end_chunk, functools.partial(load, inputs, s, block), None)

        @pl.when(warpgroup < wgs)
        def _compute():
            plgpu.set_max_registers(tiles.compute_registers, action="increase")
            # So that the first loads wait like all others: ptxas made three loops of a condition.
            for slot in range(ring):
                plgpu.barrier_arrive(s.consumed.at[slot])
            block = part(late)
            panel, span = (warpgroup, 0) if state_spans == 1 else (0, warpgroup)
            at = _Place(block.first_unit + panel, warpgroup, panel, span)
            states = pl.ds(span * span_dim, span_dim)
            final = final_ref.at[block.example, at.unit, :, states]
            start = None if inputs.initial_state is None else inputs.initial_state.at[block.row, at.unit, :, states]
            compute(inputs, s, out_ref, final if late else start, final, block, at)

    def part(late: bool) -> _Part:
        block = lax.axis_index("block")
        if late:
            block += blocks - tiles.late_blocks
        row, pack = lax.div(block, p.groups * packs), lax.rem(block, p.groups * packs)
        example, split = (row, 0) if splits == 1 else (lax.div(row, splits), lax.rem(row, splits))
        first, end = hopper_states.split_chunks(splits, chunks, split)
        if late:
            first = chunks - tiles.late_chunks
        elif tiles.late_blocks:
            end -= tiles.late_chunks * (block >= blocks - tiles.late_blocks).astype(jnp.int32)
        return _Part(row, example, first, end, lax.div(pack, packs), pack * block_units)

    def load(inputs: Any, s: _Scratch, at: _Part, chunk, _):
        step, tokens = chunk - at.first_chunk, pl.ds(chunk * ROWS, ROWS)
        slot = lax.rem(step, ring)
        ready = s.ready.at[slot]

        plgpu.barrier_wait(s.consumed.at[slot])

        for span in range(state_spans):
            states = pl.ds(span * span_dim, span_dim)
            plgpu.copy_gmem_to_smem(inputs.C.at[at.example, tokens, at.group, states], s.c_slots.at[slot, span], ready)
            plgpu.copy_gmem_to_smem(inputs.B.at[at.example, tokens, at.group, states], s.b_slots.at[slot, span], ready)
        if inputs.first is not None:
            plgpu.copy_gmem_to_smem(inputs.first.at[at.example, chunk], s.first_slots.at[slot], ready)
        for panel in range(block_units):
            unit = at.first_unit + panel
            head = lax.div(unit, panels(p.head_dim))
            plgpu.copy_gmem_to_smem(inputs.x.at[at.example, tokens, unit], s.x_slots.at[slot, panel], ready)
            plgpu.copy_gmem_to_smem(inputs.factors.at[at.example, chunk, head], s.factor_slots.at[slot, panel], ready)
            if inputs.z is not None:
                plgpu.copy_gmem_to_smem(inputs.z.at[at.example, tokens, unit], s.z_slots.at[slot, panel], ready)

    def compute(inputs: Any, s: _Scratch, out_ref, start_ref, final_ref, block: _Part, at: _Place):
        if s.column_numbers is not None:
            set_column_numbers(s.column_numbers.at[at.warpgroup])

        def over_chunks(state_acc):
            if start_ref is not None:
                state_acc[...] = plgpu.load(start_ref, layout=WGMMA, optimized=False)

            def step(chunk, _):
                slot = lax.rem(chunk - block.first_chunk, ring)
                plgpu.barrier_wait(s.ready.at[slot])
                one_chunk(inputs, s, state_acc, block.example, at, slot, chunk > block.first_chunk)
                plgpu.barrier_arrive(s.consumed.at[slot])

                @finishes(at)
                def _store():
                    tokens = pl.ds(chunk * ROWS, ROWS)
                    plgpu.copy_smem_to_gmem(s.out_slots.at[at.panel], out_ref.at[block.example, tokens, at.unit])

            lax.fori_loop(block.first_chunk, block.end_chunk, step, None)
            return state_acc[...]

        final = pl.run_scoped(over_chunks, plgpu.WGMMAAccumulatorRef((ROWS, span_dim), jnp.float32))

        # Asked of what the loop has in registers anyway. A second launch begins with this, where there is one.
        @pl.when(block.end_chunk == chunks if splits > 1 else True)
        def _end():
            final_ref[...] = final

        plgpu.wait_smem_to_gmem(0)

    def finishes(at: _Place):
        """Decorates what only one of a panel's warpgroups does."""
        return pl.when(True if state_spans == 1 else at.span == 0)

    def one_chunk(inputs: Any, s: _Scratch, state_acc, example, at: _Place, slot, has_stored):
        b_slot, c_slot, x_slot = s.b_slots.at[slot, at.span], s.c_slots.at[slot, at.span], s.x_slots.at[slot, at.panel]
        factors = s.factor_slots.at[slot, at.panel]
        state_slot = s.state_slots.at[at.warpgroup]

        def factor(name, layout):
            return plgpu.load(factors.at[name], layout=layout, optimized=False)

        if state_spans > 1:

            @pl.when(has_stored & (at.span > 0))
            def _wait_taken():
                plgpu.barrier_wait(s.share_taken.at[lax.rem(slot + ring - 1, ring)])

        state = state_acc[...]
        state_slot[...] = state.astype(p.dtype)
        plgpu.commit_smem()
        # Transposed by the load, and an operand in registers: through shared memory it took longer.
        entering = (load_tile(x_slot.T) * by_column(factor(LEAVING, BY_COLUMN))).astype(p.dtype)

        def products(score_acc, out_acc):
            plgpu.wgmma(score_acc, c_slot, b_slot.T)
            plgpu.wgmma(out_acc, c_slot, state_slot.T)
            # The last token's share of the entering state is what goes on to the next chunk.
            state_acc[...] = state * factors[ENTERING, ROWS - 1]
            plgpu.wgmma(state_acc, entering, b_slot)
            scores = plgpu.wgmma_accumulator_load(score_acc, wait_n=2)
            weights = (scores * decays(inputs, s, factor, at, slot)).astype(p.dtype)
            read = plgpu.wgmma_accumulator_load(out_acc, wait_n=1)
            out_acc[...] = read * by_row(factor(ENTERING, BY_ROW))
            plgpu.wgmma(out_acc, weights, x_slot)
            return plgpu.wgmma_accumulator_load(out_acc, wait_n=0)

        accumulator = plgpu.WGMMAAccumulatorRef(TILE, jnp.float32)
        out = pl.run_scoped(products, accumulator, accumulator)
        if state_spans > 1:

            @pl.when(at.span > 0)
            def _hand_over():
                for part, columns in zip(share_parts(out, p.dtype), SHARE_COLUMNS, strict=True):
                    state_slot[:, columns] = part
                plgpu.barrier_arrive(s.share_ready.at[slot])

        @finishes(at)
        def _finish():
            finish(inputs, s, out if state_spans == 1 else out + take_share(s, slot), example, at, slot, has_stored)

    def take_share(s: _Scratch, slot):
        plgpu.barrier_wait(s.share_ready.at[slot])
        parts = [load_tile(s.state_slots.at[1, :, columns]) for columns in SHARE_COLUMNS]
        plgpu.barrier_arrive(s.share_taken.at[slot])
        return share_of(*parts)

    def finish(inputs: Any, s: _Scratch, out, example, at: _Place, slot, has_stored):
        x_slot = s.x_slots.at[slot, at.panel]
        if inputs.D is not None:
            skip = plgpu.load(inputs.D.at[example, at.unit], layout=BY_COLUMN, optimized=False)
            out += load_tile(x_slot) * by_column(skip)
        if s.z_slots is not None:
            z = load_tile(s.z_slots.at[slot, at.panel])
            out *= z / (1.0 + jnp.exp2(z * -LOG2_E))

        @pl.when(has_stored)
        def _wait_stored():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        s.out_slots[at.panel] = out.astype(p.dtype)
        plgpu.commit_smem()

    def decays(inputs: Any, s: _Scratch, factor, at, slot):
        """From each column's token to each row's, times the column's dt; 0 where it is later or of another document."""
        row, column = row_and_column(None if s.column_numbers is None else s.column_numbers.at[at.warpgroup])
        visible = column <= row
        if inputs.first is not None:
            first = plgpu.load(s.first_slots.at[slot], layout=BY_ROW, optimized=False)
            visible &= column >= by_row(first)
        log2_decay = by_row(factor(ROW, BY_ROW)) - by_column(factor(COLUMN, BY_COLUMN))
        # Masked before exp2: above the diagonal it would overflow, and inf * 0 is NaN.
        return jnp.exp2(jnp.where(visible, log2_decay, -jnp.inf))

    shared = plgpu.Barrier(num_arrivals=1, num_barriers=ring)
    scratch = {
        "b_slots": smem_tile(ring, state_spans, ROWS, span_dim, dtype=p.dtype),
        "c_slots": smem_tile(ring, state_spans, ROWS, span_dim, dtype=p.dtype),
        "x_slots": smem_tile(ring, block_units, *TILE, dtype=p.dtype),
        **({} if operands.z is None else {"z_slots": smem_tile(ring, block_units, *TILE, dtype=p.dtype)}),
        "factor_slots": plgpu.SMEM((ring, block_units, 4, ROWS), jnp.float32),
        **({} if operands.first is None else {"first_slots": plgpu.SMEM((ring, ROWS), jnp.int32)}),
        "state_slots": smem_tile(wgs, ROWS, span_dim, dtype=p.dtype),
        "out_slots": smem_tile(block_units, *TILE, dtype=p.dtype),
        # Of a state of one span the registers do, and the loads cost more: 1.5 % of the kernel on an H200.
        **({"column_numbers": column_numbers(wgs)} if state_spans > 1 else {}),
        "ready": plgpu.Barrier(
            num_arrivals=2 * state_spans + (operands.first is not None) + block_units * (2 + (operands.z is not None)),
            num_barriers=ring,
        ),
        "consumed": plgpu.Barrier(num_arrivals=wgs, num_barriers=ring),
        # One for each slot, whose address is found in the loop: that of a single one would be kept from the start on.
        **({name: shared for name in ("share_ready", "share_taken") if state_spans > 1}),
    }

    def launch(late: bool, *given: Any, out_type: Any = ()):
        def ssd_forward(*refs, **scratch):
            roles(late, *refs, **scratch)

        return plgpu.kernel(
            ssd_forward,
            out_type=out_type,
            grid=(tiles.late_blocks if late else blocks,),
            grid_names=("block",),
            num_threads=wgs + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(*jax.tree.leaves(operands), *given)

    out, final = launch(
        False,
        out_type=(
            jax.ShapeDtypeStruct((p.batch, length, units, ROWS), p.dtype),
            jax.ShapeDtypeStruct((p.batch, units, ROWS, state_dim), jnp.float32),
        ),
    )
    if not tiles.late_blocks:
        return out, final
    out_ref, final_ref = jax.new_ref(out), jax.new_ref(final)
    launch(True, out_ref, final_ref)
    return out_ref[...], final_ref[...]


def share_parts(share: Float[Array, "Q P"], dtype: Any) -> tuple[Array, Array]:
    """A share as its value, scaled, and the rest, to which infinity is left."""
    most = 2.0 ** (min(jnp.finfo(dtype).maxexp, jnp.finfo(jnp.float32).maxexp + SHARE_LOG2_SCALE) - 1)
    value = jnp.minimum(jnp.maximum(share * SHARE_SCALE, -most), most).astype(dtype)
    return value, (share - value.astype(jnp.float32) / SHARE_SCALE).astype(dtype)


def share_of(value: Float[Array, "Q P"], rest: Float[Array, "Q P"]) -> Float[Array, "Q P"]:
    return value / SHARE_SCALE + rest


class _Part(NamedTuple):
    """What a block goes through."""

    row: Any
    """Of each example and split, in order."""
    example: Any
    first_chunk: Any
    end_chunk: Any
    group: Any
    first_unit: Any


class _Place(NamedTuple):
    """Where a compute warpgroup stands in its block."""

    unit: Any
    warpgroup: Any
    panel: Any
    span: Any


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    b_slots: Any
    c_slots: Any
    x_slots: Any
    z_slots: Any
    factor_slots: Any
    first_slots: Any
    state_slots: Any
    column_numbers: Any
    out_slots: Any
    ready: Any
    consumed: Any
    share_ready: Any
    share_taken: Any
