"""Blackwell's matmul by two blocks of a cluster together (`collective_axis`).

Each block holds half of the rows of A and of the accumulator, and half of the columns of B. Only the leader issues;
the hardware reads and writes the tensor and shared memories of both.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from fast_layers.testing._simulator_machine import SMEM, Key, in_block, machine
from fast_layers.testing._simulator_tma import blocks_together

_OneBlockMma = gpu_callbacks.TcGen05Mma
_one_block_commit_arrive = gpu_callbacks.tcgen05_commit_arrive
_one_block_mma = gpu_callbacks.tcgen05_mma


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoBlockMma(_OneBlockMma):
    """With a `collective_axis`, which here holds (cluster dimensions, indices of the collective axes)."""

    collective_axis: Any = None

    def __call__(self, pipeline_clock, tma_thread_id):
        if self.collective_axis is None:
            return super().__call__(pipeline_clock, tma_thread_id)
        if self.a_scale_key is not None or self.a_sparse_metadata_key is not None:
            raise NotImplementedError("The simulator has no scaled or sparse matmul by two blocks.")
        gpu = machine()
        logging_info = shared_memory.GPULoggingInfo(self.mesh_location, self.thread, self.source_info)
        blocks = blocks_together(self.mesh_location, *self.collective_axis)
        clock = gpu.get_clock(self.thread)
        if clock is not None:
            if pipeline_clock is not None:
                clock.update(pipeline_clock)
            clock.inc(tma_thread_id)

        def operand(key, access, block):
            key = in_block(key, block)
            if clock is not None:
                reads_at = clock.async_smem_clock if key.memory_space_id == SMEM else clock.generic_clock
                races = gpu_callbacks.get_races()
                races.check_read(self.thread, reads_at, key, access, source_info=self.source_info)
            return gpu.read(key, access, None, logging_info)

        dtype = gpu.buffer_shape_and_dtype(self.acc_key).dtype
        columns = [operand(self.b_key, self.b_access, block).astype(dtype) for block in blocks]
        rhs = np.concatenate(columns, axis=1)
        for block in blocks:
            acc_key = in_block(self.acc_key, block)
            product = operand(self.a_key, self.a_access, block).astype(dtype) @ rhs
            if self.accumulate:
                product = product + gpu.read(acc_key, self.acc_access, None, logging_info)
            gpu.store_buffer_content(
                acc_key, self.acc_access, product, self.thread, increment_clock=False, logging_info=logging_info
            )
            if clock is not None:
                races = gpu_callbacks.get_races()
                races.check_write(
                    self.thread, clock.generic_clock, acc_key, self.acc_access, source_info=self.source_info
                )
        if self.barrier_key is not None:
            for block in blocks:
                gpu.get_barrier(in_block(self.barrier_key, block)).arrive(self.thread, clock, logging_info)
        return None if clock is None else clock.copy()


@functools.wraps(_one_block_mma)
def multiply(*, collective_axis: Any = None, **operands: Any) -> Any:
    """As JAX's, where the leader alone issues a matmul of two blocks."""
    if collective_axis is not None and not _leads(operands, collective_axis):
        return operands["token"]
    return _one_block_mma(collective_axis=collective_axis, **operands)


@functools.wraps(_one_block_commit_arrive)
def commit_arrive(*, collective_axis: Any = None, **operands: Any) -> Any:
    """As JAX's, where the leader alone arrives, on the barriers of both blocks."""
    if collective_axis is None:
        return _one_block_commit_arrive(collective_axis=None, **operands)
    if _leads(operands, collective_axis):
        key = Key.from_array(operands.pop("barrier_key_as_array"))
        for block in blocks_together(operands["mesh_location"], *collective_axis):
            barrier: Any = in_block(key, block).as_np_array
            _one_block_commit_arrive(collective_axis=None, barrier_key_as_array=barrier, **operands)
    return operands["token"]


def _leads(operands: dict[str, Any], collective_axis: Any) -> bool:
    return operands["thread"].block_id == blocks_together(operands["mesh_location"], *collective_axis)[0]
