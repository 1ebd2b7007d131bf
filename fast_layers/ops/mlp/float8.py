"""Operands rounded to 8 bits, with one scale each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Float8 = Literal["e4m3", "e5m2"]
FORMATS: Mapping[str, Any] = {"e4m3": jnp.dtype(jnp.float8_e4m3fn), "e5m2": jnp.dtype(jnp.float8_e5m2)}
_EXPONENTS = -126, 126
"""Of the powers of two that float32 has, and whose inverses it has too."""
_BIAS, _MANTISSA_BITS = 127, 23


class Scaled(NamedTuple):
    """`values` times `scale`."""

    values: Array
    scale: Float[Array, ""]


def scaled(x: Array, float8: Float8) -> Scaled:
    """`x` rounded to the format, its scale the least power of two with which the largest finite element fits.

    A power of two, so that scaling itself rounds nothing. e4m3 has no infinity: there it becomes NaN.
    """
    dtype = FORMATS[float8]
    largest = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.zeros_like(x)).max().astype(jnp.float32)
    mantissa, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
    exponent = jnp.clip(exponent - (mantissa == 0.5).astype(exponent.dtype), *_EXPONENTS)
    return Scaled((x.astype(jnp.float32) * _power(-exponent)).astype(dtype), _power(exponent))


def _power(exponent: Array) -> Float[Array, ""]:
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + _BIAS) << _MANTISSA_BITS, jnp.float32)
