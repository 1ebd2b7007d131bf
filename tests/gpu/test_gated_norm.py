"""The gated norm on the GPU at hand: every backend against the reference, and repeatability.

python3 -m pytest tests/gpu/test_gated_norm.py -n0 -p no:cacheprovider
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals

import fast_layers
from fast_layers.arch import lowering_targets
from fast_layers.dispatch import PASSES
from fast_layers.ops.gated_norm.backends import BACKENDS
from fast_layers.testing import check_parity
from fast_layers.testing._parity_gated_norm import CASES, Case
from fast_layers.testing.closeness import assert_bitwise_equal

OP = "gated_rms_norm"
NAMES = [backend.name for backend in BACKENDS if backend.name != "reference"]
RUNS = 20
MORE = {
    "rows of 640": Case(rows=(101,), features=5120, group_size=640),
    "rows of 1280, norm before gate": Case(rows=(33,), features=2560, group_size=1280, norm_before_gate=True),
    "rows of 8192": Case(rows=(3, 11), features=8192),
    "many rows": Case(rows=(9001,), features=1024, group_size=512),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", [*CASES, *MORE])
@pytest.mark.parametrize("name", NAMES)
def test_parity(name, case, dtype):
    table = check_parity(OP, backends=[name], cases={case: {**CASES, **MORE}[case]}, dtypes=[dtype])
    refusals.settle(name, table)


@pytest.mark.parametrize("norm_before_gate", [False, True], ids=["gate before norm", "norm before gate"])
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_runs_give_the_same_bits(name, groups, norm_before_gate):
    """Sums between warps go through shared memory; so inputs stay the same, and other work runs in between."""
    rng = np.random.default_rng(0)
    y, z, d_out = (jnp.asarray(rng.normal(size=(5001, 5120)), jnp.bfloat16) for _ in range(3))
    weight = jnp.asarray(rng.normal(size=5120), jnp.float32)

    def op(*operands):
        options = {"group_size": 5120 // groups, "norm_before_gate": norm_before_gate, "implementation": name}
        return fast_layers.gated_rms_norm(*operands, **options)

    (plan,) = fast_layers.explain(fast_layers.gated_rms_norm, y, z, weight).plans
    (backend,) = (backend for backend in BACKENDS if backend.name == name)
    arch = lowering_targets()[0]
    if any(reasons := [backend.supports(plan.problem, arch, pass_) for pass_ in PASSES]):
        refusals.skip(name, arch, reasons)

    @jax.jit
    def call(y, z, weight, d_out):
        out, pull = jax.vjp(op, y, z, weight)
        return out, pull(d_out)

    first = jax.device_get(call(y, z, weight, d_out))
    for run in range(1, RUNS):
        jnp.sort(jnp.asarray(rng.normal(size=1 << 16))).block_until_ready()
        assert_bitwise_equal(jax.device_get(call(y, z, weight, d_out)), first, f"run {run}: ")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(first))
