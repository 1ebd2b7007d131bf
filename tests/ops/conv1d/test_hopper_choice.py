"""Which convolutions go to the Hopper kernel unasked, by what was timed, and why others do not. Runs anywhere."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from fast_layers.ops.conv1d.backends import BACKENDS
from fast_layers.ops.conv1d.problem import Problem
from ops.kernel_calls import H200, objections

LARGE = Problem(8, 4096, 5376, 4, jnp.dtype(jnp.bfloat16), "silu", bias=True)
SMALL, SMALLER = "pays from 16777216 numbers on", "pays from 1048576 numbers on"


@pytest.mark.parametrize(
    ("fields", "forward", "backward"),
    [
        ({}, None, None),
        ({"segments": True}, None, None),
        ({"channels": 1408}, None, None),
        ({"dtype": jnp.dtype(jnp.float16)}, None, None),
        ({"dtype": jnp.dtype(jnp.float32)}, None, None),
        ({"batch": 2, "channels": 1408}, SMALL, None),
        ({"batch": 1, "length": 1024, "channels": 1024, "segments": True}, SMALL, None),
        ({"batch": 1, "length": 1023, "channels": 1024}, SMALL, SMALLER),
        ({"channels": 5440}, *["takes channels in multiples of 128"] * 2),
    ],
)
def test_taken_where_it_was_no_slower(fields, forward, backward):
    reasons = objections(BACKENDS, dataclasses.replace(LARGE, **fields), H200)
    for reason, expected in zip(reasons, (forward, backward), strict=True):
        assert (reason is None) == (expected is None)
        assert (expected or "") in (reason or "")
