"""The Hopper attention kernels in the simulator: as a backend for `check_parity`, and with one thing changed.

The kernels know nothing of this. `changed` puts a stand-in for `plgpu` into a kernel's module, which passes everything
on but what a fault drops or moves.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.arch import Arch
from fast_layers.dispatch import Backend
from fast_layers.ops.attention import (
    forward_parts,
    hopper_bias_grad,
    hopper_bwd,
    hopper_bwd_apart,
    hopper_bwd_beside,
    hopper_bwd_config,
    hopper_bwd_d_query,
    hopper_bwd_deep,
    hopper_bwd_deep_query,
    hopper_bwd_in_order,
    hopper_bwd_load,
    hopper_bwd_rows,
    hopper_bwd_send,
    hopper_bwd_steps,
    hopper_call,
    hopper_d_query_parts,
    hopper_few_rows,
    hopper_few_rows_join,
    hopper_fwd,
    hopper_fwd_again,
    hopper_fwd_out,
)
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals
from fast_layers.testing import ParityTable, Simulation, check_parity, simulate
from fast_layers.testing.parity import Case
from fast_layers.testing.simulator import simulated
from simulator.found import tells

H200 = Arch("cuda", "NVIDIA H200", (9, 0))
HOPPER = Backend(
    "hopper",
    lambda problem, arch, pass_: hopper_call.supports(problem, H200, pass_),
    hopper_call.forward,
    hopper_call.backward,
)


@dataclasses.dataclass
class Judged:
    """`table` says what is wrong in values, `simulations` what the simulator found, in order."""

    table: ParityTable
    simulations: list[Simulation]

    @property
    def faulty(self) -> bool:
        return any(sim.faulty for sim in self.simulations)

    def report(self) -> str:
        return "\n\n".join([str(self.table), *(sim.report() for sim in self.simulations if sim.faulty)])

    def check(self) -> Judged:
        """Itself, where no race was found and all values are right."""
        assert not self.faulty, self.report()
        assert self.table.ok, self.report()
        return self


def judge(
    case: Case,
    dtype: Any = jnp.bfloat16,
    backend: Backend = HOPPER,
    supports: Callable[..., str | None] | None = None,
    timeout: float = 120.0,
    sums_in_order: bool = False,
) -> Judged:
    """Both passes simulated, with races looked for, and judged against the reference."""
    backend = backend if supports is None else dataclasses.replace(backend, supports=supports)
    simulations: list[Simulation] = []

    def run_by(fn):
        simulate_draw = simulated(fn, timeout=timeout, sums_in_order=sums_in_order)

        def run(*args):
            simulations.append(simulate_draw(*args))
            return simulations[-1].outputs  # races are told by themselves, and do not hide the values

        return run

    table = check_parity(backends=[backend], cases={"case": case}, dtypes=[dtype], run=run_by)
    return Judged(table, simulations)


def only(pass_: str) -> Callable[..., str | None]:
    """`supports` for one pass; the other comes from the xla backend, or is left out."""
    return lambda problem, arch, asked: None if asked == pass_ else "left out"


@contextlib.contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes replaced, and the kernels traced anew inside."""
    with pytest.MonkeyPatch.context() as patch:
        launches = [
            (hopper_fwd, "_launch"),
            (hopper_bwd, "launch"),
            (hopper_bwd_deep, "launch"),
            (hopper_bias_grad, "_launch"),
            (hopper_few_rows, "_launch"),
        ]
        for module, name in (*launches, (hopper_bwd_rows, "row_sums")):
            # Without its jit, which would give back what was traced before.
            patch.setattr(module, name, getattr(module, name).__wrapped__)
        for target, name, value in patches:
            patch.setattr(target, name, value)
        yield


