"""Bulk copies (TMA) that interpret mode lacks: predicates, reductions, and copies that a cluster makes together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.core import UntilingTransform
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.testing._simulator_machine import Access, Key, in_block, machine, plain_transforms

REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_ALIGNMENT, _PLAIN_ALIGNMENT = 128, 16
"""Of bulk copies, in bytes, with a tensor map and without (CUDA C++ Programming Guide, "Asynchronous Data Copies")."""
_LEFT_OUT_LOADS_ARRIVE = jax.__version_info__ < (0, 12)


def store(
    *, token, mesh_location, thread, src, src_transforms, dst, dst_transforms, predicate, reduction, source_info=None
):
    """SMEM to GMEM, if the predicate holds."""
    if predicate is not None and not bool(predicate):
        return token
    gpu, src_key, dst_key = machine(), Key.from_array(src), Key.from_array(dst)
    src_access = gpu.access(src_key, plain_transforms(src_transforms))
    dst_access = gpu.access(dst_key, plain_transforms(dst_transforms))
    check_contiguity(src_key, src_access, src_transforms)
    if not _has_layout(src_transforms):
        check_alignment(src_key, src_access, dst_key, dst_access, may_be_plain=reduction is None)
    task_type = gpu_callbacks.AsyncCopySmemToGmemTask if reduction is None else ReducingStore
    task = task_type(
        mesh_location,
        thread,
        src_key,
        src_access,
        dst_key,
        dst_access,
        source_info,
        gpu.incr_clock(thread) if gpu.detect_races else None,
    )
    if isinstance(task, ReducingStore):
        assert reduction is not None
        task.reduction = reduction
    gpu.execute_async_task(task)
    return token


def load(
    *, token, mesh_location, thread, src, src_transforms, dst, dst_transforms, barrier, predicate, group, partition,
    fills, source_info=None,
):  # fmt: skip
    """GMEM to SMEM, if the predicate holds; `group` are the blocks that copy together, or None.

    `fills`: whether zeros come in place of what does not exist.

    A load whose predicate does not hold moves nothing. On its barrier it arrives like any other where JAX is older than
    0.12, and not at all since.
    """
    gpu = machine()
    src_key, dst_key, barrier_key = Key.from_array(src), Key.from_array(dst), Key.from_array(barrier)
    if predicate is not None and not bool(predicate):
        if _LEFT_OUT_LOADS_ARRIVE:
            logging_info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
            gpu.get_barrier(barrier_key).arrive(thread, gpu.get_clock(thread), logging_info)
        return token
    src_access = gpu.access(src_key, plain_transforms(src_transforms))
    dst_access = gpu.access(dst_key, plain_transforms(dst_transforms))
    check_contiguity(dst_key, dst_access, dst_transforms)
    if not _has_layout(dst_transforms):
        check_alignment(dst_key, dst_access, src_key, src_access, may_be_plain=not fills and group is None)
    blocks = () if group is None else blocks_together(mesh_location, *group)
    if isinstance(partition, plgpu.CopyPartition.PARTITIONED):
        src_access = _share_of(src_access, partition.axis, blocks.index(thread.block_id), len(blocks))
    task_type = CollectiveLoad if blocks else gpu_callbacks.AsyncCopyGmemToSmemTask
    clock = gpu.incr_clock(thread) if gpu.detect_races else None
    task = task_type(
        mesh_location, thread, src_key, src_access, dst_key, dst_access, barrier_key, source_info, clock
    )  # fmt: skip
    if isinstance(task, CollectiveLoad):
        task.blocks, task.barrier_key, task.multicast = blocks, barrier_key, partition is None
    gpu.execute_async_task(task)
    return token


def check_alignment(smem_key: Key, smem: Access, gmem_key: Key, gmem: Access, *, may_be_plain: bool) -> None:
    """Of a bulk copy, whose end in shared memory has no layout but that of its rows.

    JAX copies what lies together without a tensor map, if it `may_be_plain`.
    """
    gpu = machine()
    shape, gmem_shape = (tuple(gpu.buffer_shape_and_dtype(key).shape) for key in (smem_key, gmem_key))
    dtype = jax.numpy.dtype(gpu.buffer_shape_and_dtype(smem_key).dtype)
    itemsize = dtype.itemsize
    offset = _first(smem, shape) * itemsize
    wanted = _ALIGNMENT
    if may_be_plain and _lies_together(gmem, gmem_shape):
        wanted = _PLAIN_ALIGNMENT
        start, size = _first(gmem, gmem_shape) * itemsize, math.prod(gmem.shape) * itemsize
        if start % wanted or size % wanted:
            raise ValueError(
                f"a bulk copy of {size} bytes that starts {start} bytes into its array in the GPU's memory: the GPU "
                f"wants multiples of {wanted}"
            )
        windows = _windows(gmem)
        inside = math.prod(
            max(min(stop, end) - start, 0) for (start, stop), end in zip(windows, gmem_shape, strict=True)
        )
        if inside < min(math.prod(gmem.shape), math.prod(gmem_shape) - _first(gmem, gmem_shape)):
            raise ValueError(
                f"a bulk copy of {windows} of an array {list(gmem_shape)} in the GPU's memory ends outside of it, and "
                "lies together: JAX makes it without a tensor map, so that it goes on with what comes next"
            )
    if offset % wanted:
        raise ValueError(
            f"a bulk copy starts {offset} bytes into a buffer {dtype}{list(shape)} in shared memory: the GPU wants a "
            f"multiple of {wanted}"
        )


def check_contiguity(smem_key: Key, smem: Access, transforms: Any) -> None:
    """Of a bulk copy's end in shared memory, by its tiles if there are some: JAX copies what lies together there."""
    buffer = machine().buffer_shape_and_dtype(smem_key)
    tiling = next((each.tiling for each in transforms if isinstance(each, UntilingTransform)), ())
    sizes = [stop - start for start, stop in _windows(smem)]
    whole, part = (_tiled(shape, tiling) for shape in (tuple(buffer.shape), tuple(sizes)))
    for axis, size in enumerate(part):
        if size != 1 and math.prod(whole[axis + 1 :]) != math.prod(part[axis + 1 :]):
            array = f"{jax.numpy.dtype(buffer.dtype)}{list(buffer.shape)}"
            in_tiles = f", which has tiles of {list(tiling)}" if tiling else ""
            raise ValueError(
                f"a bulk copy of {sizes} of a buffer {array} in shared memory{in_tiles}: its parts do not lie together "
                "there, and JAX refuses to compile it"
            )


