"""What may follow the convolution: each name's function and derivative, on float32."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def _silu_derivative(x: Array) -> Array:
    gate = jax.nn.sigmoid(x)
    return gate * (1 + x * (1 - gate))


ACTIVATIONS: dict[str | None, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    None: (lambda x: x, jnp.ones_like),
    "silu": (jax.nn.silu, _silu_derivative),
}
