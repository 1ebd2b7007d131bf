"""The static facts of one convolution, and the arrays that go with them.

Axis letters: B examples, L positions, C channels, W taps.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes, dtypes and options; no arrays. Batch and length may be symbolic dimensions of `jax.export`."""

    batch: int
    length: int
    channels: int
    width: int
    dtype: jnp.dtype
    activation: str | None = None
    bias: bool = False
    segments: bool = False
    initial_state: bool = False
    final_state: bool = False

    @property
    def history(self) -> int:
        """Positions before its own that an output depends on: what a state holds."""
        return self.width - 1

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """Sums and the activation: float32, or float64 for float64 inputs."""
        return jnp.dtype(jnp.float64 if self.dtype == jnp.float64 else jnp.float32)

    def describe(self) -> str:
        facts = [
            f"x [{self.batch}, {self.length}, {self.channels}]",
            f"{self.width} taps",
            str(self.dtype),
            *([f"activation {self.activation}"] if self.activation else []),
            *(["bias"] if self.bias else []),
            *(["segments"] if self.segments else []),
            *(["initial state"] if self.initial_state else []),
            *(["final state"] if self.final_state else []),
        ]
        return ", ".join(facts)


class Inputs(NamedTuple):
    """What gradients flow to, and all that the backward pass is given: there are no other residuals."""

    x: Float[Array, "B L C"]
    w: Float[Array, "W C"]
    b: Float[Array, " C"] | None = None
    initial_state: Float[Array, "B C W-1"] | None = None


class Aux(NamedTuple):
    """What no gradient flows to."""

    reach: Int[Array, "B|1 L"] | None = None
    """How many positions before its own an output sees, at most W-1; None: all of them."""


class Outputs(NamedTuple):
    y: Float[Array, "B L C"]
    final_state: Float[Array, "B C W-1"] | None = None
