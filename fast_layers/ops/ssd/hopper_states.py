"""The states between chunks for Hopper (sm_90a), of both directions in one launch: the state that enters each chunk,
and the gradient of the state that leaves it.

Both are one recurrence: from chunk to chunk S becomes decay S + (v * factor)^T W, forwards with x and B, backwards with
the output's gradient and C. So a block goes through all chunks of an example in one direction, for one or two panels of
64 channels of heads of one group:

    load warpgroup                        each compute warpgroup, on its own panel
    --------------                        ----------------------------------------
    v, W, factors of a chunk -> ready     S as rounded to 16 bits, to memory
    waits consumed                        S = decay S + (v * factor)^T W            frees consumed

S stays in registers as in `hopper_fwd`, transposed: 64 channels by N.

Source: Dao and Gu, "Transformers are SSMs" (2024).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.ssd.config import ROWS, HopperStateTiles, panels
from fast_layers.ops.ssd.hopper_call import ENTERING, LEAVING
from fast_layers.ops.ssd.hopper_tile import BY_ROW, TILE, WGMMA, by_row, load_tile
from fast_layers.ops.ssd.problem import Problem

FORWARDS, BACKWARDS = range(2)


class Sweep(NamedTuple):
    """What enters the states of a direction, and where to: x and B forwards, the output's gradient and C backwards."""

    values: Float[Array, "B L U 64"]
    to: Float[Array, "B L G N"]


class StateOperands(NamedTuple):
    """Axis letters and layouts as in `hopper_call.Operands`, W sweeps; of the F factors only ENTERING and LEAVING."""

    sweeps: tuple[Sweep, ...]
    """Forwards, and, if there is a second one, backwards."""
    factors: Float[Array, "B C H F Q"]
    start: Float[Array, "B W U 64 N"]
    """The initial state, and the gradient of the final one."""


class States(NamedTuple):
    end: Float[Array, "B W U 64 N"]
    """The final state, and the gradient of the initial one."""
    between: Float[Array, "B C W U 64 N"] | None
    """What enters each chunk; and the gradients of what leaves it. In 16 bits, since only products read them."""


def find(tiles: HopperStateTiles, p: Problem, operands: StateOperands) -> States:
    """All states. Where there are too few blocks, each split of the sequence first finds what it adds to a state."""
    if tiles.splits == 1:
        return _launch(tiles, p, True, operands)
    splits = tiles.splits
    apart = by_split(splits, operands, starts(tiles, p, operands))
    end, between = _launch(tiles, split_problem(splits, p), True, apart)
    assert between is not None
    ends = _join(splits, end)
    end = jnp.stack([ends[:, -1 if way == FORWARDS else 0, way] for way in range(len(operands.sweeps))], 1)
    return States(end, between.reshape(p.batch, -1, *between.shape[2:]))


def starts(tiles: HopperStateTiles, p: Problem, operands: StateOperands) -> Float[Array, "B*S W U 64 N"]:
    """The state that each split of the sequence starts from, exactly: what splits add, carried on from one to the next.

    A split's decay is one number for each head, so this is a scan of as many steps as there are splits.
    """
    splits, shape = tiles.splits, operands.start.shape
    apart = by_split(splits, operands, jnp.zeros((splits * p.batch, *shape[1:]), jnp.float32))
    added = _join(splits, _launch(tiles, split_problem(splits, p), False, apart).end)
    decays = _join(splits, apart.factors[:, :, :, ENTERING, -1].prod(1))
    decays = jnp.repeat(decays, panels(p.head_dim), axis=2)[..., None, None].swapaxes(0, 1)

    def carry_on(state, split):
        decay, added = split
        return decay * state + added, state

    entering = []
    for way in range(len(operands.sweeps)):
        each = decays, added[:, :, way].swapaxes(0, 1)
        entering.append(lax.scan(carry_on, operands.start[:, way], each, reverse=way == BACKWARDS)[1])
    return jnp.stack(entering, 2).swapaxes(0, 1).reshape(apart.start.shape)


def by_split(splits: int, operands: StateOperands, start: Float[Array, "B*S W U 64 N"]) -> StateOperands:
    """Splits of the sequence as examples of their own."""
    chunks = operands.factors.shape[1]
    if chunks % splits:
        raise ValueError(f"{splits=} must divide the {chunks} chunks of {ROWS} tokens")
    sweeps = jax.tree.map(functools.partial(split_tokens, splits, chunks), operands.sweeps)
    return StateOperands(sweeps, split(splits, operands.factors), start)


def split_tokens(splits: int, chunks: int, x: Float[Array, "B L ..."]) -> Float[Array, "B*S C/S*Q ..."]:
    missing = chunks * ROWS - x.shape[1]
    return split(splits, jnp.pad(x, [(0, missing if a == 1 else 0) for a in range(x.ndim)]) if missing else x)


