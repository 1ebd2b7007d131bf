"""Initial values of a Mamba-2 mixer, as mamba_ssm draws them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Initializer = Callable[..., Array]


def projection(n_layer: int = 1) -> Initializer:
    """PyTorch's default for linear and convolution weights, uniform up to 1 / sqrt(fan_in), over sqrt(n_layer)."""
    return jax.nn.initializers.variance_scaling(1 / (3 * n_layer), "fan_in", "uniform")


def uniform(bound: float) -> Initializer:
    """Between -bound and bound."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def convolution(conv_init: float | None) -> Initializer:
    """Uniform up to `conv_init`; None: as a projection's."""
    return projection() if conv_init is None else uniform(conv_init)


def convolution_bias(width: int) -> Initializer:
    """PyTorch's default: up to 1 / sqrt(fan_in), which is the number of taps."""
    return uniform(1 / math.sqrt(width))


def dt_bias(dt_min: float, dt_max: float, dt_init_floor: float) -> Initializer:
    """What softplus turns into step sizes that are log-uniform in [dt_min, dt_max] and at least dt_init_floor."""
    if not 0 < dt_min <= dt_max:
        raise ValueError(f"{dt_min=}, {dt_max=}: step sizes need 0 < dt_min <= dt_max")
    if not dt_init_floor > 0:
        raise ValueError(f"{dt_init_floor=}: must be above 0, which no softplus reaches")

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        log_dt = jax.random.uniform(key, shape, dtype, math.log(dt_min), math.log(dt_max))
        dt = jnp.maximum(jnp.exp(log_dt), dt_init_floor)
        return dt + jnp.log(-jnp.expm1(-dt))

    return init


def a_log(A_init_range: tuple[float, float]) -> Initializer:
    """The logarithm of rates uniform in the range."""
    low, high = A_init_range
    if not 0 < low <= high:
        raise ValueError(f"{A_init_range=}: rates need 0 < low <= high")

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jnp.log(jax.random.uniform(key, shape, dtype, low, high))

    return init
