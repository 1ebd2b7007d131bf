"""Mesh axes over which a value varies inside `jax.shard_map`; JAX's types track them and loops must agree on them."""

from __future__ import annotations

import jax
from jax import lax


def varying_axes(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying  # pyright: ignore[reportAttributeAccessIssue]


def vary_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x`, marked as varying over `axes` too; x itself outside `shard_map`."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
