"""The states between chunks for Blackwell (sm_100a, sm_103a), of both directions in one launch: the state that enters
each chunk, and the gradient of the state that leaves it. No GPU has run it.

As in `hopper_states`, both are one recurrence: from chunk to chunk S becomes decay S + (v * factor)^T W, forwards with
x and B, backwards with the output's gradient and C. A block goes through all chunks of 128 tokens of an example in one
direction, for a panel of heads of one group. Its roles:

    load warpgroup           matmul warpgroup                    carry warpgroup
    --------------           ----------------                    ---------------
    v, W, factors -> ready   S += scaled^T W                     S as rounded to 16 bits, to memory; S * decay
      waits consumed           needs state_ready, scaled_ready     needs ready, state_done -> state_ready, consumed
                               -> state_done
                                                                 scale warpgroup
                                                                 ---------------
                                                                 scaled = v * factor
                                                                   needs ready, state_done -> scaled_ready, consumed

S is in tensor memory, transposed: channels of the panel by N.

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

from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.ssd.blackwell_config import BLACKWELL_ROWS as ROWS
from fast_layers.ops.ssd.blackwell_config import BlackwellStateTiles
from fast_layers.ops.ssd.blackwell_tile import COLUMNS, STAGED, by_channel, by_row, column_slices
from fast_layers.ops.ssd.hopper_call import ENTERING, LEAVING
from fast_layers.ops.ssd.problem import Problem

FORWARDS, BACKWARDS = range(2)


class Sweep(NamedTuple):
    """What enters the states of a direction, and where to: x and B forwards, the output's gradient and C backwards."""

    values: Float[Array, "B L H P"]
    to: Float[Array, "B L G N"]


class StateOperands(NamedTuple):
    """Axis letters and layouts as in `blackwell_call.Operands`; of the F factors only ENTERING and LEAVING."""

    sweeps: tuple[Sweep, Sweep]
    """Forwards and backwards."""
    factors: Float[Array, "B C H F Q"]
    start: Float[Array, "B 2 U 128 N"]
    """The initial state, and the gradient of the final one."""


