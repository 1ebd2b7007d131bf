"""The static facts of one gated norm, and its arrays.

Axis letters: F features; a row is all that lies before them, of any rank.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes, dtypes and options; no arrays. Dimensions of rows may be symbolic ones of `jax.export`."""

    rows: tuple[int, ...]
    features: int
    dtype: jnp.dtype
    group_size: int
    eps: float
    norm_before_gate: bool
    split_groups: bool = False
    """A group's features are on several devices."""

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """All arithmetic: float32, or float64 for float64 inputs."""
        return jnp.dtype(jnp.float64 if self.dtype == jnp.float64 else jnp.float32)

    def describe(self) -> str:
        facts = [
            f"y {[*self.rows, self.features]}",
            str(self.dtype),
            *([f"groups of {self.group_size}"] if self.group_size != self.features else []),
            "norm before gate" if self.norm_before_gate else "gate before norm",
            *(["groups split over devices"] if self.split_groups else []),
        ]
        return ", ".join(facts)


class Inputs(NamedTuple):
    """What gradients flow to, and all that the backward pass is given: there are no other residuals."""

    y: Float[Array, "*rows F"]
    z: Float[Array, "*rows F"]
    weight: Float[Array, " F"]
