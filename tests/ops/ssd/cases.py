"""Calls of `ssd` as data: drawn by hypothesis, built into arrays, and judged by the numpy oracle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

import fast_layers
from fast_layers.arch import lowering_targets
from fast_layers.ops.ssd.backends import BACKENDS
from fast_layers.ops.ssd.problem import Problem
from ops.ssd import oracle

_SMALL = Problem(2, 7, 3, 5, 1, 4, np.dtype(np.float32), 7)
TESTED = [
    backend.name
    for backend in BACKENDS
    if backend.name != "reference" and backend.refuses(_SMALL, lowering_targets()[0], "forward") is None
]
"""The backends to hold against the oracle, those for small calls here; a new one is picked up from here."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; the arrays follow from `seed`. Its repr reproduces it."""

    batch: int = 2
    length: int = 7
    heads: int = 3
    groups: int = 1
    head_dim: int = 5
    state_dim: int = 4
    seed: int = 0
    D: str | None = None  # "head", "channel"
    z: bool = False
    dt_bias: bool = False
    softplus: bool = False
    limit: tuple[float, float] = (0.0, float("inf"))
    initial_state: bool = False
    segments: str | None = None  # "rows", "shared" (one row of ids for all examples)
    chunk_size: int | None = None
    dt: str = "usual"  # "usual" (1e-3 to 0.1), "extreme" (some of 50)
    A: str = "usual"  # "usual" (-1 to -16), "near 0", "very negative"

    def __str__(self) -> str:
        """What differs from the defaults, for the names of tests."""
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return ",".join(f"{name}={value}".replace(" ", "") for name, value, default in fields if value != default)

    @property
    def static_options(self) -> dict[str, Any]:
        return {"dt_softplus": self.softplus, "dt_limit": self.limit, "chunk_size": self.chunk_size}


@dataclasses.dataclass(frozen=True)
class Built:
    case: Case
    operands: oracle.Operands
    segment_ids: np.ndarray | None
    d_out: np.ndarray
    d_final: np.ndarray

    def oracle(self, dtype: Any = np.float64, in_order: bool = False) -> oracle.Answer:
        starts = None
        if self.segment_ids is not None:
            ids = np.broadcast_to(self.segment_ids, (self.case.batch, self.case.length))
            starts = np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
        case = self.case
        return oracle.scan(
            self.operands,
            self.d_out,
            self.d_final,
            softplus=case.softplus,
            limit=case.limit,
            starts=starts,
            dtype=dtype,
            in_order=in_order,
        )


def runner(implementation: str | None, *, optimise: bool = True) -> Callable[[Built], oracle.Answer]:
    """(out, final state, gradients) by the package's op; draws of one case share the compiled function."""
    level = {} if optimise else {"compiler_options": {"xla_backend_optimization_level": 0}}

    @functools.partial(jax.jit, static_argnums=0, **level)
    def call(static, operands, segment_ids, d_out, d_final):
        def op(operands):
            x, dt, A, B, C, *named = operands
            return fast_layers.ssd(
                *(x, dt, A, B, C),
                **dict(zip(("D", "z", "dt_bias", "initial_state"), named, strict=True)),
                segment_ids=segment_ids,
                return_final_state=True,
                implementation=implementation,
                **dict(static),
            )

        (out, final), pull = jax.vjp(op, operands)
        return oracle.Answer(out, final, *pull((d_out, d_final)))

    def run(built: Built) -> oracle.Answer:
        static = tuple(built.case.static_options.items())
        return call(static, built.operands, built.segment_ids, built.d_out, built.d_final)

    return run


def build(case: Case, dtype: Any = np.float32, draw: int = 0) -> Built:
    """Draws of one case differ in the arrays only, and so share a compiled function."""
    c = case
    rng = np.random.default_rng((c.seed, draw))
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32

    def normal(*shape, as_dtype=dtype):
        return np.asarray(rng.normal(size=shape)).astype(as_dtype)

    rows, state = (c.batch, c.length, c.heads), (c.batch, c.heads, c.head_dim, c.state_dim)
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), rows))
    bias = np.log(np.expm1(dt[0, 0]))
    if c.softplus:
        dt = np.log(np.expm1(dt)) - (bias if c.dt_bias else 0)
    dt = np.where(rng.random(rows) < 0.1, 50.0, dt) if c.dt == "extreme" else dt
    low, high = {"usual": (1, 16), "near 0": (1e-6, 1e-4), "very negative": (1e2, 1e4)}[c.A]
    operands = oracle.Operands(
        x=normal(*rows, c.head_dim),
        dt=dt.astype(wide),
        A=-rng.uniform(low, high, c.heads).astype(wide),
        B=normal(c.batch, c.length, c.groups, c.state_dim),
        C=normal(c.batch, c.length, c.groups, c.state_dim),
        D=None if c.D is None else normal(*((c.heads,) if c.D == "head" else (c.heads, c.head_dim)), as_dtype=wide),
        z=normal(*rows, c.head_dim) if c.z else None,
        dt_bias=bias.astype(wide) if c.dt_bias else None,
        initial_state=normal(*state, as_dtype=wide) if c.initial_state else None,
    )
    ids = None
    if c.segments is not None:
        # Documents of some 10 tokens, so that boundaries lie at and between the edges of chunks.
        steps = rng.random((c.length,) if c.segments == "shared" else (c.batch, c.length)) < 0.1
        ids = np.cumsum(steps, -1).astype(np.int32) % 3
    return Built(c, operands, ids, normal(*rows, c.head_dim), normal(*state, as_dtype=wide))


@st.composite
def cases(draw, lengths: tuple[int, ...] = (1, 63, 64, 65, 119, 256)) -> Case:
    """Every argument, in any combination."""
    heads = draw(st.sampled_from([1, 3, 11, 13, 6]))
    return Case(
        batch=draw(st.sampled_from([1, 2])),
        length=draw(st.sampled_from(lengths)),
        heads=heads,
        groups=draw(st.sampled_from([1, heads, *([2, 3] if heads == 6 else [])])),
        head_dim=draw(st.sampled_from([1, 5, 19, 64])),
        state_dim=draw(st.sampled_from([1, 4, 16, 33])),
        seed=draw(st.integers(0, 2**16)),
        D=draw(st.sampled_from([None, "head", "channel"])),
        z=draw(st.booleans()),
        dt_bias=draw(st.booleans()),
        softplus=draw(st.booleans()),
        limit=draw(st.sampled_from([(0.0, float("inf")), (0.01, 0.08), (0.0, 0.05)])),
        initial_state=draw(st.booleans()),
        segments=draw(st.sampled_from([None, "rows", "shared"])),
        chunk_size=draw(st.sampled_from([None, None, 1, 16, 24, 128])),
        dt=draw(st.sampled_from(["usual", "extreme"])),
        A=draw(st.sampled_from(["usual", "near 0", "very negative"])),
    )
