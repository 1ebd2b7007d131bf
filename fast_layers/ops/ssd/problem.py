"""The static facts of one state-space scan, and the arrays that go with them.

Axis letters: B batch, L tokens, H heads, P channels of a head, G groups of heads that share `in_proj` and `out_proj`
(the B and C of the papers), R heads of a group, N state size, C chunks, Q tokens of a chunk.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

DEFAULT_CHUNK = 64
LINEAR_ABOVE = 20.0
"""softplus(x) is x from here on, as in PyTorch: exp(x) would overflow long before the two differ."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes, dtypes and options; no arrays. Length and batch may be symbolic dimensions of `jax.export`."""

    batch: int
    length: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    dtype: jnp.dtype
    chunk: int
    skip: Literal["head", "channel"] | None = None
    gated: bool = False
    dt_bias: bool = False
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    initial_state: bool = False
    segments: bool = False

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.groups

    @property
    def num_chunks(self) -> int:
        """Written so that a symbolic length is known to need at least one."""
        return (self.length + (self.chunk - 1)) // self.chunk

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """State, dt, decays and sums: float32, or float64 for float64 inputs."""
        return jnp.dtype(jnp.float64 if self.dtype == jnp.float64 else jnp.float32)

    def describe(self) -> str:
        low, high = self.dt_limit
        facts = [
            f"x [{self.batch}, {self.length}, {self.heads}, {self.head_dim}]",
            f"B and C [{self.batch}, {self.length}, {self.groups}, {self.state_dim}]",
            str(self.dtype),
            f"chunk {self.chunk}",
            *([f"D per {self.skip}"] if self.skip else []),
            *(["z"] if self.gated else []),
            *(["dt_bias"] if self.dt_bias else []),
            *(["dt_softplus"] if self.dt_softplus else []),
            *([f"dt in [{low:g}, {high:g}]"] if (low, high) != (0.0, math.inf) else []),
            *(["initial state"] if self.initial_state else []),
            *(["segments"] if self.segments else []),
        ]
        return ", ".join(facts)


class Inputs(NamedTuple):
    """What gradients flow to; named as in the papers, so `B` and `C` here are arrays."""

    x: Float[Array, "B L H P"]
    dt: Float[Array, "B L H"]
    A: Float[Array, " H"]
    B: Float[Array, "B L G N"]
    C: Float[Array, "B L G N"]
    D: Float[Array, " H"] | Float[Array, "H P"] | None = None
    z: Float[Array, "B L H P"] | None = None
    dt_bias: Float[Array, " H"] | None = None
    initial_state: Float[Array, "B H P N"] | None = None


class Aux(NamedTuple):
    """What no gradient flows to. `document` counts the documents of a row from 0: it grows by 1 at each boundary."""

    document: Int[Array, "B L"] | None = None


class Scanned(NamedTuple):
    """What every backend's forward returns."""

    out: Float[Array, "B L H P"]
    final_state: Float[Array, "B H P N"]


class Residuals(NamedTuple):
    """What every backend's backward takes: nothing but the operands.

    The states that enter the chunks are computed anew. To save them costs N / 32 times x's own memory if they are in
    float32, and in 16 bits their rounding, alike for all tokens of a chunk, adds up in the gradient of A.
    """

    inputs: Inputs
    aux: Aux


def step_sizes(
    dt: Float[Array, "... H"],
    dt_bias: Float[Array, " H"] | None,
    *,
    softplus: bool,
    limit: tuple[float, float],
    dtype: jnp.dtype,
) -> Float[Array, "... H"]:
    """dt as the recurrence takes it: plus bias, through softplus, within the limit."""
    dt = dt.astype(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.astype(dtype)
    if softplus:
        # The inner minimum keeps the branch that is not taken, and its gradient, finite.
        dt = jnp.where(dt > LINEAR_ABOVE, dt, jnp.log1p(jnp.exp(jnp.minimum(dt, LINEAR_ABOVE))))
    low, high = limit
    return jnp.where(dt < low, jnp.asarray(low, dtype), jnp.where(dt > high, jnp.asarray(high, dtype), dt))


def documents(segment_ids: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """Number of boundaries up to each token: ids that differ from their left neighbour's start a document."""
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(starts, axis=1, dtype=jnp.int32)


def silu(z: Array) -> Array:
    return z * jax.nn.sigmoid(z)
