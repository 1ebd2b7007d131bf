"""Small kernels that use what kernels of the package use, each with faults that can be planted by name.

`fault=None` is the healthy kernel. A fault races before it lets a barrier complete twice unobserved, at which the
simulator stops. All take and give bfloat16 or float32 matrices whose sizes are multiples of the tiles named here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.smem_tile import smem_tile

ROWS = 64  # of a warpgroup matmul
TILE = 64  # along the other two axes of a matmul
SLOTS = 2  # of every ring
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # for bfloat16

COMPUTE_WGS = 2
LOADER = COMPUTE_WGS  # the last warpgroup


def smem(*shape: int, dtype=jnp.bfloat16, transforms=SWIZZLED):
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def matmul(a: jax.Array, b: jax.Array, *, fault: str | None = None) -> jax.Array:
    """a @ b for a of [2 * ROWS, K] and b of [K, TILE]: one loader fills a ring, two warpgroups multiply."""
    steps = a.shape[1] // TILE

    def kernel(a_gmem, b_gmem, out_gmem, a_ring, b_ring, out_smem, loaded, consumed):
        wg = lax.axis_index("wg")

        @pl.when(wg == LOADER)
        def _load():
            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, SLOTS)
                if fault != "slot not awaited":

                    @pl.when(step >= SLOTS)
                    def _():
                        plgpu.barrier_wait(consumed.at[slot])

                k = pl.ds(step * TILE, TILE)
                plgpu.copy_gmem_to_smem(a_gmem.at[:, k], a_ring.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(b_gmem.at[k], b_ring.at[slot], loaded.at[slot])

        @pl.when(wg != LOADER)
        def _compute():
            rows = pl.ds(wg * ROWS, ROWS)

            def accumulate(acc):
                @pl.loop(0, steps)
                def _(step):
                    slot = lax.rem(step, SLOTS)
                    if fault != "load awaited late":
                        plgpu.barrier_wait(loaded.at[slot])
                    read = lax.rem(step + 1, SLOTS) if fault == "wrong slot" else slot
                    plgpu.wgmma(acc, a_ring.at[read, rows], b_ring.at[read])
                    if fault == "load awaited late":
                        plgpu.barrier_wait(loaded.at[slot])
                    if fault not in ("slot freed in flight", "accumulator read in flight"):
                        plgpu.wgmma_wait(0)
                    if fault != "slot never freed":
                        plgpu.barrier_arrive(consumed.at[slot])

                in_flight = fault == "accumulator read in flight"
                return plgpu.wgmma_accumulator_load(acc, wait_n=None if in_flight else 0)

            out = pl.run_scoped(accumulate, plgpu.ACC((ROWS, TILE), jnp.float32))
            out_smem[rows] = out
            if fault != "store not committed":
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[rows], out_gmem.at[rows])
            if fault != "store not awaited":
                plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((COMPUTE_WGS * ROWS, TILE), jnp.float32),
        num_threads=COMPUTE_WGS + 1,
        thread_name="wg",
        scratch_types={
            "a_ring": smem(SLOTS, COMPUTE_WGS * ROWS, TILE),
            "b_ring": smem(SLOTS, TILE, TILE),
            "out_smem": smem(COMPUTE_WGS * ROWS, TILE, dtype=jnp.float32, transforms=()),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            "consumed": plgpu.Barrier(num_arrivals=COMPUTE_WGS, num_barriers=SLOTS),
        },
    )(a, b)


def discounted_sum(a: jax.Array, b: jax.Array, *, form: str, fault: str | None = None) -> jax.Array:
    """sum of a[:, k] @ b[k] over tiles k, halving what was summed before each: an accumulator rescaled in place.

    Args:
      form: "stored" keeps one accumulator and stores to it; "carried" carries its value through `run_state`.
        A's tile goes through registers in both.
    """
    steps = a.shape[1] // TILE

    def kernel(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, loaded):
        def fetch(step):
            k = pl.ds(step * TILE, TILE)
            plgpu.copy_gmem_to_smem(a_gmem.at[:, k], a_smem, loaded)
            plgpu.copy_gmem_to_smem(b_gmem.at[k], b_smem, loaded)
            plgpu.barrier_wait(loaded)
            return plgpu.layout_cast(a_smem[...], plgpu.Layout.WGMMA)

        def store_to_accumulator(acc):
            @pl.loop(0, steps)
            def _(step):
                lhs = fetch(step)
                acc[...] = plgpu.wgmma_accumulator_load(acc, wait_n=0) * 0.5
                plgpu.wgmma(acc, lhs, b_smem)
                if fault == "accumulator stored in flight":
                    acc[...] = plgpu.wgmma_accumulator_load(acc, wait_n=None)
                if fault != "slot refilled in flight":
                    plgpu.wgmma_wait(0)
                plgpu.commit_smem()

            return acc[...]

        def carry(step, total):
            lhs = fetch(step)
            total = pl.run_state(lambda acc: plgpu.wgmma(acc, lhs, b_smem))(plgpu.ACC.init(total * 0.5))
            plgpu.commit_smem()
            return total

        if form == "stored":
            out = pl.run_scoped(store_to_accumulator, plgpu.ACC((ROWS, TILE), jnp.float32))
        else:
            zero = plgpu.layout_cast(jnp.zeros((ROWS, TILE), jnp.float32), plgpu.Layout.WGMMA)
            out = lax.fori_loop(0, steps, carry, zero)
        out_smem[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((ROWS, TILE), jnp.float32),
        scratch_types={
            "a_smem": smem(ROWS, TILE),
            "b_smem": smem(TILE, TILE),
            "out_smem": smem(ROWS, TILE, dtype=jnp.float32, transforms=()),
            "loaded": plgpu.Barrier(num_arrivals=2),
        },
    )(a, b)


def add_rows(x: jax.Array, *, fault: str | None = None) -> jax.Array:
    """Sum of the even matrices of x [N, 8, 128], each added to the output in global memory by a warpgroup of its own.

    The first warpgroup writes zeros before; a predicate leaves the odd matrices out.
    """
    count = x.shape[0]

    def kernel(x_gmem, out_gmem, x_smem, zero_smem, loaded, zeroed):
        wg = lax.axis_index("wg")
        plgpu.copy_gmem_to_smem(x_gmem.at[wg], x_smem.at[wg], loaded.at[wg])

        @pl.when(wg == 0)
        def _():
            zero_smem[...] = jnp.zeros_like(zero_smem)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(zero_smem, out_gmem)
            plgpu.wait_smem_to_gmem(0)

        if fault != "zeros not awaited":
            plgpu.barrier_arrive(zeroed)
            plgpu.barrier_wait(zeroed)
        plgpu.barrier_wait(loaded.at[wg])
        plgpu.copy_smem_to_gmem(
            x_smem.at[wg],
            out_gmem,
            predicate=lax.rem(wg, 2) == 0,
            reduction_op=None if fault == "plain store" else "add",
        )
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        num_threads=count,
        thread_name="wg",
        scratch_types={
            "x_smem": smem(*x.shape, dtype=x.dtype, transforms=()),
            "zero_smem": smem(*x.shape[1:], dtype=x.dtype, transforms=()),
            "loaded": plgpu.Barrier(num_barriers=count),
            "zeroed": plgpu.Barrier(num_arrivals=count),
        },
    )(x)


def running_sum(x: jax.Array, *, decrement: bool = False, fault: str | None = None) -> jax.Array:
    """Sum of the matrices of x [N, 8, 128] up to each, by a block that adds one to what the block before it has left.

    `decrement`: each block uses up the semaphore for which it waits.
    """

    def kernel(x_gmem, out_gmem, both, result, loaded):
        block, wg = lax.axis_index("block"), lax.axis_index("wg")
        done = pl.get_global(plgpu.SemaphoreType.REGULAR((x.shape[0],)))

        @pl.when(wg == 0)
        def _load():
            plgpu.copy_gmem_to_smem(x_gmem.at[block], both.at[0], loaded)

            @pl.when(block == 0)
            def _nothing_before():
                plgpu.copy_gmem_to_smem(x_gmem.at[block], both.at[1], loaded)

            @pl.when(block > 0)
            def _before():
                if fault != "not awaited":
                    of = block if fault == "of a later block" else block - 1
                    plgpu.semaphore_wait(done.at[of], decrement=decrement)
                plgpu.copy_gmem_to_smem(out_gmem.at[block - 1], both.at[1], loaded)

        @pl.when(wg == 1)
        def _add():
            plgpu.barrier_wait(loaded)
            result[...] = both[0] + jnp.where(block > 0, both[1], 0.0)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, out_gmem.at[block])
            plgpu.wait_smem_to_gmem(0, wait_read_only=fault == "told of in flight")
            pl.semaphore_signal(done.at[block])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types={
            "both": smem(2, *x.shape[1:], dtype=x.dtype, transforms=()),
            "result": smem(*x.shape[1:], dtype=x.dtype, transforms=()),
            "loaded": plgpu.Barrier(num_arrivals=2),
        },
    )(x)


def copy_rows(x: jax.Array, *, plain: bool) -> jax.Array:
    """x [N, columns], row by row through shared memory; `plain`: in by copies without a tensor map."""
    mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if plain else plgpu.OOBFillMode.ZEROS

    def kernel(x_gmem, out_gmem, x_smem, loaded):
        for row in range(x.shape[0]):
            plgpu.copy_gmem_to_smem(x_gmem.at[row], x_smem.at[row], loaded, oob_mode=mode)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(x_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types={
            "x_smem": smem(*x.shape, dtype=x.dtype, transforms=()),
            "loaded": plgpu.Barrier(num_arrivals=x.shape[0]),
        },
    )(x)


def copy_part(x: jax.Array, *, rows: int, columns: int) -> jax.Array:
    """The first of x [16, 128], through swizzled tiles of 64 columns in shared memory."""

    def kernel(x_gmem, out_gmem, x_smem, loaded):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(x_smem.at[pl.ds(0, rows), pl.ds(0, columns)], out_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        scratch_types={"x_smem": smem_tile(*x.shape, dtype=x.dtype), "loaded": plgpu.Barrier()},
    )(x)


def store_wide(x: jax.Array, columns: int, *, rows: int) -> jax.Array:
    """The first columns of x [4, 128], by copies of so many whole rows, of which the last columns find no place."""

    def kernel(x_gmem, out_gmem, x_smem, loaded):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
        plgpu.barrier_wait(loaded)
        start = lax.axis_index("block") * 0
        for row in range(0, x.shape[0], rows):
            to = out_gmem.at[pl.ds(row, rows), pl.ds(start, x.shape[1])]
            plgpu.copy_smem_to_gmem(x_smem.at[pl.ds(row, rows)], to)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype),
        grid=(1,),
        grid_names=("block",),
        scratch_types={"x_smem": smem(*x.shape, dtype=x.dtype, transforms=()), "loaded": plgpu.Barrier()},
    )(x)


def multicast(x: jax.Array, *, fault: str | None = None) -> jax.Array:
    """[x, 2 x] of a cluster of two blocks, which both receive every tile of x [steps * 16, 128] by one copy."""
    rows = 16
    steps = x.shape[0] // rows

    def kernel(x_gmem, out_gmem, ring, out_smem, loaded, consumed):
        block, wg = lax.axis_index("block"), lax.axis_index("wg")

        @pl.when(wg == 0)
        def _load():
            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, SLOTS)

                @pl.when(step >= SLOTS)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(
                    x_gmem.at[pl.ds(step * rows, rows)],
                    ring.at[slot],
                    loaded.at[slot],
                    collective_axes="block",
                )

            # The other block may still write into this one's memory and barriers: it ends only when both have.
            @pl.loop(max(0, steps - SLOTS), steps)
            def _(step):
                plgpu.barrier_wait(consumed.at[lax.rem(step, SLOTS)])

        @pl.when(wg == 1)
        def _compute():
            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, SLOTS)
                plgpu.barrier_wait(loaded.at[slot])
                tile = ring[slot]
                plgpu.commit_smem()
                plgpu.barrier_arrive(consumed.at[slot])
                plgpu.wait_smem_to_gmem(0)
                out_smem[...] = tile * (block + 1).astype(x.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[block, pl.ds(step * rows, rows)])

            plgpu.wait_smem_to_gmem(0)

    consumed = (
        plgpu.Barrier(num_barriers=SLOTS)
        if fault == "only own block awaited"
        else plgpu.ClusterBarrier(collective_axes=("block",), num_barriers=SLOTS)
    )
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((2, *x.shape), x.dtype),
        cluster=(2,),
        cluster_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types={
            "ring": smem(SLOTS, rows, x.shape[1], dtype=x.dtype, transforms=()),
            "out_smem": smem(rows, x.shape[1], dtype=x.dtype, transforms=()),
            "loaded": plgpu.Barrier(num_barriers=SLOTS),
            "consumed": consumed,
        },
    )(x)


def two_block_matmul(a: jax.Array, b: jax.Array, *, fault: str | None = None) -> jax.Array:
    """a @ b on Blackwell for a [256, K] and b [K, 128]; each of two blocks holds half of A's rows and B's columns."""
    rows, columns = 128, 128
    steps = a.shape[1] // TILE

    def kernel(a_gmem, b_gmem, out_gmem, a_ring, b_ring, acc, out_smem, loaded, consumed, done):
        block, wg = lax.axis_index("block"), lax.axis_index("wg")

        @pl.when(wg == 0)
        def _issue():
            @plgpu.warp_map
            def _per_warp(warp):
                @pl.when(warp == 0)
                def _load():
                    @pl.loop(0, steps)
                    def _(step):
                        slot = lax.rem(step, SLOTS)
                        if fault != "slot not awaited":

                            @pl.when(step >= SLOTS)
                            def _():
                                plgpu.barrier_wait(consumed.at[slot])

                        k = pl.ds(step * TILE, TILE)
                        for source, ring, axis in ((a_gmem.at[:, k], a_ring, 0), (b_gmem.at[k], b_ring, 1)):
                            plgpu.copy_gmem_to_smem(
                                source,
                                ring.at[slot],
                                loaded.at[slot],
                                collective_axes="block",
                                leader_tracked=plgpu.CopyPartition.PARTITIONED(axis),
                            )

                @pl.when(jnp.logical_and(warp == 1, block == 0))
                def _multiply():
                    @pl.loop(0, steps)
                    def _(step):
                        slot = lax.rem(step, SLOTS)
                        if fault != "load awaited late":
                            plgpu.barrier_wait(loaded.at[slot])
                        plgpu.tcgen05_mma(
                            acc,
                            a_ring.at[slot],
                            b_ring.at[slot],
                            consumed.at[slot],
                            accumulate=step > 0,
                            collective_axis="block",
                        )
                        if fault == "load awaited late":
                            plgpu.barrier_wait(loaded.at[slot])

                    plgpu.tcgen05_commit_arrive(done, collective_axis="block")

        @pl.when(wg == 1)
        def _store():
            if fault != "matmul not awaited":
                plgpu.barrier_wait(done)
            out_smem[...] = plgpu.async_load_tmem(acc).astype(out_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(block * rows, rows)])
            plgpu.wait_smem_to_gmem(0)
            plgpu.wait_load_tmem()

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((2 * rows, columns), jnp.bfloat16),
        cluster=(2,),
        cluster_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types={
            "a_ring": smem(SLOTS, rows, TILE),
            "b_ring": smem(SLOTS, TILE, columns // 2),
            "acc": plgpu.TMEM((rows, columns), jnp.float32, collective=True),
            "out_smem": smem(rows, columns),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            "consumed": plgpu.Barrier(num_barriers=SLOTS, orders_tensor_core=True),
            "done": plgpu.Barrier(orders_tensor_core=True),
        },
    )(a, b)
