"""What the blocks of a cluster read in one another's shared memory, and what orders that.

A block stores, its warps meet, then `release` and the arrival at a `plgpu.ClusterBarrier`. Who has waited for it does
`acquire`, and may read. The two fences, of shared memory alone, are what the PTX ISA has for it ("membar / fence",
`.sync_restrict`): fences of all memory wait for the GPU's cache, a third of a microsecond.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from fast_layers.kernel_parts.inline import THREADS, fence, simulate_by, simulate_in_block, thread, times


def release() -> None:
    """In a kernel: what this block has stored in its shared memory before."""
    fence("fence.release.sync_restrict::shared::cta.cluster;")


def acquire() -> None:
    """In a kernel: what others have released, before they arrived at a barrier that has been waited for."""
    fence("fence.acquire.sync_restrict::shared::cluster.cluster;")


def row_of_block(ref: Any, rank: int) -> Float[Array, " C"]:
    """In a kernel, by a warpgroup: float32 [C] in the shared memory of another block, in strides of single numbers.

    `ref` is this block's, C a multiple of 128; `rank` the other's number within a cluster that has one axis.
    """
    (columns,) = ref.shape

    def load(_, ref):
        f32 = ir.F32Type.get()
        array = FragmentedArray.splat(utils.c(0.0, f32), (columns,), layout(columns).to_mgpu())
        start = arith.addi(_address(ref), times(thread(), 4))
        for i in range(columns // THREADS):
            at = arith.addi(start, utils.c(4 * THREADS * i, start.type))
            array.registers[i] = vector.from_elements(ir.VectorType.get((1,), f32), [_load(at, rank)])
        return array

    return _simulated_in_block(load, rank, plgpu.ShapeDtypeStruct((columns,), ref.dtype, layout=layout(columns)), ref)


def layout(columns: int) -> Any:
    """Of `row_of_block`."""
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=1)


def number_of_block(ref: Any, rank: int) -> Array:
    """As `row_of_block`, float32 [1]: that number."""

    def load(_, ref):
        return FragmentedArray.splat(_load(_address(ref), rank), ())

    everywhere = plgpu.ShapeDtypeStruct((), ref.dtype, layout=plgpu.Layout.WG_SPLAT(()))
    return _simulated_in_block(load, rank, everywhere, ref)


def _simulated_in_block(load: Any, rank: int, returned: Any, ref: Any) -> Array:
    simulate_by(load, lambda numbers: numbers.reshape(returned.shape))
    simulate_in_block(load, rank)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=returned)(load)(ref)


def _address(ref: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _load(address: Any, rank: int) -> Any:
    """One piece, with side effects: not to be moved before the barrier."""
    ptx = "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2; ld.shared::cluster.f32 $0, [there]; }"
    operands = [address, utils.c(rank, address.type)]
    return llvm.inline_asm(ir.F32Type.get(), operands, ptx, "=f,r,r,~{memory}", has_side_effects=True)
