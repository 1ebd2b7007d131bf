"""Matmuls of few rows for Hopper (sm_90a): a decoding step's products, whose time is that of loading the weights.

Axis letters: R rows, C columns, K what is contracted.

wgmma's own 64 rows are the weights' columns, and the tokens stand beside one another in eights: the product is
computed turned, (x w)^T, so that nothing is loaded or multiplied for tokens that are not there.

    load warpgroup                        each compute warpgroup, on its 64 of a tile's columns
    --------------                        ------------------------------------------------------------------
    x(k), w(k) -> ready(k)                products += w(k)^T x(k)^T    needs ready(k), frees consumed(k) a step later
                  waits consumed(k)       the products leave by TMA, in float32, under the next tile's steps

Blocks are persistent, as is their ring of operands. K is split over so many blocks that all SMs load until the end
(`splits`); XLA adds the parts up, does what the epilogue would have done, and turns the result.
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
from fast_layers.ops.mlp.config import (
    COMPUTE_REGISTERS,
    COMPUTE_WGS,
    DEPTH_TILE,
    HOPPER_SMS,
    LOAD_REGISTERS,
    WEIGHT_COLUMNS,
    HopperFewRowsTiles,
)
from fast_layers.ops.mlp.matmul import Matmul, Operands, Results, finish, fit
from fast_layers.ops.mlp.ring import freed_slot

BLOCK_COLUMNS = COMPUTE_WGS * WEIGHT_COLUMNS


def multiply(m: Matmul, operands: Operands, tiles: HopperFewRowsTiles) -> Results:
    """The parts are added up in the same order in every run."""
    x = fit(operands.a[0], tiles.rows, DEPTH_TILE)
    weights = tuple(fit(w, DEPTH_TILE, BLOCK_COLUMNS) for w in operands.b)
    summed = [parts.sum(0)[: m.columns, : m.rows] for parts in _launch(tiles, m.columns, x, weights)]
    return finish(m, operands, summed, turned=True)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(
    tiles: HopperFewRowsTiles, all_columns: int, x: Float[Array, "R K"], weights: tuple[Float[Array, "K C"], ...]
) -> list[Float[Array, "S C R"]]:
    """Of each product all parts, turned."""
    products, stages, rows = len(weights), tiles.stages, tiles.rows
    per_split = -(-all_columns // BLOCK_COLUMNS)
    total = tiles.splits * per_split
    blocks = min(HOPPER_SMS, total)
    depth_steps = -(-x.shape[1] // DEPTH_TILE)
    # What the last split has beyond the depth's end is loaded as zeros.
    steps = -(-depth_steps // tiles.splits)

    def few_rows(x_ref, *refs, **scratch):
        weight_refs, part_refs = refs[:products], refs[products:]
        s = _Scratch(**scratch)
        first, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        turns = lax.div(total - 1 - first, blocks) + 1

        def place(turn) -> _Place:
            index = turn * blocks + first
            part = lax.div(index, per_split)
            return _Place((index - part * per_split) * BLOCK_COLUMNS, part)

        @pl.when(warpgroup == COMPUTE_WGS)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            lax.fori_loop(0, turns, lambda turn, _: load(x_ref, weight_refs, s, place(turn), turn), None)

        @pl.when(warpgroup < COMPUTE_WGS)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            lax.fori_loop(0, turns, lambda turn, _: compute(s, part_refs, warpgroup, place(turn), turn), None)
            plgpu.wait_smem_to_gmem(0)

    def load(x_ref, weight_refs, s: _Scratch, at: _Place, turn):
        def copy_step(i, _):
            slot = freed_slot(s.consumed, turn * steps + i, stages)
            depth = pl.ds((at.part * steps + i) * DEPTH_TILE, DEPTH_TILE)
            for j, ref in enumerate(weight_refs):
                window = ref.at[depth, pl.ds(at.column, BLOCK_COLUMNS)]
                plgpu.copy_gmem_to_smem(window, s.w_slots.at[slot, j], s.ready.at[slot])
            plgpu.copy_gmem_to_smem(x_ref.at[:, depth], s.x_slots.at[slot], s.ready.at[slot])

        lax.fori_loop(0, steps, copy_step, None)

    def compute(s: _Scratch, part_refs, warpgroup, at: _Place, turn):
        own = pl.ds(warpgroup * WEIGHT_COLUMNS, WEIGHT_COLUMNS)  # in the block's tile

        def over_depth(*accumulators):
            def multiply_step(i):
                slot = lax.rem(turn * steps + i, stages)
                plgpu.barrier_wait(s.ready.at[slot])
                for j, acc in enumerate(accumulators):
                    plgpu.wgmma(acc, s.w_slots.at[slot, j, :, own].T, s.x_slots.at[slot].T)

            def free(i):
                plgpu.barrier_arrive(s.consumed.at[lax.rem(turn * steps + i, stages)])

            def step(i, _):
                multiply_step(i)
                plgpu.wgmma_wait(products)  # the step before is done, this one goes on
                free(i - 1)

            multiply_step(jnp.int32(0))
            lax.fori_loop(1, steps, step, None)
            plgpu.wgmma_wait(0)
            free(steps - 1)
            return [plgpu.wgmma_accumulator_load(acc, wait_n=None) for acc in accumulators]

        found = pl.run_scoped(over_depth, *[plgpu.WGMMAAccumulatorRef((WEIGHT_COLUMNS, rows), jnp.float32)] * products)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for j, product in enumerate(found):
            s.out_slots[warpgroup * products + j] = product
        plgpu.commit_smem()
        window = pl.ds(at.column + warpgroup * WEIGHT_COLUMNS, WEIGHT_COLUMNS)
        for j, ref in enumerate(part_refs):
            plgpu.copy_smem_to_gmem(s.out_slots.at[warpgroup * products + j], ref.at[at.part, window])

    part = jax.ShapeDtypeStruct((tiles.splits, per_split * BLOCK_COLUMNS, rows), jnp.float32)
    return plgpu.kernel(
        few_rows,
        out_type=[part] * products,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=COMPUTE_WGS + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_slots": smem_tile(stages, rows, DEPTH_TILE, dtype=x.dtype),
            "w_slots": smem_tile(stages, products, DEPTH_TILE, BLOCK_COLUMNS, dtype=x.dtype),
            "out_slots": smem_tile(COMPUTE_WGS * products, WEIGHT_COLUMNS, rows, dtype=jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=1 + products, num_barriers=stages),
            "consumed": plgpu.Barrier(num_arrivals=COMPUTE_WGS, num_barriers=stages),
        },
    )(x, *weights)


class _Place(NamedTuple):
    """A block's tile, by its first column, and which part of the depth."""

    column: Any
    part: Any


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    x_slots: Any
    w_slots: Any
    out_slots: Any
    ready: Any
    consumed: Any