class StandIn:
    """`plgpu` for a kernel's module, less some events.

    An event is a primitive's name and that of the scratch it is given, as in "barrier_wait k_ready", or of the nth call
    of a primitive in the text, as in "commit_smem #2". `hits` counts the calls that were changed.

    Args:
      drop: events to leave out.
      early: (barrier, tile): arrivals at this barrier stand right after the matmul that reads the tile instead.
    """

    def __init__(self, *drop: str, early: tuple[str, str] | None = None):
        self.drop, self.early = drop, early
        self.scratch: dict[str, Any] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.hits = 0
        self._slot: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(plgpu, name)

    def recording(self, scratch: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel's scratch tuple, which knows the refs by name."""

        def make(**refs):
            self.scratch = refs
            self.counts.clear()
            return scratch(**refs)

        return make

    def _name(self, ref: Any) -> str:
        """Of the scratch that `ref` is a view of."""
        return next((name for name, known in self.scratch.items() if _whole(known) is _whole(ref)), "")

    def _drops(self, primitive: str, ref: Any = None) -> bool:
        self.counts[primitive] += 1
        named = primitive if ref is None else f"{primitive} {self._name(ref)}"
        events = (f"{primitive} #{self.counts[primitive]}", named)
        drops = any(event in self.drop for event in events)
        self.hits += drops
        return drops

    def barrier_wait(self, barrier: Any) -> None:
        if self.early and self._name(barrier) == self.early[0].replace("consumed", "ready"):
            self._slot = barrier
        if self._name(barrier) == "again_ready":  # the second pass has no ring
            self._slot = None
        if not self._drops("barrier_wait", barrier):
            plgpu.barrier_wait(barrier)

    def barrier_arrive(self, barrier: Any) -> None:
        if self.early and self._name(barrier) == self.early[0]:
            return
        if not self._drops("barrier_arrive", barrier):
            plgpu.barrier_arrive(barrier)

    def commit_smem(self) -> None:
        if not self._drops("commit_smem"):
            plgpu.commit_smem()

    def wgmma_wait(self, n: int) -> None:
        if not self._drops("wgmma_wait"):
            plgpu.wgmma_wait(n)

    def wait_smem_to_gmem(self, n: int, wait_read_only: bool = False) -> None:
        if not self._drops("read wait_smem_to_gmem" if wait_read_only else "wait_smem_to_gmem"):
            plgpu.wait_smem_to_gmem(n, wait_read_only=wait_read_only)

    def semaphore_wait(self, semaphore: Any, value: Any, **options: Any) -> None:
        if not self._drops("semaphore_wait"):
            plgpu.semaphore_wait(semaphore, value, **options)

    def wgmma(self, acc: Any, a: Any, b: Any) -> None:
        plgpu.wgmma(acc, a, b)
        if self.early and self._slot is not None and self._name(b) == self.early[1]:
            # The slot of this step: that of the barrier waited for last, whose ring has as many.
            plgpu.barrier_arrive(dataclasses.replace(self._slot, ref=self.scratch[self.early[0]]))
            self.hits += 1

    def wgmma_accumulator_load(self, acc: Any, *, wait_n: int | None) -> Any:
        """What is dropped is the wait."""
        drops = self._drops("wgmma_accumulator_load")
        return plgpu.wgmma_accumulator_load(acc, wait_n=None if drops else wait_n)


def _whole(ref: Any) -> Any:
    """Tiles of scratch are views themselves."""
    while hasattr(ref, "ref"):
        ref = ref.ref
    return ref


SHARED_PARTS = {
    hopper_few_rows: (hopper_few_rows_join,),
    hopper_fwd: (forward_parts, hopper_fwd_again, hopper_fwd_out),
    hopper_bwd: (hopper_bwd_d_query, hopper_bwd_in_order, hopper_bwd_load, hopper_bwd_send, hopper_bwd_steps),
    hopper_bwd_apart: (hopper_d_query_parts,),
    hopper_bwd_beside: (hopper_d_query_parts,),
    hopper_bwd_deep_query: (hopper_d_query_parts,),
}
"""The modules that have some of a kernel's events."""


@contextlib.contextmanager
def changed(module: Any, stand_in: StandIn, *patches: tuple[Any, str, Any]) -> Iterator[StandIn]:
    name = "_Scratch" if hasattr(module, "_Scratch") else "Scratch"
    scratch = module, name, stand_in.recording(getattr(module, name))
    shared = [(part, "plgpu", stand_in) for part in SHARED_PARTS.get(module, ())]
    with patched((module, "plgpu", stand_in), *shared, scratch, *patches):
        yield stand_in


def backward_tiles(tiles: Any) -> tuple[Any, str, Any]:
    """A patch, as `forward_tiles`."""
    return type(tiles), "of", classmethod(lambda cls, problem: tiles)


def forward_tiles(tiles: Any) -> tuple[Any, str, Any]:
    """A patch: these tiles whatever the problem."""
    return hopper_fwd.HopperForwardTiles, "of", classmethod(lambda cls, problem, measured=None: tiles)


def square(length: int, **options: Any) -> Case:
    return dataclasses.replace(Case(q_len=length, kv_len=length, batch=1), **options)


@functools.cache
def draw(batch: int = 2, length: int = 100, heads: int = 2, depth: int = 64):
    """query, key, value, d_out."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(batch, length, heads, depth)), jnp.float16) for _ in range(4))


def both_passes(problem: Problem, inputs: Inputs, aux: Aux, d_out):
    """out, lse and gradients, lse's gradient being 0."""

    def both(inputs, aux, d_out):
        out, lse = hopper_call.forward(problem, inputs, aux)
        return out, lse, hopper_call.backward(problem, Residuals(inputs, aux, out, lse), d_out, jnp.zeros_like(lse))

    return simulate(both, inputs, aux, d_out).check()


# Blocks of several pieces each.
_FORWARD_TILES = forward_tiles(hopper_fwd.HopperForwardTiles(2, 64, blocks=1))


def _judge_changed(
    module: Any, case: Case, stand_in: StandIn, *patches: tuple[Any, str, Any], sums_in_order: bool = False
) -> Judged:
    pass_ = "forward" if module is hopper_fwd else "backward"
    rows_by_xla = (hopper_bwd_rows, "takes", lambda *_: False)  # test_hopper_attention_rows.py has their kernel
    together = (hopper_bwd_config, "LONGEST_D_QUERY_APART", {})
    with changed(module, stand_in, _FORWARD_TILES, rows_by_xla, together, *patches):
        return judge(case, supports=only(pass_), timeout=20.0, sums_in_order=sums_in_order)


def nothing_found(module: Any, case: Case) -> None:
    """Checks a kernel in which no fault is planted."""
    stand_in = StandIn()
    _judge_changed(module, case, stand_in).check()
    assert stand_in.counts["barrier_wait"] > 0  # it was asked
    assert stand_in.hits == 0


def found(
    module: Any,
    fault: str,
    faults: Mapping[str, tuple[Case, Any, str]],
    *patches: tuple[Any, str, Any],
    sums_in_order: bool = False,
) -> None:
    """Checks that the last simulation tells of the fault, by its kind of access."""
    case, stand_in, access = faults[fault]
    judged = _judge_changed(module, case, stand_in, *patches, sums_in_order=sums_in_order)
    assert stand_in.hits > 0, "the kernel has no such event any more"
    (sim,) = judged.simulations[-1:]
    assert sim.faulty
    assert tells(sim, access), sim.report()
