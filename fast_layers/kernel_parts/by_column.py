"""Reductions over the rows of a tile in wgmma's layout: a number for each column, that all threads need.

A column's rows are all warps'. JAX's own reduction meets three times for each, since it shares its memory with others
of the block; here a warpgroup has its own, and meets once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from fast_layers.kernel_parts.inline import THREADS, divided, simulate_by, thread, times

WARPS = 4
_WGMMA = plgpu.Layout.WGMMA
_PART = 8
"""Columns, of which each thread has two, the same in each eight rows."""
_LANES = THREADS // WARPS
_COLUMNS_OF_LANE = 2


def max_by_column(x: Float[Array, "R C"], exchange: Any) -> Float[Array, " C"]:
    """In a kernel, by a warpgroup: each column's maximum, NaN if there is one.

    `exchange`: float32 [4, C] in shared memory. Between two reductions by the same one the warpgroup has to meet.
    """
    return _reduce(x, exchange, _most, lambda x: x.max(axis=0))


def sum_by_column(x: Float[Array, "R C"], exchange: Any) -> Float[Array, " C"]:
    """In a kernel, by a warpgroup: each column's sum, as `max_by_column`."""
    return _reduce(x, exchange, arith.addf, lambda x: x.sum(axis=0))


def _reduce(x: Array, exchange: Any, of_two: Callable[[Any, Any], Any], simulated: Callable[[Array], Array]) -> Array:
    rows, columns = x.shape
    layout = _WGMMA.reduce(0)

    def pairwise(numbers: Any) -> list[Any]:
        return functools.reduce(lambda a, b: [of_two(*both) for both in zip(a, b, strict=True)], numbers)

    def reduce(_, ref, array):
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        two = ir.VectorType.get((_COLUMNS_OF_LANE,), f32)
        warp, lane = divided(thread(), _LANES)
        own = times(divided(lane, _PART // _COLUMNS_OF_LANE)[1], _COLUMNS_OF_LANE)

        def place(of_warp: Any, part: int) -> Any:
            at = arith.addi(arith.addi(times(of_warp, columns), own), utils.c(part * _PART, i32))
            return utils.getelementptr(utils.memref_ptr(ref), [at], f32)

        by_part = np.reshape(array.registers, (rows // 64, columns // _PART, 2))
        for part in range(columns // _PART):
            found = pairwise(map(_numbers, by_part[:, part].flat))
            for distance in (4, 8, 16):  # lanes with the same columns
                found = pairwise([found, [utils.shfl_bfly(number, distance) for number in found]])
            llvm.store(vector.from_elements(two, found), place(warp, part), alignment=8)
        utils.warpgroup_barrier()
        result = FragmentedArray.splat(utils.c(0.0, f32), (columns,), layout.to_mgpu())
        registers = result.registers.reshape(-1)
        for part in range(columns // _PART):
            warps = [llvm.load(two, place(utils.c(i, i32), part), alignment=8) for i in range(WARPS)]
            registers[part] = vector.from_elements(two, pairwise(map(_numbers, warps)))
        result.registers[...] = registers.reshape(result.registers.shape)
        return result

    simulate_by(reduce, lambda _, x: simulated(x))
    returned = plgpu.ShapeDtypeStruct((columns,), x.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA), return_type=returned)(reduce)(exchange, x)


def _numbers(pair: Any) -> list[Any]:
    return [vector.extract(pair, [], [i]) for i in range(_COLUMNS_OF_LANE)]


def _most(a: Any, b: Any) -> Any:
    return llvm.inline_asm(a.type, [a, b], "max.NaN.f32 $0, $1, $2;", "=f,f,f")
