"""A step of decoding for H200 and B200: kernels that take the numbers of each example, their registers and spills."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

from deviceless import attention_functions
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES
from fast_layers.testing import Compilation, compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]

# Batch, queries, heads, key heads, depth.
SPLIT, WHOLE, NO_GROUPS, WIDE = (1, 1, 32, 8, 128), (32, 1, 32, 8, 128), (8, 4, 28, 28, 64), (2, 16, 28, 4, 128)
# Of numbers that no row's place comes into, JAX 0.12 looked for layouts for more than five minutes.
FEW = (1, 4, 32, 8, 128)
MANY = (64, 4, 64, 8, 128)
FEW_HEADS, PAIRS, DEEP = (1, 1, 32, 4, 128), (8, 1, 32, 8, 128), (4, 1, 16, 4, 256)
PLAIN_ROWS, NARROW_TILES = (16, 1, 32, 32, 80), (1, 2, 32, 8, 96)
BY_FEW_ROWS = {SPLIT, WHOLE, NO_GROUPS, FEW, MANY, FEW_HEADS, PAIRS, DEEP, PLAIN_ROWS, NARROW_TILES}
JOINED = {SPLIT, FEW, PAIRS, DEEP, NARROW_TILES}
"""On Hopper, in a cluster."""
CASES = [(SPLIT, "offset"), (FEW, "lengths"), (WIDE, "window"), (PLAIN_ROWS, "lengths")]
MORE = [
    (SPLIT, "lengths"),
    (WHOLE, "lengths"),
    (NO_GROUPS, "window"),
    (MANY, "offset"),
    (WIDE, "offset"),
    (FEW_HEADS, "offset"),
    (PAIRS, "lengths"),
    (DEEP, "offset"),
    (NARROW_TILES, "offset"),
]
MOST_SECONDS = 90.0
"""6 to 10 on an idle machine."""


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["some", "more"])
@pytest.mark.parametrize(("gpu", "backend"), [("h200", "hopper"), ("b200", "blackwell")])
def test_steps_compile_well(gpu, backend, cases):
    jobs = []
    for (batch, queries, heads, kv_heads, depth), by in cases:
        shapes = (batch, queries, heads, depth), *[(batch, 4096, kv_heads, depth)] * 2
        filled = jax.ShapeDtypeStruct((batch,), jnp.int32)
        operands = *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), filled
        static = {"by": by, "implementation": backend}
        jobs.append(Compilation(attention_functions.decode, operands, static))
    for case, report in zip(cases, compile_all_for(gpu, jobs), strict=True):
        assert report.failure is None, f"{case}: {report.failure}"
        assert report.seconds < MOST_SECONDS, case
        kernels = {kernel.name for kernel in report.kernels}
        joined = gpu == "h200" and case[0] in JOINED
        parts = case[0] not in (WHOLE, NO_GROUPS, MANY, PLAIN_ROWS) and not joined
        splits = {"combine_parts"} if parts else set()
        few_rows = gpu == "h200" and case[0] in BY_FEW_ROWS
        assert kernels == {"attention_few_rows" if few_rows else "attention_forward"} | splits, case
        for kernel in report.kernels:
            assert not kernel.serialised_wgmma, (case, kernel)
            assert not kernel.spill_store_bytes, (case, kernel)
            assert kernel.smem_bytes is not None, (case, kernel)
            assert kernel.smem_bytes <= HOPPER_SMEM_BYTES, (case, kernel)
