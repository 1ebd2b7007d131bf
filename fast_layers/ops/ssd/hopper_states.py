"""The states between chunks for Hopper (sm_90a), of both directions in one launch: the state that enters each chunk,
and the gradient of the state that leaves it.

Both are one recurrence: from chunk to chunk S becomes decay S + (v * factor)^T W, forwards with x and B, backwards with
the output's gradient and C. So a block goes through all chunks of an example, or of one split of it, in one direction,
for one or two panels of 64 channels of heads of one group:

    load warpgroup                        each compute warpgroup, on its own panel
    --------------                        ----------------------------------------
    v, W, factors of a chunk -> ready     v * factor, while the chunk before enters S
    waits consumed                        S as rounded to 16 bits, to memory        frees the chunk before
                                          S = decay S + (v * factor)^T W

S stays in registers as in `hopper_fwd`, transposed: 64 channels by N.

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
from fast_layers.ops.ssd.config import ROWS, HopperStateTiles, panels
from fast_layers.ops.ssd.hopper_call import ENTERING, LEAVING
from fast_layers.ops.ssd.hopper_tile import BY_ROW, TILE, WGMMA, by_row, load_tile
from fast_layers.ops.ssd.problem import Problem

FORWARDS, BACKWARDS = range(2)
_UNROLLED_SPLITS = 16


class Sweep(NamedTuple):
    """What enters the states of a direction, and where to: x and B forwards, the output's gradient and C backwards."""

    values: Float[Array, "B L U 64"]
    to: Float[Array, "B L G N"]


class StateOperands(NamedTuple):
    """Axis letters and layouts as in `hopper_call.Operands`, W sweeps; of the F factors only ENTERING and LEAVING."""

    sweeps: tuple[Sweep, ...]
    """Forwards, and, if there is a second one, backwards."""
    factors: Float[Array, "B C H F Q"]
    start: Float[Array, "B*S W U 64 N"] | None
    """What each split starts from; of the whole the initial state, and the gradient of the final one. None: zeros."""


class States(NamedTuple):
    end: Float[Array, "B|B*(S-1) W U 64 N"]
    """The final state, and the gradient of the initial one; or what each split but the last adds."""
    between: Float[Array, "B C W U 64 N"] | None
    """What enters each chunk; and the gradients of what leaves it. In 16 bits, since only products read them."""


def find(tiles: HopperStateTiles, p: Problem, operands: StateOperands) -> States:
    """All states. Where there are too few blocks, each split of the sequence first finds what it adds to a state."""
    if tiles.splits > 1:
        entering = starts(tiles, p, operands)
        operands = operands._replace(start=entering.reshape(-1, *entering.shape[2:]))
    return _launch(tiles, p, True, operands)


def starts(tiles: HopperStateTiles, p: Problem, operands: StateOperands) -> Float[Array, "B S W U 64 N"]:
    """The state that each split of the sequence starts from, exactly: what splits add, carried on from one to the next.

    Splits count in the direction of their sweep. What the last one adds is not asked for.
    """
    added = _launch(tiles, p, False, operands._replace(start=None)).end
    added = added.reshape(p.batch, tiles.splits - 1, *added.shape[1:])
    kept = operands.factors[:, :, :, ENTERING, -1]
    by_way = (kept, kept[:, ::-1])[: len(operands.sweeps)]
    decays = jnp.stack([_split_decays(tiles.splits, x) for x in by_way], 2)
    decays = jnp.repeat(decays, panels(p.head_dim), axis=3)[..., None, None]

    def carry_on(state, split):
        decay, added = split
        state = decay * state + added
        return state, state

    assert operands.start is not None
    # Not by the loop, whose carry has to vary over the same mesh axes from the start on, as zeros do not.
    second = decays[:, 0] * operands.start + added[:, 0]
    # Unrolled, the few of which there mostly are become one fusion.
    others = decays[:, 1:].swapaxes(0, 1), added[:, 1:].swapaxes(0, 1)
    _, entering = lax.scan(carry_on, second, others, unroll=_UNROLLED_SPLITS)
    return jnp.concatenate([operands.start[:, None], second[:, None], entering.swapaxes(0, 1)], 1)


