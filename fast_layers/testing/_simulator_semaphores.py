"""Simulated semaphores in the GPU's memory, by which blocks of a grid wait for one another.

Blocks are simulated one after another, so one that waits for a later one waits until the watchdog ends it.
"""

from __future__ import annotations

from typing import Any

from fast_layers.testing import _simulator_machine as machine

_LOOKS_AGAIN = 0.2
"""Seconds after which one who waits looks whether the kernel has failed."""


def _place(of: Any, at: Any) -> tuple[Any, ...]:
    return int(of), *(int(i) for indexer in machine.plain_transforms(at) for i in indexer.indices)


def signal(*, token, mesh_location, thread, of, at, value, source_info=None):
    del mesh_location, source_info
    gpu = machine.machine()
    clock = gpu.incr_clock(thread) if gpu.detect_races else None
    with gpu.semaphore_changed:
        semaphore = gpu.semaphores[_place(of, at)]
        semaphore.count += int(value)
        if semaphore.clock is None:
            semaphore.clock = clock
        elif clock is not None:
            semaphore.clock.update(clock)
        gpu.semaphore_changed.notify_all()
    return token


def wait(*, token, mesh_location, thread, of, at, value, decrement, source_info=None):
    del mesh_location, source_info
    gpu = machine.machine()
    with gpu.semaphore_changed:
        semaphore = gpu.semaphores[_place(of, at)]
        while semaphore.count < int(value):
            gpu.semaphore_changed.wait(_LOOKS_AGAIN)
            gpu.check_failed()
        if bool(decrement):
            semaphore.count -= int(value)
        clock = None if semaphore.clock is None else semaphore.clock.copy()
    if clock is not None:
        with gpu.lock:
            gpu.clocks[thread].update(clock)
    return token
