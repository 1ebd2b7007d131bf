"""What a matmul does with its products before they leave the registers, as plain functions of float32 arrays.

Each epilogue says how many `products` it takes, which of them have a `biases` vector, how many arrays of the output's
shape it `reads` and `writes`, and which of those that it writes are to be summed over rows (`sums`). Calling it maps
one tile of each to one tile of each that is written; it knows nothing of warpgroups or memory, and also runs outside a
kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from fast_layers.ops.mlp.activations import ACTIVATIONS, Activation

# Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 7.1.26: within 1.5e-7.
_ERF_SCALE = 0.3275911
_ERF_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


def _normal(x: Array) -> tuple[Array, Array]:
    """The normal distribution's cumulative function, and exp(-x^2 / 2)."""
    size = jnp.abs(x) * _SQRT_HALF
    t = 1.0 / (1.0 + _ERF_SCALE * size)
    bell = jnp.exp(-size * size)
    series = jnp.zeros_like(t)
    for coefficient in _ERF_COEFFICIENTS:
        series = (series + coefficient) * t
    tail = 0.5 * series * bell  # beyond |x|, on one side
    return jnp.where(x > 0.0, 1.0 - tail, tail), bell


def _gelu(x: Array) -> Array:
    return x * _normal(x)[0]


def _d_gelu(x: Array) -> Array:
    cumulative, bell = _normal(x)
    return cumulative + x * _INV_SQRT_2PI * bell


# Pallas has no erf on a GPU.
IN_KERNELS: Mapping[str, Activation] = {**ACTIVATIONS, "gelu": Activation(_gelu, _d_gelu)}


@dataclasses.dataclass(frozen=True)
class Plain:
    """Each product plus its bias."""

    biases: tuple[bool, ...] = (False,)
    reads = 0
    sums: tuple[int, ...] = ()

    @property
    def products(self) -> int:
        return len(self.biases)

    @property
    def writes(self) -> int:
        return self.products

    def __call__(self, dtype: Any, products: Any, biases: Any, read: Any) -> tuple[Array, ...]:
        del read
        return tuple(_add(x, b).astype(dtype) for x, b in zip(products, biases, strict=True))


@dataclasses.dataclass(frozen=True)
class Activate:
    """The activation, and what it is computed from if `saves`: h, up, gate."""

    activation: str
    biases: tuple[bool, ...] = (False,)
    """For up, and where there is a gate for gate."""
    saves: bool = True
    reads = 0
    sums: tuple[int, ...] = ()

    @property
    def products(self) -> int:
        return len(self.biases)

    @property
    def writes(self) -> int:
        return 1 + (self.products if self.saves else 0)

    def __call__(self, dtype: Any, products: Any, biases: Any, read: Any) -> tuple[Array, ...]:
        del read
        # Rounded first: the backward computes the activation from what is saved.
        pre = [_add(x, b).astype(dtype) for x, b in zip(products, biases, strict=True)]
        up, *gate = (x.astype(jnp.float32) for x in pre)
        function = IN_KERNELS[self.activation].function
        h = function(gate[0]) * up if gate else function(up)
        return (h.astype(dtype), *(pre if self.saves else ()))


@dataclasses.dataclass(frozen=True)
class Differentiate:
    """From d_h: h anew, and the gradients of up and gate, which are summed for the biases that there are."""

    activation: str
    biased: tuple[bool, ...] = (False,)
    """Whether up, and where there is a gate gate, has a bias whose gradient is wanted."""
    products = 1
    biases = (False,)

    @property
    def reads(self) -> int:
        return len(self.biased)

    @property
    def writes(self) -> int:
        return 1 + len(self.biased)

    @property
    def sums(self) -> tuple[int, ...]:
        return tuple(i for i, wanted in enumerate(self.biased, start=1) if wanted)

    def __call__(self, dtype: Any, products: Any, biases: Any, read: Any) -> tuple[Array, ...]:
        del biases
        (d_h,) = products
        up, *gate = (x.astype(jnp.float32) for x in read)
        function, derivative = IN_KERNELS[self.activation]
        if not gate:
            results = (function(up), derivative(up) * d_h)
        else:
            activated = function(gate[0])
            results = (activated * up, activated * d_h, derivative(gate[0]) * up * d_h)
        return tuple(x.astype(dtype) for x in results)


Epilogue = Plain | Activate | Differentiate


def _add(product: Array, bias: Array | None) -> Array:
    return product if bias is None else product + bias
