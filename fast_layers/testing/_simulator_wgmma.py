"""Hopper's warpgroup matmul as an asynchronous operation, and its accumulators.

The matmul is computed at once, but its reads of shared memory end only when the warpgroup waits for it. So a slot
that is handed back to the loader before the wait shows as a race, and so does an accumulator touched in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from fast_layers.testing._simulator_machine import Key, machine, plain_transforms


def multiply(
    *, token, mesh_location, thread, acc, acc_transforms, a, a_transforms, b, b_transforms, a_in_smem, source_info=None
):
    """acc += a @ b; `a` is an allocation in SMEM, or values in registers."""
    gpu = machine()
    logging_info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    clock = gpu.async_clock(thread)

    def operand(key_array, transforms):
        key = Key.from_array(key_array)
        access = gpu.access(key, plain_transforms(transforms))
        if clock is not None:
            races = gpu_callbacks.get_races()
            races.check_read(thread, clock.async_smem_clock, key, access, source_info=source_info)
        return gpu.read(key, access, thread, logging_info)

    lhs = operand(a, a_transforms) if a_in_smem else np.asarray(a)
    rhs = operand(b, b_transforms)
    acc_key = Key.from_array(acc)
    acc_access = gpu.access(acc_key, plain_transforms(acc_transforms))
    old = gpu.read(acc_key, acc_access, thread, logging_info)
    with np.errstate(invalid="ignore"):  # NaN of NaN and inf, as the GPU has it
        new = old + np.matmul(lhs.astype(old.dtype), rhs.astype(old.dtype))
    gpu.store_buffer_content(acc_key, acc_access, new, thread, logging_info=logging_info)
    gpu.wgmmas_in_flight[thread].append((clock, acc_key))
    return token


def wait(*, token, mesh_location, thread, at_most, source_info=None):
    """Until no more than `at_most` matmuls of this warpgroup are in flight; they end in order."""
    _await_wgmmas(machine(), thread, at_most)
    return token


def load_accumulator(*, token, mesh_location, thread, acc, wait_n, source_info=None):
    gpu, key = machine(), Key.from_array(acc)
    if wait_n is not None:
        _await_wgmmas(gpu, thread, wait_n)
    _check_settled(gpu, thread, key, "read", source_info)
    logging_info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    return token, gpu.read(key, gpu.access(key, ()), thread, logging_info)


def store_accumulator(*, token, mesh_location, thread, acc, value, source_info=None):
    gpu, key = machine(), Key.from_array(acc)
    _check_settled(gpu, thread, key, "written", source_info)
    logging_info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    gpu.store_buffer_content(key, gpu.access(key, ()), np.asarray(value), thread, logging_info=logging_info)
    return token


def _await_wgmmas(gpu: Any, thread: Any, at_most: int) -> None:
    in_flight = gpu.wgmmas_in_flight[thread]
    while len(in_flight) > at_most:
        done_at, _ = in_flight.popleft()
        if done_at is not None:
            with gpu.lock:
                gpu.clocks[thread].update(done_at)


def _check_settled(gpu: Any, thread: Any, key: Key, what: str, source_info: Any) -> None:
    if gpu.detect_races and any(acc == key for _, acc in gpu.wgmmas_in_flight[thread]):
        where = source_info_util.summarize(source_info) if source_info is not None else "the kernel"
        gpu.findings.add_race(f"  accumulator {what} by {thread}, {where}\n  while a wgmma into it is in flight")
