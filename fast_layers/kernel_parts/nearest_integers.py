"""Floats to integers on the multiply-add units, for kernels that wait for the special-function unit.

The GPU's conversion runs where exponentials do, and JAX puts two comparisons before it. Here x is split into a multiple
of 2^9 and a rest. Floats from 2^23 to 2^24 are integers that stand in their lowest bits, so that adding such a float
rounds to an integer, and the two parts' bits add up to x.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_SPLIT_BITS = 9
_SPLIT = 2.0**_SPLIT_BITS
_ROUNDS = 1.5 * 2**23
_ROUNDS_HIGH = _ROUNDS + 0x1A6000
"""Such that its bits, `_SPLIT_BITS` higher up, and those of `_ROUNDS` add up to 0 modulo 2^32."""


def nearest_integers(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Int[Array, "..."]:
    """x * scale, rounded to int32. Less than 2^30 in size, or the result is of no use; so it is for NaN."""
    high = x * (scale * (1 / _SPLIT)) + _ROUNDS_HIGH
    # Minus what `high` is more than `_ROUNDS_HIGH`, exact: a multiple of 2^9 below 2^31.
    rest = x * scale + (high * -_SPLIT + (_ROUNDS_HIGH * _SPLIT + _ROUNDS))
    high, rest = (lax.bitcast_convert_type(part, jnp.int32) for part in (high, rest))
    return (high << _SPLIT_BITS) + rest
