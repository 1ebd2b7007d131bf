"""The MLP on the GPU at hand: every backend against numpy in a wider type, and repeatability.

python3 -m pytest tests/gpu/test_mlp.py -n0 -p no:cacheprovider
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
from ops.mlp import oracle
from ops.mlp.cases import Case, build, runner

from fast_layers.arch import lowering_targets
from fast_layers.ops.mlp.activations import ACTIVATIONS
from fast_layers.ops.mlp.backends import BACKENDS
from fast_layers.testing.closeness import assert_bitwise_equal, assert_close_over_draws

NAMES = [backend.name for backend in BACKENDS if backend.name != "reference"]
KERNELS = [name for name in NAMES if name != "xla"]
RUNS = 20
JAX = oracle.Functions(jnp.exp, jnp.tanh, jax.lax.erf)
ALL_BIASES = (True, True, True)

# Rounding the sum with a bias may change the sign that relu's whole gradient hangs on.
SMOOTH = {name: name != "relu" for name in ACTIVATIONS}

TOKENS = (1, 7, 12, 20, 40, 64, 65, 1000, 2048)
CASES = {
    **{n: Case((130,), 128, 320, 64, n, False, (smooth, False, True)) for n, smooth in SMOOTH.items()},
    **{f"{n}, gated": Case((130,), 128, 320, 64, n, True, (True, smooth, True)) for n, smooth in SMOOTH.items()},
    **{f"{tokens} tokens": Case((tokens,), 256, 512, 256, biases=ALL_BIASES) for tokens in TOKENS},
    "features in eights": Case((200,), 8, 72, 200, "silu", True, ALL_BIASES),
    "no bias": Case((333,), 192, 264, 136, "silu", True),
    "one bias of two": Case((333,), 192, 264, 136, "gelu", True, (False, True, False)),
    "saves inputs": Case((2, 150), 128, 256, 128, "silu", True, ALL_BIASES, "inputs"),
    "saves inputs, plain": Case((2, 150), 128, 256, 128, save="inputs"),
    "linear": Case((300,), 128, 320, None, "gelu_tanh", False, (True, False, False)),
    "gated linear": Case((300,), 128, 320, None, "silu", True),
    "bare matmul": Case((300,), 128, 320, None, "identity", False, (True, False, False)),
    "deep": Case((300,), 4608, 256, 4608, "gelu_tanh", False, ALL_BIASES),
    "several tiles a block": Case((4096,), 256, 2048, 256, "silu", True, ALL_BIASES),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("backend", NAMES)
def test_parity(backend, case, dtype):
    _skip_if_refused(backend, case, dtype)
    run = runner(backend, optimise=True)

    def make(draw):
        built = build(case, dtype, draw)
        plain = oracle.apply(built.operands, built.d_out, case.activation, wide=np.float32, store=dtype, functions=JAX)
        return run(built), built.oracle(), plain

    assert_close_over_draws(make, f"{backend} on {case!r}: ", draws=2)


REPEATED = {
    "plain": Case((1000,), 1024, 4096, 1024, "gelu_tanh", False, ALL_BIASES),
    "gated": Case((1000,), 1024, 2752, 1024, "silu", True, ALL_BIASES),
    "many tokens": Case((8192,), 512, 2048, 512, "gelu", False, ALL_BIASES),
    "one token": Case((1,), 1024, 4096, 1024, "silu", True),
}


@pytest.mark.parametrize("case", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("backend", KERNELS)
def test_twenty_runs_give_the_same_bits(backend, case):
    """A race between warpgroups shows as bits that change; so inputs stay the same, and other work runs in between."""
    _skip_if_refused(backend, case, jnp.bfloat16)
    built, run = build(case, jnp.bfloat16), runner(backend, optimise=True)
    rng = np.random.default_rng(0)
    first = jax.device_get(run(built))
    for number in range(1, RUNS):
        jnp.sort(jnp.asarray(rng.normal(size=1 << 16))).block_until_ready()
        assert_bitwise_equal(jax.device_get(run(built)), first, f"run {number}: ")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(first))


def _skip_if_refused(backend, case, dtype):
    small = build(dataclasses.replace(case, leading=(1,)), dtype)
    if refusal := small.refusal(backend):
        refusals.skip(backend, lowering_targets()[0], [refusal])
