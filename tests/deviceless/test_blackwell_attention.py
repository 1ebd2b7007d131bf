"""The Blackwell attention kernels, taken by name and compiled by the real assembler."""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fast_layers
from deviceless import attention_functions, functions
from fast_layers.ops.attention.blackwell_config import (
    BLACKWELL_SMEM_BYTES,
    BLACKWELL_TMEM_COLUMNS,
    BlackwellBackwardTiles,
    BlackwellForwardTiles,
)
from fast_layers.ops.attention.problem import Problem
from fast_layers.testing import Compilation, compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]


@dataclasses.dataclass(frozen=True)
class Call:
    length: int = 8192
    q_len: int | None = None
    kv_heads: int = 16
    qk_dim: int = 128
    v_dim: int | None = None
    segments: bool = False
    bias: bool = False
    mask: bool = False
    any_order: bool = False
    tiles: dict[str, Any] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def kernels(self) -> set[str]:
        if self.q_len:
            return {"attention_forward", "combine_parts"}
        if self.tiles:
            return {"attention_forward"}
        apart = self.qk_dim + (self.v_dim or self.qk_dim) > 256
        of_keys = ("keys", "values") if apart else ("keys_and_values",)
        backward = {f"attention_backward_of_{gradients}" for gradients in ("queries", *of_keys)}
        if self.any_order and not apart:
            backward = {"attention_backward"}
        return {"attention_forward"} | backward | ({"attention_bias_gradient"} if self.bias else set())

    def compilation(self) -> Compilation:
        def shape(heads, depth, length=self.length):
            return jax.ShapeDtypeStruct((2, length, heads, depth), jnp.bfloat16)

        v_dim = self.v_dim or self.qk_dim
        query = shape(16, self.qk_dim, self.q_len or self.length)
        shapes = (query, shape(self.kv_heads, self.qk_dim), shape(self.kv_heads, v_dim))
        fn: Any = fast_layers.dot_product_attention
        if self.tiles:
            return Compilation(attention_functions.blackwell_forward, shapes, {"tiles": self.tiles} | self.options)
        if not self.q_len:
            fn = attention_functions.any_order if self.any_order else functions.attention_and_gradients
            shapes = (*shapes, shape(16, v_dim))
        if self.bias or self.mask or "dropout_rate" in self.options:
            square = (self.length, self.length)
            bias = jax.ShapeDtypeStruct((1, 16, *square), jnp.bfloat16) if self.bias else None
            mask = jax.ShapeDtypeStruct((2, 1, *square), bool) if self.mask else None
            options = {"implementation": "blackwell", "reproducible": not self.any_order} | self.options
            return Compilation(attention_functions.attention_per_score, (*shapes, bias, mask), options)
        # An argument: XLA takes many seconds to fold what is computed from a constant of this length.
        ids = (jax.ShapeDtypeStruct((self.length,), jnp.int32),) if self.segments else ()
        return Compilation(fn, (*shapes, *ids), {"implementation": "blackwell"} | self.options)


CAUSAL = {"is_causal": True}
DROPOUT = {"dropout_rate": 0.1}
EVERYTHING = {"is_causal": True, "softcap": 30.0, "sinks": np.zeros(16, np.float32), "local_window_size": (1024, 0)}
LEAN = {
    "d128 causal": Call(options=CAUSAL),
    "d64 segments, any order": Call(kv_heads=4, qk_dim=64, segments=True, any_order=True, options=CAUSAL),
}
LEAN_B300 = {"d80 causal, odd length, any order": Call(2047, qk_dim=80, any_order=True, options=CAUSAL)}
REST = {
    "d64 segments": Call(kv_heads=4, qk_dim=64, segments=True, options=CAUSAL),
    "d128 full, any order": Call(any_order=True),
    "d128 causal, any order": Call(any_order=True, options=CAUSAL),
    "d128 everything, any order": Call(kv_heads=4, segments=True, any_order=True, options=EVERYTHING),
    "d128 everything per score, any order": Call(
        2048, bias=True, mask=True, any_order=True, options=CAUSAL | DROPOUT | {"softcap": 30.0}
    ),
    "d64, values of 192, any order": Call(2048, qk_dim=64, v_dim=192, any_order=True, options=CAUSAL),
    "d192/128 causal, any order": Call(2048, qk_dim=192, v_dim=128, any_order=True, options=CAUSAL),
    "d128 full": Call(),
    "d64 full": Call(qk_dim=64),
    "d64 causal": Call(qk_dim=64, options=CAUSAL),
    "d80 causal, odd length": Call(2047, qk_dim=80, options=CAUSAL),
    "d128 segments": Call(kv_heads=4, segments=True, options=CAUSAL),
    "d128 everything": Call(kv_heads=4, segments=True, options=EVERYTHING),
    "d192/128 causal": Call(qk_dim=192, v_dim=128, options=CAUSAL),
    "d192 causal": Call(2048, qk_dim=192, options=CAUSAL),
    "d256 causal": Call(qk_dim=256, options=CAUSAL),
    "d32, values of 128": Call(2048, qk_dim=32, v_dim=128),
    "d32, values of 192": Call(2048, qk_dim=32, v_dim=192),
    "d64, values of 144, any order": Call(2048, qk_dim=64, v_dim=144, any_order=True, options=CAUSAL),
    "d256, values of 32": Call(2048, qk_dim=256, v_dim=32, options=CAUSAL),
    "few queries": Call(100, kv_heads=4, options=CAUSAL),
    "few queries, d64": Call(100, qk_dim=64, options=CAUSAL),
    "few queries, d64, values of 128": Call(100, qk_dim=64, v_dim=128, options=CAUSAL),
    "d128 causal, polynomials": Call(tiles={"polynomial_columns": 8}, options=CAUSAL),
    "d128 causal, dynamic": Call(tiles={"dynamic": True}, options=CAUSAL),
    "d128 bias": Call(2048, bias=True),
    "d128 causal, dropout": Call(2048, options=CAUSAL | DROPOUT),
    "d64 mask, dropout": Call(2048, qk_dim=64, mask=True, options=DROPOUT),
    "d256 everything per score": Call(
        2048, qk_dim=256, bias=True, mask=True, options=CAUSAL | DROPOUT | {"softcap": 30.0}
    ),
    "d64 decoding": Call(q_len=1, kv_heads=4, qk_dim=64),
    "d128 decoding": Call(q_len=1, kv_heads=4),
    "d256 decoding": Call(q_len=1, kv_heads=4, qk_dim=256),
    "d128 chunk": Call(q_len=300, kv_heads=4, options=CAUSAL | {"q_offset": "bottom_right"}),
}


