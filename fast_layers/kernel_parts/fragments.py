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


def load_factor(tile: Any, columns: int) -> Array:
    """In a kernel, by a warpgroup: the first columns of a plain tile of 16 bits in shared memory, as a product's first
    factor.

    Rows in multiples of 64, columns of 16; the tile's of 8, an odd number of which lets eight rows have banks of their
    own.
    """
    rows, pitch = tile.shape[0], 2 * tile.shape[1]

    def matrices(warp, row, chunk, half):
        own = arith.addi(arith.addi(times(warp, 16), times(half, 8)), row)
        place = arith.addi(times(own, pitch), times(chunk, 16))
        return [
            arith.addi(place, utils.c(pitch * first + 2 * column, place.type))
            for first in range(0, rows, ROWS)
            for column in range(0, columns, 16)
        ]

    return _load_factor(tile, (), (rows, columns), matrices, "", lambda x: x[:, :columns])


def load_turned_factor(tile: Any, start: int, columns: int, swizzled: int | None) -> Array:
    """As `load_factor` [64, rows of the tile]: columns `start` to `start` + 64, for those that are not there others.

    Rows and columns in multiples of 16, of a plain tile as `load_factor` has it, or of one of as many columns that is
    `swizzled` by so many, 32 or 64.
    """
    rows, pitch = tile.shape[0], 2 * tile.shape[1]
    transforms = () if swizzled is None else smem_tile(*tile.shape, dtype=tile.dtype, columns=swizzled).transforms

    def matrices(warp, row, chunk, half):
        part = arith.minui(arith.addi(warp, utils.c(start // 16, warp.type)), utils.c(columns // 16 - 1, warp.type))
        if swizzled is not None:
            # Eight rows of a tile lie together, and each, or each two, have their 16 bytes in an order of their own.
            beside, within = divided(part, swizzled // 16)
            sixteen = arith.xori(arith.addi(times(within, 2), half), divided(row, ROWS // swizzled)[0])
            place = arith.addi(times(chunk, 8 * pitch), times(beside, 8 * 2 * swizzled))
            place = arith.addi(place, arith.addi(times(row, 2 * swizzled), times(sixteen, 16)))
        else:
            place = arith.addi(times(arith.addi(times(chunk, 8), row), pitch), times(part, 32))
            place = arith.addi(place, times(half, 16))
        return [arith.addi(place, utils.c(pitch * first, place.type)) for first in range(0, rows, 16)]

    def simulated(x):
        column = np.minimum(start + np.arange(0, ROWS, 16), columns - 16)[:, None] + np.arange(16)
        return x[:, column.reshape(-1)].T

    return _load_factor(tile, transforms, (ROWS, rows), matrices, ".trans", simulated)


def _load_factor(
    tile: Any, transforms: Any, shape: tuple[int, ...], matrices: Any, turned: str, simulated: Any
) -> Array:
    """`matrices(warp, row, chunk, half)`: for each sixteen columns of `shape`, by its 64 rows, where a row of the four
    matrices of 8 x 8 begins, of which each thread gives one."""
    dtype = jnp.dtype(tile.dtype)

    def load(_, ref):
        i32 = ir.IntegerType.get_signless(32)
        two = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        array = FragmentedArray.splat(utils.c(0.0, two.element_type), shape, _WGMMA.to_mgpu())
        warp, lane = divided(thread(), 32)
        matrix, row = divided(lane, 8)
        begin = llvm.ptrtoint(i32, utils.memref_ptr(ref))
        four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        ptx = f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        registers = np.reshape(array.registers, (-1, 4), copy=False)
        for of_sixteen, place in zip(registers, matrices(warp, row, *divided(matrix, 2)), strict=True):
            operands = [arith.addi(begin, place)]
            loaded = llvm.inline_asm(four, operands, ptx, "=r,=r,=r,=r,r,~{memory}", has_side_effects=True)
            of_sixteen[:] = [utils.bitcast(llvm.extractvalue(i32, loaded, [i]), two) for i in range(4)]
        return array

    simulate_by(load, simulated)
    returned = plgpu.ShapeDtypeStruct(shape, dtype, layout=_WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),), return_type=returned)(load)(tile)


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
