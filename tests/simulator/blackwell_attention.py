"""The Blackwell attention kernels in the simulator: as a backend for `check_parity`, and with one event left out.

The kernels know nothing of this. `without` puts a stand-in for `plgpu` into a kernel's module, which passes everything
on but the events that a fault drops.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.arch import Arch
from fast_layers.dispatch import Backend
from fast_layers.ops.attention import (
    blackwell_bias_grad,
    blackwell_bwd,
    blackwell_bwd_fused,
    blackwell_call,
    blackwell_fwd,
    blackwell_grad_parts,
    forward_parts,
)

B200 = Arch("cuda", "NVIDIA B200", (10, 0))
BLACKWELL = Backend(
    "blackwell",
    lambda problem, arch, pass_: blackwell_call.supports(problem, B200, pass_),
    blackwell_call.forward,
    blackwell_call.backward,
)


@contextlib.contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes replaced, and the kernels traced anew inside."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (blackwell_fwd, blackwell_bwd, blackwell_bwd_fused, blackwell_bias_grad):
            # Without its jit, which would give back what was traced before.
            patch.setattr(module, "_launch", module._launch.__wrapped__)
        for target, name, value in patches:
            patch.setattr(target, name, value)
        yield


def forward_tiles(tiles: Any) -> tuple[Any, str, Any]:
    """A patch: these tiles whatever the problem."""
    return blackwell_fwd.BlackwellForwardTiles, "of", classmethod(lambda cls, problem: tiles)


class Without:
    """`plgpu` for a kernel's module, less some events.

    An event is a primitive's name and that of the barrier it is given, as in "barrier_wait k_ready", or of the nth call
    of a primitive in the text of a kernel, as in "commit_smem #2". `hits` counts the calls that were left out.
    """

    def __init__(self, *events: str):
        self.events = events
        self.scratch: dict[str, Any] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.hits = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(plgpu, name)
        return self._listening(name, real) if name in _EVENTS else real

    def _listening(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.counts[name] += 1
            events = {f"{name} #{self.counts[name]}", f"{name} {self._name(args[0])}".rstrip() if args else name}
            if events.isdisjoint(self.events):
                return real(*args, **options)
            self.hits += 1
            return None

        return call

    def recording(self, scratch: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel's scratch tuple, which knows the refs by name."""

        def make(**refs):
            self.scratch = refs
            self.counts.clear()
            return scratch(**refs)

        return make

    def _name(self, ref: Any) -> str:
        """Of the scratch that `ref` is a view of."""
        return next(
            (name for name, known in self.scratch.items() if known is ref or known is getattr(ref, "ref", ref)), ""
        )


_EVENTS = {
    "barrier_wait",
    "commit_smem",
    "commit_tmem",
    "wait_load_tmem",
    "tcgen05_commit_arrive",
    "wait_smem_to_gmem",
}


@contextlib.contextmanager
def without(
    module: Any, *events: str, patches: tuple[tuple[Any, str, Any], ...] = (), stand_in: Without | None = None
) -> Iterator[Without]:
    stand_in = Without(*events) if stand_in is None else stand_in
    scratch = (module, "_Scratch", stand_in.recording(module._Scratch))
    shared = forward_parts if module is blackwell_fwd else blackwell_grad_parts
    with patched((module, "plgpu", stand_in), (shared, "plgpu", stand_in), scratch, *patches):
        yield stand_in