def _chosen(problem: Problem) -> set[tuple[int, ...] | BlackwellBackwardTiles]:
    """What of the tiles makes another kernel; in a ring that is deeper to decode, only its slots are more."""
    forward = BlackwellForwardTiles.of(problem)
    return {(forward.q_tiles, forward.kv_tile, forward.stages), BlackwellBackwardTiles.of(problem)}


def test_every_choice_of_tiles_is_compiled():
    def problem_of(call: Call) -> Problem:
        shapes = call.compilation().shapes[:3]
        with fast_layers.use_backends(reproducible=not call.any_order):
            (plan,) = fast_layers.explain(fast_layers.dot_product_attention, *shapes).plans
        return plan.problem

    calls = [call for call in (LEAN | LEAN_B300 | REST).values() if not call.q_len and not call.tiles]
    compiled = set().union(*(_chosen(problem_of(call)) for call in calls))
    some = problem_of(calls[0])
    for qk_dim, v_dim, length, reproducible in itertools.product(
        range(16, 257, 16), range(16, 257, 16), (100, 8192), (True, False)
    ):
        p = dataclasses.replace(
            some, qk_dim=qk_dim, v_dim=v_dim, q_len=length, kv_len=length, reproducible=reproducible
        )
        if BlackwellForwardTiles.fitting(p):
            assert _chosen(p) <= compiled, p


@pytest.mark.parametrize(
    ("gpu", "calls"),
    [
        pytest.param("b200", LEAN, id="b200"),
        pytest.param("b300", LEAN_B300, id="b300", marks=pytest.mark.exhaustive),
        pytest.param("b200", LEAN_B300 | REST, id="b200-rest", marks=pytest.mark.exhaustive),
        pytest.param("b300", LEAN | REST, id="b300-rest", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_compile_well(gpu, calls):
    reports = compile_all_for(gpu, [call.compilation() for call in calls.values()])
    faults = []
    for (name, call), report in zip(calls.items(), reports, strict=True):
        print(f"{name}: lowered and compiled in {report.seconds:.1f} s")
        if report.failure is not None:
            faults.append(f"{name}: {report.failure}")
            continue
        kernels = {kernel.name: kernel for kernel in report.kernels}
        if set(kernels) != call.kernels:
            faults.append(f"{name}: {sorted(call.kernels)} was to be chosen, got {sorted(kernels)}")
            continue
        for kernel in kernels.values():
            print(
                f"  {kernel.name}: {kernel.live_registers} registers of {max(kernel.register_budgets, default=255)}, "
                f"{kernel.smem_bytes} bytes of shared memory, {kernel.tmem_columns} columns of tensor memory, "
                f"{kernel.spill_store_bytes} spilled; {dict(kernel.instructions)}"
            )
            where = f"{name}, {kernel.name}"
            if kernel.smem_bytes is None or kernel.smem_bytes > BLACKWELL_SMEM_BYTES:
                faults.append(f"{where}: {kernel.smem_bytes} bytes of shared memory exceed {BLACKWELL_SMEM_BYTES}")
            multiplies = kernel.name != "combine_parts"
            if multiplies and not 0 < (kernel.tmem_columns or 0) <= BLACKWELL_TMEM_COLUMNS:
                faults.append(f"{where}: {kernel.tmem_columns} columns of {BLACKWELL_TMEM_COLUMNS}")
            if kernel.spills:
                faults.append(f"{where}: {kernel.spill_store_bytes} bytes are spilled")
    assert not faults, "\n".join(faults)
