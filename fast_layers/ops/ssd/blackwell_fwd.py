"""The scan's forward for Blackwell (sm_100a, sm_103a): TMA loads, tcgen05 matmuls, the state in tensor memory from the
first chunk to the last. No GPU has run it: it is simulated, and compiled by the real assembler.

A block goes through the chunks of 128 tokens of one example for a panel of heads of one group. Its roles:

    load warpgroup                      matmul warpgroup, of each chunk
    --------------                      -------------------------------
    B, C of a chunk -> bc_ready         scores = C B^T             needs bc_ready, scores_consumed -> scores_ready
      waits bc_consumed                 out = C S^T                needs state_ready, out_consumed -> inter_ready
    x, (z), factors -> x_ready          S += (x * leaving)^T B     needs entering_ready     -> state_done, bc_consumed
      waits x_consumed                  out += W x, by heads       needs weights_ready      -> weights_consumed
                                        after a warpgroup's last W x                        -> out_ready
    state warpgroup
    ---------------
    S as rounded to 16 bits, S * decay  needs state_done   -> state_ready
    x * leaving                         needs x_ready      -> entering_ready

    two compute warpgroups, each with half of the columns of scores and half of the channels of out
    -----------------------------------------------------------------------------------------------
    take scores                         needs scores_ready                      -> scores_consumed
    W = scores * decays * dt, by heads  needs x_ready, weights_consumed         -> weights_ready
      with the first: out *= entering   needs inter_ready
    (out + D x) silu(z), to memory      needs out_ready                         -> out_consumed, x_consumed

All heads of a block share scores, and each product with C or B is one for all of them. Scores are in registers before
their weights are made, so the next chunk's are multiplied meanwhile: the last W x of a chunk is issued after them. S is
transposed: channels of the panel by N. Decays between two tokens are powers of two of differences of sums that XLA has
computed (`blackwell_call.Operands`); all masks but the triangle come down to each row's first column.

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

from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.ssd.blackwell_call import Operands, operands_of
from fast_layers.ops.ssd.blackwell_config import BLACKWELL_ROWS as ROWS
from fast_layers.ops.ssd.blackwell_config import COMPUTE_WGS, BlackwellForwardTiles
from fast_layers.ops.ssd.blackwell_tile import (
    COLUMNS,
    NATIVE,
    STAGED,
    by_channel,
    by_column,
    by_row,
    column_slices,
    positions,
)
from fast_layers.ops.ssd.hopper_call import COLUMN, ENTERING, LEAVING, LOG2_E, ROW
from fast_layers.ops.ssd.problem import Aux, Inputs, Problem, Scanned


def scan(problem: Problem, inputs: Inputs, aux: Aux, tiles: BlackwellForwardTiles | None = None) -> Scanned:
    p = problem
    tiles = BlackwellForwardTiles.of(p) if tiles is None else tiles
    launch: Any = over_batch(functools.partial(_launch, tiles))  # of any problem with a batch
    out, state = launch(p, operands_of(p, tiles, inputs, aux))
    state = state[:, :, : tiles.panel].reshape(p.batch, p.heads, p.head_dim, p.state_dim)
    return Scanned(out[:, : p.length], state)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(tiles: BlackwellForwardTiles, p: Problem, operands: Operands):
    """(out [B, L, H, P], final state [B, U, 128, N])."""
    heads, piece, panel, buffers = tiles.heads, tiles.piece, tiles.panel, tiles.weight_buffers
    ring, x_ring, state_dim = tiles.stages, tiles.x_stages, p.state_dim
    pieces = panel // piece
    own_pieces = pieces // COMPUTE_WGS
    own_columns = ROWS // COMPUTE_WGS
    units = p.heads // heads
    chunks = operands.factors.shape[1]
    tree = jax.tree.structure(operands)

    def ssd_forward(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        out_ref, final_ref = refs[tree.num_leaves :]
        s = _Scratch(**{"z_slots": None, "first_slots": None, **scratch})
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        example, unit = lax.div(block, units), lax.rem(block, units)

        # Warpgroups, where warps would do: inside shard_map a warp's code may not see operands that vary over the mesh.
        def take_loads():
            plgpu.set_max_registers(tiles.issue_registers, action="decrease")
            lax.fori_loop(0, chunks, functools.partial(load, inputs, s, example, unit), None)

        def take_products():
            plgpu.set_max_registers(tiles.issue_registers, action="decrease")
            multiply(s)

        def take_state():
            plgpu.set_max_registers(tiles.state_registers, action="decrease")
            carry_state(inputs, s, final_ref, example, unit)

        # A role each: which columns of tensor memory are meant must be known when compiling.
        def take_heads(wg: int):
            plgpu.set_max_registers(tiles.compute_registers, action="increase")
            lax.fori_loop(0, chunks, functools.partial(compute, wg, inputs, s, out_ref, example, unit), None)
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(s.x_consumed.at[lax.rem(chunks - 1, x_ring)])

        compute_roles = [functools.partial(take_heads, wg) for wg in range(COMPUTE_WGS)]
        # One choice, since who still asks for another role after its own keeps in registers what that role needs.
        lax.switch(warpgroup, [*compute_roles, take_state, take_loads, take_products])

    def channels_of(unit, index: int):
        """(head, its channels) of a piece."""
        return unit * heads + index * piece // p.head_dim, pl.ds(index * piece % p.head_dim, piece)

    def load(inputs: Any, s: _Scratch, example, unit, chunk, _):
        tokens = pl.ds(chunk * ROWS, ROWS)
        slot, ready = lax.rem(chunk, ring), s.bc_ready.at[lax.rem(chunk, ring)]
        group = lax.div(unit * heads, p.heads_per_group)

        @pl.when(chunk >= ring)
        def _wait_bc():
            plgpu.barrier_wait(s.bc_consumed.at[slot])

        plgpu.copy_gmem_to_smem(inputs.C.at[example, tokens, group], s.c_slots.at[slot], ready)
        plgpu.copy_gmem_to_smem(inputs.B.at[example, tokens, group], s.b_slots.at[slot], ready)
        x_slot, x_ready = lax.rem(chunk, x_ring), s.x_ready.at[lax.rem(chunk, x_ring)]

        @pl.when(chunk >= x_ring)
        def _wait_x():
            plgpu.barrier_wait(s.x_consumed.at[x_slot])

        factors = inputs.factors.at[example, chunk, pl.ds(unit * heads, heads)]
        plgpu.copy_gmem_to_smem(factors, s.factor_slots.at[x_slot], x_ready)
        if inputs.first is not None:
            plgpu.copy_gmem_to_smem(inputs.first.at[example, chunk], s.first_slots.at[x_slot], x_ready)
        for index in range(pieces):
            head, channels = channels_of(unit, index)
            plgpu.copy_gmem_to_smem(inputs.x.at[example, tokens, head, channels], s.x_slots.at[x_slot, index], x_ready)
            if inputs.z is not None:
                z = inputs.z.at[example, tokens, head, channels]
                plgpu.copy_gmem_to_smem(z, s.z_slots.at[x_slot, index], x_ready)

    def multiply(s: _Scratch):
        def multiply_scores(chunk):
            slot = lax.rem(chunk, ring)
            plgpu.barrier_wait(s.bc_ready.at[slot])
            pl.when(chunk > 0)(lambda: plgpu.barrier_wait(s.scores_consumed))
            plgpu.tcgen05_mma(s.scores, s.c_slots.at[slot], s.b_slots.at[slot].T, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.scores_ready)

        def multiply_state(chunk):
            slot = lax.rem(chunk, ring)
            pl.when(chunk > 0)(lambda: plgpu.barrier_wait(s.out_consumed))
            plgpu.barrier_wait(s.state_ready)
            state = s.state_slot.at[pl.ds(0, panel)]
            plgpu.tcgen05_mma(s.out, s.c_slots.at[slot], state.T, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.inter_ready)
            plgpu.barrier_wait(s.entering_ready)
            plgpu.tcgen05_mma(s.state, s.entering_slot.T, s.b_slots.at[slot], accumulate=True)
            plgpu.tcgen05_commit_arrive(s.state_done)
            plgpu.tcgen05_commit_arrive(s.bc_consumed.at[slot])

        def multiply_weights(chunk, head):
            x_slot, buffer = lax.rem(chunk, x_ring), head % buffers
            plgpu.barrier_wait(s.weights_ready.at[buffer])
            for index in range(pieces):
                if index * piece // p.head_dim != head:
                    continue
                columns = s.out.at[:, pl.ds(index * piece, piece)]
                plgpu.tcgen05_mma(columns, s.weights[buffer], s.x_slots.at[x_slot, index], accumulate=True)
                if (index + 1) % own_pieces == 0:
                    plgpu.tcgen05_commit_arrive(s.out_ready.at[index // own_pieces])
            plgpu.tcgen05_commit_arrive(s.weights_consumed.at[buffer])

        def step(chunk, _):
            multiply_state(chunk)
            plgpu.barrier_wait(s.x_ready.at[lax.rem(chunk, x_ring)])
            for head in range(heads):
                if head == heads - 1:
                    pl.when(chunk + 1 < chunks)(functools.partial(multiply_scores, chunk + 1))
                multiply_weights(chunk, head)

        multiply_scores(jnp.int32(0))
        lax.fori_loop(0, chunks, step, None)

    def carry_state(inputs: Any, s: _Scratch, final_ref, example, unit):
        columns = column_slices(0, state_dim)
        for c in columns:
            if inputs.initial_state is None:
                initial = plgpu.layout_cast(jnp.zeros((ROWS, c.size), jnp.float32), STAGED)
            else:
                initial = plgpu.load(inputs.initial_state.at[example, unit, :, c], layout=STAGED, optimized=False)
            plgpu.async_store_tmem(s.state.at[:, c], initial)
        plgpu.commit_tmem()
        if panel < ROWS:
            # Rows of the state that no channel has, which are multiplied all the same.
            for c in column_slices(panel, ROWS - panel, piece):
                s.entering_slot[:, c] = plgpu.layout_cast(jnp.zeros((ROWS, c.size), p.dtype), STAGED)

        def step(chunk, _):
            x_slot = lax.rem(chunk, x_ring)
            factors = s.factor_slots.at[x_slot]
            plgpu.barrier_wait(s.x_ready.at[x_slot])
            pl.when(chunk > 0)(lambda: plgpu.barrier_wait(s.state_done))
            for c in columns:
                state = plgpu.async_load_tmem(s.state.at[:, c], layout=STAGED)
                plgpu.wait_load_tmem()
                s.state_slot[:, c] = state.astype(p.dtype)
                # The last token's share of the entering state is what goes on to the next chunk.
                decay = by_channel([factors[h, ENTERING, ROWS - 1] for h in range(heads)], p.head_dim, c.size)
                plgpu.async_store_tmem(s.state.at[:, c], state * decay)
            plgpu.commit_tmem()
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.state_ready)
            for index in range(pieces):
                leaving = factors.at[index * piece // p.head_dim, LEAVING]
                leaving = plgpu.load(leaving, layout=STAGED.reduce(1), optimized=False)
                entering = load_piece(s.x_slots, x_slot, index) * by_row(leaving, piece)
                s.entering_slot[:, pl.ds(index * piece, piece)] = entering.astype(p.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.entering_ready)
            plgpu.barrier_arrive(s.x_consumed.at[x_slot])

        lax.fori_loop(0, chunks, step, None)
        plgpu.barrier_wait(s.state_done)
        for c in columns:
            final_ref.at[example, unit, :, c][...] = plgpu.async_load_tmem(s.state.at[:, c], layout=STAGED)

    def load_piece(slots, slot, index):
        return plgpu.load(slots.at[slot, index], layout=STAGED, optimized=False).astype(jnp.float32)

    def compute(wg: int, inputs: Any, s: _Scratch, out_ref, example, unit, chunk, _):
        x_slot = lax.rem(chunk, x_ring)
        plgpu.barrier_wait(s.scores_ready)
        columns = column_slices(wg * own_columns, own_columns)
        scores = [plgpu.async_load_tmem(s.scores.at[:, c], layout=NATIVE) for c in columns]
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(s.scores_consumed)

        @pl.when(chunk > 0)
        def _free():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(s.x_consumed.at[lax.rem(chunk - 1, x_ring)])

        plgpu.barrier_wait(s.x_ready.at[x_slot])
        own = range(wg * own_pieces, (wg + 1) * own_pieces)
        for head in range(heads):
            buffer = head % buffers
            factors = s.factor_slots.at[x_slot, head]
            if head < buffers:
                pl.when(chunk > 0)(functools.partial(plgpu.barrier_wait, s.weights_consumed.at[buffer]))
            else:
                plgpu.barrier_wait(s.weights_consumed.at[buffer])
            for part, c in zip(scores, columns, strict=True):
                weights = (part * decays(s, factors, x_slot, c)).astype(p.dtype)
                plgpu.async_store_tmem(s.weights[buffer].at[:, c], weights)
            if head == 0:
                plgpu.barrier_wait(s.inter_ready)
                for index in own:
                    take_entering(s, x_slot, index)
            plgpu.commit_tmem()
            plgpu.barrier_arrive(s.weights_ready.at[buffer])

        plgpu.barrier_wait(s.out_ready.at[wg])
        parts = [plgpu.async_load_tmem(s.out.at[:, pl.ds(index * piece, piece)], layout=STAGED) for index in own]
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(s.out_consumed)
        for index, out in zip(own, parts, strict=True):
            head, channels = channels_of(unit, index)
            # The slot of x is out's: each thread reads what it then overwrites.
            s.x_slots.at[x_slot, index][...] = finish(inputs, s, out, example, head, channels, x_slot, index)
        plgpu.commit_smem()
        for index in own:
            head, channels = channels_of(unit, index)
            rows = out_ref.at[example, pl.ds(chunk * ROWS, ROWS), head, channels]
            plgpu.copy_smem_to_gmem(s.x_slots.at[x_slot, index], rows)

    def take_entering(s: _Scratch, x_slot, index):
        factors = s.factor_slots.at[x_slot, index * piece // p.head_dim, ENTERING]
        entering = plgpu.load(factors, layout=NATIVE.reduce(1), optimized=False)
        for c in column_slices(index * piece, piece):
            out = plgpu.async_load_tmem(s.out.at[:, c], layout=NATIVE)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(s.out.at[:, c], out * by_row(entering, c.size))

    def decays(s: _Scratch, factors, x_slot, c):
        """From each column's token to each row's, times the column's dt; 0 where it is later or of another document."""
        row, column = positions(c, NATIVE)
        visible = column <= row
        if s.first_slots is not None:
            first = plgpu.load(s.first_slots.at[x_slot], layout=NATIVE.reduce(1), optimized=False)
            visible &= column >= by_row(first, c.size)
        at_row = plgpu.load(factors.at[ROW], layout=NATIVE.reduce(1), optimized=False)
        at_column = plgpu.load(factors.at[COLUMN, c], layout=NATIVE.reduce(0), optimized=False)
        log2_decay = by_row(at_row, c.size) - by_column(at_column, ROWS)
        # Masked before exp2: above the diagonal it would overflow, and inf * 0 is NaN.
        return jnp.exp2(jnp.where(visible, log2_decay, -jnp.inf))

    def finish(inputs: Any, s: _Scratch, out, example, head, channels, x_slot, index):
        if inputs.D is not None:
            skip = plgpu.load(inputs.D.at[example, head, channels], layout=STAGED.reduce(0), optimized=False)
            out += load_piece(s.x_slots, x_slot, index) * by_column(skip, ROWS)
        if s.z_slots is not None:
            z = load_piece(s.z_slots, x_slot, index)
            out *= z / (1.0 + jnp.exp2(z * -LOG2_E))
        return out.astype(p.dtype)

    def tensor_memory(columns: int, dtype: Any = jnp.float32, **options) -> Any:
        return plgpu.TMEM((ROWS, columns), dtype, **options)

    in_order: Any = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    scratch = {
        "b_slots": smem_tile(ring, ROWS, state_dim, dtype=p.dtype),
        "c_slots": smem_tile(ring, ROWS, state_dim, dtype=p.dtype),
        "x_slots": smem_tile(x_ring, pieces, ROWS, piece, dtype=p.dtype),
        **({} if operands.z is None else {"z_slots": smem_tile(x_ring, pieces, ROWS, piece, dtype=p.dtype)}),
        "factor_slots": plgpu.SMEM((x_ring, heads, 4, ROWS), jnp.float32),
        **({} if operands.first is None else {"first_slots": plgpu.SMEM((x_ring, ROWS), jnp.int32)}),
        "entering_slot": smem_tile(ROWS, ROWS, dtype=p.dtype, columns=piece),
        "state_slot": smem_tile(ROWS, state_dim, dtype=p.dtype, columns=min(state_dim, COLUMNS)),
        "scores": tensor_memory(ROWS),
        "weights": [tensor_memory(ROWS, p.dtype, packed=True) for _ in range(buffers)],
        "out": tensor_memory(panel),
        "state": tensor_memory(state_dim),
        "bc_ready": plgpu.Barrier(num_arrivals=2, num_barriers=ring),
        "bc_consumed": in_order(num_barriers=ring),
        "x_ready": plgpu.Barrier(
            num_arrivals=1 + (operands.first is not None) + pieces * (1 + (operands.z is not None)), num_barriers=x_ring
        ),
        "x_consumed": plgpu.Barrier(num_arrivals=COMPUTE_WGS + 1, num_barriers=x_ring),
        "scores_ready": in_order(),
        "scores_consumed": in_order(num_arrivals=COMPUTE_WGS),
        "state_ready": in_order(),
        "state_done": in_order(),
        "entering_ready": in_order(),
        "inter_ready": in_order(),
        "weights_ready": in_order(num_arrivals=COMPUTE_WGS, num_barriers=buffers),
        "weights_consumed": in_order(num_barriers=buffers),
        "out_ready": in_order(num_barriers=COMPUTE_WGS),
        "out_consumed": in_order(num_arrivals=COMPUTE_WGS),
    }
    return plgpu.kernel(
        ssd_forward,
        out_type=(
            jax.ShapeDtypeStruct(operands.x.shape, p.dtype),
            jax.ShapeDtypeStruct((p.batch, units, ROWS, state_dim), jnp.float32),
        ),
        grid=(p.batch * units,),
        grid_names=("block",),
        num_threads=COMPUTE_WGS + 3,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands))


class _Scratch(NamedTuple):
    """What a block holds in shared and in tensor memory, and the barriers named after the event that they wait for."""

    b_slots: Any
    c_slots: Any
    x_slots: Any
    z_slots: Any
    factor_slots: Any
    first_slots: Any
    entering_slot: Any
    state_slot: Any
    scores: Any
    weights: Any
    out: Any
    state: Any
    bc_ready: Any
    bc_consumed: Any
    x_ready: Any
    x_consumed: Any
    scores_ready: Any
    scores_consumed: Any
    state_ready: Any
    state_done: Any
    entering_ready: Any
    inter_ready: Any
    weights_ready: Any
    weights_consumed: Any
    out_ready: Any
    out_consumed: Any