def split(splits: int, x: Float[Array, "B C ..."]) -> Float[Array, "B*S C/S ..."]:
    return x.reshape(splits * x.shape[0], x.shape[1] // splits, *x.shape[2:])


def split_problem(splits: int, p: Problem) -> Problem:
    return dataclasses.replace(p, batch=splits * p.batch)


def _join(splits: int, x: Float[Array, "B*S ..."]) -> Float[Array, "B S ..."]:
    return x.reshape(-1, splits, *x.shape[1:])


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(tiles: HopperStateTiles, p: Problem, keep: bool, operands: StateOperands) -> States:
    """`keep` the states between chunks, or only go through them."""
    (values, to), *_ = operands.sweeps
    wgs, ring, state_dim, units = tiles.compute_wgs, tiles.stages, to.shape[3], values.shape[2]
    chunks = operands.factors.shape[1]
    packs, rest = divmod(units // p.groups, wgs)
    assert not rest, f"compute_wgs={wgs} must divide the {units // p.groups} panels of a group"
    tree = jax.tree.structure(operands)

    def ssd_states(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        end_ref, *between_ref = refs[tree.num_leaves :]
        s = _Scratch(**{"state_slots": None, **scratch})
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        direction, place = lax.div(block, p.batch * p.groups * packs), lax.rem(block, p.batch * p.groups * packs)
        example, pack = lax.div(place, p.groups * packs), lax.rem(place, p.groups * packs)
        group = lax.div(pack, packs)
        first_unit = pack * wgs

        def chunk_of(step):
            return lax.select(direction == FORWARDS, step, chunks - 1 - step)

        @pl.when(warpgroup == wgs)
        def _load():
            plgpu.set_max_registers(tiles.load_registers, action="decrease")
            for way, sweep in enumerate(inputs.sweeps):
                one = functools.partial(load, sweep, inputs.factors, s, chunk_of, example, group, first_unit)

                @pl.when(direction == way)
                def _load_all(one=one):
                    lax.fori_loop(0, chunks, one, None)

        @pl.when(warpgroup < wgs)
        def _compute():
            plgpu.set_max_registers(tiles.compute_registers, action="increase")
            unit = first_unit + warpgroup
            start = inputs.start.at[example, direction, unit]
            between = [ref.at[example, :, direction, unit] for ref in between_ref]
            end_ref[example, direction, unit] = compute(start, between, s, chunk_of, direction, warpgroup)
            if keep:
                plgpu.wait_smem_to_gmem(0)

    def load(sweep: Any, factors_ref, s: _Scratch, chunk_of, example, group, first_unit, step, _):
        slot, chunk = lax.rem(step, ring), chunk_of(step)
        tokens, ready = pl.ds(chunk * ROWS, ROWS), s.ready.at[slot]

        @pl.when(step >= ring)
        def _wait():
            plgpu.barrier_wait(s.consumed.at[slot])

        plgpu.copy_gmem_to_smem(sweep.to.at[example, tokens, group], s.to_slots.at[slot], ready)
        for wg in range(wgs):
            unit = first_unit + wg
            head = lax.div(unit, panels(p.head_dim))
            plgpu.copy_gmem_to_smem(sweep.values.at[example, tokens, unit], s.value_slots.at[slot, wg], ready)
            plgpu.copy_gmem_to_smem(factors_ref.at[example, chunk, head], s.factor_slots.at[slot, wg], ready)

    def compute(start, between, s: _Scratch, chunk_of, direction, warpgroup):
        entering_slot = s.entering_slots.at[warpgroup]
        factor_name = lax.select(direction == FORWARDS, LEAVING, ENTERING)

        def over_chunks(state_acc):
            state_acc[...] = plgpu.load(start, layout=WGMMA, optimized=False)

            def step(i, _):
                slot = lax.rem(i, ring)
                factors = s.factor_slots.at[slot, warpgroup]
                plgpu.barrier_wait(s.ready.at[slot])
                state = state_acc[...]
                values = load_tile(s.value_slots.at[slot, warpgroup])
                factor = plgpu.load(factors.at[factor_name], layout=BY_ROW, optimized=False)
                decay = factors[ENTERING, ROWS - 1]
                if keep:

                    @pl.when(i > 0)
                    def _wait_stored():
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    s.state_slots[warpgroup] = state.astype(p.dtype)
                entering_slot[...] = (values * by_row(factor)).astype(p.dtype)
                plgpu.commit_smem()
                for to in between:
                    plgpu.copy_smem_to_gmem(s.state_slots.at[warpgroup], to.at[chunk_of(i)])
                state_acc[...] = state * decay
                plgpu.wgmma(state_acc, entering_slot.T, s.to_slots.at[slot])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(s.consumed.at[slot])

            lax.fori_loop(0, chunks, step, None)
            return state_acc[...]

        return pl.run_scoped(over_chunks, plgpu.WGMMAAccumulatorRef((ROWS, state_dim), jnp.float32))

    scratch = {
        "to_slots": smem_tile(ring, ROWS, state_dim, dtype=p.dtype),
        "value_slots": smem_tile(ring, wgs, *TILE, dtype=p.dtype),
        "factor_slots": plgpu.SMEM((ring, wgs, operands.factors.shape[3], ROWS), jnp.float32),
        **({"state_slots": smem_tile(wgs, ROWS, state_dim, dtype=p.dtype)} if keep else {}),
        "entering_slots": smem_tile(wgs, *TILE, dtype=p.dtype),
        "ready": plgpu.Barrier(num_arrivals=1 + 2 * wgs, num_barriers=ring),
        "consumed": plgpu.Barrier(num_arrivals=wgs, num_barriers=ring),
    }
    end = jax.ShapeDtypeStruct(operands.start.shape, jnp.float32)
    between = jax.ShapeDtypeStruct((p.batch, chunks, *end.shape[1:]), p.dtype)
    end, *between = plgpu.kernel(
        ssd_states,
        out_type=(end, between) if keep else (end,),
        grid=(len(operands.sweeps) * p.batch * p.groups * packs,),
        grid_names=("block",),
        num_threads=wgs + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands))
    return States(end, *(between or [None]))


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    to_slots: Any
    value_slots: Any
    factor_slots: Any
    state_slots: Any
    entering_slots: Any
    ready: Any
    consumed: Any
