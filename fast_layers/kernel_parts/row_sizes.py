"""The largest magnitude in each row of a swizzled tile of 16-bit numbers, by its bits, a row for each thread.

As integers, the bits of numbers without their signs have the numbers' order, and inf and NaN come last.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from fast_layers.kernel_parts.inline import THREADS, divided, simulate_by, thread, times
from fast_layers.kernel_parts.smem_tile import smem_tile

ROWS = THREADS
COLUMNS = 64
_ROW_BYTES, _CHUNK_BYTES = 128, 16
_CHUNKS = _ROW_BYTES // _CHUNK_BYTES
_MAGNITUDE = 0x7FFF
_OF_CHUNK = """{
    .reg .b32 a, b, c, d;
    ld.shared.v4.b32 {a, b, c, d}, [$2];
    and.b32 a, a, 0x7FFF7FFF; and.b32 b, b, 0x7FFF7FFF; and.b32 c, c, 0x7FFF7FFF; and.b32 d, d, 0x7FFF7FFF;
    max.u16x2 a, a, b; max.u16x2 c, c, d; max.u16x2 a, a, c; max.u16x2 $0, $1, a;
}"""
"""One piece, so that no compiler has all of a row in registers at once, of which the load warpgroup has few."""


def row_sizes(tile: Any) -> Float[Array, " 128"]:
    """In a kernel, by a warpgroup: of [128, 64] in shared memory; inf where a number is NaN or inf."""
    dtype, layout = jnp.dtype(tile.dtype), plgpu.Layout.WG_STRIDED((ROWS,), 1)
    infinite = int(np.array(np.inf, dtype).view(np.uint16))

    def measure(_, ref):
        i32, i16 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(16)
        row = thread()
        # Each of eight threads begins with another chunk, so that all banks answer. Their order is of no matter.
        first = arith.addi(times(row, _ROW_BYTES), times(divided(row, _CHUNKS)[1], _CHUNK_BYTES))
        start = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(ref)), first)
        largest = utils.c(0, i32)
        for chunk in range(_CHUNKS):
            operands = [largest, arith.xori(start, utils.c(chunk * _CHUNK_BYTES, i32))]
            largest = llvm.inline_asm(i32, operands, _OF_CHUNK, "=r,r,r,~{memory}", has_side_effects=True)
        two = arith.shrui(largest, utils.c(16, i32)), arith.andi(largest, utils.c(0xFFFF, i32))
        bits = arith.minui(arith.maxui(*two), utils.c(infinite, i32))
        size = arith.bitcast(utils.dtype_to_ir_type(dtype), arith.trunci(i16, bits))
        array = FragmentedArray.splat(size, (ROWS,), layout.to_mgpu())
        array.registers[0] = vector.from_elements(ir.VectorType.get((1,), size.type), [size])
        return array

    simulate_by(measure, sizes_of)
    transforms = smem_tile(ROWS, COLUMNS, dtype=dtype).transforms
    returned = plgpu.ShapeDtypeStruct((ROWS,), dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),), return_type=returned)(measure)(tile)


def sizes_of(x: Float[Array, "*R C"]) -> Float[Array, "*R"]:
    """What `row_sizes` finds."""
    bits = lax.bitcast_convert_type(x, jnp.uint16) & _MAGNITUDE
    of_row = lax.bitcast_convert_type(bits.max(-1), x.dtype)
    return jnp.where(of_row < jnp.inf, of_row, jnp.inf)
