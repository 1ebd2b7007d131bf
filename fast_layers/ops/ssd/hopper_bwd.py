"""The scan's backward for Hopper (sm_90a), in two kernels whose sums have one order: every run gives the same bits.

The first (`hopper_states`) writes, in 16 bits, the state S that enters each chunk and the gradient G of the one that
leaves it. The second, here, then needs no other chunk: a block has one chunk of one group, and goes through its panels
of 64 channels. So B and C are loaded once, and their gradients stay in registers until all heads have added to them,
where a pass over each head's chunks in order would write a part of both for each head: N / 64 times the bytes of x, and
two more such reads to add them. Two compute warpgroups share a panel, and never wait for each other:

    load warpgroup                 "columns", the tokens that write        "rows", the tokens that read
    --------------                 --------------------------------        ----------------------------
    B, C once      -> bc_ready     scores^T = B C^T                        scores = C B^T
    x, dy, S, G,   -> ready        d_weights^T = x dy^T                    d_weights = dy x^T
    factors of a panel             dx = weights^T dy + leaving * G B       what is read = S C
      waits consumed               dB += (leaving * x)^T G                 dC += (entering * dy)^T S

      at the end                   scores' gradient, of all heads -> shared -> scores_ready
                                   dB += it^T C                            dC += it B

A state of 256 is in two spans of 128, each with blocks of its own, for its gradients of B and C would not fit into a
warpgroup's registers. All other sums are then shares, which XLA adds: in float32, and in the order of the spans.

The gradient of a token's decay is a sum over all that passed it (`xla._d_log_decay`), of which the pairs within the
chunk are a sum over a rectangle of T = d_weights * weights: a triangle of ones times T, then a masked sum of each row.
T enters that product as two bfloat16, its value and the rest, since a rounded T would be the gradient's only loss.

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
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.ssd import hopper_states
from fast_layers.ops.ssd.config import ROWS, HopperBackwardTiles, HopperStateTiles, panels, spans
from fast_layers.ops.ssd.hopper_call import (
    ENTERING,
    LEAVING,
    ROW,
    by_head,
    decays_of,
    for_tma,
    operands_of,
    panels_of,
    state_as_panels,
)
from fast_layers.ops.ssd.hopper_tile import (
    BY_COLUMN,
    BY_ROW,
    TILE,
    WGMMA,
    by_column,
    by_row,
    column_numbers,
    float_tiles,
    load_tile,
    row_and_column,
    set_column_numbers,
)
from fast_layers.ops.ssd.kernel_grads import KernelGrads, Sums, assemble, before_gate
from fast_layers.ops.ssd.problem import Inputs, Problem, Residuals

DT, COLUMN, ROW_AGAIN = 1, 4, 5
"""In the backward's factors: dt; what the forward's have as `hopper_call.COLUMN`; and ROW once more. A load of one row
into two layouts would be made one by the compiler, which then searches for minutes for a layout that is both."""
WROTE, LEFT, KEPT, SKIPPED = range(4)
"""In `_Gradients.columns`."""
PASSED, READ = range(2)
"""In `_Gradients.rows`."""
ACCUMULATOR = plgpu.WGMMAAccumulatorRef(TILE, jnp.float32)


class BackwardOperands(NamedTuple):
    """As `hopper_call.Operands`, but for the factors; `d_y` is the gradient before the gate."""

    x: Float[Array, "B L U 64"]
    d_y: Float[Array, "B L U 64"]
    B: Float[Array, "B L G N"]
    C: Float[Array, "B L G N"]
    factors: Float[Array, "B C H 6 Q"]
    first: Int[Array, "B C Q"] | None
    D: Float[Array, "B U*W 64"] | None
    """0 for all but the first of a state's W spans."""
    between: Float[Array, "B C 2 U 64 N"]


class _Gradients(NamedTuple):
    """Of a state in W spans, each has sums of its own over its states; x and y are then in float32."""

    x: Float[Array, "B L|C*Q U*W 64"]
    B: Float[Array, "B C*Q S*G N"]
    C: Float[Array, "B C*Q S*G N"]
    columns: Float[Array, "B C U*W 3|4 Q"]
    """Sums over what each token wrote, over tokens and channels: of d_weights * scores * decay, without its dt (WROTE);
    of x G B (LEFT); of x dy (SKIPPED), for a D for each head and no gate. And, for each channel, of S G (KEPT)."""
    rows: Float[Array, "B C U*W 2 Q"]
    """Sums of T over the pairs that pass each token (PASSED); of dy S C (READ)."""
    y: Float[Array, "B L|C*Q U*W 64"] | None
    """What the scan gave, less D x; only with a gate."""


