"""The Hopper matmul of the MLP in all its tile choices, compiled by the real assembler."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from deviceless.mlp import LAUNCHES, MORE, WEIGHTS, Launch, together
from fast_layers.ops.mlp.config import HOPPER_SMEM_BYTES, HopperFewRowsTiles, HopperMatmulTiles
from fast_layers.ops.mlp.hopper_matmul import tiles_of
from fast_layers.testing import Compilation, compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]

# Bytes of spilled stores, about a fifth above what ptxas 13.3 made of them on 2026-11-22. Counters and addresses, once
# a tile: none is in the loop over the depth.
SPILLS = {
    "up and gate": 24,
    "backward, gated": 32,
    "backward, gated, deep": 24,
    "backward, gated, biases": 32,
}
MOST_SECONDS = 90.0


Tiles = HopperMatmulTiles | HopperFewRowsTiles


def _chosen(launches: Sequence[Launch]) -> Tiles:
    first = launches[0]
    if len(launches) == 1:
        return tiles_of(first.matmul)
    return HopperMatmulTiles.of_several([(x.rows, x.columns) for x in launches], first.depth, first.matmul.needs)


def _compilation(launches: Sequence[Launch], tiles: Tiles) -> Compilation:
    if len(launches) == 1:
        return launches[0].compilation("hopper_matmul", tiles)
    return together(launches, tiles)


def _faults(calls: dict[str, Sequence[Launch]]) -> list[str]:
    tiles = {name: _chosen(launches) for name, launches in calls.items()}
    reports = compile_all_for("h200", [_compilation(launches, tiles[name]) for name, launches in calls.items()])
    faults = []
    for (name, launches), report in zip(calls.items(), reports, strict=True):
        print(f"{name}: lowered and compiled in {report.seconds:.1f} s, {tiles[name]}")
        if report.failure is not None:
            faults.append(f"{name}: {report.failure}")
            continue
        kernel = report.kernel
        print(
            f"  {kernel.live_registers} registers of {max(kernel.register_budgets)}, {kernel.smem_bytes} bytes of "
            f"shared memory, {kernel.spill_store_bytes} spilled, {kernel.total_instructions} instructions: "
            f"{ {n: kernel.instructions.get(n, 0) for n in ('HGMMA', 'MUFU', 'FFMA', 'FMUL', 'FADD')} }"
        )
        if report.seconds > MOST_SECONDS:
            faults.append(f"{name}: {report.seconds:.0f} s")
        faults += [f"{name}: serialised, {warning}" for warning in kernel.serialised_wgmma]
        if kernel.smem_bytes is None or kernel.smem_bytes > HOPPER_SMEM_BYTES:
            faults.append(f"{name}: {kernel.smem_bytes} bytes of shared memory exceed {HOPPER_SMEM_BYTES}")
        elif kernel.smem_bytes > tiles[name].smem_bytes(launches[0].matmul.needs):
            faults.append(f"{name}: {kernel.smem_bytes} bytes of shared memory are more than config.py reckons")
        if kernel.spill_store_bytes > SPILLS.get(name, 0):
            faults.append(f"{name}: {kernel.spill_store_bytes} bytes are spilled, of {SPILLS.get(name, 0)} at most")
    return faults


MANY, FEW = WEIGHTS.items()


def _alone(launches: dict[str, Launch]) -> dict[str, Sequence[Launch]]:
    return {name: (x,) for name, x in launches.items()}


def test_kernels_compile_well():
    faults = _faults(_alone(LAUNCHES) | dict([MANY]))
    assert not faults, "\n".join(faults)


@pytest.mark.exhaustive
def test_all_kernels_compile_well():
    faults = _faults(_alone(MORE) | dict([FEW]))
    assert not faults, "\n".join(faults)
