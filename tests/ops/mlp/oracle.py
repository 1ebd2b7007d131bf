"""The MLP and its gradients in numpy, written out by hand: nothing here comes from the package.

Axis letters: M tokens, I input features, F hidden features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import special


class Operands(NamedTuple):
    """As the op takes them; also their gradients. None for what the call does not have."""

    x: Any
    w_up: Any
    w_gate: Any = None
    w_down: Any = None
    b_up: Any = None
    b_gate: Any = None
    b_down: Any = None


class Answer(NamedTuple):
    out: Any
    grads: Operands


class Functions(NamedTuple):
    """Elementwise. A yardstick takes the framework's own, which are some ulps off in float32."""

    exp: Callable[[Any], Any] = np.exp
    tanh: Callable[[Any], Any] = np.tanh
    erf: Callable[[Any], Any] = special.erf


def _gelu(f: Functions, x):
    below = (1 + f.erf(x * np.sqrt(0.5, dtype=x.dtype))) / 2
    return x * below, below + x * f.exp(-x * x / 2) / np.sqrt(2 * np.pi, dtype=x.dtype)


def _gelu_tanh(f: Functions, x):
    factor = np.sqrt(2 / np.pi, dtype=x.dtype)
    t = f.tanh(factor * (x + 0.044715 * x**3))
    return x / 2 * (1 + t), (1 + t) / 2 + x / 2 * (1 - t * t) * factor * (1 + 3 * 0.044715 * x**2)


def _sigmoid(f: Functions, x):
    s = 1 / (1 + f.exp(-x))
    return s, s * (1 - s)


def _silu(f: Functions, x):
    s, d_s = _sigmoid(f, x)
    return x * s, s + x * d_s


ACTIVATIONS: dict[str, Callable[[Functions, Any], tuple[Any, Any]]] = {
    "identity": lambda f, x: (x, np.ones_like(x)),
    "relu": lambda f, x: (np.where(x > 0, x, 0), np.where(x > 0, 1, 0).astype(x.dtype)),
    "relu_squared": lambda f, x: (np.where(x > 0, x * x, 0), np.where(x > 0, 2 * x, 0)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "sigmoid": _sigmoid,
}
"""(Value, derivative)."""


def _one_by_one(a, b):
    """The matrix product summed term after term, where a library sums in blocks."""
    return np.cumsum(a[:, :, None] * b[None], axis=1)[:, -1]


def apply(
    operands: Operands,
    d_out,
    activation: str,
    *,
    wide: Any,
    store: Any,
    functions: Functions = Functions(),
    sequential: bool = False,
) -> Answer:
    """Computed in `wide`, each array rounded to `store` where it would be written to memory."""
    product = _one_by_one if sequential else np.matmul

    def r(a):
        return a.astype(store).astype(wide)

    def affine(a, w, b):
        return r(product(a, w)) if b is None else r(r(product(a, w)) + b)

    leading = operands.x.shape[:-1]
    x, w_up, w_gate, w_down, b_up, b_gate, b_down = (None if a is None else a.astype(wide) for a in operands)
    x, d_out = x.reshape(-1, x.shape[-1]), d_out.astype(wide).reshape(-1, d_out.shape[-1])

    up = affine(x, w_up, b_up)
    gate = None if w_gate is None else affine(x, w_gate, b_gate)
    active, slope = (np.asarray(a) for a in ACTIVATIONS[activation](functions, up if gate is None else gate))
    active = r(active)
    h = active if gate is None else r(active * up)
    out = h if w_down is None else affine(h, w_down, b_down)

    d_h, d_w_down = d_out, None
    if w_down is not None:
        d_h, d_w_down = r(product(d_out, w_down.T)), product(h.T, d_out)
    if gate is None:
        d_up, d_gate, d_w_gate = r(d_h * slope), None, None
        d_x = product(d_up, w_up.T)
    else:
        d_up, d_gate = r(d_h * active), r(r(d_h * up) * slope)
        d_x = r(product(d_up, w_up.T)) + r(product(d_gate, w_gate.T))
        d_w_gate = product(x.T, d_gate)
    grads = Operands(
        d_x.reshape(operands.x.shape),
        product(x.T, d_up),
        d_w_gate,
        d_w_down,
        None if b_up is None else d_up.sum(0),
        None if b_gate is None else d_gate.sum(0),
        None if b_down is None else d_out.sum(0),
    )
    stored = Operands(*(None if a is None else a.astype(store) for a in grads))
    return Answer(out.astype(store).reshape(*leading, out.shape[-1]), stored)
