"""Run Pallas Mosaic-GPU kernels on the CPU, with every data race between their threads found."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.core import Tracer
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.ops.static_options import flag
from fast_layers.testing import _simulator_machine as machine
from fast_layers.testing import _timeout
from fast_layers.testing._simulator_extension import extended_interpret_mode

# A simulated thread occupies a thread of XLA:CPU's pool while it waits; two blocks of three warpgroups with their
# warps are 30.
POOL_THREADS = 32

# After the timeout, waiting threads are told to stop; a process that has not stopped this much later is ended.
_GRACE_SECONDS = 60.0

_STACK_BEGINS = "Traceback (most recent call last):"

_one_at_a_time = threading.Lock()
_in_thread = threading.local()


class SimulationError(RuntimeError):
    """A simulated kernel raced, broke a rule of the hardware, or did not end."""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What came of running a function on the simulated GPU.

    Attributes:
      races: one text for each pair of accesses that nothing orders, with both places in the source.
      failure: why the kernel stopped before its end, or None: a deadlock, an access out of bounds, a barrier
        misused, a store still in flight at the end.
      seconds: wall time.
    """

    races: tuple[str, ...]
    failure: str | None
    seconds: float
    _outputs: Any = dataclasses.field(repr=False)
    _kernel_ran: bool = dataclasses.field(repr=False)

    @property
    def races_found(self) -> bool:
        return bool(self.races)

    @property
    def faulty(self) -> bool:
        """A race or a failure."""
        return bool(self.races) or self.failure is not None

    @property
    def outputs(self) -> Any:
        """The function's result. Raises SimulationError if the kernel did not end; races do not raise."""
        if self.failure is not None:
            raise SimulationError(self.report())
        return self._outputs

    def check(self) -> Any:
        """The function's result. Raises SimulationError for any fault."""
        if self.faulty:
            raise SimulationError(self.report())
        return self._outputs

    def report(self) -> str:
        """The faults, to be read."""
        parts = [] if self.failure is None else [f"The kernel did not end: {self.failure}"]
        if self.races:
            parts.append(
                f"Accesses that nothing orders: {len(self.races)}{'; the first 3' if len(self.races) > 3 else ''}"
            )
        return "\n".join([*parts, *self.races[:3]]) or "No fault was found."


def simulate(
    fn: Callable[..., Any], *args: Any, timeout: float = 120.0, detect_races: bool = True, sums_in_order: bool = False
) -> Simulation:
    """Run `fn(*args)` with its Pallas Mosaic-GPU kernels simulated on the CPU.

    Kernels run thread by thread with asynchronous copies and matmuls, barriers, clusters, semaphores in the GPU's
    memory and the memories of Hopper and Blackwell; memory starts as NaN. Not simulated: register layouts and counts,
    speed, approximate maths, more than one cluster at a time, and `inline_mgpu` (left out where it returns nothing).
    For that a function may have a stand-in as its attribute `simulated`: its first argument is a reference, of whose
    numbers the stand-in makes the one array that is returned; or, if none is, of the arrays behind it what is stored
    there.

        sim = simulate(my_kernel, a, b)
        np.testing.assert_allclose(sim.check(), a @ b, rtol=1e-5)

    Args:
      fn: a function of arrays that calls kernels made by `plgpu.kernel`; traced anew in each call.
      args: its arguments. Keep shapes small (a step of two warpgroups takes about 20 ms), but let every ring of
        buffers go round at least three times.
      timeout: seconds until a kernel that has not ended is stopped, which is how a deadlock shows.
      detect_races: look for races; without it kernels run faster.
      sums_in_order: with `detect_races`, report sums of floats in global memory, too, to which copies add (TMA
        reductions) that nothing orders, of one block or of a cluster's; their last bits would change from run to run.

    Raises:
      ValueError: if no such kernel ran, or XLA:CPU has too few threads to run the kernel's (see NPROC below); for an
        `fn` that cannot be called, and a call from within a simulation or a function that JAX traces.

    XLA:CPU makes as many threads as there are cores, or as the environment variable NPROC says when jax starts. Set
    NPROC=32 before jax is imported. One simulation runs at a time.
    """
    simulation = simulated(fn, timeout=timeout, detect_races=detect_races, sums_in_order=sums_in_order)(*args)
    if not (simulation._kernel_ran or simulation.faulty):
        raise ValueError(
            f"{fn!r} ran no Mosaic-GPU kernel, so there was nothing to simulate: give a function that calls one "
            "made by plgpu.kernel (an op of fast_layers takes its kernels on their GPUs only)"
        )
    return simulation


