"""The Hopper matmul of the MLP in all its tile choices, compiled by the real assembler."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fast_layers.ops.mlp.config import HOPPER_SMEM_BYTES, HopperMatmulTiles
from fast_layers.ops.mlp.hopper_epilogue import Activate, Differentiate, Epilogue, Plain
from fast_layers.ops.mlp.hopper_matmul import Matmul, Operands, multiply
from fast_layers.testing import Compilation, compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]

PLAIN = Plain()


@dataclasses.dataclass(frozen=True)
class Launch:
    rows: int
    columns: int
    depth: int
    epilogue: Epilogue = PLAIN
    terms: int = 1
    a_turned: bool = False
    b_turned: bool = False
    dtype: Any = jnp.bfloat16

    @property
    def matmul(self) -> Matmul:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Matmul(**{**fields, "dtype": jnp.dtype(self.dtype)})

    @property
    def tiles(self) -> HopperMatmulTiles:
        return HopperMatmulTiles.of(self.rows, self.columns, self.depth, self.matmul.needs)

    def compilation(self) -> Compilation:
        def shape(rows, columns, turned=False) -> Any:
            return jax.ShapeDtypeStruct((columns, rows) if turned else (rows, columns), self.dtype)

        bias: Any = jax.ShapeDtypeStruct((self.columns,), self.dtype)

        operands = Operands(
            (shape(self.rows, self.depth, self.a_turned),) * self.terms,
            (shape(self.depth, self.columns, self.b_turned),) * max(self.terms, self.epilogue.products),
            tuple(bias if has else None for has in self.epilogue.biases),
            (shape(self.rows, self.columns),) * self.epilogue.reads,
        )
        return Compilation(launch, (operands,), {"m": self.matmul})


def launch(operands: Operands, *, m: Matmul):
    return multiply(m, operands)


TOKENS = 8192
LAUNCHES = {
    "up, gelu": Launch(TOKENS, 8192, 2048, Activate("gelu_tanh", (True,))),
    "up and gate": Launch(TOKENS, 5504, 2048, Activate("silu", (False, False))),
    "backward, gelu": Launch(TOKENS, 8192, 2048, Differentiate("gelu_tanh", (True,)), b_turned=True),
    "backward, gated": Launch(TOKENS, 5504, 2048, Differentiate("silu", (False, False)), b_turned=True),
    "x's gradient, gated": Launch(TOKENS, 2048, 5504, b_turned=True, terms=2),
}
MORE = {
    "a weight's gradient": Launch(2048, 8192, TOKENS, a_turned=True),
    "down": Launch(TOKENS, 2048, 8192, Plain((True,))),
    "up, gelu, nothing saved": Launch(TOKENS, 8192, 2048, Activate("gelu_tanh", (True,), saves=False)),
    "up, erf": Launch(TOKENS, 8192, 2048, Activate("gelu", (True,))),
    "up, identity": Launch(TOKENS, 8192, 2048, Activate("identity", (True,), saves=False)),
    "up and gate, biases": Launch(TOKENS, 5504, 2048, Activate("gelu", (True, True))),
    "up and gate anew": Launch(TOKENS, 5504, 2048, Plain((True, True))),
    "up, deep": Launch(TOKENS, 32768, 8192, Activate("gelu_tanh", (True,))),
    "up and gate, deep": Launch(TOKENS, 21888, 8192, Activate("silu", (False, False))),
    "backward, deep": Launch(TOKENS, 32768, 8192, Differentiate("gelu_tanh", (True,)), b_turned=True),
    "backward, gated, deep": Launch(TOKENS, 21888, 8192, Differentiate("silu", (True, True)), b_turned=True),
    "backward, gated, biases": Launch(TOKENS, 5504, 2048, Differentiate("gelu", (True, True)), b_turned=True),
    "backward, relu squared": Launch(TOKENS, 8192, 2048, Differentiate("relu_squared", (True,)), b_turned=True),
    "backward, relu": Launch(TOKENS, 8192, 2048, Differentiate("relu"), b_turned=True),
    "backward, sigmoid": Launch(TOKENS, 8192, 2048, Differentiate("sigmoid"), b_turned=True),
    "float16": Launch(TOKENS, 8192, 2048, Differentiate("gelu_tanh", (True,)), b_turned=True, dtype=jnp.float16),
    "few rows": Launch(8, 8192, 2048, Activate("gelu_tanh", (True,))),
    "few rows, gated": Launch(8, 21888, 8192, Activate("silu", (False, False))),
    "few rows, backward": Launch(8, 8192, 2048, Differentiate("silu", (True, True)), b_turned=True),
    "a weight's gradient from few rows": Launch(2048, 8192, 8, a_turned=True),
    "few columns": Launch(TOKENS, 64, 2048, Activate("gelu_tanh", (True,))),
    "odd sizes": Launch(2047, 5464, 2056, Activate("silu", (True, True))),
}

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
    reports = compile_all_for("h200", [call.compilation() for call in launches.values()])
    faults = []
    for (name, call), report in zip(launches.items(), reports, strict=True):
        print(f"{name}: lowered and compiled in {report.seconds:.1f} s, {call.tiles}")
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
        elif kernel.smem_bytes > call.tiles.smem_bytes(call.matmul.needs):
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
