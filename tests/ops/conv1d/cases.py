"""Calls of `causal_conv1d` as data, built into arrays and answered by numpy loops.

B examples, L positions, C channels, W taps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from hypothesis import strategies as st

import fast_layers
from fast_layers.arch import lowering_targets
from fast_layers.ops.conv1d.backends import BACKENDS
from fast_layers.ops.conv1d.problem import Problem

_SMALL = Problem(batch=2, length=9, channels=3, width=4, dtype=np.dtype(np.float32))
TESTED = [
    backend.name
    for backend in BACKENDS
    if backend.name != "reference" and backend.refuses(_SMALL, lowering_targets()[0], "forward") is None
]
"""The backends to hold against the reference, those for small calls here; a new one is picked up from here."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; the arrays follow from `seed`. Its repr reproduces it."""

    batch: int = 2
    length: int = 9
    channels: int = 3
    width: int = 4
    activation: str | None = "silu"
    bias: bool = True
    initial_state: bool = False
    segments: str | None = None  # "rows", "shared" (one row of ids for all examples)
    seed: int = 0


class Operands(NamedTuple):
    x: Any
    w: Any
    b: Any
    initial_state: Any


class Answer(NamedTuple):
    y: Any
    final_state: Any
    grads: Operands


@dataclasses.dataclass(frozen=True)
class Built:
    case: Case
    operands: Operands
    segment_ids: np.ndarray | None
    d_y: np.ndarray
    d_state: np.ndarray


@st.composite
def cases(draw) -> Case:
    return Case(
        batch=draw(st.integers(1, 3)),
        length=draw(st.sampled_from([1, 2, 3, 5, 17, 64])),
        channels=draw(st.sampled_from([1, 5, 8])),
        width=draw(st.integers(1, 5)),
        activation=draw(st.sampled_from([None, "silu"])),
        bias=draw(st.booleans()),
        initial_state=draw(st.booleans()),
        segments=draw(st.sampled_from([None, "rows", "shared"])),
        seed=draw(st.integers(0, 2**16)),
    )


def build(case: Case, dtype: Any = np.float32, draw: int = 0) -> Built:
    """Draws of one case differ in the arrays only, and so share a compiled function."""
    c = case
    rng = np.random.default_rng((c.seed, draw))

    def normal(*shape):
        return np.asarray(rng.normal(size=shape)).astype(dtype)

    operands = Operands(
        normal(c.batch, c.length, c.channels),
        normal(c.width, c.channels),
        normal(c.channels) if c.bias else None,
        normal(c.batch, c.channels, c.width - 1) if c.initial_state else None,
    )
    shape = (c.length,) if c.segments == "shared" else (c.batch, c.length)
    # Few ids, so that documents of one id have neighbours, and come back after another.
    ids = rng.integers(-1, 2, shape).astype(np.int32) if c.segments else None
    return Built(c, operands, ids, normal(c.batch, c.length, c.channels), normal(c.batch, c.channels, c.width - 1))


def oracle(built: Built, dtype: Any = np.float64, *, backwards: bool = False) -> Answer:
    """The formula, one output and one tap at a time, and its gradients; sums in either order of positions."""
    c = built.case
    x, w, b, initial = (None if a is None else np.asarray(a).astype(dtype) for a in built.operands)
    d_y, d_state = built.d_y.astype(dtype), built.d_state.astype(dtype)
    ids = np.zeros((c.batch, c.length)) if built.segment_ids is None else built.segment_ids
    ids = np.broadcast_to(ids, (c.batch, c.length))
    history = c.width - 1
    start = np.zeros((c.batch, c.channels, history), dtype) if initial is None else initial
    row = np.concatenate([start.swapaxes(1, 2), x], axis=1)
    document = np.cumsum(np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0))), axis=1)
    document = np.pad(document, ((0, 0), (history, 0)))

    d_row, d_w, d_b = np.zeros_like(row), np.zeros_like(w), np.zeros(c.channels, dtype)
    y = np.zeros((c.batch, c.length, c.channels), dtype)
    for t in range(c.length)[:: -1 if backwards else 1]:
        sees = [(document[:, t + i] == document[:, t + history])[:, None] for i in range(c.width)]
        total = np.zeros((c.batch, c.channels), dtype) if b is None else np.broadcast_to(b, (c.batch, c.channels))
        for i in range(c.width):
            total = total + sees[i] * row[:, t + i] * w[i]
        d_total = d_y[:, t]
        y[:, t] = total
        if c.activation:
            gate = 1 / (1 + np.exp(-total))
            y[:, t] = total * gate
            d_total = d_total * (gate * (1 + total * (1 - gate)))
        for i in range(c.width):
            d_row[:, t + i] += sees[i] * d_total * w[i]
            d_w[i] += (sees[i] * d_total * row[:, t + i]).sum(0)
        d_b = d_b + d_total.sum(0)
    last = (document[:, c.length :] == document[:, -1:])[..., None]
    final = np.where(last, row[:, c.length :], 0).swapaxes(1, 2)
    d_row[:, c.length :] += np.where(last, d_state.swapaxes(1, 2), 0)
    return Answer(
        y,
        final,
        Operands(
            d_row[:, history:],
            d_w,
            None if b is None else d_b,
            None if initial is None else d_row[:, :history].swapaxes(1, 2),
        ),
    )


@functools.partial(
    jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0}, keep_unused=True
)
def _call(implementation, activation, operands, segment_ids, d_y, d_state):
    def op(operands):
        x, w, b, initial_state = operands
        return fast_layers.causal_conv1d(
            x,
            w,
            b,
            activation=activation,
            initial_state=initial_state,
            segment_ids=segment_ids,
            return_final_state=True,
            implementation=implementation,
        )

    (y, state), pull = jax.vjp(op, operands)
    return Answer(y, state, *pull((d_y, d_state.astype(state.dtype))))


def run(implementation: str | None, built: Built) -> Answer:
    return _call(implementation, built.case.activation, built.operands, built.segment_ids, built.d_y, built.d_state)
