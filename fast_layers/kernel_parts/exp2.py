"""Powers of two on the multiply-add units, for kernels that wait for the special-function unit.

x is split into its nearest integer n and a rest f of at most one half: 2^x = 2^n * 2^f. 2^n is a matter of exponent
bits, and 2^f a polynomial.

Sources: Cody and Waite, "Software Manual for the Elementary Functions" (1980), for the split; FlashAttention-4
(Dao-AILab, 2025), for sharing a softmax' exponentials between the units.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Of least relative error on [-1/2, 1/2], by Remez' algorithm; it is 7.5e-8, and in float32 three times that.
_COEFFICIENTS = (
    1.0000000716546849,
    0.6931469670647611,
    0.2402211972384017,
    0.05550713273497632,
    0.00967554133444401,
    0.001327647199256973,
)
_LOWEST = -127.0
_MANTISSA_BITS = 23
_ROUNDS = 1.5 * 2**_MANTISSA_BITS - _LOWEST
"""Added to x, leaves n + 127 in the sum's lowest bits: floats of this size are integers."""


def exp2_by_polynomial(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """2^x in float32 for x up to 127; 0 where x is at most -127, NaN where it is NaN.

    For kernels: under `jax.jit` on a CPU, XLA of JAX 0.11 takes adding and subtracting `_ROUNDS` for nothing.
    """
    x = jnp.maximum(x, _LOWEST)
    rounded = x + _ROUNDS
    rest = x - (rounded - _ROUNDS)
    power = lax.bitcast_convert_type(rounded, jnp.int32) << _MANTISSA_BITS
    result = jnp.full_like(x, _COEFFICIENTS[-1])
    for coefficient in _COEFFICIENTS[-2::-1]:
        result = result * rest + coefficient
    # A product, not a sum of exponents: NaN stays NaN, and 2^-127 is 0.
    return result * lax.bitcast_convert_type(power, jnp.float32)


def exp2_in_part(x: Float[jax.Array, "R C"], columns: int) -> Float[jax.Array, "R C"]:
    """The first `columns` by polynomial."""
    if not columns:
        return jnp.exp2(x)
    if columns == x.shape[1]:
        return exp2_by_polynomial(x)
    return jnp.concatenate([exp2_by_polynomial(x[:, :columns]), jnp.exp2(x[:, columns:])], axis=1)
