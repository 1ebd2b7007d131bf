"""Calls drawn at random on the GPU at hand, against the reference, values and gradients.

One that failed is run again by its number: `-k "attention-hopper-17]"`.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import refusals
from drawn import DRAWN, draw

from fast_layers.testing import check_parity
from fast_layers.testing.parity import SUITES

NUMBERS = {op: 100 if op == "dot_product_attention" else 30 for op in DRAWN}
DRAWS = [
    pytest.param(op, backend.name, number, id=f"{op}-{backend.name}-{number}")
    for op in DRAWN
    for backend in SUITES[op].backends()
    if backend.name not in ("reference", "xla")
    for number in range(NUMBERS[op])
]


@pytest.mark.parametrize(("op", "backend", "number"), DRAWS)
def test_parity(op, backend, number):
    case = draw(op, number)
    dtype = jnp.float16 if number % 4 == 0 else jnp.bfloat16
    table = check_parity(op, backends=[backend], cases={str(case): case}, dtypes=[dtype])
    refusals.settle(backend, table)
