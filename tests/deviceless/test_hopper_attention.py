"""The Hopper attention kernels, chosen by themselves and compiled by the real assembler, in all their tile choices."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deviceless import attention_functions, functions
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES
from fast_layers.testing import Compilation, compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]


@dataclasses.dataclass(frozen=True)
class Call:
    length: int = 8192
    heads: int = 16
    kv_heads: int = 16
    qk_dim: int = 128
    v_dim: int | None = None
    batch: int = 2
    segments: bool = False
    bias: bool = False
    mask: bool = False
    leaves_d_scores: bool = False
    """At depths up to 128."""
    beside: bool = False
    """Whether blocks of the same launch make dQ of dS."""
    whole_heads: bool = False
    cut: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def kernels(self) -> tuple[str, ...]:
        deep = max(self.qk_dim, self.v_dim or 0) > 128
        both = "attention_forward", "attention_backward_deep" if deep else "attention_backward"
        more = {
            "attention_bias_gradient": self.bias,
            "attention_backward_query": self.d_query_apart and not self.beside,
            "attention_backward_parts": self.cut,
        }
        return *both, *(name for name, there in more.items() if there)

    @property
    def d_query_apart(self) -> bool:
        if max(self.qk_dim, self.v_dim or 0) > 128:
            known = not (self.segments or self.bias or self.mask or "dropout_rate" in self.options)
            whole = self.length % 128 == self.qk_dim % 64 == (self.v_dim or self.qk_dim) % 64 == 0
            return known and whole and "local_window_size" not in self.options
        windowed = self.qk_dim == 128 and "local_window_size" in self.options
        return windowed or self.leaves_d_scores

    def compilation(self) -> Compilation:
        def shape(length, heads, depth):
            return jax.ShapeDtypeStruct((self.batch, length, heads, depth), jnp.bfloat16)

        v_dim = self.v_dim or self.qk_dim
        shapes = (
            shape(self.length, self.heads, self.qk_dim),
            shape(self.length, self.kv_heads, self.qk_dim),
            shape(self.length, self.kv_heads, v_dim),
            shape(self.length, self.heads, v_dim),
        )
        if self.bias or self.mask or "dropout_rate" in self.options:
            square = (self.length, self.length)
            bias = jax.ShapeDtypeStruct((1, self.heads, *square), jnp.bfloat16) if self.bias else None
            mask = jax.ShapeDtypeStruct((self.batch, 1, *square), bool) if self.mask else None
            options = {"implementation": "hopper"} | self.options
            return Compilation(attention_functions.attention_per_score, (*shapes, bias, mask), options)
        # An argument: XLA takes many seconds to fold what is computed from a constant of this length.
        ids = (jax.ShapeDtypeStruct((self.length,), jnp.int32),) if self.segments else ()
        return Compilation(functions.attention_and_gradients, (*shapes, *ids), self.options)


CAUSAL = {"is_causal": True}
ANY_ORDER = {"reproducible": False}
WINDOW = {"is_causal": True, "local_window_size": (1023, 0)}
SOFTCAP = {"softcap": 30.0}
DROPOUT = {"dropout_rate": 0.1}
EVERYTHING = {"is_causal": True, "softcap": 30.0, "sinks": np.zeros(16, np.float32), "local_window_size": (1024, 0)}
FEW_HEADS: dict[str, Any] = {"heads": 8, "kv_heads": 8, "batch": 1}
"""Too few to leave their dS in groups without a mask."""
TWO_HEADS: dict[str, Any] = {"heads": 2, "kv_heads": 2, "batch": 1}
"""Likewise under a causal mask."""
BATCHES = {
    "shallow": {
        "d64 full": Call(heads=32, kv_heads=32, qk_dim=64, cut=True),
        "d64 causal, spans of their own": Call(512, qk_dim=64, batch=8, whole_heads=True, options=CAUSAL),
        "d64 full, clusters": Call(1024, qk_dim=64, batch=8, whole_heads=True),
        "d64 full, sizes of keys": Call(2048, heads=32, kv_heads=32, qk_dim=64, batch=8, cut=True),
    },
    "deep": {
        "d128 causal, grouped, dQ beside": Call(
            heads=32, kv_heads=8, leaves_d_scores=True, beside=True, options=CAUSAL
        ),
        "d128 full, grouped, parts of the queries": Call(32_768, heads=32, kv_heads=8, batch=1, leaves_d_scores=True),
        "d128 window": Call(options={"local_window_size": (1024, 0)}),
        "d128 everything": Call(kv_heads=4, segments=True, options=EVERYTHING),
        "d256 causal": Call(qk_dim=256, options=CAUSAL),
    },
    "more forms": {
        "d64 causal": Call(qk_dim=64, options=CAUSAL),
        "d64 segments": Call(kv_heads=4, qk_dim=64, segments=True, options=CAUSAL),
        "d128 causal, grouped, in parts": Call(
            4096, heads=32, kv_heads=8, batch=1, leaves_d_scores=True, options=CAUSAL
        ),
        "d128 causal, dQ beside": Call(leaves_d_scores=True, beside=True, options=CAUSAL),
        "d128 causal, long": Call(32_768, batch=1, leaves_d_scores=True, options=CAUSAL),
        "d128 causal, softcap": Call(leaves_d_scores=True, options=CAUSAL | SOFTCAP),
        "d192/128 causal": Call(qk_dim=192, v_dim=128, options=CAUSAL),
        "d64 everything": Call(kv_heads=4, qk_dim=64, segments=True, options=EVERYTHING),
        "d80 causal, odd length": Call(2047, qk_dim=80, options=CAUSAL),
        "d256 segments": Call(kv_heads=4, qk_dim=256, segments=True, options=CAUSAL),
        "d128 causal": Call(**TWO_HEADS, options=CAUSAL),
        "d128 causal, grouped, odd length": Call(2047, kv_heads=4, options=CAUSAL),
        "d128 full, grouped, in parts": Call(16384, heads=32, kv_heads=8, batch=1, leaves_d_scores=True),
        "d128 segments": Call(kv_heads=4, segments=True, options=CAUSAL),
        "d128 segments, dQ apart": Call(4096, segments=True, leaves_d_scores=True, options=CAUSAL),
        "d128 segments, grouped, dQ apart": Call(4096, kv_heads=4, segments=True, leaves_d_scores=True, options=CAUSAL),
        "d256 full": Call(qk_dim=256),
        "d128 full": Call(**FEW_HEADS),
        "d64 full, short": Call(512, qk_dim=64, batch=8, whole_heads=True),
        "d64 full, few heads": Call(512, **FEW_HEADS, qk_dim=64, leaves_d_scores=True),
        "d64 causal, two warpgroups": Call(1024, qk_dim=64, batch=8, whole_heads=True, options=CAUSAL),
        "d64 causal, whole grouped heads": Call(512, kv_heads=8, qk_dim=64, batch=16, whole_heads=True, options=CAUSAL),
        "d64 window, spans of their own": Call(qk_dim=64, options=WINDOW),
        "d64 softcap": Call(qk_dim=64, options=CAUSAL | SOFTCAP),
        "d128 window, softcap": Call(options=WINDOW | SOFTCAP),
        "d256/128 causal": Call(qk_dim=256, v_dim=128, options=CAUSAL),
        "d256/128 causal, short": Call(1024, qk_dim=256, v_dim=128, batch=8, options=CAUSAL),
        "d192/128 full": Call(qk_dim=192, v_dim=128),
        "d192/128 segments": Call(qk_dim=192, v_dim=128, segments=True, options=CAUSAL),
        "d192 full": Call(qk_dim=192),
        "d256 full, odd length": Call(2047, qk_dim=256),
        "d256 full, short": Call(512, qk_dim=256, batch=8),
        "d256 causal, odd length": Call(2047, qk_dim=256, options=CAUSAL),
        "d256 causal, short": Call(1024, qk_dim=256, batch=8, options=CAUSAL),
        "d192 causal": Call(qk_dim=192, options=CAUSAL),
        "d192 causal, short": Call(1024, qk_dim=192, batch=8, options=CAUSAL),
        "d192 segments": Call(qk_dim=192, segments=True, options=CAUSAL),
        "d64 causal, grouped": Call(kv_heads=4, qk_dim=64, options=CAUSAL),
        "d64 any order": Call(qk_dim=64, options=CAUSAL | ANY_ORDER),
        "d128 full, short": Call(2048, **FEW_HEADS),
        "d128 causal, dQ apart": Call(4224, leaves_d_scores=True, options=CAUSAL),
        "d128 full, dQ apart": Call(leaves_d_scores=True),
        "d128 full, dQ beside": Call(2048, batch=8, leaves_d_scores=True, beside=True),
        "d128 causal, short, dQ apart": Call(1024, batch=8, leaves_d_scores=True, options=CAUSAL),
        "d128 full, odd length": Call(2047),
        "d128 full, softcap": Call(options=SOFTCAP, leaves_d_scores=True),
        "d128 any order": Call(**TWO_HEADS, options=CAUSAL | ANY_ORDER),
    },
    "padded depths": {
        "d32 causal": Call(256, heads=4, kv_heads=2, qk_dim=32, options=CAUSAL),
        "d256/80 causal": Call(256, heads=4, kv_heads=4, qk_dim=256, v_dim=80, options=CAUSAL),
    },
    "more padded depths": {
        "d144 full, odd length": Call(333, heads=4, kv_heads=2, qk_dim=144),
        "d16 full": Call(512, heads=4, kv_heads=4, qk_dim=16),
        "d40 full": Call(512, heads=4, kv_heads=4, qk_dim=40),
        "d48 causal": Call(512, heads=4, kv_heads=4, qk_dim=48, options=CAUSAL),
        "d32 bias": Call(256, heads=4, kv_heads=2, qk_dim=32, bias=True),
        "d144 bias": Call(256, heads=4, kv_heads=2, qk_dim=144, bias=True),
        "d160 causal": Call(512, heads=4, kv_heads=4, qk_dim=160, options=CAUSAL),
        "d240 full": Call(512, heads=4, kv_heads=4, qk_dim=240),
        "d192/16 full, odd length": Call(333, heads=4, kv_heads=4, qk_dim=192, v_dim=16),
        "d208/256 causal": Call(512, heads=16, kv_heads=16, qk_dim=208, v_dim=256, batch=8, options=CAUSAL),
        "d208/256 segments": Call(512, qk_dim=208, v_dim=256, batch=8, segments=True, options=CAUSAL),
        "d256/240 full": Call(512, qk_dim=256, v_dim=240, batch=8),
        "d240/256 window": Call(512, qk_dim=240, v_dim=256, batch=8, options=WINDOW),
        "d256/208 full, few rows": Call(512, heads=4, kv_heads=4, qk_dim=256, v_dim=208),
    },
    "per score": {
        "d128 bias": Call(2048, bias=True),
        "d128 causal, dropout": Call(2048, options=CAUSAL | DROPOUT),
    },
    "more per score": {
        "d64 bias": Call(2048, qk_dim=64, bias=True),
        "d128 mask": Call(2048, mask=True),
        "d256 dropout": Call(2048, qk_dim=256, options=DROPOUT),
        "d64 mask, dropout": Call(2048, qk_dim=64, mask=True, options=DROPOUT),
        "d256 everything per score": Call(
            2048, qk_dim=256, bias=True, mask=True, options=CAUSAL | DROPOUT | {"softcap": 30.0}
        ),
    },
}

# Bytes of spilled stores: (forward, backward), about a fifth above what ptxas 13.3 made of them on 2026-11-20 to 22, or
# 13.5 from the 25th on. The backward keeps four accumulators, up to the last of its 240 registers; what it spills
# are addresses and bounds that ptxas hoists out of the loop over queries. The forward spills such too, out of the loops
# over passes and pieces, mostly for the second pass at depths over 192, where with documents the loop over keys has
# seven loads and stores of them; and where three compute warpgroups leave 32 registers to the load warpgroup.
SPILLS = {
    "d40 full": (0, 30),
    "d48 causal": (0, 24),
    "d32 bias": (0, 100, 0),
    "d64 full, short": (0, 34),
    "d64 full, clusters": (0, 40),
    "d64 full, few heads": (0, 0, 0),
    "d64 full": (0, 52, 0),
    "d64 full, sizes of keys": (0, 58, 0),
    "d64 causal, spans of their own": (10, 40),
    "d64 causal, two warpgroups": (0, 40),
    "d64 causal, whole grouped heads": (10, 63),
    "d64 window, spans of their own": (53, 72),
    "d64 softcap": (24, 670),
    "d64 causal": (24, 67),
    "d64 causal, grouped": (24, 120),
    "d64 any order": (24, 40),
    "d64 segments": (53, 240),
    "d64 everything": (58, 940),
    "d80 causal, odd length": (32, 80),
    "d32 causal": (0, 120),
    "d128 full, short": (0, 100),
    "d128 full": (0, 120),
    "d128 causal, dQ beside": (0, 53),
    "d128 causal, grouped, dQ beside": (0, 68),
    "d128 causal, long": (0, 29, 0),
    "d128 full, grouped, parts of the queries": (0, 0, 0),
    "d128 full, dQ beside": (0, 53),
    "d128 causal, dQ apart": (0, 43, 0),
    "d128 full, dQ apart": (0, 16, 0),
    "d128 causal, short, dQ apart": (0, 90, 0),
    "d128 full, odd length": (0, 145),
    "d128 full, softcap": (0, 80, 0),
    "d128 causal": (0, 72),
    "d128 causal, grouped, odd length": (0, 144),
    "d128 causal, grouped, in parts": (0, 100, 0),
    "d128 full, grouped, in parts": (0, 20, 0),
    "d128 any order": (0, 106),
    "d128 window": (0, 52, 0),
    "d128 window, softcap": (15, 200, 0),
    "d128 causal, softcap": (4, 210, 0),
    "d128 segments": (4, 350),
    "d128 everything": (24, 245, 0),
    "d128 segments, dQ apart": (0, 34, 0),
    "d128 segments, grouped, dQ apart": (0, 155, 0),
    "d192/128 causal": (0, 0, 0),
    "d192/128 segments": (10, 0),
    "d256 causal": (130, 0, 0),
    "d256 causal, odd length": (90, 0),
    "d256 causal, short": (165, 0, 0),
    "d256 segments": (140, 0),
    "d64 bias": (0, 320, 0),
    "d64 mask, dropout": (0, 1660),
    "d128 bias": (16, 200, 0),
    "d128 mask": (44, 220),
    "d128 causal, dropout": (0, 730),
    "d256 dropout": (0, 340),
    "d256 everything per score": (460, 1200, 8),
    "d208/256 causal": (10, 0),
    "d208/256 segments": (92, 0),
    "d240/256 window": (68, 0),
    "d256 full": (90, 0, 0),
    "d256 full, short": (90, 0, 0),
    "d256/128 causal": (29, 0, 0),
    "d256 full, odd length": (90, 0),
}
# Both kernels together; 6 to 40 on a busy machine of two cores.
MOST_SECONDS = 90.0


def _marks(batch: str) -> Any:
    return pytest.mark.exhaustive if batch.startswith("more") else ()


@pytest.mark.parametrize("batch", [pytest.param(name, marks=_marks(name)) for name in BATCHES])
def test_kernels_compile_well(batch):
    calls = BATCHES[batch]
    reports = compile_all_for("h200", [call.compilation() for call in calls.values()])
    faults = []
    for (name, call), report in zip(calls.items(), reports, strict=True):
        print(f"{name}: lowered and compiled in {report.seconds:.1f} s")
        if report.failure is not None:
            faults.append(f"{name}: {report.failure}")
            continue
        if report.seconds > MOST_SECONDS:
            faults.append(f"{name}: {report.seconds:.0f} s")
        kernels = {kernel.name: kernel for kernel in report.kernels}
        if call.whole_heads and set(kernels) != set(call.kernels):
            faults.append(f"{name}: {sorted(kernels)} instead of one kernel a pass")
        if call.beside and "attention_backward_query" in kernels:
            faults.append(f"{name}: dQ has a kernel of its own")
        if missing := set(call.kernels) - set(kernels):
            faults.append(f"{name}: {missing} was not chosen; there are {sorted(kernels)}")
            continue
        rows = kernels.get("attention_backward_rows")
        takes_rows = call.qk_dim in (64, 128, 256) and call.v_dim is None and call.length % 128 == 0
        if rows is None and takes_rows and not (call.d_query_apart or call.whole_heads):
            faults.append(f"{name}: the rows' sums were left to XLA")
        for small in (rows, kernels.get("attention_backward_sums")):
            if small is not None and small.spill_store_bytes:
                faults.append(f"{name}, {small.name}: {small.spill_store_bytes} bytes are spilled")
        for kernel_name, most in zip(call.kernels, SPILLS.get(name, (0,) * len(call.kernels)), strict=True):
            kernel = kernels[kernel_name]
            print(
                f"  {kernel_name}: {kernel.live_registers} registers of {max(kernel.register_budgets, default=255)}, "
                f"{kernel.smem_bytes} bytes of shared memory, {kernel.spill_store_bytes} spilled"
            )
            where = f"{name}, {kernel_name}"
            faults += [f"{where}: serialised, {warning}" for warning in kernel.serialised_wgmma]
            if kernel.smem_bytes is None or kernel.smem_bytes > HOPPER_SMEM_BYTES:
                faults.append(f"{where}: {kernel.smem_bytes} bytes of shared memory exceed {HOPPER_SMEM_BYTES}")
            if kernel.spill_store_bytes > most:
                faults.append(f"{where}: {kernel.spill_store_bytes} bytes are spilled, of {most} at most")
    assert not faults, "\n".join(faults)