def scan_grad(
    problem: Problem,
    residuals: Residuals,
    d_out: Array,
    d_final_state: Array,
    tiles: HopperBackwardTiles | None = None,
    state_tiles: HopperStateTiles | None = None,
) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    p = problem
    inputs, aux = residuals
    operands = operands_of(p, inputs, aux)
    decays = decays_of(p, inputs, aux, ROWS)
    d_y = for_tma(panels_of(before_gate(inputs, d_out).astype(p.dtype)), ROWS)
    dt, sums, entering, leaving, _ = decays
    factors = by_head(sums, dt, entering, leaving * dt, sums - jnp.log2(dt), sums)
    d_final = state_as_panels(p, d_final_state)
    start = jnp.stack(
        [jnp.zeros_like(d_final) if operands.initial_state is None else operands.initial_state, d_final], 1
    )
    sweeps = (hopper_states.Sweep(operands.x, operands.B), hopper_states.Sweep(d_y, operands.C))
    find_states: Any = over_batch(
        lambda p, operands: hopper_states.find(state_tiles or HopperStateTiles.of(p), p, operands)
    )
    end, between = find_states(p, hopper_states.StateOperands(sweeps, factors, start))
    D = operands.D
    if D is not None and (others := spans(p.state_dim) - 1):
        D = jnp.pad(D[:, :, None], ((0, 0), (0, 0), (0, others), (0, 0))).reshape(p.batch, -1, ROWS)
    launch: Any = over_batch(lambda p, operands: _launch(tiles or HopperBackwardTiles.of(p), p, operands))
    grads = launch(p, BackwardOperands(operands.x, d_y, operands.B, operands.C, factors, operands.first, D, between))
    return assemble(p, inputs, d_out, decays, _kernel_grads(p, grads, end[:, hopper_states.BACKWARDS]))


