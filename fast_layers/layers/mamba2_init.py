"""Initial values of a Mamba-2 mixer, as mamba_ssm draws them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fast_layers.ops.operands import is_real
from fast_layers.ops.static_options import check_size

Initializer = Callable[..., Array]


def projection(n_layer: int = 1) -> Initializer:
    """PyTorch's default for linear and convolution weights, uniform up to 1 / sqrt(fan_in), over sqrt(n_layer)."""
    check_size("n_layer", n_layer)
    return jax.nn.initializers.variance_scaling(1 / (3 * n_layer), "fan_in", "uniform")


def uniform(bound: float) -> Initializer:
    """Between -bound and bound."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def convolution(conv_init: float | None) -> Initializer:
    """Uniform up to `conv_init`; None: as a projection's."""
    if conv_init is None:
        return projection()
    if not _is_number(conv_init) or conv_init < 0:
        raise ValueError(f"{conv_init=}: must be a number, 0 or more, or None for 1 / sqrt(taps)")
    return uniform(conv_init)


def convolution_bias(width: int) -> Initializer:
    """PyTorch's default: up to 1 / sqrt(fan_in), which is the number of taps."""
    return uniform(1 / math.sqrt(width))


def dt_bias(dt_min: float, dt_max: float, dt_init_floor: float) -> Initializer:
    """What softplus turns into step sizes that are log-uniform in [dt_min, dt_max] and at least dt_init_floor."""
    if not (_is_number(dt_min) and _is_number(dt_max) and 0 < dt_min <= dt_max):
        raise ValueError(f"{dt_min=}, {dt_max=}: step sizes need 0 < dt_min <= dt_max, two numbers")
    if not _is_number(dt_init_floor) or not dt_init_floor > 0:
        raise ValueError(f"{dt_init_floor=}: must be a number above 0, which no softplus reaches")

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        log_dt = jax.random.uniform(key, shape, dtype, math.log(dt_min), math.log(dt_max))
        dt = jnp.maximum(jnp.exp(log_dt), dt_init_floor)
        return dt + jnp.log(-jnp.expm1(-dt))

    return init


def a_log(A_init_range: tuple[float, float]) -> Initializer:
    """The logarithm of rates uniform in the range."""
    pair = isinstance(A_init_range, tuple | list) and len(A_init_range) == 2 and all(map(_is_number, A_init_range))
    if not pair or not 0 < A_init_range[0] <= A_init_range[1]:
        raise ValueError(f"{A_init_range=}: rates need a pair of numbers (low, high), 0 < low <= high")
    low, high = A_init_range

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jnp.log(jax.random.uniform(key, shape, dtype, low, high))

    return init


def _is_number(value: Any) -> bool:
    return is_real(value) and math.isfinite(value)
