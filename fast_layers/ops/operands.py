"""What callers give as arrays, as arrays; shared by the ops."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array


def to_array(name: str, given: Any, wanted: str = "an array") -> Array:
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:
        shown = repr(given) if given is None or isinstance(given, (str, type)) else type(given).__name__
        raise ValueError(f"{name} is {shown}: must be {wanted}") from error


def floating(name: str, given: Any) -> Array:
    array = to_array(name, given)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{name} has dtype {array.dtype}: must be floating point (float16, bfloat16, float32, float64); "
            f"cast it, e.g. {name}.astype(jnp.bfloat16)"
        )
    return array
