"""The convolution on the GPU at hand: every backend against the reference, repeatability, and NaN in other documents.

python3 -m pytest tests/gpu/test_conv1d.py -n0 -p no:cacheprovider
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
from fast_layers.ops.conv1d.backends import BACKENDS
from fast_layers.testing import check_parity
from fast_layers.testing._parity_conv1d import CASES, Case
from fast_layers.testing.closeness import assert_bitwise_equal

OP = "causal_conv1d"
NAMES = [backend.name for backend in BACKENDS if backend.name != "reference"]
RUNS = 20
MORE = {
    "2 taps, channels of 2.7B": Case(length=600, channels=5376, width=2),
    "3 taps": Case(length=300, width=3, channels=1024),
    "several segments, everything": Case(
        length=1001, channels=512, documents=(250, 5, 1, 745), initial_state=True, final_state=True
    ),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", [*CASES, *MORE])
@pytest.mark.parametrize("name", NAMES)
def test_parity(name, case, dtype):
    table = check_parity(OP, backends=[name], cases={case: {**CASES, **MORE}[case]}, dtypes=[dtype])
    refusals.settle(name, table)


def _call(name, documents):
    def op(operands, ids):
        x, w, b, state = operands
        return fast_layers.causal_conv1d(
            *(x, w, b),
            activation="silu",
            initial_state=state,
            segment_ids=ids if documents else None,
            return_final_state=True,
            implementation=name,
        )

    @jax.jit
    def call(operands, ids, d_out):
        out, pull = jax.vjp(lambda operands: op(operands, ids), operands)
        return out, pull(d_out)[0]

    return call


def _operands(dtype=jnp.bfloat16, batch=4, length=3001, channels=5376):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, state = (batch, length, channels), (batch, channels, 3)
    ids = jnp.asarray(np.cumsum(rng.random((batch, length)) < 0.01, axis=1), jnp.int32)
    return (normal(*x), normal(4, channels), normal(channels), normal(*state)), ids, (normal(*x), normal(*state))


def _skip_if_refused(name, operands):
    (plan,) = fast_layers.explain(fast_layers.causal_conv1d, operands[0], operands[1]).plans
    (backend,) = (backend for backend in BACKENDS if backend.name == name)
    arch = lowering_targets()[0]
    if any(reasons := [backend.supports(plan.problem, arch, pass_) for pass_ in PASSES]):
        refusals.skip(name, arch, reasons)


@pytest.mark.parametrize("documents", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_runs_give_the_same_bits(name, documents):
    """Inputs stay the same, and other work runs in between."""
    operands, ids, d_out = _operands()
    _skip_if_refused(name, operands)
    call, rng = _call(name, documents), np.random.default_rng(0)
    first = jax.device_get(call(operands, ids, d_out))
    for run in range(1, RUNS):
        jnp.sort(jnp.asarray(rng.normal(size=1 << 16))).block_until_ready()
        assert_bitwise_equal(jax.device_get(call(operands, ids, d_out)), first, f"run {run}: ")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(first))


@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=["NaN", "inf"])
@pytest.mark.parametrize("name", NAMES)
def test_what_other_documents_hold_does_not_matter(name, poison):
    """Bit for bit, in values and in the gradient of x."""
    (x, w, b, state), _, (d_y, d_state) = _operands(batch=1, length=700, channels=256)
    _skip_if_refused(name, (x, w))
    ids, own = jnp.asarray(np.arange(700) // 300)[None], np.s_[:, 300:600]
    results = []
    for filling in (0.0, poison):
        filled, d_filled = (jnp.full_like(a, filling).at[own].set(a[own]) for a in (x, d_y))
        (y, _), grads = _call(name, True)((filled, w, b, state), ids, (d_filled, d_state))
        results.append(jax.device_get((y[own], grads[0][own])))
    assert_bitwise_equal(results[1], results[0], f"{name}: ")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in results[0])
