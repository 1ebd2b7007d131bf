"""The Hopper scan compiled by the real assembler, in all its tile choices."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

from deviceless import ssd_functions
from fast_layers.ops.ssd.config import HOPPER_SMEM_BYTES
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
    everything: bool = False  # D, z, dt_bias, initial state, documents

    def compilation(self) -> Compilation:
        def shape(*sizes, dtype=jnp.bfloat16):
            return jax.ShapeDtypeStruct(sizes, dtype)

        batch, rows = 2, (2, self.length, self.heads)
        by_group = (batch, self.length, self.groups, self.state_dim)
        operands = {
            "x": shape(*rows, self.head_dim),
            "dt": shape(*rows),
            "A": shape(self.heads, dtype=jnp.float32),
            "B": shape(*by_group),
            "C": shape(*by_group),
        }
        if self.everything:
            operands |= {
                "D": shape(self.heads, dtype=jnp.float32),
                "z": shape(*rows, self.head_dim),
                "dt_bias": shape(self.heads, dtype=jnp.float32),
                "initial_state": shape(batch, self.heads, self.head_dim, self.state_dim, dtype=jnp.float32),
                "segment_ids": shape(batch, self.length, dtype=jnp.int32),
            }
        return Compilation(ssd_functions.scan, (operands,), {"dt_softplus": True})


CALLS = {
    "P64 N128": Call(),
    "P64 N128, everything": Call(everything=True),
    "P64 N128, a group for each head": Call(heads=3, groups=3),
    "P128 N64, everything, odd length": Call(heads=3, head_dim=128, state_dim=64, length=1001, everything=True),
    "P32 N16": Call(heads=4, head_dim=32, state_dim=16),
}
# Of the kernel; a second or two on an idle machine.
MOST_SECONDS = 90.0


def test_the_kernel_compiles_well():
    reports = compile_all_for("h200", [call.compilation() for call in CALLS.values()])
    faults = []
    for name, report in zip(CALLS, reports, strict=True):
        if report.failure is not None:
            faults.append(f"{name}: {report.failure}")
            continue
        if report.seconds > MOST_SECONDS:
            faults.append(f"{name}: {report.seconds:.0f} s")
        (kernel,) = (kernel for kernel in report.kernels if kernel.name == "ssd_forward")
        print(
            f"{name}: {kernel.live_registers} registers of {max(kernel.register_budgets)}, {kernel.smem_bytes} bytes "
            f"of shared memory, {kernel.spill_store_bytes} spilled; in {report.seconds:.1f} s"
        )
        faults += [f"{name}: serialised, {warning}" for warning in kernel.serialised_wgmma]
        if kernel.smem_bytes is None or kernel.smem_bytes > HOPPER_SMEM_BYTES:
            faults.append(f"{name}: {kernel.smem_bytes} bytes of shared memory exceed {HOPPER_SMEM_BYTES}")
        if kernel.spills:
            faults.append(f"{name}: {kernel.spill_store_bytes} bytes are spilled")
    assert not faults, "\n".join(faults)
