"""Which gated norms go to the Hopper kernel unasked, by what was timed, and why others do not. Runs anywhere."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from fast_layers.ops.gated_norm.backends import BACKENDS
from fast_layers.ops.gated_norm.problem import Problem
from ops.kernel_calls import H200, objections

LARGE = Problem((8, 4096), 5120, jnp.dtype(jnp.bfloat16), 5120, 1e-5, False)
TAKEN = (None, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, TAKEN),
        ({"group_size": 640}, TAKEN),
        ({"features": 2048, "group_size": 256, "rows": (1024,)}, TAKEN),
        ({"features": 2048, "group_size": 256, "rows": (1023,)}, ("pays from 2097152 numbers on, got 2095104",) * 2),
        ({"features": 1024, "group_size": 1024}, TAKEN),
        ({"features": 8192, "group_size": 8192}, TAKEN),
        ({"features": 960, "group_size": 960}, ("timed with rows of 1024 features and more, got 960",) * 2),
        ({"group_size": 128}, ("timed with groups of 256 features and more, got 128",) * 2),
        ({"group_size": 1600, "features": 4800}, ("takes groups of",) * 2),
        ({"dtype": jnp.dtype(jnp.float16)}, TAKEN),
        ({"dtype": jnp.dtype(jnp.float32)}, ("is slower than XLA's forward in float32", None)),
        ({"split_groups": True}, ("needs the features of a group on one device",) * 2),
    ],
)
def test_taken_where_it_was_no_slower(fields, expected):
    reasons = objections(BACKENDS, dataclasses.replace(LARGE, **fields), H200)
    for reason, part in zip(reasons, expected, strict=True):
        assert (reason is None) == (part is None)
        assert (part or "") in (reason or "")
