"""Tiles as the threads of a warpgroup hold them, to memory and back, without an exchange between threads.

In wgmma's layout a thread has two neighbouring columns in every eight of a row, and the same eight rows further down.
JAX's own stores exchange or copy registers, so that what a thread writes lies together; here it writes what it has.

Fragments are a tile in the order [16-column part, half, warp, row, column pair, 8-column part, 2], in which a thread
has 16 bytes of a row at a time, and a warp 512 bytes that lie together.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxtyping import Array, Float

from fast_layers.kernel_parts.inline import THREADS, divided, simulate_by, thread, times
from fast_layers.kernel_parts.smem_tile import smem_tile

ROWS = 64
_FACTOR_COLUMNS = 64
_WIDTH = 256
_WGMMA = plgpu.Layout.WGMMA
_BY_ROW = _WGMMA.reduce(1)


def fragments_shape(columns: int) -> tuple[int, int]:
    """Of a tile of 64 rows and so many columns, a multiple of 16, in memory."""
    if columns % 16:
        raise ValueError(f"{columns=} must be a multiple of 16, of which a thread holds 16 bytes in a row")
    return ROWS * columns // _WIDTH, _WIDTH


def store_fragments(slot: Any, tile: Float[Array, "64 C"], units: Float[Array, " 64"] | None) -> None:
    """In a kernel, by a warpgroup: float32 to shared memory, or with `units` int32, the nearest to tile * units."""

    def store(_, ref, array, factors=None):
        place = _place(ref)
        of_half = (None, None) if factors is None else [vector.extract(x, [], [0]) for x in factors.registers.flat]
        for at, (two_pairs, half) in enumerate(_sixteen_bytes(array.registers)):
            numbers = [vector.extract(pair, [], [i]) for pair in two_pairs for i in range(2)]
            if factors is not None:
                numbers = [_nearest(arith.mulf(x, of_half[half])) for x in numbers]
            four = vector.from_elements(ir.VectorType.get((4,), numbers[0].type), numbers)
            llvm.store(four, place(at), alignment=16)

    def simulated(tile, units=None):
        return to_fragments(tile if units is None else jnp.rint(tile * units[:, None]).astype(jnp.int32))

    simulate_by(store, simulated)
    given = [tile] if units is None else [tile, units]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(_WGMMA, _BY_ROW)[: len(given)]))(store)(slot, *given)


def load_fragments(ref: Any, columns: int) -> Array:
    """In a kernel, by a warpgroup: [64, columns] in wgmma's layout, of int32 or float32 in the GPU's memory."""
    dtype, shape = jnp.dtype(ref.dtype), (ROWS, columns)

    def load(_, ref):
        element = utils.dtype_to_ir_type(dtype)
        two, four = (ir.VectorType.get((n,), element) for n in (2, 4))
        signed = True if dtype == jnp.int32 else None
        array = FragmentedArray.splat(utils.c(0, element), shape, _WGMMA.to_mgpu(), is_signed=signed)
        place = _place(ref)
        for at, (two_pairs, _) in enumerate(_sixteen_bytes(array.registers)):
            loaded = llvm.load(four, place(at), alignment=16)
            for i in range(2):
                numbers = [vector.extract(loaded, [], [2 * i + j]) for j in range(2)]
                two_pairs[i] = vector.from_elements(two, numbers)
        return array

    simulate_by(load, from_fragments)
    returned = plgpu.ShapeDtypeStruct(shape, dtype, layout=_WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=returned)(load)(ref)


def to_fragments(tile: Array) -> Array:
    """What `store_fragments` leaves of a tile."""
    parts = tile.reshape(4, 2, 8, -1, 2, 4, 2)  # warp, half, row; 16-column part, 8-column part, column pair, 2
    return parts.transpose(3, 1, 0, 2, 5, 4, 6).reshape(fragments_shape(tile.shape[1]))


def from_fragments(stored: Array) -> Array:
    """The inverse."""
    parts = stored.reshape(-1, 2, 4, 8, 4, 2, 2)
    return parts.transpose(2, 1, 3, 0, 5, 4, 6).reshape(ROWS, -1)


def store_turned(slot: Any, tile: Float[Array, "R C"]) -> None:
    """In a kernel, by a warpgroup: a tile to [C, R] in shared memory, in plain rows, any of which may then be copied.

    Number by number, for small tiles.
    """

    def store(_, ref, array):
        array.foreach(lambda x, at: memref.store(x, ref, [at[1], at[0]]))

    simulate_by(store, lambda x: x.T)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA))(store)(slot, tile)


def store_factor(tile: Any, x: Array) -> None:
    """In a kernel, by a warpgroup: [64, 64] of 16 bits to a swizzled tile, from the registers in which a product that
    has x as its first factor wants it."""

    def store(_, ref, array):
        i32 = ir.IntegerType.get_signless(32)
        warp, lane = divided(thread(), 32)
        matrix, row = divided(lane, 8)  # each thread gives the address of a row of one of four matrices of 8 x 8
        chunk, half = divided(matrix, 2)
        at_row = arith.addi(times(arith.addi(times(warp, 2), half), 8 * 128), times(row, 128))
        place = arith.addi(at_row, times(arith.xori(row, chunk), 16))
        # The swizzle of an address, which wants no register of its own for each of the four.
        start = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(ref)), place)
        for at, registers in enumerate(array.registers.reshape(-1, 4)):
            operands = [arith.xori(start, utils.c(32 * at, i32)), *(utils.bitcast(two, i32) for two in registers)]
            ptx = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, ptx, "r,r,r,r,r,~{memory}", has_side_effects=True)

    simulate_by(store, lambda x: x)
    transforms = smem_tile(ROWS, _FACTOR_COLUMNS, dtype=x.dtype).transforms
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), _WGMMA))(store)(tile, x)


def _sixteen_bytes(registers: Any) -> list[tuple[Any, int]]:
    """The two registers of each 16 bytes that a thread has of a row, as a view, and in which half of the rows."""
    pairs = np.reshape(registers, (-1, 2, 2), copy=False)  # 16-column part, 8-column part, half of the rows
    return [(part[:, half], half) for part in pairs for half in range(2)]


def _place(ref: Any) -> Any:
    """Where in memory this thread has its `at`-th 16 bytes."""
    i32 = ir.IntegerType.get_signless(32)
    start = utils.getelementptr(utils.memref_ptr(ref), [times(thread(), 4)], i32)
    return lambda at: utils.getelementptr(start, [at * 4 * THREADS], i32)


def _nearest(x: Any) -> Any:
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [x], "cvt.rni.s32.f32 $0, $1;", "=r,f")
