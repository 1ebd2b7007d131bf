"""The static facts of one selective scan, and the arrays that go with it.

Axis letters: B batch, L tokens, D channels, G groups of channels that share B and C, N state size.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes, dtypes and options; no arrays."""

    batch: int
    length: int
    channels: int
    groups: int
    state_dim: int
    dtype: jnp.dtype
    chunk: int
    skip: bool = False
    gated: bool = False
    dt_bias: bool = False
    dt_softplus: bool = False
    initial_state: bool = False
    segments: bool = False

    @classmethod
    def of(cls, inputs: Inputs, aux: Aux, chunk: int, dt_softplus: bool) -> Problem:
        batch, length, channels = inputs.x.shape
        groups, state_dim = inputs.B.shape[2:]
        return cls(
            batch=batch,
            length=length,
            channels=channels,
            groups=groups,
            state_dim=state_dim,
            dtype=inputs.x.dtype,
            chunk=chunk,
            skip=inputs.D is not None,
            gated=inputs.z is not None,
            dt_bias=inputs.dt_bias is not None,
            dt_softplus=dt_softplus,
            initial_state=inputs.initial_state is not None,
            segments=aux.document is not None,
        )

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """State, dt, decays and sums: float32, or float64 for float64 inputs."""
        return jnp.dtype(jnp.float64 if self.dtype == jnp.float64 else jnp.float32)

    def describe(self) -> str:
        facts = [
            f"x [{self.batch}, {self.length}, {self.channels}]",
            f"B and C [{self.batch}, {self.length}, {self.groups}, {self.state_dim}]",
            str(self.dtype),
            f"chunk {self.chunk}",
            *(["D"] if self.skip else []),
            *(["z"] if self.gated else []),
            *(["dt_bias"] if self.dt_bias else []),
            *(["dt_softplus"] if self.dt_softplus else []),
            *(["initial state"] if self.initial_state else []),
            *(["segments"] if self.segments else []),
        ]
        return ", ".join(facts)


class Inputs(NamedTuple):
    """What gradients flow to; named as in the paper, so `B`, `C` and `D` here are arrays."""

    x: Float[Array, "B L D"]
    dt: Float[Array, "B L D"]
    A: Float[Array, "D N"]
    B: Float[Array, "B L G N"]
    C: Float[Array, "B L G N"]
    D: Float[Array, " D"] | None = None
    z: Float[Array, "B L D"] | None = None
    dt_bias: Float[Array, " D"] | None = None
    initial_state: Float[Array, "B D N"] | None = None


class Aux(NamedTuple):
    """What no gradient flows to. `document` counts the documents of a row from 0: it grows by 1 at each boundary."""

    document: Int[Array, "B L"] | None = None


class Residuals(NamedTuple):
    """What a backend's backward takes: nothing but the operands."""

    inputs: Inputs
    aux: Aux


class Scanned(NamedTuple):
    """What every backend's forward returns."""

    out: Float[Array, "B L D"]
    final_state: Float[Array, "B D N"]
