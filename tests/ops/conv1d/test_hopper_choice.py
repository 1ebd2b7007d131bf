"""Which convolutions go to the Hopper kernel unasked, by what was timed. Runs anywhere."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from fast_layers.ops.conv1d.backends import BACKENDS
from fast_layers.ops.conv1d.problem import Problem
from ops.kernel_calls import H200, chosen

LARGE = Problem(
    batch=8,
    length=4096,
    channels=5376,
    width=4,
    dtype=jnp.dtype(jnp.bfloat16),
    activation="silu",
    bias=True,
    segments=False,
    initial_state=False,
    final_state=False,
)
BOTH, BACKWARD, NEITHER = ("hopper", "hopper"), ("xla", "hopper"), ("xla", "xla")


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({}, BOTH),
        ({"segments": True}, BOTH),
        ({"channels": 1408}, BOTH),
        ({"dtype": jnp.dtype(jnp.float16)}, BOTH),
        ({"dtype": jnp.dtype(jnp.float32)}, BOTH),
        ({"batch": 2, "channels": 1408}, BACKWARD),
        ({"batch": 1, "length": 1024, "channels": 1024, "segments": True}, BACKWARD),
        ({"batch": 1, "length": 1023, "channels": 1024}, NEITHER),
        ({"channels": 5440}, NEITHER),
    ],
)
def test_taken_where_it_was_no_slower(fields, taken):
    assert chosen(BACKENDS, dataclasses.replace(LARGE, **fields), H200) == taken
