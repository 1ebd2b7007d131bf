"""The Hopper scan compiled by the real assembler, both passes, in all its tile choices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import pytest

import fast_layers
from deviceless import ssd_functions
from fast_layers.dispatch import Pass
from fast_layers.ops.ssd.config import HOPPER_SMEM_BYTES, HopperBackwardTiles, HopperForwardTiles, HopperStateTiles
from fast_layers.ops.ssd.problem import Problem
from fast_layers.testing import Compilation, compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]


@dataclasses.dataclass(frozen=True)
class Call:
    heads: int = 80
    groups: int = 1
    head_dim: int = 64
    state_dim: int = 128
    length: int = 4096
    batch: int = 2
    everything: bool = False  # D, z, dt_bias, initial state, documents

    def compilation(self, pass_: Pass) -> Compilation:
        def shape(*sizes, dtype=jnp.bfloat16):
            return jax.ShapeDtypeStruct(sizes, dtype)

        rows = (self.batch, self.length, self.heads)
        by_group = (self.batch, self.length, self.groups, self.state_dim)
        operands = {
            "x": shape(*rows, self.head_dim),
            "dt": shape(*rows),
            "A": shape(self.heads, dtype=jnp.float32),
            "B": shape(*by_group),
            "C": shape(*by_group),
        }
        state = shape(self.batch, self.heads, self.head_dim, self.state_dim, dtype=jnp.float32)
        if self.everything:
            operands |= {
                "D": shape(self.heads, dtype=jnp.float32),
                "z": shape(*rows, self.head_dim),
                "dt_bias": shape(self.heads, dtype=jnp.float32),
                "initial_state": state,
                "segment_ids": shape(self.batch, self.length, dtype=jnp.int32),
            }
        if pass_ == "forward":
            return Compilation(ssd_functions.scan, (operands,), {"dt_softplus": True})
        return Compilation(ssd_functions.gradients, (operands, (operands["x"], state)), {"dt_softplus": True})


CALLS = {
    "P64 N128, in two launches": Call(batch=8),
    "P64 N128, everything": Call(everything=True),
    "P64 N128, a group for each head": Call(heads=3, groups=3),
    "P128 N64, everything, odd length": Call(heads=3, head_dim=128, state_dim=64, length=1001, everything=True),
    "P32 N16": Call(heads=4, head_dim=32, state_dim=16),
    "P64 N256, everything": Call(state_dim=256, everything=True),
}
MORE_CALLS = {
    "P64 N128": Call(),
    "P64 N128, everything, in two launches": Call(batch=8, everything=True),
    "P64 N256, everything, in two launches": Call(batch=2, state_dim=256, everything=True),
    "P64 N64, everything": Call(heads=4, state_dim=64, everything=True),
    "P64 N256": Call(state_dim=256),
    "P128 N256, everything, odd length": Call(heads=3, head_dim=128, state_dim=256, length=1001, everything=True),
    "P64 N256, split": Call(batch=1, length=32_768, state_dim=256),
    "P64 N128, four heads, split": Call(heads=4, groups=2, length=1000),
}
SPLIT = Call(batch=1, length=32_768)
BACKWARD = {"ssd_states", "ssd_backward"}
# Where shared memory begins, and a number that only the load warpgroup's start wants; in the forward two numbers, of a
# split sequence.
MOST_SPILLED_BYTES = {("ssd_backward", 256): 8, ("ssd_forward", 128): 8}
# Of all kernels of a call; a second or two for each on an idle machine.
MOST_SECONDS = 90.0


def test_forward_compiles_well():
    _check(CALLS.items(), "forward", {"ssd_forward"})


@pytest.mark.exhaustive
def test_forward_of_a_split_sequence_compiles_well():
    splits = [(name, call) for name, call in MORE_CALLS.items() if "split" in name]
    _check([("split", SPLIT), *splits], "forward", {"ssd_forward", "ssd_states"})


@pytest.mark.exhaustive
def test_forward_of_more_calls_compiles_well():
    _check([(name, call) for name, call in MORE_CALLS.items() if "split" not in name], "forward", {"ssd_forward"})


def test_backward_compiles_well():
    _check([("everything", CALLS["P64 N128, everything"])], "backward", BACKWARD)


@pytest.mark.exhaustive
def test_backward_of_all_calls_compiles_well():
    _check([*CALLS.items(), *MORE_CALLS.items(), ("split", SPLIT)], "backward", BACKWARD)


def problem_of(call: Call) -> Problem:
    (operands,) = call.compilation("forward").shapes
    explained = fast_layers.explain(lambda operands: fast_layers.ssd(**operands, implementation="reference"), operands)
    return explained.plans[0].problem


def expected_smem_bytes(kernel: str, p: Problem) -> int:
    """By what the choice of tiles goes."""
    match kernel:
        case "ssd_forward":
            return HopperForwardTiles.of(p).smem_bytes(p.state_dim, p.gated)
        case "ssd_backward":
            return HopperBackwardTiles.of(p).smem_bytes(p.state_dim, p.gated)
        case _:
            return HopperStateTiles.of(p).smem_bytes(p.state_dim)


def _check(calls: Iterable[tuple[str, Call]], pass_: Pass, kernels: set[str]) -> None:
    calls = list(calls)
    reports = compile_all_for("h200", [call.compilation(pass_) for _, call in calls])
    faults = []
    for (name, call), report in zip(calls, reports, strict=True):
        if report.failure is not None:
            faults.append(f"{name}: {report.failure}")
            continue
        if report.seconds > MOST_SECONDS:
            faults.append(f"{name}: {report.seconds:.0f} s")
        problem = problem_of(call)
        split = {"ssd_states"} if HopperForwardTiles.of(problem).splits > 1 else set()
        if (found := {kernel.name for kernel in report.kernels}) != kernels | split:
            faults.append(f"{name}: kernels {found}")
        for kernel in report.kernels:
            smem = "?" if kernel.smem_bytes is None else kernel.smem_bytes
            print(
                f"{name}, {kernel.name}: {kernel.live_registers} registers of {max(kernel.register_budgets)}, {smem} "
                f"bytes of shared memory, {kernel.spill_store_bytes} spilled; in {report.seconds:.1f} s"
            )
            faults += [f"{name}: serialised, {warning}" for warning in kernel.serialised_wgmma]
            if kernel.spill_store_bytes > MOST_SPILLED_BYTES.get((kernel.name, call.state_dim), 0):
                faults.append(f"{name}: {kernel.spill_store_bytes} bytes are spilled")
            # The two of a split sequence differ in what they keep, and have one name.
            most = min(HOPPER_SMEM_BYTES, expected_smem_bytes(kernel.name, problem))
            if kernel.smem_bytes is not None and kernel.smem_bytes > most:
                faults.append(f"{name}: {kernel.smem_bytes} bytes of shared memory exceed {most}")
    assert not faults, "\n".join(faults)