class States(NamedTuple):
    end: Float[Array, "B 2 U 128 N"]
    """The final state, and the gradient of the initial one."""
    between: Float[Array, "B C 2 H*P N"]
    """What enters each chunk; and the gradients of what leaves it. In 16 bits, since mostly products read them."""


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(tiles: BlackwellStateTiles, p: Problem, operands: StateOperands) -> States:
    heads, piece, panel, ring, state_dim = tiles.heads, tiles.piece, tiles.panel, tiles.stages, p.state_dim
    pieces, units = panel // piece, p.heads // heads
    chunks = operands.factors.shape[1]
    first_factor, factors = ENTERING, {ENTERING: 0, LEAVING: LEAVING - ENTERING}
    tree = jax.tree.structure(operands)

    def ssd_states(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        end_ref, between_ref = refs[tree.num_leaves :]
        s = _Scratch(**scratch)
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        direction, place = lax.div(block, p.batch * units), lax.rem(block, p.batch * units)
        example, unit = lax.div(place, units), lax.rem(place, units)

        def chunk_of(step):
            return lax.select(direction == FORWARDS, step, chunks - 1 - step)

        def take_loads():
            plgpu.set_max_registers(tiles.issue_registers, action="decrease")
            for way, sweep in enumerate(inputs.sweeps):
                one = functools.partial(load, sweep, inputs.factors, s, chunk_of, example, unit)

                @pl.when(direction == way)
                def _load_all(one=one):
                    lax.fori_loop(0, chunks, one, None)

        def take_products():
            plgpu.set_max_registers(tiles.issue_registers, action="decrease")
            lax.fori_loop(0, chunks, functools.partial(multiply, s), None)

        def take_scaling():
            plgpu.set_max_registers(tiles.compute_registers, action="increase")
            scale(s, lax.select(direction == FORWARDS, factors[LEAVING], factors[ENTERING]))

        def take_state():
            plgpu.set_max_registers(tiles.compute_registers, action="increase")
            start, end = inputs.start.at[example, direction, unit], end_ref.at[example, direction, unit]
            carry(start, end, between_ref.at[example, :, direction, pl.ds(unit * panel, panel)], s, chunk_of)

        # One choice, since who still asks for another role after its own keeps in registers what that role needs.
        lax.switch(warpgroup, [take_loads, take_products, take_scaling, take_state])

    def load(sweep: Any, factors_ref, s: _Scratch, chunk_of, example, unit, step, _):
        slot, chunk = lax.rem(step, ring), chunk_of(step)
        tokens, ready = pl.ds(chunk * ROWS, ROWS), s.ready.at[slot]
        group = lax.div(unit * heads, p.heads_per_group)

        @pl.when(step >= ring)
        def _wait():
            plgpu.barrier_wait(s.consumed.at[slot])

        plgpu.copy_gmem_to_smem(sweep.to.at[example, tokens, group], s.to_slots.at[slot], ready)
        of_heads = factors_ref.at[example, chunk, pl.ds(unit * heads, heads), pl.ds(first_factor, len(factors))]
        plgpu.copy_gmem_to_smem(of_heads, s.factor_slots.at[slot], ready)
        for index in range(pieces):
            head, channels = unit * heads + index * piece // p.head_dim, pl.ds(index * piece % p.head_dim, piece)
            values = sweep.values.at[example, tokens, head, channels]
            plgpu.copy_gmem_to_smem(values, s.value_slots.at[slot, index], ready)

    def multiply(s: _Scratch, step, _):
        slot = lax.rem(step, ring)
        plgpu.barrier_wait(s.ready.at[slot])
        plgpu.barrier_wait(s.state_ready)
        plgpu.barrier_wait(s.scaled_ready)
        plgpu.tcgen05_mma(s.state, s.scaled_slot.T, s.to_slots.at[slot], accumulate=True)
        plgpu.tcgen05_commit_arrive(s.state_done)

    def scale(s: _Scratch, factor):
        if panel < ROWS:
            # Rows of the state that no channel has, which are multiplied all the same.
            for c in column_slices(panel, ROWS - panel, piece):
                s.scaled_slot[:, c] = plgpu.layout_cast(jnp.zeros((ROWS, c.size), p.dtype), STAGED)

        def step(i, _):
            slot = lax.rem(i, ring)
            plgpu.barrier_wait(s.ready.at[slot])
            pl.when(i > 0)(lambda: plgpu.barrier_wait(s.state_done))
            for index in range(pieces):
                share = s.factor_slots.at[slot, index * piece // p.head_dim, factor]
                share = plgpu.load(share, layout=STAGED.reduce(1), optimized=False)
                values = plgpu.load(s.value_slots.at[slot, index], layout=STAGED, optimized=False)
                scaled = values.astype(jnp.float32) * by_row(share, piece)
                s.scaled_slot[:, pl.ds(index * piece, piece)] = scaled.astype(p.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.scaled_ready)
            plgpu.barrier_arrive(s.consumed.at[slot])

        lax.fori_loop(0, chunks, step, None)

    def carry(start, end, between, s: _Scratch, chunk_of):
        columns = column_slices(0, state_dim)
        for c in columns:
            plgpu.async_store_tmem(s.state.at[:, c], plgpu.load(start.at[:, c], layout=STAGED, optimized=False))
        plgpu.commit_tmem()

        def step(i, _):
            slot = lax.rem(i, ring)

            @pl.when(i > 0)
            def _wait():
                plgpu.barrier_wait(s.state_done)
                # Of the step before: its product has read W, and this role its decay.
                plgpu.barrier_arrive(s.consumed.at[lax.rem(i - 1, ring)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            plgpu.barrier_wait(s.ready.at[slot])
            for c in columns:
                state = plgpu.async_load_tmem(s.state.at[:, c], layout=STAGED)
                plgpu.wait_load_tmem()
                s.state_slot[:, c] = state.astype(p.dtype)
                # The last token's share of the entering state is what goes on to the next chunk.
                decay = by_channel(
                    [s.factor_slots[slot, head, factors[ENTERING], ROWS - 1] for head in range(heads)],
                    p.head_dim,
                    c.size,
                )
                plgpu.async_store_tmem(s.state.at[:, c], state * decay)
            plgpu.commit_tmem()
            plgpu.barrier_arrive(s.state_ready)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s.state_slot.at[pl.ds(0, panel)], between.at[chunk_of(i)])

        lax.fori_loop(0, chunks, step, None)
        plgpu.barrier_wait(s.state_done)
        plgpu.barrier_arrive(s.consumed.at[(chunks - 1) % ring])
        for c in columns:
            end.at[:, c][...] = plgpu.async_load_tmem(s.state.at[:, c], layout=STAGED)
        plgpu.wait_smem_to_gmem(0)

    in_order: Any = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    scratch = {
        "to_slots": smem_tile(ring, ROWS, state_dim, dtype=p.dtype),
        "value_slots": smem_tile(ring, pieces, ROWS, piece, dtype=p.dtype),
        "factor_slots": plgpu.SMEM((ring, heads, len(factors), ROWS), jnp.float32),
        "scaled_slot": smem_tile(ROWS, ROWS, dtype=p.dtype, columns=piece),
        "state_slot": smem_tile(ROWS, state_dim, dtype=p.dtype, columns=min(state_dim, COLUMNS)),
        "state": plgpu.TMEM((ROWS, state_dim), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=2 + pieces, num_barriers=ring),
        "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=ring),
        "scaled_ready": in_order(),
        "state_ready": in_order(),
        "state_done": in_order(),
    }
    end, between = plgpu.kernel(
        ssd_states,
        out_type=(
            jax.ShapeDtypeStruct(operands.start.shape, jnp.float32),
            jax.ShapeDtypeStruct((p.batch, chunks, 2, p.heads * p.head_dim, state_dim), p.dtype),
        ),
        grid=(2 * p.batch * units,),
        grid_names=("block",),
        num_threads=4,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands))
    return States(end, between)


class _Scratch(NamedTuple):
    """What a block holds in shared and in tensor memory, and the barriers named after the event that they wait for."""

    to_slots: Any
    value_slots: Any
    factor_slots: Any
    scaled_slot: Any
    state_slot: Any
    state: Any
    ready: Any
    consumed: Any
    scaled_ready: Any
    state_ready: Any
    state_done: Any
