"""The activations by name, each with its derivative.

Written for float32 (and float64) arrays in operations that XLA and Pallas' GPU lowerings both have, so that kernels and
plain code share these lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_GELU_SATURATES = 40.0
_GELU_CUBIC = 0.044715  # Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016)


class Activation(NamedTuple):
    """Elementwise, float32 to float32 (float64 to float64). JAX's own derivative of `function` may be NaN far out."""

    function: Callable[[Array], Array]
    derivative: Callable[[Array], Array]


def _sigmoid(x: Array) -> Array:
    """By the primitive: derived from 1 / (1 + exp(-x)), its derivative is NaN where the exponential is infinite."""
    return lax.logistic(x)


def _d_sigmoid(x: Array) -> Array:
    s = _sigmoid(x)
    return s * (1.0 - s)


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _d_silu(x: Array) -> Array:
    s = _sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + lax.erf(x * _SQRT_HALF))


def _d_gelu(x: Array) -> Array:
    return 0.5 * (1.0 + lax.erf(x * _SQRT_HALF)) + x * _INV_SQRT_2PI * jnp.exp(-0.5 * x * x)


def _gelu_tanh(x: Array) -> Array:
    return x * _sigmoid(_gelu_logit(x))


def _d_gelu_tanh(x: Array) -> Array:
    s = _sigmoid(_gelu_logit(x))
    # In this order: far out, either x * s or 1 - s is 0 before a factor that is large.
    return s + x * s * (1.0 - s) * _d_gelu_logit(x)


def _gelu_logit(x: Array) -> Array:
    """(1 + tanh(u)) / 2 is sigmoid(2 u), which is precise where tanh(u) is close to -1."""
    return _GELU_SLOPE * (x + _GELU_CUBIC * x * x * x)


def _d_gelu_logit(x: Array) -> Array:
    """Not above what it is where the sigmoid has become 0 or 1 in float64 too: it would overflow, and 0 inf is NaN."""
    return _GELU_SLOPE + _GELU_SLOPE * 3.0 * _GELU_CUBIC * jnp.minimum(x * x, _GELU_SATURATES**2)


def _relu(x: Array) -> Array:
    return jnp.maximum(x, 0.0)


def _d_relu(x: Array) -> Array:
    return jnp.where(x > 0.0, 1.0, 0.0).astype(x.dtype)


def _relu_squared(x: Array) -> Array:
    positive = _relu(x)
    return positive * positive


def _d_relu_squared(x: Array) -> Array:
    return 2.0 * _relu(x)


def _identity(x: Array) -> Array:
    return x


ACTIVATIONS: Mapping[str, Activation] = {
    "identity": Activation(_identity, jnp.ones_like),
    "relu": Activation(_relu, _d_relu),
    "relu_squared": Activation(_relu_squared, _d_relu_squared),
    "gelu": Activation(_gelu, _d_gelu),
    "gelu_tanh": Activation(_gelu_tanh, _d_gelu_tanh),
    "silu": Activation(_silu, _d_silu),
    "sigmoid": Activation(_sigmoid, _d_sigmoid),
}

ALIASES: Mapping[str, str] = {"relu2": "relu_squared", "gelu_erf": "gelu", "swish": "silu"}


def canonical_name(activation: str | None) -> str:
    """A name in `ACTIVATIONS` for a user's name of it. Raises ValueError for an unknown one."""
    if activation is None:
        return "identity"
    name = ALIASES.get(activation, activation) if isinstance(activation, str) else activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join([*ACTIVATIONS, *ALIASES])
        raise ValueError(f"activation={activation!r} is unknown; take a name out of {known}, or None for none")
    return name
