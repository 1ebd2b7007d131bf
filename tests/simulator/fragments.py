"""Kernels of one warpgroup that store and load a tile as its threads hold it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.fragments import (
    ROWS,
    fragments_shape,
    load_factor,
    load_fragments,
    load_turned_factor,
    store_factor,
    store_fragments,
    store_turned,
)
from fast_layers.kernel_parts.smem_tile import smem_tile

WGMMA = plgpu.Layout.WGMMA


def stored(x: jax.Array, units: jax.Array | None = None, *, fault: str | None = None) -> jax.Array:
    """Of float32 [64, C]: by `store_fragments`, and TMA."""

    def kernel(*refs, slot):
        *inputs, to = refs
        tile = plgpu.load(inputs[0], layout=WGMMA, optimized=False)
        of_rows = None if units is None else plgpu.load(inputs[1], layout=WGMMA.reduce(1), optimized=False)
        store_fragments(slot, tile, of_rows)
        if fault != "not committed":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, to)
        plgpu.wait_smem_to_gmem(0)

    dtype, shape = jnp.float32 if units is None else jnp.int32, fragments_shape(x.shape[1])
    return _of_one_warpgroup(kernel, jax.ShapeDtypeStruct(shape, dtype), slot=plgpu.SMEM(shape, dtype))(
        *([x] if units is None else [x, units])
    )


def loaded(x: jax.Array) -> jax.Array:
    """The inverse, by `load_fragments`, of int32 or float32; as float32."""

    def kernel(x, to):
        to[...] = load_fragments(x, columns).astype(jnp.float32)

    columns = x.size // ROWS
    return _of_one_warpgroup(kernel, jax.ShapeDtypeStruct((ROWS, columns), jnp.float32))(x)


def factor(x: jax.Array, *, fault: str | None = None) -> jax.Array:
    """16-bit x [64, 64], by `store_factor` and TMA."""

    def kernel(x, to, slot):
        store_factor(slot, plgpu.load(x, layout=WGMMA, optimized=False))
        if fault != "not committed":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, to)
        plgpu.wait_smem_to_gmem(0)

    return _of_one_warpgroup(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), slot=smem_tile(ROWS, ROWS, dtype=x.dtype))(
        x
    )


def loaded_factor(x: jax.Array, start: int | None = None, *, beside: int = 0, swizzled: int | None = None) -> jax.Array:
    """16-bit x [R, C] less the last columns `beside` others, or with `start` as many as 64 of these columns as rows,
    through shared memory and by `load_factor` or `load_turned_factor`; there `swizzled` by so many columns."""
    columns = x.shape[1] - beside

    def kernel(x, to, slot, ready):
        plgpu.copy_gmem_to_smem(x, slot, ready)
        plgpu.barrier_wait(ready)
        to[...] = load_factor(slot, columns) if start is None else load_turned_factor(slot, start, columns, swizzled)

    shape = (x.shape[0], columns) if start is None else (ROWS, x.shape[0])
    slot = smem_tile(*x.shape, dtype=x.dtype, columns=swizzled) if swizzled else plgpu.SMEM(x.shape, x.dtype)
    return _of_one_warpgroup(kernel, jax.ShapeDtypeStruct(shape, x.dtype), slot=slot, ready=plgpu.Barrier())(x)


def turned(x: jax.Array, *, fault: str | None = None) -> jax.Array:
    """x [R, C] by `store_turned`, and TMA of all but the last row of the result."""

    def kernel(x, to, slot):
        store_turned(slot, plgpu.load(x, layout=WGMMA, optimized=False))
        if fault != "not committed":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot.at[pl.ds(0, columns - 1)], to)
        plgpu.wait_smem_to_gmem(0)

    rows, columns = x.shape
    result = jax.ShapeDtypeStruct((columns - 1, rows), x.dtype)
    return _of_one_warpgroup(kernel, result, slot=plgpu.SMEM((columns, rows), x.dtype))(x)


def _of_one_warpgroup(kernel, result, **scratch):
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    return plgpu.kernel(kernel, out_type=result, scratch_types=scratch, compiler_params=params)