def _kernel_grads(p: Problem, grads: _Gradients, d_start: Float[Array, "B U 64 N"]) -> KernelGrads:
    """Of the inputs' heads, groups and lengths, from panels and slices."""

    def of_heads(x: Float[Array, "B L|C*Q U*W 64"]) -> Float[Array, "B L H P"]:
        x = x[:, : p.length]
        if (count := spans(p.state_dim)) > 1:
            x = x.reshape(*x.shape[:2], -1, count, ROWS).sum(3).astype(p.dtype)
        return x.reshape(p.batch, p.length, p.heads, -1)[..., : p.head_dim]

    def of_groups(x: Float[Array, "B C*Q S*G N"]) -> Float[Array, "B L G N"]:
        x = x[:, : p.length].reshape(p.batch, p.length, -1, p.groups, x.shape[-1])
        return x.sum(2)[..., : p.state_dim]

    def by_token(sums: Float[Array, "B C U*W F Q"]) -> list[Float[Array, "B C Q H"]]:
        sums = sums.reshape(*sums.shape[:2], p.heads, -1, *sums.shape[3:]).sum(3)
        return [sums[:, :, :, i].swapaxes(2, 3) for i in range(sums.shape[3])]

    wrote, left, kept, *skipped = by_token(grads.columns)
    passed, read = by_token(grads.rows)
    d_initial = d_start.reshape(p.batch, p.heads, -1, d_start.shape[-1])[:, :, : p.head_dim, : p.state_dim]
    return KernelGrads(
        x=of_heads(grads.x),
        B=of_groups(grads.B),
        C=of_groups(grads.C),
        initial_state=d_initial,
        y=None if grads.y is None else of_heads(grads.y),
        sums=Sums(wrote, left, read, passed, kept.sum(2), skipped[0] if skipped else None),
    )


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(tiles: HopperBackwardTiles, p: Problem, operands: BackwardOperands) -> _Gradients:
    ring, slices = tiles.stages, tiles.slices
    state_spans = spans(operands.B.shape[3])
    state_dim = operands.B.shape[3] // state_spans
    _, length, units, _ = operands.x.shape
    chunks = operands.factors.shape[1]
    per_block, rest = divmod(units, p.groups * slices)
    assert not rest, f"{slices=} must divide the {units // p.groups} panels of a group"
    parts = slices * p.groups
    # With a gate, XLA has dy before it was rounded; of several spans only one would have to sum it.
    sums_skipped = p.skip == "head" and not p.gated and state_spans == 1
    tree = jax.tree.structure(operands)

    def ssd_backward(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        d_x_ref, d_b_ref, d_c_ref, columns_ref, rows_ref, *y_ref = refs[tree.num_leaves :]
        s = _Scratch(**{"first_slot": None, "y_slot": None, **scratch})
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _load():
            plgpu.set_max_registers(24, action="decrease")
            load(inputs, s, place())

        @pl.when(warpgroup == 0)
        def _columns():
            plgpu.set_max_registers(240, action="increase")
            columns(inputs, s, d_x_ref, d_b_ref, columns_ref, place())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 1)
        def _rows():
            plgpu.set_max_registers(240, action="increase")
            rows(inputs, s, d_c_ref, rows_ref, y_ref, place())
            plgpu.wait_smem_to_gmem(0)

    def place() -> _Place:
        """Each role asks anew, since what is known before the roles part is kept in registers for all of them."""
        block = lax.axis_index("block")
        # Side by side, so that what a panel's spans share is read from memory once.
        span, block = (0, block) if state_spans == 1 else (lax.rem(block, state_spans), lax.div(block, state_spans))
        row, part = lax.div(block, parts), lax.rem(block, parts)
        slice_index, group = lax.div(part, p.groups), lax.rem(part, p.groups)
        first_unit = (group * slices + slice_index) * per_block
        first_sums, states = first_unit * state_spans + span, pl.ds(span * state_dim, state_dim)
        return _Place(lax.div(row, chunks), lax.rem(row, chunks), group, part, first_unit, first_sums, states)

    def load(inputs: Any, s: _Scratch, at: _Place):
        plgpu.copy_gmem_to_smem(inputs.B.at[at.example, at.tokens, at.group, at.states], s.b_slot, s.bc_ready)
        plgpu.copy_gmem_to_smem(inputs.C.at[at.example, at.tokens, at.group, at.states], s.c_slot, s.bc_ready)
        if inputs.first is not None:
            plgpu.copy_gmem_to_smem(inputs.first.at[at.example, at.chunk], s.first_slot, s.bc_ready)

        def load_panel(step, _):
            slot, unit = lax.rem(step, ring), at.first_unit + step
            head = lax.div(unit, panels(p.head_dim))
            ready = s.ready.at[slot]

            @pl.when(step >= ring)
            def _wait():
                plgpu.barrier_wait(s.consumed.at[slot])

            plgpu.copy_gmem_to_smem(inputs.x.at[at.example, at.tokens, unit], s.x_slots.at[slot], ready)
            plgpu.copy_gmem_to_smem(inputs.d_y.at[at.example, at.tokens, unit], s.d_y_slots.at[slot], ready)
            plgpu.copy_gmem_to_smem(inputs.factors.at[at.example, at.chunk, head], s.factor_slots.at[slot], ready)
            between = inputs.between.at[at.example, at.chunk, :, unit, :, at.states]
            plgpu.copy_gmem_to_smem(between.at[hopper_states.FORWARDS], s.state_slots.at[slot], ready)
            plgpu.copy_gmem_to_smem(between.at[hopper_states.BACKWARDS], s.d_state_slots.at[slot], ready)

        lax.fori_loop(0, per_block, load_panel, None)

    def columns(inputs: Any, s: _Scratch, d_x_ref, d_b_ref, columns_ref, at: _Place):
        """Rows of tiles here are the tokens that write, columns those that read."""

        def over_panels(d_b_acc):
            plgpu.barrier_wait(s.bc_ready)
            # With these and their gradients' sum the registers would not do.
            set_column_numbers(s.column_numbers.at[0])
            s.score_slots[0] = multiply(s.b_slot, s.c_slot.T)
            s.d_score_sums[...] = plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), WGMMA)

            def step(i, _):
                slot, sums = lax.rem(i, ring), at.first_sums + state_spans * i
                plgpu.barrier_wait(s.ready.at[slot])
                one_panel(d_b_acc, slot, sums, i > 0)
                plgpu.barrier_arrive(s.consumed.at[slot])
                if state_spans == 1:
                    plgpu.copy_smem_to_gmem(s.d_x_slot, d_x_ref.at[at.example, at.tokens, sums])
                plgpu.copy_smem_to_gmem(s.column_slots, columns_ref.at[at.example, at.chunk, sums])

            lax.fori_loop(0, per_block, step, None)
            d_scores = load_tile(s.d_score_sums).astype(p.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            s.d_x_slot[...] = d_scores
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.scores_ready)
            plgpu.wgmma(d_b_acc, d_scores, s.c_slot)
            return d_b_acc[...]

        def one_panel(d_b_acc, slot, sums, has_stored):
            x_slot, d_y_slot, d_state_slot = s.x_slots.at[slot], s.d_y_slots.at[slot], s.d_state_slots.at[slot]
            factor = factors_of(s, slot)
            row, column = row_and_column(s.column_numbers.at[0])
            # Only the diagonal is wanted; but to load both states would take more registers than there are.
            kept = jnp.where(row == column, multiply(d_state_slot, s.state_slots.at[slot].T), 0.0).sum(axis=1)
            x = load_tile(x_slot)
            entered = (x * by_row(factor(LEAVING, BY_ROW))).astype(p.dtype)

            def weigh(d_weight_acc):
                plgpu.wgmma(d_weight_acc, x_slot, d_y_slot.T)
                plgpu.wgmma(d_b_acc, entered, d_state_slot)
                return plgpu.wgmma_accumulator_load(d_weight_acc, wait_n=0)

            d_weights = pl.run_scoped(weigh, ACCUMULATOR)
            decays = pair_decays(s, factor(ROW_AGAIN, BY_ROW), factor(ROW, BY_COLUMN), writers_axis=0)
            dt = by_row(factor(DT, BY_ROW))
            d_weights *= decays
            s.d_score_sums[...] = load_tile(s.d_score_sums) + d_weights * dt
            scores = load_tile(s.score_slots.at[0])
            weights = (scores * decays * dt).astype(p.dtype)
            wrote = (d_weights * scores).sum(axis=1)

            # Here, since what follows is then not begun before, which would take more registers than there are.
            @pl.when(has_stored)
            def _wait_stored():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            s.column_slots[WROTE] = wrote
            s.column_slots[KEPT] = kept

            def spread(near_acc, far_acc):
                """What is read within the chunk and after it."""
                plgpu.wgmma(near_acc, weights, d_y_slot)
                plgpu.wgmma(far_acc, s.b_slot, d_state_slot.T)
                near = plgpu.wgmma_accumulator_load(near_acc, wait_n=0)
                return near, plgpu.wgmma_accumulator_load(far_acc, wait_n=0)

            d_x, far = pl.run_scoped(spread, ACCUMULATOR, ACCUMULATOR)
            s.column_slots[LEFT] = (far * load_tile(x_slot)).sum(axis=1)
            d_x += far * by_row(factor(LEAVING, BY_ROW))
            if inputs.D is not None:
                d_y = load_tile(d_y_slot)
                d_x += d_y * by_column(plgpu.load(inputs.D.at[at.example, sums], layout=BY_COLUMN, optimized=False))
                if sums_skipped:
                    s.column_slots[SKIPPED] = (d_y * load_tile(x_slot)).sum(axis=1)
            if state_spans == 1:
                s.d_x_slot[...] = d_x.astype(p.dtype)
            else:
                d_x_ref[at.example, at.tokens, sums] = d_x
            plgpu.commit_smem()

        d_b = pl.run_scoped(over_panels, plgpu.WGMMAAccumulatorRef((ROWS, state_dim), jnp.float32))
        d_b_ref[at.example, at.tokens, at.part, at.states] = d_b

    def rows(inputs: Any, s: _Scratch, d_c_ref, rows_ref, y_ref, at: _Place):
        """Rows of tiles here are the tokens that read, columns those that write."""

        def over_panels(d_c_acc):
            plgpu.barrier_wait(s.bc_ready)
            set_column_numbers(s.column_numbers.at[1])
            s.score_slots[1] = multiply(s.c_slot, s.b_slot.T)
            row, column = (plgpu.broadcasted_iota(jnp.int32, TILE, axis, layout=WGMMA) for axis in (0, 1))
            s.triangle[...] = (column >= row).astype(jnp.bfloat16)

            def step(i, _):
                slot, sums = lax.rem(i, ring), at.first_sums + state_spans * i
                plgpu.barrier_wait(s.ready.at[slot])
                one_panel(d_c_acc, slot, sums, i > 0)
                plgpu.barrier_arrive(s.consumed.at[slot])
                plgpu.copy_smem_to_gmem(s.row_slots, rows_ref.at[at.example, at.chunk, sums])
                if s.y_slot is not None:
                    plgpu.copy_smem_to_gmem(s.y_slot, y_ref[0].at[at.example, at.tokens, sums])

            lax.fori_loop(0, per_block, step, None)
            plgpu.barrier_wait(s.scores_ready)
            plgpu.wgmma(d_c_acc, s.d_x_slot.T, s.b_slot)
            return d_c_acc[...]

        def one_panel(d_c_acc, slot, sums, has_stored):
            x_slot, d_y_slot, state_slot = s.x_slots.at[slot], s.d_y_slots.at[slot], s.state_slots.at[slot]
            factor = factors_of(s, slot)
            read = (load_tile(d_y_slot) * by_row(factor(ENTERING, BY_ROW))).astype(p.dtype)

            def weigh(d_weight_acc):
                plgpu.wgmma(d_weight_acc, d_y_slot, x_slot.T)
                plgpu.wgmma(d_c_acc, read, state_slot)
                return plgpu.wgmma_accumulator_load(d_weight_acc, wait_n=0)

            d_weights = pl.run_scoped(weigh, ACCUMULATOR)
            decays = pair_decays(s, factor(COLUMN, BY_COLUMN), factor(ROW, BY_ROW), writers_axis=1)
            weights = load_tile(s.score_slots.at[1]) * decays
            passing = d_weights * weights
            coarse = passing.astype(jnp.bfloat16)
            s.passing_slots[0] = coarse
            s.passing_slots[1] = (passing - coarse.astype(jnp.float32)).astype(jnp.bfloat16)
            plgpu.commit_smem()

            def read_state(acc):
                plgpu.wgmma(acc, s.c_slot, state_slot.T)
                out = plgpu.wgmma_accumulator_load(acc, wait_n=0)
                was_read = (out * load_tile(d_y_slot)).sum(axis=1)
                if not y_ref:
                    return None, was_read
                acc[...] = out * by_row(factor(ENTERING, BY_ROW))
                plgpu.wgmma(acc, weights.astype(p.dtype), x_slot)
                return plgpu.wgmma_accumulator_load(acc, wait_n=0), was_read

            y, was_read = pl.run_scoped(read_state, ACCUMULATOR)

            @pl.when(has_stored)
            def _wait_stored():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            s.row_slots[READ] = was_read
            if s.y_slot is not None:
                s.y_slot[...] = y.astype(p.dtype)
            elif y_ref:
                y_ref[0][at.example, at.tokens, sums] = y

            def pass_by(acc):
                row, column = row_and_column(s.column_numbers.at[1])
                # From shared memory: as constants in registers, ptxas 13.0 changed some of them while they were read.
                plgpu.wgmma(acc, s.triangle, s.passing_slots.at[0])
                plgpu.wgmma(acc, s.triangle, s.passing_slots.at[1])
                return jnp.where(column < row, plgpu.wgmma_accumulator_load(acc, wait_n=0), 0.0).sum(axis=1)

            s.row_slots[PASSED] = pl.run_scoped(pass_by, ACCUMULATOR)
            plgpu.commit_smem()

        d_c = pl.run_scoped(over_panels, plgpu.WGMMAAccumulatorRef((ROWS, state_dim), jnp.float32))
        d_c_ref[at.example, at.tokens, at.part, at.states] = d_c

    def pair_decays(s: _Scratch, writers: Any, readers: Any, writers_axis: int):
        """From the token that writes to the one that reads; 0 where that is earlier or of another document."""
        by_writer, by_reader, layout = (
            (by_row, by_column, BY_COLUMN) if writers_axis == 0 else (by_column, by_row, BY_ROW)
        )
        row, column = row_and_column(s.column_numbers.at[writers_axis])
        writer, reader = (row, column) if writers_axis == 0 else (column, row)
        visible = writer <= reader
        if s.first_slot is not None:
            visible &= writer >= by_reader(plgpu.load(s.first_slot, layout=layout, optimized=False))
        # Masked before exp2: before the writer it would overflow, and inf * 0 is NaN.
        return jnp.exp2(jnp.where(visible, by_reader(readers) - by_writer(writers), -jnp.inf))

    scratch = {
        "b_slot": smem_tile(ROWS, state_dim, dtype=p.dtype),
        "c_slot": smem_tile(ROWS, state_dim, dtype=p.dtype),
        **({} if operands.first is None else {"first_slot": plgpu.SMEM((ROWS,), jnp.int32)}),
        "x_slots": smem_tile(ring, *TILE, dtype=p.dtype),
        "d_y_slots": smem_tile(ring, *TILE, dtype=p.dtype),
        "state_slots": smem_tile(ring, ROWS, state_dim, dtype=p.dtype),
        "d_state_slots": smem_tile(ring, ROWS, state_dim, dtype=p.dtype),
        "factor_slots": plgpu.SMEM((ring, operands.factors.shape[3], ROWS), jnp.float32),
        "d_x_slot": smem_tile(*TILE, dtype=p.dtype),
        **({"y_slot": smem_tile(*TILE, dtype=p.dtype)} if p.gated and state_spans == 1 else {}),
        "passing_slots": smem_tile(2, *TILE, dtype=jnp.bfloat16),
        "triangle": smem_tile(*TILE, dtype=jnp.bfloat16),
        "score_slots": float_tiles(2),
        "d_score_sums": float_tiles(),
        "column_numbers": column_numbers(2),
        "column_slots": plgpu.SMEM((3 + sums_skipped, ROWS), jnp.float32),
        "row_slots": plgpu.SMEM((2, ROWS), jnp.float32),
        "bc_ready": plgpu.Barrier(num_arrivals=2 + (operands.first is not None)),
        "ready": plgpu.Barrier(num_arrivals=5, num_barriers=ring),
        "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=ring),
        "scores_ready": plgpu.Barrier(num_arrivals=1),
    }

    def result(*shape: int, dtype: Any = jnp.float32):
        return jax.ShapeDtypeStruct((p.batch, *shape), dtype)

    sums = units * state_spans
    rows_of_x = result(length, units, ROWS, dtype=p.dtype) if state_spans == 1 else result(chunks * ROWS, sums, ROWS)
    by_group = result(chunks * ROWS, parts, operands.B.shape[3])
    grads = plgpu.kernel(
        ssd_backward,
        out_type=(
            rows_of_x,
            by_group,
            by_group,
            result(chunks, sums, 3 + sums_skipped, ROWS),
            result(chunks, sums, 2, ROWS),
            *([rows_of_x] if p.gated else []),
        ),
        grid=(p.batch * chunks * parts * state_spans,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands))
    return _Gradients(*grads) if p.gated else _Gradients(*grads, y=None)


class _Place(NamedTuple):
    """Where a block stands."""

    example: Any
    chunk: Any
    group: Any
    part: Any
    first_unit: Any
    first_sums: Any
    """Of each panel and span in `_Gradients`."""
    states: Any

    @property
    def tokens(self) -> Any:
        return pl.ds(self.chunk * ROWS, ROWS)


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    b_slot: Any
    c_slot: Any
    first_slot: Any
    x_slots: Any
    d_y_slots: Any
    state_slots: Any
    d_state_slots: Any
    factor_slots: Any
    d_x_slot: Any
    y_slot: Any
    passing_slots: Any
    triangle: Any
    score_slots: Any
    d_score_sums: Any
    column_numbers: Any
    column_slots: Any
    row_slots: Any
    bc_ready: Any
    ready: Any
    consumed: Any
    scores_ready: Any


def multiply(a: Any, b: Any) -> Float[Array, "Q Q"]:
    def product(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(product, ACCUMULATOR)


def factors_of(s: _Scratch, slot: Any):
    def factor(name: int, layout: Any) -> Float[Array, " Q"]:
        return plgpu.load(s.factor_slots.at[slot, name], layout=layout, optimized=False)

    return factor