def simulated(
    fn: Callable[..., Any], *, timeout: float = 120.0, detect_races: bool = True, sums_in_order: bool = False
) -> Callable[..., Simulation]:
    """As `simulate`, for several calls: those with arrays of the same shapes are traced and compiled once. A call may
    run no kernel."""
    _check_pool()
    if not callable(fn):
        raise ValueError(
            f"simulate was given an object of type {type(fn).__name__}, which cannot be called: give the function and "
            "its arguments, simulate(f, *args), not its result simulate(f(*args))"
        )
    seconds = _timeout.seconds(timeout)
    flag("detect_races", detect_races)
    flag("sums_in_order", sums_in_order)
    if sums_in_order and not detect_races:
        raise ValueError(f"{sums_in_order=} with {detect_races=}: such sums are found as races; leave one of them out")
    params = plgpu.InterpretGPUParams(
        detect_races=detect_races,
        inline_mgpu="ignore",
        num_tma_threads_per_device=machine.NUM_ASYNC_CLOCKS,
    )
    # A new function, so that nothing traced outside of the simulator is taken from a cache.
    program = jax.jit(lambda *args: fn(*args))

    def run(*args: Any) -> Simulation:
        findings = machine.Findings()
        started = time.monotonic()
        outputs = None
        if getattr(_in_thread, "simulates", False):
            raise ValueError(f"{fn!r} is to be simulated within a simulation: simulate one after the other")
        with _one_simulation(), extended_interpret_mode(findings, sums_in_order), _watchdog(seconds):
            gpu_callbacks.reset_gpu_interpret_mode_state()
            try:
                with plgpu.force_gpu_interpret_mode(params):
                    outputs = jax.block_until_ready(program(*args))
            except jax.errors.JaxRuntimeError as error:
                findings.fail(error)
            finally:
                gpu_callbacks.reset_gpu_interpret_mode_state()
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(outputs)):
            raise ValueError(
                f"{fn!r} cannot be simulated while JAX traces another function, since kernels only run outside of it: "
                "call simulate outside jit, grad and vmap, and give these to it, simulate(jax.vmap(f), *args)"
            )
        failure = None if findings.failure is None else _first_words(findings.failure)
        return Simulation(findings.races, failure, time.monotonic() - started, outputs, findings.kernel_ran)

    return run


def _check_pool() -> None:
    asked = os.environ.get("NPROC", "")
    threads = int(asked) if asked.isdecimal() else os.cpu_count() or 1
    if threads < POOL_THREADS:
        raise ValueError(
            f"NPROC={asked or 'unset'} and {os.cpu_count()} cores: simulated threads wait for one another, and need "
            f"{POOL_THREADS} threads of XLA. Set NPROC={POOL_THREADS} in the environment before jax is imported "
            f"(NPROC={POOL_THREADS} pytest ..., or os.environ at the top of conftest.py)."
        )


@contextlib.contextmanager
def _one_simulation() -> Iterator[None]:
    with _one_at_a_time:
        _in_thread.simulates = True
        try:
            yield
        finally:
            _in_thread.simulates = False


@contextlib.contextmanager
def _watchdog(timeout: float) -> Iterator[None]:
    """Stops the kernel after `timeout`; ends the process, with all stacks on stderr, if that does not help."""

    def stop() -> None:
        running = gpu_callbacks._shared_memory
        if running is not None:
            running.set_failed(
                TimeoutError(f"not done after {timeout:g} s: a deadlock, or more work than the timeout allows"),
                top_level=False,
            )

    timer = threading.Timer(timeout, stop)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(timeout + _GRACE_SECONDS, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _first_words(error: BaseException) -> str:
    """The message, without the stacks that XLA puts into it."""
    first, *others = str(error).strip().splitlines() or ["no message"]
    if others and first.endswith(_STACK_BEGINS):
        first = f"{first.removesuffix(_STACK_BEGINS)}{others[-1]}"
    return f"{type(error).__name__}: {first}"
