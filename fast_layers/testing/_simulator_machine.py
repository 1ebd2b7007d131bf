"""What the simulated GPU remembers beyond JAX's interpret mode, and what it found wrong.

JAX's Mosaic-GPU interpret mode keeps one `GPUSharedMemory` for the kernel that runs. `Machine` is that, with the
state of the operations that this package adds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import callback
from jax._src.pallas.mosaic.interpret import race_detection_state as base_race_detection
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as mosaic_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.pallas.mosaic_gpu.interpret import race_detection_state as gpu_race_detection

# From jax 0.12 a detected race raises, and the last completions of a barrier may go unobserved.
RACES_RAISE = "on_race" in gpu_race_detection.GPURaceDetectionState.__dataclass_fields__
BARRIERS_MUST_BE_DRAINED = not hasattr(shared_memory, "BarrierReallocationChecker")

# Each asynchronous operation ticks one of these, in turn. Two operations in flight on the same one cannot be told
# apart, so there are many more than a kernel keeps in flight.
NUM_ASYNC_CLOCKS = 64

SMEM = shared_memory.get_memory_space_idx(mosaic_core.MemorySpace.SMEM)
REGISTERS = shared_memory.get_memory_space_idx(mosaic_core.MemorySpace.REGS)

Access = interpret_utils.Access
Key = shared_memory.HostAllocationKey


class Findings:
    """Whether a kernel ran, its races, and the first error that stopped it. Filled by many threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._races: list[str] = []
        self.failure: BaseException | None = None
        self.kernel_ran = False

    def add_race(self, message: str) -> None:
        with self._lock:
            self._races.append(_readable(message))

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error

    @property
    def races(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(dict.fromkeys(self._races))


class Semaphore:
    """In global memory: how far it has been counted up, and the clocks of those who did."""

    def __init__(self):
        self.count = 0
        self.clock: Any = None


class Machine(shared_memory.GPUSharedMemory):
    """The simulated GPU: JAX's, plus warpgroup matmuls in flight and copies that a whole cluster makes together."""

    # A sub-class for each simulation sets these.
    findings: Findings
    sums_in_order: bool

    def __init__(self, **params: Any):
        # Zero at first; unlike what follows, they outlive a block.
        self.semaphores = collections.defaultdict(Semaphore)
        self.semaphore_changed = threading.Condition()
        super().__init__(**params)

    def reset_per_cluster_state(self) -> None:
        before = {thread: self._own_time(thread) for thread in getattr(self, "clocks", ())}
        next_async_clock = getattr(self, "next_tma_thread_id", 0)
        super().reset_per_cluster_state()
        # A block knows nothing of those before it, but begins after them. With clocks that began anew, what it does
        # would seem to be ordered before much of what they did.
        for thread, time in before.items():
            for clock in vars(self.clocks[thread]).values():
                clock.clock[self.thread_to_vc_position(thread)] = time
        self.next_tma_thread_id = next_async_clock
        self.findings.kernel_ran = True
        # Per warpgroup, oldest first: (clock at which the matmul is done, its accumulator).
        self.wgmmas_in_flight = collections.defaultdict(collections.deque)
        # Per barrier, per block: clocks of that block's finished shares of collective copies.
        self.collective_shares = collections.defaultdict(lambda: collections.defaultdict(collections.deque))
        self.collective_lock = threading.Lock()
        # An atomic read-modify-write of global memory takes this.
        self.reduction_lock = threading.Lock()

    def _own_time(self, thread: Any) -> int:
        return int(self.clocks[thread].generic_clock.clock[self.thread_to_vc_position(thread)])

    def set_failed(self, exception, failed_thread=None, top_level=True) -> None:
        self.findings.fail(exception)
        super().set_failed(exception, failed_thread, top_level)

    def buffer_shape_and_dtype(self, key: Key) -> Any:
        try:
            return super().buffer_shape_and_dtype(key)
        except KeyError:
            space = list(mosaic_core.MemorySpace)[key.memory_space_id].name
            raise RuntimeError(
                f"{space} of block {key.block_id} is read before the block begins, or after it ends"
            ) from None

    def read(self, key: Key, access: Access, thread, logging_info=None) -> Any:
        """What a buffer holds there. Out of bounds is an error."""
        value, _, _ = self.get_buffer_content(key, access, thread, logging_info=logging_info)
        if value is None or value.shape != access.shape:
            raise IndexError(f"Out-of-bounds read of {key} at [{access}].")
        return value

    def async_clock(self, thread) -> Any:
        """The clock of an asynchronous operation that `thread` starts now; None without race detection."""
        if not self.detect_races:
            return None
        clock = self.incr_clock(thread)
        clock.inc(self.get_next_tma_thread_id())
        return clock


class ForgivingBarrier(shared_memory.Barrier):
    """For jax 0.11: the rule of 0.12, by which a kernel may end without observing a barrier's last completions."""

    def deallocate(self) -> None:
        with self.cv:
            if self.ref_count == 1:
                self.last_observed_phase_by_thread.clear()
        super().deallocate()


def _readable(race: str) -> str:
    """JAX's report of a race with short names for memory and threads, and without the addresses of clocks."""
    lines = (line.rstrip() for line in race.removeprefix("RACE DETECTED").splitlines())
    text = "\n".join(line for line in lines if line and not line.lstrip().startswith("clock:"))

    def memory(match: re.Match[str]) -> str:
        space, block, buffer = match.groups()
        return f"{list(mosaic_core.MemorySpace)[int(space)].name} buffer {buffer} of block {block}"

    text = re.sub(r"HostAllocationKey\(memory_space_id=(\d+).*?block_id=(\d+).*?buffer_id=(-?\d+)\)", memory, text)
    text = re.sub(r"slice\((\d+), (\d+), (?:1|None)\)", r"\1:\2", text)
    return re.sub(
        r"\w+\(device_id=0, cluster_id=0, block_id=(\d+), warpgroup_id=(\d+)", r"(block \1, warpgroup \2", text
    )


def machine() -> Machine:
    """The machine that runs now."""
    running = gpu_callbacks._get_shared_memory()
    assert isinstance(running, Machine)
    return running


def machine_reporting_to(findings: Findings, sums_in_order: bool) -> type[Machine]:
    return type("Machine", (Machine,), {"findings": findings, "sums_in_order": sums_in_order})


def races_reporting_to(findings: Findings) -> type[gpu_race_detection.GPURaceDetectionState]:
    """The race detector, which writes each race down and lets the kernel go on."""

    accessed, counted = threading.local(), {}

    class RaceDetection(gpu_race_detection.GPURaceDetectionState):
        def check_read(self, *args, **kwargs):
            self._note(super().check_read, *args, **kwargs)

        def check_write(self, *args, **kwargs):
            self._note(super().check_write, *args, **kwargs)

        def _note(self, check, thread, clock, key, access, *args, **kwargs):
            accessed.first = access.range[0] if access.range else None
            try:
                check(thread, clock, key, access, *args, **kwargs)
            except RuntimeError as error:
                if not str(error).startswith("RACE DETECTED"):
                    raise
                findings.add_race(str(error))

        def _check_ref_union(self, thread, clock, buffer_key, *details):
            """Where each member of a union has as many slots of the same size, those of other places do not count."""
            if buffer_key not in self.ref_union_members:
                return
            union, group = self.ref_union_members[buffer_key]
            slots = self._slots_of(union)
            if slots is None:
                super()._check_ref_union(thread, clock, buffer_key, *details)
                return
            members: dict[Any, Any] = self.ref_union_members
            first = slice(None) if accessed.first is None else accessed.first
            for slot in range(slots)[first] if isinstance(first, slice) else (int(first),):
                members[buffer_key, slot] = (union, slot), group
                super()._check_ref_union(thread, clock, (buffer_key, slot), *details)

        def _slots_of(self, union: Any) -> int | None:
            if union not in counted:
                counted[union] = self._count_slots(union)
            return counted[union]

        def _count_slots(self, union: Any) -> int | None:
            members = [key for key, (of, _) in list(self.ref_union_members.items()) if of == union]
            groups = {self.ref_union_members[key][1] for key in members}
            buffers: list[Any] = [machine().buffer_shape_and_dtype(key) for key in members]
            counts = {shape[0] if len(shape) > 2 else None for shape, _ in buffers}
            sizes = {math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in buffers}
            alike = len(groups) == len(members) and len(counts) == len(sizes) == 1
            return counts.pop() if alike and union.memory_space_id == SMEM else None

    return RaceDetection


def printing_modules() -> tuple[Any, ...]:
    """The modules of jax 0.11 that print a race, having no other way to tell it."""
    return () if RACES_RAISE else (base_race_detection, gpu_race_detection)


def plain_transforms(transforms: Any) -> Any:
    """A reference's transforms as Python numbers, without those that only say how the buffer is laid out."""
    return jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))


def in_block(key: Key, block: int) -> Key:
    """The same allocation in another block of the cluster."""
    return dataclasses.replace(key, block_id=block)


def array_in_block(key: Any, block: int) -> Any:
    """As `in_block`, of a key as an array."""
    names = [field.name for field in dataclasses.fields(Key)]
    return key.at[names.index("block_id")].set(block)


def call_host(interpreter: Any, eqn: Any, fn: Callable[..., Any], token: Any, results: Any = None, **operands: Any):
    """Run `fn` on the host, in order, as the interpreter's thread. Returns the token, and `results` if asked for."""
    shapes = gpu_callbacks.TOKEN_SHAPE_DTYPE
    return callback.io_callback(
        functools.partial(gpu_callbacks.fail_on_exception(fn), source_info=eqn.source_info),
        shapes if results is None else (shapes, results),
        token=token,
        mesh_location=interpreter.mesh_location,
        thread=interpreter.thread,
        **operands,
    )
