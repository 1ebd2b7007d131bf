"""Which gated norms go to the Hopper kernel unasked, by what was timed. Runs anywhere."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from fast_layers.ops.gated_norm.backends import BACKENDS
from fast_layers.ops.gated_norm.problem import Problem
from ops.kernel_calls import H200, chosen

LARGE = Problem((8, 4096), 5120, jnp.dtype(jnp.bfloat16), 5120, 1e-5, False)
BOTH, BACKWARD, NEITHER = ("hopper", "hopper"), ("xla", "hopper"), ("xla", "xla")


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({}, BOTH),
        ({"group_size": 640}, BOTH),
        ({"features": 2048, "group_size": 256, "rows": (1024,)}, BOTH),
        ({"features": 2048, "group_size": 256, "rows": (1023,)}, NEITHER),
        ({"features": 1024, "group_size": 1024}, BOTH),
        ({"features": 8192, "group_size": 8192}, BOTH),
        ({"features": 960, "group_size": 960}, NEITHER),
        ({"group_size": 128}, NEITHER),
        ({"group_size": 1600, "features": 4800}, NEITHER),
        ({"dtype": jnp.dtype(jnp.float16)}, BOTH),
        ({"dtype": jnp.dtype(jnp.float32)}, BACKWARD),
        ({"split_groups": True}, NEITHER),
    ],
)
def test_taken_where_it_was_no_slower(fields, taken):
    assert chosen(BACKENDS, dataclasses.replace(LARGE, **fields), H200) == taken
