"""The Hopper matmul of the MLP in all its tile choices, compiled by the real assembler."""

from __future__ import annotations

import os

import pytest

from deviceless.mlp import LAUNCHES, MORE, Launch
from fast_layers.ops.mlp.config import HOPPER_SMEM_BYTES, HopperMatmulTiles
from fast_layers.testing import compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]

# Bytes of spilled stores, about a fifth above what ptxas 13.3 made of them on 2026-11-22. Counters and addresses, once
# a tile: none is in the loop over the depth.
SPILLS = {
    "up and gate": 24,
    "backward, gated": 90,
    "backward, gated, deep": 68,
    "backward, gated, biases": 96,
    "few rows, gated": 24,
    "float16": 44,
}
MOST_SECONDS = 90.0


def _faults(launches: dict[str, Launch]) -> list[str]:
    tiles = {
        name: HopperMatmulTiles.of(x.rows, x.columns, x.depth, x.matmul.needs, x.terms) for name, x in launches.items()
    }
    reports = compile_all_for("h200", [x.compilation("hopper_matmul", tiles[name]) for name, x in launches.items()])
    faults = []
    for (name, call), report in zip(launches.items(), reports, strict=True):
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
        elif kernel.smem_bytes > tiles[name].smem_bytes(call.matmul.needs):
            faults.append(f"{name}: {kernel.smem_bytes} bytes of shared memory are more than config.py reckons")
        if kernel.spill_store_bytes > SPILLS.get(name, 0):
            faults.append(f"{name}: {kernel.spill_store_bytes} bytes are spilled, of {SPILLS.get(name, 0)} at most")
    return faults


def test_kernels_compile_well():
    faults = _faults(LAUNCHES)
    assert not faults, "\n".join(faults)


@pytest.mark.exhaustive
def test_all_kernels_compile_well():
    faults = _faults(MORE)
    assert not faults, "\n".join(faults)
