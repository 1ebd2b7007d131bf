"""Attention on the GPU at hand: calls drawn at random against the reference, values and gradients.

One that failed is run again by its number: `-k "hopper-17]"`.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import refusals
from drawn import draw

from fast_layers.arch import lowering_targets
from fast_layers.ops.attention.backends import BACKENDS
from fast_layers.testing import check_parity

NUMBERS = 100
KERNELS = [backend.name for backend in BACKENDS if backend.name not in ("reference", "xla")]


@pytest.mark.parametrize("number", range(NUMBERS))
@pytest.mark.parametrize("backend", KERNELS)
def test_parity(backend, number):
    case = draw(number)
    dtype = jnp.float16 if number % 4 == 0 else jnp.bfloat16
    table = check_parity(backends=[backend], cases={str(case): case}, dtypes=[dtype])
    assert table.ok, f"\n{table}"
    reasons = [row.refusal for row in table.refusals]
    refusals.check(backend, lowering_targets()[0], reasons)
    if len(reasons) == len(table.rows):
        refusals.skip(backend, lowering_targets()[0], reasons)
