"""Calls drawn at random on the GPU at hand, against the reference, values and gradients.

One that failed is run again by its number: `-k "test_parity[attention-hopper-17]"`.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import refusals
from drawn import DRAWN, draw

from fast_layers.testing import check_parity
from fast_layers.testing.parity import SUITES

NUMBERS = {"attention": 100}
DRAWS = [
    pytest.param(kind, backend.name, number, id=f"{kind}-{backend.name}-{number}")
    for kind, (op, _) in DRAWN.items()
    for backend in SUITES[op].backends()
    if backend.name not in ("reference", "xla")
    for number in range(NUMBERS.get(kind, 30))
]


@pytest.mark.parametrize(("kind", "backend", "number"), DRAWS)
def test_parity(kind, backend, number):
    case = draw(kind, number)
    dtype = jnp.float16 if number % 4 == 0 else jnp.bfloat16
    table = check_parity(DRAWN[kind][0], backends=[backend], cases={str(case): case}, dtypes=[dtype])
    refusals.settle(backend, table)
