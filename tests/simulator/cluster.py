"""Kernels of one warpgroup in a block, which read other blocks' shared memory, or reduce a tile by columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts import by_column, cluster_smem

BLOCKS, COLUMNS = 4, 256


def added(x: jax.Array, *, fault: str | None = None) -> jax.Array:
    """Of float32 [2, BLOCKS, COLUMNS]: in each row the sum of all rows, times their first numbers."""

    def kernel(from_ref, to_ref, slot, ready, met):
        at = lax.axis_index("block"), lax.axis_index("rank")
        plgpu.copy_gmem_to_smem(from_ref.at[at], slot.at[0], ready)
        plgpu.barrier_wait(ready)
        slot[1] = plgpu.load(slot.at[0], layout=cluster_smem.layout(COLUMNS), optimized=False)
        plgpu.commit_smem()
        cluster_smem.release()
        plgpu.barrier_arrive(met)
        if fault != "not awaited":
            plgpu.barrier_wait(met)
        cluster_smem.acquire()
        own = slot.at[1]
        rows = [cluster_smem.row_of_block(own, rank) for rank in range(BLOCKS)]
        firsts = [cluster_smem.number_of_block(own.at[pl.ds(0, 1)], rank) for rank in range(BLOCKS)]
        to_ref.at[at][...] = sum(
            (row * lax.broadcast_in_dim(first, row.shape, []) for row, first in zip(rows, firsts, strict=True)),
            start=jnp.zeros_like(rows[0]),
        )
        plgpu.commit_smem()  # for its barrier: other warps may still read
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("block",),
        cluster=(BLOCKS,),
        cluster_names=("rank",),
        scratch_types={
            "slot": plgpu.SMEM((2, COLUMNS), jnp.float32),
            "ready": plgpu.Barrier(),
            "met": plgpu.ClusterBarrier(collective_axes=("rank",)),
        },
    )(x)


def reduced(x: jax.Array) -> jax.Array:
    """Of float32 [64 n, C]: [2, C], each column's maximum, and its sum."""

    def kernel(from_ref, to_ref, exchange, slot):
        tile = plgpu.load(from_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        slot[0] = by_column.max_by_column(tile, exchange)
        plgpu.commit_smem()
        slot[1] = by_column.sum_by_column(tile, exchange)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, to_ref)
        plgpu.wait_smem_to_gmem(0)

    columns = x.shape[1]
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((2, columns), x.dtype),
        scratch_types={
            "exchange": plgpu.SMEM((by_column.WARPS, columns), jnp.float32),
            "slot": plgpu.SMEM((2, columns), jnp.float32),
        },
    )(x)