def _tiled(shape: tuple[int, ...], tiling: tuple[int, ...]) -> tuple[int, ...]:
    if not tiling:
        return shape
    before, last = shape[: -len(tiling)], shape[-len(tiling) :]
    return (*before, *(-(-size // tile) for size, tile in zip(last, tiling, strict=True)), *tiling)


def _has_layout(transforms: Any) -> bool:
    """Whether a reference is tiled or swizzled; it can be cut between whole tiles only, which is enough."""
    return len(plain_transforms(transforms)) < len(transforms)


def _windows(access: Access) -> list[tuple[int, int]]:
    """Where it begins and ends on each axis."""
    return [(x.start, x.stop) if isinstance(x, slice) else (x, x + 1) for x in access.range]


def _first(access: Access, shape: Sequence[int]) -> int:
    """The place of its first number among those of the buffer."""
    return sum(start * math.prod(shape[axis + 1 :]) for axis, (start, _) in enumerate(_windows(access)))


def _lies_together(access: Access, shape: Sequence[int]) -> bool:
    expected = 1
    for axis, (start, stop) in reversed(list(enumerate(_windows(access)))):
        size = stop - start
        if size != 1 and math.prod(shape[axis + 1 :]) != expected:
            return False
        expected *= size
    return True


def blocks_together(mesh_location: Any, cluster_dims: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks of the cluster that differ from this one along `axes` only, the leader first."""
    coords = [tuple(int(i) for i in mesh_location.block_coords)]
    for axis in axes:
        coords = [(*c[:axis], i, *c[axis + 1 :]) for c in coords for i in range(cluster_dims[axis])]
    return tuple(int(np.ravel_multi_index(c, cluster_dims)) for c in coords)


class ReducingStore(gpu_callbacks.AsyncCopySmemToGmemTask):
    """Combines with what global memory holds.

    Reductions commute, so two of them do not race. Each counts as a read of its target, which races with plain
    writes; a plain read that is not ordered after the reduction goes unseen. But for sums of floats, if they are to be
    in order: then each counts as a plain write.
    """

    reduction: str

    def post_read(self, tma_thread_id, gpu):
        dtype = gpu.buffer_shape_and_dtype(self.dst_allocation_key).dtype
        if gpu.sums_in_order and self.reduction == "add" and jax.numpy.issubdtype(dtype, np.floating):
            super().post_read(tma_thread_id, gpu)
        elif gpu.detect_races:
            assert self.clock is not None
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
            gpu_callbacks.get_races().check_read(
                self.thread,
                self.write_clock.async_smem_clock,
                self.dst_allocation_key,
                self.dst_access,
                source_info=self.source_info,
            )

    def __call__(self, tma_thread_id):
        gpu = machine()
        self.pre_read(tma_thread_id, gpu)
        value = gpu.read(self.src_allocation_key, self.src_access, self.thread, self.logging_info)
        self.post_read(tma_thread_id, gpu)
        shape = tuple(gpu.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        inside = gpu_callbacks._clip_store_to_shape(self.dst_access, value, shape)
        if inside is not None:
            access, value = inside
            with gpu.reduction_lock:
                old = gpu.read(self.dst_allocation_key, access, self.thread, self.logging_info)
                new = REDUCTIONS[self.reduction](old, value).astype(old.dtype)
                gpu.store_buffer_content(
                    self.dst_allocation_key, access, new, self.thread, logging_info=self.logging_info
                )
        self.post_write(tma_thread_id, gpu)


class CollectiveLoad(gpu_callbacks.AsyncCopyGmemToSmemTask):
    """One block's share of a copy that several blocks make together.

    In a multicast every block writes its share into the shared memory of all, and every block's barrier completes
    once all shares are there. Otherwise each fills its own shared memory, and only the leader's barrier completes.
    """

    blocks: tuple[int, ...]
    barrier_key: Key
    multicast: bool

    def post_read(self, tma_thread_id, shared_memory):
        if not self.multicast or not shared_memory.detect_races:
            super().post_read(tma_thread_id, shared_memory)
            return
        assert self.clock is not None
        self.clock.inc(tma_thread_id)
        share = _first_divisible_share(self.dst_access, self.blocks.index(self.thread.block_id), len(self.blocks))
        for block in self.blocks:
            gpu_callbacks.get_races().check_write(
                self.thread,
                self.clock.async_smem_clock.copy(),
                in_block(self.dst_allocation_key, block),
                share,
                source_info=self.source_info,
            )

    def post_write(self, tma_thread_id, shared_memory):
        gpu = machine()
        for block in self.blocks if self.multicast else self.blocks[:1]:
            barrier_key = in_block(self.barrier_key, block)
            with gpu.collective_lock:
                shares = gpu.collective_shares[barrier_key]
                shares[self.thread.block_id].append(None if self.clock is None else self.clock.copy())
                if not all(shares[peer] for peer in self.blocks):
                    continue
                clocks = [shares[peer].popleft() for peer in self.blocks]
                merged = clocks[0]
                if merged is not None:
                    for clock in clocks[1:]:
                        merged.update(clock)
                gpu.get_barrier(barrier_key).arrive(self.thread, merged, self.logging_info)


def _first_divisible_share(access: Access, index: int, count: int) -> Access:
    """A block's share of a multicast: the hardware splits along the first axis that divides evenly."""
    for axis, window in enumerate(w for w in access.range if isinstance(w, slice)):
        if (window.stop - window.start) % count == 0:
            return _share_of(access, axis, index, count)
    raise ValueError(f"a multicast to {count} blocks: no axis of [{access}] is divisible by {count}")


def _share_of(access: Access, axis: int, index: int, count: int) -> Access:
    """Part `index` of `count` along `axis`, counted among the axes that the access keeps."""
    kept = [i for i, window in enumerate(access.range) if isinstance(window, slice)]
    window = access.range[kept[axis]]
    assert isinstance(window, slice)
    size = math.ceil((window.stop - window.start) / count)
    start = window.start + index * size
    windows = list(access.range)
    windows[kept[axis]] = slice(start, start + size, 1)
    return Access(tuple(windows), access.permutation)
