"""The Hopper convolution and gated norm compiled by the real assembler, forward and backward."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

from deviceless import mamba2_functions
from fast_layers.testing import Compilation, compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]


def _struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def conv(channels: int, dtype=jnp.bfloat16, length: int = 4096, taps: int = 4, everything: bool = False) -> Compilation:
    """`everything`: states in and out, documents."""
    x, state = _struct(8, length, channels, dtype=dtype), _struct(8, channels, taps - 1, dtype=dtype)
    operands = (x, _struct(taps, channels, dtype=dtype), _struct(channels, dtype=dtype), state if everything else None)
    if not everything:
        return Compilation(mamba2_functions.conv, (operands, x))
    return Compilation(mamba2_functions.conv, (operands, (x, state), _struct(8, length, dtype=jnp.int32)))


def norm(features: int, groups: int = 1, dtype=jnp.bfloat16, rows: int = 32_768, before: bool = False) -> Compilation:
    y = _struct(rows, features, dtype=dtype)
    static = {"group_size": features // groups, "norm_before_gate": before}
    return Compilation(mamba2_functions.norm, ((y, y, _struct(features, dtype=jnp.float32)), y), static)


CALLS = {
    "conv, 2 channels a thread": conv(5376),
    "conv, 2 channels a thread, everything": conv(7168, length=4095, everything=True),
    "norm, rows of 5120": norm(5120),
    "norm, rows of 640 in eight groups": norm(5120, groups=8, rows=1001),
}
MORE = {
    "conv, 1 channel a thread, float16": conv(384, jnp.float16, length=1000),
    "conv, float32, everything": conv(512, jnp.float32, everything=True),
    "conv, 2 taps": conv(1024, taps=2),
    "norm, rows of 8192, norm before gate": norm(8192, before=True),
    "norm, rows of 8192, float32": norm(8192, dtype=jnp.float32),
    "norm, rows of 1024, float32, norm before gate": norm(8192, groups=8, dtype=jnp.float32, before=True),
    "norm, rows of 1280, float16": norm(1280, dtype=jnp.float16),
    "norm, rows of 64": norm(256, groups=4),
}


@pytest.mark.parametrize("calls", [CALLS, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["some", "the rest"])
def test_the_kernels_compile_without_spills(calls):
    reports = compile_all_for("h200", list(calls.values()))
    faults = []
    for name, report in zip(calls, reports, strict=True):
        if report.failure is not None:
            faults.append(f"{name}: {report.failure}")
            continue
        kinds = {kernel.name for kernel in report.kernels}
        if len(kinds) != 2:
            faults.append(f"{name}: a forward and a backward kernel were expected, got {kinds}")
        for kernel in report.kernels:
            print(
                f"{name}, {kernel.name}: {kernel.registers} registers, {kernel.spill_store_bytes} bytes spilled, "
                f"{kernel.total_instructions} instructions, {kernel.instructions.get('BAR', 0)} barriers; "
                f"in {report.seconds:.1f} s"
            )
            if kernel.spills:
                faults.append(f"{name}, {kernel.name}: {kernel.spill_store_bytes} bytes are spilled")
            # What stands between warps are the norm's sums, where a row is on all four.
            if kernel.instructions.get("BAR", 0) > 8:
                faults.append(f"{name}, {kernel.name}: {kernel.instructions['BAR']} barriers")
    assert not faults, "\n".join(faults)