def _split_decays(splits: int, kept: Float[Array, "B C H"]) -> Float[Array, "B S-1 H"]:
    """Of all splits but the last, from what is kept over each chunk."""
    chunks = kept.shape[1]
    first = jnp.arange(splits) * chunks // splits
    chunk = first[:-1, None] + jnp.arange(-(-chunks // splits))
    inside = chunk < first[1:, None]
    return jnp.where(inside[..., None], kept[:, jnp.minimum(chunk, chunks - 1)], 1.0).prod(2)


def split_chunks(splits: int, chunks: int, split: Any) -> tuple[Any, Any]:
    """The first chunk of a split of the sequence, and the first after it. It has as many as the others, or one more."""
    if splits == 1:
        return 0, chunks
    if splits > chunks:
        raise ValueError(f"{splits=} must be at most the number of chunks of {ROWS} tokens, {chunks}")
    return lax.div(split * chunks, splits), lax.div((split + 1) * chunks, splits)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(tiles: HopperStateTiles, p: Problem, keep: bool, operands: StateOperands) -> States:
    """`keep` the states between chunks, of all splits; or only go through all but the last."""
    (values, to), *_ = operands.sweeps
    wgs, ring, state_dim, units = tiles.compute_wgs, tiles.stages, to.shape[3], values.shape[2]
    chunks, splits = operands.factors.shape[1], tiles.splits
    rows = p.batch * (splits if keep else splits - 1)
    packs, rest = divmod(units // p.groups, wgs)
    assert not rest, f"compute_wgs={wgs} must divide the {units // p.groups} panels of a group"
    tree = jax.tree.structure(operands)

    def ssd_states(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        end_ref, *between_ref = refs[tree.num_leaves :]
        s = _Scratch(**{"state_slots": None, **scratch})
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        direction, place = lax.div(block, rows * p.groups * packs), lax.rem(block, rows * p.groups * packs)
        row, pack = lax.div(place, p.groups * packs), lax.rem(place, p.groups * packs)
        example, split = (row, 0) if rows == p.batch else (lax.div(row, rows // p.batch), lax.rem(row, rows // p.batch))
        first_chunk, end_chunk = split_chunks(splits, chunks, split)
        count = end_chunk - first_chunk
        group = lax.div(pack, packs)
        first_unit = pack * wgs

        def chunk_of(step):
            step += first_chunk
            return lax.select(direction == FORWARDS, step, chunks - 1 - step)

        @pl.when(warpgroup == wgs)
        def _load():
            plgpu.set_max_registers(tiles.load_registers, action="decrease")
            for way, sweep in enumerate(inputs.sweeps):
                one = functools.partial(load, sweep, inputs.factors, s, chunk_of, example, group, first_unit)

                @pl.when(direction == way)
                def _load_all(one=one):
                    lax.fori_loop(0, count, one, None)

        @pl.when(warpgroup < wgs)
        def _compute():
            plgpu.set_max_registers(tiles.compute_registers, action="increase")
            unit = first_unit + warpgroup
            start = None if inputs.start is None else inputs.start.at[row, direction, unit]
            between = [ref.at[example, :, direction, unit] for ref in between_ref]
            end = compute(start, between, s, chunk_of, count, direction, warpgroup)
            if keep:

                @pl.when(split == splits - 1)
                def _end():
                    end_ref[example, direction, unit] = end

                plgpu.wait_smem_to_gmem(0)
            else:
                end_ref[row, direction, unit] = end

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

    def compute(start, between, s: _Scratch, chunk_of, count, direction, warpgroup):
        factor_name = lax.select(direction == FORWARDS, LEAVING, ENTERING)

        def over_chunks(state_acc):
            if start is not None:
                state_acc[...] = plgpu.load(start, layout=WGMMA, optimized=False)

            def step(i, _):
                slot = lax.rem(i, ring)
                factors, entering_slot = (
                    s.factor_slots.at[slot, warpgroup],
                    s.entering_slots.at[warpgroup, lax.rem(i, 2)],
                )
                plgpu.barrier_wait(s.ready.at[slot])
                values = load_tile(s.value_slots.at[slot, warpgroup])
                factor = plgpu.load(factors.at[factor_name], layout=BY_ROW, optimized=False)
                decay = factors[ENTERING, ROWS - 1]
                entering_slot[...] = (values * by_row(factor)).astype(p.dtype)
                # Not before, so that this chunk was made ready while the last one entered the state.
                state = plgpu.wgmma_accumulator_load(state_acc, wait_n=0)

                @pl.when(i > 0)
                def _free_last():
                    plgpu.barrier_arrive(s.consumed.at[lax.rem(i + ring - 1, ring)])

                    if keep:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                if keep:
                    s.state_slots[warpgroup] = state.astype(p.dtype)
                plgpu.commit_smem()
                for to in between:
                    plgpu.copy_smem_to_gmem(s.state_slots.at[warpgroup], to.at[chunk_of(i)])
                state_acc[...] = state * decay
                plgpu.wgmma(state_acc, entering_slot.T, s.to_slots.at[slot])

            lax.fori_loop(0, count, step, None)
            return state_acc[...]

        return pl.run_scoped(over_chunks, plgpu.WGMMAAccumulatorRef((ROWS, state_dim), jnp.float32))

    scratch = {
        "to_slots": smem_tile(ring, ROWS, state_dim, dtype=p.dtype),
        "value_slots": smem_tile(ring, wgs, *TILE, dtype=p.dtype),
        "factor_slots": plgpu.SMEM((ring, wgs, operands.factors.shape[3], ROWS), jnp.float32),
        **({"state_slots": smem_tile(wgs, ROWS, state_dim, dtype=p.dtype)} if keep else {}),
        "entering_slots": smem_tile(wgs, 2, *TILE, dtype=p.dtype),
        "ready": plgpu.Barrier(num_arrivals=1 + 2 * wgs, num_barriers=ring),
        "consumed": plgpu.Barrier(num_arrivals=wgs, num_barriers=ring),
    }
    state = (len(operands.sweeps), units, ROWS, state_dim)
    end = jax.ShapeDtypeStruct((p.batch if keep else rows, *state), jnp.float32)
    between = jax.ShapeDtypeStruct((p.batch, chunks, *state), p.dtype)
    end, *between = plgpu.kernel(
        ssd_states,
        out_type=(end, between) if keep else (end,),
        grid=(len(operands.sweeps) * rows * p.groups * packs,),
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
