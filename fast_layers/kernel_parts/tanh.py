"""tanh for kernels: the GPU's own is good for 11 bits only.

`tanh` has one exponential and no division, for kernels that wait for the special-function unit: with w = 1 - e^(-2|x|),
tanh |x| = w / (2 - w), and 1 / (2 - w) is a polynomial on [0, 1]. `tanh_by_division` has a second special function, the
division's care for its range, and fewer registers of constants.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fast_layers.kernel_parts.online_softmax import LOG2_E

# Of 1 / (2 - w), such that w times it has the least error on [0, 1], by Remez' algorithm; it is 6.7e-8.
_COEFFICIENTS = (
    0.5000080668161957,
    0.2496954670500065,
    0.12894148203519223,
    0.03769431199685012,
    0.11836192342705747,
    -0.16498804152945343,
    0.22949187367491636,
    -0.1475066525599911,
    0.04830150170991756,
)
_SIGN = -(2**31)


def tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """In float32, to 2.3e-7 plus half of exp2's error near 1; NaN where x is NaN.

    So 1 - tanh² is good to 5e-7. From e^(-2|x|), which knows more of it than tanh does, it would take another register
    for each number through the polynomial.
    """
    w = 1.0 - jnp.exp2(jnp.abs(x) * (-2 * LOG2_E))
    ratio = jnp.full_like(x, _COEFFICIENTS[-1])
    for coefficient in _COEFFICIENTS[-2::-1]:
        ratio = ratio * w + coefficient
    sign = lax.bitcast_convert_type(x, jnp.int32) & _SIGN
    return lax.bitcast_convert_type(lax.bitcast_convert_type(ratio * w, jnp.int32) | sign, jnp.float32)


def tanh_by_division(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """In float32, to 2.3e-7 and twice exp2's error near 1; NaN where x is NaN."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2_E)))
