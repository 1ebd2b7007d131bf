"""How long one call takes on the device.

JAX on a GPU: CUPTI's durations of all kernels of a call, added up (`jax.experimental.mosaic.gpu.profiler`), so that
the host's dispatch does not count; calls rotate over the input sets, and the same calls load the GPU before. Memory
sets and gaps between the kernels of one call are not in that sum. Where CUPTI does not answer, and on a CPU, the wall
clock: on a GPU over a batch of calls with one wait at the end, on a CPU one call at a time. PyTorch: CUDA events around
replays of a CUDA graph that holds a batch of calls (CUPTI admits one subscriber, so its profiler stays off), which
includes the gaps.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler

BATCH_SECONDS = 0.02
"""A batch of calls shall take at least this long."""
MOST_CALLS = 64
LOAD_SECONDS = 0.15
"""On a GPU, each program runs for so long just before it is timed: a GPU's clocks depend on the power that it took the
moment before, so after a light program the next would be timed too fast."""
SLOW_SECONDS = 1.0
"""On a GPU, a call slower than this is timed once, by the wall clock: device time is short."""


class _Rotating(jax.stages.Wrapped):
    """A compiled function that takes the next of several argument lists at each call."""

    def __init__(self, call: Callable[..., Any], argument_sets: Sequence[tuple]):
        self._call = call
        self._next = itertools.cycle(argument_sets)

    def __call__(self):
        return self._call(*next(self._next))

    def trace(self, *args, **kwargs):
        raise NotImplementedError("is compiled already")

    lower = trace


def on_gpu() -> bool:
    return jax.default_backend() in ("gpu", "cuda")


def _calls(roughly: float) -> int:
    return min(MOST_CALLS, max(3, math.ceil(BATCH_SECONDS / roughly)))


class Stopwatch:
    """Times JAX functions. Where CUPTI failed on a GPU, `note` says how."""

    def __init__(self):
        self.note: str | None = None

    def warm_up(self, call: Callable[..., Any], argument_sets: Sequence[tuple]) -> float:
        """Seconds of one call, roughly: the second, by the wall clock."""
        jax.block_until_ready(call(*argument_sets[0]))
        start = time.perf_counter()
        jax.block_until_ready(call(*argument_sets[-1]))
        return time.perf_counter() - start

    def seconds(self, call: Callable[..., Any], argument_sets: Sequence[tuple], roughly: float) -> tuple[list, str]:
        """(seconds of each of several calls, how they were taken)."""
        if not on_gpu():
            return [self._wall(call, argument_sets, 1)], "wall"
        if roughly > SLOW_SECONDS:
            return [roughly], "wall"
        calls = _calls(roughly)
        load(lambda: self._wall(call, argument_sets, calls))
        timer = profiler.Cupti(finalize=False).measure(_Rotating(call, argument_sets), iterations=calls)
        try:
            milliseconds: Any = timer()[1]
        except RuntimeError as error:
            # Either CUPTI is not to be had, or two calls launched different kernels: then it cannot be summed.
            self.note = f"CUPTI: {error}"
        else:
            if milliseconds:
                return [1e-3 * each for each in milliseconds], "cupti"
            self.note = "CUPTI saw no kernel"
        return [self._wall(call, argument_sets, calls)], "wall"

    def batch(self, call: Callable[..., Any], argument_sets: Sequence[tuple], roughly: float) -> float:
        """Seconds per call in a batch, by the wall clock."""
        return self._wall(call, argument_sets, _calls(roughly))

    def _wall(self, call: Callable[..., Any], argument_sets: Sequence[tuple], calls: int) -> float:
        turns = itertools.islice(itertools.cycle(argument_sets), calls)
        start = time.perf_counter()
        out = None
        for arguments in turns:
            out = call(*arguments)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls


def load(run: Callable[[], Any]) -> None:
    """Runs, each time until the device has done it, for `LOAD_SECONDS`."""
    start = time.perf_counter()
    while time.perf_counter() - start < LOAD_SECONDS:
        run()


def turns_of(names: Sequence[str], turns: int) -> Iterator[str]:
    """Each once in a turn, there and back. In two turns for each name, every one comes as often after each of the
    others: what a program leaves behind, a warm GPU above all, is no other's alone.

    Source: Williams, "Experimental designs balanced for the estimation of residual effects of treatments" (1949).
    """
    zigzag = [i // 2 if i % 2 == 0 else -(i + 1) // 2 for i in range(len(names))]
    for turn in range(turns if names else 0):
        order = [names[(turn // 2 + step) % len(names)] for step in zigzag]
        yield from order if turn % 2 == 0 else reversed(order)


def torch_seconds(
    torch: Any, call: Callable[..., Any], argument_sets: Sequence[tuple], stream: Any
) -> tuple[list, str]:
    """The same for a PyTorch function, all of whose work (also that of its autograd graph) is on `stream`."""
    with torch.cuda.stream(stream):
        start = time.perf_counter()
        call(*argument_sets[0])
        stream.synchronize()
        roughly = time.perf_counter() - start
    calls = _calls(roughly)
    turns = list(itertools.islice(itertools.cycle(argument_sets), calls))

    def batch():
        for arguments in turns:
            call(*arguments)

    graph = torch.cuda.CUDAGraph()
    try:
        # JAX's threads may allocate meanwhile, which is no business of this capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            batch()
        run, method = graph.replay, "graph"
    except RuntimeError:
        # What synchronises cannot be captured; the events around the plain calls then include the host's gaps.
        torch.cuda.synchronize()
        run, method = batch, "events"
    taken = []

    def run_and_wait():
        run()
        stream.synchronize()

    with torch.cuda.stream(stream):
        run_and_wait()
        load(run_and_wait)
        for _ in range(3):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(stream)
            run()
            last.record(stream)
            last.synchronize()
            taken.append(1e-3 * first.elapsed_time(last) / calls)
    return taken, method
